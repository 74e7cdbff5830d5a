"""The common base of all wrappers of a store, which passes each request on as it came; and the one that only counts.

Counts are for metrics, and for tests that hold a budget of requests.
"""

import asyncio
import copy
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeVar

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
from blobstore.sink import CountedSink, Sink

T = TypeVar("T")
# Reads the bytes of a call into any sink.
Read = Callable[[Sink], Coroutine[Any, Any, None]]


class PassedBody(Body):
    """A body that awaits a function with the size of each chunk before it passes that on."""

    def __init__(self, body: Body, passing: Callable[[int], Awaitable[None]]) -> None:
        self._body = body
        self._passing = passing

    @property
    @override
    def size_bytes(self) -> int:
        return self._body.size_bytes

    @override
    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._body.read_chunks()) as chunks:
            async for chunk in chunks:
                await self._passing(len(chunk))
                yield chunk


class ForwardingStore(BlobStore):
    """Passes on everything. A wrapper overrides hooks, and those methods that concern it.

    `_around` surrounds each request but `close`; a read is called "get". `_send` makes a request that has one answer,
    which is every request but a read; `_read` makes a read. `_wrap` replaces each body.
    """

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner

    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - a hook
        """Return what a request happens within. The keys are those of the call; for a list, its prefix."""
        return nullcontext()

    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request; each call of `request` sends it."""
        async with self._around(operation, *keys):
            return await request()

    async def _read(self, read: Read, sink: Sink) -> None:
        """Read into a sink; each call of `read` sends the request."""
        await read(sink)

    def _wrap(self, body: Body) -> Body:
        return body

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @override
    def place(self) -> tuple[str, ...]:
        return self._inner.place()

    @override
    def tagged(self, metadata: RequestMetadata) -> BlobStore:
        inner = self._inner.tagged(metadata)
        if inner is self._inner:
            return self
        # Limits, budgets and meters are shared by both.
        view = copy.copy(self)
        view._inner = inner  # noqa: SLF001 - its own class
        return view

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        body = self._wrap(body)
        return await self._send("put", (key,), lambda: self._inner.put(key, body, ttl_ms=ttl_ms, repeatable=repeatable))

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        body = self._wrap(body)
        return await self._send("put_if_absent", (key,), lambda: self._inner.put_if_absent(key, body, ttl_ms=ttl_ms))

    @override
    async def read_into(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        def read(into: Sink) -> Coroutine[Any, Any, None]:
            return self._inner.read_into(key, into, start=start, size_bytes=size_bytes, deleted=deleted, fresh=fresh)

        async with self._around("get", key):
            await self._read(read, sink)

    @override
    async def stat(self, key: str) -> BlobInfo | None:
        return await self._send("stat", (key,), lambda: self._inner.stat(key))

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        return await self._send(
            "list_page", (prefix,), lambda: self._inner.list_page(prefix, start_after=start_after, limit=limit)
        )

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        return await self._send("delete", keys, lambda: self._inner.delete(keys))

    @override
    async def remove_ttl(self, key: str) -> None:
        await self._send("remove_ttl", (key,), lambda: self._inner.remove_ttl(key))

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return await self._send("list_unfinished", (prefix,), lambda: self._inner.list_unfinished(prefix))

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        keys = tuple(put.key for put in puts)
        return await self._send("abort_unfinished", keys, lambda: self._inner.abort_unfinished(puts))

    @override
    async def check_unused(self, operation: str, *, marker: str = "", prefixes: tuple[str, ...] = ()) -> None:
        await self._send(
            "check_unused", (), lambda: self._inner.check_unused(operation, marker=marker, prefixes=prefixes)
        )

    @override
    async def now_ms(self) -> int:
        return await self._send("now_ms", ("",), self._inner.now_ms)

    @override
    async def close(self) -> None:
        await self._inner.close()


class Meter:
    """Counts of requests and bytes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # By operation, such as "put_if_absent"; a read counts as "get".
        self.requests: Counter[str] = Counter()
        # Requests that raised a `StoreError`.
        self.errors: Counter[str] = Counter()
        # From asking to the end of the answer, summed over the requests.
        self.seconds: defaultdict[str, float] = defaultdict(float)
        # Attempts that were not the first, where a store counts them.
        self.retries = 0
        # Of bodies, each time that they were sent; and of blobs that came back.
        self.bytes_out = self.bytes_in = 0

    def count_retry(self) -> None:
        self.retries += 1

    @asynccontextmanager
    async def request(self, operation: str) -> AsyncIterator[None]:
        """Count a request around the call that makes it."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        self.requests[operation] += 1
        try:
            yield
        except StoreError:
            self.errors[operation] += 1
            raise
        finally:
            self.seconds[operation] += clock() - began_s


class MeteredStore(ForwardingStore):
    """Counts every call; directly around a store, that is the requests that the store has to serve."""

    def __init__(self, inner: BlobStore, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = Meter() if meter is None else meter

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        return self.meter.request(operation)

    @override
    def _wrap(self, body: Body) -> Body:
        async def count(size_bytes: int) -> None:
            self.meter.bytes_out += size_bytes

        return PassedBody(body, count)

    @override
    async def _read(self, read: Read, sink: Sink) -> None:
        counted = CountedSink(sink)
        try:
            await read(counted)
        finally:
            self.meter.bytes_in += counted.size_bytes
