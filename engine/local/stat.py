"""What a stat says of a local file, and the errors of a source that does not hold still (design 0002, I3)."""

import errno
import functools
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blobstore.local.errors import TOO_MANY_OPEN, TOO_MANY_OPEN_HINT
from engine.errors import SourceChangedError, UnsafeSourceError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileMetadata
from index.spark.names import parse_state_name

# O_NONBLOCK: opening a FIFO that took a file's name must not wait for its writer.
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DIR_FLAGS: Final = READ_FLAGS | os.O_DIRECTORY

# Names from the root of a store down to a file.
FilePath = tuple[str, ...]

# What this machine or this user lacks: an error with one of these says nothing of the file that was to be read.
LACKING: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
    }
)

_PERMISSIONS: Final = 0o7777
# What RocksDB hard-links into a checkpoint and writes only once.
_SHARED_NAME: Final = re.compile(r".*\.sst|[0-9]+\.blob|OPTIONS-[0-9]+", re.DOTALL)


def local_file(name: str, status: os.stat_result) -> LocalFile:
    """A file as a scan tells it. Time of creation is left out: Linux tells it to nobody who asks through `stat`."""
    return LocalFile(
        name=name,
        metadata=FileMetadata(
            status.st_size,
            status.st_mode & _PERMISSIONS,
            status.st_mtime_ns,
            0,
            _user_name(status.st_uid),
            _group_name(status.st_gid),
        ),
        device=status.st_dev,
        inode=status.st_ino,
        changed_at_ns=status.st_ctime_ns,
    )


def is_untouched(file: LocalFile, status: os.stat_result) -> bool:
    """Whether a stat is still the scan's, to the ctime: what a restore asks before it reuses a file (I2)."""
    return (
        status.st_ctime_ns == file.changed_at_ns
        and status.st_mtime_ns == file.metadata.modified_at_ns
        and status.st_size == file.metadata.size_bytes
        and status.st_ino == file.inode
        and status.st_dev == file.device
    )


def is_unchanged(before: LocalFile, after: LocalFile) -> bool:
    """Whether two looks at one name saw the same file with the same content and metadata (design 0002, I3)."""
    return (
        before.name == after.name
        and before.device == after.device
        and before.inode == after.inode
        and before.metadata == after.metadata
        # A checkpoint shares SSTs, blob files and OPTIONS with the live store, whose next compaction or checkpoint
        # unlinks or links them: that moves the ctime of the inode and no byte, and RocksDB never writes to them once
        # they have their names. The number of links would not tell more: one that comes and one that goes cancel out.
        # Of any other file the ctime decides.
        and (before.changed_at_ns == after.changed_at_ns or _SHARED_NAME.fullmatch(before.name) is not None)
    )


def is_written_once(name: str) -> bool:
    """Tell whether RocksDB or Spark never writes to a file again once it has this name (design 0002, I1)."""
    return _SHARED_NAME.fullmatch(name) is not None or parse_state_name(name) is not None


def is_still(file: LocalFile, status: os.stat_result) -> bool:
    """As `is_unchanged`, with a stat in place of the second look: where that is the scan's, nothing is built of it."""
    return is_untouched(file, status) or is_unchanged(file, local_file(file.name, status))


def check_unchanged(path: Path, file: LocalFile, status: os.stat_result) -> None:
    """Refuse a file whose stat is no longer the scan's.

    Raises:
        UnsafeSourceError: It changed, or another file has taken its name (I3).
    """
    if not is_still(file, status):
        raise changed_error(path)


def changed_error(path: Path | str) -> SourceChangedError:
    """The error for a source that did not hold still (I3)."""
    return SourceChangedError("changed while it was backed up", operation="backup", subject=str(path))


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn what the system says of a source into the error that names it.

    Raises:
        UnsafeSourceError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise unreadable_error(path, error) from error


def special_error(path: Path, mode: int) -> UnsafeSourceError:
    """The error for an entry that is neither a file nor a directory."""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a FIFO"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return UnsafeSourceError(f"is {kind}: only files and directories are kept", operation="backup", subject=str(path))


def unreadable_error(path: Path, error: OSError) -> UnsafeSourceError:
    """The error for a part of the source that the system does not let us see."""
    if error.errno in {errno.ENOENT, errno.ESTALE}:
        return UnsafeSourceError("is not there, or vanished meanwhile", operation="backup", subject=str(path))
    if error.errno in {errno.ELOOP, errno.ENOTDIR}:
        return UnsafeSourceError(
            "is a symbolic link, or no directory", operation="backup", subject=str(path), hint="give its real path"
        )
    hint = "see that this user may read it and that the disk is well"
    if error.errno in TOO_MANY_OPEN:
        hint = TOO_MANY_OPEN_HINT
    return UnsafeSourceError(
        f"cannot be read: {error.strerror or error}", operation="backup", subject=str(path), hint=hint
    )


@functools.lru_cache(maxsize=1024)
def _user_name(uid: int) -> str:
    """The name of a user, or the number of one who has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.lru_cache(maxsize=1024)
def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
