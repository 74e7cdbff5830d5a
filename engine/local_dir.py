"""Looking at a local directory: what stands in it, and whether it has held still (design 0002, I3).

Everything here blocks and is made for a thread, a whole directory per call: a hop per file costs more than the file.
"""

import os
import re
import stat
from operator import attrgetter
from pathlib import Path

from engine.errors import UnsafeSourceError
from engine.local_stat import DIR_FLAGS, FilePath, is_unchanged, local_file, refusing, special_error, unreadable_error
from index.errors import UnsafeNameError
from index.invariants import DEPTH_MAX
from index.keys import check_file_name
from index.local_tree import LocalDir, LocalFile

# Names that `check_file_name` accepts, told by one look; every other one is asked about.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_name = attrgetter("name")


def scan_dir(path: Path) -> LocalDir:
    """What stands in a directory and below: names and stats, no contents. Symbolic links are never followed.

    Returns:
        Files and sub-directories, each sorted by name; the root's name is empty.

    Raises:
        UnsafeSourceError: It is no directory; or something in it is neither a file nor a directory, has a name that
            cannot be kept, cannot be read, vanished meanwhile, or nests too deep.
    """
    with refusing(path):
        descriptor = os.open(path, DIR_FLAGS)
    return _scan(descriptor, "", path, 0)


def all_files(local: LocalDir) -> list[LocalFile]:
    """The files of a directory and of everything below it."""
    files = list(local.files)
    for sub in local.sub_dirs:
        files += all_files(sub)
    return files


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


def _scan(descriptor: int, name: str, path: Path, depth: int) -> LocalDir:
    """Scan an open directory, and close it."""
    files: list[LocalFile] = []
    sub_dirs: list[LocalDir] = []
    try:
        if depth > DEPTH_MAX:
            raise UnsafeSourceError(f"nests deeper than {DEPTH_MAX} directories", operation="backup", subject=str(path))
        with refusing(path), os.scandir(descriptor) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    raise unreadable_error(path / entry.name, error) from error
                mode = status.st_mode
                if stat.S_ISREG(mode):
                    files.append(local_file(entry.name, status))
                elif stat.S_ISDIR(mode):
                    below = path / entry.name
                    with refusing(below):
                        opened = os.open(entry.name, DIR_FLAGS, dir_fd=descriptor)
                    sub_dirs.append(_scan(opened, entry.name, below, depth + 1))
                else:
                    raise special_error(path / entry.name, mode)
    finally:
        os.close(descriptor)
    for file in files:
        _check_name(path, file.name)
    for sub in sub_dirs:
        _check_name(path, sub.name)
    files.sort(key=_name)
    sub_dirs.sort(key=_name)
    return LocalDir(name=name, files=tuple(files), sub_dirs=tuple(sub_dirs))


def _check_name(path: Path, name: str) -> None:
    if _PLAIN_NAME.fullmatch(name) is None:
        try:
            check_file_name(name)
        except UnsafeNameError as error:
            raise UnsafeSourceError(
                f"has an entry {name!r}: {error}", operation="backup", subject=str(path), hint="rename it"
            ) from error
