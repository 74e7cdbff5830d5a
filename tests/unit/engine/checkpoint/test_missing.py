"""A backup of which something is missing: the next one heals it, a restore names one that is whole (0006, M1, M2)."""

from pathlib import Path

import pytest

from blobstore.base import list_blobs
from engine.checkpoint.backup import BackupChoice, CheckpointBackupResult, backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import CommitDamagedError, DamagedError, IncompleteError
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.snapshot.contents import blob_keys, files_of
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.live_query import LiveQuery, NewQuery, check_rows, restore_backup

in_both_places = pytest.mark.parametrize("remote", [False, True], ids=["directory", "store"])
# Each file in a blob of its own, and everything in packs.
FORMS = pytest.mark.parametrize("pack_file_bytes_max", [0, 1 << 20], ids=["alone", "packed"])


@pytest.fixture
async def store(repository: Repository) -> InterposedStore:
    assert isinstance(repository.store, InterposedStore)
    return repository.store


async def another_process(store: InterposedStore, pack_file_bytes_max: int = 0) -> Repository:
    settings = TransferSettings(
        inline_file_bytes_max=0, pack_file_bytes_max=pack_file_bytes_max, pack_bytes_max=1 << 20, chunk_bytes=4096
    )
    return await Repository.open(store, settings=settings)


async def backed_up(
    store: InterposedStore, query: LiveQuery, batches: int, pack_file_bytes_max: int = 0
) -> tuple[Repository, CheckpointBackupResult]:
    """The query after these batches, backed up by another process."""
    await query.run(batches)
    repository = await another_process(store, pack_file_bytes_max)
    return repository, await backup_checkpoint(repository, query.location)


async def blobs_of(
    repository: Repository, done: CheckpointBackupResult, task: str = "0-0", name: str = "default"
) -> set[str]:
    reference = done.commit.store(task, name)
    assert reference is not None
    return set(blob_keys(await repository.read_index(reference.index)))


async def check_whole(repository: Repository, done: CheckpointBackupResult, query: LiveQuery, directory: Path) -> None:
    assert not (await repository.verify([done.commit])).problems
    target = await restore_backup(repository, done.commit, directory / "restored")
    await check_rows(target, directory, batch=done.backup.batch)


@in_both_places
@FORMS
async def test_a_backup_of_the_same_batch_is_taken_again_where_something_is_missing(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore, remote: bool, pack_file_bytes_max: int
) -> None:
    query = new_query(remote=remote)
    repository, first = await backed_up(store, query, 7, pack_file_bytes_max)
    gone = await blobs_of(repository, first) | await blobs_of(repository, first, QUERY_TASK, QUERY_STORE)
    await store.inner.delete(sorted(gone))
    repository = await another_process(store, pack_file_bytes_max)
    assert not (await backup_checkpoint(repository, query.location)).is_new
    healed = await backup_checkpoint(repository, query.location, BackupChoice(check_retained=True))
    assert (healed.is_new, healed.backup.batch) == (True, 6)
    assert not (await backup_checkpoint(repository, query.location, BackupChoice(check_retained=True))).is_new
    await check_whole(repository, healed, query, tmp_path)


@in_both_places
@FORMS
async def test_what_the_next_batch_retains_is_sent_again(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore, remote: bool, pack_file_bytes_max: int
) -> None:
    query = new_query(remote=remote)
    repository, first = await backed_up(store, query, 7, pack_file_bytes_max)
    await store.inner.delete(sorted(await blobs_of(repository, first)))
    await query.run(1)
    repository = await another_process(store, pack_file_bytes_max)
    healed = await backup_checkpoint(repository, query.location, BackupChoice(check_retained=True))
    assert healed.backup.batch == 7
    await check_whole(repository, healed, query, tmp_path)


@pytest.mark.parametrize("of_query", [False, True], ids=["a store's", "the query's"])
async def test_an_index_that_is_missing_stops_no_backup(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore, of_query: bool
) -> None:
    query = new_query()
    _, first = await backed_up(store, query, 7)
    reference = first.commit.store(*((QUERY_TASK, QUERY_STORE) if of_query else ("0-0", "default")))
    assert reference is not None
    await store.inner.delete([reference.index.key])
    repository, healed = await backed_up(store, query, 0 if of_query else 1)
    assert healed.is_new
    await check_whole(repository, healed, query, tmp_path)


async def test_a_restore_names_the_backup_that_is_whole_and_takes_it_when_asked_to(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore
) -> None:
    query = new_query()
    repository, first = await backed_up(store, query, 4)
    await query.run(4)
    second = await backup_checkpoint(repository, query.location)
    await store.inner.delete(sorted(await blobs_of(repository, second) - await blobs_of(repository, first)))
    target = tmp_path / "target"
    with pytest.raises(IncompleteError) as refused:
        await restore_checkpoint(repository, target)
    assert "the backup of batch 3 is the newest of which everything is there" in refused.value.hint
    assert not target.exists()
    restored = await restore_checkpoint(repository, target, RestoreChoice(or_newest_complete=True))
    assert (restored.batch, restored.commit.pointer) == (3, first.commit.pointer)
    await check_rows(target, tmp_path, batch=3)


async def test_asked_for_a_whole_one_it_takes_the_one_that_was_named_if_it_is_whole(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore
) -> None:
    query = new_query()
    repository, _ = await backed_up(store, query, 4)
    await query.run(4)
    await backup_checkpoint(repository, query.location)
    restored = await restore_checkpoint(
        repository, tmp_path / "target", RestoreChoice(batch=3, or_newest_complete=True)
    )
    assert restored.batch == 3


async def test_where_no_backup_is_whole_it_says_so(new_query: NewQuery, tmp_path: Path, store: InterposedStore) -> None:
    query = new_query()
    repository, done = await backed_up(store, query, 4)
    reference = done.commit.record.stores[0]
    files = dict(files_of((await repository.read_index(reference.index)).dir))
    await store.inner.delete([blob.key for file in files.values() for blob in file.blobs])
    with pytest.raises(IncompleteError, match="every other one"):
        await restore_checkpoint(repository, tmp_path / "target", RestoreChoice(or_newest_complete=True))
    with pytest.raises(DamagedError) as refused:
        await restore_checkpoint(repository, tmp_path / "target")
    assert "no commit of the job is whole" in refused.value.hint


async def test_a_backup_whose_commit_was_damaged_as_it_was_made_is_taken_again(
    new_query: NewQuery, tmp_path: Path, store: InterposedStore
) -> None:
    query = new_query(remote=False)
    await query.run(3)

    async def lose_one() -> None:
        keys = [blob.key async for blob in list_blobs(store.inner, "blobs/")]
        await store.inner.delete(keys[:1])

    store.before("put_if_absent", "log/", lose_one)
    with pytest.raises(CommitDamagedError):
        await backup_checkpoint(await another_process(store), query.location)
    repository = await another_process(store)
    done = await backup_checkpoint(repository, query.location)
    assert (done.is_new, done.backup.batch) == (True, 2)
    assert not (await backup_checkpoint(await another_process(store), query.location)).is_new
    await check_whole(repository, done, query, tmp_path)
