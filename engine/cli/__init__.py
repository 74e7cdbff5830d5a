"""The command line: `tidemark`. The one door to click."""

from engine.cli.app import main, tidemark

__all__ = ["main", "tidemark"]
