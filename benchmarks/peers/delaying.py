"""A network further away: a process that passes bytes on, those of requests N seconds later.

`python -m benchmarks.peers.delaying PORT SECONDS` prints the port on which it listens. Answers are passed on at once,
so that a request and its answer take that much longer, however many are under way. It looks into nothing: the proxy
that counts and hangs (`counting`) would take a good part of a core where requests come by the hundred each second.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlsplit

from typing_extensions import override

from benchmarks.peers.processes import ROOT, environment

_SECONDS_MIN = 1e-4


class _Answers(asyncio.Protocol):
    """From the server to the client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    @override
    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class _Requests(asyncio.Protocol):
    """From a client to the server, later."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._seconds = seconds
        # What came, and when it is due; b"" is the end.
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._server: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._task = self._loop.create_task(self._connect(transport))

    async def _connect(self, client: asyncio.Transport) -> None:
        try:
            self._server, _ = await self._loop.create_connection(lambda: _Answers(client), "127.0.0.1", self._port)
        except OSError:
            client.abort()
            return
        self._send_due()

    @override
    def data_received(self, data: bytes) -> None:
        self._waiting.append((self._loop.time() + self._seconds, data))
        self._loop.call_later(self._seconds, self._send_due)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.data_received(b"")

    def _send_due(self) -> None:
        if self._server is None:
            return
        now_s = self._loop.time() + _SECONDS_MIN
        while self._waiting and self._waiting[0][0] <= now_s:
            _, data = self._waiting.popleft()
            if data:
                self._server.write(data)
            else:
                self._server.close()


async def _serve(port: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Requests(port, seconds), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextlib.contextmanager
def open_delay(endpoint_url: str, seconds: float) -> Iterator[str]:
    """The URL of a server that is so much further away, for as long as the context lasts."""
    port = urlsplit(endpoint_url).port or 80
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "benchmarks.peers.delaying", str(port), str(seconds)],
        cwd=ROOT,
        env=environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
