"""Decode or encode one UnsafeRow, the form of Spark's rows, field by field; `engine.arrow` decodes many at once.

A row is a bit for each field that is null, a word of eight bytes for each field, and behind them what does not fit a
word. Nothing is believed: what does not lie within its row is refused.
"""

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType

# A number, a decimal without its point, bytes of a text; of a struct its fields, of an array its elements, of a map
# pairs of its entries.
Value: TypeAlias = "int | float | bytes | tuple[Value, ...] | list[Value] | None"

WORD: Final = 8
# Decimals of more digits take two words beside the others.
WORD_DIGITS_MAX: Final = 18
_WORD_BITS: Final = 64
WIDE_BYTES: Final = 16
# Where a value is that does not fit its word: how many bytes from the beginning of the row, over how many it has.
PLACE: Final = struct.Struct("<Q")
HALF: Final = 32
_LONG: Final = struct.Struct("<q")
_NUMBERS: Final[dict[str, struct.Struct]] = {
    "boolean": struct.Struct("?"),
    "byte": struct.Struct("b"),
    "short": struct.Struct("<h"),
    "integer": struct.Struct("<i"),
    "long": _LONG,
    "float": struct.Struct("<f"),
    "double": struct.Struct("<d"),
}
# Which are the same number in no two ways.
_WHOLE: Final = frozenset({"boolean", "byte", "short", "integer", "long"})
_IN_WORD: Final = _NUMBERS.keys() | {"date", "timestamp", "timestamp_ntz", "void"}


def null_bytes(fields: int) -> int:
    """Return how many bytes say which of a number of fields are null."""
    return -(-fields // _WORD_BITS) * WORD


def is_in_word(of: DataType) -> bool:
    """Return whether a value of a type is in the word of its field, as far as the type is known."""
    if isinstance(of, DecimalType):
        return of.precision <= WORD_DIGITS_MAX
    return isinstance(of, AtomType) and (of.name in _IN_WORD or of.name.startswith("interval "))


def encode_row(of: StructType, values: Sequence[int | bytes]) -> bytes:
    """Encode a row whose fields are numbers without a point, `boolean` or `binary`, and not null.

    Raises:
        ValueError: A number does not fit its type.
        KeyError: A type is none of these.
    """
    fixed, beside = bytearray(null_bytes(len(of.fields))), bytearray()
    begin = len(fixed) + WORD * len(of.fields)
    for field, value in zip(of.fields, values, strict=True):
        if field.type == AtomType("binary") and isinstance(value, bytes):
            fixed += PLACE.pack(begin + len(beside) << HALF | len(value))
            beside += value + bytes(-len(value) % WORD)
        elif isinstance(field.type, AtomType) and field.type.name in _WHOLE:
            try:
                fixed += _NUMBERS[field.type.name].pack(value).ljust(WORD, b"\0")
            except struct.error as error:
                raise ValueError(f"{value!r} is not a {field.type.name}") from error
        else:
            raise KeyError(field.type)
    return bytes(fixed + beside)


def decode_row(of: StructType, row: bytes) -> tuple[Value, ...]:
    """Decode the fields of a row of stored types: numbers, `binary`, decimals, structs, arrays, maps and `void`.

    Raises:
        ValueError: It cannot be such a row.
        KeyError: A type is none of these.
    """
    if len(row) % WORD:
        raise ValueError("is not as long as an UnsafeRow is")
    return _struct(of, row, 0, len(row))


def _struct(of: StructType, data: bytes, start: int, size: int) -> tuple[Value, ...]:
    fixed = null_bytes(len(of.fields))
    if size < fixed + WORD * len(of.fields):
        raise ValueError("is shorter than its fields")
    return tuple(
        None if _is_null(data, start, n) else _value(field.type, data, start + fixed + WORD * n, start, size)
        for n, field in enumerate(of.fields)
    )


def _is_null(data: bytes, at: int, number: int) -> bool:
    return bool(data[at + number // 8] >> number % 8 & 1)


def _value(of: DataType, data: bytes, at: int, start: int, size: int) -> Value:
    """Decode the value whose word, or number in an array, is at a place of a row or array from `start` on."""
    if isinstance(of, AtomType) and of.name in _NUMBERS:
        found: int | float = _NUMBERS[of.name].unpack_from(data, at)[0]
        return found
    if isinstance(of, DecimalType) and is_in_word(of):
        return int(_LONG.unpack_from(data, at)[0])
    if of == AtomType("void"):
        return None
    (place,) = PLACE.unpack_from(data, at)
    offset, length = place >> HALF, place & (1 << HALF) - 1
    if offset + length > size:
        raise ValueError("points beyond its end")
    if of != AtomType("binary") and not isinstance(of, DecimalType) and (offset | length) % WORD:
        raise ValueError("points into the middle of a word")
    return _beside(of, data, start + offset, length)


def _beside(of: DataType, data: bytes, at: int, length: int) -> Value:
    """Decode a value that does not fit a word."""
    match of:
        case AtomType("binary"):
            return data[at : at + length]
        case DecimalType():
            if not 0 < length <= WIDE_BYTES:
                raise ValueError("has a decimal of more than 16 bytes")
            return int.from_bytes(data[at : at + length], "big", signed=True)
        case StructType():
            return _struct(of, data, at, length)
        case ArrayType(element=element):
            return _array(element, data, at, length)
        case MapType():
            return _map(of, data, at, length)
    raise KeyError(of)


def _array(element: DataType, data: bytes, at: int, size: int) -> list[Value]:
    if size < WORD:
        raise ValueError("has an array without a length")
    (count,) = _LONG.unpack_from(data, at)
    if isinstance(element, AtomType) and element.name in _NUMBERS:
        width = _NUMBERS[element.name].size
    else:
        width = 1 if element == AtomType("void") else WORD
    header = WORD + null_bytes(count)
    if count < 0 or header + count * width > size:
        raise ValueError("has an array beyond its end")
    first = at + header
    return [
        None if _is_null(data, at + WORD, n) else _value(element, data, first + n * width, at, size)
        for n in range(count)
    ]


def _map(of: MapType, data: bytes, at: int, size: int) -> list[Value]:
    if size < WORD:
        raise ValueError("has a map without a size")
    (keys_size,) = _LONG.unpack_from(data, at)
    rest = size - WORD - keys_size
    if keys_size < 0 or keys_size % WORD or rest < 0:
        raise ValueError("has a map beyond its end")
    keys = _array(of.key, data, at + WORD, keys_size)
    values = _array(of.value, data, at + WORD + keys_size, rest)
    if len(keys) != len(values) or None in keys:
        raise ValueError("has a map whose keys are not one for each value")
    return list(zip(keys, values, strict=True))
