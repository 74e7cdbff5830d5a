"""What each failure means to the caller of the command: one exit code per reaction."""

import signal
from enum import IntEnum
from typing import Final

from blobstore.errors import (
    AccessDeniedError,
    BlobCorruptError,
    BlobDeletedError,
    BlobNotFoundError,
    CapabilityMissingError,
    CheckpointFileExistsError,
    CheckpointUnknownError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnavailableError,
)
from engine.checkpoint.errors import QueryMovedOnError
from engine.errors import (
    CollectedError,
    CommitDamagedError,
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    DamagedError,
    EngineError,
    FencedError,
    IncompleteError,
    LeaseExpiredError,
    NotFoundError,
    NotLoadedError,
    ProviderError,
    SnapshotRepairError,
    SnapshotUploadError,
    SourceChangedError,
    StaleResultError,
    TargetBusyError,
    TargetError,
    TooMuchToDeleteError,
    UnsafeSourceError,
    UnsafeStoreError,
    UsageError,
)
from index.errors import (
    BatchLogError,
    CorruptIndexError,
    DamagedChangelogError,
    FileChecksumError,
    FormatError,
    IndexInvariantError,
    LineageError,
    PlanFileError,
    RowChecksumError,
    SamzaFormatError,
    StateMetadataError,
    UnknownFormatError,
    UnsafeNameError,
    UnsupportedRecordError,
    VersionMissingError,
)
from index.plan.commits import ShortListingError


