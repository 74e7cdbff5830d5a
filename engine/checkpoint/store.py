"""Restore one state store of a backup as one version of it (design 0005, R2, R6 and R7).

Replayed, it becomes one snapshot of the version, as Spark itself would load it before the first row: the base is
fetched into a working directory, the changelogs are applied, and RocksDB's files become the directory of the store.
SSTs that the replay left alone keep their names and bytes; they are moved, not copied.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError
from blobstore.local.files import flush
from engine.checkpoint.file_check import check_hidden
from engine.checkpoint.targets import dirs_below
from engine.local.checksums import crc32c
from engine.local.scan import opened
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of
from engine.restore.staging import Staging, target_errors
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.settings import TransferSettings
from engine.state.changelogs import ChangelogWriter
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.compression import Codec
from engine.state.files import CapturedSnapshot, StateFileManager, named_metadata
from engine.state.load import LoadMetrics, StateLoader
from engine.state.loaded import LoadedState
from engine.state.local_files import WorkingDir, local_path, working_dir
from engine.state.query import StoreAt
from engine.state.restore import IndexStateFiles, StateRestoreOptions, restore_state
from engine.state.settings import StateStoreSettings
from engine.state.zips import build_state_zip
from index.snapshot.contents import files_of
from index.snapshot.model import FilePath, StoreReference
from index.spark.checkpoint import StoreId
from index.spark.checksums import FileChecksum, encode_file_checksum, unwrap_value
from index.spark.hdfs_rows import RowForm, SplitKey
from index.spark.lineage import Resolution, target_in_index
from index.spark.names import StateVersion, changelog_name, checksum_name, snapshot_name
from index.spark.retention import SCHEMA_PATH


class StoreToRestore(msgspec.Struct, frozen=True, kw_only=True):
    """One store, the version to bring back, and where the backup has it."""

    store: StoreAt
    reference: StoreReference
    # Whether its changelogs are to be applied here (R7).
    replayed: bool = False

    @property
    def id(self) -> StoreId:
        return self.store.id

    @property
    def size_bytes(self) -> int:
        return self.reference.size_bytes


class StoreRestored(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one store."""

    id: StoreId
    files: int
    size_bytes: int
    # From the repository.
    bytes_fetched: int = 0
    requests: int = 0
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

    Raises as `restore_checkpoint`. After any error the target is as it was.
    """
    at, codec = work.store.at, work.store.settings.codec
    if work.replayed:
        index, requests = await read_index_of(repository.store, work.reference)
        files = IndexStateFiles(repository.store, index, transfer)
        unique_id = target_in_index(at.version, at.unique_id, index)
        resolution = await StateFileManager(files, StateStoreSettings(codec=codec)).resolve(at.version, unique_id)
        if resolution.changelogs:
            async with staged(target, runtime, replace=replace) as directory:
                made = await _replay(files, resolution, work, directory, transfer, runtime)
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


@contextlib.asynccontextmanager
async def staged(target: Path, runtime: Runtime, *, replace: bool) -> AsyncIterator[Path]:
    """Give a block the directory in which it builds the one of a store, whose place that takes at the end of it."""
    staging = Staging(target, runtime.session(), replace=replace)
    try:
        await run_blocking(staging.open)
        yield staging.directory
        await run_blocking(lambda: staging.publish(dirs_below(staging.directory), {}))
    finally:
        await run_blocking(staging.close)


async def _replay(
    files: IndexStateFiles,
    resolution: Resolution,
    work: StoreToRestore,
    target: Path,
    transfer: TransferSettings,
    runtime: Runtime,
) -> StoreRestored:
    settings = msgspec.structs.replace(work.store.settings, fetches_max=transfer.in_flight_max)
    present = dict(files_of(files.index.dir))
    # The zip and the changelogs that the new snapshot replaces; what is new gets the time of the newest of them (R8).
    names = [changelog_name(of) for of in resolution.changelogs]
    names += [] if resolution.base is None else [snapshot_name(resolution.base)]
    replaced = [present[name,].metadata for name in names]
    modified_at_ns = max(metadata.modified_at_ns for metadata in replaced)
    at = resolution.target
    snapshot = SnapshotToBuild(
        id=work.id, at=at, named=at, settings=settings, codec=settings.codec, modified_at_ns=modified_at_ns
    )
    made = await build_snapshot(files, snapshot, target, runtime=runtime)
    bytes_fetched = made.bytes_fetched + sum(metadata.size_bytes for metadata in replaced)
    return msgspec.structs.replace(made, bytes_fetched=bytes_fetched, requests=files.requests)


class SnapshotToBuild(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a store, and the one snapshot that is made of it."""

    id: StoreId
    at: StateVersion
    # What the version is called afterwards, which also says for which provider it is.
    named: StateVersion
    # As it is read; `codec` is of rows that are written.
    settings: StateStoreSettings
    codec: Codec
    # Of the new files.
    modified_at_ns: int
    # Of rows that are for another provider than before.
    split_key: SplitKey | None = None
    # Whether a new zip gets a checksum, where the settings have them.
    sums_files: bool = True


