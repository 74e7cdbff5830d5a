"""Reads by threads behind a fault proxy: right bytes in the end, or the error that says why (design 0008)."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from blobstore.base import BlobStore
from blobstore.errors import AccessDeniedError, BlobNotFoundError, InvalidRequestError
from blobstore.wrappers.retry import HedgeSettings
from tests.contract.sink_contract import Collecting
from tests.fault_rules import (
    Break,
    Drip,
    Fault,
    Hang,
    Stage,
    expired_token,
    s3_error,
    shifted_range,
    slow_down,
    truncated,
)
from tests.integration.s3_fault_bench import IMPATIENT, MIB, RETRY, S3, Bench, now_s, pattern, read
from tests.servers.ceph_rgw import CephRgw

pytestmark = pytest.mark.s3

SIZE_BYTES = 5 * MIB
START = 1000
DATA = pattern(SIZE_BYTES)


async def read_range(store: BlobStore, key: str = "key", *, size_bytes: int = SIZE_BYTES - START) -> bytes:
    sink = Collecting()
    await store.read_into(key, sink, start=START, size_bytes=size_bytes)
    return bytes(sink.data)


@pytest.fixture(autouse=True)
def planted(bench: Bench) -> None:
    bench.plant("key", DATA)


@pytest.mark.parametrize(
    "fault",
    [
        Break(at=Stage.REQUEST),
        Break(at=Stage.ANSWER),
        Break(at=Stage.BODY, after_bytes=0),
        Break(at=Stage.BODY, after_bytes=3_000_000),
        Break(at=Stage.BODY, after_bytes=3_000_000, polite=True),
        Hang(at=Stage.ANSWER),
        truncated(3_000_000),
        slow_down(),
        s3_error(500, "InternalError"),
        shifted_range(1),
    ],
    ids=["refused", "lost", "cut at once", "cut", "closed", "silent", "truncated", "slow down", "500", "another range"],
)
async def test_whatever_goes_wrong_once_the_bytes_are_right(bench: Bench, fault: Fault) -> None:
    store = bench.store(s3=IMPATIENT)
    rule = bench.strike(fault, "GetObject", key="/key")
    assert await read_range(store) == DATA[START:]
    assert rule.struck == 1


async def test_threads_read_what_is_large_unless_they_are_switched_off(bench: Bench) -> None:
    def is_of_its_own(sink: Collecting) -> bool:
        return not any(name.startswith("asyncio") for name in sink.thread_names)

    for threaded_reads, size_bytes in ((True, SIZE_BYTES), (True, 1000), (False, SIZE_BYTES)):
        store = bench.store(s3=msgspec.structs.replace(IMPATIENT, threaded_reads=threaded_reads))
        sink = Collecting()
        await store.read_into("key", sink, size_bytes=size_bytes)
        assert sink.data == DATA[:size_bytes]
        assert is_of_its_own(sink) == (threaded_reads and size_bytes > 1000)


async def test_what_broke_off_goes_on_where_it_was(bench: Bench) -> None:
    # Politely: a reset takes back what was not read yet.
    bench.strike(Break(at=Stage.BODY, after_bytes=3_000_000, polite=True), "GetObject", key="/key")
    assert await read_range(bench.store()) == DATA[START:]
    _, second = (entry.header("Range") for entry in bench.proxy.of("GetObject", key="/key"))
    assert int(second.removeprefix("bytes=").partition("-")[0]) >= START + MIB


async def test_what_is_missing_too_short_or_forbidden_is_reported(bench: Bench) -> None:
    store = bench.store()
    with pytest.raises(BlobNotFoundError):
        await read_range(store, "other")
    with pytest.raises(InvalidRequestError):
        await read_range(store, size_bytes=SIZE_BYTES)
    bench.strike(s3_error(403, "AccessDenied"), "GetObject", key="/key")
    with pytest.raises(AccessDeniedError):
        await read_range(store)


async def test_credentials_that_have_ended_are_looked_up_again(bench: Bench) -> None:
    store = bench.store()
    assert await read_range(store) == DATA[START:]
    bench.strike(expired_token(), "GetObject", key="/key")
    assert await read_range(store) == DATA[START:]


async def test_a_drip_is_cut_off_and_goes_on(bench: Bench) -> None:
    retry = msgspec.structs.replace(RETRY, bytes_per_s_min=4 * MIB, progress_window_s=0.5)
    rule = bench.strike(Drip(bytes_per_s=MIB), "GetObject", key="/key")
    assert await read_range(bench.store(retry=retry)) == DATA[START:]
    assert rule.struck == 1


async def test_one_that_is_given_up_does_not_keep_its_caller_waiting(bench: Bench) -> None:
    store = bench.store()
    await read_range(store)
    bench.strike(Hang(at=Stage.ANSWER), "GetObject", key="/key", times=None)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await read_range(store)
    assert clock() - began_s < 2


async def test_a_connection_serves_one_read_after_another(ceph_server: CephRgw, bench: Bench) -> None:
    """On Ceph: moto closes every connection after one answer."""
    store = bench.store()
    for _ in range(5):
        assert await read_range(store) == DATA[START:]
    assert len({exchange.connection for exchange in bench.proxy.of("GetObject", key="/key")}) == 1


READS: dict[str, Callable[[BlobStore], Awaitable[object]]] = {
    "range": read_range,
    "get": lambda store: read(store, "key"),
    "stat": lambda store: store.stat("key"),
    "list_page": lambda store: store.list_page(""),
}


@pytest.mark.parametrize("operation", READS)
async def test_what_hangs_is_asked_for_once_more_beside_it(bench: Bench, operation: str) -> None:
    """Row 7: the answer does not wait for the read timeout (design 0008, H1)."""
    store = bench.store(hedge=HedgeSettings(first_patience_s=0.2))
    expected = await READS[operation](store)
    rule = bench.strike(Hang(at=Stage.ANSWER), "GetObject", "HeadObject", "ListObjectsV2", times=1)
    began_s = now_s()
    assert await READS[operation](store) == expected
    assert rule.struck == 1
    assert now_s() - began_s < S3.read_timeout_s
