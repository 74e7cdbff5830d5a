"""Commits that fail, attempts that nobody could kill, and stores that are closed at a bad moment."""

import asyncio
from pathlib import Path

import pytest

from blobstore.errors import CheckpointFileExistsError, CheckpointUnknownError, StoreError, StoreUnavailableError
from engine.errors import NotLoadedError, TargetBusyError, TargetError, UsageError
from index.errors import DamagedChangelogError, FormatError
from index.spark.changelog import Record
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    check_numbers,
    dir_of,
    interposed,
    rows,
    settings_of,
    with_and_without_changelogs,
    with_and_without_families,
    write,
    write_numbers,
)
from tidemark import StateStore


@pytest.mark.spark_case(11)
@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_after_a_failed_commit_and_after_an_abort_the_last_version_is_whole(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    files = interposed(bench)
    conf: Conf = {"format_version": format_version, "column_families": families, "changelogs": changelogs}
    ids: Ids = [None]
    operation = "put_if_absent" if format_version == 2 else "put"
    async with bench.store(files, **conf) as store:
        expected: dict[bytes, bytes] = {}
        for version in range(1, 6):
            row = {b"%d" % version: b"%d" % version}
            ids.append((await write(store, version - 1, ids[-1], row)).unique_id)
            expected.update(row)
        await store.load(5, ids[5])
        store.put(b"6", b"6")
        files.fail(operation, "changelog" if changelogs else ".zip")
        with pytest.raises(StoreUnavailableError, match="injected"):
            await store.commit()
        assert store.version is None
        with pytest.raises(NotLoadedError):
            store.put(b"6", b"6")
        await store.load(5, ids[5], read_only=True)
        assert rows(store) == expected
        await store.load(5, ids[5])
        store.put(b"6", b"6")
        await store.abort()
        assert (store.version, store.lineage) == (None, ())
        with pytest.raises(NotLoadedError):
            await store.commit()
        await store.load(5, ids[5], read_only=True)
        assert rows(store) == expected
        sixth = await write(store, 5, ids[5], {b"6": b"6"})
        assert sixth.version == 6
        assert rows(store) == {**expected, b"6": b"6"}


@pytest.mark.spark_case(11)
@pytest.mark.parametrize("maintains_first", [False, True])
@both_formats
async def test_a_store_is_closed_before_or_after_maintenance(
    bench: Bench, format_version: int, maintains_first: bool
) -> None:
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": 1}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 4))
        if maintains_first:
            assert (await store.maintain()).uploaded is not None
    # Without background uploads a snapshot that waits is given up: its changelogs are there.
    assert bench.snapshots() == ([3] if maintains_first else [])
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [1, 2, 3])


@pytest.mark.spark_case(11)
@both_formats
async def test_maintenance_uploads_while_a_task_is_writing(bench: Bench, format_version: int) -> None:
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": 0}
    async with bench.store(**conf) as store:
        first = await write(store, 0, None, {b"0": b"0"})
        await store.load(1, first.unique_id)
        store.put(b"1", b"1")
        await asyncio.wait_for(asyncio.create_task(store.maintain()), 5)
        assert bench.snapshots() == [1]
        store.put(b"2", b"2")
        second = await store.commit()
    async with bench.store(**conf) as store:
        await store.load(1, first.unique_id)
        assert rows(store) == {b"0": b"0"}
        await store.load(2, second.unique_id)
        assert rows(store) == {b"0": b"0", b"1": b"1", b"2": b"2"}


@pytest.mark.spark_case(48)
@both_formats
async def test_a_cancelled_task_can_still_abort(bench: Bench, format_version: int) -> None:
    # SPARK-54585: there a rollback in an interrupted thread failed half way.
    work = bench.new_work()
    async with bench.store(work=work, format_version=format_version) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        writing = asyncio.Event()

        async def work_until_cancelled() -> None:
            await store.load(1, first.unique_id)
            store.put(b"a", b"2")
            writing.set()
            try:
                await asyncio.Event().wait()
            finally:
                await store.abort()

        task = asyncio.create_task(work_until_cancelled())
        await writing.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert [path.name for path in (work / "changelogs").iterdir()] == ["fetched"]
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1"}
        await write(store, 1, first.unique_id, {b"a": b"3"})


