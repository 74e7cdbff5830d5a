"""DataFrames of values that the driver has."""

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A table as a DataFrame, also one without rows: of that, Spark Connect has to be told the schema."""
    return spark.createDataFrame(table, schema=from_arrow_schema(table.schema))
