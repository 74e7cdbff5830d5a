"""Back up and restore many stores at once, spread over Spark's partitions by bytes.

A partition works on several of its stores at once, within limits for all of them together. Every call runs at once and
returns a DataFrame of the outcomes, one row per store: evaluating it again does nothing again. A store that fails or is
slow costs only itself, and its row has the error. Running the same restore again fetches the stores that are missing,
and no other bytes but indexes.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, Unpack

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from typing_extensions import override

from blobstore.concurrency import map_bounded, run_blocking
from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import TargetBusyError, TargetError, UsageError
from engine.records.find import Choice
from engine.repository.repository import Repository, SyncRepository
from engine.restore.restore import RestoreOptions, RestoreResult, plan_restore_store, target_below
from engine.runtime import Runtime, Stopwatch
from engine.settings import STORES_AT_ONCE, TransferSettings, share_among
from engine.spark.access import Access, SparkOptions, in_context, open_on_driver
from engine.spark.claims import ReadyStore
from engine.spark.errors import task_errors
from engine.spark.store_task import JobRun, state_of
from index.snapshot.model import Scope, StoreReference, as_scope

T = TypeVar("T")
ArrowTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

MB: Final = 1_000_000
# A range of this many rows has one in every partition.
CORES_MAX: Final = 10_000

# `work` is a struct in msgpack.
WORK: Final = pa.schema([pa.field("partition", pa.int32()), pa.field("work", pa.binary())])


class StoreOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the answer. The order of the fields is the order of the columns."""

    # Empty until the work is done: which store it was, and where, unless the task knows better.
    task: str = ""
    store: str = ""
    path: str = ""
    ok: bool = True
    # Why not; empty if it is ok.
    error: str = ""
    files: int = 0
    # Bytes that went through the network, and bytes that were there already.
    bytes_moved: int = 0
    bytes_kept: int = 0
    seconds: float = 0.0
    # Megabytes moved per second.
    mb_per_s: float = 0.0
    # For `backup_results`.
    result: bytes = b""


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to back up or restore."""

    task: str
    store: str
    path: str
    # What a restore brings back, or what a backup is diffed against.
    reference: StoreReference | None


_ARROW: Final = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), bytes: pa.binary()}
OUTCOME_SCHEMA: Final = pa.schema([(f.name, _ARROW[f.type]) for f in msgspec.structs.fields(StoreOutcome)])


class StoresTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition does with its stores, several at once; given to `mapInArrow`."""

    access: Access
    scope: Scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row for each row that comes in."""
        work = works_of(batches, StoreWork)
        if not work:
            return
        with borrowed(self.access, len(work)) as (repository, at_once):
            carry_out = partial(self._outcome, repository.asynchronous)
            outcomes = repository.loop.run(map_bounded(carry_out, work, in_flight_max=at_once))
        yield pa.RecordBatch.from_pylist(list(map(msgspec.structs.asdict, outcomes)), schema=OUTCOME_SCHEMA)

    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Back up or restore one store; the caller fills in what it knows itself."""
        raise NotImplementedError

    async def _outcome(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        watch = Stopwatch(Runtime())
        try:
            outcome = await self.carry_out(repository, work)
        except Exception as error:  # noqa: BLE001  # it goes into the store's row, and the others go on
            outcome = StoreOutcome(ok=False, error=f"{type(error).__name__}: {error}")
        seconds, path = watch.total_s(), outcome.path or work.path
        rate = outcome.bytes_moved / MB / seconds if seconds > 0 else 0.0
        return msgspec.structs.replace(
            outcome, task=work.task, store=work.store, path=path, seconds=seconds, mb_per_s=rate
        )


def spread(spark: SparkSession, task: StoresTask, work: Sequence[StoreWork], partitions_max: int | None) -> DataFrame:
    """Run a task over stores, balanced by the bytes that are known of them, and return the outcomes by task and store.

    Raises:
        UsageError: A store is named twice.
        TaskFailedError: As `task_errors`.
    """
    operation, subject = type(task).__name__, str(task.scope)
    if len({(item.task, item.store) for item in work}) < len(work):
        raise UsageError("a store is named twice", operation=operation, subject=subject)
    sizes_bytes = [item.reference.size_bytes if item.reference else 0 for item in work]
    partitions = assign_by_bytes(sizes_bytes, partitions_max or default_partitions(spark))
    placed = placed_work(spark, work, partitions)
    with task_errors(operation, subject):
        outcomes = placed.mapInArrow(in_context(task), from_arrow_schema(OUTCOME_SCHEMA)).toArrow()
    return frame_of(spark, outcomes.sort_by([("task", "ascending"), ("store", "ascending")]))


def placed_work(spark: SparkSession, work: Sequence[msgspec.Struct | int], partitions: Sequence[int]) -> DataFrame:
    """Return work as a DataFrame, each item in its partition, for a task that reads it by `works_of`."""
    encoded = [msgspec.msgpack.encode(item) for item in work]
    table = pa.table([pa.array(partitions, pa.int32()), pa.array(encoded, pa.binary())], schema=WORK)
    return frame_of(spark, table).repartitionById(max(partitions, default=0) + 1, "partition")


def works_of(batches: Iterator[pa.RecordBatch], kind: type[T]) -> list[T]:
    """Decode the work of one partition."""
    rows = (data for batch in batches for data in batch.column("work").to_pylist())
    return [msgspec.msgpack.decode(data, type=kind) for data in rows]


def default_partitions(spark: SparkSession) -> int:
    """Return the number of cores: with more partitions, those to come would wait for the slowest stores at work.

    The session's number of shuffle partitions is a bound in any case, and taken where executors come and go.
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

    The heaviest partition ends up with at most 4/3 of what the best possible assignment would give it (R. L. Graham,
    "Bounds on multiprocessing timing anomalies", 1969). Every number from 0 to the greatest one is used, the heaviest
    first, because Spark starts partitions in the order of their numbers. A store of size zero still counts as work.
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


@contextlib.contextmanager
def borrowed(access: Access, stores_count: int) -> Iterator[tuple[SyncRepository, int]]:
    """Borrow a repository for stores, each with its share of the limits; yield how many to work on at once, too."""
    at_once, share = share_settings(
        access.transfer, in_flight_max=access.store.in_flight_max, stores_count=stores_count
    )
    with access.borrow(share) as repository:
        yield repository, at_once


def share_settings(
    settings: TransferSettings, *, in_flight_max: int, stores_count: int
) -> tuple[int, TransferSettings]:
    """Return how many stores to work on at once, and what each of them may use: together at most what is given.

    The shares are fixed: what one store does not use the others do not get, so that one whose requests hang takes
    nothing from them but its place. `in_flight_max` is what the store beneath lets through at once.
    """
    settings = msgspec.structs.replace(settings, in_flight_max=min(in_flight_max, settings.in_flight_max))
    return share_among(settings, min(STORES_AT_ONCE, stores_count))


# What pins are held for.
PURPOSE: Final = "restore on Spark"
# How long an attempt waits for another one at the same target: an hour.
BUSY_WAITS_MAX: Final = 3600
BUSY_WAIT_S: Final = 1.0


class BackupStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition, each against its reference."""

    version: int
    check_retained: bool = False

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        options = BackupOptions(version=self.version, base=work.reference, check_retained=self.check_retained)
        result = await repository.backup(self.scope, Path(work.path), task=work.task, store=work.store, options=options)
        return StoreOutcome(
            files=result.reference.files_count,
            bytes_moved=result.stats.bytes_uploaded,
            bytes_kept=result.stats.bytes_retained,
            result=msgspec.msgpack.encode(result),
        )


class RestoreStores(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition, each into its path."""

    replace: bool

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        reference, target = _reference_of(work), Path(work.path)
        result = await when_free(lambda: self._restore(repository, reference, target))
        return StoreOutcome(
            files=reference.files_count, bytes_moved=result.bytes_fetched, bytes_kept=result.bytes_reused
        )

    async def _restore(self, repository: Repository, reference: StoreReference, target: Path) -> RestoreResult:
        try:
            return await repository.restore_reference(reference, target, options=RestoreOptions(replace=self.replace))
        except TargetError as error:
            # Spark may repeat a task that had restored some of its stores: what is there is no obstacle then.
            if isinstance(error, TargetBusyError) or not await holds_snapshot(repository, reference, target):
                raise
        return await repository.restore_reference(reference, target, options=RestoreOptions(replace=True))


async def when_free(restore: Callable[[], Awaitable[T]]) -> T:
    """Restore; while another attempt at this task is at work, which Spark would stop if this one answered, wait."""
    for _ in range(BUSY_WAITS_MAX):
        with contextlib.suppress(TargetBusyError):
            return await restore()
        await asyncio.sleep(BUSY_WAIT_S)
    return await restore()


async def holds_snapshot(repository: Repository, reference: StoreReference, target: Path) -> bool:
    """Return whether a directory has exactly the files of a snapshot, by their hashes; raises as a restore to it."""
    opened = repository.opened.without_digests()
    plan = await plan_restore_store(opened, reference, target, RestoreOptions(replace=True))

    def has_rest() -> bool:
        # The small files, and no others; the larger ones are known to be right.
        small = {target.joinpath(*file.path): file.entry.inline or b"" for file in (*plan.inline, *plan.empty)}
        return plan.files_count == sum(path.is_file() for path in target.rglob("*")) and all(
            path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
            for path, content in small.items()
        )

    return plan.fetch_requests == 0 and await asyncio.to_thread(has_rest)


class RestoreForRun(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition to where the next run of a job claims them."""

    run: JobRun

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        reference = _reference_of(work)
        ready = ReadyStore(state_of(reference), self.run.id)
        claims = self.run.claims(work.task)
        moved, kept = 0, reference.size_bytes
        with claims.begin() as attempt:
            # In a thread: there may be much to delete, and other stores are at work.
            await run_blocking(claims.remove_dead_attempts)
            await run_blocking(attempt.remove_stale, ready.state, self.run.id)
            if all(other.state != ready.state for other in claims.ready()):
                result = await repository.restore_reference(reference, attempt.directory)
                moved, kept = result.bytes_fetched, result.bytes_reused
                attempt.give_back(ready)
        files = reference.files_count
        return StoreOutcome(path=str(claims.directory), files=files, bytes_moved=moved, bytes_kept=kept)


def _reference_of(work: StoreWork) -> StoreReference:
    if work.reference is None:
        raise UsageError("there is nothing to restore", operation="restore", subject=work.path)
    return work.reference


def backup_stores(
    spark: SparkSession,
    url: str,
    scope: str | Scope,
    stores: DataFrame | Iterable[tuple[str, str, str | Path]],
    *,
    version: int | None = None,
    check_retained: bool = False,
    options: SparkOptions | None = None,
) -> DataFrame:
    """Back up many directories, each against its store in the newest commit. Nothing is visible until a commit.

    Args:
        url: A repository that every executor can reach.
        stores: Task, store and path of each, or a DataFrame with columns of these names. A path is read on whichever
            executor gets it, so it is on a shared file system unless there is only one machine.
        version: Of all of them; the newest commit's plus one if not given.
        check_retained: As for `Repository.backup`.

    Returns:
        One row per store, see `StoreOutcome`. Commit those that are ok with `backup_results`.

    Raises:
        TaskFailedError: Spark itself gave up; nothing was committed.
        StoreError: The newest commit could not be read.
    """
    options = options or SparkOptions()
    if isinstance(stores, DataFrame):
        rows = stores.select("task", "store", "path").toArrow().to_pylist()
        stores = [(row["task"], row["store"], row["path"]) for row in rows]
    repository, access = open_on_driver(url, options)
    with repository:
        newest = repository.latest(scope)
        work = [
            StoreWork(
                task=task,
                store=store,
                path=str(Path(path).absolute()),
                reference=newest.store(task, store) if newest else None,
            )
            for task, store, path in stores
        ]
        next_version = version if version is not None else (newest.record.version + 1 if newest else 1)
        task = BackupStores(access=access, scope=as_scope(scope), version=next_version, check_retained=check_retained)
        return spread(spark, task, work, options.partitions_max)


def backup_results(outcomes: DataFrame) -> tuple[BackupResult, ...]:
    """Return what `backup_stores` has made, for `Repository.commit`: one per row that is ok."""
    results = outcomes.where("ok").select("result").toArrow().column("result").to_pylist()
    return tuple(msgspec.msgpack.decode(result, type=BackupResult) for result in results)


def restore_stores(
    spark: SparkSession,
    url: str,
    scope: str | Scope,
    target_root: str | Path,
    *,
    replace: bool = False,
    or_newest_complete: bool = False,
    options: SparkOptions | None = None,
    **choice: Unpack[Choice],
) -> DataFrame:
    """Restore every store of a commit into `<target_root>/<task>/<store>`, in parallel.

    The commit is pinned until the last store is done (design 0002, D5).

    Args:
        url: A repository that every executor can reach.
        target_root: A directory on whichever executor gets a store.
        replace: What is there already may be replaced, and is reused where its hash is right (I2). Without it a store
            that is there exactly as committed is fine, anything else is an error.
        or_newest_complete: Where something of that commit is missing, take the newest of which everything is there
            (design 0006, M2); found out beforehand, with a STAT for each of its blobs.
        choice: Which commit, as for `Repository.find`; the newest if nothing is given.

    Returns:
        One row per store, see `StoreOutcome`; a store that is there already has moved no bytes.

    Raises:
        NotFoundError: There is no such commit.
        TaskFailedError: Spark itself gave up.
        StoreError: The commit could not be read or pinned.
    """
    options, root = options or SparkOptions(), Path(target_root).absolute()
    repository, access = open_on_driver(url, options)
    with repository:
        if or_newest_complete:
            choice = repository.choose_complete(scope, **choice)
        with repository.find_pinned(scope, purpose=PURPOSE, **choice) as (commit, _):
            work = [
                StoreWork(task=of.task, store=of.store, path=str(target_below(root, of)), reference=of)
                for of in commit.record.stores
            ]
            task = RestoreStores(access=access, scope=commit.scope, replace=replace)
            return spread(spark, task, work, options.partitions_max)
