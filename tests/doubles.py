"""A clock that only moves when told, and a store into which faults and other actors' actions are put."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

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
from blobstore.errors import StoreUnavailableError

Hook = Callable[[], Awaitable[None]]


class SteppedClock:
    """Milliseconds that stand still until `advance`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms


class InterposedStore(BlobStore):
    """A store that lets a test act before or after chosen requests, once each."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.requests: list[tuple[str, str]] = []
        self._before: list[tuple[str, str, Hook]] = []
        self._after: list[tuple[str, str, Hook]] = []
        self._lost_answers: list[tuple[str, str]] = []

    def before(self, operation: str, key: str, hook: Hook) -> None:
        """Run `hook` before the next request with `key` in its key. What the hook raises, the request raises."""
        self._before.append((operation, key, hook))

    def after(self, operation: str, key: str, hook: Hook) -> None:
        """Run `hook` after the next such request was carried out."""
        self._after.append((operation, key, hook))

    def lose_answer(self, operation: str, key: str) -> None:
        """Carry out the next such request, and tell the caller nothing."""
        self._lost_answers.append((operation, key))

    def fail(self, operation: str, key: str, error: Exception | None = None) -> None:
        """Do not carry out the next such request."""

        async def refuse() -> None:
            raise error or StoreUnavailableError("injected", operation=operation, key=key)

        self.before(operation, key, refuse)

    async def _enter(self, operation: str, key: str) -> None:
        self.requests.append((operation, key))
        await self._run(self._before, operation, key)

    async def _leave(self, operation: str, key: str) -> bool:
        """Whether the answer is lost."""
        await self._run(self._after, operation, key)
        for rule in self._lost_answers:
            if rule[0] == operation and rule[1] in key:
                self._lost_answers.remove(rule)
                return True
        return False

    @staticmethod
    async def _run(hooks: list[tuple[str, str, Hook]], operation: str, key: str) -> None:
        for rule in tuple(hooks):
            if rule[0] == operation and rule[1] in key:
                hooks.remove(rule)
                await rule[2]()

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @override
    async def put(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> Created:
        await self._enter("put", key)
        created = await self.inner.put(key, body, ttl_ms=ttl_ms, metadata=metadata)
        if await self._leave("put", key):
            raise StoreUnavailableError("the answer was lost", operation="put", key=key)
        return created

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        await self._enter("put_if_absent", key)
        outcome = await self.inner.put_if_absent(key, body, ttl_ms=ttl_ms, metadata=metadata)
        return Unknown(reason="the answer was lost") if await self._leave("put_if_absent", key) else outcome

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
        await self._enter("get", key)
        async with aclosing(
            self.inner.get(key, start=start, size_bytes=size_bytes, deleted=deleted, metadata=metadata)
        ) as chunks:
            async for chunk in chunks:
                yield chunk
        await self._leave("get", key)

    @override
    async def stat(self, key: str, *, metadata: RequestMetadata | None = None) -> BlobInfo | None:
        await self._enter("stat", key)
        info = await self.inner.stat(key, metadata=metadata)
        await self._leave("stat", key)
        return info

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        await self._enter("list_page", prefix)
        page = await self.inner.list_page(prefix, start_after=start_after, limit=limit)
        await self._leave("list_page", prefix)
        return page

    @override
    async def delete(
        self, keys: Sequence[str], *, metadata: RequestMetadata | None = None
    ) -> tuple[DeleteFailure, ...]:
        await self._enter("delete", " ".join(keys))
        failures = await self.inner.delete(keys, metadata=metadata)
        if await self._leave("delete", " ".join(keys)):
            raise StoreUnavailableError("the answer was lost", operation="delete")
        return failures

    @override
    async def remove_ttl(self, key: str, *, metadata: RequestMetadata | None = None) -> None:
        await self._enter("remove_ttl", key)
        await self.inner.remove_ttl(key, metadata=metadata)
        if await self._leave("remove_ttl", key):
            raise StoreUnavailableError("the answer was lost", operation="remove_ttl", key=key)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        await self._enter("list_unfinished", prefix)
        return await self.inner.list_unfinished(prefix)

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        await self._enter("abort_unfinished", " ".join(put.key for put in puts))
        return await self.inner.abort_unfinished(puts)

    @override
    async def now_ms(self) -> int:
        return await self.inner.now_ms()

    @override
    async def close(self) -> None:
        await self.inner.close()
