"""Bringing one snapshot back into a directory: whole, verified and synced, or not at all.

`plan_restore_store` takes the same look at snapshot and target, and writes nothing.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import run_blocking
from engine.clock import Runtime
from engine.errors import DamagedError, NotFoundError, TargetError, UnsafeSourceError, UsageError
from engine.local.cache import DigestCache
from engine.local.hashing import Digest
from engine.local.identify import find_present
from engine.local.scan import DIR_FLAGS, scan_dir
from engine.progress import NO_PROGRESS, Progress
from engine.records.indexes import IndexCache, read_stored_snapshot
from engine.restore.download import Downloaded, Downloader
from engine.restore.staging import Staging, look_at_target, target_errors
from engine.restore.write import OwnerPolicy, stat_again
from engine.rocksdb.lock import check_none_held_below
from engine.settings import TransferSettings
from index.display import DisplayMixin, format_files, format_seconds, format_texts
from index.plan.restore import RestorePlan, choose_candidates, plan_restore
from index.snapshot.contents import choose_files, is_empty_pattern
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FilePath, SnapshotIndex
from index.snapshot.records import StoreReference

__all__ = ["OwnerPolicy", "RestoreResult", "plan_restore_store", "read_index_of", "restore_index", "restore_store"]

# An index, and how many GETs it took.
ReadIndex = tuple[SnapshotIndex, int]


class RestoreResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a restore did."""

    files_total: int
    bytes_total: int
    # From the store; bytes as asked for, dead bytes of packs and second fetches included.
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
    # Of `seconds`: reading the index, finding out what is there already and making room, and from the last byte on,
    # syncing the directories and renaming them into place.
    index_seconds: float = 0.0
    prepare_seconds: float = 0.0
    publish_seconds: float = 0.0

    @override
    def figures(self) -> dict[str, str]:
        """How much came back, and where it came from."""
        told = {
            "files": format_files(self.files_total, self.bytes_total),
            "fetched": format_files(self.files_fetched, self.bytes_fetched),
            "reused": format_files(self.files_reused, self.bytes_reused),
            "from the index": format_files(self.files_inline, self.bytes_inline),
            "requests": f"{self.requests:,}",
            "time": format_seconds(self.seconds),
            "could not be removed": format_texts(self.leftovers),
        }
        return {name: text for name, text in told.items() if text}


async def restore_store(
    store: BlobStore,
    *,
    reference: StoreReference,
    target: Path,
    settings: TransferSettings,
    runtime: Runtime,
    cache: DigestCache,
    owners: OwnerPolicy = OwnerPolicy.IGNORE,
    replace: bool = False,
    files: Sequence[str] = (),
    progress: Progress = NO_PROGRESS,
    unless: Callable[[], Awaitable[None]] | None = None,
    indexes: IndexCache | None = None,
) -> RestoreResult:
    """Restore a snapshot to a directory.

    Requests: one GET for the index (one more per delta that it is told by), then one per blob or range of a pack.

    Args:
        store: Where from.
        reference: The snapshot.
        target: Absent, an empty directory, or with `replace` any directory.
        settings: Limits and sizes.
        runtime: Clock and randomness.
        cache: What earlier restores wrote, where a stat is trusted (I2); told what this one writes.
        owners: What to do about recorded owners.
        replace: Whether a directory with content may be replaced. Its files are reused where they are the right ones.
        files: Patterns, as of `index.snapshot.contents`: only files that one of them matches are restored.
            None: all.
        progress: Told what there is to do and what is done.
        unless: Awaited last, before the target is touched; raises if the restore is not wanted any more.
        indexes: Indexes that this process knows already.

    Returns:
        What was done. On any error, and if this is cancelled, the target is what it was, or complete.

    Raises:
        TargetError: The target is no directory, has content that may not be replaced, is in use, or there is no room;
            or `replace` would put a few files into the place of a whole directory.
        UsageError: One of the patterns is empty.
        NotFoundError: One of the patterns matches no file.
        DamagedError: The index or a blob is missing or altered. The cause is a `BlobNotFoundError` if it is missing.
        StoreError: As the store says.
    """
    check_patterns(files)
    refuse_few_files(target, files, replace=replace)

    async def choose() -> ReadIndex:
        index, requests = await read_index_of(store, reference, indexes)
        return choose_or_refuse(index, files, reference), requests

    return await restore_index(
        store,
        choose=choose,
        target=target,
        settings=settings,
        runtime=runtime,
        cache=cache,
        owners=owners,
        replace=replace,
        progress=progress,
        unless=unless,
    )


