"""Versions loaded in any order, written again, and overwritten by others: Spark's time travels and mixed up SSTs."""

import pytest

from blobstore.local.store import LocalStore
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    FirstWinsStore,
    Ids,
    both_formats,
    check_numbers,
    rows,
    with_and_without_changelogs,
    with_and_without_families,
    write,
    write_numbers,
)


@pytest.mark.spark_case(24)
@both_formats
@with_and_without_changelogs
async def test_time_travel_1_another_executor_overwrites_the_zip(
    bench: Bench, format_version: int, changelogs: bool
) -> None:
    conf: Conf = {"format_version": format_version, "changelogs": changelogs, "deltas_per_snapshot": 1}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 3))
        await store.maintain()
        await write_numbers(store, ids, range(3, 4))
        await store.maintain()
        async with bench.store(**conf) as other:
            await write_numbers(other, [None], range(1, 3))
            await other.maintain()
        await write_numbers(store, ids, range(3, 4))
        await store.maintain()
        await check_numbers(store, ids, [2, 3, 2])


@pytest.mark.spark_case(24)
@both_formats
@pytest.mark.parametrize("deltas", [1, 2])
async def test_time_travel_2_another_executor_overwrites_while_this_one_is_at_zero(
    bench: Bench, format_version: int, deltas: int
) -> None:
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": deltas}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 3))
        await store.maintain()
        await write_numbers(store, ids, range(3, 5))
        await store.load(0)
        async with bench.store(**conf) as other:
            await write_numbers(other, [None], range(1, 3))
            await other.maintain()
        await write_numbers(store, ids, range(3, 5))
        await store.maintain()
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [4])


@pytest.mark.spark_case(24)
@both_formats
@with_and_without_changelogs
async def test_time_travel_3_versions_are_written_again_after_maintenance(
    bench: Bench, format_version: int, changelogs: bool
) -> None:
    conf: Conf = {"format_version": format_version, "changelogs": changelogs, "deltas_per_snapshot": 0}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 4))
        await store.maintain()
        await write_numbers(store, ids, range(2, 5))
        await store.maintain()
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [4])


@pytest.mark.spark_case(24)
@both_formats
async def test_time_travel_4_a_snapshot_is_made_again_over_the_waiting_one(bench: Bench, format_version: int) -> None:
    conf: Conf = {"format_version": format_version, "deltas_per_snapshot": 2}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 3))
        await store.load(1, ids[1])
        store.put(b"3", b"3")
        await store.maintain()
        again = await store.commit()
        await store.maintain()
    async with bench.store(**conf) as store:
        await store.load(2, again.unique_id)
        assert rows(store) == {b"1": b"1", b"3": b"3"}


@pytest.mark.spark_case(24)
async def test_time_travel_5_an_abandoned_snapshot_of_format_1_is_not_uploaded(bench: Bench) -> None:
    files = FirstWinsStore(LocalStore(bench.root))
    conf: Conf = {"format_version": 1, "deltas_per_snapshot": 0}
    async with bench.store(files, **conf) as store:
        await write(store, 0, None, {b"a": b"1"})
        await store.load(0)
        store.put(b"a", b"1")
        await store.maintain()
        assert bench.snapshots() == []
        await store.commit()
        async with bench.store(files, **conf) as other:
            await other.load(1)
        await store.maintain()
        assert bench.snapshots() == [1]
        async with bench.store(files, **conf) as other:
            await other.load(1)
            assert rows(other) == {b"a": b"1"}


