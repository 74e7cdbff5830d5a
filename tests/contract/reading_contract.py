"""What a store promises of its gets, stats and lists."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count, pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore.base import BlobInfo, BlobStore, BytesBody, Created, CreateOutcome, MemorySink, TooLargeError
from blobstore.errors import BlobNotFoundError
from tests.contract.sink_contract import SinkContract
from tests.contract.store_calls import (
    AWKWARD_KEYS,
    CREATE_CALLS,
    HOUR_MS,
    KEY,
    PUT_METHODS,
    StoreFixtures,
    check_ttl_is_removed,
    create_bytes,
    get_bytes,
    is_refused,
    keys_of,
    put_bytes,
    stat_there,
    wait_until_after,
)

RANGES = ((0, None), (0, 10), (0, 1), (0, 0), (3, 4), (9, 1), (9, None), (10, 0), (10, None), (5, 5))
RANGES_OUTSIDE = ((0, 11), (11, None), (11, 0), (10, 1), (5, 6), (-1, None), (0, -1))

BAD_PREFIXES = ("/", "/a", "a//", "a//b", ".", "a/.b", "a b", "ä", "k" * 256)

_component = st.text(alphabet="aAb%+,-.0=@_~", min_size=1, max_size=3).filter(lambda name: not name.startswith("."))
_key = st.lists(_component, min_size=1, max_size=4).map("/".join)
_key_sets = st.sets(_key, min_size=1, max_size=12).map(
    lambda keys: sorted(key for key in keys if not any(other.startswith(f"{key}/") for other in keys))
)

# Examples of one test share a store, so each has keys of its own.
_examples = count()


class ReadingContract(SinkContract):
    # --- read_into, by a sink in memory ---

    async def test_get_yields_exactly_the_range(self, store: BlobStore) -> None:
        data = b"0123456789"
        await put_bytes(store, KEY, data)
        for start, size_bytes in RANGES:
            end = None if size_bytes is None else start + size_bytes
            got = await get_bytes(store, KEY, start=start, size_bytes=size_bytes)
            assert got == data[start:end], (start, size_bytes)

    async def test_get_refuses_an_argument_that_there_is_not(self, store: BlobStore) -> None:
        """A slip would otherwise give the whole blob."""
        await put_bytes(store, KEY, b"0123456789")
        slip = {"lenght": 5}
        with pytest.raises(TypeError):
            await store.read_into(KEY, MemorySink(10), **slip)  # type: ignore[arg-type]

    async def test_get_refuses_a_range_that_is_not_within_the_blob(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"0123456789")
        for start, size_bytes in RANGES_OUTSIDE:
            assert await is_refused(get_bytes(store, KEY, start=start, size_bytes=size_bytes)), (start, size_bytes)

    async def test_ranges_of_a_large_blob_join_to_the_whole(self, store: BlobStore) -> None:
        data = b"".join(number.to_bytes(4, "big") for number in range(700_000))
        await put_bytes(store, KEY, data)
        cuts = [0, 1, 1 << 20, (1 << 20) + 1, 2_500_000, len(data)]
        parts = [await get_bytes(store, KEY, start=a, size_bytes=b - a) for a, b in pairwise(cuts)]
        assert b"".join(parts) == data

    async def test_get_of_what_is_not_there_says_so(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content")
        for key, size_bytes in product(("absent", KEY.rpartition("/")[0], f"{KEY}x", f"{KEY}/below"), (None, 0, 5)):
            with pytest.raises(BlobNotFoundError) as caught:
                await get_bytes(store, key, size_bytes=size_bytes)
            assert caught.value.operation == "get"
            assert caught.value.key == key
            assert caught.value.hint

    async def test_a_sink_may_end_a_read(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, bytes(3 << 20))
        for _ in range(40):  # more than a limit on requests allows at once
            with pytest.raises(TooLargeError):
                await store.read_into(KEY, MemorySink(1))
        assert len(await get_bytes(store, KEY)) == 3 << 20

    async def test_a_get_may_be_cancelled(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, bytes(3 << 20))
        for turns in range(20):
            task = asyncio.ensure_future(get_bytes(store, KEY))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert len(await get_bytes(store, KEY)) == 3 << 20

    async def test_an_expired_blob_is_served_until_it_is_deleted(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"content", ttl_ms=1)
        expires_at_ms = (await stat_there(store, KEY)).expires_at_ms
        assert expires_at_ms is not None
        await wait_until_after(store, expires_at_ms)
        assert await get_bytes(store, KEY) == b"content"
        assert (await stat_there(store, KEY)).expires_at_ms == expires_at_ms
        assert await keys_of(store) == [KEY]
        await store.remove_ttl(KEY)
        await check_ttl_is_removed(store, KEY)
        assert await store.delete([KEY]) == ()
        with pytest.raises(BlobNotFoundError):
            await get_bytes(store, KEY)

    # --- stat ---

    async def test_stat_of_what_is_not_there_is_none(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content")
        for key in ("absent", KEY.rpartition("/")[0], KEY[:-1], f"{KEY}/below"):
            assert await store.stat(key) is None

    @CREATE_CALLS
    async def test_stat_reports_key_size_times_and_ttl(
        self, store: BlobStore, create: Callable[..., Awaitable[CreateOutcome]]
    ) -> None:
        before_ms = await store.now_ms()
        outcome = await create(store, KEY, b"12345", ttl_ms=HOUR_MS)
        after_ms = await store.now_ms()
        info = await stat_there(store, KEY)
        assert isinstance(outcome, Created)
        assert info == BlobInfo(
            key=KEY, size_bytes=5, created_at_ms=info.created_at_ms, expires_at_ms=info.created_at_ms + HOUR_MS
        )
        # Ceph dates objects and answers by clocks of different precision (design 0003, C1).
        tick_ms = 1000 if store.place()[0] == "s3" else 0
        assert before_ms <= info.created_at_ms <= outcome.created_at_ms + tick_ms
        assert outcome.created_at_ms <= after_ms

    async def test_a_blob_without_ttl_never_expires(self, store: BlobStore) -> None:
        await put_bytes(store, "put", b"x")
        await create_bytes(store, "created", b"x")
        assert (await stat_there(store, "put")).expires_at_ms is None
        assert (await stat_there(store, "created")).expires_at_ms is None

    async def test_put_sets_and_removes_the_ttl_with_the_content(self, store: BlobStore) -> None:
        for ttl_ms in (HOUR_MS, None, 2 * HOUR_MS, 3 * HOUR_MS, None):
            await put_bytes(store, KEY, b"x", ttl_ms=ttl_ms)
            info = await stat_there(store, KEY)
            assert info.expires_at_ms == (None if ttl_ms is None else info.created_at_ms + ttl_ms)
        await store.remove_ttl(KEY)
        await put_bytes(store, KEY, b"x", ttl_ms=HOUR_MS)
        assert (await stat_there(store, KEY)).expires_at_ms is not None

    @PUT_METHODS
    async def test_a_ttl_is_at_least_a_millisecond(self, store: BlobStore, method: str) -> None:
        for ttl_ms in (0, -1):
            assert await is_refused(getattr(store, method)(KEY, BytesBody(b"x"), ttl_ms=ttl_ms)), ttl_ms
        assert await store.stat(KEY) is None


class ListingContract(StoreFixtures):
    async def test_an_empty_store_has_one_empty_page(self, store: BlobStore) -> None:
        for prefix in ("", "a", "a/", KEY):
            page = await store.list_page(prefix)
            assert page.blobs == ()
            assert not page.truncated

    async def test_a_list_is_in_the_order_of_whole_keys(self, store: BlobStore) -> None:
        for key in AWKWARD_KEYS:
            await put_bytes(store, key, b"x")
        assert await keys_of(store) == sorted(AWKWARD_KEYS)

    async def test_a_prefix_may_end_anywhere(self, store: BlobStore) -> None:
        for key in AWKWARD_KEYS:
            await put_bytes(store, key, b"x")
        prefixes = {key[:length] for key in AWKWARD_KEYS for length in range(len(key) + 1)} | {"a/c", "c", "a-b/"}
        for prefix in prefixes:
            expected = sorted(key for key in AWKWARD_KEYS if key.startswith(prefix))
            assert await keys_of(store, prefix) == expected, prefix

    async def test_pages_join_to_the_list_from_every_position(self, store: BlobStore) -> None:
        for key in AWKWARD_KEYS:
            await put_bytes(store, key, b"x")
        positions = {*AWKWARD_KEYS, "", "a", "a/", "a/a", "a/b/", "a/~", "a0/", "b/c/", "b/c/d", "zzz", "b/c/\x7f"}
        for start_after in positions:
            for prefix in ("", "a", "a/", "b/c"):
                expected = [key for key in sorted(AWKWARD_KEYS) if key > start_after and key.startswith(prefix)]
                for limit in (1, 2, len(AWKWARD_KEYS)):
                    page = await store.list_page(prefix, start_after=start_after, limit=limit)
                    assert [blob.key for blob in page.blobs] == expected[:limit], (prefix, start_after, limit)
                    assert page.truncated == (len(expected) > limit)

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(keys=_key_sets, start_after=st.one_of(st.just(""), _key), cut=st.integers(0, 12), limit=st.integers(1, 13))
    async def test_any_list_equals_the_sorted_model(
        self, store: BlobStore, keys: list[str], start_after: str, cut: int, limit: int
    ) -> None:
        base = f"example{next(_examples)}/"
        keys = [base + key for key in keys]
        for key in keys:
            await put_bytes(store, key, b"x")
        prefix = keys[cut % len(keys)][: len(base) + cut]
        for position in (base + start_after, *keys):
            expected = [key for key in keys if key.startswith(prefix) and key > position]
            page = await store.list_page(prefix, start_after=position, limit=limit)
            assert [blob.key for blob in page.blobs] == expected[:limit]
            assert page.truncated == (len(expected) > limit)
        assert await store.delete(keys) == ()

    async def test_a_list_reports_what_stat_reports(self, store: BlobStore) -> None:
        await create_bytes(store, "with", b"12345", ttl_ms=HOUR_MS)
        await create_bytes(store, "without", b"")
        await create_bytes(store, "removed", b"1", ttl_ms=HOUR_MS)
        await store.remove_ttl("removed")
        for blob in (await store.list_page("")).blobs:
            info = await stat_there(store, blob.key)
            assert (blob.key, blob.size_bytes, blob.created_at_ms) == (info.key, info.size_bytes, info.created_at_ms)
            assert not blob.ttl_known or blob.expires_at_ms == info.expires_at_ms

    async def test_a_prefix_that_no_key_has_is_refused(self, store: BlobStore) -> None:
        for prefix in BAD_PREFIXES:
            assert await is_refused(store.list_page(prefix)), prefix
            assert await is_refused(store.list_unfinished(prefix)), prefix

    async def test_a_page_has_1_to_1000_blobs(self, store: BlobStore) -> None:
        for limit in (-1, 0, 1001):
            assert await is_refused(store.list_page("", limit=limit)), limit

    async def test_a_blob_is_in_every_list_after_its_put_and_in_none_after_its_deletion(
        self, store: BlobStore, second: BlobStore
    ) -> None:
        assert store.capabilities.consistent_lists
        for number in range(10):
            await create_bytes(store, f"k/{number}", b"x")
            assert len(await keys_of(second, "k/")) == number + 1
        for number in range(10):
            await store.delete([f"k/{number}"])
            assert f"k/{number}" not in await keys_of(second)
