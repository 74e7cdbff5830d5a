"""Row checksums: Spark's case 55, on our bytes and on Spark's."""

import shutil
from pathlib import Path

import pytest

from engine.errors import SnapshotUploadError
from engine.rocksdb.store import StoreWriter
from engine.state.changelogs import ChangelogWriter, open_changelog
from index.errors import RowChecksumError
from index.snapshot.model import UniqueId
from index.spark.changelog import DELETE, PUT
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    last_load,
    rows,
    with_and_without_changelogs,
    with_and_without_families,
    write,
)

SPARK = Path(__file__).parents[3] / "golden" / "spark"


@pytest.mark.spark_case(55)
@both_formats
@with_and_without_families
@pytest.mark.parametrize("operator", [1, 2])
async def test_rows_with_checksums_read_as_they_were_written(
    bench: Bench, format_version: int, families: bool, operator: int
) -> None:
    conf: Conf = {
        "format_version": format_version,
        "column_families": families,
        "merge_operator_version": operator,
        "row_checksums": True,
        "row_check_ratio": 1,
        "deltas_per_snapshot": 3,
    }
    joined = b"," if operator == 1 else b""
    async with bench.store(**conf) as store:
        await store.load(0)
        store.put(b"a", b"1")
        store.put(b"gone", b"1")
        expected = {b"a": b"1"}
        if families:
            store.merge(b"list", b"x")
            store.merge(b"list", b"y")
            expected[b"list"] = b"x" + joined + b"y"
        first = await store.commit()
        store.delete(b"gone")
        store.put(b"empty", b"")
        expected[b"empty"] = b""
        second = await store.commit()
        third = await store.commit(snapshot=True)
        assert rows(store) == expected
    async with bench.store(**conf) as store:
        for version, unique_id in ((2, second.unique_id), (3, third.unique_id)):
            await store.load(version, unique_id)
            assert (rows(store), store.get(b"a")) == (expected, b"1")
        await store.load(1, first.unique_id)
        assert store.get(b"gone") == b"1"


@pytest.mark.spark_case(55)
@pytest.mark.parametrize("ratio, found", [(0, False), (1, True), (4, True)])
async def test_a_row_that_was_altered_is_found_when_it_is_its_turn(bench: Bench, ratio: int, found: bool) -> None:
    conf: Conf = {"row_checksums": True, "row_check_ratio": ratio}
    async with bench.store(**conf) as store:
        await store.load(0)
        store.put(b"a", b"1")
        _alter(store._loaded.db, b"a")  # type: ignore[union-attr]
        if not found:
            assert store.get(b"a") == b"0"
            return
        for _ in range(ratio - 1):
            assert store.get(b"a") == b"0"
        with pytest.raises(RowChecksumError, match="does not fit its checksum"):
            store.get(b"a")


@pytest.mark.spark_case(55)
@with_and_without_families
@pytest.mark.parametrize("what", ["put", "delete"])
async def test_an_altered_row_in_a_changelog_is_found_at_the_load(bench: Bench, families: bool, what: str) -> None:
    conf: Conf = {"row_checksums": True, "column_families": families, "file_checksums": False}
    async with bench.store(**conf) as store:
        first = await write(store, 0, None, {b"aaaa": b"1111"})
        second = await write(store, 1, first.unique_id, {b"bbbb": b"2222"}, [b"aaaa"])
    _rewrite(bench.file(2, "changelog"), *((b"2222", b"3333") if what == "put" else (b"aaaa", b"cccc")))
    async with bench.store(**conf) as store:
        with pytest.raises(RowChecksumError):
            await store.load(2, second.unique_id)
        assert store.version is None
    async with bench.store(**{**conf, "row_checksums": False}) as store:
        await store.load(2, second.unique_id)


