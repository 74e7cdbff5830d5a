"""The check of a streaming checkpoint."""
