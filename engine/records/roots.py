"""What keeps blobs alive, as a collector reads it: open commits, live names, live pins (design 0002, D4 and D5).

Then which scopes a collection leaves alone because something of them cannot be read (D9).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec

from blobstore.base import BlobInfo, BlobStore, list_blobs, list_checked_page
from blobstore.concurrency import map_bounded
from engine.errors import ConflictError, DamagedError
from engine.records.indexes import is_missing, read_stored_snapshot
from engine.records.leases import list_namings
from engine.records.log import Noted, ScopeLog, Unreadable, list_all_logs, read_record, read_scope, repeat_reading
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.plan import collect
from index.plan.commits import NOTHING_VOUCHES, Commit, Naming, RetentionPolicy, choose_superseded_boundaries, is_closed
from index.snapshot import keys, model
from index.snapshot.codec import decode_pin

Taken = TypeVar("Taken")

# Before a reading is repeated that others have disturbed: two minutes.
_WAITS_S: Final = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 50)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A pin, a name or a closed record as a root: its key, and what it protects (nothing, once it is over)."""

    key: str
    source: model.CommitPointer
    scope: model.Scope
    stores: tuple[model.StoreReference, ...]
    # Set once the object itself may be deleted.
    removable: collect.DeleteReason | None = None


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that keeps blobs alive, as one reading of it."""

    logs: tuple[ScopeLog, ...]
    names: tuple[Lease, ...]
    pins: tuple[Lease, ...]
    # Names that were released since the reading before (D5), and records that are perhaps not closed for good (D3).
    retained: tuple[Lease, ...] = ()
    # Names, and pins that may still last, that cannot be read.
    unreadable: tuple[Unreadable, ...] = ()
    # Pins that cannot be read and are older than any pin lasts: they keep nothing.
    outlived: tuple[str, ...] = ()
    # Keys that tidemark never wrote.
    foreign: tuple[str, ...] = ()

    def all_unreadable(self) -> tuple[Unreadable, ...]:
        return (*self.unreadable, *(one for log in self.logs for one in log.unreadable))

    def named(self, scope: model.Scope) -> frozenset[model.CommitPointer]:
        return frozenset(name.source for name in self.names if name.scope == scope and name.stores)


class RootStore(NamedTuple):
    """One store of a root: of a commit, or of the lease of a name or a pin."""

    source: model.CommitPointer
    scope: model.Scope
    store: model.StoreReference
    # None: of a commit.
    lease: Lease | None = None


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The indexes that roots lead to."""

    # One store's in the order of its commits: a reader in this order meets the same blobs again and again.
    neighbours: tuple[model.IndexReference, ...]
    # Those that only pins and what is retained lead to. What is not there any more was collected before the pin was
    # there, and the pinner is refused by `check_open`: it keeps nothing, and is not damage.
    optional: frozenset[model.IndexReference]
    # Of which scopes nothing may go, whatever these lead to.
    protected: collect.Protection = collect.NOTHING_PROTECTED

    @property
    def everything(self) -> frozenset[model.IndexReference]:
        return frozenset(self.neighbours)

    def without(self, broken: Collection[model.IndexReference], protected: collect.Protection) -> "References":
        """Return those that can be read, and of which scopes nothing may go because of the others."""
        return References(
            neighbours=tuple(r for r in self.neighbours if r not in broken),
            optional=self.optional.difference(broken),
            protected=protected,
        )

    @property
    def required(self) -> frozenset[model.IndexReference]:
        return self.everything - self.optional


