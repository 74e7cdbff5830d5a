"""Wrappers that pass each request on once: as it came (their base, and that of all others), counted, or held back.

Counts are for metrics, and for tests that hold a budget of requests. What holds requests back is a number of them under
way at once, learnt from what the store says, and a number of bytes per second.
"""

import asyncio
import copy
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final, TypeVar

from typing_extensions import Unpack, override

from blobstore import base
from blobstore.concurrency import Budget, give_up
from blobstore.errors import InvalidRequestError, StoreError
from blobstore.tracing import span

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)
# Reads the bytes of a call into any sink.
Read = Callable[[base.Sink], Coroutine[Any, Any, None]]


def one_line(text: object) -> str:
    """Return a text for a line of a log: what would end the line, or move a cursor, is spelled out."""
    return repr(str(text))[1:-1]


def passed_body(body: base.Body, passing: Callable[[int], Awaitable[None]]) -> base.Body:
    """Return a body that awaits a function with the size of each chunk before it passes that on."""

    async def read() -> AsyncGenerator[bytes, None]:
        async with aclosing(body.read_chunks()) as chunks:
            async for chunk in chunks:
                await passing(len(chunk))
                yield chunk

    return base.ReadBody(body.size_bytes, read)


class CountedSink(base.Sink):
    """Counts the bytes that another sink has taken."""

    def __init__(self, sink: base.Sink) -> None:
        self._sink = sink
        self.blocks = sink.blocks
        self.size_bytes = 0

    @override
    def write(self, data: base.Buffer) -> None:
        self._sink.write(data)
        self.size_bytes += len(data)

    @override
    async def write_here(self, chunks: Sequence[base.Buffer]) -> None:
        await self._sink.write_here(chunks)
        self.size_bytes += sum(map(len, chunks))


class WatchedSink(CountedSink):
    """Also measures how long the other sink was at work, which is not the store's fault.

    The clock gives seconds, and is asked in any thread.
    """

    def __init__(self, sink: base.Sink, clock: Callable[[], float]) -> None:
        super().__init__(sink)
        self._clock = clock
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def busy_s(self) -> float:
        since_s = self._since_s
        return self._busy_s + (0.0 if since_s is None else self._clock() - since_s)

    @override
    def write(self, data: base.Buffer) -> None:
        with self._working():
            super().write(data)

    @override
    async def write_here(self, chunks: Sequence[base.Buffer]) -> None:
        with self._working():
            await super().write_here(chunks)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._since_s = began_s = self._clock()
        try:
            yield
        finally:
            self._since_s = None
            self._busy_s += self._clock() - began_s


