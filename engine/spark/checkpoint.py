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
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypedDict, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.opening import StoreSettings
from engine.arrow.key_hashes import partitions_of
from engine.blocking import LoopThread
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
from engine.checkpoint.store_check import StoreWork as StoreToCheck
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
from engine.repository.repository import Repository
from engine.runtime import Runtime, Stopwatch
from engine.spark import spread
from engine.spark.access import SparkOptions, absolute, in_context, open_on_driver
from engine.spark.errors import TaskFailedError, decode_error, encode_error
from engine.state.checkpoint_dir import CheckpointDir, store_url
from engine.state.query import StoreAt
from index.errors import FormatError, PartitionKeyError, StoreMergeError, UnknownFormatError, VersionMissingError
from index.snapshot.model import Scope, StoreReference
from index.spark.checkpoint import StoreId
from tidemark.errors import TidemarkError

_ERRORS_SHOWN_MAX: Final = 3

T = TypeVar("T")


def _carry_out(
    spark: SparkSession,
    task: spread.StoresTask,
    stores: Iterable[tuple[StoreId, StoreReference | None]],
    partitions_max: int | None,
) -> list[spread.StoreOutcome]:
    work = [
        spread.StoreWork(task=of.task, store=of.store, path=of.path, reference=reference) for of, reference in stores
    ]
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
        async with backup.opened_checkpoint(self.checkpoint, self.choice.checkpoint_settings) as root:
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
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)

    def back_up_stores(plan: backup.CheckpointBackupPlan) -> Sequence[backup.StoreBackup]:
        stores = {(item.store.id.task, item.store.id.store): item for item in plan.stores}
        task = BackupLiveStores(access=access, scope=plan.scope, checkpoint=location, stores=stores, choice=asked)
        bases = [(item.store.id, item.base) for item in plan.stores]
        return _backups(_carry_out(spark, task, bases, options.partitions_max), location)

    with repository, repository.inside(backup.opened_checkpoint(location, asked.checkpoint_settings)) as root:
        return repository.loop.run(
            backup.run_backup(
                repository.asynchronous,
                root,
                lambda plan: asyncio.to_thread(back_up_stores, plan),
                asked,
                runtime=Runtime(),
            )
        )


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


