"""What is reachable, worked out without the planner: for the check of a collection's plan (design 0006, P6).

This shares with `engine.roots`, `index.log` and `index.retention` the codecs alone: keys are listed, decoded and
followed here once more, so that a fault over there does not say of itself that it is right.
"""

import fnmatch
import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import msgspec

from blobstore.base import BlobStore, list_blobs, read_blob
from blobstore.bounded import carry_out_all, map_bounded
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError
from index.codec import (
    INDEX_BYTES_MAX,
    RECORD_BYTES_MAX,
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
)
from index.delta import apply_delta
from index.keys import LOG, NAMES, PINS, REPOSITORY, parse_log_key, parse_name_key, run_began_at_ms
from index.model import (
    PIN_DURATION_MS,
    Boundary,
    CommitPointer,
    CommitRecord,
    DirIndex,
    IndexReference,
    NameRecord,
    Pin,
    Scope,
    SnapshotIndex,
)
from index.plan_file import PlanHeader, RootCommit
from index.retention import RetentionPolicy, RetentionRule

OPERATION: Final = "verify-plan"
IN_FLIGHT_MAX: Final = 16
# "7d" is worked out when a command begins, which may have to start Spark before its run does.
SINCE_LATE_MAX_MS: Final = 10 * 60 * 1000


class OpenCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A record that no boundary closes and that came in time."""

    record: CommitRecord
    created_at_ms: int

    @property
    def root(self) -> tuple[Scope, int]:
        """What tells it from other commits."""
        return self.record.scope, self.record.number


class NowRoots(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that keeps something now."""

    commits: tuple[OpenCommit, ...]
    # Those that hold, with the time of their last write.
    names: tuple[tuple[NameRecord, int], ...]
    pins: tuple[Pin, ...]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps something: of the plan's own roots, and of those that came later."""

    # Has to be there.
    then: frozenset[IndexReference]
    later: frozenset[IndexReference]
    # Those that pins alone lead to, and that may be gone.
    optional: frozenset[IndexReference]
    # Where the plan's header says something else than the store and the rules do.
    contradictions: tuple[str, ...]
    # Roots that protected something when the plan was made, and are gone.
    changed: tuple[str, ...]


async def read_now_roots(store: BlobStore, now_ms: int) -> NowRoots:
    """Every root as it stands; pins first, then names, then logs, so that what changes hands is seen (D5).

    Raises:
        BlobNotFoundError: Something went between its listing and its reading: read again.
        FormatError: A record is damaged.
    """
    pins = []
    for key, created_at_ms, data in await _read_all(store, PINS):
        pin = decode_pin(data, subject=key)
        if pin.duration_ms and now_ms < created_at_ms + pin.duration_ms:
            pins.append(pin)
    names = []
    for key, created_at_ms, data in await _read_all(store, NAMES):
        parse_name_key(key)
        name = decode_name(data, subject=key)
        is_late = created_at_ms > name.valid_until_ms
        if not name.released and not (is_late and await _was_written_here(store, name.valid_until_ms, PIN_DURATION_MS)):
            names.append((name, created_at_ms))
    boundaries: defaultdict[Scope, list[Boundary]] = defaultdict(list)
    records: list[OpenCommit] = []
    for key, created_at_ms, data in await _read_all(store, LOG):
        scope = parse_log_key(key).scope
        if parse_log_key(key).kind == "boundary":
            boundaries[scope].append(decode_boundary(data, subject=key))
        else:
            records.append(OpenCommit(record=decode_commit(data, subject=key), created_at_ms=created_at_ms))
    commits = [c for c in records if _is_open(c.record, boundaries) and await _counts(store, c, records, boundaries)]
    commits.sort(key=lambda c: (str(c.record.scope), c.record.number))
    return NowRoots(commits=tuple(commits), names=tuple(names), pins=tuple(pins))


