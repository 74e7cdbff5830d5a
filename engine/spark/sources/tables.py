"""The rows of a store, or of a column family of one, as Arrow arrays: by the schema that Spark stored, or as bytes.

A key is one row, or two parts; a value is one row, or the elements of a list, each after its length. Rows are Spark's
UnsafeRow, or Avro. A table has the columns that Spark's own reader shows: of a list a row for each element, of a map
the user's key beside the grouping key, of timers when each expires. None of this is believed, as in `unsafe_rows`.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyspark.sql.types as spark
from pyspark.sql.pandas.types import from_arrow_type

from engine.arrow.unsafe_rows import (
    ATOMS,
    Ints,
    RowBuffer,
    arrow_type,
    damaged_row,
    decode_pairs,
    decode_rows,
    interval_parts,
)
from index.spark.avro import Read, decode_record, record_reader
from index.spark.partition_keys import AVRO_HEAD, ENCODING, LENGTH_BYTES, cut_keys
from index.spark.schema import ArrayType, AtomType, DataType, Field, KeyForm, MapType, StructType
from index.spark.unsafe_row import WORD, encode_row

# Name, Arrow's type, PySpark's.
Column: TypeAlias = tuple[str, pa.DataType, spark.DataType]


def columns(**atoms: str) -> tuple[Column, ...]:
    """Return columns of atomic types by their names."""
    return tuple((name, *types_of(AtomType(of))) for name, of in atoms.items())


def types_of(of: DataType) -> tuple[pa.DataType, spark.DataType]:
    """Return Arrow's type and PySpark's. Raises as `arrow_type`."""
    return arrow_type(of), _spark_type(of)


@functools.cache
def _spark_type(of: DataType) -> spark.DataType:
    match of:
        case StructType(fields=fields):
            return spark.StructType([spark.StructField(f.name, _spark_type(f.type), f.nullable) for f in fields])
        case ArrayType(element=element, contains_null=contains_null):
            return spark.ArrayType(_spark_type(element), contains_null)
        case MapType(key=key, value=value, value_contains_null=contains_null):
            return spark.MapType(_spark_type(key), _spark_type(value), contains_null)
        case AtomType(name=name) if name not in ATOMS:
            return spark.DayTimeIntervalType(interval_parts(name)[0], interval_parts(name)[-1])
        case _:
            return from_arrow_type(arrow_type(of), prefer_timestamp_ntz=True)


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return columns as Arrow has them."""
    return pa.schema([pa.field(name, of) for name, of, _ in columns])


def spark_schema(columns: Iterable[Column]) -> spark.StructType:
    """Return columns as PySpark has them."""
    return spark.StructType([spark.StructField(name, of) for name, _, of in columns])


Pair: TypeAlias = tuple[bytes, bytes]
# What a column family has for each key: a state variable of one of four types, or the rows of a join, as `values`.
Kind: TypeAlias = Literal["value", "values", "list", "map", "timer"]

# The columns that a key of two fields is shown as, by kind; what Spark's reader calls them.
_KEY_COLUMNS: Final = {"map": ("key", "user_map_key"), "timer": ("key", "expiration_timestamp_ms")}
_VALUE_COLUMN: Final = {"value": "value", "values": "value", "list": "list_element", "map": "user_map_value"}
_LONG: Final = AtomType("long")
# Before each number of a range: whether it is negative, not, or null.
_NEGATIVE: Final = 0
_NULL: Final = 2

