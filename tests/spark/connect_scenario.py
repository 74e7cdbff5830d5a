"""What is done over Spark Connect, part by part; run as a process of its own, which has no classic session.

`python -m tests.spark.connect_scenario <server> <directory> <outcomes> <part>...` writes a JSON object: what each part
failed with, empty if it went well.
"""

import asyncio
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.base import PySparkPicklingError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from engine.checkpoint.backup import BackupChoice
from engine.errors import IncompleteError, UsageError
from engine.repository.repository import SyncRepository
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.spark import (
    BackupListener,
    StatefulJob,
    backup_checkpoint,
    backup_results,
    backup_stores,
    check_checkpoint,
    collect,
    register_sources,
    restore_checkpoint,
    restore_stores,
)
from engine.spark.errors import TaskFailedError
from engine.spark.spread import default_partitions
from examples import spark_connect
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.spark.counting import SUMS_DDL, add, read_sums
from tests.spark.test_collect import back_up, facts
from tests.unit.engine.checkpoint.live_query import LiveQuery

SCOPE: Final = Scope("stores")
SMALL: Final = RocksDbSettings(write_buffer_bytes=64 * 1024)


def new_repository(root: Path) -> str:
    url = f"file://{root / 'repository'}"
    SyncRepository.init(url).close()
    return url


def fill(root: Path, count: int) -> list[tuple[str, str, str]]:
    """Closed RocksDB stores."""
    stores = []
    for task in range(count):
        directory = root / str(task)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with StoreWriter.open(directory, SMALL) as store:
            store.write_batch({b"%d-%d" % (task, n): b"v" * 50 for n in range(100 * (task + 1))})
            store.flush()
        stores.append((str(task), "facts", str(directory)))
    return stores


def content(directory: Path) -> dict[bytes, bytes]:
    with StoreReader.open(directory) as store:
        return dict(store.items())


def check_the_example(spark: SparkSession, root: Path) -> None:
    assert spark_connect.run(spark, root)


def check_cores(spark: SparkSession, root: Path) -> None:
    """As the server was started: two cores, three shuffle partitions."""
    assert default_partitions(spark) == 2
    chosen = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    assert default_partitions(spark) == 1
    spark.conf.set("spark.sql.shuffle.partitions", str(chosen))


def check_stores(spark: SparkSession, root: Path) -> None:
    """Backed up from a DataFrame and from a list, one of them damaged, and restored."""
    url, stores = new_repository(root), fill(root / "disk", 5)
    frame = spark.createDataFrame(stores, "task string, store string, path string")
    outcomes = backup_stores(spark, url, SCOPE, frame, version=7)
    assert isinstance(outcomes, DataFrame)
    with SyncRepository.open(url) as repository:
        commit = repository.commit(SCOPE, backup_results(outcomes), version=7)
        assert restore_stores(spark, url, SCOPE, root / "restored").where("ok").count() == len(stores)
        for task, store, directory in stores:
            assert content(root / "restored" / task / store) == content(Path(directory))
        damaged = commit.store("3", "facts")
        assert damaged is not None
        (root / "repository").joinpath(*damaged.index.key.split("/")).write_bytes(b"altered")
        rows = restore_stores(spark, url, SCOPE, root / "again").where("not ok").collect()
    assert [(row.task, row.error.partition(":")[0]) for row in rows] == [("3", "DamagedError")]
    shutil.rmtree(stores[0][2])
    rows = backup_stores(spark, url, SCOPE, [(t, s, p) for t, s, p in stores if t != "3"]).where("not ok").collect()
    assert [row.task for row in rows] == ["0"]


def check_a_collection(spark: SparkSession, root: Path) -> None:
    """The same plan as in one process, in a dry run and in earnest; and of an empty repository nothing."""
    url = new_repository(root)
    keep = Retention(keep_last=1)
    assert collect(spark, url, keep).deletes_count == 0
    with SyncRepository.open(url) as repository:
        for generation in range(1, 4):
            back_up(repository, root / "disk", generation)
        expected = facts(repository.collect(keep, dry_run=True, delete_share_max=1))
        assert facts(collect(spark, url, keep, dry_run=True, delete_share_max=1)) == expected
        assert facts(collect(spark, url, keep, delete_share_max=1)) == expected
        assert not repository.verify().problems


def check_a_checkpoint(spark: SparkSession, root: Path) -> None:
    """Backed up, checked, restored; what a task cannot restore is reported as in one process."""
    url, query = new_repository(root), LiveQuery(root / "query", partitions=3)
    asyncio.run(write(query))
    backup = backup_checkpoint(spark, url, query.root)
    assert check_checkpoint(spark, query.root).is_sound
    assert restore_checkpoint(spark, url, root / "restored").stores == 3
    assert check_checkpoint(spark, root / "restored").is_sound
    index = next(store.index.key for store in backup.commit.record.stores if store.task == "0-1")
    (root / "repository").joinpath(*index.split("/")).unlink()
    with pytest.raises(IncompleteError, match=r"\(state/0/1\); 1 of 3 stores failed$"):
        restore_checkpoint(spark, url, root / "again")


async def write(query: LiveQuery) -> None:
    await query.run(3)
    await query.close()


def fail(store: StoreWriter, batches: object, task: str) -> None:
    raise UsageError("this is what failed", operation="update")


