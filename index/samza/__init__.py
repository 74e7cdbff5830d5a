"""Samza's stored form of a snapshot."""