# Of what is decoded at once. About: a batch ends with the row that reaches it.
BATCH_ROWS_MAX: Final = 32_768
BATCH_BYTES_MAX: Final = 2 * 1024 * 1024


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The types of the rows of a store, or of a column family, and how they are encoded."""

    key: StructType
    value: StructType
    key_form: KeyForm = KeyForm()
    kind: Kind = "value"
    # Between two elements of a list.
    delimiter: bytes = b""
    # Of rows that are Avro: the schemas that values had, by the number that each value names. Empty: UnsafeRow.
    avro: tuple[tuple[int, StructType], ...] = ()

    @property
    def is_known(self) -> bool:
        """Return whether all of it can be decoded, and Spark takes it."""
        fields = self.key.fields
        if self.kind in _KEY_COLUMNS and len(fields) != len(_KEY_COLUMNS[self.kind]):
            return False
        if self.key_form.form not in {"row", "prefix"} and any(fields[n].type != _LONG for n in self.key_form.first):
            return False
        try:
            for _, of in self.avro and ((0, self.key), *self.avro):
                record_reader(of)
            for of in (self.key, self.value):
                arrow_type(of)
        except KeyError:
            return False
        return True

    @property
    def is_list(self) -> bool:
        """Return whether a value is the elements of a list."""
        return self.kind in {"list", "values"}

    @property
    def array(self) -> ArrayType:
        """Return the type of a whole list."""
        return ArrayType(self.value, contains_null=False)

    def key_columns(self) -> list[Column]:
        """Return the columns of a key."""
        if self.kind not in _KEY_COLUMNS:
            return [("key", *types_of(self.key))]
        return [(n, *types_of(f.type)) for n, f in zip(_KEY_COLUMNS[self.kind], self.key.fields, strict=True)]

    def value_columns(self, *names: str) -> list[Column]:
        """Return the column of a value, or columns of whole values, a list being an array; none for a timer."""
        if self.kind == "timer":
            return []
        if not names:
            return [(_VALUE_COLUMN[self.kind], *types_of(self.value))]
        return [(name, *types_of(self.array if self.is_list else self.value)) for name in names]


# Types of keys that are encoded: text, and what is one number in one way.
_ENCODED: Final = frozenset({"string", "binary", "boolean", "byte", "short", "integer", "long"})
_KEYS_MAX: Final = 1000


def encode_keys(table: Table, wanted: Mapping[str, Sequence[Any]]) -> tuple[bytes, ...] | None:
    """Return all keys, as they are stored and sorted, whose fields have one of these values each.

    None if a field is not named, the keys are more than a thousand, or of a form that is not encoded here.
    """
    fields = table.key.fields
    types = [field.type for field in fields]
    if (
        table.avro
        or table.kind in _KEY_COLUMNS
        or table.key_form.form != "row"
        or wanted.keys() != {field.name for field in fields}
        or not all(isinstance(of, AtomType) and of.name in _ENCODED for of in types)
        or math.prod(map(len, wanted.values())) > _KEYS_MAX
    ):
        return None
    text, octets = AtomType("string"), AtomType("binary")
    stored = StructType(tuple(msgspec.structs.replace(f, type=octets) if f.type == text else f for f in fields))
    chosen = ([v.encode() if isinstance(v, str) else v for v in wanted[field.name]] for field in fields)
    try:
        return tuple(sorted({ENCODING + encode_row(stored, values) for values in itertools.product(*chosen)}))
    except (ValueError, KeyError, TypeError):
        return None


def split_bytes(family: str, pairs: Sequence[Pair]) -> list[pa.Array]:
    """Return family, keys and values as arrays."""
    flat = list(itertools.chain.from_iterable(pairs))
    both = pa.array(flat, pa.binary())
    places = np.arange(0, len(flat), 2)
    families = pa.repeat(pa.scalar(family, pa.string()), len(pairs))
    return [families, both.take(pa.array(places)), both.take(pa.array(places + 1))]


def split_typed(table: Table, pairs: Sequence[Pair], *, subject: str) -> Iterator[list[pa.Array]]:
    """Yield the columns of keys and values; of lists a row for each element, as many at a time as have a batch's bytes.

    DamagedError: they do not fit the table.
    """
    if table == Table(key=table.key, value=table.value):
        yield list(decode_pairs(table.key, table.value, pairs, subject=subject))
        return
    keys = decode_keys(table, [key for key, _ in pairs], subject=subject)
    values = [value for _, value in pairs]
    if not table.is_list:
        yield keys if table.kind == "timer" else [*keys, _values(table, values, subject)]
        return
    counts, elements = _elements(table, values, subject)
    owner = np.repeat(np.arange(len(pairs)), counts)
    # A list may have a hundred thousand elements, and each has the key beside it.
    ends = np.cumsum(np.array([len(key) for key, _ in pairs], np.int64)[owner])
    start = 0
    while start < len(owner):
        reached = np.searchsorted(ends, BATCH_BYTES_MAX + (ends[start - 1] if start else 0))
        end = min(int(reached) + 1, start + BATCH_ROWS_MAX)
        taken = pa.array(owner[start:end])
        yield [*(column.take(taken) for column in keys), _values(table, elements[start:end], subject)]
        start = end


def decode_keys(table: Table, keys: Sequence[bytes], *, subject: str) -> list[pa.Array]:
    """Return the columns of keys. Raises as `split_typed`."""
    form, fields = table.key_form, table.key.fields
    rest = [place for place in range(len(fields)) if place not in form.first]
    try:
        leading, rows = cut_keys(form, keys)
    except ValueError as error:
        raise damaged_row(str(error), subject) from error
    columns = _leading(table, leading, subject)
    columns += _columns(table, _some(table.key, rest), rows, subject, head=AVRO_HEAD)
    by_place = dict(zip([*form.first, *rest], columns, strict=True))
    columns = [by_place[place] for place in range(len(fields))]
    if table.kind in _KEY_COLUMNS:
        return columns
    return [pa.Array.from_buffers(arrow_type(table.key), len(keys), [None], children=columns)]


def decode_values(table: Table, values: Sequence[bytes | None], *, subject: str) -> pa.Array:
    """Return whole values, a list as an array, and null where there is none. Raises as `split_typed`."""
    there = np.fromiter((value is not None for value in values), np.bool_, len(values))
    known = [value for value in values if value is not None]
    if table.is_list:
        counts, elements = _elements(table, known, subject)
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        found = pa.ListArray.from_arrays(offsets, _values(table, elements, subject), type=arrow_type(table.array))
    else:
        found = _values(table, known, subject)
    return found.take(pa.array(np.cumsum(there) - 1, mask=~there))


def _elements(table: Table, values: Sequence[bytes], subject: str) -> tuple[Ints, list[bytes]]:
    """Return how many elements each list has, and all of them."""
    counts: list[int] = []
    elements: list[bytes] = []
    for value in values:
        at, before = 0, len(elements)
        while at < len(value):
            start = at + LENGTH_BYTES
            end = start + int.from_bytes(value[at:start], "little", signed=True)
            if not start <= end <= len(value) or (not value.startswith(table.delimiter, end) and end < len(value)):
                raise damaged_row("has elements that do not add up", subject)
            elements.append(value[start:end])
            at = end + len(table.delimiter)
        if value and at != len(value) + len(table.delimiter):
            raise damaged_row("has a list that ends with a delimiter", subject)
        counts.append(len(elements) - before)
    return np.array(counts, np.int64), elements


def _some(of: StructType, places: Sequence[int]) -> StructType:
    return StructType(tuple(of.fields[place] for place in places))


def _leading(table: Table, parts: list[bytes], subject: str) -> list[pa.Array]:
    of, form = _some(table.key, table.key_form.first), table.key_form.form
    if form == "row":
        return []
    if form == "prefix":
        return _columns(table, of, parts, subject, head=len(ENCODING))
    if form != "range":
        return [_times(parts, subject)]
    # A field of Avro holds the sign alone, and the next one the number.
    texts = [Field(str(n), AtomType("binary"), nullable=True) for n in range(len(of.fields) * (2 if table.avro else 1))]
    found = [c.to_pylist() for c in _columns(table, StructType(tuple(texts)), parts, subject, head=len(ENCODING))]
    if table.avro:
        found = [
            [(sign or b"") + (number or b"") for sign, number in zip(*found[n : n + 2], strict=True)]
            for n in range(0, len(found), 2)
        ]
    return [_ranged(column, subject) for column in found]


def _times(parts: Sequence[bytes], subject: str) -> pa.Array:
    """Decode numbers of eight bytes that sort as bytes: big-endian, the sign turned round."""
    if any(len(part) != WORD for part in parts):
        raise damaged_row("has a key without a time", subject)
    stored = np.frombuffer(b"".join(parts), ">u8").astype(np.uint64) ^ np.uint64(1 << 63)
    return pa.array(stored.view(np.int64))


def _ranged(parts: Sequence[bytes | None], subject: str) -> pa.Array:
    """Decode numbers after a byte with their sign, big-endian."""
    if any(part is None or len(part) != 1 + WORD for part in parts):
        raise damaged_row("has a key without a number to sort by", subject)
    stored = np.frombuffer(b"".join(part or b"" for part in parts), np.uint8).reshape(-1, 1 + WORD)
    signs, numbers = stored[:, 0], np.ascontiguousarray(stored[:, 1:]).view(">i8").ravel().astype(np.int64)
    if (signs > _NULL).any() or ((signs == _NEGATIVE) != (numbers < 0))[signs < _NULL].any():
        raise damaged_row("has a number with another sign", subject)
    return pa.array(numbers, mask=signs == _NULL)


def _values(table: Table, values: Sequence[bytes], subject: str) -> pa.Array:
    if not table.avro:
        return decode_rows(table.value, values, subject=subject)
    written = {number: record_reader(of, table.value) for number, of in table.avro}
    return _records(table.value, values, subject, head=AVRO_HEAD, written=written)


def _columns(table: Table, of: StructType, rows: Sequence[bytes], subject: str, *, head: int) -> list[pa.Array]:
    """Return the fields of rows as arrays; before Avro are as many bytes as `head` says."""
    if table.avro:
        found: list[pa.Array] = _records(of, rows, subject, head=head).flatten()
        return found
    buffer = RowBuffer(rows, subject)
    return buffer.columns(of, buffer.all)


def _records(
    of: StructType, rows: Sequence[bytes], subject: str, *, head: int, written: Mapping[int, Read] | None = None
) -> pa.Array:
    """Decode records of Avro, each by the schema that it was written with; fields go by their names."""
    try:
        found, reader = [], record_reader(of)
        for row in rows:
            if not row.startswith(ENCODING):
                raise damaged_row("is not encoded as Avro", subject)
            read = reader if written is None else written.get(int.from_bytes(row[1:head], "little", signed=True))
            if read is None:
                raise damaged_row("names a schema that is not stored", subject)
            found.append(decode_record(read, row, head))
        return pa.array(found, arrow_type(of))
    except (ValueError, TypeError, OverflowError) as error:
        raise damaged_row(f"cannot be read as Avro: {error}", subject) from error
