from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.local.store import LocalStore
from tests.contract.store_calls import HOUR_MS
from tests.contract.store_contract import RacedByProcesses, StoreContract


class TestLocalStore(RacedByProcesses, StoreContract):
    @pytest.fixture
    @override
    def store(self, tmp_path: Path) -> Iterator[BlobStore]:
        yield LocalStore(tmp_path / "new" / "root")
        assert list(tmp_path.glob("new/root/.tmp/*")) == []  # every test: nothing half written is left

    @pytest.fixture
    @override
    def second(self, store: BlobStore, tmp_path: Path) -> BlobStore:
        return LocalStore(tmp_path / "new" / "root")

    @pytest.fixture
    @override
    def race_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/new/root"


class TestLocalStoreThatKeepsDeletedBlobs(StoreContract):
    @pytest.fixture
    @override
    def store(self, tmp_path: Path) -> BlobStore:
        return LocalStore(tmp_path, deleted_retention_ms=HOUR_MS)

    @pytest.fixture
    @override
    def second(self, store: BlobStore, tmp_path: Path) -> BlobStore:
        return LocalStore(tmp_path, deleted_retention_ms=HOUR_MS)
