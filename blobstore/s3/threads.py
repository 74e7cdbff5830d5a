"""Bodies of answers that are read in threads: the SDK signs and asks, and its blocking HTTP client moves the bytes.

aiohttp passes each piece of a body through the event loop, and to a thread that hashes and writes it. Here that thread
itself reads from the socket, which takes less than half of the CPU (design 0008, B1). Everything else of a request is
the SDK's as ever: endpoint, credentials, signature, certificates, proxies, and what a refusal says.
"""

import _thread
import asyncio
import http.client
import ssl
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import aiohttp
import urllib3
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import URLLib3Session
from typing_extensions import override

from blobstore.base import HELD_S, SINK_BYTES, Buffer, Sink
from blobstore.concurrency import run_blocking
from blobstore.s3.errors import BrokenError

T = TypeVar("T")

# Whether the request that is made in this context is sent by a thread; otherwise it goes through the event loop.
IN_THREAD: Final = ContextVar("IN_THREAD", default=False)
_REFUSED: Final = 300
# The longest refusal, and the longest other answer, that is read: a page of 1,000 keys, each byte of them escaped, is
# less than 4 MiB.
_REFUSAL_BYTES_MAX: Final = 1024 * 1024
_ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
# How long a thread reads a refusal: its caller, who has a deadline for each answer, cannot stop it.
_REFUSAL_S_MAX: Final = 60.0
# What is read at first; more at a time while that comes fast, so that of a slow body the sink hears in time.
_FIRST_BYTES: Final = 64 * 1024
_FAST_S: Final = HELD_S / 8
# What threads have read into, for those that come after them: a new buffer for each range would be cleared first. Up
# to 16 MiB stay for the life of the process.
_BUFFERS: Final = deque[bytearray](maxlen=16)
# Connections that nobody used for so long are not trusted: what is between may have forgotten them.
_IDLE_MAX_S: Final = 12.0


class ThreadedSession(AIOHTTPSession):  # type: ignore[misc]  # the SDK has no types
    """The SDK's HTTP client, which sends in a thread what `IN_THREAD` says so of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        settings.pop("connector_args", None)
        self._settings = settings
        self._making = threading.Lock()
        self._blocking: URLLib3Session | None = None
        self._used_at_s = 0.0

    @override
    async def send(self, request: Any) -> Any:
        if IN_THREAD.get():
            clock = asyncio.get_running_loop().time
            return await _in_thread(lambda: self._send(request, clock), _close_answer)
        is_stream, request.stream_output = request.stream_output, True  # the SDK would read all of it, without a limit
        answer = await super().send(request)
        if is_stream and answer.status_code < _REFUSED:
            return answer
        bytes_max = _REFUSAL_BYTES_MAX if answer.status_code >= _REFUSED else _ANSWER_BYTES_MAX
        content = await _read_answer(answer.raw, bytes_max)
        return AioAWSResponse(answer.url, answer.status_code, answer.headers, _ReadBody(content))

    @override
    async def _get_session(self, proxy_url: str | None) -> SimpleNamespace:
        # No redirect is followed: the other host would get the session token (design 0003, E6).
        session = await super()._get_session(proxy_url)

        def request(*args: Any, **how: Any) -> Any:
            return session.request(*args, **how | {"allow_redirects": False})

        return SimpleNamespace(request=request)

    @override
    async def close(self) -> None:
        if self._blocking is not None:
            self._blocking.close()
        await super().close()

    def _send(self, request: Any, clock: Callable[[], float]) -> AioAWSResponse:
        answer = self._session(clock()).send(request)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if request.stream_output and answer.status_code < _REFUSED:
            return AioAWSResponse(answer.url, answer.status_code, headers, answer.raw)
        content, until_s = bytearray(), clock() + _REFUSAL_S_MAX
        try:
            while piece := answer.raw.read1(_FIRST_BYTES):
                content += piece
                if len(content) > _REFUSAL_BYTES_MAX or clock() > until_s:
                    answer.raw.close()
                    raise _too_much(_REFUSAL_BYTES_MAX)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise BrokenError(f"a refusal broke off: {type(error).__name__}") from None
        return AioAWSResponse(answer.url, answer.status_code, headers, _ReadBody(bytes(content)))

    def _session(self, now_s: float) -> URLLib3Session:
        with self._making:
            if self._blocking is None or now_s > self._used_at_s + _IDLE_MAX_S:
                # Those that are still at work have the old one, and close with their answers.
                self._blocking = _BlockingSession(**self._settings)
            self._used_at_s = max(now_s, self._used_at_s)
            return self._blocking


class _BlockingSession(URLLib3Session):  # type: ignore[misc]  # as above
    """The SDK's blocking HTTP client, which reads the certificates once and not for each connection."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._reading = threading.Lock()
        # The TLS contexts that have the certificates of a file.
        self._know: set[tuple[ssl.SSLContext, str]] = set()

    @override
    def _setup_ssl_cert(self, conn: Any, url: str, verify: Any) -> None:
        # A pool that names a file has each of its connections read it, 0.03 s of CPU each, into the context of all.
        with self._reading:
            super()._setup_ssl_cert(conn, url, verify)
            certificates, context = conn.ca_certs, conn.conn_kw.get("ssl_context")
            # A proxy may have a context of its own, for which the pool has to name the file.
            if certificates is None or context is None or conn.proxy is not None:
                return
            if (known := (context, certificates)) not in self._know:
                context.load_verify_locations(certificates)
                self._know.add(known)
            conn.ca_certs = None


