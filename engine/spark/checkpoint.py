"""Back up, restore and check a streaming checkpoint on Spark: its stores on the executors, the rest on the driver.

The flows are those of `engine.checkpoint`, only their backends are others (design 0005, 2 to 4). A checkpoint has to be
on an object store, or a directory that every executor sees and, to restore one, may write beside as the same user.

To an object store each task publishes its stores itself, and what makes a checkpoint of them, `commits/` above all,
comes from the driver when all are there. What a prefix holds is moved aside only after a trial: every store is fetched,
verified and, if that is asked for, replayed once, and thrown away; so it is read twice then.

A task that Spark repeats finds what an earlier attempt left, and replaces it; of a lost attempt at a replayed store,
SSTs may stay that nothing names, as Spark's own lost attempts leave them.

What a store fails with is raised as one process raises it. Of several, one error names the first few.
"""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import StoreUnavailableError
from blobstore.opening import StoreSettings
from engine.arrow.key_hashes import partitions_of
from engine.blocking import run_in_loop
from engine.checkpoint import backup, explain
from engine.checkpoint.check import check_logs, finish_check
from engine.checkpoint.convert import ConvertChoice, ConvertedCheckpoint, StoreToConvert, convert_store, run_conversion
from engine.checkpoint.explain import ExplainChoice, StateExplained, StoreScanned, StoreToScan, scan_store
from engine.checkpoint.findings import CheckLevel, CheckReport, StoreChecked
from engine.checkpoint.groups import GroupRescaled, GroupToRescale
from engine.checkpoint.live import StoreToBackUp
from engine.checkpoint.rescale import RescaleChoice, RescaledCheckpoint, run_rescale
from engine.checkpoint.rescale_stores import Here, of_backup, of_checkpoint, rescale_group
from engine.checkpoint.restore import (
    CheckpointRestore,
    RestoreChoice,
    RestoredCheckpoint,
    make_target,
    run_restore,
    target_of,
)
from engine.checkpoint.store import StoreRestored, StoreToRestore, restore_store
from engine.checkpoint.store_check import StoreWork, check_store
from engine.checkpoint.targets import CheckpointTarget, DirectoryTarget, ObjectTarget, files_below, publish_files
from engine.errors import DamagedError, SourceChangedError, UnsafeSourceError
from engine.local.scratch import scratch_dir
from engine.repository.repository import Repository
from engine.runtime import Runtime, Stopwatch
from engine.spark import spread
from engine.spark.access import Access, SparkOptions, absolute, in_context, open_on_driver
from engine.spark.errors import TaskFailedError, decode_error, encode_error, task_errors
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint, store_url
from index.display import count
from index.errors import FormatError, VersionMissingError
from tidemark.errors import TidemarkError

# Number of stores of a partition at once: one waits for its store while another one reads.
_STORES_AT_ONCE: Final = 2
_ERRORS_SHOWN_MAX: Final = 3
# What another attempt may not meet: of several errors these are raised last, in this order.
_PASSING: Final = (SourceChangedError, UnsafeSourceError, VersionMissingError, StoreUnavailableError)

R = TypeVar("R", bound=msgspec.Struct)
Opened = TypeVar("Opened")
W = TypeVar("W", StoreToRestore, StoreToConvert, GroupToRescale)
Stored = TypeVar("Stored", StoreToRestore, GroupToRescale)
Work = TypeVar("Work", bound=StoreWork | StoreToScan | StoreToBackUp | StoreToRestore | StoreToConvert | GroupToRescale)