async def read_roots(
    store: BlobStore,
    repository: model.RepositoryRecord,
    now_ms: int,
    *,
    known: Roots | None = None,
    written: Iterable[model.Boundary] | None = None,
    operation: str = "collect",
) -> Roots:
    """Read all logs, names and pins; records in `known`, an earlier reading, are not read again.

    With the boundaries that the caller has `written` since, it reads again while others have closed something, too: by
    a boundary that the reading before did not show (D4). So it does after a reading that took as long as a pin lasts,
    the first one from `now_ms`: a naming that was released meanwhile may be gone, and a name be given on its strength
    that came after the listing.

    Raises:
        UnsafeStoreError: The logs keep changing or have holes (C1).
        ConflictError: Others still closed something after ten readings, or each of these took that long.
    """
    waits, began_ms = iter(_WAITS_S), now_ms
    while True:
        roots = await repeat_reading(partial(_read_once, store, repository, now_ms, known), operation=operation)
        if known is None or written is None:
            return roots
        # What they close may have been pinned when it was open, after the pins were read.
        since = _boundaries(roots) - _boundaries(known) - set(written)
        ended_ms = await store.now_ms()
        if not since and ended_ms - began_ms < model.PIN_DURATION_MS:
            return roots
        if (wait_s := next(waits, None)) is None:
            if not since:
                message = "takes longer to read than a pin lasts"
                hint = "collect from where the blob store answers faster, or release names that nobody needs"
                raise ConflictError(message, operation=operation, subject=keys.NAMES, hint=hint)
            key = min(keys.boundary_key(boundary.scope, boundary.number) for boundary in since)
            hint = "collect again when no other collection, `forget`, `discard` or `repair --drop` is at work"
            raise ConflictError(
                "closes commits, as others did all the time", operation=operation, subject=key, hint=hint
            )
        known, began_ms = roots, ended_ms
        await asyncio.sleep(wait_s)


async def _read_once(store: BlobStore, repository: model.RepositoryRecord, now_ms: int, known: Roots | None) -> Roots:
    remembered = {log.listing.scope: log.records for log in known.logs} if known else {}
    over = {name.key for name in known.names if not name.stores} if known else set[str]()
    # Pins first: a name, fork or rewind releases its pin only once its own record is there, so that a pin already
    # gone here has left a record that the later readings find (D4). The other way round both could be missed.
    noted = Noted()
    pins = await read_pins(store, repository, now_ms, noted)
    namings = await list_namings(store, noted)
    # A pin may have come since, of somebody who found a name live that was released after that.
    released = {n.key: n for n in namings if known and n.record.released and n.key not in over}
    listings = await list_all_logs(store, noted)
    logs = [await read_scope(store, listing, remembered.get(listing.scope, {})) for listing in listings]
    return Roots(
        logs=tuple(logs),
        names=tuple(_lease_of(n, repository, now_ms) for n in namings if n.key not in released),
        pins=pins,
        retained=(
            *(
                Lease(key=n.key, source=n.record.source, scope=n.record.scope, stores=n.record.stores)
                for n in released.values()
            ),
            *(
                Lease(key=keys.commit_key(r.scope, r.number), source=r.pointer, scope=r.scope, stores=r.stores)
                for log in logs
                for r in log.reopenable
            ),
        ),
        unreadable=tuple(noted.unreadable),
        outlived=tuple(noted.outlived),
        foreign=(*noted.foreign, *(key for listing in listings for key in listing.foreign)),
    )


def _boundaries(roots: Roots) -> set[model.Boundary]:
    """Return what is read of boundaries: a number may come again, and close something else (D3)."""
    return {boundary for log in roots.logs for boundary in log.boundaries}


def _lease_of(naming: Naming, repository: model.RepositoryRecord, now_ms: int) -> Lease:
    record = naming.record
    is_over = collect.name_is_removable(
        record, naming.created_at_ms, now_ms, repository.margin_ms, is_live=naming.is_live
    )
    return Lease(
        key=naming.key,
        source=record.source,
        scope=record.scope,
        stores=record.stores if naming.is_live else (),
        removable=collect.DeleteReason.RELEASED_NAME if is_over else None,
    )


