"""Which keys a store takes, and what its two ways of putting a blob promise."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from blobstore.base import BlobStore, Created, CreateOutcome, Lost
from blobstore.errors import BlobNotFoundError, InvalidRequestError
from tests.contract.bodies import ChunkedBody, FailingBody, WaitingBody
from tests.contract.store_calls import (
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

BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.hidden",
    "a b",
    "a\\b",
    "a\nb",
    "a\n",
    "a:b",
    "a#b",
    "a?b",
    "ä",
    "a\0b",
    "k" * 256,
    "a/" + "k" * 256 + "/b",
    "/".join(["k" * 255] * 4) + "/k",
)
GOOD_KEYS = (
    "a",
    "~",
    "-",
    "_a.B-0@~%+=,",
    "%2E%2E/b",
    "a..b/c.",
    "k" * 255,
    "/".join(["k" * 255] * 4),
    "/".join(["d"] * 40) + "/de",
)


class WritingContract(StoreFixtures):
    # --- keys ---

    async def test_every_method_refuses_an_invalid_key(self, store: BlobStore) -> None:
        calls: list[Callable[[str], Awaitable[object]]] = [
            lambda key: put_bytes(store, key, b"x"),
            lambda key: create_bytes(store, key, b"x"),
            lambda key: get_bytes(store, key),
            store.stat,
            lambda key: store.delete(["good", key]),
            store.remove_ttl,
        ]
        assert [key for key in BAD_KEYS for call in calls if not await is_refused(call(key))] == []
        assert await keys_of(store) == []

    async def test_every_valid_key_works(self, store: BlobStore) -> None:
        for key in GOOD_KEYS:
            assert len(key) <= 1024
            if len(key) + self.own_key_bytes > 1024:
                assert await is_refused(create_bytes(store, key, b"content", ttl_ms=HOUR_MS)), key
                continue
            assert isinstance(await create_bytes(store, key, b"content", ttl_ms=HOUR_MS), Created), key
            assert await get_bytes(store, key) == b"content", key
            await store.remove_ttl(key)
            await check_ttl_is_removed(store, key)
            assert await keys_of(store) == [key]
            assert await store.delete([key]) == ()
            assert await keys_of(store) == []

    async def test_a_key_of_1024_bytes_is_valid_and_one_of_1025_is_not(self, store: BlobStore) -> None:
        longest = "/".join(["k" * 255] * 4) + "k"
        assert len(longest) == 1024
        with pytest.raises(InvalidRequestError):
            await put_bytes(store, longest, b"x")  # its last component has 256
        longest = "/".join(["k" * 255] * 3) + "/" + "k" * (254 - self.own_key_bytes) + "/k"
        assert len(longest) == 1024 - self.own_key_bytes
        await put_bytes(store, longest, b"x", ttl_ms=HOUR_MS)
        assert await keys_of(store) == [longest]
        with pytest.raises(InvalidRequestError):
            await put_bytes(store, longest + "k", b"x")

    @CREATE_CALLS
    async def test_a_key_below_another_is_kept_or_refused(
        self, store: BlobStore, create: Callable[..., Awaitable[CreateOutcome]]
    ) -> None:
        await put_bytes(store, "a/b", b"first", ttl_ms=HOUR_MS)
        for key in ("a", "a/b/c"):
            try:
                await create(store, key, b"second", ttl_ms=HOUR_MS)
            except InvalidRequestError:
                assert await store.stat(key) is None
                with pytest.raises(BlobNotFoundError):
                    await get_bytes(store, key)
                assert await store.delete([key]) == ()
            else:
                assert await get_bytes(store, key) == b"second"
        assert await get_bytes(store, "a/b") == b"first"
        # A refusal does no lasting damage.
        await create(store, "a/d", b"third", ttl_ms=HOUR_MS)
        assert (await stat_there(store, "a/d")).expires_at_ms is not None

    # --- put ---

    async def test_what_was_put_is_got_back(self, store: BlobStore) -> None:
        data = bytes(range(256)) * 3
        await put_bytes(store, KEY, data)
        assert await get_bytes(store, KEY) == data
        assert (await stat_there(store, KEY)).size_bytes == len(data)

    async def test_put_replaces_the_blob_that_is_there(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"a longer old blob")
        await put_bytes(store, KEY, b"new")
        assert await get_bytes(store, KEY) == b"new"
        assert await keys_of(store) == [KEY]

    @CREATE_CALLS
    async def test_an_empty_blob_is_a_blob(
        self, store: BlobStore, create: Callable[..., Awaitable[CreateOutcome]]
    ) -> None:
        assert isinstance(await create(store, KEY, b""), Created)
        assert await get_bytes(store, KEY) == b""
        assert await get_bytes(store, KEY, start=0, size_bytes=0) == b""
        assert (await stat_there(store, KEY)).size_bytes == 0
        assert await keys_of(store) == [KEY]

    @PUT_METHODS
    async def test_a_body_of_many_chunks_is_put_in_their_order(self, store: BlobStore, method: str) -> None:
        chunks = [bytes([number]) * (number * 1000) for number in range(40)]
        await getattr(store, method)(KEY, ChunkedBody(*chunks))
        assert await get_bytes(store, KEY) == b"".join(chunks)

    @pytest.mark.parametrize(
        "body",
        [
            ChunkedBody(b"12345", size_bytes=6),
            ChunkedBody(b"12345", size_bytes=4),
            ChunkedBody(b"123", b"45", b"6", size_bytes=5),
            ChunkedBody(size_bytes=1),
            ChunkedBody(b"1", size_bytes=0),
        ],
        ids=["short", "long", "one chunk too much", "nothing", "something"],
    )
    @PUT_METHODS
    async def test_a_body_of_another_size_than_it_says_writes_nothing(
        self, store: BlobStore, method: str, body: ChunkedBody
    ) -> None:
        with pytest.raises(InvalidRequestError):
            await getattr(store, method)(KEY, body, ttl_ms=HOUR_MS)
        assert await store.stat(KEY) is None
        assert await keys_of(store) == []
        assert await store.list_unfinished("") == ()
        # Nor does it spoil the key for the next.
        assert isinstance(await create_bytes(store, KEY, b"whole"), Created)
        assert (await stat_there(store, KEY)).size_bytes == 5

    async def test_a_body_of_another_size_leaves_the_old_blob(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"old")
        with pytest.raises(InvalidRequestError):
            await store.put(KEY, ChunkedBody(b"12345", size_bytes=6))
        assert await get_bytes(store, KEY) == b"old"

    @PUT_METHODS
    async def test_an_error_of_the_body_comes_out_as_it_is_and_writes_nothing(
        self, store: BlobStore, method: str
    ) -> None:
        with pytest.raises(FileNotFoundError, match="is gone"):
            await getattr(store, method)(KEY, FailingBody())
        assert await store.stat(KEY) is None
        assert await store.list_unfinished("") == ()

    @PUT_METHODS
    async def test_a_cancelled_put_leaves_nothing(self, store: BlobStore, method: str) -> None:
        body = WaitingBody(b"first", b"second")
        task = asyncio.ensure_future(getattr(store, method)(KEY, body, ttl_ms=HOUR_MS))
        await body.is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await store.stat(KEY) is None
        assert await keys_of(store) == []
        assert await store.list_unfinished("") == ()
        assert isinstance(await create_bytes(store, KEY, b"whole"), Created)

    async def test_a_put_cancelled_at_any_moment_leaves_the_old_blob_or_the_new(self, store: BlobStore) -> None:
        old, new = b"o" * 3000, b"n" * 5000
        await put_bytes(store, KEY, old)
        for turns in range(30):
            task = asyncio.ensure_future(store.put(KEY, ChunkedBody(new[:2500], new[2500:])))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert await get_bytes(store, KEY) in {old, new}
            assert await keys_of(store) == [KEY]

    async def test_a_reader_sees_the_old_blob_or_the_new_one_and_no_mixture(self, store: BlobStore) -> None:
        whole = [bytes([letter]) * 5000 for letter in b"abcdef"]
        await put_bytes(store, KEY, whole[0])

        async def write() -> None:
            for data in whole[1:]:
                await store.put(KEY, ChunkedBody(data[:2000], data[2000:]))

        writing = asyncio.ensure_future(write())
        while not writing.done():
            assert await get_bytes(store, KEY) in whole
            await asyncio.sleep(0)
        await writing
        assert await get_bytes(store, KEY) == whole[-1]

    # --- put_if_absent ---

    async def test_put_if_absent_creates_what_is_not_there(self, store: BlobStore) -> None:
        assert isinstance(await create_bytes(store, KEY, b"content"), Created)
        assert await get_bytes(store, KEY) == b"content"

    async def test_a_lost_put_if_absent_changes_neither_content_nor_times_nor_ttl(self, store: BlobStore) -> None:
        await create_bytes(store, "with", b"content", ttl_ms=HOUR_MS)
        await create_bytes(store, "without", b"content")
        before = [await stat_there(store, key) for key in ("with", "without")]
        await wait_until_after(store, before[1].created_at_ms)
        assert await create_bytes(store, "with", b"other", ttl_ms=2 * HOUR_MS) == Lost()
        assert await create_bytes(store, "without", b"other") == Lost()
        assert [await stat_there(store, key) for key in ("with", "without")] == before
        assert await get_bytes(store, "with") == b"content"

    async def test_of_many_concurrent_calls_exactly_one_creates(self, store: BlobStore) -> None:
        assert store.capabilities.atomic_create
        bodies = [bytes([number]) * 10_000 for number in range(16)]
        outcomes = await asyncio.gather(
            *(store.put_if_absent(KEY, ChunkedBody(data[:1], data[1:]), ttl_ms=HOUR_MS) for data in bodies)
        )
        winners = [data for data, outcome in zip(bodies, outcomes, strict=True) if isinstance(outcome, Created)]
        assert len(winners) == 1
        assert outcomes.count(Lost()) == 15
        assert await get_bytes(store, KEY) == winners[0]
        assert (await stat_there(store, KEY)).expires_at_ms is not None

    async def test_a_late_put_if_absent_does_not_bring_a_removed_ttl_back(self, store: BlobStore) -> None:
        late = WaitingBody(b"la", b"te")
        task = asyncio.ensure_future(store.put_if_absent(KEY, late, ttl_ms=HOUR_MS))
        await late.is_waiting.wait()
        assert isinstance(await create_bytes(store, KEY, b"committed", ttl_ms=HOUR_MS), Created)
        await store.remove_ttl(KEY)
        await check_ttl_is_removed(store, KEY)
        before = await stat_there(store, KEY)
        late.go_on.set()
        assert await task == Lost()
        assert await create_bytes(store, KEY, b"later still", ttl_ms=HOUR_MS) == Lost()
        assert await stat_there(store, KEY) == before
        assert await get_bytes(store, KEY) == b"committed"
