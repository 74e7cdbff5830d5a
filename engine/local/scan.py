"""Look at local files: what is in a directory, what a stat says of a file, and whether both have held still.

A source that changes while it is backed up is refused (design 0002, I3). Scanning blocks and is made for a thread, a
whole directory per call: a hop per file costs more than the file.
"""

import errno
import fcntl
import functools
import grp
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from blobstore.local.files import TOO_MANY_OPEN, TOO_MANY_OPEN_HINT
from engine.errors import SourceChangedError, UnsafeSourceError
from index.errors import UnsafeNameError
from index.snapshot.dir_diff import LocalDir, LocalFile
from index.snapshot.invariants import DEPTH_MAX, TIME_NS_MIN
from index.snapshot.keys import check_file_name
from index.snapshot.model import SIZE_BYTES_MAX, FileMetadata, FilePath
from index.spark.names import parse_state_name

_name = attrgetter("name")

# O_NONBLOCK: opening a FIFO that took a file's name must not wait for its writer.
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DIR_FLAGS: Final = READ_FLAGS | os.O_DIRECTORY
NEW_FILE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# What this machine or this user lacks: an error with one of these says nothing of the file that was to be read.
LACKING: Final = TOO_MANY_OPEN | {
    errno.EACCES,
    errno.EPERM,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
}

# A name of 255 bytes still fits behind such a path into what the system takes (PATH_MAX).
PATH_BYTES_MAX: Final = 4096 - 256

_PERMISSIONS: Final = 0o7777
# What RocksDB hard-links into a checkpoint and writes only once.
_SHARED_NAME: Final = re.compile(r".*\.sst|[0-9]+\.blob|OPTIONS-[0-9]+", re.DOTALL)


def scan_dir(path: Path, known: LocalDir | None = None) -> LocalDir:
    """Scan a directory and all below it: names and stats, no contents. Symbolic links are never followed.

    Files and sub-directories are sorted by name; the root's name is empty. The files of an earlier scan, `known`, are
    in the result themselves where their stat is the same, to the ctime: quicker than to describe them again.

    Raises:
        UnsafeSourceError: It is not a directory; or something in it is neither a file nor a directory, has a name or a
            time that cannot be kept, cannot be read, vanished meanwhile, or nests too deep.
    """
    with refusing(path):
        descriptor = os.open(path, DIR_FLAGS)
    return _scan(descriptor, path, known or LocalDir(name=""), 0)


class SourceDir(NamedTuple):
    """A directory that is held open, so that all files that are read come from the one that was scanned."""

    path: Path
    descriptor: int


