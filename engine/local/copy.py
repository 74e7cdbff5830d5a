"""Copy local files to new inodes, as cheaply as the file system can; write small files whole or not at all. Blocks."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import msgspec

from blobstore.local.files import flush, read_chunks
from blobstore.sink import Buffer
from engine.local.scan import READ_FLAGS

# How much one call copies: so much at most is copied after the other side of the copy went away.
_COPY_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024

# What copy_file_range(2) answers between file systems that do not know each other, or on a kernel without it.
_CANNOT_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})


class FileBody(msgspec.Struct):
    """A `Body`: a local file that nobody changes."""

    path: Path
    # When it was looked at; the store refuses a file that has become shorter.
    size_bytes: int

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(read_chunks(self.path, size_bytes=self.size_bytes)) as chunks:
            async for chunk in chunks:
                yield chunk


def copy_file(source: Path, target: Path) -> int:
    """Copy a regular file to a new name; return its size in bytes.

    The blocks are shared where the file system can (reflink), but never the inode: what is written to one of the two
    files never shows in the other.

    Raises:
        FileExistsError: The target is there.
        OSError: As the file system says; ELOOP for a symbolic link, EISDIR or EINVAL for what is not a regular file.
    """
    incoming = os.open(source, READ_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(incoming).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(source))
        outgoing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            return _copy(incoming, outgoing)
        finally:
            os.close(outgoing)
    finally:
        os.close(incoming)


def _copy(incoming: int, outgoing: int) -> int:
    copied = 0
    if hasattr(os, "copy_file_range"):
        try:
            while count := os.copy_file_range(incoming, outgoing, _COPY_BYTES, copied, copied):
                copied += count
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
    # What is left: everything where the call is not known, and nothing, for the price of one read, where it is. Some
    # kernels copy nothing from a file system that makes up its files, and report success.
    while chunk := os.pread(incoming, _READ_BYTES, copied):
        write_at(outgoing, copied, chunk)
        copied += len(chunk)
    return copied


def write_at(descriptor: int, offset: int, data: Buffer) -> None:
    """Write all of the data from `offset` on."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, is_durable: bool = False) -> None:
    """Write a file, replacing an older one at once. Its temporary name is hidden, and ends otherwise.

    Args:
        path: Where; its directory is there.
        data: All of it.
        mode: Its permissions, whatever the umask is.
        is_durable: Whether its bytes survive a loss of power once it has its name.

    Raises:
        OSError: It cannot be written; an older one is as it was.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as out:  # noqa: PTH123  (a descriptor, not a path)
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
