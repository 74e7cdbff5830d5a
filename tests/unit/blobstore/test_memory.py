from blobstore.base import BytesBody
from blobstore.memory import MemoryStore


async def test_a_store_reports_the_time_of_the_clock_that_it_is_given() -> None:
    now_ms = 5_000
    store = MemoryStore(clock=lambda: now_ms)
    created = await store.put("k", BytesBody(b"x"), ttl_ms=100)
    now_ms = 7_000
    info = await store.stat("k")
    assert info is not None
    assert (created.created_at_ms, info.created_at_ms, info.expires_at_ms) == (5_000, 5_000, 5_100)
    assert await store.now_ms() == 7_000


async def test_without_a_clock_two_runs_are_the_same() -> None:
    async def run() -> list[object]:
        store = MemoryStore()
        return [await store.now_ms(), await store.put("k", BytesBody(b"x")), await store.stat("k")]

    assert await run() == await run()
