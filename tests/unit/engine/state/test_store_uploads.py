"""Snapshots on their way while the query goes on (design 0004, S3 and C7)."""

import asyncio
from pathlib import Path

import pytest

from blobstore.errors import StoreUnavailableError
from engine.errors import EngineError, SnapshotUploadError
from index.errors import FormatError
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    check_numbers,
    dir_of,
    interposed,
    last_load,
    rows,
    settings_of,
    write,
    write_numbers,
)
from tidemark import StateStore

BACKGROUND: Conf = {"background_uploads": True}


class Gate:
    """Holds a request until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.open.wait()


def _files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@both_formats
async def test_commits_loads_and_aborts_change_nothing_in_a_snapshot_on_its_way(
    bench: Bench, format_version: int
) -> None:
    files = interposed(bench)
    gate = Gate()
    files.before("put", "SSTs", gate)
    work = bench.new_work()
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": 3, "compact_on_commit": True}
    ids: Ids = [None]
    async with bench.store(files, work=work, **conf, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 4))
        await gate.reached.wait()
        (captured,) = (work / "captured").iterdir()
        before = _files_of(captured)
        assert any(name.endswith(".sst") for name in before)
        await write_numbers(store, ids, range(4, 6))
        store.put(b"lost", b"1")
        await store.abort()
        await store.load(0, read_only=True)
        await store.load(5, ids[5])
        assert _files_of(captured) == before
        assert bench.snapshots() == []
        gate.open.set()
        await store.maintain()
        assert bench.snapshots()[0] == 3
        assert not captured.exists()
    async with bench.store(**conf) as store:
        # From the snapshot alone.
        bench.file(3, "changelog").unlink()
        await check_numbers(store, ids, [3, 5, 4])


async def test_a_newer_snapshot_takes_the_place_of_one_that_waits(bench: Bench) -> None:
    files = interposed(bench)
    gate = Gate()
    files.before("put", "SSTs", gate)
    work = bench.new_work()
    ids: Ids = [None]
    async with bench.store(files, work=work, deltas_per_snapshot=1, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 2))
        await gate.reached.wait()
        await write_numbers(store, ids, range(2, 6))
        # One on its way and one that waits; what has been replaced is gone from this machine.
        assert len(list((work / "captured").iterdir())) == 2
        gate.open.set()
        assert (await store.maintain()).uploaded is not None
        assert bench.snapshots() == [1, 5]
        assert list((work / "captured").iterdir()) == []
        await check_numbers(store, ids, [5, 3, 1])


async def test_a_failed_upload_undoes_no_commit_and_the_next_commit_is_due_again(bench: Bench) -> None:
    files = interposed(bench)
    ids: Ids = [None]
    async with bench.store(files, deltas_per_snapshot=3, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 3))
        files.fail("put_if_absent", ".zip")
        await write_numbers(store, ids, range(3, 4))
        await store._commits.uploads.settle()
        assert bench.snapshots() == []
        await store.load(3, ids[3])
        committed = await store.commit()
        assert committed.snapshot_made
        ids.append(committed.unique_id)
        assert store.last_save.uploads_failed == 1
        # The later one made it good: there is nothing to report any more.
        maintained = await store.maintain()
        assert maintained.uploaded is not None
        assert bench.snapshots() == [4]
        assert not (await store.commit()).snapshot_made
    async with bench.store() as store:
        await check_numbers(store, ids, [1, 2, 3])


@pytest.mark.parametrize("shown_by", ["maintain", "close"])
async def test_a_failed_upload_is_reported(bench: Bench, shown_by: str) -> None:
    files = interposed(bench)
    work = bench.new_work()
    place = await dir_of(files, bench.root)
    store = await StateStore.open(place, work, settings_of(deltas_per_snapshot=1, **BACKGROUND))
    files.fail("put", "SSTs")
    committed = await write(store, 0, None, {b"a": b"1"})
    with pytest.raises(SnapshotUploadError, match="injected") as failure:
        await getattr(store, shown_by)()
    assert isinstance(failure.value.__cause__, StoreUnavailableError)
    assert "1_" in str(failure.value)
    # Once is enough.
    await store.close()
    assert sorted(path.name for path in work.iterdir()) == ["lock"]
    async with bench.store(work=work) as other:
        await other.load(1, committed.unique_id)
        assert rows(other) == {b"a": b"1"}


async def test_what_went_wrong_in_the_block_counts_more_than_a_failed_upload(bench: Bench) -> None:
    files = interposed(bench)
    place = await dir_of(files, bench.root)
    files.fail("put", "SSTs")
    store = await StateStore.open(place, bench.new_work(), settings_of(deltas_per_snapshot=1, **BACKGROUND))

    async def work() -> None:
        async with store:
            await write(store, 0, None, {b"a": b"1"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as failure:
        await work()
    assert "injected" in "".join(failure.value.__notes__)


async def test_closing_finishes_what_is_on_its_way(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=1, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 5))
    assert bench.snapshots()[-1] == 4
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_that_is_cancelled_leaves_no_task_and_no_lock(bench: Bench) -> None:
    files = interposed(bench)
    gate = Gate()
    files.before("put", "SSTs", gate)
    work = bench.new_work()
    place = await dir_of(files, bench.root)
    store = await StateStore.open(place, work, settings_of(deltas_per_snapshot=1, **BACKGROUND))
    await write(store, 0, None, {b"a": b"1"})
    await gate.reached.wait()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing}, timeout=10)
    assert closing.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with bench.store(work=work) as other:
        await other.load(0)


async def test_maintenance_that_is_cancelled_stops_no_upload(bench: Bench) -> None:
    files = interposed(bench)
    gate = Gate()
    files.before("put", "SSTs", gate)
    async with bench.store(files, deltas_per_snapshot=1, **BACKGROUND) as store:
        await write(store, 0, None, {b"a": b"1"})
        await gate.reached.wait()
        maintaining = asyncio.create_task(store.maintain())
        await asyncio.sleep(0)
        maintaining.cancel()
        await asyncio.wait({maintaining})
        assert maintaining.cancelled()
        gate.open.set()
        await store.maintain()
        assert bench.snapshots() == [1]


async def test_maintenance_does_not_wait_for_what_is_committed_meanwhile(bench: Bench) -> None:
    files = interposed(bench)
    first, last = Gate(), Gate()
    files.before("put", "SSTs", first)
    ids: Ids = [None]
    async with bench.store(files, deltas_per_snapshot=1, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 2))
        await first.reached.wait()
        await write_numbers(store, ids, range(2, 3))
        maintaining = asyncio.create_task(store.maintain())
        await asyncio.sleep(0)
        await store.load(2, ids[2])
        assert store._loaded is not None
        files.before("put_if_absent", f"3_{store._loaded.next_id}.zip", last)

        async def commit() -> None:
            # While the second one is on its way.
            await store.commit()

        files.before("put_if_absent", f"2_{ids[2]}.zip", commit)
        first.open.set()
        await asyncio.wait_for(maintaining, 10)
        assert bench.snapshots() == [1, 2]
        await last.reached.wait()
        last.open.set()
    assert bench.snapshots() == [1, 2, 3]


async def test_what_a_failed_load_has_fetched_is_fetched_again(bench: Bench) -> None:
    async with bench.store(file_checksums=False) as store:
        ids: Ids = [None]
        await write_numbers(store, ids, range(1, 4))
    path = bench.file(3, "changelog")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    async with bench.store() as store:
        with pytest.raises((EngineError, FormatError), match=r"3_.*\.changelog"):
            await store.load(3, ids[3])
        path.write_bytes(whole)
        await check_numbers(store, ids, [3])


async def test_an_upload_of_a_history_that_was_left_shortens_no_lineage(bench: Bench) -> None:
    files = interposed(bench)
    gate = Gate()
    files.before("put", "SSTs", gate)
    ids: Ids = [None]
    async with bench.store(files, deltas_per_snapshot=3, **BACKGROUND) as store:
        await write_numbers(store, ids, range(1, 4))
        await gate.reached.wait()
        again = ids[:2]
        await write_numbers(store, again, range(2, 3))
        gate.open.set()
        await store._commits.uploads.settle()
        assert bench.snapshots() == [3]
        # Spark goes by the number here, and would leave an empty lineage.
        assert [item.unique_id for item in store.lineage] == again[1:]
        await write_numbers(store, again, range(3, 5))
    async with bench.store() as store:
        await check_numbers(store, again, [4, 3, 2])
        await check_numbers(store, ids, [3, 2])


async def test_metrics_report_what_a_commit_and_a_load_have_cost(bench: Bench) -> None:
    async with bench.store(deltas_per_snapshot=2) as store:
        assert store.last_load is None
        await store.load(0)
        for number in range(10):
            store.put(b"k%d" % number, b"v" * 100)
        first = await store.commit()
        saved = store.last_save
        assert saved.of is not None
        assert (saved.of.version, saved.records, saved.snapshot_made, saved.uploaded) == (1, 10, False, None)
        assert saved.changelog_bytes == bench.file(1, "changelog").stat().st_size
        assert 0 < saved.changelog_s <= saved.total_s
        second = await write(store, 1, first.unique_id, {b"a": b"1"})
        assert store.last_save.snapshot_made
        assert not store.last_save.snapshot_inline
        await store.maintain()
        saved = store.last_save
        assert saved.uploaded is not None
        assert (saved.uploaded.version, saved.files_copied, saved.files_reused) == (2, len(bench.ssts()), 0)
        assert saved.bytes_copied == sum(path.stat().st_size for path in (bench.root / "SSTs").iterdir())
        assert saved.zip_bytes > 0
        third = await write(store, 2, second.unique_id, {b"b": b"1"})
        fourth = await write(store, 3, third.unique_id, {b"c": b"1"})
        await store.maintain()
        assert store.last_save.files_reused >= 1
        await store.load(3, third.unique_id)
        loaded = last_load(store)
        assert loaded.base is not None
        assert (loaded.of.version, loaded.base.version, loaded.changelogs, loaded.records) == (3, 2, 1, 1)
        assert loaded.files_fetched + loaded.files_reused >= 1
        phases = loaded.resolve_s + loaded.fetch_s + loaded.open_s + loaded.replay_s
        assert 0 < phases <= loaded.total_s + 1e-6
    async with bench.store() as store:
        await store.load(4, fourth.unique_id)
        assert last_load(store).bytes_fetched > 0
        assert (last_load(store).files_reused, last_load(store).was_loaded) == (0, False)
