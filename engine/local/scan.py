"""Looking at a local directory: what stands in it, and whether it has held still (design 0002, I3).

Everything here blocks and is made for a thread, a whole directory per call: a hop per file costs more than the file.
"""

import contextlib
import os
import re
import stat
from operator import attrgetter
from pathlib import Path

from engine.errors import UnsafeSourceError
from engine.local.stat import (
    DIR_FLAGS,
    FilePath,
    is_unchanged,
    is_untouched,
    local_file,
    refusing,
    special_error,
    unreadable_error,
)
from index.errors import UnsafeNameError
from index.snapshot.dir_diff import LocalDir, LocalFile
from index.snapshot.invariants import DEPTH_MAX
from index.snapshot.keys import check_file_name

# Names that `check_file_name` accepts, told by one look; every other one is asked about.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_name = attrgetter("name")


def scan_dir(path: Path, known: LocalDir | None = None) -> LocalDir:
    """What stands in a directory and below: names and stats, no contents. Symbolic links are never followed.

    Args:
        path: The directory.
        known: An earlier scan of it. Its files stand in the result themselves where their stat is still the same, to
            the ctime, which is quicker than to describe them anew.

    Returns:
        Files and sub-directories, each sorted by name; the root's name is empty.

    Raises:
        UnsafeSourceError: It is no directory; or something in it is neither a file nor a directory, has a name that
            cannot be kept, cannot be read, vanished meanwhile, or nests too deep.
    """
    with refusing(path):
        descriptor = os.open(path, DIR_FLAGS)
    return _scan(descriptor, path, known or LocalDir(name=""), 0)


def all_files(local: LocalDir) -> list[LocalFile]:
    """The files of a directory and of everything below it."""
    files = list(local.files)
    for sub in local.sub_dirs:
        files += all_files(sub)
    return files


def file_system_now_ns(directory: Path, scanned: LocalDir) -> int:
    """Return a time that the clock of the directory's file system has reached, which may be another machine's clock.

    It is the newest ctime of the scan and of a file without a name, where the file system makes one. With other file
    systems mounted below the directory it is the earliest of theirs.
    """
    newest_ns: dict[int, int] = {}
    for file in all_files(scanned):
        newest_ns[file.device] = max(file.changed_at_ns, newest_ns.get(file.device, 0))
    with contextlib.suppress(OSError, AttributeError):  # read-only, or a system that has no such files
        probe = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(probe)
        finally:
            os.close(probe)
        newest_ns[status.st_dev] = max(status.st_ctime_ns, newest_ns.get(status.st_dev, 0))
    return min(newest_ns.values(), default=0)


def find_difference(before: LocalDir, after: LocalDir) -> FilePath | None:
    """Compare two scans of one directory (I3).

    Returns:
        The path of the first file that changed, appeared or vanished, or of a directory that did; None if none.
    """
    if before.files != after.files:
        old = {file.name: file for file in before.files}
        new = {file.name: file for file in after.files}
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new or not is_unchanged(old[name], new[name]):
                return (name,)
    old_dirs = {sub.name: sub for sub in before.sub_dirs}
    new_dirs = {sub.name: sub for sub in after.sub_dirs}
    for name in sorted(old_dirs.keys() | new_dirs.keys()):
        if name not in old_dirs or name not in new_dirs:
            return (name,)
        below = find_difference(old_dirs[name], new_dirs[name])
        if below is not None:
            return (name, *below)
    return None


def _scan(descriptor: int, path: Path, known: LocalDir, depth: int) -> LocalDir:
    """Scan an open directory, which has the name of the known one, and close it."""
    known_files = {file.name: file for file in known.files}
    known_dirs = {sub.name: sub for sub in known.sub_dirs}
    files: list[LocalFile] = []
    sub_dirs: list[LocalDir] = []
    try:
        if depth > DEPTH_MAX:
            raise UnsafeSourceError(f"nests deeper than {DEPTH_MAX} directories", operation="backup", subject=str(path))
        with refusing(path), os.scandir(descriptor) as entries:
            here = os.fstat(descriptor).st_mode
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    raise unreadable_error(path / entry.name, error) from error
                mode = status.st_mode
                if stat.S_ISREG(mode):
                    name = entry.name
                    file = known_files.get(name)
                    if file is None or not is_untouched(file, status):
                        _check_name(path, name)
                        file = local_file(name, status)
                    files.append(file)
                elif stat.S_ISDIR(mode):
                    name = entry.name
                    _check_name(path, name)
                    below = path / name
                    with refusing(below):
                        opened = os.open(name, DIR_FLAGS, dir_fd=descriptor)
                    sub_dirs.append(_scan(opened, below, known_dirs.get(name) or LocalDir(name=name), depth + 1))
                else:
                    raise special_error(path / entry.name, mode)
    finally:
        os.close(descriptor)
    files.sort(key=_name)
    sub_dirs.sort(key=_name)
    return LocalDir(name=known.name, files=tuple(files), sub_dirs=tuple(sub_dirs), mode=stat.S_IMODE(here))


def _check_name(path: Path, name: str) -> None:
    if _PLAIN_NAME.fullmatch(name) is None:
        try:
            check_file_name(name)
        except UnsafeNameError as error:
            raise UnsafeSourceError(
                f"has an entry {name!r}: {error}", operation="backup", subject=str(path), hint="rename it"
            ) from error
