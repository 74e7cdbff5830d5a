"""HTTP/1.1 as it is on the wire: heads kept byte for byte, bodies in pieces, connections that end in both ways."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from tests.fault_rules import header_of

PIECE_BYTES: Final = 64 * 1024
HEAD_BYTES_MAX: Final = 256 * 1024
# A connection to the server that was quiet for longer is not used again: the server may be closing it just now.
IDLE_S_MAX: Final = 2.0
# What was written gets this long to be read by a side that does not.
CLOSE_S: Final = 1.0


class Head(NamedTuple):
    """The head of a request or an answer."""

    raw: bytes
    start: str
    headers: tuple[tuple[str, str], ...]

    @property
    def status(self) -> int:
        return int(self.start.split(" ", 2)[1])

    @property
    def keeps_alive(self) -> bool:
        return "HTTP/1.1" in self.start and header_of(self.headers, "Connection").lower() != "close"

    @property
    def chunked(self) -> bool:
        return "chunked" in header_of(self.headers, "Transfer-Encoding").lower()

    @property
    def size_bytes(self) -> int | None:
        """What Content-Length says; None without one."""
        length = header_of(self.headers, "Content-Length")
        return int(length) if length and not self.chunked else None


class Piece(NamedTuple):
    """Some bytes of a body, or of what frames it."""

    data: bytes
    is_payload: bool = True


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def read_head(self) -> Head | None:
        """The next head; None if the other side has closed the connection."""
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise
        start, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return Head(raw, start, tuple((name.strip(), value.strip()) for name, _, value in pairs))

    async def read_body(self, head: Head, *, until_close: bool = False) -> AsyncIterator[Piece]:
        """The body that a head announces, as it comes."""
        if head.chunked:
            while True:
                line = await self.reader.readuntil(b"\n")
                yield Piece(line, is_payload=False)
                left = int(line.split(b";")[0], 16)
                if not left:
                    break
                async for piece in self._read(left):
                    yield piece
                yield Piece(await self.reader.readexactly(2), is_payload=False)
            while line.strip():
                line = await self.reader.readuntil(b"\n")
                yield Piece(line, is_payload=False)
        elif head.size_bytes is not None:
            async for piece in self._read(head.size_bytes):
                yield piece
        elif until_close:
            while data := await self.reader.read(PIECE_BYTES):
                yield Piece(data)

    async def _read(self, left: int) -> AsyncIterator[Piece]:
        while left:
            data = await self.reader.read(min(left, PIECE_BYTES))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            yield Piece(data)

    async def send(self, data: bytes) -> None:
        """Write, and wait while too much is waiting."""
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Return once the other side has gone away."""
        while self.usable():  # noqa: ASYNC110 - a stream shows its end only to the one who reads from it
            await asyncio.sleep(0.02)

    def usable(self) -> bool:
        """Whether nothing says that the connection has ended."""
        return not (self.reader.at_eof() or self._writer.is_closing())

    async def settle(self) -> None:
        """Let what was written leave this process: a reset throws away what is still here."""
        self._writer.transport.set_write_buffer_limits(high=0)
        await self._writer.drain()

    def abort(self) -> None:
        """End the connection with a reset."""
        connected: socket.socket | None = self._writer.get_extra_info("socket")
        if connected is not None and not self._writer.is_closing():
            # Without this the system sends a FIN if everything that came was read.
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection with a FIN, after what was written; with a reset if that is not read."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()
        except asyncio.CancelledError:
            self._writer.transport.abort()
            raise


class Upstream:
    """The connection to the server that one connection of a client uses, opened when it is needed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._wire: Wire | None = None
        self._used_at_s = 0.0

    async def connect(self) -> Wire:
        """The connection, a new one if the last one may have ended."""
        now_s = asyncio.get_running_loop().time()
        if self._wire is not None and self._wire.usable() and now_s - self._used_at_s < IDLE_S_MAX:
            return self._wire
        await self.close()
        self._wire = Wire(*await asyncio.open_connection(*self._address, limit=HEAD_BYTES_MAX))
        return self._wire

    def touch(self) -> None:
        """Remember that the connection has just been used."""
        self._used_at_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    def abort(self) -> None:
        """Break the connection, if there is one."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None
