"""Directories come back with their own permissions, no matter who restores or what was there (design 0001)."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blobstore.base import BytesBody
from engine.drill.drill import remove_scratch
from engine.errors import TargetError
from index.snapshot.codec import KIND_INDEX, seal, unseal
from index.snapshot.keys import INDEXES, upload_key
from index.snapshot.model import IndexReference
from tests.unit.engine.restore.restore_kit import restored_whole
from tests.unit.engine.workbench import SCOPE, Workbench

NOBODY = 65_534
MODES = {
    "": 0o750,
    "open": 0o755,
    "private": 0o700,
    "private/read-only": 0o500,
    "read-only": 0o500,
    "read-only/sub": 0o750,
}


@pytest.fixture
def ordinary() -> Iterator[Path]:
    """A directory of a user whom permissions keep out, and this process as that user."""
    with tempfile.TemporaryDirectory() as path:
        if os.geteuid() != 0:
            yield Path(path)
            return
        os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(path)
        finally:
            os.seteuid(0)


async def bench_of(root: Path, modes: dict[str, int] = MODES) -> Workbench:
    bench = Workbench(root)
    for name in modes:
        (bench.directory / name).mkdir(exist_ok=True)
        (bench.directory / name / "000007.sst").write_bytes(b"12345" * 4000)
    give(bench.directory, modes)
    await bench.backup()
    return bench


def give(root: Path, modes: dict[str, int]) -> None:
    for name in sorted(modes, reverse=True):
        (root / name).chmod(modes[name])


def modes_of(root: Path) -> dict[str, int]:
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_dir()}
    return {name: path.stat().st_mode & 0o7777 for name, path in ({"": root} | found).items()}


async def test_directories_come_back_with_their_own_modes_whatever_the_umask(ordinary: Path) -> None:
    bench = await bench_of(ordinary)
    before = os.umask(0o077)
    try:
        await bench.restore()
    finally:
        os.umask(before)
    assert modes_of(bench.target) == MODES
    assert restored_whole(bench)


@pytest.mark.parametrize("mode, restored", [(0o700, 0o700), (0o500, 0o500), (0o3777, 0o777), (0o050, 0o550)])
async def test_no_restored_directory_keeps_its_owner_out_or_has_special_bits(
    tmp_path: Path, mode: int, restored: int
) -> None:
    if os.geteuid() != 0 and not mode & 0o400:
        pytest.skip("only root can back this up")
    bench = await bench_of(tmp_path, {"": mode, "sub": mode})
    await bench.restore()
    assert modes_of(bench.target) == {"": restored, "sub": restored}


async def test_directory_that_is_there_keeps_its_mode_and_what_is_in_it_gets_its_own(ordinary: Path) -> None:
    bench = await bench_of(ordinary)
    bench.target.mkdir(mode=0o500)
    await bench.restore()
    assert modes_of(bench.target) == MODES | {"": 0o500}


@pytest.mark.parametrize("files", [["private/read-only/*.sst"], ["*.sst"]])
async def test_some_files_come_back_in_directories_with_their_modes(ordinary: Path, files: list[str]) -> None:
    bench = await bench_of(ordinary)
    await bench.restore(files=files)
    restored = modes_of(bench.target)
    assert restored == {name: MODES[name] for name in restored}
    assert "private/read-only" in restored


async def test_read_only_directories_are_reused_replaced_and_removed(ordinary: Path) -> None:
    bench = await bench_of(ordinary, MODES | {"": 0o500})
    await bench.restore()
    result = await bench.restore(replace=True)
    assert modes_of(bench.target) == MODES | {"": 0o500}
    assert result.files_reused == len(MODES)
    assert restored_whole(bench)


async def test_what_a_dead_restore_left_of_read_only_directories_is_removed(ordinary: Path) -> None:
    bench = await bench_of(ordinary)
    await bench.restore()
    staging = bench.root / f".target.tidemark-{'0' * 20}"
    staging.mkdir()
    bench.target.chmod(0o700)
    bench.target.rename(staging / "new")
    await bench.restore()
    assert restored_whole(bench)


@pytest.mark.parametrize("exchange", [False, True])
async def test_swap_of_read_only_directories_that_fails_is_undone(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    bench = await bench_of(ordinary, MODES | {"": 0o500})
    bench.target.mkdir()
    (bench.target / "old").write_bytes(b"old")
    bench.target.chmod(0o500)

    def fail_last(directory: Any) -> None:
        if (bench.target / "open").exists():
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("engine.restore.staging.sync_dir", fail_last)
        with pytest.raises(TargetError, match="Input/output"):
            await bench.restore(replace=True, exchange=exchange)
    assert [path.name for path in bench.target.iterdir()] == ["old"]
    assert modes_of(bench.target) == {"": 0o500}
    assert bench.beside_target() == []


async def test_scratch_directory_of_read_only_directories_is_removed(ordinary: Path) -> None:
    bench = await bench_of(ordinary)
    await bench.restore()
    assert remove_scratch(bench.target) == ""
    assert not bench.target.exists()


async def test_modes_are_given_through_no_link(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o711)
    (elsewhere / "kept").touch()

    def exchange() -> None:
        (new,) = tmp_path.glob(".target.tidemark-*/new")
        (new / "open").rename(tmp_path / "moved")
        (new / "open").symlink_to(elsewhere)

    async def meddle() -> None:
        exchange()

    with pytest.raises(TargetError):
        await bench.restore(meanwhile=meddle)
    assert elsewhere.stat().st_mode & 0o777 == 0o711
    assert (elsewhere / "kept").exists()


async def test_mode_that_changed_alone_is_in_the_next_snapshot_and_uploads_nothing(ordinary: Path) -> None:
    bench = await bench_of(ordinary)
    for changed in ({"private": 0o750}, {"": 0o700}):
        give(bench.directory, MODES | changed)
        result = await bench.backup()
        assert [key.split("/")[0] for key in result.new_keys] == ["indexes"]
        target = bench.root / f"of-{result.reference.version}"
        await bench.restore(target=target)
        assert modes_of(target) == MODES | changed


async def test_directories_of_an_older_index_are_their_owners_alone(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path)
    assert bench.newest is not None
    blob = bench.inner._blobs[bench.newest.index.key]  # type: ignore[attr-defined]
    caps = {"bytes_max": 1 << 20, "raw_bytes_max": 1 << 20}
    raw = msgspec.msgpack.decode(unseal(blob.data, KIND_INDEX, subject="index", **caps))

    def cut(directory: list[Any]) -> list[Any]:
        """As a release writes it that knows no modes of directories."""
        name, files, sub_dirs, files_removed, sub_dirs_removed, mode = directory
        assert mode is not None
        return [name, files, [cut(sub) for sub in sub_dirs], files_removed, sub_dirs_removed]

    data = seal(KIND_INDEX, msgspec.msgpack.encode(raw | {"dir": cut(raw["dir"])}), **caps)
    key = upload_key(INDEXES, SCOPE, "f" * 20, 0)
    await bench.inner.put(key, BytesBody(data))
    index = IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))
    await bench.restore(reference=msgspec.structs.replace(bench.newest, index=index))
    assert set(modes_of(bench.target).values()) == {0o700}
