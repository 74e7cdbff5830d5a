"""A job with another number of tasks goes on as if it had always had it (design 0010, T2, T6)."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from engine.backup.backup import BackupOptions
from engine.errors import MisplacedKeyError, UsageError
from engine.repository.repository import SyncRepository
from engine.repository.rescale import RescaleOptions
from engine.rocksdb.store import StoreWriter
from engine.spark.stateful_job import StatefulJob
from index.snapshot.model import Scope, ScopeLayout
from index.spark.task_keys import KEY_HASH, TaskKeys
from tests.spark.counting import SUMS_DDL, add, read_sums

pytestmark = pytest.mark.spark

SCOPE = Scope("scaled")
DDL = "key string, amount bigint"


def key_columns(key: bytes) -> list[str]:
    return [key.decode()]


def rows_of(spark: SparkSession, number: int) -> DataFrame:
    return spark.range(number * 50, number * 50 + 200).selectExpr("concat('k', id % 97) AS key", "id % 100 AS amount")


def open_job(url: str, disk: Path, tasks: int, job: str = SCOPE.job) -> StatefulJob:
    return StatefulJob(url, job=job, key_columns=["key"], tasks=tasks, update=add, local_root=disk)


def sums(job: StatefulJob, spark: SparkSession) -> list[tuple[str, int, int]]:
    return sorted((row[0], row[1], row[2]) for row in job.read(spark, read_sums, SUMS_DDL).collect())


def test_state_is_that_of_a_job_that_was_never_rescaled(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """4 to 2 to 4 to 3, with a run after each."""
    disk, before = tmp_path / "disk", 4
    with open_job(url, tmp_path / "other", 4, "plain") as plain, SyncRepository.open(url) as repository:
        with open_job(url, disk, 4) as job:
            job.run(rows_of(spark, 0), offsets="0")
            plain.run(rows_of(spark, 0), offsets="0")
        for turn, tasks in enumerate((2, 4, 3), start=1):
            done = repository.rescale(SCOPE, RescaleOptions(tasks=tasks, key_columns=key_columns))
            assert (done.rows, bool(done.files_linked)) == (97, tasks == 2)
            with (
                open_job(url, disk, before) as old,
                pytest.raises(UsageError, match=f"has {tasks} tasks by key string"),
            ):
                old.run(rows_of(spark, turn))
            with open_job(url, disk, tasks) as job:
                assert sums(job, spark) == sums(plain, spark)
                job.run(rows_of(spark, turn), offsets=f"{turn}")
                plain.run(rows_of(spark, turn), offsets=f"{turn}")
                assert sums(job, spark) == sums(plain, spark)
                newest = job.latest()
                assert newest is not None
                assert (newest.record.version, newest.record.offsets) == (turn + 1, f"{turn}")
                assert {int(store.task) for store in newest.record.stores} == set(range(tasks))
            before = tasks
        # Of what cannot be right nothing is committed.
        for wrong in (lambda key: [key[1:].decode()], lambda key: [key.decode().upper()]):
            with pytest.raises(MisplacedKeyError, match="by spark-hash-v1 of key string"):
                repository.rescale(SCOPE, RescaleOptions(tasks=1, key_columns=wrong))
        newest = repository.latest(SCOPE)
        assert newest is not None
        held = newest.store("1", "state")
        assert held is not None
        repository.restore_reference(held, tmp_path / "planted")
        with StoreWriter.open(tmp_path / "planted") as store:
            misplaced = next(n for n in range(100) if KEYS.partition_of((f"new{n}",), 3) == 2)
            store.put(b"new%d" % misplaced, b"\x92\x00\x00")
            store.checkpoint(tmp_path / "captured")
        options = BackupOptions(base=held)
        planted = repository.backup(SCOPE, tmp_path / "captured", task="1", store="state", options=options)
        number = repository.commit(SCOPE, [planted], parent=newest.pointer).pointer.number
        for tasks in (1, 2):
            with pytest.raises(MisplacedKeyError, match="is in task 1 of 3, and belongs in task 2"):
                repository.rescale(SCOPE, RescaleOptions(tasks=tasks, key_columns=key_columns))
        newest = repository.latest(SCOPE)
        assert newest is not None
        assert newest.pointer.number == number


KEYS = TaskKeys(ScopeLayout(tasks_count=3, key_hash=KEY_HASH, key_columns=("key string",)))


def test_each_batch_is_still_applied_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "query"

    def run(job: StatefulJob) -> None:
        stream = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).json(str(source)).writeStream
        stream = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        stream.foreachBatch(job.for_each_batch(checkpoint)).start().awaitTermination()

    def feed() -> None:
        rows_of(spark, 0).coalesce(1).write.mode("append").json(str(source))

    for _ in range(2):
        feed()
    with open_job(url, tmp_path / "disk", 4) as job:
        run(job)
    with SyncRepository.open(url) as repository:
        repository.rescale(SCOPE, RescaleOptions(tasks=3, key_columns=key_columns))
    with open_job(url, tmp_path / "disk", 3) as job:
        before = sums(job, spark)
        # The query died between the job's commit and its own: the batch comes again.
        job.for_each_batch(checkpoint)(rows_of(spark, 0), 1)
        assert sums(job, spark) == before
        feed()
        run(job)
        assert sums(job, spark) == [(key, seen // 2 * 3, amount // 2 * 3) for key, seen, amount in before]


# As Spark's DDL has them, with values.
VALUES: dict[str, list[object]] = {
    "boolean": [True, False],
    "tinyint": [-128, 7],
    "smallint": [-32768, 300],
    "int": [-1, 2**31 - 1],
    "bigint": [-(2**63), 5],
    "float": [0.5, -0.0, float("nan")],
    "double": [0.1, -0.0, float("inf")],
    "string": ["", "Zoë", "long enough for words"],
    "binary": [b"", b"\x00\xff\x80"],
    "date": [date(1969, 12, 31), date(2024, 2, 29)],
    "timestamp": [datetime(1969, 1, 1, 0, 0, 0, 1, UTC), datetime(2024, 2, 29, tzinfo=UTC)],
    "timestamp_ntz": [datetime(1969, 1, 1, 0, 0, 0, 1), datetime(2024, 2, 29)],  # noqa: DTZ001 - it has none
    "decimal(10,2)": [Decimal("-1.20"), Decimal("99999999.99")],
    "decimal(38,10)": [Decimal("-1234567890123456789012345678.0123456789"), Decimal("0E-10")],
}


def test_values_of_every_type_have_the_hash_that_spark_has(spark: SparkSession) -> None:
    """Each behind another column, and a null."""
    for of, values in VALUES.items():
        rows = [("a", value) for value in [*values, None]]
        frame = spark.createDataFrame(rows, f"first string, second {of}")
        assert dict(frame.dtypes)["second"] == of
        keys = TaskKeys(ScopeLayout(tasks_count=7, key_hash=KEY_HASH, key_columns=("first string", f"second {of}")))
        expected = [row[0] for row in frame.selectExpr("pmod(hash(first, second), 1009)").collect()]
        assert [keys.partition_of(row, 1009) for row in rows] == expected, of
