"""Uploading a captured snapshot: new files first, the zip last (design 0004, Z1 and S4)."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from blobstore.concurrency import run_all, run_blocking
from engine.errors import UnsafeSourceError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.file_map import CapturedFile, StateFileMap
from engine.state.file_metrics import SnapshotUploaded
from engine.state.local_files import is_untouched, local_path, shared_path
from engine.state.zips import build_state_zip
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import StateVersion, stored_name
from index.spark.retention import StateListing
from index.spark.sharing import is_stale


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
    known.begin_upload(captured.upload_id, files)

    async def put(file: CapturedFile) -> None:
        await _put(directory, captured.directory, file)

    # Before the first byte is sent: what must not be empty is not.
    zipped, zip_bytes = await run_blocking(build_state_zip, captured.directory, named_metadata(captured, files))
    await run_all(put, [file for file in files if not file.is_reused], in_flight_max=puts_max)
    # As late as can be, when what takes long is done: a file that was there at the beginning may be deleted meanwhile.
    renewed: list[CapturedFile] = []
    if versions_retained is not None and any(file.is_reused for file in files):
        renewed = await _renew_stale(directory, captured, known, versions_retained)
    if renewed:
        known.begin_upload(captured.upload_id, renewed)
        await run_all(put, renewed, in_flight_max=puts_max)
        by_name = {file.local.name: file for file in renewed}
        files = tuple(by_name.get(file.local.name, file) for file in files)
        zipped, zip_bytes = await run_blocking(build_state_zip, captured.directory, named_metadata(captured, files))
    await publish(zipped)
    new = [file for file in files if not file.is_reused]
    known.remember_named(captured.of, [shared_path(file.stored.stored_name) for file in files], None)
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


def named_metadata(captured: CapturedSnapshot, files: Sequence[CapturedFile]) -> StateMetadata:
    """What a snapshot says of itself, with its files under the names that they have in the store."""
    return msgspec.structs.replace(
        captured.metadata,
        sst_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".sst")),
        log_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".log")),
    )


async def _renew_stale(
    directory: CheckpointDir, captured: CapturedSnapshot, known: StateFileMap, versions_retained: int
) -> list[CapturedFile]:
    """The reused files that somebody may have deleted, under new names."""
    newest = StateListing.of_names(status.name for status in await directory.list()).latest_snapshot_version
    # Whoever deletes here with another number than ours is not to be left out.
    if known.retained_min is not None:
        versions_retained = min(versions_retained, known.retained_min)
    renewed: list[CapturedFile] = []
    for file in captured.files:
        used = known.newest_use(shared_path(file.stored.stored_name))
        if file.is_reused and is_stale(used, newest, versions_retained):
            name = stored_name(file.local.name, captured.upload_id)
            stored = StoredFile(file.local.name, name, file.local.size_bytes)
            renewed.append(CapturedFile(stored, file.local, is_reused=False))
    return renewed


async def _put(directory: CheckpointDir, source: Path, file: CapturedFile) -> None:
    path = local_path(source, file.local.name)
    try:
        if not await run_blocking(is_untouched, path, file.local):
            raise _changed(path, "was written to since it was captured")
        # The name is new and this upload's alone: sent twice, it is the same.
        size_bytes = await directory.publish_file(shared_path(file.stored.stored_name), path, overwrite=True)
    except OSError as error:
        raise UnsafeSourceError(error.strerror or str(error), operation="snapshot", subject=str(path)) from error
    if size_bytes != file.stored.size_bytes:
        raise _changed(path, f"has {size_bytes} bytes, and had {file.stored.size_bytes} when it was captured")


def _changed(path: Path, message: str) -> UnsafeSourceError:
    hint = "nobody may write to a rocksdb_checkpoint, nor to the SSTs that it has in common with the working directory"
    return UnsafeSourceError(message, operation="snapshot", subject=str(path), hint=hint)
