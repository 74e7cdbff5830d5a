"""Check the plan of a collection by deriving it another way (design 0006, P6). Nothing is written to the repository.

Uploads are listed, then roots are read and followed; what nothing keeps is compared with the plan's lines, in memory.
This shares with the planner (`engine.records.roots`, `index.plan.commits`) the codecs and the requests alone: what is a
root and what it keeps is written here once more, so that a fault over there does not call itself right. The repository
may have moved on since the plan was made: what only newer roots reach, what came later and what is gone is counted, and
makes no plan wrong.
"""

import fnmatch
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import ClassVar, Final, TypeVar

import msgspec

from blobstore.base import BlobInfo, BlobStore, Capabilities, list_blobs, read_blob
from blobstore.concurrency import map_bounded, run_all
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError, UnsafeStoreError, UsageError
from engine.records.log import Decode, read_record
from engine.runtime import read_now_ms
from index.display import DisplayMixin
from index.errors import IndexInvariantError, PlanFileError, UnsafeNameError
from index.plan.collect import PlannedUpload, is_upload_key
from index.plan.commits import Retention, RetentionPolicy, RetentionRule
from index.plan.plan_format import (
    LINES_SUFFIX,
    PLAN_HEADER_BYTES_MAX,
    PLAN_HEADER_NAME,
    PLAN_SUMMARY_NAME,
    PlanHeader,
    PlanSummary,
    RootCommit,
    decode_lines,
    decode_plan_header,
    decode_plan_summary,
)
from index.snapshot import keys, model
from index.snapshot.codec import INDEX_BYTES_MAX, decode_boundary, decode_commit, decode_index, decode_name, decode_pin
from index.snapshot.delta import apply_delta

OPERATION: Final = "verify-plan"
# The most readings of the roots: a collection beside this one may delete what they lead to; then they have changed.
READINGS_MAX: Final = 5
LINES_FILE_BYTES_MAX: Final = 1 << 30
# "7d" is worked out when a command begins, which may have to start Spark before its run does.
SINCE_LATE_MAX_MS: Final = 10 * 60 * 1000
# Keys of one kind that are named in the result.
NAMED_MAX: Final = 1000

# ("commit", scope, number), ("closed", scope, number), ("name", scope, name, number) or ("pin", id).
RootId = tuple[str | int | model.Scope, ...]
# What these lead to may be missing.
_OPTIONAL: Final = ("pin", "closed")
Record = TypeVar("Record")


class WrongKind(StrEnum):
    """Why a line should not be in a plan."""

    REACHABLE = "something that is kept leads to it"
    UNEXPIRED = "it was younger than the TTL"
    SIZE = "its size is another"
    TIMES = "its creation time is another"


class WrongKey(msgspec.Struct, frozen=True, kw_only=True):
    """One planned key that is wrong."""

    key: str
    kind: WrongKind


