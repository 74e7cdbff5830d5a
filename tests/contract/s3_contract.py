"""The contract on S3 servers: what those who keep it each in its own way have in common."""

from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.s3.settings import S3Settings
from blobstore.s3.store import S3Store
from tests.contract.store_calls import StoreFixtures
from tests.contract.store_contract import StoreContract
from tests.servers.s3_server import S3Server


class S3Fixtures(StoreFixtures):
    """On a new bucket for every test: it costs 5 to 7 ms on either server, and leaves all 1,024 bytes to the key."""

    prefix: ClassVar[str] = ""
    settings: ClassVar[S3Settings] = S3Settings()

    def open(self, bucket: str) -> S3Store:
        return S3Store(bucket, self.prefix, self.settings)

    @pytest.fixture
    def server(self, s3_server: S3Server) -> S3Server:
        return s3_server

    @pytest.fixture
    def bucket(self, server: S3Server, new_bucket: Callable[[S3Server], str]) -> str:
        return new_bucket(server)

    @pytest.fixture
    @override
    async def store(self, bucket: str) -> AsyncIterator[BlobStore]:
        store = self.open(bucket)
        yield store
        await store.close()

    @pytest.fixture
    @override
    async def second(self, store: BlobStore, bucket: str) -> AsyncIterator[BlobStore]:
        second = self.open(bucket)
        yield second
        await second.close()


class S3Contract(S3Fixtures, StoreContract):
    """The whole contract."""
