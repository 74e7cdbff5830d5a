"""A production store over TLS, with a certificate authority that this machine does not know."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from blobstore.base import BytesBody, Created, Lost
from blobstore.errors import BlobNotFoundError, InvalidRequestError
from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import MIB, S3Settings
from blobstore.s3.store import S3Store
from engine.repository.repository import Repository
from tests.contract.sink_contract import Collecting, read_range
from tests.contract.store_calls import HOUR_MS, KEY, get_bytes, keys_of, stat_there
from tests.servers.ceph_rgw import CephRgw
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def bucket(ceph_server: CephRgw, new_bucket: Callable[[S3Server], str], monkeypatch: pytest.MonkeyPatch) -> str:
    bucket = new_bucket(ceph_server)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    return bucket


@pytest.fixture
def settings(ceph_server: CephRgw) -> S3Settings:
    return S3Settings(
        endpoint_url=ceph_server.tls_endpoint_url, ca_bundle=ceph_server.ca_bundle, single_put_bytes_max=8 * MIB
    )


@pytest.fixture
async def store(bucket: str, settings: S3Settings) -> AsyncIterator[S3Store]:
    store = S3Store(bucket, settings=settings)
    yield store
    await store.close()


# Empty; held in memory; read once more while it is sent; in two parts.
@pytest.mark.parametrize("size_bytes", [0, 1000, 3 * MIB, 11 * MIB])
async def test_blobs_of_every_size_are_put_got_and_deleted(store: S3Store, size_bytes: int) -> None:
    data = (b"%07d\n" * (size_bytes // 8)) % tuple(range(size_bytes // 8))
    await store.put(KEY, BytesBody(data), ttl_ms=HOUR_MS)
    assert hashlib.sha256(await get_bytes(store, KEY)).digest() == hashlib.sha256(data).digest()
    assert (
        await get_bytes(store, KEY, start=size_bytes // 2, size_bytes=min(size_bytes, 5)) == data[size_bytes // 2 :][:5]
    )
    info = await stat_there(store, KEY)
    assert (info.size_bytes, info.expires_at_ms) == (size_bytes, info.created_at_ms + HOUR_MS)
    assert await store.put_if_absent(KEY, BytesBody(data), ttl_ms=HOUR_MS) == Lost()
    await store.remove_ttl(KEY)
    assert (await stat_there(store, KEY)).expires_at_ms is None
    assert await keys_of(store) == [KEY]
    assert await store.delete([KEY]) == ()
    with pytest.raises(BlobNotFoundError):
        await get_bytes(store, KEY)
    assert isinstance(await store.put_if_absent(KEY, BytesBody(data), ttl_ms=HOUR_MS), Created)
    assert await store.list_unfinished("") == ()


async def test_many_requests_at_once_share_the_connections(store: S3Store) -> None:
    async def live(number: int) -> None:
        key = f"k/{number}"
        await store.put_if_absent(key, BytesBody(key.encode() * 10_000))
        assert await get_bytes(store, key) == key.encode() * 10_000

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(live(number))


async def test_threads_read_over_tls_and_cut_off_take_no_ciphertext(store: S3Store) -> None:
    data = Random(1).randbytes(8 * MIB)
    await store.put(KEY, BytesBody(data))
    assert await read_range(store, 3, 8 * MIB - 3) == data[3:]
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.03):
        sink = Collecting()
        task = asyncio.ensure_future(store.read_into(KEY, sink, size_bytes=len(data)))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        assert data.startswith(sink.data)
    assert await read_range(store, 0, 8 * MIB) == data


async def test_a_thread_says_so_too(store: S3Store, bucket: str, settings: S3Settings) -> None:
    data = bytes(2 * MIB)
    await store.put(KEY, BytesBody(data))
    unknown = S3Store(bucket, settings=S3Settings(endpoint_url=settings.endpoint_url), bound_by_profile=False)
    with pytest.raises(InvalidRequestError, match="not trusted"):
        await read_range(unknown, 0, 2 * MIB)
    await unknown.close()


async def test_certificates_are_read_once_for_all_connections_of_threads(
    store: S3Store, settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(KEY, BytesBody(bytes(8 * MIB)))
    read: list[str] = []
    real = ssl.SSLContext.load_verify_locations

    def load(self: ssl.SSLContext, cafile: str, *more: None) -> None:
        read.append(cafile)
        real(self, cafile, *more)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load)
    await asyncio.gather(*(read_range(store, at * MIB, 2 * MIB) for at in range(6)))
    assert read == [settings.ca_bundle]


async def test_an_authority_that_nobody_knows_is_refused_with_a_hint(bucket: str, settings: S3Settings) -> None:
    unknown = S3Settings(endpoint_url=settings.endpoint_url)
    bare, wrapped = S3Store(bucket, settings=unknown), open_store(f"s3://{bucket}", StoreSettings(s3=unknown))
    for store in (bare, wrapped):
        for call in (store.stat(KEY), store.put_if_absent(KEY, BytesBody(b"x")), store.now_ms(), keys_of(store)):
            with pytest.raises(InvalidRequestError, match="not trusted") as caught:
                await call
            assert "ca_bundle" in caught.value.hint
        await store.close()


async def test_an_authority_may_be_named_by_the_environment(
    bucket: str, settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", settings.ca_bundle)
    store = S3Store(bucket, settings=S3Settings(endpoint_url=settings.endpoint_url))
    assert await store.stat(KEY) is None
    await store.close()


async def test_a_file_without_certificates_is_refused_with_a_hint(
    bucket: str, settings: S3Settings, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for ca_bundle in (str(empty), str(tmp_path / "absent.pem")):
        store = S3Store(bucket, settings=S3Settings(endpoint_url=settings.endpoint_url, ca_bundle=ca_bundle))
        with pytest.raises(InvalidRequestError) as caught:
            await store.stat(KEY)
        assert "ca_bundle" in caught.value.hint
        await store.close()


async def test_a_repository_lives_over_tls(bucket: str, settings: S3Settings) -> None:
    store = open_store(f"s3://{bucket}/state", StoreSettings(s3=settings))
    async with await Repository.init(store) as repository:
        assert await repository.scopes() == ()
