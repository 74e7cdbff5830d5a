"""Versions of a state store are loaded from a repository without a listing of the state (design 0004, R6)."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.errors import BlobNotFoundError
from engine.backup.backup import BackupOptions
from engine.errors import CollectedError, DamagedError, NotFoundError, UsageError
from engine.repository.repository import Repository
from engine.state.restore import IndexStateFiles
from engine.state.zips import read_state_zip
from index.errors import VersionMissingError
from index.plan.commits import Commit, Retention
from index.snapshot.model import LineageItem
from index.spark.names import StateVersion, changelog_name, snapshot_name
from tests.unit.engine.conftest import JOB, TTL_MS
from tests.unit.engine.state.state_repository import PACKED, PLAIN, StateWorld, names_below, states, unique
from tests.unit.engine.state.state_store_kit import check_numbers, settings_of, write_numbers
from tidemark import StateStore

__all__ = ["states"]


def keys_of(files: IndexStateFiles, *paths: str) -> set[str]:
    """The blobs that these files are in."""
    return {blob.key for path in paths for blob in files._find(path).blobs}


def ssts_of(states: StateWorld, version: int) -> int:
    """How many SSTs a snapshot names."""
    path = states.bench.file(version, "zip")
    return len(read_state_zip(path.read_bytes(), subject=path.name).metadata.sst_files)


async def test_a_load_takes_the_index_and_a_blob_for_each_file_and_lists_nothing_of_the_state(
    states: StateWorld,
) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process()
    async with repository.state_files(commit) as files:
        opened = states.requests()
        await states.check(files, [8])
        loaded = states.requests()
        assert states.bench.snapshots() == [3, 6]
        small = [snapshot_name(states.of(6)), changelog_name(states.of(7)), changelog_name(states.of(8))]
        ssts = [f"SSTs/{name}" for name in states.bench.ssts()]
        assert {key for operation, key in loaded if operation == "get"} <= keys_of(
            files, *small, *(f"{name}.crc" for name in small), *ssts
        )
    assert {operation for operation, _ in loaded} == {"get"}
    # A zip, two changelogs, a checksum for each, and the SSTs of the snapshot.
    assert len(loaded) == 6 + ssts_of(states, 6)
    assert Counter(operation for operation, _ in opened) == {"put": 1, "list_page": 1, "get": 1}
    assert [key for operation, key in opened if operation == "list_page"] == ["log/job/"]
    assert [operation for operation, _ in states.requests()] == ["put"]  # the pin is released


@pytest.mark.parametrize("settings", [PLAIN, PACKED], ids=["blobs", "packs"])
async def test_every_version_that_the_directory_holds_can_be_loaded(states: StateWorld, settings: object) -> None:
    await states.grow(range(1, 12))
    repository = await states.process(settings)  # type: ignore[arg-type]
    lineage = await states.lineage()
    result = await repository.backup(
        JOB, states.bench.root, options=BackupOptions(version=11, unique_id=states.ids[11], lineage=lineage)
    )
    commit = await repository.commit(JOB, [result])
    async with repository.state_files(commit) as files:
        await states.check(files, range(12))


@pytest.mark.parametrize("settings", [PLAIN, PACKED], ids=["blobs", "packs"])
async def test_a_lineage_that_the_index_lacks_is_read_from_the_changelogs(states: StateWorld, settings: object) -> None:
    await states.grow(range(1, 10))
    commit = await states.backup(known=False)
    repository = await states.process(settings)  # type: ignore[arg-type]
    async with repository.state_files(commit) as files:
        assert files.known_lineage(states.of(9)) is None
        await states.check(files, [9, 6, 2, 1])
    assert "list_page" not in {operation for operation, key in states.requests() if not key.startswith("log/")}


async def test_with_the_lineage_of_the_index_the_header_is_not_read(states: StateWorld) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process()
    async with repository.state_files(commit) as files:
        lineage = files.known_lineage(states.of(8))
        assert lineage == await states.lineage()
        assert lineage is not None
        assert [item.version for item in lineage] == [6, 7]
        assert files.known_lineage(states.of(7)) == lineage[:1]
        # Of the oldest one, its own header says more.
        assert files.known_lineage(states.of(6)) is None
        assert files.known_lineage(StateVersion(8, unique("another"))) is None


async def test_an_attempt_that_lost_is_not_taken_for_what_came_before(states: StateWorld) -> None:
    """Two attempts at version 5; the first was backed up, the second was committed."""
    await states.grow(range(1, 6))
    await states.backup(known=False)
    lost = states.ids[5]
    del states.ids[5:]
    async with states.bench.store(deltas_per_snapshot=100) as store:
        await write_numbers(store, states.ids, range(5, 7))
        await store.load(4, states.ids[4])
    commit = await states.backup(known=False)
    repository = await states.process()
    async with repository.state_files(commit) as files:
        assert changelog_name(StateVersion(5, lost)) in await files.names()
        assert files.index.metadata.base == LineageItem(5, lost or unique(""))
        assert files.known_lineage(states.of(6)) is None
        await states.check(files, [6, 5])


async def test_format_1_is_loaded_by_number(states: StateWorld) -> None:
    await states.grow(range(1, 9), format_version=1)
    commit = await states.backup()
    repository = await states.process()
    async with repository.state_files(commit) as files:
        await states.check(files, [8, 5, 1])


async def test_format_1_that_was_continued_as_format_2_is_loaded_over_the_seam(states: StateWorld) -> None:
    await states.grow(range(1, 5), format_version=1)
    await states.grow(range(5, 6), format_version=2)
    assert states.bench.snapshots() == [3]
    commit = await states.backup()
    repository = await states.process()
    async with repository.state_files(commit) as files:
        await states.check(files, [5, 4, 3])


async def test_it_can_only_be_read(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    commit = await states.backup()
    repository = await states.process()
    async with (
        repository.state_files(commit) as files,
        await StateStore.open(files, states.bench.new_work(), settings_of()) as store,
    ):
        with pytest.raises(UsageError):
            await store.load(2, states.ids[2])
        await store.load(2, states.ids[2], read_only=True)
        with pytest.raises(UsageError):
            store.put(b"key", b"value")


async def test_a_version_that_is_not_there_is_named(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    commit = await states.backup()
    repository = await states.process()
    async with repository.state_files(commit) as files:
        with pytest.raises(VersionMissingError, match="version 2_gone"):
            await states.check_version(files, 2, "gone")
        with pytest.raises(VersionMissingError, match="version 3_"):
            await states.check_version(files, 3, "gone")


async def test_a_backup_of_a_plain_directory_has_no_versions(states: StateWorld) -> None:
    repository = await states.process()
    tree = states.world.tree({"CURRENT": b"MANIFEST-000005\n"})
    commit = await repository.commit(JOB, [await repository.backup(JOB, tree)])
    async with repository.state_files(commit) as files:
        assert await files.names() == ("CURRENT",)
        assert await files.read("CURRENT") == b"MANIFEST-000005\n"
        with pytest.raises(VersionMissingError):
            await states.check_version(files, 1, None)


async def test_files_are_fetched_whole_or_not_at_all(states: StateWorld, tmp_path: Path) -> None:
    await states.grow(range(1, 5))
    commit = await states.backup()
    repository = await states.process()
    place = tmp_path / "place"
    place.mkdir()
    async with repository.state_files(commit) as files:
        name = snapshot_name(states.of(3))
        original = (states.bench.root / name).read_bytes()
        (place / "here").write_bytes(b"old")
        assert await files.fetch(name, place / "here", size_bytes=len(original)) == len(original)
        assert (place / "here").read_bytes() == original == await files.read(name)
        sst = states.bench.ssts()[0]
        await files.fetch(f"SSTs/{sst}", place / "sst")
        assert (place / "sst").read_bytes() == (states.bench.root / "SSTs" / sst).read_bytes()
        states.requests()
        with pytest.raises(DamagedError, match="instead of 7"):
            await files.fetch(name, place / "no", size_bytes=7)
        with pytest.raises(DamagedError, match="at most 7"):
            await files.fetch(name, place / "no", size_bytes_max=7)
        with pytest.raises(DamagedError, match="at most 7"):
            await files.read(name, size_bytes_max=7)
        for path in ("gone.zip", "SSTs", "../here", "SSTs/../here", ""):
            with pytest.raises(BlobNotFoundError):
                await files.fetch(path, place / "no")
        assert states.requests() == []
    assert names_below(place) == {"here", "sst"}


async def test_a_fetch_that_is_cancelled_leaves_nothing(states: StateWorld, tmp_path: Path) -> None:
    await states.grow(range(1, 5))
    commit = await states.backup()
    repository = await states.process()
    place = tmp_path / "place"
    place.mkdir()
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    async with repository.state_files(commit) as files:
        states.world.store.before("get", "blobs/", never)
        fetch = asyncio.create_task(files.fetch(snapshot_name(states.of(3)), place / "zip"))
        await asked.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
    assert list(place.iterdir()) == []


async def blob_of(repository: Repository, commit: Commit, path: str) -> str:
    async with repository.state_files(commit) as files:
        (key,) = keys_of(files, path)
        return key


@pytest.mark.parametrize("kind", ["zip", "changelog", "sst"])
@pytest.mark.parametrize("damage", ["missing", "altered"])
async def test_a_blob_that_is_missing_or_altered_is_damage_and_never_a_wrong_state(
    states: StateWorld, kind: str, damage: str
) -> None:
    await states.grow(range(1, 6))
    commit = await states.backup()
    repository = await states.process()
    path = {
        "zip": snapshot_name(states.of(3)),
        "changelog": changelog_name(states.of(5)),
        "sst": f"SSTs/{states.bench.ssts()[-1]}",
    }[kind]
    key = await blob_of(repository, commit, path)
    if damage == "missing":
        await states.world.store.inner.delete([key])
    else:
        await states.world.store.inner.put(key, BytesBody(b"x" * (states.bench.root / path).stat().st_size))
    async with repository.state_files(commit) as files:
        with pytest.raises(DamagedError, match=path):
            await files.fetch(path, states.world.directory / "fetched")
        assert not (states.world.directory / "fetched").exists()
        if kind == "changelog":
            with pytest.raises(DamagedError):
                await states.check(files, [5])
        else:
            # An older snapshot, here none at all, and the changelogs since (design 0004, R7).
            await states.check(files, [5])


async def test_the_index_of_another_store_is_refused(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    commit = await states.backup()
    repository = await states.process()
    with pytest.raises(NotFoundError, match="has no store 1/default"):
        async with repository.state_files(commit, task="1"):
            pass
    reference = commit.record.stores[0]
    wrong = msgspec.structs.replace(reference, unique_id=unique("another"))
    record = msgspec.structs.replace(commit.record, stores=(wrong,))
    with pytest.raises(DamagedError, match="not of another"):
        async with repository.state_files(msgspec.structs.replace(commit, record=record)):
            pass


async def test_what_is_being_read_is_not_collected(states: StateWorld) -> None:
    await states.grow(range(1, 5))
    old = await states.backup()
    await states.grow(range(5, 9))
    for path in states.bench.root.glob("[1-4]_*"):
        path.unlink()
    collector, repository = await states.process(), await states.process()
    async with repository.state_files(old) as files:
        await states.backup()
        states.world.clock.advance(2 * TTL_MS // 3)
        await collector.collect(Retention(keep_last=1), delete_share_max=1)
        await states.check(files, [4])
    await collector.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(CollectedError):
        async with repository.state_files(old):
            pass


async def test_a_store_that_goes_on_elsewhere_is_loaded_from_both(states: StateWorld) -> None:
    """The files of an index are beside those of a directory: one restores, the other goes on."""
    await states.grow(range(1, 5))
    commit = await states.backup()
    await states.grow(range(5, 7))
    repository = await states.process()
    async with repository.state_files(commit) as files, states.bench.store() as live:
        await states.check(files, [4])
        await check_numbers(live, states.ids, [6])
