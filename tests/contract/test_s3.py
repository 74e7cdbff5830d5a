"""The S3 store on Ceph RGW, a production object store; where that is not installed, on moto what does not need it."""

import asyncio
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.s3.settings import StoreProfile
from blobstore.s3.store import S3Store
from tests.contract.reading_contract import ListingContract, ReadingContract
from tests.contract.s3_contract import S3Contract, S3Fixtures
from tests.contract.sink_contract import SinkContract
from tests.contract.store_calls import HOUR_MS, KEY, create_bytes, keys_of, put_bytes, stat_there
from tests.contract.store_contract import KeepingContract, RacedByProcesses
from tests.contract.writing_contract import WritingContract
from tests.servers.ceph_rgw import CephRgw
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3


@pytest.mark.soak  # in `make test` it is below a prefix, and with every wrapper around it
class TestS3OnCeph(S3Contract):
    @pytest.fixture
    @override
    def server(self, ceph_server: CephRgw) -> S3Server:
        return ceph_server

    async def test_a_page_has_up_to_1000_blobs_and_a_batch_deletes_as_many(self, store: BlobStore) -> None:
        keys = [f"k/{number:04d}" for number in range(1001)]
        for at in range(0, len(keys), 50):
            await asyncio.gather(*(put_bytes(store, key, b"") for key in keys[at : at + 50]))
        page = await store.list_page("")
        assert [blob.key for blob in page.blobs] == keys[:1000]
        assert page.truncated
        assert await keys_of(store) == keys
        assert await store.delete(keys[1:]) == ()
        assert await keys_of(store) == keys[:1]


class TestS3BelowAPrefix(RacedByProcesses, S3Contract):
    """In a bucket in which others live, by several processes that open it by its URL."""

    prefix: ClassVar[str] = "team-a/state"
    own_key_bytes: ClassVar[int] = len("team-a/state/")
    # Each loads the SDK, which takes a second: enough to keep both of a small machine's cores racing.
    racers_count: ClassVar[int] = 4

    @pytest.fixture
    @override
    def race_url(self, bucket: str) -> str:
        return f"s3://{bucket}/{self.prefix}"

    @pytest.fixture(autouse=True)
    def neighbours(self, server: S3Server, bucket: str) -> Any:
        """What is beside the prefix is neither seen nor touched by any test."""
        names = ["blobs/0f/job@task/0123-000001", "team-a/state-b/k", "team-a/stat", "team-a/zzz", "zzz"]
        for name in names:
            server.client.put_object(Bucket=bucket, Key=name, Body=b"another's")
        yield
        shown = server.client.list_objects_v2(Bucket=bucket)["Contents"]
        assert sorted(blob["Key"] for blob in shown if not blob["Key"].startswith("team-a/state/")) == sorted(names)


class WithoutTags(S3Fixtures):
    @override
    def open(self, bucket: str) -> S3Store:
        """As where `doctor` has written a profile without tags, which would be in every list of these tests."""
        store = super().open(bucket)
        store._profile = StoreProfile(
            atomic_create=True,
            consistent_lists=True,
            tags=False,
            conditional_multipart=False,
            probed_at_ms=0,
            tidemark="0",
        )
        store._is_ready = True
        return store


class TestS3WithoutTags(WithoutTags, WritingContract, KeepingContract):
    """What writes tags, or would."""

    async def test_a_ttl_stays_and_nothing_is_tagged(self, server: S3Server, bucket: str, store: BlobStore) -> None:
        assert not store.capabilities.removes_ttl
        await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        before = await stat_there(store, KEY)
        await store.remove_ttl(KEY)
        assert await stat_there(store, KEY) == before
        assert server.client.get_object_tagging(Bucket=bucket, Key=KEY)["TagSet"] == []


@pytest.mark.soak  # reads and lists ask for no tags
class TestReadsWithoutTags(WithoutTags, ReadingContract, ListingContract):
    pass