@pytest.mark.spark_case(25)
@both_formats
@with_and_without_changelogs
@pytest.mark.parametrize("overwrites", [False, True], ids=["first wins", "last wins"])
@pytest.mark.parametrize("first", [0, 1], ids=["scenario 1", "scenario 2"])
async def test_two_instances_never_mix_their_ssts(
    bench: Bench, format_version: int, changelogs: bool, overwrites: bool, first: int
) -> None:
    conf: Conf = {"format_version": format_version, "changelogs": changelogs, "deltas_per_snapshot": 1}
    plain = LocalStore(bench.root)
    files = plain if overwrites else FirstWinsStore(plain)
    async with bench.store(files, **conf) as one, bench.store(files, **conf) as two:
        committed = {}
        for store in ((one, two), (two, one))[first]:
            committed[store] = await write(store, 0, None, {b"a": b"1", b"b": b"1"})
            await store.maintain()
        second = await write(two, 1, committed[two].unique_id, {b"a": b"2", b"b": b"2"})
        await two.maintain()
        for store in (two, one):
            await store.load(1, committed[two].unique_id)
            assert rows(store) == {b"a": b"1", b"b": b"1"}
        for store in (two, one):
            await store.load(2, second.unique_id)
            assert rows(store) == {b"a": b"2", b"b": b"2"}


@pytest.mark.spark_case(25)
@both_formats
async def test_files_that_were_deleted_locally_are_not_reused(bench: Bench, format_version: int) -> None:
    conf: Conf = {"format_version": format_version, "changelogs": False}
    work = bench.new_work()
    async with bench.store(work=work, **conf) as store:
        ids: Ids = [None]
        ids.append((await write(store, 0, None, {b"a": b"1", b"b": b"1"})).unique_id)
        kept = {path.name for path in (work / "db").glob("*.sst")}
        for version in range(1, 7):
            ids.append((await write(store, version, ids[version], {b"c": b"%d" % version})).unique_id)
        for path in (work / "db").glob("*.sst"):
            if path.name not in kept:
                path.unlink()
        again = await write(store, 2, ids[2], {b"e": b"1", b"f": b"1"})
        await store.maintain()
        await store.load(0)
        await store.load(3, again.unique_id)
        assert rows(store) == {b"a": b"1", b"b": b"1", b"c": b"1", b"e": b"1", b"f": b"1"}


@pytest.mark.spark_case(25)
@both_formats
@with_and_without_families
async def test_version_0_loaded_again_after_a_snapshot_was_made(
    bench: Bench, format_version: int, families: bool
) -> None:
    # SPARK-51717: the files of the abandoned version 1 must not be named by the new one.
    conf: Conf = {"format_version": format_version, "column_families": families, "deltas_per_snapshot": 1}
    async with bench.store(**conf) as store:
        await write(store, 0, None, {b"old": b"1"})
        await store.maintain()
        first = await write(store, 0, None, {b"new": b"1"})
        await store.maintain()
        second = await write(store, 1, first.unique_id, {b"newer": b"2"})
        await store.maintain()
    async with bench.store(**conf) as store:
        await store.load(1, first.unique_id)
        assert rows(store) == {b"new": b"1"}
        await store.load(2, second.unique_id)
        assert rows(store) == {b"new": b"1", b"newer": b"2"}


@pytest.mark.spark_case(25)
@both_formats
@with_and_without_changelogs
async def test_a_compaction_between_two_snapshots_changes_neither(
    bench: Bench, format_version: int, changelogs: bool
) -> None:
    # SPARK-52637
    conf: Conf = {"format_version": format_version, "changelogs": changelogs, "deltas_per_snapshot": 1}
    ids: Ids = [None]
    expected: list[dict[bytes, bytes]] = [{}]
    async with bench.store(**conf, compact_on_commit=True) as store:
        for version in range(1, 6):
            expected.append({**expected[-1], b"k%d" % version: b"v%d" % version})
            ids.append((await write(store, version - 1, ids[-1], {b"k%d" % version: b"v%d" % version})).unique_id)
            if version in {2, 4}:
                await store.maintain()
        await store.maintain()
        for version in (5, 2, 4, 1, 3):
            await store.load(version, ids[version])
            assert rows(store) == expected[version]
    async with bench.store(**conf) as store:
        for version in (3, 5, 1):
            await store.load(version, ids[version])
            assert rows(store) == expected[version]
