"""Two attempts at one version, and files of attempts that nobody could kill: Spark's failure injections."""

import asyncio

import pytest

from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from index.errors import VersionMissingError
from tests.unit.engine.state.state_store_kit import Bench, Conf, LateStore, both_formats, interposed, rows, write


@pytest.mark.spark_case(39)
async def test_commits_that_race_return_each_its_own_ids(bench: Bench) -> None:
    async with bench.store() as one, bench.store() as two:
        first = await write(one, 0, None, {b"a": b"1"})
        for store in (one, two):
            await store.load(1, first.unique_id)
            store.put(b"by", b"one" if store is one else b"two")
        committed = await asyncio.gather(one.commit(), two.commit())
        assert {c.version for c in committed} == {2}
        assert {c.base_unique_id for c in committed} == {first.unique_id}
        assert [c.unique_id for c in committed] == [one.unique_id, two.unique_id]
        assert len({first.unique_id, *(c.unique_id for c in committed)}) == 3
        for reader in (one, two):
            await reader.load(2, committed[1].unique_id, read_only=True)
            assert rows(reader) == {b"a": b"1", b"by": b"two"}


@pytest.mark.spark_case(40)
@both_formats
@pytest.mark.parametrize("what", [".sst", ".zip"])
async def test_a_version_whose_snapshot_was_not_uploaded_is_not_there(
    bench: Bench, format_version: int, what: str
) -> None:
    files = interposed(bench)
    conf: Conf = {"format_version": format_version, "changelogs": False}
    async with bench.store(files, **conf) as store:
        first = await write(store, 0, None, {b"version": b"1.1"})
        store.put(b"version", b"2.1")
        doomed = store._loaded.next_id if store._loaded is not None else None
        files.fail("put_if_absent" if what == ".zip" and format_version == 2 else "put", what)
        with pytest.raises(StoreUnavailableError):
            await store.commit()
        await store.load(1, first.unique_id)
        assert rows(store) == {b"version": b"1.1"}
        with pytest.raises(VersionMissingError, match=r"2.*\.changelog"):
            await store.load(2, doomed)
        await store.load(0)
        files.fail("list", "", StoreUnavailableError("injected", operation="list"))
        files.fail("list_page", "", StoreUnavailableError("injected", operation="list"))
        with pytest.raises(StoreUnavailableError):
            await store.load(1, first.unique_id)


@pytest.mark.spark_case(41)
@both_formats
async def test_the_zip_of_a_zombie_comes_late(bench: Bench, format_version: int) -> None:
    files = LateStore(LocalStore(bench.root))
    conf: Conf = {"format_version": format_version, "changelogs": False}
    async with bench.store(files, **conf) as store:
        first = await write(store, 0, None, {b"version": b"1.1"})
        await store.load(1, first.unique_id)
        files.delayed = ".zip"
        store.put(b"version", b"2.1")
        with pytest.raises(StoreUnavailableError):
            await store.commit()
        files.delayed = ""
        second = await write(store, 1, first.unique_id, {b"version": b"2.2"})
        await files.arrive()
    async with bench.store(**conf) as store:
        await store.load(2, second.unique_id)
        # Without ids the last writer wins, as in Spark; with them, nothing but the committed attempt counts.
        assert store.get(b"version") == (b"2.2" if format_version == 2 else b"2.1")


@pytest.mark.spark_case(42)
@both_formats
async def test_the_changelog_of_a_zombie_comes_late(bench: Bench, format_version: int) -> None:
    files = LateStore(LocalStore(bench.root))
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": 5}
    async with bench.store(files, **conf) as store:
        first = await write(store, 0, None, {b"version": b"1.1"})
        await store.load(1, first.unique_id)
        files.delayed = ".changelog"
        store.put(b"version", b"2.1")
        with pytest.raises(StoreUnavailableError):
            await store.commit()
        files.delayed = ""
        second = await write(store, 1, first.unique_id, {b"version": b"2.2"})
        await files.arrive()
        await store.load(1, first.unique_id)
        await store.load(2, second.unique_id)
    async with bench.store(**conf) as store:
        await store.load(2, second.unique_id)
        assert store.get(b"version") == (b"2.2" if format_version == 2 else b"2.1")


@pytest.mark.spark_case(43)
async def test_a_snapshot_of_an_abandoned_attempt_that_comes_late_is_ignored(bench: Bench) -> None:
    conf: Conf = {"deltas_per_snapshot": 2}
    async with bench.store(**conf) as store, bench.store(**conf) as zombie:
        first = await write(store, 0, None, {b"version": b"1.1"})
        await write(zombie, 1, first.unique_id, {b"version": b"2.1"})
        second = await write(store, 1, first.unique_id, {b"version": b"2.2"})
        third = await write(store, 2, second.unique_id, {b"foo": b"bar"})
        await zombie.maintain()
        assert bench.snapshots() == [2]
    async with bench.store(**conf) as store:
        await store.load(3, third.unique_id)
        assert rows(store) == {b"version": b"2.2", b"foo": b"bar"}
