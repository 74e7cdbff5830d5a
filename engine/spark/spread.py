"""Spread work on many stores over Spark's partitions by bytes, and do that of a partition several stores at once.

Limits hold for all stores of a partition together. Every call runs at once and returns a DataFrame of the outcomes, one
row per store: evaluating it again does nothing again. A store that fails or is slow costs only itself, and its row has
the error.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from engine.blocking import LoopThread
from engine.clock import SystemRuntime
from engine.errors import UsageError
from engine.repository.repository import Repository
from engine.settings import TransferSettings, share_among
from engine.spark.access import Access
from engine.spark.errors import TaskFailedError, last_error
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference

Item = TypeVar("Item")
Result = TypeVar("Result")

MB: Final = 1_000_000
# A range of this many rows has one in every partition.
CORES_MAX: Final = 10_000
# A store that is slow or hangs holds one of these places, and its share of requests and memory.
STORES_AT_ONCE_MAX: Final = 8

WORK: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("task", pa.string()),
        pa.field("store", pa.string()),
        pa.field("path", pa.string()),
        pa.field("reference", pa.binary()),
    ]
)


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to back up or restore."""

    task: str
    store: str
    path: str
    # What a restore brings back, or what a backup is diffed against.
    reference: StoreReference | None


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


_ARROW: Final = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), bytes: pa.binary()}
_DDL: Final = {str: "string", bool: "boolean", int: "bigint", float: "double", bytes: "binary"}
_FIELDS: Final = msgspec.structs.fields(StoreOutcome)
OUTCOME_SCHEMA: Final = pa.schema([pa.field(field.name, _ARROW[field.type]) for field in _FIELDS])
OUTCOME_DDL: Final = ", ".join(f"{field.name} {_DDL[field.type]}" for field in _FIELDS)


CarryOut = Callable[[Repository, StoreWork], Awaitable[StoreOutcome]]


class StoresTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition does with its stores, several at once; given to `mapInArrow`."""

    access: Access
    scope: Scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row for each row that comes in, as the stores are done."""
        work = [
            StoreWork(reference=_decoded(row.pop("reference")), **row)
            for batch in batches
            for row in batch.select(["task", "store", "path", "reference"]).to_pylist()
        ]
        if not work:
            return
        at_once, share = share_settings(
            self.access.transfer, in_flight_max=self.access.store.in_flight_max, stores_count=len(work)
        )
        runtime = SystemRuntime()
        with self.access.borrow(share) as repository, repository.inside(self.opened()) as do:

            async def carry_out(item: StoreWork) -> StoreOutcome:
                return await self._outcome(do, repository.asynchronous, item, runtime)

            outcomes = carry_out_as_finished(repository.loop, carry_out, work, at_once=at_once)
            with contextlib.closing(outcomes):
                yield from map(_row, outcomes)

    def opened(self) -> contextlib.AbstractAsyncContextManager[CarryOut]:
        """Open what all stores share meanwhile, and give what works on one store; entered in the event loop."""
        return contextlib.nullcontext(self.carry_out)

    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Back up or restore one store; `seconds` and the rate are filled in by the caller."""
        raise NotImplementedError

    @staticmethod
    async def _outcome(
        carry_out: CarryOut, repository: Repository, work: StoreWork, runtime: SystemRuntime
    ) -> StoreOutcome:
        started_s = runtime.monotonic_s()
        try:
            outcome = await carry_out(repository, work)
        except Exception as error:  # noqa: BLE001  # it goes into the store's row, and the others go on
            outcome = StoreOutcome(
                task=work.task, store=work.store, path=work.path, ok=False, error=f"{type(error).__name__}: {error}"
            )
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
    if len({(item.task, item.store) for item in work}) < len(work):
        raise UsageError("a store is named twice", operation=type(task).__name__, subject=str(task.scope))
    partitions = assign_by_bytes(
        [item.reference.size_bytes if item.reference else 0 for item in work],
        partitions_max or default_partitions(spark),
    )
    table = pa.table(
        [
            pa.array(partitions, pa.int32()),
            pa.array([item.task for item in work], pa.string()),
            pa.array([item.store for item in work], pa.string()),
            pa.array([item.path for item in work], pa.string()),
            pa.array([item.reference and msgspec.msgpack.encode(item.reference) for item in work], pa.binary()),
        ],
        schema=WORK,
    )
    placed = frame_of(spark, table).repartitionById(max(partitions, default=0) + 1, "partition")
    try:
        outcomes = placed.mapInArrow(task, OUTCOME_DDL).toArrow()
    except PySparkException as error:
        raise TaskFailedError(last_error(error), operation=type(task).__name__, subject=str(task.scope)) from error
    return frame_of(spark, outcomes.sort_by([("task", "ascending"), ("store", "ascending")]))


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
    cores = int(context.defaultParallelism) if context is not None else _ask_for_cores(spark)
    return max(1, min(partitions_max, cores))


def _ask_for_cores(spark: SparkSession) -> int:
    """Find out how many tasks run at once behind Spark Connect, which divides a range by that number."""
    numbered = spark.range(CORES_MAX).selectExpr("spark_partition_id() AS partition")
    return int(numbered.agg({"partition": "max"}).toArrow().column(0)[0].as_py()) + 1


def _decoded(data: bytes | None) -> StoreReference | None:
    return None if data is None else msgspec.msgpack.decode(data, type=StoreReference)


def _row(outcome: StoreOutcome) -> pa.RecordBatch:
    columns = [pa.array([getattr(outcome, field.name)], field.type) for field in OUTCOME_SCHEMA]
    return pa.record_batch(columns, schema=OUTCOME_SCHEMA)


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Make a DataFrame of a table, also of one without rows: Spark Connect needs its schema then."""
    return spark.createDataFrame(table, schema=from_arrow_schema(table.schema))


