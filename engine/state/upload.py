"""Uploading a captured snapshot: new files first, the zip last (design 0004, Z1 and S4)."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from blobstore.bounded import carry_out_all
from blobstore.local_files import run_blocking
from engine.errors import UnsafeSourceError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.file_map import CapturedFile, StateFileMap
from engine.state.file_metrics import SnapshotUploaded
from engine.state.local_files import local_path, shared_path
from engine.state.zips import build_state_zip
from index.sst_sharing import is_stale
from index.state_metadata import StateMetadata, StoredFile
from index.state_names import StateVersion, stored_name
from index.state_retention import StateListing


class CapturedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of which everything is decided, and nothing uploaded (design 0004, S3)."""

    of: StateVersion
    # A rocksdb_checkpoint that nobody writes to.
    directory: Path
    # In the names of all its new files (N3).
    upload_id: str
    files: tuple[CapturedFile, ...]
    # What it says of itself, without its files.
    metadata: StateMetadata


async def upload_snapshot(
    directory: CheckpointDir,
    captured: CapturedSnapshot,
    known: StateFileMap,
    *,
    publish: Callable[[bytes], Awaitable[int]],
    versions_retained: int | None,
    puts_max: int,
) -> SnapshotUploaded:
    """Put a snapshot there.

    Args:
        directory: Of the state store.
        captured: The snapshot.
        known: Told of it once it is there.
        publish: Publishes the zip.
        versions_retained: How many versions whoever deletes retains; None: nobody else deletes (S4).
        puts_max: Requests under way at once.

    Raises:
        UnsafeSourceError: The rocksdb_checkpoint has changed, or has an empty file that must not be (Z2).
        StoreError: As the store says.
    """
    files = captured.files
    if versions_retained is not None and any(file.is_reused for file in files):
        files = await _renew_stale(directory, captured, known, versions_retained)
    known.begin_upload(captured.upload_id, files)
    new = [file for file in files if not file.is_reused]

    async def put(file: CapturedFile) -> None:
        await _put(directory, captured.directory, file)

    metadata = msgspec.structs.replace(
        captured.metadata,
        sst_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".sst")),
        log_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".log")),
    )
    # Before the first byte is sent: what must not be empty is not.
    zipped, zip_bytes = await run_blocking(build_state_zip, captured.directory, metadata)
    await carry_out_all(put, new, in_flight_max=puts_max)
    await publish(zipped)
    known.remember_named(captured.of, [shared_path(file.stored.stored_name) for file in files], None)
    renewed = [file for file in new if file not in captured.files]
    known.rename(renewed, version=captured.of.version, upload_id=captured.upload_id)
    known.uploaded(captured.upload_id)
    known.saw_snapshot(captured.of.version)
    return SnapshotUploaded(
        files_copied=len(new),
        files_reused=len(files) - len(new),
        files_renewed=len(renewed),
        bytes_copied=sum(file.stored.size_bytes for file in new),
        zip_bytes=zip_bytes,
    )


async def _renew_stale(
    directory: CheckpointDir, captured: CapturedSnapshot, known: StateFileMap, versions_retained: int
) -> tuple[CapturedFile, ...]:
    """The files, those that somebody may have deleted under new names."""
    newest = StateListing.of_names(status.name for status in await directory.list()).latest_snapshot_version

    def renew(file: CapturedFile) -> CapturedFile:
        used = known.newest_use(shared_path(file.stored.stored_name))
        if not file.is_reused or not is_stale(used, newest, versions_retained):
            return file
        name = stored_name(file.local.name, captured.upload_id)
        return CapturedFile(StoredFile(file.local.name, name, file.local.size_bytes), file.local, is_reused=False)

    return tuple(renew(file) for file in captured.files)


async def _put(directory: CheckpointDir, source: Path, file: CapturedFile) -> None:
    path = local_path(source, file.local.name)
    try:
        # The name is new and this upload's alone: sent twice, it is the same.
        size_bytes = await directory.publish_file(shared_path(file.stored.stored_name), path, overwrite=True)
    except OSError as error:
        raise UnsafeSourceError(error.strerror or str(error), operation="snapshot", subject=str(path)) from error
    if size_bytes != file.stored.size_bytes:
        raise UnsafeSourceError(
            f"has {size_bytes} bytes, and had {file.stored.size_bytes} when it was captured",
            operation="snapshot",
            subject=str(path),
            hint="nobody may write to a rocksdb_checkpoint",
        )
