"""What a collection has found out and done so far: its report and its audit record are made of it, however it ends."""

from collections.abc import Iterable, Mapping

import msgspec

from engine.collect.backend import KEYS_TOLD_MAX, Deleted, DeleteTally, Listing, Swept
from engine.records.damage import Damage
from engine.records.roots import Roots
from index.plan.collect import (
    DeleteReason,
    PlannedDelete,
    PlannedUpload,
    ReasonTotal,
    ScopePlan,
    UnfinishedPlan,
    UnfinishedUpload,
    sum_deletes,
    sum_totals,
)
from index.plan.retention import RetentionPolicy
from index.snapshot.keys import BLOBS, INDEXES, RunId
from index.snapshot.records import Boundary, RepositoryRecord


class Facts(msgspec.Struct, kw_only=True):
    """One run, as far as it has come; only `engine.collect.collect` changes it."""

    run: RunId
    repository: RepositoryRecord
    policy: RetentionPolicy
    # When it began, by the store's clock.
    now_ms: int
    dry_run: bool
    delete_share_max: float
    listing: Listing = Listing(
        listed_at_ms=0, count=0, size_bytes=0, newest_created_at_ms=0, foreign_count=0, foreign=()
    )
    # How far the store's clock is ahead of this machine's and of the newest upload, where that is more than a margin.
    clock_ahead_ms: int = 0
    unfinished: UnfinishedPlan = UnfinishedPlan(doomed=(), young=(), foreign=())
    unfinished_hidden: str = ""
    # What old collections have left, and how far its deletion came.
    leftovers: tuple[PlannedDelete, ...] = ()
    leftovers_tally: DeleteTally = msgspec.field(default_factory=DeleteTally)
    roots: Roots = Roots(logs=(), names=(), pins=())
    plans: tuple[ScopePlan, ...] = ()
    # What cannot be read, and what stays because of it.
    damage: Damage = Damage()
    swept: Swept = Swept()
    refused: bool = False
    # Written; of a dry run, planned.
    boundaries: tuple[Boundary, ...] = ()
    # Records, boundaries, names and pins, how far their deletion came, and what of them the store would not delete.
    log_deletes: tuple[PlannedDelete, ...] = ()
    log_tally: DeleteTally = msgspec.field(default_factory=DeleteTally)
    log_left: frozenset[str] = frozenset()
    # Whether anything may have been deleted.
    has_begun_to_delete: bool = False
    # By room, as far as it came; one that is not among them was not begun.
    deleted: Mapping[str, Deleted] = {}
    aborted: tuple[UnfinishedUpload, ...] = ()

    @property
    def age_now_ms(self) -> int:
        """The time by which ages are judged; 0, at which nothing is old, where the store's clock may have stepped."""
        return 0 if self.clock_ahead_ms else self.now_ms

    @property
    def planned_bytes(self) -> int:
        """Bytes of the uploads that are to go."""
        return sum(total.size_bytes for total in self.swept.totals)

    def totals(self) -> tuple[ReasonTotal, ...]:
        """What went, by reason; of a dry run, what would go."""
        uploads: Iterable[ReasonTotal] = (t for room in self.deleted.values() for t in room.totals)
        return sum_totals((*sum_deletes(self._others_gone()), *(self.swept.totals if self.dry_run else uploads)))

    def told(self) -> tuple[PlannedDelete, ...]:
        """Some of what went, key by key."""
        log = [d for d in self._others_gone() if d.reason is not DeleteReason.UNFINISHED_UPLOAD]
        unfinished = [d for d in self._others_gone() if d.reason is DeleteReason.UNFINISHED_UPLOAD]
        uploads = [u for u in self.swept.told if self.dry_run or self._is_gone(u)]
        return tuple(d for kind in (log, uploads, unfinished) for d in kind[:KEYS_TOLD_MAX])

    def failed_count(self) -> int:
        """Keys that were to go and are still there."""
        if not self.has_begun_to_delete:
            return 0
        unknown = sum(room.unknown_count for room in self.deleted.values())
        not_aborted = len(self.unfinished.doomed) - len(self.aborted)
        others = sum(len(_staying(planned, tally)) for planned, tally in self._other_lists())
        planned = sum(t.count for t in self.swept.totals)
        gone = sum(t.count for room in self.deleted.values() for t in room.totals)
        return planned - gone - unknown + others + not_aborted

    def unknown_count(self) -> int:
        """Keys of which nobody knows whether they are gone: the store did not answer, or a task was lost."""
        others = sum(tally.asked - tally.answered for _, tally in self._other_lists())
        return others + sum(room.unknown_count for room in self.deleted.values())

    def failed(self) -> tuple[str, ...]:
        """Some of the keys that were to go and are still there."""
        if not self.has_begun_to_delete:
            return ()
        keys = _staying(self.log_deletes, self.log_tally)
        for room in (INDEXES, BLOBS):
            not_begun = (u.key for u in self.swept.told if u.key.startswith(room))
            keys += self.deleted[room].failed if room in self.deleted else not_begun
        aborted = frozenset(self.aborted)
        keys += sorted(put.key for put in self.unfinished.doomed if put not in aborted)
        return (*keys, *_staying(self.leftovers, self.leftovers_tally))[:KEYS_TOLD_MAX]

    def failed_before(self, room: str) -> bool:
        """Whether something stays in a room that has to be empty before this one is begun (D1)."""
        return bool(self.log_left) or any(done.failed_count for name, done in self.deleted.items() if name != room)

    def _others_gone(self) -> Iterable[PlannedDelete]:
        """What went and is no upload; of a dry run, what would."""
        for planned, tally in self._other_lists():
            stays = frozenset(tally.left)
            yield from (d for d in (planned if self.dry_run else planned[: tally.answered]) if d.key not in stays)
        for put in self.unfinished.doomed if self.dry_run else self.aborted:
            yield PlannedDelete(put.key, DeleteReason.UNFINISHED_UPLOAD, put.size_bytes)

    def _other_lists(self) -> tuple[tuple[tuple[PlannedDelete, ...], DeleteTally], ...]:
        return (self.log_deletes, self.log_tally), (self.leftovers, self.leftovers_tally)

    def _is_gone(self, upload: PlannedUpload) -> bool:
        room = self.deleted.get(INDEXES if upload.key.startswith(INDEXES) else BLOBS)
        if room is None or upload.key in room.failed:
            return False
        # Of more failures than are told, nobody knows which they are.
        return room.failed_count == len(room.failed) or upload.key < room.failed[-1]


def _staying(planned: tuple[PlannedDelete, ...], tally: DeleteTally) -> list[str]:
    """What is known to be there still: what the store would not delete, and what it was never asked to."""
    return [*sorted(tally.left), *(d.key for d in planned[tally.asked :])]