class StoresWork(msgspec.Struct, Generic[Opened, Work, R], frozen=True, kw_only=True):
    """Work on stores of a checkpoint; given to `mapInArrow`. All of it is in the closure: a row has its number."""

    operation: str
    # The checkpoint, or the job: of an error that Spark ends with.
    subject: str
    work: tuple[Work, ...]
    do: Callable[[Opened, Work], Awaitable[R]]
    # What all stores of a partition share, opened with the repository; with None where there is no `access`.
    opened: Callable[[Any], AbstractAsyncContextManager[Opened]]
    # To a repository, whose limits the stores at work share. Whatever a store fails with, the others are done to their
    # end then; without it, Spark tries the task again after what is not an error of Tidemark.
    access: Access | None = None
    # To balance them by; none: they are dealt out like cards.
    sizes_bytes: tuple[int, ...] = ()
    # Whether Spark is to try again what a blob store that does not answer has ended.
    retries: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = spread.works_of(batches, int)
        if numbers:
            done, failed = zip(*self._do_all(numbers), strict=True)
            columns = [pa.array(numbers, pa.int32()), pa.array(done, pa.binary()), pa.array(failed, pa.binary())]
            yield pa.record_batch(columns, ["number", "done", "failed"])

    def _do_all(self, numbers: Sequence[int]) -> list[tuple[bytes | None, bytes | None]]:
        if self.access is None:
            return asyncio.run(self.do_each(None, numbers, _STORES_AT_ONCE))
        with spread.borrowed(self.access, len(numbers)) as (repository, at_once):
            return repository.loop.run(self.do_each(repository.asynchronous, numbers, at_once))

    async def do_each(
        self, repository: Repository | None, numbers: Sequence[int], at_once: int
    ) -> list[tuple[bytes | None, bytes | None]]:
        """Work on some stores; return the result of each, or its error."""
        async with self.opened(repository) as opened:

            async def one(number: int) -> tuple[bytes | None, bytes | None]:
                try:
                    return msgspec.msgpack.encode(await self.do(opened, self.work[number])), None
                except TidemarkError as error:
                    if self.retries and isinstance(error, StoreUnavailableError):
                        raise
                    # Of a task that fails, the driver hears the text alone.
                    return None, encode_error(error)
                except Exception as error:
                    if self.access is None:
                        raise
                    message = f"{type(error).__name__}: {error}"
                    failed = TaskFailedError(message, operation=self.operation, subject=self.subject)
                    # Spark does not see it, and so gives no traceback.
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    failed.add_note(f"it was raised in {at.name}, {at.filename}:{at.lineno}")
                    return None, encode_error(failed)

            return await map_bounded(one, numbers, in_flight_max=at_once)

    def run(self, spark: SparkSession, kind: type[R], partitions_max: int | None) -> list[R]:
        """Work on all stores, to the end of each, also where some fail.

        Raises:
            TaskFailedError: Spark gave up, or a store failed with what is not an error of Tidemark.
            TidemarkError: As `do`: of several the worst one, which names some of the others.
        """
        if not self.work:
            return []
        # Stores of one operator follow each other: dealt out like cards, a large operator is everywhere.
        sizes_bytes = self.sizes_bytes or (0,) * len(self.work)
        partitions = spread.assign_by_bytes(sizes_bytes, partitions_max or spread.default_partitions(spark))
        placed = spread.placed_work(spark, range(len(self.work)), partitions)
        name = f"{self.operation.title().replace(' ', '')}Stores"
        with task_errors(self.operation, self.subject):
            frame = placed.mapInArrow(in_context(self, name), "number int, done binary, failed binary")
            rows = frame.toArrow().sort_by("number")
        named = zip(self.work, rows.column("failed").to_pylist(), strict=True)
        if failed := [(item.id.path, decode_error(data)) for item, data in named if data is not None]:
            raise worst_of(failed, len(self.work))
        return [msgspec.msgpack.decode(done, type=kind) for done in rows.column("done").to_pylist()]


