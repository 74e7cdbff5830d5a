"""To which task of a job a key belongs: the hash of a job's layout, over values in plain Python (design 0010, T2)."""

import math
import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any, Final

from index.errors import PartitionKeyError
from index.snapshot.model import ScopeLayout
from index.spark.partition_keys import hash_values, partition_of, stored_type
from index.spark.schema import AtomType, DataType, DecimalType

# Spark's Murmur3 `hash` with its fixed seed, over the key columns in their order, `pmod` the number of tasks.
KEY_HASH: Final = "spark-hash-v1"
TASKS_MAX: Final = 100_000

# By the names of Spark's SQL, which a layout has, those of its JSON.
_ATOMS: Final = {
    "boolean": "boolean",
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    **{name: name for name in ("float", "double", "string", "binary", "date", "timestamp", "timestamp_ntz")},
}
_COLUMN: Final = re.compile(rf"(.+) ({'|'.join(_ATOMS)}|decimal\(([0-9]{{1,2}}),([0-9]{{1,2}})\))", re.DOTALL)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EXACT: Final = Context(prec=80)
_DIGITS_MAX: Final = 40
_SHOWN_MAX: Final = 100


class TaskKeys:
    """The key columns of a job, as its layout declares them."""

    def __init__(self, layout: ScopeLayout) -> None:
        """Read the types of the columns; `PartitionKeyError`: the hash of one, such as a struct, is not known here."""
        self.columns = layout.key_columns
        self._types = tuple(map(_type_of, layout.key_columns))
        self._stored = tuple(map(stored_type, self._types))

    def partition_of(self, values: Sequence[Any], tasks: int) -> int:
        """Return the task, among a number of them, of the values of all key columns in their order.

        A value is None, bool, int, float, str (or its bytes in UTF-8), bytes, Decimal, date, or datetime: with a time
        zone for a `timestamp`, without one for a `timestamp_ntz`.

        Raises:
            PartitionKeyError: They are not as many as there are columns, or one is not of its column's type.
        """
        if not isinstance(values, list | tuple) or len(values) != len(self.columns):
            raise PartitionKeyError(f"are not values of {', '.join(self.columns)}", subject=_show(values), hint=_HINT)
        stored = [
            None if value is None else _store(value, of, column)
            for value, of, column in zip(values, self._types, self.columns, strict=True)
        ]
        return partition_of(hash_values(self._stored, stored), tasks)


_HINT: Final = "the key function returns one value for each key column of the job, of its type"


def _type_of(column: str) -> DataType:
    found = _COLUMN.fullmatch(column)
    if found is None:
        hint = "a job whose keys are of such a type keeps its number of tasks"
        raise PartitionKeyError("has a type whose hash is not known here", subject=f"key column {column}", hint=hint)
    return DecimalType(int(found[3]), int(found[4])) if found[3] else AtomType(_ATOMS[found[2]])


def _store(value: Any, of: DataType, column: str) -> Any:  # noqa: ANN401  # of any type
    """Return a value as a row of Spark stores it."""
    stored = _store_decimal(value, of) if isinstance(of, DecimalType) else None
    if isinstance(of, AtomType):
        kinds, store = _STORES[of.name]
        # A subclass may be of another type of Spark: a bool is an int, a datetime a date.
        stored = store(value) if type(value) in kinds else None
    if stored is None:
        raise PartitionKeyError(f"does not fit the key column {column}", subject=_show(value), hint=_HINT)
    return stored


def _store_decimal(value: object, of: DecimalType) -> int | None:
    if not isinstance(value, Decimal) or not value.is_finite() or abs(value.adjusted()) > _DIGITS_MAX:
        return None
    unscaled = value.scaleb(of.scale, _EXACT)
    fits = unscaled == unscaled.to_integral_value(context=_EXACT) and unscaled.adjusted() < of.precision
    return int(unscaled) if fits else None


def _whole(bits: int) -> Callable[[int], int | None]:
    return lambda value: value if -(1 << bits - 1) <= value < 1 << bits - 1 else None


def _micros(value: datetime) -> int:
    return (value.replace(tzinfo=value.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)


def _single(value: float) -> float | None:
    """Return a number if it is one of 32 bits."""
    try:
        return value if math.isnan(value) or struct.unpack("<f", struct.pack("<f", value))[0] == value else None
    except OverflowError:
        return None


# By the name of a type: of which types its values are, and how they are stored; None: it is none.
_STORES: Final[dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]]] = {
    "boolean": ((bool,), bool),
    **{name: ((int,), _whole(bits)) for name, bits in (("byte", 8), ("short", 16), ("integer", 32), ("long", 64))},
    "float": ((float,), _single),
    "double": ((float,), float),
    "string": ((str, bytes), lambda value: value if isinstance(value, bytes) else value.encode(errors="surrogatepass")),
    "binary": ((bytes,), bytes),
    "date": ((date,), lambda value: (value - _EPOCH.date()).days),
    "timestamp": ((datetime,), lambda value: None if value.tzinfo is None else _micros(value)),
    "timestamp_ntz": ((datetime,), lambda value: _micros(value) if value.tzinfo is None else None),
}


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}…"
