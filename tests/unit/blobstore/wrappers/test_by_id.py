"""A manager with ids of its own behind a store of entries: what a crash between two steps leaves (design/samza.md)."""

import asyncio

import pytest

from blobstore.base import BytesBody, Created, Lost, RequestMetadata, read_blob
from blobstore.errors import (
    BlobCorruptError,
    BlobDeletedError,
    BlobNotFoundError,
    InvalidRequestError,
    StoreUnavailableError,
)
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, wrap_store
from blobstore.wrappers.by_id import ManagedStore
from blobstore.wrappers.retry import RetrySettings
from tests.blob_manager import MemoryManager, UntaggedStore
from tests.contract.store_calls import create_bytes, get_bytes, keys_of, put_bytes
from tests.doubles import InterposedStore

KEY, TTL_MS = "blobs/k", 1000


class CrashError(Exception):
    pass


class Bench:
    """A store whose entries are in memory, behind hooks."""

    def __init__(self) -> None:
        self.entries = InterposedStore(MemoryStore())
        self.manager = MemoryManager()
        self.store = ManagedStore(self.entries, self.manager, prefixes=("blobs/",), ttl_max_ms=TTL_MS)

    def crash_before(self, operation: str, key: str = KEY) -> None:
        self.entries.fail(operation, key, CrashError())


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_only_keys_below_the_prefixes_go_to_the_manager(bench: Bench) -> None:
    await put_bytes(bench.store, "log/1", b"record")
    assert await get_bytes(bench.store, "log/1") == b"record"
    assert bench.manager.methods() == []
    await create_bytes(bench.store, KEY, b"content", ttl_ms=TTL_MS)
    assert list(bench.manager.blobs.values()) == [b"content"]
    # What is stored stays readable for ever (B1).
    assert await get_bytes(bench.entries, KEY) == b'{"schema":1,"id":"ambry:/0?v=1","size_bytes":7}'


async def test_a_crash_before_the_entry_leaves_bytes_that_expire_by_themselves(bench: Bench) -> None:
    bench.crash_before("put_if_absent")
    with pytest.raises(CrashError):
        await create_bytes(bench.store, KEY, b"lost", ttl_ms=TTL_MS)
    assert await keys_of(bench.store) == []
    assert await bench.store.stat(KEY) is None
    assert isinstance(await create_bytes(bench.store, KEY, b"content", ttl_ms=TTL_MS), Created)
    await bench.store.remove_ttl(KEY)
    bench.manager.expire()
    assert await get_bytes(bench.store, KEY) == b"content"
    assert list(bench.manager.blobs.values()) == [b"content"]


async def test_no_entry_without_a_ttl_leads_to_bytes_with_one(bench: Bench) -> None:
    bench.crash_before("put_if_absent")
    with pytest.raises(CrashError):
        await create_bytes(bench.store, KEY, b"content")
    assert bench.manager.methods() == ["put", "remove_ttl"]


async def test_a_crash_between_the_two_removals_of_a_ttl_is_made_good_by_the_next(bench: Bench) -> None:
    await create_bytes(bench.store, KEY, b"content", ttl_ms=TTL_MS)
    bench.crash_before("remove_ttl")
    with pytest.raises(CrashError):
        await bench.store.remove_ttl(KEY)
    bench.manager.expire()
    info = await bench.store.stat(KEY)
    assert info is not None
    assert info.expires_at_ms is not None  # it shows that it is not done
    await bench.store.remove_ttl(KEY)
    info = await bench.store.stat(KEY)
    assert info is not None
    assert info.expires_at_ms is None


async def test_a_crash_between_the_two_deletes_is_made_good_by_the_next(bench: Bench) -> None:
    await create_bytes(bench.store, KEY, b"content")
    bench.crash_before("delete")
    with pytest.raises(CrashError):
        await bench.store.delete([KEY])
    assert bench.manager.blobs == {}
    assert await keys_of(bench.store) == [KEY]  # a collection still finds it
    assert await bench.store.delete([KEY]) == ()
    assert await keys_of(bench.store) == []


