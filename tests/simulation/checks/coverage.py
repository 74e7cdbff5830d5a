"""Count the rare moments that a campaign met, so that a theme that no longer leads there is found out."""

import enum
from collections import Counter


class Moment(enum.StrEnum):
    """What has to be met often enough for a campaign to say anything."""

    LOST_ANSWER_AT_COMMIT = "lost answer at a commit"
    ADOPTED = "own record adopted after no answer"
    COLLECTION_BEFORE_CHECK = "collection between record and check"
    ZOMBIE_AFTER_BOUNDARY = "zombie wakes after a boundary"
    FENCED = "writer fenced"
    COMMIT_LOST = "number taken by another writer"
    STALE_RESULT = "result of a second attempt refused"
    VOID_RECORD = "void record"
    INTERRUPTED_TTL_REMOVAL = "interrupted TTL removal"
    LATE_PUT = "put that landed late"
    LATE_PUT_CREATED = "put that landed late and created its object"
    LOST_ANSWER_AT_BOUNDARY = "lost answer at a boundary"
    TWO_COLLECTORS = "two collectors at once"
    KEPT_BY_SECOND_READING = "upload kept by the second reading"
    FORK_AGAINST_COLLECT = "fork against a collection"
    NAME_AGAINST_COLLECT = "name against a collection"
    REWIND_AGAINST_COLLECT = "rewind against a collection"
    RESTORE_AGAINST_COLLECT = "restore against a collection"
    FOLLOW_AGAINST_COLLECT = "follower against a collection"
    PROMOTED = "followed directory promoted"
    PROMOTED_UNDER_WAY = "follower at work refused after a promotion"
    RELEASE_AGAINST_COLLECT = "release against a collection"
    BY_NAME_AGAINST_COLLECT = "use of a name's commit against a collection"
    RELEASED_IN_USE = "name released while its commit was in use"
    NAMED_WITHIN_COLLECT = "name given and released within a collection"
    REPACK_AGAINST_RESTORE = "re-pack during a restore"
    CONFLICT_409 = "409"
    STALE_LISTS_REFUSED = "collection refused on stale lists"
    EXPIRY_BY_STORE = "expiry by the store itself"
    KILLED_WRITER = "writer killed at work"
    KILLED_COLLECTOR = "collector killed at work"
    KILLED_READER = "restore killed at work"
    KILLED_FOLLOWER = "follower killed at work"
    PIN_LAPSED = "reader asleep for longer than its pin"
    TOO_OLD = "uploads refused for their age"
    BODY_DAMAGED = "body cut short or altered"
    REFUSED = "500, 503 or reset"
    HUNG = "request without an answer"
    CLOCK_BACKWARDS = "clock that went backwards"
    DELTA = "index stored as a difference"
    DELTA_CHAIN = "difference to an index that is one itself"
    REPACKED = "backup that packs files again"
    RESUMED = "backup that goes on with one that was broken off"
    DROPPED = "store dropped by a commit"
    FORGOTTEN = "scope forgotten"
    ZOMBIE_AFTER_FORGETTING = "zombie wakes after its scope was forgotten"
    BEGAN_AGAIN = "new beginning of a forgotten scope"
    TASK_SCOPE = "commit of one task's scope"
    COMMITTED_AGAIN = "result committed a second time"
    RESCALED = "job with another number of tasks"
    RESCALE_LOST = "rescale overtaken by another commit"
    RESCALE_AGAINST_COLLECT = "rescale against a collection"
    FULL = "put refused by a full store"
    SERVER_CLOCK_BACKWARDS = "server's clock that went backwards"
    COPIED = "repository moved to another place"
    FLIPPED_AT_REST = "object outside blobs/ that rotted"
    LIST_IN_PAGES = "list in pages"


class Coverage:
    """Counts of moments; those of several processes can be added up."""

    def __init__(self) -> None:
        self.counts: Counter[Moment] = Counter()

    def met(self, moment: Moment, times: int = 1) -> None:
        """A moment was met."""
        if times:
            self.counts[moment] += times

    def add(self, counts: dict[str, int]) -> None:
        """Add what another process has met."""
        for name, count in counts.items():
            self.counts[Moment(name)] += count

    def missing(self, at_least: int) -> list[Moment]:
        """The moments that were met less often than they should have been."""
        return [moment for moment in Moment if self.counts[moment] < at_least]

    def table(self) -> str:
        """Every moment with its count, the rarest first."""
        return "\n".join(f"  {self.counts[m]:>9,}  {m}" for m in sorted(Moment, key=lambda m: self.counts[m]))
