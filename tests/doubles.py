"""A clock that only moves when asked, and a store into which faults and other actors' actions are put."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from typing_extensions import override

from blobstore.base import BlobStore, Body, CreateOutcome, Unknown
from blobstore.errors import StoreUnavailableError
from blobstore.wrappers.forwarding import ForwardingStore

Hook = Callable[[], Awaitable[None]]


# Longer than that no test holds a request.
HELD_S_MAX = 10


class Gate:
    """Holds a request back until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await asyncio.wait_for(self.opened.wait(), HELD_S_MAX)

    async def open(self) -> None:
        self.opened.set()


class SteppedClock:
    """Milliseconds that do not move until `advance`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms


class AnswerLostError(StoreUnavailableError):
    """No answer came to a request, which was carried out or not."""


class InterposedStore(ForwardingStore):
    """A store that lets a test act before or after chosen requests, once each."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.inner = inner
        self.requests: list[tuple[str, str]] = []
        self._before: list[tuple[str, str, Hook]] = []
        self._after: list[tuple[str, str, Hook]] = []
        self._lost_answers: list[tuple[str, str]] = []
        self._countdown: tuple[int, Hook] | None = None

    def before(self, operation: str, key: str, hook: Hook) -> None:
        """Run `hook` before the next request with `key` in its key. What the hook raises, the request raises."""
        self._before.append((operation, key, hook))

    def before_request(self, number: int, hook: Hook) -> None:
        """Run `hook` before the request after that many from now on, whatever it is; 1 is the next one."""
        self._countdown = (number, hook)

    @property
    def has_waiting(self) -> bool:
        """Whether that request has not come yet."""
        return self._countdown is not None

    def after(self, operation: str, key: str, hook: Hook) -> None:
        """Run `hook` after the next such request was carried out."""
        self._after.append((operation, key, hook))

    def lose_answer(self, operation: str, key: str) -> None:
        """Carry out the next such request, and give the caller no answer."""
        self._lost_answers.append((operation, key))

    def fail(self, operation: str, key: str, error: Exception | None = None) -> None:
        """Do not carry out the next such request."""

        async def refuse() -> None:
            raise error or StoreUnavailableError("injected", operation=operation, key=key)

        self.before(operation, key, refuse)

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        if operation == "now_ms":  # changes nothing, and nobody counts it
            yield
            return
        key = " ".join(keys)
        self.requests.append((operation, key))
        await self._count_down()
        await self._run(self._before, operation, key)
        yield
        await self._run(self._after, operation, key)
        for rule in self._lost_answers:
            if rule[0] == operation and rule[1] in key:
                self._lost_answers.remove(rule)
                raise AnswerLostError("the answer was lost", operation=operation, key=key)

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        try:
            return await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        except AnswerLostError:
            return Unknown(reason="the answer was lost")

    async def _count_down(self) -> None:
        if self._countdown is None:
            return
        number, hook = self._countdown
        self._countdown = (number - 1, hook) if number > 1 else None
        if number == 1:
            await hook()

    @staticmethod
    async def _run(hooks: list[tuple[str, str, Hook]], operation: str, key: str) -> None:
        for rule in tuple(hooks):
            if rule[0] == operation and rule[1] in key:
                hooks.remove(rule)
                await rule[2]()
