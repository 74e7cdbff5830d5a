"""Counting what goes to a store and comes back: for metrics, and for tests that hold a budget of requests."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from typing_extensions import override

from blobstore.base import BlobStore, Body
from blobstore.errors import StoreError
from blobstore.sink import CountedSink, Sink
from blobstore.wrappers.forwarding import ForwardingStore, PassedBody, Read

_LOGGED_MAX: Final = 100_000


class Meter:
    """Counts of requests and bytes.

    Attributes:
        requests: By operation, such as "put_if_absent". A read counts as "get".
        errors: Requests that raised a `StoreError`, by operation.
        seconds: From asking to the end of the answer, summed over the requests of an operation.
        retries: Attempts that were not the first, where a store counts them.
        bytes_out: Bytes of bodies, each time that they were sent.
        bytes_in: Bytes of blobs that came back.
        log: Operation and key of each request in order, the last 100,000 of them; empty unless asked for. A delete
            has an entry for each key.
    """

    def __init__(self, *, keeps_log: bool = False) -> None:
        self._keeps_log = keeps_log
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.retries = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.log: deque[tuple[str, str]] = deque(maxlen=_LOGGED_MAX)

    def keys(self, operation: str) -> tuple[str, ...]:
        """Return the logged keys of one operation, in order."""
        return tuple(key for logged, key in self.log if logged == operation)

    def reset(self) -> None:
        """Start again from nothing."""
        self.requests.clear()
        self.errors.clear()
        self.seconds.clear()
        self.log.clear()
        self.retries = 0
        self.bytes_out = self.bytes_in = 0

    def count_retry(self) -> None:
        """Count an attempt that is not the first."""
        self.retries += 1

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


class MeteredStore(ForwardingStore):
    """Counts every call that reaches the store. Directly around it, that is the requests that the store has to serve.

    Args:
        inner: The store.
        meter: Where to count; None for a new one.
    """

    def __init__(self, inner: BlobStore, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = Meter() if meter is None else meter

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            with self.meter.request(operation, *keys):
                yield
        finally:
            self.meter.seconds[operation] += clock() - began_s

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
