"""Stateful jobs, streaming checkpoints and collections on Spark: the only package that imports PySpark and pyarrow."""

from engine.checkpoint.backup import BackupChoice
from engine.checkpoint.restore import RestoreChoice
from engine.spark.access import SparkOptions
from engine.spark.checkpoint import backup_checkpoint, check_checkpoint, restore_checkpoint
from engine.spark.collection.backend import collect
from engine.spark.listener import BackupListener
from engine.spark.sources.sources import register_sources
from engine.spark.spread import backup_results, backup_stores, restore_stores
from engine.spark.stateful_job import JobCommit, JobOptions, StatefulJob

__all__ = [
    "BackupChoice",
    "BackupListener",
    "JobCommit",
    "JobOptions",
    "RestoreChoice",
    "SparkOptions",
    "StatefulJob",
    "backup_checkpoint",
    "backup_results",
    "backup_stores",
    "check_checkpoint",
    "collect",
    "register_sources",
    "restore_checkpoint",
    "restore_stores",
]