class RestoreCheckpointStores(spread.StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition, each below a directory or below the URL of a prefix."""

    # Where the checkpoint is gathered if that is a directory, else where it is published.
    root: str
    is_directory: bool
    target_settings: StoreSettings
    # Publish nothing: only see that every store can be fetched.
    is_trial: bool = False
    # By task and store; a group by those of its first target.
    wanted: dict[tuple[str, str], StoreToRestore | GroupToRescale]

    @override
    async def carry_out(self, repository: Repository, work: spread.StoreWork) -> spread.StoreOutcome:
        item = self.wanted[work.task, work.store]
        made: StoreRestored | GroupRescaled
        if isinstance(item, GroupToRescale):
            made = await self._rescaled(repository, item)
            stores = made.stores
        else:
            made = await self._restored(repository, item)
            stores = (made,)
        return spread.StoreOutcome(
            files=sum(of.files for of in stores),
            bytes_moved=sum(of.bytes_fetched for of in stores),
            result=msgspec.msgpack.encode(made),
        )

    async def _restored(self, repository: Repository, item: StoreToRestore) -> StoreRestored:
        async def restore(below: Path, item: StoreToRestore) -> StoreRestored:
            target = below / item.id.path
            # Spark may have lost an attempt that had come to its end: what that left may go.
            return await spread.when_free(
                lambda: restore_store(
                    repository, item, target, transfer=repository.settings, runtime=Runtime(), replace=True
                )
            )

        if self.is_directory:
            return await restore(Path(self.root), item)
        if item.replayed:
            item = msgspec.structs.replace(item, store=_unsummed(item.store))
        made, files = await self._published(lambda scratch: restore(scratch, item))
        return msgspec.structs.replace(made, published=files)

    async def _rescaled(self, repository: Repository, item: GroupToRescale) -> GroupRescaled:
        open_store = of_backup(repository.store, repository.settings)
        if self.is_directory:
            return await _rescale(open_store, item, Path(self.root))
        bare = msgspec.structs.replace(item, sums_files=False)  # as of `_unsummed`
        return _with_published(*await self._published(lambda scratch: _rescale(open_store, bare, scratch)))

    async def _published(self, build: Callable[[Path], Awaitable[T]]) -> tuple[T, tuple[str, ...]]:
        return await _published(self.root, self.target_settings, build, is_trial=self.is_trial)


def _unsummed(store: StoreAt) -> StoreAt:
    """Return a store without checksums of files: two attempts make two zips of one name, and one has its checksum."""
    return msgspec.structs.replace(store, settings=msgspec.structs.replace(store.settings, file_checksums=False))


async def _rescale(open_store: OpenStore, item: GroupToRescale, target: Path) -> GroupRescaled:
    how = Here(partitioner=partitions_of)
    return await spread.when_free(lambda: rescale_group(open_store, item, target, how, replace=True))


def _with_published(made: GroupRescaled, files: tuple[str, ...]) -> GroupRescaled:
    first = msgspec.structs.replace(made.stores[0], published=files)
    return msgspec.structs.replace(made, stores=(first, *made.stores[1:]))


async def _published(
    root: str, settings: StoreSettings | None, build: Callable[[Path], Awaitable[T]], *, is_trial: bool = False
) -> tuple[T, tuple[str, ...]]:
    """Build stores in a directory of their own, publish them below the URL of a prefix, and return the paths, too."""
    scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))
    try:
        async with backup.opened_checkpoint(root, settings) as directory:
            made = await build(Path(scratch.name))
            files: Sequence[str] = ()
            if not is_trial:
                files = await run_blocking(files_below, Path(scratch.name))
                await publish_files(directory, Path(scratch.name), files)
    finally:
        await run_blocking(scratch.cleanup)
    return made, tuple(files)


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
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)

    async def carry_out(
        restore: CheckpointRestore, work: Sequence[StoreToRestore] | Sequence[GroupToRescale]
    ) -> list[bytes]:
        is_directory = isinstance(place, DirectoryTarget)
        task = RestoreCheckpointStores(
            access=access,
            scope=Scope(restore.job),
            root=str(restore.directory) if is_directory else store_url(str(target)),
            is_directory=is_directory,
            target_settings=settings,
            wanted={(item.id.task, item.id.store): item for item in work},
        )
        if isinstance(place, ObjectTarget):
            if place.has_content:
                trial = msgspec.structs.replace(task, is_trial=True)
                await run_blocking(_restore_stores, spark, trial, partitions_max)
            await place.clear()
        # To its end: tasks still write to the staging directory, and rely on the pin.
        return await run_blocking(_restore_stores, spark, task, partitions_max)

    async def restore_stores(restore: CheckpointRestore, work: tuple[StoreToRestore, ...]) -> Sequence[StoreRestored]:
        results = await carry_out(restore, work)
        return [msgspec.msgpack.decode(result, type=StoreRestored) for result in results]

    async def rescale_stores(restore: CheckpointRestore, work: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
        results = await carry_out(restore, work)
        return [msgspec.msgpack.decode(result, type=GroupRescaled) for result in results]

    with repository:
        backends = restore_stores, rescale_stores
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


class CheckStores(msgspec.Struct, frozen=True, kw_only=True):
    """Checks the stores of a partition; given to `mapInArrow`."""

    location: str
    level: CheckLevel
    settings: StoreSettings | None
    scratch: Path | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check each row of work; return one row for each."""
        work = spread.works_of(batches, StoreToCheck)
        if work:
            rows = [msgspec.msgpack.encode(checked) for checked in asyncio.run(self._check(work))]
            yield pa.record_batch([pa.array(rows, pa.binary())], ["checked"])

    async def _check(self, work: list[StoreToCheck]) -> list[StoreChecked]:
        async with backup.opened_checkpoint(self.location, self.settings) as root:
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
        location: A directory that every executor sees under this path, or a URL.
        level: As `engine.checkpoint.check.check_checkpoint`.
        scratch: As there, on each executor.
        partitions_max: `default_partitions` if not given.

    Raises:
        TaskFailedError: A store could not be looked at as often as Spark tried, or Spark itself gave up.
        NotFoundError, ProviderError, StoreError: As `engine.checkpoint.check.check_checkpoint`.
    """
    task = CheckStores(location=absolute(location), level=level, settings=store_settings, scratch=scratch)
    return _run(_check(spark, task, partitions_max or spread.default_partitions(spark)))


W = TypeVar("W", StoreToConvert, GroupToRescale, StoreToScan)


class _DoWork(msgspec.Struct, Generic[W], frozen=True, kw_only=True):
    """Works on stores of a checkpoint; given to `mapInArrow`. The work is in the closure: a row has its number."""

    source: str
    settings: StoreSettings | None
    work: tuple[W, ...]

    async def make(self, source: CheckpointDir, item: W) -> msgspec.Struct:
        """Make one item of the work; return what became of it."""
        raise NotImplementedError

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Make each item that a row has the number of; return one row for each."""
        numbers = spread.works_of(batches, int)
        if numbers:
            rows = asyncio.run(self._make_all(numbers))
            made = [None if isinstance(row, bytes) else msgspec.msgpack.encode(row) for row in rows]
            failed = [row if isinstance(row, bytes) else None for row in rows]
            columns = [pa.array(numbers, pa.int32()), pa.array(made, pa.binary()), pa.array(failed, pa.binary())]
            yield pa.record_batch(columns, ["number", "made", "failed"])

    async def _make_all(self, numbers: Sequence[int]) -> list[msgspec.Struct | bytes]:
        async with backup.opened_checkpoint(self.source, self.settings) as source:

            async def one(number: int) -> msgspec.Struct | bytes:
                try:
                    return await self.make(source, self.work[number])
                except TidemarkError as error:  # of a task that fails, the driver hears the text alone
                    return encode_error(error)

            return await map_bounded(one, numbers, in_flight_max=_STORES_AT_ONCE)


class _MakeStores(_DoWork[W], Generic[W], frozen=True, kw_only=True):
    """Makes stores of a checkpoint at another place from those of a source."""

    # As of `RestoreCheckpointStores`.
    root: str
    is_directory: bool


class ConvertStores(_MakeStores[StoreToConvert], frozen=True, kw_only=True):
    """Converts the stores of a partition."""

    @override
    async def make(self, source: CheckpointDir, item: StoreToConvert) -> StoreRestored:
        async def build(item: StoreToConvert, below: Path) -> StoreRestored:
            target = below / item.id.path
            return await spread.when_free(lambda: convert_store(source, item, target, runtime=Runtime(), replace=True))

        if self.is_directory:
            return await build(item, Path(self.root))
        bare = msgspec.structs.replace(item, sums_files=False)  # as of `_unsummed`
        made, files = await _published(self.root, self.settings, lambda scratch: build(bare, scratch))
        return msgspec.structs.replace(made, published=files)


class RescaleStores(_MakeStores[GroupToRescale], frozen=True, kw_only=True):
    """Rescales the groups of a partition."""

    @override
    async def make(self, source: CheckpointDir, item: GroupToRescale) -> GroupRescaled:
        open_store = of_checkpoint(source)
        if self.is_directory:
            return await _rescale(open_store, item, Path(self.root))
        bare = msgspec.structs.replace(item, sums_files=False)  # as of `_unsummed`
        return _with_published(
            *await _published(self.root, self.settings, lambda scratch: _rescale(open_store, bare, scratch))
        )


class ScanStores(_DoWork[StoreToScan], frozen=True, kw_only=True):
    """Reads all rows of the stores of a partition."""

    scratch: Path | None

    @override
    async def make(self, source: CheckpointDir, item: StoreToScan) -> StoreScanned:
        return await scan_store(source.child(item.store.id.path), item, self.scratch)


def explain_checkpoint(
    spark: SparkSession, location: str | Path, choice: ExplainChoice | None = None, *, partitions_max: int | None = None
) -> StateExplained:
    """Explain a checkpoint, its rows read on the executors, which see it under this path or URL.

    Raises:
        TaskFailedError: A store could not be read as often as Spark tried, or Spark itself gave up.
        As `engine.checkpoint.explain.explain_checkpoint`.
    """
    choice, source = msgspec.structs.replace(choice or ExplainChoice(), full=True), absolute(location)

    async def scan_stores(work: Sequence[StoreToScan]) -> list[StoreScanned]:
        task = ScanStores(source=source, settings=choice.store_settings, scratch=choice.scratch, work=tuple(work))
        results = await asyncio.to_thread(_spread, spark, task, partitions_max, "explain")
        return [msgspec.msgpack.decode(result, type=StoreScanned) for result in results]

    return _run(explain.explain_checkpoint(source, choice, scan_stores=scan_stores))


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
        TaskFailedError: A store could not be converted as often as Spark tried, or Spark itself gave up.
        As `engine.checkpoint.convert.convert_checkpoint`.
    """
    choice, runtime = choice or ConvertChoice(), Runtime()
    settings = choice.store_settings
    place = make_target(target, runtime, move_aside=False, settings=settings)

    async def convert_stores(directory: Path, work: tuple[StoreToConvert, ...]) -> Sequence[StoreRestored]:
        task = ConvertStores(work=work, **_places(source, target, place, directory), settings=settings)
        # To its end, as a restore: tasks still write to the staging directory.
        results = await run_blocking(_spread, spark, task, partitions_max, "convert")
        return [msgspec.msgpack.decode(result, type=StoreRestored) for result in results]

    async def convert() -> ConvertedCheckpoint:
        async with backup.opened_checkpoint(source, settings) as root:
            return await run_conversion(root, place, choice, convert_stores, runtime)

    return _run(convert())


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
        TaskFailedError: A group could not be rescaled as often as Spark tried, or Spark itself gave up.
        As `engine.checkpoint.rescale.rescale_checkpoint`.
    """
    runtime, settings = Runtime(), choice.store_settings
    place = make_target(target, runtime, move_aside=False, settings=settings)

    async def rescale_groups(directory: Path, work: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
        task = RescaleStores(work=work, **_places(source, target, place, directory), settings=settings)
        # To its end, as a restore: tasks still write to the staging directory.
        results = await run_blocking(_spread, spark, task, partitions_max, "rescale")
        return [msgspec.msgpack.decode(result, type=GroupRescaled) for result in results]

    async def rescale() -> RescaledCheckpoint:
        async with backup.opened_checkpoint(source, settings) as root:
            return await run_rescale(root, place, choice, rescale_groups, runtime)

    return _run(rescale())


class _Places(TypedDict):
    source: str
    root: str
    is_directory: bool


def _places(source: str | Path, target: str | Path, place: CheckpointTarget, directory: Path) -> _Places:
    """Say where stores are read and made, as executors have it."""
    is_directory = isinstance(place, DirectoryTarget)
    root = str(directory) if is_directory else store_url(str(target))
    return _Places(source=absolute(source), root=root, is_directory=is_directory)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own: a notebook has one already."""
    loop = LoopThread()
    try:
        return loop.run(work)
    finally:
        loop.stop()


def _spread(spark: SparkSession, task: _DoWork[W], partitions_max: int | None, operation: str) -> list[bytes]:
    """Carry out a task; return what became of each item of its work, encoded."""
    count = len(task.work)
    if not count:
        return []
    most = partitions_max or spread.default_partitions(spark)
    placed = spread.placed_work(spark, range(count), [number % min(most, count) for number in range(count)])
    frame = placed.mapInArrow(in_context(task), "number int, made binary, failed binary")
    rows = spread.evaluate(frame, operation, task.source).sort_by("number")
    for failed in rows.column("failed").to_pylist():
        if failed is not None:
            raise decode_error(failed)
    return list(rows.column("made").to_pylist())


async def _check(spark: SparkSession, task: CheckStores, partitions_max: int) -> CheckReport:
    watch = Stopwatch(Runtime())

    def check_stores(stores: tuple[StoreToCheck, ...]) -> list[StoreChecked]:
        if not stores:
            return []
        # Stores of one operator follow each other: dealt out like cards, a large operator is everywhere.
        partitions = [number % min(partitions_max, len(stores)) for number in range(len(stores))]
        frame = spread.placed_work(spark, stores, partitions).mapInArrow(in_context(task), "checked binary")
        rows = spread.evaluate(frame, "check", task.location).column("checked").to_pylist()
        return [msgspec.msgpack.decode(row, type=StoreChecked) for row in rows]

    async with backup.opened_checkpoint(task.location, task.settings) as root:
        logs = await check_logs(root)
        checked = await asyncio.to_thread(check_stores, logs.stores)
        return await finish_check(root, logs, checked, level=task.level, watch=watch)
