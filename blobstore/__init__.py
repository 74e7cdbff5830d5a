"""Bytes by key: one storage contract, its stores and its wrappers. Knows nothing of snapshots."""
