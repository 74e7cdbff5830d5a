"""Servers that answer anything at all: no XML, other keys than were asked for, numbers and times that are none (H5)."""

import asyncio
import contextlib
import gc
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import pytest
from click.testing import CliRunner
from typing_extensions import override

from blobstore.base import BytesBody, list_blobs, read_blob
from blobstore.errors import InvalidRequestError, StoreError, StoreFullError, StoreUnavailableError
from blobstore.s3.settings import S3Settings
from blobstore.s3.store import S3Store
from engine.cli import tidemark
from engine.cli.run import ExitCode
from tests.contract.sink_contract import Collecting
from tests.fuzz.target import check_refusal

DATE: Final = "Sun, 22 Nov 2026 20:00:00 GMT"
# Where an answer without end has its end, if nobody hangs up.
_ENDLESS_BYTES: Final = 256 * 1024 * 1024
_SECRET: Final = "what-only-the-answer-says"


class Liar(ThreadingHTTPServer):
    """Answers every request with one body and some headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Lying)
        self.status = 200
        self.body = b""
        self.headers: dict[str, str] = {}
        # Whether the body comes again and again, in chunks, each so much after the last; and how many bytes were sent.
        self.is_endless = False
        self.pause_s = 0.0
        self.sent_bytes = 0
        self.requests: list[str] = []

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Lying(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        assert isinstance(self.server, Liar)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(self.command)
        length = {"Content-Length": str(len(self.server.body))}
        if self.server.is_endless:
            length = {"Transfer-Encoding": "chunked"}
        self.send_response_only(self.server.status)
        for name, value in {"Date": DATE, "Content-Type": "application/xml", **length, **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not self.server.is_endless:
            self.wfile.write(self.server.body)
            return
        chunk = b"%x\r\n%s\r\n" % (len(self.server.body), self.server.body)
        with contextlib.suppress(OSError):
            while self.server.sent_bytes < _ENDLESS_BYTES:
                self.wfile.write(chunk)
                self.server.sent_bytes += len(self.server.body)
                time.sleep(self.server.pause_s)
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  # the names that the base class calls

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _serve() -> Iterator[Liar]:
    with Liar() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    yield from _serve()


@pytest.fixture
def other() -> Iterator[Liar]:
    """The server that a redirect leads to."""
    yield from _serve()


@pytest.fixture
async def store(liar: Liar) -> S3Store:
    return S3Store("bucket", "team", S3Settings(endpoint_url=liar.endpoint_url), bound_by_profile=False)


def listed(*keys: str, size: str = "3", time: str = "2026-11-22T20:00:00.000Z", more: str = "") -> bytes:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified>{more}</Contents>"
        for key in keys
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()


GOOD: Final = "team/blobs/00/j/x"
LISTS: Final = {
    "a page of HTML": f"<html>{_SECRET}".encode(),
    "nothing": b"\xff\xfe\x00",
    "another document": b"<Other/>" * 2,
    "entities in entities": b'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 10) for n in range(9))
    + b"]><ListBucketResult>&j;</ListBucketResult>",
    "an entity of this machine": b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    + listed("&x;").replace(b"<?xml", b""),
    "a size that is none": listed(GOOD, size=_SECRET),
    "a size twice": listed(GOOD, more="<Size>4</Size>"),
    "a time that is none": listed(GOOD, time=_SECRET),
    "a time without end": listed(GOOD, time="9" * 5000),
    "a time after all times": listed(GOOD, time="Mon, 01 Jan 99999 00:00:00 +9999999"),
    "no time": listed(GOOD).replace(b"LastModified", b"L"),
    "no key": listed(GOOD).replace(b"Key", b"K"),
    "a key above the prefix": listed("other/blobs/00/j/x"),
    "a key beside the prefix": listed("team-b/blobs/00/j/x"),
    "a climbing key": listed("team/../../etc/passwd"),
    "a key of another prefix": listed("team/indexes/00/j/x"),
    "an empty key": listed(""),
    "the same key twice": listed(GOOD, GOOD),
    "keys that descend": listed("team/blobs/01/j/x", GOOD),
    "fewer than it says": listed(GOOD).replace(b"<IsT", b"<KeyCount>5</KeyCount><IsT"),
    "more than were asked for": listed(*(f"{GOOD}{n:05d}" for n in range(1001))),
}


# Another document has no contents, and a list without any is a list.
EMPTY: Final = frozenset({"another document", "entities in entities"})


def assert_secret_is_kept(error: Exception) -> None:
    """What a server answered is not quoted: it may have what a proxy was asked for."""
    assert _SECRET not in str(error)


async def test_a_list_that_is_none_is_a_typed_error_and_names_no_key(store: S3Store, liar: Liar) -> None:
    """Whatever a server lists, nobody is ever handed a key that is not below what was asked for."""
    for what, body in LISTS.items():
        liar.body = body
        try:
            found = [blob.key async for blob in list_blobs(store, "blobs/")]
        except StoreError as error:
            check_refusal(error)
            assert_secret_is_kept(error)
        else:
            assert found == [], what
            assert what in EMPTY, what
    await store.close()


async def test_a_true_list_is_handed_on(store: S3Store, liar: Liar) -> None:
    """So that the refusals above mean something."""
    liar.body = listed(GOOD, GOOD + "1")
    assert [blob.key async for blob in list_blobs(store, "blobs/")] == ["blobs/00/j/x", "blobs/00/j/x1"]
    await store.close()


HEADERS: Final = {
    "no time": {"Last-Modified": ""},
    "a time that is none": {"Last-Modified": "yesterday"},
    "a time after all times": {"Last-Modified": "Mon, 99 Jan 99999 99:99:99 +99999999"},
    "a year without end": {"Last-Modified": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"},
}


async def test_headers_that_say_nothing_are_a_typed_error(store: S3Store, liar: Liar) -> None:
    for headers in HEADERS.values():
        liar.headers = headers
        with pytest.raises(StoreError) as refused:
            await store.stat("blobs/00/j/x")
        assert refused.value.hint
    await store.close()


async def test_a_body_longer_than_the_cap_is_not_read(store: S3Store, liar: Liar) -> None:
    liar.body = bytes(1_000_000)
    liar.headers = {"Last-Modified": DATE, "ETag": '"x"'}
    with pytest.raises(StoreError):
        await read_blob(store, "blobs/00/j/x", size_bytes_max=1000)
    await store.close()


def _requests(store: S3Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Each way to ask a server: through the event loop, in a thread, with a body, without an answer's body."""
    return {
        "get": lambda: read_blob(store, "blobs/00/j/x", size_bytes_max=1000),
        "range": lambda: store.read_into("blobs/00/j/x", Collecting(), size_bytes=2 * 1024 * 1024),
        "stat": lambda: store.stat("blobs/00/j/x"),
        "list": lambda: store.list_page("blobs/"),
        "put": lambda: store.put("blobs/00/j/x", BytesBody(b"abc")),
        "create": lambda: store.put_if_absent("blobs/00/j/x", BytesBody(b"abc")),
        "delete": lambda: store.delete(["blobs/00/j/x"]),
    }


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(store: S3Store, liar: Liar, other: Liar, status: int) -> None:
    """The other host would get the session token, and what it answers would be taken for the object (F2)."""
    host = other.endpoint_url.removeprefix("http://")
    liar.status, liar.headers = status, {"Location": f"{other.endpoint_url}/{_SECRET}"}
    for what, ask in _requests(store).items():
        is_unread = (status, what) == (303, "range")  # the SDK's blocking client fails on it
        with pytest.raises(StoreError if is_unread else InvalidRequestError) as refused:
            await ask()
        assert is_unread or host in refused.value.hint, what
        assert_secret_is_kept(refused.value)
        assert _SECRET not in refused.value.hint
    assert other.requests == []
    await store.close()
    with warnings.catch_warnings():
        # The SDK's blocking client loses the answer that it fails on, and its socket goes with the garbage.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_answer_without_end_is_given_up(store: S3Store, liar: Liar, status: int) -> None:
    """In bounded memory: no more is read than the limit and what is on its way (F5)."""
    liar.status, liar.is_endless, liar.body = status, True, bytes(64 * 1024)
    requests = _requests(store)
    for what in ("get", "range", "list", "put", "delete"):
        liar.sent_bytes = 0
        with pytest.raises(StoreError):
            await requests[what]()
        assert liar.sent_bytes < 32 * 1024 * 1024, what
    await store.close()


