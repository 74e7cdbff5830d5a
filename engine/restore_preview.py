"""What a restore would do: the same look at snapshot and target, and nothing is written beside it."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from blobstore.base import BlobStore
from engine.digest_cache import DigestCache
from engine.errors import DamagedError, TargetError, UnsafeSourceError
from engine.identify import find_present
from engine.index_io import read_index
from engine.local_dir import scan_dir
from engine.local_stat import FilePath
from engine.restore import OwnerPolicy, choose_or_refuse
from engine.rocksdb_lock import check_not_held
from engine.transfer_settings import TransferSettings
from index.local_tree import LocalFile
from index.model import SnapshotIndex, StoreReference
from index.restore_plan import RestorePlan, choose_candidates, plan_restore


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
    """The plan of `restore_store` with the same arguments.

    Raises:
        TargetError: The target has content that may not be replaced, or a RocksDB has it open.
        NotFoundError: One of the patterns matches no file.
        DamagedError: The index is missing or altered.
        StoreError: As the store says.
    """
    index = await read_index(store, reference.index)
    if index.metadata.unique_id != reference.unique_id:
        raise DamagedError(
            f"is of {index.metadata.unique_id}, not of {reference.unique_id}",
            operation="restore",
            subject=reference.index.key,
        )
    index = choose_or_refuse(index, files, reference)
    stop = threading.Event()
    try:
        present = await asyncio.to_thread(_look, target, index, cache, replace=replace, stop=stop)
    finally:
        stop.set()
    return plan_restore(index, present, range_bytes=settings.range_bytes, owners_count=owners is not OwnerPolicy.IGNORE)


def _look(
    target: Path, index: SnapshotIndex, cache: DigestCache, *, replace: bool, stop: threading.Event
) -> dict[FilePath, LocalFile]:
    """The files of the target that are files of the snapshot."""
    if not _has_content(target):
        return {}
    if not replace:
        raise TargetError("is not empty", operation="restore", subject=str(target))
    try:
        check_not_held(target)
    except UnsafeSourceError as error:
        raise TargetError("a RocksDB has it open", operation="restore", subject=str(target)) from error
    try:
        return find_present(target, choose_candidates(index, scan_dir(target)), cache, stop=stop)
    except UnsafeSourceError:
        # As in a restore: nothing in such a directory is to be relied on.
        return {}


def _has_content(target: Path) -> bool:
    try:
        return next(target.iterdir(), None) is not None
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TargetError(f"cannot be used: {error.strerror}", operation="restore", subject=str(target)) from error
