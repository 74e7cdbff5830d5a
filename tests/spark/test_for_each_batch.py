"""A job beside a streaming query applies each batch exactly once (design 0005, J1)."""

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from engine.spark.errors import BatchMismatchError
from engine.spark.stateful_job import StatefulJob
from tests.spark.counting import SUMS_DDL, add, read_sums

pytestmark = pytest.mark.spark

DDL = "key string, amount bigint"


def test_batch_that_comes_again_is_applied_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    rows, source = [("a", 1), ("b", 2)], tmp_path / "in"
    with StatefulJob(url, job="j", key_columns=["key"], tasks=2, update=add, local_root=tmp_path / "disk") as job:
        apply = job.for_each_batch("q")

        def dies(batch: DataFrame, batch_id: int) -> None:
            apply(batch, batch_id)
            if batch_id == 1:
                raise RuntimeError("between the two commits")

        def run(function: object) -> None:
            stream = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).json(str(source)).writeStream
            stream = stream.option("checkpointLocation", str(tmp_path / "query")).trigger(availableNow=True)
            stream.foreachBatch(function).start().awaitTermination()  # type: ignore[arg-type]

        for _ in range(3):
            spark.createDataFrame(rows, DDL).coalesce(1).write.mode("append").json(str(source))
        with pytest.raises(StreamingQueryException):
            run(dies)
        newest = job.latest()
        assert newest is not None
        assert newest.record.version == 1
        assert not (tmp_path / "query" / "commits" / "1").exists()
        run(apply)
        expected = spark.read.schema(DDL).json(str(source)).groupBy("key").agg({"*": "count", "amount": "sum"})
        expected = expected.selectExpr("key", "`count(1)`", "`sum(amount)`")
        assert sorted(job.read(spark, read_sums, SUMS_DDL).collect()) == sorted(expected.collect())
        batch = spark.createDataFrame(rows, DDL)
        for wrong in (1, 4):
            with pytest.raises(BatchMismatchError):
                apply(batch, wrong)
        with pytest.raises(BatchMismatchError):
            job.for_each_batch("another")(batch, 3)
