"""The limit on bytes per second, to a real server and back: what is sent is held up, and not only what is read."""

import time
from itertools import pairwise

import pytest

from blobstore.base import BytesBody, Created, read_blob
from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import S3Settings
from tests.contract.sink_contract import Collecting
from tests.servers.s3_server import S3Server

MIB = 2**20
DATA = bytes(range(256)) * (6 * MIB // 4 // 256)

pytestmark = pytest.mark.s3


async def test_sending_and_fetching_take_the_time_of_their_bytes(s3_server: S3Server, s3_bucket: str) -> None:
    # A limit of its own: other tests of the process have others.
    settings = StoreSettings(bytes_per_s_max=MIB + 3, s3=S3Settings(endpoint_url=s3_server.endpoint_url))
    store = open_store(f"s3://{s3_bucket}/prefix", settings)
    try:
        times_s = [time.monotonic()]
        # Of more than what is held in memory: it is read twice, and counts once.
        assert isinstance(await store.put_if_absent("blobs/k", BytesBody(DATA)), Created)
        times_s.append(time.monotonic())
        sink = Collecting()
        await store.read_into("blobs/k", sink, size_bytes=len(DATA))
        times_s.append(time.monotonic())
        assert bytes(sink.data) == DATA
        assert len(await read_blob(store, "blobs/k", size_bytes_max=len(DATA))) == len(DATA)
        times_s.append(time.monotonic())
    finally:
        await store.close()
    for before_s, after_s in pairwise(times_s):
        assert 1.2 < after_s - before_s < 10