@pytest.fixture(params=["", "team-a/state"], ids=["bucket", "prefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(s3_bucket: str, prefix: str) -> Any:
    store = S3Store(s3_bucket, prefix)
    yield store
    await store.close()


def name_of(store: S3Store, key: str) -> dict[str, str]:
    return {"Bucket": store.bucket, "Key": f"{store.prefix}/{key}" if store.prefix else key}


async def test_an_object_is_the_blob_with_write_id_ttl_and_tag(s3_server: S3Server, store: S3Store) -> None:
    """Design 0003, "Bytes": what an outsider finds in the bucket."""
    await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
    await put_bytes(store, "permanent", b"content")
    created = s3_server.client.get_object(**name_of(store, KEY))
    assert created["Body"].read() == b"content"
    assert created["Metadata"].pop("tidemark-ttl-ms") == str(HOUR_MS)
    assert len(bytes.fromhex(created["Metadata"].pop("tidemark-write-id"))) == 16
    assert created["Metadata"] == {}
    assert tags_of(s3_server, store, KEY) == [{"Key": "tidemark", "Value": "expiring"}]
    permanent = s3_server.client.head_object(**name_of(store, "permanent"))["Metadata"]
    assert set(permanent) == {"tidemark-write-id"}
    assert tags_of(s3_server, store, "permanent") == []
    await store.remove_ttl(KEY)
    assert tags_of(s3_server, store, KEY) == [{"Key": "tidemark", "Value": "kept"}]


def tags_of(server: S3Server, store: S3Store, key: str) -> Any:
    return server.client.get_object_tagging(**name_of(store, key))["TagSet"]


async def test_a_lost_tag_is_a_ttl_that_was_not_removed(s3_server: S3Server, store: S3Store) -> None:
    """Design 0003, L2."""
    await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
    before = await stat_there(store, KEY)
    assert before.expires_at_ms == before.created_at_ms + HOUR_MS
    s3_server.client.delete_object_tagging(**name_of(store, KEY))
    assert (await stat_there(store, KEY)).expires_at_ms is not None
    await store.remove_ttl(KEY)
    assert (await stat_there(store, KEY)).expires_at_ms is None


async def test_uploads_that_nobody_completed_are_reported_with_key_and_time_and_can_be_given_up(
    ceph_server: CephRgw, store: S3Store
) -> None:
    """On Ceph: moto says that every upload was begun in 2010."""
    before_ms = await store.now_ms()
    ids = [begin_upload(ceph_server, **name_of(store, key)) for key in (KEY, KEY, "other")]
    beside = begin_upload(ceph_server, store.bucket, "beside/" + KEY)
    after_ms = await store.now_ms()
    shown = await store.list_unfinished("blobs/")
    assert {(put.key, put.upload_id) for put in shown} == {(KEY, ids[0]), (KEY, ids[1])}
    assert all(before_ms <= put.begun_at_ms <= after_ms for put in shown)
    assert await store.list_unfinished("absent/") == ()
    assert await keys_of(store) == []
    assert await store.stat(KEY) is None
    assert await store.abort_unfinished(shown) == ()
    assert await store.list_unfinished("blobs/") == ()
    assert await store.abort_unfinished(shown) == ()
    left = ceph_server.client.list_multipart_uploads(Bucket=store.bucket)["Uploads"]
    assert {upload["UploadId"] for upload in left} == {ids[2], beside}


def begin_upload(server: S3Server, Bucket: str, Key: str) -> str:  # noqa: N803  # as S3 names them
    """A multipart upload with one part, as a process that dies leaves it; its id."""
    upload = {"Bucket": Bucket, "Key": Key}
    upload["UploadId"] = server.client.create_multipart_upload(**upload)["UploadId"]
    server.client.upload_part(**upload, PartNumber=1, Body=b"part")
    return upload["UploadId"]


@pytest.mark.parametrize("prefix", ["team-a/state"])
async def test_more_unfinished_uploads_than_a_page_holds_are_all_reported(
    ceph_server: CephRgw, store: S3Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ceph: moto reports all uploads on one page, however few were asked for."""
    ask = store._bucket.ask
    pages = 0

    async def ask_for_few(method: str, operation: str, key: str, **arguments: object) -> Any:
        nonlocal pages
        if method == "list_multipart_uploads":
            pages += 1
            arguments["MaxUploads"] = 20
        return await ask(method, operation, key, **arguments)

    monkeypatch.setattr(store._bucket, "ask", ask_for_few)
    begun = list(await begin_uploads(store, range(50)))
    shown = await store.list_unfinished("")
    assert pages == 3
    assert {(put.key, put.upload_id) for put in shown} == {(put.key, put.upload_id) for put in begun}
    assert await store.abort_unfinished(shown) == ()
    assert await store.list_unfinished("") == ()


async def begin_uploads(store: S3Store, numbers: range) -> Any:
    # Some keys have several, so that a page may end between two of one key.
    return await asyncio.gather(*(store.begin_upload(f"k/{number % 30:04d}") for number in numbers))


async def test_an_upload_that_is_aborted_while_it_is_written_fails(ceph_server: CephRgw, store: S3Store) -> None:
    """On Ceph: moto answers 500."""
    upload = name_of(store, KEY)
    upload["UploadId"] = begin_upload(ceph_server, **upload)
    assert await store.abort_unfinished(await store.list_unfinished("")) == ()
    with pytest.raises(ceph_server.client.exceptions.ClientError, match="NoSuchUpload"):
        ceph_server.client.upload_part(**upload, PartNumber=2, Body=b"part")


class TestReadByThreads(S3Fixtures, SinkContract):
    """Whatever the size (design 0008, B2); what is too little for that goes through the event loop in the others."""

    @pytest.fixture
    @override
    def server(self, ceph_server: CephRgw) -> S3Server:
        return ceph_server

    @pytest.fixture(autouse=True)
    def from_the_first_byte(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("blobstore.s3.store.THREADED_FROM_BYTES", 1)