class ExitCode(IntEnum):
    """The exit codes of `tidemark`, sorted by what the caller does next."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    PARTIAL = 3
    DAMAGED = 4
    UNAVAILABLE = 5
    CONFLICT = 6
    NOT_FOUND = 7
    DENIED = 8
    UNSAFE = 9
    TOO_MUCH = 10
    SLOW = 11
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


# What `tidemark --help` and docs/how-to/troubleshoot.md say of them.
MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "unexpected: a fault of tidemark or of this machine; --debug shows where",
    ExitCode.USAGE: "the command line, a setting or a file named in it is wrong",
    ExitCode.PARTIAL: "done in part: some keys or stores failed, a TTL is left to remove, an audit record is missing",
    ExitCode.DAMAGED: "stored data is missing or altered",
    ExitCode.UNAVAILABLE: "the store is unavailable or full, or the outcome of a commit unknown: try again",
    ExitCode.CONFLICT: "conflict: another writer was first, or the backup is too old; back up again",
    ExitCode.NOT_FOUND: "no such bucket, repository, job, commit, store or name",
    ExitCode.DENIED: "access denied",
    ExitCode.UNSAFE: "refused as unsafe: this directory, target, store, deletion or newer format",
    ExitCode.TOO_MUCH: "a collection would delete more than it may: look at its plan, and approve it",
    ExitCode.SLOW: "a restore drill took longer than its --slo",
    ExitCode.INTERRUPTED: "interrupted (143: terminated; 129: the terminal hung up)",
}

# Every public class by itself, so that a new one is a decision and not an accident; a test walks the trees. Errors of
# engine.spark are not among them: verbs load it only when they are asked to, and its errors have the code of the class
# above them.
CODES: Final[dict[type[Exception], ExitCode]] = {
    # StoreError
    StoreError: ExitCode.UNEXPECTED,
    StoreUnavailableError: ExitCode.UNAVAILABLE,
    BlobNotFoundError: ExitCode.NOT_FOUND,
    BlobDeletedError: ExitCode.NOT_FOUND,
    AccessDeniedError: ExitCode.DENIED,
    # Nothing is wrong with the data or the command; once there is space, the same command works.
    StoreFullError: ExitCode.UNAVAILABLE,
    StoreMissingError: ExitCode.NOT_FOUND,
    BlobCorruptError: ExitCode.DAMAGED,
    CapabilityMissingError: ExitCode.UNSAFE,
    InvalidRequestError: ExitCode.UNEXPECTED,
    CheckpointFileExistsError: ExitCode.CONFLICT,
    CheckpointUnknownError: ExitCode.UNAVAILABLE,
    # EngineError
    EngineError: ExitCode.UNEXPECTED,
    ConflictError: ExitCode.CONFLICT,
    CommitLostError: ExitCode.CONFLICT,
    FencedError: ExitCode.CONFLICT,
    StaleResultError: ExitCode.CONFLICT,
    CommitUnknownError: ExitCode.UNAVAILABLE,
    LeaseExpiredError: ExitCode.CONFLICT,
    NotFoundError: ExitCode.NOT_FOUND,
    CollectedError: ExitCode.NOT_FOUND,
    SourceChangedError: ExitCode.UNSAFE,
    UnsafeSourceError: ExitCode.UNSAFE,
    DamagedError: ExitCode.DAMAGED,
    CommitDamagedError: ExitCode.DAMAGED,
    IncompleteError: ExitCode.DAMAGED,
    TargetError: ExitCode.UNSAFE,
    TargetBusyError: ExitCode.UNSAFE,
    ProviderError: ExitCode.UNSAFE,
    UnsafeStoreError: ExitCode.UNSAFE,
    TooMuchToDeleteError: ExitCode.TOO_MUCH,
    UsageError: ExitCode.USAGE,
    NotLoadedError: ExitCode.USAGE,
    QueryMovedOnError: ExitCode.UNAVAILABLE,
    SnapshotRepairError: ExitCode.DAMAGED,
    # Its changelog exists, and the next commit makes another snapshot.
    SnapshotUploadError: ExitCode.UNAVAILABLE,
    # FormatError: names and files that people give are checked before, as usage; what is left was in the store.
    FormatError: ExitCode.DAMAGED,
    CorruptIndexError: ExitCode.DAMAGED,
    UnknownFormatError: ExitCode.UNSAFE,
    IndexInvariantError: ExitCode.DAMAGED,
    ShortListingError: ExitCode.UNSAFE,
    UnsafeNameError: ExitCode.DAMAGED,
    SamzaFormatError: ExitCode.USAGE,
    BatchLogError: ExitCode.DAMAGED,
    DamagedChangelogError: ExitCode.DAMAGED,
    FileChecksumError: ExitCode.DAMAGED,
    LineageError: ExitCode.DAMAGED,
    # A plan is where people put it, and is only ever read because they name it.
    PlanFileError: ExitCode.USAGE,
    RowChecksumError: ExitCode.DAMAGED,
    StateMetadataError: ExitCode.DAMAGED,
    UnsupportedRecordError: ExitCode.USAGE,
    # A version that never was looks the same as one that was deleted.
    VersionMissingError: ExitCode.NOT_FOUND,
}


# By what `failures.interrupted_by` notes.
_SIGNALLED: Final = {(signal.SIGTERM,): ExitCode.TERMINATED, (signal.SIGHUP,): ExitCode.HUNG_UP}
# What a store does before its first request can only go wrong by its settings.
_FIRST_STEPS: Final = frozenset({"open", "connect", "sign"})


def is_wrong_setting(error: BaseException) -> bool:
    """Return whether the settings or the environment do not lead to a store: tidemark is not at fault."""
    return isinstance(error, InvalidRequestError) and error.operation in _FIRST_STEPS


def innermost(error: BaseException) -> BaseException:
    """Return the first plain error inside groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def public_class(error: BaseException) -> str:
    """Name the public class of an error: a private subclass is nothing that a program could know."""
    return next(kind.__name__ for kind in type(innermost(error)).__mro__ if not kind.__name__.startswith("_"))


def choose_exit_code(error: BaseException) -> ExitCode:
    """Return the code of an error: that of its class, or of the nearest class above that has one."""
    if is_wrong_setting(error):
        return ExitCode.USAGE
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    if isinstance(error, PermissionError):
        return ExitCode.DENIED
    if isinstance(error, KeyboardInterrupt):
        return _SIGNALLED.get(error.args[:1], ExitCode.INTERRUPTED)
    return ExitCode.UNEXPECTED
