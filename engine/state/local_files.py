"""SSTs and archived WALs as they stand in a RocksDB directory of this machine, and what else is there. Blocks.

```
<directory>/000012.sst           an SST
<directory>/archive/000008.log   an archived WAL
<directory>/<anything else>      goes into the zip, or is no part of a snapshot
```
"""

import os
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from engine.errors import UnsafeSourceError
from engine.local.hashing import ContentHasher
from engine.local.identify import READ_BYTES, read_sst
from engine.local.scan import READ_FLAGS
from index.errors import UnsafeNameError
from index.spark.names import LOGS, SSTS, check_log_name, check_sst_name
from index.spark.sharing import FileStamp, LocalStateFile

# Where RocksDB keeps WALs that it does not write any more.
ARCHIVE: Final = "archive"


def local_path(directory: Path, local_name: str) -> Path:
    """Where a file of this checked local name stands in a RocksDB directory."""
    return directory / local_name if local_name.endswith(".sst") else directory / ARCHIVE / local_name


def shared_path(stored_name: str) -> str:
    """Where a file of this checked stored name stands in the directory of a state store."""
    return f"{SSTS if stored_name.endswith('.sst') else LOGS}/{stored_name}"


def list_shared(directory: Path) -> tuple[Path, ...]:
    """SSTs and archived WALs of a RocksDB directory, sorted by name; none if there is no directory.

    Raises:
        UnsafeSourceError: The directory cannot be read, or one of them has a name that RocksDB does not give.
    """
    try:
        found = [path for path in _entries(directory) if path.name.endswith(".sst")]
        found += [path for path in _entries(directory / ARCHIVE) if path.name.endswith(".log")]
        for path in found:
            (check_sst_name if path.name.endswith(".sst") else check_log_name)(path.name)
    except OSError as error:
        raise _unreadable(directory, error) from error
    except UnsafeNameError as error:
        raise UnsafeSourceError(
            f"holds a file that RocksDB did not name: {error}", operation="snapshot", subject=str(directory)
        ) from error
    return tuple(sorted(found, key=lambda path: path.name))


def look_at(path: Path) -> LocalStateFile:
    """Name, size, identity and stamp of an SST or an archived WAL: a read of its end, or of all of it if that has none.

    Raises:
        UnsafeSourceError: It is no regular file, or cannot be read.
    """
    try:
        descriptor = os.open(path, READ_FLAGS)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeSourceError("is not a regular file", operation="identify", subject=str(path))
            identity = read_sst(descriptor, status.st_size) if path.name.endswith(".sst") else None
            return LocalStateFile(
                path.name,
                status.st_size,
                identity or _hash(descriptor),
                # From before it was read: a change in between shows.
                FileStamp(status.st_ino, status.st_mtime_ns),
                is_linked=status.st_nlink > 1,
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error


def is_untouched(path: Path, file: LocalStateFile) -> bool:
    """Whether a file is still the one that was looked at, by its size and stamp.

    Raises:
        OSError: It is not there.
    """
    status = path.lstat()
    return status.st_size == file.size_bytes and FileStamp(status.st_ino, status.st_mtime_ns) == file.stamp


def look_at_all(paths: Iterable[Path]) -> tuple[LocalStateFile, ...]:
    """`look_at` one after the other."""
    return tuple(look_at(path) for path in paths)


def remove_all_but(directory: Path, kept: Collection[str]) -> None:
    """Make a directory that holds these SSTs and archived WALs, and nothing else.

    Args:
        directory: Made if it is not there.
        kept: Local names; those that are not there stay away.

    Raises:
        OSError: Something cannot be removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in _entries(directory):
        if path.name == ARCHIVE and _is_directory(path):
            for archived in _entries(path):
                if archived.name not in kept or not archived.name.endswith(".log") or _is_directory(archived):
                    _remove(archived)
            if not _entries(path):
                path.rmdir()
        elif path.name not in kept or not path.name.endswith(".sst") or _is_directory(path):
            _remove(path)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        # RocksDB's last thread may remove files of a closed directory at the same time.
        path.unlink(missing_ok=True)


def _hash(descriptor: int) -> bytes:
    hasher = ContentHasher()
    while chunk := os.pread(descriptor, READ_BYTES, hasher.size_bytes):
        hasher.update(chunk)
    return hasher.blake3


def _unreadable(path: Path, error: OSError) -> UnsafeSourceError:
    return UnsafeSourceError(error.strerror or str(error), operation="identify", subject=str(path))
