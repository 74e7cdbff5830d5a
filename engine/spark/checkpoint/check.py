"""Checking a streaming checkpoint in parallel on Spark: the stores on the executors, the rest on the driver (0005, 4).

The checkpoint has to be a directory that every executor sees, or on an object store.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from blobstore.concurrency import map_bounded
from blobstore.opening import StoreSettings
from engine.blocking import LoopThread
from engine.checkpoint.check.check import begin_check, finish_check
from engine.checkpoint.check.contents import StoreWork
from engine.checkpoint.check.stores import check_store
from engine.checkpoint.findings import CheckLevel, CheckReport, StoreChecked
from engine.clock import SystemRuntime
from engine.spark.access import absolute
from engine.spark.errors import TaskFailedError, last_error
from engine.spark.spread import default_partitions, frame_of
from engine.state.checkpoint_dir import CheckpointDir

_WORK: Final = pa.schema([pa.field("partition", pa.int32()), pa.field("work", pa.binary())])
_CHECKED: Final = pa.schema([pa.field("checked", pa.binary())])
# Number of stores of a partition at once: one waits for its store while another one reads.
_STORES_AT_ONCE: Final = 2


class CheckStores(msgspec.Struct, frozen=True, kw_only=True):
    """Checks the stores of a partition; given to `mapInArrow`."""

    location: str
    level: CheckLevel
    settings: StoreSettings | None
    scratch: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check each row of work; return one row for each."""
        work = [
            msgspec.msgpack.decode(data, type=StoreWork)
            for batch in batches
            for data in batch.column("work").to_pylist()
        ]
        if work:
            rows = [msgspec.msgpack.encode(checked) for checked in asyncio.run(self._check(work))]
            yield pa.record_batch([pa.array(rows, pa.binary())], schema=_CHECKED)

    async def _check(self, work: list[StoreWork]) -> list[StoreChecked]:
        root = await CheckpointDir.open(self.location, settings=self.settings)
        scratch = Path(self.scratch) if self.scratch else None
        try:
            return await map_bounded(
                lambda store: check_store(root, store, scratch=scratch, level=self.level),
                work,
                in_flight_max=_STORES_AT_ONCE,
            )
        finally:
            await root.close()


def check_checkpoint(
    spark: SparkSession,
    location: str | Path,
    *,
    level: CheckLevel = "full",
    scratch: Path | None = None,
    partitions_max: int | None = None,
    store_settings: StoreSettings | None = None,
) -> CheckReport:
    """Check a checkpoint, its stores on the executors.

    Args:
        spark: The session.
        location: A directory that every executor sees under this path, or a URL.
        level: As `engine.checkpoint.check.check.check_checkpoint`.
        scratch: As there, on each executor.
        partitions_max: Maximum number of partitions of the work; see `default_partitions` if not given.
        store_settings: How the checkpoint's store is asked.

    Raises:
        TaskFailedError: A store could not be looked at as often as Spark tried, or Spark itself gave up.
        NotFoundError, ProviderError, StoreError: As `engine.checkpoint.check.check.check_checkpoint`.
    """
    task = CheckStores(
        location=absolute(location),
        level=level,
        settings=store_settings,
        scratch=None if scratch is None else str(scratch),
    )
    # A notebook has an event loop of its own.
    loop = LoopThread()
    try:
        return loop.run(_check(spark, task, partitions_max or default_partitions(spark)))
    finally:
        loop.stop()


async def _check(spark: SparkSession, task: CheckStores, partitions_max: int) -> CheckReport:
    runtime = SystemRuntime()
    root = await CheckpointDir.open(task.location, settings=task.settings)
    try:
        plan = await begin_check(root, level=task.level, runtime=runtime)
        checked = await asyncio.to_thread(_spread, spark, task, plan.stores, partitions_max)
        return await finish_check(root, plan, checked, runtime=runtime)
    finally:
        await root.close()


def _spread(
    spark: SparkSession, task: CheckStores, stores: tuple[StoreWork, ...], partitions_max: int
) -> list[StoreChecked]:
    if not stores:
        return []
    count = min(partitions_max, len(stores))
    # Stores of one operator follow each other: dealt out like cards, a large operator is everywhere.
    table = pa.table(
        [
            pa.array([number % count for number in range(len(stores))], pa.int32()),
            pa.array([msgspec.msgpack.encode(store) for store in stores], pa.binary()),
        ],
        schema=_WORK,
    )
    placed = frame_of(spark, table).repartitionById(count, "partition")
    try:
        rows = placed.mapInArrow(task, "checked binary").toArrow().column("checked").to_pylist()
    except PySparkException as error:
        raise TaskFailedError(last_error(error), operation="check", subject=task.location) from error
    return [msgspec.msgpack.decode(row, type=StoreChecked) for row in rows]
