"""What the engine refuses or could not do, sorted by what the caller does next.

```
EngineError
├── ConflictError              somebody else was first: load again and redo
│   ├── CommitLostError        another record took the number, or this one is no longer part of the chain
│   ├── FencedError            a collector closed this writer's past
│   └── StaleResultError       a backup was made against another parent
├── CommitUnknownError         the commit may have happened: the same writer asks again and will know
├── LeaseExpiredError          the uploads are too old to be committed: back up again
├── NotFoundError              no such repository, scope, commit, store or name
│   └── CollectedError         it was there, and a collection came first: choose again
├── UnsafeSourceError          the directory cannot be backed up as it is
│   └── SourceChangedError     a file is not the one any more that was looked at: look again
├── SnapshotUploadError        state commits are whole, a snapshot of one of them is not: the next commit makes another
├── DamagedError               stored data is missing or altered
│   ├── CommitDamagedError     the commit was made, and something of it is missing: back up again
│   ├── MisplacedKeyError      a key of state is not in the partition that the rule of its operator says
│   ├── SnapshotRepairError    no snapshot of a state store opens that is near enough: take the state from a backup
│   └── IncompleteError        something of a commit is missing, and it is known which commit is whole
├── TargetError                the target of a restore cannot be used
│   ├── PromotedError          a writer has claimed it: follow into another directory
│   └── TargetBusyError        another restore to it is at work
├── ProviderError              the state is of a provider that nothing here can read, or write
├── UnsafeStoreError           the store or its answers cannot be trusted with this operation
├── TooMuchToDeleteError       a collection would delete more than it was allowed to: look at its plan
│   └── ShrunkError            a backup would shrink a store by more than it was allowed to: look at its directory
└── UsageError                 the arguments do not make sense together
    └── NotLoadedError         a state store has no version loaded: load one first
```
"""

from typing import TYPE_CHECKING, TypeVar, cast

from index.errors import FormatError
from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from index.plan.commits import Commit


class EngineError(TidemarkError):
    """Base of all errors of the engine; `operation` is the use case that failed, such as "commit"."""

    def __init__(self, message: str, *, operation: str, subject: str = "", hint: str = "") -> None:
        super().__init__(message, operation=operation, subject=subject, hint=hint)


class ConflictError(EngineError):
    """Another writer was first."""

    default_hint = "load the newest commit and do the work again on top of it"


class CommitLostError(ConflictError):
    """Another record has the number, or later records do not descend from this one (design 0002, C4)."""


class FencedError(ConflictError):
    """A boundary at or above the record's number does not list it (design 0002, C4)."""


class StaleResultError(ConflictError):
    """A backup's base is not what the parent commit holds for that store (design 0002, C2)."""


class CommitUnknownError(EngineError):
    """No answer: the record may be there. The writer remembers it and adopts it later (design 0002, C3)."""

    default_hint = "commit again with the same writer: it finds out what happened; delete nothing"


class LeaseExpiredError(EngineError):
    """The oldest new blob has less than the margin of its TTL left (design 0002, C5)."""

    default_hint = "run the backup again, then commit"


class NotFoundError(EngineError):
    """There is no such repository, scope, commit, store or name."""

    default_hint = "run `tidemark list` to see what there is"


class CollectedError(NotFoundError):
    """The commit was closed by a collector before it could be protected (design 0002, D5)."""

    default_hint = "choose another commit; retention may be too short for the readers that there are"


class UnsafeSourceError(EngineError):
    """The directory changed meanwhile, is open in RocksDB, or has entries that cannot be kept (design 0002, I3)."""

    default_hint = "back up a RocksDB checkpoint, not a directory in use"


class SourceChangedError(UnsafeSourceError):
    """A file that was being read is not the one any more that was looked at (design 0002, I3)."""


class DamagedError(EngineError):
    """Stored data is missing, cut short or altered."""

    default_hint = "run `tidemark repair`: it finds all that is damaged, and says what can be done"


class CommitDamagedError(DamagedError):
    """A commit was made, and something that is new in it is gone (design 0002, T1)."""

    default_hint = (
        "back up again: what is missing is sent once more; until then go on from an older commit, and do not take the "
        "offsets of this one for saved"
    )


class IncompleteError(DamagedError):
    """Something of a commit is missing (design 0006, M2).

    Attributes:
        complete: The newest commit of the scope of which everything is there; None if none was found.
    """

    complete: "Commit | None" = None


class MisplacedKeyError(DamagedError):
    """A key of state is not in the partition in which its operator's rule has it, or not in its task (0010, H9, T3).

    Attributes:
        checked: How many keys of the store were found in place before it.
    """

    default_hint = (
        "nothing was written: the query partitions its state by a rule that tidemark does not know, or the state is "
        "damaged; `restore` keeps the partitions as they are"
    )
    checked: int = 0


class TargetError(EngineError):
    """The target of a restore cannot be written, or holds something that a restore may not replace."""

    default_hint = "choose a target that is absent, or allow replacing it"


class PromotedError(TargetError):
    """A writer has claimed the directory, and no follower touches it any more (design 0011, F6)."""

    default_hint = "the follower's work is done: follow into another directory"


class TargetBusyError(TargetError):
    """Another restore to this target is at work."""

    default_hint = "wait for it, or choose another target"


class UnsafeStoreError(EngineError):
    """The blob store, or what it answered, cannot be trusted with this operation; nothing was deleted."""

    default_hint = "run again; if it persists, this blob store is not safe for the operation"


class TooMuchToDeleteError(EngineError):
    """A collection's plan has a larger share of all bytes, or of a job, than it may delete (design 0006, P4 and P9)."""

    default_hint = "look at the plan of a dry run; allow a larger share if it is right"


class ShrunkError(TooMuchToDeleteError):
    """A backup would shrink a store by a larger share than it may (design 0006, P8)."""

    default_hint = "look whether it is the right directory; if it is, allow it: --shrink-max 100%"


class ProviderError(EngineError):
    """State of this provider cannot be read, or not be written (design 0004, B4)."""

    default_hint = "only state of Spark's RocksDBStateStoreProvider and HDFSBackedStateStoreProvider can be read"


class UsageError(EngineError):
    """The arguments contradict each other or are out of range."""

    default_hint = "see the documentation of the call"


class SnapshotUploadError(EngineError):
    """A snapshot could not be uploaded in the background (design 0004, C7)."""

    default_hint = "no commit is lost: its changelog exists, and the next commit makes another snapshot"


class SnapshotRepairError(DamagedError):
    """Neither the newest snapshot opens nor an older one that is near enough (design 0004, R7)."""

    default_hint = "raise `changes_replayed_max`, load another version, or take the directory from a backup"


class NotLoadedError(UsageError):
    """Nothing is loaded: not yet, or an abort, a failure or `close` has undone it (design 0004, C5)."""

    default_hint = "call `load` first: after an abort and after every failure too"


E = TypeVar("E", bound=EngineError | FormatError)


def bare_message(error: TidemarkError) -> str:
    """Return an error's message without its operation and its subject."""
    return str(error).removeprefix(" ".join(filter(None, (error.operation, error.subject))) + ": ")


def restated(error: E, *, subject: str, message: str = "", hint: str = "") -> E:
    """Make the same error about another subject, which the caller knows better; to be raised `from` its cause.

    A message or a hint that is given takes the place of its own.
    """
    message, hint = message or bare_message(error), hint or error.hint
    again = type(error)(message, operation=error.operation, subject=subject, hint=hint)
    for note in getattr(error, "__notes__", ()):
        again.add_note(note)
    return cast("E", again.with_traceback(error.__traceback__))
