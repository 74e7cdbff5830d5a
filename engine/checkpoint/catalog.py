"""Finding the backups of a job in a repository (design 0005, P8, P9 and R1)."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from engine.errors import CollectedError, IncompleteError, NotFoundError, UsageError
from engine.records.find import CHOICES_MAX
from engine.records.leases import PinLease
from engine.records.missing import find_complete
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.spark.checkpoint import CheckpointBackup, StoredBackup, choose_checkpoint_backup, decode_checkpoint_backup
from index.text import iso_time

_FIND: Final = "find backup"
_HINT: Final = "take one with `tidemark spark backup`"


async def find_job(repository: Repository) -> str:
    """Return the only job of a repository that has backups.

    Costs a list, and for each job two requests or three.

    Raises:
        NotFoundError: There is none.
        UsageError: There are several; it names them, with their places and newest batches.
    """
    found: list[tuple[str, CheckpointBackup]] = []
    for scope in await repository.scopes():
        newest = await repository.latest(scope) if scope.task is None else None
        backup = None if newest is None else decode_checkpoint_backup(newest.record.offsets)
        if backup is not None:
            found.append((scope.job, backup))
    if not found:
        raise NotFoundError("the repository has no checkpoint backup", operation=_FIND, hint=_HINT)
    if len(found) > 1:
        said = "; ".join(f"{job}: {backup.location}, batch {backup.batch}" for job, backup in found)
        raise UsageError("more than one job has checkpoint backups", operation=_FIND, hint=f"choose a job: {said}")
    return found[0][0]


async def list_checkpoint_backups(repository: Repository, job: str) -> tuple[StoredBackup, ...]:
    """List every backup of a job, newest first: one GET for each commit."""
    commits = await repository.commits(Scope(job))
    return tuple((c, backup) for c in commits if (backup := decode_checkpoint_backup(c.record.offsets)) is not None)


async def find_checkpoint_backup(
    repository: Repository, job: str, *, batch: int | None = None, at_ms: int | None = None
) -> StoredBackup:
    """Find the backup that a batch, or a time, is restored from; the newest if neither is given (R1).

    Raises:
        NotFoundError: There is none; it says which there are.
        UsageError: Both are given.
    """
    if batch is not None and at_ms is not None:
        raise UsageError("a batch and a time are given", operation=_FIND, subject=job, hint="give one of them")
    if batch is None and at_ms is None:
        newest = await repository.latest(Scope(job))
        backup = None if newest is None else decode_checkpoint_backup(newest.record.offsets)
        if newest is not None and backup is not None:
            return newest, backup
    backups = await list_checkpoint_backups(repository, job)
    found = choose_checkpoint_backup(backups, batch=batch, at_ms=at_ms)
    if found is not None:
        return found
    if not backups:
        raise NotFoundError("the job has no checkpoint backup", operation=_FIND, subject=job, hint=_HINT)
    wanted = f"batch {batch}" if at_ms is None else iso_time(at_ms)
    raise NotFoundError(
        f"no backup has {wanted}", operation=_FIND, subject=job, hint=f"there is {_list_batches(backups)}"
    )


async def find_complete_checkpoint_backup(
    repository: Repository, job: str, *, batch: int | None, at_ms: int | None
) -> StoredBackup:
    """Find as `find_checkpoint_backup` does; if something of it is missing, the newest backup that is whole (0006, M2).

    Raises:
        IncompleteError: No backup is whole.
        As `find_checkpoint_backup`.
    """
    chosen = await find_checkpoint_backup(repository, job, batch=batch, at_ms=at_ms)
    if await find_complete(repository.store, [chosen[0]]) is not None:
        return chosen
    backups = await list_checkpoint_backups(repository, job)
    complete = await find_complete(repository.store, [commit for commit, _ in backups])
    if complete is None:
        raise IncompleteError(
            f"something of the backup of batch {chosen[1].batch} is missing, and of every other one",
            operation=_FIND,
            subject=job,
        )
    return next(taken for taken in backups if taken[0].pointer == complete.pointer)


@contextlib.asynccontextmanager
async def pinned_checkpoint_backup(
    repository: Repository,
    job: str,
    *,
    batch: int | None,
    at_ms: int | None,
    purpose: str,
    or_newest_complete: bool = False,
) -> AsyncIterator[tuple[Commit, CheckpointBackup, PinLease]]:
    """Find a backup and keep it from being collected while the block runs (R9, and design 0002, D5).

    Args:
        or_newest_complete: Use `find_complete_checkpoint_backup` instead.

    Raises:
        CollectedError: Every choice was collected before its pin was written.
        As `find_checkpoint_backup`.
    """
    find = find_complete_checkpoint_backup if or_newest_complete else find_checkpoint_backup
    async with contextlib.AsyncExitStack() as stack:
        for attempt in range(CHOICES_MAX):
            commit, backup = await find(repository, job, batch=batch, at_ms=at_ms)
            try:
                lease = await stack.enter_async_context(repository.pinned(commit, purpose))
            except CollectedError:
                if attempt == CHOICES_MAX - 1:
                    raise
                continue
            yield commit, backup, lease
            return


def _list_batches(backups: tuple[StoredBackup, ...]) -> str:
    """Format the batches that can be restored, for a hint."""
    oldest, newest = backups[-1], backups[0]
    batches = sorted({p.batch for _, p in backups})
    few = ", ".join(map(str, batches[-8:]))
    return (
        f"{'…, ' if len(batches) > 8 else ''}{few}, taken from {iso_time(oldest[0].committed_at_ms)} "  # noqa: PLR2004
        f"to {iso_time(newest[0].committed_at_ms)}"
    )