async def restore_index(
    store: BlobStore,
    *,
    choose: Callable[[], Awaitable[ReadIndex]],
    target: Path,
    settings: TransferSettings,
    runtime: Runtime,
    cache: DigestCache,
    owners: OwnerPolicy = OwnerPolicy.IGNORE,
    replace: bool = False,
    progress: Progress = NO_PROGRESS,
    unless: Callable[[], Awaitable[None]] | None = None,
) -> RestoreResult:
    """Restore what an index names, which need not stand in the store as it is.

    Args:
        choose: Awaited once the target is known to be usable: the index, and how many GETs that took.

    Returns:
        As `restore_store`, as are all other arguments and the errors.
    """
    begun_s = runtime.monotonic_s()
    staging = Staging(target, runtime.session(), replace=replace)
    try:
        await run_blocking(staging.open)
        opened_s = runtime.monotonic_s()
        index, requests = await choose()
        indexed_s = runtime.monotonic_s()
        present = await find_present_below(staging.target, index, cache) if staging.replaces else {}
        plan = await run_blocking(
            plan_restore,
            index,
            present,
            range_bytes=settings.range_bytes,
            owners_count=owners is not OwnerPolicy.IGNORE,
        )
        progress.total(files=plan.files_count, bytes_=plan.size_bytes)
        await run_blocking(_prepare, staging, plan)
        prepared_s = runtime.monotonic_s()
        done = await _download(store, index, plan, staging, settings=settings, owners=owners, progress=progress)
        fetched_s = runtime.monotonic_s()
        if unless is not None:
            await unless()
        if staging.replaces:
            await asyncio.to_thread(_check_not_in_use, staging.target)
        await run_blocking(staging.publish, plan.dirs, plan.modes)
    finally:
        await run_blocking(staging.close)
    await asyncio.to_thread(_remember, staging.target, done, cache)
    done_s = runtime.monotonic_s()
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
        requests=requests + done.requests,
        seconds=done_s - begun_s,
        leftovers=tuple(staging.leftovers),
        index_seconds=indexed_s - opened_s,
        prepare_seconds=prepared_s - indexed_s + opened_s - begun_s,
        publish_seconds=done_s - fetched_s,
    )


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse patterns that are none.

    Raises:
        UsageError: One of them is empty.
    """
    for pattern in patterns:
        if is_empty_pattern(pattern):
            raise UsageError(
                "is an empty pattern",
                operation="restore",
                subject=repr(pattern),
                hint="write a name or a pattern such as '*.sst'; for all files none at all",
            )


def refuse_few_files(target: Path, patterns: Sequence[str], *, replace: bool) -> None:
    """Refuse to put a few files into the place of a whole directory.

    Raises:
        TargetError: There are patterns, and the target may be replaced.
    """
    if patterns and replace:
        raise TargetError(
            "a few files would take the place of the whole directory",
            operation="restore",
            subject=str(target),
            hint="restore them to a new directory, and copy what you need",
        )


def choose_or_refuse(index: SnapshotIndex, patterns: Sequence[str], reference: StoreReference) -> SnapshotIndex:
    """The files of a snapshot that patterns match; without patterns, all.

    Raises:
        NotFoundError: One of the patterns matches none.
    """
    if not patterns:
        return index
    chosen, unmatched = choose_files(index, patterns)
    if unmatched:
        raise NotFoundError(
            f"no file matches {unmatched[0]!r}",
            operation="restore",
            subject=f"{reference.task}/{reference.store}",
            hint="`tidemark show` lists the files; `*` matches within one directory",
        )
    return chosen


async def read_index_of(store: BlobStore, reference: StoreReference, indexes: IndexCache | None = None) -> ReadIndex:
    """The index of a store in a commit, and how many GETs it took.

    Raises:
        DamagedError: It is missing or altered, or is another one's.
        StoreError: As the store says.
    """
    known = indexes.find(reference.index) if indexes is not None else None
    snapshot = known or await read_stored_snapshot(store, reference.index)
    if snapshot.index.metadata.unique_id != reference.unique_id:
        raise DamagedError(
            f"is of {snapshot.index.metadata.unique_id}, not of {reference.unique_id}",
            operation="restore",
            subject=reference.index.key,
        )
    return snapshot.index, 0 if known is not None else len(snapshot.chain)


async def find_present_below(target: Path, index: SnapshotIndex, cache: DigestCache) -> dict[FilePath, LocalFile]:
    """Find the files of a directory that are files of the snapshot (I2).

    Raises:
        TargetError: A RocksDB has it or one below it open, or it cannot be read.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_look_below, target, index, cache, stop)
    finally:
        stop.set()


