"""Whole runs on a real Spark: what is committed equals what plain Spark SQL says, whatever happens to tasks."""

import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from blobstore.base import list_blobs, read_blob
from blobstore.errors import StoreUnavailableError
from engine.backup.backup import BackupResult
from engine.commit import writer as commit
from engine.errors import CommitLostError, ConflictError, DamagedError, UsageError
from engine.repository.repository import SyncRepository
from engine.rocksdb.store import StoreWriter
from engine.settings import TransferSettings
from engine.spark import store_task
from engine.spark.errors import PartitioningError, TaskFailedError
from engine.spark.stateful_job import PINS_MAX, JobOptions, StatefulJob
from engine.spark.store_task import UpdateTask
from index.snapshot.codec import RECORD_BYTES_MAX, decode_pin
from index.snapshot.contents import blob_keys
from index.snapshot.keys import PINS
from index.snapshot.model import Scope, StoreReference
from tests.spark.counting import SUMS_DDL, add, add_batch, once, read_sums

pytestmark = pytest.mark.spark

TASKS = 3


def open_job(url: str, disk: Path, update: Any = add, **changed: Any) -> StatefulJob:
    arguments = {"job": "sums", "key_columns": ["key"], "tasks": TASKS, "update": update, "local_root": disk}
    options = {name: changed.pop(name) for name in JobOptions.__struct_fields__ if name in changed}
    return StatefulJob(url, **{**arguments, **changed}, options=JobOptions(**options))


def month(spark: SparkSession, number: int, keys: int = 20, count: int = 200) -> DataFrame:
    """Rows that differ from month to month."""
    first = number * count
    return spark.range(first, first + count, 1, 2).selectExpr(
        f"concat('k', (id * 7 + {number}) % {keys}) AS key", "id % 100 AS amount"
    )


def assert_sums(job: StatefulJob, spark: SparkSession, months: list[DataFrame]) -> None:
    everything = months[0]
    for rows in months[1:]:
        everything = everything.unionAll(rows)
    expected = everything.groupBy("key").agg({"*": "count", "amount": "sum"})
    expected = expected.selectExpr("key", "`count(1)` AS seen", "`sum(amount)` AS amount")
    found = job.read(spark, read_sums, SUMS_DDL)
    assert sorted(found.toArrow().to_pylist(), key=str) == sorted(expected.toArrow().to_pylist(), key=str)


def store_dirs(disk: Path) -> list[str]:
    """What is in the directories of the tasks' stores."""
    return sorted(entry.name for entry in disk.glob("*/sums/*/state/*"))


def test_state_survives_the_loss_of_the_disks(spark: SparkSession, url: str, tmp_path: Path) -> None:
    months = [month(spark, number) for number in range(4)]
    disk = tmp_path / "disk"
    with open_job(url, disk) as job:
        done = job.run(months[0], version=1, offsets="month 1")
        assert sum(task.rows_count for task in done.tasks) == 200
        done = job.run(months[1], version=2, offsets="month 2")
        assert {task.origin for task in done.tasks} == {"local"}
        shutil.rmtree(disk)
        done = job.run(months[2], version=3, offsets="month 3")
        assert {task.origin for task in done.tasks} == {"restored"}
    # Another driver, another disk.
    with open_job(url, tmp_path / "other disk") as job:
        newest = job.latest()
        assert newest is not None
        assert (newest.record.version, newest.record.offsets) == (3, "month 3")
        assert (newest.record.layout.tasks_count, newest.record.layout.key_columns) == (TASKS, ("key string",))
        job.run(months[3], version=4, offsets="month 4")
        assert_sums(job, spark, months)


def test_one_partition_is_one_task_however_adaptive_spark_is(spark: SparkSession, url: str, tmp_path: Path) -> None:
    tasks = 12
    with open_job(url, tmp_path / "disk", tasks=tasks) as job:
        done = job.run(month(spark, 0))
        expected = month(spark, 0).selectExpr(f"pmod(hash(key), {tasks}) AS task").groupBy("task").count()
        rows_of = {str(row["task"]): row["count"] for row in expected.toArrow().to_pylist()}
        assert {task.task: task.rows_count for task in done.tasks} == rows_of
        assert_sums(job, spark, [month(spark, 0)])


