"""A real RocksDB, backed up from its checkpoints, restored, opened and read."""

import os
import random
import time
from pathlib import Path

import pytest
import rocksdict

import engine.local.scan
from blobstore.base import list_blobs
from blobstore.local.store import LocalStore
from engine.local.digests import FactReader
from engine.local.scan import scan_dir
from engine.records.indexes import read_index
from engine.settings import TransferSettings
from index.snapshot.contents import files_of
from index.snapshot.dir_diff import LocalDir
from index.snapshot.model import SstIdentity, StoreReference
from tests.unit.engine.workbench import Workbench, read_tree, stamps


def opened(path: Path) -> rocksdict.Rdict:
    """In raw mode: the default one unpickles what it reads."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    options.set_write_buffer_size(256 * 1024)
    options.set_target_file_size_base(256 * 1024)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_disable_auto_compactions(disable=True)
    return rocksdict.Rdict(str(path), options)


def fill(db: rocksdict.Rdict, seed: int, count: int = 4000) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        db[b"%08d" % rng.randrange(100_000)] = rng.randbytes(200)
    db.flush()


def content(path: Path) -> dict[bytes, bytes]:
    db = opened(path)
    try:
        iterator = db.iter()
        iterator.seek_to_first()
        read: dict[bytes, bytes] = {}
        while iterator.valid():
            read[iterator.key()] = iterator.value()
            iterator.next()
        iterator.status()
        del iterator
        return read
    finally:
        db.close()


def checkpoint(db: rocksdict.Rdict, path: Path) -> Path:
    rocksdict.Checkpoint(db).create_checkpoint(str(path))
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    bench = Workbench(tmp_path, LocalStore(tmp_path / "repository"))
    bench.settings = TransferSettings(pack_file_bytes_max=64 * 1024, pack_bytes_max=1024 * 1024)
    return bench


async def identities(bench: Workbench, reference: StoreReference) -> dict[str, SstIdentity | None]:
    index = await read_index(bench.inner, reference.index)
    return {path[-1]: file.sst for path, file in files_of(index.dir) if path[-1].endswith(".sst")}


async def test_second_backup_uploads_what_changed_and_both_restore_byte_for_byte(
    bench: Workbench, tmp_path: Path
) -> None:
    db = opened(tmp_path / "db")
    fill(db, 1)
    one = checkpoint(db, tmp_path / "one")
    first = await bench.backup(directory=one)
    assert all((await identities(bench, first.reference)).values())

    fill(db, 2, count=1500)
    two = checkpoint(db, tmp_path / "two")
    before = {blob.key async for blob in list_blobs(bench.inner, "")}
    bench.meter.reset()
    second = await bench.backup(directory=two)
    old, new = read_tree(one), read_tree(two)
    shared = {name for name in new if name.endswith(".sst") and name in old}
    assert len(shared) > 2
    changed = {name: data for name, data in new.items() if old.get(name) != data}
    assert second.stats.files_added == len(changed)
    assert second.stats.bytes_added == sum(map(len, changed.values()))
    uploaded = [blob.size_bytes async for blob in list_blobs(bench.inner, "blobs/") if blob.key not in before]
    inline = second.stats.bytes_added - second.stats.bytes_uploaded
    assert sum(uploaded) == second.stats.bytes_uploaded
    assert 0 <= inline < 2000
    assert bench.meter.requests == {"get": 1, "put_if_absent": len(uploaded) + 1}

    db.compact_range(None, None)
    three = checkpoint(db, tmp_path / "three")
    third = await bench.backup(directory=three)
    assert third.stats.files_removed > len(shared)
    db.close()

    for result, directory in ((first, one), (second, two), (third, three)):
        target = tmp_path / f"restored-{directory.name}"
        await bench.restore(reference=result.reference, target=target)
        assert read_tree(target) == read_tree(directory)
        assert {name: mode for name, (mode, _) in stamps(target).items()} == {
            name: mode for name, (mode, _) in stamps(directory).items()
        }
        assert content(target) == content(directory)


async def test_unchanged_store_is_not_even_hashed(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = opened(tmp_path / "db")
    fill(db, 3)
    await bench.backup(directory=checkpoint(db, tmp_path / "one"))
    # A new checkpoint hard-links the same files: the ctime is another one, the identity is not.
    again = await bench.backup(directory=checkpoint(db, tmp_path / "two"))
    db.close()
    names = {str(path) for path in read_tree(tmp_path / "two") if not path.endswith(".sst")}
    assert again.stats.files_retained + again.stats.files_added == len(read_tree(tmp_path / "two"))
    assert again.stats.files_added <= len(names)
    assert again.stats.bytes_uploaded < 64 * 1024


@pytest.mark.parametrize("when", ["after the scan", "after the last byte"])
@pytest.mark.parametrize("doing", ["compaction", "checkpoint", "both"])
async def test_live_store_goes_on_while_its_checkpoint_is_backed_up(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, doing: str
) -> None:
    """A compaction unlinks the SSTs that the checkpoint shares, a checkpoint links them: no byte changes (I3)."""
    db = opened(tmp_path / "db")
    for seed in (31, 32, 33):
        fill(db, seed)
    one = checkpoint(db, tmp_path / "one")
    expected = read_tree(one)
    shared = [path for path in one.iterdir() if path.suffix == ".sst"]
    before = {path: path.stat() for path in shared}

    def work() -> None:
        time.sleep(0.05)  # the clock of the file system moves in ticks
        if doing != "compaction":
            checkpoint(db, tmp_path / "two")
        if doing != "checkpoint":
            db.compact_range(None, None)
            give_up_s = time.monotonic() + 20
            while any((tmp_path / "db" / path.name).exists() for path in shared) and time.monotonic() < give_up_s:
                time.sleep(0.05)

    is_early = when == "after the scan"
    owner, name = (FactReader, "identify_ssts") if is_early else (engine.local.scan, "find_difference")
    real = getattr(owner, name)

    def and_work(*args: object, **options: object) -> object:
        work()
        return real(*args, **options)

    def work_and_scan(scanned: LocalDir, _: LocalDir) -> object:
        work()
        return real(scanned, scan_dir(one))

    monkeypatch.setattr(owner, name, and_work if is_early else work_and_scan)
    result = await bench.backup(directory=one)
    db.close()
    assert all(path.stat().st_ctime_ns > before[path].st_ctime_ns for path in shared)
    if doing == "both":
        assert all(path.stat().st_nlink == before[path].st_nlink for path in shared)
    await bench.restore(reference=result.reference)
    assert read_tree(bench.target) == read_tree(one) == expected
    assert content(bench.target) == content(one)


async def test_forks_of_one_store_with_files_of_equal_name_and_size_are_distinguished(
    bench: Workbench, tmp_path: Path
) -> None:
    db = opened(tmp_path / "db")
    fill(db, 4, count=500)
    forks = [checkpoint(db, tmp_path / name) for name in ("fork-a", "fork-b")]
    db.close()
    for seed, fork in enumerate(forks):
        db = opened(fork)
        rng = random.Random(seed)
        for number in range(800):
            db[b"%08d" % number] = rng.randbytes(100)
        db.flush()
        db.close()
    a, b = read_tree(forks[0]), read_tree(forks[1])
    twins = [n for n in a if n.endswith(".sst") and n in b and len(a[n]) == len(b[n]) and a[n] != b[n]]
    assert twins, "the forks wrote no file of equal name and size"
    first = await bench.backup(directory=forks[0])
    second = await bench.backup(directory=forks[1])
    assert second.stats.files_added >= len(twins)
    for result, fork in ((first, forks[0]), (second, forks[1])):
        target = tmp_path / f"restored-{fork.name}"
        await bench.restore(reference=result.reference, target=target)
        assert read_tree(target) == read_tree(fork)
        assert content(target) == content(fork)


async def test_restore_onto_an_older_version_fetches_what_it_has_not(bench: Workbench, tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    fill(db, 5)
    first = await bench.backup(directory=checkpoint(db, tmp_path / "one"))
    fill(db, 6, count=1000)
    second = await bench.backup(directory=checkpoint(db, tmp_path / "two"))
    db.close()
    await bench.restore(reference=first.reference)
    result = await bench.restore(reference=second.reference, replace=True)
    assert read_tree(bench.target) == read_tree(tmp_path / "two")
    old = {name: len(data) for name, data in read_tree(tmp_path / "one").items() if name.endswith(".sst")}
    assert result.bytes_reused >= sum(old.values())
    assert result.bytes_fetched <= second.stats.bytes_uploaded + first.stats.bytes_uploaded - sum(old.values())
    assert content(bench.target) == content(tmp_path / "two")


async def test_restored_store_goes_on_and_is_backed_up_on_top(bench: Workbench, tmp_path: Path) -> None:
    """The whole life: restore, work on, checkpoint, back up against the snapshot that it came from."""
    db = opened(tmp_path / "db")
    fill(db, 7)
    await bench.backup(directory=checkpoint(db, tmp_path / "one"))
    db.close()
    await bench.restore()
    db = opened(bench.target)
    fill(db, 8, count=300)
    two = checkpoint(db, tmp_path / "two")
    db.close()
    result = await bench.backup(directory=two)
    kept = {name for name in read_tree(two) if name.endswith(".sst") and (tmp_path / "one" / name).exists()}
    assert result.stats.files_retained >= len(kept) > 1
    target = tmp_path / "again"
    await bench.restore(target=target)
    assert read_tree(target) == read_tree(two)
    assert content(target) == content(two)


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="no list of descriptors")
async def test_no_descriptor_is_left_open(bench: Workbench, tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    fill(db, 9)
    one = checkpoint(db, tmp_path / "one")
    db.close()
    del db
    before = set(os.listdir("/dev/fd"))  # noqa: PTH208
    await bench.backup(directory=one)
    await bench.restore()
    assert len(set(os.listdir("/dev/fd"))) == len(before)  # noqa: PTH208
