"""Spark's Python workers, and whole drivers, killed and stopped in the middle of their requests to a real S3 server.

A request waits at a gate; then its sender is killed with SIGKILL, or stopped with SIGSTOP until every TTL of its
uploads is over, while another driver goes on and collects. Whatever was acknowledged restores, nobody is notified of a
commit that is none, and two collections leave exactly what has a reason to be there.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from blobstore.base import list_blobs
from blobstore.opening import open_store
from engine.repository.repository import Repository, SyncRepository
from engine.rocksdb.store import StoreReader
from engine.spark import StatefulJob, collect
from index.plan.commits import Commit, Retention
from tests.fault_rules import Predicate, Stage, on
from tests.servers.s3_server import S3Server
from tests.spark.counting import add, read_sums
from tests.spark.mortal_driver import JOB, KEEP_LAST, TASKS, rows_of, sums_of
from tests.spark.processes import Gate, below, gated, send, wait_for_end, workers_below
from tests.spark.s3_storage import workers_sign_as
from tests.walker import expected_keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.s3,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
# The least that a margin above the slowest PUT of S3 allows, about.
TTL_MS = 21_000
MARGIN_MS = 7_000
ANSWER_TIMEOUT_S = 240.0
TRIES_MAX = 6


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits, and whose process is hit meanwhile."""

    name: str
    # What the driver is asked to do.
    command: str
    when: Predicate
    at: Stage = Stage.REQUEST


UPLOAD = Moment(name="upload", command="run", when=on("PutObject", key="/blobs/"))
UPLOADED = Moment(name="uploaded", command="run", when=on("PutObject", key="/indexes/"), at=Stage.ANSWER)
COMMIT = Moment(name="commit", command="run", when=on("PutObject", key=".commit"))
COMMITTED = Moment(name="committed", command="run", when=on("PutObject", key=".commit"), at=Stage.ANSWER)
SETTLE = Moment(name="settle", command="run", when=on("PutObjectTagging", "DeleteObjectTagging", key="/blobs/"))
LIST = Moment(name="list", command="collect", when=on("ListObjectsV2", key="blobs/"))
MARK = Moment(name="mark", command="collect", when=on("GetObject", key="/indexes/"))
BOUNDARY = Moment(name="boundary", command="collect", when=on("PutObject", key=".boundary"), at=Stage.ANSWER)
DELETE = Moment(name="delete", command="collect", when=on("DeleteObjects"))
OF_WORKERS = (UPLOAD, UPLOADED, LIST, MARK)
OF_DRIVERS = (UPLOAD, COMMIT, COMMITTED, SETTLE, LIST, BOUNDARY, DELETE)


