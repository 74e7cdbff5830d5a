"""Encode and decode what a collection writes: plan, run and audit record (design 0006).

A plan is a header, one line for each upload that would go, in the order of the keys of each file, and a summary that is
written last, so that a plan without it is not whole (P1, P2). It is evidence and no order: nothing is ever deleted
because of what it says (P3).

A run is what a collection on Spark leaves in `runs/<run>/` while it works: shards, objects, the header (R2). Its plans
are named by their own digests, so that of two collections that work on one run neither ever carries out what the other
has planned (R4), and so that a mark says which plan was carried out (R5).

An audit record is what a collection leaves behind as evidence (A1). Nothing reads it to decide anything.

What is not of its form is refused: a part of a plan by PlanFileError, a run's header or an audit record by
CorruptIndexError, and each of a newer tidemark by UnknownFormatError.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from index.errors import (
    UNDECODABLE,
    CorruptIndexError,
    IndexInvariantError,
    PlanFileError,
    UnknownFormatError,
    UnsafeNameError,
)
from index.java_text import decode_json
from index.plan.collect import DeleteReason, PlannedUpload, ReasonTotal
from index.plan.commits import KeepReason, RetentionPolicy
from index.snapshot.keys import BLOBS, INDEXES, SHARDS_COUNT, RunId, check_run_id, parse_upload_key
from index.snapshot.model import NEVER_MS, SIZE_BYTES_MAX, CommitPointer, Scope

PLAN_HEADER_NAME: Final = "plan.json"
PLAN_SUMMARY_NAME: Final = "summary.json"
LINES_SUFFIX: Final = ".jsonl"
PLAN_SCHEMA: Final = 1

# Caps for the reader of a file that anyone may have written.
PLAN_HEADER_BYTES_MAX: Final = 256 * 1024 * 1024
LINE_BYTES_MAX: Final = 4096

# What is negative, or does not fit 63 bits, is refused by the decoder.
Natural = Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]

_PLAN_HINT: Final = "make the plan again with a dry run"

RUN_HEADER: Final = "run"
# The name of what says that a run has come to its end, and that what is left of it may go.
RUN_ENDED: Final = "ended"
# Newer releases may add fields, which an older one ignores; it resumes no run of a greater schema.
RUN_SCHEMA: Final = 1
RUN_HEADER_BYTES_MAX: Final = 64 * 1024

_KIND_PREFIXES: Final = (BLOBS, INDEXES)
# Blobs and indexes, in the order of their keys.
POSITIONS_COUNT: Final = len(_KIND_PREFIXES) * SHARDS_COUNT

AUDIT_SCHEMA: Final = 1

Outcome = Literal["done", "partly", "refused", "failed"]


class RootCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A valid commit that was open when the plan was made."""

    scope: Scope
    number: Natural
    version: Natural
    committed_at_ms: int
    # None: it is to be closed.
    kept: KeepReason | None


class RootName(msgspec.Struct, frozen=True, kw_only=True):
    """A naming that was there."""

    scope: Scope
    name: str
    number: Natural
    is_live: bool


class RootPin(msgspec.Struct, frozen=True, kw_only=True):
    """A pin that was there."""

    id: str
    scope: Scope
    number: Natural
    is_live: bool


class PlanHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was made of; times by the store's clock, in milliseconds."""

    schema: int = PLAN_SCHEMA
    run: RunId
    repository_id: str
    release: str
    ttl_ms: Natural
    # When the run began.
    now_ms: Natural
    # When the uploads were listed: the `now` of D2, earlier than `now_ms` where a run was resumed (R3).
    listed_at_ms: Natural
    retention: RetentionPolicy
    commits: tuple[RootCommit, ...]
    names: tuple[RootName, ...]
    pins: tuple[RootPin, ...]


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a plan: how many lines it has, and what it leaves."""

    schema: int = PLAN_SCHEMA
    run: RunId
    lines_count: Natural
    size_bytes: Natural
    totals: tuple[ReasonTotal, ...]
    # Every blob and index that was listed.
    listed_count: Natural
    listed_bytes: Natural
    # Unreachable uploads that are younger than the TTL.
    waiting_count: Natural
    waiting_bytes: Natural


_Part = TypeVar("_Part", PlanHeader, PlanSummary)


class _Line(msgspec.Struct, frozen=True, gc=False):
    key: str
    # The reason of D2.
    reason: Literal["unreachable_upload"]
    size_bytes: Natural
    # Milliseconds before 1970 show no malice where a test's clock begins at 0.
    created_at_ms: Annotated[int, msgspec.Meta(ge=-NEVER_MS, le=NEVER_MS)]


class _Schema(msgspec.Struct, frozen=True):
    schema: int


_line_decoder = msgspec.json.Decoder(_Line)


def encode_indented(value: "PlanHeader | PlanSummary | AuditRecord") -> bytes:
    """Return a plan's header or summary, or an audit record, as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode_plan_header(data: bytes, *, subject: str) -> PlanHeader:
    """Return the header that was written."""
    header = _decode_whole(data, PlanHeader, subject)
    if header.listed_at_ms > header.now_ms:
        raise PlanFileError("has times that no plan has", subject=subject, hint=_PLAN_HINT)
    return header


