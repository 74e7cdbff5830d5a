"""Bodies of answers that are read in threads: the SDK signs and asks, and its blocking HTTP client moves the bytes.

aiohttp hands each piece of a body through the event loop, and to a thread that hashes and writes it. Here that thread
itself reads from the socket, which takes less than half of the CPU (design 0008, B1). Everything else of a request is
the SDK's as ever: endpoint, credentials, signature, certificates, proxies, and what a refusal says.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import urllib3
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import URLLib3Session
from typing_extensions import override

from blobstore.local_files import run_blocking
from blobstore.s3_errors import BrokenError
from blobstore.sinks import HELD_S, POURED_BYTES, Gate, ShutError, Sink

T = TypeVar("T")

# The threads for the request that is made in this context; None: it goes through the event loop.
THREADS: Final = ContextVar[Executor | None]("THREADS", default=None)
_REFUSED: Final = 300
# What is read at first; more at a time while that comes fast, so that of a slow body the sink hears in time.
_FIRST_BYTES: Final = 64 * 1024
_FAST_S: Final = HELD_S / 8


class ThreadedSession(AIOHTTPSession):  # type: ignore[misc]  # the SDK has no types
    """The SDK's HTTP client, which sends in a thread what `THREADS` says so of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        settings.pop("connector_args", None)
        self._settings = settings
        self._blocking: URLLib3Session | None = None

    @override
    async def send(self, request: Any) -> Any:
        threads = THREADS.get()
        if threads is None:
            return await super().send(request)
        return await _in_thread(threads, lambda: self._send(request), _close_answer)

    @override
    async def close(self) -> None:
        if self._blocking is not None:
            self._blocking.close()
        await super().close()

    def _send(self, request: Any) -> AioAWSResponse:
        if self._blocking is None:
            # Two threads may make one each: then the first one's connections end with their answers.
            self._blocking = URLLib3Session(**self._settings)
        answer = self._blocking.send(request)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        raw = answer.raw if answer.status_code < _REFUSED else _ReadBody(answer.content)
        return AioAWSResponse(answer.url, answer.status_code, headers, raw)


class _ReadBody:
    """What a refusal says, which the SDK reads as if it were still to come."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data

    def close(self) -> None:
        """There is nothing to close."""


async def pour(threads: Executor, body: urllib3.HTTPResponse, sink: Sink, *, size_bytes: int) -> None:
    """Give the body of an answer to a sink, in a thread.

    Cancelled, it leaves that thread alone, which has no way to the sink any more and ends soon.

    Args:
        threads: One of them.
        body: Not read yet; given up if it is not read to its end.
        sink: For the bytes.
        size_bytes: How many were announced.

    Raises:
        BrokenError: They did not come.
        Exception: What the sink raised.
    """
    gate, clock = Gate(sink), asyncio.get_running_loop().time
    try:
        await _in_thread(threads, lambda: _pour(body, gate, size_bytes, clock), lambda _: body.close())
    except asyncio.CancelledError:
        with suppress(Exception):  # it is between two pieces, or at its end
            body.shutdown()
        await run_blocking(gate.shut)
        raise


def _pour(body: urllib3.HTTPResponse, sink: Sink, size_bytes: int, clock: Callable[[], float]) -> None:
    left, at_once = size_bytes, _FIRST_BYTES
    try:
        while left:
            began_s = clock()
            try:
                piece = body.read(min(left, at_once))
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                raise BrokenError(f"the body broke off: {type(error).__name__}") from None
            if not piece:
                raise BrokenError(f"the last {left} bytes did not come")
            left -= len(piece)
            took_s = clock() - began_s
            if took_s < _FAST_S:
                at_once = min(2 * at_once, POURED_BYTES)
            elif took_s > HELD_S:
                at_once = max(at_once // 2, _FIRST_BYTES)
            sink.write(piece)
    except ShutError:
        pass  # nobody listens
    finally:
        if left:
            body.close()


async def _in_thread(threads: Executor, work: Callable[[], T], undo: Callable[["Future[T]"], None] | None = None) -> T:
    """The result of a function that runs in a thread; one that is cancelled meanwhile does not wait for it.

    Args:
        threads: One of them.
        work: The function.
        undo: What happens, in the thread, to a result for which nobody waits.
    """
    future = threads.submit(work)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if undo is not None:
            future.add_done_callback(undo)
        raise


def _close_answer(answered: "Future[AioAWSResponse]") -> None:
    if not answered.cancelled() and answered.exception() is None:
        answered.result().raw.close()
