"""A proxy for plain HTTP/1.1 that passes everything on as it is, except for what its rules break.

```python
async with FaultProxy("127.0.0.1:7480") as proxy:
    rule = proxy.add(Rule(fault=lose_answer(), when=on("PutObject", key="log/")))
    ...  # a client of proxy.endpoint_url
    assert rule.struck == 1
```

Heads are passed on byte for byte, `Host` too, which the signatures of S3 cover; bodies stream. For long runs it is a
process of its own, which prints its port and, when it is asked to end (SIGTERM), what it did:

```
python -m tests.fault_proxy 127.0.0.1:7480 --seed 1 --lose 0.05 --reset 0.05
```
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from random import Random
from types import TracebackType
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import msgspec

from tests.fault_rules import (
    Answer,
    Break,
    Drip,
    Fault,
    FlipUpload,
    Hang,
    Reply,
    Request,
    Rewrite,
    Rule,
    Stage,
    flip_bit,
    header_of,
    name_of,
    soak_rules,
)
from tests.fault_wire import HEAD_BYTES_MAX, Head, Piece, Upstream, Wire

REWRITE_BYTES_MAX: Final = 64 * 1024 * 1024
# A server that answers before it has read the body gets this long for the rest of it.
REST_OF_UPLOAD_S: Final = 5.0
_DRIP_STEP_S: Final = 0.05
_NO_BODY: Final = frozenset({204, 304})


class Exchange(msgspec.Struct, kw_only=True):
    """One request and what became of it."""

    method: str
    target: str
    operation: str
    headers: tuple[tuple[str, str], ...]
    # Which of the client's connections, from 1.
    connection: int
    at_s: float
    # "" if none struck.
    fault: str = ""
    # The whole request was sent on to the server.
    reached_upstream: bool = False
    # What the server answered; 0 if it did not.
    upstream_status: int = 0
    # The client was sent a whole answer, true or not.
    answered: bool = False

    def header(self, name: str) -> str:
        """The value of a header of the request; "" if it is not there."""
        return header_of(self.headers, name)


class FaultProxy:
    """A proxy on a free port of the loopback interface; an async context manager.

    Args:
        upstream: The server, as `host:port` or as a URL of plain HTTP.
        rng: For rules with a probability.
        log_max: How many exchanges are remembered; None for all.
    """

    def __init__(self, upstream: str, *, rng: Random | None = None, log_max: int | None = None) -> None:
        parts = urlsplit(upstream if "//" in upstream else f"//{upstream}")
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._rng = rng or Random(0)
        # In the order in which they are asked.
        self.rules: list[Rule] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._log: deque[Exchange] = deque(maxlen=log_max)
        self.in_flight = 0
        # The most requests that were under way at once.
        self.in_flight_most = 0
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def endpoint_url(self) -> str:
        """Where it listens, as a URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Every request so far, in the order in which their heads came."""
        return tuple(self._log)

    def of(self, *operations: str, key: str = "") -> tuple[Exchange, ...]:
        """The exchanges of some S3 operations (all if none is named), with a substring in the target."""
        return tuple(e for e in self._log if (not operations or e.operation in operations) and key in unquote(e.target))

    def add(self, rule: Rule) -> Rule:
        """Obey one more rule; of several that match a request, the first one added strikes."""
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and the log."""
        self.rules.clear()
        self.clear_log()

    def clear_log(self) -> None:
        """Forget what was asked so far."""
        self._log.clear()
        self.in_flight_most = self.in_flight

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        client = Wire(reader, writer)
        upstream = Upstream(self._upstream)
        try:
            while await self._serve_next(client, upstream, self._connections):
                pass
        except (_BrokenError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # By a rule, by the client or by the server: the other side sees the same.
            client.abort()
        except asyncio.CancelledError:
            # The proxy closes. Not passed on: `start_server` would report it.
            client.abort()
        finally:
            upstream.abort()
            with contextlib.suppress(asyncio.CancelledError):
                await client.close()
            self._tasks.discard(task)

    async def _serve_next(self, client: Wire, upstream: Upstream, connection: int) -> bool:
        """One exchange; whether the client's connection can take another."""
        head = await client.read_head()
        if head is None:
            return False
        method, target, _ = head.start.split(" ", 2)
        request = Request(method=method, target=target, headers=head.headers)
        fault = next((rule.fault for rule in self.rules if rule.strikes(request, self._rng)), None)
        exchange = Exchange(
            method=method,
            target=target,
            operation=request.operation,
            headers=head.headers,
            connection=connection,
            at_s=asyncio.get_running_loop().time(),
            fault=name_of(fault),
        )
        self._log.append(exchange)
        self.counts[exchange.fault or "passed on"] += 1
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        try:
            return await _Turn(client, upstream, head, fault, exchange).run()
        finally:
            self.in_flight -= 1


class _BrokenError(Exception):
    """A rule wants the connection broken with a reset."""


class _Turn:
    """One exchange under one fault or none."""

    def __init__(self, client: Wire, upstream: Upstream, head: Head, fault: Fault | None, exchange: Exchange) -> None:
        self._client = client
        self._upstream = upstream
        self._head = head
        self._fault = fault
        self._exchange = exchange

    async def run(self) -> bool:
        """Carry it out; whether the client's connection can take another.

        Raises:
            _BrokenError: The client's connection is to be reset.
            ConnectionError: One of the two connections broke.
            IncompleteReadError: As before.
        """
        match self._fault:
            case Break(at=Stage.REQUEST, polite=polite):
                if polite:
                    # With something left unread the system would send a reset.
                    await self._skip_upload()
                return _broken(polite=polite)
            case Break(at=Stage.UPLOAD, polite=polite) if not (self._head.chunked or self._head.size_bytes):
                return _broken(polite=polite)
            case Hang(at=Stage.REQUEST) as hang:
                await self._hang(hang)
            case Reply(answer=answer, after_upstream=False):
                # A client that waits to be asked for its body is not asked.
                expected = bool(header_of(self._head.headers, "Expect"))
                if not expected:
                    await self._skip_upload()
                await self._send_whole(answer, with_body=not self._asks_for_head)
                return self._head.keeps_alive and not expected
        wire = await self._upstream.connect()
        await wire.send(self._head.raw)
        upload = asyncio.ensure_future(self._pass_upload_on(wire))
        try:
            try:
                head = await self._read_answer(wire)
            except (ConnectionError, asyncio.IncompleteReadError):
                # If it was the upload that broke the connection, then it knows why.
                await upload
                raise
            self._exchange.upstream_status = head.status
            return await self._pass_answer_on(wire, head, upload)
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)

    @property
    def _asks_for_head(self) -> bool:
        return self._exchange.method == "HEAD"

    async def _hang(self, hang: Hang) -> None:
        gone = asyncio.ensure_future(self._client.gone())
        waits = [gone] + ([asyncio.ensure_future(hang.until.wait())] if hang.until is not None else [])
        try:
            await asyncio.wait(waits, timeout=hang.seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ConnectionResetError("the client has gone away")
        finally:
            for wait in waits:
                wait.cancel()

    async def _skip_upload(self) -> None:
        async for _ in self._client.read_body(self._head):
            pass

    async def _pass_upload_on(self, wire: Wire) -> bool:
        """Send the body of the request on; whether the server took all of it.

        Raises:
            As `run`.
        """
        try:
            taken = await self._pass_pieces_on(wire)
        except _BrokenError:
            if isinstance(self._fault, Break) and self._fault.polite:
                await self._upstream.close()
            self._upstream.abort()
            raise
        except BaseException:
            self._upstream.abort()
            raise
        self._exchange.reached_upstream = taken
        return taken

    async def _pass_pieces_on(self, wire: Wire) -> bool:
        cut_bytes = self._cut_bytes(Stage.UPLOAD, self._head)
        flip_at = self._fault.at_byte if isinstance(self._fault, FlipUpload) else -1
        done_bytes, listening = 0, True
        if cut_bytes == 0:
            raise _BrokenError
        async for data, is_payload in self._client.read_body(self._head):
            piece = flip_bit(data, flip_at - done_bytes) if is_payload else data
            done_bytes += len(data) if is_payload else 0
            cut = cut_bytes is not None and done_bytes >= cut_bytes
            if cut:
                piece = piece[: len(piece) - (done_bytes - (cut_bytes or 0))]
            if listening:
                try:
                    await wire.send(piece)
                except ConnectionError:
                    # The server has seen enough, and its answer counts. The rest is read for the client's sake.
                    listening = False
            if cut:
                await wire.settle()
                raise _BrokenError
        return listening

    async def _read_answer(self, wire: Wire) -> Head:
        """The head of the final answer; those before it, such as `100 Continue`, are passed on."""
        while True:
            head = await wire.read_head()
            if head is None:
                raise ConnectionResetError("the server closed the connection without an answer")
            if head.status >= 200:
                return head
            await self._client.send(head.raw)

    async def _pass_answer_on(self, wire: Wire, head: Head, upload: "asyncio.Future[bool]") -> bool:
        bodiless = self._asks_for_head or head.status in _NO_BODY
        until_close = not (bodiless or head.chunked or head.size_bytes is not None)
        body = _nothing() if bodiless else wire.read_body(head, until_close=until_close)
        keeps = False
        match self._fault:
            case Break(at=Stage.ANSWER, polite=polite):
                await _join(body)
                await _finish(upload)
                return _broken(polite=polite)
            case Break(at=Stage.BODY, polite=polite) if bodiless or head.size_bytes == 0:
                return _broken(polite=polite)
            case Reply(answer=answer):
                await _join(body)
                keeps = await _finish(upload)
                await self._send_whole(answer, with_body=not bodiless)
            case Rewrite(change=change):
                whole = Answer(
                    status=head.status,
                    reason=head.start.partition(" ")[2].partition(" ")[2],
                    headers=head.headers,
                    body=await _join(body),
                )
                keeps = await _finish(upload)
                await self._send_whole(change(whole), with_body=not bodiless)
            case fault:
                if isinstance(fault, Hang) and fault.at is Stage.ANSWER:
                    await self._hang(fault)
                self._exchange.answered = not isinstance(fault, Break)
                await self._stream(head, body)
                if isinstance(fault, Break) and fault.at is Stage.BODY:
                    return _broken(polite=fault.polite)
                keeps = await _finish(upload)
        self._upstream.touch()
        if until_close or not (keeps and head.keeps_alive):
            await self._upstream.close()
        return keeps and head.keeps_alive and self._head.keeps_alive and not until_close

    async def _stream(self, head: Head, body: AsyncIterator[Piece]) -> None:
        """Pass an answer on as it comes: up to where it is to be cut, or slowly, or with a pause."""
        cut_bytes = self._cut_bytes(Stage.BODY, head)
        done_bytes = 0
        await self._client.send(head.raw)
        async for data, is_payload in body:
            piece = data
            done_bytes += len(data) if is_payload else 0
            if cut_bytes is not None and done_bytes >= cut_bytes:
                at = len(data) - (done_bytes - cut_bytes)
                await self._client.send(data[:at])
                await self._client.settle()
                if not isinstance(self._fault, Hang):
                    return
                await self._hang(self._fault)
                piece, cut_bytes = data[at:], None
            await self._send_piece(piece)

    async def _send_piece(self, piece: bytes) -> None:
        if not isinstance(self._fault, Drip):
            await self._client.send(piece)
            return
        step_bytes = max(1, int(self._fault.bytes_per_s * _DRIP_STEP_S))
        for start in range(0, len(piece), step_bytes):
            await self._client.send(piece[start : start + step_bytes])
            await asyncio.sleep(step_bytes / self._fault.bytes_per_s)

    async def _send_whole(self, answer: Answer, *, with_body: bool) -> None:
        self._exchange.answered = True
        if with_body:
            answer = answer.with_headers(transfer_encoding=None, content_length=str(len(answer.body)))
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in answer.headers)]
        raw = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        await self._client.send(raw + answer.body if with_body else raw)

    def _cut_bytes(self, at: Stage, head: Head) -> int | None:
        """After how much of a body the fault is to strike; None if it is another fault."""
        if not isinstance(self._fault, Break | Hang) or self._fault.at is not at:
            return None
        after_bytes = self._fault.after_bytes if isinstance(self._fault, Break) else None
        if after_bytes is not None:
            return after_bytes
        if head.size_bytes is not None:
            return head.size_bytes // 2
        return 1 if head.chunked or at is Stage.BODY else 0


