"""What a restore would do: the same look at snapshot and target, and nothing is written beside it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from blobstore.base import BlobStore
from engine.local.cache import DigestCache
from engine.restore.restore import (
    OwnerPolicy,
    check_patterns,
    choose_or_refuse,
    find_present_below,
    read_index_of,
    refuse_few_files,
)
from engine.restore.staging import look_at_target
from engine.settings import TransferSettings
from index.plan.restore import RestorePlan, plan_restore
from index.snapshot.records import StoreReference


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
    """The plan of `restore_store` with the same arguments; what it refuses is refused in the same order.

    Only what takes writing is not found out: whether there is room, and another restore at work.

    Raises:
        TargetError: The target is no directory, has content that may not be replaced, or a RocksDB has it open; or
            `replace` would put a few files into the place of a whole directory.
        UsageError: One of the patterns is empty.
        NotFoundError: One of the patterns matches no file.
        DamagedError: The index is missing or altered.
        StoreError: As the store says.
    """
    check_patterns(files)
    refuse_few_files(target, files, replace=replace)
    _, has_content = await asyncio.to_thread(look_at_target, target, replace=replace)
    index, _ = await read_index_of(store, reference)
    index = choose_or_refuse(index, files, reference)
    present = await find_present_below(target, index, cache) if has_content else {}
    return plan_restore(index, present, range_bytes=settings.range_bytes, owners_count=owners is not OwnerPolicy.IGNORE)
