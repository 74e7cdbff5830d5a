"""Every wrapper, and all of them together, around every kind of store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from blobstore.opening import open_store
from blobstore.s3.store import S3Store
from blobstore.wrappers.forwarding import Bandwidth, InFlightLimit, LimitedStore, MeteredStore, PacedStore
from blobstore.wrappers.retry import HedgedStore, HedgeSettings, RetryingStore
from tests.contract.reading_contract import ListingContract, ReadingContract
from tests.contract.store_contract import StoreContract
from tests.servers.s3_server import S3Server

# In `make test` each wrapper is around a store in memory, and all together around that and a directory. The tests
# of a server take ten times as long: there the S3 store is held to the contract by itself (`test_s3`), and used with
# all wrappers around it by the integration tests. Everything around every store is for `make endure`.
ON_SERVERS = [
    pytest.param(server, marks=[pytest.mark.s3, pytest.mark.soak]) for server in ("ceph_server", "moto_server")
]


@pytest.fixture(params=["memory", pytest.param("local", marks=pytest.mark.soak), *ON_SERVERS])
def made(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[S3Server], str]) -> BlobStore:
    match request.param:
        case "memory":
            return MemoryStore()
        case "local":
            return LocalStore(tmp_path)
        case server:
            return S3Store(new_bucket(request.getfixturevalue(server)))


@pytest.fixture
async def inner(made: BlobStore) -> AsyncIterator[BlobStore]:
    yield made
    await made.close()


class TestRetryingStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return RetryingStore(inner)


class TestLimitedStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return LimitedStore(inner, InFlightLimit(2))


class TestHedgedStore(ReadingContract, ListingContract):
    """Every read that does not come at once is asked for twice."""

    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return HedgedStore(inner, HedgeSettings(first_patience_s=1e-5, patience_min_s=1e-5, extra_in_reserve=1000))


class TestMeteredStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return MeteredStore(inner)


class TestPacedStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return PacedStore(inner, Bandwidth(10**9))


class TestOpenedStore(StoreContract):
    @pytest.fixture(params=["memory", "local", *ON_SERVERS])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[S3Server], str]) -> str:
        match request.param:
            case "memory":
                return f"memory://{tmp_path.name}"
            case "local":
                return f"file://{tmp_path}"
            case server:
                return f"s3://{new_bucket(request.getfixturevalue(server))}"

    @pytest.fixture
    @override
    async def store(self, url: str) -> AsyncIterator[BlobStore]:
        store = open_store(url)
        yield store
        await store.close()

    @pytest.fixture
    @override
    async def second(self, store: BlobStore, url: str) -> AsyncIterator[BlobStore]:
        second = open_store(url)
        yield second
        await second.close()
