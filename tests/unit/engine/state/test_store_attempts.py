"""Attempts that fail, are left or are cancelled at a bad moment leave nothing that counts for their successors."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import StoreUnavailableError
from engine.errors import DamagedError, EngineError, NotLoadedError, ProviderError, SnapshotUploadError
from engine.rocksdb import store as rocksdb
from engine.rocksdb.store import RocksDbSettings, StoreWriter
from engine.state import files as state_files
from engine.state.changelogs import ChangelogReader, open_changelog
from engine.state.load import StateLoader
from engine.state.loaded import ColumnFamilies, ColumnFamily
from engine.state.local_files import WorkingDir, look_at
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    check_numbers,
    interposed,
    last_load,
    rows,
    settings_of,
    write,
    write_numbers,
)
from tidemark import StateStore

NO_SPACE = OSError(28, "No space left on device")


def _slow(function: Callable[..., Any], reached: asyncio.Event) -> Callable[..., Any]:
    """A function of a thread that takes long enough to be cancelled meanwhile."""
    loop = asyncio.get_running_loop()

    def slowly(*args: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        time.sleep(0.1)
        return function(*args)

    return slowly


async def _cancelled(work: Any, reached: asyncio.Event) -> None:
    task = asyncio.create_task(work)
    await reached.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


# --- format 1, where only a number distinguishes two attempts


async def test_an_upload_of_an_attempt_that_was_left_never_lands_on_its_successor(bench: Bench) -> None:
    files = interposed(bench)
    reached, go = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        reached.set()
        await go.wait()

    async with bench.store(files, format_version=1, background_uploads=True, deltas_per_snapshot=2) as store:
        await write(store, 0, None, {b"a": b"1"})
        store.put(b"a", b"abandoned")
        files.before("put", ".sst", hang)
        await store.commit()
        await reached.wait()
        # A look does not mean that the batch is run again.
        await store.load(1, read_only=True)
        assert store._commits.uploads._running is not None
        await store.load(1)
        store.put(b"a", b"right")
        await asyncio.wait_for(store.commit(snapshot=True), 10)
        store.put(b"b", b"3")
        await store.commit()
        go.set()
        assert (await store.maintain()).uploaded is not None
        assert store.last_save.uploads_failed == 0
    async with bench.store(format_version=1) as store:
        await store.load(2, read_only=True)
        assert (rows(store), last_load(store).changelogs) == ({b"a": b"right"}, 0)
        await store.load(3, read_only=True)
        assert rows(store) == {b"a": b"right", b"b": b"3"}


@pytest.mark.parametrize("with_family", [False, True])
async def test_the_zip_of_a_commit_that_failed_never_stands_for_the_one_that_did_not(
    bench: Bench, with_family: bool
) -> None:
    files = interposed(bench)
    conf: Conf = {"format_version": 1, "column_families": True}
    async with bench.store(files, **conf) as store:
        await write(store, 0, None, {b"a": b"1"})
        store.put(b"a", b"failed")
        if with_family:
            store.add_family("more")
        files.fail("put", "2.changelog")
        with pytest.raises(StoreUnavailableError):
            await store.commit(snapshot=not with_family)
        assert (await write(store, 1, None, {b"a": b"second"})).snapshot_made
    async with bench.store(**conf) as store:
        await store.load(2)
        assert (rows(store), store.families) == ({b"a": b"second"}, ("default",))


# --- column families and repair


async def test_rows_of_one_family_never_come_back_under_the_name_of_another(bench: Bench) -> None:
    async with bench.store(column_families=True) as store:
        await write(store, 0, None, {b"k": b"v"})
        store.add_family("salaries")
        store.put(b"bob", b"1000", "salaries")
        second = await store.commit()
    bench.file(2, "zip").unlink()
    async with bench.store(column_families=True) as store:
        with pytest.raises(DamagedError, match="not a known column family"):
            await store.load(2, second.unique_id)


async def test_a_commit_after_a_repair_is_a_snapshot(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=2) as store:
        await write_numbers(store, ids, range(1, 6), maintain_every=1)
    bench.file(4, "zip").write_bytes(b"")
    async with bench.store(deltas_per_snapshot=100) as store:
        await write_numbers(store, ids, range(6, 7))
        assert last_load(store).snapshots_repaired == 1
        assert bench.snapshots() == [2, 4, 6]


def test_a_family_with_the_number_0_has_a_prefix_of_its_own() -> None:
    families = ColumnFamilies(
        is_enabled=True, families=(ColumnFamily("default", 0), ColumnFamily("other", 1, is_internal=True)), id_max=1
    )
    assert families.prefix("default") == b"\0\0"
    assert tuple((family.name, family.id) for family in families) == (("default", 0), ("other", 1))
    assert [families.is_internal(key) for key in (b"\0\0k", b"\1\0k")] == [False, True]
    assert ColumnFamilies(is_enabled=False).prefix("default") == b""


# --- cancelled


async def test_a_load_that_is_cancelled_while_rocksdb_opens_leaves_nothing_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.store() as store:
        first = await write(store, 0, None, {b"a": b"1"})
        await store.abort()
        reached = asyncio.Event()
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(StateLoader, "_open_db", _slow(StateLoader._open_db, reached))
                await _cancelled(store.load(1, first.unique_id), reached)
            await store.load(1, first.unique_id)
        finally:
            gc.enable()
        assert rows(store) == {b"a": b"1"}


async def test_a_commit_that_is_cancelled_while_it_captures_leaves_no_upload_pending(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.store(deltas_per_snapshot=1) as store:
        await write(store, 0, None, {b"a": b"1"})
        await store.maintain()
        store.put(b"b", b"2")
        reached = asyncio.Event()
        monkeypatch.setattr(store.manager, "capture", _slow(store.manager.capture, reached))
        await _cancelled(store.commit(), reached)
        assert store.manager.known._pending == {}


async def test_a_load_that_is_cancelled_while_it_reads_a_header_leaves_no_file_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=100) as store:
        await write_numbers(store, ids, range(1, 3))
    async with bench.store() as store:
        reached = asyncio.Event()
        steps: list[str] = []

        @contextmanager
        def opening(*args: Any) -> Iterator[ChangelogReader]:
            with open_changelog(*args) as reader:
                steps.append("open")
                yield reader
            steps.append("closed")

        monkeypatch.setattr(state_files, "open_changelog", _slow(opening, reached))
        await _cancelled(store.load(2, ids[2]), reached)
        assert steps == ["open", "closed"]


def test_an_upload_that_ends_with_its_event_loop_is_reported_and_made_good(bench: Bench) -> None:
    stores: list[StateStore] = []

    async def first() -> None:
        conf = settings_of(deltas_per_snapshot=1, background_uploads=True)
        stores.append(await StateStore.open(bench.root, bench.new_work(), conf))
        await write(stores[0], 0, None, {b"a": b"1"})

    async def second() -> None:
        (store,) = stores
        assert store.last_save.uploads_failed == 1
        assert store.manager.known._pending == {}
        with pytest.raises(SnapshotUploadError, match="was cancelled"):
            await store.maintain()
        assert (await store.commit()).snapshot_made
        await store.close()

    asyncio.run(first())
    asyncio.run(second())
    assert bench.snapshots() == [2]


# --- what failed, and what did not


async def test_a_snapshot_that_was_waited_for_makes_an_earlier_failure_good(bench: Bench) -> None:
    files = interposed(bench)
    async with bench.store(files, deltas_per_snapshot=100, background_uploads=True) as store:
        store._commits.uploads.is_due_again = True
        files.fail("put_if_absent", ".zip")
        await write(store, 0, None, {b"a": b"1"})
        await store._commits.uploads.settle()
        assert store.last_save.uploads_failed == 1
        await store.commit(snapshot=True)
        assert (await store.maintain()).uploaded is not None
        assert not (await store.commit()).snapshot_made


async def test_a_version_that_is_there_was_committed_although_the_disk_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.store() as store:
        await store.load(0)
        store.put(b"a", b"1")

        def full(*_: object, **__: object) -> None:
            raise NO_SPACE

        with monkeypatch.context() as patch:
            patch.setattr("engine.state.loaded.ChangelogWriter", full)
            committed = await store.commit()
        assert store.version is None
        with pytest.raises(NotLoadedError):
            store.get(b"a")
        await store.load(1, committed.unique_id)
        assert rows(store) == {b"a": b"1"}


async def test_commits_that_fail_leave_no_changelog_behind(bench: Bench) -> None:
    files, work = interposed(bench), bench.new_work()
    async with bench.store(files, work=work) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        for _ in range(3):
            files.fail("put_if_absent", "changelog")
            with pytest.raises(StoreUnavailableError):
                await write(store, 1, first.unique_id, {b"b": b"2"})
        assert [path.name for path in (work / "changelogs").iterdir()] == ["fetched"]


# --- damage, here and there


async def test_too_many_open_files_are_no_damaged_snapshot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=1) as store:
        await write_numbers(store, ids, range(1, 4), maintain_every=1)

    opening = StateLoader._open_db
    refusals = [os.strerror(24)]

    def refuse_once(self: StateLoader, base: Any, changes: Any = None) -> Any:
        if not refusals:
            return opening(self, base, changes)
        cause = Exception("IO error: While open a file for random read: 000011.sst: " + refusals.pop())
        raise EngineError(str(cause), operation="open") from cause

    async with bench.store(deltas_per_snapshot=1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(StateLoader, "_open_db", refuse_once)
            with pytest.raises(EngineError, match="Too many open files"):
                await store.load(3, ids[3])
        await check_numbers(store, ids, [3])


def _alter(path: Path, *, is_noticed: Callable[[bytes], bool]) -> None:
    """Flip a byte in the middle, and leave everything as it was that says which file it is."""
    before, status = look_at(path), path.stat()
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, 0, -1):
        data[at] ^= 0xFF
        if is_noticed(bytes(data)):
            break
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert look_at(path) == before


async def test_a_file_that_was_damaged_on_this_machine_is_fetched_again(bench: Bench) -> None:
    first_rows = {b"k%05d" % number: b"v%d" % number for number in range(2000)}
    async with bench.store(deltas_per_snapshot=1) as store:
        first = await write(store, 0, None, first_rows)
        await store.maintain()
        second = await write(store, 1, first.unique_id, {b"z": b"z"})
        await store.maintain()
    work = bench.new_work()
    async with bench.store(work=work, deltas_per_snapshot=1) as store:
        await store.load(1, first.unique_id)
        await store.abort()
        largest = max((work / "db").glob("*.sst"), key=lambda path: path.stat().st_size)
        _alter(largest, is_noticed=lambda _: True)
        await store.load(2, second.unique_id)
        assert last_load(store).files_reused > 0
        with pytest.raises(DamagedError):
            rows(store)
        # The same version once more: what is in the store is whole.
        await store.load(2, second.unique_id)
        assert (len(rows(store)), last_load(store).files_reused) == (2001, 0)
        assert last_load(store).snapshots_repaired == 0


async def test_a_snapshot_is_put_aside_only_if_it_does_not_open_from_the_store_either(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=1) as store:
        await write_numbers(store, ids, range(1, 4), maintain_every=1)
    async with bench.store(deltas_per_snapshot=1) as store:
        await check_numbers(store, ids, [2])
        opening = StateLoader._open_db
        opened: list[bool] = []

        def once_damaged(self: StateLoader, base: Any, changes: Any = None) -> Any:
            reused = self._manager.last_load.files_reused > 0
            opened.append(reused)
            if reused:
                raise DamagedError("injected", operation="open")
            return opening(self, base, changes)

        monkeypatch.setattr(StateLoader, "_open_db", once_damaged)
        await check_numbers(store, ids, [3])
        assert opened == [True, False]
        assert last_load(store).snapshots_repaired == 0


async def test_a_version_that_is_loaded_again_costs_no_file_twice(bench: Bench) -> None:
    ids: Ids = [None]
    # Three versions in all: the fourth file of a level may be compacted with the others at any moment.
    async with bench.store(deltas_per_snapshot=1) as store:
        await write_numbers(store, ids, range(1, 3), maintain_every=1)
    async with bench.store(deltas_per_snapshot=1) as store:
        for version, again in ((2, 0), (2, 1), (1, 0), (2, 0), (2, 1)):
            await store.load(version, ids[version])
            loaded = last_load(store)
            assert loaded.files_fetched + loaded.files_reused > 0
            assert loaded.files_fetched == 0 or not again
            await store.abort()
        # And what is built on it shares its files.
        await write_numbers(store, ids, range(3, 4), maintain_every=1)
        assert store.last_save.files_reused > 0
        await check_numbers(store, ids, [3, 2, 1])


# --- whose state it is


async def test_state_of_the_hdfs_backed_provider_is_not_written(bench: Bench) -> None:
    bench.root.mkdir()
    for name in ("1.delta", "2.delta", "2.snapshot"):
        (bench.root / name).write_bytes(b"x")
    async with bench.store(format_version=1) as store:
        with pytest.raises(ProviderError, match="HDFSBackedStateStoreProvider") as caught:
            await store.load(2)
        assert "spark convert --to rocksdb" in caught.value.hint


async def test_commits_uploads_and_loads_are_lines_with_the_place_of_the_state(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.state")
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=2) as store:
        await write_numbers(store, ids, range(1, 4), maintain_every=1)
    async with bench.store(deltas_per_snapshot=2) as store:
        await store.load(3, ids[3])
    said = [each.getMessage().removeprefix(f"{bench.root}: ") for each in caplog.records]
    assert f"loaded version 3_{ids[3]} from snapshot 2_{ids[2]}; changelogs replayed: 1" in said
    assert [line for line in said if line.startswith(f"committed version 2_{ids[2]}: ")]
    (uploaded,) = [line for line in said if line.startswith(f"uploaded the snapshot of version 2_{ids[2]}: ")]
    assert "files_copied=1" in uploaded
    assert not [line for line in said if str(bench.root) in line]


async def test_a_reader_repairs_without_knowing_of_changelogs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=2) as store:
        await write_numbers(store, ids, range(1, 6), maintain_every=1)
    bench.file(4, "zip").write_bytes(b"")
    async with bench.store(changelogs=False) as store:
        await check_numbers(store, ids, [5])
        assert last_load(store).snapshots_repaired == 1
        (record,) = [each for each in caplog.records if each.name == "engine.state.load"]
        assert record.levelname == "WARNING"
        assert str(bench.root) in record.getMessage()
        assert "does not open" in record.getMessage()
        # But what is built on it would have no changelog to be repaired with.
        with pytest.raises(Exception, match="zip"):
            await store.load(4, ids[4])


# --- the working directory


def test_a_process_that_was_forked_off_does_not_keep_the_working_directory(tmp_path: Path) -> None:
    place = WorkingDir.open(tmp_path / "work")
    # What a fork leaves to the child: the same open file.
    inherited = os.dup(place._lock)
    try:
        place.close()
        WorkingDir.open(tmp_path / "work").close()
    finally:
        os.close(inherited)


def test_a_store_that_cannot_be_made_readable_is_not_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StoreWriter.open(tmp_path / "db", RocksDbSettings()).close()

    def fail(*_: object) -> None:
        raise EngineError("injected", operation="open")

    with monkeypatch.context() as patch:
        patch.setattr(rocksdb, "_check_no_operands", fail)
        with pytest.raises(EngineError, match="injected") as failure:
            StoreWriter.open(tmp_path / "db", RocksDbSettings())
    # While the error is alive, and its frames with it.
    StoreWriter.open(tmp_path / "db", RocksDbSettings()).close()
    assert failure.value.operation == "open"
