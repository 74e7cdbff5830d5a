"""What each step of a collection has found or done, as a value that the later ones take."""

from collections.abc import Iterable

import msgspec

from blobstore.errors import StoreError
from engine.collect.backend import KEYS_LISTED_MAX, Deleted, DeleteTally, Listing, SweepResult
from engine.errors import EngineError
from engine.records.damage import Damage, Unread
from engine.records.roots import References, Roots
from index.errors import FormatError
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
from index.snapshot.model import IndexReference
from index.snapshot.records import Boundary, RepositoryRecord

CollectError = EngineError | FormatError | StoreError


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and by which rules it goes."""

    run: RunId
    repository: RepositoryRecord
    policy: RetentionPolicy
    # When it began, by the store's clock.
    now_ms: int
    dry_run: bool
    delete_share_max: float


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Step 1: the uploads, and whether the store's clock may have stepped (D11)."""

    listing: Listing
    # How far it is ahead of this machine's and of the newest upload, where that is more than a margin.
    clock_ahead_ms: int
    # The time by which ages are judged; 0, at which nothing is old, where the clock may have stepped.
    age_now_ms: int
    # The rules; where the clock may have stepped, those of `RetentionPolicy.ageless`.
    policy: RetentionPolicy


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """Step 2: puts that were never finished, and what earlier collections have left."""

    unfinished: UnfinishedPlan
    # Why such puts could not be looked for; empty if they were.
    unfinished_hidden: str
    planned: tuple[PlannedDelete, ...]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Step 3: one reading of the roots, what cannot be read, and what is kept because of either."""

    roots: Roots
    damage: Damage
    scopes: tuple[ScopePlan, ...]
    # The indexes that kept commits, names and pins lead to, but for those that cannot be read.
    references: References

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The boundaries to write."""
        planned = [plan.boundary for plan in self.scopes if plan.boundary is not None]
        return tuple(sorted(planned, key=lambda b: str(b.scope)))


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """Step 4: the uploads that nothing kept leads to."""

    # The reading that was followed.
    kept: Kept
    sweep_result: SweepResult
    # Indexes that are missing or altered.
    broken: dict[IndexReference, Unread]
    # Why newest commits could not be settled.
    unsettled: tuple[CollectError, ...]


class DeletePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Step 6, after the boundaries: everything that may go, by the second reading of the roots (D4)."""

    # That reading, with what the first one keeps.
    kept: Kept
    # Written; of a dry run, planned.
    boundaries: tuple[Boundary, ...]
    # Records, boundaries, names and pins.
    log_deletes: tuple[PlannedDelete, ...]
    sweep_result: SweepResult


class Deletion(msgspec.Struct, kw_only=True):
    """Step 7: how far the deletes have come; it outlives the error that ends them."""

    plan: DeletePlan
    leftovers: Leftovers
    log_tally: DeleteTally = msgspec.field(default_factory=DeleteTally)
    leftovers_tally: DeleteTally = msgspec.field(default_factory=DeleteTally)
    # By prefix; one that is not among them was not begun.
    uploads: dict[str, Deleted] = {}
    aborted: tuple[UnfinishedUpload, ...] = ()

    @classmethod
    def complete(cls, plan: DeletePlan, leftovers: Leftovers) -> "Deletion":
        """Return the deletion as it would be if all of it succeeded: what a dry run reports."""
        log, left = len(plan.log_deletes), len(leftovers.planned)
        return cls(
            plan=plan,
            leftovers=leftovers,
            log_tally=DeleteTally(asked=log, answered=log),
            leftovers_tally=DeleteTally(asked=left, answered=left),
            uploads={INDEXES: Deleted(totals=()), BLOBS: Deleted(totals=plan.sweep_result.totals)},
            aborted=leftovers.unfinished.doomed,
        )

    def may_begin(self, prefix: str) -> bool:
        """Return whether everything is gone that has to be before this prefix is begun (D1)."""
        return not self.log_tally.left and not any(
            done.failed_count for name, done in self.uploads.items() if name != prefix
        )

    def totals(self) -> tuple[ReasonTotal, ...]:
        """Return what is gone, by reason."""
        uploads = (total for done in self.uploads.values() for total in done.totals)
        return sum_totals((*sum_deletes((*self._log_gone(), *self._aborted())), *uploads))

    def first_keys(self) -> tuple[PlannedDelete, ...]:
        """Return the first keys of each kind that are gone."""
        uploads = (u for u in self.plan.sweep_result.first if self._is_gone(u))
        kinds = (self._log_gone(), uploads, self._aborted())
        return tuple(d for kind in kinds for d in list(kind)[:KEYS_LISTED_MAX])

    def failed_count(self) -> int:
        """Return the number of keys that were to go and are still there."""
        gone = sum(total.count for done in self.uploads.values() for total in done.totals)
        unknown = sum(done.unknown_count for done in self.uploads.values())
        not_aborted = len(self.leftovers.unfinished.doomed) - len(self.aborted)
        others = sum(len(_staying(planned, tally)) for planned, tally in self._lists())
        return self.plan.sweep_result.planned_count - gone - unknown + others + not_aborted

    def unknown_count(self) -> int:
        """Return the number of keys that may be gone or not: the store did not answer, or a task was lost."""
        others = sum(tally.asked - tally.answered for _, tally in self._lists())
        return others + sum(done.unknown_count for done in self.uploads.values())

    def failed(self) -> tuple[str, ...]:
        """Return the first of the keys that were to go and are still there."""
        keys = _staying(self.plan.log_deletes, self.log_tally)
        for prefix in (INDEXES, BLOBS):
            not_begun = (u.key for u in self.plan.sweep_result.first if u.key.startswith(prefix))
            keys += self.uploads[prefix].failed if prefix in self.uploads else not_begun
        aborted = frozenset(self.aborted)
        keys += sorted(put.key for put in self.leftovers.unfinished.doomed if put not in aborted)
        return (*keys, *_staying(self.leftovers.planned, self.leftovers_tally))[:KEYS_LISTED_MAX]

    def _log_gone(self) -> Iterable[PlannedDelete]:
        for planned, tally in self._lists():
            stays = frozenset(tally.left)
            yield from (d for d in planned[: tally.answered] if d.key not in stays)

    def _aborted(self) -> Iterable[PlannedDelete]:
        return (PlannedDelete(put.key, DeleteReason.UNFINISHED_UPLOAD, put.size_bytes) for put in self.aborted)

    def _lists(self) -> tuple[tuple[tuple[PlannedDelete, ...], DeleteTally], ...]:
        return (self.plan.log_deletes, self.log_tally), (self.leftovers.planned, self.leftovers_tally)

    def _is_gone(self, upload: PlannedUpload) -> bool:
        done = self.uploads.get(INDEXES if upload.key.startswith(INDEXES) else BLOBS)
        if done is None or upload.key in done.failed:
            return False
        # Of failures beyond those that are listed, the keys are not known.
        return done.failed_count == len(done.failed) or upload.key < done.failed[-1]


def _staying(planned: tuple[PlannedDelete, ...], tally: DeleteTally) -> list[str]:
    """Return what is known to be there still: what the store would not delete, and what it was never asked to."""
    return [*sorted(tally.left), *(d.key for d in planned[tally.asked :])]
