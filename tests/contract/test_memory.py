import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.memory import MemoryStore
from tests.contract.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    @override
    def store(self) -> BlobStore:
        return MemoryStore()


class TestMemoryStoreWithTinyChunks(StoreContract):
    @pytest.fixture
    @override
    def store(self) -> BlobStore:
        return MemoryStore(chunk_bytes=4096)
