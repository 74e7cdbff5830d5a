"""UnsafeRows written one by one, in the plainest way, for the reader of whole columns to be held against."""

import struct
from decimal import Decimal
from typing import Any

from engine.arrow.unsafe_rows import element_bytes
from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType

_WORDS = {
    "boolean": "?",
    "byte": "b",
    "short": "<h",
    "integer": "<i",
    "long": "<q",
    "float": "<f",
    "double": "<d",
    "date": "<i",
    "timestamp": "<q",
    "timestamp_ntz": "<q",
    "interval day to second": "<q",
}


def encode_row(of: StructType, values: tuple[Any, ...] | list[Any]) -> bytes:
    """A row as it is in RocksDB."""
    return b"\0" + _row(of, values)


def _row(of: StructType, values: tuple[Any, ...] | list[Any]) -> bytes:
    header = (len(of.fields) + 63) // 64 * 8
    types = [field.type for field in of.fields]
    return _slots(b"", header, types, [8] * len(types), values)


def _array(of: DataType, values: list[Any]) -> bytes:
    width = element_bytes(of)
    header = (len(values) + 63) // 64 * 8
    return _slots(struct.pack("<q", len(values)), header, [of] * len(values), [width] * len(values), values)


def _map(of: MapType, values: dict[Any, Any]) -> bytes:
    keys = _array(of.key, list(values))
    return struct.pack("<q", len(keys)) + keys + _array(of.value, list(values.values()))


def _slots(head: bytes, header: int, types: list[DataType], widths: list[int], values: Any) -> bytes:
    nulls = sum(1 << number for number, value in enumerate(values) if value is None)
    fixed = len(head) + header + sum(widths)
    fixed += -fixed % 8
    slots, behind = b"", b""
    for of, width, value in zip(types, widths, values, strict=True):
        slot, more = _slot(of, value, fixed + len(behind))
        slots += slot.ljust(width, b"\0")[:width]
        behind += more + bytes(-len(more) % 8)
    return (head + nulls.to_bytes(header, "little") + slots).ljust(fixed, b"\0") + behind


def _slot(of: DataType, value: Any, at: int) -> tuple[bytes, bytes]:
    wide = isinstance(of, DecimalType) and of.precision > 18
    if value is None:
        # Spark keeps space for a wide decimal that may come.
        return (struct.pack("<II", 0, at), bytes(16)) if wide else (b"", b"")
    if isinstance(of, DecimalType):
        unscaled = _unscaled(value, of.scale)
        if not wide:
            return struct.pack("<q", unscaled), b""
        data = unscaled.to_bytes((unscaled + (unscaled < 0)).bit_length() // 8 + 1, "big", signed=True)
        return struct.pack("<II", len(data), at), data.ljust(16, b"\0")
    if isinstance(of, AtomType) and of.name in _WORDS:
        return struct.pack(_WORDS[of.name], value), b""
    data = _behind(of, value)
    return struct.pack("<II", len(data), at), data


def _unscaled(value: Decimal, scale: int) -> int:
    """Without the arithmetic of decimals, which rounds to 28 digits."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    number: int = int("".join(map(str, digits))) * 10 ** (exponent + scale)
    return -number if sign else number


def _behind(of: DataType, value: Any) -> bytes:
    match of:
        case StructType():
            return _row(of, value)
        case ArrayType(element=element):
            return _array(element, value)
        case MapType():
            return _map(of, value)
        case _:
            return value.encode() if isinstance(value, str) else bytes(value)
