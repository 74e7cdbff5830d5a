"""Types of stored rows as PySpark's and as Arrow's, in the form in which PySpark takes batches: names and all."""

import functools
from typing import Final

import pyarrow as pa
import pyspark.sql.types as spark

from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType

# A decimal with more digits does not fit a word.
WORD_DIGITS_MAX: Final = 18

_ATOMS: Final[dict[str, tuple[pa.DataType, spark.DataType]]] = {
    "void": (pa.null(), spark.NullType()),
    "boolean": (pa.bool_(), spark.BooleanType()),
    "byte": (pa.int8(), spark.ByteType()),
    "short": (pa.int16(), spark.ShortType()),
    "integer": (pa.int32(), spark.IntegerType()),
    "long": (pa.int64(), spark.LongType()),
    "float": (pa.float32(), spark.FloatType()),
    "double": (pa.float64(), spark.DoubleType()),
    "string": (pa.string(), spark.StringType()),
    "binary": (pa.binary(), spark.BinaryType()),
    "date": (pa.date32(), spark.DateType()),
    "timestamp": (pa.timestamp("us", tz="UTC"), spark.TimestampType()),
    "timestamp_ntz": (pa.timestamp("us"), spark.TimestampNTZType()),
}
# Of days to seconds: `interval day to second` and its parts. Those of months PySpark does not take.
_INTERVAL: Final = "interval "
_INTERVAL_PARTS: Final = ("day", "hour", "minute", "second")


def is_known(of: DataType) -> bool:
    """Return whether rows with such a field can be Arrow arrays, and Spark takes them."""
    match of:
        case StructType(fields=fields):
            return all(is_known(field.type) for field in fields)
        case ArrayType(element=element):
            return is_known(element)
        case MapType(key=key, value=value):
            return is_known(key) and is_known(value)
        case DecimalType(precision=precision, scale=scale):
            return 0 <= scale <= precision
        case AtomType(name=name):
            return name in _ATOMS or _is_interval(name)


def is_wide(of: DecimalType) -> bool:
    """Return whether such a number does not fit a word."""
    return of.precision > WORD_DIGITS_MAX


@functools.cache
def arrow_type(of: DataType) -> pa.DataType:
    """Return the Arrow type of a type that is known."""
    match of:
        case StructType(fields=fields):
            return pa.struct([pa.field(f.name, arrow_type(f.type), nullable=f.nullable) for f in fields])
        case ArrayType(element=element, contains_null=contains_null):
            return pa.list_(pa.field("element", arrow_type(element), nullable=contains_null))
        case MapType(key=key, value=value, value_contains_null=contains_null):
            keys = pa.field("key", arrow_type(key), nullable=False)
            return pa.map_(keys, pa.field("value", arrow_type(value), nullable=contains_null))
        case DecimalType(precision=precision, scale=scale):
            return pa.decimal128(precision, scale)
        case AtomType(name=name):
            return pa.duration("us") if _is_interval(name) else _ATOMS[name][0]


def spark_type(of: DataType) -> spark.DataType:
    """Return PySpark's type of a type that is known."""
    match of:
        case StructType(fields=fields):
            return spark.StructType([spark.StructField(f.name, spark_type(f.type), f.nullable) for f in fields])
        case ArrayType(element=element, contains_null=contains_null):
            return spark.ArrayType(spark_type(element), contains_null)
        case MapType(key=key, value=value, value_contains_null=contains_null):
            return spark.MapType(spark_type(key), spark_type(value), contains_null)
        case DecimalType(precision=precision, scale=scale):
            return spark.DecimalType(precision, scale)
        case AtomType(name=name):
            if not _is_interval(name):
                return _ATOMS[name][1]
            parts = _interval_parts(name)
            return spark.DayTimeIntervalType(_INTERVAL_PARTS.index(parts[0]), _INTERVAL_PARTS.index(parts[-1]))


def _is_interval(name: str) -> bool:
    parts = _interval_parts(name)
    return bool(parts) and set(_INTERVAL_PARTS).issuperset(parts)


def _interval_parts(name: str) -> list[str]:
    return name.removeprefix(_INTERVAL).split(" to ") if name.startswith(_INTERVAL) else []
