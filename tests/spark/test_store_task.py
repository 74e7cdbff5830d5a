"""Attempts at one task as Spark may run them, without Spark: repeated, beside each other, late."""

import multiprocessing
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from engine.errors import StaleResultError, UsageError
from engine.repository.repository import SyncRepository
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.spark.access import Access, SparkOptions, open_on_driver
from engine.spark.claims import StoreClaims
from engine.spark.errors import PartitioningError
from engine.spark.store_task import TASK_COLUMN, JobRun, ReadStore, ReadTask, TaskReport, UpdateStore, UpdateTask
from index.plan.commits import Commit
from index.snapshot.model import Scope
from tests.spark.counting import add, add_batch, read_sums

SCOPE = Scope("job")


class Job(msgspec.Struct):
    """What the driver does, done by a test."""

    access: Access
    repository: SyncRepository
    disk: Path
    newest: Commit | None = None

    def run(self, number: int) -> JobRun:
        stores = self.newest.record.stores if self.newest else ()
        return JobRun(
            access=self.access,
            scope=SCOPE,
            store="state",
            local_root=str(self.disk),
            id=f"{number:020x}",
            bases={reference.task: reference for reference in stores},
            rocksdb=RocksDbSettings(),
        )

    def task(self, run: int, update: UpdateStore = add, version: int | None = None) -> UpdateTask:
        base_version = self.newest.record.version if self.newest else 0
        return UpdateTask(run=self.run(run), version=version or base_version + 1, update=update)

    def read(self, function: ReadStore) -> Generator[pa.RecordBatch, None, None]:
        return ReadTask(run=self.run(9), read=function)(iter([pa.record_batch([["0"]], names=["task"])]))

    def commit(self, *reports: TaskReport) -> Commit:
        self.newest = self.repository.commit(
            SCOPE,
            [report.backup for report in reports],
            version=reports[0].backup.reference.version,
            parent=self.newest.pointer if self.newest else None,
        )
        return self.newest

    def step(self, run: int, amount: int = 1) -> TaskReport:
        report = attempt(self.task(run), amount)
        self.commit(report)
        return report

    def sums(self) -> dict[str, tuple[int, int]]:
        rows = [row for batch in self.read(read_sums) for row in batch.to_pylist()]
        return {row["key"]: (row["seen"], row["amount"]) for row in rows}

    def entries(self) -> list[str]:
        return sorted(entry.name for entry in self.claims().directory.iterdir())

    def claims(self) -> StoreClaims:
        return self.run(0).claims("0")


def rows(amount: int = 1, task: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        [["a", "b", "a"], [amount, amount, amount], pa.array([task] * 3, pa.int32())], ["key", "amount", TASK_COLUMN]
    )


def attempt(task: UpdateTask, amount: int = 1) -> TaskReport:
    (answer,) = task(iter([rows(amount)]))
    return msgspec.msgpack.decode(answer.column("report")[0].as_py(), type=TaskReport)


@pytest.fixture
def job(url: str, tmp_path: Path) -> Iterator[Job]:
    repository, access = open_on_driver(url, SparkOptions())
    with repository:
        yield Job(access=access, repository=repository, disk=tmp_path / "disk")


def test_state_goes_on_from_commit_to_commit_on_the_same_disk(job: Job) -> None:
    assert [job.step(0, 1).origin, job.step(1, 10).origin, job.step(2, 100).origin] == ["new", "local", "local"]
    assert job.sums() == {"a": (6, 222), "b": (3, 111)}


def test_a_lost_disk_is_restored_from_the_last_commit(job: Job) -> None:
    job.step(0, 1)
    job.step(1, 10)
    job.disk = job.disk.with_name("another disk")
    assert job.step(2, 100).origin == "restored"
    assert job.sums() == {"a": (6, 222), "b": (3, 111)}


def test_a_store_on_disk_that_does_not_open_is_restored(job: Job) -> None:
    job.step(0, 1)
    (ready,) = job.claims().directory.glob("ready-*")
    (ready / "CURRENT").write_text("MANIFEST-999999\n")
    assert job.step(1, 10).origin == "restored"
    assert job.sums() == {"a": (4, 22), "b": (2, 11)}


def test_a_task_without_rows_does_nothing_and_its_store_is_claimed_later(job: Job) -> None:
    job.step(0, 1)
    before = job.entries()
    assert list(job.task(1)(iter([]))) == []
    assert list(job.task(1)(iter([rows().slice(0, 0)]))) == []
    assert job.entries() == before
    job.commit(attempt(job.task(2, version=7), 10))
    assert job.sums() == {"a": (4, 22), "b": (2, 11)}


