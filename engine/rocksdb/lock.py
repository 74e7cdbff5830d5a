"""Whether a RocksDB has a directory open (design 0002, I3).

RocksDB holds a POSIX lock on a file LOCK for as long as it has the directory open. Such locks belong to a process and
are dropped when that process closes *any* descriptor of the file. So this process never opens a LOCK: that would
silently unlock a RocksDB that it has open itself. It reads the kernel's table, or lets a child process ask.
"""

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from engine.errors import UnsafeSourceError
from index.snapshot.dir_diff import LocalDir

LOCK_NAME: Final = "LOCK"
CHILD_TIMEOUT_S: Final = 10

_LOCK_TABLE: Final = Path("/proc/locks")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
# The number of the first PID namespace is fixed in the kernel (PROC_PID_INIT_INO). Only in it does /proc/locks show
# the locks of every process; in a container it leaves out those of the others.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC

# 1: POSIX  ADVISORY  WRITE 5433 08:01:7864448 0 EOF; a waiter has "->" after the number and holds nothing.
_TABLE_LINE: Final = re.compile(
    r"^\d+: (?:POSIX|OFDLCK) +\S+ +\S+ +(?P<process>\S+) (?P<device>[0-9a-f]+:[0-9a-f]+):(?P<inode>\d+) ", re.MULTILINE
)

# F_GETLK asks which process prevents a write lock, and takes none. A process of another namespace is given as 0.
_ASK_FOR_HOLDER: Final = """
import fcntl, os, struct, sys
bsd = sys.platform == "darwin" or "bsd" in sys.platform
layout = "@qqihh" if bsd else "@hhqqi4x"
fields = (0, 0, 0, fcntl.F_WRLCK, 0) if bsd else (fcntl.F_WRLCK, 0, 0, 0, 0)
for path in sys.argv[1:]:
    answer = struct.unpack(layout, fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_GETLK, struct.pack(layout, *fields)))
    kind, process = (answer[3], answer[2]) if bsd else (answer[0], answer[4])
    print("nobody" if kind == fcntl.F_UNLCK else process)
"""


def check_not_held(path: Path, local: LocalDir | None = None) -> None:
    """Refuse a directory that a RocksDB has open, in this process or in another one, or where that cannot be found out.

    With a scan of it, the LOCK of every directory below is checked too.

    Raises:
        UnsafeSourceError: A LOCK is or may be held.
    """
    _check(path / LOCK_NAME, *(_nested_locks(path, local) if local is not None else ()))


def check_none_held_below(path: Path) -> None:
    """Refuse as `check_not_held` a directory that may hold anything: every LOCK in it and below is checked.

    Symbolic links are not followed: what they point at is not part of the directory. An `OSError` says that one cannot
    be read.
    """
    _check(*_locks_below(path))


def _check(*locks: Path) -> None:
    there: list[tuple[Path, os.stat_result]] = []
    for lock in locks:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = lock.lstat()
            if stat.S_ISREG(status.st_mode):
                there.append((lock, status))
    if not there:
        return
    held, hidden = _held_by_table(there)
    if not held and hidden:
        held = _held_by_child([lock for lock, _ in there])
    for lock, process in held:
        reason = f"is held by process {process}: a RocksDB has this directory open"
        hint = "close the database, or back up a RocksDB checkpoint of it, or let `backup --live` take a copy"
        raise UnsafeSourceError(reason, operation="check", subject=str(lock), hint=hint)


def _nested_locks(path: Path, local: LocalDir) -> Iterator[Path]:
    for sub in local.sub_dirs:
        if any(file.name == LOCK_NAME for file in sub.files):
            yield path / sub.name / LOCK_NAME
        yield from _nested_locks(path / sub.name, sub)


def _locks_below(path: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        # What goes meanwhile is not held.
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for directory, _, names in os.walk(path, onerror=fail):
        if LOCK_NAME in names:
            yield Path(directory, LOCK_NAME)


def _held_by_table(locks: Iterable[tuple[Path, os.stat_result]]) -> tuple[list[tuple[Path, str]], bool]:
    """Read /proc/locks: the held ones with their process, and whether others may be held unseen.

    A stacked file system (overlayfs, a btrfs subvolume) shows another device number in the table than in a stat; then
    an equal inode number is a suspicion that the child settles.
    """
    try:
        table = _LOCK_TABLE.read_text(encoding="ascii", errors="replace")
        hidden = _PID_NAMESPACE.stat().st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return [], True
    holders = {(m["device"], int(m["inode"])): m["process"] for m in _TABLE_LINE.finditer(table)}
    inodes = {inode for _, inode in holders}
    held: list[tuple[Path, str]] = []
    for lock, status in locks:
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        process = holders.get((device, status.st_ino))
        if process is not None:
            held.append((lock, process))
        elif status.st_ino in inodes:
            hidden = True
    return held, hidden


def _held_by_child(locks: list[Path]) -> list[tuple[Path, str]]:
    command = [sys.executable or "python3", "-I", "-S", "-c", _ASK_FOR_HOLDER, *map(str, locks)]
    try:
        child = subprocess.run(  # noqa: S603  (our own interpreter and program)
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = "cannot find out whether a RocksDB holds it"
        raise UnsafeSourceError(reason, operation="check", subject=str(locks[0])) from error
    return [(lock, process) for lock, process in zip(locks, child.stdout.split(), strict=True) if process != "nobody"]
