"""A fleet of stores on a real S3 server: whatever befalls one of them is its own affair."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.wrappers.retry import RetrySettings
from engine.repository.repository import Repository, SyncRepository
from engine.spark import JobOptions, SparkOptions, StatefulJob, backup_results, backup_stores, collect, restore_stores
from engine.spark.access import open_on_driver
from engine.spark.spread import RestoreStores, StoreOutcome, StoreWork, spread
from index.plan.commits import Commit, Retention
from index.snapshot.model import Scope
from tests.fault_rules import Hang, Rule, Stage, on, s3_error
from tests.servers.s3_server import S3Server
from tests.spark.counting import SUMS_DDL, add, once, read_sums
from tests.spark.s3_storage import Storage, proxied, workers_sign_as

pytestmark = [pytest.mark.spark, pytest.mark.s3]

SCOPE = Scope("fleet")
KIB = 1024


@pytest.fixture
def storage(
    spark: SparkSession, s3_server: S3Server, s3_bucket: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Storage]:
    """A new repository on S3, for the driver and for workers."""
    directory = tmp_path_factory.getbasetemp()
    with proxied(s3_server, s3_bucket) as storage, workers_sign_as(spark, s3_server, directory):
        SyncRepository.init(storage.url).close()
        yield storage


def fill(root: Path, count: int) -> list[tuple[str, str, Path]]:
    """Stores of very different sizes, each with a file for the index, files for a pack and one or more blobs."""
    rng = random.Random(2)
    stores = []
    for number in range(count):
        directory = root / f"{number:02}"
        directory.mkdir(parents=True)
        (directory / "CURRENT").write_text(f"MANIFEST-{number:06}\n")
        for name, size_bytes in (("small", 2 * KIB), ("other", 5 * KIB), ("large", 400 * KIB * 8 // (number + 1))):
            (directory / name).write_bytes(rng.randbytes(size_bytes))
        stores.append((f"{number:02}", "state", directory))
    return stores


def commit(spark: SparkSession, storage: Storage, stores: list[tuple[str, str, Path]]) -> Commit:
    outcomes = backup_stores(spark, storage.url, SCOPE, stores, options=SparkOptions(store=storage.settings))
    assert outcomes.where("NOT ok").toArrow().to_pylist() == []
    with SyncRepository.open(storage.url) as repository:
        return repository.commit(SCOPE, backup_results(outcomes))


def restore(spark: SparkSession, storage: Storage, target: Path) -> dict[str, dict[str, Any]]:
    rows = (
        restore_stores(spark, storage.url, SCOPE, target, options=SparkOptions(store=storage.settings))
        .toArrow()
        .to_pylist()
    )
    return {row["task"]: row for row in rows}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def keys_of(storage: Storage, commit: Commit) -> dict[str, set[str]]:
    """The blobs of each task's store."""
    found = {}
    with SyncRepository.open(storage.url) as repository:
        for reference in commit.record.stores:
            index = repository.read_index(reference.index)
            found[reference.task] = {str(blob.key) for file in index.dir.files_present for blob in file.blobs}
    return found


def test_of_64_stores_one_that_fails_or_is_slow_costs_only_itself_and_a_rerun_fetches_what_is_missing(
    spark: SparkSession, storage: Storage, tmp_path: Path
) -> None:
    # Two tries for each request, one after the other; one that hangs is given up after a while.
    s3 = msgspec.structs.replace(storage.settings.s3, read_timeout_s=6)
    retry = RetrySettings(attempts_max=2, first_wait_s=0.05)
    storage.settings = msgspec.structs.replace(storage.settings, s3=s3, retry=retry)
    stores = fill(tmp_path / "disk", 64)
    newest = commit(spark, storage, stores)
    blobs = keys_of(storage, newest)
    # One of the largest, so that it is among the first: half of all others are behind it in its partition.
    slow = min(blobs["01"])
    gone, denied, down = (min(blobs[task]) for task in ("07", "20", "33"))
    lost = storage.server.client.get_object(Bucket=storage.bucket, Key=f"state/{gone}")["Body"].read()
    storage.server.client.delete_object(Bucket=storage.bucket, Key=f"state/{gone}")
    storage.proxy.add(Rule(fault=s3_error(403, "AccessDenied"), when=on("GetObject", key=denied), times=None))
    storage.proxy.add(Rule(fault=s3_error(503, "ServiceUnavailable"), when=on("GetObject", key=down), times=None))
    storage.proxy.add(Rule(fault=Hang(at=Stage.ANSWER), when=on("GetObject", key=slow)))
    storage.proxy._log.clear()

    rows = restore(spark, storage, tmp_path / "restored")
    errors = {task: row["error"].split(":")[0] for task, row in rows.items() if not row["ok"]}
    assert errors == {"07": "DamagedError", "20": "AccessDeniedError", "33": "StoreUnavailableError"}
    assert len(rows) == 64
    for task, _, directory in stores:
        target = tmp_path / "restored" / task / "state"
        if task in errors:
            assert not target.exists()
        else:
            assert content(target) == content(directory)
    assert rows["01"]["seconds"] > 6
    # When the slow one had its second try, nearly everybody else had asked for everything: had those behind it in its
    # partition waited, half of all would come after it.
    asked = storage.gets("blobs/")
    late = set(asked[len(asked) - 1 - asked[::-1].index(slow) :]) - {slow}
    assert sum(bool(late & keys) for keys in blobs.values()) <= 16

    # Healed: only what is missing is fetched, and of the others not one blob.
    metadata = {"tidemark-write-id": "0" * 32}
    storage.server.client.put_object(Bucket=storage.bucket, Key=f"state/{gone}", Body=lost, Metadata=metadata)
    storage.proxy.clear()
    rows = restore(spark, storage, tmp_path / "restored")
    assert all(row["ok"] for row in rows.values())
    assert {task for task, row in rows.items() if row["bytes_moved"]} == set(errors)
    assert set(storage.gets("blobs/")) == set().union(*(blobs[task] for task in errors))
    assert sum(row["bytes_moved"] for row in rows.values()) < 2 * sum(
        sum(map(len, content(directory).values())) for task, _, directory in stores if task in errors
    )
    for task, _, directory in stores:
        assert content(tmp_path / "restored" / task / "state") == content(directory)


