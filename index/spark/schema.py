"""The schema that Spark stores beside the rows of a state: what the fields of keys and values are.

`_metadata/schema` of a store's partition 0 is of version 1 or 2 and of the one table of the store; the files in
`_stateSchema/` are of version 3 and name every column family. Types are in them as Spark's JSON.
"""

import re
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from index.errors import UNDECODABLE, BatchLogError
from index.java_text import decode_json, decode_utf
from index.spark.query_logs import DEFAULT_STORE, version_of

VERSION_MAX: Final = 3
# Texts over 65,535 bytes are written in pieces; no schema is that long.
CHUNKS_MAX: Final = 1024
FAMILIES_MAX: Final = 32_768
# What a schema file may have.
SCHEMA_BYTES_MAX: Final = 64 * 1024 * 1024
# How many types may be inside of each other: whatever reads a type goes into it as deep.
TYPE_DEPTH_MAX: Final = 100

_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_DECIMAL: Final = re.compile(r"decimal\(\s*([0-9]{1,2})\s*,\s*(-?[0-9]{1,2})\s*\)")
# A text may have a collation, which its type says, or the metadata of a field does; one of them is by bytes.
_COLLATIONS: Final = "__COLLATIONS"
# In the metadata of a field: the delay of the watermark.
_WATERMARK: Final = "spark.watermarkDelayMs"
_COLLATE: Final = re.compile(r" collate (?!UTF8_BINARY(?![A-Za-z0-9_]))")
_TEXT: Final = re.compile(r"(var)?char\([0-9]{1,9}\)|string( collate [A-Za-z0-9_]+)?")
# Precision and scale of a decimal that says neither.
_DECIMAL_PLAIN: Final = (10, 0)
_DECIMAL_DIGITS_MAX: Final = 38


class AtomType(msgspec.Struct, frozen=True):
    """A type without parts, by the name that Spark's JSON has for it, such as `long`; every text is a `string`."""

    name: str


class DecimalType(msgspec.Struct, frozen=True):
    """A decimal number: its digits in all, and those after the point."""

    precision: int
    scale: int


class ArrayType(msgspec.Struct, frozen=True):
    """A list type."""

    element: "DataType"
    contains_null: bool


class MapType(msgspec.Struct, frozen=True):
    """A map; its keys are never null."""

    key: "DataType"
    value: "DataType"
    value_contains_null: bool


class Field(msgspec.Struct, frozen=True):
    """One field of a struct."""

    name: str
    type: "DataType"
    nullable: bool
    # Whether a text in it is compared by other rules than its bytes.
    is_collated: bool = False
    # Whether it is the time of events, of which the query has a watermark.
    has_watermark: bool = False


class StructType(msgspec.Struct, frozen=True):
    """A row, or a field that is one."""

    fields: tuple[Field, ...]


DataType: TypeAlias = AtomType | DecimalType | ArrayType | MapType | StructType


