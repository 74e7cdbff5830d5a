"""Listing a whole prefix, in parts where it is large."""

import asyncio
import random

import pytest

from blobstore.base import BytesBody, ListPage
from blobstore.concurrency import IN_FLIGHT_MAX
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.collect.backend import list_uploads
from engine.records.roots import list_prefix
from index.snapshot.keys import BLOBS, INDEXES, upload_key
from index.snapshot.model import Scope
from tests.doubles import InterposedStore


async def filled(count: int, *foreign: str) -> InterposedStore:
    store = MemoryStore()
    session = "0123456789abcdef0123"
    for key in [*(upload_key(BLOBS, Scope("job"), session, n) for n in range(count)), *foreign]:
        await store.put(key, BytesBody(b"x"))
    await store.put(upload_key(INDEXES, Scope("job"), session, 0), BytesBody(b"x"))
    return InterposedStore(store)


async def names(store: InterposedStore) -> list[str]:
    return await list_prefix(store, BLOBS, lambda blob: blob.key)


@pytest.mark.parametrize("count, requests", [(0, 1), (999, 1), (1000, 1), (1001, 2), (2500, 3), (7000, 7)])
async def test_a_list_of_few_pages_costs_exactly_these(count: int, requests: int) -> None:
    store = await filled(count)
    assert len(await names(store)) == count
    assert len(store.requests) == requests


async def test_a_list_of_many_pages_is_read_in_parallel_and_whole_and_in_order() -> None:
    store = await filled(33_000, "blobs/0", "blobs/40", "blobs/7f", "blobs/80.mine/x", "blobs/zz/foreign")
    in_flight, most = 0, 0
    original = store.inner.list_page

    async def slow(*args: object, **kwargs: object) -> ListPage:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return await original(*args, **kwargs)  # type: ignore[arg-type]

    store.inner.list_page = slow  # type: ignore[method-assign]
    found = await names(store)
    assert found == sorted(found)
    assert set(found) == {key for key in store.inner._blobs if key.startswith(BLOBS)}  # type: ignore[attr-defined]
    assert 4 <= most <= IN_FLIGHT_MAX
    assert 34 <= len(store.requests) <= 34 * 5 / 4


async def test_foreign_keys_between_the_shards_are_reported() -> None:
    store = await filled(12_000, "blobs/7f", "blobs/80.mine/x", "blobs/zz/foreign")
    uploads, foreign = await list_uploads(store, [BLOBS, INDEXES])
    assert len(uploads) == 12_001
    assert foreign == ("blobs/7f", "blobs/80.mine/x", "blobs/zz/foreign")


async def test_many_foreign_keys_in_one_place_are_listed_too() -> None:
    foreign = [f"blobs/m/{number:05d}" for number in range(5000)]
    random.Random(1).shuffle(foreign)
    store = await filled(6000, *foreign)
    assert len(await names(store)) == 11_000


@pytest.mark.parametrize("page", [ListPage(blobs=(), truncated=True), None])
async def test_a_list_that_does_not_go_forward_is_not_believed(page: ListPage | None) -> None:
    store = await filled(12_000)
    first = await store.inner.list_page(BLOBS)
    answers = [first]

    async def lie(*args: object, **kwargs: object) -> ListPage:
        return answers.pop() if answers else page or first

    store.inner.list_page = lie  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await names(store)
