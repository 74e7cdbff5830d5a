"""A cap on the requests that are under way at once, learnt from what the store says."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType

from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.errors import InvalidRequestError
from blobstore.wrappers.forwarding import ForwardingStore


class InFlightLimit:
    """Halves when the store asks for less, and grows by one after every `in_flight_max` successes, up to that.

    So slow a growth keeps the refusals that each step too far costs to a few in a hundred, however little a store can
    take, which the budget of retries can bear.

    One object is given to the store that keeps the limit and to the one that hears the answers. Sixteen requests that
    are refused together are one piece of news, not sixteen: as long as more are under way than are allowed, the last
    halving has not come into force, and no answer shows whether it was right.

    Requests get their slot in the order in which they came. None that is under way is ever taken back.

    Args:
        in_flight_max: How many at most, and at first; at least 1.

    Attributes:
        allowed: How many at present, from 1 to the most.
        under_way: How many there are.

    Source:
        Additive increase, multiplicative decrease, as TCP does (RFC 5681); design 0003, E2.
    """

    def __init__(self, in_flight_max: int) -> None:
        if in_flight_max < 1:
            raise InvalidRequestError(f"in_flight_max is {in_flight_max}, which lets nothing through", operation="open")
        self._in_flight_max = in_flight_max
        self._successes = 0
        # Requests that wait while there is no slot; empty whenever there is one.
        self._queue: deque[asyncio.Future[None]] = deque()
        self.allowed = in_flight_max
        self.under_way = 0

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for a slot, and hold it."""
        return _Slot(self._take, self._give_back)

    def shrink(self) -> None:
        """Note that the store asked for less."""
        if self.under_way <= self.allowed:
            self.allowed = max(1, self.allowed // 2)
            self._successes = 0

    def grow(self) -> None:
        """Note that the store did what it was asked to do."""
        if self.under_way > self.allowed or self.allowed == self._in_flight_max:
            return
        self._successes += 1
        if self._successes >= self._in_flight_max:
            self._successes = 0
            self.allowed += 1
            self._let_in()

    async def _take(self) -> None:
        if self.under_way < self.allowed:
            self.under_way += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # The slot came in the same moment as the cancellation.
                self._give_back()
            else:
                turn.cancel()
                with suppress(ValueError):  # passed over by `_let_in` already
                    self._queue.remove(turn)
            raise

    def _give_back(self) -> None:
        self.under_way -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and self.under_way < self.allowed:
            turn = self._queue.popleft()
            if not turn.done():
                self.under_way += 1
                turn.set_result(None)


class _Slot(AbstractAsyncContextManager[None]):
    """One slot; no generator, since every request takes one."""

    __slots__ = ("_give_back", "_take")

    def __init__(self, take: Callable[[], Awaitable[None]], give_back: Callable[[], None]) -> None:
        self._take = take
        self._give_back = give_back

    @override
    async def __aenter__(self) -> None:
        await self._take()

    @override
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()


class LimitedStore(ForwardingStore):
    """Lets a number of requests through at once; the others wait in the order in which they came.

    A sink must not wait for another request to the store: at times there is one slot for all.

    Args:
        inner: The store.
        limit: How many. A number, at least 1, is a limit that stays as it is.
    """

    def __init__(self, inner: BlobStore, limit: InFlightLimit | int) -> None:
        super().__init__(inner)
        self._limit = InFlightLimit(limit) if isinstance(limit, int) else limit

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        return self._limit.slot()
