"""Examine what a store really does."""
