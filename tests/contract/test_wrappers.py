"""Every wrapper, and all of them together, around every kind of store."""

from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.limited import LimitedStore
from blobstore.local import LocalStore
from blobstore.memory import MemoryStore
from blobstore.metered import MeteredStore
from blobstore.opening import open_store
from blobstore.retrying import RetryingStore
from tests.contract.store_contract import StoreContract


@pytest.fixture(params=["memory", "local"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


class TestRetryingStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return RetryingStore(inner)


class TestLimitedStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return LimitedStore(inner, 2)


class TestMeteredStore(StoreContract):
    @pytest.fixture
    @override
    def store(self, inner: BlobStore) -> BlobStore:
        return MeteredStore(inner)


class TestOpenedStore(StoreContract):
    @pytest.fixture(params=["memory", "local"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}"

    @pytest.fixture
    @override
    def store(self, url: str) -> BlobStore:
        return open_store(url)

    @pytest.fixture
    @override
    def second(self, store: BlobStore, url: str) -> BlobStore:
        return open_store(url)
