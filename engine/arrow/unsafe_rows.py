"""Spark's UnsafeRow, the form of rows in a state store, as Arrow arrays: whole columns at a time.

A row is a bit for each field that is null, a word of eight bytes for each field, and what does not fit a word behind
them; such a field's word says where, from the beginning of the row, and how long. Nested rows, arrays and maps are
encoded the same way within. All of it is little-endian and at multiples of eight bytes, so that many rows laid one
behind the other are one array of words, and a column is picked out of it at once.

In a state store the byte before each row says how it is encoded: 0 for this form.

Nothing is believed: every offset and size has to lie within its row, and texts one behind the other, or it is damage.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.errors import DamagedError
from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType
from index.spark.unsafe_row import WIDE_BYTES, WORD, WORD_DIGITS_MAX

ATOMS: Final[dict[str, pa.DataType]] = {
    "void": pa.null(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_VOID: Final = AtomType("void")
# Of days to seconds: `interval day to second` and its parts. Those of months PySpark does not take.
_INTERVAL: Final = "interval "
_INTERVAL_PARTS: Final = {"day": 0, "hour": 1, "minute": 2, "second": 3}


@functools.cache
def arrow_type(of: DataType) -> pa.DataType:
    """Return Arrow's type. KeyError: rows with such a field cannot be Arrow arrays, or Spark does not take them."""
    match of:
        case StructType(fields=fields):
            return pa.struct([_arrow_field(f.name, f.type, nullable=f.nullable) for f in fields])
        case ArrayType(element=element, contains_null=contains_null):
            return pa.list_(_arrow_field("element", element, nullable=contains_null))
        case MapType(key=key, value=value, value_contains_null=contains_null) if key != _VOID:
            entry = _arrow_field("key", key, nullable=False), _arrow_field("value", value, nullable=contains_null)
            return pa.map_(*entry)
        case DecimalType(precision=precision, scale=scale):
            if not 0 <= scale <= precision:
                raise KeyError(of)
            return pa.decimal128(precision, scale)
        case AtomType(name=name):
            if not name.startswith(_INTERVAL):
                return ATOMS[name]
            interval_parts(name)
            return pa.duration("us")
    raise KeyError(of)  # such as `map()`: no key of Arrow's is always null


def _arrow_field(name: str, of: DataType, *, nullable: bool) -> pa.Field:
    """Return a field of Arrow's, which has no nulls that are never null: Spark has some in `array()`."""
    return pa.field(name, arrow_type(of), nullable=nullable or of == _VOID)


def interval_parts(name: str) -> list[int]:
    """Return the parts that an interval of days to seconds has, from 0 for days on. KeyError: it has others."""
    return [_INTERVAL_PARTS[part] for part in name.removeprefix(_INTERVAL).split(" to ")]


Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# One byte before each row, and as many between two: then each row begins at a word.
_GAP: Final = bytes(WORD - 1)
_WORD_BITS: Final = 64

_TEXTS: Final = frozenset({"string", "binary"})
_SIGN_BIT: Final = 0x80
# The largest position in Arrow's arrays.
_BUFFER_BYTES_MAX: Final = 2**31 - 1


def damaged_row(message: str, subject: str) -> DamagedError:
    """Return the error for a row that cannot be what a writer wrote."""
    hint = "the state does not fit the schema that is stored beside it; read it with `rows=bytes`"
    return DamagedError(f"a row {message}", operation="decode", subject=subject, hint=hint)


class Region(msgspec.Struct, frozen=True):
    """Where many rows, or arrays, are in the buffer: byte positions at words, and sizes."""

    at: Ints
    size: Ints
    # False where there is none: its position and size mean nothing. None: all are there.
    there: Bools | None = None

    def __len__(self) -> int:
        return len(self.at)


