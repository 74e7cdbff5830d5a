"""Every sentence of the `BlobStore` contract as a test, with what stays and what goes, by when and by whom.

A store passes it by one subclass of `StoreContract` with a `store` fixture.
"""

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from blobstore.base import BlobStore, Created, Lost, UnfinishedPut, read_blob
from blobstore.errors import BlobDeletedError, BlobNotFoundError, InvalidRequestError
from tests.contract.reading_contract import ListingContract, ReadingContract
from tests.contract.store_calls import (
    AWKWARD_KEYS,
    HOUR_MS,
    KEY,
    StoreFixtures,
    check_creation_time,
    check_ttl_is_removed,
    create_bytes,
    get_bytes,
    keys_of,
    put_bytes,
    stat_there,
)
from tests.contract.writing_contract import WritingContract


class RacedByProcesses:
    """For stores that other processes can open. Comes before the contract among the bases of a test class."""

    racers_count: ClassVar[int] = 8

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


class KeepingContract(StoreFixtures):
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

    async def test_finished_puts_are_not_reported_as_unfinished(self, store: BlobStore) -> None:
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

    async def test_closing_twice_is_fine(self, store: BlobStore) -> None:
        await put_bytes(store, KEY, b"x")
        await store.close()
        await store.close()


class StoreContract(WritingContract, ReadingContract, ListingContract, KeepingContract):
    """Subclass it, and give it a fixture `store`: empty, and closed by the one who made it."""
