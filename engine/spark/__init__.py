"""Stateful jobs, streaming checkpoints and collections on Spark: the only package that imports PySpark and pyarrow."""

from engine.errors import UsageError


class MissingExtraError(UsageError, ImportError):
    """PySpark, or what it needs to move Arrow batches, is not installed or too old."""

    default_hint = (
        "in the checkout: pip install '.[spark]'; beside a platform's own Spark 4.1: pip install pandas pyarrow"
    )


try:
    import pandas as pd  # noqa: F401  # PySpark asks for it in a task's first mapInArrow, which is late for an error

    from engine.checkpoint.backup import BackupChoice
    from engine.checkpoint.restore import RestoreChoice
    from engine.spark.access import SparkOptions
    from engine.spark.checkpoint import backup_checkpoint, check_checkpoint, convert_checkpoint, restore_checkpoint
    from engine.spark.collection.backend import collect
    from engine.spark.listener import BackupListener
    from engine.spark.sources.sources import register_sources
    from engine.spark.spread import backup_results, backup_stores, restore_stores
    from engine.spark.stateful_job import JobCommit, JobOptions, StatefulJob
except ImportError as error:
    raise MissingExtraError(str(error), operation="import", subject="engine.spark") from error

__all__ = [
    "BackupChoice",
    "BackupListener",
    "JobCommit",
    "JobOptions",
    "MissingExtraError",
    "RestoreChoice",
    "SparkOptions",
    "StatefulJob",
    "backup_checkpoint",
    "backup_results",
    "backup_stores",
    "check_checkpoint",
    "collect",
    "convert_checkpoint",
    "register_sources",
    "restore_checkpoint",
    "restore_stores",
]
