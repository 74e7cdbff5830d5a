"""A store in the memory of this process: the whole contract, deterministic, for tests and trials."""

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from typing_extensions import override

from blobstore import base
from blobstore.errors import BlobDeletedError, BlobNotFoundError

# Some time in 2023: where the clock starts that a store has if it is given none.
_FIRST_MS: Final = 1_700_000_000_000


class _Blob(msgspec.Struct, frozen=True):
    data: bytes
    info: base.BlobInfo


class MemoryStore(base.BlobStore):
    """Blobs in a dict. Deleted ones are kept, too.

    A key may also be a "directory" of others, as on an object store.

    Args:
        clock: The store's clock in ms since the epoch. Without one each look at the clock is 1 ms after the last,
            so that runs repeat exactly.
        chunk_bytes: Size of the chunks in which a sink takes a blob.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None, chunk_bytes: int = 1 << 20) -> None:
        self._clock = itertools.count(_FIRST_MS).__next__ if clock is None else clock
        self._chunk_bytes = chunk_bytes
        self._blobs: dict[str, _Blob] = {}
        self._deleted: dict[str, bytes] = {}
        # The keys of `_blobs`. Strings sort by code point, which is the order of their UTF-8 bytes.
        self._sorted_keys: list[str] = []

    @property
    @override
    def capabilities(self) -> base.Capabilities:
        return base.Capabilities(atomic_create=True, consistent_lists=True, keeps_deleted=True, shared=False)

    @override
    def place(self) -> tuple[str, ...]:
        return "memory", str(id(self))

    @override
    async def put(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, repeatable: bool = False
    ) -> base.Created:
        base.check_put(key, ttl_ms, "put")
        return self._publish(key, await _collect(body, operation="put", key=key), ttl_ms)

    @override
    async def put_if_absent(self, key: str, body: base.Body, *, ttl_ms: int | None = None) -> base.CreateOutcome:
        base.check_put(key, ttl_ms, "put_if_absent")
        if key in self._blobs:
            return base.Lost()
        data = await _collect(body, operation="put_if_absent", key=key)
        # Others ran while the body was read. From here on there is no await: look and publish are one step.
        return base.Lost() if key in self._blobs else self._publish(key, data, ttl_ms)

    @override
    async def read_into(
        self,
        key: str,
        sink: base.Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        base.check_read(key, start, size_bytes)
        if key in self._blobs:
            data = self._blobs[key].data
        elif deleted and key in self._deleted:
            data = self._deleted[key]
        else:
            raise self._missing(key, "get")
        end = start + base.range_size_bytes(start, size_bytes, blob_size_bytes=len(data), key=key)
        await base.write_chunks(self._chunks(data, start, end), sink)

    async def _chunks(self, data: bytes, start: int, end: int) -> AsyncGenerator[bytes, None]:
        for at in range(start, end, self._chunk_bytes):
            yield data[at : min(at + self._chunk_bytes, end)]

    @override
    async def stat(self, key: str) -> base.BlobInfo | None:
        base.check_key(key, "stat")
        return self._blobs[key].info if key in self._blobs else None

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = base.LIST_PAGE_MAX) -> base.ListPage:
        base.check_list(prefix, limit)
        keys = self._sorted_keys
        first = max(bisect_left(keys, prefix), bisect_right(keys, start_after))
        page = [key for key in keys[first : first + limit + 1] if key.startswith(prefix)]
        blobs = tuple(self._blobs[key].info for key in page[:limit])
        return base.ListPage(blobs=blobs, truncated=len(page) > limit)

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        base.check_delete(keys)
        for key in keys:
            blob = self._blobs.pop(key, None)
            if blob is not None:
                self._deleted[key] = blob.data
                del self._sorted_keys[bisect_left(self._sorted_keys, key)]
        return ()

    @override
    async def remove_ttl(self, key: str) -> None:
        base.check_key(key, "remove_ttl")
        if key not in self._blobs:
            raise self._missing(key, "remove_ttl")
        blob = self._blobs[key]
        self._blobs[key] = _Blob(blob.data, msgspec.structs.replace(blob.info, expires_at_ms=None))

    @override
    async def list_unfinished(self, prefix: str) -> tuple[base.UnfinishedPut, ...]:
        base.check_list(prefix, base.LIST_PAGE_MAX)
        return ()

    @override
    async def abort_unfinished(self, puts: Sequence[base.UnfinishedPut]) -> tuple[base.DeleteFailure, ...]:
        return ()

    @override
    async def now_ms(self) -> int:
        return self._clock()

    @override
    async def close(self) -> None:
        pass  # nothing is held, and the blobs stay with the object

    def _publish(self, key: str, data: bytes, ttl_ms: int | None) -> base.Created:
        now_ms = self._clock()
        if key not in self._blobs:
            insort(self._sorted_keys, key)
        expires_at_ms = None if ttl_ms is None else now_ms + ttl_ms
        info = base.BlobInfo(key=key, size_bytes=len(data), created_at_ms=now_ms, expires_at_ms=expires_at_ms)
        self._blobs[key] = _Blob(data, info)
        return base.Created(created_at_ms=now_ms)

    def _missing(self, key: str, operation: str) -> BlobNotFoundError:
        if key in self._deleted:
            return BlobDeletedError("was deleted", operation=operation, key=key)
        return BlobNotFoundError("there is no such blob", operation=operation, key=key)


async def _collect(body: base.Body, *, operation: str, key: str) -> bytes:
    async with aclosing(base.checked_chunks(body, operation=operation, key=key)) as chunks:
        return b"".join([chunk async for chunk in chunks])
