"""Collection: the only use case that deletes (design 0002, D1 to D7).

A run gathers facts, plans, writes boundaries, reads the roots again, and deletes what is still in the plan. An error on
the way means that nothing is deleted after it. Listing, marking and deleting are done by `Hands`, so that Spark tasks
can do them where the inventory is large.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, Created, Lost, RequestMetadata, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from engine.bounded import map_bounded
from engine.errors import DamagedError, UnsafeStoreError
from engine.index_io import is_missing, read_index_chain
from engine.log_io import list_all_logs, read_boundaries, read_boundary, read_records
from engine.progress import NO_PROGRESS, Progress
from engine.settle import new_keys_of, settle_keys
from index.codec import RECORD_BYTES_MAX, decode_name, decode_pin, encode_record
from index.collect_plan import (
    DeleteReason,
    PlannedDelete,
    ScopePlan,
    Upload,
    choose_closed_records,
    choose_superseded_boundaries,
    choose_uploads,
    name_is_live,
    name_is_removable,
    pin_is_live,
    pin_is_removable,
    plan_scope,
)
from index.errors import UnsafeNameError
from index.keys import BLOBS, INDEXES, NAMES, PINS, boundary_key, commit_key, parse_name_key, parse_upload_key
from index.log import Commit, LogListing, ShortListingError, check_dense, valid_commits
from index.model import Boundary, CommitPointer, CommitRecord, IndexReference, RepositoryRecord, Scope, StoreReference
from index.reachable import blob_keys
from index.retention import KeepReason, Retention

IN_FLIGHT_MAX: Final = 16
ROOT_ATTEMPTS_MAX: Final = 5
# A collector that is overtaken by a commit and another collector plans again this often.
PLANS_MAX: Final = 3


class ScopeLog(msgspec.Struct, frozen=True, kw_only=True):
    """One scope's log, listed and read whole."""

    listing: LogListing
    records: dict[int, CommitRecord]
    boundaries: tuple[Boundary, ...]

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Its valid commits, oldest first."""
        return valid_commits(self.listing, self.records, self.boundaries)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A pin or a name as a root: where it came from, and what it protects (nothing, once it is over)."""

    key: str
    written_at_ms: int
    source: CommitPointer
    scope: Scope
    stores: tuple[StoreReference, ...]
    # Set once the object itself may be deleted.
    removable: DeleteReason | None


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that keeps blobs alive, as one reading of it."""

    logs: tuple[ScopeLog, ...]
    leases: tuple[Lease, ...]

    def named(self, scope: Scope) -> frozenset[CommitPointer]:
        """Records of a scope that a live name refers to."""
        return frozenset(
            le.source for le in self.leases if le.scope == scope and le.stores and le.key.startswith(NAMES)
        )


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The indexes that roots lead to."""

    everything: frozenset[IndexReference]
    # Those that only pins lead to. What is not there any more was collected before the pin stood, and the pinner is
    # refused by `check_open`: it keeps nothing, and is no damage.
    optional: frozenset[IndexReference]

    @property
    def required(self) -> frozenset[IndexReference]:
        """Those that have to be there."""
        return self.everything - self.optional


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
    # Keys under blobs/ or indexes/ that this project never wrote; they are left alone.
    foreign: tuple[str, ...]
    failed: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Bytes of the blobs and indexes deleted."""
        return sum(d.size_bytes for d in self.deletes)


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """The inventory, split by what the roots lead to."""

    unreachable: tuple[Upload, ...]
    # Reachable ones that carry a TTL, or of which the listing did not tell.
    live_with_ttl: tuple[Upload, ...]
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
            live_with_ttl=tuple(u for u in live if not u.ttl_known or u.expires_at_ms is not None),
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
        UnsafeStoreError: The store's lists are not consistent, or a listing had holes: nothing was deleted.
        DamagedError: An index that a root needs is missing or altered: nothing was deleted.
        FormatError: Something was written by a newer tidemark: nothing was deleted.
        StoreError: As the store says: nothing was deleted after it.
    """
    check_store(store)
    hands = hands or OwnHands(store, progress)
    now_ms = await store.now_ms()
    foreign = await hands.list_uploads()
    planned = await _plan(store, repository, retention, hands, now_ms, settle=not dry_run)
    roots, plans, marked = planned.roots, planned.plans, planned.marked
    doomed = await plan_upload_deletes(store, marked.unreachable, now_ms)
    written = {plan.boundary for plan in plans if plan.boundary is not None}
    after, spared = roots, frozenset[str]()
    if not dry_run:
        written = {await write_boundary(store, boundary) for boundary in sorted(written, key=lambda b: str(b.scope))}
        after, spared = await _read_again(store, repository, now_ms, planned)
        doomed = tuple(d for d in doomed if d.key not in spared)
    rooms = (
        plan_log_deletes(after, planned=written if dry_run else ()),
        tuple(d for d in doomed if d.key.startswith(INDEXES)),
        tuple(d for d in doomed if d.key.startswith(BLOBS)),
    )
    failed: tuple[str, ...] = ()
    if not dry_run:
        progress.total(files=sum(map(len, rooms)), bytes_=sum(d.size_bytes for d in doomed))
        failed = await carry_out(hands, rooms)
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
        deletes=tuple(d for room in rooms for d in room if d.key not in failed),
        waiting_count=len(waiting),
        waiting_bytes=sum(u.size_bytes for u in waiting),
        live_count=marked.live_count + len(rescued),
        live_bytes=marked.live_bytes + sum(u.size_bytes for u in rescued),
        foreign=foreign,
        failed=failed,
    )


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    """Roots, what is to become of them, and what they lead to."""

    roots: Roots
    plans: tuple[ScopePlan, ...]
    references: References
    marked: Marked


