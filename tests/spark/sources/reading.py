"""State by Spark's own reader and by ours, in a form that can be compared."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from engine.spark.sources.sources import register_sources
from tests.spark.state.queries import FORMAT, Query, StatefulQuery

# The column family of timers by key, of either kind of time.
TIMERS: Final = "Timers_keyToTimestamp"


def ran(spark: SparkSession, query: Query, root: Path, conf: dict[str, str], batches: int = 3) -> StatefulQuery:
    """A query that has run."""
    made = StatefulQuery(spark, query, root, conf)
    made.feed(batches)
    made.run()
    return made


def reading_session(query: StatefulQuery) -> SparkSession:
    """A session that reads the query's state in either way."""
    session = query.session({FORMAT: query.conf.get(FORMAT, "1")})
    register_sources(session)
    return session


def by_spark(
    session: SparkSession, query: StatefulQuery, store: str = "default", batch: int | None = None
) -> DataFrame:
    options = {"storeName": store} | ({} if batch is None else {"batchId": str(batch)})
    rows = session.read.format("statestore").options(**options).load(str(query.checkpoint))
    return rows.select("key", "value", F.col("partition_id").alias("partition"))


def by_us(session: SparkSession, query: StatefulQuery, **options: object) -> DataFrame:
    texts = {name: str(value) for name, value in options.items()}
    return session.read.format("tidemark_state").options(**texts).load(str(query.checkpoint))


def family_by_spark(session: SparkSession, query: StatefulQuery, family: str, batch: int | None = None) -> DataFrame:
    """A state variable, the timers, or a column family of a join, with the columns that Spark's reader has for it."""
    options = {"stateVarName": family}
    if family.endswith(TIMERS):
        options = {"readRegisteredTimers": "true"}
    elif query.query.name.startswith("join"):
        options = {"storeName": family}
    if batch is not None:
        options["batchId"] = str(batch)
    rows = session.read.format("statestore").options(**options).load(str(query.checkpoint))
    return rows.withColumnRenamed("partition_id", "partition")


def rows_of(frame: DataFrame, columns: Sequence[str] = ("key", "value", "partition")) -> Counter[str]:
    """Rows that can be counted, whatever is in them."""
    return Counter(repr(_plain(row)) for row in frame.select(*columns).collect())


def _plain(value: object) -> object:
    """Fields by their place: of those of one name, Spark's reader has several."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {repr(_plain(key)): _plain(each) for key, each in value.items()}
    return value


def types_of(of: DataType) -> object:
    """A type without the names of fields."""
    if isinstance(of, StructType):
        return [(types_of(field.dataType), field.nullable) for field in of.fields]
    if isinstance(of, ArrayType):
        return ("array", types_of(of.elementType), of.containsNull)
    if isinstance(of, MapType):
        return ("map", types_of(of.keyType), types_of(of.valueType), of.valueContainsNull)
    return of


RICH_KEY = [
    "k",
    "cast(v % 7 as byte) as byte",
    "cast(if(v % 5 = 0, null, v % 11) as short) as short",
    "cast(v % 3 as int) as int",
    "v % 2 = 0 as even",
    "cast(v as float) / 3 as float",
    "cast(v as double) / 7 as double",
    "cast(v as decimal(10, 2)) / 4 as small",
    "cast(v as decimal(30, 5)) * -123456789012345678 as large",
    "if(v % 4 = 0, null, to_date(ts)) as day",
    "ts",
    "to_timestamp_ntz(ts) as ntz",
    "encode(k, 'utf-16') as bytes",
    "named_struct('a', v, 'b', if(v % 3 = 0, null, named_struct('c', k, 'd', cast(v as decimal(22, 3))))) as nested",
    "transform(sequence(1, int(v % 4)), x -> if(x = 2, null, concat(k, x))) as texts",
    "make_dt_interval(int(v % 9), 1, 2, v) as span",
]
RICH_VALUE = [
    "if(v % 3 = 0, null, map('a', v, concat('b', k), null)) as map",
    "transform(sequence(0, int(v % 70)), x -> cast(if(x % 7 = 3, null, x) as byte)) as octets",
    "array(cast(v as decimal(38, 10)), null, cast(-v as decimal(38, 10))) as numbers",
    "transform(sequence(1, int(v % 3)), x -> named_struct('x', cast(x as float), 'y', array(k, null))) as structs",
    "map(v, map(k, array(v % 2 = 0, null))) as maps",
    "if(v % 2 = 0, null, '') as empty",
    "concat('日本', k, '😀') as unicode",
]


def rich_rows(rows: DataFrame) -> DataFrame:
    """Every type that a key or a value of an aggregation can be of."""
    sized = rows.selectExpr("k", "abs(v) + 1 as v", "ts")
    keys, values = (
        sized.selectExpr(*RICH_KEY, "v"),
        [f"first({each.rpartition(' as ')[0]}) as {each.rpartition(' as ')[2]}" for each in RICH_VALUE],
    )
    names = [each.rpartition(" as ")[2] for each in RICH_KEY]
    return keys.groupBy(*names).agg(*map(F.expr, values), F.count("*").alias("n"), F.max("v").alias("most"))


RICH = Query(name="rich", build=lambda sources: rich_rows(sources[0]), mode="update")
