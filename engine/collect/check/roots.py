"""What is reachable, worked out without the planner: for the check of a collection's plan (design 0006, P6).

This shares with `engine.records.roots`, `index.plan.commits` and `index.plan.retention` the codecs alone: keys are
listed, decoded and followed here once more, so that a fault over there does not say of itself that it is right.
"""

import fnmatch
import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import msgspec

from blobstore.base import BlobStore, list_blobs, read_blob
from blobstore.concurrency import map_bounded, run_all
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError
from index.errors import FormatError, UnsafeNameError
from index.plan.plan_format import PlanHeader, RootCommit
from index.snapshot.codec import (
    INDEX_BYTES_MAX,
    RECORD_BYTES_MAX,
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
)
from index.snapshot.delta import apply_delta
from index.snapshot.keys import LOG, NAMES, PINS, REPOSITORY, parse_log_key, parse_name_key, parse_pin_key
from index.snapshot.model import DirIndex, IndexReference, Scope, SnapshotIndex
from index.snapshot.records import (
    NEVER_MS,
    PIN_DURATION_MS,
    Boundary,
    CommitPointer,
    CommitRecord,
    RepositoryRecord,
    StoreReference,
)

OPERATION: Final = "verify-plan"
IN_FLIGHT_MAX: Final = 16

