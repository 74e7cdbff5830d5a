"""Snapshots that do not open: Spark's automatic repair, and where it ends (design 0004, R7)."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import StoreUnavailableError
from engine.errors import DamagedError, SnapshotRepairError
from index.errors import FormatError, VersionMissingError
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    check_numbers,
    interposed,
    last_load,
    with_and_without_families,
    write_numbers,
)
from tidemark import StateStore


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _lose_sst(path: Path) -> None:
    newest = max((path.parent / "SSTs").iterdir(), key=lambda sst: sst.stat().st_mtime_ns)
    newest.unlink()


def _cut_sst(path: Path) -> None:
    newest = max((path.parent / "SSTs").iterdir(), key=lambda sst: sst.stat().st_mtime_ns)
    _truncate(newest)


def _without_current(path: Path) -> None:
    _rezip(path, {"CURRENT": None})


def _with_a_foreign_manifest(path: Path) -> None:
    _rezip(path, {"CURRENT": b"MANIFEST-999999\n"})


def _rezip(path: Path, changes: dict[str, bytes | None]) -> None:
    """A zip in which all is well but for what is in it."""
    with zipfile.ZipFile(path) as zipped:
        entries = {info.filename: zipped.read(info) for info in zipped.infolist()}
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in entries.items():
            changed = changes.get(name, content)
            if changed is not None:
                zipped.writestr(name, changed)


def _base_version(store: StateStore) -> int:
    base = last_load(store).base
    return 0 if base is None else base.version


async def _make(bench: Bench, newest: int, **conf: Any) -> Ids:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=2, **conf) as store:
        await write_numbers(store, ids, range(1, newest + 1), maintain_every=2)
    return ids


@pytest.mark.spark_case(26)
@both_formats
@with_and_without_families
@pytest.mark.parametrize(
    "damage", [_truncate, _empty, _flip, _lose_sst, _cut_sst, _without_current, _with_a_foreign_manifest]
)
async def test_an_older_snapshot_stands_in_for_one_that_does_not_open(
    bench: Bench, format_version: int, families: bool, damage: Callable[[Path], None]
) -> None:
    conf: Conf = {"format_version": format_version, "column_families": families}
    ids = await _make(bench, 7, **conf)
    newest = bench.snapshots()[-1]
    damage(bench.file(newest, "zip"))
    async with bench.store(**conf, deltas_per_snapshot=4) as store:
        await check_numbers(store, ids, [7])
        assert last_load(store).snapshots_repaired == 1
        assert _base_version(store) == bench.snapshots()[-2]
        assert last_load(store).changelogs == 7 - bench.snapshots()[-2]
        # The next load of it is not a repair, and one of another base is not asked to be one.
        await check_numbers(store, ids, [3])
        assert last_load(store).snapshots_repaired == 0
        # What it is built on now is old, so the next commit makes a snapshot.
        await store.load(7, ids[7])
        assert (await store.commit()).snapshot_made


@pytest.mark.spark_case(26)
@both_formats
async def test_with_every_snapshot_damaged_the_state_is_replayed_from_nothing(
    bench: Bench, format_version: int
) -> None:
    ids = await _make(bench, 7, format_version=format_version)
    assert bench.snapshots() == [2, 4, 6]
    for version in bench.snapshots():
        _truncate(bench.file(version, "zip"))
    async with bench.store(format_version=format_version) as store:
        await check_numbers(store, ids, [7])
        assert (last_load(store).snapshots_repaired, last_load(store).base, last_load(store).changelogs) == (3, None, 7)


@pytest.mark.spark_case(26)
@both_formats
async def test_a_repair_goes_back_only_so_far(bench: Bench, format_version: int) -> None:
    ids = await _make(bench, 7, format_version=format_version)
    _truncate(bench.file(6, "zip"))
    async with bench.store(format_version=format_version, changes_replayed_max=2) as store:
        with pytest.raises(SnapshotRepairError, match="next one is 3 versions back") as failure:
            await store.load(7, ids[7])
        assert "changes_replayed_max" in failure.value.hint
        assert isinstance(failure.value.__cause__, DamagedError | FormatError)
        assert store.version is None
    async with bench.store(format_version=format_version, changes_replayed_max=3) as store:
        await check_numbers(store, ids, [7])


@pytest.mark.spark_case(26)
@both_formats
async def test_a_repair_needs_the_changelogs(bench: Bench, format_version: int) -> None:
    ids = await _make(bench, 7, format_version=format_version)
    for version in bench.snapshots():
        _truncate(bench.file(version, "zip"))
    bench.file(1, "changelog").unlink()
    async with bench.store(format_version=format_version) as store:
        with pytest.raises(SnapshotRepairError, match=r"the snapshots 6.*4.*2.* do not open"):
            await store.load(7, ids[7])


@pytest.mark.spark_case(26)
@pytest.mark.parametrize("off", ["snapshot_repair", "changelogs"])
async def test_without_repair_the_damage_is_reported(bench: Bench, off: str) -> None:
    ids = await _make(bench, 7)
    _truncate(bench.file(6, "zip"))
    conf: Conf = {off: False}
    async with bench.store(**conf) as store:
        with pytest.raises((DamagedError, FormatError), match=r"6_.*\.zip"):
            await store.load(7, ids[7])
        assert store.version is None


@pytest.mark.spark_case(26)
@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_the_newest_snapshot_is_tried_so_often_before_a_repair(
    bench: Bench, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await _make(bench, 5, file_checksums=False)
    path = bench.file(4, "zip")
    whole = path.read_bytes()
    _truncate(path)
    async with bench.store(repair_after_failures=failures, file_checksums=False) as store:
        loading = store.manager.load_snapshot
        calls = 0

        async def load_snapshot(base: StateVersion | None, directory: Path) -> StateMetadata:
            nonlocal calls
            calls += 1
            if calls == 2:
                # It heals before it is read a second time.
                path.write_bytes(whole)
            return await loading(base, directory)

        monkeypatch.setattr(store.manager, "load_snapshot", load_snapshot)
        await check_numbers(store, ids, [5])
        found = (calls, last_load(store).snapshots_repaired, _base_version(store))
        assert found == ((2, 1, 2) if failures == 1 else (2, 0, 4))


@both_formats
async def test_a_store_that_does_not_answer_is_no_damage(bench: Bench, format_version: int) -> None:
    ids = await _make(bench, 7, format_version=format_version)
    files = interposed(bench)
    async with bench.store(files, format_version=format_version) as store:
        files.fail("get", ".zip")
        with pytest.raises(StoreUnavailableError, match="injected"):
            await store.load(7, ids[7])
        assert [key for operation, key in files.requests if key.endswith(".zip")] == [bench.file(6, "zip").name]
        await check_numbers(store, ids, [6])


@both_formats
async def test_a_missing_changelog_is_no_damage(bench: Bench, format_version: int) -> None:
    ids = await _make(bench, 7, format_version=format_version)
    bench.file(7, "changelog").unlink()
    async with bench.store(format_version=format_version) as store:
        with pytest.raises(VersionMissingError, match=r"7.*\.changelog"):
            await store.load(7, ids[7])
        await check_numbers(store, ids, [6])
