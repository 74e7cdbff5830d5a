"""The file manager under real RocksDB stores: what is saved opens again, and equal names and sizes are not enough."""

from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.rocksdb.store import StoreReader, StoreWriter
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.local_files import list_shared, look_at
from index.snapshot.model import SstIdentity
from index.spark.metadata import StateMetadata
from tests.unit.engine.state.state_bench import StateBench, at

METADATA = StateMetadata(num_keys=-1, column_family_ids=(), column_family_internal=(), column_family_id_max=0)


@pytest.fixture
async def bench(tmp_path: Path) -> StateBench:
    return StateBench(tmp_path, (await CheckpointDir.open(MemoryStore())).child("state/0/0"))


def grow(bench: StateBench, name: str, puts: dict[bytes, bytes]) -> Path:
    """Write to the loaded store and make a rocksdb_checkpoint of it."""
    with StoreWriter.open(bench.working) as store:
        store.write_batch(puts)
        store.checkpoint(bench.root / name)
    return bench.root / name


def rows(bench: StateBench) -> dict[bytes, bytes]:
    with StoreReader.open(bench.working) as store:
        return dict(store.items())


async def test_what_is_saved_opens_again_and_shares_its_ssts(bench: StateBench) -> None:
    await bench.load(None)
    await bench.manager.upload_snapshot(bench.manager.capture(grow(bench, "1", {b"a": b"1"}), at(1), METADATA))
    saved = await bench.manager.upload_snapshot(bench.manager.capture(grow(bench, "2", {b"b": b"2"}), at(2), METADATA))
    assert (saved.files_copied, saved.files_reused) == (1, 1)
    for version, expected in [(1, {b"a": b"1"}), (2, {b"a": b"1", b"b": b"2"})]:
        await bench.load(at(version))
        assert not {"LOCK", "LOG", "IDENTITY", "rocksdict-config.json"} & {p.name for p in bench.working.iterdir()}
        assert rows(bench) == expected


async def test_an_sst_of_equal_name_and_size_of_another_session_is_uploaded_under_its_own_name(
    bench: StateBench, tmp_path: Path
) -> None:
    """Section 1.3 of design 0004: what Spark goes by is the same on both sides, and the files are not."""
    await bench.load(None)
    await bench.manager.upload_snapshot(bench.manager.capture(grow(bench, "1", {b"a": b"1"}), at(1), METADATA))
    await bench.load(at(1))
    one = bench.manager.capture(grow(bench, "one", {b"b": b"1"}), at(2), METADATA)
    await bench.manager.upload_snapshot(one)
    # The working directory is replaced behind the manager's back, as by a process that shares it.
    other = bench.beside(tmp_path / "other")
    await other.load(at(1))
    two = grow(other, "two", {b"b": b"2"})
    (new,) = {path.name for path in list_shared(two)} - {file.local.name for file in one.files if file.is_reused}
    theirs, ours = look_at(one.directory / new), look_at(two / new)
    assert (theirs.name, theirs.size_bytes) == (ours.name, ours.size_bytes)
    assert isinstance(ours.identity, SstIdentity)
    assert theirs.identity != ours.identity
    saved = await bench.manager.upload_snapshot(bench.manager.capture(two, at(3), METADATA))
    # Nor is the one that is the same believed to be: somebody else has put it there (S5).
    assert (saved.files_copied, saved.files_reused) == (2, 0)
    await bench.load(at(3))
    assert rows(bench) == {b"a": b"1", b"b": b"2"}
    await bench.load(at(2))
    assert rows(bench) == {b"a": b"1", b"b": b"1"}


async def test_every_sst_of_rocksdb_has_an_identity_of_its_own(bench: StateBench) -> None:
    await bench.load(None)
    grow(bench, "1", {b"a": b"1"})
    found = tuple(map(look_at, list_shared(grow(bench, "2", {b"b": b"1"}))))
    assert len(found) == len({file.identity for file in found}) == 2
    assert all(isinstance(file.identity, SstIdentity) for file in found)
