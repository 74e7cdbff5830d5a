"""The restore drill: restore a whole commit, to a directory that is removed again or to nowhere, and time it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Unpack

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.release import installed_release
from engine.clock import Runtime, SystemRuntime
from engine.drill.nowhere import Fetched, restore_to_nowhere
from engine.drill.record import Measured, RestoreDrill
from engine.errors import TargetError
from engine.progress import NO_PROGRESS, Progress
from engine.records.find import Choice
from engine.records.missing import naming_complete
from engine.records.repository import OpenRepository
from engine.repository.repository import Repository
from engine.restore.restore import restore_store
from engine.restore.staging import remove_tree, target_errors
from engine.rocksdb.store import StoreReader, spark_settings
from engine.settings import STORES_AT_ONCE, share_among
from index.plan.commits import Commit
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference

SCRATCH_PREFIX: Final = "tidemark-restore-drill-"
_OPERATION: Final = "bench restore"
# An operator that reads any operands a store may hold; nothing is read but what an opening reads.
_OPENING: Final = spark_settings(merge_delimiter=b",")


class DrillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a restore drill."""

    # A directory that exists. A fresh one is made in it, with enough space, and removed at the end, also after an
    # error. None: everything is read and hashed, and nothing is written or opened.
    scratch: Path | None
    # Leave the fresh directory. RocksDB was open in it: it is not byte for byte what was backed up.
    keep: bool = False
    # This number of stores share the requests and the memory of `repository.settings`, as on an executor.
    stores_at_once: int = STORES_AT_ONCE
    # Noted in the result.
    slo_ms: int | None = None


async def run_restore_drill(
    repository: Repository,
    scope: Scope,
    options: DrillOptions,
    *,
    runtime: Runtime | None = None,
    progress: Progress = NO_PROGRESS,
    **choice: Unpack[Choice],
) -> RestoreDrill:
    """Restore all stores of a commit to a scratch directory or to nowhere, open those of RocksDB, and time it.

    Requests: as a restore of each store.

    Args:
        repository: Where from.
        scope: Whose commit; `choice` says which, as for `Repository.find`.
        options: Where to, and how.
        runtime: Clock and random numbers.
        progress: Hears of files and bytes.

    Raises:
        NotFoundError: No commit fits.
        TargetError: The scratch directory does not exist, cannot be used, or has too little space.
        DamagedError: Something is missing or altered, or a RocksDB does not open. If the fresh directory could not be
            removed, a note names it.
        StoreError: As the store says.
    """
    runtime = runtime or SystemRuntime()
    began_at_ms, began_s = runtime.local_now_ms(), runtime.monotonic_s()
    find = repository.find_pinned(scope, purpose="restore drill", **choice)
    async with naming_complete(repository.store, lambda: repository.commits(scope)), find as (commit, lease):
        find_s = runtime.monotonic_s() - began_s
        stores = commit.record.stores
        at_once, settings = share_among(repository.settings, max(1, min(options.stores_at_once, len(stores))))
        async with _scratch_directory(options, commit, runtime) as directory:
            drill = _Drill(repository.opened.without_digests(settings), directory, _AddOnly(progress))
            progress.total(files=sum(s.files_count for s in stores), bytes_=sum(s.size_bytes for s in stores))
            with repository.missing_blobs.recording():
                began_s = runtime.monotonic_s()
                fetched = await map_bounded(drill.restore, stores, in_flight_max=at_once)
                restore_s = runtime.monotonic_s() - began_s
                databases = await run_blocking(_rocksdb_dirs, directory) if directory is not None else []
                began_s = runtime.monotonic_s()
                await map_bounded(_open_and_close, databases, in_flight_max=at_once)
                open_s = runtime.monotonic_s() - began_s if databases else 0.0
    return RestoreDrill(
        began_at_ms=began_at_ms,
        release=installed_release(),
        repository_id=repository.record.id,
        job=scope.job,
        task=scope.task,
        commit_number=commit.pointer.number,
        version=commit.record.version,
        pinned=lease.pinned,
        to_disk=directory is not None,
        kept_at=str(directory) if directory is not None and await run_blocking(directory.exists) else "",
        stores_at_once=at_once,
        stores_count=len(stores),
        files_count=sum(store.files_count for store in stores),
        size_bytes=sum(store.size_bytes for store in stores),
        largest_store_bytes=max((store.size_bytes for store in stores), default=0),
        find_s=find_s,
        restore_s=restore_s,
        open_s=open_s,
        measured=Measured(
            requests_count=sum(one.requests for one in fetched),
            bytes_fetched=sum(one.bytes_fetched for one in fetched),
            opened_count=len(databases),
        ),
        slo_ms=options.slo_ms,
    )