async def _counts(
    store: BlobStore, commit: OpenCommit, records: list[OpenCommit], boundaries: defaultdict[Scope, list[Boundary]]
) -> bool:
    """Return whether an open record came in time, or something vouches for it (C5)."""
    record = commit.record
    if commit.created_at_ms <= record.valid_until_ms:
        return True
    later = [c.record for c in records if c.record.scope == record.scope and c.record.number > record.number]
    me = CommitPointer(record.number, record.write_id)
    if any(other.predecessor == me for other in later) or any(me in b.kept for b in boundaries[record.scope]):
        return True
    if later:
        return False
    lease_ms = PIN_DURATION_MS
    if record.kind == "commit":
        repository = decode_repository(
            await read_blob(store, REPOSITORY, size_bytes_max=RECORD_BYTES_MAX), subject=REPOSITORY
        )
        lease_ms = repository.ttl_ms - repository.margin_ms
    named = [s for s in record.stores if s.number == record.number] or record.stores
    brought = [await store.stat(s.index.key) for s in named]
    if not await _was_written_here(store, record.valid_until_ms, lease_ms):
        return None not in brought
    if record.kind != "commit" or not store.capabilities.removes_ttl:
        return False
    there = [info for info in brought if info is not None]
    return bool(there) and all(info.expires_at_ms is None for info in there)


async def _was_written_here(store: BlobStore, valid_until_ms: int, lease_ms: int) -> bool:
    """Return whether a lease began after the repository record was created, and so was no other repository's."""
    there = await store.stat(REPOSITORY)
    return there is None or valid_until_ms - lease_ms >= there.created_at_ms - store.capabilities.created_late_ms


async def _read_all(store: BlobStore, prefix: str) -> list[tuple[str, int, bytes]]:
    async def read(blob: tuple[str, int]) -> tuple[str, int, bytes]:
        key, created_at_ms = blob
        return key, created_at_ms, await read_blob(store, key, size_bytes_max=RECORD_BYTES_MAX)

    listed = [(blob.key, blob.created_at_ms) async for blob in list_blobs(store, prefix)]
    return await map_bounded(read, listed, in_flight_max=IN_FLIGHT_MAX)


def _is_open(record: CommitRecord, boundaries: defaultdict[Scope, list[Boundary]]) -> bool:
    me = CommitPointer(record.number, record.write_id)
    return all(b.number < record.number or me in b.kept for b in boundaries[record.scope])


def compare_clock(header: PlanHeader, now_ms: int, *, late_ms: int) -> tuple[str, ...]:
    """Where a plan's times cannot be: its own clock would say which TTLs are over.

    Args:
        header: The plan's.
        now_ms: The store's clock, read by whoever checks.
        late_ms: By how much times of the store may differ.
    """
    found = []
    if header.now_ms > now_ms + late_ms:
        found.append("the plan was made later than it is now by the store's clock")
    if header.now_ms != run_began_at_ms(header.run):
        found.append("the plan was made at another time than its run began")
    # A run is taken up for so long (R3).
    if header.listed_at_ms < header.now_ms - header.ttl_ms:
        found.append("the plan's listing is older than a TTL")
    return tuple(found)


def compare_retention(header: PlanHeader, meant: Callable[[int], RetentionPolicy]) -> tuple[str, ...]:
    """Where a plan keeps something else than is meant, given what is meant at a time by the store's clock."""
    latest, earliest = meant(header.now_ms).rules, meant(max(0, header.now_ms - SINCE_LATE_MAX_MS)).rules
    told = header.retention.rules
    if len(told) != len(latest):
        return (f"the plan has {len(told)} rules of retention, and {len(latest)} are meant",)
    return tuple(
        f"the plan's rule {place} of retention, for jobs {mine.pattern}, is not the one that is meant"
        for place, (mine, low, high) in enumerate(zip(told, earliest, latest, strict=True), start=1)
        if not _is_meant(mine, low, high)
    )


