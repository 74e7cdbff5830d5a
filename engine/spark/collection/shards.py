"""What the driver and the tasks of a collection exchange: rows, failures, and the inventory and plan of each shard.

Between the steps go numbers, or one row for many keys: a row for each key would cost more than all else together. An
inventory or a plan is an object of the run, known by its digest (design 0006, R2, R4 and R5).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from blobstore.base import BlobStore, BytesBody, read_blob
from blobstore.errors import BlobNotFoundError, StoreError
from engine.collect.backend import COLLECT
from engine.errors import DamagedError, EngineError
from engine.records.indexes import is_missing
from engine.spark.errors import RunEndedError
from index.errors import FormatError
from index.plan.collect import PlannedUpload, Upload
from index.plan.plan_format import Shard, decode_lines, digest_of, encode_line
from index.snapshot.keys import RunId, run_key

# What is in `data`. An inventory or a plan is in it only where nothing may be written to the repository (P2).
ITEM: Final = "item"
ANSWER: Final = "answer"
INVENTORY: Final = "inventory"
LIVE: Final = "live"
FAILED: Final = "failed"
PLAN: Final = "plan"

ROWS: Final = pa.schema([("position", pa.int32()), ("kind", pa.string()), ("data", pa.binary())])
ROWS_DDL: Final = "position int, kind string, data binary"

# About 30 bytes for each upload.
INVENTORY_BYTES_MAX: Final = 1024 * 1024 * 1024
# A line has several times the bytes of its key in the inventory.
PLAN_BYTES_MAX: Final = 8 * INVENTORY_BYTES_MAX

UPLOADS: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("created_at_ms", pa.int64()),
        # A key that tidemark never wrote: it is reported and left alone.
        pa.field("foreign", pa.bool_()),
    ],
    metadata={b"tidemark": b"inventory 1"},
)


class Row(NamedTuple):
    """One row: a shard's position, or of other work its place in order; what `data` is; the data."""

    position: int
    kind: str
    data: bytes | None


def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    """Return the rows of batches, one in Python's memory at a time."""
    for batch in batches:
        positions, kinds, data = batch.columns
        for number in range(batch.num_rows):
            yield Row(positions[number].as_py(), kinds[number].as_py(), data[number].as_py())


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a batch."""
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(values, field.type) for values, field in zip(columns, ROWS, strict=True)]
    return pa.record_batch(arrays, schema=ROWS)


# ---------------------------------------------------------------------- failures

# An exception that leaves a task is tried again by Spark, up to four times, and comes back as the text of a traceback.
# What tidemark refuses would be refused each time, and what a store does not answer was tried again already: these
# become rows, and the driver raises the same error that one process would.
SENT: Final = (EngineError, StoreError, FormatError)
SentError = EngineError | StoreError | FormatError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to the driver."""

    # Its class, then those above it.
    kinds: tuple[str, ...]
    text: str
    # Operation, subject or key, hint and so on.
    attributes: dict[str, str | bool | int | float | None]
    notes: tuple[str, ...]
    # A blob is not there, which may mean that another collector came in between.
    is_missing: bool


def failure_row(error: SentError) -> Row:
    """Return an error as a row for the driver."""
    failure = Failure(
        kinds=tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, SENT)),
        text=str(error),
        attributes={name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)},
        notes=tuple(map(str, getattr(error, "__notes__", ()))),
        is_missing=isinstance(error, DamagedError) and is_missing(error),
    )
    return Row(0, FAILED, msgspec.msgpack.encode(failure))


@contextlib.contextmanager
def failures_to(rows: list[Row]) -> Iterator[None]:
    """Append the error of the block to a list, as a row."""
    try:
        yield
    except SENT as error:
        rows.append(failure_row(error))


def raise_failures(rows: Iterable[Row]) -> None:
    """Raise the error of a task, if there is one; first one that no other collector explains.

    Raises:
        EngineError, StoreError, FormatError: Of the class that it had in the task.
    """
    failures = [msgspec.msgpack.decode(row.data or b"", type=Failure) for row in rows if row.kind == FAILED]
    if not failures:
        return
    failure = min(failures, key=lambda failure: failure.is_missing)
    known = {kind.__name__: kind for root in SENT for kind in _tree(root)}
    kind = next(known[name] for name in failure.kinds if name in known)
    # As it was: its text and its attributes are what `__init__` made of other arguments.
    error = kind.__new__(kind, failure.text)
    vars(error).update(failure.attributes)
    for note in failure.notes:
        error.add_note(note)
    if failure.is_missing:
        subject = str(failure.attributes.get("subject"))
        raise error from BlobNotFoundError("a task did not find it", operation="get", key=subject)
    raise error


