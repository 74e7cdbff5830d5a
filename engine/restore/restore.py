"""Restore one snapshot into a directory: whole, verified and synced, or not at all.

`plan_restore_store` takes the same look at snapshot and target, and writes nothing.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import ByteBudget, give_up, map_bounded, run_blocking
from blobstore.errors import CapabilityMissingError
from blobstore.local.files import place_of
from blobstore.tracing import traced
from blobstore.wrappers.forwarding import UndeletingStore
from engine.errors import DamagedError, NotFoundError, TargetError, UnsafeSourceError, UsageError
from engine.local.digests import Digest, DigestCache, FactReader
from engine.local.scan import DIR_FLAGS, opened, scan_dir
from engine.records.find import CHOICES_MAX, Choice, find_pinned, require_store
from engine.records.indexes import check_is_of, read_stored_snapshot
from engine.records.leases import PinLease, is_closed_by_now
from engine.records.repository import OpenRepository, StoreAddress
from engine.restore.download import Downloader
from engine.restore.staging import Staging, check_apart, look_at_target, target_errors
from engine.restore.write import OwnerPolicy, stat_again
from engine.rocksdb.lock import check_none_held_below
from engine.runtime import NO_PROGRESS, Pace, Progress, Stopwatch, SummedProgress
from engine.settings import TASKS_AT_ONCE, share_among
from engine.text import Where
from index.display import DisplayMixin, format_files, format_seconds, format_texts
from index.plan.commits import Commit
from index.plan.restore import GAP_BYTES_FIRST, RestorePlan, choose_gap_bytes, plan_restore
from index.snapshot.contents import choose_files, is_empty_pattern
from index.snapshot.dir_diff import LocalFile, pairs_to_identify
from index.snapshot.keys import encode_component
from index.snapshot.model import CommitPointer, FilePath, SnapshotIndex, StoreReference
from tidemark.errors import TidemarkError

_LOG: Final = logging.getLogger(__name__)
# An index, and the GETs that it took.
IndexRead = tuple[SnapshotIndex, int]
Used = TypeVar("Used")


class RestoreResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a restore did."""

    files_total: int
    bytes_total: int
    # From the blob store; bytes as asked for, dead bytes of packs and second fetches included.
    files_fetched: int
    bytes_fetched: int
    # From the directory that was replaced.
    files_reused: int
    bytes_reused: int
    # From the index; empty files count among them.
    files_inline: int
    bytes_inline: int
    # GETs of indexes and blobs, as this restore asked for them.
    requests: int
    seconds: float
    # Paths beside the target that could not be removed, for somebody with more rights to remove.
    leftovers: tuple[str, ...] = ()
    # Of `seconds`: reading the index, finding out what is there already, making directories, and from the last byte on,
    # syncing the directories and renaming them into place.
    index_seconds: float = 0.0
    prepare_seconds: float = 0.0
    publish_seconds: float = 0.0

    @override
    def _figures(self) -> dict[str, str]:
        return {
            "files": format_files(self.files_total, self.bytes_total),
            "fetched": format_files(self.files_fetched, self.bytes_fetched),
            "reused": format_files(self.files_reused, self.bytes_reused),
            "from the index": format_files(self.files_inline, self.bytes_inline),
            "requests": f"{self.requests:,}",
            "time": format_seconds(self.seconds),
            "could not be removed": format_texts(self.leftovers),
        }


class TargetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the target of a restore is treated."""

    # What to do about recorded owners.
    owners: OwnerPolicy = OwnerPolicy.IGNORE
    # Whether a directory with content may be replaced. Its files are reused where they are the right ones (I2).
    replace: bool = False
    # With `replace`: at every moment there is a whole directory at the target, where the file system can exchange two
    # names (Linux); elsewhere, and without this, there is none for a moment.
    exchange: bool = False


class RestoreOptions(TargetOptions, frozen=True, kw_only=True):
    """What of a snapshot is restored, and how."""

    # Patterns such as `*.sst`, matched from the right: only files that one of them matches are restored. None: all.
    files: Sequence[str] = ()
    # Take deleted blobs and indexes too, from a store that keeps them for a while: Samza's `getDeleted`.
    deleted: bool = False


class Restored(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which commit was restored and how it went."""

    commit: Commit
    result: RestoreResult
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool
    # Why it is not the commit that was chosen, but the newest of which everything is there; empty if it is.
    instead_because: str = ""


