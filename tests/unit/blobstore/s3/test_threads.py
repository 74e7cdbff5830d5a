"""Answers that only threads meet, over real connections."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from blobstore.errors import StoreUnavailableError
from blobstore.s3.settings import MIB, S3Settings
from blobstore.s3.store import S3Store
from tests.contract.sink_contract import read_range


class Raw:
    """Answers every request with the same bytes, and closes."""

    def __init__(self) -> None:
        self.answer = b""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        writer.close()


@pytest.fixture
async def raw(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Raw]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    raw = Raw()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield raw
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Slow Down\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nabc",
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 2097152\r\nContent-Range: bytes 0-2097151/2097152\r\n\r\nabc",
        b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2097152\r\n\r\nabc",
        b"nonsense\r\n\r\n",
        b"",
    ],
    ids=["refusal breaks off", "refusal", "body ends", "no length", "no range", "nonsense", "nothing"],
)
async def test_whatever_an_answer_lacks_it_is_an_error_that_may_go_away(raw: Raw, answer: bytes) -> None:
    raw.answer = answer
    settings = S3Settings(endpoint_url=raw.url, path_style=True, read_timeout_s=2)
    store = S3Store("bucket", settings=settings, bound_by_profile=False)
    with pytest.raises(StoreUnavailableError):
        await read_range(store, 0, 2 * MIB)
    await store.close()


async def test_a_connection_is_used_again_once_a_body_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    body = bytes(range(256)) * (2 * MIB // 256)
    connections: set[object] = set()

    async def serve(request: web.BaseRequest) -> web.Response:
        connections.add(request.transport)
        return web.Response(status=206, body=body, headers={"Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"})

    runner = web.ServerRunner(web.Server(serve))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    store = S3Store("bucket", settings=S3Settings(endpoint_url=url, path_style=True), bound_by_profile=False)
    for _ in range(3):
        assert await read_range(store, 0, 2 * MIB) == body
    await store.close()
    assert len(connections) == 1
    await runner.cleanup()
