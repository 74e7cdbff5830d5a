"""Spread work on many stores over Spark's partitions by bytes, and do that of a partition several stores at once.

Limits hold for all stores of a partition together. Every call runs at once and returns a DataFrame of the outcomes, one
row per store: evaluating it again does nothing again. A store that fails or is slow costs only itself, and its row has
the error.
"""

import contextlib
import heapq
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from blobstore.concurrency import map_bounded
from engine.clock import Runtime
from engine.errors import UsageError
from engine.repository.repository import Repository
from engine.settings import TransferSettings, share_among
from engine.spark.access import Access
from engine.spark.errors import TaskFailedError, last_error
from index.snapshot.model import Scope, StoreReference

T = TypeVar("T")
ArrowTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

MB: Final = 1_000_000
# A range of this many rows has one in every partition.
CORES_MAX: Final = 10_000
# A store that is slow or hangs holds one of these places, and its share of requests and memory.
STORES_AT_ONCE_MAX: Final = 8

# `work` is a struct in msgpack.
WORK: Final = pa.schema([pa.field("partition", pa.int32()), pa.field("work", pa.binary())])


class StoreOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the answer. The order of the fields is the order of the columns."""

    task: str
    store: str
    path: str
    ok: bool
    # Why not; empty if it is ok.
    error: str = ""
    files: int = 0
    # Bytes that went through the network, and bytes that were there already.
    bytes_moved: int = 0
    bytes_kept: int = 0
    seconds: float = 0.0
    # Megabytes moved per second.
    mb_per_s: float = 0.0
    # For `backup_results`; empty after a restore.
    result: bytes = b""


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to back up or restore."""

    task: str
    store: str
    path: str
    # What a restore brings back, or what a backup is diffed against.
    reference: StoreReference | None

    def done(self, *, files: int, bytes_moved: int, bytes_kept: int = 0, result: bytes = b"") -> StoreOutcome:
        return StoreOutcome(
            task=self.task,
            store=self.store,
            path=self.path,
            ok=True,
            files=files,
            bytes_moved=bytes_moved,
            bytes_kept=bytes_kept,
            result=result,
        )

    def failed(self, error: str, kind: bytes = b"") -> StoreOutcome:
        """Return the outcome of work that failed; `kind` says to the driver what to do next."""
        return StoreOutcome(task=self.task, store=self.store, path=self.path, ok=False, error=error, result=kind)


_ARROW: Final = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), bytes: pa.binary()}
OUTCOME_SCHEMA: Final = pa.schema(
    [pa.field(field.name, _ARROW[field.type]) for field in msgspec.structs.fields(StoreOutcome)]
)

CarryOut = Callable[[Repository, StoreWork], Awaitable[StoreOutcome]]


class StoresTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition does with its stores, several at once; given to `mapInArrow`."""

    access: Access
    scope: Scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row for each row that comes in."""
        work = works_of(batches, StoreWork)
        if not work:
            return
        at_once, share = share_settings(
            self.access.transfer, in_flight_max=self.access.store.in_flight_max, stores_count=len(work)
        )
        with self.access.borrow(share) as repository, repository.inside(self.opened()) as do:

            async def carry_out(item: StoreWork) -> StoreOutcome:
                return await _timed(do, repository.asynchronous, item)

            outcomes = repository.loop.run(map_bounded(carry_out, work, in_flight_max=at_once))
        yield pa.RecordBatch.from_pylist(list(map(msgspec.structs.asdict, outcomes)), schema=OUTCOME_SCHEMA)

    def opened(self) -> contextlib.AbstractAsyncContextManager[CarryOut]:
        """Open what all stores share meanwhile, and give what works on one store; entered in the event loop."""
        return contextlib.nullcontext(self.carry_out)

    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Back up or restore one store; `seconds` and the rate are filled in by the caller."""
        raise NotImplementedError


async def _timed(carry_out: CarryOut, repository: Repository, work: StoreWork) -> StoreOutcome:
    runtime = Runtime()
    started_s = runtime.monotonic_s()
    try:
        outcome = await carry_out(repository, work)
    except Exception as error:  # noqa: BLE001  # it goes into the store's row, and the others go on
        outcome = work.failed(f"{type(error).__name__}: {error}")
    seconds = runtime.monotonic_s() - started_s
    rate = outcome.bytes_moved / MB / seconds if seconds > 0 else 0.0
    return msgspec.structs.replace(outcome, seconds=seconds, mb_per_s=rate)


def spread(spark: SparkSession, task: StoresTask, work: Sequence[StoreWork], partitions_max: int | None) -> DataFrame:
    """Run a task over stores, balanced by the bytes that are known of them, and wait for it.

    Returns:
        The outcomes by task and store, as a DataFrame of values: nothing is run again.

    Raises:
        UsageError: A store is named twice.
        TaskFailedError: A partition failed as often as Spark allows.
    """
    operation, subject = type(task).__name__, str(task.scope)
    if len({(item.task, item.store) for item in work}) < len(work):
        raise UsageError("a store is named twice", operation=operation, subject=subject)
    partitions = assign_by_bytes(
        [item.reference.size_bytes if item.reference else 0 for item in work],
        partitions_max or default_partitions(spark),
    )
    placed = placed_work(spark, work, partitions)
    outcomes = evaluate(placed.mapInArrow(task, from_arrow_schema(OUTCOME_SCHEMA)), operation, subject)
    return frame_of(spark, outcomes.sort_by([("task", "ascending"), ("store", "ascending")]))


def placed_work(spark: SparkSession, work: Sequence[msgspec.Struct], partitions: Sequence[int]) -> DataFrame:
    """Return work as a DataFrame, each item in its partition, for a task that reads it by `works_of`."""
    encoded = [msgspec.msgpack.encode(item) for item in work]
    table = pa.table([pa.array(partitions, pa.int32()), pa.array(encoded, pa.binary())], schema=WORK)
    return frame_of(spark, table).repartitionById(max(partitions, default=0) + 1, "partition")


def works_of(batches: Iterator[pa.RecordBatch], kind: type[T]) -> list[T]:
    """Decode the work of one partition."""
    rows = (data for batch in batches for data in batch.column("work").to_pylist())
    return [msgspec.msgpack.decode(data, type=kind) for data in rows]


def evaluate(frame: DataFrame, operation: str, subject: str) -> pa.Table:
    """Return the rows of a DataFrame.

    Raises:
        TaskFailedError: A partition failed as often as Spark allows, or Spark itself gave up.
    """
    try:
        return frame.toArrow()
    except PySparkException as error:
        raise TaskFailedError(last_error(error), operation=operation, subject=subject) from error


def default_partitions(spark: SparkSession) -> int:
    """Return the number of cores, so that every store has its turn however long another one takes.

    With more partitions than that, those to come would wait for the slowest stores of those at work. Where executors
    come and go nobody knows the number of cores: then it is the session's number of shuffle partitions, which is a
    bound in any case.
    """
    partitions_max = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return partitions_max
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        cores = int(context.defaultParallelism)
    else:
        # Spark Connect: it divides a range by the number of tasks that run at once.
        numbered = spark.range(CORES_MAX).selectExpr("spark_partition_id() AS partition")
        cores = int(numbered.agg({"partition": "max"}).toArrow().column(0)[0].as_py()) + 1
    return max(1, min(partitions_max, cores))


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Make a DataFrame of a table, also of one without rows: Spark Connect needs its schema then."""
    return spark.createDataFrame(table, schema=from_arrow_schema(table.schema))


def assign_by_bytes(sizes_bytes: Sequence[int], partitions_max: int) -> tuple[int, ...]:
    """Assign a partition to each size: the largest first, each to the partition that has the least so far.

    The heaviest partition ends up with at most 4/3 of what the best possible assignment would give it. Partition
    numbers are in the order of load, heaviest first, because Spark starts partitions in the order of their numbers:
    what takes longest then begins first, also where there are more partitions than cores.

    Returns:
        One partition number per size, in the order of `sizes_bytes`; every number from 0 to the greatest one is used.
        A store of size zero still counts as work.

    Source:
        R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969): longest processing time first.
    """
    count = max(1, min(partitions_max, len(sizes_bytes)))
    loads = [(0, 0, number) for number in range(count)]
    chosen = [0] * len(sizes_bytes)
    for position in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        load_bytes, stores_count, number = loads[0]
        heapq.heapreplace(loads, (load_bytes + sizes_bytes[position], stores_count + 1, number))
        chosen[position] = number
    heaviest_first = sorted(loads, key=lambda load: (-load[0], -load[1], load[2]))
    renumbered = {number: rank for rank, (_, _, number) in enumerate(heaviest_first)}
    return tuple(renumbered[number] for number in chosen)


def share_settings(
    settings: TransferSettings, *, in_flight_max: int, stores_count: int
) -> tuple[int, TransferSettings]:
    """Return how many stores to work on at once, and what each of them may use: together at most what is given.

    The shares are fixed: what one store does not use the others do not get, so that one whose requests hang takes
    nothing from them. A store that is alone in its partition has everything.

    Args:
        settings: What all of them together may use.
        in_flight_max: What the store beneath lets through at once.
        stores_count: How many there are; at least 1.
    """
    settings = msgspec.structs.replace(settings, in_flight_max=min(in_flight_max, settings.in_flight_max))
    return share_among(settings, min(STORES_AT_ONCE_MAX, stores_count))
