"""What is left when a store fails, a process dies, or two threads are at it at once."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blobstore.errors import CheckpointUnknownError, StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.errors import DamagedError
from engine.state.changelogs import ChangelogWriter
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import VersionMissingError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import PUT
from tests.doubles import InterposedStore
from tests.unit.engine.state.state_bench import Content, StateBench, at, delete_old_versions, files, needed, tree


@pytest.fixture
def store() -> InterposedStore:
    return InterposedStore(MemoryStore())


@pytest.fixture
async def bench(store: InterposedStore, tmp_path: Path) -> AsyncIterator[StateBench]:
    root = await CheckpointDir.open(store)
    yield StateBench(tmp_path, root.child("state/0/0"))
    await root.close()


@pytest.fixture(params=[None, "a"], ids=["V1", "V2"])
def unique_id(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


# --- failing uploads ---


@pytest.mark.spark_case(19, 40)
@pytest.mark.parametrize("failing", ["SSTs/000002", "logs/000003", ".zip"])
async def test_a_version_whose_upload_failed_is_not_there_and_the_one_before_is(
    bench: StateBench, store: InterposedStore, unique_id: str | None, failing: str
) -> None:
    await bench.save(files(s1=10), at(1, unique_id))
    captured = bench.capture(files(s1=10, s2=20, l3=30), at(2, unique_id))
    for operation in ("put", "put_if_absent"):
        store.fail(operation, failing)
    with pytest.raises(StoreUnavailableError):
        await bench.manager.upload_snapshot(captured)
    assert await bench.versions(".zip") == [1]
    with pytest.raises(VersionMissingError):
        await bench.load(at(2, unique_id))
    await bench.load(at(1, unique_id))
    assert tree(bench.working) == files(s1=10)


async def test_nothing_that_a_failed_upload_put_there_is_named_by_a_later_snapshot(
    bench: StateBench, store: InterposedStore
) -> None:
    store.fail("put", ".zip")
    with pytest.raises(StoreUnavailableError):
        await bench.save(files(s1=10), at(1))
    left = set(await bench.names("SSTs"))
    saved = await bench.save(files(s1=10, s2=20), at(2))
    assert (saved.files_copied, saved.files_reused) == (2, 0)
    assert len(left) == 1
    assert len(set(await bench.names("SSTs")) - left) == 2
    await bench.load(at(2))
    assert tree(bench.working) == files(s1=10, s2=20)
    # And it goes, as any other file that nobody names.
    await bench.save(files(s3=30), at(3))
    deleted = await delete_old_versions(bench.manager, versions_retained_min=1)
    assert (deleted.files, deleted.orphans) == (2, 1)


@pytest.mark.spark_case(46)
async def test_a_snapshot_of_maintenance_that_is_written_again_replaces_the_older_one_whole(
    bench: StateBench, store: InterposedStore, tmp_path: Path
) -> None:
    """The maintenance of an executor that was given up ends late; the one that follows it writes the version again."""
    late = bench.beside(tmp_path / "late")
    await bench.save(files(s1=10), at(1))
    await late.load(at(1))
    left_over = late.capture(files(s1=10, s2=20), at(2))
    await bench.save(files(s1=10, s2=25, s3=30), at(2))
    await bench.load(at(2))
    assert tree(bench.working) == files(s1=10, s2=25, s3=30)
    # Without ids the last writer wins, whole; nothing is a mixture.
    await late.manager.upload_snapshot(left_over)
    await bench.load(at(2))
    assert tree(bench.working) == files(s1=10, s2=20)
    saved = await bench.save(files(s1=10, s2=20, s4=40), at(3))
    assert (saved.files_copied, saved.files_reused) == (1, 2)
    await late.load(at(3))
    assert tree(late.working) == files(s1=10, s2=20, s4=40)


@pytest.mark.spark_case(46)
async def test_with_ids_a_late_snapshot_of_an_attempt_that_lost_stands_beside_the_committed_one(
    bench: StateBench, tmp_path: Path
) -> None:
    late = bench.beside(tmp_path / "late")
    await bench.save(files(s1=10), at(1, "a"))
    await late.load(at(1, "a"))
    left_over = late.capture(files(s1=10, s2=20), at(2, "lost"))
    await bench.save(files(s1=10, s2=25), at(2, "won"))
    await late.manager.upload_snapshot(left_over)
    await bench.load(at(2, "won"))
    assert tree(bench.working) == files(s1=10, s2=25)


async def test_a_changelog_that_the_store_did_not_list_is_an_error(bench: StateBench, store: InterposedStore) -> None:
    store.lose_answer("put_if_absent", "1_a.changelog")
    with pytest.raises(CheckpointUnknownError):
        await bench.changelog(at(1, "a"))


async def test_a_changelog_without_its_checksum_is_read(
    bench: StateBench, store: InterposedStore, tmp_path: Path
) -> None:
    store.fail("put_if_absent", "1_a.changelog.crc")
    with pytest.raises(StoreUnavailableError):
        await bench.changelog(at(1, "a"), b"whole")
    (path,) = await bench.manager.fetch_changelogs([at(1, "a")], tmp_path)
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize("interrupted", ["SSTs/", ".zip", ".changelog", ".crc"])
async def test_an_interrupted_deletion_is_completed_by_the_next(
    bench: StateBench, store: InterposedStore, interrupted: str
) -> None:
    for version in range(1, 6):
        await bench.changelog(at(version, "a"))
        await bench.save(files(**{f"s{version}": 10}), at(version, "a"))
    store.fail("delete", interrupted)
    with pytest.raises(StoreUnavailableError):
        await delete_old_versions(bench.manager, versions_retained_min=2)
    for version in (4, 5):
        await bench.load(at(version, "a"))
    # What stopped before the zips is all done again; what stopped after them waits until others expire.
    await bench.save(files(s6=10), at(6, "a"))
    await delete_old_versions(bench.manager, versions_retained_min=2)
    assert await bench.versions(".zip") == [5, 6]
    assert await bench.versions(".changelog") == [5]
    assert sorted(name[:6] for name in await bench.names("SSTs")) == ["000005", "000006"]
    assert await bench.versions(".crc") == [5, 5, 6]


# --- requests ---


async def write_changelogs(bench: StateBench, ids: str, scratch: Path, snapshots: tuple[int, ...]) -> None:
    """Version 1 has the first letter as its id, and so on; a header goes back to the snapshot before it."""
    for version, unique_id in enumerate(ids, 1):
        since = max((s for s in snapshots if s < version), default=1)
        lineage = [LineageItem(v, UniqueId(ids[v - 1])) for v in range(since, version)]
        with ChangelogWriter(scratch / f"{version}", "lz4", 3, lineage) as writer:
            writer.write((PUT, b"key", b"value"))
            writer.finish()
            await bench.manager.publish_changelog(at(version, unique_id), writer.path)
        if version in snapshots:
            await bench.save(files(**{f"s{version}": 10}), at(version, unique_id))


async def test_a_version_with_an_id_takes_one_list_and_each_changelog_once(
    store: InterposedStore, tmp_path: Path
) -> None:
    directory = (await CheckpointDir.open(store)).child("state/0/0")
    bench = StateBench(tmp_path, directory, file_checksums=False)
    await write_changelogs(bench, "abcdefg", tmp_path, (3,))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    fresh = bench.beside(tmp_path / "fresh", file_checksums=False)
    store.requests.clear()
    resolution = await fresh.manager.resolve(7, UniqueId("g"), scratch=scratch)
    assert resolution.base == at(3, "c")
    assert resolution.changelogs == tuple(at(v, i) for v, i in [(4, "d"), (5, "e"), (6, "f"), (7, "g")])
    await fresh.load(resolution.base)
    await fresh.manager.fetch_changelogs(resolution.changelogs, scratch)
    assert [operation for operation, _ in store.requests].count("list_page") == 1
    assert sorted(key.rpartition("/")[2][:3] for operation, key in store.requests if operation == "get") == [
        "000",
        "3_c",
        "4_d",
        "5_e",
        "6_f",
        "7_g",
    ]


async def test_with_a_known_lineage_the_header_is_not_read(
    bench: StateBench, store: InterposedStore, tmp_path: Path
) -> None:
    await write_changelogs(bench, "abcde", tmp_path, (2,))
    known = {at(5, "e"): tuple(LineageItem(v, UniqueId("abcde"[v - 1])) for v in (2, 3, 4))}
    fresh = bench.beside(tmp_path / "fresh")
    store.requests.clear()
    assert (await fresh.manager.resolve(5, UniqueId("e"), known=known)).base == at(2, "b")
    assert [operation for operation, _ in store.requests if operation == "get"] == []
    assert (await fresh.manager.resolve(5, UniqueId("e"), rejected=[at(2, "b")])).base is None


async def test_a_file_that_is_here_is_not_asked_for(bench: StateBench, store: InterposedStore) -> None:
    await bench.save(files(s1=10), at(1))
    await bench.save(files(s1=10, s2=20), at(2))
    await bench.load(at(1))
    await bench.load(None)
    await bench.load(at(1))
    await bench.save(files(s1=10, s3=20), at(3))
    store.requests.clear()
    await bench.load(at(3))
    gets = [key.rpartition("/")[2][:6] for operation, key in store.requests if operation == "get"]
    assert gets == ["3.zip", "000003"]


async def test_of_names_without_ids_the_oldest_zip_that_stays_is_read_again_and_with_ids_none_is(
    bench: StateBench, store: InterposedStore, unique_id: str | None
) -> None:
    """Some stores report times in seconds: an overwritten zip may look as it did."""
    for version in range(1, 4):
        await bench.save(files(**{f"s{version}": 10}), at(version, unique_id))
    await delete_old_versions(bench.manager, versions_retained_min=2)
    await bench.save(files(s4=10), at(4, unique_id))
    store.requests.clear()
    await delete_old_versions(bench.manager, versions_retained_min=2)
    zips = sorted(key.rpartition("/")[2] for operation, key in store.requests if operation == "get")
    assert zips == ([] if unique_id else ["3.zip", "4.zip"])
    assert await bench.versions(".zip") == [3, 4]


# --- two threads ---


@pytest.mark.parametrize("kind", ["directory", "memory"])
async def test_saving_and_deleting_in_two_threads_lose_nothing_that_stays(
    tmp_path: Path, kind: str, unique_id: str | None
) -> None:
    """3.9: each thread has an event loop of its own, and both use one manager."""
    location = tmp_path / "checkpoint" if kind == "directory" else MemoryStore()
    directory = (await CheckpointDir.open(location)).child("state/0/0")
    bench = StateBench(tmp_path, directory, versions_retained_min=3)
    contents: dict[int, Content] = {}
    done = threading.Event()
    deletions: list[int] = []

    async def save_all() -> None:
        random_state = random.Random(5)
        alive: dict[str, int] = {}
        for version in range(1, 61):
            alive = {name: size for name, size in alive.items() if random_state.random() < 0.8}
            alive[f"s{version}"] = version + 1
            await bench.changelog(at(version, unique_id))
            await bench.save(files(**alive), at(version, unique_id))
            contents[version] = files(**alive)

    async def delete_all() -> None:
        while not done.is_set():
            target = at(len(contents), unique_id) if contents else None
            deleted = await delete_old_versions(
                bench.manager, versions_retained_min=3, needed=None if target is None else needed(target, target)
            )
            deletions.append(deleted.snapshots)
            await asyncio.sleep(0.001)

    def save_in_a_thread() -> None:
        try:
            asyncio.run(save_all())
        finally:
            done.set()

    threads = [threading.Thread(target=save_in_a_thread), threading.Thread(target=lambda: asyncio.run(delete_all()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert len(contents) == 60
    assert sum(deletions) > 10
    await delete_old_versions(bench.manager, versions_retained_min=3)
    reader = bench.beside(tmp_path / "reader")
    assert await reader.versions(".zip") == [58, 59, 60]
    assert await reader.versions(".changelog") == [58, 59, 60]
    for version in (58, 59, 60):
        await reader.load(at(version, unique_id))
        assert tree(reader.working) == contents[version]
    named = {name for version in (58, 59, 60) for name in contents[version] if name.endswith(".sst")}
    assert {f"{name[:6]}.sst" for name in await reader.names("SSTs")} == named


async def test_what_an_upload_under_way_will_name_is_not_deleted(bench: StateBench, store: InterposedStore) -> None:
    """The snapshots that name `000001.sst` expire between the moment that it is captured again and its upload."""
    await bench.save(files(s1=10), at(1))
    captured = bench.capture(files(s1=10, s9=90), at(9))
    for version in range(2, 6):
        await bench.save(files(**{f"s{version}": 10}), at(version))
    await delete_old_versions(bench.manager, versions_retained_min=1)
    assert await bench.versions(".zip") == [5]
    await bench.manager.upload_snapshot(captured)
    await bench.load(at(9))
    assert tree(bench.working) == files(s1=10, s9=90)


async def test_a_missing_sst_names_the_snapshot_that_wants_it(bench: StateBench) -> None:
    await bench.save(files(s1=10), at(1, "a"))
    await bench.directory.delete([f"SSTs/{name}" for name in await bench.names("SSTs")])
    with pytest.raises(DamagedError, match="snapshot 1_a names it"):
        await bench.load(at(1, "a"))
