"""Local files, off the event loop: the only module that imports aiofiles. Writing and syncing, which block.

Opening and reading raise the plain `OSError`, which `store_error` translates for a directory store. A cancelled call
waits for its thread (`run_blocking`): no file is written, renamed or closed behind the caller's back.
"""

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import aiofiles
from typing_extensions import override

from blobstore.base import Buffer, Sink, TooLargeError
from blobstore.concurrency import run_blocking, shielded
from blobstore.errors import (
    AccessDeniedError,
    BlobCorruptError,
    CapabilityMissingError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)

CHUNK_BYTES: Final = 1 << 20
TOO_MANY_OPEN: Final = frozenset({errno.EMFILE, errno.ENFILE})
TOO_MANY_OPEN_HINT: Final = (
    "allow this process more open files (`ulimit -n`), or let it do less at once (`--in-flight-max`)"
)

# What fsync of a directory answers where the file system has no such thing.
_CANNOT_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP})
# The permissions of what `tempfile` makes.
_PRIVATE: Final = 0o600

# Descriptor of an open directory, or what opens one for as long as it is needed.
Directory = int | contextlib.AbstractContextManager[int] | None


def open_to_read(path: Path | str, *, dir_fd: Directory = None) -> contextlib.AbstractAsyncContextManager[int]:
    """Open a regular file, of a path relative to `dir_fd`; ELOOP for a link, EISDIR or EINVAL for anything else."""
    return _opened(path, "rb", os.O_NONBLOCK, dir_fd)


def create_to_write(
    path: Path | str, *, dir_fd: Directory = None, mode: int = 0o666
) -> contextlib.AbstractAsyncContextManager[int]:
    """Make a new file, closed at the end, of permissions `mode` less the umask; its name is the caller's to remove."""
    return _opened(path, "xb", 0, dir_fd, mode)


async def read_chunks(path: Path | str, size_bytes: int = sys.maxsize) -> AsyncGenerator[bytes, None]:
    """Open a file, as `open_to_read`; yield its first bytes, fewer if it ends sooner, in non-empty chunks."""
    at = 0
    async with open_to_read(path) as descriptor:
        while at < size_bytes:
            chunk = await run_blocking(os.pread, descriptor, min(CHUNK_BYTES, size_bytes - at), at)
            if not chunk:
                return
            at += len(chunk)
            yield chunk


class FileSink(Sink):
    """Writes bytes to an open file, from `start` on, up to a size that they must not exceed."""

    def __init__(self, descriptor: int, size_bytes_max: int | None = None, *, start: int = 0) -> None:
        self._descriptor, self._start = descriptor, start
        self._size_bytes_max = size_bytes_max
        self.size_bytes = 0

    @override
    def write(self, data: Buffer) -> None:
        if self._size_bytes_max is not None and self.size_bytes + len(data) > self._size_bytes_max:
            raise TooLargeError
        write_all_at(self._descriptor, self._start + self.size_bytes, data)
        self.size_bytes += len(data)


def write_all_at(descriptor: int, offset: int, data: Buffer) -> None:
    """Write all of the data from `offset` on. Blocks."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def sync_dir(directory: Path | int) -> None:
    """Make the names in a directory durable. Blocks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if isinstance(directory, Path) else directory
    try:
        flush(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        if isinstance(directory, Path):
            os.close(descriptor)


def flush(descriptor: int) -> None:
    """Make what was written durable. Blocks."""
    if sys.platform == "darwin":
        # There, fsync leaves the bytes in the cache of the drive; and what knows no better way has only fsync.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def make_durable(directory: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents unless they are there, so that they survive a loss of power. Blocks.

    Its permissions are `mode`, less those of the umask; its parents have what the umask leaves.
    """
    for level in (*reversed(directory.parents), directory):
        if not level.is_dir():
            level.mkdir(mode if level == directory else 0o777, exist_ok=True)
            sync_dir(level.parent)


def place_of(directory: Path) -> tuple[str, ...]:
    """Return where a directory is, as `BlobStore.place`; links in a circle make no error. Blocks."""
    return "file", *Path(os.path.realpath(directory)).parts


def check_regular(path: Path) -> None:
    """Refuse, by `OSError`, a file that would take the place of a device, a pipe or what the system made. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode) or path.parent == Path("/dev"):
            raise OSError(errno.EINVAL, "is not a regular file, and a file would take its place", str(path))


