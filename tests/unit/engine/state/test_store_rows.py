"""Rows: order, merges, column families and the number of keys."""

import pytest

from engine.errors import DamagedError, UsageError
from engine.state.changelogs import open_changelog
from engine.state.loaded import ColumnFamilies, ColumnFamily, after_prefix
from index.spark.changelog import DELETE_RANGE
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    both_formats,
    last_load,
    rows,
    with_and_without_changelogs,
    with_and_without_families,
    write,
)


@pytest.mark.spark_case(15)
@both_formats
@pytest.mark.parametrize("operator, joined", [(1, b","), (2, b"")])
async def test_operands_are_the_same_after_a_replay(
    bench: Bench, format_version: int, operator: int, joined: bytes
) -> None:
    conf: Conf = {
        "format_version": format_version,
        "column_families": True,
        "deltas_per_snapshot": 5,
        "merge_operator_version": operator,
    }
    async with bench.store(**conf) as store:
        await store.load(0)
        store.put(b"a", b"1")
        store.merge(b"a", b"2")
        store.merge(b"list", b"x")
        first = await store.commit()
        store.merge(b"a", b"3")
        store.merge(b"list", b"y")
        second = await store.commit()
        store.delete(b"a")
        store.put(b"list", b"z")
        third = await store.commit()
        assert bench.changelogs() == [1, 2, 3]
        # Families make version 1 a snapshot; everything after it is replayed.
        assert bench.snapshots() == [1]
    async with bench.store(**conf) as store:
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1" + joined + b"2", b"list": b"x"}
        await store.load(2, second.unique_id)
        assert rows(store) == {b"a": joined.join([b"1", b"2", b"3"]), b"list": b"x" + joined + b"y"}
        await store.load(3, third.unique_id)
        assert rows(store) == {b"list": b"z"}
        assert store.num_keys == 1


@pytest.mark.spark_case(15)
@both_formats
async def test_every_commit_writes_a_changelog_and_an_empty_one_too(bench: Bench, format_version: int) -> None:
    async with bench.store(format_version=format_version, deltas_per_snapshot=2) as store:
        await store.load(0)
        for expected in (False, True, False, True):
            committed = await store.commit()
            assert committed.snapshot_made is expected
        assert bench.changelogs() == [1, 2, 3, 4]
        assert (store.last_save.records, store.last_save.of is not None) == (0, True)
        forced = await store.commit(snapshot=True)
        assert forced.snapshot_made
        assert store.last_save.snapshot_inline
        assert bench.snapshots() == [5]
    async with bench.store(format_version=format_version) as store:
        await store.load(5, forced.unique_id)
        assert rows(store) == {}


async def test_a_merge_needs_column_families_where_changelogs_are_written(bench: Bench) -> None:
    async with bench.store() as store:
        await store.load(0)
        store.put(b"a", b"1")
        with pytest.raises(UsageError, match="needs column families"):
            store.merge(b"a", b"2")
        # Nothing of it was done: the commit is whole.
        await store.commit()
        assert rows(store) == {b"a": b"1"}
    async with bench.store(changelogs=False) as store:
        await store.load(0)
        store.merge(b"a", b"1")
        store.merge(b"a", b"2")
        await store.commit()
        assert rows(store) == {b"a": b"12"}


@with_and_without_families
async def test_rows_come_in_the_order_of_their_keys(bench: Bench, families: bool) -> None:
    async with bench.store(column_families=families) as store:
        await store.load(0)
        keys = [b"", b"\x00", b"a", b"a\x00", b"ab", b"b", b"\xff", b"\xff\xff"]
        for key in reversed(keys):
            store.put(key, b"v" + key)
        assert [key for key, _ in store.items()] == keys
        assert [key for key, _ in store.items(b"a")] == [b"a", b"a\x00", b"ab"]
        assert [key for key, _ in store.items(start=b"ab")] == [b"ab", b"b", b"\xff", b"\xff\xff"]
        assert [key for key, _ in store.items(b"a", start=b"a\x00")] == [b"a\x00", b"ab"]
        assert [key for key, _ in store.items(b"a", start=b"b")] == []
        scan = store.items()
        assert next(scan) == (b"", b"v")
        store.put(b"a", b"changed")
        store.delete(b"b")
        assert list(scan) == [(key, b"v" + key) for key in keys[1:]]
        assert store.get(b"") == b"v"