@pytest.mark.parametrize("operation", ["put_if_absent", "put"])
async def test_a_commit_that_is_cancelled_leaves_nothing_loaded_and_nothing_behind(
    bench: Bench, operation: str
) -> None:
    files = interposed(bench)
    work = bench.new_work()
    changelogs = operation == "put_if_absent"
    async with bench.store(files, work=work, changelogs=changelogs) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        await store.load(1, first.unique_id)
        store.put(b"a", b"2")
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        files.before(operation, "changelog" if changelogs else "SSTs", hang)
        task = asyncio.create_task(store.commit())
        await reached.wait()
        with pytest.raises(UsageError, match="a commit is under way"):
            store.get(b"a")
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert store.version is None
        assert list((work / "captured").iterdir()) == []
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1"}
        await write(store, 1, first.unique_id, {b"a": b"3"})
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("operation, key", [("list_page", ""), ("get", ".zip")])
async def test_a_load_that_is_cancelled_leaves_nothing_loaded(bench: Bench, operation: str, key: str) -> None:
    files = interposed(bench)
    async with bench.store(changelogs=False) as store:
        first = await write(store, 0, None, {b"a": b"1"})
    async with bench.store(files, changelogs=False) as store:
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        files.before(operation, key, hang)
        task = asyncio.create_task(store.load(1, first.unique_id))
        await reached.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert store.version is None
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1"}
        assert asyncio.all_tasks() == {asyncio.current_task()}


@both_formats
async def test_an_answer_that_is_lost_is_no_commit(bench: Bench, format_version: int) -> None:
    files = interposed(bench)
    async with bench.store(files, format_version=format_version) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        await store.load(1, first.unique_id)
        store.put(b"a", b"2")
        files.lose_answer("put_if_absent" if format_version == 2 else "put", "changelog")
        with pytest.raises((CheckpointUnknownError, StoreUnavailableError)):
            await store.commit()
        assert store.version is None
        # What came of it does not matter: the next attempt has a name of its own, or takes its place.
        again = await write(store, 1, first.unique_id, {b"a": b"3"})
    async with bench.store(format_version=format_version) as store:
        await store.load(2, again.unique_id)
        assert rows(store) == {b"a": b"3"}


async def test_with_ids_nothing_is_overwritten(bench: Bench) -> None:
    async with bench.store() as store:
        await store.load(0)
        assert store._loaded is not None
        assert store._loaded.next_id is not None
        taken = bench.root / f"1_{store._loaded.next_id}.changelog"
        taken.parent.mkdir(parents=True, exist_ok=True)
        taken.write_bytes(b"somebody else's")
        store.put(b"a", b"1")
        with pytest.raises(CheckpointFileExistsError):
            await store.commit()
        assert taken.read_bytes() == b"somebody else's"
        assert store.version is None


async def test_a_damaged_changelog_is_never_passed_over(bench: Bench) -> None:
    async with bench.store(file_checksums=False) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        second = await write(store, 1, first.unique_id, {b"a": b"2"})
    path = bench.file(2, "changelog")
    path.write_bytes(path.read_bytes()[:-10])
    async with bench.store() as store:
        await store.load(1, first.unique_id)
        with pytest.raises((DamagedChangelogError, Exception), match=r"2_.*\.changelog") as failure:
            await store.load(2, second.unique_id)
        assert failure.value.__class__ is not Exception
        assert store.version is None
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1"}


async def test_a_changelog_that_does_not_fit_its_checksum_is_refused(bench: Bench) -> None:
    async with bench.store(codec="zstd") as store:
        first = await write(store, 0, None, {b"a": b"1"})
    path = bench.file(1, "changelog")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with bench.store(codec="zstd") as store:
        with pytest.raises(FormatError, match=r"1_.*\.changelog"):
            await store.load(1, first.unique_id)


