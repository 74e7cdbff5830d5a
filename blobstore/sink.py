"""Where the bytes of a blob are poured: they are read, hashed and written in one thread (design 0008)."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from typing_extensions import override

from blobstore.concurrency import run_blocking
from blobstore.errors import StoreError

Buffer = bytes | bytearray | memoryview

# So many bytes are handed to a sink at a time, and no more are held for it, nor for longer.
POURED_BYTES: Final = 1024 * 1024
HELD_S: Final = 1.0


class Sink(Protocol):
    """Takes the bytes of a range."""

    def write(self, data: Buffer) -> None:
        """Take the next bytes.

        It blocks, and is called in a thread, each time perhaps in another one, never twice at once. What it raises
        ends the pour.
        """
        ...


class CountedSink(Sink):
    """Passes bytes on, and tells how far they have come.

    Attributes:
        size_bytes: What went through.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.size_bytes = 0

    @override
    def write(self, data: Buffer) -> None:
        self._sink.write(data)
        self.size_bytes += len(data)


class WatchedSink(CountedSink):
    """Measure how long the sink itself was at work, which is not the store's fault.

    Args:
        sink: The sink.
        clock: Seconds; asked in any thread.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        super().__init__(sink)
        self._clock = clock
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def busy_s(self) -> float:
        """Up to this moment."""
        since_s = self._since_s
        return self._busy_s + (0.0 if since_s is None else self._clock() - since_s)

    @override
    def write(self, data: Buffer) -> None:
        self._since_s = began_s = self._clock()
        try:
            super().write(data)
        finally:
            self._since_s = None
            self._busy_s += self._clock() - began_s


class ShutError(Exception):
    """Nobody wants these bytes any more."""


class Gate(Sink):
    """Passes bytes on until it is shut, so that a thread that cannot be stopped does no harm."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._is_shut = False

    @override
    def write(self, data: Buffer) -> None:
        with self._lock:
            if self._is_shut:
                raise ShutError
            self._sink.write(data)

    def refuse(self) -> None:
        """Let nothing through any more that has not begun."""
        self._is_shut = True

    def shut(self) -> None:
        """`refuse`, and wait for a write that is under way."""
        self.refuse()
        with self._lock:
            pass


async def pour_chunks(chunks: AsyncGenerator[bytes, None], sink: Sink) -> None:
    """Give a stream to a sink, with few hops to a thread; the stream is closed at the end.

    Raises:
        Exception: What the stream or the sink raised. What came before the stream broke, the sink has had.
    """
    clock = asyncio.get_running_loop().time
    held: list[bytes] = []
    held_bytes, since_s = 0, 0.0  # what comes first is handed on at once: somebody may wait for it

    async def write() -> None:
        nonlocal held, held_bytes, since_s
        writing, held, held_bytes, since_s = held, [], 0, clock()
        if writing:
            await run_blocking(_write_all, sink, writing)

    async with aclosing(chunks) as incoming:
        try:
            async for chunk in incoming:
                held.append(chunk)
                held_bytes += len(chunk)
                if held_bytes >= POURED_BYTES or clock() >= since_s + HELD_S:
                    await write()
        except StoreError:
            await write()
            raise
    await write()


def _write_all(sink: Sink, chunks: Sequence[Buffer]) -> None:
    for chunk in chunks:
        sink.write(chunk)
