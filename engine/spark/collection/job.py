"""Collection on Spark, for inventories that one machine would take too long to list, to mark and to delete.

The steps and their order are those of `engine.collect.collect` (design 0002, D4; 0006, Steps on Spark). Records,
boundaries, names and pins stay with the driver; tasks do what grows with the number of uploads.
"""

from pyspark.sql import SparkSession

from blobstore.base import BlobStore
from blobstore.opening import StoreSettings
from engine.collect.collect import DELETE_SHARE_MAX
from engine.collect.report import CollectReport
from engine.settings import TransferSettings
from engine.spark.access import open_on_driver
from engine.spark.collection.backend import SparkBackend
from engine.spark.spread import default_partitions
from index.plan.retention import Retention, RetentionPolicy


def collect(
    spark: SparkSession,
    url: str,
    retention: Retention | RetentionPolicy,
    *,
    dry_run: bool = False,
    delete_share_max: float = DELETE_SHARE_MAX,
    plan_to: BlobStore | None = None,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
) -> CollectReport:
    """Delete what nothing keeps: `engine.collect.collect`, with the lists, the marks and the deletes in tasks.

    A collection that died is taken up where it was (design 0006, R3 and R5).

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        retention: Which commits stay; the newest of every scope always does.
        dry_run: Plan only: nothing is written or deleted, no TTL is removed.
        delete_share_max: The largest share of all bytes that may go (P4).
        plan_to: Where the plan is written to, by the driver.
        partitions_max: Each step runs in at most so many tasks, the session's shuffle partitions if not given; it has
            fewer where what was listed is little for them.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.

    Returns:
        What went, and what stayed. Foreign keys outside the 256 shards of a room are not seen.

    Raises:
        UnsafeStoreError: The store cannot be collected, or a listing had holes: nothing was deleted.
        TooMuchToDeleteError: The plan is too large a share of all bytes: nothing was deleted.
        DamagedError: Something is missing or altered: nothing was deleted of its job and of those it may refer to.
        FormatError: Something was written by a newer tidemark: the same.
        RunEndedError: Another collection that worked on the same run has ended it: nothing was deleted after that.
        StoreError: As the store says: nothing was deleted after it but what the same step had begun.
        TaskFailedError: A task failed for good by something else: nothing was deleted after that step.
    """
    if partitions_max is None:
        partitions_max = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)
    with repository:
        backend = SparkBackend(
            spark,
            access,
            repository.asynchronous.store,
            partitions_max=partitions_max,
            cores=default_partitions(spark),
            dry_run=dry_run,
            plan_to=plan_to,
        )
        return repository.collect(
            retention, dry_run=dry_run, delete_share_max=delete_share_max, plan_to=plan_to, backend=backend
        )
