"""Rows of state as Arrow batches: typed, or as the bytes that stand in RocksDB."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyspark.sql.types as spark

from engine.spark.sources.arrow_types import arrow_type, spark_type
from engine.spark.sources.plan import StoreRead, Table
from engine.spark.sources.unsafe_rows import RowBuffer, decode_pairs, decode_rows, rows_array
from engine.state.store import StateStore
from index.spark.checkpoint import StoreId
from index.spark.schema import StructType

Pairs: TypeAlias = Sequence[tuple[bytes, bytes]]

# A batch is of so many rows at the most, and of about so many bytes.
BATCH_ROWS_MAX: Final = 32_768
BATCH_BYTES_MAX: Final = 2 * 1024 * 1024

# Which store a row is of: the columns that filters are pushed down on.
STORE_COLUMNS: Final = ("operator", "partition", "store", "version")
_STORE_SCHEMA: Final = pa.schema(
    [
        pa.field("operator", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("store", pa.string()),
        pa.field("version", pa.int64()),
    ]
)
_LENGTH_BYTES: Final = 4


def row_fields(table: Table | None, names: Sequence[str]) -> list[pa.Field]:
    """The columns of a row's parts.

    Args:
        table: What the rows are; None: bytes, with their family before.
        names: A key's name, then those of values.
    """
    if table is None:
        return [pa.field("family", pa.string()), *(pa.field(name, pa.binary()) for name in names)]
    key, *values = names
    return [pa.field(key, arrow_type(table.key)), *(pa.field(name, arrow_type(table.value)) for name in values)]


def spark_schema(table: Table | None, names: Sequence[str], *, change: bool = False) -> spark.StructType:
    """As PySpark tells the columns of `row_fields` after those of the store."""
    found = spark.StructType(
        [
            spark.StructField("operator", spark.IntegerType()),
            spark.StructField("partition", spark.IntegerType()),
            spark.StructField("store", spark.StringType()),
        ]
    )
    found.add("change" if change else "version", spark.StringType() if change else spark.LongType())
    key, *values = names
    if table is None:
        found.add("family", spark.StringType())
    found.add(key, spark.BinaryType() if table is None else spark_type(table.key))
    for name in values:
        found.add(name, spark.BinaryType() if table is None else spark_type(table.value))
    return found


def state_batches(read: StoreRead, store: StateStore, table: Table | None) -> Iterator[pa.RecordBatch]:
    """All rows of a loaded store.

    Raises:
        DamagedError: A block is damaged, or a row does not fit the schema.
        RowChecksumError: A row does not fit its checksum, if it is this row's turn.
    """
    schema = pa.schema([*_STORE_SCHEMA, *row_fields(table, ("key", "value"))])
    for family in store.families:
        for pairs in store.chunks(family, rows_max=BATCH_ROWS_MAX, bytes_max=BATCH_BYTES_MAX):
            parts = split_bytes(family, pairs) if table is None else split_typed(table, pairs, read.id)
            head = store_columns(read.id, len(pairs))
            version = pa.repeat(pa.scalar(read.version, pa.int64()), len(pairs))
            yield pa.RecordBatch.from_arrays([*head, version, *parts], schema=schema)


def store_columns(of: StoreId, count: int) -> list[pa.Array]:
    """Operator, partition and store of so many rows."""
    return [
        pa.repeat(pa.scalar(of.operator, pa.int32()), count),
        pa.repeat(pa.scalar(of.partition, pa.int32()), count),
        pa.repeat(pa.scalar(of.store, pa.string()), count),
    ]


def split_bytes(family: str, pairs: Pairs) -> list[pa.Array]:
    """Family, keys and values."""
    flat = list(itertools.chain.from_iterable(pairs))
    both = pa.array(flat, pa.binary())
    places = np.arange(0, len(flat), 2)
    return [
        pa.repeat(pa.scalar(family, pa.string()), len(pairs)),
        both.take(pa.array(places)),
        both.take(pa.array(places + 1)),
    ]


def split_typed(table: Table, pairs: Pairs, of: StoreId) -> list[pa.Array]:
    """Keys and values as structs."""
    subject = f"state of {of}"
    if not table.prefix_columns:
        return list(decode_pairs(table.key, table.value, pairs, subject=subject))
    keys = decode_keys(table, [key for key, _ in pairs], of)
    return [keys, decode_rows(table.value, [value for _, value in pairs], subject=subject)]


def decode_keys(table: Table, keys: Sequence[bytes], of: StoreId) -> pa.Array:
    """Keys as structs: of one row, or of two, the first after its length."""
    subject = f"state of {of}"
    if not table.prefix_columns:
        return decode_rows(table.key, keys, subject=subject)
    cuts = [_LENGTH_BYTES + int.from_bytes(key[:_LENGTH_BYTES], "little", signed=True) for key in keys]
    columns = []
    for fields, rows in (
        (
            table.key.fields[: table.prefix_columns],
            [key[_LENGTH_BYTES:cut] for key, cut in zip(keys, cuts, strict=True)],
        ),
        (table.key.fields[table.prefix_columns :], [key[max(cut, 0) :] for key, cut in zip(keys, cuts, strict=True)]),
    ):
        buffer = RowBuffer(rows, subject)
        columns += buffer.columns(StructType(fields), buffer.all)
    return rows_array(table.key, columns, len(keys))