class Driver:
    """A driver in a process of its own; it is given one command after another."""

    def __init__(self, url: str, directory: Path, environment: dict[str, str]) -> None:
        directory.mkdir(parents=True)
        self._log = directory / "log"
        words = [sys.executable, "-m", "tests.spark.mortal_driver", url, str(directory / "local")]
        with self._log.open("w") as errors:
            self._process = Popen(  # the block of the test ends it
                words,
                cwd=ROOT,
                env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                text=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def everything(self) -> list[int]:
        """The driver, its JVM and its workers."""
        return [self.pid, *below(self.pid)]

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        pids = self.everything
        send(pids, signal.SIGCONT)
        send(pids, signal.SIGKILL)
        self._process.communicate()
        wait_for_end(pids)


class Case:
    """A repository, a driver that goes on whatever happens to others, and what was acknowledged to anybody."""

    def __init__(self, url: str, server: S3Server, gate: Gate, directory: Path, stack: ExitStack) -> None:
        self.url, self.gate = url, gate
        self.acknowledged: dict[int, int] = {}
        self._server, self._directory, self._stack = server, directory, stack
        self._numbers = itertools.count()
        self.survivor = self.start(server.endpoint_url)

    def start(self, endpoint_url: str) -> Driver:
        """A driver that finds the server there."""
        environment = self._server.environment() | {"AWS_ENDPOINT_URL_S3": endpoint_url}
        driver = Driver(self.url, self._directory / f"driver-{next(self._numbers)}", environment)
        self._stack.callback(driver.end)
        assert driver.hear()["ok"]
        return driver

    def note(self, command: str, answer: dict[str, Any]) -> bool:
        """What a driver was acknowledged counts, once for each number."""
        if answer["ok"] and command == "run":
            assert self.acknowledged.setdefault(answer["number"], answer["version"]) == answer["version"]
        return bool(answer["ok"])

    def do(self, driver: Driver, command: str) -> None:
        """Until it succeeds: anyone who lost loads again and does the work again."""
        for _ in range(TRIES_MAX):
            driver.send(command)
            if self.note(command, driver.hear()):
                return
        raise AssertionError(f"{command} does not succeed")

    def check(self) -> None:
        """Every commit that is left restores to what its version holds, and the newest is as new as any reported."""
        with SyncRepository.open(self.url) as repository:
            commits = repository.commits(JOB)
            assert commits
            assert commits[0].pointer.number >= max(self.acknowledged)
            by_number = {commit.pointer.number: commit.record.version for commit in commits}
            kept = sorted(self.acknowledged)[-KEEP_LAST:]
            # Not all of the newest need have been acknowledged to anybody; none of those acknowledged is another.
            assert all(by_number.get(n, self.acknowledged[n]) == self.acknowledged[n] for n in kept)
            for commit in commits:
                target = self._directory / f"restored-{next(self._numbers)}"
                assert restored_sums(repository, commit, target) == sums_of(commit.record.version)


def restored_sums(repository: SyncRepository, commit: Commit, directory: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for reference in commit.record.stores:
        target = directory / reference.task
        repository.restore(commit, target, task=reference.task, store=reference.store)
        with StoreReader.open(target) as store:
            for batch in read_sums(store, reference.task):
                columns = (batch.column(name).to_pylist() for name in ("key", "seen", "amount"))
                found |= {key: (seen, amount) for key, seen, amount in zip(*columns, strict=True)}
    return found


async def assert_no_leak(url: str) -> None:
    """Past the TTL of every upload and pin, two collections leave exactly what has a reason to be there."""
    repository = await Repository.open(open_store(url))
    store = repository.store
    ends_at_s = time.monotonic() + 90
    await asyncio.sleep(TTL_MS / 1000 + 1)
    while True:
        for _ in range(2):
            report = await repository.collect(Retention(keep_last=KEEP_LAST), delete_share_max=1)
            assert not report.failed_count
        left = {blob.key async for blob in list_blobs(store, "")}
        if left == await expected_keys(store, await store.now_ms()):
            break
        # A pin of a reader that was killed is kept for a margin longer than it holds.
        assert time.monotonic() < ends_at_s, left
        await asyncio.sleep(5)
    assert await store.list_unfinished("") == ()
    await repository.close()


@pytest.fixture(scope="module")
def case(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One for all, so that each meets what those before it have left."""
    directory = tmp_path_factory.mktemp("killed")
    bucket = "killed-processes"
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        s3_server.client.create_bucket(Bucket=bucket)
        url = f"s3://{bucket}/state"
        SyncRepository.init(url, ttl_ms=TTL_MS, margin_ms=MARGIN_MS, collection_period_ms=TTL_MS).close()
        gate = stack.enter_context(gated(s3_server.endpoint_url))
        case = Case(url, s3_server, gate, directory, stack)
        for _ in range(KEEP_LAST + 1):
            case.do(case.survivor, "run")
        yield case


@pytest.fixture
def victim(case: Case) -> Iterator[Driver]:
    driver = case.start(case.gate.endpoint_url)
    # What there is to delete, and a local copy of its own.
    case.do(driver, "run")
    yield driver
    driver.end()


@contextmanager
def waiting(case: Case, driver: Driver, moment: Moment) -> Iterator[None]:
    """A block in which a driver's request waits."""
    case.gate.close(moment.when, at=moment.at)
    driver.send(moment.command)
    case.gate.wait()
    try:
        yield
    finally:
        case.gate.open()


def outlive_the_ttl(case: Case) -> None:
    """Meanwhile another driver goes on, and collects what has expired."""
    ends_at_s = time.monotonic() + TTL_MS / 1000 + 2
    for _ in range(2):
        case.do(case.survivor, "run")
    time.sleep(max(0.0, ends_at_s - time.monotonic()))
    case.do(case.survivor, "collect")


@pytest.mark.soak
@pytest.mark.timeout(600)
class TestMatrix:
    @pytest.mark.parametrize("moment", OF_WORKERS, ids=lambda moment: moment.name)
    def test_workers_are_killed(self, case: Case, victim: Driver, moment: Moment) -> None:
        """Spark repeats what they did."""
        with waiting(case, victim, moment):
            workers = workers_below(victim.pid)
            assert workers
            send(workers, signal.SIGKILL)
        assert case.note(moment.command, victim.hear())
        case.check()

    @pytest.mark.parametrize("moment", OF_WORKERS, ids=lambda moment: moment.name)
    def test_workers_stop_for_longer_than_the_ttl(self, case: Case, victim: Driver, moment: Moment) -> None:
        with waiting(case, victim, moment):
            workers = workers_below(victim.pid)
            assert workers
            send(workers, signal.SIGSTOP)
            outlive_the_ttl(case)
        send(workers, signal.SIGCONT)
        answer = victim.hear()
        # The survivor has committed meanwhile: whatever the victim has uploaded is too late.
        assert moment.command == "collect" or not answer["ok"]
        case.check()
        case.do(victim, moment.command)
        case.check()

    @pytest.mark.parametrize("moment", OF_DRIVERS, ids=lambda moment: moment.name)
    def test_a_driver_is_killed(self, case: Case, victim: Driver, moment: Moment) -> None:
        """What it has left does not hinder the next."""
        with waiting(case, victim, moment):
            pids = victim.everything
            send([victim.pid], signal.SIGKILL)
            wait_for_end(pids[1:])
        case.check()
        for command in ("run", "collect"):
            case.do(case.survivor, command)
        case.check()

    @pytest.mark.parametrize("moment", OF_DRIVERS, ids=lambda moment: moment.name)
    def test_a_driver_stops_for_longer_than_the_ttl_and_wakes_as_a_zombie(
        self, case: Case, victim: Driver, moment: Moment
    ) -> None:
        with waiting(case, victim, moment):
            send(victim.everything, signal.SIGSTOP)
            outlive_the_ttl(case)
        send(victim.everything, signal.SIGCONT)
        answer = victim.hear()
        case.note(moment.command, answer)
        # A record that was there before the others was built upon: only then is it a commit.
        assert moment.command == "collect" or answer["ok"] <= (moment in {COMMITTED, SETTLE})
        case.check()
        for driver in (victim, case.survivor):
            case.do(driver, "run")
            case.do(driver, "collect")
        case.check()

    def test_nothing_is_left_that_has_no_reason_to_be_there(self, case: Case) -> None:
        asyncio.run(assert_no_leak(case.url))
        case.check()


@pytest.mark.soak
def test_workers_are_killed_in_a_backup_and_in_a_collection(
    spark: SparkSession, s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short one: killed with a blob half sent, and with a list half read; and stopped in between."""
    url = f"s3://{s3_bucket}/state"
    driver = os.getpid()
    with ExitStack() as stack:
        gate = stack.enter_context(gated(s3_server.endpoint_url))
        stack.enter_context(workers_sign_as(spark, s3_server, tmp_path))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gate.endpoint_url)
        monkeypatch.setitem(spark.sparkContext.environment, "AWS_ENDPOINT_URL_S3", gate.endpoint_url)
        repository = stack.enter_context(SyncRepository.init(url))
        job = stack.enter_context(
            StatefulJob(url, job=JOB.job, key_columns=["key"], tasks=TASKS, update=add, local_root=tmp_path / "local")
        )
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def run(version: int) -> Commit:
            rows = spark.createDataFrame(rows_of(version), "key string, amount bigint")
            return job.run(rows, version=version, offsets=f"v{version}").commit

        commit = run(1)
        for version, number in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
            gate.close(UPLOAD.when)
            running = pool.submit(run, version)
            gate.wait()
            workers = workers_below(driver)
            assert workers
            send(workers, number)
            gate.open()
            if number == signal.SIGSTOP:
                time.sleep(0.5)
                send(workers, signal.SIGCONT)
            commit = running.result(ANSWER_TIMEOUT_S)
            assert restored_sums(repository, commit, tmp_path / f"v{version}") == sums_of(version)
        gate.close(LIST.when)
        collecting = pool.submit(lambda: collect(spark, url, Retention(keep_last=1), delete_share_max=1))
        gate.wait()
        send(workers_below(driver), signal.SIGKILL)
        gate.open()
        assert not collecting.result(ANSWER_TIMEOUT_S).failed_count
        assert restored_sums(repository, commit, tmp_path / "after") == sums_of(3)