def decode_plan_summary(data: bytes, *, subject: str) -> PlanSummary:
    """Return the summary that was written."""
    summary = _decode_whole(data, PlanSummary, subject)
    if any(min(total.count, total.size_bytes) < 0 for total in summary.totals):
        raise PlanFileError("has counts or sizes that no plan has", subject=subject, hint=_PLAN_HINT)
    return summary


def encode_line(planned: PlannedUpload) -> bytes:
    """Return one line of a plan, with its newline."""
    line = _Line(planned.key, "unreachable_upload", planned.size_bytes, planned.created_at_ms)
    return msgspec.json.encode(line) + b"\n"


def decode_line(line: bytes, *, subject: str) -> PlannedUpload:
    """Return the upload that a line, without its newline, plans to delete."""
    if len(line) > LINE_BYTES_MAX:
        raise PlanFileError(f"is longer than {LINE_BYTES_MAX} bytes", subject=subject, hint=_PLAN_HINT)
    try:
        value = _line_decoder.decode(line)
        parse_upload_key(value.key)
    except (*UNDECODABLE, UnsafeNameError) as error:
        raise PlanFileError(f"not a line of a plan: {error}", subject=subject, hint=_PLAN_HINT) from error
    reason = DeleteReason.UNREACHABLE_UPLOAD
    return PlannedUpload(value.key, reason, value.size_bytes, created_at_ms=value.created_at_ms)


def decode_lines(data: bytes, *, subject: str) -> Iterator[PlannedUpload]:
    """Return every upload of a file of lines; one whose last line has no end is refused."""
    if data and not data.endswith(b"\n"):
        raise PlanFileError("is cut short", subject=subject, hint=_PLAN_HINT)
    for number, line in enumerate(data.splitlines(), start=1):
        yield decode_line(line, subject=f"{subject}, line {number}")


def _decode_whole(data: bytes, kind: type[_Part], subject: str) -> _Part:
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema == PLAN_SCHEMA:
            value = msgspec.json.decode(data, type=kind)
            check_run_id(value.run)
            return value
    except (*UNDECODABLE, IndexInvariantError, UnsafeNameError) as error:
        raise PlanFileError(f"not a part of a plan: {error}", subject=subject, hint=_PLAN_HINT) from error
    raise UnknownFormatError(
        f"has schema {schema}, which this version of tidemark does not know", subject=subject, hint=_PLAN_HINT
    )


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Written before anything is listed; a run that has one is not finished (design 0006, R3 and R6)."""

    schema: int = RUN_SCHEMA
    # It says when the run began, by the store's clock: the `now` of D2 for a collection that resumes the run.
    run: RunId
    repository_id: str
    # The version of tidemark that began it; for people only.
    release: str


class Shard(msgspec.Struct, frozen=True, order=True):
    """One of the 512 parts of an inventory, by its place in the order of keys."""

    position: int

    @property
    def kind_prefix(self) -> str:
        return _KIND_PREFIXES[self.position // SHARDS_COUNT]

    @property
    def prefix(self) -> str:
        """What all of its keys begin with, and no others."""
        return f"{self.kind_prefix}{self.position % SHARDS_COUNT:02x}/"

    @property
    def inventory_name(self) -> str:
        return f"inventory-{self.plan_file}"

    def plan_name(self, digest: bytes) -> str:
        return f"plan-{self.plan_file}-{digest.hex()}"

    def done_name(self, digest: bytes) -> str:
        return f"done-{self.plan_file}-{digest.hex()}"

    @property
    def plan_file(self) -> str:
        """Name of the file of its lines, where a plan is written to files."""
        return f"{self.kind_prefix.rstrip('/')}-{self.position % SHARDS_COUNT:02x}"


SHARDS: Final = tuple(Shard(position) for position in range(POSITIONS_COUNT))
_BY_PREFIX: Final = {shard.prefix: shard for shard in SHARDS}
_BY_MARK: Final = {shard.done_name(b"").removesuffix("-"): shard for shard in SHARDS}
_DIGEST: Final = re.compile("[0-9a-f]{64}")


def carried_out_plans(names: Iterable[str]) -> dict[int, tuple[bytes, ...]]:
    """Return the digests of the plans that are marked as carried out, by shard, from the names of a run's objects."""
    found: dict[int, tuple[bytes, ...]] = {}
    for name in sorted(names):
        mark, _, digest = name.rpartition("-")
        shard = _BY_MARK.get(mark)
        if shard is not None and _DIGEST.fullmatch(digest):
            found[shard.position] = (*found.get(shard.position, ()), bytes.fromhex(digest))
    return found


