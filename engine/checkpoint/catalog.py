"""Finding the backups of a job in a repository (design 0005, P8, P9 and R1)."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from engine.errors import CollectedError, IncompleteError, NotFoundError, UsageError
from engine.records.find import CHOICES_MAX, find_complete
from engine.records.leases import PinLease
from engine.repository.repository import Repository
from index.display import iso_time
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.spark.checkpoint import CheckpointBackup, StoredBackup, choose_checkpoint_backup, decode_checkpoint_backup

_FIND: Final = "find backup"
# Batches that a hint lists.
_SHOWN_MAX: Final = 8
_HINT: Final = "take one with `tidemark spark backup`"


async def find_job(repository: Repository) -> str:
    """Return the only job of a repository that has backups; a list, and for each job two requests or three.

    NotFoundError: there is none. UsageError: there are several; it names them, with their places and newest batches.
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


async def find_checkpoint_backup(
    repository: Repository, job: str, *, batch: int | None = None, at_ms: int | None = None
) -> StoredBackup:
    """Find the backup that a batch, or a time, is restored from; the newest if neither is given (R1).

    NotFoundError: there is none; it says which there are. UsageError: both are given.
    """
    if batch is not None and at_ms is not None:
        raise UsageError("a batch and a time are given", operation=_FIND, subject=job, hint="give one of them")
    if batch is None and at_ms is None:
        latest = await repository.latest(Scope(job))
        backup = None if latest is None else decode_checkpoint_backup(latest.record.offsets)
        if latest is not None and backup is not None:
            return latest, backup
    backups = await _list_backups(repository, job)
    found = choose_checkpoint_backup(backups, batch=batch, at_ms=at_ms)
    if found is not None:
        return found
    if not backups:
        raise NotFoundError("the job has no checkpoint backup", operation=_FIND, subject=job, hint=_HINT)
    wanted = f"batch {batch}" if at_ms is None else iso_time(at_ms)
    oldest, newest = (iso_time(backups[at][0].committed_at_ms) for at in (-1, 0))
    batches = sorted({backup.batch for _, backup in backups})
    few = "…, " * (len(batches) > _SHOWN_MAX) + ", ".join(map(str, batches[-_SHOWN_MAX:]))
    hint = f"there is {few}, taken from {oldest} to {newest}"
    raise NotFoundError(f"no backup has {wanted}", operation=_FIND, subject=job, hint=hint)


async def _list_backups(repository: Repository, job: str) -> tuple[StoredBackup, ...]:
    """List every backup of a job, newest first: one GET for each commit."""
    commits = await repository.commits(Scope(job))
    return tuple((c, backup) for c in commits if (backup := decode_checkpoint_backup(c.record.offsets)) is not None)


async def _or_newest_complete(repository: Repository, job: str, chosen: StoredBackup) -> StoredBackup:
    """Return a backup; if something of it is missing, the newest that is whole (0006, M2). IncompleteError: none is."""
    if await find_complete(repository.store, [chosen[0]]) is not None:
        return chosen
    backups = await _list_backups(repository, job)
    complete = await find_complete(repository.store, [commit for commit, _ in backups])
    if complete is None:
        message = f"something of the backup of batch {chosen[1].batch} is missing, and of every other one"
        raise IncompleteError(message, operation=_FIND, subject=job)
    return next(taken for taken in backups if taken[0].pointer == complete.pointer)


@contextlib.asynccontextmanager
async def pinned_checkpoint_backup(
    repository: Repository, job: str, batch: int | None, at_ms: int | None, *, or_newest_complete: bool
) -> AsyncIterator[tuple[Commit, CheckpointBackup, PinLease]]:
    """Find a backup and keep it from being collected while the block runs (R9, and design 0002, D5).

    Raises as `find_checkpoint_backup`. CollectedError: every choice was collected before its pin was written.
    IncompleteError: the newest complete one was asked for, and none is.
    """
    async with contextlib.AsyncExitStack() as stack:
        for attempt in range(CHOICES_MAX):
            chosen = await find_checkpoint_backup(repository, job, batch=batch, at_ms=at_ms)
            if or_newest_complete:
                chosen = await _or_newest_complete(repository, job, chosen)
            commit, backup = chosen
            try:
                lease = await stack.enter_async_context(repository.pinned(commit, "restore checkpoint"))
            except CollectedError:
                if attempt == CHOICES_MAX - 1:
                    raise
                continue
            yield commit, backup, lease
            return