async def build_snapshot(files: StateFiles, work: SnapshotToBuild, target: Path, *, runtime: Runtime) -> StoreRestored:
    """Build the directory of a store: one snapshot, and the schema of its rows.

    RocksDB works in a directory beside the target, which is the caller's to remove. Nothing is repaired: damage is
    an error. What the load took of an index is for the caller to add.
    """
    manager = StateFileManager(files, msgspec.structs.replace(work.settings, snapshot_repair=False))
    schema = await read_row_schema(files)
    async with working_dir(target.with_name("working")) as place:
        loader = StateLoader(manager, place, runtime, split_key=work.split_key)
        loaded, metrics = await loader.load(work.at, {}, read_only=True)
        try:
            with target_errors(target):
                if work.named.is_hdfs:
                    sizes = await run_blocking(_write_rows, target, work, loaded, schema)
                else:
                    captured = await run_blocking(capture, manager, place, loaded, work.named)
                    now_ms = runtime.local_now_ms() if work.sums_files and work.settings.file_checksums else None
                    sizes = await run_blocking(write_snapshot, target, captured, schema, work.modified_at_ns, now_ms)
        finally:
            await run_blocking(loaded.db.close)
    await run_blocking(check_read, files, metrics)
    return StoreRestored(
        id=work.id,
        files=len(sizes),
        size_bytes=sum(sizes),
        bytes_fetched=metrics.bytes_fetched,
        changelogs=metrics.changelogs,
        records=metrics.records,
    )


async def read_row_schema(files: StateFiles) -> bytes | None:
    """Read the schema of a store's rows; None where there is none: Spark writes it in partition 0."""
    with contextlib.suppress(BlobNotFoundError):
        return await files.read("/".join(SCHEMA_PATH))
    return None


async def bring_row_schema(files: StateFiles, root: Path, of: StoreId) -> None:
    """Write the schema of an operator's rows where a checkpoint has it: with its first partition."""
    if (schema := await read_row_schema(files)) is not None:
        path = root.joinpath(of.path, *SCHEMA_PATH)
        await run_blocking(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        await run_blocking(path.write_bytes, schema)


def checkpoint_of(place: WorkingDir, loaded: LoadedState) -> Path:
    """Make a rocksdb_checkpoint of a loaded version. Blocks."""
    directory = place.new_captured()
    loaded.write_operands()
    loaded.db.checkpoint(directory)
    return directory


def capture(manager: StateFileManager, place: WorkingDir, loaded: LoadedState, named: StateVersion) -> CapturedSnapshot:
    """Capture a loaded version as the snapshot of a version of that name. Blocks."""
    return manager.capture(checkpoint_of(place, loaded), named, loaded.metadata)


def check_read(files: StateFiles, metrics: LoadMetrics) -> None:
    """Compare what a version without an id was made of with Hadoop's checksums: nothing else proves all of it (V4)."""
    if not isinstance(files, CheckpointDir) or files.local_root is None or metrics.of.unique_id is not None:
        return
    first = 1 if metrics.base is None else metrics.base.version + 1
    changed = [msgspec.structs.replace(metrics.of, version=number) for number in range(first, metrics.of.version + 1)]
    names = [changelog_name(of) for of in changed] + ([snapshot_name(metrics.base)] if metrics.base else [])
    for name in names:
        check_hidden(files.local_root / name)


def write_snapshot(
    target: Path, captured: CapturedSnapshot, schema: bytes | None, modified_at_ns: int | None, summed_at_ms: int | None
) -> list[int]:
    """Write the directory of a store, SSTs and logs moved; with a checksum if there is an id and a time. Blocks.

    New files get the time that is given. Without one they keep theirs: an SST may be one of another checkpoint, too.
    Returns the size of each file.
    """
    zipped, _ = build_state_zip(captured.directory, named_metadata(captured, captured.files))
    for file in captured.files:
        path = target / file.stored.path
        path.parent.mkdir(exist_ok=True)
        local_path(captured.directory, file.local.name).rename(path)
        # What was fetched has its time; a load syncs nothing.
        _seal(path, None if file.is_reused else modified_at_ns)
    name = snapshot_name(captured.of)
    written: dict[FilePath, bytes] = {} if schema is None else {SCHEMA_PATH: schema}
    written[name,] = zipped
    if summed_at_ms is not None and captured.of.unique_id is not None:
        checksum = FileChecksum.of_file(crc32c=crc32c(zipped), size_bytes=len(zipped), timestamp_ms=summed_at_ms)
        written[checksum_name(name),] = encode_file_checksum(checksum)
    return [*(file.stored.size_bytes for file in captured.files), *_write_files(target, written, modified_at_ns)]


def _write_rows(target: Path, work: SnapshotToBuild, loaded: LoadedState, schema: bytes | None) -> list[int]:
    """Write the directory of a store of the HDFS-backed provider; return the size of each file. Blocks."""
    settings = work.settings
    form = RowForm(settings.row_checksums, crc32c)
    path = target / snapshot_name(work.named)
    with ChangelogWriter(path, work.codec, 1) as writer:
        for key, stored in loaded.db.items():
            value = stored
            if settings.row_checksums:
                value = unwrap_value(key, stored, delimiter=settings.merge_delimiter, crc32c=crc32c)
            writer.write(form.from_rocksdb(key, value))
        writer.finish()
    _seal(path, work.modified_at_ns)
    written = {} if schema is None else {SCHEMA_PATH: schema}
    return [path.stat().st_size, *_write_files(target, written, work.modified_at_ns)]


def _write_files(target: Path, written: Mapping[FilePath, bytes], modified_at_ns: int | None) -> list[int]:
    """Write small files, synced; return their sizes. Blocks."""
    for parts, data in written.items():
        path = target.joinpath(*parts)
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as new:
            new.write(data)
        _seal(path, modified_at_ns)
    return [len(data) for data in written.values()]


def _seal(path: Path, modified_at_ns: int | None) -> None:
    with opened(path) as descriptor:
        if modified_at_ns is not None:
            os.utime(descriptor, ns=(modified_at_ns, modified_at_ns))
        flush(descriptor)