async def test_a_write_that_fails_half_way_is_not_committed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.store() as store:
        await store.load(0)
        store.put(b"a", b"1")
        assert store._loaded is not None
        assert store._loaded.writer is not None

        def full(record: Record) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store._loaded.writer, "write", full)
        with pytest.raises(TargetError, match="No space") as failure:
            store.put(b"b", b"2")
        assert failure.value.hint == "free space where the working directory is"
        with pytest.raises(UsageError, match="a write has failed"):
            await store.commit()
        assert store.version is None
        assert bench.changelogs() == []


async def test_a_full_disk_at_the_commit_is_reported_as_such(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.store() as store:
        await store.load(0)
        store.put(b"a", b"1")
        assert store._loaded is not None
        assert store._loaded.writer is not None

        def full() -> int:
            raise OSError(28, "No space left on device", "changelogs/written-1")

        monkeypatch.setattr(store._loaded.writer, "finish", full)
        with pytest.raises(TargetError, match="commit changelogs/written-1: No space"):
            await store.commit()
        assert store.version is None


async def test_a_close_that_was_cancelled_while_it_waited_can_be_done_again(bench: Bench) -> None:
    files = interposed(bench)
    work = bench.new_work()
    async with bench.store() as store:
        first = await write(store, 0, None, {b"a": b"1"})
    place = await dir_of(files, bench.root)
    store = await StateStore.open(place, work, settings_of())
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    files.before("list_page", "", hang)
    loading = asyncio.create_task(store.load(1, first.unique_id))
    await reached.wait()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    loading.cancel()
    await asyncio.wait({loading})
    await store.close()
    async with bench.store(work=work) as store:
        await store.load(1, first.unique_id)


async def test_two_stores_never_share_a_working_directory(bench: Bench, tmp_path: Path) -> None:
    work = bench.new_work()
    store = await StateStore.open(bench.root, work, settings_of())
    with pytest.raises(TargetBusyError, match="another state store works in it"):
        await StateStore.open(bench.root, work, settings_of())
    await store.load(0)
    await store.close()
    async with bench.store(work=work) as other:
        await other.load(0)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "db").write_text("mine")
    with pytest.raises(TargetError, match="holds something else: db"):
        await StateStore.open(bench.root, precious, settings_of())
    assert (precious / "db").read_text() == "mine"


async def test_what_a_dead_process_left_is_removed(bench: Bench) -> None:
    work = bench.new_work()
    for name in ("db", "captured/1", "changelogs/fetched"):
        (work / name).mkdir(parents=True)
        (work / name / "000001.sst").write_text("stale")
    (work / "lock").touch()
    async with bench.store(work=work) as store:
        assert not list(work.rglob("*.sst"))
        await store.load(0)
        assert rows(store) == {}


async def test_calls_that_wait_take_turns(bench: Bench) -> None:
    async with bench.store() as store:
        await store.load(0)
        store.put(b"a", b"1")
        committed, _, _ = await asyncio.gather(store.commit(), store.maintain(), store.load(0))
        assert (committed.version, store.version) == (1, 0)
        await store.load(1, committed.unique_id)
        assert rows(store) == {b"a": b"1"}


async def test_a_store_that_does_not_answer_costs_no_repair(bench: Bench) -> None:
    files = interposed(bench)
    async with bench.store(deltas_per_snapshot=1) as store:
        ids: Ids = [None]
        await write_numbers(store, ids, range(1, 4), maintain_every=1)
    async with bench.store(files, deltas_per_snapshot=1) as store:

        async def down() -> None:
            raise StoreUnavailableError("injected", operation="get")

        bench.ssts()
        files.before("get", "3_", down)
        files.before("get_range", "3_", down)
        with pytest.raises(StoreError):
            await store.load(3, ids[3])
        assert store.version is None