def test_rows_of_a_task_come_in_the_order_asked_for(spark: SparkSession, url: str, tmp_path: Path) -> None:
    def check_order(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        amounts = [amount for batch in batches for amount in batch.column("amount").to_pylist()]
        assert amounts == sorted(amounts)

    with open_job(url, tmp_path / "disk", check_order, order_by=("amount",)) as job:
        job.run(month(spark, 0).orderBy("amount", ascending=False))


def test_a_task_without_rows_keeps_its_store(spark: SparkSession, url: str, tmp_path: Path) -> None:
    only_one_key = month(spark, 1).where("key = 'k3'")
    with open_job(url, tmp_path / "disk") as job:
        first = job.run(month(spark, 0))
        second = job.run(only_one_key)
        assert len(second.tasks) == 1
        touched = second.tasks[0].task
        for reference in first.commit.record.stores:
            assert (second.commit.store(reference.task, "state") == reference) == (reference.task != touched)
        # Not one row at all is a commit too: the offsets have moved on.
        third = job.run(only_one_key.where("false"), offsets="further")
        assert third.tasks == ()
        assert third.commit.record.stores == second.commit.record.stores
        assert third.commit.record.offsets == "further"
        assert_sums(job, spark, [month(spark, 0), only_one_key])


@pytest.mark.parametrize("checked", [True, False], ids=["asked to look", "found when it is settled"])
def test_what_is_missing_in_the_repository_is_uploaded_again_from_the_disk(
    spark: SparkSession, url: str, tmp_path: Path, checked: bool
) -> None:
    disk, repository_dir = tmp_path / "disk", Path(url.removeprefix("file://"))
    # Each file in a blob of its own: what shares a pack may be packed again anyway.
    alone = TransferSettings(inline_file_bytes_max=0, pack_file_bytes_max=0)
    with open_job(url, disk, transfer=alone) as job, pytest.MonkeyPatch.context() as patch:
        if not checked:
            # The driver dies before it removes a TTL, so that the next one looks at what is there.
            patch.setattr(commit, "settle_keys", _refuse)
        first = job.run(month(spark, 0), version=1).commit
    with open_job(url, disk, transfer=alone, check_retained=checked) as job, SyncRepository.open(url) as repository:
        for reference in first.record.stores:
            index = repository.read_index(reference.index)
            for blob in blob_keys(index):
                (repository_dir / blob).unlink()
        if not checked:
            with pytest.raises(DamagedError):
                job.run(month(spark, 0), version=1)
        second = job.run(month(spark, 1), version=2)
        assert sum(report.backup.stats.files_healed for report in second.tasks)
        assert repository.verify([second.commit]).problems == ()
    shutil.rmtree(disk)
    with open_job(url, tmp_path / "other disk") as job:
        assert_sums(job, spark, [month(spark, 0), month(spark, 1)])


async def _refuse(*_: object, **__: object) -> None:
    raise StoreUnavailableError("the driver dies here", operation="remove_ttl")


def test_stores_of_another_name_are_left_out_of_its_commits_only_if_asked(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """Design 0006, F3: and come back with a rewind."""
    with open_job(url, tmp_path / "disk") as job:
        first = job.run(month(spark, 0), version=1)
    assert (first.dropped, first.carried_over) == ((), ())
    with open_job(url, tmp_path / "disk", store="typo") as job, SyncRepository.open(url) as repository:
        beside = job.run(month(spark, 1), version=2)
        others = tuple((s.task, "state") for s in first.commit.record.stores)
        assert (beside.dropped, beside.carried_over) == ((), others)
        repository.rewind(first.commit)
    renamed = open_job(url, tmp_path / "disk", store="renamed", drop_other_stores=True)
    with renamed as job, SyncRepository.open(url) as repository:
        second = job.run(month(spark, 1), version=2)
        assert second.dropped == tuple((s.task, "state") for s in first.commit.record.stores)
        assert {s.store for s in second.commit.record.stores} == {"renamed"}
        assert_sums(job, spark, [month(spark, 1)])
        assert job.run(month(spark, 2), version=3).dropped == ()
        back = repository.rewind(first.commit)
        assert {s.store for s in back.record.stores} == {"state"}


def test_a_key_may_be_null_and_of_several_columns(spark: SparkSession, url: str, tmp_path: Path) -> None:
    rows = month(spark, 0).selectExpr("nullif(key, 'k1') AS key", "amount", "amount % 2 AS odd")
    with open_job(url, tmp_path / "disk", key_columns=["key", "odd"]) as job:
        assert sum(task.rows_count for task in job.run(rows).tasks) == 200
        newest = job.latest()
        assert newest is not None
        assert newest.record.layout.key_columns == ("key string", "odd bigint")


class FailFirst(msgspec.Struct):
    """Fails or dies in the first attempt at each task, in the middle of its update."""

    markers: Path
    how: str

    def __call__(self, store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        add_batch(store, next(batches))
        store.flush()
        if once(self.markers / task):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the first attempt fails")
        for batch in batches:
            add_batch(store, batch)


@pytest.mark.parametrize("how", [pytest.param("raise", marks=pytest.mark.soak), "kill"])
def test_attempts_that_fail_in_mid_update_are_repeated(spark: SparkSession, url: str, tmp_path: Path, how: str) -> None:
    months = [month(spark, number) for number in range(2)]
    disk = tmp_path / "disk"
    with open_job(url, disk) as job:
        job.run(months[0])
    (tmp_path / "markers").mkdir()
    with open_job(url, disk, FailFirst(tmp_path / "markers", how)) as job:
        done = job.run(months[1])
        assert len(list((tmp_path / "markers").iterdir())) == len(done.tasks) == TASKS
        assert_sums(job, spark, months)
    assert len(store_dirs(disk)) == TASKS
    assert all(name.startswith("ready-") for name in store_dirs(disk))


class FailAround(UpdateTask, frozen=True, kw_only=True):
    """Fails in the first attempt at each task, before its backup or after it."""

    markers: Path = Path()
    when: str = ""

    @override
    def _back_up(self, checkpoint: Path, task: str, base: StoreReference | None) -> BackupResult:
        fails = once(self.markers / task)
        if fails and self.when == "before":
            raise RuntimeError("the first attempt fails before its backup")
        result = super()._back_up(checkpoint, task, base)
        if fails:
            raise RuntimeError("the first attempt fails after its backup")
        return result


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.soak), "after"])
def test_attempts_that_fail_around_their_backup_are_repeated(
    spark: SparkSession, url: str, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    months = [month(spark, number) for number in range(3)]
    with open_job(url, tmp_path / "disk") as job:
        job.run(months[0])
        (tmp_path / "markers").mkdir()
        with monkeypatch.context() as patched:
            patched.setattr(
                store_task, "UpdateTask", lambda **f: FailAround(**f, markers=tmp_path / "markers", when=when)
            )
            assert {task.origin for task in job.run(months[1]).tasks} == {"restored"}
        assert {task.origin for task in job.run(months[2]).tasks} == {"local"}
        assert_sums(job, spark, months)
    assert len(store_dirs(tmp_path / "disk")) == TASKS


def test_a_task_that_always_fails_commits_nothing_and_says_why(spark: SparkSession, url: str, tmp_path: Path) -> None:
    def fail(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        raise ValueError("this row is bad")

    with open_job(url, tmp_path / "disk") as job:
        first = job.run(month(spark, 0))
    with open_job(url, tmp_path / "disk", fail) as job:
        with pytest.raises(TaskFailedError, match="ValueError: this row is bad"):
            job.run(month(spark, 1))
        newest = job.latest()
        assert newest is not None
        assert newest.pointer == first.commit.pointer
    with open_job(url, tmp_path / "disk") as job:
        job.run(month(spark, 1))
        assert_sums(job, spark, [month(spark, 0), month(spark, 1)])


def test_a_driver_that_dies_before_its_commit_is_followed_by_another(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with open_job(url, disk) as job:
        job.run(month(spark, 0), version=1, offsets="1")
        job._attempt_all(month(spark, 1), job.latest(), 2)  # All tasks are done, and then the driver dies.
    with open_job(url, disk) as job:
        done = job.run(month(spark, 1), version=2, offsets="2")
        assert {task.origin for task in done.tasks} == {"restored"}
        assert_sums(job, spark, [month(spark, 0), month(spark, 1)])
    assert len(store_dirs(disk)) == TASKS


class Overtaken(msgspec.Struct):
    """A driver that another one overtakes between its tasks and its commit."""

    job: StatefulJob
    other: StatefulJob
    rows: DataFrame

    def run(self, rows: DataFrame) -> None:
        repository = self.job._repository
        commit = repository.commit

        def commit_late(*arguments: Any, **named: Any) -> Any:
            self.other.run(self.rows)
            return commit(*arguments, **named)

        repository.commit = commit_late
        self.job.run(rows)


@pytest.mark.parametrize("begun", [True, False])
def test_a_zombie_driver_that_commits_late_is_refused(
    spark: SparkSession, url: str, tmp_path: Path, begun: bool
) -> None:
    months = [month(spark, number) for number in range(3)]
    with open_job(url, tmp_path / "disk") as job, open_job(url, tmp_path / "disk") as other:
        if begun:
            job.run(months[0])
        with pytest.raises(ConflictError):
            Overtaken(job=job, other=other, rows=months[1]).run(months[2])
        assert_sums(other, spark, [months[0], months[1]] if begun else [months[1]])
        # It goes on from what won.
        other.run(months[2])
        assert_sums(other, spark, months if begun else months[1:])


def test_a_run_whose_commit_was_overtaken_while_its_tasks_failed_says_so(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    def fail(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        raise ValueError("this row is bad")

    with open_job(url, tmp_path / "disk", fail) as job, open_job(url, tmp_path / "other disk") as other:
        parent = other.run(month(spark, 0)).commit
        attempt_all = job._attempt_all

        def attempt_late(*arguments: Any) -> Any:
            other.run(month(spark, 1))
            return attempt_all(*arguments)

        job._attempt_all = attempt_late  # type: ignore[method-assign, assignment]
        with pytest.raises(CommitLostError, match=f"commit {parent.pointer.number + 1}"):
            job.run(month(spark, 2))


def test_running_the_newest_version_again_does_nothing(spark: SparkSession, url: str, tmp_path: Path) -> None:
    with open_job(url, tmp_path / "disk") as job:
        first = job.run(month(spark, 0), version=5, offsets="o")
        again = job.run(month(spark, 0), version=5, offsets="o")
        assert (again.repeated, again.tasks, again.commit.pointer) == (True, (), first.commit.pointer)
        assert_sums(job, spark, [month(spark, 0)])


@pytest.mark.parametrize("version, offsets", [(5, "other offsets"), (4, "o"), (0, "")])
def test_a_version_that_does_not_follow_is_refused(
    spark: SparkSession, url: str, tmp_path: Path, version: int, offsets: str
) -> None:
    with open_job(url, tmp_path / "disk") as job:
        job.run(month(spark, 0).where("false"), version=5, offsets="o")
        with pytest.raises(UsageError, match="does not follow version 5"):
            job.run(month(spark, 0), version=version, offsets=offsets)


@pytest.mark.parametrize(
    "changed, key",
    [
        ({"tasks": TASKS + 1}, "key"),
        ({"key_columns": ["amount"]}, "key"),
        # Spark's hash of an int is not its hash of a bigint.
        ({}, "cast(length(key) AS int) AS key"),
    ],
)
def test_another_number_of_tasks_or_other_keys_are_refused_before_any_work(
    spark: SparkSession, url: str, tmp_path: Path, changed: dict[str, Any], key: str
) -> None:
    with open_job(url, tmp_path / "disk") as job:
        job.run(month(spark, 0).where("false"))
    with open_job(url, tmp_path / "disk", **changed) as job, pytest.raises(UsageError, match="has 3 tasks"):
        job.run(month(spark, 1).selectExpr(key, "amount"))


@pytest.mark.parametrize("columns", [["amount"], ["key", "amount", "1 AS __tidemark_task"]])
def test_rows_without_the_key_or_with_our_column_are_refused(
    spark: SparkSession, url: str, tmp_path: Path, columns: list[str]
) -> None:
    with open_job(url, tmp_path / "disk") as job, pytest.raises(UsageError, match="rows"):
        job.run(month(spark, 0).selectExpr(*columns))


@pytest.mark.parametrize("changed", [{"tasks": 0}, {"key_columns": []}, {"key_columns": ["key", "key"]}])
def test_arguments_that_contradict_each_other_are_refused(url: str, tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        open_job(url, tmp_path / "disk", **changed)


def test_a_store_that_tasks_cannot_reach_is_refused(tmp_path: Path) -> None:
    SyncRepository.init("memory://stateful-job").close()
    with pytest.raises(UsageError, match="only this process"):
        open_job("memory://stateful-job", tmp_path / "disk")


def test_a_dataframe_of_the_state_stays_with_its_commit(spark: SparkSession, url: str, tmp_path: Path) -> None:
    with open_job(url, tmp_path / "disk") as job:
        job.run(month(spark, 0))
        before = job.read(spark, read_sums, SUMS_DDL)
        job.run(month(spark, 1))
        assert before.agg({"seen": "sum"}).toArrow()["sum(seen)"].to_pylist() == [200]
        assert job.read(spark, read_sums, SUMS_DDL).agg({"seen": "sum"}).toArrow()["sum(seen)"].to_pylist() == [400]


def test_the_pins_of_readers_are_bounded_and_end_with_the_job(url: str, tmp_path: Path) -> None:
    with SyncRepository.open(url) as repository:

        async def live_pins() -> int:
            store = repository.asynchronous.store
            keys = [blob.key async for blob in list_blobs(store, PINS)]
            pins = [
                decode_pin(await read_blob(store, key, size_bytes_max=RECORD_BYTES_MAX), subject=key) for key in keys
            ]
            return sum(pin.duration_ms > 0 for pin in pins)

        with open_job(url, tmp_path / "disk") as job:
            for _ in range(PINS_MAX + 2):
                commit = repository.commit(job.scope, [])
                job._pin(commit)
                job._pin(commit)
            assert repository.loop.run(live_pins()) == PINS_MAX
        assert repository.loop.run(live_pins()) == 0


def test_reading_before_the_first_commit_gives_no_rows(spark: SparkSession, url: str, tmp_path: Path) -> None:
    with open_job(url, tmp_path / "disk") as job:
        assert job.latest() is None
        assert job.read(spark, read_sums, SUMS_DDL).toArrow().num_rows == 0


def test_tasks_that_ran_twice_are_not_committed(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_job(url, tmp_path / "disk") as job:
        to_arrow = type(month(spark, 0)).toArrow

        def doubled(frame: DataFrame) -> pa.Table:
            table = to_arrow(frame)
            return pa.concat_tables([table, table])

        monkeypatch.setattr(type(month(spark, 0)), "toArrow", doubled)
        with pytest.raises(PartitioningError, match="several partitions"):
            job.run(month(spark, 0))
        assert job.latest() is None


def test_nothing_secret_and_no_session_travels_to_tasks(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    with open_job(url, tmp_path / "disk") as job:
        job.run(month(spark, 0))
        pickled = cloudpickle.dumps(UpdateTask(run=job._begin_run(job.latest()), version=2, update=add))
    assert b"not-to-be-shown" not in pickled
    assert b"SparkSession" not in pickled
    assert pickle.loads(pickled).run.scope == Scope("sums")
