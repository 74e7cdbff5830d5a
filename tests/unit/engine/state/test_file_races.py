"""A deletion and an upload of one process at the same time (design 0004, G6 and S4)."""

import asyncio
from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.state.checkpoint_dir import CheckpointDir
from tests.doubles import InterposedStore
from tests.unit.engine.state.state_bench import StateBench, at, delete_old_versions, files, needed, tree


@pytest.fixture
def store() -> InterposedStore:
    return InterposedStore(MemoryStore())


@pytest.fixture
async def bench(store: InterposedStore, tmp_path: Path) -> StateBench:
    directory = (await CheckpointDir.open(store)).child("state/0/0")
    return StateBench(tmp_path, directory, check_stale_files=False)


@pytest.mark.parametrize("captured_before", [True, False], ids=["captured before", "captured after"])
async def test_a_file_that_an_upload_names_which_ends_after_the_listing_is_not_deleted(
    bench: StateBench, store: InterposedStore, tmp_path: Path, captured_before: bool
) -> None:
    other = bench.beside(tmp_path / "other")
    await bench.save(files(s1=10), at(1, "a"))
    await other.save(files(s9=10), at(5, "b"))
    await bench.load(at(1, "a"))
    captured = [bench.capture(files(s1=10, s2=3), at(6, "c"))] if captured_before else []
    uploaded = asyncio.Event()

    async def upload() -> None:
        # The deletion has listed the zips, and is about to read the one that it does not know.
        await bench.manager.upload_snapshot((captured or [bench.capture(files(s1=10, s2=3), at(6, "c"))])[0])
        uploaded.set()

    store.before("get", "5_b.zip", upload)
    current = needed(at(5, "b"), at(5, "b"))
    deleted = await delete_old_versions(bench.manager, versions_retained_min=1, needed=current)
    assert uploaded.is_set()
    assert (deleted.snapshots, deleted.files) == (1, 0)
    await bench.load(at(6, "c"))
    assert tree(bench.working) == files(s1=10, s2=3)


async def test_a_file_is_renewed_by_the_fewest_versions_that_a_deletion_here_retains(
    store: InterposedStore, tmp_path: Path
) -> None:
    bench = StateBench(tmp_path, (await CheckpointDir.open(store)).child("state/0/0"), versions_retained_min=100)
    await bench.save(files(s1=10), at(1, "a"))
    await delete_old_versions(bench.manager, versions_retained_min=2, needed=needed(at(1, "a"), at(1, "a")))
    await bench.beside(tmp_path / "other").save(files(s9=10), at(5, "b"))
    uploaded = await bench.save(files(s1=10, s2=3), at(6, "c"))
    assert (uploaded.files_renewed, uploaded.files_reused) == (1, 0)


async def test_the_look_for_stale_files_comes_after_what_takes_long(store: InterposedStore, tmp_path: Path) -> None:
    bench = StateBench(tmp_path, (await CheckpointDir.open(store)).child("state/0/0"), versions_retained_min=1)
    other = bench.beside(tmp_path / "other", versions_retained_min=1)
    await bench.save(files(s1=10), at(1, "a"))

    async def delete_meanwhile() -> None:
        await other.save(files(s9=10), at(5, "b"))
        await delete_old_versions(other.manager, needed=needed(at(5, "b"), at(5, "b")))

    store.before("put", "SSTs/000002", delete_meanwhile)
    uploaded = await bench.save(files(s1=10, s2=3), at(6, "c"))
    assert uploaded.files_renewed == 1
    await other.load(at(6, "c"))
    assert tree(other.working) == files(s1=10, s2=3)