async def read_pins(
    store: BlobStore, repository: model.RepositoryRecord, now_ms: int, noted: Noted
) -> tuple[Lease, ...]:
    """Return every pin, those that are over too: one LIST per 1,000, and a GET for each.

    One that cannot be read is noted: it may keep anything until it is older than any pin lasts.
    """
    leases: list[Lease] = []
    async for blob in list_blobs(store, keys.PINS):
        if not keys.is_pin_key(blob.key):
            noted.foreign.append(blob.key)
            continue
        try:
            pin = await read_record(store, blob.key, decode_pin)
        except FormatError as error:
            if blob.created_at_ms + model.PIN_DURATION_MS + 2 * repository.margin_ms <= now_ms:
                noted.outlived.append(blob.key)
            else:
                noted.unreadable.append(Unreadable(key=blob.key, error=error))
            continue
        removable = collect.pin_is_removable(pin, blob.created_at_ms, now_ms, repository.margin_ms)
        leases.append(
            Lease(
                key=blob.key,
                source=pin.source,
                scope=pin.scope,
                stores=pin.stores if collect.pin_is_live(pin, blob.created_at_ms, now_ms) else (),
                removable=collect.DeleteReason.EXPIRED_PIN if removable else None,
            )
        )
    return tuple(leases)


def plan_scopes(
    roots: Roots, policy: RetentionPolicy, damaged: Collection[model.Scope] = frozenset()
) -> tuple[collect.ScopePlan, ...]:
    """Return what stays and what is to be closed of every scope; of a damaged one nothing is closed."""
    plans: list[collect.ScopePlan] = []
    for log in roots.logs:
        scope = log.listing.scope
        is_damaged = log.is_damaged or scope in damaged
        retention = None if is_damaged else policy.choose(scope.job)
        named = roots.named(scope)
        planned = collect.plan_scope(log.listing, log.records, log.boundaries, retention, named, vouched=log.vouched)
        # A boundary would close what it cannot name.
        plans.append(msgspec.structs.replace(planned, boundary=None) if is_damaged else planned)
    return tuple(plans)


def root_stores(commits: Iterable[Commit], leases: Iterable[Lease]) -> Iterator[RootStore]:
    """Walk the stores of some roots."""
    for commit in commits:
        yield from (RootStore(commit.pointer, commit.scope, s) for s in commit.record.stores)
    for lease in leases:
        yield from (RootStore(lease.source, lease.scope, s, lease) for s in lease.stores)


def references_of(roots: Roots, plans: Iterable[collect.ScopePlan] | None = None) -> References:
    """Return the indexes that live names and pins lead to, and the commits that plans keep; without, all open ones."""
    retained = roots.retained
    if plans is None:
        commits = [commit for log in roots.logs for commit in log.commits]
    else:
        plans = tuple(plans)
        commits = [commit for plan in plans for commit, _ in plan.kept]
        retained = not_closed_again(retained, plans)
    required = list(root_stores(commits, roots.names))
    pinned = list(root_stores((), (*roots.pins, *retained)))
    places = {s.index: (str(scope), s.task, s.store, s.number, s.index.key) for _, scope, s, _ in (*required, *pinned)}
    return References(
        neighbours=tuple(sorted(places, key=places.__getitem__)),
        optional=frozenset(root.store.index for root in pinned) - {root.store.index for root in required},
    )


def not_closed_again(retained: Iterable[Lease], plans: Iterable[collect.ScopePlan]) -> tuple[Lease, ...]:
    """Return what is retained but for what planned boundaries close for good; if they do not, the second reading sees.

    As of all else that they close (D3, D4).
    """
    planned = {plan.scope: (plan.boundary,) for plan in plans if plan.boundary is not None}
    return tuple(lease for lease in retained if not is_closed(lease.source, planned.get(lease.scope, ())))


async def reachable_keys(
    store: BlobStore, references: Iterable[model.IndexReference], *, optional: frozenset[model.IndexReference]
) -> frozenset[str]:
    """Return every key that some indexes keep alive: themselves, the bases of deltas (P2), and the blobs.

    Raises:
        DamagedError: An index is altered, or it or what it is a delta on is missing, unless it is `optional`.
    """

    async def read(reference: model.IndexReference) -> frozenset[str]:
        try:
            return (await read_stored_snapshot(store, reference)).kept_keys
        except DamagedError as error:
            if reference in optional and is_missing(error):
                return frozenset()
            raise

    found = await map_bounded(read, sorted(references, key=lambda r: r.key))
    return frozenset().union(*found)


