"""Name what can go wrong with a checkpoint beyond `engine.errors`, and its files as the checkpoint has them.

An error about a copy on this machine names the file of the checkpoint instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.errors import DamagedError, E, EngineError, TargetError, UnsafeSourceError, bare_message, restated
from engine.local.scan import LACKING
from index.errors import ClosedCheckpointError, FormatError, UnknownFormatError

DAMAGE_HINT: Final = (
    "nothing was written; `tidemark spark check` lists all that is damaged, and an older backup may have it whole"
)
MOVED_HINT: Final = "back up again; if it ends in the same way, see what `tidemark spark check` says"


class QueryMovedOnError(EngineError):
    """The query deleted or overwrote what was being read, again and again (design 0005, P6)."""

    default_hint = "back up again, or let the query keep more (spark.sql.streaming.minBatchesToRetain)"


@contextmanager
def reading(path: Path, hint: str) -> Iterator[None]:
    """Let a file that a block cannot read be damage, unless this machine lacks something."""
    try:
        yield
    except OSError as error:
        subject, reason = str(path), error.strerror
        if error.errno in LACKING:
            hint = "check permissions, free space, memory and open files on this machine; nothing is known of the file"
            message = f"cannot be read here: {reason}"
            raise TargetError(message, operation="check", subject=subject, hint=hint) from error
        raise DamagedError(f"cannot be read: {reason}", operation="check", subject=subject, hint=hint) from error


def lacks(error: BaseException | None) -> bool:
    """Return whether the cause is that this machine lacks something, not the content of a file."""
    while error is not None:
        if isinstance(error, TargetError) or (isinstance(error, OSError) and error.errno in LACKING):
            return True
        error = error.__cause__
    return False


@contextmanager
def error_context(location: str, path: str | None = "", *, private: Path | None = None) -> Iterator[None]:
    """Let the errors of a block name files of the checkpoint, as `with_subject` does.

    A path of None: they name files from `location` on already.
    """
    try:
        yield
    except (EngineError, FormatError) as error:
        path = error.subject if path is None else path
        raise with_subject(error, location, path, private=private) from error.__cause__


@contextmanager
def redact_paths(location: str, private: Path) -> Iterator[None]:
    """Let only errors that name something below a private directory name the checkpoint instead."""
    try:
        yield
    except (EngineError, FormatError) as error:
        if str(private) not in str(error):
            raise
        raise with_subject(error, location, private=private) from error.__cause__


def with_subject(error: E, location: str, path: str = "", *, private: Path | None = None) -> E:
    """Restate an error about a file, or a copy of it, to name that of the checkpoint, with a hint for a backup.

    `path` is from the directory `location`; if empty, the error names a file in there, or the directory is all that is
    known. What is below `private`, where this machine has the files, is never shown.
    """
    if isinstance(error, TargetError):
        return error  # of this machine's own directories
    subject, message = (
        text if private is None or location in text else text.replace(str(private), location)
        for text in (error.subject, bare_message(error))
    )
    whole = f"{location}/{path}" if path else location
    if path or not subject.startswith(location):
        if subject and not whole.endswith(subject) and subject.rpartition("/")[2] != whole.rpartition("/")[2]:
            message = f"{subject}: {message}"
        subject = whole
    return restated(error, subject=subject, message=message, hint=_hint(error, private))


def _hint(error: EngineError | FormatError, private: Path | None) -> str:
    if isinstance(error, DamagedError) and private is None and error.hint != DamagedError.default_hint:
        return ""  # it was made for the checkpoint
    if isinstance(error, UnsafeSourceError):
        return MOVED_HINT if error.hint == UnsafeSourceError.default_hint else ""
    is_damage = isinstance(error, DamagedError | FormatError)
    is_damage &= not isinstance(error, UnknownFormatError | ClosedCheckpointError)
    return DAMAGE_HINT if is_damage else ""
