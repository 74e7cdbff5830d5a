"""The restore drill: restore a whole commit, to a directory that is removed again or to nowhere, and time it."""

import os
from pathlib import Path
from typing import Final, Unpack

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.release import installed_release
from engine.clock import Runtime, SystemRuntime
from engine.drill.model import Measured, Rehearsal
from engine.drill.nowhere import Fetched, restore_to_nowhere
from engine.drill.scratch import scratch_directory
from engine.local.cache import DigestCache
from engine.progress import NO_PROGRESS, Progress
from engine.records.missing import naming_complete
from engine.repository.reading import Choice, ReadingRepository
from engine.restore.restore import restore_store
from engine.rocksdb.store import StoreReader, spark_settings
from engine.settings import STORES_AT_ONCE, TransferSettings, share_among
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference

# An operator that reads whatever operands a store holds; nothing is read but what an opening reads.
_OPENING: Final = spark_settings(merge_delimiter=b",")


async def rehearse(
    repository: ReadingRepository,
    scope: Scope,
    *,
    scratch: Path | None,
    keep: bool = False,
    stores_at_once: int = STORES_AT_ONCE,
    slo_ms: int | None = None,
    runtime: Runtime | None = None,
    progress: Progress = NO_PROGRESS,
    **choice: Unpack[Choice],
) -> Rehearsal:
    """Restore all stores of a commit to a scratch directory or to nowhere, open what is RocksDB, and measure the time.

    Requests: as a restore of each store.

    Args:
        repository: Where from.
        scope: Whose commit; `choice` says which, as for `Repository.find`.
        scratch: A directory that is there. A fresh one is made in it, which it has room for, and removed at the end,
            also after an error; if it does not go, a note on the error names it. None: everything is read and hashed,
            and nothing is written or opened.
        keep: Leave the fresh directory where it is. RocksDB was open in it: it is not byte for byte what was backed up.
        stores_at_once: So many stores share the requests and the memory of `repository.settings`, as on an executor.
        slo_ms: What it may take; nothing but noted.
        runtime: Clock and random numbers.
        progress: Told what there is to do and what is done.

    Returns:
        What was measured.

    Raises:
        NotFoundError: No commit fits.
        TargetError: The scratch directory is not there, cannot be used, or has no room.
        DamagedError: Something is missing or altered, or a RocksDB does not open.
        StoreError: As the store says.
    """
    runtime = runtime or SystemRuntime()
    began_at_ms, began_s = runtime.local_now_ms(), runtime.monotonic_s()
    find = repository.find_pinned(scope, purpose="rehearse a restore", **choice)
    async with naming_complete(repository.store, lambda: repository.commits(scope)), find as (commit, lease):
        find_s = runtime.monotonic_s() - began_s
        stores = commit.record.stores
        at_once, settings = share_among(repository.settings, max(1, min(stores_at_once, len(stores))))
        async with scratch_directory(scratch, commit, runtime, keep=keep) as directory:
            drill = _Drill(repository.store, directory, settings, runtime, _Adding(progress))
            progress.total(files=sum(s.files_count for s in stores), bytes_=sum(s.size_bytes for s in stores))
            with repository.missing_blobs.recording():
                began_s = runtime.monotonic_s()
                done = await map_bounded(drill.restore, stores, in_flight_max=at_once)
                restore_s = runtime.monotonic_s() - began_s
                databases = await run_blocking(_rocksdb_dirs, directory) if directory is not None else []
                began_s = runtime.monotonic_s()
                await map_bounded(_open_and_close, databases, in_flight_max=at_once)
                open_s = runtime.monotonic_s() - began_s if databases else 0.0
    return Rehearsal(
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
            requests_count=sum(one.requests for one in done),
            bytes_fetched=sum(one.bytes_fetched for one in done),
            opened_count=len(databases),
        ),
        slo_ms=slo_ms,
    )


class _Drill(msgspec.Struct, frozen=True):
    """Where stores are restored from and to."""

    store: BlobStore
    # None: to nowhere.
    directory: Path | None
    settings: TransferSettings
    runtime: Runtime
    progress: Progress

    async def restore(self, reference: StoreReference) -> Fetched:
        """Bring back one store."""
        if self.directory is None:
            return await restore_to_nowhere(self.store, reference, settings=self.settings, progress=self.progress)
        result = await restore_store(
            self.store,
            reference=reference,
            target=_target(self.directory, reference),
            settings=self.settings,
            runtime=self.runtime,
            cache=DigestCache(),
            progress=self.progress,
        )
        return Fetched(requests=result.requests, bytes_fetched=result.bytes_fetched)


def _target(directory: Path, reference: StoreReference) -> Path:
    """Where a store goes. Names of tasks and stores are made safe as in keys: they come from the store."""
    return directory / encode_component(reference.task) / encode_component(reference.store)


def _rocksdb_dirs(directory: Path) -> list[Path]:
    return [
        Path(path)
        for path, _, names in os.walk(directory)
        if "CURRENT" in names and any(name.startswith("MANIFEST-") for name in names)
    ]


async def _open_and_close(directory: Path) -> None:
    """Open a store in raw mode, for reading only, and close it."""

    def open_and_close() -> None:
        with StoreReader.open(directory, _OPENING):
            pass

    await run_blocking(open_and_close)


class _Adding:
    """Progress of one of several restores: what there is to do was told before."""

    def __init__(self, whole: Progress) -> None:
        self._whole = whole

    def total(self, *, files: int, bytes_: int) -> None:
        """Known already."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        self._whole.add(files=files, bytes_=bytes_)
