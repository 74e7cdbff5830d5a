"""A snapshot with every form of file, and what a restore of it has to come to."""

import os
from pathlib import Path

from engine.records.indexes import read_index
from index.snapshot.contents import files_of
from tests.unit.engine.workbench import Tree, Workbench, read_tree, stamps

FORMS: Tree = {
    "empty": b"",
    "inline": b"16 bytes, inline",
    "packed-1": os.urandom(1500),
    "sub/packed-2": os.urandom(2048),
    "sub/deep/packed-3": os.urandom(17),
    "000007.sst": os.urandom(5_000),
    "cut": os.urandom(20_000),
    "sub/übersicht \U0001f600": b"more than sixteen bytes",
}


async def backed_up(tmp_path: Path) -> Workbench:
    """A bench with one snapshot of every form of file, odd modes and old times."""
    bench = Workbench(tmp_path)
    bench.write(FORMS)
    (bench.directory / "empty-dir" / "below").mkdir(parents=True)
    (bench.directory / "sub" / "packed-2").chmod(0o640)
    (bench.directory / "cut").chmod(0o400)
    for at, path in enumerate(sorted(bench.directory.rglob("*"))):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + at))
    await bench.backup()
    return bench


def restored_whole(bench: Workbench, target: Path | None = None) -> bool:
    target = target or bench.target
    assert read_tree(target) == read_tree(bench.directory)
    assert stamps(target) == stamps(bench.directory)
    assert bench.beside_target() == []
    return True


async def blob_of(bench: Workbench, path: str, position: int = 0) -> str:
    assert bench.newest is not None
    index = await read_index(bench.inner, bench.newest.index)
    (file,) = (file for parts, file in files_of(index.dir) if "/".join(parts) == path)
    return file.blobs[position].key
