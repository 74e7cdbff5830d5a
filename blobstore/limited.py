"""A cap on the requests that are under way at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
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
)
from blobstore.errors import InvalidRequestError


class LimitedStore(BlobStore):
    """Lets so many requests through at once; the others wait in the order in which they came.

    A `get` counts from its first chunk until it is read to its end or closed. Do not put what is being got from the
    same store at the same moment: with all slots taken by such gets, none of their puts would ever start.

    Args:
        inner: The store.
        in_flight_max: How many, at least 1.
    """

    def __init__(self, inner: BlobStore, in_flight_max: int) -> None:
        if in_flight_max < 1:
            raise InvalidRequestError(f"in_flight_max is {in_flight_max}, which lets nothing through", operation="open")
        self._inner = inner
        self._slots = asyncio.Semaphore(in_flight_max)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @override
    async def put(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> Created:
        async with self._slots:
            return await self._inner.put(key, body, ttl_ms=ttl_ms, metadata=metadata)

    @override
    async def put_if_absent(
        self, key: str, body: Body, *, ttl_ms: int | None = None, metadata: RequestMetadata | None = None
    ) -> CreateOutcome:
        async with self._slots:
            return await self._inner.put_if_absent(key, body, ttl_ms=ttl_ms, metadata=metadata)

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
        stream = self._inner.get(key, start=start, size_bytes=size_bytes, deleted=deleted, metadata=metadata)
        async with self._slots, aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    @override
    async def stat(self, key: str, *, metadata: RequestMetadata | None = None) -> BlobInfo | None:
        async with self._slots:
            return await self._inner.stat(key, metadata=metadata)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        async with self._slots:
            return await self._inner.list_page(prefix, start_after=start_after, limit=limit)

    @override
    async def delete(
        self, keys: Sequence[str], *, metadata: RequestMetadata | None = None
    ) -> tuple[DeleteFailure, ...]:
        async with self._slots:
            return await self._inner.delete(keys, metadata=metadata)

    @override
    async def remove_ttl(self, key: str, *, metadata: RequestMetadata | None = None) -> None:
        async with self._slots:
            await self._inner.remove_ttl(key, metadata=metadata)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        async with self._slots:
            return await self._inner.list_unfinished(prefix)

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        async with self._slots:
            return await self._inner.abort_unfinished(puts)

    @override
    async def now_ms(self) -> int:
        async with self._slots:
            return await self._inner.now_ms()

    @override
    async def close(self) -> None:
        await self._inner.close()
