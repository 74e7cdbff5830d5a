"""Restore one state store of a backup as one version of it (design 0005, R2, R6 and R7).

Replayed, it becomes one snapshot of the version, as Spark itself would load it before the first row: the base is
fetched into a working directory, the changelogs are applied, and RocksDB's files become the directory of the store.
SSTs that the replay left alone keep their names and bytes; they are moved, not copied.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.local.files import flush
from engine.checkpoint.targets import dirs_below
from engine.clock import Runtime
from engine.local.hashing import crc32c
from engine.progress import NO_PROGRESS, Progress
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of
from engine.restore.staging import Staging, target_errors
from engine.settings import TransferSettings
from engine.state.changelogs import CREATOR
from engine.state.files import CapturedSnapshot, StateFileManager, named_metadata
from engine.state.load import StateLoader
from engine.state.loaded import LoadedState
from engine.state.local_files import WorkingDir, local_path, shared_path
from engine.state.query import StoreAt
from engine.state.restore import StateRestoreOptions, restore_state
from engine.state.settings import StateStoreSettings
from engine.state.sources import IndexStateFiles
from engine.state.zips import build_state_zip
from index.snapshot.contents import files_of
from index.snapshot.model import FileIndex, FilePath
from index.snapshot.records import StoreReference
from index.spark.checkpoint import StoreId
from index.spark.checksums import FileChecksum, encode_file_checksum
from index.spark.lineage import Resolution, target_in_index
from index.spark.names import changelog_name, checksum_name, snapshot_name
from index.spark.retention import SCHEMA_PATH

_FILE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE: Final = 0o666


class StoreToRestore(msgspec.Struct, frozen=True, kw_only=True):
    """One store, the version to bring back, and where the backup has it."""

    store: StoreAt
    reference: StoreReference
    # Whether its changelogs are to be applied here (R7).
    replayed: bool = False

    @property
    def id(self) -> StoreId:
        """Which store."""
        return self.store.id


class StoreRestored(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one store."""

    id: StoreId
    files: int
    size_bytes: int
    # From the repository.
    bytes_fetched: int
    requests: int
    # What was replayed.
    changelogs: int = 0
    records: int = 0
    # What was published to an object store already, as paths of the checkpoint.
    published: tuple[str, ...] = ()


async def restore_store(
    repository: Repository,
    work: StoreToRestore,
    target: Path,
    *,
    transfer: TransferSettings,
    runtime: Runtime,
    replace: bool = False,
    progress: Progress = NO_PROGRESS,
) -> StoreRestored:
    """Restore a store to a directory of this machine, whole or not at all.

    Args:
        repository: Where from; the caller holds a pin.
        work: Which store and version.
        target: Absent or empty, or with `replace` any directory.
        transfer: Limits and sizes for this store.
        runtime: Clock and random numbers.
        replace: Whether content of the target may be deleted: an earlier attempt has left it.
        progress: Receives files and bytes.

    Raises:
        DamagedError, FormatError: Something is missing or altered; the error names the file, and the blob.
        TargetError: The target cannot be used.
        StoreError: As the store says. After any error the target is as it was.
    """
    if work.replayed:
        found = await _replayed(repository, work, target, transfer, runtime, replace=replace, progress=progress)
        if found is not None:
            return found
    options = StateRestoreOptions(
        version=work.store.at.version,
        unique_id=work.store.at.unique_id,
        codec=work.store.settings.codec,
        replace=replace,
    )
    opened = repository.opened.without_digests(transfer)
    restored = await restore_state(opened, work.reference, target, options, progress)
    result = restored.result
    return StoreRestored(
        id=work.id,
        files=result.files_total,
        size_bytes=result.bytes_total,
        bytes_fetched=result.bytes_fetched,
        requests=result.requests,
    )


async def _replayed(
    repository: Repository,
    work: StoreToRestore,
    target: Path,
    transfer: TransferSettings,
    runtime: Runtime,
    *,
    replace: bool,
    progress: Progress,
) -> StoreRestored | None:
    """Restore as `restore_store` does, with changelogs applied; None if there are none to apply."""
    index, requests = await read_index_of(repository.store, work.reference)
    files = IndexStateFiles(repository.store, index, transfer)
    settings = msgspec.structs.replace(work.store.settings, fetches_max=transfer.in_flight_max)
    at = work.store.at
    unique_id = None if at.unique_id is None else target_in_index(at.version, at.unique_id, index)
    resolution = await StateFileManager(files, StateStoreSettings(codec=settings.codec)).resolve(at.version, unique_id)
    if not resolution.changelogs:
        return None
    staging = Staging(target, runtime.session(), replace=replace)
    try:
        await run_blocking(staging.open)
        made = await replay_store(
            files,
            resolution,
            settings,
            working=staging.directory.with_name("working"),
            target=staging.directory,
            runtime=runtime,
        )
        await run_blocking(lambda: staging.publish(dirs_below(staging.directory), {}))
    finally:
        await run_blocking(staging.close)
    progress.add(files=made.files, bytes_=made.size_bytes)
    return StoreRestored(
        id=work.id,
        files=made.files,
        size_bytes=made.size_bytes,
        bytes_fetched=made.bytes_fetched,
        requests=requests + files.requests,
        changelogs=made.changelogs,
        records=made.records,
    )


