"""Answers that only threads meet, over real connections."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from blobstore.errors import StoreUnavailableError
from blobstore.s3.settings import MIB, S3Settings
from blobstore.s3.store import S3Store
from blobstore.s3.threads import _BlockingSession
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


def test_threads_that_connect_at_once_wait_for_one_of_them_to_read_the_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def load(self: ssl.SSLContext, cafile: str, *_: None) -> None:
        assert cafile
        time.sleep(0.02)
        read.append(cafile)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load)
    session = _BlockingSession(verify="bundle.pem")
    pool = session._manager.connection_from_url("https://127.0.0.1:9")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: session._setup_ssl_cert(pool, "https://127.0.0.1:9", "bundle.pem"), range(8)))
    assert (read, pool.ca_certs, pool.cert_reqs) == (["bundle.pem"], None, "CERT_REQUIRED")


def test_for_a_proxy_the_certificates_stay_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_: pytest.fail("it was read"))
    session = _BlockingSession(verify="bundle.pem", proxies={"https": "https://proxy:1"})
    pool = session._get_proxy_manager("https://proxy:1").connection_from_url("https://127.0.0.1:9")
    session._setup_ssl_cert(pool, "https://127.0.0.1:9", "bundle.pem")
    assert (pool.ca_certs, pool.cert_reqs) == ("bundle.pem", "CERT_REQUIRED")


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
