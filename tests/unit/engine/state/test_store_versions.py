"""Versions come and go: Spark's cases of RocksDBSuite on what a load finds."""

from pathlib import Path

import pytest
from typing_extensions import override

from engine.errors import NotLoadedError, UsageError
from engine.state.checkpoint_dir import READ_BYTES_MAX, CheckpointDir, StateFiles
from index.errors import LineageError, UnsafeNameError, VersionMissingError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    check_numbers,
    last_load,
    rows,
    settings_of,
    with_and_without_changelogs,
    with_and_without_families,
    write,
    write_numbers,
)
from tidemark import StateStore


@pytest.mark.spark_case(1)
@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_every_version_has_a_changelog_and_maintenance_makes_snapshots(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    # Spark makes 50 versions in every combination; here one of them does.
    newest = 50 if (format_version, families, changelogs) == (2, False, True) else 12
    ids: Ids = [None]
    async with bench.store(
        format_version=format_version, column_families=families, changelogs=changelogs, deltas_per_snapshot=1
    ) as store:
        await write_numbers(store, ids, range(1, newest + 1), maintain_every=5)
        if changelogs:
            assert bench.changelogs() == [*range(1, newest + 1)]
            first = [1] if families else []
            assert bench.snapshots() == [*first, *range(5, newest + 1, 5)]
        else:
            assert bench.changelogs() == []
            assert bench.snapshots() == [*range(1, newest + 1)]
        await check_numbers(store, ids, range(0, newest + 1, 4))


@pytest.mark.spark_case(2)
@both_formats
@with_and_without_families
async def test_a_version_that_does_not_exist_is_reported_by_name(
    bench: Bench, format_version: int, families: bool
) -> None:
    async with bench.store(format_version=format_version, column_families=families) as store:
        with pytest.raises(UsageError, match="version -1"):
            await store.load(-1)
        with pytest.raises(VersionMissingError, match=r"1\.changelog") as failure:
            await store.load(1)
        assert failure.value.hint
        with pytest.raises(NotLoadedError, match="no version is loaded"):
            store.get(b"a")


@pytest.mark.spark_case(2)
async def test_a_version_of_an_unknown_id_is_reported_by_name(bench: Bench) -> None:
    async with bench.store() as store:
        committed = await write(store, 0, None, {b"a": b"1"})
        with pytest.raises(VersionMissingError, match=r"1_nobody\.changelog.*1_"):
            await store.load(1, "nobody")
        with pytest.raises(VersionMissingError, match=r"1\.changelog") as failure:
            await store.load(1)
        assert "unique ids only" in failure.value.hint
        with pytest.raises(UsageError, match="no unique id"):
            await store.load(0, committed.unique_id)
        with pytest.raises(UnsafeNameError):
            await store.load(1, "../1")
        await store.load(1, committed.unique_id)
        assert rows(store) == {b"a": b"1"}


@pytest.mark.spark_case(7)
@both_formats
@with_and_without_families
async def test_a_snapshot_is_due_when_so_many_versions_have_passed(
    bench: Bench, format_version: int, families: bool
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families, "deltas_per_snapshot": 5}
    first = [1] if families else []
    due = [6, 11] if families else [5, 10]
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 3), maintain_every=1)
        assert bench.snapshots() == first
        await write_numbers(store, ids, range(3, 9), maintain_every=1)
        assert bench.snapshots() == [*first, due[0]]
        await write_numbers(store, ids, range(9, 13), maintain_every=1)
        assert bench.snapshots() == [*first, *due]
    async with bench.store(**conf) as store:
        # Counted from the snapshot that the load found.
        await write_numbers(store, ids, range(13, 18), maintain_every=1)
        assert bench.snapshots() == [*first, *due, due[1] + 5]
        # And after a reload of an older version from the one below it.
        await write_numbers(store, ids, range(4, 4 + due[0]), maintain_every=1)
        again = {due[0], 8 if format_version == 2 else due[0]}
        assert set(bench.snapshots()) >= {*first, *due, *(v for v in again if v in due)}
        assert bench.changelogs()[-1] == 17


