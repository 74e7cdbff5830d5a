"""Rows that the tasks of a collection take and give, all of one shape.

Between the steps go numbers, or one row for many keys: a row for each key would cost more than all else together.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

# What is in `data`. An inventory or a plan is in it only where nothing may be written to the repository (P2).
ITEM: Final = "item"
ANSWER: Final = "answer"
INVENTORY: Final = "inventory"
LIVE: Final = "live"
FAILED: Final = "failed"
PLAN: Final = "plan"

ROWS: Final = pa.schema([("position", pa.int32()), ("kind", pa.string()), ("data", pa.binary())])
ROWS_DDL: Final = "position int, kind string, data binary"

# Shards that a task works on at once, so that it does not wait for every answer; it holds their inventories meanwhile.
SHARDS_AT_ONCE: Final = 4

ArrowTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Row(NamedTuple):
    """One row: a shard's position, or of other work its place in order; what `data` is; the data."""

    position: int
    kind: str
    data: bytes | None


def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    """The rows of batches, one in Python's memory at a time."""
    for batch in batches:
        positions, kinds, data = batch.columns
        for number in range(batch.num_rows):
            yield Row(positions[number].as_py(), kinds[number].as_py(), data[number].as_py())


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a batch."""
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(values, field.type) for values, field in zip(columns, ROWS, strict=True)]
    return pa.record_batch(arrays, schema=ROWS)
