"""What a store promises of a read into a sink that blocks (design 0008)."""

import asyncio
import threading

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, Sink
from blobstore.errors import BlobNotFoundError
from tests.contract.store_calls import KEY, StoreFixtures, is_refused, put_bytes

DATA = b"".join(number.to_bytes(4, "big") for number in range(800_000))
SIZE_BYTES = len(DATA)
# Small and large, at the beginning, at the end, and nothing.
RANGES = ((0, SIZE_BYTES), (0, 1), (1, 1 << 20), (3, (1 << 21) + 7), (SIZE_BYTES - 5, 5), (7, 0), (SIZE_BYTES, 0))
RANGES_OUTSIDE = ((0, SIZE_BYTES + 1), (5, SIZE_BYTES), (SIZE_BYTES, 1), (SIZE_BYTES + 1, 0), (-1, 5), (0, -1))


class Collecting(Sink):
    def __init__(self) -> None:
        self.data = bytearray()
        self.thread_names: set[str] = set()

    @override
    def write(self, data: Buffer) -> None:
        assert len(data) > 0
        self.thread_names.add(threading.current_thread().name)
        self.data += data


class Refusing(Collecting):
    """Takes that many bytes, and then no more."""

    def __init__(self, size_bytes: int, error: Exception) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.error = error

    @override
    def write(self, data: Buffer) -> None:
        if len(self.data) >= self.size_bytes:
            raise self.error
        super().write(data)


async def read_range(store: BlobStore, start: int = 0, size_bytes: int = SIZE_BYTES, *, key: str = KEY) -> bytes:
    sink = Collecting()
    await store.read_into(key, sink, start=start, size_bytes=size_bytes)
    assert threading.current_thread().name not in sink.thread_names
    return bytes(sink.data)


class SinkContract(StoreFixtures):
    async def test_a_sink_gets_exactly_the_range(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, DATA)
        for start, size_bytes in RANGES:
            assert await read_range(store, start, size_bytes) == DATA[start : start + size_bytes], (start, size_bytes)
        fresh = Collecting()
        await store.read_into(KEY, fresh, start=1, size_bytes=SIZE_BYTES - 1, fresh=True)
        assert fresh.data == DATA[1:]

    async def test_a_read_refuses_a_range_that_is_not_within_the_blob(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, DATA)
        for start, size_bytes in RANGES_OUTSIDE:
            assert await is_refused(read_range(store, start, size_bytes)), (start, size_bytes)

    async def test_a_read_of_what_is_not_there_says_so(self, store: BlobStore) -> None:
        for size_bytes in (0, 5, SIZE_BYTES):
            with pytest.raises(BlobNotFoundError) as caught:
                await read_range(store, 0, size_bytes, key="absent")
            assert (caught.value.operation, caught.value.key) == ("get", "absent")

    @pytest.mark.parametrize("after_bytes", [0, 1 << 20])
    @pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("wrong")], ids=["OSError", "ValueError"])
    async def test_what_the_sink_raises_goes_on_as_it_is(
        self, store: BlobStore, after_bytes: int, error: Exception
    ) -> None:
        await put_bytes(store, KEY, DATA)
        sink = Refusing(after_bytes, error)
        with pytest.raises(type(error)) as caught:
            await store.read_into(KEY, sink, size_bytes=SIZE_BYTES)
        assert caught.value is error
        assert DATA.startswith(sink.data)
        assert await read_range(store) == DATA

    async def test_a_read_that_was_cancelled_writes_no_more(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, DATA)
        sinks = [Collecting() for _ in range(20)]
        sizes = []
        for turns, sink in enumerate(sinks):
            task = asyncio.ensure_future(store.read_into(KEY, sink, size_bytes=SIZE_BYTES))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
            sizes.append(len(sink.data))
        assert await read_range(store) == DATA
        assert [len(sink.data) for sink in sinks] == sizes
        assert all(DATA.startswith(sink.data) for sink in sinks)

    async def test_many_may_read_at_once(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, DATA)
        parts = [(at, min(1 << 20, SIZE_BYTES - at)) for at in range(0, SIZE_BYTES, 1 << 20)]
        got = await asyncio.gather(*(read_range(store, *part) for part in parts * 3))
        assert b"".join(got) == DATA * 3
