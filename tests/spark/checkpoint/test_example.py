from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from examples import streaming_backup

pytestmark = pytest.mark.spark


@pytest.mark.soak  # of a few months docs/how-to/spark.md tells it, which a test runs
def test_the_example_comes_to_what_it_should(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    months = streaming_backup.MONTHS
    assert streaming_backup.tell(spark.newSession(), tmp_path, months=months, lost_after=months - 1)
    said = capsys.readouterr().out
    assert "restored after batch" in said
    assert said.endswith("Equal.\n")
