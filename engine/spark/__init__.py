"""The one door to PySpark and pyarrow: stateful jobs, and the engine that fans the work out."""

from engine.spark.parallel import backup_results, backup_stores, restore_stores
from engine.spark.parallel_collect import collect
from engine.spark.stateful_job import JobCommit, StatefulJob

__all__ = ["JobCommit", "StatefulJob", "backup_results", "backup_stores", "collect", "restore_stores"]
