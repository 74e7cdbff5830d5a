"""What a collection may delete, and why; decided from what was listed and read (design 0002, D1 to D5)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from index.errors import UnsafeNameError
from index.plan.commits import (
    SHRINK_FLOOR_BYTES,
    SHRINK_MAX,
    Commit,
    KeepReason,
    LogListing,
    Retention,
    choose_kept,
    find_reopenable,
    is_closed,
    is_number_closed,
    is_shrunk,
    lasting_boundaries,
    valid_commits,
)
from index.snapshot.keys import parse_upload_key
from index.snapshot.model import (
    NEVER_MS,
    PIN_DURATION_MS,
    Boundary,
    CommitPointer,
    CommitRecord,
    NameRecord,
    Pin,
    Scope,
)


class DeleteReason(StrEnum):
    """Why a key may be deleted."""

    CLOSED_COMMIT = "commit record closed by a boundary"
    SUPERSEDED_BOUNDARY = "boundary whose content a newer one repeats"
    EXPIRED_PIN = "pin released or expired"
    RELEASED_NAME = "name released"
    UNREACHABLE_UPLOAD = "unreachable, and older than the TTL"
    UNFINISHED_UPLOAD = "begun longer ago than the TTL, and never finished"
    LEFT_RUN = "left by a collection that began longer ago than the TTL"
    OLD_AUDIT = "audit record older than those that are kept"


class PlannedDelete(msgspec.Struct, frozen=True, gc=False):
    """One key to delete."""

    key: str
    reason: DeleteReason
    size_bytes: int = 0


class PlannedUpload(PlannedDelete, frozen=True, gc=False, kw_only=True):
    """One blob or index to delete, with its creation time by the store's clock."""

    created_at_ms: int


class ReasonTotal(msgspec.Struct, frozen=True, kw_only=True):
    """How much goes for one reason."""

    reason: DeleteReason
    count: int
    size_bytes: int


class Upload(msgspec.Struct, frozen=True, gc=False):
    """A listed blob or index; its creation time by the store's clock in milliseconds."""

    key: str
    size_bytes: int
    created_at_ms: int


class UnfinishedUpload(msgspec.Struct, frozen=True, gc=False):
    """A listed put that was begun and is not visible; its key is any key of the store's, not always one of ours.

    One that begins with a dot is not a key but a name that the store itself has made (`blobstore.base.UnfinishedPut`).
    """

    key: str
    upload_id: str
    # By the store's clock.
    begun_at_ms: int
    # What it holds, where the store shows it.
    size_bytes: int = 0


class UnfinishedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection does with the puts that were never finished."""

    # Forgotten: to be aborted.
    doomed: tuple[UnfinishedUpload, ...]
    # Ours, and so young that they may be under way.
    young: tuple[UnfinishedUpload, ...]
    # Keys that tidemark never wrote: left alone.
    foreign: tuple[str, ...]


class ScopePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection does to one scope's log."""

    scope: Scope
    # The records that stay roots, each with its reason.
    kept: tuple[tuple[Commit, KeepReason], ...]
    # The boundary to write before anything is deleted; None where nothing is to be closed.
    boundary: Boundary | None
    # Of the commit that goes and leaves the least behind: the bytes of its state, and of the largest newer one that
    # stays (design 0006, P9). Where nothing goes, both are those of the newest.
    before_bytes: int = 0
    after_bytes: int = 0


class ShrunkJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that a collection would leave with much less state than it gives up (design 0006, P9)."""

    job: str
    # The largest state that goes, and the largest newer one that stays; sums over the job's scopes.
    before_bytes: int
    after_bytes: int


def plan_scope(
    listing: LogListing,
    records: Mapping[int, CommitRecord],
    boundaries: Sequence[Boundary],
    retention: Retention | None,
    named: Collection[CommitPointer],
    *,
    vouched: Collection[CommitPointer] = (),
) -> ScopePlan:
    """Choose what stays open in one scope and the boundary that closes the rest (D3).

    Records above the newest valid one are left alone: they are void, and a boundary passes them once a newer valid one
    is there. The newest valid record is always kept. The boundary's number is the highest record that it newly closes,
    or the next, up to the newest commit's, with which it lasts. What only one closes that does not is closed again.

    Args:
        listing: The whole log of the scope, dense.
        records: Every listed record that no lasting boundary closes by its number, read; as is every listed boundary.
        retention: What to keep; None: every valid commit.
        named: Records of this scope that names refer to.
        vouched: Late records for which something outside the log vouches (C5).
    """
    commits = valid_commits(listing, records, boundaries, vouched)
    kept = choose_kept(commits, retention, named)
    newest = commits[-1].pointer.number if commits else 0
    closing = [
        record.pointer
        for number, _ in listing.records
        if number < newest
        and (record := records.get(number)) is not None
        and record.pointer not in kept
        and not is_closed(record.pointer, boundaries)
    ]
    again = [p for p in find_reopenable(boundaries) if listing.created_at_ms(p.number) is not None]
    boundary = None
    for least in sorted({p.number for p in (*closing, *again)}, reverse=True):
        if number := choose_number(listing, boundaries, least, newest):
            kept_below = tuple(sorted(p for p in kept if p.number <= number))
            boundary = Boundary(scope=listing.scope, number=number, kept=kept_below)
            break
    before_bytes, after_bytes = _worst_loss(commits, kept)
    return ScopePlan(
        scope=listing.scope,
        kept=tuple((commit, kept[commit.pointer]) for commit in commits if commit.pointer in kept),
        boundary=boundary,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
    )


def choose_number(listing: LogListing, boundaries: Sequence[Boundary], least: int, newest: int) -> int:
    """Return the number of a boundary that closes up to `least`, and lasts; 0 if there is none up to the newest.

    No newer boundary closes it: all list it, or there is none (design 0002, D3).
    """
    listed = {p.number for b in boundaries for p in b.kept}
    above = max(listing.boundaries, default=0) + 1
    for number in sorted({least, above, *listed}):
        newer = [b for b in boundaries if b.number > number]
        if least <= number <= newest and number not in listing.boundaries and not is_number_closed(number, newer):
            return number
    return 0


def _worst_loss(commits: Sequence[Commit], kept: Collection[CommitPointer]) -> tuple[int, int]:
    """Find the commit to go of which the newer ones that stay hold the least: its bytes, and theirs at the most."""
    newest_bytes = commits[-1].record.state_bytes if commits else 0
    pairs, newer_bytes = [(newest_bytes, newest_bytes)], 0
    for commit in reversed(commits):
        size_bytes = commit.record.state_bytes
        if commit.pointer in kept:
            newer_bytes = max(newer_bytes, size_bytes)
        else:
            pairs.append((size_bytes, newer_bytes))
    # Of several the largest loss: but none in which most stays, as between two old commits of which one has a name.
    return max(pairs, key=lambda pair: (is_shrunk(pair[0], pair[1], SHRINK_MAX), pair[0] - pair[1]))


def find_shrunk_jobs(plans: Iterable[ScopePlan], share_max: float) -> tuple[ShrunkJob, ...]:
    """Return the jobs that would shrink by more than a share of their state, by name (design 0006, P9)."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for plan in plans:
        before[plan.scope.job] += plan.before_bytes
        after[plan.scope.job] += plan.after_bytes
    return tuple(
        ShrunkJob(job=job, before_bytes=before[job], after_bytes=after[job])
        for job in sorted(before)
        if is_shrunk(before[job], after[job], share_max, floor_bytes=SHRINK_FLOOR_BYTES)
    )


def choose_closed_records(
    listing: LogListing, records: Mapping[int, CommitRecord], boundaries: Sequence[Boundary]
) -> tuple[int, ...]:
    """Return the numbers of the listed records that a lasting boundary has closed: they may be deleted first (D1)."""
    lasting = lasting_boundaries(boundaries)
    return tuple(
        number
        for number, _ in listing.records
        if is_number_closed(number, lasting) or (number in records and is_closed(records[number].pointer, lasting))
    )


def pin_is_live(pin: Pin, written_at_ms: int, now_ms: int) -> bool:
    """Return whether a pin protects: it was not released and its duration has not passed since its last write (D5)."""
    return pin.duration_ms > 0 and now_ms < written_at_ms + pin.duration_ms


def pin_is_removable(pin: Pin, written_at_ms: int, now_ms: int, margin_ms: int) -> bool:
    """Return whether a pin's object may be deleted: released, or expired for so long that no renewal is on its way."""
    return pin.duration_ms == 0 or now_ms >= written_at_ms + pin.duration_ms + margin_ms