async def test_bytes_that_the_manager_cannot_delete_keep_their_entry(bench: Bench) -> None:
    await create_bytes(bench.store, KEY, b"content")
    await create_bytes(bench.store, "blobs/l", b"content")

    def refuse(method: str, blob_id: str) -> None:
        if method == "delete" and blob_id.startswith("ambry:/0"):
            raise InvalidRequestError("403", operation=method, key=blob_id)

    bench.manager.before = refuse
    (failure,) = await bench.store.delete([KEY, "blobs/l", "log/absent"])
    assert (failure.key, "403" in failure.reason) == (KEY, True)
    assert await keys_of(bench.store) == [KEY]
    assert await get_bytes(bench.store, KEY) == b"content"


async def test_the_loser_of_a_race_deletes_its_bytes_and_a_replaced_blob_goes(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(create_bytes(bench.store, KEY, b"%d" % number) for number in range(5)))
    assert sum(isinstance(outcome, Created) for outcome in outcomes) == 1
    assert len(bench.manager.blobs) == 1
    await put_bytes(bench.store, KEY, b"replaced")
    assert list(bench.manager.blobs.values()) == [b"replaced"]


async def test_an_own_entry_that_answers_lost_keeps_its_bytes(bench: Bench) -> None:
    """The entry was created, its answer was lost, and the HTTP client below asked once more."""

    async def arrive() -> None:
        (blob_id,) = bench.manager.blobs
        await bench.entries.inner.put(KEY, BytesBody(b'{"schema":1,"id":"%s","size_bytes":7}' % blob_id.encode()))

    bench.entries.before("put_if_absent", KEY, arrive)
    assert await create_bytes(bench.store, KEY, b"content") == Lost()
    assert await get_bytes(bench.store, KEY) == b"content"


async def test_a_range_is_cut_out_of_a_blob_and_no_more_is_read_than_up_to_its_end(bench: Bench) -> None:
    data = bytes(range(250)) * 40
    await create_bytes(bench.store, KEY, data)
    for start, size_bytes in ((0, 1), (999, 2), (1000, 1000), (2500, 0), (9999, 1), (10_000, 0)):
        assert await get_bytes(bench.store, KEY, start=start, size_bytes=size_bytes) == data[start:][:size_bytes]
    with pytest.raises(InvalidRequestError):
        await get_bytes(bench.store, KEY, start=9999, size_bytes=2)


async def test_a_stream_that_ends_too_soon_is_asked_for_again(bench: Bench) -> None:
    await create_bytes(bench.store, KEY, b"content")
    (blob_id,) = bench.manager.blobs
    bench.manager.blobs[blob_id] = b"cont"
    with pytest.raises(StoreUnavailableError, match="4 bytes, and 7"):
        await get_bytes(bench.store, KEY)
    store = wrap_store(bench.store, StoreSettings(retry=RetrySettings(first_wait_s=0)))

    def heal(method: str, blob_id: str) -> None:
        if len(bench.manager.calls) > 4:
            bench.manager.blobs[blob_id] = b"content"

    bench.manager.before = heal
    assert await get_bytes(store, KEY) == b"content"


async def test_bytes_that_are_gone_are_not_found_under_the_key(bench: Bench) -> None:
    await create_bytes(bench.store, KEY, b"content", ttl_ms=TTL_MS)
    bench.manager.expire()
    for call in (get_bytes(bench.store, KEY), bench.store.remove_ttl(KEY)):
        with pytest.raises(BlobNotFoundError) as caught:
            await call
        assert caught.value.key == KEY
        assert not isinstance(caught.value, BlobDeletedError)
    assert await bench.store.stat(KEY) is not None  # only reading shows it (B7)


async def test_a_blob_that_is_replaced_while_it_is_read_is_read_again(bench: Bench) -> None:
    await put_bytes(bench.store, KEY, b"first")
    replaced = False

    async def replace() -> None:
        nonlocal replaced
        replaced = True
        await put_bytes(bench.store, KEY, b"second")

    bench.entries.after("get", KEY, replace)
    assert await get_bytes(bench.store, KEY) == b"second"
    assert replaced


