"""How errors name the files of a checkpoint that is backed up, wherever this machine has read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.errors import DamagedError, E, EngineError, TargetError, UnsafeSourceError, bare_message, restated
from index.errors import FormatError, UnknownFormatError

DAMAGE_HINT: Final = (
    "nothing was backed up; `tidemark spark check` tells of all that is damaged, and an older backup may have it whole"
)
MOVED_HINT: Final = "back up again; if it ends in the same way, see what `tidemark spark check` says"


@contextmanager
def located(location: str, path: str | None = "", *, private: Path | None = None) -> Iterator[None]:
    """Let the errors of a block name files of the checkpoint: as `told_of`, for whatever it raises.

    Args:
        location: As for `told_of`.
        path: As for `told_of`; None: errors name files from `location` on already.
        private: As for `told_of`.
    """
    try:
        yield
    except (EngineError, FormatError) as error:
        raise told_of(error, location, error.subject if path is None else path, private=private) from error.__cause__


@contextmanager
def hiding(location: str, private: Path) -> Iterator[None]:
    """As `located`, for errors that name something below a private directory; all others are as they were."""
    try:
        yield
    except (EngineError, FormatError) as error:
        if str(private) not in str(error):
            raise
        raise told_of(error, location, private=private) from error.__cause__


def told_of(error: E, location: str, path: str = "", *, private: Path | None = None) -> E:
    """An error anew, naming the file of the checkpoint that it is about, with a hint for whoever backs that up.

    Args:
        error: What was raised of a file, or of a copy of it on this machine.
        location: A directory of the checkpoint.
        path: Of the file from there; "": the error names a file in there, or the directory is all that is known.
        private: Where this machine has the files, of which nobody is told.
    """
    if isinstance(error, TargetError):
        return error  # of this machine's own directories
    subject, message = (_shown(text, location, private) for text in (error.subject, bare_message(error)))
    whole = f"{location}/{path}" if path else location
    if path or not subject.startswith(location):
        if subject and not whole.endswith(subject) and subject.rpartition("/")[2] != whole.rpartition("/")[2]:
            message = f"{subject}: {message}"
        subject = whole
    return restated(error, subject=subject, message=message, hint=_hint(error, private))


def _shown(text: str, location: str, private: Path | None) -> str:
    return text if private is None or location in text else text.replace(str(private), location)


def _hint(error: EngineError | FormatError, private: Path | None) -> str:
    if isinstance(error, DamagedError) and private is None and error.hint != DamagedError.default_hint:
        return ""  # it was made for the checkpoint
    if isinstance(error, UnsafeSourceError):
        return MOVED_HINT if error.hint == UnsafeSourceError.default_hint else ""
    is_damage = isinstance(error, DamagedError | FormatError) and not isinstance(error, UnknownFormatError)
    return DAMAGE_HINT if is_damage else ""