def check_a_job(spark: SparkSession, root: Path) -> None:
    """Runs, loses its disks, goes on, is read; a failing task is reported by its own error."""
    url, disk = new_repository(root), root / "disk"
    months = [spark.range(n, n + 100).selectExpr("concat('k', id % 7) AS key", "id AS amount") for n in (0, 50)]

    def open_job(update: Callable[..., None] = add) -> StatefulJob:
        return StatefulJob(url, job="sums", key_columns=["key"], tasks=3, update=update, local_root=disk)

    with open_job() as job:
        job.run(months[0], version=1)
        shutil.rmtree(disk)
        assert job.restore_stores(spark).where("ok AND bytes_moved > 0").count() == 3
        assert {task.origin for task in job.run(months[1], version=2).tasks} == {"local"}
        found = sorted(map(tuple, job.read(spark, read_sums, SUMS_DDL).collect()))
        sums = months[0].unionAll(months[1]).groupBy("key").agg({"*": "count", "amount": "sum"})
        assert found == sorted(map(tuple, sums.selectExpr("key", "`count(1)`", "`sum(amount)`").collect()))
        with pytest.raises(PySparkException):
            job.run(months[0].select("key", "missing"))
    with open_job(fail) as job, pytest.raises(TaskFailedError, match="UsageError: update: this is what failed"):
        job.run(months[0], version=3)


def in_batches(spark: SparkSession, root: Path) -> DataStreamWriter:
    """A query of one batch, of a hundred rows."""
    spark.range(100).selectExpr("concat('k', id % 7) AS key", "id AS amount").write.parquet(str(root / "in"))
    writer = spark.readStream.schema("key string, amount long").parquet(str(root / "in")).writeStream
    return writer.option("checkpointLocation", str(root / "checkpoint")).trigger(availableNow=True)


def open_sums(url: str, root: Path) -> StatefulJob:
    return StatefulJob(url, job="sums", key_columns=["key"], tasks=2, update=add, local_root=root / "disk")


def check_a_job_that_a_batch_function_holds(spark: SparkSession, root: Path) -> None:
    """It cannot go where the function runs, which is reported."""
    with open_sums(new_repository(root), root) as held:

        def run(rows: DataFrame, batch: int) -> None:
            held.run(rows, version=batch + 1)

        with pytest.raises(PySparkPicklingError) as refused:
            in_batches(spark, root).foreachBatch(run).start()
    assert "bound to the process that opened it" in "".join(traceback.format_exception(refused.value))


def check_a_job_that_a_batch_function_opens(spark: SparkSession, root: Path) -> None:
    """It runs where the function runs."""
    url = new_repository(root)

    def run(rows: DataFrame, batch: int) -> None:
        with open_sums(url, root) as job:
            job.run(rows, version=batch + 1)

    in_batches(spark, root).foreachBatch(run).start().awaitTermination()
    with open_sums(url, root) as job:
        assert job.read(spark, read_sums, SUMS_DDL).agg({"seen": "sum"}).first() == (100,)


def check_a_listener_and_the_sources(spark: SparkSession, root: Path) -> None:
    """The newest batch of a query is in the repository, taken by this process; and its state is read in all ways."""
    url, checkpoint = new_repository(root), root / "checkpoint"
    for key, value in spark_connect.CONF.items():
        spark.conf.set(key, value)
    with BackupListener(checkpoint, url, BackupChoice(job="words")) as listener:
        spark.streams.addListener(listener)
        for batch in range(2):
            spark_connect.arrive(spark, batch, root)
            spark_connect.run_query(spark, root, checkpoint=checkpoint)
        assert listener.wait(60, batch=1), listener.last_error
        spark.streams.removeListener(listener)
    with SyncRepository.open(url) as repository:
        newest = repository.latest(Scope("words"))
    assert newest is not None
    assert newest.record.version == 2
    read_sources(spark, checkpoint)


def read_sources(spark: SparkSession, checkpoint: Path) -> None:
    """What the example does not: filters pushed down, files, and what is wrong, reported with its hint."""
    register_sources(spark, push_filters=True)
    part = spark.read.format("tidemark_state").load(str(checkpoint)).where("partition = 1")
    assert {row.partition for row in part.collect()} == {1}
    files = spark.read.format("tidemark_files").load(str(checkpoint))
    assert files.where("needed").count() > 0
    with pytest.raises(PySparkException, match=r"(?s)UsageError.*hint: see docs/how-to/spark.md"):
        spark.read.format("tidemark_state").option("wrong", 1).load(str(checkpoint)).count()
    for changelog in checkpoint.glob("state/0/*/*.changelog"):
        changelog.write_bytes(changelog.read_bytes()[:-3])
    with pytest.raises(PySparkException, match=r"(?s)FileChecksumError: .*hint: the file or its .crc is damaged"):
        spark.read.format("tidemark_state").load(str(checkpoint)).count()


PARTS: Final[dict[str, Callable[[SparkSession, Path], None]]] = {
    name.removeprefix("check_"): function for name, function in globals().items() if name.startswith("check_")
}


def main() -> None:
    """Run some parts, each in a directory of its own, in one session: each session has Python workers of its own."""
    server, root, outcomes, *names = sys.argv[1:]
    outcomes_by_part = {}
    spark = SparkSession.builder.remote(server).getOrCreate()
    for name in names:
        directory = Path(root, name)
        directory.mkdir()
        try:
            PARTS[name](spark, directory)
            outcomes_by_part[name] = ""
        except BaseException as error:  # noqa: BLE001  # whatever it is is in the outcome, and the others go on
            outcomes_by_part[name] = "".join(traceback.format_exception(error))
    spark.stop()
    Path(outcomes).write_bytes(msgspec.json.encode(outcomes_by_part))


if __name__ == "__main__":
    main()
