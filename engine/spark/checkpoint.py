"""Back up, restore and check a streaming checkpoint on Spark: its stores on the executors, the rest on the driver.

The flows are those of `engine.checkpoint`, only their backends are others (design 0005, 2 to 4). A checkpoint has to be
on an object store, or a directory that every executor sees and, to restore one, may write beside as the same user.

To an object store each task publishes its stores itself, and what makes a checkpoint of them, `commits/` above all,
comes from the driver when all are there. What a prefix holds is moved aside only after a trial: every store is fetched,
verified and, if that is asked for, replayed once, and thrown away; so it is read twice then.

A task that Spark repeats finds what an earlier attempt left, and replaces it; of a lost attempt at a replayed store,
SSTs may stay that nothing names, as Spark's own lost attempts leave them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.opening import StoreSettings
from engine.arrow.key_hashes import partitions_of
from engine.blocking import run_in_loop
from engine.checkpoint import backup, explain
from engine.checkpoint.check import check_logs, finish_check
from engine.checkpoint.convert import ConvertChoice, ConvertedCheckpoint, StoreToConvert, convert_store, run_conversion
from engine.checkpoint.errors import DAMAGE_HINT, MOVED_HINT
from engine.checkpoint.explain import ExplainChoice, StateExplained, StoreScanned, StoreToScan, scan_store
from engine.checkpoint.findings import CheckLevel, CheckReport, StoreChecked
from engine.checkpoint.groups import GroupRescaled, GroupToRescale
from engine.checkpoint.live import StoreToBackUp
from engine.checkpoint.rescale import RescaleChoice, RescaledCheckpoint, run_rescale
from engine.checkpoint.rescale_stores import Here, OpenStore, of_backup, of_checkpoint, rescale_group
from engine.checkpoint.restore import (
    CheckpointRestore,
    RestoreChoice,
    RestoredCheckpoint,
    make_target,
    run_restore,
    target_of,
)
from engine.checkpoint.store import StoreRestored, StoreToRestore, restore_store
from engine.checkpoint.store_check import check_store
from engine.checkpoint.targets import CheckpointTarget, DirectoryTarget, ObjectTarget, files_below, publish_files
from engine.errors import (
    ConflictError,
    DamagedError,
    EngineError,
    MisplacedKeyError,
    SourceChangedError,
    UnsafeSourceError,
)
from engine.local.scratch import scratch_dir
from engine.repository.repository import Repository
from engine.runtime import Runtime, Stopwatch
from engine.spark import spread
from engine.spark.access import SparkOptions, absolute, in_context, open_on_driver
from engine.spark.errors import TaskFailedError, decode_error, encode_error, task_errors
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint, store_url
from index.errors import FormatError, PartitionKeyError, StoreMergeError, UnknownFormatError, VersionMissingError
from index.snapshot.model import Scope, StoreReference
from index.spark.checkpoint import StoreId
from tidemark.errors import TidemarkError

_ERRORS_SHOWN_MAX: Final = 3

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)


def _carry_out(
    spark: SparkSession,
    task: spread.StoresTask,
    stores: Iterable[tuple[StoreId, StoreReference | None]],
    partitions_max: int | None,
) -> list[spread.StoreOutcome]:
    work = [spread.StoreWork(task=of.task, store=of.store, path=of.path, reference=base) for of, base in stores]
    rows = spread.spread(spark, task, work, partitions_max).toArrow().to_pylist() if work else []
    return [spread.StoreOutcome(**row) for row in rows]


def _first_of(errors: Sequence[str]) -> str:
    more = len(errors) - _ERRORS_SHOWN_MAX
    return "; ".join(errors[:_ERRORS_SHOWN_MAX]) + (f", and {more} more" if more > 0 else "")


# What the driver raises for what a store failed with.
_RAISED: Final[dict[type[Exception], type[EngineError | StoreError | VersionMissingError]]] = {
    SourceChangedError: SourceChangedError,
    UnsafeSourceError: UnsafeSourceError,
    VersionMissingError: VersionMissingError,
    DamagedError: DamagedError,
    FormatError: DamagedError,
    # What a newer Spark wrote is not damaged.
    UnknownFormatError: TaskFailedError,
    ConflictError: ConflictError,
    StoreUnavailableError: StoreUnavailableError,
    Exception: TaskFailedError,
}
# The one that is raised of several, with its hint: damage first, then what moved.
_HINTS: Final[dict[type[EngineError], str]] = {
    TaskFailedError: "",
    DamagedError: DAMAGE_HINT,
    ConflictError: "",
    SourceChangedError: MOVED_HINT,
    UnsafeSourceError: MOVED_HINT,
}


class BackupLiveStores(spread.StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition."""

    checkpoint: str
    # By task and store.
    stores: dict[tuple[str, str], StoreToBackUp]
    choice: backup.BackupChoice

    @override
    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[spread.CarryOut]:
        async with opened_checkpoint(self.checkpoint, self.choice.checkpoint_settings) as root:
            yield lambda repository, work: self.back_up(repository, root, work)

    async def back_up(self, repository: Repository, root: CheckpointDir, work: spread.StoreWork) -> spread.StoreOutcome:
        done = await backup.backup_store(repository, root, self.scope, self.stores[work.task, work.store], self.choice)
        stats = done.result.stats
        return spread.StoreOutcome(
            files=stats.files_total,
            bytes_moved=stats.bytes_uploaded,
            bytes_kept=stats.bytes_retained,
            result=msgspec.msgpack.encode(done),
        )


