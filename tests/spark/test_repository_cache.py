"""What a process keeps open from task to task, without Spark, and once with it."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.opening import StoreSettings
from engine.errors import UsageError
from engine.repository.repository import Repository, SyncRepository
from engine.settings import MIB, STORES_AT_ONCE, TransferSettings
from engine.spark.access import Access, RepositoryCache, SparkOptions, cached_here, open_on_driver
from engine.spark.spread import StoreOutcome, StoresTask, StoreWork, share_settings
from index.snapshot.model import Scope

SCOPE = Scope("job")


@pytest.fixture
def access(url: str) -> Access:
    repository, access = open_on_driver(url, SparkOptions())
    repository.close()
    return access


@pytest.fixture
def kept() -> Iterator[RepositoryCache]:
    kept = RepositoryCache(kept_max=2)
    yield kept
    kept.close()


def borrow(kept: RepositoryCache, access: Access, key: str = "") -> SyncRepository:
    with kept.borrow((access, key), access.open) as repository:
        assert repository.latest(SCOPE) is None
        return repository


def test_the_next_task_finds_the_repository_open(kept: RepositoryCache, access: Access) -> None:
    first = borrow(kept, access)
    assert first.loop.is_running
    assert borrow(kept, access) is first


def test_other_settings_of_the_store_are_another_repository(access: Access) -> None:
    other = msgspec.structs.replace(access, store=StoreSettings(in_flight_max=3))
    with access.borrow() as first, other.borrow() as second, access.borrow() as third:
        assert first.asynchronous.store is third.asynchronous.store
        assert second.asynchronous.store is not first.asynchronous.store


def test_other_limits_of_a_task_take_no_other_connections(access: Access) -> None:
    limits = TransferSettings(in_flight_max=3)
    with access.borrow() as first, access.borrow(limits) as second:
        assert first.asynchronous.store is second.asynchronous.store
        assert (first.asynchronous.settings, second.asynchronous.settings) == (access.transfer, limits)


def test_what_was_used_longest_ago_is_closed_first(kept: RepositoryCache, access: Access) -> None:
    opened = {name: borrow(kept, access, name) for name in ("a", "b", "a", "c")}
    assert {name: repository.loop.is_running for name, repository in opened.items()} == {
        "a": True,
        "b": False,
        "c": True,
    }
    assert borrow(kept, access, "b") is not opened["b"]


def test_what_is_in_use_is_not_evicted(kept: RepositoryCache, access: Access) -> None:
    with kept.borrow("a", access.open) as a, kept.borrow("b", access.open) as b, kept.borrow("c", access.open) as c:
        assert a.loop.is_running
    assert [repository.loop.is_running for repository in (a, b, c)] == [True, True, False]


def test_an_error_leaves_the_repository_open(kept: RepositoryCache, access: Access) -> None:
    first = borrow(kept, access)
    with pytest.raises(UsageError), kept.borrow((access, ""), access.open):
        raise UsageError("is refused", operation="backup")
    assert borrow(kept, access) is first


def test_an_interrupted_task_takes_the_repository_along(kept: RepositoryCache, access: Access) -> None:
    with pytest.raises(KeyboardInterrupt), kept.borrow((access, ""), access.open) as first:
        raise KeyboardInterrupt
    assert not first.loop.is_running
    assert borrow(kept, access) is not first


def test_a_repository_that_others_use_outlives_the_one_who_was_interrupted(
    kept: RepositoryCache, access: Access
) -> None:
    with kept.borrow("a", access.open) as first:
        with pytest.raises(KeyboardInterrupt), kept.borrow("a", access.open) as second:
            raise KeyboardInterrupt
        assert second is first
        assert first.latest(SCOPE) is None
        assert borrow(kept, access) is not first
    assert not first.loop.is_running


def test_a_repository_whose_loop_has_ended_is_opened_again(kept: RepositoryCache, access: Access) -> None:
    first = borrow(kept, access)
    first.close()
    assert borrow(kept, access) is not first


def test_threads_share_what_is_kept(kept: RepositoryCache, access: Access) -> None:
    barrier = threading.Barrier(8)

    def use(_: int) -> SyncRepository:
        barrier.wait()
        return borrow(kept, access)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(use, range(8)))) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12 warns of what is tested
def test_a_forked_process_opens_its_own_and_lets_the_parents_alone(access: Access) -> None:
    with access.borrow() as first:
        first.latest(SCOPE)
    child = os.fork()
    if not child:
        # Whatever happens, this copy of the test run must not go on.
        try:
            with access.borrow() as own:
                is_right = own.loop is not first.loop and own.latest(SCOPE) is None
            cached_here().close()
            os._exit(0 if is_right and not own.loop.is_running else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with access.borrow() as again:
        assert again.loop is first.loop
        assert again.latest(SCOPE) is None


def test_a_process_ends_without_a_word_about_what_it_kept(url: str) -> None:
    script = f"""
