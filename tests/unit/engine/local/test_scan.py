"""Scanning a directory: names and stats in order, and what is refused (design 0002, I3)."""

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.errors import TargetError, UnsafeSourceError
from engine.local.scan import file_system_now_ns, find_difference, is_untouched, scan_dir
from engine.restore.staging import target_errors
from index.snapshot.dir_diff import LocalDir
from index.snapshot.invariants import DEPTH_MAX
from tests.unit.engine.workbench import open_descriptors


def names(directory: LocalDir) -> dict[str, object]:
    return {file.name: file.metadata.size_bytes for file in directory.files} | {
        sub.name: names(sub) for sub in directory.sub_dirs
    }


def test_scan_names_everything_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "Z", "é", ".hidden", "a b", "\U0001f600", "a.sst", "\tt", "x\ny"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "zero").write_bytes(b"")
    scanned = scan_dir(tmp_path)
    assert scanned.name == ""
    listed = [file.name for file in scanned.files]
    assert listed == sorted(listed)
    assert names(scanned) == {name: len(name.encode()) for name in listed} | {"sub": {"zero": 0, "empty": {}}}


def test_scan_reports_what_stat_reports(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    path.chmod(0o4751)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub").chmod(0o2750)
    os.utime(path, ns=(1, 1_234_567_890_123_456_789))
    (file,) = scan_dir(tmp_path).files
    status = path.stat()
    assert (file.device, file.inode, file.changed_at_ns) == (status.st_dev, status.st_ino, status.st_ctime_ns)
    assert (file.metadata.size_bytes, file.metadata.mode) == (5, 0o4751)
    assert file.metadata.modified_at_ns == 1_234_567_890_123_456_789
    assert file.metadata.owner == path.owner()
    assert (file.sst, file.blake3, file.crc32) == (None, None, None)
    assert [sub.mode for sub in scan_dir(tmp_path).sub_dirs] == [0o2750]
    assert scan_dir(tmp_path).mode == tmp_path.stat().st_mode & 0o7777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_owner_without_a_name_is_reported_by_number(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.chown(tmp_path / "f", 54321, 54322)
    (file,) = scan_dir(tmp_path).files
    assert (file.metadata.owner, file.metadata.group) == ("54321", "54322")


def _socket(path: Path) -> None:
    # The path of a socket is short: bind where it is.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: path.symlink_to("/etc/passwd"), "a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
        (lambda path: path.symlink_to("."), "a symbolic link"),
        (os.mkfifo, "a FIFO"),
        (_socket, "a socket"),
    ],
    ids=["link", "dangling link", "link to a directory", "FIFO", "socket"],
)
@pytest.mark.parametrize("place", ["", "sub"])
def test_what_is_neither_file_nor_directory_is_refused_by_name(
    tmp_path: Path, place: str, make: Callable[[Path], None], words: str
) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    make(tmp_path / place / "odd")
    with pytest.raises(UnsafeSourceError, match=words) as raised:
        scan_dir(tmp_path)
    assert raised.value.subject == str(tmp_path / place / "odd")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_device_is_refused(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", 0o20600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("not even root, here")
    with pytest.raises(UnsafeSourceError, match="a device"):
        scan_dir(tmp_path)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\xc3", b"back\\slash"])
def test_name_that_cannot_be_kept_is_refused(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "sub").mkdir()
    with open(os.fsencode(tmp_path / "sub") + b"/" + name, "wb"):  # noqa: PTH123 - a name that no str spells
        pass
    with pytest.raises(UnsafeSourceError) as raised:
        scan_dir(tmp_path)
    assert raised.value.subject == str(tmp_path / "sub")
    assert raised.value.hint == "rename it"


@pytest.mark.parametrize("kind", ["absent", "file", "link"])
def test_root_that_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    if kind == "file":
        root.touch()
    elif kind == "link":
        (tmp_path / "real").mkdir()
        root.symlink_to("real")
    with pytest.raises(UnsafeSourceError) as raised:
        scan_dir(root)
    assert raised.value.subject == str(root)


def test_directories_that_nest_too_deep_are_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * DEPTH_MAX)
    deep.mkdir(parents=True)
    scan_dir(tmp_path)
    (deep / "d").mkdir()
    with pytest.raises(UnsafeSourceError, match="deeper"):
        scan_dir(tmp_path)


