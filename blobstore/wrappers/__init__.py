"""Wrappers around any store, one concern each."""
