"""Counting what goes to a store and comes back: for metrics, and for tests that hold a budget of requests."""

from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
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
    RequestMetadata,
    UnfinishedPut,
)
from blobstore.errors import StoreError

_LOGGED_MAX: Final = 100_000


class Meter:
    """What has been counted so far.

    Attributes:
        requests: By operation, such as "put_if_absent". A get counts once its first chunk is asked for.
        errors: Requests that raised a `StoreError`, by operation.
        bytes_out: Bytes of bodies, each time that they were sent.
        bytes_in: Bytes of blobs that came back.
        log: Operation and key of each request in order, the last 100,000 of them; empty unless asked for. A delete
            has an entry for each key.
    """

    def __init__(self, *, keeps_log: bool = False) -> None:
        self._keeps_log = keeps_log
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0
        self.log: deque[tuple[str, str]] = deque(maxlen=_LOGGED_MAX)

    def keys(self, operation: str) -> tuple[str, ...]:
        """The logged keys of one operation, in order."""
        return tuple(key for logged, key in self.log if logged == operation)

    def reset(self) -> None:
        """Start again from nothing."""
        self.requests.clear()
        self.errors.clear()
        self.log.clear()
        self.bytes_out = self.bytes_in = 0

    @contextmanager
    def request(self, operation: str, *keys: str) -> Iterator[None]:
        """Count a request around the call that makes it."""
        self.requests[operation] += 1
        if self._keeps_log:
            self.log.extend((operation, key) for key in keys)
        try:
            yield
        except StoreError:
            self.errors[operation] += 1
            raise


class _CountedBody:
    def __init__(self, body: Body, meter: Meter) -> None:
        self._body = body
        self._meter = meter

    @property
    def size_bytes(self) -> int:
        return self._body.size_bytes

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        chunks = self._body.read_chunks()
        try:
            async for chunk in chunks:
                self._meter.bytes_out += len(chunk)
                yield chunk
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()


class MeteredStore(BlobStore):
    """Counts every call that reaches the store. Directly around it, that is the requests that the store has to serve.

    Args:
        inner: The store.
        meter: Where to count; None for a new one.
    """

    def __init__(self, inner: BlobStore, meter: Meter | None = None) -> None:
        self._inner = inner
        self.meter = Meter() if meter is None else meter

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @override
    async def put(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> Created:
        with self.meter.request("put", key):
            return await self._inner.put(key, _CountedBody(body, self.meter), ttl_ms=ttl_ms, metadata=metadata)

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        counted = _CountedBody(body, self.meter)
        with self.meter.request("put_if_absent", key):
            return await self._inner.put_if_absent(key, counted, ttl_ms=ttl_ms, metadata=metadata)

    @override
    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[bytes, None]:
        stream = self._inner.get(key, start=start, size_bytes=size_bytes, deleted=deleted, metadata=metadata)
        with self.meter.request("get", key):
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    self.meter.bytes_in += len(chunk)
                    yield chunk

    @override
    async def stat(self, key: str, *, metadata: RequestMetadata | None = None) -> BlobInfo | None:
        with self.meter.request("stat", key):
            return await self._inner.stat(key, metadata=metadata)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        with self.meter.request("list_page", prefix):
            return await self._inner.list_page(prefix, start_after=start_after, limit=limit)

    @override
    async def delete(
        self, keys: Sequence[str], *, metadata: RequestMetadata | None = None
    ) -> tuple[DeleteFailure, ...]:
        with self.meter.request("delete", *keys):
            return await self._inner.delete(keys, metadata=metadata)

    @override
    async def remove_ttl(self, key: str, *, metadata: RequestMetadata | None = None) -> None:
        with self.meter.request("remove_ttl", key):
            await self._inner.remove_ttl(key, metadata=metadata)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        with self.meter.request("list_unfinished", prefix):
            return await self._inner.list_unfinished(prefix)

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        with self.meter.request("abort_unfinished", *(put.key for put in puts)):
            return await self._inner.abort_unfinished(puts)

    @override
    async def now_ms(self) -> int:
        with self.meter.request("now_ms", ""):
            return await self._inner.now_ms()

    @override
    async def close(self) -> None:
        await self._inner.close()
