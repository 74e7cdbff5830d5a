"""What is late is asked for again, and the answer that comes first is taken (design 0008, H1 to H4 and H6)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, BytesBody, MemorySink, Sink, read_blob
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import InFlightLimit, LimitedStore, MeteredStore
from blobstore.wrappers.retry import HedgedStore, HedgeSettings, RetryingStore
from tests.contract.sink_contract import Collecting
from tests.simulation.model.virtual_loop import run_jumping
from tests.unit.blobstore.scripted_store import OK, BreakAfter, ScriptedStore, Step

DATA = b"0123456789"
SETTINGS = HedgeSettings(
    requests_max=2, first_patience_s=1, patience_min_s=0.1, extra_in_reserve=2, requests_per_extra=10
)
BROKEN = StoreUnavailableError("broken", operation="get", key="k")


def after(seconds: float, error: Exception | None = None) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error

    return wait


HANG = after(1e9)


async def read_range(store: BlobStore) -> bytes:
    sink = Collecting()
    await store.read_into("k", sink, size_bytes=len(DATA))
    return bytes(sink.data)


async def got(store: BlobStore) -> bytes:
    return await read_blob(store, "k", size_bytes_max=100)


async def repeated(store: BlobStore) -> None:
    await store.put("k", BytesBody(DATA), repeatable=True)


# And the one write that is treated as they are (H6).
READS: dict[str, Callable[[BlobStore], Awaitable[object]]] = {
    "get": got,
    "range": read_range,
    "stat": lambda store: store.stat("k"),
    "list_page": lambda store: store.list_page(""),
    "repeatable put": repeated,
}
EVERY_READ = pytest.mark.parametrize("read", READS.values(), ids=READS)


async def filled(*script: Step, settings: HedgeSettings = SETTINGS) -> tuple[ScriptedStore, HedgedStore]:
    inner = ScriptedStore()
    await inner.put("k", BytesBody(DATA))
    inner.requests.clear()
    inner.script = list(script)
    return inner, HedgedStore(inner, settings)


def run(
    read: Callable[[BlobStore], Awaitable[object]], *script: Step, settings: HedgeSettings = SETTINGS
) -> tuple[object, int, float]:
    """What it came to, how many requests it took, and the seconds."""

    async def main() -> tuple[object, int]:
        inner, store = await filled(*script, settings=settings)
        outcome: object
        try:
            outcome = await read(store)
        except StoreUnavailableError as error:
            outcome = error
        return outcome, len(inner.requests)

    (outcome, requests), waited_s = run_jumping(main())
    return outcome, requests, waited_s


@EVERY_READ
def test_what_hangs_is_asked_for_again_and_the_second_answer_taken(
    read: Callable[[BlobStore], Awaitable[object]],
) -> None:
    expected, requests, _ = run(read)
    assert requests == 1
    assert run(read, HANG, OK) == (expected, 2, 1)


@EVERY_READ
def test_where_both_hang_there_is_a_third_and_no_fourth(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    three = msgspec.structs.replace(SETTINGS, requests_max=3)
    expected, _, _ = run(read)
    assert run(read, HANG, HANG, OK, settings=three) == (expected, 3, 2)
    assert run(read, after(9), HANG, HANG, OK, settings=three) == (expected, 3, 9)


@EVERY_READ
def test_what_is_late_may_still_be_first(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    expected, _, _ = run(read)
    assert run(read, after(1.5), after(3)) == (expected, 2, 1.5)


@EVERY_READ
def test_one_that_fails_leaves_it_to_the_other(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    expected, _, _ = run(read)
    assert run(read, after(2, BROKEN), after(3)) == (expected, 2, 4)
    assert run(read, after(5), after(2, BROKEN)) == (expected, 2, 5)


@EVERY_READ
def test_where_both_fail_the_first_error_is_reported(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    other = StoreUnavailableError("other", operation="get", key="k")
    assert run(read, after(2, BROKEN), after(3, other)) == (BROKEN, 2, 4)


@EVERY_READ
def test_an_error_in_time_is_nobody_elses_to_try_again(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    assert run(read, BROKEN) == (BROKEN, 1, 0)


@pytest.mark.parametrize(
    "write",
    [lambda store: store.put("k", BytesBody(DATA)), lambda store: store.put_if_absent("k", BytesBody(DATA))],
    ids=["put", "put_if_absent"],
)
def test_a_write_of_which_a_copy_may_do_harm_is_sent_once(write: Callable[[BlobStore], Awaitable[object]]) -> None:
    _, requests, waited_s = run(write, after(9))
    assert (requests, waited_s) == (1, 9)


def test_who_waits_for_a_slot_is_not_late() -> None:
    async def main() -> int:
        inner, store = await filled(*[after(0.9)] * 10)
        limited = LimitedStore(store, InFlightLimit(1))
        await asyncio.gather(*(repeated(limited) for _ in range(10)))
        return len(inner.requests)

    assert run_jumping(main())[0] == 10


def test_a_refusal_is_an_answer() -> None:
    async def main() -> None:
        _, store = await filled(after(2, BlobNotFoundError("gone", operation="get", key="k")), HANG)
        with pytest.raises(BlobNotFoundError):
            await got(store)

    assert run_jumping(main())[1] == 2


def test_patience_follows_what_the_answers_take() -> None:
    async def main() -> float:
        _, store = await filled(*[after(0.5)] * 20, HANG, OK)
        for _ in range(20):
            await got(store)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await got(store)
        return clock() - began_s

    assert run_jumping(main())[0] == pytest.approx(1.0)  # twice the usual


def test_there_are_only_so_many_second_requests() -> None:
    async def main() -> list[int]:
        inner, store = await filled()
        counts = []
        for _ in range(4):
            before = len(inner.requests)
            inner.script = [after(1.2)]
            await got(store)
            counts.append(len(inner.requests) - before)
        for _ in range(10):
            await got(store)
        before = len(inner.requests)
        inner.script = [after(5)]
        await got(store)
        return [*counts, len(inner.requests) - before]

    assert run_jumping(main())[0] == [2, 2, 1, 1, 2]


class TwoLanes(MemoryStore):
    """Its first read is late with its first bytes, and then as fast as the second."""

    def __init__(self, waits_s: list[float]) -> None:
        super().__init__()
        self._waits_s = waits_s
        self.open = 0
        self.refused = 0

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        wait_s = self._waits_s.pop(0)
        self.open += 1
        try:
            for at in range(size_bytes or 0):
                await asyncio.sleep(wait_s)
                try:
                    sink.write(DATA[at : at + 1])
                except Exception:
                    self.refused += 1
                    raise
        finally:
            self.open -= 1


@pytest.mark.parametrize("waits_s", [[1.1, 0.2], [1.1, 0.1], [1.1, 5.0]], ids=["second", "both at once", "first"])
def test_of_two_reads_one_alone_has_the_sink(waits_s: list[float]) -> None:
    async def main() -> TwoLanes:
        inner = TwoLanes(waits_s)
        assert await read_range(HedgedStore(inner, SETTINGS)) == DATA
        assert inner.open == 0
        return inner

    assert run_jumping(main())[0].refused <= 1


async def test_the_time_that_a_sink_takes_is_not_the_stores() -> None:
    class Slow(Collecting):
        @override
        def write(self, data: Buffer) -> None:
            time.sleep(0.6)
            super().write(data)

    settings = msgspec.structs.replace(SETTINGS, first_patience_s=0.3)
    inner, store = await filled(settings=settings)
    await store.read_into("k", Slow(), size_bytes=4)
    assert inner.requests == ["get 0+4"]


def test_a_caller_that_goes_away_while_the_loser_ends_takes_the_winner_along() -> None:
    class Clinging(TwoLanes):
        """Its first read takes a second to end."""

        @override
        async def read_into(self, key: str, sink: Sink, **how: Any) -> None:
            is_first = not self.starts
            self.starts.append(0)
            try:
                await super().read_into(key, sink, **how)
            finally:
                if is_first:
                    await asyncio.sleep(1)

        starts: ClassVar[list[int]] = []

    async def main() -> int:
        inner, sink = Clinging([1e9, 0.5]), Collecting()
        task = asyncio.ensure_future(HedgedStore(inner, SETTINGS).read_into("k", sink, size_bytes=len(DATA)))
        await asyncio.sleep(2)  # the second has begun, at 1.5, and the first is being ended until 2.5
        task.cancel()
        await asyncio.wait([task])
        had = len(sink.data)
        await asyncio.sleep(100)
        assert inner.open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return len(sink.data) - had

    assert run_jumping(main())[0] == 0


def test_a_read_that_breaks_goes_on_in_the_layer_above() -> None:
    async def main() -> list[str]:
        inner, store = await filled(HANG, BreakAfter(4, BROKEN))
        assert await read_range(RetryingStore(store)) == DATA
        return inner.requests

    assert run_jumping(main())[0] == ["get 0+10", "get 0+10", "get 4+6"]


@EVERY_READ
def test_cancelled_at_any_moment_it_leaves_nothing_under_way(read: Callable[[BlobStore], Awaitable[object]]) -> None:
    async def main() -> None:
        for moment in range(12):
            _, store = await filled(after(2), after(1), after(2), after(1))
            task = asyncio.ensure_future(read(store))
            await asyncio.sleep(moment / 4)
            task.cancel()
            await asyncio.wait([task])
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run_jumping(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 1.0},
        {"requests_max": 0},
        {"factor": 0.5},
        {"extra_in_reserve": -1},
        {"requests_per_extra": 0},
        {"patience_min_s": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0]):
        HedgeSettings(**wrong)  # type: ignore[arg-type]


def test_a_sink_in_memory_that_is_held_up_gets_the_bytes_of_one_read() -> None:
    class HeldUp(MemorySink):
        @override
        async def write_here(self, chunks: Sequence[Buffer]) -> None:
            await asyncio.sleep(9)
            await super().write_here(chunks)

    async def main() -> tuple[bytes, int]:
        inner, _ = await filled()
        sink = HeldUp()
        await HedgedStore(MeteredStore(inner), SETTINGS).read_into("k", sink)
        return sink.data, len(inner.requests)

    assert run_jumping(main())[0] == (DATA, 1)