class RestoredStore(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """One store of a commit, where it is restored to, and how that went: a result, or the failure."""

    reference: StoreReference
    target: Path
    result: RestoreResult | None = None
    failure: Exception | None = None


class RestoredAll(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which commit was restored, and each of its stores."""

    commit: Commit
    stores: tuple[RestoredStore, ...]
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool


def target_below(root: Path, reference: StoreReference) -> Path:
    """Return where a store goes below a directory, `<task>/<store>`: safe as in keys, as the store names both."""
    return root / encode_component(reference.task) / encode_component(reference.store)


async def restore_stores(
    repository: OpenRepository,
    commit: Commit,
    root: Path,
    options: RestoreOptions = RestoreOptions(),
    progress: Progress = NO_PROGRESS,
    *,
    replaced: Collection[Path] = (),
) -> tuple[RestoredStore, ...]:
    """Restore all stores of a pinned commit to `target_below`, several at once; go on after a failure.

    They share memory and requests of one. Targets that are `replaced` may have content, whatever the options say. A
    directory above the targets in which nothing was restored is not left there.
    """
    stores, parts = commit.record.stores, SummedProgress(progress)
    at_once, settings = share_among(repository.settings, min(TASKS_AT_ONCE, len(stores)))
    repository = msgspec.structs.replace(repository, settings=settings)

    async def restore(reference: StoreReference) -> RestoredStore:
        target = target_below(root, reference)
        how = msgspec.structs.replace(options, replace=options.replace or target in replaced)
        try:
            result = await restore_store(repository, reference, target, how, parts.part())
        except (TidemarkError, OSError) as error:
            return RestoredStore(reference=reference, target=target, failure=error)
        return RestoredStore(reference=reference, target=target, result=result)

    above = [*{target_below(root, reference).parent for reference in stores}, root]
    made = await run_blocking(lambda: [one for one in above if not os.path.lexists(one)])
    try:
        return tuple(await map_bounded(restore, stores, in_flight_max=at_once))
    finally:
        await run_blocking(_remove_empty, made)


def _remove_empty(directories: Sequence[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


@traced("restore_store")
async def restore_store(
    repository: OpenRepository,
    reference: StoreReference,
    target: Path,
    options: RestoreOptions = RestoreOptions(),
    progress: Progress = NO_PROGRESS,
    *,
    reading: Awaitable[IndexRead] | None = None,
) -> RestoreResult:
    """Restore a snapshot to a directory.

    Requests: one GET for the index (one more per delta that leads to it), then one per blob or range of a pack. What is
    `reading` the index already is awaited instead.

    The target is absent, an empty directory, or with `replace` any directory. On any error, and if this is cancelled,
    it is what it was, or complete.

    Raises:
        TargetError: The target is not a directory, has content that may not be replaced, is in use, has no space, or is
            the repository's place, above it or below it; or `replace` would put a few files into the place of a whole
            directory.
        UsageError: One of the patterns is empty.
        NotFoundError: One of the patterns matches no file.
        DamagedError: The index or a blob is missing or altered. The cause is a `BlobNotFoundError` if it is missing.
            What is missing is noted in `repository.missing_blobs`.
        CapabilityMissingError: Deleted blobs are wanted, and the store does not keep them.
        StoreError: As the store says.
    """
    repository = _as_asked(repository, target, options)
    with repository.missing_blobs.recording():
        async with staged_restore(repository, target, options, progress) as staged:
            index, requests = await _read_chosen(repository, reference, options.files, reading)
            await staged.download(index, requests=requests)
            result = await staged.publish()
    _LOG.info(
        "%s: restored version %d of commit %d to %s: %d files, %d bytes fetched, %d reused",
        Where(repository.store, f"{index.metadata.job} {reference.task}/{reference.store}"),
        reference.version,
        reference.number,
        target,
        result.files_total,
        result.bytes_fetched,
        result.bytes_reused,
    )
    return result


async def restore_chosen(
    repository: OpenRepository,
    address: StoreAddress,
    target: Path,
    choice: Choice,
    options: RestoreOptions,
    *,
    progress: Progress = NO_PROGRESS,
) -> Restored:
    """Find, protect and restore a commit. Errors as `use_found`, `find_pinned` and `restore_store`."""
    purpose = f"restore {address.task}/{address.store}"
    early = EarlyReading(repository, address, options)

    def find() -> AbstractAsyncContextManager[tuple[Commit, PinLease]]:
        store, runtime = repository.store, repository.runtime
        return find_pinned(store, runtime, address.scope, purpose=purpose, on_found=early.begin, **choice)

    async def restore(commit: Commit, lease: PinLease) -> Restored:
        reference = require_store(commit, address.task, address.store)
        result = await restore_store(repository, reference, target, options, progress, reading=early.reading)
        return Restored(commit=commit, result=result, pinned=lease.pinned)

    async with early:
        return await use_found(repository.store, find, restore)


async def use_found(
    store: BlobStore,
    find: Callable[[], AbstractAsyncContextManager[tuple[Commit, PinLease]]],
    use: Callable[[Commit, PinLease], Awaitable[Used]],
) -> Used:
    """Use a commit that `find` pins; one that was unprotected and taken by a collection is found again (D5).

    Raises:
        DamagedError: As `use` says, of a commit that no collection has taken, or of the third one.
        Exception: The other errors of both.
    """
    overtaken: tuple[CommitPointer, DamagedError] | None = None
    for attempt in range(CHOICES_MAX):
        async with find() as (commit, lease):
            if overtaken is not None and overtaken[0] == commit.pointer:
                raise overtaken[1]
            try:
                return await use(commit, lease)
            except DamagedError as error:
                # Only an unprotected reader may have been overtaken by a collection, and one whose pin somebody has
                # deleted; otherwise damage is damage.
                if attempt == CHOICES_MAX - 1:
                    raise
                if lease.pinned and not await is_closed_by_now(store, commit):
                    raise
                overtaken = commit.pointer, error
    raise AssertionError("unreachable: the last attempt returns or raises")


class EarlyReading:
    """The reading of an index while its commit is being pinned: used once the pin holds, else thrown away (D5).

    An index never changes, so that what is read before the pin is what would be read after it.
    """

    def __init__(self, repository: OpenRepository, address: StoreAddress, options: RestoreOptions) -> None:
        self._repository, self._address, self._options = repository, address, options
        self._given_up: list[asyncio.Task[IndexRead]] = []
        # Of the commit that was found last; None: nothing was begun.
        self.reading: asyncio.Task[IndexRead] | None = None

    def begin(self, commit: Commit) -> None:
        """Begin with the store of a commit that was found, if it has it. Not where deleted indexes are wanted too."""
        reference, repository = commit.store(self._address.task, self._address.store), self._repository
        if self.reading is not None:
            self._given_up.append(self.reading)
            self.reading.cancel()
            self.reading = None
        if reference is not None and not self._options.deleted:
            self.reading = asyncio.create_task(read_index_of(repository.store, reference, repository.pace))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await give_up(*self._given_up, *filter(None, [self.reading]))


@contextlib.asynccontextmanager
async def staged_restore(
    repository: OpenRepository, target: Path, options: TargetOptions = TargetOptions(), progress: Progress = NO_PROGRESS
) -> AsyncIterator["StagedRestore"]:
    """Claim a target, for `download` and then `publish`; what is not published is removed when the block ends.

    Arguments and errors as `restore_store`.
    """
    watch = Stopwatch(repository.runtime)
    await run_blocking(check_not_repository, repository.store, target)
    session = repository.runtime.session()
    staging = Staging(target, session, replace=options.replace, exchange=options.exchange)
    async with repository.digests.of(target) as cache:
        try:
            await run_blocking(staging.open)
            watch.end_phase("prepare")
            yield StagedRestore(
                repository=repository, staging=staging, options=options, cache=cache, progress=progress, watch=watch
            )
        finally:
            await run_blocking(staging.close)


class StagedRestore(msgspec.Struct, kw_only=True):
    """A restore that has claimed its target: download an index, then publish it, each once."""

    repository: OpenRepository
    staging: Staging
    options: TargetOptions
    cache: DigestCache
    progress: Progress
    watch: Stopwatch
    # What was downloaded, and the number of GETs that its index took.
    done: tuple[RestorePlan, Downloader, int] | None = None

    async def download(self, index: SnapshotIndex, *, requests: int) -> None:
        """Build beside the target what an index names, which took some GETs and need not be in the store as it is."""
        watch, staging, settings, pace = self.watch, self.staging, self.repository.settings, self.repository.pace
        watch.end_phase("index")
        plan = await _plan(
            self.repository, index, staging.target, self.options, self.cache if staging.replaces else None
        )
        self.progress.total(files=plan.files_count, bytes_=plan.size_bytes)
        await run_blocking(staging.prepare, plan.dirs, [file.size_bytes for file in plan.written])
        watch.end_phase("prepare")
        with ExitStack() as stack:
            source = -1
            if plan.links or plan.copies:
                with target_errors(staging.target):
                    source = stack.enter_context(opened(staging.target, DIR_FLAGS))
            downloader = Downloader(
                store=self.repository.store,
                snapshot=index.metadata,
                target=staging.target,
                root=staging.descriptor,
                source=source,
                owners=self.options.owners,
                settings=settings,
                progress=self.progress,
                budget=ByteBudget(settings.memory_bytes_max),
            )
            await downloader.download(plan)
        self.done = plan, downloader, requests
        watch.end_phase("download")
        pace.add_transfer(downloader.bytes_fetched, watch.phase_s("download"))

    async def publish(self) -> RestoreResult:
        if self.done is None:
            raise AssertionError("nothing was downloaded")
        plan, done, index_requests = self.done
        staging, watch = self.staging, self.watch
        if staging.replaces:
            await asyncio.to_thread(check_not_in_use, staging.target)
        await run_blocking(staging.publish, plan.dirs, plan.modes)
        await run_blocking(staging.close)
        await asyncio.to_thread(_remember, staging.target, done, self.cache)
        watch.end_phase("publish")
        in_index = (*plan.empty, *plan.inline)
        return RestoreResult(
            files_total=plan.files_count,
            bytes_total=plan.size_bytes,
            files_fetched=done.files_fetched,
            bytes_fetched=done.bytes_fetched,
            files_reused=done.files_reused,
            bytes_reused=done.bytes_reused,
            files_inline=len(in_index),
            bytes_inline=sum(file.size_bytes for file in in_index),
            requests=index_requests + done.requests,
            seconds=watch.total_s(),
            leftovers=tuple(staging.leftovers),
            index_seconds=watch.phase_s("index"),
            prepare_seconds=watch.phase_s("prepare"),
            publish_seconds=watch.phase_s("publish"),
        )


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse empty patterns with a `UsageError`."""
    for pattern in filter(is_empty_pattern, patterns):
        hint = "write a name or a pattern such as '*.sst'; for all files none at all"
        raise UsageError("is an empty pattern", operation="restore", subject=repr(pattern), hint=hint)


def _as_asked(repository: OpenRepository, target: Path, options: RestoreOptions) -> OpenRepository:
    """Return the repository as a restore is to read it."""
    check_patterns(options.files)
    if options.files and options.replace:
        message = "a few files would take the place of the whole directory"
        hint = "restore them to a new directory, and copy what you need"
        raise TargetError(message, operation="restore", subject=str(target), hint=hint)
    if not options.deleted:
        return repository
    if not repository.store.capabilities.keeps_deleted:
        hint = (
            "open a bucket with versions with `S3Settings(serve_deleted=True)`, as `tidemark restore --deleted` does, "
            "and the right s3:GetBucketVersioning; a directory with `StoreSettings(deleted_retention_ms=...)`"
        )
        raise CapabilityMissingError("deleted blobs are not kept here", operation="restore", hint=hint)
    return msgspec.structs.replace(repository, store=UndeletingStore(repository.store))


async def _read_chosen(
    repository: OpenRepository,
    reference: StoreReference,
    patterns: Sequence[str],
    reading: Awaitable[IndexRead] | None = None,
) -> IndexRead:
    """Read an index as `read_index_of`, and leave out of it the files that no pattern matches."""
    index, requests = await (reading or read_index_of(repository.store, reference, repository.pace))
    if not patterns:
        return index, requests
    chosen, unmatched = choose_files(index, patterns)
    if unmatched:
        subject = f"{reference.task}/{reference.store}"
        hint = "`tidemark show` lists the files; `*` matches within one directory"
        raise NotFoundError(f"no file matches {unmatched[0]!r}", operation="restore", subject=subject, hint=hint)
    return chosen, requests


async def read_index_of(store: BlobStore, reference: StoreReference, pace: Pace | None = None) -> IndexRead:
    """Read the index of a store in a commit, and count the GETs. DamagedError: it is missing, altered, or another's."""
    snapshot = await read_stored_snapshot(store, reference.index, pace)
    check_is_of(snapshot.index, reference, operation="restore")
    return snapshot.index, len(snapshot.chain)


async def _plan(
    repository: OpenRepository, index: SnapshotIndex, target: Path, options: TargetOptions, cache: DigestCache | None
) -> RestorePlan:
    """Plan a restore; of a target with content, which has a cache, files of the snapshot are reused (I2)."""
    present: dict[FilePath, LocalFile] = {}
    if cache is not None:
        stop = threading.Event()
        try:
            present = await asyncio.to_thread(_find_present, target, index, cache, stop)
        finally:
            stop.set()
    settings, pace = repository.settings, repository.pace
    gap_bytes = GAP_BYTES_FIRST
    if pace.bytes_per_s > 0 and pace.answer_s < math.inf:
        gap_bytes = choose_gap_bytes(pace.answer_s / settings.in_flight_max, pace.bytes_per_s)
    return await run_blocking(
        plan_restore,
        index,
        present,
        range_bytes=settings.range_bytes,
        owners_count=options.owners is not OwnerPolicy.IGNORE,
        gap_bytes=gap_bytes,
    )


def _find_present(
    target: Path, index: SnapshotIndex, cache: DigestCache, stop: threading.Event
) -> dict[FilePath, LocalFile]:
    check_not_in_use(target)
    try:
        candidates = [
            ((*path, file.name), file, entry)
            for path, pairs in pairs_to_identify(scan_dir(target), index.dir)
            for file, entry in pairs
        ]
        return FactReader(target, cache, stop=stop).find_present(candidates)
    except UnsafeSourceError:
        # It has entries that no backup would keep, or somebody works in it: nothing in it is to be relied on.
        return {}


def check_not_repository(store: BlobStore, target: Path) -> None:
    """Refuse, with a `TargetError`, the place of the repository, one above it and one below it."""
    check_apart(str(target), place_of(target), store.place())


def check_not_in_use(target: Path) -> None:
    """Refuse, with a `TargetError`, a directory that a RocksDB has open."""
    try:
        with target_errors(target):
            check_none_held_below(target)
    except UnsafeSourceError as error:
        hint = "close the database first"
        raise TargetError("a RocksDB has it open", operation="restore", subject=str(target), hint=hint) from error
    except RecursionError as error:
        message, hint = "nests too deep to be looked through", "remove it first"
        raise TargetError(message, operation="restore", subject=str(target), hint=hint) from error


def _remember(target: Path, done: Downloader, cache: DigestCache) -> None:
    """Remember the files that are at the target now (I2)."""
    links = {written.file.path for written in done.linked}
    with ExitStack() as resources:
        try:
            root = resources.enter_context(opened(target, DIR_FLAGS))
        except OSError:
            return  # somebody has moved it already: there is nothing to remember, and the restore is done
        for written in done.written:
            # The ctime of a linked file has changed again when the old directory with its other name was removed.
            local = stat_again(root, written) if written.file.path in links else written.local
            if local is not None:
                entry = written.file.entry
                cache.record_restored(local, Digest(entry.blake3, entry.crc32))
    cache.trim([written.local for written in done.written])


async def plan_restore_store(
    repository: OpenRepository, reference: StoreReference, target: Path, options: RestoreOptions = RestoreOptions()
) -> RestorePlan:
    """Plan what `restore_store` would do with the same arguments; what it refuses is refused in the same order.

    Only what takes writing is not found out: whether there is space, and another restore at work. Errors likewise.
    """
    repository = _as_asked(repository, target, options)
    await run_blocking(check_not_repository, repository.store, target)
    async with repository.digests.of(target) as cache:
        _, has_content = await asyncio.to_thread(look_at_target, target, replace=options.replace)
        index, _ = await _read_chosen(repository, reference, options.files)
        return await _plan(repository, index, target, options, cache if has_content else None)
