"""The one door to PySpark and pyarrow: stateful jobs, streaming checkpoints, and the engine that fans the work out."""

from engine.spark.checkpoint_backup import backup_checkpoint
from engine.spark.checkpoint_check import check_checkpoint
from engine.spark.checkpoint_restore import restore_checkpoint
from engine.spark.collect_job import collect
from engine.spark.listener import BackupListener
from engine.spark.parallel import backup_results, backup_stores, restore_stores
from engine.spark.sources import register_sources
from engine.spark.stateful_job import JobCommit, StatefulJob

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
