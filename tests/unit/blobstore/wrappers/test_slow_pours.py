"""The floor under the rate of a pour: what is cut off, and what is not (as `test_slow_gets`)."""

import asyncio

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BytesBody
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.sink import POURED_BYTES, Sink
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.contract.pouring_contract import Collecting
from tests.simulation.model.virtual_loop import run_jumping

PIECE_BYTES = POURED_BYTES // 8
DATA = bytes(number % 251 for number in range(2 * POURED_BYTES))
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
    """Waits before each piece; each pour has its pace, and the last pace is that of all others."""

    def __init__(self, *waits_s: float) -> None:
        super().__init__()
        self.waits_s = list(waits_s)
        self.starts: list[int] = []
        self.open = 0

    @override
    async def pour(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int,
        fresh: bool = False,
    ) -> None:
        wait_s = self.waits_s[min(len(self.starts), len(self.waits_s) - 1)]
        self.starts.append(start)
        self.open += 1
        try:
            for at in range(start, start + size_bytes, PIECE_BYTES):
                await asyncio.sleep(wait_s)
                sink.write(DATA[at : min(at + PIECE_BYTES, start + size_bytes)])
        finally:
            self.open -= 1


def pour(*waits_s: float, settings: RetrySettings = SETTINGS) -> tuple[PacedStore, bytes, str, float]:
    """The store, what the sink has had, what was raised, and the seconds that it took."""

    async def main() -> tuple[PacedStore, bytes, str]:
        inner, sink, error = PacedStore(*waits_s), Collecting(), ""
        await inner.put("k", BytesBody(DATA))
        try:
            await RetryingStore(inner, settings).pour("k", sink, size_bytes=len(DATA))
        except StoreUnavailableError as raised:
            error = str(raised)
        assert inner.open == 0
        return inner, bytes(sink.data), error

    (inner, data, error), waited_s = run_jumping(main())
    return inner, data, error, waited_s


@pytest.mark.parametrize("wait_s", [0.9, 0.1])
def test_what_comes_at_the_floor_is_left_alone(wait_s: float) -> None:
    inner, data, _, _ = pour(wait_s)
    assert (inner.starts, data) == ([0], DATA)


def test_a_drip_is_cut_off_and_goes_on_from_its_byte_without_using_up_the_budget() -> None:
    inner, data, _, _ = pour(3, 0.1)
    # After its first piece it may fall behind by as much as is poured at once, eight pieces: here 12 s, and the window.
    assert inner.starts == [0, 6 * PIECE_BYTES]
    assert data == DATA


def test_a_drip_on_every_connection_ends_as_an_error() -> None:
    inner, data, error, _ = pour(30, settings=msgspec.structs.replace(SETTINGS, progress_window_s=10))
    assert len(inner.starts) == SETTINGS.attempts_max
    assert "which is less than" in error
    assert DATA.startswith(data)


def test_silence_ends_at_the_deadline() -> None:
    inner, data, error, waited_s = pour(1000)
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
        await RetryingStore(inner, SETTINGS).pour("k", Slow(), size_bytes=len(DATA))
        return inner.starts

    assert run_jumping(main())[0] == [0]
