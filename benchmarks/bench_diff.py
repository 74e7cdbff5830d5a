"""The pure cost of a backup that changes nothing: diff, index, delta, stored form. No disk, no network.

Samza's no-change diff of 5,000 files of 4 KiB, which stats and reads them, takes 310 to 430 ms in a warm JVM. What is
comparable with that is `scan` + `diff`; the scan belongs to the engine, which can pass its own `LocalDir` to
`measure_no_change`.
"""

import hashlib
from collections.abc import Callable

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from index.snapshot.codec import decode_index, encode_index
from index.snapshot.delta import apply_delta, make_delta
from index.snapshot.dir_diff import LocalDir, LocalFile, build_dir_index, diff_dir, diff_stats, pairs_to_identify
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.keys import BLOBS, INDEXES, upload_key
from index.snapshot.model import (
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexReference,
    LineageItem,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    SstIdentity,
    UniqueId,
)

SCOPE = Scope("page-views", "Partition 7")
SESSION = "0123456789abcdef0123"
SIZE_BYTES = 4096
REFERENCE = IndexReference(key=upload_key(INDEXES, SCOPE, SESSION, 0), sha256=b"1" * 32, size_bytes=100)

# Two out of three files are SSTs, as in a store with archived logs.
COUNTS = [5_000, 100_000]


def file_of(n: int) -> FileIndex:
    return FileIndex(
        f"{n:06d}.sst" if n % 3 else f"{n:06d}.log",
        FileMetadata(
            SIZE_BYTES, 0o644, 1_700_000_000_000_000_000 + 1_000_003 * n, 1_700_000_000_000 + n, "spark", "hadoop"
        ),
        hashlib.sha256(n.to_bytes(8, "little")).digest(),
        n * 2_654_435_761 % 2**32,
        (FileBlob(upload_key(BLOBS, SCOPE, SESSION, n), 0, 0, SIZE_BYTES),),
        None,
        SstIdentity("RCQT39JY6E1U4N923P4Y", n + 1) if n % 3 else None,
    )


def snapshot(count: int) -> SnapshotIndex:
    metadata = SnapshotMetadata(
        job=SCOPE.job, task=SCOPE.task or "", store="counts", version=1, unique_id=UniqueId("u1")
    )
    return SnapshotIndex(metadata=metadata, session=SESSION, dir=DirIndex("", tuple(file_of(n) for n in range(count))))


def local_of(index: SnapshotIndex) -> LocalDir:
    """What a scan and an identification of the same files would have found."""
    return LocalDir(
        name="",
        files=tuple(
            LocalFile(
                name=file.name,
                metadata=msgspec.structs.replace(file.metadata),
                device=1,
                inode=n,
                changed_at_ns=1,
                sst=None if file.sst is None else SstIdentity(file.sst.session_id, file.sst.file_number),
                blake3=None if file.sst else bytes(bytearray(file.blake3)),
            )
            for n, file in enumerate(index.dir.files_present)
        ),
    )


def measure_no_change(benchmark: BenchmarkFixture, scan: Callable[[], LocalDir], remote: DirIndex) -> None:
    """The hook for a real scan: `scan` is timed together with the diff, and nothing may have changed."""
    diff = benchmark(lambda: diff_dir(scan(), remote))
    stats = diff_stats(diff)
    assert (stats.files_added, stats.files_removed) == (0, 0)


@pytest.fixture(scope="module", params=COUNTS, ids=lambda count: f"{count}-files")
def index(request: pytest.FixtureRequest) -> SnapshotIndex:
    return snapshot(request.param)


def test_no_change_diff(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    local = local_of(index)
    measure_no_change(benchmark, lambda: local, index.dir)


def test_which_files_are_identified(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    local = local_of(index)
    found = benchmark(lambda: list(pairs_to_identify(local, index.dir)))
    assert sum(len(pairs) for _, pairs in found) == len(local.files)


def test_build_of_an_unchanged_index(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    diff = diff_dir(local_of(index), index.dir)
    assert benchmark(lambda: build_dir_index(diff, {})) == index.dir


def test_check_of_every_invariant(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    benchmark(lambda: check_snapshot_index(index))


def test_encode(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    data = benchmark(lambda: encode_index(index))
    benchmark.extra_info["stored_bytes_per_file"] = len(data) / len(index.dir.files_present)


def test_decode(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    data = encode_index(index)
    assert benchmark(lambda: decode_index(data, subject="benchmark")) == index


def test_delta_of_ten_changed_files(benchmark: BenchmarkFixture, index: SnapshotIndex) -> None:
    local = local_of(index)
    changed = {file.name for file in local.files[100:110]}
    files = tuple(
        msgspec.structs.replace(file, sst=None, blake3=b"2" * 32) if file.name in changed else file
        for file in local.files
    )
    diff = diff_dir(msgspec.structs.replace(local, files=files), index.dir)
    uploaded: dict[tuple[str, ...], FileIndex] = {
        (file.name,): msgspec.structs.replace(file_of(10_000_000 + n), name=file.name)
        for n, file in enumerate(diff.files_added)
    }
    base = LineageItem(1, UniqueId("u1"))
    metadata = msgspec.structs.replace(index.metadata, version=2, unique_id="u2", base=base, lineage=(base,))
    new = msgspec.structs.replace(index, metadata=metadata, dir=build_dir_index(diff, uploaded))

    delta = benchmark(lambda: make_delta(index, REFERENCE, 0, new))

    assert len(delta.dir.files_set) == 10
    assert apply_delta(index, delta) == new
    benchmark.extra_info["stored_bytes"] = len(encode_index(delta))
