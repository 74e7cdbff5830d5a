"""The query goes on while a backup is made: what it takes away or overwrites is never half of one (0005, P6)."""

import io
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from blobstore.errors import StoreUnavailableError
from engine.backup.upload import Uploader
from engine.checkpoint.backup import ATTEMPTS_MAX, BackupChoice, backup_checkpoint
from engine.checkpoint.errors import QueryMovedOnError
from engine.checkpoint.live import LiveStore
from engine.errors import ConflictError, DamagedError, UnsafeSourceError
from engine.local.checksums import crc32c
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.errors import VersionMissingError
from index.plan.backup import BackupPlan
from index.spark.checkpoint import QUERY_TASK
from index.spark.checksums import FileChecksum, encode_file_checksum
from index.spark.names import parse_state_name
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.live_query import DELTAS, LiveQuery, NewQuery, check_rows, restore_backup
from tests.unit.engine.checkpoint.test_backup import both_formats, in_both_places

Move = Callable[[], Awaitable[None]]


def at_upload(repository: Repository, move: Move, *, times: int = 1) -> None:
    """Let the query do something when the first blob of an attempt, or of the next ones, is about to be sent."""
    store = repository.store
    assert isinstance(store, InterposedStore)

    async def hook() -> None:
        await move()
        if times > 1:
            at_upload(repository, move, times=times - 1)

    store.before("put_if_absent", "blobs/", hook)


async def take_away(query: LiveQuery, version: int) -> None:
    """What Spark's maintenance does to what is older than a version."""
    root = await query.directory()
    for partition in ("state/0/0", "state/0/1"):
        directory = root.child(partition)
        parsed = [(status.path, parse_state_name(status.path)) for status in await directory.list()]
        await directory.delete([path for path, name in parsed if name is not None and name.of.version < version])


@in_both_places
@both_formats
async def test_files_that_vanish_make_it_begin_again_at_the_newest_batch(
    new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int, remote: bool
) -> None:
    query = new_query(remote=remote, format_version=format_version)
    await query.run(5)

    async def go_on() -> None:
        await query.run(5)
        await take_away(query, 9)

    if remote:
        assert isinstance(query.files, InterposedStore)
        # Listed, and gone before it is fetched.
        query.files.before("get", "state/0/0/", go_on)
    else:
        at_upload(repository, go_on)
    done = await backup_checkpoint(repository, query.location, BackupChoice(stores_at_once=1))
    assert (done.backup.batch, done.attempts) == (9, 2)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    await check_rows(target, tmp_path, batch=9)


@in_both_places
@pytest.mark.parametrize("suffix", ["zip", "changelog"])
async def test_a_file_without_an_id_that_is_overwritten_meanwhile_is_refused(
    new_query: NewQuery,
    tmp_path: Path,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    remote: bool,
    suffix: str,
) -> None:
    query = new_query(remote=remote, format_version=1, partitions=1)
    await query.run(5)
    directory = (await query.directory()).child("state/0/0")
    (name,) = [s.path for s in await directory.list() if s.path.endswith(suffix) and s.path[0] in "35"][-1:]
    data = await directory.read(name)

    upload = Uploader.upload

    async def overwrite_and_upload(uploader: Uploader, plan: BackupPlan) -> None:
        # Once, before the last file is read: another file, of the same size and the same content but for the time.
        monkeypatch.setattr(Uploader, "upload", upload)
        await directory.publish(name, data, overwrite=True)
        await upload(uploader, plan)

    monkeypatch.setattr(Uploader, "upload", overwrite_and_upload)
    done = await backup_checkpoint(repository, query.location)
    assert (done.backup.batch, done.attempts) == (4, 2)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    await check_rows(target, tmp_path, batch=4, partitions=1)


