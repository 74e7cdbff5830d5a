"""What a commit record says: which stores, on top of what, valid until when (design 0002, C1, C2, C5, C7 and K3).

Then what a writer asks the store before it sends a record, and what the log says of one that was sent.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, NoReturn

import msgspec

from blobstore.base import BlobStore, list_blobs
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from engine.backup.backup import BackupResult
from engine.errors import (
    CommitLostError,
    EngineError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    StaleResultError,
    UnsafeStoreError,
    UsageError,
)
from engine.records.indexes import has_ttl
from engine.records.log import LOAD_ATTEMPTS_MAX, list_log, read_boundaries, read_commit, read_vouched
from index.display import format_texts
from index.errors import FormatError
from index.plan.commits import Commit, Head, Verdict, judge_record, valid_commits
from index.snapshot import model
from index.snapshot.codec import encode_record
from index.snapshot.keys import LOG, commit_key, encode_component

# Any commit may be the parent, as far as the caller is concerned; what the results were diffed against counts (C2).
ANY: Final = "any"


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True):
    """Another layout for a scope, with another store in place of each that it has (design 0010, T1)."""

    # What the parent has to say.
    before: model.ScopeLayout
    after: model.ScopeLayout


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked to be committed; an equal one later is the same request, made again (C3)."""

    kind: Literal["commit", "rewind", "fork"]
    version: int | None = None
    offsets: str = ""
    layout: model.ScopeLayout | LayoutChange | None = None
    # Task, store and index of each result. A unique id is the caller's label: two results may have the same one.
    results: tuple[tuple[str, str, model.IndexReference], ...] = ()
    # Task and name of each store that the scope no longer has.
    dropped: tuple[tuple[str, str], ...] = ()
    parent: model.CommitPointer | Literal["any"] | None = ANY
    source: model.CommitPointer | None = None
    source_scope: model.Scope | None = None

    @property
    def layout_after(self) -> model.ScopeLayout | None:
        """What the record says, if the caller gave it."""
        return self.layout.after if isinstance(self.layout, LayoutChange) else self.layout


def is_answer(record: model.CommitRecord, request: Request) -> bool:
    """Return whether a record is the commit of a request: it names the very indexes of its results as new (C3).

    An index is uploaded once, so the record answers this request, even if another process sent it.
    """
    new = tuple((s.task, s.store, s.index) for s in record.stores if s.number == record.number)
    return (
        bool(request.results)
        and record.kind == request.kind
        and new == request.results
        and record.offsets == request.offsets
        and request.version in {None, record.version}
        and request.layout_after in {None, record.layout}
        and request.parent in {ANY, record.predecessor}
        and all((s.task, s.store) not in request.dropped for s in record.stores)
    )


class Sent(msgspec.Struct, frozen=True):
    """A record that was sent, or was about to be, and of which the outcome was never learned (C3)."""

    request: Request
    record: model.CommitRecord


def request_of(
    results: Sequence[BackupResult],
    *,
    version: int | None,
    offsets: str,
    layout: model.ScopeLayout | LayoutChange | None,
    parent: model.CommitPointer | Literal["any"] | None,
    dropped: Collection[tuple[str, str]],
) -> Request:
    """Make the request to commit some backups, whatever order they come in."""
    identities = ((r.reference.task, r.reference.store, r.reference.index) for r in results)
    return Request(
        kind="commit",
        version=version,
        offsets=offsets,
        layout=layout,
        # At most one for each store: the index is never compared.
        results=tuple(sorted(identities, key=lambda identity: identity[:2])),
        dropped=tuple(sorted(set(dropped))),
        parent=parent,
    )


def compose_commit(
    head: Head,
    request: Request,
    results: Sequence[BackupResult],
    *,
    scope: model.Scope,
    write_id: model.WriteId,
    repository: model.RepositoryRecord,
    committed_before: Collection[model.IndexReference] = (),
) -> model.CommitRecord:
    """Compose the record of new backups on a head: stores without a result are carried over (C2) or dropped (F3).

    The results fit the head (`check_bases`); those of indexes that were `committed_before` are not new in it (T4).

    Raises:
        NotFoundError: A store is to be dropped that the head does not hold.
        UsageError: The layout is another one than the scope has, or a change of it leaves a store as it was (K3).
    """
    parent = head.newest.record if head.newest else None
    stores = {(s.task, s.store): s for s in (parent.stores if parent else ())}
    _check_layout(scope, request, parent)
    for task, store in request.dropped:
        if (task, store) not in stores:
            there = format_texts(sorted("/".join(place) for place in stores)) or "no stores"
            message = f"there is no store {store} of task {task} to drop"
            hint = f"the newest commit has {there}"
            raise NotFoundError(message, operation="commit", subject=str(scope), hint=hint)
        del stores[task, store]
    for result in results:
        number = head.next_number
        if result.reference.index in committed_before:
            number = head.newest.pointer.number if head.newest else head.next_number - 1
        reference = msgspec.structs.replace(result.reference, number=number)
        stores[reference.task, reference.store] = reference
    created_ms = [result.oldest_birth_ms for result in results]
    lease_ms = repository.ttl_ms - repository.margin_ms
    next_version = parent.version + 1 if parent else 1
    return model.CommitRecord(
        scope=scope,
        number=head.next_number,
        write_id=write_id,
        kind=request.kind,
        version=request.version if request.version is not None else next_version,
        offsets=request.offsets,
        layout=request.layout_after or (parent.layout if parent else model.ScopeLayout()),
        stores=tuple(stores[key] for key in sorted(stores)),
        valid_until_ms=min(created_ms) + lease_ms if created_ms else model.NEVER_MS,
        predecessor=head.pointer,
        predecessor_committed_at_ms=head.committed_at_ms,
    )


