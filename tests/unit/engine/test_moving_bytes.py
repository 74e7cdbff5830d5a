"""The pieces that move bytes: the bound on memory, bodies of files, and puts whose answer was lost."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import BytesBody, read_blob
from blobstore.concurrency import ByteBudget, run_all
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from engine.backup.upload import FileRunBody, PartsBody
from engine.errors import DamagedError, LeaseExpiredError, UsageError
from engine.local.digests import FileHasher, hash_bytes
from engine.local.scan import opened_dir, scan_dir
from engine.records.indexes import put_new
from engine.settings import TransferSettings, share_among
from index.plan.backup import PlannedFile
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import Scope
from tests.doubles import InterposedStore

KEY = upload_key(BLOBS, Scope("job"), "0" * 20, 0)


class TestCarryOutAll:
    async def test_every_job_is_done_with_few_in_flight(self) -> None:
        now = most = 0
        done: list[int] = []

        async def work(job: int) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            done.append(job)

        await run_all(work, iter(range(100)), in_flight_max=7)
        assert sorted(done) == list(range(100))
        assert most == 7

    async def test_first_failure_is_raised_with_its_cause_and_cancels_the_others(self) -> None:
        cancelled: list[int] = []

        async def work(job: int) -> None:
            if job == 3:
                raise DamagedError("first", operation="test") from KeyError("cause")
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(job)
                raise ValueError("a later failure") from None

        with pytest.raises(DamagedError) as raised:
            await run_all(work, range(10), in_flight_max=4)
        assert isinstance(raised.value.__cause__, KeyError)
        assert raised.value.__context__ is None
        assert sorted(cancelled) == [0, 1, 2]

    async def test_cancellation_stays_one(self) -> None:
        task = asyncio.create_task(run_all(lambda _: asyncio.sleep(3600), range(9), in_flight_max=3))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestByteBudget:
    async def test_no_more_is_held_than_there_is(self) -> None:
        budget = ByteBudget(10)
        held = most = 0

        async def work(size: int) -> None:
            nonlocal held, most
            async with budget.hold(size):
                held += min(size, 10)
                most = max(most, held)
                await asyncio.sleep(0)
                held -= min(size, 10)

        await asyncio.gather(*(work(size) for size in (3, 8, 1, 10, 99, 2, 5, 5, 7) * 5))
        assert most == 10

    async def test_large_request_is_not_overtaken_for_ever(self) -> None:
        budget = ByteBudget(10)
        order: list[int] = []

        async def work(size: int) -> None:
            async with budget.hold(size):
                order.append(size)
                await asyncio.sleep(0)

        await asyncio.gather(work(6), work(10), work(1), work(2))
        assert order == [6, 10, 1, 2]

    @pytest.mark.parametrize("when", ["waiting", "served"])
    async def test_cancelled_request_gives_back_what_it_was_given(self, when: str) -> None:
        budget = ByteBudget(10)

        async def work() -> None:
            async with budget.hold(10):
                await asyncio.sleep(60)

        async with budget.hold(10):
            waiting = asyncio.create_task(work())
            await asyncio.sleep(0)
            if when == "waiting":
                waiting.cancel()
                await asyncio.sleep(0)
        # Served, and cancelled before it could run.
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), budget.hold(10):
            pass


@pytest.mark.parametrize("sizes", [[], [0], [1], [5000], [100] * 99, [4096, 1, 4096, 0, 4095, 1]])
async def test_parts_are_one_body(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    body = PartsBody(parts, 4096)
    for _ in range(2):
        chunks = [chunk async for chunk in body.read_chunks()]
        assert b"".join(chunks) == b"".join(parts)
        assert all(chunks)
        assert len(chunks) <= sum(sizes) / 2048 + 1
    assert body.size_bytes == sum(sizes)


class TestPutNew:
    async def test_created(self) -> None:
        store = MemoryStore()
        created = await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)
        info = await store.stat(KEY)
        assert info is not None
        assert (info.created_at_ms, info.expires_at_ms) == (created.created_at_ms, created.created_at_ms + 5000)

    async def test_own_earlier_request_that_landed_is_ours(self) -> None:
        store = MemoryStore()
        first = await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)
        again = await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)
        assert again == first

    async def test_anything_else_under_our_key_is_damage(self) -> None:
        store = MemoryStore()
        await store.put_if_absent(KEY, BytesBody(b"foreign"), ttl_ms=5000)
        with pytest.raises(DamagedError, match="7 bytes are there") as raised:
            await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)
        assert raised.value.subject == KEY

    async def test_upload_that_was_collected_before_its_answer_came_is_to_be_made_again(self) -> None:
        inner = MemoryStore()
        store = InterposedStore(inner)
        await inner.put_if_absent(KEY, BytesBody(b"data"), ttl_ms=5000)

        async def lose() -> None:
            await inner.delete([KEY])

        store.before("stat", KEY, lose)
        with pytest.raises(LeaseExpiredError, match="collected"):
            await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)

    async def test_size_is_proof_enough_of_what_an_earlier_request_put(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file changed before it was sent again, and no stat says so: the hash is that of the bytes that landed."""
        path = tmp_path / "f"
        path.write_bytes(b"x" * 10_000)
        inner = InterposedStore(MemoryStore())
        inner.lose_answer("put_if_absent", KEY)

        async def rewrite() -> None:
            path.write_bytes(b"y" * 10_000)

        inner.after("put_if_absent", KEY, rewrite)
        monkeypatch.setattr("engine.backup.upload.is_still", lambda *_: True)
        with opened_dir(tmp_path) as source:
            (file,) = scan_dir(tmp_path).files
            body = FileRunBody(
                source=source, item=PlannedFile(("f",), file), start=0, size_bytes=10_000, chunk_bytes=4096
            )
            store = RetryingStore(inner, RetrySettings(first_wait_s=0))
            await put_new(store, KEY, body, ttl_ms=5000)
            landed = await read_blob(store, KEY, size_bytes_max=10_000)
            assert (await body.read_digest()).blake3 == hash_bytes(landed).blake3

    async def test_no_answer_is_unavailable(self) -> None:
        store = InterposedStore(MemoryStore())
        store.lose_answer("put_if_absent", KEY)
        with pytest.raises(StoreUnavailableError):
            await put_new(store, KEY, BytesBody(b"data"), ttl_ms=5000)