def worst_of(failed: Sequence[tuple[str, TidemarkError]], stores: int) -> TidemarkError:
    """Return the error of the store that failed worst, as it is, but that its text names the first few others too.

    Damage is the worst, of it what a backup lacks, as another one may be whole; what another attempt may not meet is
    the least.
    """

    def rank(failure: tuple[str, TidemarkError]) -> tuple[int, bool, bool]:
        error = failure[1]
        passing = next((n for n, kind in enumerate(_PASSING, 1) if isinstance(error, kind)), 0)
        return passing, not isinstance(error, DamagedError), not isinstance(error, FormatError)

    failed = sorted(failed, key=rank)
    shown = [text if path in (text := str(error)) else f"{text} ({path})" for path, error in failed]
    more = len(failed) - _ERRORS_SHOWN_MAX
    text = "; ".join(shown[:_ERRORS_SHOWN_MAX]) + (f", and {more} more" if more > 0 else "")
    worst = failed[0][1]
    worst.args = (f"{text}; {len(failed)} of {count(stores, 'store')} failed",)
    for path, error in failed[1:_ERRORS_SHOWN_MAX]:
        for note in getattr(error, "__notes__", ()):
            worst.add_note(f"{path}: {note}")
    return worst


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
        TaskFailedError: Spark gave up, or a store failed with what is not an error of Tidemark.
        As `engine.checkpoint.backup.backup_checkpoint`.
    """
    location = absolute(checkpoint)
    asked = choice or backup.BackupChoice()
    options = options or SparkOptions()
    repository, access = open_on_driver(url, options)

    @contextlib.asynccontextmanager
    async def opened(repository: Repository) -> AsyncIterator[tuple[Repository, CheckpointDir]]:
        async with opened_checkpoint(location, asked.checkpoint_settings) as root:
            yield repository, root

    async def back_up_stores(plan: backup.CheckpointBackupPlan) -> Sequence[backup.StoreBackup]:
        scope, stores = plan.scope, plan.stores

        async def back_up(at: tuple[Repository, CheckpointDir], item: StoreToBackUp) -> backup.StoreBackup:
            return await backup.backup_store(*at, scope, item, asked)

        work = StoresWork(
            operation=backup.OPERATION,
            subject=location,
            work=stores,
            do=back_up,
            opened=opened,
            access=access,
            sizes_bytes=tuple(item.base.size_bytes if item.base else 0 for item in stores),
        )
        return await asyncio.to_thread(work.run, spark, backup.StoreBackup, options.partitions_max)

    with repository, repository.inside(opened_checkpoint(location, asked.checkpoint_settings)) as root:
        work = backup.run_backup(repository.asynchronous, root, back_up_stores, asked, runtime=Runtime())
        return repository.loop.run(work)


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

    async def make(self, build: Callable[[Opened, W, Path], Awaitable[R]], opened: Opened, item: W) -> R:
        """Have stores built of what is opened, below the directory or in one of their own that is then published."""
        if self.is_directory:
            # Spark may have lost an attempt that had come to its end: what that left may go.
            return await spread.when_free(lambda: build(opened, item, Path(self.root)))
        async with scratch_dir() as scratch, opened_checkpoint(self.root, self.settings) as directory:
            made = await build(opened, _unsummed(item), scratch)
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


async def _restore(repository: Repository, item: StoreToRestore, below: Path) -> StoreRestored:
    target, transfer = below / item.id.path, repository.settings
    return await restore_store(repository, item, target, transfer=transfer, runtime=Runtime(), replace=True)


async def _convert(root: CheckpointDir, item: StoreToConvert, below: Path) -> StoreRestored:
    return await convert_store(root, item, below / item.id.path, runtime=Runtime(), replace=True)


async def _rescale(opened: Repository | CheckpointDir, item: GroupToRescale, below: Path) -> GroupRescaled:
    open_store = of_backup(opened.store, opened.settings) if isinstance(opened, Repository) else of_checkpoint(opened)
    return await rescale_group(open_store, item, below, Here(partitioner=partitions_of), replace=True)


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
        TaskFailedError: Spark gave up, or a store failed with what is not an error of Tidemark.
        As `engine.checkpoint.restore.restore_checkpoint`.
    """
    choice, options = choice or RestoreChoice(), options or SparkOptions()
    settings, partitions_max = choice.target_settings or options.store, options.partitions_max
    choice = msgspec.structs.replace(choice, target_settings=settings)
    runtime = Runtime()
    place = target_of(choice, target, runtime)
    repository, access = open_on_driver(url, options)

    def backend(
        kind: type[R], build: Callable[[Repository, Stored, Path], Awaitable[R]]
    ) -> Callable[[CheckpointRestore, tuple[Stored, ...]], Awaitable[Sequence[R]]]:
        async def carry_out(restore: CheckpointRestore, items: tuple[Stored, ...]) -> Sequence[R]:
            async def run(destination: Destination) -> Sequence[R]:
                work = StoresWork(
                    operation="restore checkpoint",
                    subject=restore.job,
                    work=items,
                    do=partial(destination.make, build),
                    opened=contextlib.nullcontext,
                    access=access,
                    sizes_bytes=tuple(item.size_bytes for item in items),
                )
                # To its end: tasks still write to the staging directory, and rely on the pin.
                return await run_blocking(work.run, spark, kind, partitions_max)

            destination = Destination.of(place, restore.directory, settings)
            if isinstance(place, ObjectTarget):
                if place.has_content:
                    await run(msgspec.structs.replace(destination, is_trial=True))
                await place.clear()
            return await run(destination)

        return carry_out

    with repository:
        backends = backend(StoreRestored, _restore), backend(GroupRescaled, _rescale)
        return repository.loop.run(run_restore(repository.asynchronous, place, choice, backends, runtime))


def _of(source: str, settings: StoreSettings | None) -> Callable[[None], AbstractAsyncContextManager[CheckpointDir]]:
    return lambda _: opened_checkpoint(source, settings)


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
            opened = _of(source, store_settings)
            work = StoresWork(
                operation="check", subject=source, work=logs.stores, do=check_one, opened=opened, retries=True
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
        return await scan_store(root.child(item.id.path), item, scratch)

    async def scan_stores(stores: Sequence[StoreToScan]) -> list[StoreScanned]:
        opened = _of(source, settings)
        work = StoresWork(operation="explain", subject=source, work=tuple(stores), do=scan_one, opened=opened)
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
        do, opened = partial(Destination.of(place, directory, settings).make, _convert), _of(absolute(source), settings)
        work = StoresWork(operation="convert", subject=absolute(source), work=stores, do=do, opened=opened)
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
        do, opened = partial(Destination.of(place, directory, settings).make, _rescale), _of(absolute(source), settings)
        work = StoresWork(operation="rescale", subject=absolute(source), work=groups, do=do, opened=opened)
        # To its end, as a restore: tasks still write to the staging directory.
        return await run_blocking(work.run, spark, GroupRescaled, partitions_max)

    async def rescale() -> RescaledCheckpoint:
        async with opened_checkpoint(source, settings) as root:
            return await run_rescale(root, place, choice, rescale_groups, runtime)

    return run_in_loop(rescale())
