"""What a backup of a checkpoint would take, without taking it."""

from pathlib import Path

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import opened_checkpoint
from engine.checkpoint.backup_steps import CheckpointBackupPlan, begin_backup
from engine.checkpoint.live import LiveStore
from engine.checkpoint.live_files import live_files
from engine.checkpoint.naming import located
from engine.records.indexes import read_index
from engine.repository.repository import Repository
from engine.settings import STORES_AT_ONCE
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StoreAt


class BackupPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before any file but zips and a few changelogs is read."""

    job: str
    query_id: str
    batch: int
    # The newest backup is of this batch already.
    is_taken: bool
    stores: int
    # The state; the query's own files are few and small.
    files: int
    size_bytes: int
    # Of these, what the newest backup does not have by name: an upper bound of what would be uploaded.
    files_new: int
    bytes_new: int


async def preview_backup(
    repository: Repository,
    location: str | Path | BlobStore,
    *,
    job: str | None = None,
    moved: bool = False,
    stores_at_once: int = STORES_AT_ONCE,
    scratch: Path | None = None,
    store_settings: StoreSettings | None = None,
) -> BackupPreview:
    """What `backup_checkpoint` would do; nothing is written. Arguments and errors as there."""
    async with opened_checkpoint(location, store_settings) as root:
        begun = await begin_backup(repository, root, job=job, moved=moved)

        async def look(store: StoreAt) -> tuple[int, int, int, int]:
            return await _look(repository, root, begun, store, scratch)

        found = await map_bounded(look, begun.at.stores, in_flight_max=stores_at_once)
    files, size_bytes, files_new, bytes_new = (sum(row[at] for row in found) for at in range(4))
    return BackupPreview(
        job=begun.scope.job,
        query_id=begun.query_id,
        batch=begun.at.batch,
        is_taken=begun.taken is not None,
        stores=len(begun.at.stores),
        files=files,
        size_bytes=size_bytes,
        files_new=files_new,
        bytes_new=bytes_new,
    )


async def _look(
    repository: Repository, root: CheckpointDir, begun: CheckpointBackupPlan, store: StoreAt, scratch: Path | None
) -> tuple[int, int, int, int]:
    """Files and bytes of a store, and of what is new in it."""
    base = begun.base(store.id)
    previous = None if base is None else await read_index(repository.store, base.index)
    async with live_files(root.child(store.id.path), scratch) as files:
        with located(files.location, private=files.directory):
            chosen, known = await LiveStore(files, store).choose(previous)
    new = [file.metadata.size_bytes for path, file in chosen.items() if path not in known]
    return len(chosen), sum(file.metadata.size_bytes for file in chosen.values()), len(new), sum(new)
