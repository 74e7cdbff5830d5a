"""Back up a streaming query's checkpoint while the query goes on (design 0005, section 2).

`backup_checkpoint` does it all here; `run_backup` lets the caller say where the stores are backed up.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from blobstore.opening import StoreSettings
from engine.checkpoint.backup_steps import (
    OPERATION,
    BackupTotals,
    CheckpointBackupPlan,
    CheckpointBackupResult,
    StoreBackup,
    backup_store,
    begin_backup,
    finish_backup,
)
from engine.checkpoint.errors import QueryMovedOnError
from engine.clock import Runtime, SystemRuntime
from engine.errors import SourceChangedError, UnsafeSourceError
from engine.progress import NO_PROGRESS, Progress, SummedProgress
from engine.repository.repository import Repository
from engine.settings import STORES_AT_ONCE, share_among
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StoreAt
from index.errors import VersionMissingError

__all__ = [
    "BackupTotals",
    "CheckpointBackupPlan",
    "CheckpointBackupResult",
    "StoreBackup",
    "backup_checkpoint",
    "run_backup",
]

ATTEMPTS_MAX: Final = 3
# What the query may have done to what was being read (P6).
MOVED: Final = (UnsafeSourceError, VersionMissingError)


BackUpStores = Callable[[CheckpointBackupPlan], Awaitable[Sequence[StoreBackup]]]


async def backup_checkpoint(
    repository: Repository,
    location: str | Path | BlobStore,
    *,
    job: str | None = None,
    stores_at_once: int = STORES_AT_ONCE,
    verify: bool = True,
    check_retained: bool = False,
    moved: bool = False,
    scratch: Path | None = None,
    progress: Progress = NO_PROGRESS,
    store_settings: StoreSettings | None = None,
    runtime: Runtime | None = None,
) -> CheckpointBackupResult:
    """Back up a query's newest committed batch. The query may run meanwhile.

    Requests: section 7 of design 0005.

    Args:
        repository: Where to.
        location: The checkpointLocation: a path, a URL as `open_store` takes it, or a store that has it as its root.
        job: Which job has the backups of this query; `spark-<query id>` if not given.
        stores_at_once: So many stores are worked on at once.
        verify: Whether what is new is checked before it is taken over (P5).
        check_retained: Whether what the newest backup has is looked for, and sent again where it is missing, also if
            the backup is of this batch already (design 0006, M1); a STAT for each blob.
        moved: Go on with the job also if the newest backup is of another place, and this checkpoint does not have its
            batch (P9).
        scratch: Where files of a checkpoint on another store are fetched to; the system's place if not given.
        progress: Told what there is to do and what is done.
        store_settings: How the checkpoint's store is asked.
        runtime: Tells how long it took.

    Raises:
        NotFoundError: There is no checkpoint, or no batch is committed.
        ProviderError: The state is not RocksDB's.
        UsageError: The job has something else than backups of this query, or those of another copy of it (P9).
        DamagedError, FormatError: A file is not whole (P5); the error names it, and nothing was committed.
        VersionMissingError: A file is not there.
        QueryMovedOnError: The query took away what was being read, again and again (P6).
        ConflictError: Another backup of the query was committed meanwhile.
        StoreError: As the stores say.
    """
    async with opened_checkpoint(location, store_settings) as root:
        at_once, share = share_among(repository.settings, stores_at_once)
        sums = SummedProgress(progress)

        async def back_up_stores(begun: CheckpointBackupPlan) -> Sequence[StoreBackup]:
            async def back_up(store: StoreAt) -> StoreBackup:
                return await backup_store(
                    repository,
                    root,
                    begun.scope,
                    store,
                    begun.base(store.id),
                    verify=verify,
                    check_retained=check_retained,
                    scratch=scratch,
                    settings=share,
                    progress=sums.part(),
                )

            return await map_bounded(back_up, begun.at.stores, in_flight_max=at_once)

        return await run_backup(
            repository,
            root,
            back_up_stores,
            job=job,
            verify=verify,
            check_retained=check_retained,
            moved=moved,
            scratch=scratch,
            progress=sums.part(),
            runtime=runtime,
        )


@contextlib.asynccontextmanager
async def opened_checkpoint(
    location: str | Path | BlobStore, settings: StoreSettings | None = None
) -> AsyncIterator[CheckpointDir]:
    """The root of a checkpoint, for a block."""
    root = await CheckpointDir.open(location, settings=settings)
    try:
        yield root
    finally:
        await root.close()


async def run_backup(
    repository: Repository,
    root: CheckpointDir,
    back_up_stores: BackUpStores,
    *,
    job: str | None = None,
    verify: bool = True,
    check_retained: bool = False,
    moved: bool = False,
    scratch: Path | None = None,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> CheckpointBackupResult:
    """All steps, the stores being backed up as the caller says; again if the query moves on under it (P6).

    Arguments and errors otherwise as `backup_checkpoint`.
    """
    runtime = runtime or SystemRuntime()
    began_s = runtime.monotonic_s()
    failed: tuple[int, Exception] | None = None
    for attempt in range(1, ATTEMPTS_MAX + 1):
        begun = await begin_backup(repository, root, job=job, check_retained=check_retained, moved=moved)
        if begun.parent is not None and begun.taken is not None:
            return CheckpointBackupResult(commit=begun.parent, backup=begun.taken, is_new=False, attempts=attempt)
        try:
            stores = await back_up_stores(begun)
            done = await finish_backup(
                repository,
                root,
                begun,
                stores,
                verify=verify,
                check_retained=check_retained,
                scratch=scratch,
                progress=progress,
            )
        except MOVED as error:
            # What is missing at a batch is missing: only a query that goes on is worth another look.
            if failed is not None and failed[0] == begun.at.batch and not isinstance(error, SourceChangedError):
                raise
            failed = begun.at.batch, error
            continue
        return msgspec.structs.replace(done, attempts=attempt, seconds=runtime.monotonic_s() - began_s)
    assert failed is not None  # noqa: S101  # every other end of an attempt leaves the loop
    raise QueryMovedOnError(
        f"was read {ATTEMPTS_MAX} times, and each time the query took away a part; the last time at batch {failed[0]}: "
        f"{failed[1]}",
        operation=OPERATION,
        subject=root.location,
    ) from failed[1]
