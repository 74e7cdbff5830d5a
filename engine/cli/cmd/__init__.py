"""The verbs of `tidemark`: which file has one, `VERBS` in `engine/cli/app.py` says."""
