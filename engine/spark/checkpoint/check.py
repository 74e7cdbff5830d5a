"""Checking a streaming checkpoint in parallel on Spark: the stores on the executors, the rest on the driver (0005, 4).

The checkpoint has to be a directory that every executor sees, or on an object store.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from blobstore.concurrency import map_bounded
from blobstore.opening import StoreSettings
from engine.blocking import LoopThread
from engine.checkpoint.backup import opened_checkpoint
from engine.checkpoint.check import check_logs, finish_check
from engine.checkpoint.findings import CheckLevel, CheckReport, StoreChecked
from engine.checkpoint.store_check import StoreWork, check_store
from engine.clock import Runtime, Stopwatch
from engine.spark.access import absolute
from engine.spark.spread import default_partitions, evaluate, placed_work, works_of

# Number of stores of a partition at once: one waits for its store while another one reads.
_STORES_AT_ONCE: Final = 2


class CheckStores(msgspec.Struct, frozen=True, kw_only=True):
    """Checks the stores of a partition; given to `mapInArrow`."""

    location: str
    level: CheckLevel
    settings: StoreSettings | None
    scratch: Path | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check each row of work; return one row for each."""
        work = works_of(batches, StoreWork)
        if work:
            rows = [msgspec.msgpack.encode(checked) for checked in asyncio.run(self._check(work))]
            yield pa.record_batch([pa.array(rows, pa.binary())], ["checked"])

    async def _check(self, work: list[StoreWork]) -> list[StoreChecked]:
        async with opened_checkpoint(self.location, self.settings) as root:
            return await map_bounded(
                lambda store: check_store(root, store, scratch=self.scratch, level=self.level),
                work,
                in_flight_max=_STORES_AT_ONCE,
            )


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
        level: As `engine.checkpoint.check.check_checkpoint`.
        scratch: As there, on each executor.
        partitions_max: Maximum number of partitions of the work; see `default_partitions` if not given.
        store_settings: How the checkpoint's store is asked.

    Raises:
        TaskFailedError: A store could not be looked at as often as Spark tried, or Spark itself gave up.
        NotFoundError, ProviderError, StoreError: As `engine.checkpoint.check.check_checkpoint`.
    """
    task = CheckStores(location=absolute(location), level=level, settings=store_settings, scratch=scratch)
    # A notebook has an event loop of its own.
    loop = LoopThread()
    try:
        return loop.run(_check(spark, task, partitions_max or default_partitions(spark)))
    finally:
        loop.stop()


async def _check(spark: SparkSession, task: CheckStores, partitions_max: int) -> CheckReport:
    watch = Stopwatch(Runtime())

    def spread(stores: tuple[StoreWork, ...]) -> list[StoreChecked]:
        if not stores:
            return []
        # Stores of one operator follow each other: dealt out like cards, a large operator is everywhere.
        partitions = [number % min(partitions_max, len(stores)) for number in range(len(stores))]
        frame = placed_work(spark, stores, partitions).mapInArrow(task, "checked binary")
        rows = evaluate(frame, "check", task.location).column("checked").to_pylist()
        return [msgspec.msgpack.decode(row, type=StoreChecked) for row in rows]

    async with opened_checkpoint(task.location, task.settings) as root:
        logs = await check_logs(root)
        checked = await asyncio.to_thread(spread, logs.stores)
        return await finish_check(root, logs, checked, level=task.level, watch=watch)