def name_is_removable(name: NameRecord, written_at_ms: int, now_ms: int, margin_ms: int, *, is_live: bool) -> bool:
    """Return whether a naming's object may be deleted: it protects nothing, and never will again.

    Until `valid_until_ms` a released one holds its key, so that a request which created it and was sent twice cannot
    bring it back to life; and for as long as a pin may last that was written when it was live (D5).
    """
    settled = name.valid_until_ms == NEVER_MS or now_ms > name.valid_until_ms
    pins_are_over = not name.released or now_ms >= written_at_ms + PIN_DURATION_MS + margin_ms
    return settled and pins_are_over and not is_live


class Protection(msgspec.Struct, frozen=True, kw_only=True):
    """Scopes of which no upload may go, because something of them cannot be read (D9)."""

    scopes: frozenset[Scope] = frozenset()
    # Which scopes it may refer to is not known.
    everything: bool = False

    def plus(self, other: "Protection") -> "Protection":
        return Protection(scopes=self.scopes | other.scopes, everything=self.everything or other.everything)

    def scope_names(self) -> tuple[str, ...]:
        """Return the scopes by name; `*` for all."""
        return ("*",) if self.everything else tuple(sorted(map(str, self.scopes)))

    def covers(self, key: str) -> bool:
        """Return whether an upload stays."""
        return self.everything or (bool(self.scopes) and parse_upload_key(key).scope in self.scopes)


NOTHING_PROTECTED: Final = Protection()


def choose_uploads(
    unreachable: Iterable[Upload], now_ms: int, ttl_ms: int, protected: Protection = NOTHING_PROTECTED
) -> tuple[PlannedUpload, ...]:
    """Choose the unreachable uploads that may go: those that were created at least a TTL ago (D2).

    Whether an upload still carries its TTL decides nothing: a commit of a result that was committed before has the
    lease of its uploads in full (C5). Where the creation time moves when a TTL is removed it moves to a later time
    only, and the upload waits a while longer.

    Args:
        unreachable: Blobs and indexes that no kept commit, name or pin leads to; listed before the roots were read.
        now_ms: The store's clock, read before the listing.
    """
    return tuple(
        PlannedUpload(u.key, DeleteReason.UNREACHABLE_UPLOAD, u.size_bytes, created_at_ms=u.created_at_ms)
        for u in unreachable
        if u.created_at_ms + ttl_ms <= now_ms and not protected.covers(u.key)
    )


def waiting_until_ms(waiting: Iterable[Upload], ttl_ms: int) -> int:
    """Return when the youngest of some unreachable uploads is a TTL old, by the store's clock; 0 of none."""
    return max((upload.created_at_ms + ttl_ms for upload in waiting), default=0)


def sum_totals(parts: Iterable[PlannedDelete | ReasonTotal]) -> tuple[ReasonTotal, ...]:
    """Sum deletes, and totals of others, in the order of `DeleteReason`, without reasons for which nothing goes."""
    counts: Counter[DeleteReason] = Counter()
    sizes: Counter[DeleteReason] = Counter()
    for part in parts:
        counts[part.reason] += part.count if isinstance(part, ReasonTotal) else 1
        sizes[part.reason] += part.size_bytes
    return tuple(ReasonTotal(reason=r, count=counts[r], size_bytes=sizes[r]) for r in DeleteReason if counts[r])


def choose_unfinished(puts: Iterable[UnfinishedUpload], now_ms: int, ttl_ms: int) -> UnfinishedPlan:
    """Choose the puts to abort: ours, and begun at least a TTL ago by the store's clock (design 0002, D10).

    A blob that takes longer than the TTL to put could not be committed any more (C5). The clock was read before the
    puts were listed.
    """
    doomed: list[UnfinishedUpload] = []
    young: list[UnfinishedUpload] = []
    foreign: set[str] = set()
    for put in puts:
        if not (is_upload_key(put.key) or put.key.startswith(".")):
            foreign.add(put.key)
        elif put.begun_at_ms + ttl_ms <= now_ms:
            doomed.append(put)
        else:
            young.append(put)
    return UnfinishedPlan(doomed=tuple(doomed), young=tuple(young), foreign=tuple(sorted(foreign)))


def is_upload_key(key: str) -> bool:
    """Return whether a key is one that tidemark gives to blobs and indexes; any other is somebody else's."""
    try:
        parse_upload_key(key)
    except UnsafeNameError:
        return False
    return True
