"""What a task of a collection failed with, as a row: the driver raises the same error that one process would.

An exception that leaves a task is tried again by Spark, up to four times, and comes back as the text of a traceback.
What tidemark refuses would be refused each time, and what a store does not answer was tried again already.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from blobstore.errors import BlobNotFoundError, StoreError
from engine.errors import DamagedError, EngineError, bare_message
from engine.records.indexes import is_missing
from engine.spark.collection.rows import FAILED, Row
from index.errors import FormatError

# What a task tells of instead of dying of it.
TOLD: Final = (EngineError, StoreError, FormatError)
ToldError = EngineError | StoreError | FormatError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to the driver."""

    # Its class, then those above it.
    kinds: tuple[str, ...]
    message: str
    operation: str
    subject: str
    hint: str
    notes: tuple[str, ...]
    # A blob is not there, which may mean that this collector was overtaken.
    is_missing: bool


def failure_row(error: ToldError) -> Row:
    """The row that tells the driver of an error."""
    subject = error.key if isinstance(error, StoreError) else error.subject
    operation = "" if isinstance(error, FormatError) else error.operation
    prefix = " ".join(filter(None, [operation, subject]))
    failure = Failure(
        kinds=tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TOLD)),
        message=str(error).removeprefix(f"{prefix}: ") if isinstance(error, StoreError) else bare_message(error),
        operation=operation,
        subject=subject,
        hint=error.hint,
        notes=tuple(map(str, getattr(error, "__notes__", ()))),
        is_missing=isinstance(error, DamagedError) and is_missing(error),
    )
    return Row(0, FAILED, msgspec.msgpack.encode(failure))


def raise_failures(rows: Iterable[Row]) -> None:
    """Raise what a task failed with, if one did; first what cannot be explained by having been overtaken.

    Raises:
        EngineError, StoreError, FormatError: Of the class that it had in the task.
    """
    failures = [msgspec.msgpack.decode(row.data or b"", type=Failure) for row in rows if row.kind == FAILED]
    if not failures:
        return
    failure = min(failures, key=lambda failure: failure.is_missing)
    error = _made(failure)
    for note in failure.notes:
        error.add_note(note)
    if failure.is_missing:
        raise error from BlobNotFoundError("a task did not find it", operation="get", key=failure.subject)
    raise error


@contextlib.contextmanager
def failures_to(rows: list[Row]) -> Iterator[None]:
    """Put what the block fails with into a list, as a row."""
    try:
        yield
    except TOLD as error:
        rows.append(failure_row(error))


def _made(failure: Failure) -> ToldError:
    known = {kind.__name__: kind for root in TOLD for kind in _tree(root)}
    kind = next(known[name] for name in failure.kinds if name in known)
    if issubclass(kind, FormatError):
        return kind(failure.message, subject=failure.subject, hint=failure.hint)
    if issubclass(kind, StoreError):
        return kind(failure.message, operation=failure.operation, key=failure.subject, hint=failure.hint)
    return kind(failure.message, operation=failure.operation, subject=failure.subject, hint=failure.hint)


def _tree(kind: type[ToldError]) -> Iterator[type[ToldError]]:
    # A private class is nobody's to raise.
    if not kind.__name__.startswith("_"):
        yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)
