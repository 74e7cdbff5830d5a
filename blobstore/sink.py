"""What the bytes of a blob are read into. One thread reads, hashes and writes many of them (design 0008)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from typing_extensions import override

from blobstore.concurrency import run_blocking

Buffer = bytes | bytearray | memoryview

# Bytes that are given to a sink at a time; no more are held for it, nor for longer.
SINK_BYTES: Final = 1024 * 1024
HELD_S: Final = 1.0


class Sink(ABC):
    """Takes the bytes of a range."""

    # False: `write` never blocks, and bytes that come through the event loop are written there.
    blocks: bool = True

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Take the next bytes; what it raises ends the read.

        It may block, and is called in a thread, each time perhaps in another one, never twice at once.
        """

    async def take(self, chunks: Sequence[Buffer]) -> None:
        """Take the next bytes, in a thread if the sink blocks: also a cancelled call ends after whole writes."""
        if self.blocks:
            await run_blocking(_write_all, self, chunks)
        else:
            await self.write_here(chunks)

    async def write_here(self, chunks: Sequence[Buffer]) -> None:
        """Write on the event loop, to a sink that never blocks."""
        _write_all(self, chunks)


class TooLargeError(Exception):
    """More bytes came than a `MemorySink` may hold."""


class MemorySink(Sink):
    """Keeps the bytes in memory, at most `size_bytes_max` of them."""

    blocks = False

    def __init__(self, size_bytes_max: int | None = None) -> None:
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._chunks: list[bytes] = []

    @property
    def data(self) -> bytes:
        return b"".join(self._chunks)

    @override
    def write(self, data: Buffer) -> None:
        self._size_bytes += len(data)
        if self._size_bytes_max is not None and self._size_bytes > self._size_bytes_max:
            raise TooLargeError
        self._chunks.append(bytes(data))


class CountedSink(Sink):
    """Counts the bytes that another sink has taken."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.blocks = sink.blocks
        self.size_bytes = 0

    @override
    def write(self, data: Buffer) -> None:
        self._sink.write(data)
        self.size_bytes += len(data)

    @override
    async def write_here(self, chunks: Sequence[Buffer]) -> None:
        await self._sink.write_here(chunks)
        self.size_bytes += sum(map(len, chunks))


class WatchedSink(CountedSink):
    """Also measures how long the other sink was at work, which is not the store's fault.

    The clock gives seconds, and is asked in any thread.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        super().__init__(sink)
        self._clock = clock
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def busy_s(self) -> float:
        since_s = self._since_s
        return self._busy_s + (0.0 if since_s is None else self._clock() - since_s)

    @override
    def write(self, data: Buffer) -> None:
        with self._working():
            super().write(data)

    @override
    async def write_here(self, chunks: Sequence[Buffer]) -> None:
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


async def write_chunks(chunks: AsyncGenerator[bytes, None], sink: Sink) -> None:
    """Give a stream to a sink, with few hops to a thread, and close the stream.

    Raises:
        Exception: What the stream or the sink raised. What came before the stream broke, the sink has had.
    """
    clock = asyncio.get_running_loop().time
    held: list[bytes] = []
    held_bytes, since_s = 0, 0.0  # the first bytes are passed on at once: somebody may wait for them

    async def write() -> None:
        nonlocal held, held_bytes, since_s
        writing, held, held_bytes, since_s = held, [], 0, clock()
        if writing:
            await sink.take(writing)

    async with aclosing(chunks) as incoming:
        try:
            async for chunk in incoming:
                held.append(chunk)
                held_bytes += len(chunk)
                if held_bytes >= SINK_BYTES or clock() >= since_s + HELD_S:
                    await write()
        except Exception:
            await write()
            raise
    await write()


def _write_all(sink: Sink, chunks: Sequence[Buffer]) -> None:
    if chunks:
        sink.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
