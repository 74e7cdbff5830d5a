"""A plain directory as a store. Blobs are files of their own name and content, so that any tool can read them.

```
<root>/<key>            a blob, byte for byte
<root>/.ttl/<key>       its TTL, see `local_ttl`
<root>/.deleted/<key>   a deleted blob, where the store is asked to keep them
<root>/.tmp/            files that are being written, and probes of the clock
```

No key begins with a dot, so these never clash. A blob is written to `.tmp`, synced, given its name in one step and
that name synced: `put_if_absent` by link(2), so that of two racers exactly one wins (design 0002, S1), `put` by
rename(2). The file system has to know hard links and tell upper from lower case.
"""

import errno
import os
import secrets
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from typing_extensions import override

from blobstore.base import (
    LIST_PAGE_MAX,
    BlobInfo,
    BlobStore,
    Body,
    Capabilities,
    Created,
    CreateOutcome,
    DeleteFailure,
    ListPage,
    Lost,
    RequestMetadata,
    UnfinishedPut,
    Unknown,
    check_key,
)
from blobstore.checks import check_delete, check_list, check_range, check_ttl, checked_chunks, range_size_bytes
from blobstore.errors import (
    BlobDeletedError,
    BlobNotFoundError,
    InvalidRequestError,
)
from blobstore.local_births import Births, modified_at_ms
from blobstore.local_deleted import DeletedBlobs
from blobstore.local_errors import shortened, store_errors, telling_failures
from blobstore.local_files import (
    DurableDirs,
    LocalFile,
    create_to_write,
    flush,
    open_to_read,
    run_blocking,
    sync_dir,
)
from blobstore.local_ttl import TtlLinks
from blobstore.local_walk import walk_keys
from blobstore.mounts import lists_are_consistent
from blobstore.sinks import POURED_BYTES, Sink

# What a process that died has left in `.tmp` is removed once it is this old.
TEMP_AGE_MAX_MS: Final = 24 * 3600 * 1000

_NO_SUCH_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
# A thread pours so many bytes at a time: a pour that is cancelled ends with them.
_HOP_BYTES: Final = 16 * 1024 * 1024
# link(2) on a network file system may answer these though the link was made, or will be.
_NO_ANSWER: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})