async def _read_answer(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    content, is_whole = bytearray(), False
    try:
        while part := await answer.content.readany():
            content += part
            if len(content) > bytes_max:
                raise _too_much(bytes_max)
        is_whole = True
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BrokenError(f"the answer broke off: {type(error).__name__}") from None
    finally:
        if not is_whole:
            answer.close()
    return bytes(content)


def _too_much(bytes_max: int) -> BrokenError:
    return BrokenError(f"the answer has more than {bytes_max} bytes, or comes too slowly")


class _ReadBody:
    """An answer that has been read, for the SDK, which reads it as if it were still to come."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data

    def close(self) -> None:
        pass  # nothing is held


async def read_into(body: urllib3.HTTPResponse, sink: Sink, *, size_bytes: int) -> None:
    """Give the body of an answer, of as many bytes as were announced, to a sink, in a thread.

    Cancelled, it leaves that thread alone, which has no way to the sink any more and ends with its piece or the read
    timeout. (Closing its socket from here would, over TLS, give it the ciphertext to read.)

    Raises:
        BrokenError: They did not come.
        Exception: What the sink raised.
    """
    clock, writing, is_given_up = asyncio.get_running_loop().time, threading.Lock(), False

    def write(piece: Buffer) -> bool:
        with writing:
            if not is_given_up:
                sink.write(piece)
            return not is_given_up

    def wait_for_write() -> None:
        with writing:
            pass

    try:
        await _in_thread(lambda: _read(body, write, size_bytes, clock))
    except asyncio.CancelledError:
        is_given_up = True
        await run_blocking(wait_for_write)
        raise


def _read(
    body: urllib3.HTTPResponse, write: Callable[[Buffer], bool], size_bytes: int, clock: Callable[[], float]
) -> None:
    """Read a body until `write` says that nobody waits for more."""
    left, at_once = size_bytes, _FIRST_BYTES
    # urllib3 makes a new object of each piece; what it reads from fills one buffer (design 0008, R14).
    source = getattr(body, "_fp", None)
    source = source if isinstance(source, http.client.HTTPResponse) else body
    try:
        buffer = _BUFFERS.pop()
    except IndexError:
        buffer = bytearray(SINK_BYTES)
    try:
        while left:
            began_s = clock()
            piece = memoryview(buffer)[: min(left, at_once)]
            try:
                piece = piece[: source.readinto(piece)]
            except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
                raise BrokenError(f"the body broke off: {type(error).__name__}") from None
            if not piece:
                raise BrokenError(f"the last {left} bytes did not come")
            left -= len(piece)
            took_s = clock() - began_s
            if took_s < _FAST_S:
                at_once = min(2 * at_once, SINK_BYTES)
            elif took_s > HELD_S:
                at_once = max(at_once // 2, _FIRST_BYTES)
            if not write(piece):
                return
    finally:
        _BUFFERS.append(buffer)
        # A length that is not the answer's end, as beside chunks, leaves something in the connection.
        if left or not source.isclosed():
            body.close()
        else:
            body.release_conn()


async def _in_thread(work: Callable[[], T], undo: Callable[["Future[T]"], None] | None = None) -> T:
    """Run a function in a thread; a call that is cancelled meanwhile does not wait for it.

    Nor does the end of the process: those of a pool would be waited for. And nobody waits for the thread to begin, as
    `threading.Thread.start` does: where many compete for the interpreter that holds the event loop for 5 ms each time.

    `undo` is what happens, in the thread, to a result for which nobody waits.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the caller has it
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    _thread.start_new_thread(run, ())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if undo is not None:
            future.add_done_callback(undo)
        raise


def _close_answer(answered: "Future[AioAWSResponse]") -> None:
    if answered.exception() is None:
        answered.result().raw.close()
