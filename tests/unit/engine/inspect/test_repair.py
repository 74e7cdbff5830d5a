"""What is damaged, which commits need it, and what is done about it (design 0006, M1 to M3)."""

from pathlib import Path

import pytest

from blobstore.base import BytesBody, read_blob
from engine.backup.backup import BackupOptions
from engine.errors import IncompleteError, NotFoundError, UnsafeStoreError, UsageError
from engine.inspect.discard import discard
from engine.inspect.repair import drop_commits, find_damaged
from engine.inspect.verify import Level
from engine.records.find import DAMAGED_FILE
from engine.repository.repository import Repository
from index.plan.commits import Commit, Retention, ShortListingError
from index.snapshot.keys import commit_key
from tests.unit.engine.conftest import JOB, TTL_MS, World, text_tree


async def alter(world: World, key: str) -> None:
    data = bytearray(await read_blob(world.store.inner, key, size_bytes_max=1 << 30))
    data[len(data) // 2] ^= 1
    await world.store.inner.put(key, BytesBody(bytes(data)))


async def own_blob(world: World, repository: Repository, commit: Commit) -> str:
    """The largest blob that a commit has brought."""
    index = await repository.read_index(commit.record.stores[0].index)
    sub = next(sub for sub in index.dir.sub_dirs_present if sub.name == "archive")
    return sub.files_present[0].blobs[0].key


async def damaged_numbers(repository: Repository) -> list[int]:
    report = await repository.verify(scope=JOB, level=Level.CONTENT)
    commits = await repository.commits(JOB, with_named=True)
    return [one.number for one in await find_damaged(repository.store, commits, report.problems)]


async def test_the_commits_that_need_an_altered_blob_are_named_with_what_is_to_be_sent(world: World) -> None:
    repository = await world.process()
    one, two, _ = await world.history(repository, "one", "two", "three")
    await alter(world, await own_blob(world, repository, two))
    report = await repository.verify(scope=JOB, level=Level.CONTENT)
    (found,) = await find_damaged(repository.store, await repository.commits(JOB), report.problems)
    assert (found.number, found.version) == (two.pointer.number, two.record.version)
    (store,) = found.stores
    assert store.files == ("archive/000009.log",)
    assert store.size_bytes == len(text_tree("two")["archive/000009.log"])
    await world.store.inner.delete([one.record.stores[0].index.key])
    assert await damaged_numbers(repository) == [2, 1]


@pytest.mark.parametrize("what", ["blob", "index"])
async def test_the_next_process_sends_again_what_a_restore_found_altered(
    world: World, tmp_path: Path, what: str
) -> None:
    async def process() -> Repository:
        return await Repository.open(world.store, cache_dir=tmp_path / "cache")

    repository = await process()
    newest = (await world.history(repository, "one", "two"))[-1]
    key = await own_blob(world, repository, newest) if what == "blob" else newest.record.stores[0].index.key
    await alter(world, key)
    with pytest.raises(IncompleteError, match=key):
        await (await process()).find_and_restore(JOB, world.target())
    (cache,) = (tmp_path / "cache").iterdir()
    assert (cache / DAMAGED_FILE).stat().st_mode & 0o077 == 0
    again = await process()
    await again.commit(JOB, [await world.backup(again, "two")])
    assert await world.restored_text(await process()) == "two"
    (cache / DAMAGED_FILE).write_bytes(b"[1, 2")
    assert (await process()).missing_blobs.keys == frozenset()


async def test_an_altered_index_of_the_newest_commit_does_not_stop_the_job(world: World) -> None:
    repository = await world.process()
    newest = (await world.history(repository, "one", "two"))[-1]
    await alter(world, newest.record.stores[0].index.key)
    other = await world.process()
    await other.commit(JOB, [await world.backup(other, "three")])
    assert await world.restored_text(await world.process()) == "three"


async def test_the_newest_complete_commit_is_one_that_can_be_read(world: World) -> None:
    repository = await world.process()
    _, two, three = await world.history(repository, "one", "two", "three")
    for commit in (two, three):
        await alter(world, await own_blob(world, repository, commit))
    with pytest.raises(IncompleteError) as failed:
        await (await world.process()).find_and_restore(JOB, world.target())
    # As far as is known without reading it.
    assert failed.value.complete is not None
    assert failed.value.complete.pointer == two.pointer
    restored = await (await world.process()).find_and_restore(JOB, world.target(), or_newest_complete=True)
    assert restored.commit.pointer.number == 1
    assert "000009.log" in restored.instead_because


async def test_where_nothing_can_be_read_the_restore_ends_with_the_damage(world: World) -> None:
    repository = await world.process()
    for commit in await world.history(repository, "one", "two"):
        await alter(world, await own_blob(world, repository, commit))
    with pytest.raises(IncompleteError):
        await (await world.process()).find_and_restore(JOB, world.target(), or_newest_complete=True)


async def test_dropped_commits_are_closed_and_all_others_stay(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two", "three", "four")
    for commit in commits[1:3]:
        await alter(world, await own_blob(world, repository, commit))
    assert await damaged_numbers(repository) == [3, 2]
    boundary = await drop_commits(world.store, JOB, [3, 2])
    assert boundary is not None
    assert (boundary.number, [p.number for p in boundary.kept]) == (3, [1])
    assert [c.pointer.number for c in await repository.commits(JOB)] == [4, 1]
    assert await damaged_numbers(repository) == []
    assert await drop_commits(world.store, JOB, [3, 2]) is None
    world.clock.advance(TTL_MS)
    await (await world.process()).collect(Retention(keep_last=9), delete_share_max=1)
    assert await world.restored_text(await world.process()) == "four"
    assert await world.restored_text(await world.process(), number=1) == "one"


async def test_the_newest_commit_is_never_dropped(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    with pytest.raises(UsageError, match="commit 2 is the newest"):
        await drop_commits(world.store, JOB, [1, 2])
    assert len(await repository.commits(JOB)) == 2


async def test_a_commit_that_lands_while_others_are_dropped_stays(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    result = await other.backup(JOB, world.tree(text_tree("three")), options=BackupOptions())

    async def commit_now() -> None:
        await other.commit(JOB, [result])

    world.store.before("put_if_absent", "log/", commit_now)
    await drop_commits(world.store, JOB, [1])
    assert [c.pointer.number for c in await repository.commits(JOB)] == [3, 2]
    assert await world.restored_text(await world.process()) == "three"


async def test_the_number_of_a_deleted_record_is_closed_and_all_others_stay(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three", "four")
    for number in (2, 3):
        await world.store.inner.delete([commit_key(JOB, number)])
    with pytest.raises(UnsafeStoreError) as refused:
        await (await world.process()).commits(JOB)
    assert f"`tidemark discard {commit_key(JOB, 2)}`" in refused.value.hint
    # The hole below comes first.
    with pytest.raises(ShortListingError):
        await discard(world.store, commit_key(JOB, 3))
    for number in (2, 3):
        done = await discard(world.store, commit_key(JOB, number))
        assert done.boundary is not None
        assert done.boundary.number <= 4
    assert [c.pointer.number for c in await (await world.process()).commits(JOB)] == [4, 1]
    other = await world.process()
    await other.commit(JOB, [await world.backup(other, "five")])
    assert await world.restored_text(await world.process()) == "five"


@pytest.mark.parametrize("number", [5, 9])
async def test_a_number_that_nobody_needs_is_not_closed(world: World, number: int) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    before = await world.keys()
    with pytest.raises(NotFoundError):
        await discard(world.store, commit_key(JOB, number))
    assert await world.keys() == before
