"""What each failure means to the caller of the command: one exit code per reaction."""

import signal
from enum import IntEnum
from typing import Final

from blobstore.errors import InvalidRequestError


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

# Every public class of error by the name that `--json` shows, so that a new one is a decision and not an accident; a
# test walks the trees. Errors of engine.spark are not among them: verbs load it only when they are asked to, and its
# errors have the code of the class above them.
_NAMES: Final = {
    ExitCode.UNEXPECTED: "StoreError InvalidRequestError EngineError",
    # Names and files that people give are checked before, as usage; a name that is wrong later was in the store. A
    # plan is where people put it, and is only ever read because they name it.
    ExitCode.USAGE: "UsageError NotLoadedError SamzaFormatError PlanFileError UnsupportedRecordError",
    ExitCode.DAMAGED: "BlobCorruptError DamagedError CommitDamagedError IncompleteError SnapshotRepairError "
    "FormatError CorruptIndexError IndexInvariantError UnsafeNameError BatchLogError DamagedChangelogError "
    "FileChecksumError LineageError RowChecksumError StateMetadataError",
    # Of a full store nothing is wrong with the data or the command; once there is space, the same command works. The
    # changelog of a snapshot that was not uploaded exists, and the next commit makes another snapshot.
    ExitCode.UNAVAILABLE: "StoreUnavailableError StoreFullError CheckpointUnknownError CommitUnknownError "
    "QueryMovedOnError SnapshotUploadError",
    ExitCode.CONFLICT: "CheckpointFileExistsError ConflictError CommitLostError FencedError StaleResultError "
    "LeaseExpiredError",
    # A version that never was looks the same as one that was deleted.
    ExitCode.NOT_FOUND: "BlobNotFoundError BlobDeletedError StoreMissingError NotFoundError CollectedError "
    "VersionMissingError",
    ExitCode.DENIED: "AccessDeniedError",
    ExitCode.UNSAFE: "CapabilityMissingError SourceChangedError UnsafeSourceError TargetError TargetBusyError "
    "ProviderError UnsafeStoreError UnknownFormatError ShortListingError",
    ExitCode.TOO_MUCH: "TooMuchToDeleteError",
}
CODES: Final = {name: code for code, names in _NAMES.items() for name in names.split()}

# By the signal, which `app` notes.
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
        # Others may have a class of the same name.
        if kind.__name__ in CODES and kind.__module__.startswith(_OURS):
            return CODES[kind.__name__]
    if isinstance(error, PermissionError):
        return ExitCode.DENIED
    if isinstance(error, KeyboardInterrupt):
        return _SIGNALLED.get(error.args[:1], ExitCode.INTERRUPTED)
    return ExitCode.UNEXPECTED


_OURS: Final = ("blobstore.", "engine.", "index.")