def test_hash_of_pieces_is_hash_of_the_whole() -> None:
    data = os.urandom(100_000)
    hasher = FileHasher()
    for start in range(0, len(data), 777):
        hasher.update(memoryview(data)[start : start + 777])
    assert hasher.digest == hash_bytes(data)
    assert hasher.size_bytes == len(data)
    empty = bytes.fromhex("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")
    assert hash_bytes(b"") == (empty, 0)
    assert hash_bytes(b"123456789").crc32 == 0xCBF43926


@pytest.mark.parametrize(
    "wrong",
    [
        {"in_flight_max": 0},
        {"chunk_bytes": 1},
        {"chunk_bytes": 9 << 20},
        {"blob_bytes_max": 1000},
        {"pack_bytes_max": 65 << 20},
        {"pack_file_bytes_max": 9 << 20},
        {"pack_file_bytes_max": -1},
        {"inline_file_bytes_max": 65 << 10},
        {"inline_bytes_max": -1},
        {"range_bytes": 1},
        {"memory_bytes_max": 15 << 20},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError) as raised:
        TransferSettings(**wrong)
    assert raised.value.subject in {name, "memory_bytes_max", "pack_file_bytes_max", "pack_bytes_max"}


@pytest.mark.parametrize(
    "memory_mib, in_flight_max, at_once_max, expected",
    [(64, 16, 8, 8), (64, 4, 8, 4), (16, 16, 8, 2), (64, 16, 1, 1), (64, 1, 8, 1)],
)
def test_shares_are_together_what_was_given(
    memory_mib: int, in_flight_max: int, at_once_max: int, expected: int
) -> None:
    settings = TransferSettings(memory_bytes_max=memory_mib * 1024 * 1024, in_flight_max=in_flight_max)
    at_once, share = share_among(settings, at_once_max)
    assert at_once == expected
    assert at_once * share.memory_bytes_max <= settings.memory_bytes_max
    assert at_once * share.in_flight_max <= settings.in_flight_max