async def test_a_refusal_that_drips_without_end_holds_no_thread(
    store: S3Store, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timeout between two bytes ends it, and nobody can stop the thread."""
    monkeypatch.setattr("blobstore.s3.threads._REFUSAL_S_MAX", 0.3)
    liar.status, liar.is_endless, liar.body, liar.pause_s = 500, True, b"x", 0.02
    async with asyncio.timeout(5):
        with pytest.raises(StoreUnavailableError):
            await _requests(store)["range"]()
    await store.close()


async def test_a_quota_that_is_used_up_is_a_full_store(store: S3Store, liar: Liar) -> None:
    """And no refused permission, though Ceph says both by a 403: a restore goes on without its pin (F3)."""
    liar.status, liar.body = 403, b"<Error><Code>QuotaExceeded</Code></Error>"
    requests = _requests(store)
    for what in ("put", "create"):
        with pytest.raises(StoreFullError):
            await requests[what]()
    await store.close()


def test_a_black_hole_ends_a_command_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers; `list` was silent for five minutes (F14)."""
    monkeypatch.setattr("blobstore.opening._SERVER_ANSWERS_WITHIN_S", (0.2, 0.3))
    monkeypatch.setattr("blobstore.wrappers.retry._SILENCE_S", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with socket.create_server(("127.0.0.1", 0)) as hole:
        host = f"127.0.0.1:{hole.getsockname()[1]}"
        words = ["list", "-r", "s3://bucket/team", "-j", "job", "--endpoint-url", f"http://{host}"]
        done = CliRunner().invoke(tidemark, words)
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert f"warning: no answer from {host} for" in done.stderr
    assert "attempt 2 of" in done.stderr
