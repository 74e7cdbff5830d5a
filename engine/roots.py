"""What keeps blobs alive, as a collector reads it: open commits, live names, live pins (design 0002, D4 and D5)."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from blobstore.base import BlobStore, list_blobs
from blobstore.bounded import map_bounded
from engine.errors import DamagedError
from engine.index_io import is_missing, read_index_chain
from engine.log_io import ScopeLog, list_all_logs, read_record, read_scope, repeat_reading
from engine.names import read_all_namings
from index.codec import decode_pin
from index.collect_plan import (
    DeleteReason,
    PlannedDelete,
    ScopePlan,
    choose_closed_records,
    choose_superseded_boundaries,
    name_is_removable,
    pin_is_live,
    pin_is_removable,
    plan_scope,
)
from index.keys import PINS, boundary_key, commit_key
from index.log import Commit
from index.model import Boundary, CommitPointer, CommitRecord, IndexReference, RepositoryRecord, Scope, StoreReference
from index.reachable import blob_keys
from index.retention import RetentionPolicy

IN_FLIGHT_MAX: Final = 16


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A pin or a name as a root: where it stands, and what it protects (nothing, once it is over)."""

    key: str
    source: CommitPointer
    scope: Scope
    stores: tuple[StoreReference, ...]
    # Set once the object itself may be deleted.
    removable: DeleteReason | None


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that keeps blobs alive, as one reading of it."""

    logs: tuple[ScopeLog, ...]
    names: tuple[Lease, ...]
    pins: tuple[Lease, ...]

    def named(self, scope: Scope) -> frozenset[CommitPointer]:
        """Records of a scope that a live name refers to."""
        return frozenset(name.source for name in self.names if name.scope == scope and name.stores)


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The indexes that roots lead to."""

    # One store's in the order of its commits: whoever reads them so meets the same blobs again and again.
    neighbours: tuple[IndexReference, ...]
    # Those that only pins lead to. What is not there any more was collected before the pin stood, and the pinner is
    # refused by `check_open`: it keeps nothing, and is no damage.
    optional: frozenset[IndexReference]

    @property
    def everything(self) -> frozenset[IndexReference]:
        """All of them."""
        return frozenset(self.neighbours)

    @property
    def required(self) -> frozenset[IndexReference]:
        """Those that have to be there."""
        return self.everything - self.optional


async def read_roots(
    store: BlobStore,
    repository: RepositoryRecord,
    now_ms: int,
    *,
    known: Roots | None = None,
    operation: str = "collect",
) -> Roots:
    """All logs, names and pins; records in `known` are not read again.

    Args:
        store: The repository's store.
        repository: Its record.
        now_ms: The store's clock.
        known: An earlier reading.
        operation: The use case, for its errors.

    Raises:
        UnsafeStoreError: The logs keep changing or have holes (C1).
    """
    remembered: Mapping[Scope, Mapping[int, CommitRecord]] = (
        {log.listing.scope: log.records for log in known.logs} if known else {}
    )

    async def read() -> Roots:
        # Pins first: a name, fork or rewind releases its pin only once its own record stands, so that a pin already
        # gone here has left a record that the later readings find (D5). The other way round both could be missed.
        pins = await read_pins(store, repository, now_ms)
        names = await _read_names(store, now_ms)
        logs = [
            await read_scope(store, listing, remembered.get(listing.scope)) for listing in await list_all_logs(store)
        ]
        return Roots(logs=tuple(logs), names=names, pins=pins)

    return await repeat_reading(read, operation=operation)


async def _read_names(store: BlobStore, now_ms: int) -> tuple[Lease, ...]:
    return tuple(
        Lease(
            key=naming.key,
            source=naming.record.source,
            scope=naming.record.scope,
            stores=naming.record.stores if naming.is_live else (),
            removable=DeleteReason.RELEASED_NAME
            if name_is_removable(naming.record, now_ms, is_live=naming.is_live)
            else None,
        )
        for naming in await read_all_namings(store)
    )


async def read_pins(store: BlobStore, repository: RepositoryRecord, now_ms: int) -> tuple[Lease, ...]:
    """Every pin, those that are over too: one LIST per 1,000, and a GET for each.

    Raises:
        FormatError: One is damaged.
    """
    leases: list[Lease] = []
    async for blob in list_blobs(store, PINS):
        pin = await read_record(store, blob.key, decode_pin)
        removable = pin_is_removable(pin, blob.created_at_ms, now_ms, repository.margin_ms)
        leases.append(
            Lease(
                key=blob.key,
                source=pin.source,
                scope=pin.scope,
                stores=pin.stores if pin_is_live(pin, blob.created_at_ms, now_ms) else (),
                removable=DeleteReason.EXPIRED_PIN if removable else None,
            )
        )
    return tuple(leases)


def plan_scopes(roots: Roots, policy: RetentionPolicy) -> tuple[ScopePlan, ...]:
    """What stays and what is to be closed of every scope."""
    return tuple(
        plan_scope(
            log.listing,
            log.records,
            log.boundaries,
            policy.choose(log.listing.scope.job),
            roots.named(log.listing.scope),
            vouched=log.vouched,
        )
        for log in roots.logs
    )


def kept_references(plans: Iterable[ScopePlan], roots: Roots) -> References:
    """The indexes that kept commits, names and pins lead to."""
    return _references((commit for plan in plans for commit, _ in plan.kept), roots)


def open_references(roots: Roots) -> References:
    """The indexes that any commit still open, and any live lease, leads to: those of the second reading (D4)."""
    return _references((commit for log in roots.logs for commit in log.commits), roots)


def _references(commits: Iterable[Commit], roots: Roots) -> References:
    committed = [(commit.record.scope, s) for commit in commits for s in commit.record.stores]
    named = [(name.scope, s) for name in roots.names for s in name.stores]
    pinned = [(pin.scope, s) for pin in roots.pins for s in pin.stores]
    places = {s.index: (str(scope), s.task, s.store, s.number, s.index.key) for scope, s in committed + named + pinned}
    required = frozenset(s.index for _, s in committed + named)
    return References(
        neighbours=tuple(sorted(places, key=places.__getitem__)),
        optional=frozenset(s.index for _, s in pinned) - required,
    )


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
    leases = (*roots.names, *roots.pins)
    others += [PlannedDelete(lease.key, lease.removable) for lease in leases if lease.removable is not None]
    return (*records, *others)
