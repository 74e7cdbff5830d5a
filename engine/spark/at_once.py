"""Several stores of one partition at once, within what is allowed for all of them together."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from engine.blocking import LoopThread
from engine.settings import TransferSettings, share_among

Item = TypeVar("Item")
Result = TypeVar("Result")

# A store that is slow or hangs holds one of so many places, and its share of requests and memory.
STORES_AT_ONCE_MAX: Final = 8


def share_settings(
    settings: TransferSettings, *, in_flight_max: int, stores_count: int
) -> tuple[int, TransferSettings]:
    """How many stores to work on at once, and what each of them may use.

    The shares are fixed: what one store does not use the others do not get, so that one whose requests hang takes
    nothing from them. A store that is alone in its partition has everything.

    Args:
        settings: What all of them together may use.
        in_flight_max: What the store beneath lets through at once.
        stores_count: How many there are; at least 1.

    Returns:
        The number, and the settings of each: that many times their memory and requests is within what was given.
    """
    settings = msgspec.structs.replace(settings, in_flight_max=min(in_flight_max, settings.in_flight_max))
    return share_among(settings, min(STORES_AT_ONCE_MAX, stores_count))


def carry_out_as_finished(
    loop: LoopThread,
    carry_out: Callable[[Item], Coroutine[Any, Any, Result]],
    items: Sequence[Item],
    *,
    at_once: int,
) -> Generator[Result, None, None]:
    """Call an async function on every item, so many at once; the results as they finish.

    For a thread without an event loop. Closing the generator cancels what is at work and waits for its end.

    Raises:
        Exception: What a call raises; the others are cancelled.
    """
    crew = _Crew(carry_out, items, at_once)
    try:
        for _ in items:
            yield loop.run(crew.next_result())
    finally:
        loop.run(crew.end())


class _Crew(Generic[Item, Result]):
    """Calls at work, from one visit of the other thread to the next; lives in one event loop."""

    def __init__(
        self, carry_out: Callable[[Item], Coroutine[Any, Any, Result]], items: Iterable[Item], at_once: int
    ) -> None:
        self._carry_out = carry_out
        self._items = iter(items)
        self._at_once = at_once
        self._at_work: set[asyncio.Task[Result]] = set()

    async def next_result(self) -> Result:
        """Wait for the next call that ends; there is one."""
        self._fill_up()
        done, _ = await asyncio.wait(self._at_work, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        self._at_work.remove(first)
        # The next one begins while the caller looks at this result.
        self._fill_up()
        return first.result()

    async def end(self) -> None:
        """Cancel what is at work and wait for its end."""
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)

    def _fill_up(self) -> None:
        for item in itertools.islice(self._items, self._at_once - len(self._at_work)):
            self._at_work.add(asyncio.create_task(self._carry_out(item)))
