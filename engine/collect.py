"""Collection: the only use case that deletes (design 0002, D1 to D7).

A run gathers facts, plans, writes boundaries, reads the roots again, and deletes what is still in the plan. An error on
the way means that nothing is deleted after it. Listing, marking and deleting are done by `Hands`, so that Spark tasks
can do them where the inventory is large; puts that were never finished are few, and always this process's work.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from blobstore.base import (
    DELETE_BATCH_MAX,
    BlobInfo,
    BlobStore,
    BytesBody,
    Created,
    Lost,
    RequestMetadata,
    UnfinishedPut,
)
from blobstore.bounded import map_bounded
from blobstore.errors import AccessDeniedError, CapabilityMissingError
from engine.errors import DamagedError, UnsafeStoreError
from engine.index_io import is_missing
from engine.inventory import list_room
from engine.log_io import read_boundary
from engine.progress import NO_PROGRESS, Progress
from engine.roots import (
    IN_FLIGHT_MAX,
    References,
    Roots,
    kept_references,
    open_references,
    plan_log_deletes,
    reachable_keys,
    read_roots,
)
from engine.settle import new_indexes_of, settle_indexes
from engine.store_checks import check_collects
from index.codec import encode_record
from index.collect_plan import (
    DeleteReason,
    PlannedDelete,
    ScopePlan,
    UnfinishedPlan,
    UnfinishedUpload,
    Upload,
    choose_unfinished,
    choose_uploads,
    is_upload_key,
    plan_scope,
)
from index.keys import BLOBS, INDEXES, boundary_key
from index.model import Boundary, IndexReference, RepositoryRecord, Scope
from index.retention import KeepReason, Retention

# A collector that is overtaken by a commit and another collector plans again this often.
PLANS_MAX: Final = 3
# Unfinished puts that are given up in one call, which has the deadline of a short request.
ABORT_BATCH_MAX: Final = 100


class KeptCommit(msgspec.Struct, frozen=True, kw_only=True):
    """One commit that stays, and why."""

    scope: Scope
    number: int
    version: int
    reason: KeepReason


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, or with `dry_run` would do."""

    dry_run: bool
    kept: tuple[KeptCommit, ...]
    boundaries: tuple[Boundary, ...]
    deletes: tuple[PlannedDelete, ...]
    # Unreachable uploads that stay because their TTL has not expired.
    waiting_count: int
    waiting_bytes: int
    live_count: int
    live_bytes: int
    # Keys under blobs/ or indexes/ that this project never wrote, finished or not; they are left alone.
    foreign: tuple[str, ...]
    # Puts that nobody has finished, and that stay because they may be under way; the older ones are among `deletes`.
    unfinished_count: int = 0
    # Why unfinished puts could not be looked for; empty if they were.
    unfinished_hidden: str = ""
    failed: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Bytes of the blobs and indexes deleted."""
        return sum(d.size_bytes for d in self.deletes)


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """The inventory, split by what the roots lead to."""

    unreachable: tuple[Upload, ...]
    # Reachable indexes that carry a TTL, or of which the listing did not tell.
    unsettled: frozenset[str]
    live_count: int
    live_bytes: int


class Hands(Protocol):
    """Who carries out the steps whose work grows with the inventory: this process, or the tasks of a Spark job."""

    async def list_uploads(self) -> tuple[str, ...]:
        """List every blob and index, and remember them; called once, before any root is read (D2).

        Returns:
            Keys below their prefixes that tidemark never wrote.
        """
        ...

    async def mark(self, references: References) -> Marked:
        """Split what was listed by what these indexes lead to.

        Raises:
            DamagedError: As `reachable_keys`.
        """
        ...

    async def delete(self, room: Sequence[PlannedDelete]) -> tuple[str, ...]:
        """Delete keys of one room; returns those that are still there."""
        ...


class OwnHands:
    """All of it in this process."""

    def __init__(self, store: BlobStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._uploads: tuple[Upload, ...] = ()

    async def list_uploads(self) -> tuple[str, ...]:
        """As `Hands`."""
        self._uploads, foreign = await list_uploads(self._store, (BLOBS, INDEXES))
        return foreign

    async def mark(self, references: References) -> Marked:
        """As `Hands`."""
        keys = await reachable_keys(self._store, references.everything, optional=references.optional)
        live = [u for u in self._uploads if u.key in keys]
        return Marked(
            unreachable=tuple(u for u in self._uploads if u.key not in keys),
            unsettled=frozenset(
                u.key for u in live if u.key.startswith(INDEXES) and (not u.ttl_known or u.expires_at_ms is not None)
            ),
            live_count=len(live),
            live_bytes=sum(u.size_bytes for u in live),
        )

    async def delete(self, room: Sequence[PlannedDelete]) -> tuple[str, ...]:
        """As `Hands`."""
        return await delete_keys(self._store, room, self._progress)


async def collect(
    store: BlobStore,
    repository: RepositoryRecord,
    retention: Retention,
    *,
    dry_run: bool = False,
    hands: Hands | None = None,
    progress: Progress = NO_PROGRESS,
) -> CollectReport:
    """Delete what nothing keeps, in the order that D4 demands.

    Args:
        retention: Which commits stay; the newest of every scope always does.
        dry_run: Plan only: nothing is written or deleted, no TTL is removed.
        hands: Who lists, marks and deletes; this process if not given.

    Returns:
        What went, each key with its reason, and what stayed.

    Raises:
        UnsafeStoreError: The store cannot be collected (`check_collects`), or a listing had holes: nothing was deleted.
        DamagedError: An index that a root needs is missing or altered: nothing was deleted.
        FormatError: Something was written by a newer tidemark: nothing was deleted.
        StoreError: As the store says: nothing was deleted after it.
    """
    hands = hands or OwnHands(store, progress)
    now_ms = await store.now_ms()
    check_collects(store)
    foreign = await hands.list_uploads()
    unfinished, unfinished_hidden = await plan_unfinished(store, now_ms, repository.ttl_ms)

    async def read(known: Roots | None) -> Roots:
        return await read_roots(store, repository, now_ms, known=known)

    roots, (plans, references), marked = await _plan(store, read, retention, hands, settle=not dry_run)
    doomed = await plan_upload_deletes(store, marked.unreachable, now_ms, repository.ttl_ms)
    written = {plan.boundary for plan in plans if plan.boundary is not None}
    after, spared = roots, frozenset[str]()
    if not dry_run:
        written = {await write_boundary(store, boundary) for boundary in sorted(written, key=lambda b: str(b.scope))}
        after, spared = await _read_again(store, read, roots, references)
        doomed = tuple(d for d in doomed if d.key not in spared)
    rooms = (
        plan_log_deletes(after, planned=written if dry_run else ()),
        tuple(d for d in doomed if d.key.startswith(INDEXES)),
        tuple(d for d in doomed if d.key.startswith(BLOBS)),
    )
    aborted = unfinished.doomed
    failed: tuple[str, ...] = ()
    if not dry_run:
        progress.total(files=sum(map(len, rooms)), bytes_=sum(d.size_bytes for d in doomed))
        failed = await carry_out(hands, rooms)
        aborted = await abort_puts(store, unfinished.doomed)
    not_aborted = frozenset(unfinished.doomed) - frozenset(aborted)
    gone = {d.key for d in doomed}
    waiting = [u for u in marked.unreachable if u.key not in gone and u.key not in spared]
    rescued = [u for u in marked.unreachable if u.key in spared]
    return CollectReport(
        dry_run=dry_run,
        kept=tuple(
            KeptCommit(scope=plan.scope, number=c.pointer.number, version=c.record.version, reason=reason)
            for plan in plans
            for c, reason in plan.kept
        ),
        boundaries=tuple(sorted(written, key=lambda b: str(b.scope))),
        deletes=(
            *(d for room in rooms for d in room if d.key not in failed),
            *(PlannedDelete(put.key, DeleteReason.UNFINISHED_UPLOAD) for put in aborted),
        ),
        waiting_count=len(waiting),
        waiting_bytes=sum(u.size_bytes for u in waiting),
        live_count=marked.live_count + len(rescued),
        live_bytes=marked.live_bytes + sum(u.size_bytes for u in rescued),
        foreign=tuple(sorted({*foreign, *unfinished.foreign})),
        unfinished_count=len(unfinished.young),
        unfinished_hidden=unfinished_hidden,
        failed=(*failed, *sorted(put.key for put in not_aborted)),
    )


# Reads the roots; records of an earlier reading are not read again.
ReadRoots = Callable[[Roots | None], Awaitable[Roots]]
Chosen = TypeVar("Chosen")
Found = TypeVar("Found")


async def _plan(
    store: BlobStore, read: ReadRoots, retention: Retention, hands: Hands, *, settle: bool
) -> tuple[Roots, tuple[tuple[ScopePlan, ...], References], Marked]:
    """The first reading of the roots: plan, mark, and settle the newest commits."""

    def choose(roots: Roots) -> tuple[References, tuple[tuple[ScopePlan, ...], References]]:
        plans = tuple(
            plan_scope(log.listing, log.records, log.boundaries, retention, roots.named(log.listing.scope))
            for log in roots.logs
        )
        references = kept_references(plans, roots)
        return references, (plans, references)

    async def mark(roots: Roots, references: References) -> Marked:
        marked = await hands.mark(references)
        if settle:
            await settle_newest(store, roots, marked.unsettled)
        return marked

    return await _read_until_not_overtaken(read, None, choose, mark)


async def _read_again(
    store: BlobStore, read: ReadRoots, first: Roots, marked: References
) -> tuple[Roots, frozenset[str]]:
    """The second reading of the roots, and what it spares beside what the first has marked (D4)."""

    def choose(roots: Roots) -> tuple[References, None]:
        return open_references(roots), None

    async def spare(roots: Roots, references: References) -> frozenset[str]:  # noqa: ARG001
        unmarked = references.everything - marked.everything
        return await reachable_keys(store, unmarked, optional=references.optional)

    roots, _, spared = await _read_until_not_overtaken(read, first, choose, spare)
    return roots, spared


async def _read_until_not_overtaken(
    read: ReadRoots,
    known: Roots | None,
    choose: Callable[[Roots], tuple[References, Chosen]],
    follow: Callable[[Roots, References], Awaitable[Found]],
) -> tuple[Roots, Chosen, Found]:
    """Read roots and follow what they lead to; again if something missing shows that this collector was overtaken.

    Raises:
        DamagedError: Something is missing though the roots still need it, or is altered.
    """
    overtaken: tuple[frozenset[IndexReference], DamagedError] | None = None
    for attempt in range(PLANS_MAX):
        known = await read(known)
        references, chosen = choose(known)
        if overtaken is not None and references.required == overtaken[0]:
            raise overtaken[1]
        try:
            return known, chosen, await follow(known, references)
        except DamagedError as error:
            if not is_missing(error) or attempt == PLANS_MAX - 1:
                raise
            overtaken = references.required, error
    raise AssertionError("unreachable: the last attempt returns or raises")


async def list_uploads(store: BlobStore, prefixes: Iterable[str]) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Blobs and indexes below some prefixes, and keys there that tidemark never wrote. Comes before the roots (D2)."""

    def take(blob: BlobInfo) -> Upload | str:
        if not is_upload_key(blob.key):
            return blob.key
        return Upload(blob.key, blob.size_bytes, blob.created_at_ms, blob.expires_at_ms, blob.ttl_known)

    found = [one for prefix in prefixes for one in await list_room(store, prefix, take)]
    return tuple(u for u in found if isinstance(u, Upload)), tuple(key for key in found if isinstance(key, str))


