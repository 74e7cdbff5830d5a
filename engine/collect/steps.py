"""What the steps of a collection find and do, and may do next (design 0006; 0002, D1 and D4)."""

import msgspec

from blobstore.errors import StoreError
from engine.collect.backend import KEYS_LISTED_MAX, Deleted, DeleteTally, Listing, SweepResult
from engine.errors import EngineError
from engine.records.roots import Damage, References, Roots, Unread
from index.errors import FormatError
from index.plan.collect import (
    DeleteReason,
    PlannedDelete,
    PlannedUpload,
    ReasonTotal,
    ScopePlan,
    UnfinishedPlan,
    UnfinishedUpload,
    sum_totals,
)
from index.plan.commits import RetentionPolicy
from index.snapshot.keys import BLOBS, INDEXES, RunId
from index.snapshot.model import Boundary, IndexReference, RepositoryRecord

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
    # What they have left, in the order of its deletion.
    runs: tuple[PlannedDelete, ...]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Step 3: one reading of the roots, what cannot be read, and what is kept because of either."""

    roots: Roots
    damage: Damage
    scopes: tuple[ScopePlan, ...]
    # The indexes that kept commits, names and pins lead to, but for those that cannot be read.
    references: References

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
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


class Deletion(msgspec.Struct, kw_only=True):
    """Steps 6 and 7, after the boundaries: everything that may go by the second reading of the roots (D4).

    It says how far the deletes have come, too, and outlives the error that ends them.
    """

    # That reading, with what the first one keeps.
    kept: Kept
    # Written; of a dry run, planned.
    boundaries: tuple[Boundary, ...]
    sweep_result: SweepResult
    leftovers: Leftovers
    # Records, boundaries, names and pins.
    log: DeleteTally
    # What earlier collections have left.
    runs: DeleteTally
    # By prefix; one that is not among them was not begun.
    uploads: dict[str, Deleted] = {}
    aborted: tuple[UnfinishedUpload, ...] = ()

    def complete(self) -> None:
        """Take all of it for done: what a dry run reports."""
        for tally in (self.log, self.runs):
            tally.asked = tally.answered = len(tally.planned)
        self.uploads = {INDEXES: Deleted(totals=()), BLOBS: Deleted(totals=self.sweep_result.totals)}
        self.aborted = self.leftovers.unfinished.doomed

    def may_begin(self, prefix: str) -> bool:
        """Return whether everything is gone that has to be before this prefix is begun (D1)."""
        return not self.log.left and not any(done.failed_count for name, done in self.uploads.items() if name != prefix)

    def totals(self) -> tuple[ReasonTotal, ...]:
        uploads = (total for done in self.uploads.values() for total in done.totals)
        return sum_totals((*sum_totals((*self._log_gone(), *self._aborted())), *uploads))

    def first_keys(self) -> tuple[PlannedDelete, ...]:
        uploads = [u for u in self.sweep_result.first if self._is_gone(u)]
        kinds: tuple[list[PlannedDelete], ...] = (self._log_gone(), [*uploads], self._aborted())
        return tuple(d for kind in kinds for d in kind[:KEYS_LISTED_MAX])

    def failed_count(self) -> int:
        gone = sum(total.count for done in self.uploads.values() for total in done.totals)
        unknown = sum(done.unknown_count for done in self.uploads.values())
        not_aborted = len(self.leftovers.unfinished.doomed) - len(self.aborted)
        others = len(self.log.staying()) + len(self.runs.staying())
        return self.sweep_result.planned_count - gone - unknown + others + not_aborted

    def unknown_count(self) -> int:
        """Return the number of keys that may be gone or not: the store did not answer, or a task was lost."""
        uploads = sum(done.unknown_count for done in self.uploads.values())
        return self.log.unknown_count + self.runs.unknown_count + uploads

    def failed(self) -> tuple[str, ...]:
        keys = self.log.staying()
        for prefix in (INDEXES, BLOBS):
            not_begun = (u.key for u in self.sweep_result.first if u.key.startswith(prefix))
            keys += self.uploads[prefix].failed if prefix in self.uploads else not_begun
        aborted = frozenset(self.aborted)
        keys += sorted(put.key for put in self.leftovers.unfinished.doomed if put not in aborted)
        return (*keys, *self.runs.staying())[:KEYS_LISTED_MAX]

    def _log_gone(self) -> list[PlannedDelete]:
        return self.log.gone() + self.runs.gone()

    def _aborted(self) -> list[PlannedDelete]:
        return [PlannedDelete(put.key, DeleteReason.UNFINISHED_UPLOAD, put.size_bytes) for put in self.aborted]

    def _is_gone(self, upload: PlannedUpload) -> bool:
        done = self.uploads.get(INDEXES if upload.key.startswith(INDEXES) else BLOBS)
        if done is None or upload.key in done.failed:
            return False
        # Of failures beyond those that are listed, the keys are not known.
        return done.failed_count == len(done.failed) or upload.key < done.failed[-1]
