"""The command line: `tidemark`. The sole importer of click."""

from engine.cli.app import main, tidemark

__all__ = ["main", "tidemark"]