async def test_what_is_no_entry_is_corrupt_and_listed_and_can_be_deleted(bench: Bench) -> None:
    """A program without the manager wrote it: no list, and so no collection, may stop there."""
    for data in (b"", b"{}", b'{"id": 7, "size_bytes": 1}', b'{"id": "i", "size_bytes": -1}', b"\xff", b"x" * 70_000):
        await bench.entries.inner.put(KEY, BytesBody(data))
        with pytest.raises(BlobCorruptError):
            await read_blob(bench.store, KEY, size_bytes_max=10)
        info = await bench.store.stat(KEY)
        assert info is not None
        assert (await bench.store.list_page("")).blobs == (info,)
        assert info.size_bytes == len(data)
        assert await bench.store.delete([KEY]) == ()
        assert await keys_of(bench.entries) == []
    assert bench.manager.methods() == []


async def test_what_is_no_entry_wins_a_race_and_can_be_replaced(bench: Bench) -> None:
    await bench.entries.inner.put(KEY, BytesBody(b"bytes"))
    assert await create_bytes(bench.store, KEY, b"content") == Lost()
    assert bench.manager.blobs == {}
    await put_bytes(bench.store, KEY, b"content")
    assert await get_bytes(bench.store, KEY) == b"content"


async def test_the_entry_of_a_newer_release_stays_because_it_leads_to_bytes(bench: Bench) -> None:
    await bench.entries.inner.put(KEY, BytesBody(b'{"schema": 2, "ids": ["i"]}'))
    with pytest.raises(BlobCorruptError, match="newer"):
        await read_blob(bench.store, KEY, size_bytes_max=10)
    (failure,) = await bench.store.delete([KEY])
    assert (failure.key, await keys_of(bench.store)) == (KEY, [KEY])


async def test_a_fault_at_one_entry_of_many_does_not_fail_the_others(bench: Bench) -> None:
    """At one fault in 200 requests nearly no page of 1,000 entries would ever be read."""
    keys = [f"blobs/{number}" for number in range(30)]
    for key in keys:
        await create_bytes(bench.store, key, b"content")
    bench.manager.methods()
    bench.entries.fail("get", keys[17])
    assert await keys_of(bench.store) == sorted(keys)
    bench.entries.fail("get", keys[3])
    failing = {"ambry:/9?v=1"}

    def fail_once(method: str, blob_id: str) -> None:
        if blob_id in failing:
            failing.remove(blob_id)
            raise StoreUnavailableError("503", operation=method, key=blob_id)

    bench.manager.before = fail_once
    assert await bench.store.delete(keys) == ()
    assert (bench.manager.blobs, failing) == ({}, set())
    # Only what failed was asked for again.
    assert len(bench.manager.methods()) == len(keys) + 1


async def test_the_bytes_lose_their_ttl_where_the_store_of_the_entries_cannot_remove_one() -> None:
    """An engine that sees `removes_ttl=False` removes none, and what it has committed expires."""
    manager = MemoryManager()
    store = ManagedStore(UntaggedStore(MemoryStore()), manager, prefixes=("blobs/",), ttl_max_ms=TTL_MS)
    assert store.capabilities.removes_ttl
    assert not store.capabilities.keeps_created_at
    await create_bytes(store, KEY, b"content", ttl_ms=TTL_MS)
    await store.remove_ttl(KEY)
    manager.expire()
    assert await get_bytes(store, KEY) == b"content"
    info = await store.stat(KEY)
    assert info is not None
    assert info.expires_at_ms is None


async def test_a_ttl_that_is_longer_than_the_managers_is_refused_before_anything_is_sent(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="2000 ms is longer"):
        await create_bytes(bench.store, KEY, b"content", ttl_ms=2 * TTL_MS)
    assert bench.manager.methods() == []


async def test_a_manager_hears_for_whom_each_request_is(bench: Bench) -> None:
    metadata = RequestMetadata(job="flights", task="0", store="facts", payload_path="000001.sst", size_bytes=7)
    store = wrap_store(bench.store).tagged(metadata)
    await create_bytes(store, KEY, b"content")
    await get_bytes(store, KEY)
    await store.remove_ttl(KEY)
    await store.delete([KEY])
    assert {each for _, _, each in bench.manager.calls} == {metadata}
    assert bench.manager.methods() == ["put", "remove_ttl", "get", "remove_ttl", "delete"]
