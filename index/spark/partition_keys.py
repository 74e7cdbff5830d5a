"""In which partition a key of state is: Spark's Murmur3 of the columns by which its operator is shuffled (0010).

A stateful operator reads its rows shuffled by its grouping or joining columns, and keeps the state of a row in the
partition of the row. A key of its stores has these columns and perhaps others: which, is a rule for each operator.
"""

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, Final, TypeAlias

import msgspec

from index.errors import PartitionKeyError
from index.spark.avro import decode_record, record_reader
from index.spark.query_logs import DEFAULT_STORE
from index.spark.schema import (
    ArrayType,
    AtomType,
    DataType,
    DecimalType,
    Field,
    KeyForm,
    MapType,
    StateSchema,
    StructType,
)
from index.spark.unsafe_row import WORD, WORD_DIGITS_MAX, decode_row

# --- Murmur3

SEED: Final = 42
_MASK: Final = 0xFFFFFFFF
_INT: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<f")
_LONG: Final = struct.Struct("<q")
_DOUBLE: Final = struct.Struct("<d")
# What Java makes of every number that is none.
FLOAT_NAN: Final = 0x7FC00000
DOUBLE_NAN: Final = 0x7FF8000000000000
_EXACT: Final = Context(prec=40)
_INTS: Final = frozenset({"boolean", "byte", "short", "integer"})


def hash_values(types: Iterable[DataType], values: Iterable[Any], seed: int = SEED) -> int:
    """Hash typed columns as Spark's `hash` does, one after the other, each with the hash before it as its seed (H1).

    Types are those of `stored_type`, values as `unsafe_row` or `avro` decode them; a hash is 32 bits without a sign.

    Source:
        Spark's `Murmur3Hash` and `Murmur3_x86_32`; 0010, H1 to H3.
    """
    for of, value in zip(types, values, strict=True):
        if value is not None:
            seed = _hash(of, value, seed)
    return seed


def hash_bytes(data: bytes, seed: int, size: int | None = None) -> int:
    """Hash bytes: words of four, and each byte after them as a number of its own with its sign (H2).

    The size is of them all, if others before these are in the seed already.
    """
    whole = len(data) & ~3
    for (word,) in _INT.iter_unpack(data[:whole]):
        seed = _mix(seed, word)
    for byte in data[whole:]:
        seed = _mix(seed, byte - ((byte & 0x80) << 1) & _MASK)
    return _finish(seed, len(data) if size is None else size)


def partition_of(hashed: int, partitions: int) -> int:
    """Return the partition of a hash of 32 bits: of it as a number with a sign, never negative (H1)."""
    return (hashed - ((hashed & 1 << 31) << 1)) % partitions


def _hash(of: DataType, value: Any, seed: int) -> int:  # noqa: ANN401  # of any type
    types: Iterable[DataType]
    match of:
        case AtomType(name):
            return _ATOMS[name](value, seed)
        case DecimalType(precision=precision, scale=scale):
            number = int(value.scaleb(scale, _EXACT)) if isinstance(value, Decimal) else value
            if precision <= WORD_DIGITS_MAX:
                return _hash_long(number, seed)
            # The bytes of the number without its point, as few as hold it and its sign.
            size = (number if number >= 0 else ~number).bit_length() // 8 + 1
            return hash_bytes(number.to_bytes(size, "big", signed=True), seed)
        case StructType(fields=fields):
            types, values = (field.type for field in fields), value.values() if isinstance(value, dict) else value
        case ArrayType(element=element):
            types, values = (element,) * len(value), value
        case MapType(key=key, value=element):
            types, values = (key, element) * len(value), (each for entry in value for each in entry)
        case _:
            raise KeyError(of)
    return hash_values(types, values, seed)


def _hash_int(value: int, seed: int) -> int:
    return _finish(_mix(seed, value & _MASK), 4)


def _hash_long(value: int, seed: int) -> int:
    return _finish(_mix(_mix(seed, value & _MASK), value >> 32 & _MASK), 8)