class PlanCheck(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What the check of a plan has found. Of keys the first `NAMED_MAX` are named, the counts are of all."""

    json_properties: ClassVar = {name: name for name in ("is_right", "is_complete", "is_over")}

    run: keys.RunId
    planned_count: int
    planned_bytes: int
    listed_count: int
    indexes_count: int
    wrong_count: int
    wrong: tuple[WrongKey, ...]
    # Eligible when the plan was made, and not in it.
    missed_count: int
    missed_bytes: int
    missed: tuple[str, ...]
    # Where header or totals say something else than the blob store, the rules or the lines do.
    contradictions: tuple[str, ...]
    # Roots of the plan that are gone by now: what only they kept looks missed.
    changed: tuple[str, ...]
    # Neither wrong nor missed: came after the plan; planned and gone; planned, and kept by what came later.
    later_count: int
    gone_count: int
    rescued_count: int
    # Unreachable and younger than the TTL: rightly in no plan.
    waiting_count: int
    # Whether what is meant to be kept was given to compare with; else the plan's own retention is believed.
    retention_compared: bool

    @property
    def is_right(self) -> bool:
        return not self.wrong_count and not self.contradictions

    @property
    def is_complete(self) -> bool:
        return not self.missed_count

    @property
    def is_over(self) -> bool:
        """Whether all that was planned is gone, by a collection since: then there is nothing left to compare."""
        return 0 < self.planned_count == self.gone_count


class Root(msgspec.Struct, frozen=True):
    """Something that keeps indexes now."""

    id: RootId
    created_at_ms: int
    stores: tuple[model.StoreReference, ...]
    # Of a commit.
    committed_at_ms: int = 0


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The indexes that roots of the plan keep, or roots that came later."""

    then: frozenset[model.IndexReference]
    later: frozenset[model.IndexReference]
    # Those that pins alone lead to, and that may be gone.
    optional: frozenset[model.IndexReference]
    contradictions: tuple[str, ...]
    # Roots that protected something when the plan was made, and are gone.
    changed: tuple[str, ...]


async def verify_plan(
    store: BlobStore,
    repository: model.RepositoryRecord,
    plan: BlobStore,
    *,
    meant: Callable[[int], RetentionPolicy] | None = None,
) -> PlanCheck:
    """Derive again what a collection may delete, and compare it with a plan.

    Requests: a LIST per 1,000 uploads; the lists of logs, names and pins and a GET for each record, name and pin; a GET
    for each index that is alive, more for deltas. Memory: the keys of all uploads, and of the plan.

    `meant` is what is meant to be kept, at a time by the store's clock; if not given, the plan is believed.

    Raises:
        PlanFileError: A file of the plan is missing, or is not part of one.
        UnknownFormatError: A newer tidemark wrote the plan, or something in the repository.
        UsageError: The plan is another repository's.
        DamagedError: An index that a root needs is missing or altered.
        UnsafeStoreError: The roots kept changing.
    """
    header = decode_plan_header(await _read_part(plan, PLAN_HEADER_NAME), subject=PLAN_HEADER_NAME)
    summary = decode_plan_summary(await _read_part(plan, PLAN_SUMMARY_NAME), subject=PLAN_SUMMARY_NAME)
    if header.repository_id != repository.id:
        message = f"is of repository {header.repository_id}, and this is {repository.id}"
        raise UsageError(message, operation=OPERATION, subject="the plan")
    now_ms = await read_now_ms(store)
    # Before the roots, as a collection does (D2).
    uploads = [
        blob
        for prefix in (keys.BLOBS, keys.INDEXES)
        async for blob in list_blobs(store, prefix)
        if is_upload_key(blob.key)
    ]
    reach, reached = await _read_reach(store, repository, header)
    lines: list[PlannedUpload] = []
    async for blob in list_blobs(plan, ""):
        if blob.key.endswith(LINES_SUFFIX):
            lines += decode_lines(await _read_part(plan, blob.key), subject=blob.key)
    by_key = {line.key: line for line in lines}
    contradictions = [
        *_compare_times(header, repository, now_ms, late_ms=store.capabilities.created_late_ms),
        *(_compare_retention(header, meant) if meant is not None else ()),
        *_compare_lines(summary, header, lines),
        *reach.contradictions,
    ]
    # When the plan's uploads were listed; never later than it is now, whatever the plan says.
    due_ms = min(header.listed_at_ms, now_ms) - repository.ttl_ms
    found: defaultdict[str, list[BlobInfo]] = defaultdict(list)
    for upload in uploads:
        line, fate = by_key.pop(upload.key, None), reached.get(upload.key)
        is_due = upload.created_at_ms <= due_ms
        if fate is None and line is not None:
            fate = _judge(upload, line, store.capabilities, is_due=is_due)
        elif fate is None:
            fate = "later" if upload.created_at_ms >= header.listed_at_ms else "missed" if is_due else "waiting"
        elif line is None:
            continue
        found[fate].append(upload)
    wrong = [WrongKey(key=upload.key, kind=kind) for kind in WrongKind for upload in found[kind]]
    return PlanCheck(
        run=header.run,
        planned_count=len(lines),
        planned_bytes=sum(line.size_bytes for line in lines),
        listed_count=len(uploads),
        indexes_count=len(reach.then | reach.later),
        wrong_count=len(wrong),
        wrong=tuple(wrong[:NAMED_MAX]),
        missed_count=len(found["missed"]),
        missed_bytes=sum(upload.size_bytes for upload in found["missed"]),
        missed=tuple(upload.key for upload in found["missed"][:NAMED_MAX]),
        contradictions=tuple(contradictions),
        changed=reach.changed,
        later_count=len(found["later"]),
        gone_count=len(by_key),
        rescued_count=len(found["rescued"]),
        waiting_count=len(found["waiting"]),
        retention_compared=meant is not None,
    )


def _judge(upload: BlobInfo, line: PlannedUpload, capabilities: Capabilities, *, is_due: bool) -> str:
    """Judge an upload that nothing leads to, by the line that names it."""
    if not is_due:
        return WrongKind.UNEXPIRED
    if upload.size_bytes != line.size_bytes:
        return WrongKind.SIZE
    moved = not capabilities.keeps_created_at and line.created_at_ms < upload.created_at_ms
    return "right" if moved or upload.created_at_ms == line.created_at_ms else WrongKind.TIMES


async def _read_reach(
    store: BlobStore, repository: model.RepositoryRecord, header: PlanHeader
) -> tuple[Reach, dict[str, str]]:
    """Read the roots, and follow them; return each key that is reached, with what a line about it is."""
    before = None
    for _ in range(READINGS_MAX):
        try:
            reach = compare_roots(header, await read_now_roots(store, repository, await read_now_ms(store)))
        except BlobNotFoundError:
            continue  # collected since it was listed
        try:
            then = await follow(store, reach.then, reach.optional)
            later = await follow(store, reach.later, reach.optional)
            return reach, dict.fromkeys(later, "rescued") | dict.fromkeys(then, WrongKind.REACHABLE)
        except DamagedError as error:
            if not isinstance(error.__cause__, BlobNotFoundError) or reach == before:
                raise
            before = reach
    raise UnsafeStoreError(f"the roots changed in each of {READINGS_MAX} readings", operation=OPERATION)


async def _read_part(plan: BlobStore, name: str) -> bytes:
    cap = LINES_FILE_BYTES_MAX if name.endswith(LINES_SUFFIX) else PLAN_HEADER_BYTES_MAX
    try:
        return await read_blob(plan, name, size_bytes_max=cap)
    except BlobNotFoundError as error:
        message = "is missing: not a plan, or one that was not finished"
        raise PlanFileError(message, subject=name, hint="make it by a dry run") from error


def _compare_times(
    header: PlanHeader, repository: model.RepositoryRecord, now_ms: int, *, late_ms: int
) -> Iterator[str]:
    """Yield where a plan's TTL and times cannot be: its own clock would say which TTLs are over."""
    if header.ttl_ms != (ttl_ms := repository.ttl_ms):
        yield f"the plan has a TTL of {header.ttl_ms} ms, and the repository one of {ttl_ms} ms"
    if header.now_ms > now_ms + late_ms:
        yield "the plan was made later than it is now by the blob store's clock"
    if header.now_ms != keys.run_began_at_ms(header.run):
        yield "the plan was made at another time than its run began"
    # A run is resumed for so long (R3).
    if header.listed_at_ms < header.now_ms - header.ttl_ms:
        yield "the plan's listing is older than a TTL"


def _compare_lines(summary: PlanSummary, header: PlanHeader, lines: Sequence[PlannedUpload]) -> Iterator[str]:
    if repeated := len(lines) - len({line.key for line in lines}):
        yield f"{repeated} lines repeat another one"
    size_bytes = sum(line.size_bytes for line in lines)
    for what, said, there in (
        ("lines", summary.lines_count, len(lines)),
        ("bytes", summary.size_bytes, size_bytes),
        ("lines by reason", sum(total.count for total in summary.totals), len(lines)),
        ("bytes by reason", sum(total.size_bytes for total in summary.totals), size_bytes),
    ):
        if said != there:
            yield f"the summary has {said} {what}, and there are {there}"
    if summary.run != header.run:
        yield "the summary is of another run"


def _compare_retention(header: PlanHeader, meant: Callable[[int], RetentionPolicy]) -> Iterator[str]:
    """Yield where a plan keeps something else than is meant, given what is meant at a time by the store's clock."""
    latest, earliest = meant(header.now_ms).rules, meant(max(0, header.now_ms - SINCE_LATE_MAX_MS)).rules
    planned = header.retention.rules
    if planned == meant(header.now_ms).ageless().rules:
        # As where the clock may have stepped: what goes by it keeps everything (D11).
        return
    if len(planned) != len(latest):
        yield f"the plan has {len(planned)} rules of retention, and {len(latest)} are meant"
        return
    for place, (mine, low, high) in enumerate(zip(planned, earliest, latest, strict=True), start=1):
        if not _is_meant(mine, low, high):
            yield f"the plan's rule {place} of retention, for jobs {mine.pattern}, is not the one that is meant"


def _is_meant(mine: RetentionRule, low: RetentionRule, high: RetentionRule) -> bool:
    """Return whether a rule is the one that is meant; its time may lie between two."""
    if mine.retention is not None and low.retention is not None and high.retention is not None:
        since_ms, low_ms = mine.retention.keep_since_ms, low.retention.keep_since_ms
        high_ms = high.retention.keep_since_ms
        if since_ms is not None and low_ms is not None and high_ms is not None and low_ms <= since_ms <= high_ms:
            same = msgspec.structs.replace(mine.retention, keep_since_ms=high_ms)
            mine = msgspec.structs.replace(mine, retention=same)
    return mine == high


async def read_now_roots(store: BlobStore, repository: model.RepositoryRecord, now_ms: int) -> list[Root]:
    """Read every root as it is: pins, then names, then logs, so that what changes from one to another is seen (D4).

    `BlobNotFoundError`: something went between its listing and its reading: read again.
    """
    roots = []
    for blob, pin in await _read_all(store, keys.PINS, keys.parse_pin_key, decode_pin):
        if pin.duration_ms and now_ms < blob.created_at_ms + pin.duration_ms:
            roots.append(Root(("pin", pin.id), blob.created_at_ms, pin.stores))
    for blob, name in await _read_all(store, keys.NAMES, keys.parse_name_key, decode_name):
        is_late = blob.created_at_ms > name.valid_until_ms
        if not name.released and not (
            is_late and await _was_written_here(store, name.valid_until_ms, model.PIN_DURATION_MS)
        ):
            root_id = ("name", name.scope, name.name, name.source.number)
            roots.append(Root(root_id, blob.created_at_ms, name.stores))
    boundaries: defaultdict[model.Scope, list[model.Boundary]] = defaultdict(list)
    records: list[tuple[model.CommitRecord, int]] = []
    for blob, record in await _read_all(store, keys.LOG, keys.parse_log_key, _decode_log):
        if isinstance(record, model.Boundary):
            boundaries[record.scope].append(record)
        else:
            records.append((record, blob.created_at_ms))
    return roots + await _log_roots(store, repository, records, boundaries)


async def _log_roots(
    store: BlobStore,
    repository: model.RepositoryRecord,
    records: Sequence[tuple[model.CommitRecord, int]],
    boundaries: Mapping[model.Scope, Sequence[model.Boundary]],
) -> list[Root]:
    """Return the records, each with its creation time, that keep something."""
    roots: list[Root] = []
    newest: dict[model.Scope, int] = {}
    # A predecessor is older than the record that names it (M18).
    predecessors = {(record.scope, record.predecessor) for record, _ in records}
    # By scope, when the commit before the next valid one was committed, as that one says (C7).
    said_ms: dict[model.Scope, int] = {}
    for record, created_at_ms in sorted(records, key=lambda r: -r[0].number):
        scope, number = record.scope, record.number
        newest.setdefault(scope, number)
        me = model.CommitPointer(number, record.write_id)
        fate = _fate_of(me, boundaries.get(scope, ()))
        # A record that came in time, or that a boundary or a later record vouches for, is valid (C5).
        is_valid = (
            created_at_ms <= record.valid_until_ms
            or (scope, me) in predecessors
            or any(me in b.kept for b in boundaries.get(scope, ()))
            or (newest[scope] == number and await _is_settled(store, repository, record))
        )
        if fate == "closed":
            roots.append(Root(("closed", scope, number), created_at_ms, record.stores))
        if is_valid and fate == "open":
            committed_ms = min(
                max(created_at_ms, record.predecessor_committed_at_ms), said_ms.get(scope, model.NEVER_MS)
            )
            roots.append(Root(("commit", scope, number), created_at_ms, record.stores, committed_ms))
            if record.predecessor is not None:
                said_ms[scope] = record.predecessor_committed_at_ms
    return roots


def _fate_of(commit: model.CommitPointer, boundaries: Sequence[model.Boundary]) -> str:
    """Return whether it is open, closed, or closed by a boundary that lasts: then it keeps nothing (D3)."""
    closers = [b for b in boundaries if b.number >= commit.number and commit not in b.kept]
    for closer in closers:
        newer = (b for b in boundaries if b.number > closer.number)
        if all(any(p.number == closer.number for p in b.kept) for b in newer):
            return "gone"
    return "closed" if closers else "open"


async def _is_settled(store: BlobStore, repository: model.RepositoryRecord, record: model.CommitRecord) -> bool:
    """Return whether a newest record that came late counts: its uploads were kept, or it was copied here (C5)."""
    lease_ms = repository.ttl_ms - repository.margin_ms if record.kind == "commit" else model.PIN_DURATION_MS
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
    there = await store.stat(keys.REPOSITORY)
    return there is None or valid_until_ms - lease_ms >= there.created_at_ms - store.capabilities.created_late_ms


async def _read_all(
    store: BlobStore, prefix: str, parse: Callable[[str], object], decode: Decode[Record]
) -> list[tuple[BlobInfo, Record]]:
    """Read every object below a prefix but those that tidemark never wrote."""
    listed = []
    async for blob in list_blobs(store, prefix):
        try:
            parse(blob.key)
        except UnsafeNameError:
            continue
        listed.append(blob)

    async def read(blob: BlobInfo) -> tuple[BlobInfo, Record]:
        return blob, await read_record(store, blob.key, decode)

    return await map_bounded(read, listed)


def _decode_log(data: bytes, *, subject: str) -> model.CommitRecord | model.Boundary:
    key = keys.parse_log_key(subject)
    record = (decode_boundary if key.kind == "boundary" else decode_commit)(data, subject=subject)
    if (record.scope, record.number) != (key.scope, key.number):
        raise IndexInvariantError(f"says that it is {record.number} of {record.scope}", subject=subject)
    return record


def compare_roots(header: PlanHeader, roots: list[Root]) -> Reach:
    """Compare the roots of the plan with those of today, and check what its header says of them."""
    named = {root.id[1::2] for root in roots if root.id[0] == "name" and root.created_at_ms < header.now_ms}
    kept = _choose_kept(header, named)
    commits: dict[RootId, RootCommit] = {("commit", c.scope, c.number): c for c in header.commits}
    planned: set[RootId] = {("name", n.scope, n.name, n.number) for n in header.names if n.is_live}
    # A pin moves whenever it is renewed: whether it was there is known by its id alone.
    planned |= {("pin", pin.id) for pin in header.pins if pin.is_live} | commits.keys()
    closed = commits.keys() - kept
    there = {root.id: root for root in roots}
    contradictions = [
        f"{_label(root.id)} was there, and is not among the roots"
        for root in roots
        if root.id not in planned and root.id[0] not in _OPTIONAL and root.created_at_ms < header.now_ms
    ]
    for root_id, commit in commits.items():
        if (commit.kept is not None) != (root_id in kept):
            fate = "is kept" if root_id in kept else "is to be closed"
            contradictions.append(f"{_label(root_id)} {fate} by the retention, and the plan says otherwise")
        if root_id in there and there[root_id].committed_at_ms != commit.committed_at_ms:
            contradictions.append(f"{_label(root_id)} was committed at another time")
    keeping = [root for root in roots if root.id not in closed]
    then = frozenset(s.index for root in keeping if root.id in planned for s in root.stores)
    later = frozenset(s.index for root in keeping if root.id not in planned for s in root.stores)
    required = frozenset(s.index for root in keeping if root.id[0] not in _OPTIONAL for s in root.stores)
    return Reach(
        then=then,
        later=later - then,
        optional=(then | later) - required,
        contradictions=tuple(contradictions),
        changed=tuple(_label(gone) for gone in sorted(planned - closed - there.keys(), key=str)),
    )


def _label(root: RootId) -> str:
    if root[0] == "pin":
        return f"pin {root[1]}"
    return f"commit {root[2]} of {root[1]}" if root[0] == "commit" else f"the name {root[2]} of {root[1]}"


# 9999-12-31; what is later is of its hour.
_SECONDS_MAX: Final = 253_402_300_799


def _counted_periods(retention: Retention | None) -> tuple[tuple[str, int], ...]:
    """Return how many hours, days, ISO weeks and months count, each by the form that a time in it has (P10)."""
    if retention is None:
        return ()
    counts = (
        ("%Y-%m-%d %H", retention.keep_hourly),
        ("%Y-%m-%d", retention.keep_daily),
        ("%G-%V", retention.keep_weekly),
        ("%Y-%m", retention.keep_monthly),
    )
    return tuple((form, count) for form, count in counts if count)


def _choose_kept(header: PlanHeader, named: set[RootId]) -> set[RootId]:
    """Choose what the plan's retention keeps of the commits that were there, by rules that are written once more."""
    named = named | {(n.scope, n.number) for n in header.names if n.is_live}
    newer_ms: dict[model.Scope, int] = {}
    places: defaultdict[model.Scope, int] = defaultdict(int)
    kept: set[RootId] = set()
    periods: defaultdict[tuple[model.Scope, str], set[str]] = defaultdict(set)
    # Commits whose time is that of the one before, as after a step of the clock.
    timeless: set[tuple[model.Scope, int]] = set()
    before_ms: dict[model.Scope, int] = {}
    for commit in sorted(header.commits, key=lambda c: c.number):
        if commit.committed_at_ms <= before_ms.get(commit.scope, -1):
            timeless.add((commit.scope, commit.number))
        before_ms[commit.scope] = commit.committed_at_ms
    for commit in sorted(header.commits, key=lambda c: c.number, reverse=True):
        scope = commit.scope
        rule = next((r for r in header.retention.rules if fnmatch.fnmatchcase(scope.job, r.pattern)), None)
        retention = rule.retention if rule is not None else None
        since_ms = retention.keep_since_ms if retention is not None else None
        is_timeless = (scope, commit.number) in timeless
        counted = _counted_periods(retention)
        is_first = is_timeless and bool(counted)
        for form, count in () if is_timeless else counted:
            at_s = min(commit.committed_at_ms // 1000, _SECONDS_MAX)
            period = f"{datetime.fromtimestamp(at_s, UTC):{form}}"
            seen = periods[scope, form]
            is_first |= period not in seen and len(seen) < count
            seen.add(period)
        if (
            retention is None
            or scope not in newer_ms
            or places[scope] < retention.keep_last
            or (retention.keep_named and (scope, commit.number) in named)
            # Since then, or the newest at that time.
            or (since_ms is not None and max(commit.committed_at_ms, newer_ms[scope]) >= since_ms)
            or is_first
        ):
            kept.add(("commit", scope, commit.number))
        newer_ms[scope] = commit.committed_at_ms
        places[scope] += 1
    return kept


async def follow(
    store: BlobStore, references: frozenset[model.IndexReference], optional: frozenset[model.IndexReference]
) -> set[str]:
    """Return every key that some indexes keep: themselves, what they are a delta on, and the blobs.

    Raises:
        DamagedError: An index is missing or altered, and not only a pin leads to it.
    """
    reached: set[str] = set()

    async def walk(reference: model.IndexReference) -> None:
        found: set[str] = set()
        try:
            index = await _resolve(store, reference, found)
        except DamagedError as error:
            if reference in optional and isinstance(error.__cause__, BlobNotFoundError):
                return
            raise
        _walk_dir(index.dir, found)
        reached.update(found)

    await run_all(walk, sorted(references, key=lambda r: r.key))
    return reached


async def _resolve(store: BlobStore, reference: model.IndexReference, reached: set[str]) -> model.SnapshotIndex:
    try:
        data = await read_blob(store, reference.key, size_bytes_max=min(reference.size_bytes, INDEX_BYTES_MAX))
    except BlobNotFoundError as error:
        raise DamagedError("is not there", operation=OPERATION, subject=reference.key) from error
    if hashlib.sha256(data).digest() != reference.sha256:
        raise DamagedError("is not what the reference to it says", operation=OPERATION, subject=reference.key)
    if reference.key in reached:
        raise DamagedError("leads to itself", operation=OPERATION, subject=reference.key)
    reached.add(reference.key)
    index = decode_index(data, subject=reference.key)
    if isinstance(index, model.SnapshotIndex):
        return index
    return apply_delta(await _resolve(store, index.base, reached), index)


def _walk_dir(directory: model.DirIndex, reached: set[str]) -> None:
    for file in directory.files_present:
        reached.update(blob.key for blob in file.blobs)
    for sub in directory.sub_dirs_present:
        _walk_dir(sub, reached)
