import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, DeleteFailure, Lost, MemorySink, Unknown, read_blob
from blobstore.errors import (
    AccessDeniedError,
    BlobCorruptError,
    BlobNotFoundError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import ForwardingStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.contract.bodies import ChunkedBody, FailingBody
from tests.contract.sink_contract import Collecting
from tests.simulation.model.virtual_loop import run_jumping
from tests.unit.blobstore.scripted_store import OK, BreakAfter, LostAnswer, ScriptedStore, Step

EXACT = RetrySettings(attempts_max=4, first_wait_s=1, factor=2, wait_max_s=3, jitter=0, deadline_s=50)
NO_ANSWER = Unknown(reason="connection reset")


def unavailable(retry_after_s: float | None = None) -> StoreUnavailableError:
    return StoreUnavailableError("503 Slow Down", operation="inner", key="k", retry_after_s=retry_after_s)


async def hang() -> None:
    await asyncio.sleep(1e9)


async def filled(*script: Step) -> tuple[ScriptedStore, RetryingStore]:
    inner = ScriptedStore()
    await inner.put("k", BytesBody(b"0123456789"), ttl_ms=1000)
    inner.requests.clear()
    inner.script = list(script)
    return inner, RetryingStore(inner, EXACT)


OPERATIONS: dict[str, Callable[[BlobStore], Awaitable[object]]] = {
    "put": lambda store: store.put("new", BytesBody(b"x")),
    "put_if_absent": lambda store: store.put_if_absent("new", BytesBody(b"x")),
    "read_into": lambda store: read_blob(store, "k", size_bytes_max=100),
    "range": lambda store: store.read_into("k", Collecting(), size_bytes=10),
    "stat": lambda store: store.stat("k"),
    "list_page": lambda store: store.list_page(""),
    "delete": lambda store: store.delete(["k"]),
    "remove_ttl": lambda store: store.remove_ttl("k"),
    "now_ms": lambda store: store.now_ms(),
}
EVERY_OPERATION = pytest.mark.parametrize("operation", OPERATIONS)


@EVERY_OPERATION
def test_every_operation_is_tried_until_it_works(operation: str) -> None:
    async def main() -> int:
        inner, store = await filled(unavailable(), unavailable(), unavailable())
        await OPERATIONS[operation](store)
        return len(inner.requests)

    requests, waited_s = run_jumping(main())
    assert requests == 4
    assert waited_s == 1 + 2 + 3  # grown by the factor, up to the longest


@EVERY_OPERATION
def test_the_last_error_reports_how_often_it_was_tried(operation: str) -> None:
    async def main() -> tuple[int, StoreUnavailableError]:
        inner, store = await filled(*(unavailable() for _ in range(9)))
        with pytest.raises(StoreUnavailableError) as caught:
            await OPERATIONS[operation](store)
        return len(inner.requests), caught.value

    (requests, error), _ = run_jumping(main())
    assert requests == 4
    assert error.attempts == 4
    assert "attempt 4 of at most 4" in error.__notes__[0]


@EVERY_OPERATION
@pytest.mark.parametrize(
    "kind", [AccessDeniedError, BlobNotFoundError, BlobCorruptError, StoreFullError, InvalidRequestError]
)
def test_nothing_else_is_tried_again(operation: str, kind: type[StoreError]) -> None:
    async def main() -> tuple[int, StoreError]:
        inner, store = await filled(kind("no", operation=operation))
        with pytest.raises(kind) as caught:
            await OPERATIONS[operation](store)
        return len(inner.requests), caught.value

    (requests, error), waited_s = run_jumping(main())
    assert (requests, error.attempts, waited_s) == (1, 1, 0)


@EVERY_OPERATION
def test_an_attempt_without_an_answer_ends_at_its_deadline(operation: str) -> None:
    async def main() -> int:
        inner, store = await filled(hang, hang)
        await OPERATIONS[operation](store)
        return len(inner.requests)

    requests, waited_s = run_jumping(main())
    assert requests == 3
    assert waited_s == pytest.approx(50 + 1 + 50 + 2, abs=0.01)


@EVERY_OPERATION
def test_a_store_that_never_answers_ends_as_an_error_or_as_unknown(operation: str) -> None:
    async def main() -> object:
        _, store = await filled(*[hang] * 9)
        try:
            return await OPERATIONS[operation](store)
        except StoreUnavailableError as error:
            return error

    outcome, waited_s = run_jumping(main())
    assert isinstance(outcome, Unknown if operation == "put_if_absent" else StoreUnavailableError)
    assert waited_s == pytest.approx(4 * 50 + 1 + 2 + 3, abs=0.01)


IMPATIENT = msgspec.structs.replace(EXACT, answers_within_s=(10, 18, 30))
READS = pytest.mark.parametrize("operation", ["read_into", "range", "stat", "list_page", "now_ms"])


@READS
def test_a_read_of_a_server_that_never_answers_ends_within_a_minute(operation: str) -> None:
    """A black hole held it for five (F14). Meanwhile it is logged."""
    shown: list[float] = []

    async def main() -> int:
        inner, _ = await filled(*[hang] * 9)
        with pytest.raises(StoreUnavailableError, match="no answer within 30 s"):
            await OPERATIONS[operation](RetryingStore(inner, IMPATIENT, on_silence=shown.append))
        return len(inner.requests)

    requests, waited_s = run_jumping(main())
    assert requests == 3
    assert waited_s == pytest.approx(10 + 1 + 18 + 2 + 30, abs=0.01)
    assert shown == [pytest.approx(seconds, abs=0.01) for seconds in (10, 18, 30)]


@READS
def test_a_read_of_a_slow_server_is_waited_for(operation: str) -> None:
    """Again and again: what waited so long is not a storm, and takes nothing from the budget."""

    async def slow() -> None:
        await asyncio.sleep(29)

    settings = msgspec.structs.replace(IMPATIENT, retries_in_reserve=0)

    async def main() -> None:
        inner, _ = await filled(*[slow] * 30)
        store = RetryingStore(inner, settings)
        for _ in range(10):
            await OPERATIONS[operation](store)

    assert run_jumping(main())[1] == pytest.approx(10 * (10 + 1 + 18 + 2 + 29), abs=0.01)


def test_many_silent_requests_are_logged_once_in_a_while() -> None:
    shown: list[float] = []

    async def main() -> None:
        inner, _ = await filled(*[hang] * 99)
        store = RetryingStore(inner, IMPATIENT, on_silence=shown.append)
        await asyncio.gather(*(OPERATIONS["stat"](store) for _ in range(16)), return_exceptions=True)

    run_jumping(main())
    assert len(shown) == 3


# They answer from what the store knows of itself.
NO_REQUESTS = {"tagged", "capabilities", "place"}


class _Hanging(ForwardingStore):
    """Never answers anything."""

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        await hang()
        yield

    @override
    async def close(self) -> None:
        await hang()


@pytest.mark.parametrize(
    "method", sorted(name for name in vars(BlobStore) if not name.startswith("_") and name not in NO_REQUESTS)
)
def test_no_method_of_the_contract_waits_for_ever(method: str) -> None:
    calls: dict[str, Callable[[BlobStore], Awaitable[object]]] = OPERATIONS | {
        "list_unfinished": lambda store: store.list_unfinished(""),
        "abort_unfinished": lambda store: store.abort_unfinished([]),
        "check_unused": lambda store: store.check_unused("init"),
        "close": lambda store: store.close(),
    }

    async def main() -> None:
        store = RetryingStore(_Hanging(MemoryStore()), msgspec.structs.replace(EXACT, attempts_max=1))
        with suppress(StoreUnavailableError):
            assert isinstance(await calls[method](store), Unknown)

    assert run_jumping(main())[1] == pytest.approx(50, abs=0.01)


@EVERY_OPERATION
def test_a_cancelled_operation_is_not_tried_again(operation: str) -> None:
    async def main() -> int:
        inner, store = await filled(hang)
        task = asyncio.ensure_future(OPERATIONS[operation](store))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(inner.requests)

    requests, waited_s = run_jumping(main())
    assert (requests, waited_s) == (1, 1)


@pytest.mark.parametrize("asked_s,waited_s", [(0.5, 1), (2.5, 2.5), (100, 100), (1000, 120)])
def test_a_store_that_asks_for_a_longer_wait_gets_it_within_reason(asked_s: float, waited_s: float) -> None:
    async def main() -> None:
        _, store = await filled(unavailable(asked_s))
        await store.stat("k")

    assert run_jumping(main())[1] == waited_s


def test_jitter_shortens_waits_and_repeats_with_its_seed() -> None:
    async def main(seed: int) -> None:
        inner = ScriptedStore(*(unavailable() for _ in range(5)))
        settings = RetrySettings(first_wait_s=1, wait_max_s=8, jitter=0.5)
        await RetryingStore(inner, settings, rng=Random(seed).random).now_ms()

    waits_s = [run_jumping(main(seed))[1] for seed in (1, 1, 2)]
    assert waits_s[0] == waits_s[1] != waits_s[2]
    assert all(0.5 * 23 <= wait_s <= 23 for wait_s in waits_s)


# --- put_if_absent ---


@pytest.mark.parametrize(
    "script,expected,is_there",
    [
        pytest.param([NO_ANSWER], Created, True, id="nothing arrived, so that the second is the first"),
        pytest.param([LostAnswer(NO_ANSWER)], Lost, True, id="it had arrived: who lost has to compare the content"),
        pytest.param([NO_ANSWER] * 3, Created, True, id="the last attempt works"),
        pytest.param([NO_ANSWER] * 4, Unknown, False, id="no attempt had an answer"),
        pytest.param([unavailable(), NO_ANSWER, unavailable(), unavailable()], Unknown, False, id="one had none"),
        pytest.param([unavailable(), hang, unavailable(), unavailable()], Unknown, False, id="one took too long"),
        pytest.param([LostAnswer(NO_ANSWER), *[unavailable()] * 3], Unknown, True, id="unknown though it is there"),
        pytest.param(
            [LostAnswer(NO_ANSWER), AccessDeniedError("no", operation="put_if_absent")],
            Unknown,
            True,
            id="a later refusal says nothing of the first attempt",
        ),
        pytest.param([unavailable(), OK], Created, True, id="a refusal is not a lost answer"),
    ],
)
def test_an_unknown_outcome_is_sent_again_and_never_turned_into_another(
    script: list[Step], expected: type, is_there: bool
) -> None:
    async def main() -> tuple[object, bool]:
        inner = ScriptedStore(*script)
        outcome = await RetryingStore(inner, EXACT).put_if_absent("k", ChunkedBody(b"ab", b"cd"), ttl_ms=5)
        inner.script.clear()
        return outcome, await inner.stat("k") is not None

    (outcome, found), _ = run_jumping(main())
    assert isinstance(outcome, expected)
    assert found == is_there


def test_the_same_body_is_sent_again_whole() -> None:
    async def main() -> tuple[int, bytes]:
        inner, body = ScriptedStore(LostAnswer(unavailable()), OK), ChunkedBody(b"ab", b"cd")
        await RetryingStore(inner, EXACT).put_if_absent("k", body)
        inner, body = ScriptedStore(unavailable(), LostAnswer(NO_ANSWER)), ChunkedBody(b"ab", b"cd")
        await RetryingStore(inner, EXACT).put_if_absent("k", body)
        return body.times_read, await read_blob(inner, "k", size_bytes_max=10)

    assert run_jumping(main())[0] == (1, b"abcd")


def test_an_error_of_the_body_is_not_tried_again() -> None:
    async def main() -> int:
        inner = ScriptedStore()
        with pytest.raises(FileNotFoundError):
            await RetryingStore(inner, EXACT).put("k", FailingBody())
        return len(inner.requests)

    assert run_jumping(main())[0] == 1


def test_the_deadline_of_a_put_grows_with_its_body() -> None:
    settings = RetrySettings(attempts_max=1, deadline_s=10, bytes_per_s_min=1000)

    async def main(size_bytes: int) -> None:
        with pytest.raises(StoreUnavailableError):
            await RetryingStore(ScriptedStore(hang), settings).put("k", BytesBody(bytes(size_bytes)))

    assert [run_jumping(main(size))[1] for size in (0, 5000)] == [pytest.approx(10), pytest.approx(15)]


# --- get ---


@pytest.mark.parametrize(
    "script,range_,requests",
    [
        pytest.param([BreakAfter(4, unavailable())], (0, None), ["0+None", "4+None"], id="whole blob"),
        pytest.param([BreakAfter(4, unavailable())], (1, 8), ["1+8", "5+4"], id="range"),
        pytest.param([BreakAfter(8, unavailable())], (2, 8), ["2+8"], id="it broke after the last byte"),
        pytest.param([BreakAfter(99, unavailable())], (0, None), ["0+None", "10+None"], id="and nobody knew it was"),
        pytest.param([BreakAfter(0, unavailable())], (3, 4), ["3+4", "3+4"], id="before the first byte"),
        pytest.param([BreakAfter(0, unavailable())], (3, 0), ["3+0", "3+0"], id="an empty range"),
    ],
)
@pytest.mark.parametrize("kind", [Collecting, MemorySink])
def test_a_broken_read_goes_on_where_it_broke(
    script: list[Step], range_: tuple[int, int | None], requests: list[str], kind: type[Collecting | MemorySink]
) -> None:
    async def main() -> tuple[bytes, list[str]]:
        inner, store = await filled(*script)
        sink = kind()
        await store.read_into("k", sink, start=range_[0], size_bytes=range_[1])
        return bytes(sink.data), inner.requests

    (data, sent), _ = run_jumping(main())
    end = None if range_[1] is None else sum(range_)  # type: ignore[arg-type]
    assert data == b"0123456789"[range_[0] : end]
    assert sent == [f"get {request}" for request in requests]


# Breaks off twice after four bytes, and five attempts fail in all.
HALTING: list[Step] = [
    BreakAfter(4, unavailable()),
    unavailable(),
    unavailable(),
    BreakAfter(4, unavailable()),
    unavailable(),
]


def test_progress_gives_new_attempts() -> None:
    async def main() -> tuple[bytes, list[str]]:
        inner, _ = await filled(*HALTING)
        store = RetryingStore(inner, msgspec.structs.replace(EXACT, bytes_per_s_min=1, progress_window_s=4))
        return await read_blob(store, "k", size_bytes_max=10), inner.requests

    (data, sent), _ = run_jumping(main())
    assert data == b"0123456789"
    assert sent == ["get 0+None", *["get 4+None"] * 3, *["get 8+None"] * 2]


def test_a_few_bytes_are_no_progress() -> None:
    async def main() -> list[str]:
        inner, _ = await filled(*HALTING)
        store = RetryingStore(inner, msgspec.structs.replace(EXACT, bytes_per_s_min=1, progress_window_s=9))
        with pytest.raises(StoreUnavailableError) as caught:
            await read_blob(store, "k", size_bytes_max=10)
        assert caught.value.attempts == 4
        return inner.requests

    assert run_jumping(main())[0] == ["get 0+None", *["get 4+None"] * 3]


def test_a_read_that_makes_no_progress_ends_with_the_error() -> None:
    async def main() -> bytes:
        _, store = await filled(BreakAfter(4, unavailable()), *(unavailable() for _ in range(9)))
        sink = MemorySink()
        with pytest.raises(StoreUnavailableError) as caught:
            await store.read_into("k", sink)
        assert caught.value.attempts == 4
        return sink.data

    assert run_jumping(main())[0] == b"0123"


def test_damage_in_mid_stream_is_not_tried_again() -> None:
    async def main() -> int:
        inner, store = await filled(BreakAfter(4, BlobCorruptError("checksum", operation="get", key="k")))
        with pytest.raises(BlobCorruptError):
            await read_blob(store, "k", size_bytes_max=10)
        return len(inner.requests)

    assert run_jumping(main())[0] == 1


# --- delete ---


def test_keys_that_could_not_be_deleted_are_reported_and_not_tried_again() -> None:
    failures = (DeleteFailure(key="k", reason="locked"),)

    async def main() -> tuple[object, int]:
        inner, store = await filled(unavailable(), failures)
        return await store.delete(["k"]), len(inner.requests)

    assert run_jumping(main())[0] == (failures, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts_max": 0},
        {"first_wait_s": -1},
        {"factor": 0.5},
        {"wait_max_s": -1},
        {"jitter": 1.5},
        {"deadline_s": 0},
        {"answers_within_s": (10.0, 0.0)},
        {"bytes_per_s_min": 0},
        {"progress_window_s": 0},
        {"retries_in_reserve": -1},
        {"successes_per_retry": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"are|is"):
        RetrySettings(**wrong)  # type: ignore[arg-type]
