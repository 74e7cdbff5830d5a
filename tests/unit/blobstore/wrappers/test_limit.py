import asyncio
from collections.abc import Sequence

import pytest
from typing_extensions import override

from blobstore.base import Buffer, BytesBody, MemorySink, read_blob
from blobstore.errors import StoreUnavailableError
from blobstore.wrappers.forwarding import InFlightLimit, LimitedStore
from tests.unit.blobstore.scripted_store import ScriptedStore


class _Crowd:
    """Counts how many requests are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1


async def test_no_more_requests_are_under_way_than_the_limit() -> None:
    crowd = _Crowd()
    store = LimitedStore(ScriptedStore(*[crowd] * 40), InFlightLimit(3))
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(store.put(f"k{number}", BytesBody(b"x")))
            group.create_task(store.stat(f"k{number}"))
            group.create_task(store.delete([f"k{number}"]))
            group.create_task(store.list_page(""))
    assert crowd.most == 3


async def test_a_read_counts_until_its_end() -> None:
    class Waiting(MemorySink):
        @override
        async def take(self, chunks: Sequence[Buffer]) -> None:
            await go_on.wait()
            await super().take(chunks)

    go_on, sinks = asyncio.Event(), [Waiting(), Waiting()]
    store = LimitedStore(ScriptedStore(chunk_bytes=1), InFlightLimit(2))
    await store.put("k", BytesBody(b"abc"))
    reads = [asyncio.ensure_future(store.read_into("k", sink)) for sink in sinks]
    await asyncio.sleep(0.01)
    third = asyncio.ensure_future(store.stat("k"))
    await asyncio.sleep(0.01)
    assert not third.done()
    go_on.set()
    assert await third is not None
    await asyncio.gather(*reads)
    assert [sink.data for sink in sinks] == [b"abc", b"abc"]


async def test_a_failed_or_cancelled_request_frees_its_slot() -> None:
    error = StoreUnavailableError("no", operation="stat")
    store = LimitedStore(ScriptedStore(error, error), InFlightLimit(1))
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await store.stat("k")
    waiting = asyncio.ensure_future(read_blob(store, "absent", size_bytes_max=1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await store.stat("k") is None


async def test_a_read_that_is_cancelled_at_any_moment_leaves_no_slot_taken() -> None:
    for steps in range(8):
        limit = InFlightLimit(1)
        store = LimitedStore(ScriptedStore(lambda: asyncio.sleep(0), chunk_bytes=1), limit)
        await store.put("k", BytesBody(b"abc"))
        task = asyncio.create_task(read_blob(store, "k", size_bytes_max=3))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert limit.under_way == 0
