"""The restore drill: restore a whole commit, to a directory that is removed again or to nowhere, and time it."""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias, Unpack

import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import run_all, run_blocking
from engine.clock import Runtime
from engine.drill.record import Measured, RestoreDrill
from engine.errors import DamagedError, TargetError
from engine.local.hashing import ContentHasher
from engine.local.transfer import ByteBudget, HashingSink, fetch_right
from engine.progress import NO_PROGRESS, AddedProgress, Progress
from engine.records.find import Choice
from engine.records.missing import naming_complete
from engine.records.repository import OpenRepository
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of, restore_store
from engine.restore.staging import find_lack_of_space, remove_tree, target_errors
from engine.restore.write import PackReader
from engine.rocksdb.store import StoreReader, spark_settings
from engine.settings import STORES_AT_ONCE, share_among
from index.plan.commits import Commit
from index.plan.restore import FetchedRun, RestoredFile, plan_restore
from index.snapshot.keys import encode_component
from index.snapshot.model import FileBlob, Scope, StoreReference

SCRATCH_PREFIX: Final = "tidemark-restore-drill-"
_OPERATION: Final = "bench restore"
_METADATA: Final = RequestMetadata(payload_path="restore drill")
# An operator that reads any operands a store may hold; nothing is read but what an opening reads.
_OPENING: Final = spark_settings(merge_delimiter=b",")

# A range of a pack, or a blob of a file.
_Job: TypeAlias = FetchedRun | tuple[RestoredFile, FileBlob]


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

    Requests: as a restore of each store. `choice` says which commit of the scope, as for `Repository.find`.

    Raises:
        NotFoundError: No commit fits.
        TargetError: The scratch directory does not exist, cannot be used, or has too little space.
        DamagedError: Something is missing or altered, or a RocksDB does not open. If the fresh directory could not be
            removed, a note names it.
        StoreError: As the store says.
    """
    runtime = runtime or Runtime()
    began_at_ms, began_s = runtime.local_now_ms(), runtime.monotonic_s()
    find = repository.find_pinned(scope, purpose="restore drill", **choice)
    async with naming_complete(repository.store, lambda: repository.commits(scope)), find as (commit, lease):
        find_s = runtime.monotonic_s() - began_s
        stores = commit.record.stores
        at_once, settings = share_among(repository.settings, max(1, min(options.stores_at_once, len(stores))))
        async with _scratch_directory(options, commit, runtime) as directory:
            opened = repository.opened.without_digests(settings)
            drill = _Drill(repository=opened, directory=directory, progress=AddedProgress(progress))
            progress.total(files=sum(s.files_count for s in stores), bytes_=sum(s.size_bytes for s in stores))
            with repository.missing_blobs.recording():
                began_s = runtime.monotonic_s()
                await run_all(drill.restore, stores, in_flight_max=at_once)
                restore_s = runtime.monotonic_s() - began_s
                databases = await run_blocking(_rocksdb_dirs, directory) if directory is not None else []
                began_s = runtime.monotonic_s()
                await run_all(_open_and_close, databases, in_flight_max=at_once)
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
            requests_count=drill.requests, bytes_fetched=drill.bytes_fetched, opened_count=len(databases)
        ),
        slo_ms=options.slo_ms,
    )


class _Drill(msgspec.Struct, kw_only=True):
    repository: OpenRepository
    # None: to nowhere.
    directory: Path | None
    progress: Progress
    # GETs of indexes and of blobs, and the bytes of these.
    requests: int = 0
    bytes_fetched: int = 0

    async def restore(self, reference: StoreReference) -> None:
        if self.directory is None:
            await self._restore_to_nowhere(reference)
            return
        # Names of tasks and stores come from the store.
        target = self.directory / encode_component(reference.task) / encode_component(reference.store)
        result = await restore_store(self.repository, reference, target, progress=self.progress)
        self.requests += result.requests
        self.bytes_fetched += result.bytes_fetched

    async def _restore_to_nowhere(self, reference: StoreReference) -> None:
        """Read and hash all that a restore to an empty directory would fetch, by the same plan (design 0009, R4)."""
        store, settings = self.repository.store.tagged(_METADATA), self.repository.settings
        index, requests = await read_index_of(self.repository.store, reference)
        self.requests += requests
        plan = plan_restore(index, {}, range_bytes=settings.range_bytes, owners_count=False)
        budget = ByteBudget(settings.memory_bytes_max)

        async def fetch(job: _Job) -> None:
            ranged = job if isinstance(job, FetchedRun) else job[1]

            async def is_right(*, fresh: bool) -> bool:
                self.requests += 1
                self.bytes_fetched += ranged.size_bytes
                return await _is_right(store, job, fresh=fresh)

            async with budget.hold(2 * settings.chunk_bytes):
                await fetch_right(
                    is_right, lambda reason: DamagedError(reason, operation=_OPERATION, subject=ranged.key)
                )
            if isinstance(job, FetchedRun):
                self.progress.add(files=len(job.files), bytes_=sum(file.size_bytes for file in job.files))
            else:
                self.progress.add(bytes_=ranged.size_bytes)

        blobs = ((file, blob) for file in plan.streams for blob in file.entry.blobs)
        jobs: Iterator[_Job] = itertools.chain(plan.runs, blobs)
        await run_all(fetch, jobs, in_flight_max=settings.in_flight_max)
        in_index = (*plan.empty, *plan.inline)
        self.progress.add(files=len(in_index) + len(plan.streams), bytes_=sum(file.size_bytes for file in in_index))


async def _is_right(store: BlobStore, job: _Job, *, fresh: bool) -> bool:
    if isinstance(job, FetchedRun):
        files = PackReader(job, job.files)
        await store.read_into(job.key, files, start=job.start, size_bytes=job.size_bytes, fresh=fresh)
        return not files.wrong
    file, blob = job
    hasher = ContentHasher()
    sink, start = HashingSink(hasher), blob.blob_offset_bytes
    await store.read_into(blob.key, sink, start=start, size_bytes=blob.size_bytes, fresh=fresh)
    # The hash of a file's only blob is the file's.
    return hasher.blake3 == (blob.blake3 or file.entry.blake3)


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
    """Make a directory with space for a commit, and remove it at the end unless all went well and it is kept."""
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
    stores = commit.record.stores
    size_bytes, files_count = sum(s.size_bytes for s in stores), sum(s.files_count for s in stores)
    if lack := find_lack_of_space(directory, size_bytes, files_count):
        raise TargetError(
            f"too little space: {lack}",
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
