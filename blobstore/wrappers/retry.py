"""Trying again what a store did not answer: the only layer that does, and the only importer of tenacity.

It holds the retrying store, its settings, and the budget that bounds the retries of all operations together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random  # noqa: TID251 - the default of an argument: jitter decides about nothing but waiting
from typing import Any, Final, TypeVar

import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type
from typing_extensions import override

from blobstore.base import BlobStore, Body, Created, CreateOutcome, Unknown
from blobstore.concurrency import give_up
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.sink import HELD_S, SINK_BYTES, Sink, WatchedSink
from blobstore.wrappers.forwarding import ForwardingStore
from blobstore.wrappers.limit import InFlightLimit

T = TypeVar("T")

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
        """Raise `ValueError` for a count or time that is out of range."""
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

    @property
    def progress_bytes(self) -> float:
        """Return the bytes of one window at the floor: a read that got this many more has made progress."""
        return self.bytes_per_s_min * self.progress_window_s


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

    A read that broke off, or came too slowly, goes on from the byte that it had reached. It ends with an
    error after as many failed attempts as any other operation, counted since it last made progress, which is more than
    a few bytes (`RetrySettings.progress_bytes`): a store that sends a little and breaks off, again and again, holds
    nobody.
    Going on joins two requests, so a blob that `put` replaces just in between can come out mixed: only blobs of less
    than a chunk are ever replaced here.

    Args:
        inner: The store; it does not retry by itself.
        settings: How often and how long.
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
    async def read_into(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        watched, tries = WatchedSink(sink, asyncio.get_running_loop().time), _Tries()
        counted_bytes = 0

        async def attempt() -> None:
            nonlocal counted_bytes
            got_bytes = watched.size_bytes
            if got_bytes and got_bytes == size_bytes:
                return  # it broke after the last byte
            left = None if size_bytes is None else size_bytes - got_bytes
            read = self._inner.read_into(
                key, watched, start=start + got_bytes, size_bytes=left, deleted=deleted, fresh=fresh
            )
            # A range as large as that may be read in large pieces; of anything else the sink has what is a second old.
            is_large = left is not None and left >= SINK_BYTES
            unseen_bytes = SINK_BYTES if is_large else HELD_S * self._settings.bytes_per_s_min
            try:
                await self._watch(read, watched, key, self._answer_s(tries), unseen_bytes)
            finally:
                if watched.size_bytes - counted_bytes >= self._settings.progress_bytes:
                    counted_bytes = watched.size_bytes
                    tries.failed = tries.unanswered = 0
                    self._budget.refill()

        await self._try(attempt, tries)

    async def _watch(
        self, read: Coroutine[Any, Any, None], sink: WatchedSink, key: str, deadline_s: float, unseen_bytes: float
    ) -> None:
        """Await a read for as long as it makes progress; `deadline_s` is for its first bytes.

        Raises:
            _NoAnswerError: Nothing has come for as long as the deadline allows.
            _TooSlowError: Since its first bytes came it has fallen behind the floor, by more than `unseen_bytes`, which
                may be on their way unseen.
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
                    raise _too_slow(came_bytes / waited_s, settings, key)
                if came_bytes:
                    has_begun, deadline_s = True, settings.deadline_s
        finally:
            await give_up(reading)

    @override
    async def close(self) -> None:
        await self._within(self._settings.deadline_s, self._inner.close(), "close", "")

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        key, tries = keys[0] if len(keys) == 1 else "", _Tries()

        def attempt() -> Awaitable[T]:
            deadline_s = self._answer_s(tries) if operation in _SMALL_READS else self._settings.deadline_s
            return self._within(deadline_s, request(), operation, key)

        return await self._try(attempt, tries)

    async def _try(self, attempt: Callable[[], Awaitable[T]], tries: _Tries | None = None) -> T:
        """Await attempts until one does not raise `StoreUnavailableError`, or no more are allowed.

        Raises:
            StoreError: That of the last attempt, with the number of attempts.
        """
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
                    if error.asks_for_less:
                        self._limit.shrink()
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
                error.add_note(
                    "it was not tried again because the retry budget is spent: too many requests to this store failed"
                )
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


def _too_slow(bytes_per_s: float, settings: RetrySettings, key: str) -> _TooSlowError:
    return _TooSlowError(
        f"came at {bytes_per_s:.0f} bytes/s, which is less than {settings.bytes_per_s_min}",
        operation="get",
        key=key,
        hint="the store, or the way to it, is too slow for this many requests at once",
        asks_for_less=True,
    )


class RetryBudget:
    """Bounds the retries of all operations together, where a count for each of them does not.

    While a store is down, every operation would be sent six times: the store that comes back meets six times its load,
    and goes down again. With a budget the first operations use up the reserve, and the rest are tried once each. Second
    requests for what is late are bounded in the same way (`HedgedStore`).

    Args:
        reserve: Retries that can be made without any success; the budget begins with them and never holds more.
        successes_per_retry: How many successes pay for one retry.

    Source:
        The standard mode of the AWS SDKs: a bucket of 500 tokens, a retry takes 5, a success gives 1.
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
