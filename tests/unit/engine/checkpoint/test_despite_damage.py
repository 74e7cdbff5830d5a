"""A backup believes nothing less than `check`, except on request (0005, P5, P5a); and older batches (P3)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blobstore.memory import MemoryStore
from engine.checkpoint import backup as backup_module
from engine.checkpoint.backup import BackupChoice, CheckpointBackupResult, StoreBackup, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import DamagedError, ShrunkError
from engine.inspect.history import format_offsets
from engine.local.digests import hash_content
from engine.repository.repository import Repository
from index.spark.checkpoint import decode_checkpoint_backup
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.checked import flip, found
from tests.unit.engine.checkpoint.live_query import NewQuery, check_rows
from tests.unit.engine.checkpoint.test_backup import PLAIN, files_in
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of

DESPITE = BackupChoice(despite_damage=True)


@pytest.fixture
async def query(tmp_path: Path) -> WrittenQuery:
    """One that reads files, 5 batches of it: a snapshot of version 3, and changelogs above it."""
    written = await WrittenQuery(tmp_path / "query", tmp_path / "work", file_offsets=True).begin()
    await written.run(5)
    return written


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


Damage = Callable[[Path], None]


@pytest.mark.parametrize(
    "pattern, damage",
    [
        ("sources/0/1", Path.unlink),
        ("sources/0/1", cut),
        ("state/0/0/_metadata/schema", Path.unlink),
        ("state/0/0/_metadata/schema", cut),
        ("offsets/1", Path.unlink),
        ("commits/1", cut),
        ("state/0/0/5_*.changelog", cut),
        ("state/0/1/SSTs/*.sst", lambda path: flip(path, 100)),
    ],
)
async def test_what_check_calls_damage_is_taken_over_only_with_leave(
    query: WrittenQuery, repository: Repository, tmp_path: Path, pattern: str, damage: Damage
) -> None:
    path = max(query.root.glob(pattern))
    name = path.relative_to(query.root).as_posix()
    sound = path.read_bytes()
    damage(path)
    assert ("damage", name) in await found(query.root)
    with pytest.raises(DamagedError, match=name):
        await backup_checkpoint(repository, query.root)
    taken = await backup_checkpoint(repository, query.root, DESPITE)
    assert taken.backup.damage == (name,)
    assert decode_checkpoint_backup(taken.commit.record.offsets) == taken.backup
    assert format_offsets(taken.commit.record.offsets, 40) == "Spark batch 4, DAMAGED"
    restored = await restore_checkpoint(repository, tmp_path / "restored")
    assert restored.backup.describe_damage() == name
    assert not (await backup_checkpoint(repository, query.root, DESPITE)).is_new
    # Nothing of it is believed afterwards.
    with pytest.raises(DamagedError, match=name):
        await backup_checkpoint(repository, query.root)
    path.write_bytes(sound)
    again = await backup_checkpoint(repository, query.root)
    assert (again.is_new, again.backup.damage, again.findings) == (True, (), ())
    await restore_checkpoint(repository, tmp_path / "sound")
    assert (await check_checkpoint(tmp_path / "sound")).findings == ()
    assert await rows_of(tmp_path / "sound", tmp_path) == await rows_of(query.root, tmp_path / "of")


@pytest.mark.parametrize("is_remote", [False, True], ids=["directory", "store"])
async def test_what_is_sound_is_read_and_not_sent_again_while_the_damage_lasts(
    new_query: NewQuery, tmp_path: Path, is_remote: bool
) -> None:
    """P5a."""
    repository = await Repository.init(InterposedStore(MemoryStore()), settings=PLAIN)
    query = new_query(remote=is_remote, partitions=1)
    await query.run(7)
    directory = await query.directory()
    names = [status.path for status in await directory.walk("state/0/0/SSTs")]
    assert len(names) > 1

    async def alter(name: str) -> None:
        data = bytearray(await directory.read(name))
        # In the first block of data, and not in the properties, which have the identity.
        data[5] ^= 1
        await directory.publish(name, bytes(data), overwrite=True)

    async def holds(done: CheckpointBackupResult) -> bool:
        files = await files_in(repository, done, "0-0")
        kept = [files[name.removeprefix("state/0/0/")].blake3 for name in names[:2]]
        return kept == [hash_content(await directory.read(name)) for name in names[:2]]

    await alter(names[0])
    first = await backup_checkpoint(repository, query.location, DESPITE)
    assert first.backup.damage == (names[0],)
    await query.run(1)
    second = await backup_checkpoint(repository, query.location, DESPITE)
    assert second.backup.damage == (names[0],)
    # The new changelog and its checksum; what is damaged is as it was.
    assert second.state.files_added == 2
    assert second.state.bytes_uploaded < first.state.bytes_uploaded / 2
    assert second.query.files_added <= 4
    # An SST that was sound, altered in place: its identity is the same, and its bytes are not.
    await alter(names[1])
    await query.run(1)
    third = await backup_checkpoint(repository, query.location, DESPITE)
    assert third.backup.damage == (names[0], names[1])
    assert await holds(third)
    # Mended, it is sent as it is now.
    for name in names[:2]:
        await alter(name)
    mended = await backup_checkpoint(repository, query.location)
    assert (mended.is_new, mended.backup.damage) == (True, ())
    assert await holds(mended)
    await restore_checkpoint(repository, tmp_path / "restored")
    assert (await check_checkpoint(tmp_path / "restored")).findings == ()


async def test_state_that_has_shrunk_is_refused_also_after_a_damaged_backup(
    query: WrittenQuery, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that backup has is not believed, but how large it was."""
    monkeypatch.setattr("engine.checkpoint.backup.SHRINK_FLOOR_BYTES", 0)
    shutil.rmtree(query.root / "sources")
    assert (await backup_checkpoint(repository, query.root, DESPITE)).is_new
    kept = backup_module.backup_store

    async def shrunk(*arguments: Any, **how: Any) -> StoreBackup:
        return msgspec.structs.replace(await kept(*arguments, **how), sst_bytes=1)

    monkeypatch.setattr(backup_module, "backup_store", shrunk)
    await query.run(1)
    with pytest.raises(ShrunkError):
        await backup_checkpoint(repository, query.root, BackupChoice(despite_damage=True, shrink_max=0.5))