def test_path_that_no_restore_could_make_is_refused(tmp_path: Path) -> None:
    # Each directory is made in the one above: the whole path is longer than the system takes at once.
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("d" * 250, dir_fd=descriptor)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    with pytest.raises(UnsafeSourceError, match="longer than 3,840 bytes"):
        scan_dir(tmp_path)


@pytest.mark.parametrize("seconds", [2**33, 2**34, -(2**34)])
def test_time_that_does_not_fit_63_bits_is_refused_by_name(tmp_path: Path, seconds: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    os.utime(path, (0, seconds))
    if path.stat().st_mtime != seconds:
        pytest.skip("this file system has no such times")
    if seconds == 2**33:
        assert scan_dir(tmp_path).files[0].metadata.modified_at_ns == seconds * 10**9
        return
    with pytest.raises(UnsafeSourceError, match="f: has a time that cannot be kept"):
        scan_dir(tmp_path)


def test_too_few_open_files_are_reported_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnsafeSourceError) as source:
        scan_dir(tmp_path)
    with pytest.raises(TargetError) as target, target_errors(tmp_path):
        refuse()
    assert "ulimit -n" in source.value.hint
    assert "ulimit -n" in target.value.hint


def test_scan_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "odd").symlink_to("x")
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(UnsafeSourceError):
            scan_dir(tmp_path)
    assert open_descriptors() == before


def _touch(root: Path) -> None:
    os.utime(root / "sub" / "f", ns=(1, 1))


def _rewrite_in_place(root: Path) -> None:
    status = (root / "sub" / "f").stat()
    (root / "sub" / "f").write_bytes(b"F")
    os.utime(root / "sub" / "f", ns=(status.st_atime_ns, status.st_mtime_ns))


def _exchange(root: Path) -> None:
    (root / "new").write_bytes(b"f")
    (root / "new").rename(root / "sub" / "f")


@pytest.mark.parametrize(
    "change, where",
    [
        (lambda root: None, None),
        (_touch, ("sub", "f")),
        (_rewrite_in_place, ("sub", "f")),
        (_exchange, ("sub", "f")),
        (lambda root: (root / "sub" / "f").chmod(0o600), ("sub", "f")),
        (lambda root: (root / "a").unlink(), ("a",)),
        (lambda root: (root / "b").touch(), ("b",)),
        (lambda root: (root / "sub" / "g").touch(), ("sub", "g")),
        (lambda root: (root / "sub2").mkdir(), ("sub2",)),
        (lambda root: (root / "empty").rmdir(), ("empty",)),
    ],
)
def test_every_change_of_a_directory_is_found(
    tmp_path: Path, change: Callable[[Path], None], where: tuple[str, ...] | None
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "sub" / "f").write_bytes(b"f")
    before = scan_dir(tmp_path)
    change(tmp_path)
    after = scan_dir(tmp_path)
    assert find_difference(before, after) == where
    # Anyone who knows how it was sees the same.
    assert scan_dir(tmp_path, before) == after


def test_what_has_not_changed_is_what_is_known_of_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("same", "other", "sub/same"):
        (tmp_path / name).write_bytes(b"1")
    before = scan_dir(tmp_path)
    (tmp_path / "other").write_bytes(b"22")
    after = scan_dir(tmp_path, before)
    other, same = after.files
    assert same is before.files[1]
    assert other != before.files[0]
    assert after.sub_dirs[0].files[0] is before.sub_dirs[0].files[0]


def _unlink_twin(root: Path) -> None:
    (root / "twin").unlink()


def _exchange_twin(root: Path) -> None:
    """The number of links is what it was."""
    os.link(root / "twin", root / "third")
    (root / "twin").unlink()


def _touch_shared(root: Path) -> None:
    os.utime(root / "twin", ns=(1, 1))


