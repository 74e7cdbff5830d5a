"""A manager of four methods, with a store that keeps its entries, has the whole contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from blobstore.opening import wrap_store
from blobstore.wrappers.by_id import ManagedStore
from tests.blob_manager import MemoryManager, UntaggedStore
from tests.contract.store_calls import HOUR_MS
from tests.contract.store_contract import StoreContract

DAY_MS = 24 * HOUR_MS


class TestManagedStore(StoreContract):
    """No capability is missing; that ranges are cut out of whole blobs nobody sees."""

    @pytest.fixture
    def manager(self) -> MemoryManager:
        return MemoryManager()

    @pytest.fixture(params=["memory", "local", "without tags"])
    def inner(self, request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
        if request.param == "without tags":
            return UntaggedStore(MemoryStore())
        return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)

    @pytest.fixture
    @override
    def store(self, inner: BlobStore, manager: MemoryManager) -> Iterator[BlobStore]:
        yield ManagedStore(inner, manager, prefixes=("",), ttl_max_ms=DAY_MS)
        assert {"put", "get", "delete", "remove_ttl"}.issuperset(manager.methods())

    @pytest.fixture
    @override
    def second(self, inner: BlobStore, manager: MemoryManager) -> BlobStore:
        return wrap_store(ManagedStore(inner, manager, prefixes=("",), ttl_max_ms=DAY_MS))
