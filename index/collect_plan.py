"""What a collection may delete, and why; decided from what was listed and read (design 0002, D1 to D5)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from index.log import Commit, LogListing, is_closed, valid_commits
from index.model import NEVER_MS, Boundary, CommitPointer, CommitRecord, NameRecord, Pin, Scope
from index.retention import KeepReason, Retention, choose_kept


class DeleteReason(StrEnum):
    """Why a key may be deleted."""

    CLOSED_COMMIT = "commit record closed by a boundary"
    SUPERSEDED_BOUNDARY = "boundary whose content a newer one repeats"
    EXPIRED_PIN = "pin released or expired"
    RELEASED_NAME = "name released"
    EXPIRED_UPLOAD = "unreachable, and its TTL has expired: the upload was never committed"
    CLOSED_UPLOAD = "unreachable, and its TTL was removed: it belonged to a closed commit"


class PlannedDelete(msgspec.Struct, frozen=True, gc=False):
    """One key to delete."""

    key: str
    reason: DeleteReason
    size_bytes: int = 0


class Upload(msgspec.Struct, frozen=True, gc=False):
    """A listed blob or index; times by the store's clock in milliseconds."""

    key: str
    size_bytes: int
    created_at_ms: int
    # None: no TTL, if `ttl_known`.
    expires_at_ms: int | None
    ttl_known: bool = True


class ScopePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection does to one scope's log."""

    scope: Scope
    # The records that stay roots, each with its reason.
    kept: tuple[tuple[Commit, KeepReason], ...]
    # The boundary to write before anything is deleted; None where nothing new is closed.
    boundary: Boundary | None


def plan_scope(
    listing: LogListing,
    records: Mapping[int, CommitRecord],
    boundaries: Sequence[Boundary],
    retention: Retention,
    named: Collection[CommitPointer],
) -> ScopePlan:
    """Choose what stays open in one scope and the boundary that closes the rest (D3).

    Records above the newest valid one are left alone: they are void, and a boundary passes them once a newer valid
    one stands. The newest valid record is always kept.

    Args:
        listing: The whole log of the scope, dense.
        records: Every listed record, read.
        boundaries: Every listed boundary, read.
        retention: What to keep.
        named: Records of this scope that names refer to.

    Returns:
        The plan; its boundary's number is the highest record that it newly closes.
    """
    commits = valid_commits(listing, records, boundaries)
    kept = choose_kept(commits, retention, named)
    newest = commits[-1].pointer.number if commits else 0
    closing = [
        record.pointer
        for number, _ in listing.records
        if number < newest
        and (record := records[number]).pointer not in kept
        and not is_closed(record.pointer, boundaries)
    ]
    boundary = None
    if closing:
        number = closing[-1].number
        boundary = Boundary(
            scope=listing.scope, number=number, kept=tuple(sorted(p for p in kept if p.number <= number))
        )
    return ScopePlan(
        scope=listing.scope,
        kept=tuple((commit, kept[commit.pointer]) for commit in commits if commit.pointer in kept),
        boundary=boundary,
    )


def choose_closed_records(
    listing: LogListing, records: Mapping[int, CommitRecord], boundaries: Sequence[Boundary]
) -> tuple[CommitPointer, ...]:
    """The listed records that a boundary has closed: they may be deleted, before any index or blob (D1)."""
    return tuple(
        records[number].pointer
        for number, _ in listing.records
        if number in records and is_closed(records[number].pointer, boundaries)
    )


def choose_superseded_boundaries(boundaries: Sequence[Boundary]) -> tuple[Boundary, ...]:
    """The boundaries that may be deleted: a newer one keeps, at or below their number, a subset of what they keep (D3).

    The newest is never among them.
    """
    ordered = sorted(boundaries, key=lambda b: b.number)
    return tuple(
        old
        for i, old in enumerate(ordered)
        if any({p for p in new.kept if p.number <= old.number} <= set(old.kept) for new in ordered[i + 1 :])
    )


def pin_is_live(pin: Pin, written_at_ms: int, now_ms: int) -> bool:
    """Whether a pin protects: it was not released and its duration has not passed since its last write (D5)."""
    return pin.duration_ms > 0 and now_ms < written_at_ms + pin.duration_ms


def pin_is_removable(pin: Pin, written_at_ms: int, now_ms: int, margin_ms: int) -> bool:
    """Whether a pin's object may be deleted: released, or expired for so long that no renewal is on its way."""
    return pin.duration_ms == 0 or now_ms >= written_at_ms + pin.duration_ms + margin_ms


def name_is_live(name: NameRecord, written_at_ms: int) -> bool:
    """Whether a name protects what it refers to: not released, and written while its pin still held (D5)."""
    return not name.released and written_at_ms <= name.valid_until_ms


def name_is_removable(name: NameRecord, written_at_ms: int, now_ms: int) -> bool:
    """Whether a naming's object may be deleted: it protects nothing, and never will again.

    Until `valid_until_ms` a released one holds its key, so that a request which created it and was sent twice cannot
    bring it back to life.
    """
    settled = name.valid_until_ms == NEVER_MS or now_ms > name.valid_until_ms
    return settled and not name_is_live(name, written_at_ms)


def choose_uploads(
    uploads: Iterable[Upload], reachable: Collection[str], now_ms: int
) -> tuple[tuple[PlannedDelete, ...], tuple[Upload, ...]]:
    """Split unreachable uploads into those that may go and those whose TTL has to be looked up first (D2).

    Args:
        uploads: Blobs and indexes, listed before the roots were read.
        reachable: Every key that a kept commit, a name or a pin leads to.
        now_ms: The store's clock, read before the listing.

    Returns:
        What may be deleted, and the unreachable uploads of which the listing did not tell the TTL.
    """
    deletes: list[PlannedDelete] = []
    unknown: list[Upload] = []
    for upload in uploads:
        if upload.key in reachable:
            continue
        if not upload.ttl_known:
            unknown.append(upload)
        elif upload.expires_at_ms is None:
            deletes.append(PlannedDelete(upload.key, DeleteReason.CLOSED_UPLOAD, upload.size_bytes))
        elif upload.expires_at_ms <= now_ms:
            deletes.append(PlannedDelete(upload.key, DeleteReason.EXPIRED_UPLOAD, upload.size_bytes))
    return tuple(deletes), tuple(unknown)