async def test_a_missing_file_of_state_cannot_be_taken_over(query: WrittenQuery, repository: Repository) -> None:
    max(query.root.glob("state/0/0/5_*.changelog")).unlink()
    with pytest.raises(DamagedError, match="5_"):
        await backup_checkpoint(repository, query.root, DESPITE)


@pytest.mark.parametrize("format_version", [1, 2])
async def test_older_batches_can_be_restored(
    new_query: NewQuery, repository: Repository, tmp_path: Path, format_version: int
) -> None:
    query = new_query(format_version=format_version)
    await query.run(8)
    newest = await backup_checkpoint(repository, query.root, BackupChoice(job="newest"))
    assert newest.backup.oldest_batch == 5
    done = await backup_checkpoint(repository, query.root, BackupChoice(job="older", keep_batches=4))
    oldest = done.backup.oldest_batch
    # Its base is a snapshot, so there may be a batch or two more.
    assert oldest <= 3
    for batch in range(oldest, 8):
        target = tmp_path / f"at {batch}"
        await restore_checkpoint(repository, target, RestoreChoice(job="older", batch=batch))
        await check_rows(target, tmp_path / f"rows {batch}", batch=batch)
        assert (await check_checkpoint(target)).findings == ()
    await query.run(1)
    more = await backup_checkpoint(repository, query.root, BackupChoice(job="older", keep_batches=4))
    assert 0 < more.state.files_added < more.state.files


async def test_batches_whose_state_retention_has_taken_are_left_out(
    query: WrittenQuery, repository: Repository
) -> None:
    for partition in (0, 1):
        for version in (1, 2):
            for path in query.root.glob(f"state/0/{partition}/{version}_*"):
                path.unlink()
    assert await found(query.root) == []
    done = await backup_checkpoint(repository, query.root, BackupChoice(keep_batches=99))
    assert done.backup.oldest_batch == 2


async def test_damage_to_an_older_batch_that_is_taken_is_refused(query: WrittenQuery, repository: Repository) -> None:
    changelog = max(query.root.glob("state/0/0/2_*.changelog"))
    cut(changelog)
    assert (await backup_checkpoint(repository, query.root, BackupChoice(job="newest"))).is_new
    with pytest.raises(DamagedError, match=changelog.name):
        await backup_checkpoint(repository, query.root, BackupChoice(job="older", keep_batches=4))
    shutil.rmtree(query.root / "sources")
    with pytest.raises(DamagedError, match="sources/0/0"):
        await backup_checkpoint(repository, query.root, BackupChoice(job="third"))
