"""A disk without space, or that may only be read: a typed error, and nothing is lost or left behind.

What does not fit is refused before the first byte where that can be known, and cleaned up after where it cannot.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from blobstore.errors import AccessDeniedError, StoreError, StoreFullError
from engine.cli import tidemark
from engine.errors import CommitUnknownError, TargetError
from engine.repository.repository import Repository
from engine.restore import staging
from index.plan.commits import Commit, Retention
from index.snapshot.model import Scope
from tests.unit.engine.workbench import SETTINGS, Tree, Workbench, open_descriptors, read_tree

SMALL_MIB = 2

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("mount") is None,
    reason="mounts a small file system",
)


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("not even root may mount here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB with space for 40 files."""
    with mounted(tmp_path / "disk", f"size={SMALL_MIB}m,nr_inodes=48") as disk:
        yield disk


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


@pytest.mark.parametrize(
    "files, size, lacking", [(3, 1 << 20, "bytes and"), (60, 10, "inodes and"), (600, 3500, "bytes and")]
)
async def test_what_does_not_fit_is_refused_before_a_byte_is_fetched(
    bench: Workbench, small_disk: Path, files: int, size: int, lacking: str
) -> None:
    bench.write({f"{i:03d}": os.urandom(size) for i in range(files)})
    await bench.backup()
    bench.meter.reset()
    with pytest.raises(TargetError, match="there is no space") as raised:
        await bench.restore(target=small_disk / "target")
    assert lacking in str(raised.value)
    assert bench.meter.requests == {"get": 1}
    assert names_in(small_disk) == []


@pytest.mark.parametrize("tree", [(3, 1 << 20), (60, 10), (1000, 3500)], ids=["large", "many", "packed"])
@pytest.mark.parametrize("replace", [False, True])
async def test_disk_that_gets_full_meanwhile_leaves_the_target_as_it_was(
    bench: Workbench, small_disk: Path, monkeypatch: pytest.MonkeyPatch, tree: tuple[int, int], replace: bool
) -> None:
    files, size = tree
    monkeypatch.setattr(staging, "find_lack_of_space", lambda *_: "")
    target = small_disk / "target"
    if replace:
        target.mkdir()
        (target / "old").write_bytes(b"old")
    bench.write({f"{i:04d}": os.urandom(size) for i in range(files)})
    await bench.backup()
    before = open_descriptors()
    with pytest.raises(TargetError, match="there is no space") as raised:
        await bench.restore(target=target, replace=replace)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.hint
    assert names_in(small_disk) == (["target"] if replace else [])
    assert not replace or (target / "old").read_bytes() == b"old"
    assert open_descriptors() == before


async def test_target_that_is_a_mount_point_is_refused_with_advice(bench: Workbench, small_disk: Path) -> None:
    bench.write({"f": b"x"})
    await bench.backup()
    with pytest.raises(TargetError) as raised:
        await bench.restore(target=small_disk)
    assert "mount point" in raised.value.hint or "another disk" in raised.value.hint
    assert names_in(small_disk) == []


async def test_target_on_a_file_system_that_may_only_be_read_is_refused(bench: Workbench, small_disk: Path) -> None:
    bench.write({"f": b"x"})
    await bench.backup()
    target = small_disk / "target"
    await bench.restore(target=target)
    bench.write({"f": b"y"})
    await bench.backup()
    remount(small_disk, "ro")
    for replace, where in ((False, small_disk / "new"), (True, target)):
        with pytest.raises(TargetError) as raised:
            await bench.restore(target=where, replace=replace)
        assert raised.value.hint
    assert names_in(small_disk) == ["target"]
    assert read_tree(target) == {"f": b"x"}


JOB = Scope("job")