@pytest.mark.spark_case(9)
@both_formats
@with_and_without_families
async def test_a_directory_of_snapshots_goes_on_with_changelogs(
    bench: Bench, format_version: int, families: bool
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families, "versions_deleted_min": 0}
    ids: Ids = [None]
    async with bench.store(**conf, changelogs=False, versions_retained_min=30) as store:
        await write_numbers(store, ids, range(1, 11))
        assert (bench.snapshots(), bench.changelogs()) == ([*range(1, 11)], [])
    async with bench.store(**conf, versions_retained_min=10, deltas_per_snapshot=1) as store:
        await check_numbers(store, ids, range(1, 11))
        # With format 1, version 10 gets a changelog beside its zip, as in Spark's test.
        first = 10 if format_version == 1 else 11
        await write_numbers(store, ids, range(first, 21))
        assert (bench.snapshots(), bench.changelogs()) == ([*range(1, 11)], [*range(first, 21)])
        await check_numbers(store, ids, range(2, 21, 3))
        await store.maintain()
        assert (bench.snapshots(), bench.changelogs()) == ([10, 20], [*range(first, 21)])
        await check_numbers(store, ids, range(10, 21))


@pytest.mark.spark_case(9)
@both_formats
@with_and_without_families
async def test_a_directory_of_changelogs_goes_on_with_snapshots(
    bench: Bench, format_version: int, families: bool
) -> None:
    conf: Conf = {
        "format_version": format_version,
        "column_families": families,
        "versions_retained_min": 5,
        "versions_deleted_min": 0,
    }
    ids: Ids = [None]
    async with bench.store(**conf, deltas_per_snapshot=3) as store:
        await write_numbers(store, ids, range(1, 11))
    async with bench.store(**conf, changelogs=False) as store:
        await check_numbers(store, ids, range(1, 11))
        await write_numbers(store, ids, range(11, 21))
        assert bench.changelogs() == [*range(1, 11)]
        assert bench.snapshots() == [*([1] if families else []), *range(11, 21)]
        await check_numbers(store, ids, range(2, 21, 3))
        await store.maintain()
        assert bench.snapshots() == [*range(16, 21)]
        assert bench.changelogs() == []
        await check_numbers(store, ids, range(16, 21))


@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_what_was_put_is_there_and_what_was_not_committed_is_not(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families, "changelogs": changelogs}
    async with bench.store(**conf) as store:
        await store.load(0)
        assert (store.get(b"a"), rows(store)) == (None, {})
        store.put(b"a", b"1")
        assert store.get(b"a") == b"1"
        first = await store.commit()
        # Usable on the spot, as the version that it has become.
        assert (store.version, store.unique_id, store.get(b"a")) == (1, first.unique_id, b"1")
    async with bench.store(**conf) as store:
        await store.load(0)
        assert rows(store) == {}
        await store.load(1, first.unique_id)
        store.put(b"b", b"2")
        assert rows(store) == {b"a": b"1", b"b": b"2"}
    async with bench.store(**conf) as store:
        await store.load(1, first.unique_id)
        assert (store.get(b"b"), rows(store)) == (None, {b"a": b"1"})
        store.put(b"b", b"2")
        second = await store.commit()
        assert (second.version, second.base_unique_id) == (2, first.unique_id)
        await store.load(1, first.unique_id)
        assert rows(store) == {b"a": b"1"}
        await store.load(2, second.unique_id)
        assert rows(store) == {b"a": b"1", b"b": b"2"}


async def test_loading_what_is_loaded_asks_nothing_and_keeps_nothing_uncommitted(bench: Bench) -> None:
    async with bench.store() as store:
        committed = await write(store, 0, None, {b"a": b"1"})
        await store.load(1, committed.unique_id)
        assert last_load(store).was_loaded
        store.put(b"a", b"2")
        await store.load(1, committed.unique_id)
        assert not last_load(store).was_loaded
        assert rows(store) == {b"a": b"1"}


async def test_a_store_that_was_loaded_to_be_read_refuses_writes(bench: Bench) -> None:
    async with bench.store(column_families=True) as store:
        committed = await write(store, 0, None, {b"a": b"1"})
        await store.load(1, committed.unique_id, read_only=True)
        assert store.get(b"a") == b"1"
        with pytest.raises(UsageError, match="read only"):
            store.put(b"a", b"2")
        with pytest.raises(UsageError, match="read only"):
            store.add_family("other")
        with pytest.raises(UsageError, match="read only"):
            await store.commit()