class StateSchema(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one column family, with the names that Spark gave the fields: several may have one name."""

    family: str = DEFAULT_STORE
    key: StructType
    value: StructType
    # How keys are encoded, as JSON; empty up to version 2, where the operator's metadata has it.
    key_encoder: str = ""
    # Which of the schemas that values of this family had it is: each value that is encoded as Avro names its own.
    value_id: int = 0


class KeyForm(msgspec.Struct, frozen=True):
    """How a key is encoded: some of its fields in one part, the others as a row of their own behind it or before it."""

    # `row`: all fields as one row; `prefix`: two rows, the first after its length; `range`: likewise, the first of
    # numbers that sort as bytes; `time_first` and `time_last`: a time of eight bytes before the row, or behind it.
    form: Literal["row", "prefix", "range", "time_first", "time_last"] = "row"
    # The places of the fields that are numbers or times, or that lead.
    first: tuple[int, ...] = ()


def decode_state_schema(data: bytes, *, subject: str = "schema") -> tuple[StateSchema, ...]:
    """Decode a schema file: one table up to version 2, and in version 3 one for each column family.

    Raises:
        BatchLogError: It is not what Spark writes.
        UnknownFormatError: It is of a newer version.
    """
    reader = _Reader(data, subject)
    version = version_of(reader.text(), VERSION_MAX, subject)
    if version == VERSION_MAX:
        found = [_read_family(reader, subject) for _ in range(reader.count(FAMILIES_MAX))]
    else:
        read = reader.text if version == 1 else reader.chunks
        found = [_schema(read(), read(), subject)]
    reader.check_end()
    return tuple(found)


def decode_type(json: str, *, subject: str = "schema") -> DataType:
    """Decode a type from Spark's JSON.

    Raises:
        BatchLogError: It is none, or deeper than any that is used.
    """
    try:
        return _type(msgspec.json.decode(json), subject, TYPE_DEPTH_MAX)
    except UNDECODABLE as error:
        raise BatchLogError(f"has a type that cannot be read: {error}", subject=subject) from error


def decode_key_form(schema: StateSchema, *, subject: str = "schema") -> KeyForm | None:
    """Decode how the keys of a column family are encoded; None for what is not read: of a newer Spark, or all a range.

    Raises:
        BatchLogError: It is not what Spark writes.
    """
    what = "has a key encoder that cannot be read"
    wire = decode_json(schema.key_encoder, _EncoderWire, BatchLogError, what, subject=subject)
    count = len(schema.key.fields)
    match wire.key_state_encoder_type.removesuffix("StateEncoderSpec"):
        case "NoPrefixKey":
            found = KeyForm()
        case "PrefixKeyScan":
            found = KeyForm("prefix", tuple(range(min(wire.num_cols_prefix_key, count + 1))))
        case "RangeKeyScan":
            found = KeyForm("range", wire.ordering_ordinals)
        case "TimestampAsPrefixKey":
            found = KeyForm("time_first", (count - 1,))
        case "TimestampAsPostfixKey":
            found = KeyForm("time_last", (count - 1,))
        case _:
            return None
    there = {*found.first} & {*range(count)}
    if found.form == "range" and len(found.first) == len(there) == count:
        return None
    if found.form != "row" and not 0 < len(found.first) == len(there) < count:
        raise BatchLogError(f"has {count} fields in a key, and leading ones {found.first}", subject=subject)
    return found


def with_unique_names(of: DataType) -> DataType:
    """Return the type with fields of one name numbered: `sum` and `sum` become `sum_0` and `sum_1`.

    The buffers of an aggregation have many fields of one name, and Arrow needs them to be unique.
    """
    match of:
        case StructType(fields=fields):
            named = zip(unique_names([field.name for field in fields]), fields, strict=True)
            return StructType(tuple(Field(name, with_unique_names(of.type), of.nullable) for name, of in named))
        case ArrayType(element=element, contains_null=contains_null):
            return ArrayType(with_unique_names(element), contains_null)
        case MapType(key=key, value=value, value_contains_null=contains_null):
            return MapType(with_unique_names(key), with_unique_names(value), contains_null)
        case _:
            return of


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names as they are where they are unique, others with a number that makes them so."""
    counts = Counter(names)
    taken = {name for name, count in counts.items() if count == 1}
    numbers = dict.fromkeys(counts, 0)
    found: list[str] = []
    for name in names:
        unique = name
        while counts[name] > 1 and (unique == name or unique in taken):
            unique = f"{name}_{numbers[name]}"
            numbers[name] += 1
        taken.add(unique)
        found.append(unique)
    return found


class _EncoderWire(msgspec.Struct, rename="camel"):
    key_state_encoder_type: str
    num_cols_prefix_key: Annotated[int, msgspec.Meta(ge=0)] = 0
    ordering_ordinals: tuple[int, ...] = ()


class _Reader:
    """A file as Java's DataInputStream reads it."""

    def __init__(self, data: bytes, subject: str) -> None:
        self._data, self._subject, self._at = data, subject, 0

    def text(self) -> str:
        try:
            found = decode_utf(self._data, self._at)
        except ValueError as error:
            raise BatchLogError(f"has a text that cannot be read: {error}", subject=self._subject) from error
        if found is None:
            raise self._short()
        text, self._at = found
        return text

    def number(self, form: struct.Struct) -> int:
        if len(self._data) < self._at + form.size:
            raise self._short()
        (found,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(found)

    def count(self, at_most: int) -> int:
        found = self.number(_INT)
        if not 0 <= found <= at_most:
            raise BatchLogError(f"counts {found} where at most {at_most} can be", subject=self._subject)
        return found

    def chunks(self) -> str:
        return "".join([self.text() for _ in range(self.count(CHUNKS_MAX))])

    def check_end(self) -> None:
        if self._at != len(self._data):
            raise BatchLogError(f"goes on for {len(self._data) - self._at} bytes after its end", subject=self._subject)

    def _short(self) -> BatchLogError:
        return BatchLogError("is cut short", subject=self._subject)


def _read_family(reader: _Reader, subject: str) -> StateSchema:
    family = reader.text()
    reader.number(_SHORT)  # which of the schemas of its keys it is: they never change
    key = reader.chunks()
    value_id = reader.number(_SHORT)
    value = reader.chunks()
    encoder = reader.chunks()
    reader.chunks()  # of the part of the key that is the user's own: it is in the key's schema
    found = _schema(key, value, subject)
    return msgspec.structs.replace(found, family=family, key_encoder=encoder, value_id=value_id)


def _schema(key_json: str, value_json: str, subject: str) -> StateSchema:
    key, value = (decode_type(json, subject=subject) for json in (key_json, value_json))
    if not isinstance(key, StructType) or not isinstance(value, StructType):
        raise BatchLogError("has a key or a value that is not a row", subject=subject)
    return StateSchema(key=key, value=value)


def _type(json: Any, subject: str, depth_max: int) -> DataType:  # noqa: ANN401  # whatever JSON can be
    if not depth_max:
        raise BatchLogError(f"has a type deeper than {TYPE_DEPTH_MAX}", subject=subject)
    match json:
        case str() as name:
            return _named(name)
        case {"type": "struct", "fields": list() as fields}:
            return StructType(tuple(_field(field, subject, depth_max - 1) for field in fields))
        case {"type": "array", "elementType": element, "containsNull": bool() as contains_null}:
            return ArrayType(_type(element, subject, depth_max - 1), contains_null)
        case {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": bool() as contains_null}:
            return MapType(_type(key, subject, depth_max - 1), _type(value, subject, depth_max - 1), contains_null)
        case {"type": str() as name}:
            # A type of a user's own, or one of a newer Spark: known by its name alone.
            return AtomType(name)
    raise BatchLogError(f"has a type that cannot be read: {str(json)[:80]}", subject=subject)


def _field(json: Any, subject: str, depth_max: int) -> Field:  # noqa: ANN401  # as above
    match json:
        case {"name": str() as name, "type": of, "nullable": bool() as nullable}:
            metadata = json.get("metadata")
            noted = metadata if isinstance(metadata, dict) else {}
            is_collated = _COLLATIONS in noted or bool(_COLLATE.search(str(of)))
            return Field(name, _type(of, subject, depth_max), nullable, is_collated, _WATERMARK in noted)
    raise BatchLogError(f"has a field that cannot be read: {str(json)[:80]}", subject=subject)


def _named(name: str) -> DataType:
    if _TEXT.fullmatch(name):
        return AtomType("string")
    if name == "decimal":
        return DecimalType(*_DECIMAL_PLAIN)
    m = _DECIMAL.fullmatch(name)
    if m is not None and 0 < int(m[1]) <= _DECIMAL_DIGITS_MAX:
        return DecimalType(int(m[1]), int(m[2]))
    return AtomType(name)
