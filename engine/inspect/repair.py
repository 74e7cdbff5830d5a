"""Which commits need what is damaged, and the end of those that nobody can restore (design 0006, M3)."""

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from blobstore.base import BlobStore, Created, Lost
from engine.errors import ConflictError, DamagedError, UnsafeStoreError, UsageError
from engine.inspect.verify import Problem, ProblemKind
from engine.records.indexes import read_index
from engine.records.log import check_consistent_lists, find_boundary, load_scope, put_boundary
from index.errors import FormatError, UnknownFormatError
from index.plan.collect import choose_number
from index.plan.commits import Commit
from index.snapshot.contents import files_of
from index.snapshot.model import Boundary, Scope, StoreReference

OPERATION: Final = "repair"
_MAY_ARRIVE: Final = "repair again: the boundary may still arrive, and closes the damaged commits then"


class DamagedStore(msgspec.Struct, frozen=True, kw_only=True):
    """One store of a commit that cannot be restored whole, and what of it would have to be sent again."""

    task: str
    store: str
    # All of them where the index is damaged: then nobody knows which.
    files_count: int
    size_bytes: int
    # At most the first hundred.
    files: tuple[str, ...] = ()
    index_damaged: bool = False


class DamagedCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that needs something that is missing or altered."""

    number: int
    version: int
    committed_at_ms: int
    # Set where only this name still holds it.
    name: str | None
    stores: tuple[DamagedStore, ...]


_FILES_SHOWN_MAX: Final = 100


async def find_damaged(
    store: BlobStore, commits: Sequence[Commit], problems: Collection[Problem]
) -> tuple[DamagedCommit, ...]:
    """Find which of some commits need what a verification has found, in the order of the commits.

    Requests: a GET for each index (more for deltas). Nothing else is read: a commit that is not named needs nothing of
    what was found.
    """
    altered = {(p.key, p.path) for p in problems if p.kind is ProblemKind.CONTENT_WRONG}
    gone = {p.key for p in problems if p.kind in {ProblemKind.BLOB_MISSING, ProblemKind.BLOB_SHORT}}
    found: list[DamagedCommit] = []
    # Most commits carry most indexes over.
    seen: dict[tuple[str, str, str], DamagedStore | None] = {}
    for commit in commits:
        damaged: list[DamagedStore] = []
        for reference in commit.record.stores:
            key = (reference.task, reference.store, reference.index.key)
            if key not in seen:
                seen[key] = await _look(store, reference, altered, gone)
            if (one := seen[key]) is not None:
                damaged.append(one)
        if damaged:
            found.append(
                DamagedCommit(
                    number=commit.pointer.number,
                    version=commit.record.version,
                    committed_at_ms=commit.committed_at_ms,
                    name=commit.name,
                    stores=tuple(damaged),
                )
            )
    return tuple(found)


async def _look(
    store: BlobStore, reference: StoreReference, altered: Collection[tuple[str, str]], gone: Collection[str]
) -> DamagedStore | None:
    whole = DamagedStore(
        task=reference.task,
        store=reference.store,
        files_count=reference.files_count,
        size_bytes=reference.size_bytes,
        index_damaged=True,
    )
    try:
        index = await read_index(store, reference.index)
    except UnknownFormatError:
        raise  # the bytes are right: a newer tidemark can restore it
    except (DamagedError, FormatError):
        return whole
    files = {
        "/".join(path): file.metadata.size_bytes
        for path, file in files_of(index.dir)
        if any(b.key in gone for b in file.blobs) or (file.blobs and (file.blobs[0].key, "/".join(path)) in altered)
    }
    if not files:
        return None
    return msgspec.structs.replace(
        whole,
        files_count=len(files),
        size_bytes=sum(files.values()),
        files=tuple(sorted(files)[:_FILES_SHOWN_MAX]),
        index_damaged=False,
    )


async def drop_commits(store: BlobStore, scope: Scope, numbers: Collection[int]) -> Boundary | None:
    """Close open commits by a boundary that keeps all others, as a collection closes what retention gives up (D3).

    Nothing is deleted: a collection takes what only they needed.

    Returns:
        The boundary; None: none of the numbers is of an open commit.

    Raises:
        UsageError: The newest commit is one of them, or another record of the scope cannot be read.
        ConflictError: Other boundaries leave no number for this one.
        UnsafeStoreError: The boundary may be missing.
        StoreError: As the store says; nothing is closed.
    """
    check_consistent_lists(store, OPERATION, "a commit that is not listed could be closed")
    log = await load_scope(store, scope)
    if log.unreadable:
        key = log.unreadable[0].key
        raise UsageError("cannot be read", operation=OPERATION, subject=key, hint=f"`tidemark discard {key}` first")
    closed = [c.pointer.number for c in log.commits if c.pointer.number in numbers]
    if not closed:
        return None
    newest = log.commits[-1].pointer.number
    if newest in closed:
        hint = "send it again or rewind first; to give up the whole job there is `tidemark forget`"
        raise UsageError(f"commit {newest} is the newest", operation=OPERATION, subject=str(scope), hint=hint)
    # Never above the newest: a commit that lands meanwhile is not to be closed.
    number = choose_number(log.listing, log.boundaries, max(closed), newest)
    if not number:
        raise ConflictError("no number is left below the newest commit", operation=OPERATION, subject=str(scope))
    kept = sorted(c.pointer for c in log.commits if c.pointer.number <= number and c.pointer.number not in closed)
    boundary = Boundary(scope=scope, number=number, kept=tuple(kept))
    outcome = await put_boundary(store, boundary, operation=OPERATION, may_arrive=_MAY_ARRIVE)
    if isinstance(outcome, Lost):
        raise ConflictError(f"a collection has written boundary {number} meanwhile", operation=OPERATION)
    if not isinstance(outcome, Created) and await find_boundary(store, scope, number) != boundary:
        raise UnsafeStoreError("the boundary may be missing", operation=OPERATION, subject=str(scope), hint=_MAY_ARRIVE)
    return boundary
