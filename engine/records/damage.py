"""Objects that cannot be read: which scopes a collection leaves alone because of them (design 0002, D9)."""

from collections.abc import Iterable, Mapping

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from engine.errors import DamagedError
from engine.records.indexes import is_missing, read_index_chain
from engine.records.roots import IN_FLIGHT_MAX, References, Roots
from index.errors import FormatError, UnsafeNameError
from index.plan.collect import NOTHING_PROTECTED, Protection
from index.plan.commits import NOTHING_VOUCHES
from index.snapshot.contents import blob_keys
from index.snapshot.keys import commit_key, parse_name_key, parse_upload_key
from index.snapshot.model import IndexReference, Scope
from index.snapshot.records import StoreReference

Unread = DamagedError | FormatError


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What of one reading of the roots cannot be read, and what stays because of it."""

    # Nothing in the logs of these is closed or deleted.
    scopes: frozenset[Scope] = frozenset()
    # Nor any of these uploads.
    protected: Protection = NOTHING_PROTECTED
    # Why, by key.
    reasons: tuple[tuple[str, str], ...] = ()
    # What reading said; nothing of a record for which nothing vouches.
    errors: tuple[Unread, ...] = ()


async def find_broken(store: BlobStore, references: References) -> dict[IndexReference, Unread]:
    """Read indexes, and return those that are missing or altered; one that only a pin leads to may be missing."""

    async def look(reference: IndexReference) -> Unread | None:
        try:
            await read_index_chain(store, reference)
        except (DamagedError, FormatError) as error:
            is_gone = isinstance(error, DamagedError) and is_missing(error)
            return None if is_gone and reference in references.optional else error
        return None

    ordered = sorted(references.everything, key=lambda r: r.key)
    found = await map_bounded(look, ordered, in_flight_max=IN_FLIGHT_MAX)
    return {reference: error for reference, error in zip(ordered, found, strict=True) if error is not None}


async def assess(store: BlobStore, roots: Roots, broken: Mapping[IndexReference, Unread]) -> Damage:
    """Find out which scopes are to be left alone: those of what cannot be read, and those that it may refer to.

    A record or an index may refer to uploads of its own scope, and of those that its neighbours refer to. Where no
    other index of a store can be read, or a record may be the first of a fork, nobody knows: every upload stays.

    Requests: none where everything can be read; else a GET for each index of the scopes that are damaged.
    """
    reasons = {one.key: str(one.error) for one in roots.all_unreadable()}
    reasons |= {reference.key: str(error) for reference, error in broken.items()}
    scopes = {log.listing.scope for log in roots.logs if log.is_damaged}
    everything = False
    for one in roots.unreadable:
        try:
            scopes.add(parse_name_key(one.key)[0])
        except UnsafeNameError:
            everything = True  # a pin's key does not say whose it is
    for log in roots.logs:
        if log.is_adrift:
            late = log.void[-1]
            reasons[commit_key(late.scope, late.number)] = NOTHING_VOUCHES
        # A void record says nothing about a fork that came after it.
        lowest = min((commit.record.number for commit in log.commits), default=None)
        unread = {one.key for one in log.unreadable}
        everything |= any(
            commit_key(log.listing.scope, number) in unread and (lowest is None or number < lowest)
            for number, _ in log.listing.records
        )
    stores = _stores_by_scope(roots)
    scopes |= {scope for scope, held in stores.items() if any(s.index in broken for s in held)}
    covered = set(scopes) | {parse_upload_key(reference.key).scope for reference in broken}
    for scope in scopes:
        held = stores.get(scope, ())
        readable = [s for s in held if s.index not in broken]
        found = await _scopes_of(store, {s.index for s in readable})
        covered |= found
        # What one store was forked from another one's index does not say.
        everything |= not found or not {_place(s) for s in held} <= {_place(s) for s in readable}
    if not scopes and not everything:
        return Damage()
    return Damage(
        scopes=frozenset(scopes),
        protected=Protection(scopes=frozenset(covered), everything=everything),
        reasons=tuple(sorted(reasons.items())),
        errors=(*(one.error for one in roots.all_unreadable()), *broken.values()),
    )


def _stores_by_scope(roots: Roots) -> dict[Scope, list[StoreReference]]:
    found: dict[Scope, list[StoreReference]] = {}
    for log in roots.logs:
        for record in log.records.values():
            found.setdefault(log.listing.scope, []).extend(record.stores)
    for lease in (*roots.names, *roots.pins):
        found.setdefault(lease.scope, []).extend(lease.stores)
    return found


def _place(reference: StoreReference) -> tuple[str, str]:
    return reference.task, reference.store


async def _scopes_of(store: BlobStore, references: Iterable[IndexReference]) -> frozenset[Scope]:
    """Return the scopes of everything that some indexes keep; one that cannot be read adds only its own."""

    async def read(reference: IndexReference) -> frozenset[Scope]:
        try:
            index, chain = await read_index_chain(store, reference)
        except (DamagedError, FormatError):
            return frozenset()
        keys = blob_keys(index) | {link.key for link in chain}
        return frozenset(parse_upload_key(key).scope for key in keys)

    ordered = sorted(references, key=lambda r: r.key)
    return frozenset().union(*await map_bounded(read, ordered, in_flight_max=IN_FLIGHT_MAX))