async def _plan(
    store: BlobStore,
    repository: RepositoryRecord,
    retention: Retention,
    hands: Hands,
    now_ms: int,
    *,
    settle: bool,
) -> _Planned:
    """Read the roots, plan and mark; again if something missing shows that this collector was overtaken."""
    roots: Roots | None = None
    overtaken_by: tuple[frozenset[IndexReference], DamagedError] | None = None
    for attempt in range(PLANS_MAX):
        roots = await read_roots(store, repository, now_ms, known=roots)
        plans = tuple(
            plan_scope(log.listing, log.records, log.boundaries, retention, roots.named(log.listing.scope))
            for log in roots.logs
        )
        references = root_references(plans, roots.leases)
        if overtaken_by is not None and references.required == overtaken_by[0]:
            raise overtaken_by[1]
        try:
            marked = await hands.mark(references)
            if settle:
                await settle_newest(store, roots, marked.live_with_ttl)
        except DamagedError as error:
            if not is_missing(error) or attempt == PLANS_MAX - 1:
                raise
            overtaken_by = references.required, error
        else:
            return _Planned(roots=roots, plans=plans, references=references, marked=marked)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _read_again(
    store: BlobStore, repository: RepositoryRecord, now_ms: int, planned: _Planned
) -> tuple[Roots, frozenset[str]]:
    """The second reading of the roots, and what it spares (D4); again if this collector was overtaken, as `_plan`."""
    roots = planned.roots
    overtaken_by: tuple[frozenset[IndexReference], DamagedError] | None = None
    for attempt in range(PLANS_MAX):
        roots = await read_roots(store, repository, now_ms, known=roots)
        references = open_references(roots)
        if overtaken_by is not None and references.required == overtaken_by[0]:
            raise overtaken_by[1]
        unmarked = references.everything - planned.references.everything
        try:
            return roots, await reachable_keys(store, unmarked, optional=references.optional)
        except DamagedError as error:
            if not is_missing(error) or attempt == PLANS_MAX - 1:
                raise
            overtaken_by = references.required, error
    raise AssertionError("unreachable: the last attempt returns or raises")