class ForwardingStore(base.BlobStore):
    """Passes on everything. A wrapper overrides hooks, and those methods that concern it.

    `_around` surrounds each request but `close`; a read is called "get". `_send` makes a request that has one answer,
    which is every request but a read; `_read` makes a read. `_wrap` replaces each body.
    """

    def __init__(self, inner: base.BlobStore) -> None:
        self._inner = inner

    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - a hook
        """Return what a request happens within. The keys are those of the call; for a list, its prefix."""
        return nullcontext()

    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request; each call of `request` sends it."""
        async with self._around(operation, *keys):
            return await request()

    async def _read(self, read: Read, sink: base.Sink) -> None:
        """Read into a sink; each call of `read` sends the request."""
        await read(sink)

    def _wrap(self, body: base.Body) -> base.Body:
        return body

    @property
    @override
    def capabilities(self) -> base.Capabilities:
        return self._inner.capabilities

    @override
    def place(self) -> tuple[str, ...]:
        return self._inner.place()

    @override
    def tagged(self, metadata: base.RequestMetadata) -> base.BlobStore:
        inner = self._inner.tagged(metadata)
        if inner is self._inner:
            return self
        # Limits, budgets and meters are shared by both.
        view = copy.copy(self)
        view._inner = inner  # noqa: SLF001 - its own class
        return view

    @override
    async def put(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, repeatable: bool = False
    ) -> base.Created:
        body = self._wrap(body)
        return await self._send("put", (key,), lambda: self._inner.put(key, body, ttl_ms=ttl_ms, repeatable=repeatable))

    @override
    async def put_if_absent(self, key: str, body: base.Body, *, ttl_ms: int | None = None) -> base.CreateOutcome:
        body = self._wrap(body)
        return await self._send("put_if_absent", (key,), lambda: self._inner.put_if_absent(key, body, ttl_ms=ttl_ms))

    @override
    async def read_into(self, key: str, sink: base.Sink, **options: Unpack[base.ReadOptions]) -> None:
        async with self._around("get", key):
            await self._read(lambda into: self._inner.read_into(key, into, **options), sink)

    @override
    async def stat(self, key: str) -> base.BlobInfo | None:
        return await self._send("stat", (key,), lambda: self._inner.stat(key))

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = base.LIST_PAGE_MAX) -> base.ListPage:
        return await self._send(
            "list_page", (prefix,), lambda: self._inner.list_page(prefix, start_after=start_after, limit=limit)
        )

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        return await self._send("delete", keys, lambda: self._inner.delete(keys))

    @override
    async def remove_ttl(self, key: str) -> None:
        await self._send("remove_ttl", (key,), lambda: self._inner.remove_ttl(key))

    @override
    async def list_unfinished(self, prefix: str) -> tuple[base.UnfinishedPut, ...]:
        return await self._send("list_unfinished", (prefix,), lambda: self._inner.list_unfinished(prefix))

    @override
    async def abort_unfinished(self, puts: Sequence[base.UnfinishedPut]) -> tuple[base.DeleteFailure, ...]:
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


class UndeletingStore(ForwardingStore):
    """Reads deleted blobs too, while the store keeps them: each read is one with Samza's `getDeleted`."""

    @override
    async def read_into(self, key: str, sink: base.Sink, **options: Unpack[base.ReadOptions]) -> None:
        options["deleted"] = True
        await super().read_into(key, sink, **options)


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
    async def request(self, operation: str, keys: Sequence[str]) -> AsyncIterator[None]:
        """Count a request around the call that makes it, and give it a span."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        self.requests[operation] += 1
        key = keys[0] if len(keys) == 1 else ""
        try:
            with span(f"store.{operation}", is_request=True, key=key, keys_count=len(keys)):
                yield
        except StoreError:
            self.errors[operation] += 1
            raise
        finally:
            self.seconds[operation] += clock() - began_s


class MeteredStore(ForwardingStore):
    """Counts every call, and gives each a span; directly around a store, the requests that the store has to serve."""

    def __init__(self, inner: base.BlobStore, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = Meter() if meter is None else meter

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        return self.meter.request(operation, keys)

    @override
    def _wrap(self, body: base.Body) -> base.Body:
        async def count(size_bytes: int) -> None:
            self.meter.bytes_out += size_bytes

        return passed_body(body, count)

    @override
    async def _read(self, read: Read, sink: base.Sink) -> None:
        counted = CountedSink(sink)
        try:
            await read(counted)
        finally:
            self.meter.bytes_in += counted.size_bytes


# Bytes are let through in pieces of this size: who has many to move does not hold up who has few.
PIECE_BYTES: Final = 64 * 1024
# So much of the time in which nothing was moved may be made up for at once.
BURST_S: Final = 0.25
# A shorter wait is put off until it has become this long: sleeping costs more than it gives.
GRAIN_S: Final = 0.01


class InFlightLimit(Budget):
    """A number of requests at once, which the answers of the store change.

    Halves when the store asks for less, and grows by one after every `in_flight_max` successes, up to that, as TCP does
    (RFC 5681; design 0003, E2). So slow a growth keeps the refusals that each step too far costs to a few in a hundred,
    however little a store can take, which the budget of retries can bear.

    One object is given to the store that keeps the limit and to the one that hears the answers. Sixteen requests that
    are refused together are one piece of news, not sixteen: as long as more are under way than are allowed, the last
    halving has not come into force, and no answer shows whether it was right.
    """

    def __init__(self, in_flight_max: int) -> None:
        if in_flight_max < 1:
            raise InvalidRequestError(f"in_flight_max is {in_flight_max}, which lets nothing through", operation="open")
        super().__init__(in_flight_max)
        self._in_flight_max = in_flight_max
        self._successes = 0

    def shrink(self) -> bool:
        """Note that the store asked for less; return whether less is allowed from now on."""
        before = self.allowed
        if self.under_way <= self.allowed:
            self.allowed = max(1, self.allowed // 2)
            self._successes = 0
        return self.allowed < before

    def grow(self) -> None:
        """Note that the store did what it was asked to do."""
        if self.under_way > self.allowed or self.allowed == self._in_flight_max:
            return
        self._successes += 1
        if self._successes >= self._in_flight_max:
            self._successes = 0
            self.allowed += 1
            self._serve()


class LimitedStore(ForwardingStore):
    """Lets a number of requests through at once; the others wait in the order in which they came.

    A sink must not wait for another request to the store: at times there is one slot for all.
    """

    def __init__(self, inner: base.BlobStore, limit: InFlightLimit) -> None:
        super().__init__(inner)
        self._limit = limit

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        _LOG.debug("%s %s", operation, one_line(keys[0]) if len(keys) == 1 else f"{len(keys)} keys")
        return self._limit.hold()


class Bandwidth:
    """A bucket of tokens, kept as the moment up to which the line is taken; event loops and threads may ask at once."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._taken_until_s = float("-inf")

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Reserve bytes; return the seconds after which they will have gone through.

        `now_s` is the time of an event loop, which all of a process have from one clock.
        """
        with self._lock:
            begins_s = max(self._taken_until_s, now_s - BURST_S)
            self._taken_until_s = begins_s + size_bytes / self._bytes_per_s
            return max(0.0, self._taken_until_s - now_s)

    def waits_s(self, size_bytes: int, clock: Callable[[], float]) -> Iterator[float]:
        """Reserve bytes piece by piece; yield the seconds to wait before the next one, where it is worth it."""
        for at in range(0, size_bytes, PIECE_BYTES):
            wait_s = self.reserve(min(PIECE_BYTES, size_bytes - at), clock())
            if wait_s > GRAIN_S:
                yield wait_s

    async def pass_through(self, size_bytes: int) -> None:
        for wait_s in self.waits_s(size_bytes, asyncio.get_running_loop().time):
            await asyncio.sleep(wait_s)


# By rate: a limit is one of the process, however many stores it opens.
_of_process: Final[dict[int, Bandwidth]] = {}
_making: Final = threading.Lock()


def shared_bandwidth(bytes_per_s: int) -> Bandwidth:
    """Return the bandwidth that all stores of this process with this limit share."""
    with _making:
        return _of_process.setdefault(bytes_per_s, Bandwidth(bytes_per_s))


class PacedStore(ForwardingStore):
    """Holds bodies and blobs to a bandwidth.

    It is the outermost wrapper: to them a reader that is held up is a slow reader, and no slow store. A store that
    reads a body more often than it sends it has to hold bodies back by itself: then `paces_bodies` is False.
    """

    def __init__(self, inner: base.BlobStore, bandwidth: Bandwidth, *, paces_bodies: bool = True) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth
        self._paces_bodies = paces_bodies

    @override
    def _wrap(self, body: base.Body) -> base.Body:
        return passed_body(body, self._bandwidth.pass_through) if self._paces_bodies else body

    @override
    async def _read(self, read: Read, sink: base.Sink) -> None:
        paced = _PacedSink(sink, self._bandwidth, asyncio.get_running_loop().time)
        reading = asyncio.ensure_future(read(paced))
        try:
            await asyncio.wait({reading})
        finally:
            # First: giving up a read waits for the write that is under way, which need not wait any more.
            paced.is_let_go.set()
            await give_up(reading)
        reading.result()


class _PacedSink(base.Sink):
    """Holds up the thread that writes."""

    def __init__(self, sink: base.Sink, bandwidth: Bandwidth, clock: Callable[[], float]) -> None:
        self._sink = sink
        self.blocks = sink.blocks
        self._bandwidth = bandwidth
        self._clock = clock
        self.is_let_go = threading.Event()

    @override
    def write(self, data: base.Buffer) -> None:
        for wait_s in self._bandwidth.waits_s(len(data), self._clock):
            if self.is_let_go.wait(wait_s):
                break
        self._sink.write(data)

    @override
    async def write_here(self, chunks: Sequence[base.Buffer]) -> None:
        await self._bandwidth.pass_through(sum(map(len, chunks)))
        await self._sink.write_here(chunks)
