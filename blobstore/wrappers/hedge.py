"""Asking once more while the answer does not come: one request in a hundred that hangs holds nobody."""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, Body, Created
from blobstore.concurrency import give_up, shielded
from blobstore.errors import StoreUnavailableError
from blobstore.sink import Buffer, Sink
from blobstore.wrappers.forwarding import ForwardingStore, Read
from blobstore.wrappers.retry import RetryBudget

T = TypeVar("T")

_SMALL_READS: Final = frozenset({"stat", "list_page"})
# Answers of which the times are kept, and how many make a habit.
_KEPT_MAX: Final = 100
_KNOWN_MIN: Final = 10


class HedgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a read, or a put that is repeatable, is sent once more (design 0008, H1 to H3 and H6)."""

    # For one answer, in all.
    requests_max: int = 3
    # The time within which this share of the last answers began to come, multiplied by the factor.
    share: float = 0.95
    factor: float = 2.0
    # Never sooner; and so long while too few answers are known.
    patience_min_s: float = 0.1
    first_patience_s: float = 0.5
    # More requests that may be sent at once, and those that pay for one more.
    extra_in_reserve: int = 8
    requests_per_extra: int = 20

    def __post_init__(self) -> None:
        """Raise `ValueError` for a number that is out of range."""
        if not 0 < self.share < 1 or self.factor < 1:
            raise ValueError("share is within 0 and 1, and factor is at least 1")
        if self.requests_max < 1:
            raise ValueError("requests_max is positive")
        if self.extra_in_reserve < 0 or self.requests_per_extra < 1:
            raise ValueError("extra_in_reserve is not negative and requests_per_extra is positive")
        if min(self.patience_min_s, self.first_patience_s) <= 0:
            raise ValueError("patience is positive")


class Hedge:
    """Races requests for one answer, when the first is late."""

    def __init__(self, settings: HedgeSettings | None = None) -> None:
        self._settings = settings or HedgeSettings()
        # By operation: the times that the last answers have taken.
        self._answers_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_MAX))
        self._budget = RetryBudget(self._settings.extra_in_reserve, self._settings.requests_per_extra)

    async def race(
        self,
        operation: str,
        ask: Callable[[], Awaitable[T]],
        discard: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """Return the first answer to one request or a few; how long to wait, the times of former answers decide.

        On an error and on a cancellation, no request is under way and no answer is left open. `discard` is what is
        done with an answer that came too late.
        """
        clock = asyncio.get_running_loop().time
        answers_s, began_s = self._answers_s[operation], clock()
        self._budget.refill()
        asked = [asyncio.ensure_future(ask())]
        try:
            while len(asked) < self._settings.requests_max:
                patience_s = self._patience_s(answers_s)
                answered, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if answered or not self._budget.take():
                    break
                asked.append(asyncio.ensure_future(ask()))
            winner = await _first_answer(asked)
            if len(asked) > 1:
                await shielded(_let_go([request for request in asked if request is not winner], discard))
        except BaseException:
            # Whatever has come, nobody will take it: also what has won, which may go on by itself.
            await shielded(_let_go(asked, discard))
            raise
        result = winner.result()
        answers_s.append(clock() - began_s)
        return result

    def _patience_s(self, answers_s: deque[float]) -> float:
        settings, known = self._settings, sorted(answers_s)
        if len(known) < _KNOWN_MIN:
            return settings.first_patience_s
        return max(settings.patience_min_s, settings.factor * known[int(settings.share * len(known))])


class HedgedStore(ForwardingStore):
    """Sends a read again, beside the first, when its answer is late, and takes the one that begins to come first.

    Reads are those of blobs, stats and lists; a put that is `repeatable` is treated as they are. The loser is given
    up. What was lost or refused is none of its business: an error that is not `StoreUnavailableError` is an answer.
    """

    def __init__(self, inner: BlobStore, settings: HedgeSettings | None = None) -> None:
        super().__init__(inner)
        self._hedge = Hedge(settings)

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        def ask() -> Awaitable[Created]:
            return self._inner.put(key, body, ttl_ms=ttl_ms, repeatable=repeatable)

        return await (self._hedge.race("put", ask) if repeatable else ask())

    @override
    async def _read(self, read: Read, sink: Sink) -> None:
        claim = threading.Lock()

        async def ask() -> asyncio.Future[None]:
            """Return a read once it has brought bytes or is at its end."""
            lane = _Lane(sink, claim)
            reading = asyncio.ensure_future(read(lane))
            try:
                await asyncio.wait({reading, lane.is_taken}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await give_up(reading)
                raise
            if reading.done():
                reading.result()
            return reading

        reading = await self._hedge.race("get", ask, give_up)
        try:
            if not reading.done():
                await asyncio.wait({reading})
        finally:
            await give_up(reading)
        reading.result()

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        return await (self._hedge.race(operation, request) if operation in _SMALL_READS else request())


async def _first_answer(asked: Sequence[asyncio.Future[T]]) -> asyncio.Future[T]:
    """Return the first that is answered; if none is, the one whose error is raised."""
    left = set(asked)
    while left:
        _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for request in asked:
            if request.done() and not isinstance(request.exception(), StoreUnavailableError | _LateError):
                return request
    return next(request for request in asked if not isinstance(request.exception(), _LateError))


async def _let_go(asked: Sequence[asyncio.Future[T]], discard: Callable[[T], Awaitable[None]] | None) -> None:
    """Cancel requests, and discard the answers that they have had."""
    await give_up(*asked)
    for request in asked:
        if discard is not None and not request.cancelled() and request.exception() is None:
            await discard(request.result())


class _LateError(Exception):
    """Another read has the sink."""


class _Lane(Sink):
    """One of several reads of the same range into one sink: the first that brings bytes has it (design 0008, H4).

    `claim` is held by the lane that has the sink, and is never given back.
    """

    def __init__(self, sink: Sink, claim: threading.Lock) -> None:
        self._sink = sink
        self._claim = claim
        self._has_sink = False
        self.blocks = sink.blocks
        self._loop = asyncio.get_running_loop()
        # Set once this one has the sink.
        self.is_taken: asyncio.Future[None] = self._loop.create_future()

    def _is_first_write(self) -> bool:
        if self._has_sink:
            return False
        self._has_sink = self._claim.acquire(blocking=False)
        if not self._has_sink:
            raise _LateError
        return True

    @override
    def write(self, data: Buffer) -> None:
        if self._is_first_write():
            # Before the write: the time that the sink takes is not the store's.
            self._loop.call_soon_threadsafe(self._set_taken)
        self._sink.write(data)

    @override
    async def write_here(self, chunks: Sequence[Buffer]) -> None:
        if self._is_first_write():
            self._set_taken()
        await self._sink.write_here(chunks)

    def _set_taken(self) -> None:
        if not self.is_taken.done():
            self.is_taken.set_result(None)