def check_store(store: BlobStore) -> None:
    """Refuse a store on which collection cannot be safe (D4).

    Raises:
        UnsafeStoreError: Its lists may be stale, or its conditional create is not atomic.
    """
    if not (store.capabilities.consistent_lists and store.capabilities.atomic_create):
        raise UnsafeStoreError(
            "the store's lists may be stale or its conditional create is not atomic",
            operation="collect",
            hint="collect only on a store with consistent lists and atomic create-if-absent",
        )


async def list_uploads(store: BlobStore, prefixes: Iterable[str]) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Blobs and indexes below some prefixes, and keys there that tidemark never wrote. Comes before the roots (D2)."""
    uploads: list[Upload] = []
    foreign: list[str] = []
    for prefix in prefixes:
        async for blob in list_blobs(store, prefix):
            try:
                parse_upload_key(blob.key)
            except UnsafeNameError:
                foreign.append(blob.key)
                continue
            uploads.append(Upload(blob.key, blob.size_bytes, blob.created_at_ms, blob.expires_at_ms, blob.ttl_known))
    return tuple(uploads), tuple(foreign)


async def read_roots(
    store: BlobStore, repository: RepositoryRecord, now_ms: int, *, known: Roots | None = None
) -> Roots:
    """All logs, names and pins; records in `known` are not read again.

    Raises:
        UnsafeStoreError: The logs keep changing or have holes (C1).
    """
    remembered: Mapping[Scope, Mapping[int, CommitRecord]] = (
        {log.listing.scope: log.records for log in known.logs} if known else {}
    )
    for attempt in range(ROOT_ATTEMPTS_MAX):
        try:
            # Pins first: a name, fork or rewind releases its pin only once its own record stands, so that a pin already
            # gone here has left a record that the later readings find (D5). The other way round both could be missed.
            pins = await _read_pins(store, repository, now_ms)
            names = await _read_names(store, now_ms)
            logs = [
                await _read_log(store, listing, remembered.get(listing.scope)) for listing in await list_all_logs(store)
            ]
            return Roots(logs=tuple(logs), leases=(*names, *pins))
        except (BlobNotFoundError, ShortListingError) as error:
            if attempt == ROOT_ATTEMPTS_MAX - 1:
                raise UnsafeStoreError("the logs keep changing or have holes", operation="collect") from error
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _read_log(store: BlobStore, listing: LogListing, known: Mapping[int, CommitRecord] | None) -> ScopeLog:
    boundaries = await read_boundaries(store, listing)
    check_dense(listing, boundaries)
    return ScopeLog(listing=listing, records=await read_records(store, listing, known), boundaries=boundaries)


async def _read_names(store: BlobStore, now_ms: int) -> list[Lease]:
    leases = []
    async for blob in list_blobs(store, NAMES):
        parse_name_key(blob.key)
        name = decode_name(await read_blob(store, blob.key, size_bytes_max=RECORD_BYTES_MAX), subject=blob.key)
        live = name_is_live(name, blob.created_at_ms)
        removable = name_is_removable(name, blob.created_at_ms, now_ms)
        leases.append(
            Lease(
                key=blob.key,
                written_at_ms=blob.created_at_ms,
                source=name.source,
                scope=name.scope,
                stores=name.stores if live else (),
                removable=DeleteReason.RELEASED_NAME if removable else None,
            )
        )
    return leases


async def _read_pins(store: BlobStore, repository: RepositoryRecord, now_ms: int) -> list[Lease]:
    leases = []
    async for blob in list_blobs(store, PINS):
        pin = decode_pin(await read_blob(store, blob.key, size_bytes_max=RECORD_BYTES_MAX), subject=blob.key)
        live = pin_is_live(pin, blob.created_at_ms, now_ms)
        removable = pin_is_removable(pin, blob.created_at_ms, now_ms, repository.margin_ms)
        leases.append(
            Lease(
                key=blob.key,
                written_at_ms=blob.created_at_ms,
                source=pin.source,
                scope=pin.scope,
                stores=pin.stores if live else (),
                removable=DeleteReason.EXPIRED_PIN if removable else None,
            )
        )
    return leases


def root_references(plans: Iterable[ScopePlan], leases: Iterable[Lease]) -> References:
    """The indexes that kept commits, names and pins lead to."""
    return _references((commit for plan in plans for commit, _ in plan.kept), leases)


def open_references(roots: Roots) -> References:
    """The indexes that any commit still open, and any live lease, leads to: those of the second reading (D4)."""
    return _references((commit for log in roots.logs for commit in log.commits), roots.leases)


def _references(commits: Iterable[Commit], leases: Iterable[Lease]) -> References:
    required = {s.index for commit in commits for s in commit.record.stores}
    pinned: set[IndexReference] = set()
    for lease in leases:
        (pinned if lease.key.startswith(PINS) else required).update(s.index for s in lease.stores)
    return References(everything=frozenset(required | pinned), optional=frozenset(pinned - required))


async def reachable_keys(
    store: BlobStore,
    references: Iterable[IndexReference],
    *,
    optional: frozenset[IndexReference] = frozenset(),
) -> frozenset[str]:
    """Every key that some indexes keep alive: themselves, the bases of deltas (P2), and the blobs.

    Args:
        optional: Those of them that keep nothing alive where they, or what they are a delta on, are missing.

    Raises:
        DamagedError: An index is missing or altered.
    """

    async def read(reference: IndexReference) -> frozenset[str]:
        try:
            index, chain = await read_index_chain(store, reference)
        except DamagedError as error:
            if reference in optional and is_missing(error):
                return frozenset()
            raise
        return blob_keys(index) | {r.key for r in chain}

    found = await map_bounded(read, sorted(references, key=lambda r: r.key), in_flight_max=IN_FLIGHT_MAX)
    return frozenset().union(*found)


async def settle_newest(store: BlobStore, roots: Roots, live_with_ttl: Iterable[Upload]) -> None:
    """T2: complete the TTL removal of the newest valid commit of every scope, where it was interrupted.

    Costs nothing where the listing shows that no live upload has a TTL.
    """
    with_ttl = {u.key for u in live_with_ttl}
    for log in roots.logs:
        if log.commits and with_ttl:
            keys = await new_keys_of(store, log.commits[-1].record)
            await settle_keys(store, [key for key in keys if key in with_ttl])


async def plan_upload_deletes(
    store: BlobStore, unreachable: Iterable[Upload], now_ms: int
) -> tuple[PlannedDelete, ...]:
    """D2, with a `stat` for each upload of which the listing did not tell the TTL."""
    deletes, unknown = choose_uploads(unreachable, (), now_ms)

    async def look_up(upload: Upload) -> Upload | None:
        info = await store.stat(upload.key, metadata=RequestMetadata(payload_path="collect"))
        return None if info is None else Upload(info.key, info.size_bytes, info.created_at_ms, info.expires_at_ms)

    known = [u for u in await map_bounded(look_up, unknown, in_flight_max=IN_FLIGHT_MAX) if u is not None]
    return (*deletes, *choose_uploads(known, (), now_ms)[0])


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


def plan_log_deletes(roots: Roots, planned: Iterable[Boundary] = ()) -> tuple[PlannedDelete, ...]:
    """Closed records first, then superseded boundaries, released names and pins that are over."""
    records: list[PlannedDelete] = []
    others: list[PlannedDelete] = []
    for log in roots.logs:
        scope = log.listing.scope
        boundaries = (*log.boundaries, *(b for b in planned if b.scope == scope))
        records += [
            PlannedDelete(commit_key(scope, p.number), DeleteReason.CLOSED_COMMIT)
            for p in choose_closed_records(log.listing, log.records, boundaries)
        ]
        others += [
            PlannedDelete(boundary_key(scope, b.number), DeleteReason.SUPERSEDED_BOUNDARY)
            for b in choose_superseded_boundaries(boundaries)
        ]
    others += [PlannedDelete(lease.key, lease.removable) for lease in roots.leases if lease.removable is not None]
    return (*records, *others)


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