@pytest.mark.spark_case(27)
@both_formats
@with_and_without_families
@with_and_without_changelogs
async def test_an_empty_start_counts_as_a_version_and_commits_a_snapshot(
    bench: Bench, format_version: int, families: bool, changelogs: bool
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families, "changelogs": changelogs}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 3))
        before = bench.changelogs()
        await store.load(2, empty=True)
        assert (store.version, rows(store)) == (2, {})
        store.put(b"a", b"1")
        third = await store.commit()
        assert (third.version, third.snapshot_made, third.base_unique_id) == (3, True, None)
        assert (bench.changelogs(), bench.snapshots()[-1]) == (before, 3)
        fourth = await write(store, 3, third.unique_id, {b"b": b"2"})
    async with bench.store(**conf) as store:
        await store.load(3, third.unique_id)
        assert rows(store) == {b"a": b"1"}
        await store.load(4, fourth.unique_id)
        assert rows(store) == {b"a": b"1", b"b": b"2"}
        await check_numbers(store, ids, [2])


@pytest.mark.spark_case(27)
async def test_an_empty_start_is_no_reload_of_what_is_loaded(bench: Bench) -> None:
    async with bench.store() as store:
        committed = await write(store, 0, None, {b"a": b"1"})
        await store.load(1, empty=True)
        assert rows(store) == {}
        await store.load(1, committed.unique_id)
        assert rows(store) == {b"a": b"1"}
        with pytest.raises(UsageError, match="no unique id"):
            await store.load(1, committed.unique_id, empty=True)


async def test_nothing_without_ids_is_built_on_a_version_with_one(bench: Bench) -> None:
    async with bench.store() as store:
        committed = await write(store, 0, None, {b"a": b"1"})
    async with bench.store(format_version=1) as store:
        with pytest.raises(UsageError, match="nothing without one"):
            await store.load(1, committed.unique_id)
        await store.load(1, committed.unique_id, read_only=True)
        assert rows(store) == {b"a": b"1"}


async def test_a_closed_store_says_so(bench: Bench) -> None:
    store = await StateStore.open(bench.root, bench.new_work(), settings_of())
    await store.load(0)
    scan = store.items()
    await store.close()
    await store.close()
    with pytest.raises(UsageError, match="closed"):
        store.get(b"a")
    with pytest.raises(UsageError, match="closed"):
        await store.load(0)
    with pytest.raises(UsageError, match="closed"):
        await store.maintain()
    with pytest.raises(UsageError, match="closed"):
        next(scan)
    assert store.version is None


async def test_a_gap_in_the_lineage_is_named(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=100) as store:
        await write_numbers(store, ids, range(1, 5))
    bench.file(2, "changelog").unlink()
    async with bench.store() as store:
        with pytest.raises((VersionMissingError, LineageError), match=f"2_{ids[2]}"):
            await store.load(4, ids[4])
        assert store.version is None
        await store.load(1, UniqueId(str(ids[1])))


class BackupFiles(StateFiles):
    """Files that can only be read, and that know their lineages, as those of a snapshot index."""

    def __init__(self, files: CheckpointDir, lineages: dict[StateVersion, tuple[LineageItem, ...]]) -> None:
        self._files = files
        self._lineages = lineages

    @property
    @override
    def location(self) -> str:
        return self._files.location

    @override
    async def names(self) -> tuple[str, ...]:
        return await self._files.names()

    @override
    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        return await self._files.read(path, size_bytes_max=size_bytes_max)

    @override
    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        return await self._files.fetch(path, target, size_bytes=size_bytes, size_bytes_max=size_bytes_max)

    @override
    async def read_range(self, path: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        return await self._files.read_range(path, start, size_bytes, fresh=fresh)

    @override
    def known_lineage(self, of: StateVersion) -> tuple[LineageItem, ...] | None:
        return self._lineages.get(of)

    @override
    async def close(self) -> None:
        raise AssertionError("it belongs to the caller")


async def test_a_backup_of_a_directory_is_loaded_and_never_written(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=2) as store:
        await write_numbers(store, ids, range(1, 6), maintain_every=1)
        lineage = store.lineage
    directory = await CheckpointDir.open(bench.root)
    backup = BackupFiles(directory, {StateVersion(5, ids[5]): lineage[:-1]})
    async with await StateStore.open(backup, bench.new_work(), settings_of()) as store:
        await check_numbers(store, ids, [5, 4, 2])
        with pytest.raises(UsageError, match="cannot be written") as failure:
            await store.load(5, ids[5])
        assert "read_only" in failure.value.hint
        await store.load(0, read_only=True)
        with pytest.raises(UsageError, match="backup"):
            await store.maintain()
    await directory.close()