def backup_checkpoint(
    spark: SparkSession,
    url: str,
    checkpoint: str | Path,
    choice: backup.BackupChoice | None = None,
    *,
    options: SparkOptions | None = None,
) -> backup.CheckpointBackupResult:
    """Back up a checkpoint, its stores spread over the executors by their bytes.

    Args:
        spark: The session; it need not be the one that runs the query.
        url: A repository that every executor can reach.
        checkpoint: The checkpointLocation as every executor can reach it: a path or a URL.
        choice: What, and how; `scratch` is a directory here and on each executor.

    Raises:
        As `engine.checkpoint.backup.backup_checkpoint`, but what is not whole is always a DamagedError, a part
        that is gone an UnsafeSourceError, and what else a store fails with a TaskFailedError.
    """
    location = absolute(checkpoint)
    asked = choice or backup.BackupChoice()
    options = options or SparkOptions()
    repository, access = open_on_driver(url, options)

    async def back_up_stores(plan: backup.CheckpointBackupPlan) -> Sequence[backup.StoreBackup]:
        stores = {(item.store.id.task, item.store.id.store): item for item in plan.stores}
        task = BackupLiveStores(access=access, scope=plan.scope, checkpoint=location, stores=stores, choice=asked)
        bases = [(item.store.id, item.base) for item in plan.stores]
        outcomes = await asyncio.to_thread(_carry_out, spark, task, bases, options.partitions_max)
        return _backups(outcomes, location)

    with repository, repository.inside(opened_checkpoint(location, asked.checkpoint_settings)) as root:
        work = backup.run_backup(repository.asynchronous, root, back_up_stores, asked, runtime=Runtime())
        return repository.loop.run(work)


