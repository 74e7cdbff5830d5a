"""Spark's names and bytes: state stores, changelogs, checkpoints."""
