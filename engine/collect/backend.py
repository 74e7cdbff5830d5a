"""The steps of a collection whose work grows with the inventory: their contract, and one process that does them.

Spark's tasks are the other implementation (design 0006, R1).
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec
from typing_extensions import override

from blobstore.base import DELETE_BATCH_MAX, BlobInfo, BlobStore, BytesBody, RequestMetadata
from engine.records.roots import Damage, References, Roots, Unread, list_prefix, reachable_keys
from engine.runtime import NO_PROGRESS, Progress
from index.plan import collect
from index.plan.commits import RetentionPolicy
from index.plan.plan_format import LINES_SUFFIX, encode_line
from index.snapshot.keys import BLOBS, INDEXES, RunId
from index.snapshot.model import Boundary, IndexReference, RepositoryRecord
from tidemark.errors import TidemarkError

__all__ = ["KEYS_LISTED_MAX", "CollectBackend", "Deleted", "Listing", "SweepResult"]

COLLECT: Final = RequestMetadata(payload_path="collect")
# The default share of all bytes of blobs and indexes that one run may delete.
DELETE_SHARE_MAX: Final = 0.2
# Keys of a kind that are listed one by one; of the others there are counts, and the plan.
KEYS_LISTED_MAX: Final = 1000
# Of a plan; about 20 MB.
LINES_PER_FILE: Final = 100_000


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has listed."""

    # The `now` of D2, by the store's clock; earlier than the run's own beginning where a run was resumed (R3).
    listed_at_ms: int
    # Blobs and indexes.
    count: int
    size_bytes: int
    # Of the newest of them, by the store's clock; 0: there are none.
    newest_created_at_ms: int
    # Keys below their prefixes that tidemark never wrote, and the first KEYS_LISTED_MAX of them.
    foreign_count: int
    foreign: tuple[str, ...]
    # The earlier run whose listing this is (R3); None: this run has listed for itself.
    resumed_from: RunId | None = None


NOTHING_LISTED: Final = Listing(
    listed_at_ms=0, count=0, size_bytes=0, newest_created_at_ms=0, foreign_count=0, foreign=()
)


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the listed uploads: each is to be deleted, waits, or is live."""

    # Those to delete.
    totals: tuple[collect.ReasonTotal, ...] = ()
    # Unreachable ones that are younger than the TTL, and when the youngest of them no longer is; 0: there are none.
    waiting_count: int = 0
    waiting_bytes: int = 0
    waiting_until_ms: int = 0
    # Those that the roots lead to.
    live_count: int = 0
    live_bytes: int = 0
    # Of the live ones, those that were to be deleted until the second reading of the roots led to them.
    excluded_count: int = 0
    excluded_bytes: int = 0
    # The first KEYS_LISTED_MAX to delete, in the order of their keys.
    first: tuple[collect.PlannedUpload, ...] = ()

    @property
    def planned_count(self) -> int:
        """The number of uploads to delete."""
        return sum(total.count for total in self.totals)

    @property
    def planned_bytes(self) -> int:
        """Their bytes."""
        return sum(total.size_bytes for total in self.totals)


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the planned uploads below one prefix."""

    # Of what is gone.
    totals: tuple[collect.ReasonTotal, ...]
    # What the store would not delete, and the first KEYS_LISTED_MAX of it in the order of the keys.
    failed_count: int = 0
    failed: tuple[str, ...] = ()
    # What the store was asked to delete, or may have been, without an answer; 0 where the deletion came to its end.
    unknown_count: int = 0


class DeleteTally(msgspec.Struct, kw_only=True):
    """A list of deletes, and how far it has come; it outlives the error that ends it."""

    planned: tuple[collect.PlannedDelete, ...] = ()
    # The number of first keys that were asked for, and of those with an answer.
    asked: int = 0
    answered: int = 0
    # Of those, what the store would not delete.
    left: list[str] = []

    @property
    def unknown_count(self) -> int:
        """The number of keys without an answer: they may be gone or not."""
        return self.asked - self.answered

    def gone(self) -> list[collect.PlannedDelete]:
        left = frozenset(self.left)
        return [d for d in self.planned[: self.answered] if d.key not in left]

    def staying(self) -> list[str]:
        """Return what is known to be there still: what the store would not delete, and what it was never asked to."""
        return [*sorted(self.left), *(d.key for d in self.planned[self.asked :])]