def _backups(outcomes: Sequence[spread.StoreOutcome], location: str) -> tuple[backup.StoreBackup, ...]:
    """Decode the results of all stores, or raise what is wrong with some."""
    failed: dict[type[Exception], list[str]] = {}
    for outcome in outcomes:
        if not outcome.ok:
            error = decode_error(outcome.result) if outcome.result else None
            kind = next(_RAISED[of] for of in type(error).__mro__ if of in _RAISED) if error else TaskFailedError
            message = _message(error, outcome.path, location) if error else outcome.error
            failed.setdefault(kind, []).append(message)
    for raised, hint in _HINTS.items():
        if raised in failed:
            raise raised(_first_of(failed[raised]), operation=backup.OPERATION, subject=location, hint=hint)
    if VersionMissingError in failed:
        raise VersionMissingError(_first_of(failed[VersionMissingError]), subject=location, hint=MOVED_HINT)
    if failed:
        raise StoreUnavailableError(_first_of(failed[StoreUnavailableError]), operation=backup.OPERATION, key=location)
    return tuple(msgspec.msgpack.decode(outcome.result, type=backup.StoreBackup) for outcome in outcomes)


def _message(error: Exception, path: str, location: str) -> str:
    """Format an error with its notes, for a driver that names the checkpoint itself."""
    text = "; ".join([str(error).replace(f"{location.rstrip('/')}/", ""), *getattr(error, "__notes__", ())])
    return text if path in text else f"{path}: {text}"


_INCOMPLETE_HINT: Final = "where something is missing, `--or-newest-complete` takes the newest backup that is whole"


W = TypeVar("W", StoreToRestore, StoreToConvert, GroupToRescale)


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """Where stores are made, as executors have it: below a directory, or below the URL of a prefix."""

    # Where the checkpoint is gathered if that is a directory, else where it is published.
    root: str
    is_directory: bool
    settings: StoreSettings | None
    # Publish nothing: only see that every store can be fetched.
    is_trial: bool = False

    @classmethod
    def of(cls, place: CheckpointTarget, directory: Path, settings: StoreSettings | None) -> "Destination":
        is_directory = isinstance(place, DirectoryTarget)
        root = str(directory) if is_directory else store_url(str(place.location))
        return cls(root=root, is_directory=is_directory, settings=settings)

    async def make(self, item: W, build: Callable[[Path, W], Awaitable[R]]) -> R:
        """Have stores built below the directory, or in one of their own that is then published."""
        if self.is_directory:
            # Spark may have lost an attempt that had come to its end: what that left may go.
            return await spread.when_free(lambda: build(Path(self.root), item))
        async with scratch_dir() as scratch, opened_checkpoint(self.root, self.settings) as directory:
            made = await build(scratch, _unsummed(item))
            if self.is_trial:
                return made
            files = await run_blocking(files_below, scratch)
            await publish_files(directory, scratch, files)
        return _with_published(made, tuple(files))


def _unsummed(item: W) -> W:
    """Return work without checksums of new files: two attempts make two zips of one name, and one has its checksum."""
    if not isinstance(item, StoreToRestore):
        return msgspec.structs.replace(item, sums_files=False)
    if not item.replayed:
        return item
    settings = msgspec.structs.replace(item.store.settings, file_checksums=False)
    return msgspec.structs.replace(item, store=msgspec.structs.replace(item.store, settings=settings))


def _with_published(made: R, files: tuple[str, ...]) -> R:
    if isinstance(made, GroupRescaled):
        return msgspec.structs.replace(made, stores=(_with_published(made.stores[0], files), *made.stores[1:]))
    return msgspec.structs.replace(made, published=files)


async def _rescale(open_store: OpenStore, item: GroupToRescale, target: Path) -> GroupRescaled:
    return await rescale_group(open_store, item, target, Here(partitioner=partitions_of), replace=True)


