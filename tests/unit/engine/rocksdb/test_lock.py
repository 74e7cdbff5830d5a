"""A directory that a real RocksDB has open is refused, and looking never unlocks it (design 0002, I3)."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rocksdict

from engine.errors import UnsafeSourceError
from engine.local.scan import scan_dir
from engine.rocksdb import lock as rocksdb_lock
from engine.rocksdb.lock import check_not_held

WAYS = ["table", "child"]

_OPEN = """
import rocksdict, sys
db = rocksdict.Rdict(sys.argv[1], rocksdict.Options(raw_mode=True))
print("open", flush=True)
sys.stdin.read()
"""


def opened(path: Path) -> rocksdict.Rdict:
    return rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the kernel's table, or as in a container and on other systems, where a child process asks."""
    if request.param == "child":
        monkeypatch.setattr(rocksdb_lock, "_LOCK_TABLE", Path("/nonexistent"))
    elif not sys.platform.startswith("linux"):
        pytest.skip("only Linux has such a table")
    return str(request.param)


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Path]:
    """A store that another process has open."""
    store = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield store
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def test_store_open_in_this_process_is_refused_and_stays_locked(tmp_path: Path, way: str) -> None:
    store = tmp_path / "store"
    db = opened(store)
    for _ in range(2):
        with pytest.raises(UnsafeSourceError, match="has this directory open") as raised:
            check_not_held(store)
        assert raised.value.subject == str(store / "LOCK")
    # Had this process opened LOCK to look, its lock would be gone and another process could open the store now.
    command = [sys.executable, "-c", _OPEN, str(store)]
    other = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert other.returncode != 0
    assert b"lock" in other.stderr.lower()
    db.close()
    check_not_held(store)


def test_store_open_in_another_process_is_refused(other_process: Path, way: str) -> None:
    with pytest.raises(UnsafeSourceError, match="is held by process"):
        check_not_held(other_process)


def test_rocksdb_checkpoint_of_an_open_store_is_not_held(tmp_path: Path, way: str) -> None:
    db = opened(tmp_path / "store")
    db[b"k"] = b"v"
    rocksdict.Checkpoint(db).create_checkpoint(str(tmp_path / "checkpoint"))
    check_not_held(tmp_path / "checkpoint", scan_dir(tmp_path / "checkpoint"))
    db.close()


def test_lock_of_a_directory_below_counts_if_there_is_a_scan(tmp_path: Path, way: str) -> None:
    (tmp_path / "task" / "a").mkdir(parents=True)
    db = opened(tmp_path / "task" / "store")
    check_not_held(tmp_path)
    with pytest.raises(UnsafeSourceError) as raised:
        check_not_held(tmp_path, scan_dir(tmp_path))
    assert raised.value.subject == str(tmp_path / "task" / "store" / "LOCK")
    db.close()
    check_not_held(tmp_path, scan_dir(tmp_path))


@pytest.mark.parametrize("kind", ["absent", "directory", "link", "no such directory"])
def test_where_no_file_is_called_lock_nothing_is_held(tmp_path: Path, way: str, kind: str) -> None:
    if kind == "directory":
        (tmp_path / "LOCK").mkdir()
    elif kind == "link":
        (tmp_path / "LOCK").symlink_to("/etc/passwd")
    check_not_held(tmp_path / "nowhere" if kind == "no such directory" else tmp_path)


@pytest.mark.parametrize(
    "line, held",
    [
        ("1: POSIX  ADVISORY  WRITE 77 {device}:{inode} 0 EOF", True),
        ("12: POSIX  ADVISORY  READ  77 {device}:{inode} 0 EOF", True),
        ("3: OFDLCK ADVISORY  WRITE -1 {device}:{inode} 0 EOF", True),
        ("1: -> POSIX  ADVISORY  WRITE 77 {device}:{inode} 0 EOF", False),
        ("1: FLOCK  ADVISORY  WRITE 77 {device}:{inode} 0 EOF", False),
        ("1: POSIX  ADVISORY  WRITE 77 {device}:{inode}1 0 EOF", False),
        ("garbage", False),
        ("", False),
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has such a table")
def test_lines_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, held: bool) -> None:
    lock = tmp_path / "store" / "LOCK"
    lock.parent.mkdir()
    lock.touch()
    status = lock.stat()
    device = f"{status.st_dev >> 8 & 0xFFF:02x}:{status.st_dev & 0xFF:02x}"
    (tmp_path / "locks").write_text(line.format(device=device, inode=status.st_ino) + "\n")
    monkeypatch.setattr(rocksdb_lock, "_LOCK_TABLE", tmp_path / "locks")
    if held:
        with pytest.raises(UnsafeSourceError):
            check_not_held(lock.parent)
    else:
        check_not_held(lock.parent)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has such a table")
def test_suspicion_of_a_stacked_file_system_is_settled_by_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "store" / "LOCK"
    lock.parent.mkdir()
    lock.touch()
    table = tmp_path / "locks"
    table.write_text(f"1: POSIX  ADVISORY  WRITE 77 ff:fe:{lock.stat().st_ino} 0 EOF\n")
    monkeypatch.setattr(rocksdb_lock, "_LOCK_TABLE", table)
    asked: list[list[Path]] = []

    def ask(locks: list[Path]) -> list[tuple[Path, str]]:
        asked.append(locks)
        return []

    monkeypatch.setattr(rocksdb_lock, "_held_by_child", ask)
    check_not_held(lock.parent)
    assert asked == [[lock]]


def test_what_cannot_be_found_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "LOCK").touch()
    monkeypatch.setattr(rocksdb_lock, "_LOCK_TABLE", Path("/nonexistent"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(UnsafeSourceError, match="cannot find out"):
        check_not_held(tmp_path)
