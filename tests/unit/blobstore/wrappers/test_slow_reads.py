"""The floor under the rate of a read: what is cut off, what is not, and what is left behind."""

import asyncio
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import SINK_BYTES, BytesBody, MemorySink, Sink, read_blob
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import InFlightLimit, LimitedStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.contract.sink_contract import Collecting
from tests.simulation.model.virtual_loop import run_jumping
from tests.unit.blobstore.scripted_store import OK, BreakAfter, ScriptedStore

PIECE_BYTES = SINK_BYTES // 8
DATA = bytes(number % 251 for number in range(2 * SINK_BYTES))
# A piece in each second; all retries of the reserve are spent.
SETTINGS = RetrySettings(
    attempts_max=3,
    first_wait_s=1,
    jitter=0,
    deadline_s=50,
    bytes_per_s_min=PIECE_BYTES,
    progress_window_s=4,
    retries_in_reserve=0,
)


class PacedStore(MemoryStore):
    """Waits before each piece; each read has its pace, and the last pace is that of all others."""

    def __init__(self, *waits_s: float) -> None:
        super().__init__()
        self.waits_s = list(waits_s)
        self.starts: list[int] = []
        self.open = self.most_open = 0

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        wait_s = self.waits_s[min(len(self.starts), len(self.waits_s) - 1)]
        end = len(DATA) if size_bytes is None else start + size_bytes
        self.starts.append(start)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for at in range(start, end, PIECE_BYTES):
                await asyncio.sleep(wait_s)
                await sink.take([DATA[at : min(at + PIECE_BYTES, end)]])
        finally:
            await asyncio.sleep(0)  # ending takes a moment
            self.open -= 1


def read(*waits_s: float, settings: RetrySettings = SETTINGS) -> tuple[PacedStore, bytes, str, float]:
    """The store, what the sink has had, what was raised, and the seconds that it took."""

    async def main() -> tuple[PacedStore, bytes, str]:
        inner, sink, error = PacedStore(*waits_s), MemorySink(), ""
        await inner.put("k", BytesBody(DATA))
        try:
            await RetryingStore(inner, settings).read_into("k", sink, size_bytes=len(DATA))
        except StoreUnavailableError as raised:
            error = str(raised)
        assert inner.open == 0
        return inner, sink.data, error

    (inner, data, error), waited_s = run_jumping(main())
    return inner, data, error, waited_s


@pytest.mark.parametrize("wait_s", [0.9, 0.1])
def test_what_comes_at_the_floor_is_left_alone(wait_s: float) -> None:
    inner, data, _, _ = read(wait_s)
    assert (inner.starts, data) == ([0], DATA)


def test_a_drip_is_cut_off_and_goes_on_from_its_byte_without_using_up_the_budget() -> None:
    inner, data, _, _ = read(3, 0.1)
    # After a piece it may fall behind by as much as is held for a sink: eight pieces, here 12 s, and the window.
    assert inner.starts == [0, 6 * PIECE_BYTES]
    assert data == DATA


def test_a_drip_of_an_open_range_is_cut_off_after_a_window() -> None:
    async def main() -> list[int]:
        inner = PacedStore(3, 0.1)
        assert await read_blob(RetryingStore(inner, SETTINGS), "k", size_bytes_max=len(DATA)) == DATA
        return inner.starts

    assert run_jumping(main())[0] == [0, 2 * PIECE_BYTES]


def test_a_drip_on_every_connection_ends_as_an_error() -> None:
    inner, data, error, _ = read(30, settings=msgspec.structs.replace(SETTINGS, progress_window_s=10))
    assert len(inner.starts) == SETTINGS.attempts_max
    assert "which is less than" in error
    assert DATA.startswith(data)


def test_silence_ends_at_the_deadline() -> None:
    inner, data, error, waited_s = read(1000)
    assert (len(inner.starts), data) == (1, b"")
    assert "no answer within 50 s" in error
    assert waited_s == pytest.approx(50)


def test_a_sink_that_takes_its_time_is_not_taken_for_a_slow_store() -> None:
    async def main() -> list[int]:
        loop, inner = asyncio.get_running_loop(), PacedStore(0.1)
        await inner.put("k", BytesBody(DATA))
        now_s = 0.0
        real = loop.time

        class Slow(Collecting):
            @override
            def write(self, data: bytes | bytearray | memoryview) -> None:
                nonlocal now_s
                now_s += 20
                super().write(data)

        loop.time = lambda: real() + now_s  # type: ignore[method-assign]
        await RetryingStore(inner, SETTINGS).read_into("k", Slow(), size_bytes=len(DATA))
        return inner.starts

    assert run_jumping(main())[0] == [0]


def test_a_read_that_is_too_slow_asks_for_less() -> None:
    async def main() -> int:
        inner = PacedStore(3, 3, 3, 3, 0)
        limit = InFlightLimit(4)
        store = LimitedStore(RetryingStore(inner, SETTINGS, limit=limit), limit)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(read_blob(store, "k", size_bytes_max=len(DATA)))
            await asyncio.sleep(20.5)
            return limit.allowed

    assert run_jumping(main())[0] == 2


def test_progress_pays_for_retries() -> None:
    async def main() -> list[str]:
        broken = StoreUnavailableError("reset", operation="get")
        inner = ScriptedStore(OK, BreakAfter(1000, broken), BreakAfter(1000, broken), chunk_bytes=100)
        await inner.put("k", BytesBody(DATA[:3000]))
        settings = msgspec.structs.replace(
            SETTINGS, bytes_per_s_min=100, progress_window_s=10, retries_in_reserve=1, successes_per_retry=1
        )
        assert await read_blob(RetryingStore(inner, settings), "k", size_bytes_max=3000) == DATA[:3000]
        return inner.requests[1:]

    assert run_jumping(main())[0] == ["get 0+None", "get 1000+None", "get 2000+None"]


def test_a_read_that_is_cancelled_at_any_moment_leaves_nothing_open() -> None:
    moments = 90  # of half a second: through drips, cuts, waits and a read that goes well
    settings = msgspec.structs.replace(SETTINGS, deadline_s=7)

    async def main() -> int:
        finished = 0
        for moment in range(moments):
            inner = PacedStore(3, 8, 3, 0.2, 0.05)
            limit = InFlightLimit(1)
            store = LimitedStore(RetryingStore(inner, settings, limit=limit), limit)
            task = asyncio.create_task(read_blob(store, "k", size_bytes_max=len(DATA)))
            await asyncio.sleep(moment / 2)
            task.cancel()
            await asyncio.wait([task])
            finished += not task.cancelled()
            assert (inner.open, limit.under_way) == (0, 0)
            assert inner.most_open <= 1
        return finished

    assert 0 < run_jumping(main())[0] < 60
