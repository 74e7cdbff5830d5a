"""A bound on the bytes per second that a process sends and fetches, and the store that keeps to it."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from typing_extensions import override

from blobstore.base import BlobStore, Body
from blobstore.concurrency import give_up
from blobstore.sink import Buffer, Sink
from blobstore.wrappers.forwarding import ForwardingStore, PassedBody, Read

# Bytes are let through in pieces of this size: who has many to move does not hold up who has few.
PIECE_BYTES: Final = 64 * 1024
# So much of the time in which nothing was moved may be made up for at once.
BURST_S: Final = 0.25
# A shorter wait is put off until it has become this long: sleeping costs more than it gives.
GRAIN_S: Final = 0.01


class Bandwidth:
    """A number of bytes per second, shared by all callers in the order in which they ask.

    A bucket of tokens, kept as the moment up to which the line is taken. Event loops and threads may ask at once.

    Args:
        bytes_per_s: At least 1.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._taken_until_s = float("-inf")

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Reserve bytes; return the seconds after which they will have gone through.

        Args:
            size_bytes: How many.
            now_s: The time of an event loop, which all of a process have from one clock.
        """
        with self._lock:
            begins_s = max(self._taken_until_s, now_s - BURST_S)
            self._taken_until_s = begins_s + size_bytes / self._bytes_per_s
            return max(0.0, self._taken_until_s - now_s)

    async def pass_through(self, size_bytes: int) -> None:
        """Wait until a number of bytes has gone through."""
        clock = asyncio.get_running_loop().time
        for piece_bytes in pieces(size_bytes):
            wait_s = self.reserve(piece_bytes, clock())
            if wait_s > GRAIN_S:
                await asyncio.sleep(wait_s)


def pieces(size_bytes: int) -> Iterator[int]:
    """Yield the sizes of the pieces in which bytes are let through."""
    for at in range(0, size_bytes, PIECE_BYTES):
        yield min(PIECE_BYTES, size_bytes - at)


# By rate: a limit is one of the process, however many stores it opens.
_of_process: Final[dict[int, Bandwidth]] = {}
_making: Final = threading.Lock()


def shared_bandwidth(bytes_per_s: int) -> Bandwidth:
    """Return the bandwidth that all stores of this process with this limit share."""
    with _making:
        return _of_process.setdefault(bytes_per_s, Bandwidth(bytes_per_s))


class PacedStore(ForwardingStore):
    """Holds bodies and blobs to a bandwidth.

    It is the outermost wrapper: to them a reader that is held up is a slow reader, and no slow store.

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
    def _wrap(self, body: Body) -> Body:
        return PassedBody(body, self._bandwidth.pass_through) if self._paces_bodies else body

    @override
    async def _read(self, read: Read, sink: Sink) -> None:
        paced = _PacedSink(sink, self._bandwidth, asyncio.get_running_loop().time)
        reading = asyncio.ensure_future(read(paced))
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            # First: giving up a read waits for the write that is under way, which need not wait any more.
            paced.let_go()
            await give_up(reading)
            raise
        reading.result()


class _PacedSink(Sink):
    """Holds up the thread that writes.

    Args:
        sink: The sink.
        bandwidth: What the bytes go through.
        clock: Seconds; asked in any thread.
    """

    def __init__(self, sink: Sink, bandwidth: Bandwidth, clock: Callable[[], float]) -> None:
        self._sink = sink
        self.blocks = sink.blocks
        self._bandwidth = bandwidth
        self._clock = clock
        self._is_let_go = threading.Event()

    def let_go(self) -> None:
        self._is_let_go.set()

    @override
    def write(self, data: Buffer) -> None:
        for piece_bytes in pieces(len(data)):
            wait_s = self._bandwidth.reserve(piece_bytes, self._clock())
            if wait_s > GRAIN_S and self._is_let_go.wait(wait_s):
                break
        self._sink.write(data)

    @override
    async def write_here(self, chunks: Sequence[Buffer]) -> None:
        await self._bandwidth.pass_through(sum(map(len, chunks)))
        await self._sink.write_here(chunks)
