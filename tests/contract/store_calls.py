"""What the parts of the contract ask a store, and what they ask it of: `store`, empty, and once more as `second`."""

import asyncio
from collections.abc import Awaitable
from typing import ClassVar

import pytest

from blobstore.base import BlobInfo, BlobStore, BytesBody, Created, CreateOutcome, MemorySink, list_blobs
from blobstore.errors import InvalidRequestError

HOUR_MS = 3_600_000
KEY = "blobs/0f/job@task/0123-000001"

# Keys that sort differently as strings, as paths and as names of directories.
AWKWARD_KEYS = ("a-b", "a.b", "a/b", "a/b-c", "a/b0", "a0", "a~", "aa/a", "aa/b/c", "ab", "A", "b/c/d/e", "b/c0")


async def put_bytes(store: BlobStore, key: str, data: bytes, *, ttl_ms: int | None = None) -> Created:
    return await store.put(key, BytesBody(data), ttl_ms=ttl_ms)


async def create_bytes(store: BlobStore, key: str, data: bytes, *, ttl_ms: int | None = None) -> CreateOutcome:
    return await store.put_if_absent(key, BytesBody(data), ttl_ms=ttl_ms)


async def get_bytes(
    store: BlobStore, key: str, *, start: int = 0, size_bytes: int | None = None, deleted: bool = False
) -> bytes:
    sink = MemorySink()
    await store.read_into(key, sink, start=start, size_bytes=size_bytes, deleted=deleted)
    return sink.data


async def is_refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except InvalidRequestError:
        return True
    return False


async def stat_there(store: BlobStore, key: str) -> BlobInfo:
    info = await store.stat(key)
    assert info is not None
    assert info.ttl_known
    return info


async def check_ttl_is_removed(store: BlobStore, key: str) -> None:
    """After `remove_ttl`: it is gone, or stays where the store says so."""
    info = await stat_there(store, key)
    assert (info.expires_at_ms is None) == store.capabilities.removes_ttl


def check_creation_time(store: BlobStore, before: BlobInfo, after: BlobInfo) -> None:
    """Around `remove_ttl`: it stays, or is later where the store says so."""
    if store.capabilities.keeps_created_at:
        assert after.created_at_ms == before.created_at_ms
    else:
        assert after.created_at_ms >= before.created_at_ms


async def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    return [blob.key async for blob in list_blobs(store, prefix)]


async def wait_until_after(store: BlobStore, time_ms: int) -> None:
    for _ in range(1000):
        if await store.now_ms() > time_ms:
            return
        await asyncio.sleep(0.005)
    pytest.fail("the store's clock does not move")


CREATE_CALLS = pytest.mark.parametrize("create", [put_bytes, create_bytes], ids=["put", "put_if_absent"])
PUT_METHODS = pytest.mark.parametrize("method", ["put", "put_if_absent"])


class StoreFixtures:
    """The base of every part of the contract."""

    # How many of the 1,024 bytes of a key the store needs for itself, as S3 does for a prefix in a bucket.
    own_key_bytes: ClassVar[int] = 0

    @pytest.fixture
    def store(self) -> BlobStore:
        raise NotImplementedError

    @pytest.fixture
    def second(self, store: BlobStore) -> BlobStore:
        """The same blobs, opened once more; a store that cannot be opened twice gives itself."""
        return store
