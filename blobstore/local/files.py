"""Streams of local files, off the event loop: the only module that imports aiofiles.

Everything here raises the plain `OSError`: what it means is for the caller to say. A cancelled call waits for its
thread (`run_blocking`): no file is written, renamed or closed behind the caller's back.
"""

import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, Literal

import aiofiles
from typing_extensions import override

from blobstore.base import Body
from blobstore.concurrency import run_blocking, shielded
from blobstore.sink import Buffer, Sink, TooLargeError

CHUNK_BYTES: Final = 1 << 20

# What fsync of a directory answers where the file system has no such thing.
_CANNOT_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP})

Directory = int | AbstractContextManager[int] | None


class LocalFile:
    """An open regular file, read and written at positions; several tasks may do so at once.

    Made by `open_to_read`, `create_to_write` and `open_unnamed`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    async def stat(self) -> os.stat_result:
        """Return what the file system says of the open file, whatever became of its name."""
        return await run_blocking(os.fstat, self.descriptor)

    async def read_chunks(
        self, *, start: int = 0, size_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from `start`, `size_bytes` of them or up to the end, in non-empty chunks.

        A file that ends sooner yields less: the caller knows what it expects.
        """
        at, left = start, size_bytes
        while left is None or left > 0:
            wanted = chunk_bytes if left is None else min(chunk_bytes, left)
            chunk = await run_blocking(os.pread, self.descriptor, wanted, at)
            if not chunk:
                return
            at += len(chunk)
            left = None if left is None else left - len(chunk)
            yield chunk

    async def write_at(self, offset: int, data: bytes) -> None:
        """Write all of the data from `offset` on."""
        await run_blocking(_write_all, self.descriptor, offset, data)

    async def sync(self) -> None:
        """Make content and size durable; the name is made so by `sync_dir` of its directory."""
        await run_blocking(flush, self.descriptor)


@asynccontextmanager
async def open_to_read(path: Path | str, *, dir_fd: Directory = None) -> AsyncIterator[LocalFile]:
    """Open a regular file.

    Args:
        path: Its path, relative to `dir_fd` if that is given.
        dir_fd: Descriptor of an open directory, or what opens one for as long as it is needed.

    Raises:
        IsADirectoryError: It is a directory.
        OSError: With ELOOP for a symbolic link, EINVAL for anything else that is not a regular file.
    """
    async with _opened(path, "rb", os.O_NONBLOCK, dir_fd) as file:
        yield file


@asynccontextmanager
async def create_to_write(path: Path | str, *, dir_fd: Directory = None, mode: int = 0o666) -> AsyncIterator[LocalFile]:
    """Make a new file, closed at the end; the name stays and is the caller's to remove.

    Args:
        path: Its path, relative to `dir_fd` if that is given.
        dir_fd: As for `open_to_read`.
        mode: Permissions, less those of the umask.

    Raises:
        FileExistsError: Something of this name is there.
    """
    async with _opened(path, "xb", 0, dir_fd, mode) as file:
        yield file


@asynccontextmanager
async def open_unnamed(directory: Path | None = None) -> AsyncIterator[LocalFile]:
    """Open a scratch file without a name: it is gone with this process, however that ends."""
    made: list[Any] = []
    try:
        await run_blocking(lambda: made.append(tempfile.TemporaryFile(dir=directory, buffering=0)))  # noqa: SIM115
        yield LocalFile(made[0].fileno())
    finally:
        for file in made:
            await run_blocking(file.close)


async def read_chunks(
    path: Path | str,
    *,
    start: int = 0,
    size_bytes: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    dir_fd: int | None = None,
) -> AsyncGenerator[bytes, None]:
    """Open a file for `LocalFile.read_chunks`; raises as `open_to_read`."""
    async with open_to_read(path, dir_fd=dir_fd) as file:
        wanted = file.read_chunks(start=start, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
        async with aclosing(wanted) as chunks:
            async for chunk in chunks:
                yield chunk


class FileSink(Sink):
    """Writes bytes to an open file, from its start.

    Args:
        descriptor: Of the file.
        size_bytes_max: Size that the file must not exceed; None for no limit.

    Attributes:
        size_bytes: Bytes written.
    """

    def __init__(self, descriptor: int, size_bytes_max: int | None = None) -> None:
        self._descriptor = descriptor
        self._size_bytes_max = size_bytes_max
        self.size_bytes = 0

    @override
    def write(self, data: Buffer) -> None:
        if self._size_bytes_max is not None and self.size_bytes + len(data) > self._size_bytes_max:
            raise TooLargeError
        _write_all(self._descriptor, self.size_bytes, data)
        self.size_bytes += len(data)


def sync_dir(directory: Path | int) -> None:
    """Make the names in a directory durable. Blocks: for functions that already run in a thread.

    Args:
        directory: Its path or an open descriptor.
    """
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
    """Make what was written durable. Blocks: for functions that already run in a thread."""
    if sys.platform == "darwin":
        # There, fsync leaves the bytes in the cache of the drive; and what knows no better way has only fsync.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def make_durable(directory: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents unless they are there, so that they survive a loss of power. Blocks.

    Args:
        directory: Its path.
        mode: Permissions of the directory, less those of the umask; its parents have what the umask leaves.
    """
    for level in (*reversed(directory.parents), directory):
        if not level.is_dir():
            level.mkdir(mode if level == directory else 0o777, exist_ok=True)
            sync_dir(level.parent)


class SpooledBody(Body):
    """Bytes written piece by piece and put later: in memory up to a bound, then in an unnamed file.

    Args:
        memory_bytes_max: From this size on, everything is in the file.
        directory: Where the file is made; None is the system's place for temporary files.
    """

    def __init__(self, *, memory_bytes_max: int, directory: Path | None = None) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._directory = directory
        self._memory = bytearray()
        self._resources = AsyncExitStack()
        self._file: LocalFile | None = None
        self._size_bytes = 0

    @property
    @override
    def size_bytes(self) -> int:
        return self._size_bytes

    async def write(self, data: bytes) -> None:
        """Append bytes; one call at a time."""
        if self._file is None and self._size_bytes + len(data) > self._memory_bytes_max:
            self._file = await self._resources.enter_async_context(open_unnamed(self._directory))
            await self._file.write_at(0, bytes(self._memory))
            self._memory.clear()
        if self._file is None:
            self._memory += data
        else:
            await self._file.write_at(self._size_bytes, data)
        self._size_bytes += len(data)

    @override
    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        if self._file is None:
            for at in range(0, self._size_bytes, CHUNK_BYTES):
                yield bytes(self._memory[at : at + CHUNK_BYTES])
        else:
            async with aclosing(self._file.read_chunks(size_bytes=self._size_bytes)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def close(self) -> None:
        """Free memory and file."""
        self._memory.clear()
        await self._resources.aclose()


@asynccontextmanager
async def _opened(
    path: Path | str, mode: Literal["rb", "xb"], flags: int, dir_fd: Directory, permissions: int = 0
) -> AsyncIterator[LocalFile]:
    def opener(name: str, mode_flags: int) -> int:
        opened = nullcontext(dir_fd) if dir_fd is None or isinstance(dir_fd, int) else dir_fd
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
        yield LocalFile(made[0].fileno())
    except BaseException:
        for file in made:
            # What went wrong first is what the caller has to know.
            with suppress(OSError):
                await shielded(file.close())
        raise
    else:
        await shielded(made[0].close())


def _write_all(descriptor: int, offset: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]