def _tree(kind: type[SentError]) -> Iterator[type[SentError]]:
    # A private class is nobody's to raise.
    if not kind.__name__.startswith("_"):
        yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


# ---------------------------------------------------------------------- inventories


async def read_inventory(store: BlobStore, run: RunId, shard: Shard) -> bytes:
    """Read the inventory of a shard.

    Raises:
        RunEndedError: It is gone.
        StoreError: As the store says.
    """
    return await _read(store, run_key(run, shard.inventory_name), INVENTORY_BYTES_MAX)


async def _read(store: BlobStore, key: str, size_bytes_max: int) -> bytes:
    try:
        return await read_blob(store.tagged(COLLECT), key, size_bytes_max=size_bytes_max)
    except BlobNotFoundError as error:
        raise run_has_ended(key) from error


def run_has_ended(key: str) -> RunEndedError:
    """Return the error for an object of a run that is gone (R4, R6)."""
    return RunEndedError(
        "is gone, or another: a collection that worked on the same run has ended it", operation="collect", subject=key
    )


def encode_inventory(uploads: tuple[Upload, ...], foreign: tuple[str, ...]) -> bytes:
    """Return what was listed as an Arrow stream."""
    columns = (
        [u.key for u in uploads] + list(foreign),
        [u.size_bytes for u in uploads] + [0] * len(foreign),
        [u.created_at_ms for u in uploads] + [0] * len(foreign),
        [False] * len(uploads) + [True] * len(foreign),
    )
    arrays = [pa.array(values, field.type) for values, field in zip(columns, UPLOADS, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, UPLOADS, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=UPLOADS))
    return bytes(sink.getvalue())


def decode_inventory(data: bytes, shard: Shard) -> pa.Table:
    """Return what was listed of a shard, with the columns of `UPLOADS`, in the order of the keys; foreign keys last.

    Raises:
        DamagedError: It is not what `encode_inventory` makes of this shard.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        # What an earlier release has listed has columns of TTLs too, on which nothing depends.
        table = table.select(UPLOADS.names)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(shard, f"does not decode: {error}") from error
    if not table.schema.equals(UPLOADS):
        raise _damaged(shard, "has other columns")
    if (
        any(column.null_count for column in table.itercolumns())
        or not pc.all(pc.starts_with(table["key"], shard.prefix), min_count=0).as_py()
    ):
        raise _damaged(shard, "has keys of other shards, or none")
    return table


def _damaged(shard: Shard, reason: str) -> DamagedError:
    return DamagedError(
        reason,
        operation="collect",
        subject=shard.inventory_name,
        hint="delete what is below runs/, on which nothing depends, and run it again",
    )


# Of a shard with nothing in it, as most are where a repository is small: it is never read again.
NOTHING: Final = encode_inventory((), ())
NOTHING_DIGEST: Final = digest_of(NOTHING)


# ---------------------------------------------------------------------- plans


def encode_plan(planned: Iterable[PlannedUpload]) -> bytes:
    """Return the lines of a plan, in the order of the keys."""
    return b"".join(encode_line(p) for p in sorted(planned, key=lambda p: p.key))


async def write_plan(store: BlobStore, run: RunId, shard: Shard, plan: bytes) -> None:
    """Write a shard's plan, unless it is empty. Its name follows from its bytes, so that it replaces only its like."""
    if plan:
        await store.tagged(COLLECT).put(run_key(run, shard.plan_name(digest_of(plan))), BytesBody(plan))


async def read_plan(store: BlobStore, run: RunId, shard: Shard, digest: bytes) -> tuple[PlannedUpload, ...]:
    """Read the plan with this digest: the one that this collection has made, and no other (R4).

    Raises:
        RunEndedError: It is not there any more.
        DamagedError: It is not what was planned.
        StoreError: As the store says.
    """
    key = run_key(run, shard.plan_name(digest))
    data = await _read(store, key, PLAN_BYTES_MAX)
    if digest_of(data) != digest:
        raise DamagedError("is not what was planned", operation="collect", subject=key)
    return tuple(decode_lines(data, subject=key))