class CollectBackend(Protocol):
    """This process (`InProcessBackend`) or Spark's tasks; serves one collection, its methods called in order."""

    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        """List every blob and index, and remember them; called once, before any root is read (D2).

        `now_ms` is the store's clock at the beginning of the run.
        """
        ...

    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> SweepResult:
        """Choose by D2 among the uploads that no index leads to, and write the plan's lines if it has a place.

        Called again when another collector came in between. `now_ms`, by which ages are judged, is
        `Listing.listed_at_ms`, or 0, at which nothing is old. Errors as `reachable_keys`.
        """
        ...

    async def exclude(self, keys: frozenset[str]) -> SweepResult:
        """Take keys out of the plan: the second reading of the roots leads to them (D4)."""
        ...

    async def delete(self, prefix: str) -> Deleted:
        """Delete what is planned of `INDEXES`, then of `BLOBS`."""
        ...

    def so_far(self, prefix: str) -> Deleted:
        """Return what is known of a prefix whose `delete` has failed; of lost tasks nothing is."""
        ...

    async def end(self) -> None:
        """Remove what the run has written down for itself: it has come to its end (R6)."""
        ...


class InProcessBackend(CollectBackend):
    """All of it in this process; nothing is written but a plan, where it is wanted."""

    def __init__(self, store: BlobStore, progress: Progress = NO_PROGRESS, plan_to: BlobStore | None = None) -> None:
        self._store = store
        self._progress = progress
        self._plan_to = plan_to
        self._plan_names: list[str] = []
        self._uploads: tuple[collect.Upload, ...] = ()
        self._unreachable: tuple[collect.Upload, ...] = ()
        self._ttl_ms = 0
        self._planned: tuple[collect.PlannedUpload, ...] = ()
        # Of the prefix that is being deleted.
        self._tally = DeleteTally()

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        self._uploads, foreign = await list_uploads(self._store, (BLOBS, INDEXES))
        return Listing(
            listed_at_ms=now_ms,
            count=len(self._uploads),
            size_bytes=sum(u.size_bytes for u in self._uploads),
            newest_created_at_ms=max((u.created_at_ms for u in self._uploads), default=0),
            foreign_count=len(foreign),
            foreign=foreign[:KEYS_LISTED_MAX],
        )

    @override
    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> SweepResult:
        keys = await reachable_keys(self._store, references.everything, optional=references.optional)
        self._unreachable = tuple(u for u in self._uploads if u.key not in keys)
        self._ttl_ms = ttl_ms
        planned = collect.choose_uploads(self._unreachable, now_ms, ttl_ms, references.protected)
        self._planned = tuple(sorted(planned, key=lambda p: p.key))
        if self._plan_to is not None:
            await self._write_plan(self._plan_to)
        return self._result()

    @override
    async def exclude(self, keys: frozenset[str]) -> SweepResult:
        excluded = tuple(p for p in self._planned if p.key in keys)
        self._planned = tuple(p for p in self._planned if p.key not in keys)
        return self._result(excluded)

    @override
    async def delete(self, prefix: str) -> Deleted:
        self._tally = DeleteTally(planned=tuple(p for p in self._planned if p.key.startswith(prefix)))
        await delete_keys(self._store, self._tally.planned, self._progress, tally=self._tally)
        return self.so_far(prefix)

    @override
    def so_far(self, prefix: str) -> Deleted:
        failed = self._tally.staying()
        return Deleted(
            totals=collect.sum_totals(self._tally.gone()),
            failed_count=len(failed),
            failed=tuple(failed[:KEYS_LISTED_MAX]),
            unknown_count=self._tally.unknown_count,
        )

    @override
    async def end(self) -> None:
        """Do nothing: nothing was written down."""

    async def _write_plan(self, plan_to: BlobStore) -> None:
        """Write the lines of the plan in place of those of an earlier one: a collection may plan again."""
        names: list[str] = []
        for start in range(0, len(self._planned), LINES_PER_FILE):
            names.append(f"uploads-{len(names):06d}")
            await write_lines(plan_to, names[-1], self._planned[start : start + LINES_PER_FILE])
        stale = [f"{name}{LINES_SUFFIX}" for name in self._plan_names[len(names) :]]
        for start in range(0, len(stale), DELETE_BATCH_MAX):
            await plan_to.delete(stale[start : start + DELETE_BATCH_MAX])
        self._plan_names = names

    def _result(self, excluded: Sequence[collect.PlannedUpload] = ()) -> SweepResult:
        chosen = frozenset(p.key for p in (*self._planned, *excluded))
        waiting = [u for u in self._unreachable if u.key not in chosen]
        gone = sum(p.size_bytes for p in self._planned) + sum(u.size_bytes for u in waiting)
        return SweepResult(
            totals=collect.sum_totals(self._planned),
            waiting_count=len(waiting),
            waiting_bytes=sum(u.size_bytes for u in waiting),
            waiting_until_ms=collect.waiting_until_ms(waiting, self._ttl_ms),
            live_count=len(self._uploads) - len(self._planned) - len(waiting),
            live_bytes=sum(u.size_bytes for u in self._uploads) - gone,
            excluded_count=len(excluded),
            excluded_bytes=sum(p.size_bytes for p in excluded),
            first=self._planned[:KEYS_LISTED_MAX],
        )


