"""Explain one key: what leads to it, and what a collection would do with it (design 0006, P7)."""

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import map_bounded
from blobstore.errors import InvalidRequestError
from engine.errors import DamagedError, UsageError
from engine.records.indexes import is_missing, read_stored_snapshot
from engine.records.roots import Roots, not_closed_again, plan_log_deletes, plan_scopes, read_roots, root_stores
from engine.runtime import read_now_ms
from index.display import DisplayMixin
from index.errors import UnsafeNameError
from index.plan.collect import DeleteReason, ScopePlan, Upload, choose_uploads, is_upload_key
from index.plan.commits import KeepReason, Retention, RetentionPolicy, as_policy
from index.snapshot import keys
from index.snapshot.contents import paths_in
from index.snapshot.model import IndexReference, RepositoryRecord, Scope

# Of all that leads to a key, the most that is listed.
PATHS_LISTED_MAX: Final = 20
FILES_LISTED_MAX: Final = 5


class KeyKind(StrEnum):
    """The kinds of keys."""

    BLOB = "blob"
    INDEX = "index"
    COMMIT = "commit record"
    BOUNDARY = "boundary"
    NAME = "name"
    PIN = "pin"
    RUN = "working object of a collection"
    AUDIT = "audit record"
    REPOSITORY = "repository record"
    FOREIGN = "nothing that tidemark writes"


class Fate(StrEnum):
    """What a collection would do with a key."""

    KEPT = "stays"
    DELETED = "goes"
    # Unreachable, and younger than the TTL.
    WAITING = "waits until it is a TTL old"
    LEFT_ALONE = "is left alone"
    ABSENT = "is not there"
    # An index that is kept cannot be read, and may lead to it.
    UNKNOWN = "is unknown"


class RootKind(StrEnum):
    """What keeps something."""

    COMMIT = "commit"
    NAME = "name"
    PIN = "pin"


