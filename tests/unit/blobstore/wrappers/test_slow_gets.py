"""The floor under the rate of a get: what is cut off, what is not, and what is left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BytesBody, read_blob
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.limit import InFlightLimit, LimitedStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.simulation.model.virtual_loop import run_jumping
from tests.unit.blobstore.scripted_store import OK, BreakAfter, ScriptedStore

DATA = bytes(number % 251 for number in range(3000))

# 1,000 bytes in a window; all retries of the reserve are spent, so that only what needs none can go on.
SETTINGS = RetrySettings(
    attempts_max=4,
    first_wait_s=1,
    factor=2,
    wait_max_s=3,
    jitter=0,
    deadline_s=50,
    bytes_per_s_min=100,
    progress_window_s=10,
    retries_in_reserve=0,
)


class PacedStore(MemoryStore):
    """Waits before each chunk of ten bytes; each connection has its pace, and the last pace is that of all others."""

    def __init__(self, *chunk_waits_s: float) -> None:
        super().__init__(chunk_bytes=10)
        self.chunk_waits_s = list(chunk_waits_s)
        self.starts: list[int] = []
        self.open = self.most_open = 0

    @override
    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        pace = min(len(self.starts), len(self.chunk_waits_s) - 1)
        self.starts.append(start)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for chunk in super().get(key, start=start, size_bytes=size_bytes, deleted=deleted):
                await asyncio.sleep(self.chunk_waits_s[pace])
                yield chunk
        finally:
            await asyncio.sleep(0)  # closing takes a moment
            self.open -= 1


async def paced(*chunk_waits_s: float, size_bytes: int = len(DATA)) -> tuple[PacedStore, RetryingStore]:
    inner = PacedStore(*chunk_waits_s)
    await inner.put("k", BytesBody(DATA[:size_bytes]))
    return inner, RetryingStore(inner, SETTINGS)


def test_a_drip_is_cut_off_and_goes_on_from_its_byte() -> None:
    async def main() -> PacedStore:
        inner, store = await paced(1, 0)
        assert await read_blob(store, "k", size_bytes_max=3000) == DATA
        return inner

    inner, waited_s = run_jumping(main())
    assert inner.starts == [0, 110]  # the first chunk, and those of a window
    assert (inner.open, inner.most_open) == (0, 1)
    assert waited_s == 11 + 1


def test_a_drip_on_every_connection_ends_as_an_error() -> None:
    got = bytearray()

    async def read(store: RetryingStore) -> None:
        async for chunk in store.get("k"):
            got.extend(chunk)

    async def main() -> PacedStore:
        inner, store = await paced(1)
        with pytest.raises(StoreUnavailableError, match="10 bytes/s, which is less than 100") as caught:
            await read(store)
        assert inner.open == 0
        assert caught.value.attempts == 4
        assert "attempt 4 of at most 4" in caught.value.__notes__[0]
        return inner

    inner, waited_s = run_jumping(main())
    assert inner.starts == [0, 110, 220, 330]
    assert got == DATA[:440]
    assert waited_s == 4 * 11 + 1 + 2 + 3


def test_a_line_that_is_slow_but_steady_gets_there_without_using_up_the_budget() -> None:
    async def main() -> PacedStore:
        inner, store = await paced(0.25)
        assert await read_blob(store, "k", size_bytes_max=3000) == DATA
        return inner

    # Three of these make progress, so that the fourth is never the last.
    assert run_jumping(main())[0].starts == [0, 410, 820, 1230, 1640, 2050, 2460, 2870]


@pytest.mark.parametrize("chunk_wait_s,requests", [(0.0625, 1), (0.125, 4)])
def test_only_what_is_below_the_floor_is_cut_off(chunk_wait_s: float, requests: int) -> None:
    async def main() -> int:
        inner, store = await paced(chunk_wait_s)  # 160 and 80 bytes/s
        assert await read_blob(store, "k", size_bytes_max=3000) == DATA
        return len(inner.starts)

    assert run_jumping(main())[0] == requests


def test_what_came_fast_before_excuses_a_drip_for_one_window() -> None:
    async def main() -> list[int]:
        inner, store = await paced(0)
        got = b""
        async with aclosing(store.get("k")) as chunks:
            async for chunk in chunks:
                got += chunk
                inner.chunk_waits_s[0] = 1 if len(inner.starts) == 1 and len(got) >= 1500 else 0
        assert got == DATA
        return inner.starts

    assert run_jumping(main())[0] == [0, 1700]


@pytest.mark.parametrize("chunk_wait_s,size_bytes", [(40, 10), (9, 20), (1, 100)])
def test_a_small_blob_may_be_slow(chunk_wait_s: float, size_bytes: int) -> None:
    async def main() -> list[int]:
        inner, store = await paced(chunk_wait_s, size_bytes=size_bytes)
        await read_blob(store, "k", size_bytes_max=3000)
        return inner.starts

    assert run_jumping(main())[0] == [0]


def test_what_was_too_slow_but_is_there_is_not_asked_for_again() -> None:
    async def main() -> list[int]:
        inner, store = await paced(1)
        async with aclosing(store.get("k", start=5, size_bytes=110)) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == DATA[5:115]
        assert inner.open == 0
        return inner.starts

    assert run_jumping(main()) == ([5], 11)


def test_a_reader_that_takes_its_time_is_not_taken_for_a_slow_store() -> None:
    async def main() -> list[int]:
        inner, store = await paced(0.01)
        async with aclosing(store.get("k")) as chunks:
            async for _ in chunks:
                await asyncio.sleep(20)
        return inner.starts

    assert run_jumping(main())[0] == [0]


def test_a_get_that_is_too_slow_asks_for_less() -> None:
    async def main() -> int:
        inner, _ = await paced(1, 1, 1, 1, 0)
        limit = InFlightLimit(4)
        store = LimitedStore(RetryingStore(inner, SETTINGS, limit=limit), limit)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(read_blob(store, "k", size_bytes_max=3000))
            await asyncio.sleep(11.5)
            return limit.allowed

    assert run_jumping(main())[0] == 2


def test_progress_pays_for_retries() -> None:
    async def main() -> list[str]:
        broken = StoreUnavailableError("reset", operation="get")
        inner = ScriptedStore(OK, BreakAfter(1000, broken), BreakAfter(1000, broken), chunk_bytes=100)
        await inner.put("k", BytesBody(DATA))
        settings = msgspec.structs.replace(SETTINGS, retries_in_reserve=1, successes_per_retry=1)
        assert await read_blob(RetryingStore(inner, settings), "k", size_bytes_max=3000) == DATA
        return inner.requests[1:]

    assert run_jumping(main())[0] == ["get 0+None", "get 1000+None", "get 2000+None"]


def test_closing_a_get_does_not_wait_for_ever() -> None:
    class Clinging(MemoryStore):
        @override
        async def get(
            self,
            key: str,
            *,
            start: int = 0,
            size_bytes: int | None = None,
            deleted: bool = False,
            fresh: bool = False,
        ) -> AsyncGenerator[bytes, None]:
            try:
                yield b"x"
            finally:
                await asyncio.sleep(1e9)

    async def main() -> None:
        chunks = RetryingStore(Clinging(), SETTINGS).get("k")
        await anext(chunks)
        with pytest.raises(StoreUnavailableError):
            await chunks.aclose()

    assert run_jumping(main())[1] == pytest.approx(50)


def test_a_get_that_is_cancelled_at_any_moment_leaves_nothing_open() -> None:
    moments = 90  # of half a second: through drips, cuts, waits and a stream that goes well
    settings = msgspec.structs.replace(SETTINGS, deadline_s=7)

    async def main() -> int:
        finished = 0
        for moment in range(moments):
            inner, _ = await paced(1, 8, 1, 0.2, 0.05)
            limit = InFlightLimit(1)
            store = LimitedStore(RetryingStore(inner, settings, limit=limit), limit)
            task = asyncio.create_task(read_blob(store, "k", size_bytes_max=3000))
            await asyncio.sleep(moment / 2)
            task.cancel()
            await asyncio.wait([task])
            finished += not task.cancelled()
            assert (inner.open, limit.under_way) == (0, 0)
            assert inner.most_open <= 1
        return finished

    assert 0 < run_jumping(main())[0] < 60


def test_a_reader_that_goes_away_leaves_nothing_open() -> None:
    async def main() -> int:
        inner, store = await paced(1)
        async with aclosing(store.get("k")) as chunks:
            for _ in range(11):  # now it is too slow, and not yet cut off
                await anext(chunks)
            assert inner.open == 1
        return inner.open

    assert run_jumping(main())[0] == 0
