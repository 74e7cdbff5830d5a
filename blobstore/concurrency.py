"""Running many awaitables with few in flight and few bytes in memory, and blocking calls in threads.

The first failure is the one that is raised. Work once handed to a thread cannot be taken back, so a cancelled call
waits until the thread is done before it raises. On a mount that hangs, the call hangs with it.
"""

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Other = TypeVar("Other")
Resource = TypeVar("Resource")
Parameters = ParamSpec("Parameters")

# How many calls are under way at once where nobody says another number.
IN_FLIGHT_MAX: Final = 16


async def run_all(
    carry_out: Callable[[Item], Awaitable[None]], items: Iterable[Item], *, in_flight_max: int = IN_FLIGHT_MAX
) -> None:
    """Call an async function on every item, at most `in_flight_max` at once.

    Items are drawn as workers become free, and nothing is kept of them: memory does not grow with their number.

    Raises:
        Exception: The first that a call raised, itself and with its cause; the others are cancelled first.
        CancelledError: This call was cancelled, whatever failed at the same time; or one of them ended like that.
    """
    queue = iter(items)
    # No more workers than there is work for: most calls are of one item or none.
    firsts = list(itertools.islice(queue, in_flight_max))
    if len(firsts) < min(2, in_flight_max):
        for item in firsts:
            await carry_out(item)
        return

    async def work(first: Item) -> None:
        for item in itertools.chain((first,), queue):
            await carry_out(item)

    await join([asyncio.ensure_future(work(item)) for item in firsts])


async def map_bounded(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], *, in_flight_max: int = IN_FLIGHT_MAX
) -> list[Result]:
    """Return the results of `run_all` in the order of the items; errors likewise."""
    results: dict[int, Result] = {}

    async def keep(numbered: tuple[int, Item]) -> None:
        position, item = numbered
        results[position] = await function(item)

    await run_all(keep, enumerate(items), in_flight_max=in_flight_max)
    return [results[position] for position in range(len(results))]


async def both(one: Awaitable[Result], other: Awaitable[Other]) -> tuple[Result, Other]:
    """Await two things at once; if one fails the other is cancelled, and ends before its error is raised itself."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    await join(tasks)
    return tasks[0].result(), tasks[1].result()


async def join(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for tasks; the first that fails or is cancelled, or a cancellation of this call, ends all others.

    An `asyncio.TaskGroup` takes a task that was cancelled for one that is done. That of Python 3.11 loses a
    cancellation that comes while a task fails, and after a failure leaves the caller counted as cancelled, so that an
    `asyncio.timeout` around it raises no `TimeoutError`.
    """
    try:
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    task.result()
    finally:
        await give_up(*tasks)


async def shielded(work: Awaitable[Result]) -> Result:
    """Await what must not be left halfway: a call that is cancelled raises once it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        # Seen: the cancellation is what counts now.
        task.exception()
    raise cancelled


async def give_up(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, all of them first, and wait until they have ended even if this call is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    if not all(task.done() for task in tasks):
        await shielded(asyncio.gather(*tasks, return_exceptions=True))
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen


async def run_blocking(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call a function in a thread, to its end even if this call is cancelled meanwhile."""
    call = functools.partial(function, *args, **kwargs)
    return await shielded(asyncio.get_running_loop().run_in_executor(None, call))


@asynccontextmanager
async def acquired(acquire: Callable[[], Resource], release: Callable[[Resource], object]) -> AsyncIterator[Resource]:
    """Hold for a block what is acquired in a thread and released in one; errors are theirs.

    A cancelled call never gets the result of the thread, which goes on to its end: what it acquired is released, too.
    """
    found: list[Resource] = []
    try:
        await run_blocking(lambda: found.append(acquire()))
        yield found[0]
    finally:
        for resource in found:
            await run_blocking(release, resource)


class Budget:
    """A bound on what is under way at once. Who asks first is served first.

    Attributes:
        allowed: How much at present.
        under_way: How much there is; none of it is ever taken back.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.under_way = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int = 1) -> AsyncIterator[None]:
        """Wait until so much is free, and hold it for the block; more than is allowed counts as all of that."""
        size = min(size, self.allowed)
        if self._waiting or self.under_way + size > self.allowed:
            await self._wait(size)
        else:
            self.under_way += size
        try:
            yield
        finally:
            self.under_way -= size
            self._serve()

    async def _wait(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except BaseException:  # cancelled, or closed
            if turn.done() and not turn.cancelled():
                self.under_way -= size  # it came in the same moment
            turn.cancel()
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if self.under_way + size > self.allowed:
                    return
                self.under_way += size
                turn.set_result(None)
            self._waiting.popleft()


class ByteBudget(Budget):
    """A bound on the bytes that all transfers together hold."""
