"""Rows of state, and of its changes, as Arrow batches: typed, or as the bytes that RocksDB has."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from engine.spark.sources.plan import StoreWork, Table
from engine.spark.sources.unsafe_rows import (
    ATOMS,
    Column,
    RowBuffer,
    arrow_schema,
    decode_pairs,
    decode_rows,
    rows_array,
    types_of,
)
from engine.state.store import StateStore
from index.spark.checkpoint import StoreId
from index.spark.schema import StructType

Pair: TypeAlias = tuple[bytes, bytes]
# Key, the value before, the value after: None where there was none.
Change: TypeAlias = tuple[bytes, bytes | None, bytes | None]

BATCH_ROWS_MAX: Final = 32_768
# About: a batch ends with the row that reaches it.
BATCH_BYTES_MAX: Final = 2 * 1024 * 1024

_STORE: Final[tuple[Column, ...]] = (
    ("operator", *ATOMS["integer"]),
    ("partition", *ATOMS["integer"]),
    ("store", *ATOMS["string"]),
)
_LENGTH_BYTES: Final = 4


def columns_of(table: Table | None, *, changes: bool) -> list[Column]:
    """Return the columns of `batches_of`: of rows of a table; without one, of bytes with their column family."""
    found = [*_STORE, ("change", *ATOMS["string"]) if changes else ("version", *ATOMS["long"])]
    names = ("before", "after") if changes else ("value",)
    if table is None:
        return [*found, ("family", *ATOMS["string"]), *((name, *ATOMS["binary"]) for name in ("key", *names))]
    return [*found, ("key", *types_of(table.key)), *((name, *types_of(table.value)) for name in names)]


def batches_of(work: StoreWork, stores: Sequence[StateStore | None]) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a loaded store; of two, what changed from the first to the second, by family and key.

    Raises:
        DamagedError: A block is damaged, or a row does not fit the schema.
        RowChecksumError: A row that is checked does not fit its checksum.
    """
    schema = arrow_schema(columns_of(work.table, changes=work.changes))
    names = dict.fromkeys(name for store in stores if store is not None for name in store.families)
    for family in names:
        chunks = (_chunks(store, family, share=len(stores)) for store in stores)
        for columns in _change_columns(work, family, *chunks) if work.changes else _columns_of(work, family, *chunks):
            count = len(columns[-1])
            values = (work.id.operator, work.id.partition, work.id.store)
            head = [pa.repeat(pa.scalar(v, of), count) for v, (_, of, _) in zip(values, _STORE, strict=True)]
            yield pa.RecordBatch.from_arrays([*head, *columns], schema=schema)


def _chunks(store: StateStore | None, family: str, *, share: int) -> Iterator[list[Pair]]:
    if store is None or family not in store.families:
        return iter(())
    return store.chunks(family, rows_max=BATCH_ROWS_MAX // share, bytes_max=BATCH_BYTES_MAX // share)


def _columns_of(work: StoreWork, family: str, chunks: Iterator[list[Pair]]) -> Iterator[list[pa.Array]]:
    for pairs in chunks:
        parts = split_bytes(family, pairs) if work.table is None else split_typed(work.table, pairs, work.id)
        yield [pa.repeat(pa.scalar(work.version, pa.int64()), len(pairs)), *parts]


def _change_columns(
    work: StoreWork, family: str, before: Iterator[list[Pair]], after: Iterator[list[Pair]]
) -> Iterator[list[pa.Array]]:
    for changes in diff_pairs(before, after):
        kinds = pa.array(["added" if b is None else "removed" if a is None else "changed" for _, b, a in changes])
        keys, *values = ([change[part] for change in changes] for part in range(3))
        if work.table is None:
            families = pa.repeat(pa.scalar(family, pa.string()), len(changes))
            yield [kinds, families, *(pa.array(column, pa.binary()) for column in (keys, *values))]
            continue
        columns = [kinds, decode_keys(work.table, [key for key, _, _ in changes], work.id)]
        for column in values:
            there = np.fromiter((value is not None for value in column), np.bool_, len(column))
            known = [value for value in column if value is not None]
            found = decode_rows(work.table.value, known, subject=f"state of {work.id}")
            columns.append(found.take(pa.array(np.cumsum(there) - 1, mask=~there)))
        yield columns


def diff_pairs(before: Iterator[list[Pair]], after: Iterator[list[Pair]]) -> Iterator[list[Change]]:
    """Yield what changed from some rows to others, both in the order of their keys; a chunk of either is held.

    Up to the lower of the last keys of both chunks both sides are known, and compared as sets.
    """
    first, second = next(before, []), next(after, [])
    while first or second:
        bound = min(rows[-1][0] for rows in (first, second) if rows)
        cuts = [bisect_right(rows, bound, key=itemgetter(0)) for rows in (first, second)]
        old, new = dict(first[: cuts[0]]), dict(second[: cuts[1]])
        differing = sorted({key for key, _ in old.items() ^ new.items()})
        if differing:
            yield [(key, old.get(key), new.get(key)) for key in differing]
        first = first[cuts[0] :] or next(before, [])
        second = second[cuts[1] :] or next(after, [])


def split_bytes(family: str, pairs: Sequence[Pair]) -> list[pa.Array]:
    """Return family, keys and values as arrays."""
    flat = list(itertools.chain.from_iterable(pairs))
    both = pa.array(flat, pa.binary())
    places = np.arange(0, len(flat), 2)
    families = pa.repeat(pa.scalar(family, pa.string()), len(pairs))
    return [families, both.take(pa.array(places)), both.take(pa.array(places + 1))]


def split_typed(table: Table, pairs: Sequence[Pair], of: StoreId) -> list[pa.Array]:
    """Return keys and values as arrays of structs."""
    subject = f"state of {of}"
    if not table.prefix_columns:
        return list(decode_pairs(table.key, table.value, pairs, subject=subject))
    keys = decode_keys(table, [key for key, _ in pairs], of)
    return [keys, decode_rows(table.value, [value for _, value in pairs], subject=subject)]


def decode_keys(table: Table, keys: Sequence[bytes], of: StoreId) -> pa.Array:
    """Return keys as structs: of one row, or of two, the first after its length."""
    subject, prefix = f"state of {of}", table.prefix_columns
    if not prefix:
        return decode_rows(table.key, keys, subject=subject)
    cuts = [_LENGTH_BYTES + int.from_bytes(key[:_LENGTH_BYTES], "little", signed=True) for key in keys]
    columns = []
    for fields, rows in (
        (table.key.fields[:prefix], [key[_LENGTH_BYTES:cut] for key, cut in zip(keys, cuts, strict=True)]),
        (table.key.fields[prefix:], [key[max(cut, 0) :] for key, cut in zip(keys, cuts, strict=True)]),
    ):
        buffer = RowBuffer(rows, subject)
        columns += buffer.columns(StructType(fields), buffer.all)
    return rows_array(table.key, columns, len(keys))