def _is_meant(told: RetentionRule, low: RetentionRule, high: RetentionRule) -> bool:
    """Whether a rule is the one that is meant; its time may lie between two."""
    mine, meant = told.retention, high.retention
    if mine is None or meant is None or low.retention is None:
        return told == high
    since_ms, low_ms, high_ms = mine.keep_since_ms, low.retention.keep_since_ms, meant.keep_since_ms
    if since_ms is None or low_ms is None or high_ms is None:
        return told == high
    same = msgspec.structs.replace(mine, keep_since_ms=high_ms) == meant
    return told.pattern == high.pattern and same and low_ms <= since_ms <= high_ms


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Roots of one kind, compared."""

    then: frozenset[IndexReference]
    later: frozenset[IndexReference]
    contradictions: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def compare_roots(header: PlanHeader, now: NowRoots) -> Reach:
    """Tell the roots that the plan was made of from those of today, and check what its header says of them."""
    parts = (_compare_commits(header, now), _compare_names(header, now), _compare_pins(header, now))
    then = frozenset().union(*(part.then for part in parts))
    later = frozenset().union(*(part.later for part in parts))
    required = frozenset().union(*(part.then | part.later for part in parts[:-1]))
    return Reach(
        then=then,
        later=later - then,
        optional=(then | later) - required,
        contradictions=tuple(text for part in parts for text in part.contradictions),
        changed=tuple(text for part in parts for text in part.changed),
    )


def _compare_commits(header: PlanHeader, now: NowRoots) -> _Part:
    there = {commit.root: commit for commit in now.commits}
    told = {(commit.scope, commit.number): commit for commit in header.commits}
    kept = _choose_kept(header, now)
    contradictions = [
        f"{_what(root)} was open, and is not among the roots"
        for root, commit in there.items()
        if root not in told and commit.created_at_ms < header.now_ms
    ]
    for root, commit in told.items():
        if (commit.kept is not None) != (root in kept):
            fate = "is kept" if root in kept else "is to be closed"
            contradictions.append(f"{_what(root)} {fate} by the retention, and the plan says otherwise")
        if root in there and _commit_time(there[root]) != commit.committed_at_ms:
            contradictions.append(f"{_what(root)} was committed at another time")
    return _Part(
        then=frozenset(s.index for root in kept & there.keys() for s in there[root].record.stores),
        later=frozenset(s.index for root in there.keys() - told.keys() for s in there[root].record.stores),
        contradictions=tuple(contradictions),
        changed=tuple(_what(root) for root in told if root in kept and root not in there),
    )


def _compare_names(header: PlanHeader, now: NowRoots) -> _Part:
    told = {(n.scope, n.name, n.number) for n in header.names if n.is_live}
    held = {(name.scope, name.name, name.source.number) for name, _ in now.names}
    then: set[IndexReference] = set()
    later: set[IndexReference] = set()
    contradictions: list[str] = []
    for name, created_at_ms in now.names:
        is_told = (name.scope, name.name, name.source.number) in told
        if not is_told and created_at_ms < header.now_ms:
            contradictions.append(f"the name {name.name} of {name.scope} held, and is not among the roots")
        (then if is_told else later).update(s.index for s in name.stores)
    return _Part(
        then=frozenset(then),
        later=frozenset(later),
        contradictions=tuple(contradictions),
        changed=tuple(f"the name {name} of {scope}" for scope, name, _ in sorted(told - held, key=str)),
    )


def _compare_pins(header: PlanHeader, now: NowRoots) -> _Part:
    """A pin moves whenever it is renewed: whether it was there is known by its id alone."""
    told = {pin.id for pin in header.pins if pin.is_live}
    return _Part(
        then=frozenset(s.index for pin in now.pins if pin.id in told for s in pin.stores),
        later=frozenset(s.index for pin in now.pins if pin.id not in told for s in pin.stores),
        changed=tuple(f"pin {pin}" for pin in sorted(told - {pin.id for pin in now.pins})),
    )


def _what(root: tuple[Scope, int]) -> str:
    return f"commit {root[1]} of {root[0]}"


def _commit_time(commit: OpenCommit) -> int:
    return max(commit.created_at_ms, commit.record.predecessor_committed_at_ms)


def _choose_kept(header: PlanHeader, now: NowRoots) -> frozenset[tuple[Scope, int]]:
    """What the plan's retention keeps of the commits that were there, by rules written down once more."""
    named = {(n.scope, n.number) for n in header.names if n.is_live}
    named |= {(n.scope, n.source.number) for n, created_at_ms in now.names if created_at_ms < header.now_ms}
    by_scope: defaultdict[Scope, list[RootCommit]] = defaultdict(list)
    for commit in header.commits:
        by_scope[commit.scope].append(commit)
    kept: set[tuple[Scope, int]] = set()
    for scope, commits in by_scope.items():
        newest_first = sorted(commits, key=lambda c: c.number, reverse=True)
        is_kept = _rule(header.retention, scope.job)
        for place, commit in enumerate(newest_first):
            newer = newest_first[place - 1] if place else None
            if newer is None or is_kept(place, commit, newer, (scope, commit.number) in named):
                kept.add((scope, commit.number))
    return frozenset(kept)


