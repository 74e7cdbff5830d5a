"""Who carries out the steps of a collection whose work grows with the inventory (design 0006, R1)."""

from typing import Final, Protocol

import msgspec

from engine.records.roots import References
from index.plan.collect import PlannedUpload, ReasonTotal
from index.snapshot.keys import RunId

__all__ = ["KEYS_TOLD_MAX", "CollectBackend", "Deleted", "Listing", "Swept"]

# So many keys of a kind are told one by one; of the others there are counts, and the plan.
KEYS_TOLD_MAX: Final = 1000


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has listed."""

    # The `now` of D2, by the store's clock; earlier than the run's own beginning where a listing was taken up (R3).
    listed_at_ms: int
    # Blobs and indexes.
    count: int
    size_bytes: int
    # Of the newest of them, by the store's clock; 0: there are none.
    newest_created_at_ms: int
    # Keys below their prefixes that tidemark never wrote, and the first KEYS_TOLD_MAX of them.
    foreign_count: int
    foreign: tuple[str, ...]
    # The earlier run whose listing was taken up (R3); None: this run has listed for itself.
    taken_up: RunId | None = None


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the listed uploads; every one of them is to be deleted, waits, or is live."""

    # Those to delete.
    totals: tuple[ReasonTotal, ...] = ()
    # Unreachable ones that are younger than the TTL, and when the youngest of them is no more; 0: there are none.
    waiting_count: int = 0
    waiting_bytes: int = 0
    waiting_until_ms: int = 0
    # Those that the roots lead to.
    live_count: int = 0
    live_bytes: int = 0
    # Of the live ones, those that were to be deleted until the second reading of the roots led to them.
    spared_count: int = 0
    spared_bytes: int = 0
    # The first KEYS_TOLD_MAX to delete, in the order of their keys.
    told: tuple[PlannedUpload, ...] = ()


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one room's part of the plan."""

    # Of what is gone.
    totals: tuple[ReasonTotal, ...]
    # What the store would not delete, and the first KEYS_TOLD_MAX of it in the order of the keys.
    failed_count: int = 0
    failed: tuple[str, ...] = ()
    # What the store was asked to delete, or may have been, without an answer; of a room that came to its end nothing.
    unknown_count: int = 0


class DeleteTally(msgspec.Struct, kw_only=True):
    """How far a list of deletes has come; it outlives the error that ends them."""

    # So many of the first keys were asked for, and of so many there is an answer.
    asked: int = 0
    answered: int = 0
    # Of those, what the store would not delete.
    left: list[str] = []


class CollectBackend(Protocol):
    """This process (`InProcessBackend`) or Spark's tasks; serves one collection, its methods called in order."""

    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        """List every blob and index, and remember them; called once, before any root is read (D2).

        Args:
            run: The collection.
            now_ms: The store's clock at its beginning.
        """
        ...

    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> Swept:
        """Choose by D2 among the uploads that no index leads to, and write the plan's lines if it has a place.

        Called again when the run was overtaken.

        Args:
            references: The indexes that are kept.
            now_ms: The time by which ages are judged: `Listing.listed_at_ms`, or 0, at which nothing is old.
            ttl_ms: The repository's TTL.

        Raises:
            DamagedError: As `reachable_keys`.
        """
        ...

    async def spare(self, keys: frozenset[str]) -> Swept:
        """Take keys out of the plan: the second reading of the roots leads to them (D4)."""
        ...

    async def delete(self, room: str) -> Deleted:
        """Delete what is planned of `INDEXES`, then of `BLOBS`."""
        ...

    def planned_count(self, room: str) -> int:
        """So many uploads of a room are to go, as the plan is now."""
        ...

    def so_far(self) -> Deleted | None:
        """What is known of the room whose `delete` has failed; None if nothing is, as of tasks that are lost."""
        return None

    async def end(self) -> None:
        """The run has come to its end: what it has written down for itself may go (R6)."""
        ...
