"""Bodies that do what a test needs: wait, fail, or report the wrong size."""

import asyncio
from collections.abc import AsyncGenerator


class ChunkedBody:
    """Some chunks, and the size that is claimed for them."""

    def __init__(self, *chunks: bytes, size_bytes: int | None = None) -> None:
        self._chunks = chunks
        self.size_bytes = sum(map(len, chunks)) if size_bytes is None else size_bytes
        self.times_read = 0

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        self.times_read += 1
        for chunk in self._chunks:
            await asyncio.sleep(0)
            yield chunk


class WaitingBody:
    """Two chunks; before the second it waits until it may go on."""

    def __init__(self, first: bytes, second: bytes) -> None:
        self._first, self._second = first, second
        self.size_bytes = len(first) + len(second)
        self.is_waiting = asyncio.Event()
        self.go_on = asyncio.Event()

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        self.is_waiting.set()
        await self.go_on.wait()
        yield self._second


class FailingBody:
    """One chunk and then an error of its own."""

    size_bytes = 100

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        yield b"x" * 50
        raise FileNotFoundError(2, "the file that is being put is gone", "source")
