"""What of a live checkpoint is listed, where it is read, and how a change is noticed (design 0005, P6 and P7)."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine.checkpoint.live import LiveFiles, live_files, read_small
from engine.errors import DamagedError, SourceChangedError, UnsafeSourceError
from engine.state.checkpoint_dir import CheckpointDir
from tests.doubles import InterposedStore

TREE = {
    "metadata": b"{}",
    "commits/0": b"v1",
    "commits/1": b"v1\n{}",
    "commits/.1.crc": b"of Hadoop",
    "sources/0/9.compact": b"v1",
    "sources/0/.tmp/1": b"left over",
    "sources/0/x.tmp": b"left over",
    "offsets": b"a file where a directory is meant to be",
}
LISTED = {("commits", "0"): 2, ("commits", "1"): 5, ("sources", "0", "9.compact"): 2}
BELOW = ("commits", "sources", "offsets", "state/0")


class Place:
    """The tree in one of two places, and what changes it."""

    def __init__(self, root: Path, store: InterposedStore | None) -> None:
        self.root = root
        self.store = store

    async def write(self, name: str, data: bytes) -> None:
        if self.store is not None:
            await self.store.inner.put(name, BytesBody(data))
            return
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("new").write_bytes(data)
        path.with_name("new").rename(path)

    async def remove(self, name: str) -> None:
        if self.store is not None:
            await self.store.inner.delete([name])
        else:
            (self.root / name).unlink()

    async def open(self) -> CheckpointDir:
        return await CheckpointDir.open(self.store or self.root)


@pytest.fixture(params=["directory", "store"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    made = Place(tmp_path / "tree", InterposedStore(MemoryStore()) if request.param == "store" else None)
    for name, data in TREE.items():
        # No store of ours has a hidden name.
        if made.store is None or "/." not in name:
            await made.write(name, data)
    return made


async def test_what_is_listed_is_what_may_be_sparks(place: Place, tmp_path: Path) -> None:
    async with live_files(await place.open(), tmp_path) as files:
        listed = await files.list(BELOW)
    assert {path: file.metadata.size_bytes for path, file in listed.items()} == LISTED
    assert all(file.name == path[-1] for path, file in listed.items())


async def test_files_can_be_read_with_the_stat_that_is_listed(place: Place, tmp_path: Path) -> None:
    async with live_files(await place.open(), tmp_path) as files:
        listed = await files.list(BELOW)
        brought = await files.bring([*listed, ("metadata",)])
        for path, file in brought.items():
            at = files.directory.joinpath(*path)
            assert at.read_bytes() == TREE["/".join(path)]
            assert (file.inode, file.changed_at_ns) == (at.stat().st_ino, at.stat().st_ctime_ns)
            if path in listed:
                assert file.metadata.modified_at_ns == listed[path].metadata.modified_at_ns
        assert files.is_lasting == (place.store is None)
        assert files.requests == (0 if place.store is None else len(BELOW) + len(brought))
    assert files.is_lasting or not files.directory.exists()


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A directory in a directory, and so on, more often than Python calls a function in a function."""
    made, at = list[Path](), tmp_path / "sources"
    for _ in range(sys.getrecursionlimit()):
        at.mkdir()
        made.append(at)
        at /= "d"
    yield tmp_path
    # One by one, as `shutil` cannot.
    for path in reversed(made):
        path.rmdir()


async def test_a_tree_that_nests_too_deep_is_refused(deep: Path) -> None:
    async with live_files(await CheckpointDir.open(deep)) as files:
        with pytest.raises(UnsafeSourceError, match="nests too deep"):
            await files.list(("sources",))


async def changed(files: LiveFiles) -> str | None:
    found = await files.find_changed(list(LISTED))
    return None if found is None else "/".join(found)


async def test_a_change_is_noticed(place: Place, tmp_path: Path) -> None:
    async with live_files(await place.open(), tmp_path) as files:
        await files.list(BELOW)
        assert await changed(files) is None
        # Another file with the same bytes, as an attempt that lost would write.
        await place.write("commits/1", TREE["commits/1"])
        assert await changed(files) == "commits/1"
    async with live_files(await place.open(), tmp_path) as files:
        await files.list(BELOW)
        await place.remove("sources/0/9.compact")
        assert await changed(files) == "sources/0/9.compact"
        assert await files.find_changed(list(LISTED), gone=False) is None


async def test_what_is_gone_or_another_cannot_be_brought(place: Place, tmp_path: Path) -> None:
    async with live_files(await place.open(), tmp_path) as files:
        await files.list(BELOW)
        with pytest.raises(UnsafeSourceError, match="commits/7: is not there, or vanished"):
            await files.bring([("commits", "7")])
        if place.store is not None:
            await place.write("commits/1", b"longer than it was listed")
            with pytest.raises(SourceChangedError, match="commits/1"):
                await files.bring([("commits", "1")])


@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO"])
async def test_what_is_no_file_is_refused_unless_it_is_hidden(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "tree"
    (root / "SSTs").mkdir(parents=True)
    odd = root / "SSTs" / ".hidden"
    if kind == "a FIFO":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path)
    async with live_files(await CheckpointDir.open(root)) as files:
        assert await files.list() == {}
        odd.rename(root / "SSTs" / "000001.sst")
        with pytest.raises(UnsafeSourceError, match=rf"SSTs/000001\.sst: is {kind}") as caught:
            await files.list()
        assert caught.value.hint == "put a file or a directory in its place"
        with pytest.raises(UnsafeSourceError, match=kind):
            await files.bring([("SSTs", "000001.sst")])


async def test_a_checkpoint_behind_a_link_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "metadata").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    async with live_files(await CheckpointDir.open(tmp_path / "link")) as files:
        assert files.directory == tmp_path / "real"
        assert list(await files.list()) == [("metadata",)]


async def test_files_vanish_while_a_directory_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    for name in ("1.changelog", "2.changelog"):
        (root / name).write_bytes(b"x")
    listdir = os.listdir

    def then_delete(path: Path) -> list[str]:
        names = listdir(path)
        (root / "1.changelog").unlink()
        return names

    monkeypatch.setattr(os, "listdir", then_delete)
    async with live_files(await CheckpointDir.open(root)) as files:
        assert list(await files.list()) == [("2.changelog",)]


def test_what_is_to_be_held_in_memory_is_not_larger_than_that(tmp_path: Path) -> None:
    path = tmp_path / "1.zip.crc"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(DamagedError, match="more than 4 bytes"):
        read_small(path, 4)
    with pytest.raises(UnsafeSourceError, match="not there"):
        read_small(tmp_path / "gone", 4)
