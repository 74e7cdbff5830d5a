"""What a collection leaves behind as evidence (design 0006, A1). Nothing reads it to decide anything."""

from typing import Final, Literal

import msgspec

from index.decoding import decode_json
from index.errors import UnknownFormatError
from index.plan.collect import ReasonTotal
from index.plan.retention import RetentionPolicy
from index.snapshot.keys import RunId
from index.snapshot.model import Scope
from index.snapshot.records import CommitPointer

SCHEMA: Final = 1

Outcome = Literal["done", "partly", "refused", "failed"]


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
    """One collection. Lists are cut at a maximum, and the counts beside them are not."""

    schema: int = SCHEMA
    run: RunId
    release: str
    # By the store's clock. An earlier listing was taken up where the second is before the first (R3); 0: none was made.
    began_at_ms: int
    listed_at_ms: int
    # The run whose listing that was, where this process knows it.
    taken_up: RunId | None = None
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
    spared_count: int
    # Blobs and indexes that were to go, and everything that went.
    planned: tuple[ReasonTotal, ...]
    deleted: tuple[ReasonTotal, ...]
    failed_count: int
    failed: tuple[str, ...]
    # Keys of which nobody knows whether they are gone, because the store gave no answer or a task was lost; at most.
    unknown_count: int = 0
    # How far the store's clock was ahead of everything else; then nothing was deleted for its age.
    clock_ahead_ms: int = 0


def encode_audit(record: AuditRecord) -> bytes:
    """The record as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode_audit(data: bytes, *, subject: str) -> AuditRecord:
    """The record that was written.

    Raises:
        CorruptIndexError: It is none.
        UnknownFormatError: A newer tidemark wrote it.
    """
    record = decode_json(data, AuditRecord, what="no audit record", subject=subject)
    if record.schema != SCHEMA:
        raise UnknownFormatError(f"has schema {record.schema}", subject=subject, hint="use a newer tidemark")
    return record