async def test_a_file_that_was_overwritten_between_two_backups_is_reported_by_its_content(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(format_version=1, partitions=1, deltas_per_snapshot=100)
    await query.run(4)
    await backup_checkpoint(repository, query.root)
    changelog = query.root / "state/0/0/4.changelog"
    before = changelog.stat()
    # The attempt that lost writes its own version 4 over the committed one, which Spark reads from now on.
    await query.write(0, 3, value=b"of nobody!" * 20)
    await query.run()
    data = changelog.read_bytes()
    await backup_checkpoint(repository, query.root)
    newest = await repository.latest((await repository.scopes())[0])
    assert newest is not None
    target = await restore_backup(repository, newest, tmp_path / "restored")
    assert (target / "state/0/0/4.changelog").read_bytes() == data
    assert before.st_ino != changelog.stat().st_ino


async def test_a_query_that_is_always_faster_is_reported_after_three_times(
    new_query: NewQuery, repository: Repository
) -> None:
    query = new_query()
    await query.run(3)

    async def go_on() -> None:
        await query.run(4)
        await take_away(query, query.batches // DELTAS * DELTAS)

    at_upload(repository, go_on, times=ATTEMPTS_MAX)
    with pytest.raises(QueryMovedOnError, match="read 3 times") as caught:
        await backup_checkpoint(repository, query.root, BackupChoice(stores_at_once=1))
    assert isinstance(caught.value.__cause__, UnsafeSourceError | VersionMissingError)
    assert not await repository.scopes()


async def test_a_zip_that_is_uploaded_twice_meanwhile_is_looked_at_once_more(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(remote=True, partitions=1)
    await query.run(4)
    directory = (await query.directory()).child("state/0/0")
    (name,) = [status.path for status in await directory.list() if status.path.endswith(".zip")]
    # The same entries in another order: another file, and as good.
    again = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(await directory.read(name))) as old, zipfile.ZipFile(again, "w") as new:
        for entry in reversed(old.namelist()):
            new.writestr(entry, old.read(entry))
    sums = FileChecksum.of_file(crc32c=crc32c(again.getvalue()), size_bytes=len(again.getvalue()), timestamp_ms=0)

    async def upload_the_rest() -> None:
        await directory.publish(f"{name}.crc", encode_file_checksum(sums), overwrite=True)

    await directory.publish(name, again.getvalue(), overwrite=True)
    assert isinstance(query.files, InterposedStore)
    # The checksum is fetched before the zip: the old one, which does not fit it.
    query.files.after("get", f"{name}.crc", upload_the_rest)
    done = await backup_checkpoint(repository, query.location)
    assert (done.backup.batch, done.attempts) == (3, 1)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    assert (target / "state/0/0" / name).read_bytes() == again.getvalue()
    await check_rows(target, tmp_path, batch=3, partitions=1)


@pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
async def test_only_with_an_id_a_zip_may_go_once_it_was_read(
    new_query: NewQuery, repository: Repository, monkeypatch: pytest.MonkeyPatch, format_version: int
) -> None:
    # A first backup may take longer than Spark keeps a zip, while its SSTs stay, as newer ones share them.
    query = new_query(partitions=1, format_version=format_version)
    await query.run(4)
    held_still = LiveStore.check_held_still

    async def after_all_was_read(self: LiveStore) -> None:
        await query.run(DELTAS)
        await take_away(query, query.batches // DELTAS * DELTAS)
        await held_still(self)

    monkeypatch.setattr(LiveStore, "check_held_still", after_all_was_read)
    if format_version == 1:
        with pytest.raises(QueryMovedOnError):
            await backup_checkpoint(repository, query.root)
    else:
        done = await backup_checkpoint(repository, query.root)
        assert (done.backup.batch, done.attempts) == (3, 1)


async def test_what_is_missing_for_good_is_no_query_that_moves(new_query: NewQuery, repository: Repository) -> None:
    query = new_query(partitions=1)
    await query.run(3)
    for path in query.root.glob("state/0/0/SSTs/*"):
        path.unlink()
    with pytest.raises(DamagedError, match="SSTs/"):
        await backup_checkpoint(repository, query.root)


async def test_no_scratch_file_is_left(new_query: NewQuery, tmp_path: Path, repository: Repository) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    query = new_query(remote=True)
    await query.run(4)
    await backup_checkpoint(repository, query.location, BackupChoice(scratch=scratch))
    await query.run()
    assert isinstance(query.files, InterposedStore)
    query.files.fail("get", ".changelog", StoreUnavailableError("injected", operation="get", key="x"))
    with pytest.raises(StoreUnavailableError):
        await backup_checkpoint(repository, query.location, BackupChoice(scratch=scratch))
    assert not list(scratch.iterdir())


async def test_the_files_of_the_query_are_read_after_the_stores(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(partitions=1)
    await query.run(3)

    async def begin_next() -> None:
        await (await query.directory()).publish("offsets/3", b"v1\n{}", overwrite=False)
        await (await query.directory()).publish("sources/0/1", b"v1\n{}", overwrite=False)

    at_upload(repository, begin_next)
    done = await backup_checkpoint(repository, query.root)
    target = tmp_path / "restored"
    await repository.restore(done.commit, target, task=QUERY_TASK, store="checkpoint")
    assert (done.backup.batch, done.attempts) == (2, 1)
    assert (target / "sources/0/1").exists()
    assert (target / "offsets/3").exists()


async def test_a_batch_that_is_run_again_meanwhile_is_not_mixed_with_its_first_run(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(partitions=1)
    await query.run(4)

    async def take_back() -> None:
        for log in ("offsets", "commits"):
            (query.root / log / "3").unlink()
        query.batches = 3
        await query.run()

    at_upload(repository, take_back)
    done = await backup_checkpoint(repository, query.root)
    assert (done.backup.batch, done.attempts) == (3, 2)
    assert done.commit.record.stores[0].unique_id == query.ids(4)[0]
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    await check_rows(target, tmp_path, batch=3, partitions=1)


async def test_known_files_of_a_pack_that_is_filled_again_are_fetched(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    # Files that a backup takes over are in a pack whose other files are gone from it before long.
    settings = TransferSettings(inline_file_bytes_max=0)
    repository = await Repository.open(repository.store, settings=settings)
    query = new_query(remote=True, partitions=1, deltas_per_snapshot=8)
    backups = []
    for _ in range(12):
        await query.run(3)
        backups.append(await backup_checkpoint(repository, query.location))
    assert any(backup.state.bytes_uploaded > backup.state.bytes_added for backup in backups)
    target = await restore_backup(repository, backups[-1].commit, tmp_path / "restored")
    await check_rows(target, tmp_path, batch=query.batches - 1, partitions=1)


async def test_a_commit_whose_answer_is_lost_is_found(new_query: NewQuery, repository: Repository) -> None:
    query = new_query(partitions=1)
    await query.run(2)
    store = repository.store
    assert isinstance(store, InterposedStore)
    store.lose_answer("put_if_absent", "log/")
    done = await backup_checkpoint(repository, query.root)
    assert [commit.pointer for commit in await repository.commits(done.commit.scope)] == [done.commit.pointer]


async def test_of_two_backups_at_once_one_is_refused(new_query: NewQuery, repository: Repository) -> None:
    query = new_query(partitions=1)
    await query.run(4)
    other = await Repository.open(repository.store)

    async def be_faster() -> None:
        await backup_checkpoint(other, query.root)

    at_upload(repository, be_faster)
    with pytest.raises(ConflictError):
        await backup_checkpoint(repository, query.root)
    # The writer has learnt of it.
    assert not (await backup_checkpoint(repository, query.root)).is_new
    await query.run()
    assert (await backup_checkpoint(repository, query.root)).is_new
