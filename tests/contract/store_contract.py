"""Every sentence of the `BlobStore` contract as a test. A store passes it by one subclass with a `store` fixture."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import count, pairwise, product
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore.base import (
    BlobInfo,
    BlobStore,
    BytesBody,
    Created,
    CreateOutcome,
    Lost,
    UnfinishedPut,
    list_blobs,
    read_blob,
)
from blobstore.errors import BlobDeletedError, BlobNotFoundError, InvalidRequestError
from tests.contract.bodies import ChunkedBody, FailingBody, WaitingBody

HOUR_MS = 3_600_000
KEY = "blobs/0f/job@task/0123-000001"

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
# Start and size in bytes, of a blob of ten.
RANGES = ((0, None), (0, 10), (0, 1), (0, 0), (3, 4), (9, 1), (9, None), (10, 0), (10, None), (5, 5))
RANGES_OUTSIDE = ((0, 11), (11, None), (11, 0), (10, 1), (5, 6), (-1, None), (0, -1))

BAD_PREFIXES = ("/", "/a", "a//", "a//b", ".", "a/.b", "a b", "ä", "k" * 256)

# Keys that sort differently as strings, as paths and as names of directories.
AWKWARD_KEYS = ("a-b", "a.b", "a/b", "a/b-c", "a/b0", "a0", "a~", "aa/a", "aa/b/c", "ab", "A", "b/c/d/e", "b/c0")

_component = st.text(alphabet="aAb%+,-.0=@_~", min_size=1, max_size=3).filter(lambda name: not name.startswith("."))
_key = st.lists(_component, min_size=1, max_size=4).map("/".join)
_key_sets = st.sets(_key, min_size=1, max_size=12).map(
    lambda keys: sorted(key for key in keys if not any(other.startswith(f"{key}/") for other in keys))
)

# Examples of one test share a store, so each has keys of its own.
_examples = count()


async def put_bytes(store: BlobStore, key: str, data: bytes, *, ttl_ms: int | None = None) -> Created:
    return await store.put(key, BytesBody(data), ttl_ms=ttl_ms)


async def create_bytes(store: BlobStore, key: str, data: bytes, *, ttl_ms: int | None = None) -> CreateOutcome:
    return await store.put_if_absent(key, BytesBody(data), ttl_ms=ttl_ms)


async def get_bytes(
    store: BlobStore, key: str, *, start: int = 0, size_bytes: int | None = None, deleted: bool = False
) -> bytes:
    async with aclosing(store.get(key, start=start, size_bytes=size_bytes, deleted=deleted)) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def is_refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except InvalidRequestError:
        return True
    return False


async def stat_there(store: BlobStore, key: str) -> BlobInfo:
    info = await store.stat(key)
    assert info is not None
    assert info.ttl_known
    return info


async def check_ttl_is_removed(store: BlobStore, key: str) -> None:
    """After `remove_ttl`: it is gone, or stays where the store says so."""
    info = await stat_there(store, key)
    assert (info.expires_at_ms is None) == store.capabilities.removes_ttl


def check_creation_time(store: BlobStore, before: BlobInfo, after: BlobInfo) -> None:
    """Around `remove_ttl`: it stays, or is later where the store says so."""
    if store.capabilities.keeps_created_at:
        assert after.created_at_ms == before.created_at_ms
    else:
        assert after.created_at_ms >= before.created_at_ms


async def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    return [blob.key async for blob in list_blobs(store, prefix)]


async def wait_until_after(store: BlobStore, time_ms: int) -> None:
    for _ in range(1000):
        if await store.now_ms() > time_ms:
            return
        await asyncio.sleep(0.005)
    pytest.fail("the store's clock stands still")


CREATE_CALLS = pytest.mark.parametrize("create", [put_bytes, create_bytes], ids=["put", "put_if_absent"])
PUT_METHODS = pytest.mark.parametrize("method", ["put", "put_if_absent"])


class RacedByProcesses:
    """For stores that other processes can open. Stands before the contract among the bases of a test class."""

    racers_count: ClassVar[int] = 16

    @pytest.fixture
    def race_url(self) -> str:
        """By which URL they do."""
        raise NotImplementedError

    async def test_of_many_processes_exactly_one_creates_each_key(self, store: BlobStore, race_url: str) -> None:
        keys_count = 20
        racers = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.contract.racer", race_url, f"{number:02d}", str(keys_count)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
            for number in range(self.racers_count)
        ]
        for racer in racers:
            assert racer.stdout is not None
            assert await racer.stdout.readline() == b"ready\n"
        results = [out.decode().split() for out, _ in await asyncio.gather(*(r.communicate(b"go\n") for r in racers))]
        for key in range(keys_count):
            winners = [number for number, outcomes in enumerate(results) if outcomes[key] == "won"]
            assert len(winners) == 1
            assert await get_bytes(store, f"race/{key}") == f"{winners[0]:02d}".encode() * 1000
            assert (await stat_there(store, f"race/{key}")).expires_at_ms is not None
        assert len(await keys_of(store)) == keys_count


class StoreContract:
    """Subclass it, and give it a fixture `store`: empty, and closed by whoever made it."""

    # How many of the 1,024 bytes of a key the store needs for itself, as S3 does for a prefix in a bucket.
    own_key_bytes: ClassVar[int] = 0

    @pytest.fixture
    def store(self) -> BlobStore:
        raise NotImplementedError

    @pytest.fixture
    def second(self, store: BlobStore) -> BlobStore:
        """The same blobs, opened once more; a store that cannot be opened twice gives itself."""
        return store

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
        # A refusal is no lasting damage.
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

    # --- get ---

    async def test_get_yields_exactly_the_range(self, store: BlobStore) -> None:
        data = b"0123456789"
        await put_bytes(store, KEY, data)
        for start, size_bytes in RANGES:
            end = None if size_bytes is None else start + size_bytes
            got = await get_bytes(store, KEY, start=start, size_bytes=size_bytes)
            assert got == data[start:end], (start, size_bytes)

    async def test_get_refuses_a_range_that_is_not_within_the_blob(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"0123456789")
        for start, size_bytes in RANGES_OUTSIDE:
            assert await is_refused(get_bytes(store, KEY, start=start, size_bytes=size_bytes)), (start, size_bytes)

    async def test_get_yields_no_empty_chunk(self, store: BlobStore) -> None:
        data = bytes(3 << 20)
        await put_bytes(store, KEY, data)
        sizes = [len(chunk) async for chunk in store.get(KEY)]
        assert all(sizes)
        assert sum(sizes) == len(data)

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

    async def test_a_get_may_be_closed_before_its_end(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, bytes(3 << 20))
        for _ in range(40):  # more than a limit on requests allows at once
            async with aclosing(store.get(KEY)) as chunks:
                assert await anext(chunks)
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
        if store.capabilities.enforces_ttl:
            pytest.skip("this store may delete it by itself")
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
    async def test_stat_tells_key_size_times_and_ttl(
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
        assert before_ms <= info.created_at_ms <= outcome.created_at_ms <= after_ms

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

    # --- list_page ---

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
        room = f"example{next(_examples)}/"
        keys = [room + key for key in keys]
        for key in keys:
            await put_bytes(store, key, b"x")
        prefix = keys[cut % len(keys)][: len(room) + cut]
        for position in (room + start_after, *keys):
            expected = [key for key in keys if key.startswith(prefix) and key > position]
            page = await store.list_page(prefix, start_after=position, limit=limit)
            assert [blob.key for blob in page.blobs] == expected[:limit]
            assert page.truncated == (len(expected) > limit)
        assert await store.delete(keys) == ()

    async def test_a_list_tells_what_stat_tells(self, store: BlobStore) -> None:
        await create_bytes(store, "with", b"12345", ttl_ms=HOUR_MS)
        await create_bytes(store, "without", b"")
        await create_bytes(store, "removed", b"1", ttl_ms=HOUR_MS)
        await store.remove_ttl("removed")
        for blob in (await store.list_page("")).blobs:
            info = await stat_there(store, blob.key)
            assert (blob.key, blob.size_bytes, blob.created_at_ms) == (info.key, info.size_bytes, info.created_at_ms)
            assert blob.ttl_known or not store.capabilities.list_shows_ttl
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

    # --- delete ---

    async def test_delete_removes_a_batch_and_nothing_else(self, store: BlobStore) -> None:
        for key in AWKWARD_KEYS:
            await put_bytes(store, key, b"x")
        assert await store.delete(AWKWARD_KEYS[::2]) == ()
        assert await keys_of(store) == sorted(AWKWARD_KEYS[1::2])

    async def test_delete_is_idempotent_and_what_is_not_there_counts_as_deleted(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"x")
        assert await store.delete([KEY, "absent", KEY, f"{KEY}/below", KEY.rpartition("/")[0]]) == ()
        assert await store.delete([KEY]) == ()
        assert await store.delete([]) == ()

    async def test_at_most_1000_keys_are_deleted_at_once(self, store: BlobStore) -> None:
        keys = [f"k{number}" for number in range(1001)]
        await put_bytes(store, "k1", b"x")
        with pytest.raises(InvalidRequestError):
            await store.delete(keys)
        assert await store.stat("k1") is not None
        assert await store.delete(keys[:1000]) == ()
        assert await store.stat("k1") is None

    async def test_an_invalid_key_in_a_batch_deletes_nothing(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"x")
        with pytest.raises(InvalidRequestError):
            await store.delete([KEY, "/"])
        assert await store.stat(KEY) is not None

    async def test_a_deleted_blob_is_not_found(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        await store.delete([KEY])
        assert await store.stat(KEY) is None
        with pytest.raises(BlobNotFoundError) as got:
            await get_bytes(store, KEY)
        with pytest.raises(BlobNotFoundError) as removed:
            await store.remove_ttl(KEY)
        if store.capabilities.keeps_deleted:
            assert isinstance(got.value, BlobDeletedError)
            assert isinstance(removed.value, BlobDeletedError)

    async def test_a_deleted_blob_is_served_on_demand_by_a_store_that_keeps_it(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"0123456789", ttl_ms=HOUR_MS)
        assert await get_bytes(store, KEY, deleted=True) == b"0123456789"
        await store.delete([KEY])
        if store.capabilities.keeps_deleted:
            assert await get_bytes(store, KEY, deleted=True) == b"0123456789"
            assert await get_bytes(store, KEY, start=3, size_bytes=4, deleted=True) == b"3456"
            assert await read_blob(store, KEY, size_bytes_max=10, deleted=True) == b"0123456789"
        else:
            with pytest.raises(BlobNotFoundError):
                await get_bytes(store, KEY, deleted=True)
        with pytest.raises(BlobNotFoundError):
            await get_bytes(store, "never-was", deleted=True)

    async def test_a_key_can_be_put_again_after_its_deletion(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"first", ttl_ms=HOUR_MS)
        await store.remove_ttl(KEY)
        await store.delete([KEY])
        assert isinstance(await create_bytes(store, KEY, b"second", ttl_ms=HOUR_MS), Created)
        assert await get_bytes(store, KEY) == b"second"
        assert await get_bytes(store, KEY, deleted=True) == b"second"
        assert (await stat_there(store, KEY)).expires_at_ms is not None

    async def test_the_ttl_of_a_deleted_blob_is_gone_with_it(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"first", ttl_ms=HOUR_MS)
        await store.delete([KEY])
        await create_bytes(store, KEY, b"second")
        assert (await stat_there(store, KEY)).expires_at_ms is None

    # --- remove_ttl ---

    async def test_remove_ttl_makes_a_blob_permanent_and_changes_nothing_else(self, store: BlobStore) -> None:
        await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        before = await stat_there(store, KEY)
        assert before.expires_at_ms is not None
        for _ in range(3):  # idempotent
            await store.remove_ttl(KEY)
            await check_ttl_is_removed(store, KEY)
            after = await stat_there(store, KEY)
            assert after.size_bytes == before.size_bytes
            check_creation_time(store, before, after)
        assert await get_bytes(store, KEY) == b"content"

    async def test_remove_ttl_of_a_permanent_blob_changes_nothing(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content")
        before = await stat_there(store, KEY)
        await store.remove_ttl(KEY)
        after = await stat_there(store, KEY)
        check_creation_time(store, before, after)
        assert (after.size_bytes, after.expires_at_ms) == (before.size_bytes, None)
        assert await get_bytes(store, KEY) == b"content"

    async def test_remove_ttl_of_what_is_not_there_says_so(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content")
        for key in ("absent", KEY.rpartition("/")[0], f"{KEY}/below"):
            with pytest.raises(BlobNotFoundError) as caught:
                await store.remove_ttl(key)
            assert caught.value.operation == "remove_ttl"
            assert caught.value.key == key

    # --- puts that were never finished ---

    async def test_finished_puts_are_not_told_as_unfinished(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content")
        await create_bytes(store, KEY, b"other")
        await create_bytes(store, "created", b"content", ttl_ms=HOUR_MS)
        for prefix in ("", "blobs/", KEY, "absent"):
            assert await store.list_unfinished(prefix) == ()

    async def test_an_unfinished_put_that_is_not_there_counts_as_given_up(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        assert await store.abort_unfinished([]) == ()
        absent = [UnfinishedPut(key=key, upload_id="2~never-begun", begun_at_ms=0) for key in (KEY, "absent")]
        assert await store.abort_unfinished(absent) == ()
        assert await get_bytes(store, KEY) == b"content"
        assert await keys_of(store) == [KEY]

    # --- and the rest ---

    async def test_the_clock_is_the_one_by_which_blobs_are_dated(self, store: BlobStore) -> None:
        times_ms = []
        for number in range(5):
            times_ms.append(await store.now_ms())
            await create_bytes(store, f"k{number}", b"x")
            times_ms.append((await stat_there(store, f"k{number}")).created_at_ms)
        assert times_ms == sorted(times_ms)

    async def test_another_opening_sees_the_same(self, store: BlobStore, second: BlobStore) -> None:
        await create_bytes(store, KEY, b"content", ttl_ms=HOUR_MS)
        assert await get_bytes(second, KEY) == b"content"
        assert await second.stat(KEY) == await store.stat(KEY)
        assert await create_bytes(second, KEY, b"other", ttl_ms=HOUR_MS) == Lost()
        await second.remove_ttl(KEY)
        await check_ttl_is_removed(store, KEY)
        await second.delete([KEY])
        assert await store.stat(KEY) is None

    async def test_methods_may_be_called_concurrently(self, store: BlobStore) -> None:
        async def live(number: int) -> None:
            key = f"k/{number % 7}/{number}"
            assert isinstance(await create_bytes(store, key, key.encode() * 100, ttl_ms=HOUR_MS), Created)
            assert await get_bytes(store, key) == key.encode() * 100
            await store.remove_ttl(key)
            await check_ttl_is_removed(store, key)
            assert key in await keys_of(store, f"k/{number % 7}/")
            if number % 2:
                assert await store.delete([key]) == ()

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(live(number))
        assert len(await keys_of(store)) == 20

    async def test_capabilities_stay_the_same(self, store: BlobStore) -> None:
        before = store.capabilities
        await put_bytes(store, KEY, b"x")
        assert store.capabilities == before
        assert before.ordered_lists

    async def test_closing_twice_is_fine(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"x")
        await store.close()
        await store.close()
