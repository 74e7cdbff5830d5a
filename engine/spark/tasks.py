"""Backing up and restoring many stores at once on Spark.

The work is spread by bytes over partitions, and the stores of a partition are worked on several at once, within limits
that hold for all of them together. Every call runs at once and returns a DataFrame of what came out, one row per store:
evaluating it again does nothing again. A store that fails or is slow costs only itself, and says so in its row; running
the same restore again fetches the stores that are missing, and no other bytes but indexes.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Unpack

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from blobstore.concurrency import run_blocking
from blobstore.opening import StoreSettings
from engine.backup.backup import BackupResult
from engine.clock import SystemRuntime
from engine.errors import TargetBusyError, TargetError, UsageError
from engine.local.cache import DigestCache
from engine.repository.repository import Choice, Repository
from engine.restore.restore import RestoreResult, plan_restore_store
from engine.settings import TransferSettings
from engine.spark.access import Access, open_on_driver
from engine.spark.at_once import carry_out_as_finished, share_settings
from engine.spark.balancing import assign_by_bytes
from engine.spark.claims import ReadyStore
from engine.spark.errors import TaskFailedError, last_error
from engine.spark.frames import frame_of
from engine.spark.store_task import JobRun, state_of
from index.plan.restore import RestorePlan
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference

MB: Final = 1_000_000
# What pins are held for.
PURPOSE: Final = "restore on Spark"
# How long an attempt waits for another one at the same target: an hour.
BUSY_WAITS_MAX: Final = 3600
BUSY_WAIT_S: Final = 1.0
# A range of so many rows has one in every partition.
CORES_MAX: Final = 10_000

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
        """One row out for each row in, as the stores are done."""
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
        """What works on one store, with what has to be open for all of them meanwhile; entered in the event loop."""
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
        except Exception as error:  # noqa: BLE001  # whatever it is stands in the store's row, and the others go on
            outcome = StoreOutcome(
                task=work.task, store=work.store, path=work.path, ok=False, error=f"{type(error).__name__}: {error}"
            )
        seconds = runtime.monotonic_s() - started_s
        rate = outcome.bytes_moved / MB / seconds if seconds > 0 else 0.0
        return msgspec.structs.replace(outcome, seconds=seconds, mb_per_s=rate)


class BackupStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition."""

    version: int
    check_retained: bool = False

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Back up one store against its reference."""
        result = await repository.backup(
            self.scope,
            Path(work.path),
            task=work.task,
            store=work.store,
            version=self.version,
            base=work.reference,
            check_retained=self.check_retained,
        )
        stats = result.stats
        return StoreOutcome(
            task=work.task,
            store=work.store,
            path=work.path,
            ok=True,
            files=result.reference.files_count,
            bytes_moved=stats.bytes_uploaded,
            bytes_kept=stats.bytes_retained,
            result=msgspec.msgpack.encode(result),
        )


class RestoreStores(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition."""

    replace: bool

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Restore one store into its path."""
        if work.reference is None:
            raise UsageError("there is nothing to restore", operation="restore", subject=work.path)
        target = Path(work.path)
        result = await self._restore(repository, work.reference, target)
        return StoreOutcome(
            task=work.task,
            store=work.store,
            path=work.path,
            ok=True,
            files=work.reference.files_count,
            bytes_moved=result.bytes_fetched,
            bytes_kept=result.bytes_reused,
        )

    async def _restore(self, repository: Repository, reference: StoreReference, target: Path) -> RestoreResult:
        for _ in range(BUSY_WAITS_MAX):
            try:
                return await repository.restore_reference(reference, target, replace=self.replace)
            except TargetBusyError:
                # Another attempt at this task, which Spark would stop if this one answered first: wait for it.
                await asyncio.sleep(BUSY_WAIT_S)
            except TargetError:
                # Spark may repeat a task that had restored some of its stores: what stands there is no obstacle then.
                if not await holds_snapshot(repository, reference, target):
                    raise
                return await repository.restore_reference(reference, target, replace=True)
        return await repository.restore_reference(reference, target, replace=self.replace)


async def holds_snapshot(repository: Repository, reference: StoreReference, target: Path) -> bool:
    """Whether a directory has exactly the files of a snapshot, by their hashes.

    Raises:
        TargetError: It is no directory, or is in use.
        DamagedError: The index is missing or altered.
        StoreError: As the store says.
    """
    plan = await plan_restore_store(
        repository.store,
        reference=reference,
        target=target,
        settings=repository.settings,
        cache=DigestCache(),
        replace=True,
    )
    return plan.fetch_requests == 0 and await asyncio.to_thread(_has_rest_of, target, plan)


def _has_rest_of(target: Path, plan: RestorePlan) -> bool:
    """Whether a directory, of which the larger files are known to be right, has the small ones and no others."""
    if plan.files_count != sum(path.is_file() for path in target.rglob("*")):
        return False
    for file in (*plan.inline, *plan.empty):
        path = target.joinpath(*file.path)
        if (
            not path.is_file()
            or path.stat().st_size != file.size_bytes
            or path.read_bytes() != (file.entry.inline or b"")
        ):
            return False
    return True


class RestoreForRun(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition to where the next run of a job claims them."""

    run: JobRun

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Restore one store, unless this machine has that very state already."""
        reference = work.reference
        if reference is None:
            raise UsageError("there is nothing to restore", operation="restore", subject=work.path)
        ready = ReadyStore(state_of(reference), self.run.id)
        claims = self.run.claims(work.task)
        moved, kept = 0, reference.size_bytes
        with claims.begin() as attempt:
            # In a thread: there may be much to delete, and other stores are at work.
            await run_blocking(claims.remove_dead_rooms)
            await run_blocking(attempt.remove_stale, ready.state, self.run.id)
            if all(other.state != ready.state for other in claims.ready()):
                result = await repository.restore_reference(reference, attempt.directory)
                moved, kept = result.bytes_fetched, result.bytes_reused
                attempt.give_back(ready)
        return StoreOutcome(
            task=work.task,
            store=work.store,
            path=str(claims.directory),
            ok=True,
            files=reference.files_count,
            bytes_moved=moved,
            bytes_kept=kept,
        )


def backup_stores(
    spark: SparkSession,
    url: str,
    scope: Scope,
    stores: DataFrame | Iterable[tuple[str, str, str | Path]],
    *,
    version: int | None = None,
    check_retained: bool = False,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
) -> DataFrame:
    """Back up many directories, each against its store in the newest commit. Nothing is visible until a commit.

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        scope: What the stores will be committed as.
        stores: Task, store and path of each, or a DataFrame with columns of these names. A path is read on whichever
            executor gets it, so it is on a shared file system unless there is only one machine.
        version: The caller's version of all of them; the newest commit's plus one if not given.
        check_retained: As for `Repository.backup`.
        partitions_max: Work is spread over at most so many; see `default_partitions` if not given.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.

    Returns:
        One row per store, see `StoreOutcome`. Commit those that are ok with `backup_results`.

    Raises:
        TaskFailedError: Spark itself gave up; nothing was committed.
        StoreError: The newest commit could not be read.
    """
    if isinstance(stores, DataFrame):
        rows = stores.select("task", "store", "path").toArrow().to_pylist()
        stores = [(row["task"], row["store"], row["path"]) for row in rows]
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)
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
        task = BackupStores(access=access, scope=scope, version=next_version, check_retained=check_retained)
        return spread(spark, task, work, partitions_max)


def backup_results(outcomes: DataFrame) -> tuple[BackupResult, ...]:
    """What `backup_stores` has made, for `Repository.commit`: one per row that is ok."""
    results = outcomes.where("ok").select("result").toArrow().column("result").to_pylist()
    return tuple(msgspec.msgpack.decode(result, type=BackupResult) for result in results)


def restore_stores(
    spark: SparkSession,
    url: str,
    scope: Scope,
    target_root: str | Path,
    *,
    replace: bool = False,
    or_newest_complete: bool = False,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
    **choice: Unpack[Choice],
) -> DataFrame:
    """Restore every store of a commit into `<target_root>/<task>/<store>`, in parallel.

    The commit is pinned until the last store is done (design 0002, D5).

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        scope: Whose stores.
        target_root: A directory on whichever executor gets a store.
        replace: What is there already may be replaced, and is reused where its hash is right (I2). Without it a store
            that stands there exactly as committed is no error, anything else is.
        or_newest_complete: Where something of that commit is missing, take the newest of which everything is there
            (design 0006, M2); found out beforehand, with a STAT for each of its blobs.
        partitions_max: Work is spread over at most so many; see `default_partitions` if not given.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.
        choice: Which commit, as for `Repository.find`; the newest if nothing is given.

    Returns:
        One row per store, see `StoreOutcome`.

    Raises:
        NotFoundError: There is no such commit.
        TaskFailedError: Spark itself gave up.
        StoreError: The commit could not be read or pinned.
    """
    root = Path(target_root).absolute()
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(repository)
        if or_newest_complete:
            choice = repository.choose_complete(scope, **choice)
        commit, _ = stack.enter_context(repository.find_pinned(scope, purpose=PURPOSE, **choice))
        work = [
            StoreWork(
                task=reference.task,
                store=reference.store,
                path=str(root / encode_component(reference.task) / encode_component(reference.store)),
                reference=reference,
            )
            for reference in commit.record.stores
        ]
        return spread(spark, RestoreStores(access=access, scope=scope, replace=replace), work, partitions_max)


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
    """As many partitions as there are cores, so that every store has its turn however long another one takes.

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
    """How many tasks run at once behind Spark Connect: it does not say so, but it divides a range by that number."""
    numbered = spark.range(CORES_MAX).selectExpr("spark_partition_id() AS partition")
    return int(numbered.agg({"partition": "max"}).toArrow().column(0)[0].as_py()) + 1


def _decoded(data: bytes | None) -> StoreReference | None:
    return None if data is None else msgspec.msgpack.decode(data, type=StoreReference)


def _row(outcome: StoreOutcome) -> pa.RecordBatch:
    columns = [pa.array([getattr(outcome, field.name)], field.type) for field in OUTCOME_SCHEMA]
    return pa.record_batch(columns, schema=OUTCOME_SCHEMA)