def plan_log_deletes(
    roots: Roots, planned: Iterable[model.Boundary] = (), damaged: Collection[model.Scope] = frozenset()
) -> tuple[collect.PlannedDelete, ...]:
    """Plan to delete closed records, then superseded boundaries, released names, ended pins; of no damaged scope."""
    records: list[collect.PlannedDelete] = []
    others: list[collect.PlannedDelete] = []
    damaged = {log.listing.scope for log in roots.logs if log.is_damaged}.union(damaged)
    for log in roots.logs:
        scope = log.listing.scope
        if scope in damaged:
            continue
        boundaries = (*log.boundaries, *(b for b in planned if b.scope == scope))
        records += [
            collect.PlannedDelete(keys.commit_key(scope, number), collect.DeleteReason.CLOSED_COMMIT)
            for number in collect.choose_closed_records(log.listing, log.records, boundaries)
        ]
        unread = frozenset(log.listing.boundaries).difference(b.number for b in boundaries)
        others += [
            collect.PlannedDelete(keys.boundary_key(scope, number), collect.DeleteReason.SUPERSEDED_BOUNDARY)
            for number in choose_superseded_boundaries(boundaries, unread)
        ]
    others += [collect.PlannedDelete(key, collect.DeleteReason.EXPIRED_PIN) for key in roots.outlived]
    for lease in (*roots.names, *roots.pins):
        if lease.removable is not None and lease.scope not in damaged:
            others.append(collect.PlannedDelete(lease.key, lease.removable))
    return (*records, *others)


async def list_prefix(store: BlobStore, prefix: str, take: Callable[[BlobInfo], Taken]) -> list[Taken]:
    """List every blob of a prefix; what one page does not hold is listed in parts, at most 16 at once.

    Requests: p LISTs for p pages up to about 8; of more, at most a quarter of them again. What `take` keeps of each
    blob is returned in the order of the keys. Errors as `list_checked_page`.
    """
    first = await list_checked_page(store, prefix)
    taken = [take(blob) for blob in first.blobs]
    if not first.truncated:
        return taken

    async def list_range(part: keys.KeyRange) -> list[Taken]:
        found: list[Taken] = []
        async with aclosing(list_blobs(store, prefix, start_after=part.after)) as blobs:
            async for blob in blobs:
                if not part.reaches(blob.key):
                    break
                found.append(take(blob))
        return found

    ranges = keys.choose_list_ranges(prefix, first.blobs[-1].key)
    for found in await map_bounded(list_range, ranges):
        taken += found
    return taken


