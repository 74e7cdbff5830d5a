"""Avro as Spark writes it into a state store: the records of a schema, field by field, without their schema.

Every field is a union of null and its type, in this order, but for one that is always null and takes no byte. So are
structs, arrays and maps inside of arrays and maps; the others there are of their type alone.
"""

import functools
import struct
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Final, TypeAlias

from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType

# Takes the bytes and where to begin; returns a value and where it ends.
Read: TypeAlias = Callable[[bytes, int], tuple[Any, int]]

_VARINT_BYTES_MAX: Final = 10
_MORE: Final = 0x80
# More digits than sixteen bytes have.
_EXACT: Final = Context(prec=40)
# With their binary digits.
_FRACTIONS: Final[dict[DataType | None, int]] = {AtomType("float"): 24, AtomType("double"): 53}


@functools.cache
def record_reader(of: StructType, shown: DataType | None = None) -> Read:
    """Return what reads a record as a dict by field name; numbers for times and dates, pairs for maps.

    What it returns raises ValueError for what is no such record. Where `shown`, a newer schema, has a float or a double
    for a whole number, it returns that, rounded; a decimal keeps its digits, and has the newer scale, as in Spark.

    Raises:
        KeyError: Spark writes no Avro of such a type.
    """
    types = {field.name: field.type for field in shown.fields} if isinstance(shown, StructType) else {}
    readers = [(field.name, _field_reader(field.type, types.get(field.name))) for field in of.fields]

    def read(data: bytes, at: int) -> tuple[Any, int]:
        found = {}
        for name, field in readers:
            found[name], at = field(data, at)
        return found, at

    return read


def decode_record(read: Read, data: bytes, at: int = 0) -> Any:  # noqa: ANN401  # of any type
    """Decode the one record that is in some bytes from a place on.

    Raises:
        ValueError: It is none, or the bytes go on.
    """
    found, end = read(data, at)
    if end != len(data):
        raise ValueError(f"goes on for {len(data) - end} bytes after its end")
    return found


def _field_reader(of: DataType, shown: DataType | None) -> Read:
    return (lambda _, at: (None, at)) if of == AtomType("void") else _optional(_reader(of, shown))


def _inner_reader(of: DataType, shown: DataType | None) -> Read:
    """Return what reads an element of an array, or a value of a map."""
    read = _reader(of, shown)
    return _optional(read) if isinstance(of, StructType | ArrayType | MapType) else read


def _reader(of: DataType, shown: DataType | None) -> Read:
    match of:
        case StructType():
            return record_reader(of, shown)
        case ArrayType(element=element):
            return _blocks(_inner_reader(element, shown.element if isinstance(shown, ArrayType) else None))
        case MapType(key=AtomType("string"), value=value):
            return _blocks(_pair(_inner_reader(value, shown.value if isinstance(shown, MapType) else None)))
        case DecimalType(precision=precision, scale=scale):
            scale = shown.scale if isinstance(shown, DecimalType) else scale
            return _decimal((10**precision).bit_length() // 8 + 1, scale)
        case AtomType(name):
            read = _ATOMS[name]
            return _rounded(read, _FRACTIONS[shown]) if read is _number and shown in _FRACTIONS else read
        case _:
            raise KeyError(of)


def _rounded(read: Read, digits: int) -> Read:
    """Round at once to as many binary digits, half to even: a float that is made of a double was rounded twice."""

    def rounded(data: bytes, at: int) -> tuple[float, int]:
        found, at = read(data, at)
        unit = 1 << max(0, abs(found).bit_length() - digits)
        return float(round(Fraction(found, unit)) * unit), at

    return rounded


def _optional(read: Read) -> Read:
    def optional(data: bytes, at: int) -> tuple[Any, int]:
        branch, at = _number(data, at)
        if branch not in {0, 1}:
            raise ValueError(f"has branch {branch} of a union of two")
        return read(data, at) if branch else (None, at)

    return optional


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read seven bits from each byte, the lowest first, then the sign out of the lowest bit."""
    coded = 0
    for number, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        coded |= (byte & ~_MORE) << (7 * number)
        if byte < _MORE:
            if coded >> 64:
                break
            return (coded >> 1) ^ -(coded & 1), at + number + 1
    raise ValueError("has a number that does not end")


def _fixed(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if not 0 <= size <= len(data) - at:
        raise ValueError(f"has {len(data) - at} bytes left where {size} belong")
    return data[at : at + size], at + size


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _number(data, at)
    return _fixed(data, at, size)


def _text(data: bytes, at: int) -> tuple[str, int]:
    found, at = _bytes(data, at)
    return found.decode(), at


def _boolean(data: bytes, at: int) -> tuple[bool, int]:
    found, at = _fixed(data, at, 1)
    return found != b"\0", at


def _float(form: struct.Struct) -> Read:
    def read(data: bytes, at: int) -> tuple[float, int]:
        found, at = _fixed(data, at, form.size)
        return form.unpack(found)[0], at

    return read


def _decimal(size: int, scale: int) -> Read:
    def read(data: bytes, at: int) -> tuple[Decimal, int]:
        found, at = _fixed(data, at, size)
        return Decimal(int.from_bytes(found, "big", signed=True)).scaleb(-scale, _EXACT), at

    return read


def _pair(read: Read) -> Read:
    def pair(data: bytes, at: int) -> tuple[tuple[str, Any], int]:
        key, at = _text(data, at)
        value, at = read(data, at)
        return (key, value), at

    return pair


def _blocks(read: Read) -> Read:
    """Read blocks up to an empty one, each after the number of its elements; behind a negative one is a size."""

    def blocks(data: bytes, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            count, at = _number(data, at)
            if count < 0:
                count, (_, at) = -count, _number(data, at)
            if not count:
                return found, at
            for _ in range(count):  # each takes a byte at least: too many end with the bytes
                value, at = read(data, at)
                found.append(value)

    return blocks


_ATOMS: Final[dict[str, Read]] = {
    **dict.fromkeys(("byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz"), _number),
    "float": _float(struct.Struct("<f")),
    "double": _float(struct.Struct("<d")),
    "boolean": _boolean,
    "string": _text,
    "binary": _bytes,
}