def _check_layout(scope: model.Scope, request: Request, parent: model.CommitRecord | None) -> None:
    """Raise `UsageError` for a layout that is not the parent's, or a change of it that does not replace every store."""
    layout = request.layout
    begun = parent.layout if parent is not None else None
    message, hint = "", "the key hash of a job never changes; the number of its tasks does by `tidemark rescale` alone"
    if isinstance(layout, LayoutChange):
        left = {(s.task, s.store) for s in (parent.stores if parent is not None else ())}
        left -= {(task, store) for task, store, _ in request.results}.union(request.dropped)
        if not isinstance(request.parent, model.CommitPointer):
            message, hint = "a change of the layout has to name its parent", "give the commit that it was made from"
        elif begun != layout.before:
            message = f"the scope has {begun}, not {layout.before}"
        elif left:
            message = f"stores would keep the keys of the layout before: {format_texts(sorted(map('/'.join, left)))}"
            hint = "give a result for each store, or drop it"
    elif begun is not None and layout not in {None, begun}:
        message = f"the scope has {begun}, not {layout}"
    if message:
        raise UsageError(message, operation="commit", subject=str(scope), hint=hint)


def compose_copy(
    head: Head,
    request: Request,
    source: model.CommitRecord,
    *,
    scope: model.Scope,
    write_id: model.WriteId,
    valid_until_ms: int,
) -> model.CommitRecord:
    """Compose a record of what another commit (`source`) holds, on top of a head (C2, C6, C7).

    `valid_until_ms` is until when a pin protects that commit (D5).

    Raises:
        NotFoundError: The head is older than the commit to rewind to.
        UsageError: The scope of a fork has commits already.
    """
    stores = source.stores
    if request.kind == "fork":
        if head.newest is not None:
            message = "the job has commits already"
            hint = "fork into a job that has none, or forget this one first"
            raise UsageError(message, operation="fork", subject=str(scope), hint=hint)
        stores = tuple(msgspec.structs.replace(s, number=head.next_number) for s in stores)
    elif source.number >= head.next_number:
        # Made by another writer since the head was loaded: who remembers one looks again.
        message = f"commit {source.number} is newer than what is there"
        hint = "look again which commits there are, and rewind to one of them"
        raise NotFoundError(message, operation="rewind", subject=str(scope), hint=hint)
    return model.CommitRecord(
        scope=scope,
        number=head.next_number,
        write_id=write_id,
        kind=request.kind,
        version=source.version,
        offsets=source.offsets,
        layout=source.layout,
        stores=stores,
        valid_until_ms=valid_until_ms,
        predecessor=head.pointer,
        predecessor_committed_at_ms=head.committed_at_ms,
        source=request.source,
        source_scope=request.source_scope,
    )


def encode_commit(record: model.CommitRecord) -> bytes:
    """Encode a record; raise `UsageError` where a value that the caller gave cannot be written down."""
    try:
        return encode_record(record)
    except FormatError as error:
        raise UsageError(
            f"cannot be written down: {error}", operation=record.kind, subject=str(record.scope), hint=error.hint
        ) from error


def check_results(scope: model.Scope, results: Sequence[BackupResult], dropped: Collection[tuple[str, str]]) -> None:
    """Raise `UsageError` for results of another scope or task, two of one store, or one of a store that is dropped."""

    def refuse(problem: str) -> NoReturn:
        raise UsageError(problem, operation="commit", subject=str(scope))

    seen: set[tuple[str, str]] = set()
    for result in results:
        task, name = place = result.reference.task, result.reference.store
        if result.scope != scope:
            refuse(f"a result belongs to {result.scope}")
        if scope.task not in {None, task}:
            refuse(f"a result belongs to task {task}")
        if place in seen:
            refuse(f"two results for store {name} of task {task}")
        seen.add(place)
    for task, name in sorted(seen.intersection(dropped)):
        refuse(f"store {name} of task {task} has a result and is to be dropped")


def check_parent(scope: model.Scope, head: Head, request: Request) -> None:
    """Raise `CommitLostError` for a request whose caller has seen another newest commit."""
    if request.parent not in {ANY, head.pointer}:
        there = f"the newest commit is {head.pointer.number}" if head.pointer else "there is no commit any more"
        raise CommitLostError(f"{there}: it is not the parent given", operation=request.kind, subject=str(scope))


