"""What else is in a directory of the HDFS-backed provider, and what is in its files (0004, N1a; 0005, K7)."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from blobstore.base import BlobStore
from blobstore.memory import MemoryStore
from engine.checkpoint import backup as backup_module
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import ConvertChoice, convert_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.checkpoint.targets import ObjectTarget
from engine.errors import DamagedError, ShrunkError
from engine.local.checksums import crc32c
from engine.repository.repository import Repository
from engine.runtime import Runtime
from engine.state.changelogs import ChangelogWriter, open_changelog
from index.errors import FormatError
from index.spark.changelog import DELETE, PUT, ChangelogVersion, Record
from index.spark.checksums import FileChecksum, encode_file_checksum
from index.spark.retention import StateListing
from tests.contract.store_calls import get_bytes
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.checked import GOLDEN, found
from tests.unit.engine.checkpoint.live_query import names_below
from tests.unit.engine.checkpoint.test_backup import in_memory
from tests.unit.engine.checkpoint.written_query import rows_of
from tests.unit.index.builders import latest_version


@pytest.fixture
async def checkpoint(tmp_path: Path) -> Path:
    """Three batches, and the snapshot of version 2 beside the deltas."""
    root = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "hdfs-provider", root)
    (root / "sources/0").mkdir(parents=True)
    for entry in range(3):
        line = f'{{"path":"file:///in/{entry}","timestamp":1,"batchId":{entry}}}'
        (root / f"sources/0/{entry}").write_text(f"v1\n{line}")
    await convert_checkpoint(root, tmp_path / "made", ConvertChoice(batch=1))
    shutil.copy(tmp_path / "made/state/0/0/2.snapshot", root / "state/0/0")
    return root


def rewrite(file: Path, change: Callable[[list[Record]], Sequence[Record]], version: ChangelogVersion = 1) -> None:
    with open_changelog(file, "lz4") as reader:
        records = [record for records in reader for record in records]
    with ChangelogWriter(file, "lz4", version) as writer:
        for record in change(records):
            writer.write(record)
        writer.finish()


async def test_a_name_of_rocksdbs_provider_is_passed_over_as_spark_does(checkpoint: Path, tmp_path: Path) -> None:
    """Spark 4.3 logs "Could not identify file", and goes on."""
    rows = await rows_of(checkpoint, tmp_path / "before")
    for name in ("9.zip", "3.changelog", "2.zip"):
        (checkpoint / "state/0/0" / name).write_bytes(b"x")
    report = await check_checkpoint(checkpoint)
    assert report.is_sound
    assert report.findings == ()
    # Which provider it is, the query says.
    assert await rows_of(checkpoint, tmp_path / "after") == rows
    repository = await Repository.init(MemoryStore())
    assert (await backup_checkpoint(repository, checkpoint)).backup.batch == 2


@pytest.mark.parametrize("is_remote", [False, True], ids=["directory", "store"])
async def test_a_checksum_of_spark_4_1_that_does_not_fit_is_a_warning(
    checkpoint: Path, tmp_path: Path, is_remote: bool
) -> None:
    """Spark 4.1 writes one beside each name, and 4.3 writes the name again without one."""
    names = ("1.delta", "2.delta", "2.snapshot", "3.delta")
    for name in names:
        data = (checkpoint / "state/0/0" / name).read_bytes()
        checksum = FileChecksum.of_file(crc32c=crc32c(data), size_bytes=len(data), timestamp_ms=1)
        (checkpoint / f"state/0/0/{name}.crc").write_bytes(encode_file_checksum(checksum))

    async def source() -> Path | BlobStore:
        return await in_memory(checkpoint) if is_remote else checkpoint

    repository = await Repository.init(MemoryStore())
    assert (await check_checkpoint(await source())).findings == ()
    sound = await backup_checkpoint(repository, await source(), BackupChoice(job="sound"))
    assert sound.findings == ()
    for name in names[1:]:
        shutil.copy(checkpoint / "state/0/0/1.delta.crc", checkpoint / f"state/0/0/{name}.crc")
    report = await check_checkpoint(await source())
    assert [(f.kind, f.path) for f in report.findings] == [("warning", f"state/0/0/{name}.crc") for name in names[1:]]
    done = await backup_checkpoint(repository, await source(), BackupChoice(job="stale"))
    # What the batches of the backup take.
    assert {f.path for f in done.findings} == {"state/0/0/2.snapshot.crc", "state/0/0/3.delta.crc"}
    assert done.backup.damaged == 0
    await restore_checkpoint(repository, tmp_path / "restored", RestoreChoice(job="sound"))
    assert {"2.snapshot.crc", "3.delta.crc"} <= {path.name for path in (tmp_path / "restored/state/0/0").iterdir()}


async def test_a_checksum_that_is_larger_than_any_is_a_warning_to_a_backup_too(checkpoint: Path) -> None:
    (checkpoint / "state/0/0/3.delta.crc").write_bytes(b"x" * 70_000)
    assert await found(checkpoint) == [("warning", "state/0/0/3.delta.crc")]
    done = await backup_checkpoint(await Repository.init(MemoryStore()), checkpoint)
    assert [(finding.kind, finding.path) for finding in done.findings] == [("warning", "state/0/0/3.delta.crc")]


@pytest.mark.parametrize("name", ["notes.txt", "x.delta", "v1.snapshot"])
async def test_a_name_that_sparks_maintenance_fails_on_is_a_warning(checkpoint: Path, name: str) -> None:
    """Spark 4.3: `NumberFormatException: For input string: "notes"`, from "Error cleaning up files"."""
    (checkpoint / "state/0/0" / name).write_bytes(b"x")
    assert await found(checkpoint) == [("warning", f"state/0/0/{name}")]


@pytest.mark.parametrize("name", ["notes", "7.txt", "a.b.c", ".x.delta"])
async def test_other_names_are_no_finding(checkpoint: Path, name: str) -> None:
    (checkpoint / "state/0/0" / name).write_bytes(b"x")
    assert await found(checkpoint) == []


@pytest.mark.parametrize(
    "change, version",
    [(lambda records: [*records, (DELETE, records[0][1], b"")], 1), (lambda records: records, 2)],
    ids=["deletes", "typed"],
)
async def test_a_snapshot_that_no_provider_writes_is_damage(
    checkpoint: Path, change: Callable[[list[Record]], Sequence[Record]], version: ChangelogVersion
) -> None:
    rewrite(checkpoint / "state/0/0/2.snapshot", change, version)
    assert await found(checkpoint) == [("damage", "state/0/0/2.snapshot")]
    repository = await Repository.init(MemoryStore())
    with pytest.raises((DamagedError, FormatError), match=r"2\.snapshot"):
        await backup_checkpoint(repository, checkpoint)


async def test_a_snapshot_with_a_key_twice_is_damage(checkpoint: Path) -> None:
    rewrite(checkpoint / "state/0/0/2.snapshot", lambda records: [*records, records[0]])
    assert await found(checkpoint) == [("damage", "state/0/0/2.snapshot")]


async def test_keys_of_the_snapshot_are_counted(checkpoint: Path) -> None:
    report = await check_checkpoint(checkpoint)
    with open_changelog(checkpoint / "state/0/0/2.snapshot", "lz4") as reader:
        assert report.keys == sum(map(len, reader)) > 0


def test_a_deletion_does_not_see_files_of_the_other_provider() -> None:
    listing = StateListing.of_names(["1.delta", "9.snapshot", "9.snapshot.crc", "2.zip", "3.changelog"])
    assert (latest_version(listing), listing.latest_snapshot_version, listing.checksums) == (3, 2, ())


async def test_on_another_store_it_is_checked_backed_up_and_restored(checkpoint: Path, tmp_path: Path) -> None:
    """Each file comes with one GET; on the way back a snapshot and deltas come before the logs."""
    source = await in_memory(checkpoint)
    assert (await check_checkpoint(source)).is_sound
    repository = await Repository.init(MemoryStore())
    await backup_checkpoint(repository, source)
    await restore_checkpoint(repository, tmp_path / "restored")
    bucket = InterposedStore(MemoryStore())
    target = ObjectTarget(bucket, "place", location="s3a://bucket/place", runtime=Runtime(), move_aside=False)
    await restore_checkpoint(repository, target)
    puts = [key.removeprefix("place/") for operation, key in bucket.requests if operation.startswith("put")]
    restored = list(names_below(tmp_path / "restored"))
    assert sorted(puts) == sorted(restored)
    assert {f"state/0/0/{name}" for name in ("2.snapshot", "3.delta")} <= set(puts)
    assert puts.index("state/0/0/2.snapshot") < puts.index("state/0/0/3.delta") < puts.index("offsets/2")
    for name in puts:
        assert await get_bytes(bucket.inner, f"place/{name}") == (tmp_path / "restored" / name).read_bytes()


async def test_stores_that_shrink_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_module, "SHRINK_FLOOR_BYTES", 0)
    repository = await Repository.init(MemoryStore())
    rewrite(
        checkpoint / "state/0/0/2.snapshot",
        lambda records: [*records, *((PUT, bytes([n]) * 99, b"12345678") for n in range(99))],
    )
    await backup_checkpoint(repository, checkpoint)
    rewrite(checkpoint / "state/0/0/2.snapshot", lambda records: records[:1])
    commit = checkpoint / "commits/2"
    commit.write_bytes(commit.read_bytes() + b" ")
    with pytest.raises(ShrunkError):
        await backup_checkpoint(repository, checkpoint, BackupChoice(shrink_max=0.5))