class LocalStore(BlobStore):
    """Blobs as the files of a directory, for any number of processes and, over a network mount, machines.

    Args:
        root: The directory; made by the first write if it is not there.
        deleted_retention_ms: How long deleted blobs can still be read; 0 for not at all.

    Raises:
        InvalidRequestError: The root is something else than a directory.
    """

    def __init__(self, root: Path, *, deleted_retention_ms: int = 0) -> None:
        self._root = root.absolute()
        if self._root.exists() and not self._root.is_dir():
            raise InvalidRequestError(
                "is not a directory", operation="open", key=str(root), hint="name a directory, or one to be made"
            )
        self._dirs = DurableDirs(self._root)
        self._temp = self._root / ".tmp"
        self._temp_is_clean = False
        self._births = Births(self._temp)
        self._ttl = TtlLinks(self._root / ".ttl", self._dirs, self._new_temp)
        self._deleted = DeletedBlobs(self._root / ".deleted", self._dirs, deleted_retention_ms)
        self._capabilities = Capabilities(
            atomic_create=True,
            consistent_lists=lists_are_consistent(self._root),
            list_shows_ttl=True,
            enforces_ttl=False,
            keeps_deleted=deleted_retention_ms > 0,
        )

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @override
    def place(self) -> tuple[str, ...]:
        return "file", *self._root.resolve().parts

    @override
    async def put(
        self,
        key: str,
        body: Body,
        *,
        ttl_ms: int | None = None,
        repeatable: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> Created:
        check_key(key, "put")
        check_ttl(ttl_ms, operation="put", key=key)
        async with self._staged(key, body, "put") as (file, temp):
            with store_errors("put", key):
                return await run_blocking(self._replace, file.descriptor, temp, key, ttl_ms)

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        check_key(key, "put_if_absent")
        check_ttl(ttl_ms, operation="put_if_absent", key=key)
        with store_errors("put_if_absent", key):
            lost = await run_blocking(self._lost, key)
        if lost is not None:
            return lost
        async with self._staged(key, body, "put_if_absent") as (file, temp):
            with store_errors("put_if_absent", key):
                return await run_blocking(self._create, file.descriptor, temp, key, ttl_ms)

    @override
    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[bytes, None]:
        check_key(key, "get")
        check_range(start, size_bytes, key=key)
        async with AsyncExitStack() as resources:
            with store_errors("get", key):
                file = await self._open(key, deleted=deleted, resources=resources)
                blob_size_bytes = (await file.stat()).st_size
            wanted = range_size_bytes(start, size_bytes, blob_size_bytes=blob_size_bytes, key=key)
            with store_errors("get", key):
                async with aclosing(file.read_chunks(start=start, size_bytes=wanted)) as chunks:
                    async for chunk in chunks:
                        wanted -= len(chunk)
                        yield chunk
            if wanted:
                raise shortened(key)

    @override
    async def pour(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int,
        fresh: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> None:
        check_key(key, "get")
        check_range(start, size_bytes, key=key)
        async with AsyncExitStack() as resources:
            with store_errors("get", key):
                file = await self._open(key, deleted=False, resources=resources)
                blob_size_bytes = (await file.stat()).st_size
            range_size_bytes(start, size_bytes, blob_size_bytes=blob_size_bytes, key=key)
            end = start + size_bytes
            # A hop to a thread for so many bytes: a cancelled pour ends with its hop.
            for at in range(start, end, _HOP_BYTES):
                await run_blocking(_pour, file.descriptor, key, sink, at, min(at + _HOP_BYTES, end))

    @override
    async def stat(self, key: str, *, metadata: RequestMetadata | None = None) -> BlobInfo | None:
        check_key(key, "stat")
        with store_errors("stat", key):
            return await run_blocking(self._info, key)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        check_list(prefix, limit)
        with store_errors("list_page", prefix):
            return await run_blocking(self._list, prefix, start_after, limit)

    @override
    async def delete(
        self, keys: Sequence[str], *, metadata: RequestMetadata | None = None
    ) -> tuple[DeleteFailure, ...]:
        check_delete(keys)
        return await run_blocking(self._delete, keys)

    @override
    async def remove_ttl(self, key: str, *, metadata: RequestMetadata | None = None) -> None:
        check_key(key, "remove_ttl")
        with store_errors("remove_ttl", key):
            await run_blocking(self._remove_ttl, key)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        check_list(prefix, LIST_PAGE_MAX)
        return ()  # the first write clears them away, see `clean_temp`

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        return ()

    @override
    async def now_ms(self) -> int:
        with store_errors("now_ms", str(self._root)):
            return await run_blocking(self._now_ms)

    @override
    async def close(self) -> None:
        pass  # nothing stays open between calls

    async def clean_temp(self, *, older_than_ms: int = TEMP_AGE_MAX_MS) -> int:
        """Remove what processes that died have left in `.tmp`; the first write does this too.

        Args:
            older_than_ms: What was written to more recently may belong to a process that lives.

        Returns:
            How many files it removed.
        """
        with store_errors("clean_temp", str(self._root)):
            return await run_blocking(self._clean_temp, older_than_ms)

    # --- what follows blocks, and runs in threads ---

    def _path(self, key: str) -> Path:
        return self._root / key

    def _new_temp(self) -> Path:
        return self._temp / secrets.token_hex(16)

    def _regular_file(self, key: str) -> os.stat_result | None:
        try:
            found = self._path(key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def _info(self, key: str) -> BlobInfo | None:
        # The blob before its TTL: the link is there before the blob is, so that this order never misses it.
        found = self._regular_file(key)
        if found is None:
            return None
        ttl_ms = self._ttl.read_ms(key)
        created_at_ms = self._births.read_ms(self._path(key), found)
        return BlobInfo(
            key=key,
            size_bytes=found.st_size,
            created_at_ms=created_at_ms,
            expires_at_ms=None if ttl_ms is None else created_at_ms + ttl_ms,
        )

    def _missing(self, key: str, operation: str) -> BlobNotFoundError:
        if self._deleted.is_kept(key):
            return BlobDeletedError("was deleted", operation=operation, key=key)
        return BlobNotFoundError("there is no such file", operation=operation, key=key)

    def _list(self, prefix: str, start_after: str, limit: int) -> ListPage:
        blobs: list[BlobInfo] = []
        for key in walk_keys(self._root, prefix, start_after):
            info = self._info(key)
            if info is None:
                continue  # deleted since the directory was read
            if len(blobs) == limit:
                return ListPage(blobs=tuple(blobs), truncated=True)
            blobs.append(info)
        return ListPage(blobs=tuple(blobs), truncated=False)

    def _lost(self, key: str) -> Lost | None:
        if self._regular_file(key) is None:
            return None
        # Who finds it may build on it, and whoever created it may have died before this.
        sync_dir(self._path(key).parent)
        return Lost()

    def _create(self, descriptor: int, temp: Path, key: str, ttl_ms: int | None) -> CreateOutcome:
        path = self._path(key)
        self._seal(descriptor, path)
        if ttl_ms is not None:
            lost = self._lost(key)
            if lost is not None:
                return lost
            self._ttl.promise(key, ttl_ms, is_there=lambda: self._regular_file(key) is not None)
        _be_born(descriptor)
        try:
            path.hardlink_to(temp)
        except OSError as error:
            # A network file system may repeat a request by itself and then answer to the repetition.
            if not _is_same_file(path, descriptor):
                if error.errno in _NO_ANSWER:
                    return Unknown(reason=f"link: {error.strerror}")
                if error.errno == errno.EPERM:
                    raise OSError(errno.EOPNOTSUPP, "cannot make hard links", str(path)) from error
                lost = self._lost(key) if isinstance(error, FileExistsError) else None
                if lost is None:
                    raise
                return lost
        # Where the process was stopped just before the link, the name came far later than the time told so far, and
        # readers have to see what the writer is told (design 0002, C5). Until then `Births` tells it to them.
        os.utime(descriptor)
        try:
            sync_dir(path.parent)
        except OSError as error:
            return Unknown(reason=f"linked, but sync of the directory failed: {error.strerror}")
        return _created(descriptor)

    def _replace(self, descriptor: int, temp: Path, key: str, ttl_ms: int | None) -> Created:
        path = self._path(key)
        self._seal(descriptor, path)
        # A crash in between leaves a TTL where none is meant, never none where one is.
        if ttl_ms is not None:
            self._ttl.set(key, ttl_ms)
        _be_born(descriptor)
        temp.replace(path)
        sync_dir(path.parent)
        if ttl_ms is None:
            self._ttl.remove(key)
        return _created(descriptor)

    def _remove_ttl(self, key: str) -> None:
        if self._regular_file(key) is None:
            raise self._missing(key, "remove_ttl")
        self._ttl.remove(key)

    def _seal(self, descriptor: int, path: Path) -> None:
        """Make a file ready to get its name."""
        flush(descriptor)
        self._dirs.make(path.parent)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory of other keys", str(path))

    def _delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        failures: dict[str, str] = {}
        directories: dict[Path, list[str]] = {}
        for key in keys:
            path = self._path(key)
            with telling_failures(failures, [key]), suppress(FileNotFoundError):
                if self._regular_file(key) is not None:
                    self._deleted.delete(path, key)
            directories.setdefault(path.parent, []).append(key)
        # A deletion that a loss of power undoes could bring a commit back whose blobs are gone (design 0002, D1). Also
        # for what is gone already: whoever deleted it may have died before this.
        for directory, names in directories.items():
            with telling_failures(failures, names), suppress(FileNotFoundError, NotADirectoryError):
                sync_dir(directory)
        for key in keys:
            if key not in failures:
                self._ttl.drop(key)
        if self._capabilities.keeps_deleted:
            with suppress(OSError):  # the next call purges
                self._deleted.purge(self._now_ms())
        return tuple(DeleteFailure(key=key, reason=reason) for key, reason in failures.items())

    def _now_ms(self) -> int:
        self._prepare()
        probe = self._new_temp()
        probe.touch(exist_ok=False)
        try:
            return modified_at_ms(probe.stat())
        finally:
            probe.unlink(missing_ok=True)

    def _prepare(self) -> None:
        self._dirs.make(self._temp)
        if not self._temp_is_clean:
            self._temp_is_clean = True
            self._clean_temp(TEMP_AGE_MAX_MS)

    def _clean_temp(self, older_than_ms: int) -> int:
        self._prepare()
        oldest_ms = self._now_ms() - older_than_ms
        removed = 0
        for leftover in self._temp.iterdir():
            # Another process cleans too, or is done with it; what belongs to another user is theirs to clean.
            with suppress(FileNotFoundError, PermissionError):
                if modified_at_ms(leftover.lstat()) <= oldest_ms:
                    self._births.unlink_temp(leftover)
                    removed += 1
        return removed

    def _unlink_if_possible(self, temp: Path) -> None:
        # What cannot be removed now is removed by a later `clean_temp`; the outcome of the call does not depend on it.
        with suppress(OSError):
            self._births.unlink_temp(temp)

    # --- and this does not ---

    @asynccontextmanager
    async def _staged(self, key: str, body: Body, operation: str) -> AsyncIterator[tuple[LocalFile, Path]]:
        """A temporary file with the bytes of a body; its name is gone at the end, whatever happened."""
        with store_errors(operation, key):
            await run_blocking(self._prepare)
        temp = self._new_temp()
        try:
            async with AsyncExitStack() as resources:
                with store_errors(operation, key):
                    file = await resources.enter_async_context(create_to_write(temp))
                at = 0
                # Errors of the body are not the store's, so the two are not caught together.
                async with aclosing(checked_chunks(body, operation=operation, key=key)) as chunks:
                    async for chunk in chunks:
                        with store_errors(operation, key):
                            await file.write_at(at, chunk)
                        at += len(chunk)
                yield file, temp
        finally:
            await run_blocking(self._unlink_if_possible, temp)

    async def _open(self, key: str, *, deleted: bool, resources: AsyncExitStack) -> LocalFile:
        try:
            return await resources.enter_async_context(open_to_read(self._path(key)))
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                raise
        if not deleted or not await run_blocking(self._deleted.is_kept, key):
            raise await run_blocking(self._missing, key, "get")
        return await resources.enter_async_context(open_to_read(self._deleted.path(key)))


def _be_born(descriptor: int) -> None:
    # A blob is as old as its name, by the clock of the file system. Writing and syncing it may have taken long.
    os.utime(descriptor)


def _created(descriptor: int) -> Created:
    # The change time is that of link or rename. Where the process was stopped just before that step, it is far later
    # than the modification time that `stat` tells, and a writer has to know (design 0002, C5).
    now = os.fstat(descriptor)
    return Created(created_at_ms=max(now.st_mtime_ns, now.st_ctime_ns) // 1_000_000)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _pour(descriptor: int, key: str, sink: Sink, start: int, end: int) -> None:
    """Give a sink the bytes from `start` to `end`. What the sink raises is not the store's error."""
    buffer = memoryview(bytearray(min(end - start, POURED_BYTES)))
    at = start
    while at < end:
        with store_errors("get", key):
            size_bytes = os.preadv(descriptor, [buffer[: end - at]], at)
        if not size_bytes:
            raise shortened(key)
        sink.write(buffer[:size_bytes])
        at += size_bytes