def write_whole(path: Path, data: bytes, *, mode: int = _PRIVATE, is_durable: bool = False) -> None:
    """Write a file, replacing an older one at once. Its temporary name is hidden, and ends otherwise.

    Its permissions are `mode`, whatever the umask is; if durable, its bytes survive a loss of power once it has its
    name. OSError: it cannot be written, or is none that `check_regular` lets pass; an older one is as it was.
    """
    check_regular(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as out:  # noqa: PTH123  (a descriptor, not a path)
            if mode != _PRIVATE:  # as it was made: some file systems have no modes
                os.fchmod(handle, mode)
            out.write(data)
            if is_durable:
                out.flush()
                flush(handle)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@contextlib.asynccontextmanager
async def _opened(
    path: Path | str, mode: Literal["rb", "xb"], flags: int, dir_fd: Directory, permissions: int = 0
) -> AsyncIterator[int]:
    def opener(name: str, mode_flags: int) -> int:
        opened = contextlib.nullcontext(dir_fd) if dir_fd is None or isinstance(dir_fd, int) else dir_fd
        with opened as directory:
            descriptor = os.open(name, mode_flags | flags | os.O_NOFOLLOW | os.O_CLOEXEC, permissions, dir_fd=directory)
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind):
            return descriptor
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code), str(path))

    # Opening runs to its end even if it is cancelled; whatever it opened is then found here and closed.
    made: list[Any] = []

    async def open_it() -> None:
        made.append(await aiofiles.open(path, mode, buffering=0, opener=opener))

    try:
        await shielded(open_it())
        yield made[0].fileno()
    except BaseException:
        for file in made:
            # What went wrong first is what the caller has to know.
            with contextlib.suppress(OSError):
                await shielded(file.close())
        raise
    else:
        await shielded(made[0].close())


@contextlib.contextmanager
def noting_failures(failures: dict[str, str], keys: Sequence[str]) -> Iterator[None]:
    """Delete within: a failure is noted with its reason, and raises nothing."""
    try:
        yield
    except OSError as error:
        failures.update({key: str(store_error(error, "delete", key)) for key in keys})


@contextlib.contextmanager
def store_errors(operation: str, key: str) -> Iterator[None]:
    """Translate errors of the file system that are raised within."""
    try:
        yield
    except OSError as error:
        raise store_error(error, operation, key) from error


def store_error(error: OSError, operation: str, key: str) -> StoreError:
    """Return what an error of the file system means to the caller: the only place that decides it."""
    # EIO, ESTALE, ETIMEDOUT, ...; ENOENT on a write: the store was moved or cleaned under it.
    kind, hint = _MEANINGS.get(error.errno or 0, (StoreUnavailableError, ""))
    # A name alone is one of a directory that was open.
    path = error.filename if str(error.filename).startswith("/") else key
    return kind(error.strerror or str(error), operation=operation, key=key, hint=hint.format(path=path))


_MEANINGS: Final[dict[int, tuple[type[StoreError], str]]] = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), (AccessDeniedError, "give this user access to {path}")),
    errno.EROFS: (AccessDeniedError, "the file system of {path} is mounted read-only"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (StoreFullError, "")),
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
        (InvalidRequestError, "one key cannot be a directory of another, nor longer than the file system allows"),
    ),
    errno.ELOOP: (
        BlobCorruptError,
        "there is a symbolic link at {path}: none is followed below the root; put what it leads to there",
    ),
    errno.EINVAL: (BlobCorruptError, "there is something else than a regular file at {path}"),
    # The first two are the same number on Linux, and two on macOS.
    **dict.fromkeys(
        (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK),
        (CapabilityMissingError, "a directory as blob store needs hard links, and all of it on one file system"),
    ),
    **dict.fromkeys(TOO_MANY_OPEN, (StoreUnavailableError, TOO_MANY_OPEN_HINT)),
}