class _Drill(msgspec.Struct, frozen=True):
    repository: OpenRepository
    # None: to nowhere.
    directory: Path | None
    progress: Progress

    async def restore(self, reference: StoreReference) -> Fetched:
        if self.directory is None:
            store, settings = self.repository.store, self.repository.settings
            return await restore_to_nowhere(store, reference, settings=settings, progress=self.progress)
        # Names of tasks and stores come from the store.
        target = self.directory / encode_component(reference.task) / encode_component(reference.store)
        result = await restore_store(self.repository, reference, target, progress=self.progress)
        return Fetched(requests=result.requests, bytes_fetched=result.bytes_fetched)


class _AddOnly:
    """Progress of one of several restores, whose total is known already."""

    def __init__(self, whole: Progress) -> None:
        self.add = whole.add

    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""


def _rocksdb_dirs(directory: Path) -> list[Path]:
    return [
        Path(path)
        for path, _, names in os.walk(directory)
        if "CURRENT" in names and any(name.startswith("MANIFEST-") for name in names)
    ]


async def _open_and_close(directory: Path) -> None:
    def open_and_close() -> None:
        with StoreReader.open(directory, _OPENING):
            pass

    await run_blocking(open_and_close)


# ---------------------------------------------------------------------- the fresh directory (design 0009, R2)


@asynccontextmanager
async def _scratch_directory(options: DrillOptions, commit: Commit, runtime: Runtime) -> AsyncIterator[Path | None]:
    """Make a directory with space for a commit, and remove it at the end unless all went well and it is kept.

    Raises:
        TargetError: The scratch directory does not exist, cannot be used, or has too little space.
    """
    if options.scratch is None:
        yield None
        return
    directory = await run_blocking(options.scratch.absolute) / f"{SCRATCH_PREFIX}{runtime.session()}"
    try:
        with target_errors(directory):
            await run_blocking(_make_with_space, directory, commit)
        yield directory
    except BaseException as error:
        if reason := await run_blocking(remove_scratch, directory):
            error.add_note(f"could not be removed: {directory}: {reason}")
        raise
    if not options.keep:
        await run_blocking(remove_scratch, directory)


def _make_with_space(directory: Path, commit: Commit) -> None:
    # Never made: where a disk is not mounted, what is measured would be the disk of the root.
    if not directory.parent.is_dir():
        raise TargetError(
            "there is no such directory",
            operation=_OPERATION,
            subject=str(directory.parent),
            hint="see that its disk is mounted, or make it; or choose another one with --to",
        )
    directory.mkdir(mode=0o700)
    space = os.statvfs(directory)
    size_bytes = sum(store.size_bytes for store in commit.record.stores)
    files_count = sum(store.files_count for store in commit.record.stores)
    # A file takes whole blocks: half a block more on average.
    needed_bytes = size_bytes + files_count * space.f_frsize // 2
    free_bytes = space.f_bavail * space.f_frsize
    if needed_bytes > free_bytes:
        raise TargetError(
            f"too little space: needs {needed_bytes:,} bytes and {free_bytes:,} are free",
            operation=_OPERATION,
            subject=str(directory.parent),
            hint="choose another disk with --to, or run the drill with --to-nowhere",
        )


def remove_scratch(directory: Path) -> str:
    """Remove as much of a directory as possible; return why the rest stays, empty if all is gone."""
    remove_tree(directory, ignore_errors=True)
    try:
        # Once more, of what is left: now the first error is reported.
        remove_tree(directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""