@contextmanager
def opened(path: str | Path, flags: int = READ_FLAGS, mode: int = 0o666, *, dir_fd: int | None = None) -> Iterator[int]:
    """Hold a file or directory open for a block; arguments and errors are those of `os.open`."""
    descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def hold(name: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file or directory, and lock it (flock) until the descriptor is closed; -1 if it is gone by then.

    BlockingIOError: another process holds it; OSError: it cannot be opened.
    """
    with ExitStack() as stack:
        descriptor = os.open(name, flags, 0o600, dir_fd=dir_fd)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError as error:  # as SMB says it
            raise BlockingIOError(*error.args) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=dir_fd, follow_symlinks=False)):
                stack.pop_all()
                return descriptor
    return -1


@contextmanager
def opened_dir(path: Path) -> Iterator[SourceDir]:
    """Hold a directory open for a block. UnsafeSourceError: it is not a directory, or cannot be read."""
    with refusing(path):
        descriptor = os.open(path, DIR_FLAGS)
    try:
        yield SourceDir(path, descriptor)
    finally:
        os.close(descriptor)


def find_overlap(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return how one place lies to another: "above", "below" or "at" it; empty if they are apart, or one is unknown."""
    if not (ours and theirs and all(one == other for one, other in zip(ours, theirs, strict=False))):
        return ""
    return "above" if len(ours) < len(theirs) else "below" if len(ours) > len(theirs) else "at"


def all_files(local: LocalDir) -> list[LocalFile]:
    """Return the files of a directory and of everything below it."""
    return [*local.files, *(file for sub in local.sub_dirs for file in all_files(sub))]


def file_system_now_ns(directory: Path, scanned: LocalDir) -> int:
    """Return a time that the clock of the directory's file system has reached, which may be another machine's clock.

    It is the ctime of a file without a name; where the file system makes none, and of others that are mounted below
    the directory, the newest of the scan, which a clock that was set back may not have reached again. Of several file
    systems the earliest counts.
    """
    files = all_files(scanned)
    newest_ns = {
        device: max([file.changed_at_ns for file in files if file.device == device])
        for device in {file.device for file in files}
    }
    with suppress(OSError, AttributeError):  # read-only, or a system that has no such files
        with opened(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600) as probe:
            status = os.fstat(probe)
        newest_ns[status.st_dev] = status.st_ctime_ns
    return min(newest_ns.values(), default=0)


def find_difference(before: LocalDir, after: LocalDir) -> FilePath | None:
    """Return the path of the first file that changed, appeared or vanished, or of a directory that did (I3)."""
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
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            message = f"its path is longer than {PATH_BYTES_MAX:,} bytes: what is in it could not be restored"
            raise UnsafeSourceError(message, operation="backup", subject=str(path))
        with refusing(path), os.scandir(descriptor) as entries:
            here = os.fstat(descriptor).st_mode
            for entry in entries:
                name = entry.name
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    raise unreadable_error(path / name, error) from error
                mode = status.st_mode
                if stat.S_ISREG(mode):
                    file = known_files.get(name)
                    if file is None or not is_untouched(file, status):
                        _check_name(path, name)
                        if not TIME_NS_MIN <= status.st_mtime_ns <= SIZE_BYTES_MAX:
                            message, hint = "has a time that cannot be kept", "set it: touch"
                            raise UnsafeSourceError(message, operation="backup", subject=str(path / name), hint=hint)
                        file = local_file(name, status)
                    files.append(file)
                elif stat.S_ISDIR(mode):
                    _check_name(path, name)
                    below = path / name
                    with refusing(below):
                        opened = os.open(name, DIR_FLAGS, dir_fd=descriptor)
                    sub_dirs.append(_scan(opened, below, known_dirs.get(name) or LocalDir(name=name), depth + 1))
                else:
                    raise special_error(path / name, mode)
    finally:
        os.close(descriptor)
    files.sort(key=_name)
    sub_dirs.sort(key=_name)
    return LocalDir(name=known.name, files=tuple(files), sub_dirs=tuple(sub_dirs), mode=stat.S_IMODE(here))


def _check_name(path: Path, name: str) -> None:
    try:
        check_file_name(name)
    except UnsafeNameError as error:
        message = f"has an entry {name!r}: {error}"
        raise UnsafeSourceError(message, operation="backup", subject=str(path), hint="rename it") from error


def local_file(name: str, status: os.stat_result) -> LocalFile:
    """Describe a file by its stat, without its time of creation, which Linux does not give through `stat`."""
    return LocalFile(
        name=name,
        metadata=FileMetadata(
            status.st_size,
            status.st_mode & _PERMISSIONS,
            status.st_mtime_ns,
            0,
            _name_of(status.st_uid, pwd.getpwuid),
            _name_of(status.st_gid, grp.getgrgid),
        ),
        device=status.st_dev,
        inode=status.st_ino,
        changed_at_ns=status.st_ctime_ns,
    )


def is_untouched(file: LocalFile, status: os.stat_result) -> bool:
    """Return whether a stat is still the scan's, to the ctime: checked before a restore reuses a file (I2)."""
    return (
        status.st_ctime_ns == file.changed_at_ns
        and status.st_mtime_ns == file.metadata.modified_at_ns
        and status.st_size == file.metadata.size_bytes
        and status.st_ino == file.inode
        and status.st_dev == file.device
    )


def is_unchanged(before: LocalFile, after: LocalFile) -> bool:
    """Return whether two looks at a name saw the same file, content and metadata (design 0002, I3)."""
    return (
        before.name == after.name
        and before.device == after.device
        and before.inode == after.inode
        and before.metadata == after.metadata
        # A checkpoint shares SSTs, blob files and OPTIONS with the live store, whose next compaction or checkpoint
        # unlinks or links them: that moves the ctime of the inode and no byte, and RocksDB never writes to them once
        # they have their names. The number of links would not show more: one that comes and one that goes cancel out.
        # Of any other file the ctime decides.
        and (before.changed_at_ns == after.changed_at_ns or _SHARED_NAME.fullmatch(before.name) is not None)
    )


def is_written_once(name: str) -> bool:
    """Return whether RocksDB or Spark never writes to a file again once it has this name (design 0002, I1)."""
    return _SHARED_NAME.fullmatch(name) is not None or parse_state_name(name) is not None


def is_still(file: LocalFile, status: os.stat_result) -> bool:
    """As `is_unchanged`, with a stat in place of the second look: where that is the scan's, nothing is built of it."""
    return is_untouched(file, status) or is_unchanged(file, local_file(file.name, status))


def changed_error(path: Path | str) -> SourceChangedError:
    """Make the error for a source that did not hold still (I3)."""
    return SourceChangedError("changed while it was backed up", operation="backup", subject=str(path))


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn what the system says of a source into the `UnsafeSourceError` that names it."""
    try:
        yield
    except OSError as error:
        raise unreadable_error(path, error) from error


def special_error(path: Path, mode: int) -> UnsafeSourceError:
    """Make the error for an entry that is neither a file nor a directory."""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a FIFO"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return UnsafeSourceError(f"is {kind}: only files and directories are kept", operation="backup", subject=str(path))


def unreadable_error(path: Path, error: OSError) -> UnsafeSourceError:
    """Make the error for a part of the source that the system does not let us read."""
    if error.errno in {errno.ENOENT, errno.ESTALE}:
        return UnsafeSourceError("is not there, or vanished meanwhile", operation="backup", subject=str(path))
    if error.errno in {errno.ELOOP, errno.ENOTDIR}:
        message, hint = "is a symbolic link, or no directory", "give its real path"
    else:
        message = f"cannot be read: {error.strerror or error}"
        hint = "see that this user may read it and that the disk is well"
    if error.errno in TOO_MANY_OPEN:
        hint = TOO_MANY_OPEN_HINT
    return UnsafeSourceError(message, operation="backup", subject=str(path), hint=hint)


@functools.lru_cache(maxsize=1024)
def _name_of(number: int, look_up: Callable[[int], pwd.struct_passwd | grp.struct_group]) -> str:
    try:
        return look_up(number)[0]
    except KeyError:
        return str(number)


def hold_dir(directory: Path) -> int:
    """Take a directory for this process; -1 if another one has it, or it is gone."""
    with suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
        return hold(directory, DIR_FLAGS)
    return -1
