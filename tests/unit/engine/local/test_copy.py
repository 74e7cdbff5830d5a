"""A local file is copied whole, also where the kernel cannot."""

import os
from pathlib import Path

import pytest

from engine.local.copy import copy_file


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 1024 * 1024 + 1])
def test_a_copy_has_all_bytes(tmp_path: Path, size: int) -> None:
    (tmp_path / "source").write_bytes(os.urandom(size))
    assert copy_file(tmp_path / "source", tmp_path / "target") == size
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()


def test_a_copy_is_whole_where_the_kernel_cannot_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    (tmp_path / "source").write_bytes(b"x" * 3_000_000)
    assert copy_file(tmp_path / "source", tmp_path / "target") == 3_000_000
    assert (tmp_path / "target").read_bytes() == b"x" * 3_000_000


def test_a_copy_goes_on_where_the_kernel_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        return 0

    monkeypatch.setattr(os, "copy_file_range", stop, raising=False)
    (tmp_path / "source").write_bytes(b"abc")
    assert copy_file(tmp_path / "source", tmp_path / "target") == 3


def test_a_copy_replaces_nothing_and_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"old"
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(OSError, match=r"regular|directory"):
            copy_file(tmp_path / name, tmp_path / "other")
        assert not (tmp_path / "other").exists()