class KilledOnce(RestoreStores, frozen=True, kw_only=True):
    """Its worker is killed, as by a kernel that is short of memory, when the first partition comes to one store."""

    marker: Path
    victim: str

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        if work.task == self.victim and once(self.marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().carry_out(repository, work)


def test_a_killed_worker_is_replaced_and_what_it_had_restored_is_recognised(
    spark: SparkSession, storage: Storage, tmp_path: Path
) -> None:
    stores = fill(tmp_path / "disk", 20)
    newest = commit(spark, storage, stores)
    repository, access = open_on_driver(storage.url, SparkOptions(store=storage.settings))
    repository.close()
    work = [
        StoreWork(task=r.task, store=r.store, path=str(tmp_path / "restored" / r.task), reference=r)
        for r in newest.record.stores
    ]
    task = KilledOnce(access=access, scope=SCOPE, replace=False, marker=tmp_path / "killed", victim="15")
    storage.proxy.clear()
    rows = {row["task"]: row for row in spread(spark, task, work, 1).toArrow().to_pylist()}
    assert (tmp_path / "killed").exists()
    assert all(row["ok"] for row in rows.values())
    recognised = {task for task, row in rows.items() if not row["bytes_moved"]}
    assert recognised
    assert "15" not in recognised
    blobs = keys_of(storage, newest)
    asked = storage.gets("blobs/")
    for name in recognised:
        assert sorted(key for key in asked if key in blobs[name]) == sorted(blobs[name])
    for name, _, directory in stores:
        assert content(tmp_path / "restored" / name) == content(directory)
    assert sorted(path.name for path in (tmp_path / "restored").iterdir()) == [name for name, _, _ in stores]


def test_a_stateful_job_lives_on_s3_and_each_process_opens_it_once(
    spark: SparkSession, storage: Storage, tmp_path: Path
) -> None:
    months = [spark.range(n, n + 90).selectExpr("concat('k', id % 7) AS key", "id AS amount") for n in (0, 40, 80)]
    storage.proxy.clear()
    with StatefulJob(
        storage.url,
        job="sums",
        key_columns=["key"],
        tasks=3,
        update=add,
        local_root=tmp_path / "disk",
        options=JobOptions(store_settings=storage.settings),
    ) as job:
        for rows in months:
            job.run(rows)
            shutil.rmtree(tmp_path / "disk")
        assert job.restore_stores(spark).where("NOT ok").count() == 0
        everything = months[0].unionAll(months[1]).unionAll(months[2])
        expected = everything.groupBy("key").agg({"*": "count", "amount": "sum"})
        expected = expected.selectExpr("key", "`count(1)` AS seen", "`sum(amount)` AS amount")
        found = job.read(spark, read_sums, SUMS_DDL)
        assert sorted(found.toArrow().to_pylist(), key=str) == sorted(expected.toArrow().to_pylist(), key=str)
        report = collect(
            spark, storage.url, Retention(keep_last=1), delete_share_max=1, options=SparkOptions(store=storage.settings)
        )
        assert report.deletes
        assert [c.pointer.number for c in job._repository.commits(job.scope)] == [3]
    # The profile is read once by each opening: two in the driver, and in each worker one for every kind of settings.
    # 9 attempts, 3 reads, 3 restores and the tasks of the collection came by.
    assert len(storage.gets("profile")) <= 2 + 4
