"""Atomic named files over any store: the interface of Spark's `CheckpointFileManager` (SPARK-23966).

Spark's managers rename a temporary file, or check whether the file is there and then write. On an object store
neither is atomic, and one of them returns as if all were well when it lost the race or could not upload. Here a file
is published by one request that is atomic by itself, and everything but success is an error.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from tempfile import SpooledTemporaryFile
from typing import Final

import msgspec
from typing_extensions import override

from blobstore import base, errors
from blobstore.concurrency import run_blocking
from blobstore.local.files import CHUNK_BYTES

# An empty blob of this name is in every directory that `mkdirs` made. No file may have it.
DIRECTORY_MARKER: Final = "~directory"

# Sorts after every character that a key can have.
_AFTER_ALL: Final = "\x7f"
# What one writer holds in memory before it moves on to a scratch file.
_MEMORY_BYTES_MAX: Final = 8 * 1024 * 1024


class FileStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory as `list` shows it."""

    # Relative to the root of the `CheckpointFiles`.
    path: str
    is_directory: bool
    # Of a directory, these two are 0.
    size_bytes: int = 0
    modified_at_ms: int = 0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class CheckpointWriter(base.Body):
    """Takes the content of a file that does not exist before all of it is there. Made by `create_atomic`."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=_MEMORY_BYTES_MAX)  # noqa: SIM115 - `close` does
        self._size_bytes = 0
        self.is_cancelled = False

    @property
    @override
    def size_bytes(self) -> int:
        return self._size_bytes

    async def write(self, data: bytes) -> None:
        """Append bytes; one call at a time."""
        await run_blocking(self._write, data)
        self._size_bytes += len(data)

    def _write(self, data: bytes) -> None:
        # A write that was cancelled has left bytes behind what counts.
        self._file.seek(self._size_bytes)
        self._file.write(data)

    def cancel(self) -> None:
        """Publish nothing at the end of the block. There is no way back."""
        self.is_cancelled = True

    @override
    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        for at in range(0, self._size_bytes, CHUNK_BYTES):
            yield await run_blocking(self._read, at)

    def _read(self, at: int) -> bytes:
        self._file.seek(at)
        return self._file.read(CHUNK_BYTES)

    async def close(self) -> None:
        # It may flush what nobody wants any more, onto a full disk.
        with suppress(OSError):
            await run_blocking(self._file.close)


class CheckpointFiles:
    """Files and directories below a prefix of a store.

    Directories are what the keys of files imply, and what `mkdirs` marks: a directory exists while there is a file or
    a marker below it. Paths are relative, with components as keys have them; "" is the root.

    Args:
        prefix: The key of the root; "" for the whole store.
        is_local: What the attribute says: only who opens a store knows whether others can reach it.
    """

    def __init__(self, store: base.BlobStore, prefix: str = "", *, is_local: bool = False) -> None:
        if prefix:
            base.check_key(prefix, "open")
        self._store = store
        self._root = f"{prefix}/" if prefix else ""
        self.is_local = is_local

    def place(self) -> tuple[str, ...]:
        place = self._store.place()
        return (*place, *filter(None, self._root.split("/"))) if place else ()

    @asynccontextmanager
    async def create_atomic(self, path: str, *, overwrite: bool) -> AsyncIterator[CheckpointWriter]:
        """Write a file that appears whole when the block ends, or not at all; errors as `publish`.

        A block that raises, is cancelled, or calls `cancel` publishes nothing. Directories on the way need not exist.
        """
        self._key(path, "create_atomic")  # a path that is none is refused before anything is written
        writer = CheckpointWriter()
        try:
            yield writer
            if not writer.is_cancelled:
                await self.publish(path, writer, overwrite=overwrite)
        finally:
            await writer.close()

    async def publish(self, path: str, body: base.Body, *, overwrite: bool) -> None:
        """Write a file, whole or not at all, by one conditional request: on a directory store by link or rename.

        Raises:
            CheckpointFileExistsError: Without `overwrite`: a file is there, and is unchanged.
            CheckpointUnknownError: The store never said whether it took the file.
            StoreError: It did not.
        """
        key = self._key(path, "publish")
        if overwrite:
            await self._store.put(key, body)
            return
        match await self._store.put_if_absent(key, body):
            case base.Created():
                return
            case base.Lost():
                raise errors.CheckpointFileExistsError("the file is there already", operation="publish", key=key)
            case base.Unknown(reason=reason):
                raise errors.CheckpointUnknownError(reason, operation="publish", key=key)

    async def read_into(self, path: str, sink: base.Sink) -> None:
        """Give the content of a file to a sink; raises `BlobNotFoundError` if there is none."""
        await self._store.read_into(self._key(path, "open"), sink)

    async def list(self, path: str = "") -> tuple[FileStatus, ...]:
        """List files and directories directly in a directory, sorted by name.

        Costs a request for each directory in it and one for each 1,000 files.

        Raises:
            BlobNotFoundError: There is no such directory.
        """
        prefix = self._prefix(path, "list")
        found: list[FileStatus] = []
        exists = False
        start_after = ""
        while True:
            page = await base.list_checked_page(self._store, prefix, start_after=start_after)
            for blob in page.blobs:
                exists = True
                if blob.key <= start_after:
                    continue  # below a directory that is known by now
                name, slash, _ = blob.key[len(prefix) :].partition("/")
                if slash:
                    found.append(FileStatus(path=(prefix + name)[len(self._root) :], is_directory=True))
                    start_after = f"{prefix}{name}/{_AFTER_ALL}"
                    continue
                start_after = blob.key
                if name != DIRECTORY_MARKER:
                    found.append(self._file(blob))
            if not page.truncated:
                break
        if not exists:
            raise errors.BlobNotFoundError("there is no such directory", operation="list", key=prefix)
        return tuple(sorted(found, key=lambda status: status.path))

    async def walk(self, path: str = "") -> AsyncGenerator[FileStatus, None]:
        """Yield every file in a directory and below, in the order of their keys; none if there is no such directory.

        Costs a request for each 1,000 files.
        """
        async with aclosing(base.list_blobs(self._store, self._prefix(path, "walk"))) as blobs:
            async for blob in blobs:
                if blob.key.rpartition("/")[2] != DIRECTORY_MARKER:
                    yield self._file(blob)

    def _file(self, blob: base.BlobInfo) -> FileStatus:
        path, modified_at_ms = blob.key[len(self._root) :], blob.created_at_ms
        return FileStatus(path=path, is_directory=False, size_bytes=blob.size_bytes, modified_at_ms=modified_at_ms)

    async def exists(self, path: str) -> bool:
        if path and await self._store.stat(self._key(path, "exists")) is not None:
            return True
        return bool((await self._store.list_page(self._prefix(path, "exists"), limit=1)).blobs)

    async def mkdirs(self, path: str) -> None:
        """Make a directory and all above it; those that are there stay as they are.

        A store has no directories, and a key no empty component. So each gets a marker, an empty blob of the name
        `DIRECTORY_MARKER`, that `list` does not show and `delete` removes with the directory.

        Raises:
            CheckpointFileExistsError: A file is where a directory is to be.
            CheckpointUnknownError: The store never said whether it took a marker; do it again.
        """
        prefix = self._prefix(path, "mkdirs")
        # Markers are put from the top down, so the last one implies all.
        if await self._store.stat(prefix + DIRECTORY_MARKER) is not None:
            return
        names = path.split("/") if path else []
        for depth in range(len(names) + 1):
            directory = self._root + "".join(f"{name}/" for name in names[:depth])
            file = directory.removesuffix("/")
            if depth and await self._store.stat(file) is not None:
                raise errors.CheckpointFileExistsError("a file is there", operation="mkdirs", key=file)
            outcome = await self._store.put_if_absent(directory + DIRECTORY_MARKER, base.BytesBody(b""))
            if isinstance(outcome, base.Unknown):
                raise errors.CheckpointUnknownError(outcome.reason, operation="mkdirs", key=directory)

    async def delete(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; no error if there is none.

        Not atomic for a directory: what is put into it meanwhile may stay.

        Raises:
            InvalidRequestError: The path is empty: nobody deletes the root by a slip.
            StoreUnavailableError: Something was not deleted; do it again.
        """
        batch = [self._key(path, "delete")]
        async for blob in base.list_blobs(self._store, self._prefix(path, "delete")):
            if len(batch) == base.DELETE_BATCH_MAX:
                await self._delete(batch)
                batch.clear()
            batch.append(blob.key)
        await self._delete(batch)

    async def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files, not directories, up to 1,000 with one request, in this order; no error for one that is gone.

        Raises:
            StoreUnavailableError: Something was not deleted, and nothing of a later batch was; do it again.
        """
        await self._delete([self._key(path, "delete") for path in paths])

    async def _delete(self, keys: Sequence[str]) -> None:
        for at in range(0, len(keys), base.DELETE_BATCH_MAX):
            batch = keys[at : at + base.DELETE_BATCH_MAX]
            if failures := await self._store.delete(batch):
                message = f"{len(failures)} of {len(batch)} were not deleted, the first because: {failures[0].reason}"
                raise errors.StoreUnavailableError(message, operation="delete", key=failures[0].key)

    async def abort_unfinished(self, *, older_than_ms: int) -> None:
        """Remove what writers that died have left unfinished; what cannot be removed is for the next call."""
        now_ms = await self._store.now_ms()
        puts = await self._store.list_unfinished(self._root)
        await self._store.abort_unfinished([put for put in puts if put.begun_at_ms + older_than_ms <= now_ms])

    async def close(self) -> None:
        await self._store.close()

    def _key(self, path: str, operation: str) -> str:
        if not path or DIRECTORY_MARKER in path.split("/"):
            raise errors.InvalidRequestError("does not name a file", operation=operation, key=repr(path))
        return base.check_key(self._root + path, operation)

    def _prefix(self, path: str, operation: str) -> str:
        return f"{self._key(path, operation)}/" if path else self._root