def _chmod_shared(root: Path) -> None:
    (root / "twin").chmod(0o604)


def _grow_shared(root: Path) -> None:
    with (root / "twin").open("ab") as file:
        file.write(b"more")
    os.utime(root / "twin", ns=(5, 5))


@pytest.mark.parametrize(
    "name, immutable",
    [
        ("000007.sst", True),
        ("OPTIONS-000012", True),
        ("000009.blob", True),
        ("OPTIONS-000012.dbtmp", False),
        ("000007.sst.x", False),
        ("MANIFEST-000004", False),
        ("000008.log", False),
    ],
)
@pytest.mark.parametrize(
    "change, only_links",
    [
        (_unlink_twin, True),
        (_exchange_twin, True),
        (lambda root: os.link(root / "twin", root / "third"), True),
        (_touch_shared, False),
        (_chmod_shared, False),
        (_grow_shared, False),
    ],
    ids=["unlinked", "link exchanged", "linked", "touched", "other mode", "grown"],
)
def test_only_what_a_checkpoint_shares_may_be_linked_and_unlinked_elsewhere(
    tmp_path: Path, change: Callable[[Path], None], only_links: bool, name: str, immutable: bool
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / name).write_bytes(b"f")
    os.utime(directory / name, ns=(5, 5))
    os.link(directory / name, tmp_path / "twin")
    before = scan_dir(directory)
    time.sleep(0.05)  # the clock of the file system moves in ticks
    change(tmp_path)
    held_still = only_links and immutable
    assert find_difference(before, scan_dir(directory)) == (None if held_still else (name,))
    # A restore that wants to reuse the file still goes by the ctime (I2).
    assert not is_untouched(before.files[0], (directory / name).stat())


class TestFileSystemNow:
    """The clock by which a file is old is that of its own file system (I1)."""

    def test_it_has_reached_what_a_new_file_says(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"f")
        time.sleep(0.05)
        (tmp_path / "new").write_bytes(b"f")
        now_ns = file_system_now_ns(tmp_path, scan_dir(tmp_path))
        assert now_ns >= (tmp_path / "new").stat().st_ctime_ns
        assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "new"]

    def test_a_file_from_before_the_clock_was_set_back_says_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"f")
        scanned = scan_dir(tmp_path)
        (file,) = scanned.files
        ahead = msgspec.structs.replace(file, changed_at_ns=2**62)
        assert file_system_now_ns(tmp_path, msgspec.structs.replace(scanned, files=(ahead,))) < 2**62

    def test_where_nothing_can_be_made_it_is_the_newest_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("f", "new"):
            (tmp_path / name).write_bytes(b"f")
            os.utime(tmp_path / name, ns=(0, 2**62))
            time.sleep(0.05)
        scanned = scan_dir(tmp_path)
        assert file_system_now_ns(tmp_path / "gone", scanned) == (tmp_path / "new").stat().st_ctime_ns
        monkeypatch.delattr("os.O_TMPFILE")
        assert file_system_now_ns(tmp_path, scanned) == (tmp_path / "new").stat().st_ctime_ns
        assert file_system_now_ns(tmp_path, LocalDir(name="")) == 0

    def test_of_two_file_systems_the_one_that_is_behind_counts(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"f")
        scanned = scan_dir(tmp_path)
        (file,) = scanned.files
        mounted = msgspec.structs.replace(file, name="g", device=file.device + 1, changed_at_ns=7)
        both = msgspec.structs.replace(scanned, files=(file, mounted))
        assert file_system_now_ns(tmp_path, both) == 7


def test_other_file_in_the_place_of_an_sst_is_found(tmp_path: Path) -> None:
    sst = tmp_path / "000007.sst"
    sst.write_bytes(b"f")
    status = sst.stat()
    before = scan_dir(tmp_path)
    (tmp_path / "new").write_bytes(b"g")
    os.utime(tmp_path / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "new").rename(sst)
    assert find_difference(before, scan_dir(tmp_path)) == ("000007.sst",)
