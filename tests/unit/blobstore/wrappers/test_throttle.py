"""Bodies and blobs held to a bandwidth, by a virtual clock and once by the real one."""

import asyncio
import time
from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, BytesBody, Created, Sink, read_blob
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, open_store
from blobstore.wrappers.forwarding import BURST_S, Bandwidth, Meter, MeteredStore, PacedStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.contract.sink_contract import Collecting
from tests.simulation.model.virtual_loop import run_jumping

MIB = 1024 * 1024
DATA = bytes(4 * MIB)


def test_a_put_and_a_get_take_the_time_of_their_bytes() -> None:
    async def move() -> tuple[float, float]:
        store, clock = PacedStore(MemoryStore(), Bandwidth(MIB)), asyncio.get_running_loop().time
        began_s = clock()
        assert isinstance(await store.put_if_absent("k", BytesBody(DATA)), Created)
        put_s = clock() - began_s
        assert await read_blob(store, "k", size_bytes_max=len(DATA)) == DATA
        return put_s, clock() - began_s

    put_s, both_s = run_jumping(move())[0]
    assert put_s == pytest.approx(4 - BURST_S, abs=0.1)
    assert both_s == pytest.approx(8 - BURST_S, abs=0.1)


def test_a_body_that_the_store_paces_itself_is_left_alone() -> None:
    async def move() -> float:
        store, clock = PacedStore(MemoryStore(), Bandwidth(MIB), paces_bodies=False), asyncio.get_running_loop().time
        began_s = clock()
        await store.put("k", BytesBody(DATA))
        return clock() - began_s

    assert run_jumping(move())[0] < 0.1


def test_a_reader_that_is_held_up_is_no_slow_store() -> None:
    """A floor of 512 KiB/s, and eight readers that have 64 KiB/s each: nothing is cut off."""

    meter = Meter()

    async def move() -> None:
        inner = MemoryStore()
        await inner.put("k", BytesBody(DATA))
        retry = RetrySettings(bytes_per_s_min=MIB // 2, progress_window_s=1, attempts_max=1)
        store = PacedStore(RetryingStore(MeteredStore(inner, meter), retry), Bandwidth(MIB // 2))
        await asyncio.gather(*(read_blob(store, "k", size_bytes_max=len(DATA)) for _ in range(8)))

    run_jumping(move())
    assert meter.requests == {"get": 8}


@pytest.mark.parametrize("kind", ["memory", "local"])
async def test_two_mebibytes_at_one_per_second_really_take_more_than_a_second(kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}" if kind == "local" else f"memory://{tmp_path.name}"
    bare = open_store(url)
    await bare.put("k", BytesBody(DATA[: 2 * MIB]))
    # Another limit for each: one is of the whole process.
    store = open_store(url, StoreSettings(bytes_per_s_max=MIB + (kind == "local")))
    sink = Collecting()
    began_s = time.monotonic()
    await store.read_into("k", sink, size_bytes=2 * MIB)
    took_s = time.monotonic() - began_s
    assert sink.data == DATA[: 2 * MIB]
    assert 1.5 < took_s < 10
    for opened in (store, bare):
        await opened.close()


async def test_a_read_that_is_given_up_waits_for_nothing(tmp_path: Path) -> None:
    inner: BlobStore = open_store(f"file://{tmp_path}")
    await inner.put("k", BytesBody(DATA))
    written = 0

    class Counting(Sink):
        @override
        def write(self, data: Buffer) -> None:
            nonlocal written
            written += len(data)

    store = PacedStore(inner, Bandwidth(1000))
    reading = asyncio.create_task(store.read_into("k", Counting(), size_bytes=len(DATA)))
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    # All of it would take more than an hour, and the first piece a minute.
    assert time.monotonic() - began_s < 20
    now_written = written
    await asyncio.sleep(0.1)
    assert written == now_written
    await store.close()