class ReplayedStore(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a replay made, and what it cost."""

    files: int
    size_bytes: int
    # From the repository.
    bytes_fetched: int
    changelogs: int
    records: int


async def replay_store(
    files: IndexStateFiles,
    resolution: Resolution,
    settings: StateStoreSettings,
    *,
    working: Path,
    target: Path,
    runtime: Runtime,
) -> ReplayedStore:
    """Build the directory of a store that holds one snapshot of a version, and nothing else but the schema of its rows.

    Args:
        files: The store's files in the repository; protected by the caller.
        resolution: What the version is made of.
        settings: Of the store.
        working: Where RocksDB works; made, and left to the caller to remove.
        target: An empty directory on the same file system.
        runtime: Ids, and the time that a checksum says.

    Raises:
        DamagedError, FormatError: What the version takes is missing or damaged; the error names it.
        TargetError: A directory cannot be written.
        StoreError: As the store says.
    """
    # A backup has one base: there is nothing to repair it with, and damage has to be reported.
    settings = msgspec.structs.replace(settings, snapshot_repair=False)
    manager = StateFileManager(files, settings)
    schema = await files.read("/".join(SCHEMA_PATH)) if SCHEMA_PATH in dict(files_of(files.index.dir)) else None
    place = await run_blocking(WorkingDir.open, working)
    try:
        loader = StateLoader(manager, place, runtime)
        loaded, metrics = await loader.load(resolution.target, {}, read_only=True)
        try:
            captured = await run_blocking(_capture, manager, place, loaded)
        finally:
            await run_blocking(loaded.db.close)
        builder = _Builder(target, files, resolution, runtime, file_checksums=settings.file_checksums)
        with target_errors(target):
            await run_blocking(builder.build, captured, schema)
    finally:
        await run_blocking(place.close)
    return ReplayedStore(
        files=builder.files,
        size_bytes=builder.size_bytes,
        bytes_fetched=metrics.bytes_fetched + builder.read_bytes,
        changelogs=metrics.changelogs,
        records=metrics.records,
    )


def _capture(manager: StateFileManager, place: WorkingDir, loaded: LoadedState) -> CapturedSnapshot:
    """Make what a commit of this version would upload."""
    directory = place.new_captured()
    loaded.write_operands()
    loaded.db.flush()
    loaded.db.checkpoint(directory)
    return manager.capture(directory, loaded.target, loaded.metadata)


class _Builder:
    """Writes the directory of a store. Blocks.

    What is new gets the time of the newest file that it replaces (R8).
    """

    def __init__(
        self, target: Path, files: IndexStateFiles, resolution: Resolution, runtime: Runtime, *, file_checksums: bool
    ) -> None:
        self._target = target
        self._runtime = runtime
        self._resolution = resolution
        self._checksums = file_checksums and resolution.target.unique_id is not None
        replaced = _replaced(dict(files_of(files.index.dir)), resolution)
        self._modified_at_ns = max(entry.metadata.modified_at_ns for entry in replaced)
        self.read_bytes = sum(entry.metadata.size_bytes for entry in replaced)
        self.files = self.size_bytes = 0

    def build(self, captured: CapturedSnapshot, schema: bytes | None) -> None:
        """Move SSTs and logs, and write the rest."""
        zipped, _ = build_state_zip(captured.directory, named_metadata(captured, captured.files))
        for file in captured.files:
            path = self._target / shared_path(file.stored.stored_name)
            path.parent.mkdir(exist_ok=True)
            local_path(captured.directory, file.local.name).rename(path)
            if not file.is_reused:  # what was fetched is synced already, and has its time
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._seal(descriptor)
            self._count(file.stored.size_bytes)
        if schema is not None:
            self._write(SCHEMA_PATH, schema)
        name = snapshot_name(self._resolution.target)
        self._write((name,), zipped)
        if self._checksums:
            checksum = FileChecksum.of_file(
                crc32c=crc32c(zipped),
                size_bytes=len(zipped),
                timestamp_ms=self._runtime.local_now_ms(),
                executor_id=CREATOR,
            )
            self._write((checksum_name(name),), encode_file_checksum(checksum))

    def _write(self, path: FilePath, data: bytes) -> None:
        target = self._target.joinpath(*path)
        target.parent.mkdir(exist_ok=True)
        descriptor = os.open(target, _FILE_FLAGS, _FILE_MODE)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except BaseException:
            os.close(descriptor)
            raise
        self._seal(descriptor)
        self._count(len(data))

    def _seal(self, descriptor: int) -> None:
        try:
            os.utime(descriptor, ns=(self._modified_at_ns, self._modified_at_ns))
            flush(descriptor)
        finally:
            os.close(descriptor)

    def _count(self, size_bytes: int) -> None:
        self.files += 1
        self.size_bytes += size_bytes


def _replaced(present: dict[FilePath, FileIndex], resolution: Resolution) -> list[FileIndex]:
    """List the zip and the changelogs that the new snapshot replaces."""
    names = [changelog_name(of) for of in resolution.changelogs]
    names += [] if resolution.base is None else [snapshot_name(resolution.base)]
    return [present[name,] for name in names]
