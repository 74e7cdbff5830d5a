"""What a run on Spark can end with, and how a task's error comes to the driver."""

import contextlib
from collections.abc import Iterator

import msgspec
from pyspark.errors import PySparkException

from blobstore.errors import BlobNotFoundError
from engine.errors import ConflictError, DamagedError, EngineError, UsageError
from engine.records.find import key_of
from engine.records.indexes import is_missing
from index.display import encodable
from tidemark.errors import TidemarkError

__all__ = ["BatchMismatchError", "PartitioningError", "RunEndedError", "TaskFailedError"]

# An exception that leaves a task is tried again by Spark, up to four times, and comes back as the text of a traceback.
# What tidemark refuses would be refused each time, and what a store does not answer was tried again already: these
# travel as data, and the driver raises the same error that one process would.


class TaskFailedError(EngineError):
    """Spark gave up on a task after its last attempt. Nothing was committed."""

    default_hint = "nothing was committed: mend the cause and run again with the same version; its traceback is below"


class PartitioningError(EngineError):
    """Spark ran a task's rows in several partitions, or several tasks' rows in one. Nothing was committed."""

    default_hint = "this is a bug, or the DataFrame was repartitioned behind the job's back; nothing was committed"


class BatchMismatchError(UsageError):
    """A query's batch is neither the job's newest version nor the next one. Nothing was committed."""

    default_hint = "stop the query, then bring both to one batch: `tidemark spark restore --batch N --with-job JOB`"


class RunEndedError(ConflictError):
    """Another collection that worked on the same run was first to end it (design 0006, R4 and R6)."""

    default_hint = "nothing is wrong: run it again if the other collection has not done what you asked for"


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    # Its class, then those above it; a private one is nobody's to raise.
    kinds: tuple[str, ...]
    text: str
    # Operation, subject or key, hint and so on.
    attributes: dict[str, str | bool | int | float | None]
    notes: tuple[str, ...]
    # The key of a blob that is not there, which may mean that another collector came in between.
    missing: str | None


def encode_error(error: TidemarkError) -> bytes:
    """Return an error as data for the driver."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TidemarkError))
    missing = key_of(error) if isinstance(error, DamagedError) and is_missing(error) else None
    attributes = {name: encodable(value) if isinstance(value, str) else value for name, value in vars(error).items()}
    failure = _Failure(
        kinds=tuple(kind for kind in kinds if not kind.startswith("_")),
        text=encodable(str(error)),
        attributes={name: value for name, value in attributes.items() if isinstance(value, str | int | float | None)},
        notes=tuple(encodable(str(note)) for note in getattr(error, "__notes__", ())),
        missing=encodable(missing) if missing is not None else None,
    )
    return msgspec.msgpack.encode(failure)


def decode_error(data: bytes) -> TidemarkError:
    """Invert `encode_error`: an error of the class that it had in the task."""
    failure = msgspec.msgpack.decode(data, type=_Failure)
    known = {kind.__name__: kind for kind in _tree(TidemarkError)}
    kind = next(known[name] for name in failure.kinds if name in known)
    # As it was: its text and its attributes are what `__init__` made of other arguments.
    error = kind.__new__(kind, failure.text)
    vars(error).update(failure.attributes)
    for note in failure.notes:
        error.add_note(note)
    if failure.missing is not None:
        error.__cause__ = BlobNotFoundError("a task did not find it", operation="get", key=failure.missing)
    return error


def _tree(kind: type[TidemarkError]) -> Iterator[type[TidemarkError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


@contextlib.contextmanager
def task_errors(operation: str, subject: str = "", hint: str = "") -> Iterator[None]:
    """Raise TaskFailedError where Spark gives up in the block, on a partition or altogether."""
    try:
        yield
    except PySparkException as error:
        raise TaskFailedError(last_error(error), operation=operation, subject=subject, hint=hint) from error


def last_error(error: PySparkException) -> str:
    """Return the line of a worker's traceback that names the error; else the first line of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = (line for line in reversed(lines) if "Error" in line.split(":")[0] and " " not in line.split(":")[0])
    return next(named, lines[0] if lines else type(error).__name__)