def check_bases(scope: model.Scope, head: Head, results: Sequence[BackupResult]) -> None:
    """Raise `StaleResultError` for a result that was diffed against another index than the parent holds (C2).

    So is one that was uploaded before the scope was forgotten (D8).
    """
    for result in results:
        place = f"store {result.reference.store} of task {result.reference.task}"
        held = head.store(result.reference)
        if head.newest is None and result.oldest_birth_ms < head.closed_at_ms:
            message, hint = f"{place} was uploaded before the job was forgotten", "back up again, then commit"
            raise StaleResultError(message, operation="commit", subject=str(scope), hint=hint)
        if result.base != (held.index if held else None):
            base = f"{place} was backed up against {result.base.key if result.base else None}"
            message = f"{base}, but the newest commit holds {held.index.key if held else None}"
            raise StaleResultError(message, operation="commit", subject=str(scope))


async def check_granularity(store: BlobStore, scope: model.Scope, operation: str, first: Commit | None = None) -> None:
    """Refuse to commit a job both as a whole and by task: a store belongs to exactly one scope (K3).

    `first` is the first commit of the scope. Of two kinds that began side by side the one goes on whose first record
    was created first by the store's clock, or the whole job.

    Raises:
        UsageError: There is a log of the other kind, and it came first.
    """
    job = f"{LOG}{encode_component(scope.job)}"
    other = f"{job}@" if scope.task is None else f"{job}/"
    began_ms = min([blob.created_at_ms async for blob in list_blobs(store, other)], default=None)
    if began_ms is None:
        return
    if first is None or (began_ms, scope.task is None) < (first.created_at_ms, scope.task is not None):
        message = "the job already commits " + ("task by task" if scope.task is None else "as a whole")
        hint = "use the same kind of scope, or another job name"
        raise UsageError(message, operation=operation, subject=str(scope), hint=hint)


async def find_committed(
    store: BlobStore, head: Head, results: Iterable[BackupResult]
) -> frozenset[model.IndexReference]:
    """Find the results that were committed before, as after a rewind, a drop or a forget: their indexes have no TTL.

    Such an index is not new in another record: only so does an index without a TTL prove that the record that names it
    as new was acknowledged (T4). One STAT for each result whose store the head has carried over or does not have.

    Raises:
        LeaseExpiredError: The index of a result is gone.
    """

    async def is_old(result: BackupResult) -> bool:
        carries_ttl = await has_ttl(store, result.reference.index.key)
        if carries_ttl is None:
            raise LeaseExpiredError("the index is gone", operation="commit", subject=result.reference.index.key)
        return not carries_ttl

    asked = [result for result in results if store.capabilities.removes_ttl and head.may_know(result.reference)]
    old = await map_bounded(is_old, asked)
    return frozenset(result.reference.index for result, found in zip(asked, old, strict=True) if found)


async def acknowledge(store: BlobStore, record: model.CommitRecord) -> Commit:
    """Decide by one LIST whether a record that was created is acknowledged, lost, fenced or void (C4, C5).

    Raises:
        CommitLostError: Later records do not descend from it.
        FencedError: A collector has closed it.
        LeaseExpiredError: It came too late, and is void.
        UsageError: It is the first of its scope, and the job has begun in the other way before (K3).
        UnsafeStoreError: The log does not hold still, or the record is not listed.
    """
    for _ in range(LOAD_ATTEMPTS_MAX):
        listing = await list_log(store, record.scope, from_number=record.number)
        try:
            boundaries = await read_boundaries(store, listing)
            # A boundary that lists this record has seen it in the chain; only without one can later records contradict.
            numbers = [number for number, _ in listing.records if number > record.number and not boundaries]
            records = {number: await read_commit(store, record.scope, number) for number in numbers}
            newer = valid_commits(listing, records, boundaries, await read_vouched(store, listing, records, boundaries))
        except BlobNotFoundError:
            continue
        verdict = judge_record(record, listing, boundaries, newer)
        if isinstance(verdict, Commit):
            if record.predecessor is None:
                # Two kinds may both have looked before either of them wrote (K3).
                await check_granularity(store, record.scope, record.kind, verdict)
            return verdict
        raise _refusal(verdict, record)
    raise UnsafeStoreError("the log keeps changing", operation=record.kind, subject=str(record.scope))


def _refusal(verdict: Verdict, record: model.CommitRecord) -> EngineError:
    scope, operation = str(record.scope), record.kind
    match verdict:
        case Verdict.FENCED:
            return FencedError(f"a boundary does not list record {record.number}", operation=operation, subject=scope)
        case Verdict.VOID:
            # A pin holds the blobs of a copy, not a backup.
            hint = "" if operation == "commit" else f"{operation} again: it took longer than its pin holds"
            message = f"record {record.number} was created after the lease of its uploads: it is void"
            return LeaseExpiredError(message, operation=operation, subject=scope, hint=hint)
        case Verdict.LOST:
            message = f"later records do not descend from record {record.number}"
            return CommitLostError(message, operation=operation, subject=scope)
        case Verdict.NOT_LISTED:
            key = commit_key(record.scope, record.number)
            return UnsafeStoreError("the record just written is not in the listing", operation=operation, subject=key)