class RowBuffer:
    """Many encoded rows, one behind the other, as RocksDB has them: each with its first byte.

    DamagedError: one is not encoded as an UnsafeRow.
    """

    def __init__(self, rows: Sequence[bytes] | Iterable[bytes], subject: str) -> None:
        rows = rows if isinstance(rows, list) else list(rows)
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        strides = sizes + len(_GAP)
        at = np.cumsum(strides) - strides + WORD
        self._hold(lambda: _GAP.join([b"", *rows, b"\0"]), at, sizes, int(strides.sum()), subject)

    @classmethod
    def of_matrix(cls, octets: npt.NDArray[np.uint8], begins: Ints, sizes: Ints, subject: str) -> Self:
        """Lay out the rows of which each line of a matrix has one, from a byte on. Raises as the class."""
        width, first = int(sizes.max(initial=0)), int(begins.max(initial=0))
        stride = WORD * (1 + -(-width // WORD))

        def lay_out() -> npt.NDArray[np.uint8]:
            laid = np.zeros((len(sizes), stride), np.uint8)
            if (begins == first).all():
                laid[:, WORD - 1 :][:, :width] = octets[:, first : first + width]
            else:
                places = np.minimum(begins[:, None] + np.arange(width), octets.shape[1] - 1)
                laid[:, WORD - 1 :][:, :width] = np.take_along_axis(octets, places, 1)
            return laid.ravel()

        made = cls.__new__(cls)
        made._hold(lay_out, np.arange(len(sizes)) * stride + WORD, sizes, len(sizes) * stride, subject)  # noqa: SLF001
        return made

    def _hold(
        self, lay_out: Callable[[], bytes | npt.NDArray[np.uint8]], at: Ints, sizes: Ints, bytes_: int, subject: str
    ) -> None:
        self._damage = functools.partial(damaged_row, subject=subject)
        if len(sizes) and (int(sizes.min()) < 1 or ((sizes - 1) % WORD).any()):
            raise self._damage("is not as long as an UnsafeRow is")
        if bytes_ > _BUFFER_BYTES_MAX - 2 * WORD:
            raise self._damage("takes more than Arrow's positions reach")
        self._data = lay_out()
        self._words = np.frombuffer(self._data, "<i8")
        if np.frombuffer(self._data, np.uint8)[at - 1].any():
            raise self._damage("is not encoded as an UnsafeRow")
        self.all = Region(at, sizes - 1)

    def columns(self, of: StructType, region: Region) -> list[pa.Array]:
        header = (len(of.fields) + _WORD_BITS - 1) // _WORD_BITS
        self._check(region.size >= WORD * (header + len(of.fields)), region.there, "is shorter than its fields")
        first = region.at // WORD
        columns = []
        for number, field in enumerate(of.fields):
            nulls = self._word(first + number // _WORD_BITS, region.there) >> (number % _WORD_BITS) & 1
            there = nulls == 0 if region.there is None else (nulls == 0) & region.there
            stored = self._word(first + header + number, region.there)
            columns.append(self._column(field.type, stored, region, None if there.all() else there))
        return columns

    def structs(self, of: StructType, region: Region) -> pa.Array:
        columns = self.columns(of, region)
        return pa.Array.from_buffers(arrow_type(of), len(region), [_bitmap(region.there)], children=columns)

    def _column(self, of: DataType, stored: npt.NDArray[Any], parent: Region, there: Bools | None) -> pa.Array:
        if isinstance(of, StructType | ArrayType | MapType):
            return self._nested(of, self._within(stored, parent, there))
        if isinstance(of, DecimalType):
            if of.precision <= WORD_DIGITS_MAX:
                return _decimal(of, stored.astype(np.int64), there)
            return self._wide_decimal(of, self._within(stored, parent, there, aligned=False))
        if of.name in _TEXTS:
            return self._text(of, self._within(stored, parent, there, aligned=False))
        return _number(of, stored, there)

    def _within(self, stored: npt.NDArray[Any], parent: Region, there: Bools | None, *, aligned: bool = True) -> Region:
        """Return what words point to: the offset from the parent's start in the upper half, the size in the lower."""
        words = stored.view(np.uint64)
        offset, size = (words >> np.uint64(32)).astype(np.int64), (words & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._check(offset + size <= parent.size, there, "points beyond its end")
        if aligned:
            self._check((offset | size) % WORD == 0, there, "points into the middle of a word")
        return Region(parent.at + offset, size, there)

    def _check(self, holds: Bools, there: Bools | None, message: str) -> None:
        if not (holds if there is None else holds | ~there).all():
            raise self._damage(message)

    def _word(self, places: Ints, there: Bools | None) -> Ints:
        """Return these words; 0, as the buffer begins, where there is nothing."""
        return self._words[places if there is None else np.where(there, places, 0)]

    def _at(self, region: Region) -> Ints:
        """Positions to read at; the beginning of the buffer where there is nothing."""
        return region.at if region.there is None else np.where(region.there, region.at, 0)

    # --- what the words point to

    def _text(self, of: AtomType, region: Region) -> pa.Array:
        """Texts or bytes: the buffer is cut into them and what is between, and they are taken out."""
        size = region.size if region.there is None else np.where(region.there, region.size, 0)
        ends = np.maximum.accumulate(np.where(size > 0, region.at + size, 0)) if len(size) else size
        self._check(region.at[1:] >= ends[:-1], size[1:] > 0, "has texts that are not one behind the other")
        cuts = np.empty(2 * len(size) + 1, np.int32)
        cuts[0] = 0
        cuts[2::2] = ends
        cuts[1::2] = ends - size
        pieces = pa.Array.from_buffers(
            arrow_type(of), 2 * len(size), [None, pa.py_buffer(cuts), pa.py_buffer(self._data)]
        )
        places = pa.array(
            np.arange(1, 2 * len(size), 2), mask=None if region.there is None else ~region.there, type=pa.int64()
        )
        return pieces.take(places)

    def _wide_decimal(self, of: DecimalType, region: Region) -> pa.Array:
        """Decode numbers of up to 16 bytes: big-endian, reversed and widened."""
        there = region.there
        self._check((region.size > 0) & (region.size <= WIDE_BYTES), there, "has a decimal of more than 16 bytes")
        at, size = self._at(region), region.size if there is None else np.where(there, region.size, 1)
        octets = np.frombuffer(self._data, np.uint8)
        steps = np.arange(WIDE_BYTES)
        places = at[:, None] + size[:, None] - 1 - steps
        sign = np.where(octets[at] >= _SIGN_BIT, 0xFF, 0).astype(np.uint8)
        values = np.where(steps < size[:, None], octets[np.maximum(places, 0)], sign[:, None])
        return pa.Array.from_buffers(
            arrow_type(of), len(at), [_bitmap(there), pa.py_buffer(np.ascontiguousarray(values))]
        )

    def _nested(self, of: StructType | ArrayType | MapType, region: Region) -> pa.Array:
        if isinstance(of, StructType):
            return self.structs(of, region)
        if isinstance(of, ArrayType):
            counts, values = self._elements(of.element, region)
            return _list(arrow_type(of), counts, region.there, values)
        self._check(region.size >= WORD, region.there, "has a map without a size")
        keys_size = self._words[self._at(region) // WORD]
        rest = region.size - WORD - keys_size
        self._check((keys_size >= 0) & (keys_size % WORD == 0) & (rest >= 0), region.there, "has a map beyond its end")
        counts, keys = self._elements(of.key, Region(region.at + WORD, keys_size, region.there))
        others, values = self._elements(of.value, Region(region.at + WORD + keys_size, rest, region.there))
        if not np.array_equal(counts, others):
            raise self._damage("has a map with more keys than values, or fewer")
        if keys.null_count:
            raise self._damage("has a map with a key that is null")
        entry = pa.struct([arrow_type(of).key_field, arrow_type(of).item_field])
        entries = pa.Array.from_buffers(entry, len(keys), [None], children=[keys, values])
        return _list(arrow_type(of), counts, region.there, entries)

    def _elements(self, of: DataType, region: Region) -> tuple[Ints, pa.Array]:
        """Return how many elements each array has, and all of them: a count, a null bit for each, and the elements."""
        self._check(region.size >= WORD, region.there, "has an array without a length")
        at = self._at(region)
        counts = self._words[at // WORD]
        counts = counts if region.there is None else np.where(region.there, counts, 0)
        width = element_bytes(of)
        self._check((counts >= 0) & (counts <= region.size * WORD), region.there, "has an array of an unlikely length")
        header = WORD + (counts + _WORD_BITS - 1) // _WORD_BITS * WORD
        self._check(header + counts * width <= region.size, region.there, "has an array beyond its end")
        # One line for each element from here on: of which array it is, and the how many-th.
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        parent = Region(at[owner], region.size[owner])
        nulls = self._words[parent.at // WORD + 1 + number // _WORD_BITS] >> (number % _WORD_BITS) & 1
        place = parent.at + header[owner] + number * width
        stored = np.frombuffer(self._data, f"<i{width}")[place // width]
        return counts, self._column(of, stored, parent, None if not nulls.any() else nulls == 0)


def element_bytes(of: DataType) -> int:
    """Return the size of an element of an array: that of Arrow's, or a word that points to it."""
    if not isinstance(of, AtomType) or of.name in _TEXTS:
        return WORD
    return 1 if of.name in {"void", "boolean"} else int(arrow_type(of).bit_width) // 8


def decode_rows(of: StructType, rows: Sequence[bytes] | Iterable[bytes], *, subject: str) -> pa.Array:
    """Decode rows, as RocksDB has them, to structs of types that `arrow_type` knows, or raise DamagedError."""
    buffer = RowBuffer(rows, subject)
    return buffer.structs(of, buffer.all)


def decode_pairs(
    key: StructType, value: StructType, pairs: Iterable[tuple[bytes, bytes]], *, subject: str
) -> tuple[pa.Array, pa.Array]:
    """Decode keys and values as two arrays of structs, both from one buffer. Raises as `decode_rows`."""
    buffer = RowBuffer(list(itertools.chain.from_iterable(pairs)), subject)
    rows = buffer.all
    keys, values = (Region(rows.at[first::2], rows.size[first::2]) for first in (0, 1))
    return buffer.structs(key, keys), buffer.structs(value, values)


def _number(of: AtomType, stored: npt.NDArray[Any], there: Bools | None) -> pa.Array:
    if of.name == "void":
        return pa.nulls(len(stored))
    if of.name == "boolean":
        content = _bitmap(stored.astype(np.uint8).astype(np.bool_))
    else:
        # The bits are those of what Arrow has, in an integer of a word's size outside of arrays.
        content = pa.py_buffer(np.ascontiguousarray(stored.astype(f"<i{element_bytes(of)}")))
    return pa.Array.from_buffers(arrow_type(of), len(stored), [_bitmap(there), content])


def _decimal(of: DecimalType, unscaled: Ints, there: Bools | None) -> pa.Array:
    halves = np.empty((len(unscaled), 2), "<i8")
    halves[:, 0] = unscaled
    halves[:, 1] = unscaled >> 63
    return pa.Array.from_buffers(arrow_type(of), len(unscaled), [_bitmap(there), pa.py_buffer(halves)])


def _list(of: pa.DataType, counts: Ints, there: Bools | None, values: pa.Array) -> pa.Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.Array.from_buffers(of, len(counts), [_bitmap(there), pa.py_buffer(offsets)], children=[values])


def _bitmap(bits: Bools | None) -> pa.Buffer | None:
    return None if bits is None else pa.py_buffer(np.packbits(bits, bitorder="little"))
