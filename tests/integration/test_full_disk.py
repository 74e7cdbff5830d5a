"""A disk without room: refused before the first byte where that can be known, and cleaned up after where it cannot."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import staging
from engine.errors import TargetError
from tests.unit.engine.workbench import Workbench, open_descriptors

SMALL_MIB = 2

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("mount") is None,
    reason="mounts a small file system",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB with room for 40 files."""
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={SMALL_MIB}m,nr_inodes=48"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("not even root may mount here")
    yield path
    subprocess.run(["umount", path], check=True)


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
    with pytest.raises(TargetError, match="there is no room") as raised:
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
    monkeypatch.setattr(staging.Staging, "check_room", lambda *_, **__: None)
    target = small_disk / "target"
    if replace:
        target.mkdir()
        (target / "old").write_bytes(b"old")
    bench.write({f"{i:04d}": os.urandom(size) for i in range(files)})
    await bench.backup()
    before = open_descriptors()
    with pytest.raises(TargetError, match="there is no room") as raised:
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
