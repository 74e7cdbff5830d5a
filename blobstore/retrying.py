"""Trying again what a store did not answer: the only layer that does, and the one door to tenacity."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from random import Random  # noqa: TID251 - the default of an argument: jitter decides about nothing but waiting
from typing import TypeVar

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from typing_extensions import override

from blobstore.base import (
    LIST_PAGE_MAX,
    BlobInfo,
    BlobStore,
    Body,
    Capabilities,
    Created,
    CreateOutcome,
    DeleteFailure,
    ListPage,
    RequestMetadata,
    UnfinishedPut,
    Unknown,
)
from blobstore.errors import StoreError, StoreUnavailableError

T = TypeVar("T")


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long an operation is tried; together they bound how long it can take."""

    attempts_max: int = 6
    # The waits grow from the first by the factor, up to the longest.
    first_wait_s: float = 0.2
    factor: float = 2.0
    wait_max_s: float = 20.0
    # Up to which part a wait is shortened by chance, so that clients that failed together do not return together.
    jitter: float = 0.5
    # A store that asks for a longer wait is obeyed up to here.
    retry_after_max_s: float = 120.0
    # An attempt without an answer for this long has failed; for a get this holds for every chunk.
    deadline_s: float = 60.0
    # The deadline of a put is longer by the time that its body takes at this rate.
    bytes_per_s_min: int = 256 * 1024

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: A count or time is out of range.
        """
        if self.attempts_max < 1 or self.bytes_per_s_min < 1 or self.deadline_s <= 0:
            raise ValueError("attempts_max, bytes_per_s_min and deadline_s are positive")
        if min(self.first_wait_s, self.wait_max_s, self.retry_after_max_s) < 0 or self.factor < 1:
            raise ValueError("waits are not negative and do not shrink")
        if not 0 <= self.jitter <= 1:
            raise ValueError("jitter is a part: 0 to 1")


class _NoAnswerError(StoreUnavailableError):
    """The deadline of an attempt has passed: what was asked for may still happen."""


class RetryingStore(BlobStore):
    """Repeats what raised `StoreUnavailableError`, and a `put_if_absent` whose outcome is `Unknown`; nothing else.

    A `get` that broke off goes on from the byte that it had reached. That joins two requests, so a blob that `put`
    replaces just in between can come out mixed: only blobs of less than a chunk are ever replaced here.

    Args:
        inner: The store; it does not retry by itself.
        settings: How often and how long.
        chance: Gives numbers from 0 up to 1 for the jitter; a seeded one in tests.
    """

    def __init__(
        self, inner: BlobStore, settings: RetrySettings | None = None, *, chance: Callable[[], float] | None = None
    ) -> None:
        self._inner = inner
        self._settings = settings or RetrySettings()
        self._chance = Random().random if chance is None else chance  # noqa: S311 - see the import

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @override
    async def put(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> Created:
        async def attempt() -> Created:
            put = self._inner.put(key, body, ttl_ms=ttl_ms, metadata=metadata)
            return await self._within(self._deadline_s(body), put, "put", key)

        return await self._repeat(attempt)

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        unknown = ""

        async def attempt() -> CreateOutcome:
            nonlocal unknown
            put = self._inner.put_if_absent(key, body, ttl_ms=ttl_ms, metadata=metadata)
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
            return await self._repeat(attempt)
        except StoreError as error:
            if not unknown:
                raise
            # Whatever the store said to a later attempt, an earlier one may have written the blob, or may yet
            # (design 0002, C3). Only Created and Lost tell what is there.
            return Unknown(reason=f"{unknown}; after {error.attempts} attempts: {error}")

    @override
    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[bytes, None]:
        stream: AsyncGenerator[bytes, None] | None = None
        got_bytes = 0

        async def next_chunk() -> bytes:
            """The next chunk; nothing at the end."""
            nonlocal stream
            if stream is None:
                if got_bytes and got_bytes == size_bytes:
                    return b""  # it broke after the last byte
                left = None if size_bytes is None else size_bytes - got_bytes
                stream = self._inner.get(
                    key, start=start + got_bytes, size_bytes=left, deleted=deleted, metadata=metadata
                )
            try:
                return await self._within(self._settings.deadline_s, anext(stream, b""), "get", key)
            except BaseException:
                # A generator that has raised is at its end.
                stream = None
                raise

        try:
            while chunk := await self._repeat(next_chunk):
                got_bytes += len(chunk)
                yield chunk
        finally:
            if stream is not None:
                await stream.aclose()

    @override
    async def stat(self, key: str, *, metadata: RequestMetadata | None = None) -> BlobInfo | None:
        return await self._short(lambda: self._inner.stat(key, metadata=metadata), "stat", key)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        return await self._short(
            lambda: self._inner.list_page(prefix, start_after=start_after, limit=limit), "list_page", prefix
        )

    @override
    async def delete(
        self, keys: Sequence[str], *, metadata: RequestMetadata | None = None
    ) -> tuple[DeleteFailure, ...]:
        return await self._short(lambda: self._inner.delete(keys, metadata=metadata), "delete", "")

    @override
    async def remove_ttl(self, key: str, *, metadata: RequestMetadata | None = None) -> None:
        await self._short(lambda: self._inner.remove_ttl(key, metadata=metadata), "remove_ttl", key)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return await self._short(lambda: self._inner.list_unfinished(prefix), "list_unfinished", prefix)

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        return await self._short(lambda: self._inner.abort_unfinished(puts), "abort_unfinished", "")

    @override
    async def now_ms(self) -> int:
        return await self._short(self._inner.now_ms, "now_ms", "")

    @override
    async def close(self) -> None:
        await self._inner.close()

    async def _short(self, request: Callable[[], Awaitable[T]], operation: str, key: str) -> T:
        return await self._repeat(lambda: self._within(self._settings.deadline_s, request(), operation, key))

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await attempts until one does not raise `StoreUnavailableError`, or no more are allowed.

        Raises:
            StoreError: That of the last attempt; it tells how many there were.
        """
        attempts = 0

        async def counted() -> T:
            nonlocal attempts
            attempts += 1
            return await attempt()

        # One for each call: a tenacity object keeps the state of its loop in itself.
        retrying = AsyncRetrying(
            sleep=asyncio.sleep,
            stop=stop_after_attempt(self._settings.attempts_max),
            wait=self._wait_s,
            retry=retry_if_exception_type(StoreUnavailableError),
            reraise=True,
        )
        try:
            result: T = await retrying(counted)
        except StoreError as error:
            error.attempts = attempts
            if attempts > 1:
                error.add_note(f"this was attempt {attempts} of at most {self._settings.attempts_max}")
            raise
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

    def _deadline_s(self, body: Body) -> float:
        return self._settings.deadline_s + body.size_bytes / self._settings.bytes_per_s_min

    def _wait_s(self, state: RetryCallState) -> float:
        settings = self._settings
        wait_s = min(settings.wait_max_s, settings.first_wait_s * settings.factor ** (state.attempt_number - 1))
        wait_s *= 1 - settings.jitter * self._chance()
        error = state.outcome.exception() if state.outcome is not None else None
        asked_s = error.retry_after_s if isinstance(error, StoreUnavailableError) else None
        return wait_s if asked_s is None else max(wait_s, min(asked_s, settings.retry_after_max_s))