class Stored:
    """A repository on a small disk, with a commit that must never be lost."""

    commit: Commit

    def __init__(self, disk: Path, repository: Repository, tree: Tree, root: Path) -> None:
        self.disk, self.repository, self.tree, self.root = disk, repository, tree, root

    def source(self, name: str, tree: Tree) -> Path:
        directory = self.root / name
        directory.mkdir()
        for file, data in tree.items():
            (directory / file).write_bytes(data)
        return directory

    def fill(self) -> Path:
        """Leave no space at all."""
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as out:
            for size in (64 * 1024, 4096, 1):
                while True:
                    try:
                        out.write(bytes(size))
                    except OSError:
                        break
        return filler

    async def check(self) -> None:
        """What was committed is whole, and restores in another process to another disk."""
        async with await Repository.open(f"file://{self.disk}/repository") as repository:
            assert not (await repository.verify()).problems
            newest = await repository.latest(JOB)
            assert newest is not None
            assert newest.pointer == self.commit.pointer
            target = self.root / f"restored-{os.urandom(4).hex()}"
            await repository.find_and_restore(JOB, target)
            assert read_tree(target) == self.tree


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        async with await Repository.init(f"file://{disk}/repository", settings=SETTINGS) as repository:
            tree = {"small": b"s" * 100, "large": os.urandom(100_000)}
            stored = Stored(disk, repository, tree, tmp_path)
            # Two commits, so that there is something to collect.
            for name, files in (("before", {"old": os.urandom(50_000)}), ("newest", tree)):
                made = await repository.backup(JOB, stored.source(name, files))
                stored.commit = await repository.commit(JOB, [made])
            yield stored


async def test_repository_without_space_loses_nothing_and_goes_on_when_there_is_some(stored: Stored) -> None:
    more = stored.source("more", {"more": os.urandom(300_000)})
    # Backed up while there was space, and committed when there is none.
    made = await stored.repository.backup(JOB, more)
    filler = stored.fill()
    with pytest.raises(StoreFullError):
        await stored.repository.backup(JOB, more)
    with pytest.raises((StoreFullError, CommitUnknownError)):
        await stored.repository.commit(JOB, [made])
    with pytest.raises(StoreFullError):
        await stored.repository.collect(Retention(keep_last=1), delete_share_max=1)
    # Reading needs no space there.
    await stored.check()
    filler.unlink()
    await stored.check()
    stored.commit = await stored.repository.commit(JOB, [made])
    stored.tree = {"more": (more / "more").read_bytes()}
    await stored.repository.collect(Retention(keep_last=1), delete_share_max=1)
    await stored.check()


async def test_repository_that_may_only_be_read_is_read_by_every_verb_and_refuses_the_rest(
    stored: Stored, own_directory: Path
) -> None:
    more = stored.source("more", {"more": b"more"})
    made = await stored.repository.backup(JOB, more)
    remount(stored.disk, "ro")
    with pytest.raises(AccessDeniedError):
        await stored.repository.backup(JOB, more)
    with pytest.raises(AccessDeniedError):
        await stored.repository.commit(JOB, [made])
    with pytest.raises(StoreError) as refused:
        await stored.repository.collect(Retention(keep_last=1), delete_share_max=1)
    assert isinstance(refused.value, AccessDeniedError)
    # Without a pin, for that cannot be written either; nobody can collect meanwhile.
    await stored.check()
    for words in (
        "list",
        "verify",
        "metrics",
        "report",
        "history --job job",
        "collect -n --keep-last 1 --delete-at-most 100%",
        "collect -n --keep-since 1h",
        "collect explain log/job/00000000000000000002.commit --keep-last 1",
    ):
        repository = f"file://{stored.disk}/repository"
        done = await asyncio.to_thread(CliRunner().invoke, tidemark, [*words.split(), "-r", repository])
        assert done.exit_code == 0, f"{words}: {done.output}"
    remount(stored.disk, "rw")
    stored.commit = await stored.repository.commit(JOB, [made])
    stored.tree = {"more": b"more"}
    await stored.check()
