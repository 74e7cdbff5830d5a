"""A manager of blobs with the semantics of Samza's own test double, which is the only one in the open."""

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from typing_extensions import override

from blobstore.base import Body, Capabilities, RequestMetadata
from blobstore.errors import BlobDeletedError, BlobNotFoundError
from blobstore.wrappers.by_id import BlobManager
from blobstore.wrappers.forwarding import ForwardingStore


class MemoryManager(BlobManager):
    """Mints an id for each put, creates with a TTL, keeps tombstones, lists nothing.

    Attributes:
        blobs: The bytes by id; deleted ones are in `deleted`.
        expiring: Ids whose TTL nobody removed.
        calls: The method and id of each call, and the metadata that came with it.
        before: Called with the method and id of each call; what it raises, the call raises.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self.blobs: dict[str, bytes] = {}
        self.deleted: dict[str, bytes] = {}
        self.expiring: set[str] = set()
        self.calls: list[tuple[str, str, RequestMetadata]] = []
        self.before: Callable[[str, str], None] = lambda method, blob_id: None

    def _note(self, method: str, blob_id: str, metadata: RequestMetadata) -> None:
        self.calls.append((method, blob_id, metadata))
        self.before(method, blob_id)

    def methods(self) -> list[str]:
        """The methods called so far, which are forgotten."""
        called = [method for method, _, _ in self.calls]
        self.calls.clear()
        return called

    def expire(self) -> None:
        """Let the TTL of all end that still have one."""
        for blob_id in self.expiring:
            del self.blobs[blob_id]
        self.expiring.clear()

    @override
    async def put(self, body: Body, metadata: RequestMetadata) -> str:
        blob_id = f"ambry:/{next(self._ids)}?v=1"
        self._note("put", blob_id, metadata)
        async with aclosing(body.read_chunks()) as chunks:
            data = b"".join([chunk async for chunk in chunks])
        self.blobs[blob_id] = data
        self.expiring.add(blob_id)
        return blob_id

    @override
    async def get(
        self, blob_id: str, metadata: RequestMetadata, *, deleted: bool = False
    ) -> AsyncGenerator[bytes, None]:
        self._note("get", blob_id, metadata)
        data = self.deleted[blob_id] if deleted and blob_id in self.deleted else self._there("get", blob_id)
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    @override
    async def delete(self, blob_id: str, metadata: RequestMetadata) -> None:
        self._note("delete", blob_id, metadata)
        self.deleted[blob_id] = self._there("delete", blob_id)
        del self.blobs[blob_id]
        self.expiring.discard(blob_id)

    @override
    async def remove_ttl(self, blob_id: str, metadata: RequestMetadata) -> None:
        self._note("remove_ttl", blob_id, metadata)
        self._there("remove_ttl", blob_id)
        self.expiring.discard(blob_id)

    def _there(self, method: str, blob_id: str) -> bytes:
        if blob_id in self.deleted:
            raise BlobDeletedError("410", operation=method, key=blob_id)
        if blob_id not in self.blobs:
            raise BlobNotFoundError("404", operation=method, key=blob_id)
        return self.blobs[blob_id]


class UntaggedStore(ForwardingStore):
    """Cannot remove a TTL, as an S3 store without tags (design 0003, L5)."""

    @property
    @override
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, removes_ttl=False)

    @override
    async def remove_ttl(self, key: str) -> None:
        if await self.stat(key) is None:
            await super().remove_ttl(key)  # says so