def assign_by_bytes(sizes_bytes: Sequence[int], partitions_max: int) -> tuple[int, ...]:
    """Assign a partition to each size: the largest first, each to the partition that has the least so far.

    The heaviest partition ends up with at most 4/3 of what the best possible assignment would give it. Partition
    numbers are in the order of load, heaviest first, because Spark starts partitions in the order of their numbers:
    what takes longest then begins first, also where there are more partitions than cores.

    Args:
        sizes_bytes: What each store has to move; a store of size zero still counts as work.
        partitions_max: No more partitions than this; with fewer sizes there is one for each.

    Returns:
        One partition number per size, in the order of `sizes_bytes`; every number from 0 to the greatest one is used.

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
    """Return how many stores to work on at once, and what each of them may use.

    The shares are fixed: what one store does not use the others do not get, so that one whose requests hang takes
    nothing from them. A store that is alone in its partition has everything.

    Args:
        settings: What all of them together may use.
        in_flight_max: What the store beneath lets through at once.
        stores_count: How many there are; at least 1.

    Returns:
        The number, and the settings of each: that many times their memory and requests is within what was given.
    """
    settings = msgspec.structs.replace(settings, in_flight_max=min(in_flight_max, settings.in_flight_max))
    return share_among(settings, min(STORES_AT_ONCE_MAX, stores_count))


def carry_out_as_finished(
    loop: LoopThread,
    carry_out: Callable[[Item], Coroutine[Any, Any, Result]],
    items: Sequence[Item],
    *,
    at_once: int,
) -> Generator[Result, None, None]:
    """Call an async function on every item, `at_once` at a time; yield the results as they finish.

    For a thread without an event loop. Closing the generator cancels what is at work and waits for its end.

    Raises:
        Exception: What a call raises; the others are cancelled.
    """
    crew = _Crew(carry_out, items, at_once)
    try:
        for _ in items:
            yield loop.run(crew.next_result())
    finally:
        loop.run(crew.end())


class _Crew(Generic[Item, Result]):
    """Calls at work, from one visit of the other thread to the next; lives in one event loop."""

    def __init__(
        self, carry_out: Callable[[Item], Coroutine[Any, Any, Result]], items: Iterable[Item], at_once: int
    ) -> None:
        self._carry_out = carry_out
        self._items = iter(items)
        self._at_once = at_once
        self._at_work: set[asyncio.Task[Result]] = set()

    async def next_result(self) -> Result:
        """Wait for the next call that ends; there is one."""
        self._fill_up()
        done, _ = await asyncio.wait(self._at_work, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        self._at_work.remove(first)
        # The next one begins while the caller looks at this result.
        self._fill_up()
        return first.result()

    async def end(self) -> None:
        """Cancel what is at work and wait for its end."""
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)

    def _fill_up(self) -> None:
        for item in itertools.islice(self._items, self._at_once - len(self._at_work)):
            self._at_work.add(asyncio.create_task(self._carry_out(item)))