class KeyPath(msgspec.Struct, frozen=True, kw_only=True):
    """One way from a root to a key."""

    json_properties: ClassVar = {"keeps": "keeps"}

    root: RootKind
    scope: Scope
    number: int
    # The name, or the id of the pin; empty of a commit.
    name: str = ""
    # Of a commit; None: this retention closes it, so that it keeps nothing.
    kept: KeepReason | None = None
    task: str
    store: str
    # From the store's own index to the one that is, or has, the key; more than one if there are deltas between.
    indexes: tuple[str, ...]
    # Of a blob: the first few files that have bytes in it.
    files: tuple[str, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether a collection with this retention follows it."""
        return self.root is not RootKind.COMMIT or self.kept is not None


class Explanation(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """One key; times by the blob store's clock."""

    key: str
    kind: KeyKind
    fate: Fate
    # Why it would go.
    reason: DeleteReason | None = None
    # Which rule of the design says so.
    rule: str
    now_ms: int
    size_bytes: int | None = None
    created_at_ms: int | None = None
    # None: it carries no TTL, or is not there.
    expires_at_ms: int | None = None
    # When a collection may delete what is unreachable now; None of anything else.
    collectable_at_ms: int | None = None
    paths_count: int = 0
    # Those that keep it first.
    paths: tuple[KeyPath, ...] = ()
    # Indexes that are missing or altered: they may lead to it too.
    unreadable: tuple[str, ...] = ()


async def explain(
    store: BlobStore, repository: RepositoryRecord, retention: Retention | RetentionPolicy, key: str
) -> Explanation:
    """Explain whether a key is there, what leads to it, and what a collection would do with it. Nothing is changed.

    Requests: one STAT; those of reading all roots, with their errors; of a blob or an index a GET for each index that
    an open commit, a name or a pin leads to, more for deltas. A key that no store can hold is a UsageError.
    """
    now_ms = await read_now_ms(store)
    kind = kind_of(key)
    try:
        there = await store.tagged(RequestMetadata(payload_path="explain")).stat(key)
    except InvalidRequestError as error:
        raise UsageError("not a key that a blob store can hold", operation="explain", subject=repr(key)) from error
    found = Explanation(key=key, kind=kind, fate=Fate.ABSENT, rule="", now_ms=now_ms)
    if there is not None:
        found = replace(
            found, size_bytes=there.size_bytes, created_at_ms=there.created_at_ms, expires_at_ms=there.expires_at_ms
        )
    if kind in _BY_THEMSELVES:
        fate, rule = _BY_THEMSELVES[kind]
        return replace(found, fate=Fate.ABSENT if there is None else fate, rule=rule)
    roots = await read_roots(store, repository, now_ms, operation="explain")
    plans = plan_scopes(roots, as_policy(retention))
    if kind not in {KeyKind.BLOB, KeyKind.INDEX}:
        return _explain_record(found, roots, plans)
    paths, unreadable, may_be_kept = await _find_paths(store, roots, plans, key)
    found = replace(found, paths_count=len(paths), paths=tuple(paths[:PATHS_LISTED_MAX]), unreadable=unreadable)
    is_kept = any(path.keeps for path in paths)
    if may_be_kept and not is_kept:
        rule = "an index that is kept cannot be read, and may lead to it: a collection leaves its job alone (0002, D9)"
        return replace(found, fate=Fate.ABSENT if there is None else Fate.UNKNOWN, rule=rule)
    # By D2, as a collection that begins now does.
    if there is None:
        rule = "MISSING: something that is kept leads to it" if is_kept else "nothing that is kept leads to it"
        return replace(found, rule=rule)
    if is_kept:
        return replace(found, fate=Fate.KEPT, rule="something that is kept leads to it (0002, D2)")
    due = choose_uploads([Upload(key, there.size_bytes, there.created_at_ms)], now_ms, repository.ttl_ms)
    return replace(
        found,
        fate=Fate.DELETED if due else Fate.WAITING,
        reason=due[0].reason if due else None,
        collectable_at_ms=there.created_at_ms + repository.ttl_ms,
        rule=f"nothing that is kept leads to it, and it is {'older' if due else 'younger'} than the TTL (0002, D2)",
    )


def kind_of(key: str) -> KeyKind:
    """Return what a key is of, by its grammar alone (design 0001, K1 to K6)."""
    if key == keys.REPOSITORY:
        return KeyKind.REPOSITORY
    if is_upload_key(key):
        return KeyKind.INDEX if key.startswith(keys.INDEXES) else KeyKind.BLOB
    for kind, parse in _GRAMMARS:
        try:
            parsed = parse(key)
        except UnsafeNameError:
            continue
        return KeyKind.BOUNDARY if getattr(parsed, "kind", "") == "boundary" else kind
    return KeyKind.FOREIGN


_GRAMMARS: Final = (
    (KeyKind.COMMIT, keys.parse_log_key),
    (KeyKind.NAME, keys.parse_name_key),
    (KeyKind.PIN, keys.parse_pin_key),
    (KeyKind.RUN, keys.parse_run_key),
    (KeyKind.AUDIT, keys.parse_audit_key),
)
# Those that neither retention nor roots decide.
_BY_THEMSELVES: Final = {
    KeyKind.RUN: (Fate.KEPT, "a run's objects go when it ends, or a TTL after it began (0006, R6)"),
    KeyKind.AUDIT: (Fate.KEPT, "the newest audit records stay (0006, A1)"),
    KeyKind.REPOSITORY: (Fate.KEPT, "a repository begins with it (0002, K1)"),
    KeyKind.FOREIGN: (Fate.LEFT_ALONE, "a collection deletes nothing that tidemark has not written"),
}

# Why it stays, and why it goes.
_RECORD_RULES: Final = {
    KeyKind.COMMIT: ("void, and no boundary has passed it yet (0002, C5)", "a boundary closes it (0002, D3)"),
    KeyKind.BOUNDARY: ("no newer boundary says the same (0002, D3)", "a newer boundary says the same (0002, D3)"),
    KeyKind.NAME: (
        "it holds; or what somebody wrote while it held may still land (0002, D5)",
        "it protects nothing (0002, D5)",
    ),
    KeyKind.PIN: ("its lease is running (0002, D5)", "its lease is over (0002, D5)"),
}


def _explain_record(found: Explanation, roots: Roots, plans: tuple[ScopePlan, ...]) -> Explanation:
    if found.size_bytes is None:
        return replace(found, rule="closed records and ended leases are deleted (0002, D1)")
    planned = [plan.boundary for plan in plans if plan.boundary is not None]
    deletes = {d.key: d.reason for d in plan_log_deletes(roots, planned)}
    stays, goes = _RECORD_RULES[found.kind]
    if found.key in deletes:
        return replace(found, fate=Fate.DELETED, reason=deletes[found.key], rule=goes)
    if found.kind is KeyKind.COMMIT:
        kept = {lease.key: KeepReason.REOPENABLE for lease in roots.retained}
        kept |= {keys.commit_key(p.scope, c.pointer.number): reason for p in plans for c, reason in p.kept}
        if found.key in kept:
            stays = f"{kept[found.key].value} (0006, P5; 0002, D3)"
    return replace(found, fate=Fate.KEPT, rule=stays)


async def _find_paths(
    store: BlobStore, roots: Roots, plans: tuple[ScopePlan, ...], key: str
) -> tuple[list[KeyPath], tuple[str, ...], bool]:
    """Return the ways to a key, those that keep it first; unreadable indexes; whether one of these is kept."""
    starts = list(_starts(roots, plans))
    required = {
        reference
        for path, reference in starts
        if path.root is not RootKind.PIN and path.kept is not KeepReason.REOPENABLE
    }
    unreadable: list[str] = []

    async def look(reference: IndexReference) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        try:
            snapshot = await read_stored_snapshot(store, reference)
        except DamagedError as error:
            # What only a pin leads to may be gone; of the rest `tidemark verify` reports more.
            if not is_missing(error) or reference in required:
                unreadable.append(reference.key)
            # What cannot be read is referred to all the same.
            return ((key,), ()) if reference.key == key else None
        keys = tuple(link.key for link in snapshot.chain)
        if key in keys:
            return keys[: keys.index(key) + 1], ()
        files = tuple(itertools.islice(paths_in(snapshot.index, key), FILES_LISTED_MAX))
        return (keys[:1], files) if files else None

    indexes = sorted({reference for _, reference in starts}, key=lambda r: r.key)
    found = dict(zip(indexes, await map_bounded(look, indexes), strict=True))
    ways = [(path, found[reference]) for path, reference in starts]
    paths = [replace(path, indexes=way[0], files=way[1]) for path, way in ways if way is not None]
    kept = {reference.key for path, reference in starts if path.keeps}
    paths.sort(key=lambda path: not path.keeps)
    return paths, tuple(sorted(unreadable)), not kept.isdisjoint(unreadable)


def _starts(roots: Roots, plans: tuple[ScopePlan, ...]) -> Iterator[tuple[KeyPath, IndexReference]]:
    """Return every store of every root, as a path that has no indexes yet; the newest commits first."""
    reasons = {(plan.scope, commit.pointer): reason for plan in plans for commit, reason in plan.kept}
    commits = [commit for log in roots.logs for commit in reversed(log.commits)]
    leases = (*roots.names, *roots.pins, *not_closed_again(roots.retained, plans))
    for source, scope, store, lease in root_stores(commits, leases):
        root, name, kept = RootKind.COMMIT, "", None
        if lease is None:
            kept = reasons.get((scope, source))
        elif lease.key.startswith(keys.LOG):
            kept = KeepReason.REOPENABLE
        elif lease.key.startswith(keys.NAMES):
            root, name = RootKind.NAME, keys.parse_name_key(lease.key)[1]
        else:
            root, name = RootKind.PIN, keys.parse_pin_key(lease.key)
        path = KeyPath(
            root=root,
            scope=scope,
            number=source.number,
            name=name,
            kept=kept,
            task=store.task,
            store=store.store,
            indexes=(),
        )
        yield path, store.index