def group_by_shard(keys: Iterable[str]) -> dict[Shard, list[str]]:
    """Return the keys of blobs and indexes by their shards; a CorruptIndexError if one is the key of neither."""
    groups: dict[Shard, list[str]] = {}
    for key in keys:
        # Two digits and a slash after the prefix of the kind.
        shard = _BY_PREFIX.get(key[: key.find("/") + 4])
        if shard is None:
            raise CorruptIndexError("is not the key of a blob or an index", subject=repr(key))
        groups.setdefault(shard, []).append(key)
    return groups


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 by which an object of a run is identified."""
    return hashlib.sha256(data).digest()


def encode_run_header(header: RunHeader) -> bytes:
    """Return a header as one JSON object."""
    return msgspec.json.encode(header)


def decode_run_header(data: bytes, *, subject: str) -> RunHeader:
    """Return the header that was stored."""
    header = decode_json(data, RunHeader, CorruptIndexError, "is not the header of a run", subject=subject)
    if header.schema > RUN_SCHEMA:
        raise UnknownFormatError(f"is of schema {header.schema}", subject=subject, hint="use a newer tidemark")
    return header


class AuditedScope(msgspec.Struct, frozen=True, kw_only=True):
    """One log that was examined."""

    scope: Scope
    # The newest valid commit; 0 where there is none.
    newest: int
    # Valid commits that were open, and how many of them stayed so.
    open_count: int
    kept_count: int


class AuditedBoundary(msgspec.Struct, frozen=True, kw_only=True):
    """One boundary that was written, or adopted."""

    scope: Scope
    number: int
    # Records that it leaves open, and the newest of them.
    kept_count: int
    kept: tuple[CommitPointer, ...]


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One collection. Lists are cut at a maximum, and the counts beside them are not.

    What a run that failed did not come to is 0 or empty.
    """

    schema: int = AUDIT_SCHEMA
    run: RunId
    release: str
    # By the store's clock. The run resumed an earlier one where the second is before the first (R3); 0: nothing was
    # listed.
    began_at_ms: int
    listed_at_ms: int
    # The earlier run whose listing that was, where this process knows it.
    resumed_from: RunId | None = msgspec.field(default=None, name="taken_up")
    # By this machine's clock.
    seconds: float
    outcome: Outcome
    # What stopped it; empty if nothing did.
    error: str
    retention: RetentionPolicy
    delete_share_max: float
    scopes_count: int
    scopes: tuple[AuditedScope, ...]
    names_count: int
    pins_count: int
    boundaries_count: int
    boundaries: tuple[AuditedBoundary, ...]
    listed_count: int
    listed_bytes: int
    live_count: int
    live_bytes: int
    waiting_count: int
    waiting_bytes: int
    excluded_count: int = msgspec.field(name="spared_count")
    # Blobs and indexes that were to go, and everything that went.
    planned: tuple[ReasonTotal, ...]
    deleted: tuple[ReasonTotal, ...]
    failed_count: int
    failed: tuple[str, ...]
    # Keys that may be gone or not, because the store gave no answer or a task was lost; at most.
    unknown_count: int = 0
    # How far the store's clock was ahead of everything else; then nothing was deleted for its age.
    clock_ahead_ms: int = 0


def decode_audit(data: bytes, *, subject: str) -> AuditRecord:
    """Return the record that was written."""
    record = decode_json(data, AuditRecord, CorruptIndexError, "is not an audit record", subject=subject)
    if record.schema != AUDIT_SCHEMA:
        raise UnknownFormatError(f"has schema {record.schema}", subject=subject, hint="use a newer tidemark")
    return record