# ("commit", scope, number), ("name", scope, name, number) or ("pin", id).
RootId = tuple[str | int | Scope, ...]
_Record = tuple[CommitRecord, int]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps indexes now."""

    id: RootId
    created_at_ms: int
    stores: tuple[StoreReference, ...]
    # Of a commit.
    committed_at_ms: int = 0


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


async def read_now_roots(store: BlobStore, repository: RepositoryRecord, now_ms: int) -> list[Root]:
    """Read every root as it stands: pins, then names, then logs, so that what changes from one to another is seen (D4).

    Raises:
        BlobNotFoundError: Something went between its listing and its reading: read again.
        FormatError: A record is damaged.
    """
    roots = []
    for key, created_at_ms, data in await _read_all(store, PINS, parse_pin_key):
        pin = decode_pin(data, subject=key)
        if pin.duration_ms and now_ms < created_at_ms + pin.duration_ms:
            roots.append(Root(id=("pin", pin.id), created_at_ms=created_at_ms, stores=pin.stores))
    for key, created_at_ms, data in await _read_all(store, NAMES, parse_name_key):
        name = decode_name(data, subject=key)
        is_late = created_at_ms > name.valid_until_ms
        if not name.released and not (is_late and await _was_written_here(store, name.valid_until_ms, PIN_DURATION_MS)):
            root_id = ("name", name.scope, name.name, name.source.number)
            roots.append(Root(id=root_id, created_at_ms=created_at_ms, stores=name.stores))
    boundaries: defaultdict[Scope, list[Boundary]] = defaultdict(list)
    records: list[_Record] = []
    for key, created_at_ms, data in await _read_all(store, LOG, parse_log_key):
        parsed = parse_log_key(key)
        if parsed.kind == "boundary":
            boundaries[parsed.scope].append(decode_boundary(data, subject=key))
        else:
            records.append((decode_commit(data, subject=key), created_at_ms))
    # What the next valid commit of a scope says of when the one before it was committed (C7).
    said_ms: dict[Scope, int] = {}
    for record, created_at_ms in sorted(records, key=lambda r: -r[0].number):
        me = CommitPointer(record.number, record.write_id)
        closing = boundaries[record.scope]
        is_open = all(b.number < record.number or me in b.kept for b in closing)
        # A record that came in time, or that a boundary or a later record vouches for, is valid (C5).
        later = [r for r, _ in records if r.scope == record.scope and r.number > record.number]
        is_valid = (
            created_at_ms <= record.valid_until_ms
            or any(r.predecessor == me for r in later)
            or any(me in b.kept for b in closing)
            or (not later and await _is_settled(store, repository, record))
        )
        if is_open and is_valid:
            roots.append(
                Root(
                    id=("commit", record.scope, record.number),
                    created_at_ms=created_at_ms,
                    stores=record.stores,
                    committed_at_ms=min(
                        max(created_at_ms, record.predecessor_committed_at_ms),
                        said_ms.get(record.scope, NEVER_MS),
                    ),
                )
            )
            if record.predecessor is not None:
                said_ms[record.scope] = record.predecessor_committed_at_ms
    return roots


async def _is_settled(store: BlobStore, repository: RepositoryRecord, record: CommitRecord) -> bool:
    """Return whether a newest record that came late counts: its uploads were kept, or it was copied here (C5)."""
    lease_ms = repository.ttl_ms - repository.margin_ms if record.kind == "commit" else PIN_DURATION_MS
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


def _is_name(data: bytes) -> bool:
    try:
        decode_name(data, subject="")
    except FormatError:
        return False
    return True


async def _read_all(store: BlobStore, prefix: str, parse: Callable[[str], object]) -> list[tuple[str, int, bytes]]:
    """Read every object below a prefix but those that tidemark never wrote.

    Raises:
        UnsafeNameError: One is a name of the first commits, which is not to be passed over.
    """

    async def read(blob: tuple[str, int]) -> tuple[str, int, bytes]:
        key, created_at_ms = blob
        return key, created_at_ms, await read_blob(store, key, size_bytes_max=RECORD_BYTES_MAX)

    # One that ends in a slash is a console's, and no key of ours.
    listed = [(b.key, b.created_at_ms) async for b in list_blobs(store, prefix) if not b.key.endswith("/")]
    found = []
    for key, created_at_ms, data in await map_bounded(read, listed, in_flight_max=IN_FLIGHT_MAX):
        try:
            parse(key)
        except UnsafeNameError:
            if _is_name(data):
                raise
            continue
        found.append((key, created_at_ms, data))
    return found


def compare_roots(header: PlanHeader, roots: list[Root]) -> Reach:
    """Tell the roots that the plan was made of from those of today, and check what its header says of them."""
    named = {root.id[1::2] for root in roots if root.id[0] == "name" and root.created_at_ms < header.now_ms}
    kept = _choose_kept(header, named)
    commits: dict[RootId, RootCommit] = {("commit", c.scope, c.number): c for c in header.commits}
    told: set[RootId] = {("name", n.scope, n.name, n.number) for n in header.names if n.is_live}
    # A pin moves whenever it is renewed: whether it was there is known by its id alone.
    told |= {("pin", pin.id) for pin in header.pins if pin.is_live} | commits.keys()
    closed = commits.keys() - kept
    there = {root.id: root for root in roots}
    contradictions = [
        f"{_label(root.id)} was there, and is not among the roots"
        for root in roots
        if root.id not in told and root.id[0] != "pin" and root.created_at_ms < header.now_ms
    ]
    for root_id, commit in commits.items():
        if (commit.kept is not None) != (root_id in kept):
            fate = "is kept" if root_id in kept else "is to be closed"
            contradictions.append(f"{_label(root_id)} {fate} by the retention, and the plan says otherwise")
        if root_id in there and there[root_id].committed_at_ms != commit.committed_at_ms:
            contradictions.append(f"{_label(root_id)} was committed at another time")
    keeping = [root for root in roots if root.id not in closed]
    then = frozenset(s.index for root in keeping if root.id in told for s in root.stores)
    later = frozenset(s.index for root in keeping if root.id not in told for s in root.stores)
    required = frozenset(s.index for root in keeping if root.id[0] != "pin" for s in root.stores)
    return Reach(
        then=then,
        later=later - then,
        optional=(then | later) - required,
        contradictions=tuple(contradictions),
        changed=tuple(_label(gone) for gone in sorted(told - closed - there.keys(), key=str)),
    )


def _label(root: RootId) -> str:
    if root[0] == "pin":
        return f"pin {root[1]}"
    return f"commit {root[2]} of {root[1]}" if root[0] == "commit" else f"the name {root[2]} of {root[1]}"


def _choose_kept(header: PlanHeader, named: set[RootId]) -> set[RootId]:
    """Choose what the plan's retention keeps of the commits that were there, by rules written down once more."""
    named = named | {(n.scope, n.number) for n in header.names if n.is_live}
    by_scope: defaultdict[Scope, list[RootCommit]] = defaultdict(list)
    for commit in sorted(header.commits, key=lambda c: c.number, reverse=True):
        by_scope[commit.scope].append(commit)
    kept: set[RootId] = set()
    for scope, newest_first in by_scope.items():
        rule = next((r for r in header.retention.rules if fnmatch.fnmatchcase(scope.job, r.pattern)), None)
        retention = rule.retention if rule is not None else None
        newer_ms = None
        for place, commit in enumerate(newest_first):
            since_ms = retention.keep_since_ms if retention is not None else None
            if (
                retention is None
                or newer_ms is None
                or place < retention.keep_last
                or (retention.keep_named and (scope, commit.number) in named)
                # Since then, or the newest at that time.
                or (since_ms is not None and max(commit.committed_at_ms, newer_ms) >= since_ms)
            ):
                kept.add(("commit", scope, commit.number))
            newer_ms = commit.committed_at_ms
    return kept


async def follow(
    store: BlobStore, references: frozenset[IndexReference], optional: frozenset[IndexReference]
) -> set[str]:
    """Return every key that some indexes keep: themselves, what they are a delta on, and the blobs.

    Raises:
        DamagedError: An index is missing or altered, and not only a pin leads to it.
        FormatError: An index is damaged.
    """
    reached: set[str] = set()

    async def walk(reference: IndexReference) -> None:
        keys: set[str] = set()
        try:
            index = await _resolve(store, reference, keys)
        except DamagedError as error:
            if reference in optional and isinstance(error.__cause__, BlobNotFoundError):
                return
            raise
        _walk_dir(index.dir, keys)
        reached.update(keys)

    await run_all(walk, sorted(references, key=lambda r: r.key), in_flight_max=IN_FLIGHT_MAX)
    return reached


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
