"""The engine: backs up, commits, restores and collects. `from engine import Repository` is where to begin."""