def _hash_float(value: float, seed: int) -> int:
    return _hash_int(FLOAT_NAN if math.isnan(value) else _INT.unpack(_FLOAT.pack(value or 0.0))[0], seed)


def _hash_double(value: float, seed: int) -> int:
    return _hash_long(DOUBLE_NAN if math.isnan(value) else _LONG.unpack(_DOUBLE.pack(value or 0.0))[0], seed)


def _mix(seed: int, word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK
    word = (word << 15 | word >> 17) * 0x1B873593 & _MASK
    seed ^= word
    return ((seed << 13 | seed >> 19) * 5 + 0xE6546B64) & _MASK


def _finish(seed: int, size: int) -> int:
    seed ^= size
    seed = (seed ^ seed >> 16) * 0x85EBCA6B & _MASK
    seed = (seed ^ seed >> 13) * 0xC2B2AE35 & _MASK
    return seed ^ seed >> 16


_ATOMS: Final[dict[str, Callable[[Any, int], int]]] = {
    **dict.fromkeys(_INTS, _hash_int),
    "long": _hash_long,
    "float": _hash_float,
    "double": _hash_double,
    "binary": hash_bytes,
}

# --- The rule of each operator

# Operators whose keys are the columns by which they are shuffled.
_WHOLE: Final = frozenset(
    {"stateStoreSave", "dedupe", "dedupeWithinWatermark", "flatMapGroupsWithState", "applyInPandasWithState"}
)
_SESSION: Final = "sessionWindowStateStoreSaveExec"
_JOIN: Final = "symmetricHashJoin"
# What a join keeps, behind the side of it: whether a number or a time follows the columns in the key.
_JOIN_TABLES: Final = {
    "keyToNumValues": False,
    "keyWithIndexToValue": True,
    "keyWithTsToValues": True,
    "tsWithKey": True,
}
_TRANSFORM: Final = frozenset(
    {"transformWithStateExec", "transformWithStateInPandasExec", "transformWithStateInPySparkExec"}
)
# Of transformWithState: what is kept beside a variable, by how its name begins.
_BESIDE: Final = ("$min_", "$count_", "$rowCounter_")
_EXPIRY: Final = "$ttl_"
_TIMERS: Final = ("$procTimers_", "$eventTimers_")
_BY_TIME: Final = "timestampToKey"

# What a type is stored as in a row, where it is not a type of its own.
_STORED: Final = {
    r"string": "binary",
    r"date|interval (year|month|year to month)": "integer",
    r"timestamp|timestamp_ntz|time\([0-9]\)|interval (day|hour|minute|second)( to (hour|minute|second))?": "long",
}
_KNOWN: Final = _ATOMS.keys() | {"void"}
_COLLATED: Final = "string with a collation"
LENGTH_BYTES: Final = 4
ENCODING: Final = b"\0"
# Before Avro: how it is encoded and, but for what leads a key, two bytes with its schema.
AVRO_HEAD: Final = 3
_UPGRADE: Final = "a newer tidemark may know it; `restore` and `convert` keep the partitions as they are"


class KeyRule(msgspec.Struct, frozen=True, kw_only=True):
    """By which columns the keys of one column family of a store were given to partitions."""

    operator: int
    # As Spark calls it.
    operator_name: str
    store: str
    family: str
    # In words.
    rule: str
    # How keys are encoded.
    form: KeyForm
    # The part of a key that has the columns: whether it is what leads, and its fields, as stored types.
    is_first: bool
    row: StructType
    # They are as many of its first fields; or, within, the first field of the struct that is its first one.
    count: int
    is_within: bool = False
    is_avro: bool = False

    @property
    def subject(self) -> str:
        """Name the column family for an error."""
        family = "" if self.family == DEFAULT_STORE else f", column family {self.family}"
        return f"operator {self.operator} ({self.operator_name}), store {self.store}{family}"

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns that are hashed."""
        of = self.row.fields[0].type if self.is_within and self.row.fields else self.row
        return of.fields[: self.count] if isinstance(of, StructType) else ()

    def cut(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return of each key, without the number of its family, the part that has the columns, as it is encoded.

        Raises:
            ValueError: A key has no such parts.
        """
        return cut_keys(self.form, keys)[0 if self.is_first else 1]

    def decode(self, part: bytes) -> Sequence[Any]:
        """Decode the columns from that part of a key, as types that are stored. ValueError: it has others."""
        if not part.startswith(ENCODING):
            raise ValueError("is not encoded as a row of state")
        values: Any
        if self.is_avro:
            head = len(ENCODING) if self.is_first else AVRO_HEAD
            values = tuple(decode_record(record_reader(self.row), part, head).values())
        else:
            values = decode_row(self.row, part[len(ENCODING) :])
        if self.is_within:
            values = values[0].values() if isinstance(values[0], dict) else values[0]
            if values is None:
                raise ValueError("has no columns to hash")
        return tuple(values)[: self.count]

    def partition_of(self, key: bytes, partitions: int) -> int:
        """Return the partition of a key among a number of them. Raises as `hash_of`."""
        return partition_of(self.hash_of(key), partitions)

    def hash_of(self, key: bytes) -> int:
        """Return the hash of the columns of a key, 32 bits without a sign.

        Raises:
            PartitionKeyError: The key does not fit its schema (H8).
        """
        try:
            (part,) = self.cut([key])
            return hash_values((field.type for field in self.fields), self.decode(part))
        except (ValueError, struct.error) as error:
            reason = f"has a key that does not fit its schema: {error}; it is {key[:64].hex()}"
            raise PartitionKeyError(reason, subject=self.subject, hint="restore the state from a backup") from error


# A rule in words, the places of the fields of a key that it takes, and in how many structs the columns are there.
_Columns: TypeAlias = tuple[str, tuple[int, ...], int]


def cut_keys(form: KeyForm, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Cut keys into the part of the fields that are first, and the row of the others; of one row the first is empty.

    Raises:
        ValueError: The first part of a key is longer than the key.
    """
    match form.form:
        case "row":
            return [b""] * len(keys), list(keys)
        case "time_first":
            return [key[:WORD] for key in keys], [key[WORD:] for key in keys]
        case "time_last":
            return [key[-WORD:] for key in keys], [key[:-WORD] for key in keys]
    cuts = [LENGTH_BYTES + int.from_bytes(key[:LENGTH_BYTES], "little", signed=True) for key in keys]
    both = [*zip(keys, cuts, strict=True)]
    if not all(LENGTH_BYTES <= cut <= len(key) for key, cut in both):
        raise ValueError("has a key whose first part does not fit into it")
    return [key[LENGTH_BYTES:cut] for key, cut in both], [key[cut:] for key, cut in both]


def choose_key_rule(
    operator: int,
    operator_name: str,
    store: str,
    schema: StateSchema,
    form: KeyForm | None,
    *,
    variables: Mapping[str, str],
    is_avro: bool = False,
) -> KeyRule:
    """Choose by which columns the keys of a column family were given to partitions (H4 to H7).

    How its keys are encoded is its `form`; None: in one that is not known. `variables` are the types of the state
    variables of the operator, by name.

    Raises:
        PartitionKeyError: The operator, the family, the form or a type of the key is not known (H8).
    """
    fields, form_known = schema.key.fields, form or KeyForm()
    found = _find_columns(operator_name, store, schema.family, len(fields), variables)
    rule, wanted, depth = found or ("", (), 0)
    is_first = form_known.form == "prefix" and wanted == form_known.first[: len(wanted)]
    rest = tuple(place for place in range(len(fields)) if place not in form_known.first)
    places = form_known.first if is_first else rest
    row = StructType(tuple(_stored_field(fields[place]) for place in places))
    chosen = KeyRule(
        operator=operator,
        operator_name=operator_name,
        store=store,
        family=schema.family,
        rule=rule,
        form=form_known,
        is_first=is_first,
        row=row,
        count=len(wanted),
        is_within=depth > 1,
        is_avro=is_avro,
    )
    unknown = _find_unknown(row)
    is_there = wanted == places[: len(wanted)] and len(chosen.fields) == len(wanted) and bool(wanted)
    if depth:
        is_there = is_there and all(isinstance(field.type, StructType) for field in chosen.fields)
    if form is None:
        reason = "encodes its keys in a form that is not known"
    elif found is None:
        reason = "is of an operator, or a table of one, whose partition key is not known"
    elif not is_there:
        reason = f"has keys of {len(fields)} fields in the form {form.form}, and {rule} is not a part of them"
    elif unknown is not None:
        reason = f"has a key with the type {unknown}, whose hash is not known"
    elif is_avro and not _is_avro(row):
        reason = "has a key of a type that Spark does not write as Avro"
    else:
        return chosen
    raise PartitionKeyError(reason, subject=chosen.subject, hint=_UPGRADE)


def _find_columns(
    operator_name: str, store: str, family: str, count: int, variables: Mapping[str, str]
) -> _Columns | None:
    whole: _Columns = "the whole key", tuple(range(count)), 0
    shorter: _Columns = "the key without its last field", tuple(range(count - 1)), 0
    if operator_name in _WHOLE:
        return whole
    if operator_name == _SESSION:
        return shorter
    if operator_name == _JOIN:
        table = (store if family == DEFAULT_STORE else family).removeprefix("left-").removeprefix("right-")
        return None if table not in _JOIN_TABLES else shorter if _JOIN_TABLES[table] else whole
    return _find_transform_columns(family, whole, variables) if operator_name in _TRANSFORM else None


def _find_transform_columns(family: str, whole: _Columns, variables: Mapping[str, str]) -> _Columns | None:
    first: _Columns = "the first field of the key", (0,), 1
    second: _Columns = "the second field of the key", (1,), 1
    if family.startswith(_TIMERS):
        return second if family.endswith(_BY_TIME) else first
    if family.startswith(_EXPIRY):
        is_map = variables.get(family.removeprefix(_EXPIRY)) == "MapState"
        return ("the first field of the second field of the key", (1,), 2) if is_map else second
    if family.startswith(_BESIDE):
        return whole
    return {"MapState": first, "ValueState": whole, "ListState": whole}.get(variables.get(family, ""))


def stored_type(of: DataType) -> DataType:
    """Return the type that has the same bytes in a row and the same hash, which of a text are its bytes (H3)."""
    match of:
        case StructType(fields=fields):
            return StructType(tuple(map(_stored_field, fields)))
        case ArrayType(element=element, contains_null=contains_null):
            return ArrayType(stored_type(element), contains_null)
        case MapType(key=key, value=value, value_contains_null=contains_null):
            return MapType(stored_type(key), stored_type(value), contains_null)
        case AtomType(name):
            return AtomType(next((stored for kind, stored in _STORED.items() if re.fullmatch(kind, name)), name))
        case _:
            return of


def _stored_field(field: Field) -> Field:
    of = AtomType(_COLLATED) if field.is_collated else stored_type(field.type)
    return Field(field.name, of, field.nullable)


def _find_unknown(of: DataType) -> str | None:
    """Return the first type that has no hash here, if there is one, by its name."""
    match of:
        case StructType(fields=fields):
            return next((name for field in fields if (name := _find_unknown(field.type))), None)
        case ArrayType(element=element):
            return _find_unknown(element)
        case MapType(key=key, value=value):
            return _find_unknown(key) or _find_unknown(value)
        case AtomType(name):
            return None if name in _KNOWN else name
        case _:
            return None


def _is_avro(of: StructType) -> bool:
    try:
        record_reader(of)
    except KeyError:
        return False
    return True
