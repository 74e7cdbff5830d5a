import pytest
from pyspark.sql import SparkSession

from tests.spark.sources.reading import ran
from tests.spark.state.queries import AGGREGATION, FORMAT, StatefulQuery


@pytest.fixture(scope="session")
def counted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> StatefulQuery:
    """A counting query; anyone who breaks its checkpoint does so with a copy."""
    return ran(spark, AGGREGATION, tmp_path_factory.mktemp("counted"), {FORMAT: "2"}, batches=4)