async def write_lines(plan_to: BlobStore, name: str, planned: Iterable[collect.PlannedUpload]) -> None:
    """Write one file of a plan's lines; `name` is without its suffix."""
    await plan_to.put(f"{name}{LINES_SUFFIX}", BytesBody(b"".join(encode_line(p) for p in planned)))


async def list_uploads(store: BlobStore, prefixes: Iterable[str]) -> tuple[tuple[collect.Upload, ...], tuple[str, ...]]:
    """List blobs and indexes below some prefixes, and keys there that tidemark never wrote; before the roots (D2)."""

    def take(blob: BlobInfo) -> collect.Upload | str:
        if not collect.is_upload_key(blob.key):
            return blob.key
        return collect.Upload(blob.key, blob.size_bytes, blob.created_at_ms)

    found = [one for prefix in prefixes for one in await list_prefix(store, prefix, take)]
    return tuple(u for u in found if isinstance(u, collect.Upload)), tuple(key for key in found if isinstance(key, str))


async def delete_keys(
    store: BlobStore,
    deletes: Sequence[collect.PlannedDelete],
    progress: Progress = NO_PROGRESS,
    *,
    tally: DeleteTally | None = None,
) -> tuple[str, ...]:
    """Delete keys, a batch at a time; return those that the store would not delete.

    `tally` is filled on the way, for the caller that has to know how far it came when an error ends it.
    """
    tally = tally or DeleteTally()
    collecting = store.tagged(COLLECT)
    for start in range(0, len(deletes), DELETE_BATCH_MAX):
        batch = deletes[start : start + DELETE_BATCH_MAX]
        tally.asked += len(batch)
        failures = await collecting.delete([d.key for d in batch])
        failed = {failure.key for failure in failures}
        tally.answered += len(batch)
        tally.left += sorted(failed)
        progress.add(files=len(batch) - len(failed), bytes_=sum(d.size_bytes for d in batch if d.key not in failed))
    return tuple(tally.left)


class CollectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to collect."""

    # Plan only: nothing in the repository is written or deleted, no TTL is removed.
    dry_run: bool = False
    # A run that plans to delete more than this share of the bytes of all blobs and indexes ends before it closes or
    # deletes anything (design 0006, P4); 1 allows everything. So does one that would shrink a job by more than this,
    # and by more than half (P9).
    delete_share_max: float = DELETE_SHARE_MAX
    # An empty place outside the repository for the plan, key by key.
    plan_to: BlobStore | None = None


NO_OPTIONS: Final = CollectOptions()


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and by which rules it goes; after step 1 also its listing, and whether the clock may have moved (D11)."""

    run: RunId
    repository: RepositoryRecord
    # Where the clock may have stepped, that of `RetentionPolicy.ageless`.
    policy: RetentionPolicy
    # When it began, by the store's clock.
    now_ms: int
    options: CollectOptions
    listing: Listing = NOTHING_LISTED
    # How far the clock is ahead of this machine's and of the newest upload, where that is more than a margin.
    clock_ahead_ms: int = 0
    # The time by which ages are judged; 0, at which nothing is old, where the clock may have stepped.
    age_now_ms: int = 0


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """Step 2: puts that were never finished, and what earlier collections have left."""

    unfinished: collect.UnfinishedPlan
    # Why such puts could not be looked for; empty if they were.
    unfinished_hidden: str
    # Of runs, in the order of its deletion.
    runs: tuple[collect.PlannedDelete, ...]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Step 3: one reading of the roots, what cannot be read, and what is kept because of either."""

    roots: Roots
    damage: Damage
    scopes: tuple[collect.ScopePlan, ...]
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
    unsettled: tuple[TidemarkError, ...]


class Deletion(msgspec.Struct, kw_only=True):
    """Steps 6 and 7: what may go by the second reading of the roots (D4), and how far the deletes have come.

    It outlives the error that ends them.
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
    aborted: tuple[collect.UnfinishedUpload, ...] = ()

    def complete(self) -> None:
        """Take all of it for done: what a dry run reports."""
        for tally in (self.log, self.runs):
            tally.asked = tally.answered = len(tally.planned)
        self.uploads = {INDEXES: Deleted(totals=()), BLOBS: Deleted(totals=self.sweep_result.totals)}
        self.aborted = self.leftovers.unfinished.doomed

    def may_begin(self, prefix: str) -> bool:
        """Return whether everything is gone that has to be before this prefix is begun (D1)."""
        return not self.log.left and not any(done.failed_count for name, done in self.uploads.items() if name != prefix)

    def totals(self) -> tuple[collect.ReasonTotal, ...]:
        uploads = (total for done in self.uploads.values() for total in done.totals)
        return collect.sum_totals((*collect.sum_totals((*self._log_gone(), *self._aborted())), *uploads))

    def first_keys(self) -> tuple[collect.PlannedDelete, ...]:
        uploads = [u for u in self.sweep_result.first if self._is_gone(u)]
        return (*self._log_gone()[:KEYS_LISTED_MAX], *uploads, *self._aborted()[:KEYS_LISTED_MAX])

    def failed_count(self) -> int:
        gone = sum(total.count for done in self.uploads.values() for total in done.totals)
        unknown = sum(done.unknown_count for done in self.uploads.values())
        not_aborted = len(self.leftovers.unfinished.doomed) - len(self.aborted)
        others = len(self.log.staying()) + len(self.runs.staying())
        return self.sweep_result.planned_count - gone - unknown + others + not_aborted

    def unknown_count(self) -> int:
        uploads = sum(done.unknown_count for done in self.uploads.values())
        return self.log.unknown_count + self.runs.unknown_count + uploads

    def failed(self) -> tuple[str, ...]:
        keys = self.log.staying()
        for prefix in (INDEXES, BLOBS):
            not_begun = (u.key for u in self.sweep_result.first if u.key.startswith(prefix))
            keys += self.uploads[prefix].failed if prefix in self.uploads else not_begun
        keys += sorted(put.key for put in set(self.leftovers.unfinished.doomed).difference(self.aborted))
        return (*keys, *self.runs.staying())[:KEYS_LISTED_MAX]

    def _log_gone(self) -> list[collect.PlannedDelete]:
        return self.log.gone() + self.runs.gone()

    def _aborted(self) -> list[collect.PlannedDelete]:
        return [
            collect.PlannedDelete(put.key, collect.DeleteReason.UNFINISHED_UPLOAD, put.size_bytes)
            for put in self.aborted
        ]

    def _is_gone(self, upload: collect.PlannedUpload) -> bool:
        done = self.uploads.get(INDEXES if upload.key.startswith(INDEXES) else BLOBS)
        if done is None or upload.key in done.failed:
            return False
        # Of failures beyond those that are listed, the keys are not known.
        return done.failed_count == len(done.failed) or upload.key < done.failed[-1]
