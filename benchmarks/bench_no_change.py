"""A backup's look at a directory in which nothing changed: scan, identify and diff of 5,000 files of 4 KiB, warm.

The rival in the same run is Samza's rule on the same directory and in the same code: stat, and the CRC32 of every file
up to 1 MiB, as `DirDiffUtil` does for each commit. Samza itself was measured at 310 to 430 ms for this work.

Run `make bench`, or `python benchmarks/bench_no_change.py` for the table alone.
"""

import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec

from engine.local.digests import DigestCache, FactReader, hash_bytes
from engine.local.scan import scan_dir
from index.snapshot import dir_diff
from index.snapshot.dir_diff import LocalDir, LocalFile, diff_dir, diff_stats
from index.snapshot.model import DirIndex, FileIndex

FILES_COUNT = 5_000
SIZE_BYTES = 4096
LARGE_FILE_BYTES = 1024 * 1024
ROUNDS = 15
# What "changed within two seconds" distrusts is over.
SETTLED_NS = 10_000_000_000


def make_tree(root: Path) -> DirIndex:
    """The files, and the index of a snapshot that holds exactly them."""
    for n in range(FILES_COUNT):
        (root / f"{n:06d}.log").write_bytes(n.to_bytes(4, "little") * (SIZE_BYTES // 4))
    files = []
    for file in scan_dir(root).files:
        digest = hash_bytes((root / file.name).read_bytes())
        files.append(
            FileIndex(file.name, file.metadata, digest.blake3, digest.crc32, inline=b"")
        )  # bytes do not matter
    return DirIndex("", tuple(files))


def look(root: Path, remote: DirIndex, cache: DigestCache) -> int:
    """Ours: how many files would be uploaded."""
    local = scan_dir(root)
    now_ns = time.time_ns() + SETTLED_NS
    known = FactReader(root, cache, stop=threading.Event(), looked_at_ns=now_ns).identify(local, remote)
    return diff_stats(diff_dir(known, remote)).files_added


def is_same_file_for_samza(local: LocalFile, remote: FileIndex) -> bool:
    """Samza's `DirDiffUtil.areSameFile`, owners compared, and no checksum of a file above 1 MiB."""
    mine, theirs = local.metadata, remote.metadata
    if (local.name, mine.size_bytes) != (remote.name, theirs.size_bytes):
        return False
    if (mine.group, mine.owner) != (theirs.group, theirs.owner) or (mine.mode ^ theirs.mode) & 0o700:
        return False
    return mine.size_bytes > LARGE_FILE_BYTES or local.crc32 == remote.crc32


def look_as_samza(root: Path, remote: DirIndex) -> int:
    """Samza's: the same scan, and every file read."""
    local = scan_dir(root)
    files = tuple(msgspec.structs.replace(f, crc32=zlib.crc32((root / f.name).read_bytes())) for f in local.files)
    with mock.patch.object(dir_diff, "is_same_file", is_same_file_for_samza):
        return diff_stats(diff_dir(LocalDir(name="", files=files), remote)).files_added


def timed_ms(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    assert work() == 0
    return (time.perf_counter() - began) * 1000


def measure(root: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of both, taken in turn."""
    remote, cache = make_tree(root), DigestCache(trust_stat=True)
    look(root, remote, cache)
    look_as_samza(root, remote)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(timed_ms(lambda: look(root, remote, cache)))
        theirs.append(timed_ms(lambda: look_as_samza(root, remote)))
    return ours, theirs


def test_no_change_look_at_five_thousand_files(tmp_path: Path) -> None:
    ours, theirs = measure(tmp_path)
    report(ours, theirs)


def report(ours: list[float], theirs: list[float]) -> None:
    for name, values in (("tidemark", ours), ("Samza's rule, same code", theirs)):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:26} median {middle:6.1f} ms   quartiles {low:6.1f} to {high:6.1f}")
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(f"ratio, pair by pair: median {statistics.median(ratios):.1f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        report(*measure(Path(directory)))
