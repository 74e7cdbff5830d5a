"""The one door to PySpark and pyarrow: stateful jobs, streaming checkpoints, and the engine that fans the work out."""

from engine.spark.checkpoint.backup import backup_checkpoint
from engine.spark.checkpoint.check import check_checkpoint
from engine.spark.checkpoint.listener import BackupListener
from engine.spark.checkpoint.restore import restore_checkpoint
from engine.spark.collection.job import collect
from engine.spark.sources.register import register_sources
from engine.spark.stateful_job import JobCommit, StatefulJob
from engine.spark.tasks import backup_results, backup_stores, restore_stores

__all__ = [
    "BackupListener",
    "JobCommit",
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
