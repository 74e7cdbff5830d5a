"""A job beside a streaming query applies each batch exactly once (design 0005, J1)."""

import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from engine.checkpoint.targets import DirectoryTarget
from engine.errors import NotFoundError, TargetError
from engine.spark import BackupChoice, RestoreChoice, backup_checkpoint, restore_checkpoint
from engine.spark.errors import BatchMismatchError
from engine.spark.stateful_job import StatefulJob
from tests.spark.counting import SUMS_DDL, add, read_sums

pytestmark = pytest.mark.spark

JOB = "query"
DDL = "key string, amount bigint"


def test_batch_that_comes_again_is_applied_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    rows, source = [("a", 1), ("b", 2)], tmp_path / "in"
    with StatefulJob(url, job="j", key_columns=["key"], tasks=2, update=add, local_root=tmp_path / "disk") as job:
        apply = job.for_each_batch(tmp_path / "query")

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
        # The same batch as it was planned is passed over; planned again, it may have other rows.
        apply(batch, 2)
        planned = tmp_path / "query/offsets/2"
        planned.with_name(".2.crc").unlink()
        planned.write_text(planned.read_text().replace('"batchTimestampMs":1', '"batchTimestampMs":2'))
        with pytest.raises(BatchMismatchError, match="planned it again"):
            apply(batch, 2)
        # Another query, also one that begins again.
        shutil.rmtree(tmp_path / "query")
        run(lambda batch, batch_id: None)
        for known in (0, 2):
            with pytest.raises(BatchMismatchError, match="of something else"):
                apply(batch, known)
        with pytest.raises(NotFoundError):
            job.for_each_batch(tmp_path / "nowhere")(batch, 3)


def test_both_are_taken_back_and_go_on_to_the_same_results(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the how-to says: one verb takes both back; in between the query is refused (J2)."""
    source, checkpoint = tmp_path / "in", tmp_path / "query"

    def feed() -> None:
        spark.createDataFrame([("a", 1), ("b", 2)], DDL).coalesce(1).write.mode("append").json(str(source))

    def run(job: StatefulJob, at: Path) -> None:
        stream = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).json(str(source)).writeStream
        stream = stream.option("checkpointLocation", str(at)).trigger(availableNow=True)
        stream.foreachBatch(job.for_each_batch(at)).start().awaitTermination()

    async def fail(*_: object) -> None:
        raise TargetError("injected", operation="restore")

    with StatefulJob(url, job="j", key_columns=["key"], tasks=2, update=add, local_root=tmp_path / "disk") as job:
        for _ in range(2):
            feed()
        run(job, checkpoint)
        backup_checkpoint(spark, url, checkpoint, BackupChoice(job=JOB))
        for _ in range(2):
            feed()
        run(job, checkpoint)
        # The checkpoint alone: the query would plan batch 2 again, and the job is ahead of it.
        restore_checkpoint(spark, url, tmp_path / "alone", RestoreChoice(job=JOB))
        with pytest.raises(StreamingQueryException, match="BatchMismatchError"):
            run(job, tmp_path / "alone")
        with pytest.raises(NotFoundError, match="no commit of a batch of query"):
            restore_checkpoint(spark, url, tmp_path / "both", RestoreChoice(job=JOB, with_job=JOB))
        choice = RestoreChoice(job=JOB, with_job="j", batch=1)
        # A crash between the two steps: the job is taken back alone, and the query is ahead.
        with monkeypatch.context() as patched:
            patched.setattr(DirectoryTarget, "publish", fail)
            with pytest.raises(TargetError, match="injected"):
                restore_checkpoint(spark, url, tmp_path / "both", choice)
        assert not (tmp_path / "both").exists()
        feed()
        with pytest.raises(StreamingQueryException, match="BatchMismatchError"):
            run(job, checkpoint)
        done = restore_checkpoint(spark, url, tmp_path / "both", choice)
        assert (done.batch, done.with_job) == (1, "j")
        run(job, tmp_path / "both")
        sums = {row[0]: row[1:] for row in job.read(spark, read_sums, SUMS_DDL).collect()}
    assert sums == {"a": (5, 5), "b": (5, 10)}
