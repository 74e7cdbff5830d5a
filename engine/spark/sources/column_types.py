"""The types that columns of state have in PySpark and in Arrow."""

import functools
from collections.abc import Iterable
from typing import Final, TypeAlias

import pyarrow as pa
import pyspark.sql.types as spark

from engine.arrow import unsafe_rows
from engine.arrow.unsafe_rows import arrow_type, interval_parts
from index.spark.schema import ArrayType, DataType, DecimalType, MapType, StructType

# Name, Arrow's type, PySpark's.
Column: TypeAlias = tuple[str, pa.DataType, spark.DataType]

_SPARK_ATOMS: Final[dict[str, spark.DataType]] = {
    "void": spark.NullType(),
    "boolean": spark.BooleanType(),
    "byte": spark.ByteType(),
    "short": spark.ShortType(),
    "integer": spark.IntegerType(),
    "long": spark.LongType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "string": spark.StringType(),
    "binary": spark.BinaryType(),
    "date": spark.DateType(),
    "timestamp": spark.TimestampType(),
    "timestamp_ntz": spark.TimestampNTZType(),
}
ATOMS: Final = {name: (of, _SPARK_ATOMS[name]) for name, of in unsafe_rows.ATOMS.items()}


def types_of(of: DataType) -> tuple[pa.DataType, spark.DataType]:
    """Return Arrow's type and PySpark's. Raises as `arrow_type`."""
    return arrow_type(of), _spark_type(of)


@functools.cache
def _spark_type(of: DataType) -> spark.DataType:
    match of:
        case StructType(fields=fields):
            struct = spark.StructType()
            for field in fields:
                struct.add(field.name, _spark_type(field.type), field.nullable)
            return struct
        case ArrayType(element=element, contains_null=contains_null):
            return spark.ArrayType(_spark_type(element), contains_null)
        case MapType(key=key, value=value, value_contains_null=contains_null):
            return spark.MapType(_spark_type(key), _spark_type(value), contains_null)
        case DecimalType(precision=precision, scale=scale):
            return spark.DecimalType(precision, scale)
        case _:
            atom = _SPARK_ATOMS.get(of.name)
            return atom or spark.DayTimeIntervalType(interval_parts(of.name)[0], interval_parts(of.name)[-1])


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return columns as Arrow has them."""
    return pa.schema([pa.field(name, of) for name, of, _ in columns])


def spark_schema(columns: Iterable[Column]) -> spark.StructType:
    """Return columns as PySpark has them."""
    return spark.StructType([spark.StructField(name, of) for name, _, of in columns])
