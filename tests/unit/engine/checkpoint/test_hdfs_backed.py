"""State of the HDFS-backed provider, on what Spark wrote: damage is named, and nothing damaged is taken over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import ConvertChoice, convert_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import DamagedError, UsageError
from engine.repository.repository import Repository
from index.errors import FormatError
from tests.unit.engine.checkpoint.checked import GOLDEN, flip, found
from tests.unit.engine.checkpoint.written_query import rows_of


@pytest.fixture
async def checkpoint(tmp_path: Path) -> Path:
    """Three batches: a snapshot of version 2 in place of what led to it, and the delta of version 3."""
    root = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "hdfs-provider", root)
    (root / "sources/0").mkdir(parents=True)
    for entry in range(3):
        line = f'{{"path":"file:///in/{entry}","timestamp":1,"batchId":{entry}}}'
        (root / f"sources/0/{entry}").write_text(f"v1\n{line}")
    await convert_checkpoint(root, tmp_path / "made", ConvertChoice(batch=1))
    shutil.copy(tmp_path / "made/state/0/0/2.snapshot", root / "state/0/0")
    shutil.rmtree(tmp_path / "made")
    return root


async def test_it_is_checked_backed_up_restored_and_replayed(checkpoint: Path, tmp_path: Path) -> None:
    rows = await rows_of(checkpoint, tmp_path / "a")
    assert sum(map(len, rows.values())) > 5
    report = await check_checkpoint(checkpoint)
    assert report.is_sound
    assert not report.warnings
    assert report.versions == 3
    repository = await Repository.init(MemoryStore())
    done = await backup_checkpoint(repository, checkpoint)
    assert (done.backup.batch, done.backup.oldest_batch) == (2, 1)
    assert not (await backup_checkpoint(repository, checkpoint)).is_new
    await restore_checkpoint(repository, tmp_path / "plain")
    await restore_checkpoint(repository, tmp_path / "replayed", RestoreChoice(replayed=True))
    names = {path.name for path in (tmp_path / "plain/state/0/0").iterdir()}
    assert names == {"2.snapshot", "3.delta", "_metadata"}
    assert {path.name for path in (tmp_path / "replayed/state/0/0").iterdir()} == {"3.snapshot", "_metadata"}
    for name in ("plain", "replayed"):
        assert (await check_checkpoint(tmp_path / name)).is_sound
        assert await rows_of(tmp_path / name, tmp_path / f"rows-{name}") == rows


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def end_early(path: Path) -> None:
    """Whole blocks, and no end mark."""
    path.write_bytes(path.read_bytes()[:-21])


@pytest.mark.parametrize("name", ["1.delta", "2.delta", "3.delta", "2.snapshot"])
@pytest.mark.parametrize("damage", [cut, end_early, lambda path: flip(path, 30)], ids=["cut", "end early", "flip"])
async def test_a_damaged_file_is_named_and_refused(
    checkpoint: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(checkpoint / "state/0/0" / name)
    assert await found(checkpoint) == [("damage", f"state/0/0/{name}")]
    repository = await Repository.init(MemoryStore())
    if name in {"1.delta", "2.delta"}:  # no batch of the backup needs it
        assert (await backup_checkpoint(repository, checkpoint)).is_new
        return
    for use in (
        backup_checkpoint(repository, checkpoint),
        convert_checkpoint(checkpoint, tmp_path / "converted", ConvertChoice(provider="rocksdb")),
    ):
        with pytest.raises((DamagedError, FormatError), match=name):
            await use
    assert not (tmp_path / "converted").exists()


async def test_a_gap_is_named(checkpoint: Path) -> None:
    (checkpoint / "state/0/0/3.delta").unlink()
    assert await found(checkpoint) == [("damage", "state/0/0/3.delta")]
    repository = await Repository.init(MemoryStore())
    with pytest.raises(DamagedError, match=r"3\.delta"):
        await backup_checkpoint(repository, checkpoint)


async def test_versions_below_a_snapshot_may_be_gone(checkpoint: Path, tmp_path: Path) -> None:
    rows = await rows_of(checkpoint, tmp_path / "a")
    for name in ("1.delta", "2.delta"):
        (checkpoint / "state/0/0" / name).unlink()
    assert await found(checkpoint) == []
    assert await rows_of(checkpoint, tmp_path / "b") == rows


@pytest.mark.parametrize("format_version", [1, 2])
async def test_rows_are_the_same_in_rocksdb(checkpoint: Path, tmp_path: Path, format_version: int) -> None:
    choice = ConvertChoice(provider="rocksdb", format_version=2 if format_version == 2 else 1)
    done = await convert_checkpoint(checkpoint, tmp_path / "converted", choice)
    assert (done.provider_before, done.provider) == ("hdfs", "rocksdb")
    assert await rows_of(tmp_path / "converted", tmp_path / "a") == await rows_of(checkpoint, tmp_path / "b")
    assert (await check_checkpoint(tmp_path / "converted")).is_sound


async def test_the_hdfs_backed_provider_knows_no_ids(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ids") as caught:
        await convert_checkpoint(checkpoint, tmp_path / "converted", ConvertChoice(format_version=2))
    assert "--to rocksdb" in caught.value.hint
