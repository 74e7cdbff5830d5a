"""The contract on a bucket that keeps versions, and serves deleted blobs from them (design 0003, V1 to V3)."""

from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Created
from blobstore.errors import BlobDeletedError, BlobNotFoundError
from blobstore.s3.settings import S3Settings
from blobstore.s3.store import S3Store
from engine.errors import UnsafeStoreError
from engine.repository.repository import Repository
from tests.contract.reading_contract import ListingContract, ReadingContract
from tests.contract.s3_contract import S3Fixtures
from tests.contract.store_calls import HOUR_MS, KEY, StoreFixtures, create_bytes, get_bytes, put_bytes
from tests.contract.store_contract import KeepingContract
from tests.contract.writing_contract import WritingContract
from tests.fault_proxy import FaultProxy
from tests.fault_rules import Rule, on_method, s3_error
from tests.servers.ceph_rgw import CephRgw
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3


class Versioned(S3Fixtures):
    settings: ClassVar[S3Settings] = S3Settings(serve_deleted=True)

    @pytest.fixture
    @override
    def server(self, moto_server: MotoServer) -> S3Server:
        return moto_server

    @pytest.fixture
    @override
    async def store(self, server: S3Server, bucket: str) -> AsyncIterator[BlobStore]:
        server.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        store = self.open(bucket)
        await store.stat("any")  # from the first answer on, it says that it keeps what is deleted
        assert store.capabilities.keeps_deleted
        yield store
        await store.close()


class ServedContract(StoreFixtures):
    test_a_deleted_blob_is_not_found = KeepingContract.test_a_deleted_blob_is_not_found
    test_it_is_served_on_demand = KeepingContract.test_a_deleted_blob_is_served_on_demand_by_a_store_that_keeps_it
    test_a_key_can_be_put_again = KeepingContract.test_a_key_can_be_put_again_after_its_deletion

    async def test_the_newest_version_is_served_however_often_a_blob_was_deleted(
        self, server: S3Server, bucket: str, store: BlobStore
    ) -> None:
        await put_bytes(store, KEY, b"first")
        await put_bytes(store, f"{KEY}-longer", b"another's")
        await put_bytes(store, KEY, b"second")
        for _ in range(12):
            server.client.delete_object(Bucket=bucket, Key=KEY)
        assert await get_bytes(store, KEY, deleted=True) == b"second"
        assert await get_bytes(store, KEY, start=6, size_bytes=0, deleted=True) == b""
        assert await get_bytes(store, KEY, start=6, deleted=True) == b""
        assert await get_bytes(store, f"{KEY}-longer", deleted=True) == b"another's"
        with pytest.raises(BlobNotFoundError) as caught:
            await get_bytes(store, KEY[:-1], deleted=True)
        assert not isinstance(caught.value, BlobDeletedError)
        await put_bytes(store, KEY, b"third")
        assert await get_bytes(store, KEY, deleted=True) == b"third"

    async def test_a_version_that_is_gone_too_is_not_found(
        self, server: S3Server, bucket: str, store: BlobStore
    ) -> None:
        await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        await store.delete([KEY])
        for each in server.client.list_object_versions(Bucket=bucket)["Versions"]:
            server.client.delete_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])
        with pytest.raises(BlobNotFoundError):
            await get_bytes(store, KEY, deleted=True)


class TestS3WithVersions(Versioned, ServedContract, KeepingContract):
    pass


class TestS3OnCephWithVersions(Versioned, ServedContract):
    """No more than what is deleted: Ceph ignores `If-None-Match` in such a bucket, and it can be no repository."""

    @pytest.fixture
    @override
    def server(self, ceph_server: CephRgw) -> S3Server:
        return ceph_server

    async def test_a_create_replaces_what_is_there_and_init_refuses_the_bucket(
        self, bucket: str, store: BlobStore
    ) -> None:
        for data in (b"first", b"second"):
            assert isinstance(await create_bytes(store, KEY, data), Created)
        with pytest.raises(UnsafeStoreError):
            await Repository.init(f"s3://{bucket}/below")


@pytest.mark.soak  # versions make no difference to what is there
class TestTheRestWithVersions(Versioned, WritingContract, ReadingContract, ListingContract):
    pass


async def open_and_look(bucket: str, settings: S3Settings) -> bool:
    store = S3Store(bucket, "", settings)
    await store.stat(KEY)
    keeps_deleted = store.capabilities.keeps_deleted
    await store.close()
    return keeps_deleted


async def test_only_a_bucket_whose_versions_are_on_keeps_deleted_blobs(s3_server: S3Server, s3_bucket: str) -> None:
    settings = S3Settings(serve_deleted=True)
    seen = [await open_and_look(s3_bucket, settings)]
    for status in ("Enabled", "Suspended"):
        s3_server.client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": status})
        seen.append(await open_and_look(s3_bucket, settings))
    assert seen == [False, True, False]


@pytest.mark.parametrize("status, code", [(403, "AccessDenied"), (501, "NotImplemented")])
async def test_a_store_that_may_not_ask_keeps_nothing(
    s3_server: S3Server, s3_bucket: str, status: int, code: str
) -> None:
    s3_server.client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": "Enabled"})
    async with FaultProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Rule(fault=s3_error(status, code), when=on_method("GET", containing="?versioning"), times=None))
        settings = S3Settings(serve_deleted=True, endpoint_url=proxy.endpoint_url, path_style=True)
        assert not await open_and_look(s3_bucket, settings)


async def test_without_the_setting_nothing_is_asked_and_what_is_deleted_is_not_found(
    s3_server: S3Server, s3_bucket: str
) -> None:
    s3_server.client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": "Enabled"})
    async with FaultProxy(s3_server.endpoint_url) as proxy:
        store = S3Store(s3_bucket, "", S3Settings(endpoint_url=proxy.endpoint_url, path_style=True))
        await put_bytes(store, KEY, b"content")
        await store.delete([KEY])
        with pytest.raises(BlobNotFoundError):
            await get_bytes(store, KEY, deleted=True)
        with pytest.raises(BlobNotFoundError):  # AWS and moto say that the method is not allowed on a delete marker
            await store.remove_ttl(KEY)
        assert [exchange.target for exchange in proxy.exchanges if "version" in exchange.target] == []
        await store.close()