from engine.spark.access import SparkOptions, open_on_driver
from index.snapshot.model import Scope
repository, access = open_on_driver({url!r}, SparkOptions())
repository.close()
with access.borrow() as kept:
    kept.latest(Scope("job"))
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- several stores at once ---


class Meeting(StoresTask, frozen=True, kw_only=True):
    """The store "slow" waits for all the others: if any of them waited for it, it would be for ever."""

    others: asyncio.Semaphore
    others_count: int = 0

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        if work.store == "slow":
            for _ in range(self.others_count):
                await self.others.acquire()
        self.others.release()
        if work.store == "broken":
            raise UsageError("is broken", operation="restore")
        # For the test: what it may use.
        settings = repository.settings
        return StoreOutcome(files=settings.in_flight_max, bytes_kept=settings.memory_bytes_max)


def batch(stores: list[str]) -> pa.RecordBatch:
    work = [StoreWork(task="0", store=store, path="/", reference=None) for store in stores]
    return pa.record_batch([pa.array(map(msgspec.msgpack.encode, work), pa.binary())], ["work"])


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, object]]:
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_slow_store_and_a_broken_one_cost_only_themselves(access: Access) -> None:
    stores = ["slow", "broken", *map(str, range(30))]
    task = Meeting(access=access, scope=SCOPE, others=asyncio.Semaphore(0), others_count=31)
    rows = rows_of(task(iter([batch(stores[:20]), batch(stores[20:])])))
    assert [row["store"] for row in rows if not row["ok"]] == ["broken"]
    assert {row["store"] for row in rows} == set(stores)
    for row in rows:
        if not row["ok"]:
            continue
        # All of them together are within what is allowed for the process.
        assert row["files"] == 16 // STORES_AT_ONCE
        assert row["bytes_kept"] == 64 * MIB // STORES_AT_ONCE


def test_a_store_that_is_alone_has_everything(access: Access) -> None:
    task = Meeting(access=access, scope=SCOPE, others=asyncio.Semaphore(0))
    (row,) = rows_of(task(iter([batch(["0"])])))
    assert (row["files"], row["bytes_kept"]) == (16, 64 * MIB)
    assert rows_of(task(iter([]))) == []


@pytest.mark.parametrize(
    "given, stores_count, in_flight_max, expected",
    [
        pytest.param({}, 64, 16, (8, 2, 8 * MIB), id="as much as there is"),
        pytest.param({}, 3, 16, (3, 5, 64 * MIB // 3), id="few stores"),
        pytest.param({}, 64, 4, (4, 1, 16 * MIB), id="few requests"),
        pytest.param({"in_flight_max": 1}, 64, 16, (1, 1, 64 * MIB), id="one request"),
        pytest.param({"memory_bytes_max": 16 * MIB}, 64, 16, (2, 8, 8 * MIB), id="little memory"),
        pytest.param({"memory_bytes_max": 4096 * MIB}, 64, 1024, (8, 2, 512 * MIB), id="much memory"),
    ],
)
def test_shares_are_within_what_was_given(
    given: dict[str, Any], stores_count: int, in_flight_max: int, expected: tuple[int, int, int]
) -> None:
    settings = TransferSettings(**given)
    at_once, share = share_settings(settings, in_flight_max=in_flight_max, stores_count=stores_count)
    assert (at_once, share.in_flight_max, share.memory_bytes_max) == expected
    assert share.range_bytes >= settings.pack_bytes_max
    assert share.pack_bytes_max == settings.pack_bytes_max


# --- in Spark's workers ---


class WhoWorks(msgspec.Struct, frozen=True, kw_only=True):
    """Reports which process it is and which repository it was lent."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            with self.access.borrow() as repository:
                repository.latest(SCOPE)
                yield pa.record_batch(
                    [[os.getpid()], [os.getppid()], [id(repository.asynchronous.store)]], ["pid", "parent", "opened"]
                )


@pytest.mark.spark
def test_sparks_workers_keep_one_repository_each(spark: SparkSession, access: Access) -> None:
    opened: dict[int, set[int]] = {}
    parents: set[int] = set()
    for _ in range(2):
        frame = spark.range(0, 4, 1, 4).mapInArrow(WhoWorks(access=access), "pid bigint, parent bigint, opened bigint")
        for row in frame.toArrow().to_pylist():
            opened.setdefault(row["pid"], set()).add(row["opened"])
            parents.add(row["parent"])
    # 8 tasks: the workers, forked from one daemon, are used again, and each has opened once.
    assert len(opened) < 8
    assert len(parents) == 1
    assert all(len(repositories) == 1 for repositories in opened.values())
