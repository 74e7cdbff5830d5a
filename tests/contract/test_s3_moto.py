"""The S3 store on moto, a mock that does what Ceph does not: it completes a multipart upload conditionally."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, Lost
from blobstore.s3.client import S3Bucket
from blobstore.s3.errors import Answer
from blobstore.s3.settings import MIB, S3Settings
from blobstore.s3.store import S3Store
from tests.contract.reading_contract import ListingContract, ReadingContract
from tests.contract.s3_contract import S3Contract, S3Fixtures
from tests.contract.store_calls import HOUR_MS, KEY, create_bytes, get_bytes, keys_of, put_bytes, stat_there
from tests.contract.store_contract import KeepingContract
from tests.contract.writing_contract import WritingContract
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3


@pytest.mark.soak  # in `make test` everything on moto goes in parts, which nothing else can show
class TestS3OnMoto(S3Contract):
    @pytest.fixture
    @override
    def server(self, moto_server: MotoServer) -> S3Server:
        return moto_server


class InParts(S3Fixtures):
    """Everything that is not empty goes in parts; after every test, none of an upload is left."""

    settings: ClassVar[S3Settings] = S3Settings(
        conditional_multipart=True, single_put_bytes_max=0, part_bytes=5 * MIB, parts_in_memory_max=2
    )

    @pytest.fixture
    @override
    def server(self, moto_server: MotoServer) -> S3Server:
        return moto_server

    @pytest.fixture
    @override
    async def store(self, server: S3Server, bucket: str) -> AsyncIterator[BlobStore]:
        store = S3Store(bucket, self.prefix, self.settings)
        yield store
        await store.close()
        assert "Uploads" not in server.client.list_multipart_uploads(Bucket=bucket)


class TestS3InParts(InParts, WritingContract):
    """What a put promises; how a blob was put makes no difference to gets, lists and deletes."""

    async def test_a_blob_of_several_parts_is_whole_and_created_with_its_ttl(self, store: BlobStore) -> None:
        data = bytes(range(256)) * (44 * MIB // 1024)  # 11 MiB: two parts and a smaller one
        assert isinstance(await create_bytes(store, KEY, data, ttl_ms=HOUR_MS), Created)
        info = await stat_there(store, KEY)
        assert (info.size_bytes, info.expires_at_ms) == (len(data), info.created_at_ms + HOUR_MS)
        assert hashlib.sha256(await get_bytes(store, KEY)).digest() == hashlib.sha256(data).digest()
        assert await get_bytes(store, KEY, start=5 * MIB - 2, size_bytes=4) == data[5 * MIB - 2 : 5 * MIB + 2]
        assert await create_bytes(store, KEY, b"other", ttl_ms=HOUR_MS) == Lost()
        await store.remove_ttl(KEY)
        assert (await stat_there(store, KEY)).expires_at_ms is None
        await put_bytes(store, KEY, data[::-1])
        assert (await get_bytes(store, KEY))[:5] == data[::-1][:5]
        assert await keys_of(store) == [KEY]

    async def test_a_put_cancelled_while_it_completes_leaves_no_parts_behind(
        self, store: BlobStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call, is_completing, is_cancelled = S3Bucket.call, asyncio.Event(), asyncio.Event()

        async def held(bucket: S3Bucket, operation: str, **parameters: Any) -> Answer:
            if operation != "complete_multipart_upload":
                return await call(bucket, operation, **parameters)
            is_completing.set()
            answer = await call(bucket, operation, **parameters)
            # However soon the server answers, the put is cancelled before it knows.
            await is_cancelled.wait()
            return answer

        monkeypatch.setattr(S3Bucket, "call", held)
        for turns in range(10):
            is_completing.clear()
            is_cancelled.clear()
            putting = asyncio.ensure_future(store.put(KEY, BytesBody(b"new")))
            await is_completing.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            is_cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await putting

    async def test_more_uploads_at_once_than_parts_may_be_in_memory_all_get_through(self, store: BlobStore) -> None:
        bodies = [bytes([number]) * (11 * MIB) for number in range(4)]
        outcomes = await asyncio.gather(*(create_bytes(store, f"k/{body[0]}", body) for body in bodies))
        assert all(isinstance(outcome, Created) for outcome in outcomes)
        for body in bodies:
            assert await get_bytes(store, f"k/{body[0]}") == body


@pytest.mark.soak  # a blob is the same, however it was put
class TestTheOthersInParts(InParts, ReadingContract, ListingContract, KeepingContract):
    pass