@both_formats
@with_and_without_changelogs
async def test_column_families_are_apart_from_each_other(bench: Bench, format_version: int, changelogs: bool) -> None:
    conf: Conf = {"format_version": format_version, "changelogs": changelogs, "column_families": True}
    async with bench.store(**conf) as store:
        await store.load(0)
        assert store.families == ("default",)
        assert store.add_family("items")
        assert not store.add_family("items")
        assert store.add_family("$rows_items", internal=True)
        assert store.add_family("gone")
        store.put(b"k", b"default")
        for family in ("items", "$rows_items", "gone"):
            store.put(b"k", family.encode(), family)
            store.put(b"l", b"2", family)
        with pytest.raises(UsageError, match="no such column family") as failure:
            store.put(b"k", b"v", "other")
        assert "add_family" in failure.value.hint
        assert (store.num_keys, store.num_internal_keys) == (5, 2)
        first = await store.commit()
        assert first.snapshot_made
        assert store.drop_family("gone")
        assert not store.drop_family("gone")
        with pytest.raises(UsageError, match="no such column family"):
            store.get(b"k", "gone")
        assert (store.num_keys, store.num_internal_keys) == (3, 2)
        store.delete(b"k", "$rows_items")
        second = await store.commit()
        assert second.snapshot_made
        # A name that comes back gets another number: what is left of the old one is not its own.
        store.add_family("gone")
        assert rows(store, "gone") == {}
        store.put(b"k", b"new", "gone")
        third = await store.commit()
    async with bench.store(**conf) as store:
        await store.load(1, first.unique_id)
        assert list(store.families) == ["default", "items", "$rows_items", "gone"]
        assert rows(store, "gone") == {b"k": b"gone", b"l": b"2"}
        await store.load(2, second.unique_id)
        assert list(store.families) == ["default", "items", "$rows_items"]
        assert rows(store) == {b"k": b"default"}
        assert rows(store, "items") == {b"k": b"items", b"l": b"2"}
        assert rows(store, "$rows_items") == {b"l": b"2"}
        assert (store.num_keys, store.num_internal_keys) == (3, 1)
        await store.load(3, third.unique_id)
        assert rows(store, "gone") == {b"k": b"new"}
        assert [(family.name, family.id) for family in store._loaded.families] == [  # type: ignore[union-attr]
            ("default", 1),
            ("items", 2),
            ("$rows_items", 3),
            ("gone", 5),
        ]


async def test_a_dropped_family_stands_in_the_changelog_as_one_range(bench: Bench) -> None:
    async with bench.store(column_families=True, changes_replayed_max=10) as store:
        await store.load(0)
        store.add_family("items")
        for number in range(100):
            store.put(b"%d" % number, b"", "items")
        first = await store.commit()
        store.drop_family("items")
        second = await store.commit()
    with open_changelog(bench.file(2, "changelog"), "lz4") as changelog:
        (records,) = changelog
    assert records == [(DELETE_RANGE, b"\x02\x00", b"\x02\x01")]
    # The replay of that record and the snapshot say the same.
    bench.file(2, "zip").unlink()
    async with bench.store(column_families=True) as store:
        await store.load(2, second.unique_id)
        assert (store.num_keys, last_load(store).records) == (0, 1)
        await store.load(1, first.unique_id)
        assert store.num_keys == 100