async def plan_unfinished(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[UnfinishedPlan, str]:
    """What to do with puts of blobs and indexes that were begun and never finished: one request for each room.

    Returns:
        The plan, and why there is none: the right to see such puts is one of its own, and a store may not tell them.
        What nobody can see harms nobody, so that the rest of the collection goes on.
    """
    puts: list[UnfinishedUpload] = []
    try:
        for room in (BLOBS, INDEXES):
            puts += [UnfinishedUpload(p.key, p.upload_id, p.begun_at_ms) for p in await store.list_unfinished(room)]
    except (AccessDeniedError, CapabilityMissingError) as error:
        return choose_unfinished((), now_ms, ttl_ms), f"{error} ({error.hint})"
    return choose_unfinished(puts, now_ms, ttl_ms), ""


async def abort_puts(store: BlobStore, doomed: Sequence[UnfinishedUpload]) -> tuple[UnfinishedUpload, ...]:
    """Give up unfinished puts; returns those that are given up."""
    given_up: list[UnfinishedUpload] = []
    for start in range(0, len(doomed), ABORT_BATCH_MAX):
        batch = doomed[start : start + ABORT_BATCH_MAX]
        puts = [UnfinishedPut(key=p.key, upload_id=p.upload_id, begun_at_ms=p.begun_at_ms) for p in batch]
        try:
            left = {failure.key for failure in await store.abort_unfinished(puts)}
        except (AccessDeniedError, CapabilityMissingError):
            left = {put.key for put in batch}
        given_up += [put for put in batch if put.key not in left]
    return tuple(given_up)


async def settle_newest(store: BlobStore, roots: Roots, unsettled: frozenset[str]) -> None:
    """T2: complete the TTL removal of the newest valid commit of every scope, where it was interrupted.

    Costs nothing where the listing shows that no live index has a TTL, and one `stat` for each index that is new in a
    newest commit where it does not tell. An index that was not listed came after the listing, with its commit: the
    next collection sees to it.
    """
    newest = [log.commits[-1].record for log in roots.logs if log.commits]
    await settle_indexes(
        store, [index for record in newest for index in new_indexes_of(record) if index.key in unsettled]
    )


async def plan_upload_deletes(
    store: BlobStore, unreachable: Iterable[Upload], now_ms: int, ttl_ms: int
) -> tuple[PlannedDelete, ...]:
    """D2, with a `stat` for each upload younger than the TTL of which the listing did not tell the TTL.

    Where TTLs cannot be removed there is nothing to look up: the TTL of a younger one is running.
    """
    deletes, unknown = choose_uploads(unreachable, (), now_ms, ttl_ms)
    if not store.capabilities.removes_ttl:
        return deletes

    async def look_up(upload: Upload) -> Upload | None:
        info = await store.stat(upload.key, metadata=RequestMetadata(payload_path="collect"))
        return None if info is None else Upload(info.key, info.size_bytes, info.created_at_ms, info.expires_at_ms)

    known = [u for u in await map_bounded(look_up, unknown, in_flight_max=IN_FLIGHT_MAX) if u is not None]
    return (*deletes, *choose_uploads(known, (), now_ms, ttl_ms)[0])


async def write_boundary(store: BlobStore, boundary: Boundary) -> Boundary:
    """Write a boundary, or adopt the one that has its number already (D3).

    Raises:
        UnsafeStoreError: The store did not answer.
    """
    key = boundary_key(boundary.scope, boundary.number)
    match await store.put_if_absent(key, BytesBody(encode_record(boundary))):
        case Created():
            return boundary
        case Lost():
            return await read_boundary(store, boundary.scope, boundary.number)
        case unknown:
            raise UnsafeStoreError(f"no answer for the boundary: {unknown.reason}", operation="collect", subject=key)


async def carry_out(hands: Hands, rooms: Sequence[Sequence[PlannedDelete]]) -> tuple[str, ...]:
    """Delete records, then indexes, then blobs; a room is begun only when the one before is empty (D1).

    Returns:
        Planned keys that are still there: those that the store would not delete, and everything in later rooms.
    """
    for position, room in enumerate(rooms):
        left = await hands.delete(room)
        if left:
            return (*left, *(d.key for later in rooms[position + 1 :] for d in later))
    return ()


async def delete_keys(
    store: BlobStore, deletes: Sequence[PlannedDelete], progress: Progress = NO_PROGRESS
) -> tuple[str, ...]:
    """Delete keys of one room, a batch at a time; returns those that the store would not delete."""
    left: list[str] = []
    for start in range(0, len(deletes), DELETE_BATCH_MAX):
        batch = deletes[start : start + DELETE_BATCH_MAX]
        failures = await store.delete([d.key for d in batch], metadata=RequestMetadata(payload_path="collect"))
        failed = {failure.key for failure in failures}
        left += sorted(failed)
        progress.add(files=len(batch) - len(failed), bytes_=sum(d.size_bytes for d in batch if d.key not in failed))
    return tuple(left)
