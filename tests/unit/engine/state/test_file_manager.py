"""Spark's outcomes of its own file manager's tests, on a directory and on a store of objects."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import CheckpointFileExistsError
from blobstore.memory import MemoryStore
from engine.errors import DamagedError, UnsafeSourceError, UsageError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from index.errors import FileChecksumError, VersionMissingError
from index.spark.names import stored_name
from tests.unit.engine.state.state_bench import (
    StateBench,
    at,
    delete_old_versions,
    files,
    fill,
    needed,
    tree,
    wait_for_the_clock,
)
from tests.unit.index.builders import latest_version

UUID = "01234567-89ab-4def-8123-456789abcdef"


@pytest.fixture(params=["directory", "memory"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StateBench]:
    if request.param == "directory":
        root = await CheckpointDir.open(tmp_path / "checkpoint")
    else:
        root = await CheckpointDir.open(MemoryStore())
    yield StateBench(tmp_path, root.child("state/0/0"))
    await root.close()


@pytest.fixture(params=[None, "0-0-0"], ids=["V1", "V2"])
def unique_id(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


# --- upload only new files ---


@pytest.mark.spark_case(18)
async def test_only_new_files_are_uploaded(bench: StateBench, tmp_path: Path) -> None:
    first, second = files(s1=10, s2=20, l1=1000, l2=2000), files(s1=10, s2=25, s3=30, l1=1000, l2=2500, l3=3000)
    third = files(s1=10, s2=25, s3=30, s4=40, l4=4000)
    assert latest_version(await bench.listing()) == 0
    with pytest.raises(VersionMissingError, match=r"1\.zip"):
        await bench.load(at(1))

    await bench.save(first, at(1), num_keys=101)
    assert latest_version(await bench.listing()) == 1
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (2, 2)

    # Files of the same names and other sizes, and files that do not belong there.
    fill(bench.working, {"000001.sst": b"x" * 11, "CURRENT": b"old", "archive/000001.log": b"x" * 1001})
    fill(bench.working, {"random.sst": b"x", "random": b"x", "000005.log": b"x", "archive/000007.log": b"x"})
    fill(bench.working, {"sub/directory": b"x", ".hidden": b"x", "LOCK": b""})
    assert (await bench.load(at(1))).num_keys == 101
    assert tree(bench.working) == first

    # The same version again: nothing that it put there before is named again.
    saved = await bench.save(second, at(1), num_keys=1001)
    assert (saved.files_copied, saved.files_reused) == (6, 0)
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (5, 5)
    assert (await bench.load(at(1))).num_keys == 1001
    assert tree(bench.working) == second

    saved = await bench.save(third, at(2), num_keys=1501)
    assert (saved.files_copied, saved.files_reused) == (2, 3)
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (6, 6)
    await bench.load(at(2))
    assert tree(bench.working) == third
    await bench.load(at(1))
    assert tree(bench.working) == second
    with pytest.raises(VersionMissingError):
        await bench.load(at(3))
    await bench.load(None)
    assert tree(bench.working) == {}
    assert bench.working.is_dir()


async def test_load_leaves_exactly_the_checkpoints_files_and_fetches_only_what_is_missing(
    bench: StateBench, unique_id: str | None
) -> None:
    await bench.save(files(s1=10, s2=20, l1=5), at(1, unique_id))
    await bench.save(files(s1=10, s3=30), at(2, unique_id))
    await bench.save(files(s1=10, s3=30, s4=40), at(3, unique_id))
    await bench.load(at(2, unique_id))
    assert (bench.manager.last_load.files_fetched, bench.manager.last_load.files_reused) == (2, 0)
    await bench.load(at(3, unique_id))
    assert tree(bench.working) == files(s1=10, s3=30, s4=40)
    assert (bench.manager.last_load.files_fetched, bench.manager.last_load.files_reused) == (1, 2)
    assert bench.manager.last_load.bytes_fetched == 40
    # Going back, Spark fetches everything (SPARK-45419). Here what the snapshot names stays: a name never gets other
    # bytes.
    await bench.load(at(1, unique_id))
    assert tree(bench.working) == files(s1=10, s2=20, l1=5)
    assert bench.manager.last_load.files_reused == 1


@pytest.mark.spark_case(8)
async def test_files_of_a_history_that_was_left_are_not_shared(bench: StateBench, unique_id: str | None) -> None:
    await bench.save(files(s1=10), at(1, unique_id))
    await bench.save(files(s1=10, s2=20), at(3, unique_id))
    await bench.load(at(1, unique_id))
    # The same name and size as in version 3, made again.
    other = files(s1=10) | {"000002.sst": b"other bytes of size "}
    saved = await bench.save(other, at(4, "another" if unique_id else None))
    assert (saved.files_copied, saved.files_reused) == (1, 1)
    await bench.load(at(4, "another" if unique_id else None))
    assert tree(bench.working) == other


async def test_an_empty_start_begins_a_history_of_its_own(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1))
    await bench.load(None)
    saved = await bench.save(files(s1=10), at(2))
    assert (saved.files_copied, saved.files_reused) == (1, 0)


async def test_a_file_of_equal_name_and_size_with_other_content_is_uploaded(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1))
    changed = files() | {"000001.sst": b"0123456789"}
    saved = await bench.save(changed, at(2))
    assert (saved.files_copied, saved.files_reused) == (1, 0)
    await bench.load(at(2))
    assert tree(bench.working) == changed


async def test_a_local_file_that_was_altered_is_fetched_again(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1))
    await bench.load(at(1))
    await bench.save(files(s1=10, s2=20), at(2))
    await bench.load(at(2))
    (bench.working / "000001.sst").write_bytes(b"0123456789")
    await bench.save(files(s1=10, s2=20), at(3))
    await bench.load(at(3))
    assert tree(bench.working) == files(s1=10, s2=20)


async def test_what_a_captured_snapshot_refers_to_is_not_changed_by_what_comes_after(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1))
    captured = bench.capture(files(s1=10, s2=20), at(2))
    later = bench.capture(files(s2=20, s3=30), at(3))
    await bench.load(None)
    first = await bench.manager.upload_snapshot(captured)
    second = await bench.manager.upload_snapshot(later)
    # Of version 3, `000002.sst` was on its way with version 2, and may not have arrived.
    assert (first.files_copied, first.files_reused) == (1, 1)
    assert (second.files_copied, second.files_reused) == (2, 0)
    for version, content in [(2, files(s1=10, s2=20)), (3, files(s2=20, s3=30))]:
        await bench.load(at(version))
        assert tree(bench.working) == content


async def test_a_discarded_snapshots_files_are_uploaded_by_the_next(bench: StateBench) -> None:
    bench.manager.known.discard(bench.capture(files(s1=10), at(1)).upload_id)
    saved = await bench.save(files(s1=10), at(2))
    assert (saved.files_copied, saved.files_reused) == (1, 0)
    await bench.load(at(2))
    assert tree(bench.working) == files(s1=10)


async def test_a_load_that_fails_leaves_nothing_behind_that_the_next_would_believe(bench: StateBench) -> None:
    await bench.save(files(s1=10, s2=20), at(1))
    await bench.save(files(s1=10, s3=30), at(2))
    lost = next(name for name in await bench.names("SSTs") if name.startswith("000003"))
    await bench.directory.delete([f"SSTs/{lost}"])
    with pytest.raises(DamagedError, match="000003"):
        await bench.load(at(2))
    await bench.load(at(1))
    assert tree(bench.working) == files(s1=10, s2=20)


async def test_an_sst_of_another_size_than_the_snapshot_says_is_refused(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1))
    (name,) = await bench.names("SSTs")
    for data in (b"short", b"far longer than it was"):
        await bench.directory.publish(f"SSTs/{name}", data, overwrite=True)
        with pytest.raises(DamagedError, match="bytes"):
            await bench.load(at(1))
        assert "000001.sst" not in tree(bench.working)


# --- zips ---


@pytest.mark.spark_case(20)
@pytest.mark.parametrize("name", sorted(files()))
async def test_an_empty_file_that_must_not_be_empty_stops_a_snapshot(bench: StateBench, name: str) -> None:
    with pytest.raises(UnsafeSourceError, match=name):
        await bench.save(files(s1=10) | {name: b""}, at(1))
    assert await bench.names() == []
    assert await bench.names("SSTs") == []


async def test_an_empty_live_wal_is_part_of_a_snapshot(bench: StateBench) -> None:
    content = files(s1=10) | {"000004.log": b""}
    await bench.save(content, at(1))
    await bench.load(at(1))
    assert tree(bench.working) == content


async def test_what_rocksdict_leaves_is_never_part_of_a_snapshot(bench: StateBench) -> None:
    extra = {"LOG": b"x", "LOG.old.123": b"x", "LOCK": b"", "IDENTITY": b"x", "rocksdict-config.json": b"{}"}
    await bench.save(files(s1=10) | extra, at(1))
    await bench.load(at(1))
    assert tree(bench.working) == files(s1=10)


async def test_a_name_with_an_id_is_never_overwritten(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1, "a"))
    await bench.changelog(at(1, "a"), b"first")
    with pytest.raises(CheckpointFileExistsError):
        await bench.save(files(s1=11), at(1, "a"))
    with pytest.raises(CheckpointFileExistsError):
        await bench.changelog(at(1, "a"), b"second")
    await bench.load(at(1, "a"))
    assert tree(bench.working) == files(s1=10)


async def test_of_a_name_without_an_id_the_last_writer_wins(bench: StateBench, tmp_path: Path) -> None:
    await bench.changelog(at(1), b"first")
    await bench.changelog(at(1), b"second")
    (path,) = await bench.manager.fetch_changelogs([at(1)], tmp_path)
    assert path.read_bytes() == b"second"


# --- what is there ---


async def test_latest_versions_count_every_id_and_pass_over_foreign_names(bench: StateBench) -> None:
    listing = await bench.listing()
    assert (latest_version(listing), listing.latest_snapshot_version) == (0, 0)
    await bench.save(files(), at(3, "a"))
    await bench.changelog(at(5, "b"))
    for name in ("99.zip.bak", "x.zip", "07.zip", "8_a_b.changelog", "schema"):
        await bench.directory.publish(name, b"", overwrite=True)
    listing = await bench.listing()
    assert (latest_version(listing), listing.latest_snapshot_version) == (5, 3)


async def test_changelogs_come_in_order_and_a_missing_one_is_named(bench: StateBench, tmp_path: Path) -> None:
    for version in range(1, 20):
        await bench.changelog(at(version, f"id{version}"), str(version).encode())
    wanted = [at(version, f"id{version}") for version in range(3, 20)]
    paths = await bench.manager.fetch_changelogs(wanted, tmp_path)
    assert [path.read_bytes() for path in paths] == [str(version).encode() for version in range(3, 20)]
    with pytest.raises(VersionMissingError, match=r"20_id20\.changelog"):
        await bench.manager.fetch_changelogs([*wanted, at(20, "id20")], tmp_path)


# --- file checksums ---


@pytest.mark.spark_case(51)
@pytest.mark.parametrize("kind", ["zip", "changelog"])
async def test_a_corrupt_file_is_detected(bench: StateBench, tmp_path: Path, kind: str) -> None:
    await bench.save(files(s1=10), at(1, "a"))
    await bench.changelog(at(1, "a"), b"changes")
    data = bytearray(await bench.directory.read(f"1_a.{kind}"))
    data[3] ^= 1
    await bench.directory.publish(f"1_a.{kind}", bytes(data), overwrite=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    load: Callable[[], Awaitable[object]] = {
        "zip": lambda: bench.load(at(1, "a")),
        "changelog": lambda: bench.manager.fetch_changelogs([at(1, "a")], scratch),
    }[kind]
    with pytest.raises(FileChecksumError, match=f"1_a.{kind}"):
        await load()
    assert tree(scratch) == {}


@pytest.mark.spark_case(47, 53)
async def test_files_with_and_without_checksums_are_read_by_managers_with_and_without(
    bench: StateBench, tmp_path: Path
) -> None:
    plain = bench.beside(tmp_path / "plain", file_checksums=False)
    await plain.save(files(s1=10), at(1, "a"))
    await plain.changelog(at(1, "a"), b"without")
    await bench.save(files(s1=11), at(2, "b"))
    await bench.changelog(at(2, "b"), b"with")
    assert [name for name in await bench.names() if name.endswith(".crc")] == ["2_b.changelog.crc", "2_b.zip.crc"]
    for number, reader in enumerate((bench, plain)):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        await reader.load(at(1, "a"))
        assert tree(reader.working) == files(s1=10)
        await reader.load(at(2, "b"))
        assert tree(reader.working) == files(s1=11)
        paths = await reader.manager.fetch_changelogs([at(1, "a"), at(2, "b")], scratch)
        assert [path.read_bytes() for path in paths] == [b"without", b"with"]


async def test_a_name_without_an_id_gets_no_checksum_and_loses_the_one_that_an_older_spark_left(
    bench: StateBench,
) -> None:
    await bench.changelog(at(1), b"old")
    # Also one that has come since the directory was last listed.
    assert not await bench.manager.has_snapshot(at(1))
    await bench.directory.publish("1.changelog.crc", b"{}", overwrite=False)
    await bench.changelog(at(1), b"new")
    assert await bench.names() == ["1.changelog"]


# --- deletion ---


async def commit(bench: StateBench, versions: range, unique_id: str | None, *, changelogs: bool = True) -> None:
    for version in versions:
        if changelogs:
            await bench.changelog(at(version, unique_id))
        await bench.save(files(**{f"s{version}": 10, "s9999": 5}), at(version, unique_id))


@pytest.mark.spark_case(3)
async def test_purge_with_nothing_to_wait_for(bench: StateBench, unique_id: str | None) -> None:
    for version in range(1, 6):
        await bench.changelog(at(version, unique_id))
    for version in (2, 3):
        await bench.save(files(**{f"s{version}": 10}), at(version, unique_id))
        await delete_old_versions(bench.manager, versions_retained_min=3)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([2, 3], [1, 2, 3, 4, 5])
    await bench.save(files(s5=10), at(5, unique_id))
    await delete_old_versions(bench.manager, versions_retained_min=3)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([3, 5], [3, 4, 5])
    for version in range(6, 9):
        await bench.changelog(at(version, unique_id))
    await bench.save(files(s8=10), at(8, unique_id))
    await delete_old_versions(bench.manager, versions_retained_min=3)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([5, 8], [5, 6, 7, 8])
    assert sorted(name[:6] for name in await bench.names("SSTs")) == ["000005", "000008"]


@pytest.mark.spark_case(4)
async def test_purge_waits_until_enough_is_stale(bench: StateBench, unique_id: str | None) -> None:
    for version in range(1, 6):
        await commit(bench, range(version, version + 1), unique_id)
        await delete_old_versions(bench.manager, versions_retained_min=3, versions_deleted_min=3)
        assert await bench.versions(".zip") == list(range(1, version + 1))
    await commit(bench, range(6, 7), unique_id)
    deleted = await delete_old_versions(bench.manager, versions_retained_min=3, versions_deleted_min=3)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([4, 5, 6], [4, 5, 6])
    assert (deleted.oldest_kept, deleted.snapshots, deleted.changelogs, deleted.files) == (4, 3, 3, 3)


@pytest.mark.spark_case(5)
async def test_purge_deletes_no_more_than_it_may_at_once(
    bench: StateBench, unique_id: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.state.files")
    settings: dict[str, Any] = {"versions_retained_min": 3, "versions_deleted_min": 3, "versions_deleted_max": 1}
    await commit(bench, range(1, 7), unique_id)
    await delete_old_versions(bench.manager, **settings)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([2, 3, 4, 5, 6], [2, 3, 4, 5, 6])
    await commit(bench, range(7, 8), unique_id)
    await delete_old_versions(bench.manager, **settings)
    assert (await bench.versions(".zip"), await bench.versions(".changelog")) == ([3, 4, 5, 6, 7], [3, 4, 5, 6, 7])
    assert "deleted versions below 3" in caplog.text
    assert bench.manager.files.location in caplog.text


@pytest.mark.spark_case(6)
async def test_purge_deletes_less_than_it_may_at_once(bench: StateBench, unique_id: str | None) -> None:
    settings: dict[str, Any] = {"versions_retained_min": 3, "versions_deleted_min": 1, "versions_deleted_max": 2}
    await commit(bench, range(1, 6), unique_id)
    for newest in (5, 6, 7):
        await delete_old_versions(bench.manager, **settings)
        assert await bench.versions(".zip") == [newest - 2, newest - 1, newest]
        assert await bench.versions(".changelog") == [newest - 2, newest - 1, newest]
        await commit(bench, range(newest + 1, newest + 2), unique_id)


async def test_every_id_of_an_expired_version_goes_with_its_files_and_checksums(bench: StateBench) -> None:
    for version in range(1, 4):
        for unique_id in ("a", "b"):
            await bench.changelog(at(version, unique_id))
            await bench.save(files(**{f"s{version}": 10}), at(version, unique_id))
    await bench.directory.publish("1_c.zip.crc", b"an orphan", overwrite=False)
    current = needed(at(3, "a"), at(3, "a"))
    deleted = await delete_old_versions(bench.manager, versions_retained_min=1, needed=current)
    assert {name.split("_")[0] for name in await bench.names()} == {"3"}
    assert len(await bench.names()) == 8
    assert len(await bench.names("SSTs")) == 2
    assert (deleted.snapshots, deleted.changelogs, deleted.checksums, deleted.files) == (4, 4, 9, 4)


@pytest.mark.spark_case(16)
async def test_orphans_older_than_everything_that_is_named_go(bench: StateBench, tmp_path: Path) -> None:
    other = bench.beside(tmp_path / "other")
    await bench.save(files(s1=10, s2=20, l1=1000, l2=2000), at(1))
    await other.save(files(s1=10, s2=20, l2=1000, l3=2000), at(1))
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (4, 4)
    await wait_for_the_clock()
    await other.save(files(s3=10, s4=20, l4=1000, l5=2000), at(2))
    await delete_old_versions(other.manager, versions_retained_min=1)
    assert len(await bench.names("SSTs")) <= 4
    assert len(await bench.names("logs")) <= 5
    await wait_for_the_clock()
    await other.save(files(s5=10, l6=1000, l7=2000), at(3))
    assert latest_version(await other.listing()) == 3
    await delete_old_versions(other.manager, versions_retained_min=1)
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (1, 2)
    await bench.load(at(3))
    assert tree(bench.working) == files(s5=10, l6=1000, l7=2000)


@pytest.mark.spark_case(17)
async def test_orphans_stay_while_there_is_one_version(bench: StateBench, unique_id: str | None) -> None:
    # Spark's test calls them orphan.sst and orphan.log, which nobody names a file of a snapshot (G5).
    orphans = (f"SSTs/{stored_name('000099.sst', UUID)}", f"logs/{stored_name('000099.log', UUID)}")
    for orphan in orphans:
        await bench.directory.publish(orphan, b"", overwrite=False)
    await wait_for_the_clock()
    await bench.save(files(s1=10, s2=20, l1=1000, l2=2000), at(1, unique_id))
    await delete_old_versions(bench.manager, versions_retained_min=1)
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (3, 3)
    await wait_for_the_clock()
    await bench.save(files(s3=10, s4=20, l3=1000, l4=2000), at(2, unique_id))
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (5, 5)
    await delete_old_versions(bench.manager, versions_retained_min=1)
    assert (len(await bench.names("SSTs")), len(await bench.names("logs"))) == (2, 2)


async def test_after_a_step_back_what_the_query_stands_on_is_not_deleted(bench: StateBench) -> None:
    for version in range(1, 15):
        await bench.changelog(at(version, "old"))
    for version in (2, *range(4, 15, 2)):
        await bench.save(files(**{f"s{version}": 10}), at(version, "old"))
    await bench.load(at(6, "old"))
    await bench.changelog(at(7, "new"))
    await delete_old_versions(
        bench.manager, versions_retained_min=2, needed=needed(at(7, "new"), at(6, "old"), at(7, "new"))
    )
    assert await bench.versions(".zip") == [6, 8, 10, 12, 14]
    assert "7_new.changelog" in await bench.names()
    await bench.load(at(6, "old"))
    assert tree(bench.working) == files(s6=10)


async def test_a_version_overwritten_by_another_executor_is_read_again_before_files_are_deleted(
    bench: StateBench, tmp_path: Path
) -> None:
    other = bench.beside(tmp_path / "other")
    for version in range(1, 4):
        await bench.save(files(s1=10, **{f"s{version + 1}": 20}), at(version))
    await other.load(at(1))
    # From here on, versions 2 and 3 are those of the other one, which still uses what version 1 put there.
    for version in (2, 3):
        await other.save(files(s1=10, s2=20, **{f"s{version + 6}": 30}), at(version))
    await delete_old_versions(bench.manager, versions_retained_min=2)
    for version in (2, 3):
        await other.load(at(version))
        assert tree(other.working) == files(s1=10, s2=20, **{f"s{version + 6}": 30})


async def test_foreign_names_are_never_deleted(bench: StateBench) -> None:
    foreign = ["0001.zip", "1.zip.bak", "1_a_b.zip", "SSTs/notes.txt", "_metadata/schema", "note"]
    # Nor what merely ends as they do: a copy, a note, the log of a driver.
    foreign += ["SSTs/my-backup.sst", "SSTs/000001.sst", "SSTs/README.sst", "logs/driver.log"]
    for name in foreign:
        await bench.directory.publish(name, b"mine", overwrite=False)
    await wait_for_the_clock()
    await commit(bench, range(1, 6), None)
    await delete_old_versions(bench.manager, versions_retained_min=1)
    for name in foreign:
        assert await bench.directory.read(name) == b"mine"


async def test_a_damaged_snapshot_that_stays_stops_a_deletion_and_one_that_goes_does_not(bench: StateBench) -> None:
    await commit(bench, range(1, 5), None)
    await bench.directory.publish("1.zip", b"no zip", overwrite=True)
    await bench.directory.publish("4.zip", b"no zip", overwrite=True)
    with pytest.raises(DamagedError, match=r"4\.zip"):
        await delete_old_versions(bench.manager, versions_retained_min=2)
    assert await bench.versions(".zip") == [1, 2, 3, 4]
    await commit(bench, range(4, 5), None)
    await delete_old_versions(bench.manager, versions_retained_min=2)
    assert await bench.versions(".zip") == [3, 4]


async def test_a_file_that_another_executor_may_have_deleted_is_uploaded_again(
    bench: StateBench, tmp_path: Path
) -> None:
    late = bench.beside(tmp_path / "late", versions_retained_min=3)
    await bench.save(files(s1=10), at(1))
    await late.load(at(1))
    captured = late.capture(files(s1=10, s2=20), at(2))
    await commit(bench, range(3, 7), None)
    await delete_old_versions(bench.manager, versions_retained_min=3)
    uploaded = await late.manager.upload_snapshot(captured)
    assert (uploaded.files_copied, uploaded.files_renewed, uploaded.files_reused) == (2, 1, 0)
    await late.load(at(2))
    assert tree(late.working) == files(s1=10, s2=20)


async def test_a_backup_cannot_be_written(bench: StateBench) -> None:
    class BackupFiles:
        location = "a backup"
        names = bench.manager.files.names
        read = bench.manager.files.read
        fetch = bench.manager.files.fetch
        read_range = bench.manager.files.read_range
        known_lineage = bench.manager.files.known_lineage
        close = bench.manager.files.close

    await bench.save(files(s1=10), at(1))
    backup = StateFileManager(BackupFiles())
    await backup.load_snapshot(at(1), bench.working)
    assert tree(bench.working) == files(s1=10)
    with pytest.raises(UsageError, match="backup"):
        await delete_old_versions(backup)
    with pytest.raises(UsageError, match="backup"):
        await backup.publish_changelog(at(2), bench.working / "CURRENT")