def _broken(*, polite: bool) -> bool:
    """What `run` returns so that the connection is closed.

    Raises:
        _BrokenError: It is to be reset.
    """
    if not polite:
        raise _BrokenError
    return False


async def _finish(upload: "asyncio.Future[bool]") -> bool:
    """Wait for the end of an upload whose answer is there already; whether the server took all of it."""
    try:
        return await asyncio.wait_for(upload, REST_OF_UPLOAD_S)
    except TimeoutError:
        return False


async def _join(body: AsyncIterator[Piece]) -> bytes:
    """A whole body.

    Raises:
        ConnectionAbortedError: It is too large to be held.
    """
    parts: list[bytes] = []
    size_bytes = 0
    async for data, is_payload in body:
        if is_payload:
            parts.append(data)
            size_bytes += len(data)
            if size_bytes > REWRITE_BYTES_MAX:
                raise ConnectionAbortedError("the answer is too large to be rewritten")
    return b"".join(parts)


async def _nothing() -> AsyncIterator[Piece]:
    return
    yield


async def _serve(upstream: str, *, seed: int, lose: float, reset: float) -> None:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    async with FaultProxy(upstream, rng=Random(seed), log_max=0) as proxy:
        for rule in soak_rules(lose, reset):
            proxy.add(rule)
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        await asked_to_end.wait()
        sys.stdout.write(f"{json.dumps(proxy.counts, sort_keys=True)}\n")


def main() -> None:
    """Run a proxy until SIGTERM."""
    parser = argparse.ArgumentParser(description="A proxy that loses answers and breaks connections.")
    parser.add_argument("upstream", help="host:port of a server of plain HTTP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lose", type=float, default=0.0, help="share of answers lost after the server did its work")
    parser.add_argument("--reset", type=float, default=0.0, help="share of connections broken before or in a body")
    given = parser.parse_args()
    asyncio.run(_serve(given.upstream, seed=given.seed, lose=given.lose, reset=given.reset))


if __name__ == "__main__":
    main()