@pytest.mark.spark_case(55)
@pytest.mark.parametrize("inline", [True, False])
async def test_a_snapshot_with_an_altered_row_is_not_uploaded(bench: Bench, inline: bool) -> None:
    conf: Conf = {"row_checksums": True, "row_check_ratio": 1, "deltas_per_snapshot": 2}
    async with bench.store(**conf) as store:
        first = await write(store, 0, None, {b"a": b"1", b"b": b"2"})
        await store.load(1, first.unique_id)
        store.put(b"c", b"3")
        _alter(store._loaded.db, b"a")  # type: ignore[union-attr]
        if inline:
            with pytest.raises(RowChecksumError):
                await store.commit(snapshot=True)
            assert bench.changelogs() == [1]
            assert store.version is None
        else:
            second = await store.commit()
            with pytest.raises(SnapshotUploadError, match="does not fit its checksum"):
                await store.maintain()
            assert bench.changelogs() == [1, 2]
            # The changelogs are whole, and a load from them is too.
            await store.load(0)
            await store.load(2, second.unique_id)
            assert rows(store) == {b"a": b"1", b"b": b"2", b"c": b"3"}
        assert bench.snapshots() == []


@pytest.mark.spark_case(55)
@with_and_without_changelogs
async def test_an_altered_row_in_a_snapshot_is_found_when_it_is_read(bench: Bench, changelogs: bool) -> None:
    conf: Conf = {"row_checksums": True, "changelogs": changelogs}
    async with bench.store(**conf, row_check_ratio=0) as store:
        await store.load(0)
        store.put(b"a", b"1")
        store.put(b"b", b"2")
        _alter(store._loaded.db, b"a")  # type: ignore[union-attr]
        first = await store.commit(snapshot=True)
    async with bench.store(**conf, row_check_ratio=1) as store:
        await store.load(1, first.unique_id)
        assert store.get(b"b") == b"2"
        with pytest.raises(RowChecksumError, match="does not fit its checksum"):
            rows(store)
        with pytest.raises(RowChecksumError):
            store.get(b"a")


@pytest.mark.spark_case(15, 55)
async def test_rows_with_checksums_that_spark_wrote_are_verified_and_built_on(bench: Bench) -> None:
    shutil.copytree(SPARK / "row-checksums" / "state" / "0" / "0", bench.root)
    conf: Conf = {"column_families": True, "row_checksums": True, "row_check_ratio": 1}
    ids: Ids = [None, *(UniqueId(bench.file(version, "changelog").stem.partition("_")[2]) for version in (1, 2, 3))]
    async with bench.store(**conf) as store:
        await store.load(3, ids[3])
        assert last_load(store).changelogs == 2
        before = {family: rows(store, family) for family in store.families}
        assert store.num_keys == sum(len(found) for name, found in before.items() if not name.startswith("$"))
        assert sum(map(len, before.values())) > 10
        (family, key), *_ = ((name, key) for name, found in before.items() for key in found)
        store.merge(key, b"more", family)
        fourth = await store.commit()
        assert fourth.base_unique_id == ids[3]
    async with bench.store(**conf) as store:
        await store.load(4, fourth.unique_id)
        before[family][key] += b"more"
        assert {name: rows(store, name) for name in store.families} == before


def _alter(db: StoreWriter, key: bytes) -> None:
    stored = db.get(key)
    assert stored is not None
    db.put(key, stored.replace(b"1", b"0"))


def _rewrite(path: Path, old: bytes, new: bytes) -> None:
    """The changelog with other bytes in its records, and everything else fitting."""
    with open_changelog(path, "lz4") as changelog:
        records = [record for batch in changelog for record in batch]
        header = changelog.header
    assert any(old in key or old in value for _, key, value in records)
    writer = ChangelogWriter(path, "lz4", header.version, header.lineage)
    for kind, key, value in records:
        if kind == PUT:
            writer.write((PUT, key.replace(old, new), value.replace(old, new)))
        else:
            writer.write((DELETE, key.replace(old, new), b""))
    writer.finish()
