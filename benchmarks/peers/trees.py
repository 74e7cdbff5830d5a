"""The directories that are moved, and the digests that show whether what came back is what was sent."""

import os
import random
import shutil
from pathlib import Path

import msgspec
from blake3 import blake3

from engine.rocksdb.store import StoreWriter, spark_settings

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
# One file in this many changed.
CHANGED_SHARE = 100
_ROW_BYTES = 1000
_ROWS_AT_ONCE = 10_000
# Random bytes are made in pieces of this size: no two files, and no two pieces of one, are alike.
_PIECE_BYTES = 16 * MIB


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A number of files of one size in bytes; the state of a RocksDB if `count` is 0."""

    name: str
    count: int
    size_bytes: int

    def scaled(self, scale: float) -> "Shape":
        """Fewer files, or a smaller one, or a smaller state."""
        if self.count > 1:
            return msgspec.structs.replace(self, count=max(2, round(self.count * scale)))
        return msgspec.structs.replace(self, size_bytes=max(MIB, round(self.size_bytes * scale)))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="small", count=2000, size_bytes=64 * KIB),
        Shape(name="mid", count=40, size_bytes=32 * MIB),
        Shape(name="big", count=1, size_bytes=GIB),
        Shape(name="state", count=0, size_bytes=4 * GIB),
    )
}


def make_tree(shape: Shape, target: Path) -> int:
    """Make the directory; how many bytes its files have."""
    if not shape.count:
        make_state(target, shape.size_bytes)
    else:
        target.mkdir(parents=True)
        for number in range(shape.count):
            write_random(target / f"{number:06d}.sst", shape.size_bytes)
    return tree_bytes(target)


def write_random(path: Path, size_bytes: int) -> None:
    """A file of bytes that nothing compresses."""
    with path.open("wb") as file:
        for begin in range(0, size_bytes, _PIECE_BYTES):
            file.write(os.urandom(min(_PIECE_BYTES, size_bytes - begin)))


def make_state(target: Path, size_bytes: int) -> None:
    """A RocksDB with Spark's settings: rows of 16 and 1,000 bytes in SSTs, as a checkpoint of it has them."""
    building = target.with_name(target.name + ".building")
    building.mkdir(parents=True)
    with StoreWriter.open(building, spark_settings()) as store:
        rows = size_bytes // (_ROW_BYTES + 16)
        for begin in range(0, rows, _ROWS_AT_ONCE):
            values = os.urandom(_ROW_BYTES * _ROWS_AT_ONCE)
            store.write_batch(
                {
                    f"{begin + n:016x}".encode(): values[n * _ROW_BYTES : (n + 1) * _ROW_BYTES]
                    for n in range(min(_ROWS_AT_ONCE, rows - begin))
                }
            )
        store.flush()
        store.checkpoint(target)
    shutil.rmtree(building)


def change_files(root: Path, round_number: int) -> int:
    """Rewrite one file in a hundred, others in each round, with other bytes of the same length; how many bytes."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    chosen = random.Random(round_number).sample(paths, max(1, len(paths) // CHANGED_SHARE))
    for path in chosen:
        write_random(path, path.stat().st_size)
    return sum(path.stat().st_size for path in chosen)


def tree_bytes(root: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def tree_digests(root: Path) -> dict[str, str]:
    """A digest of each file's content by its path."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(root))] = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    return found


def difference(expected: dict[str, str], root: Path) -> str:
    """In what a directory differs from what was sent; empty if in nothing."""
    found = tree_digests(root)
    for shown, paths in (
        ("missing", expected.keys() - found.keys()),
        ("unexpected", found.keys() - expected.keys()),
        ("wrong content", {path for path in expected.keys() & found.keys() if expected[path] != found[path]}),
    ):
        if paths:
            return f"{shown}: {len(paths)} of {len(expected)} files, first {min(paths)}"
    return ""
