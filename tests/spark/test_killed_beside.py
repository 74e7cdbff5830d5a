"""kill -9 of a driver with a job beside its query, and of the command that takes both back (design 0005, 5a).

Whenever it comes: at the end the job has seen each row of the input once, which plain SQL counts.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from engine.repository.repository import SyncRepository
from engine.spark import BackupChoice, backup_checkpoint
from engine.spark.stateful_job import StatefulJob
from index.snapshot.model import Scope
from tests.spark.beside_driver import DDL, JOB, QUERY_JOB, Moment, Settings, feed, opened_job, restore_words, run_query
from tests.spark.counting import SUMS_DDL, read_sums
from tests.spark.processes import below, send, wait_for_end

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
BATCHES = 4


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of ours for a block, and kill it then, with all its processes, if it still runs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("ab") as output:
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        pids = [process.pid, *below(process.pid)]
        send(pids, signal.SIGKILL)
        process.wait()
        wait_for_end(pids)


def kill_when(settings: Settings, is_time: Callable[[], bool]) -> bool:
    """Run the driver until something holds, and kill it then; return whether it was still running."""
    root = Path(settings.root)
    for name in ("hung", "within"):
        (root / name).unlink(missing_ok=True)
    path = root / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    ends_at_s = time.monotonic() + DEADLINE_S
    with started(["tests.spark.beside_driver", str(path)], root / "log") as driver:
        while driver.poll() is None and not is_time():
            assert time.monotonic() < ends_at_s, (root / "log").read_text()[-3000:]
            time.sleep(0.002)
        is_killed = driver.poll() is None
    if not is_killed:
        assert driver.returncode == 0, (root / "log").read_text()[-3000:]
    (root / "within").unlink(missing_ok=True)
    return is_killed


def kill_at(settings: Settings) -> None:
    """Run the driver until it says that its moment has come, and kill it then."""
    assert kill_when(settings, (Path(settings.root) / "hung").exists)


def assert_exactly_once(spark: SparkSession, job: StatefulJob, root: Path) -> None:
    rows = spark.read.schema(DDL).json(str(root / "in")).dropDuplicates(["id"])
    expected = rows.groupBy("key").agg({"*": "count", "amount": "sum"})
    expected = expected.selectExpr("key", "`count(1)`", "`sum(amount)`")
    assert sorted(job.read(spark, read_sums, SUMS_DDL).collect()) == sorted(expected.collect())


def assert_each_batch_once(url: str, batches: int) -> None:
    with SyncRepository.open(url) as repository:
        versions = [commit.record.version for commit in repository.commits(Scope(JOB))]
    assert sorted(versions) == list(range(batches))


def committed(settings: Settings, batch: int) -> Path:
    return settings.checkpoint / "commits" / str(batch)


def job_version(url: str) -> int:
    with SyncRepository.open(url) as repository:
        newest = repository.latest(Scope(JOB))
    assert newest is not None
    return newest.record.version


@pytest.mark.soak  # test_for_each_batch shows it in one process
def test_driver_killed_between_the_two_commits_goes_on(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """The short one: the job has the batch, and the query does not know it."""
    settings = Settings(root=str(tmp_path), repository=url, moment="between", batch=1)
    feed(tmp_path, 2)
    kill_at(settings)
    assert job_version(url) == 1
    assert not committed(settings, 1).exists()
    again = msgspec.structs.replace(settings, moment="")
    with opened_job(again) as job:
        run_query(spark, job, again)
        assert_exactly_once(spark, job, tmp_path)
    assert_each_batch_once(url, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestMatrix:
    @pytest.mark.parametrize("moment", ["before", "within", "between", ""])
    def test_driver_killed_at_a_moment_goes_on(
        self, spark: SparkSession, url: str, tmp_path: Path, moment: Moment
    ) -> None:
        """At the first batch, and again at a later one."""
        feed(tmp_path, BATCHES)
        done = Settings(root=str(tmp_path), repository=url)
        for batch in (0, 2):
            settings = msgspec.structs.replace(done, moment=moment, batch=batch)
            if not moment:
                # Of the query's commit, which comes last: whatever is under way then is of the next batch.
                assert kill_when(settings, committed(settings, batch).exists)
            else:
                kill_at(settings)
                assert not committed(settings, batch).exists()
        with opened_job(done) as job:
            run_query(spark, job, done)
            assert_exactly_once(spark, job, tmp_path)
        assert_each_batch_once(url, BATCHES)

    @pytest.mark.parametrize("seed", range(3))
    def test_driver_killed_at_any_time_goes_on(self, spark: SparkSession, url: str, tmp_path: Path, seed: int) -> None:
        rng = random.Random(seed)
        batches = 30
        feed(tmp_path, batches)
        settings = Settings(root=str(tmp_path), repository=url)
        kills = 0
        for _ in range(6):
            done = len(list((settings.checkpoint / "offsets").glob("[0-9]*")))
            ahead, delay_s = done + rng.randrange(1, 4), rng.uniform(0, 0.6)
            due_s = 0.0

            def is_time(ahead: int = ahead, delay_s: float = delay_s) -> bool:
                nonlocal due_s
                # From the offsets of a batch on, anything may be under way.
                if not due_s and (settings.checkpoint / "offsets" / str(ahead)).exists():
                    due_s = time.monotonic() + delay_s
                return bool(due_s) and time.monotonic() >= due_s

            kills += kill_when(settings, is_time)
        assert kills
        with opened_job(settings) as job:
            run_query(spark, job, settings)
            assert_exactly_once(spark, job, tmp_path)
        assert_each_batch_once(url, batches)

    def test_restore_of_both_killed_before_it_publishes_is_run_again(
        self, spark: SparkSession, url: str, tmp_path: Path
    ) -> None:
        settings = self._run_past_a_backup(spark, url, tmp_path)
        kill_at(msgspec.structs.replace(settings, moment="publish"))
        assert job_version(url) == settings.batch
        # The old checkpoint is there, whole, and ahead of the job.
        assert committed(settings, settings.batch + 2).exists()
        self._restore_and_go_on(spark, url, tmp_path, settings)

    @pytest.mark.parametrize("seed", range(2))
    def test_restore_of_both_killed_at_any_time_is_run_again(
        self, spark: SparkSession, url: str, tmp_path: Path, seed: int
    ) -> None:
        rng = random.Random(seed)
        settings = self._run_past_a_backup(spark, url, tmp_path)
        seconds = 1.5
        at_the_end = 0
        for _ in range(12):
            began_s = time.monotonic()
            with started(["engine.cli", *restore_words(settings)], tmp_path / "log") as process:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(0.3, seconds))
                    seconds = time.monotonic() - began_s
                at_the_end += process.poll() == 0
            # The target is absent, the old one or whole; the old one is never lost.
            assert committed(settings, settings.batch).exists() or list(tmp_path.glob("query.aside-*"))
        assert at_the_end < 12
        self._restore_and_go_on(spark, url, tmp_path, settings)

    def _run_past_a_backup(self, spark: SparkSession, url: str, root: Path) -> Settings:
        """Run both for two batches, back the query up, and run them for two more."""
        settings = Settings(root=str(root), repository=url, batch=1, target=str(root / "query"))
        with opened_job(settings) as job:
            feed(root, 2)
            run_query(spark, job, settings)
            backup_checkpoint(spark, url, settings.checkpoint, BackupChoice(job=QUERY_JOB))
            feed(root, 2)
            run_query(spark, job, settings)
        return settings

    def _restore_and_go_on(self, spark: SparkSession, url: str, root: Path, settings: Settings) -> None:
        subprocess.run([sys.executable, "-m", "engine.cli", *restore_words(settings)], cwd=ROOT, check=True)
        assert job_version(url) == settings.batch
        assert not committed(settings, settings.batch + 1).exists()
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        assert not left, "what a killed restore has gathered goes with the next one"
        with opened_job(settings) as job:
            feed(root, 1)
            run_query(spark, job, settings)
            assert_exactly_once(spark, job, root)
