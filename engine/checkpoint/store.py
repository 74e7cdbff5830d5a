"""Restore one state store of a backup as one version of it (design 0005, R2, R6 and R7).

Replayed, it becomes one snapshot of the version, as Spark itself would load it before the first row: the base is
fetched into a working directory, the changelogs are applied, and RocksDB's files become the directory of the store.
SSTs that the replay left alone keep their names and bytes; they are moved, not copied.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.local.dirs import TEMP
from blobstore.local.files import flush
from engine.checkpoint.targets import dirs_below
from engine.local.checksums import crc32c
from engine.local.scan import READ_FLAGS
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of
from engine.restore.staging import Staging, target_errors
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.settings import TransferSettings
from engine.state.changelogs import CREATOR, ChangelogWriter
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import CapturedSnapshot, StateFileManager, named_metadata
from engine.state.load import StateLoader
from engine.state.loaded import LoadedState
from engine.state.local_files import WorkingDir, local_path, shared_path
from engine.state.query import StoreAt
from engine.state.restore import IndexStateFiles, StateRestoreOptions, restore_state
from engine.state.settings import StateStoreSettings
from engine.state.zips import build_state_zip
from index.snapshot.contents import files_of
from index.snapshot.model import FilePath, StoreReference
from index.spark.changelog import PUT
from index.spark.checkpoint import StoreId
from index.spark.checksums import FileChecksum, encode_file_checksum, unframe_hdfs_value
from index.spark.lineage import Resolution, target_in_index
from index.spark.names import StateVersion, changelog_name, checksum_name, snapshot_name
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
    """Restore a store to a directory of this machine, whole or not at all. The caller holds a pin.

    The target is absent or empty, or with `replace` any directory, whose content an earlier attempt has left.

    Raises:
        DamagedError, FormatError: Something is missing or altered; the error names the file, and the blob.
        TargetError: The target cannot be used.
        StoreError: As the store says. After any error the target is as it was.
    """
    at, codec = work.store.at, work.store.settings.codec
    if work.replayed:
        index, requests = await read_index_of(repository.store, work.reference)
        files = IndexStateFiles(repository.store, index, transfer)
        unique_id = None if at.unique_id is None else target_in_index(at.version, at.unique_id, index)
        resolution = await StateFileManager(files, StateStoreSettings(codec=codec)).resolve(at.version, unique_id)
        if resolution.changelogs:
            staging = Staging(target, runtime.session(), replace=replace)
            try:
                await run_blocking(staging.open)
                made = await _replay(files, resolution, work, staging.directory, transfer, runtime)
                await run_blocking(lambda: staging.publish(dirs_below(staging.directory), {}))
            finally:
                await run_blocking(staging.close)
            progress.add(files=made.files, bytes_=made.size_bytes)
            return msgspec.structs.replace(made, requests=requests + made.requests)
    options = StateRestoreOptions(version=at.version, unique_id=at.unique_id, codec=codec, replace=replace)
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


async def _replay(
    files: IndexStateFiles,
    resolution: Resolution,
    work: StoreToRestore,
    target: Path,
    transfer: TransferSettings,
    runtime: Runtime,
) -> StoreRestored:
    """Build the directory of a store: one snapshot of a version, and the schema of its rows.

    RocksDB works in a directory beside the target, which goes with the staging.
    """
    # A backup has one base: there is nothing to repair it with, and damage has to be reported.
    settings = msgspec.structs.replace(work.store.settings, fetches_max=transfer.in_flight_max, snapshot_repair=False)
    manager = StateFileManager(files, settings)
    present = dict(files_of(files.index.dir))
    schema = await files.read("/".join(SCHEMA_PATH)) if SCHEMA_PATH in present else None
    # The zip and the changelogs that the new snapshot replaces; what is new gets the time of the newest of them (R8).
    names = [changelog_name(of) for of in resolution.changelogs]
    names += [] if resolution.base is None else [snapshot_name(resolution.base)]
    replaced = [present[name,].metadata for name in names]
    modified_at_ns = max(metadata.modified_at_ns for metadata in replaced)
    working = target.with_name("working")
    place = await run_blocking(WorkingDir.open, working)
    try:
        loader = StateLoader(manager, place, runtime)
        loaded, metrics = await loader.load(resolution.target, {}, read_only=True)
        try:
            made: Path | CapturedSnapshot
            if resolution.target.hdfs_backed:
                with target_errors(target):
                    made = await run_blocking(_write_snapshot, working, loaded, settings)
            else:
                made = await run_blocking(_capture, manager, place, loaded)
        finally:
            await run_blocking(loaded.db.close)
        is_summed = settings.file_checksums and resolution.target.unique_id is not None
        summed_at_ms = runtime.local_now_ms() if is_summed else None
        with target_errors(target):
            if isinstance(made, Path):
                sizes = await _publish_snapshot(target, resolution.target, made, schema, modified_at_ns)
            else:
                sizes = await run_blocking(_build, target, made, schema, modified_at_ns, summed_at_ms)
    finally:
        await run_blocking(place.close)
    return StoreRestored(
        id=work.id,
        files=len(sizes),
        size_bytes=sum(sizes),
        bytes_fetched=metrics.bytes_fetched + sum(metadata.size_bytes for metadata in replaced),
        requests=files.requests,
        changelogs=metrics.changelogs,
        records=metrics.records,
    )


def _write_snapshot(directory: Path, loaded: LoadedState, settings: StateStoreSettings) -> Path:
    """Write all rows as a snapshot of the HDFS-backed provider (0004, P2). Blocks."""
    with ChangelogWriter(directory / "snapshot", settings.codec, 1) as writer:
        for key, value in loaded.db.items():
            writer.write((PUT, key, unframe_hdfs_value(value) if settings.row_checksums else value))
        writer.finish()
        return writer.path


async def _publish_snapshot(
    target: Path, of: StateVersion, snapshot: Path, schema: bytes | None, modified_at_ns: int
) -> list[int]:
    """Publish a snapshot of the HDFS-backed provider, and the schema of its rows; return the size of each file."""
    written: dict[str, Path | bytes] = {snapshot_name(of): snapshot}
    if schema is not None:
        written["/".join(SCHEMA_PATH)] = schema
    directory = await CheckpointDir.open(target)
    try:
        sizes = [await directory.publish(path, source, overwrite=False) for path, source in written.items()]
    finally:
        await directory.close()
    # Where the store of the directory has written them; they are moved out of it.
    with contextlib.suppress(FileNotFoundError):
        await run_blocking((target / TEMP).rmdir)
    for path in written:
        await run_blocking(os.utime, target / path, ns=(modified_at_ns, modified_at_ns))
    return sizes


def _capture(manager: StateFileManager, place: WorkingDir, loaded: LoadedState) -> CapturedSnapshot:
    directory = place.new_captured()
    loaded.write_operands()
    loaded.db.flush()
    loaded.db.checkpoint(directory)
    return manager.capture(directory, loaded.target, loaded.metadata)


def _build(
    target: Path, captured: CapturedSnapshot, schema: bytes | None, modified_at_ns: int, summed_at_ms: int | None
) -> list[int]:
    """Write the directory of a store, SSTs and logs moved; with a checksum if there is a time for it. Blocks.

    Returns the size of each file.
    """
    zipped, _ = build_state_zip(captured.directory, named_metadata(captured, captured.files))
    for file in captured.files:
        path = target / shared_path(file.stored.stored_name)
        path.parent.mkdir(exist_ok=True)
        local_path(captured.directory, file.local.name).rename(path)
        if not file.is_reused:  # what was fetched is synced already, and has its time
            with os.fdopen(os.open(path, READ_FLAGS), "rb") as opened:
                _seal(opened.fileno(), modified_at_ns)
    name = snapshot_name(captured.of)
    written: dict[FilePath, bytes] = {} if schema is None else {SCHEMA_PATH: schema}
    written[name,] = zipped
    if summed_at_ms is not None:
        checksum = FileChecksum.of_file(
            crc32c=crc32c(zipped), size_bytes=len(zipped), timestamp_ms=summed_at_ms, executor_id=CREATOR
        )
        written[checksum_name(name),] = encode_file_checksum(checksum)
    for parts, data in written.items():
        path = target.joinpath(*parts)
        path.parent.mkdir(exist_ok=True)
        with os.fdopen(os.open(path, _FILE_FLAGS, _FILE_MODE), "wb") as opened:
            opened.write(data)
            opened.flush()
            _seal(opened.fileno(), modified_at_ns)
    return [*(file.stored.size_bytes for file in captured.files), *map(len, written.values())]


def _seal(descriptor: int, modified_at_ns: int) -> None:
    os.utime(descriptor, ns=(modified_at_ns, modified_at_ns))
    flush(descriptor)
