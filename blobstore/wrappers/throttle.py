"""Moving no more bytes per second than somebody allows."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from typing_extensions import override

from blobstore.base import BlobStore, Body, Created, CreateOutcome, RequestMetadata
from blobstore.concurrency import give_up
from blobstore.sink import Buffer, Sink
from blobstore.wrappers.bandwidth import GRAIN_S, Bandwidth, pieces
from blobstore.wrappers.forwarding import ForwardingStore


class PacedStore(ForwardingStore):
    """Holds bodies and blobs to a bandwidth.

    It stands outside of all other wrappers: to them a reader that is held up is a slow reader, and no slow store.

    Args:
        inner: The store.
        bandwidth: What all bytes go through.
        paces_bodies: False: the store itself sends no body faster. One that reads a body more often than it sends it
            has to do so.
    """

    def __init__(self, inner: BlobStore, bandwidth: Bandwidth, *, paces_bodies: bool = True) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth
        self._paces_bodies = paces_bodies

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
        return await super().put(key, self._paced(body), ttl_ms=ttl_ms, repeatable=repeatable, metadata=metadata)

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        return await super().put_if_absent(key, self._paced(body), ttl_ms=ttl_ms, metadata=metadata)

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
        stream = super().get(key, start=start, size_bytes=size_bytes, deleted=deleted, fresh=fresh, metadata=metadata)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await self._bandwidth.pass_through(len(chunk))
                yield chunk

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
        paced = _PacedSink(sink, self._bandwidth, asyncio.get_running_loop().time)
        pour = super().pour(key, paced, start=start, size_bytes=size_bytes, fresh=fresh, metadata=metadata)
        pouring = asyncio.ensure_future(pour)
        try:
            await asyncio.wait({pouring})
        except asyncio.CancelledError:
            # First: whoever gives up a pour waits for the write that is under way, which need not wait any more.
            paced.let_go()
            await give_up(pouring)
            raise
        pouring.result()

    def _paced(self, body: Body) -> Body:
        return _PacedBody(body, self._bandwidth) if self._paces_bodies else body


class _PacedBody:
    """A body that is held up after each chunk."""

    def __init__(self, body: Body, bandwidth: Bandwidth) -> None:
        self._body = body
        self._bandwidth = bandwidth

    @property
    def size_bytes(self) -> int:
        return self._body.size_bytes

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        chunks = self._body.read_chunks()
        try:
            async for chunk in chunks:
                await self._bandwidth.pass_through(len(chunk))
                yield chunk
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()


class _PacedSink(Sink):
    """Holds up the thread that writes.

    Args:
        sink: The sink.
        bandwidth: What the bytes go through.
        clock: Seconds; asked in any thread.
    """

    def __init__(self, sink: Sink, bandwidth: Bandwidth, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._bandwidth = bandwidth
        self._clock = clock
        self._is_let_go = threading.Event()

    def let_go(self) -> None:
        """Hold nobody up any more."""
        self._is_let_go.set()

    @override
    def write(self, data: Buffer) -> None:
        for piece_bytes in pieces(len(data)):
            wait_s = self._bandwidth.reserve(piece_bytes, self._clock())
            if wait_s > GRAIN_S and self._is_let_go.wait(wait_s):
                break
        self._sink.write(data)
