"""The engine: backs up, commits, restores and collects. `from engine import Repository` is where to begin."""

from engine.repository import Repository
from engine.sync import SyncRepository

__all__ = ["Repository", "SyncRepository"]
