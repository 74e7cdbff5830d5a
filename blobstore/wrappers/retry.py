"""Sending a request more than once: again where it was not answered, and beside the first where that is late.

Nothing else repeats what a store did not answer, or imports tenacity. Both kinds have settings and a store, and a
budget that bounds them.
"""

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random  # noqa: TID251 - the default of an argument: jitter decides about nothing but waiting
from typing import Any, Final, TypeVar

import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type
from typing_extensions import Unpack, override

from blobstore.base import (
    HELD_S,
    SINK_BYTES,
    BlobStore,
    Body,
    Buffer,
    Created,
    CreateOutcome,
    ReadOptions,
    Sink,
    Unknown,
)
from blobstore.concurrency import give_up, shielded
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.wrappers.forwarding import ForwardingStore, InFlightLimit, Read, WatchedSink, one_line

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)

# Reads without a body of any size.
_SMALL_READS: Final = frozenset({"stat", "list_page", "now_ms"})
# An attempt that failed after so long is worth a word.
_SILENCE_S: Final = 5.0
_ROUNDING_S: Final = 1e-6


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long an operation is tried; together they bound how long it can take.

    The defaults ride out an outage of a few seconds with 16 operations under way, each of which is tried six times
    (80 retries of the 100 in reserve), and faults of one request in ten for ever: one retry in nine successes.
    """

    attempts_max: int = 6
    # The waits grow from the first by the factor, up to the longest.
    first_wait_s: float = 0.2
    factor: float = 2.0
    wait_max_s: float = 20.0
    # Up to which part a wait is shortened at random, so that clients that failed together do not return together.
    jitter: float = 0.5
    # A store that asks for a longer wait is obeyed up to here.
    retry_after_max_s: float = 120.0
    # An attempt without an answer for this long has failed; so has a read without more bytes for this long.
    deadline_s: float = 60.0
    # How long the first attempts wait for a read to be answered, if not so long; an operation without an answer within
    # that many attempts, of whatever kind, has failed. Empty: as long as that, as often as any other.
    answers_within_s: tuple[float, ...] = ()
    # The floor under every transfer: 16 of them on a line of 10 Mbit/s are above it. The deadline of a put is longer by
    # the time that its body takes at this rate; a read that falls behind it by more than is held for a sink is cut
    # off and goes on in a new request.
    bytes_per_s_min: int = 64 * 1024
    progress_window_s: float = 10.0
    # Retries that all operations together can make without any success, and the successes that pay for one more.
    retries_in_reserve: int = 100
    successes_per_retry: int = 5

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or self.bytes_per_s_min < 1 or self.deadline_s <= 0 or self.progress_window_s <= 0:
            raise ValueError("attempts_max, bytes_per_s_min, deadline_s and progress_window_s are positive")
        if min(self.first_wait_s, self.wait_max_s, self.retry_after_max_s) < 0 or self.factor < 1:
            raise ValueError("waits are not negative and do not shrink")
        if any(answer_s <= 0 for answer_s in self.answers_within_s):
            raise ValueError("answers_within_s are positive")
        if not 0 <= self.jitter <= 1:
            raise ValueError("jitter is a part: 0 to 1")
        if self.retries_in_reserve < 0 or self.successes_per_retry < 1:
            raise ValueError("retries_in_reserve is not negative and successes_per_retry is positive")


class _NoAnswerError(StoreUnavailableError):
    """The deadline of an attempt has passed: what was asked for may still happen."""


class _TooSlowError(StoreUnavailableError):
    """A read fell behind the floor, and is to go on in a new request."""


class _Tries(msgspec.Struct):
    """The failed attempts of one operation, and the last error; of a read, since it last made progress."""

    failed: int = 0
    unanswered: int = 0
    is_out_of_budget: bool = False
    last: StoreError | None = None


class RetryingStore(ForwardingStore):
    """Repeats what raised `StoreUnavailableError`, and a `put_if_absent` whose outcome is `Unknown`; nothing else.

    Every attempt has a deadline. Retries are bounded for each operation and, by a budget that successes refill, for
    all of them together.

    A read that broke off, or came too slowly, goes on from the byte that it had reached. It ends with an error after as
    many failed attempts as any other operation, counted since it last made progress, which is as many bytes as one
    window has at the floor: a store that sends a little and breaks off, again and again, holds nobody. Going on joins
    two requests, so a blob that `put` replaces just in between can come out mixed: only blobs of less than a chunk are
    ever replaced here.

    Args:
        inner: The store; it does not retry by itself.
        limit: Shrinks when the store asks for less, and grows when it does what it was asked to do.
        rng: Returns random numbers from 0 up to 1 for the jitter; a seeded one in tests.
        on_retry: Called before each attempt that is not the first.
        on_silence: Called with the seconds that an attempt waited in vain, once in a while.
    """

    def __init__(
        self,
        inner: BlobStore,
        settings: RetrySettings | None = None,
        *,
        limit: InFlightLimit | None = None,
        rng: Callable[[], float] | None = None,
        on_retry: Callable[[], None] | None = None,
        on_silence: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._settings = settings or RetrySettings()
        self._budget = RetryBudget(self._settings.retries_in_reserve, self._settings.successes_per_retry)
        self._limit = InFlightLimit(1) if limit is None else limit
        self._on_retry = on_retry
        self._on_silence = on_silence
        # Until when no other silence is reported.
        self._quiet_until_s = 0.0
        self._rng = Random().random if rng is None else rng  # noqa: S311 - see the import

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        async def attempt() -> Created:
            put = self._inner.put(key, body, ttl_ms=ttl_ms, repeatable=repeatable)
            return await self._within(self._deadline_s(body), put, "put", key)

        return await self._try(attempt)

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        unknown = ""

        async def attempt() -> CreateOutcome:
            nonlocal unknown
            put = self._inner.put_if_absent(key, body, ttl_ms=ttl_ms)
            try:
                outcome = await self._within(self._deadline_s(body), put, "put_if_absent", key)
            except _NoAnswerError as error:
                unknown = str(error)
                raise
            if isinstance(outcome, Unknown):
                unknown = outcome.reason
                raise StoreUnavailableError(outcome.reason, operation="put_if_absent", key=key)
            return outcome

        try:
            return await self._try(attempt)
        except StoreError as error:
            if not unknown:
                raise
            # Whatever the store said to a later attempt, an earlier one may have written the blob, or may yet
            # (design 0002, C3). Only Created and Lost say what is there.
            return Unknown(reason=f"{unknown}; after {error.attempts} attempts: {error}")

    @override
    async def read_into(self, key: str, sink: Sink, **options: Unpack[ReadOptions]) -> None:
        watched, tries = WatchedSink(sink, asyncio.get_running_loop().time), _Tries()
        start, size_bytes = options.get("start", 0), options.get("size_bytes")
        progress_bytes = self._settings.bytes_per_s_min * self._settings.progress_window_s
        counted_bytes = 0

        async def attempt() -> None:
            nonlocal counted_bytes
            got_bytes = watched.size_bytes
            if got_bytes and got_bytes == size_bytes:
                return  # it broke after the last byte
            left = None if size_bytes is None else size_bytes - got_bytes
            options["start"], options["size_bytes"] = start + got_bytes, left
            read = self._inner.read_into(key, watched, **options)
            # A range as large as that may be read in large pieces; of anything else the sink has what is a second old.
            is_large = left is not None and left >= SINK_BYTES
            unseen_bytes = SINK_BYTES if is_large else HELD_S * self._settings.bytes_per_s_min
            try:
                await self._watch(read, watched, key, self._answer_s(tries), unseen_bytes)
            finally:
                if watched.size_bytes - counted_bytes >= progress_bytes:
                    counted_bytes = watched.size_bytes
                    tries.failed = tries.unanswered = 0
                    self._budget.refill()

        await self._try(attempt, tries)

    async def _watch(
        self, read: Coroutine[Any, Any, None], sink: WatchedSink, key: str, deadline_s: float, unseen_bytes: float
    ) -> None:
        """Await a read for as long as it makes progress; `deadline_s` is for its first bytes.

        It is too slow when, since these came, it has fallen behind the floor by more than may be on their way unseen.
        """
        settings, clock = self._settings, asyncio.get_running_loop().time
        reading = asyncio.ensure_future(read)
        silent_s = behind_bytes = 0.0
        has_begun = False
        try:
            while True:
                before_bytes, before_s = sink.size_bytes, clock() - sink.busy_s
                await asyncio.wait({reading}, timeout=min(settings.progress_window_s, deadline_s - silent_s))
                if reading.done():
                    return reading.result()
                came_bytes, waited_s = sink.size_bytes - before_bytes, clock() - sink.busy_s - before_s
                silent_s = 0.0 if came_bytes else silent_s + waited_s
                # Sums of waits miss the deadline by a rounding error, and a wait that short moves no clock.
                if silent_s >= deadline_s - _ROUNDING_S:
                    raise _NoAnswerError(f"no answer within {deadline_s:g} s", operation="get", key=key)
                if has_begun:
                    behind_bytes = max(0.0, behind_bytes + settings.bytes_per_s_min * waited_s - came_bytes)
                if came_bytes and behind_bytes > unseen_bytes:
                    rate, floor = came_bytes / waited_s, settings.bytes_per_s_min
                    message = f"came at {rate:.0f} bytes/s, which is less than {floor}"
                    hint = "the blob store, or the way to it, is too slow for this many requests at once"
                    raise _TooSlowError(message, operation="get", key=key, hint=hint, asks_for_less=True)
                if came_bytes:
                    has_begun, deadline_s = True, settings.deadline_s
        finally:
            await give_up(reading)

    @override
    async def close(self) -> None:
        await self._within(self._settings.deadline_s, self._inner.close(), "close", "")

    async def repeat(self, operation: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat one of many requests of which an operation consists, within the same bounds as any other."""
        return await self._send(operation, (key,), request)

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        key, tries = keys[0] if len(keys) == 1 else "", _Tries()

        def attempt() -> Awaitable[T]:
            deadline_s = self._answer_s(tries) if operation in _SMALL_READS else self._settings.deadline_s
            return self._within(deadline_s, request(), operation, key)

        return await self._try(attempt, tries)

    async def _try(self, attempt: Callable[[], Awaitable[T]], tries: _Tries | None = None) -> T:
        """Await attempts until one does not raise `StoreUnavailableError`, or no more are allowed."""
        tries = tries or _Tries()
        clock = asyncio.get_running_loop().time

        async def counted() -> T:
            began_s = clock()
            try:
                return await attempt()
            except StoreError as error:
                tries.failed += 1
                tries.last = error
                tries.unanswered += isinstance(error, _NoAnswerError)
                if isinstance(error, StoreUnavailableError):
                    self._report_silence(began_s, clock())
                    if error.asks_for_less and self._limit.shrink():
                        _LOG.warning("%s; now %d requests at once", one_line(error), self._limit.allowed)
                raise

        try:
            try:
                result = await counted()
            except StoreUnavailableError as error:
                # Only now: what succeeds at once, as nearly everything does, need not pay for what tries again.
                result = await self._retry(counted, error, tries)
        except StoreError as error:
            error.attempts = tries.failed
            if tries.failed > 1:
                error.add_note(f"this was attempt {tries.failed} of at most {self._settings.attempts_max}")
            if tries.is_out_of_budget:
                why = "the retry budget is spent: too many requests to this blob store failed"
                error.add_note(f"it was not tried again because {why}")
            raise
        finally:
            tries.last = None  # its traceback leads here: a cycle that would hold the body
        self._budget.refill()
        self._limit.grow()
        return result

    async def _retry(self, attempt: Callable[[], Awaitable[T]], first: StoreUnavailableError, tries: _Tries) -> T:
        failed: StoreUnavailableError | None = first

        async def again() -> T:
            nonlocal failed
            if failed is not None:
                error, failed = failed, None
                raise error
            if self._on_retry is not None:
                self._on_retry()
            _LOG.debug("attempt %d, after: %s", tries.failed + 1, one_line(tries.last))
            return await attempt()

        # One for each call: a tenacity object keeps the state of its loop in itself.
        retrying = AsyncRetrying(
            sleep=asyncio.sleep,
            stop=lambda _: self._is_enough(tries),
            wait=lambda _: self._wait_s(tries),
            retry=retry_if_exception_type(StoreUnavailableError),
            reraise=True,
        )
        result: T = await retrying(again)
        return result

    async def _within(self, deadline_s: float, request: Awaitable[T], operation: str, key: str) -> T:
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await request
        except TimeoutError as error:
            if not deadline.expired():
                raise  # another's, such as the body's
            raise _NoAnswerError(f"no answer within {deadline_s:g} s", operation=operation, key=key) from error

    def _report_silence(self, began_s: float, now_s: float) -> None:
        if self._on_silence is not None and now_s - began_s >= _SILENCE_S and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _SILENCE_S
            self._on_silence(now_s - began_s)

    def _answer_s(self, tries: _Tries) -> float:
        answers_s = self._settings.answers_within_s
        longest_s = self._settings.deadline_s
        return min(longest_s, answers_s[tries.unanswered]) if tries.unanswered < len(answers_s) else longest_s

    def _deadline_s(self, body: Body) -> float:
        return self._settings.deadline_s + body.size_bytes / self._settings.bytes_per_s_min

    def _is_enough(self, tries: _Tries) -> bool:
        answers_s = self._settings.answers_within_s
        if tries.failed >= self._settings.attempts_max or (answers_s and tries.unanswered >= len(answers_s)):
            return True
        # One more request in a window is not a storm, and a line that is slow but steady shall not use up the reserve.
        if not isinstance(tries.last, _TooSlowError | _NoAnswerError if answers_s else _TooSlowError):
            tries.is_out_of_budget = not self._budget.take()
        return tries.is_out_of_budget

    def _wait_s(self, tries: _Tries) -> float:
        settings = self._settings
        wait_s = min(settings.wait_max_s, settings.first_wait_s * settings.factor ** (tries.failed - 1))
        wait_s *= 1 - settings.jitter * self._rng()
        asked_s = tries.last.retry_after_s if isinstance(tries.last, StoreUnavailableError) else None
        return wait_s if asked_s is None else max(wait_s, min(asked_s, settings.retry_after_max_s))


class RetryBudget:
    """Bounds the retries of all operations together, as the standard mode of the AWS SDKs does.

    While a store is down, every operation would be sent six times: the store that comes back meets six times its load,
    and goes down again. With a budget the first operations use up the reserve, and the rest are tried once each.

    Args:
        reserve: Retries that can be made without any success; the budget begins with them and never holds more.
        successes_per_retry: How many successes pay for one retry.
    """

    def __init__(self, reserve: int, successes_per_retry: int) -> None:
        self._successes_per_retry = successes_per_retry
        self._tokens_max = self._tokens = reserve * successes_per_retry

    def take(self) -> bool:
        """Pay for a retry; return whether the budget allows it."""
        if self._tokens < self._successes_per_retry:
            return False
        self._tokens -= self._successes_per_retry
        return True

    def refill(self) -> None:
        self._tokens = min(self._tokens + 1, self._tokens_max)


_HEDGED: Final = frozenset({"stat", "list_page"})
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
        self, operation: str, ask: Callable[[], Awaitable[T]], discard: Callable[[T], Awaitable[None]] | None = None
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
        return await (self._hedge.race(operation, request) if operation in _HEDGED else request())


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