def _look_below(
    target: Path, index: SnapshotIndex, cache: DigestCache, stop: threading.Event
) -> dict[FilePath, LocalFile]:
    _check_not_in_use(target)
    try:
        local = scan_dir(target)
        return find_present(target, choose_candidates(index, local), cache, stop=stop)
    except UnsafeSourceError:
        # It has entries that no backup would keep, or somebody works in it: nothing in it is to be relied on.
        return {}


def _check_not_in_use(target: Path) -> None:
    try:
        with target_errors(target):
            check_none_held_below(target)
    except UnsafeSourceError as error:
        raise TargetError(
            "a RocksDB has it open", operation="restore", subject=str(target), hint="close the database first"
        ) from error


def _prepare(staging: Staging, plan: RestorePlan) -> None:
    written = tuple(plan.written)
    staging.check_room(size_bytes=sum(file.size_bytes for file in written), files_count=len(written))
    staging.make_dirs(plan.dirs)


async def _download(
    store: BlobStore,
    index: SnapshotIndex,
    plan: RestorePlan,
    staging: Staging,
    *,
    settings: TransferSettings,
    owners: OwnerPolicy,
    progress: Progress,
) -> Downloaded:
    source = -1
    with target_errors(staging.target):
        if plan.links or plan.copies:
            source = os.open(staging.target, DIR_FLAGS)
    try:
        downloader = Downloader(
            store,
            index.metadata,
            target=staging.target,
            root=staging.descriptor,
            source=source,
            settings=settings,
            owners=owners,
            progress=progress,
        )
        return await downloader.download(plan)
    finally:
        if source >= 0:
            os.close(source)


def _remember(target: Path, done: Downloaded, cache: DigestCache) -> None:
    """Tell the cache what stands at the target now (I2)."""
    links = {written.file.path for written in done.links}
    try:
        root = os.open(target, DIR_FLAGS)
    except OSError:
        return  # somebody has moved it already: there is nothing to remember, and the restore is done
    try:
        for written in done.files:
            # The ctime of a linked file has changed again when the old directory with its other name was removed.
            local = stat_again(root, written) if written.file.path in links else written.local
            if local is not None:
                entry = written.file.entry
                cache.record_restored(local, Digest(entry.blake3, entry.crc32))
    finally:
        os.close(root)
    cache.trim([written.local for written in done.files])


async def plan_restore_store(
    store: BlobStore,
    *,
    reference: StoreReference,
    target: Path,
    settings: TransferSettings,
    cache: DigestCache,
    owners: OwnerPolicy = OwnerPolicy.IGNORE,
    replace: bool = False,
    files: Sequence[str] = (),
) -> RestorePlan:
    """The plan of `restore_store` with the same arguments; what it refuses is refused in the same order.

    Only what takes writing is not found out: whether there is room, and another restore at work.

    Raises:
        TargetError: The target is no directory, has content that may not be replaced, or a RocksDB has it open; or
            `replace` would put a few files into the place of a whole directory.
        UsageError: One of the patterns is empty.
        NotFoundError: One of the patterns matches no file.
        DamagedError: The index is missing or altered.
        StoreError: As the store says.
    """
    check_patterns(files)
    refuse_few_files(target, files, replace=replace)
    _, has_content = await asyncio.to_thread(look_at_target, target, replace=replace)
    index, _ = await read_index_of(store, reference)
    index = choose_or_refuse(index, files, reference)
    present = await find_present_below(target, index, cache) if has_content else {}
    return plan_restore(index, present, range_bytes=settings.range_bytes, owners_count=owners is not OwnerPolicy.IGNORE)
