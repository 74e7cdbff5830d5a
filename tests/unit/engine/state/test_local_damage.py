"""Files of the working directory that somebody has altered are not kept, nor named again, nor uploaded (S5)."""

import os
from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.errors import DamagedError, UnsafeSourceError
from engine.rocksdb.store import StoreReader, StoreWriter
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import CapturedSnapshot
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion
from tests.unit.engine.state.state_bench import StateBench, at

METADATA = StateMetadata(num_keys=-1, column_family_ids=(), column_family_internal=(), column_family_id_max=0)
ROWS = {b"key%04d" % number: b"value" * 10 for number in range(500)}


@pytest.fixture
async def bench(tmp_path: Path) -> StateBench:
    """Version 1 is in the store and was loaded; version 2 as well, with one small SST more."""
    made = StateBench(tmp_path, (await CheckpointDir.open(MemoryStore())).child("state/0/0"))
    await made.load(None)
    await made.manager.upload_snapshot(capture(made, at(1, "a"), ROWS))
    await made.load(at(1, "a"))
    await made.manager.upload_snapshot(capture(made, at(2, "b"), {b"z": b"2"}))
    return made


def capture(bench: StateBench, of: StateVersion, puts: dict[bytes, bytes]) -> CapturedSnapshot:
    """Write to the loaded store, and capture a rocksdb_checkpoint of it."""
    directory = bench.root / f"{of}-{len(list(bench.root.iterdir()))}"
    with StoreWriter.open(bench.working) as store:
        store.write_batch(puts)
        store.checkpoint(directory)
    return bench.manager.capture(directory, of, METADATA)


def damage(bench: StateBench, *, seen: bool = True) -> None:
    """Alter a byte of the large SST; `seen`: as a program would, not as a disk does."""
    sst = max(bench.working.glob("*.sst"), key=lambda path: path.stat().st_size)
    before = sst.stat()
    with sst.open("r+b") as file:
        file.seek(before.st_size // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    # Whatever the clock of the file system.
    os.utime(sst, ns=(before.st_atime_ns, before.st_mtime_ns + seen))


def rows(bench: StateBench) -> dict[bytes, bytes]:
    with StoreReader.open(bench.working) as store:
        return dict(store.items())


async def test_an_sst_that_nobody_has_touched_is_kept_and_named_again(bench: StateBench) -> None:
    saved = await bench.manager.upload_snapshot(capture(bench, at(3, "c"), {b"z": b"3"}))
    assert (saved.files_copied, saved.files_reused) == (1, 2)
    await bench.load(at(2, "b"))
    await bench.load(at(3, "c"))
    assert bench.manager.last_load.files_reused > 0


async def test_an_sst_that_was_written_to_is_fetched_again(bench: StateBench) -> None:
    await bench.load(at(1, "a"))
    await bench.load(at(2, "b"))
    assert bench.manager.last_load.files_reused == 1
    await bench.load(at(1, "a"))
    damage(bench)
    await bench.load(at(2, "b"))
    assert bench.manager.last_load.files_reused == 0
    assert rows(bench) == ROWS | {b"z": b"2"}


async def test_no_snapshot_is_made_of_an_sst_that_was_written_to(bench: StateBench) -> None:
    await bench.load(at(2, "b"))
    damage(bench)
    with pytest.raises(DamagedError, match="was written to"):
        capture(bench, at(3, "c"), {b"z": b"3"})
    # And the next load believes nothing that is here.
    await bench.load(at(2, "b"))
    assert bench.manager.last_load.files_reused == 0
    assert rows(bench) == ROWS | {b"z": b"2"}


async def test_an_sst_that_was_written_to_before_it_is_renewed_is_not_uploaded(tmp_path: Path) -> None:
    bench = StateBench(tmp_path, (await CheckpointDir.open(MemoryStore())).child("state/0/0"), versions_retained_min=1)
    await bench.load(None)
    await bench.manager.upload_snapshot(capture(bench, at(1, "a"), ROWS))
    captured = capture(bench, at(2, "b"), {b"z": b"2"})
    damage(bench)
    # Somebody else's newer snapshot: anyone who retains one version may have deleted what version 1 put there (S4).
    other = bench.beside(tmp_path / "other")
    await other.save({"CURRENT": b"x"}, at(9, "x"))
    with pytest.raises(UnsafeSourceError, match="written to"):
        await bench.manager.upload_snapshot(captured)
    assert await bench.versions(".zip") == [1, 9]


async def test_what_rocksdb_found_damaged_is_fetched_again(bench: StateBench) -> None:
    await bench.load(at(1, "a"))
    damage(bench, seen=False)
    await bench.load(at(2, "b"))
    assert bench.manager.last_load.files_reused == 1
    with pytest.raises(DamagedError):
        rows(bench)
    bench.manager.known.forget_all()
    await bench.load(at(2, "b"))
    assert bench.manager.last_load.files_reused == 0
    assert rows(bench) == ROWS | {b"z": b"2"}
