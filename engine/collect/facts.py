"""What a collection has found out and done so far: its report and its audit record are made of it, however it ends."""

from collections.abc import Iterable, Mapping

import msgspec

from engine.collect.hands import KEYS_TOLD_MAX, Deleted, Listing, Marked, Swept
from engine.roots import Roots
from index.collect_plan import (
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
from index.keys import BLOBS, INDEXES, RunId
from index.model import Boundary, RepositoryRecord
from index.retention import RetentionPolicy


class Facts(msgspec.Struct, kw_only=True):
    """One run, as far as it has come; only `engine.collect.run` changes it."""

    run: RunId
    repository: RepositoryRecord
    policy: RetentionPolicy
    # When it began, by the store's clock.
    now_ms: int
    dry_run: bool
    delete_share_max: float
    listing: Listing = Listing(listed_at_ms=0, count=0, size_bytes=0, foreign_count=0, foreign=())
    unfinished: UnfinishedPlan = UnfinishedPlan(doomed=(), young=(), foreign=())
    unfinished_hidden: str = ""
    # What old collections have left, and what of it the store would not delete.
    leftovers: tuple[PlannedDelete, ...] = ()
    leftovers_left: frozenset[str] = frozenset()
    roots: Roots = Roots(logs=(), names=(), pins=())
    plans: tuple[ScopePlan, ...] = ()
    marked: Marked = Marked(live_count=0, live_bytes=0, unsettled=frozenset())
    swept: Swept = Swept(totals=(), waiting_count=0, waiting_bytes=0)
    refused: bool = False
    # Written; of a dry run, planned.
    boundaries: tuple[Boundary, ...] = ()
    # Records, boundaries, names and pins, and what of them the store would not delete.
    log_deletes: tuple[PlannedDelete, ...] = ()
    log_left: frozenset[str] = frozenset()
    # Whether anything may have been deleted.
    has_begun_to_delete: bool = False
    # By room; one that is not among them was not begun.
    deleted: Mapping[str, Deleted] = {}
    aborted: tuple[UnfinishedUpload, ...] = ()

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
        planned = sum(t.count for t in self.swept.totals)
        gone = sum(t.count for room in self.deleted.values() for t in room.totals)
        not_aborted = len(self.unfinished.doomed) - len(self.aborted)
        return planned - gone + len(self.log_left) + len(self.leftovers_left) + not_aborted

    def failed(self) -> tuple[str, ...]:
        """Some of the keys that were to go and are still there."""
        if not self.has_begun_to_delete:
            return ()
        keys = [*sorted(self.log_left)]
        for room in (INDEXES, BLOBS):
            not_begun = (u.key for u in self.swept.told if u.key.startswith(room))
            keys += self.deleted[room].failed if room in self.deleted else not_begun
        aborted = frozenset(self.aborted)
        keys += sorted(put.key for put in self.unfinished.doomed if put not in aborted)
        return (*keys, *sorted(self.leftovers_left))[:KEYS_TOLD_MAX]

    def failed_before(self, room: str) -> bool:
        """Whether something stays in a room that has to be empty before this one is begun (D1)."""
        return bool(self.log_left) or any(done.failed_count for name, done in self.deleted.items() if name != room)

    def _others_gone(self) -> Iterable[PlannedDelete]:
        """What went and is no upload; of a dry run, what would."""
        stays = self.log_left | self.leftovers_left
        began = self.dry_run or self.has_begun_to_delete
        yield from (d for d in (*self.log_deletes, *self.leftovers) if began and d.key not in stays)
        for put in self.unfinished.doomed if self.dry_run else self.aborted:
            yield PlannedDelete(put.key, DeleteReason.UNFINISHED_UPLOAD)

    def _is_gone(self, upload: PlannedUpload) -> bool:
        room = self.deleted.get(INDEXES if upload.key.startswith(INDEXES) else BLOBS)
        if room is None or upload.key in room.failed:
            return False
        # Of more failures than are told, nobody knows which they are.
        return room.failed_count == len(room.failed) or upload.key < room.failed[-1]