class RestoreCheckpointStores(spread.StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition."""

    destination: Destination
    # By task and store; a group by those of its first target.
    wanted: dict[tuple[str, str], StoreToRestore | GroupToRescale]

    @override
    async def carry_out(self, repository: Repository, work: spread.StoreWork) -> spread.StoreOutcome:
        async def restore(below: Path, item: StoreToRestore) -> StoreRestored:
            target, transfer = below / item.id.path, repository.settings
            return await restore_store(repository, item, target, transfer=transfer, runtime=Runtime(), replace=True)

        async def rescale(below: Path, item: GroupToRescale) -> GroupRescaled:
            return await _rescale(of_backup(repository.store, repository.settings), item, below)

        item = self.wanted[work.task, work.store]
        made: StoreRestored | GroupRescaled
        if isinstance(item, GroupToRescale):
            made = await self.destination.make(item, rescale)
            stores = made.stores
        else:
            made = await self.destination.make(item, restore)
            stores = (made,)
        return spread.StoreOutcome(
            files=sum(of.files for of in stores),
            bytes_moved=sum(of.bytes_fetched for of in stores),
            result=msgspec.msgpack.encode(made),
        )


def restore_checkpoint(
    spark: SparkSession,
    url: str,
    target: str | Path,
    choice: RestoreChoice | None = None,
    *,
    options: SparkOptions | None = None,
) -> RestoredCheckpoint:
    """Restore a checkpoint, its stores on the executors.

    Args:
        url: A repository that every executor can reach.
        target: A directory that every executor sees under this path, or the URL of a prefix of an object store. Content
            of a prefix that is moved aside goes before the first store comes, and after all of them were fetched once,
            to see that they can be: they are read twice then.
        choice: What, and how. A target that is a URL is asked as the repository is if `target_settings` is None.

    Raises:
        DamagedError: Something of a store is missing or altered; the first few are named.
        TaskFailedError: A store could not be restored otherwise, or Spark itself gave up.
        As `engine.checkpoint.restore.restore_checkpoint`.
    """
    choice, options = choice or RestoreChoice(), options or SparkOptions()
    settings, partitions_max = choice.target_settings or options.store, options.partitions_max
    choice = msgspec.structs.replace(choice, target_settings=settings)
    runtime = Runtime()
    place = target_of(choice, target, runtime)
    repository, access = open_on_driver(url, options)

    def backend(kind: type[R]) -> Callable[[CheckpointRestore, Sequence[Any]], Awaitable[Sequence[R]]]:
        async def carry_out(restore: CheckpointRestore, work: Sequence[StoreToRestore | GroupToRescale]) -> Sequence[R]:
            destination = Destination.of(place, restore.directory, settings)
            wanted = {(item.id.task, item.id.store): item for item in work}
            task = RestoreCheckpointStores(
                access=access, scope=Scope(restore.job), destination=destination, wanted=wanted
            )
            if isinstance(place, ObjectTarget):
                if place.has_content:
                    tried = msgspec.structs.replace(destination, is_trial=True)
                    trial = msgspec.structs.replace(task, destination=tried)
                    await run_blocking(_restore_stores, spark, trial, partitions_max)
                await place.clear()
            # To its end: tasks still write to the staging directory, and rely on the pin.
            results = await run_blocking(_restore_stores, spark, task, partitions_max)
            return [msgspec.msgpack.decode(result, type=kind) for result in results]

        return carry_out

    with repository:
        backends = backend(StoreRestored), backend(GroupRescaled)
        return repository.loop.run(run_restore(repository.asynchronous, place, choice, backends, runtime))


def _restore_stores(spark: SparkSession, task: RestoreCheckpointStores, partitions_max: int | None) -> list[bytes]:
    stores = [(item.id, item.reference) for item in task.wanted.values()]
    outcomes = _carry_out(spark, task, stores, partitions_max)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        errors = [decode_error(outcome.result) for outcome in failed if outcome.result]
        for error in errors:
            if isinstance(error, MisplacedKeyError | PartitionKeyError | StoreMergeError):
                raise error
        is_damage = any(isinstance(error, DamagedError | FormatError) for error in errors)
        shown = _first_of([f"{outcome.path}: {outcome.error}" for outcome in failed])
        raise (DamagedError if is_damage else TaskFailedError)(
            f"{len(failed)} of {len(outcomes)} stores were not restored: {shown}",
            operation="restore checkpoint",
            subject=str(task.scope),
            hint=_INCOMPLETE_HINT if is_damage else "",
        )
    return [outcome.result for outcome in outcomes]


# Number of stores of a partition at once: one waits for its store while another one reads.
_STORES_AT_ONCE: Final = 2

Work = TypeVar("Work")


class StoresWork(msgspec.Struct, Generic[Work, R], frozen=True, kw_only=True):
    """Work on stores of a checkpoint; given to `mapInArrow`. All of it is in the closure: a row has its number."""

    operation: str
    source: str
    settings: StoreSettings | None
    work: tuple[Work, ...]
    # Whether Spark is to try again what a blob store that does not answer has ended.
    retries: bool = False
    do: Callable[[CheckpointDir, Work], Awaitable[R]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = spread.works_of(batches, int)
        if numbers:
            done, failed = zip(*asyncio.run(self._do_all(numbers)), strict=True)
            columns = [pa.array(numbers, pa.int32()), pa.array(done, pa.binary()), pa.array(failed, pa.binary())]
            yield pa.record_batch(columns, ["number", "done", "failed"])

    async def _do_all(self, numbers: Sequence[int]) -> list[tuple[bytes | None, bytes | None]]:
        async with opened_checkpoint(self.source, self.settings) as source:

            async def one(number: int) -> tuple[bytes | None, bytes | None]:
                try:
                    return msgspec.msgpack.encode(await self.do(source, self.work[number])), None
                except TidemarkError as error:
                    if self.retries and isinstance(error, StoreUnavailableError):
                        raise
                    # Of a task that fails, the driver hears the text alone.
                    return None, encode_error(error)

            return await map_bounded(one, numbers, in_flight_max=_STORES_AT_ONCE)

    def run(self, spark: SparkSession, kind: type[R], partitions_max: int | None) -> list[R]:
        count = len(self.work)
        if not count:
            return []
        most = min(partitions_max or spread.default_partitions(spark), count)
        # Stores of one operator follow each other: dealt out like cards, a large operator is everywhere.
        placed = spread.placed_work(spark, range(count), [number % most for number in range(count)])
        name = f"{self.operation.capitalize()}Stores"
        with task_errors(self.operation, self.source):
            frame = placed.mapInArrow(in_context(self, name), "number int, done binary, failed binary")
            rows = frame.toArrow().sort_by("number")
        for failed in rows.column("failed").to_pylist():
            if failed is not None:
                raise decode_error(failed)
        return [msgspec.msgpack.decode(done, type=kind) for done in rows.column("done").to_pylist()]


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
        location: A directory that every executor sees under this path, or a URL.
        level: As `engine.checkpoint.check.check_checkpoint`.
        scratch: As there, on each executor.
        partitions_max: `default_partitions` if not given.

    Raises:
        TaskFailedError: Spark gave up, also where the store did not answer as often as Spark tried.
        As `engine.checkpoint.check.check_checkpoint`.
    """
    source, watch = absolute(location), Stopwatch(Runtime())
    check_one = partial(check_store, scratch=scratch, level=level)

    async def check() -> CheckReport:
        async with opened_checkpoint(source, store_settings) as root:
            logs = await check_logs(root)
            work = StoresWork(
                operation="check", source=source, settings=store_settings, work=logs.stores, retries=True, do=check_one
            )
            checked = await asyncio.to_thread(work.run, spark, StoreChecked, partitions_max)
            return await finish_check(root, logs, checked, level=level, watch=watch)

    return run_in_loop(check())


def explain_checkpoint(
    spark: SparkSession, location: str | Path, choice: ExplainChoice | None = None, *, partitions_max: int | None = None
) -> StateExplained:
    """Explain a checkpoint, its rows read on the executors, which see it under this path or URL.

    Raises:
        TaskFailedError: Spark gave up.
        As `engine.checkpoint.explain.explain_checkpoint`.
    """
    choice, source = msgspec.structs.replace(choice or ExplainChoice(), full=True), absolute(location)
    settings, scratch = choice.store_settings, choice.scratch

    async def scan_one(root: CheckpointDir, item: StoreToScan) -> StoreScanned:
        return await scan_store(root.child(item.store.id.path), item, scratch)

    async def scan_stores(stores: Sequence[StoreToScan]) -> list[StoreScanned]:
        work = StoresWork(operation="explain", source=source, settings=settings, work=tuple(stores), do=scan_one)
        return await asyncio.to_thread(work.run, spark, StoreScanned, partitions_max)

    return run_in_loop(explain.explain_checkpoint(source, choice, scan_stores=scan_stores))


def convert_checkpoint(
    spark: SparkSession,
    source: str | Path,
    target: str | Path,
    choice: ConvertChoice | None = None,
    *,
    partitions_max: int | None = None,
) -> ConvertedCheckpoint:
    """Convert a checkpoint, its stores on the executors.

    Args:
        source: A directory that every executor sees under this path, or a URL.
        target: Likewise, at a new place.
        choice: To what.
        partitions_max: `default_partitions` if not given.

    Raises:
        TaskFailedError: Spark gave up.
        As `engine.checkpoint.convert.convert_checkpoint`.
    """
    choice, runtime = choice or ConvertChoice(), Runtime()
    settings = choice.store_settings
    place = make_target(target, runtime, move_aside=False, settings=settings)

    async def convert_stores(directory: Path, stores: tuple[StoreToConvert, ...]) -> Sequence[StoreRestored]:
        destination = Destination.of(place, directory, settings)

        async def convert_one(root: CheckpointDir, item: StoreToConvert) -> StoreRestored:
            async def build(below: Path, item: StoreToConvert) -> StoreRestored:
                return await convert_store(root, item, below / item.id.path, runtime=Runtime(), replace=True)

            return await destination.make(item, build)

        work = StoresWork(operation="convert", source=absolute(source), settings=settings, work=stores, do=convert_one)
        # To its end, as a restore: tasks still write to the staging directory.
        return await run_blocking(work.run, spark, StoreRestored, partitions_max)

    async def convert() -> ConvertedCheckpoint:
        async with opened_checkpoint(source, settings) as root:
            return await run_conversion(root, place, choice, convert_stores, runtime)

    return run_in_loop(convert())


def rescale_checkpoint(
    spark: SparkSession,
    source: str | Path,
    target: str | Path,
    choice: RescaleChoice,
    *,
    partitions_max: int | None = None,
) -> RescaledCheckpoint:
    """Rescale a checkpoint, its groups of stores on the executors.

    Args:
        source: A directory that every executor sees under this path, or a URL.
        target: Likewise, at a new place.
        choice: To how many partitions of state.
        partitions_max: Of the work: `default_partitions` if not given.

    To an object store groups are published as they are done: after an error some may be at the target, without logs, so
    that nothing takes it for a checkpoint. Rescale to another prefix then.

    Raises:
        TaskFailedError: Spark gave up.
        As `engine.checkpoint.rescale.rescale_checkpoint`.
    """
    runtime, settings = Runtime(), choice.store_settings
    place = make_target(target, runtime, move_aside=False, settings=settings)

    async def rescale_groups(directory: Path, groups: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
        destination = Destination.of(place, directory, settings)

        async def rescale_one(root: CheckpointDir, item: GroupToRescale) -> GroupRescaled:
            return await destination.make(item, lambda below, item: _rescale(of_checkpoint(root), item, below))

        work = StoresWork(operation="rescale", source=absolute(source), settings=settings, work=groups, do=rescale_one)
        # To its end, as a restore: tasks still write to the staging directory.
        return await run_blocking(work.run, spark, GroupRescaled, partitions_max)

    async def rescale() -> RescaledCheckpoint:
        async with opened_checkpoint(source, settings) as root:
            return await run_rescale(root, place, choice, rescale_groups, runtime)

    return run_in_loop(rescale())
