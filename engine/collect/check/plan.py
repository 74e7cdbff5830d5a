"""Check the plan of a collection by deriving it another way (design 0006, P6). Nothing is written to the repository.

Uploads are listed, then roots are read and followed (`engine.collect.check.roots`); what nothing keeps is compared with
the plan's lines, in memory. The repository may have moved on since the plan was made: what only newer roots reach, what
came later and what is gone is counted, and makes no plan wrong.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import ClassVar, Final

import msgspec

from blobstore.base import BlobInfo, BlobStore, Capabilities, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from engine.clock import read_now_ms
from engine.collect.check.roots import OPERATION, Reach, compare_roots, follow, read_now_roots
from engine.errors import DamagedError, UnsafeStoreError, UsageError
from index.display import DisplayMixin
from index.errors import PlanFileError, UnsafeNameError
from index.plan.collect import PlannedUpload
from index.plan.plan_format import (
    LINES_SUFFIX,
    PLAN_HEADER_BYTES_MAX,
    PLAN_HEADER_NAME,
    PLAN_SUMMARY_NAME,
    PlanHeader,
    PlanSummary,
    decode_lines,
    decode_plan_header,
    decode_plan_summary,
)
from index.plan.retention import RetentionPolicy, RetentionRule
from index.snapshot.keys import BLOBS, INDEXES, RunId, parse_upload_key, run_began_at_ms
from index.snapshot.records import RepositoryRecord

# A collection beside us may take what the roots have led to; then they have changed.
READINGS_MAX: Final = 5
LINES_FILE_BYTES_MAX: Final = 1 << 30
# "7d" is worked out when a command begins, which may have to start Spark before its run does.
SINCE_LATE_MAX_MS: Final = 10 * 60 * 1000
# Keys of one kind that are named in the result.
NAMED_MAX: Final = 1000


class WrongKind(StrEnum):
    """Why a line should not stand in a plan."""

    REACHABLE = "something that is kept leads to it"
    UNEXPIRED = "it was younger than the TTL"
    SIZE = "its size is another"
    TIMES = "its creation time is another"
    REPEATED = "it is planned twice"


class WrongKey(msgspec.Struct, frozen=True, kw_only=True):
    """One planned key that is wrong."""

    key: str
    kind: WrongKind


class PlanCheck(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What the check of a plan has found. Of keys the first `NAMED_MAX` are named, the counts are of all."""

    json_properties: ClassVar = {name: name for name in ("is_right", "is_complete", "is_over")}

    run: RunId
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
    # Where header or totals say something else than the store, the rules or the lines do.
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
        """Whether nothing in the plan is wrong."""
        return not self.wrong_count and not self.contradictions

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missed."""
        return not self.missed_count

    @property
    def is_over(self) -> bool:
        """Whether all that was planned is gone, by a collection since: then there is nothing left to compare."""
        return 0 < self.planned_count == self.gone_count


async def verify_plan(
    store: BlobStore,
    repository: RepositoryRecord,
    plan: BlobStore,
    *,
    meant: Callable[[int], RetentionPolicy] | None = None,
) -> PlanCheck:
    """Derive again what a collection may delete, and compare it with a plan.

    Requests: a LIST per 1,000 uploads; the lists of logs, names and pins and a GET for each record, name
    and pin; a GET for each index that is alive, more for deltas. Memory: the keys of all uploads, and of the plan.

    Args:
        store: The repository's.
        repository: Its record.
        plan: Where the plan's files are.
        meant: What is meant to be kept, at a time by the store's clock; compared with what the plan says that it keeps.
            If not given, the plan is believed.

    Returns:
        What is wrong, what is missed, and what cannot be told because the repository has moved on.

    Raises:
        PlanFileError: A file of the plan is missing, or is none.
        UnknownFormatError: A newer tidemark wrote the plan, or something in the repository.
        UsageError: The plan is another repository's.
        DamagedError: An index that a root needs is missing or altered.
        UnsafeStoreError: The roots kept changing.
        StoreError: As the store says.
    """
    header = decode_plan_header(await _read_part(plan, PLAN_HEADER_NAME), subject=PLAN_HEADER_NAME)
    summary = decode_plan_summary(await _read_part(plan, PLAN_SUMMARY_NAME), subject=PLAN_SUMMARY_NAME)
    if header.repository_id != repository.id:
        message = f"is of repository {header.repository_id}, and this is {repository.id}"
        raise UsageError(message, operation=OPERATION, subject="the plan")
    now_ms = await read_now_ms(store)
    # Before the roots, as a collection does (D2).
    uploads = [blob for prefix in (BLOBS, INDEXES) async for blob in list_blobs(store, prefix) if _is_upload(blob)]
    reach, reached = await _read_reach(store, repository, header)
    lines: list[PlannedUpload] = []
    async for blob in list_blobs(plan, ""):
        if blob.key.endswith(LINES_SUFFIX):
            lines += decode_lines(await _read_part(plan, blob.key), subject=blob.key)
    by_key: dict[str, tuple[PlannedUpload, ...]] = {}
    for line in lines:
        there = by_key.get(line.key, ())
        by_key[line.key] = there if line in there else (*there, line)
    contradictions = [
        *_compare_header(header, repository, now_ms, late_ms=store.capabilities.created_late_ms),
        *(_compare_retention(header, meant) if meant is not None else ()),
        *_compare_totals(summary, header, lines),
        *reach.contradictions,
    ]
    if repeated := len(lines) - sum(map(len, by_key.values())):
        contradictions.append(f"{repeated} lines repeat another one")
    # When the plan's uploads were listed; never later than it is now, whatever the plan says.
    due_ms = min(header.listed_at_ms, now_ms) - repository.ttl_ms
    found: defaultdict[str, list[BlobInfo]] = defaultdict(list)
    for upload in uploads:
        named, fate = by_key.pop(upload.key, ()), reached.get(upload.key)
        if fate is None:
            is_later = upload.created_at_ms >= header.listed_at_ms
            fate = _judge(upload, named, store.capabilities, is_due=upload.created_at_ms <= due_ms, is_later=is_later)
        elif not named:
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


def _judge(
    upload: BlobInfo, lines: Sequence[PlannedUpload], capabilities: Capabilities, *, is_due: bool, is_later: bool
) -> str:
    """Judge an upload that nothing leads to, by the lines that name it."""
    if not lines:
        return "later" if is_later else "missed" if is_due else "waiting"
    if not is_due:
        return WrongKind.UNEXPIRED
    if len(lines) > 1:
        return WrongKind.REPEATED
    if upload.size_bytes != lines[0].size_bytes:
        return WrongKind.SIZE
    moved = not capabilities.keeps_created_at and lines[0].created_at_ms < upload.created_at_ms
    return "right" if moved or upload.created_at_ms == lines[0].created_at_ms else WrongKind.TIMES


async def _read_reach(
    store: BlobStore, repository: RepositoryRecord, header: PlanHeader
) -> tuple[Reach, dict[str, str]]:
    """Read the roots, and follow them; return each key that is reached, with what a line about it is.

    Raises:
        DamagedError: Something is missing though the roots still need it.
        UnsafeStoreError: The roots kept changing.
    """
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
        message = "is missing: this is no plan, or one that was not finished"
        raise PlanFileError(message, subject=name, hint="make it by a dry run") from error


def _is_upload(blob: BlobInfo) -> bool:
    try:
        parse_upload_key(blob.key)
    except UnsafeNameError:
        return False
    return True


def _compare_header(header: PlanHeader, repository: RepositoryRecord, now_ms: int, *, late_ms: int) -> Iterator[str]:
    """Yield where a plan's TTL and times cannot be: its own clock would say which TTLs are over."""
    if header.ttl_ms != (ttl_ms := repository.ttl_ms):
        yield f"the plan has a TTL of {header.ttl_ms} ms, and the repository one of {ttl_ms} ms"
    if header.now_ms > now_ms + late_ms:
        yield "the plan was made later than it is now by the store's clock"
    if header.now_ms != run_began_at_ms(header.run):
        yield "the plan was made at another time than its run began"
    # A run is resumed for so long (R3).
    if header.listed_at_ms < header.now_ms - header.ttl_ms:
        yield "the plan's listing is older than a TTL"


def _compare_totals(summary: PlanSummary, header: PlanHeader, lines: Sequence[PlannedUpload]) -> Iterator[str]:
    """Yield where the summary of a plan says something else than its lines add up to, together and by reason."""
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
