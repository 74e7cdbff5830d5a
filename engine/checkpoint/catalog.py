"""Finding the pictures of a job in a repository (design 0005, P8, P9 and R1)."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from engine.errors import CollectedError, IncompleteError, NotFoundError, UsageError
from engine.records.missing import find_complete
from engine.records.pins import PinLease
from engine.repository.reading import CHOICES_MAX
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.spark.checkpoint import Picture, Taken, choose_picture, decode_picture
from index.text import iso_time

_FIND: Final = "find picture"
_HINT: Final = "take one with `tidemark spark backup`"


async def find_job(repository: Repository) -> str:
    """The only job of a repository that has pictures.

    Costs a list, and for each job two requests or three.

    Raises:
        NotFoundError: There is none.
        UsageError: There are several; it names them, with their places and newest batches.
    """
    found: list[tuple[str, Picture]] = []
    for scope in await repository.scopes():
        newest = await repository.latest(scope) if scope.task is None else None
        picture = None if newest is None else decode_picture(newest.record.offsets)
        if picture is not None:
            found.append((scope.job, picture))
    if not found:
        raise NotFoundError("the repository has no picture of a checkpoint", operation=_FIND, hint=_HINT)
    if len(found) > 1:
        said = "; ".join(f"{job}: {picture.location}, batch {picture.batch}" for job, picture in found)
        raise UsageError("more than one job has pictures", operation=_FIND, hint=f"choose a job: {said}")
    return found[0][0]


async def list_pictures(repository: Repository, job: str) -> tuple[Taken, ...]:
    """Every picture of a job, newest first: one GET for each commit."""
    commits = await repository.commits(Scope(job))
    return tuple((c, picture) for c in commits if (picture := decode_picture(c.record.offsets)) is not None)


async def find_picture(
    repository: Repository, job: str, *, batch: int | None = None, at_ms: int | None = None
) -> Taken:
    """The picture that a batch, or a time, is restored from; the newest if neither is given (R1).

    Raises:
        NotFoundError: There is none; it says which there are.
        UsageError: Both are given.
    """
    if batch is not None and at_ms is not None:
        raise UsageError("a batch and a time are given", operation=_FIND, subject=job, hint="give one of them")
    if batch is None and at_ms is None:
        newest = await repository.latest(Scope(job))
        picture = None if newest is None else decode_picture(newest.record.offsets)
        if newest is not None and picture is not None:
            return newest, picture
    pictures = await list_pictures(repository, job)
    found = choose_picture(pictures, batch=batch, at_ms=at_ms)
    if found is not None:
        return found
    if not pictures:
        raise NotFoundError("the job has no picture of a checkpoint", operation=_FIND, subject=job, hint=_HINT)
    wanted = f"batch {batch}" if at_ms is None else iso_time(at_ms)
    raise NotFoundError(f"no picture has {wanted}", operation=_FIND, subject=job, hint=f"there is {_told(pictures)}")


async def find_complete_picture(repository: Repository, job: str, *, batch: int | None, at_ms: int | None) -> Taken:
    """`find_picture` if everything of it is there, else the newest of which everything is (design 0006, M2).

    Raises:
        IncompleteError: No picture is whole.
        As `find_picture`.
    """
    chosen = await find_picture(repository, job, batch=batch, at_ms=at_ms)
    if await find_complete(repository.store, [chosen[0]]) is not None:
        return chosen
    pictures = await list_pictures(repository, job)
    complete = await find_complete(repository.store, [commit for commit, _ in pictures])
    if complete is None:
        raise IncompleteError(
            f"something of the picture of batch {chosen[1].batch} is missing, and of every other one",
            operation=_FIND,
            subject=job,
        )
    return next(taken for taken in pictures if taken[0].pointer == complete.pointer)


@contextlib.asynccontextmanager
async def pinned_picture(
    repository: Repository,
    job: str,
    *,
    batch: int | None,
    at_ms: int | None,
    purpose: str,
    or_newest_complete: bool = False,
) -> AsyncIterator[tuple[Commit, Picture, PinLease]]:
    """`find_picture`, kept from being collected while the block runs (R9, and design 0002, D5).

    Args:
        or_newest_complete: Use `find_complete_picture` instead.

    Raises:
        CollectedError: Every choice was collected before its pin stood.
        As `find_picture`.
    """
    find = find_complete_picture if or_newest_complete else find_picture
    async with contextlib.AsyncExitStack() as stack:
        for attempt in range(CHOICES_MAX):
            commit, picture = await find(repository, job, batch=batch, at_ms=at_ms)
            try:
                lease = await stack.enter_async_context(repository.pinned(commit, purpose))
            except CollectedError:
                if attempt == CHOICES_MAX - 1:
                    raise
                continue
            yield commit, picture, lease
            return


def _told(pictures: tuple[Taken, ...]) -> str:
    """Which batches can be had, for a hint."""
    oldest, newest = pictures[-1], pictures[0]
    batches = sorted({p.batch for _, p in pictures})
    few = ", ".join(map(str, batches[-8:]))
    return (
        f"{'…, ' if len(batches) > 8 else ''}{few}, taken from {iso_time(oldest[0].committed_at_ms)} "  # noqa: PLR2004
        f"to {iso_time(newest[0].committed_at_ms)}"
    )
