"""The plan of a collection as files: a header, lines, and totals at the end (design 0006, P1 to P3). Pure.

```
plan.json         which repository, when, which retention, and every root that was examined
*.jsonl           one line for each upload that would go, in the order of the keys of each file
summary.json      totals; written last, so that a plan without it is not whole
```

A plan is evidence and no order: nothing ever deletes because of what stands here (P3).
"""

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from index.decoding import UNDECODABLE
from index.errors import IndexInvariantError, PlanFileError, UnknownFormatError, UnsafeNameError
from index.plan.collect import DeleteReason, PlannedUpload, ReasonTotal, sum_totals
from index.plan.retention import KeepReason, RetentionPolicy
from index.snapshot.keys import RunId, check_run_id, parse_upload_key
from index.snapshot.model import SIZE_BYTES_MAX, Scope
from index.snapshot.records import NEVER_MS

HEADER_NAME: Final = "plan.json"
SUMMARY_NAME: Final = "summary.json"
LINES_SUFFIX: Final = ".jsonl"
SCHEMA: Final = 1

# Caps for whoever reads a file that anybody may have written.
HEADER_BYTES_MAX: Final = 256 * 1024 * 1024
LINE_BYTES_MAX: Final = 4096

# The reason of D2: what a line says; the others are what earlier releases wrote, each for a part of the same.
_REASON: Final = DeleteReason.UNREACHABLE_UPLOAD.name.lower()
_REASONS: Final = frozenset({_REASON, "expired_upload", "closed_upload", "outlived_upload"})

Value = TypeVar("Value")


class RootCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A valid commit that was open when the plan was made."""

    scope: Scope
    number: int
    version: int
    committed_at_ms: int
    # None: it is to be closed.
    kept: KeepReason | None


class RootName(msgspec.Struct, frozen=True, kw_only=True):
    """A naming that was there."""

    scope: Scope
    name: str
    number: int
    is_live: bool


class RootPin(msgspec.Struct, frozen=True, kw_only=True):
    """A pin that was there."""

    id: str
    scope: Scope
    number: int
    is_live: bool


class PlanHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was made of; times by the store's clock, in milliseconds."""

    schema: int = SCHEMA
    run: RunId
    repository_id: str
    release: str
    ttl_ms: int
    # When the run began.
    now_ms: int
    # When the uploads were listed: the `now` of D2, earlier than `now_ms` where a listing was taken up (R3).
    listed_at_ms: int
    retention: RetentionPolicy
    commits: tuple[RootCommit, ...]
    names: tuple[RootName, ...]
    pins: tuple[RootPin, ...]


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a plan: how many lines it has, and what it leaves."""

    schema: int = SCHEMA
    run: RunId
    lines_count: int
    size_bytes: int
    totals: tuple[ReasonTotal, ...]
    # Every blob and index that was listed.
    listed_count: int
    listed_bytes: int
    # Unreachable uploads that are younger than the TTL.
    waiting_count: int
    waiting_bytes: int


class _Line(msgspec.Struct, frozen=True, gc=False):
    key: str
    reason: str
    size_bytes: int
    created_at_ms: int


class _Schema(msgspec.Struct, frozen=True):
    schema: int


_line_encoder = msgspec.json.Encoder()
_line_decoder = msgspec.json.Decoder(_Line)


def encode_header(header: PlanHeader | PlanSummary) -> bytes:
    """A header or a summary as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n"


def decode_header(data: bytes, *, subject: str) -> PlanHeader:
    """The header that was written.

    Raises:
        PlanFileError: It is no header.
        UnknownFormatError: A newer tidemark wrote it.
    """
    header = _decode_whole(data, PlanHeader, subject)
    _check_run(header.run, subject)
    times = (header.now_ms, header.listed_at_ms, header.ttl_ms)
    numbers = [number for commit in header.commits for number in (commit.number, commit.version)]
    numbers += [name.number for name in header.names]
    numbers += [pin.number for pin in header.pins]
    if min(*times, *numbers) < 0 or header.listed_at_ms > header.now_ms:
        raise PlanFileError("has times or numbers that no plan has", subject=subject, hint=_HINT)
    return header


def decode_summary(data: bytes, *, subject: str) -> PlanSummary:
    """The summary that was written; errors as in `decode_header`."""
    summary = _decode_whole(data, PlanSummary, subject)
    _check_run(summary.run, subject)
    counts = (summary.lines_count, summary.listed_count, summary.waiting_count, *(t.count for t in summary.totals))
    sizes = (summary.size_bytes, summary.listed_bytes, summary.waiting_bytes, *(t.size_bytes for t in summary.totals))
    if min(*counts, *sizes) < 0:
        raise PlanFileError("has counts or sizes that no plan has", subject=subject, hint=_HINT)
    # Of an earlier release's reasons several mean the same.
    return msgspec.structs.replace(summary, totals=sum_totals(summary.totals))


def encode_line(planned: PlannedUpload) -> bytes:
    """One line of a plan, with its newline."""
    line = _Line(planned.key, _REASON, planned.size_bytes, planned.created_at_ms)
    return _line_encoder.encode(line) + b"\n"


def decode_line(line: bytes, *, subject: str) -> PlannedUpload:
    """The upload that a line plans to delete.

    Args:
        line: The bytes between two newlines.
        subject: File and number of the line, for errors.

    Raises:
        PlanFileError: It is no line of a plan.
    """
    if len(line) > LINE_BYTES_MAX:
        raise PlanFileError(f"is longer than {LINE_BYTES_MAX} bytes", subject=subject, hint=_HINT)
    try:
        value = _line_decoder.decode(line)
    except UNDECODABLE as error:
        raise PlanFileError(f"is no line of a plan: {error}", subject=subject, hint=_HINT) from error
    try:
        parse_upload_key(value.key)
    except UnsafeNameError as error:
        raise PlanFileError("has a key that no blob or index has", subject=subject, hint=_HINT) from error
    if value.reason not in _REASONS:
        raise PlanFileError("has a reason for which no upload is deleted", subject=subject, hint=_HINT)
    # Milliseconds before 1970 are no sign of malice where a test's clock begins at 0; sizes below 0 are.
    if not 0 <= value.size_bytes <= SIZE_BYTES_MAX or abs(value.created_at_ms) > NEVER_MS:
        raise PlanFileError("has a size or a time that no upload has", subject=subject, hint=_HINT)
    reason = DeleteReason.UNREACHABLE_UPLOAD
    return PlannedUpload(value.key, reason, value.size_bytes, created_at_ms=value.created_at_ms)


def decode_lines(data: bytes, *, subject: str) -> Iterator[PlannedUpload]:
    """Every upload of a file of lines.

    Raises:
        PlanFileError: A line is none, or the last one has no end.
    """
    if data and not data.endswith(b"\n"):
        raise PlanFileError("is cut short", subject=subject, hint=_HINT)
    for number, line in enumerate(data.splitlines(), start=1):
        yield decode_line(line, subject=f"{subject}, line {number}")


_HINT: Final = "make the plan again with a dry run"


def _decode_whole(data: bytes, kind: type[Value], subject: str) -> Value:
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=kind)
    except (*UNDECODABLE, IndexInvariantError) as error:
        raise PlanFileError(f"is no part of a plan: {error}", subject=subject, hint=_HINT) from error
    raise UnknownFormatError(
        f"has schema {schema}, which this version of tidemark does not know", subject=subject, hint=_HINT
    )


def _check_run(run: str, subject: str) -> None:
    try:
        check_run_id(run)
    except UnsafeNameError as error:
        raise PlanFileError("has a run that is none", subject=subject, hint=_HINT) from error