async def test_families_that_only_changelogs_know_are_refused(bench: Bench) -> None:
    async with bench.store(column_families=True) as store:
        await store.load(0)
        first = await store.commit()
        store.add_family("items")
        store.put(b"k", b"v", "items")
        second = await store.commit()
        assert bench.snapshots() == [1, 2]
    for version in (1, 2):
        bench.file(version, "zip").unlink()
    async with bench.store(column_families=True) as store:
        with pytest.raises(DamagedError, match="not a known column family"):
            await store.load(2, second.unique_id)
        assert store.version is None
        await store.load(1, first.unique_id)


async def test_settings_and_directory_agree_on_column_families(bench: Bench) -> None:
    async with bench.store(column_families=True, deltas_per_snapshot=100) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        second = await write(store, 1, first.unique_id, {b"a": b"2"})
    async with bench.store() as store:
        with pytest.raises(UsageError, match="settings say otherwise") as failure:
            await store.load(2, second.unique_id)
        assert "column_families" in failure.value.hint
    bench.file(1, "zip").unlink()
    async with bench.store() as store:
        with pytest.raises(UsageError, match="column families do not go with"):
            await store.load(1, first.unique_id)
        assert store.version is None


def test_numbers_of_families_are_never_given_twice() -> None:
    families = ColumnFamilies(is_enabled=True, families=(ColumnFamily("default", 1), ColumnFamily("a", 4)), id_max=6)
    assert families.add("b", is_internal=False)
    families.drop("b")
    assert families.add("c", is_internal=True)
    assert tuple((family.name, family.id) for family in families) == (("default", 1), ("a", 4), ("c", 8))
    assert families.is_internal(b"\x08\x00key")
    assert not families.is_internal(b"\x04\x00key")
    for name in ("", " a", "a\n", "x" * 2000):
        with pytest.raises(UsageError, match="not a name"):
            families.add(name, is_internal=False)
    families.id_max = 2**15 - 1
    with pytest.raises(UsageError, match="all 32767 numbers are given"):
        families.add("d", is_internal=False)
    with pytest.raises(UsageError, match="no column families"):
        ColumnFamilies(is_enabled=False).add("a", is_internal=False)


def test_the_end_of_a_family_is_right_behind_its_last_key() -> None:
    assert ColumnFamily("a", 2**15 - 1).prefix == b"\xff\x7f"
    assert after_prefix(b"\xff\x7f") == b"\xff\x80"
    assert after_prefix(b"\x02\xff") == b"\x03\x00"


@pytest.mark.spark_case(22)
@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_a_directory_begins_with_an_unknown_number_of_keys(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families, "changelogs": changelogs}
    async with bench.store(**conf, count_keys=False) as store:
        first = await write(store, 0, None, {b"a": b"1"})
        assert first.num_keys == -1
    async with bench.store(**conf, count_keys=False) as store:
        await store.load(1, first.unique_id)
        assert (store.num_keys, store.num_internal_keys, rows(store)) == (-1, -1, {b"a": b"1"})


@pytest.mark.spark_case(23)
@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_counting_is_turned_off_and_on_at_restarts(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    conf: Conf = {
        "format_version": format_version,
        "column_families": families,
        "changelogs": changelogs,
        "deltas_per_snapshot": 1,
    }
    async with bench.store(**conf) as store:
        await store.load(0)
        store.put(b"a", b"5")
        store.put(b"b", b"5")
        assert store.num_keys == 2
        committed = await store.commit()
        assert committed.num_keys == 2
        await store.maintain()
    async with bench.store(**conf, count_keys=False) as store:
        committed = await write(store, 1, committed.unique_id, {b"b": b"7", b"c": b"7"})
        assert (committed.num_keys, store.num_keys) == (-1, -1)
        await store.maintain()
    async with bench.store(**conf) as store:
        committed = await write(store, 2, committed.unique_id, {b"c": b"8", b"d": b"8"}, [b"nobody"])
        assert (committed.num_keys, store.num_keys) == (4, 4)