def _rule(policy: RetentionPolicy, job: str) -> Callable[[int, RootCommit, RootCommit, bool], bool]:
    """Whether a commit is kept: its place among the valid ones (0: the newest), it, the next newer one, is it named."""
    rule = next((r for r in policy.rules if fnmatch.fnmatchcase(job, r.pattern)), None)
    retention = rule.retention if rule is not None else None
    if retention is None:
        return lambda _place, _commit, _newer, _named: True
    since_ms = retention.keep_since_ms

    def is_kept(place: int, commit: RootCommit, newer: RootCommit, named: bool) -> bool:  # noqa: FBT001
        if place < retention.keep_last or (named and retention.keep_named):
            return True
        # Since then, or the newest at that time.
        return since_ms is not None and (commit.committed_at_ms >= since_ms or newer.committed_at_ms >= since_ms)

    return is_kept


async def follow(
    store: BlobStore,
    references: frozenset[IndexReference],
    optional: frozenset[IndexReference],
    take: Callable[[str], None],
) -> None:
    """Give every key to `take` that some indexes keep: themselves, what they are a delta on, and the blobs.

    Raises:
        DamagedError: An index is missing or altered, and not only a pin leads to it.
        FormatError: An index is damaged.
    """

    async def walk(reference: IndexReference) -> None:
        keys: set[str] = set()
        try:
            index = await _resolve(store, reference, keys)
        except DamagedError as error:
            if reference in optional and isinstance(error.__cause__, BlobNotFoundError):
                return
            raise
        _walk_dir(index.dir, keys)
        for key in keys:
            take(key)

    await carry_out_all(walk, sorted(references, key=lambda r: r.key), in_flight_max=IN_FLIGHT_MAX)


async def _resolve(store: BlobStore, reference: IndexReference, keys: set[str]) -> SnapshotIndex:
    try:
        data = await read_blob(store, reference.key, size_bytes_max=min(reference.size_bytes, INDEX_BYTES_MAX))
    except BlobNotFoundError as error:
        raise DamagedError("is not there", operation=OPERATION, subject=reference.key) from error
    if hashlib.sha256(data).digest() != reference.sha256:
        raise DamagedError("is not what the reference to it says", operation=OPERATION, subject=reference.key)
    if reference.key in keys:
        raise DamagedError("leads to itself", operation=OPERATION, subject=reference.key)
    keys.add(reference.key)
    index = decode_index(data, subject=reference.key)
    if isinstance(index, SnapshotIndex):
        return index
    return apply_delta(await _resolve(store, index.base, keys), index)


def _walk_dir(directory: DirIndex, keys: set[str]) -> None:
    for file in directory.files_present:
        keys.update(blob.key for blob in file.blobs)
    for sub in directory.sub_dirs_present:
        _walk_dir(sub, keys)
