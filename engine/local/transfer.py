"""Moving bytes: from file to file, and between this machine and a store, with a bound on what is in memory at once.

Files are copied to new inodes, as cheaply as the file system can, and small ones written whole or not at all.
"""

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, Body, Created, Lost, Unknown
from blobstore.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidRequestError,
    StoreError,
    StoreUnavailableError,
)
from blobstore.local.files import flush, read_chunks
from blobstore.sink import Buffer, Sink
from engine.errors import DamagedError, LeaseExpiredError
from engine.local.hashing import ContentHasher
from engine.local.scan import READ_FLAGS
from index.snapshot.model import BlobKey


class Fetch(Protocol):
    """Fetches once; whether the bytes were right. `fresh`: by a connection of its own."""

    def __call__(self, *, fresh: bool) -> Awaitable[bool]: ...


async def fetch_right(fetch: Fetch, damaged: Callable[[str], DamagedError]) -> None:
    """Fetch what has to have certain bytes; once more if they are wrong: a fault on the way is not yet one of the blob.

    Raises what `damaged` makes of a reason if the blob is missing, or was wrong both times.
    """
    cause: StoreError | None = None
    for fresh in (False, True):
        cause = None
        try:
            if await fetch(fresh=fresh):
                return
        except BlobNotFoundError as error:
            raise damaged("its blob is missing") from error
        except (BlobCorruptError, InvalidRequestError) as error:
            cause = error
    raise damaged("its bytes are not the ones that were backed up") from cause


class ByteBudget:
    """A bound on the bytes that all transfers together hold. Who asks first is served first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait until a number of bytes are free, and hold them for the block; more than there are count as all."""
        size_bytes = min(size_bytes, self._bytes_max)
        if self._waiting or self._held_bytes + size_bytes > self._bytes_max:
            await self._wait(size_bytes)
        else:
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            self._held_bytes -= size_bytes
            self._serve()

    async def _wait(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._held_bytes -= size_bytes
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if self._held_bytes + size_bytes > self._bytes_max:
                    return
                self._held_bytes += size_bytes
                turn.set_result(None)
            self._waiting.popleft()


class PartsBody:
    """A `Body`: several byte strings as one blob, without a second copy of them all."""

    def __init__(self, parts: Sequence[bytes], chunk_bytes: int) -> None:
        self._parts = parts
        self._chunk_bytes = chunk_bytes
        self.size_bytes = sum(map(len, parts))

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts one after the other; small ones are joined, none is larger than a pack takes."""
        chunk: list[bytes] = []
        chunk_bytes = 0
        for part in self._parts:
            if chunk and chunk_bytes + len(part) > self._chunk_bytes:
                yield b"".join(chunk)
                chunk.clear()
                chunk_bytes = 0
            chunk.append(part)
            chunk_bytes += len(part)
        if chunk_bytes:
            yield b"".join(chunk)


async def put_new(store: BlobStore, key: BlobKey, body: Body, *, ttl_ms: int) -> Created:
    """Put a blob under a key that was minted for it (design 0002, K2); return when the store created it.

    Raises:
        StoreUnavailableError: The store did not say whether it is there.
        DamagedError: Another blob is there, which nobody but us could have put.
        LeaseExpiredError: It was there, and is gone.
        StoreError: As the store says.
    """
    match await store.put_if_absent(key, body, ttl_ms=ttl_ms):
        case Created() as created:
            return created
        case Unknown(reason=reason):
            raise StoreUnavailableError(f"no answer: {reason}", operation="put_if_absent", key=key)
        case Lost():
            # The key is random and ours alone: what is there came from an earlier sending of this very request. Its
            # size is proof enough: a body keeps the hash of its first reading, and refuses another that differs.
            found = await store.stat(key)
            if found is None:
                message = "an upload was collected before it was answered"
                raise LeaseExpiredError(message, operation="backup", subject=key)
            if found.size_bytes != body.size_bytes:
                message = f"a new upload of {body.size_bytes} bytes was refused, and {found.size_bytes} bytes are there"
                hint = "somebody else writes to this repository's keys"
                raise DamagedError(message, operation="backup", subject=key, hint=hint)
            return Created(created_at_ms=found.created_at_ms)


class HashingSink(Sink):
    """Hashes bytes and keeps none of them."""

    def __init__(self, hasher: ContentHasher) -> None:
        self._hasher = hasher

    @override
    def write(self, data: Buffer) -> None:
        self._hasher.update(data)


# How much one call copies: so much at most is copied after the other side of the copy went away.
_COPY_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024

# What copy_file_range(2) answers between file systems that do not know each other, or on a kernel without it.
_CANNOT_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})
# The permissions of what `tempfile` makes.
_PRIVATE: Final = 0o600


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
    """Copy a regular file to a new name, which is not there yet; return its size in bytes.

    The blocks are shared where the file system can (reflink), but never the inode: what is written to one of the two
    files never shows in the other. OSError: ELOOP for a symbolic link, EISDIR or EINVAL for another kind of file.
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


def write_whole(path: Path, data: bytes, *, mode: int = _PRIVATE, is_durable: bool = False) -> None:
    """Write a file, replacing an older one at once. Its temporary name is hidden, and ends otherwise.

    Its permissions are `mode`, whatever the umask is; if durable, its bytes survive a loss of power once it has its
    name. OSError: it cannot be written; an older one is as it was.
    """
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
