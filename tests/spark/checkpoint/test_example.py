from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from examples import repartition_flights, streaming_backup

pytestmark = pytest.mark.spark


@pytest.mark.soak  # docs/how-to/spark.md has it for a few months, and a test runs that
def test_the_example_comes_to_what_it_should(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    months = streaming_backup.MONTHS
    assert streaming_backup.run(spark.newSession(), tmp_path, months=months, lost_after=months - 1)
    said = capsys.readouterr().out
    assert "restored after batch" in said
    assert said.endswith("Equal.\n")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "numbers", [(4, 8), pytest.param(repartition_flights.PARTITIONS, marks=pytest.mark.soak)], ids=["once", "twice"]
)
def test_a_query_that_is_repartitioned_comes_to_what_it_should(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], numbers: tuple[int, ...]
) -> None:
    assert repartition_flights.run(spark.newSession(), tmp_path, days=2, numbers=numbers)
    said = capsys.readouterr().out
    assert said.count(" → ") == len(numbers) - 1
    assert said.endswith("Equal.\n")
