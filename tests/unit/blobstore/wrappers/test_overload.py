"""A store that is down, faulty or busy for a while, and what a crowd of requests makes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from typing_extensions import override

from blobstore import opening
from blobstore.base import BytesBody, read_blob
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import ForwardingStore, InFlightLimit, LimitedStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.simulation.model.virtual_loop import run_jumping

IN_FLIGHT = 16


class FaultyStore(ForwardingStore):
    """Refuses what `is_refused` says within 5 ms; what it does not refuse takes 50 ms."""

    def __init__(self, is_refused: Callable[["FaultyStore"], bool], *, asks_for_less: bool = False) -> None:
        super().__init__(MemoryStore())
        self._is_refused = is_refused
        self._asks_for_less = asks_for_less
        self.requests = self.refused = self.busy = 0

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        self.requests += 1
        await asyncio.sleep(0.005)
        if self._is_refused(self):
            self.refused += 1
            raise StoreUnavailableError("503", operation=operation, asks_for_less=self._asks_for_less)
        self.busy += 1
        try:
            await asyncio.sleep(0.05)
            yield
        finally:
            self.busy -= 1


class Crowd:
    """A store in its wrappers, and what became of many requests to it."""

    def __init__(self, inner: FaultyStore, settings: RetrySettings | None = None, *, adapts: bool = True) -> None:
        self.inner = inner
        self.limit = InFlightLimit(IN_FLIGHT)
        retrying = RetryingStore(inner, settings, limit=self.limit if adapts else None, rng=Random(1).random)
        self._store = LimitedStore(retrying, self.limit)
        self.errors: list[StoreUnavailableError] = []

    async def send(self, requests: int) -> int:
        """How many of a number of requests, all at once, have an answer."""
        answers = await asyncio.gather(*(self._store.stat("k") for _ in range(requests)), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, StoreUnavailableError) for error in errors)
        self.errors += [error for error in errors if isinstance(error, StoreUnavailableError)]
        assert self.limit.under_way == 0
        return requests - len(errors)

    @property
    def is_budget_reported(self) -> bool:
        return any("retry budget" in note for error in self.errors for note in error.__notes__)


def is_down_until(seconds_s: float) -> Callable[[FaultyStore], bool]:
    return lambda _: asyncio.get_running_loop().time() < seconds_s


def is_faulty(rate: float) -> Callable[[FaultyStore], bool]:
    draw = Random(7).random
    return lambda _: draw() < rate


# --- the retry budget ---


@pytest.mark.parametrize("reserve,answered", [(RetrySettings().retries_in_reserve, IN_FLIGHT), (30, 0)])
def test_a_full_crowd_survives_a_short_outage_on_the_reserve(reserve: int, answered: int) -> None:
    async def main() -> Crowd:
        crowd = Crowd(FaultyStore(is_down_until(3)), RetrySettings(retries_in_reserve=reserve))
        assert await crowd.send(IN_FLIGHT) == answered
        return crowd

    assert run_jumping(main())[0].is_budget_reported == (answered == 0)


@pytest.mark.parametrize("rate,survives", [(0.1, True), (0.4, False)])
def test_faults_of_one_in_ten_are_survived_for_ever(rate: float, survives: bool) -> None:
    async def main() -> Crowd:
        crowd = Crowd(FaultyStore(is_faulty(rate)))
        await crowd.send(5000)
        return crowd

    crowd, _ = run_jumping(main())
    assert (not crowd.errors) == survives
    assert crowd.is_budget_reported == (not survives)


def test_a_long_outage_is_no_storm() -> None:
    async def main() -> None:
        crowd = Crowd(FaultyStore(is_down_until(1e9)))
        assert await crowd.send(2000) == 0
        assert crowd.inner.requests == 2000 + 100  # the reserve, and no more
        last = crowd.errors[-1]
        assert last.attempts == 1
        assert "retry budget is spent" in last.__notes__[-1]

    _, waited_s = run_jumping(main())
    assert waited_s < 60


def test_after_an_outage_successes_pay_for_retries_again() -> None:
    async def main() -> None:
        down = [True]
        crowd = Crowd(FaultyStore(lambda _: down[0]))
        await crowd.send(200)
        down[0] = False
        assert await crowd.send(50) == 50
        down[0] = True
        before = crowd.inner.requests
        assert await crowd.send(100) == 0
        assert crowd.inner.requests == before + 100 + 50 // 5

    run_jumping(main())


# --- fewer in flight ---


@pytest.mark.parametrize("asks_for_less,allowed", [(True, 8), (False, 16)])
def test_a_crowd_that_is_refused_together_is_halved_once(asks_for_less: bool, allowed: int) -> None:
    async def main() -> None:
        inner = FaultyStore(is_down_until(0.01), asks_for_less=asks_for_less)
        crowd = Crowd(inner)
        sending = asyncio.create_task(crowd.send(IN_FLIGHT))
        await asyncio.sleep(0.02)
        assert inner.refused == IN_FLIGHT
        assert crowd.limit.allowed == allowed
        assert await sending == IN_FLIGHT

    run_jumping(main())


@pytest.mark.parametrize("at_once_max", [1, 2, 4, 8])
def test_a_store_that_is_busy_is_sent_what_it_can_take(at_once_max: int) -> None:
    async def main(*, adapts: bool) -> tuple[int, int]:
        inner = FaultyStore(lambda store: store.busy >= at_once_max, asks_for_less=True)
        return await Crowd(inner, adapts=adapts).send(2000), inner.refused

    (answered, refused), _ = run_jumping(main(adapts=True))
    (answered_otherwise, _), _ = run_jumping(main(adapts=False))
    assert answered == 2000
    assert refused < 2000 / 10
    assert answered_otherwise < 2000


def test_an_opened_store_is_sent_what_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FaultyStore(lambda store: store.busy >= 4, asks_for_less=True)
    monkeypatch.setattr(opening, "open_bare", lambda *_: inner)

    async def main() -> None:
        store = opening.open_store("memory://busy", rng=Random(1).random)
        await asyncio.gather(*(store.stat("k") for _ in range(1000)))

    run_jumping(main())
    assert inner.refused < 100


@pytest.mark.parametrize("is_there", [True, False])
def test_a_get_that_is_read_to_its_end_is_a_success(is_there: bool) -> None:
    async def main() -> int:
        inner, limit = MemoryStore(), InFlightLimit(2)
        store = LimitedStore(RetryingStore(inner, limit=limit), limit)
        limit.shrink()
        if is_there:
            await inner.put("k", BytesBody(b"content"))
        for _ in range(2):
            with suppress(BlobNotFoundError):
                await read_blob(store, "k", size_bytes_max=100)
        return limit.allowed

    assert run_jumping(main())[0] == (2 if is_there else 1)


def test_what_was_asked_for_less_is_sent_more_again_later() -> None:
    async def main() -> list[int]:
        crowd = Crowd(FaultyStore(is_down_until(2), asks_for_less=True))
        allowed = []
        assert await crowd.send(IN_FLIGHT) == IN_FLIGHT
        for _ in range(20):
            allowed.append(crowd.limit.allowed)
            await crowd.send(IN_FLIGHT)
        return allowed

    allowed = run_jumping(main())[0]
    assert allowed[0] < IN_FLIGHT
    assert allowed == sorted(allowed)
    assert allowed[-1] == IN_FLIGHT


def test_a_store_that_always_asks_for_less_still_gets_one() -> None:
    async def main() -> int:
        crowd = Crowd(FaultyStore(is_down_until(1e9), asks_for_less=True))
        await crowd.send(300)
        return crowd.limit.allowed

    assert run_jumping(main())[0] == 1
