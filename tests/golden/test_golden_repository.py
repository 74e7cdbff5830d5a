"""A repository that commit 9c11d49 has written is read, continued and collected (format version 1)."""

import os
import shutil
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from blobstore.base import BytesBody, list_blobs, read_blob
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.inspect.verify import Level
from engine.records.find import find_complete
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.codec import RECORD_BYTES_MAX, decode_pin
from index.snapshot.keys import pin_key
from index.snapshot.model import Scope
from index.spark.checkpoint import decode_checkpoint_backup
from tests.contract.store_calls import get_bytes
from tests.doubles import SteppedClock
from tests.golden.make_repository import (
    BATCHES,
    FLIGHTS,
    GONE,
    NAME,
    PIN_ID,
    PINNED,
    REPLAY,
    SETTINGS,
    STATES,
    tree,
    write_tree,
)
from tests.unit.engine.checkpoint.live_query import check_rows
from tests.unit.engine.workbench import read_tree

ARCHIVE: Final = Path(__file__).with_name("repository_9c11d49.tar.xz")
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The directory, with the times that it had, at least 200 days before this machine's now.

    So that no store here is ahead of this machine, where a collection would take nothing for old.
    """
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path, filter="data")
    root = tmp_path / "repository"
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    newest_ns = max(path.stat().st_mtime_ns for path in files)
    earlier_ns = max(0, newest_ns - (time.time_ns() - 200 * DAY_MS * 1_000_000))
    for path in files:
        at_ns = path.stat().st_mtime_ns - earlier_ns
        os.utime(path, ns=(at_ns, at_ns))
    return root


async def in_memory(unpacked: Path, clock: SteppedClock, *, days_later: int = 0) -> MemoryStore:
    """Copy the repository to a store whose clock does not move, an hour after the last request.

    A copy that is made days later keeps no times.
    """
    directory, memory = LocalStore(unpacked), MemoryStore(clock=clock)
    blobs = [blob async for blob in list_blobs(directory, "")]
    for blob in blobs:
        clock.now_ms = blob.created_at_ms + days_later * DAY_MS
        ttl_ms = None if blob.expires_at_ms is None else blob.expires_at_ms - blob.created_at_ms
        data = await get_bytes(directory, blob.key)
        await memory.put(blob.key, BytesBody(data), ttl_ms=ttl_ms)
    clock.now_ms = max(blob.created_at_ms for blob in blobs) + days_later * DAY_MS + HOUR_MS
    return memory


@pytest.fixture(params=["directory", "memory", "copied"])
async def repository(request: pytest.FixtureRequest, unpacked: Path) -> AsyncIterator[Repository]:
    days_later = 100 if request.param == "copied" else 0
    in_place = request.param == "directory"
    store = LocalStore(unpacked) if in_place else await in_memory(unpacked, SteppedClock(), days_later=days_later)
    async with await Repository.open(store, settings=SETTINGS) as repository:
        yield repository


async def spark_scope(repository: Repository) -> Scope:
    (scope,) = [scope for scope in await repository.scopes() if scope.job.startswith("spark-")]
    return scope


async def check_all(repository: Repository, expected: dict[Scope, dict[int, int]], scratch: Path) -> None:
    """Whether each scope has exactly these commits, and each comes back byte for byte."""
    for scope, states in expected.items():
        commits = {commit.pointer.number: commit for commit in await repository.commits(scope)}
        assert set(commits) == set(states), scope
        for number, state in states.items():
            target = scratch / f"{scope.job}-{scope.task}-{number}"
            await repository.restore(commits[number], target, task=scope.task or "0")
            assert read_tree(target) == tree(state)
            shutil.rmtree(target)


async def test_every_commit_comes_back_byte_for_byte(repository: Repository, tmp_path: Path) -> None:
    spark = await spark_scope(repository)
    assert set(await repository.scopes()) - {GONE} == {*STATES, spark}
    await check_all(repository, STATES, tmp_path / "restored")
    assert await repository.latest(GONE) is None
    (name,) = await repository.names(FLIGHTS)
    assert (name.name, name.source.number) == (NAME, 2)
    report = await repository.verify(level=Level.CONTENT)
    assert not report.problems
    assert report.commits_count == sum(map(len, STATES.values())) + 2


async def test_every_job_goes_on(repository: Repository, tmp_path: Path) -> None:
    expected = {scope: dict(states) for scope, states in STATES.items()}
    for scope, states in expected.items():
        newest = max(states)
        directory = write_tree(tmp_path / "state", states[newest] + 1)
        result = await repository.backup(scope, directory, task=scope.task or "0")
        assert (result.stats.files_added, result.stats.files_retained) == (6, 19)
        commit = await repository.commit(scope, [result])
        assert commit.pointer.number == newest + 1
        states[newest + 1] = states[newest] + 1
    forgotten = await repository.commit(GONE, [await repository.backup(GONE, write_tree(tmp_path / "state", 50))])
    assert forgotten.pointer.number > 1_000_000_000
    await repository.rewind(next(c for c in await repository.commits(FLIGHTS) if c.pointer.number == 2))
    expected[FLIGHTS][8] = 2
    named = Scope("of the name")
    await repository.fork(await repository.find(FLIGHTS, name=NAME), named)
    expected |= {GONE: {forgotten.pointer.number: 50}, named: {1: 2}}
    await check_all(repository, expected, tmp_path / "restored")


async def test_a_backup_of_a_checkpoint_comes_back_and_goes_on(repository: Repository, tmp_path: Path) -> None:
    commit = await repository.latest(await spark_scope(repository))
    assert commit is not None
    backup = decode_checkpoint_backup(commit.record.offsets)
    assert backup is not None
    assert backup.batch == BATCHES - 1
    for replayed in (False, True):
        target = tmp_path / f"replayed-{replayed}"
        await restore_checkpoint(repository, target, RestoreChoice(job=commit.scope.job, replayed=replayed))
        await check_rows(target, tmp_path / f"work-{replayed}", batch=BATCHES - 1, partitions=1)
    done = await backup_checkpoint(repository, tmp_path / "replayed-False")
    assert not done.is_new


@pytest.mark.parametrize("days_later", [0, 100])
async def test_a_collection_takes_what_nothing_needs_and_nothing_else(
    unpacked: Path, tmp_path: Path, days_later: int
) -> None:
    clock = SteppedClock()
    memory = await in_memory(unpacked, clock, days_later=days_later)
    async with await Repository.open(memory, settings=SETTINGS) as repository:
        spark = await spark_scope(repository)
        # The reader that holds the pin is alive as yet.
        await repository.collect(Retention(keep_last=1), delete_share_max=1.0)
        left = {scope: {max(states): states[max(states)]} for scope, states in STATES.items()}
        left[FLIGHTS][2] = 2
        await check_all(repository, left, tmp_path / "restored")
        data = await read_blob(memory, pin_key(PIN_ID), size_bytes_max=RECORD_BYTES_MAX)
        pin = decode_pin(data, subject=PIN_ID)
        await repository.restore_reference(pin.stores[0], tmp_path / "pinned")
        assert read_tree(tmp_path / "pinned") == tree(PINNED)
        for _ in range(2):
            clock.advance(3 * DAY_MS)
            await repository.collect(Retention(keep_last=1), delete_share_max=1.0)
        await check_all(repository, left, tmp_path / "restored")
        assert left[REPLAY]
        assert await find_complete(repository.store, await repository.commits(spark)) is not None
        assert not (await repository.verify(level=Level.CONTENT)).problems
        keys = [blob.key async for blob in list_blobs(memory, "")]
        # Of the forgotten job only its boundary is left, and of the abandoned upload nothing.
        assert [key.split("/")[0] for key in keys if "/gone/" in key] == ["log"]
        assert not [blob.key async for blob in list_blobs(memory, "") if blob.expires_at_ms is not None]