def fail_in_mid_update(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
    add_batch(store, next(batches))
    store.flush()
    raise RuntimeError("in mid-update")


def test_an_attempt_that_failed_in_mid_update_leaves_nothing_and_is_repeated_from_the_commit(job: Job) -> None:
    job.step(0, 1)
    with pytest.raises(RuntimeError, match="mid-update"):
        attempt(job.task(1, fail_in_mid_update))
    assert job.entries() == []
    assert job.step(1, 10).origin == "restored"
    assert job.sums() == {"a": (4, 22), "b": (2, 11)}


def test_an_attempt_that_finished_unheard_is_repeated_and_only_one_counts(job: Job) -> None:
    job.step(0, 1)
    unheard = attempt(job.task(1), 10)
    heard = attempt(job.task(1), 10)
    assert (unheard.origin, heard.origin) == ("local", "restored")
    job.commit(heard)
    assert job.sums() == {"a": (4, 22), "b": (2, 11)}
    # The next run claims the state that was committed and removes the other one.
    assert job.step(2, 100).origin == "local"
    assert len(job.entries()) == 1
    assert job.sums() == {"a": (6, 222), "b": (3, 111)}


def test_a_function_that_leaves_rows_unread_is_refused(job: Job) -> None:
    def first_only(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        add_batch(store, next(batches))

    with pytest.raises(UsageError, match="all rows"):
        list(job.task(0, first_only)(iter([rows(), rows()])))
    assert job.entries() == []


@pytest.mark.parametrize("batches", [[rows(task=0), rows(task=1)], [pa.concat_batches([rows(task=0), rows(task=1)])]])
def test_rows_of_two_tasks_in_one_partition_are_refused(job: Job, batches: list[pa.RecordBatch]) -> None:
    with pytest.raises(PartitioningError, match="rows of tasks"):
        list(job.task(0)(iter(batches)))


def test_a_scan_that_the_function_left_open_does_no_harm(job: Job) -> None:
    kept = []

    def leave_open(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        add(store, batches, task)
        scan = store.items()
        next(scan)
        kept.append(scan)

    job.commit(attempt(job.task(0, leave_open)))
    assert job.step(1, 10).origin == "local"


class Meet(msgspec.Struct):
    """An update that waits in its middle until the other attempt is there too."""

    barrier: threading.Barrier

    def __call__(self, store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        first = next(batches)
        self.barrier.wait(60)
        add_batch(store, first)
        for batch in batches:
            add_batch(store, batch)
        self.barrier.wait(60)


def attempt_in_a_process(task: UpdateTask, answers: "multiprocessing.Queue[bytes]") -> None:
    answers.put(msgspec.msgpack.encode(attempt(task, 10)))


def test_two_attempts_at_once_do_not_disturb_each_other_and_one_counts(job: Job) -> None:
    job.step(0, 1)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    barrier = context.Barrier(2)
    task = job.task(1, Meet(barrier))
    processes = [context.Process(target=attempt_in_a_process, args=(task, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    reports = [msgspec.msgpack.decode(answers.get(timeout=60), type=TaskReport) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(report.origin for report in reports) == ["local", "restored"]
    assert len(job.entries()) == 2
    for report in reports:
        assert report.backup.base == job.newest.record.stores[0].index  # type: ignore[union-attr]
    job.commit(reports[0])
    assert job.sums() == {"a": (4, 22), "b": (2, 11)}
    # The loser's reference is worth nothing any more.
    with pytest.raises(StaleResultError):
        job.repository.commit(SCOPE, [reports[1].backup], version=3)
    assert job.step(2, 100).origin == "local"
    assert job.sums() == {"a": (6, 222), "b": (3, 111)}
    assert len(job.entries()) == 1


def test_a_zombie_attempt_that_ends_runs_later_changes_nothing_and_is_removed(job: Job) -> None:
    job.step(0, 1)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    barrier = context.Barrier(2)
    zombie = context.Process(target=attempt_in_a_process, args=(job.task(1, Meet(barrier)), answers))
    zombie.start()
    barrier.wait(60)  # It has claimed the store and is in the middle of its update.
    assert job.step(1, 10).origin == "restored"
    assert job.step(2, 100).origin == "local"
    barrier.wait(60)
    late = msgspec.msgpack.decode(answers.get(timeout=60), type=TaskReport)
    zombie.join()
    with pytest.raises(StaleResultError):
        job.repository.commit(SCOPE, [late.backup], version=9)
    assert len(job.entries()) == 2
    assert job.step(3, 1000).origin == "local"
    assert len(job.entries()) == 1
    assert job.sums() == {"a": (8, 2222), "b": (4, 1111)}


def test_reading_gives_the_store_back_for_the_next_run(job: Job) -> None:
    job.step(0, 1)
    before = job.entries()
    assert job.sums() == job.sums() == {"a": (2, 2), "b": (1, 1)}
    assert job.entries() == before
    assert job.step(1, 10).origin == "local"


def test_reading_on_another_machine_restores_once(job: Job) -> None:
    job.step(0, 1)
    job.disk = job.disk.with_name("another disk")
    job.sums()
    before = job.entries()
    assert len(before) == 1
    job.sums()
    assert job.entries() == before
    assert job.step(1, 10).origin == "local"


def test_a_reader_that_stops_early_or_fails_gives_the_store_back(job: Job) -> None:
    job.step(0, 1)
    before = job.entries()

    def endless(store: StoreReader, task: str) -> Iterator[pa.RecordBatch]:
        while True:
            yield rows()

    def failing(store: StoreReader, task: str) -> Iterator[pa.RecordBatch]:
        yield rows()
        raise RuntimeError("in mid-read")

    stopped = job.read(endless)
    next(stopped)
    stopped.close()
    assert job.entries() == before
    with pytest.raises(RuntimeError, match="mid-read"):
        list(job.read(failing))
    assert job.entries() == before