Unread = DamagedError | FormatError


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What of one reading of the roots cannot be read, and what stays because of it."""

    # Nothing in the logs of these is closed or deleted.
    scopes: frozenset[model.Scope] = frozenset()
    # Nor any of these uploads.
    protected: collect.Protection = collect.NOTHING_PROTECTED
    # Why, by key.
    reasons: tuple[tuple[str, str], ...] = ()
    # What reading said; nothing of a record for which nothing vouches.
    errors: tuple[Unread, ...] = ()


async def find_broken(store: BlobStore, references: References) -> dict[model.IndexReference, Unread]:
    """Read indexes, and return those that are missing or altered; one that only a pin leads to may be missing."""

    async def look(reference: model.IndexReference) -> Unread | None:
        try:
            await read_stored_snapshot(store, reference)
        except (DamagedError, FormatError) as error:
            is_gone = isinstance(error, DamagedError) and is_missing(error)
            return None if is_gone and reference in references.optional else error
        return None

    ordered = sorted(references.everything, key=lambda r: r.key)
    found = await map_bounded(look, ordered)
    return {reference: error for reference, error in zip(ordered, found, strict=True) if error is not None}


async def assess(store: BlobStore, roots: Roots, broken: Mapping[model.IndexReference, Unread]) -> Damage:
    """Find out which scopes are to be left alone: those of what cannot be read, and those that it may refer to (D9).

    A record or an index may refer to uploads of its own scope, and of those that its neighbours refer to. Where no
    other index of a store can be read, or a record may be the first of a fork, nobody knows: every upload stays. What
    is closed and cannot be read keeps nothing.

    Requests: none where everything can be read; else a GET for each index of the scopes that are damaged.
    """
    broken = _needed(roots, broken) if broken else {}
    reasons = {one.key: str(one.error) for one in roots.all_unreadable()}
    reasons |= {reference.key: str(error) for reference, error in broken.items()}
    scopes = {log.listing.scope for log in roots.logs if log.is_damaged}
    everything = False
    for one in roots.unreadable:
        try:
            scopes.add(keys.parse_name_key(one.key)[0])
        except UnsafeNameError:
            everything = True  # a pin's key does not say whose it is
    for log in roots.logs:
        scope = log.listing.scope
        if log.is_adrift:
            reasons[keys.commit_key(scope, log.void[-1].number)] = NOTHING_VOUCHES
        # A void record says nothing about a fork that came after it.
        lowest = min((commit.record.number for commit in log.commits), default=log.listing.newest_number + 1)
        unread = {one.key for one in log.unreadable}
        everything |= any(keys.commit_key(scope, n) in unread and n < lowest for n, _ in log.listing.records)
    stores: defaultdict[model.Scope, list[model.StoreReference]] = defaultdict(list)
    for log in roots.logs:
        for record in log.records.values():
            stores[log.listing.scope] += record.stores
    for lease in (*roots.names, *roots.pins, *roots.retained):
        stores[lease.scope] += lease.stores
    scopes |= {scope for scope, held in stores.items() if any(s.index in broken for s in held)}
    covered = set(scopes) | {keys.parse_upload_key(reference.key).scope for reference in broken}
    for scope in scopes:
        found, read = await _scopes_of(store, {s.index for s in stores[scope]})
        covered |= found
        # What one store was forked from another one's index does not say.
        readable = {(s.task, s.store) for s in stores[scope] if s.index in read}
        is_whole = {(s.task, s.store) for s in stores[scope]} <= readable
        everything |= not found or not is_whole
    if not scopes and not everything:
        return Damage()
    return Damage(
        scopes=frozenset(scopes),
        protected=collect.Protection(scopes=frozenset(covered), everything=everything),
        reasons=tuple(sorted(reasons.items())),
        errors=(*(one.error for one in roots.all_unreadable()), *broken.values()),
    )


def _needed(roots: Roots, broken: Mapping[model.IndexReference, Unread]) -> dict[model.IndexReference, Unread]:
    """Return what is broken but for what is damaged, and only closed records or released names lead to."""
    needed = references_of(msgspec.structs.replace(roots, retained=())).everything
    return {r: error for r, error in broken.items() if r in needed or isinstance(error, UnknownFormatError)}


async def _scopes_of(
    store: BlobStore, references: Iterable[model.IndexReference]
) -> tuple[frozenset[model.Scope], frozenset[model.IndexReference]]:
    """Return the scopes of everything that some indexes keep, and which of these could be read."""

    async def read(reference: model.IndexReference) -> frozenset[model.Scope] | None:
        try:
            snapshot = await read_stored_snapshot(store, reference)
        except (DamagedError, FormatError):
            return None
        return frozenset(keys.parse_upload_key(key).scope for key in snapshot.kept_keys)

    ordered = sorted(references, key=lambda r: r.key)
    found = dict(zip(ordered, await map_bounded(read, ordered), strict=True))
    scopes = {reference: of for reference, of in found.items() if of is not None}
    return frozenset().union(*scopes.values()), frozenset(scopes)
