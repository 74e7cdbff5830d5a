"""A repository whose bytes are with a manager of four methods: backup, commit, restore and collection, and crashes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import list_blobs, read_blob
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, wrap_store
from blobstore.wrappers.by_id import ManagedStore
from blobstore.wrappers.retry import RetrySettings
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import BLOBS, INDEXES
from tests.blob_manager import MemoryManager
from tests.doubles import InterposedStore, SteppedClock
from tests.unit.engine.conftest import MARGIN_MS, TTL_MS, World

AT_ONCE = StoreSettings(retry=RetrySettings(first_wait_s=0))


class CrashError(Exception):
    pass


class ManagedWorld(World):
    """Entries and records in memory behind hooks; the bytes are with the manager."""

    def __init__(self, directory: Path) -> None:
        clock, self.manager = SteppedClock(), MemoryManager()
        super().__init__(InterposedStore(MemoryStore(clock=clock)), clock, directory)

    def opened(self) -> Any:
        managed = ManagedStore(self.store, self.manager, prefixes=(BLOBS, INDEXES), ttl_max_ms=TTL_MS)
        return wrap_store(managed, AT_ONCE)

    @override
    async def process(self) -> Repository:
        return await Repository.open(self.opened())

    async def ids(self) -> set[str]:
        """The ids that have an entry."""
        entries = self.store.inner
        keys = [blob.key for prefix in (BLOBS, INDEXES) async for blob in list_blobs(entries, prefix)]
        return {msgspec.json.decode(await read_blob(entries, key, size_bytes_max=1000))["id"] for key in keys}

    async def collect(self) -> None:
        """Two TTLs pass, and everything but the newest commit goes."""
        for _ in range(2):
            self.clock.advance(TTL_MS + MARGIN_MS)
            await (await self.process()).collect(Retention(keep_last=1), delete_share_max=1)


@pytest.fixture
async def managed(tmp_path: Path) -> ManagedWorld:
    world = ManagedWorld(tmp_path)
    await Repository.init(world.opened(), ttl_ms=TTL_MS, margin_ms=MARGIN_MS, collection_period_ms=TTL_MS)
    return world


async def test_a_whole_life_leaves_the_manager_with_the_last_snapshot_and_nothing_else(managed: ManagedWorld) -> None:
    """Samza's ledger: what was added has its TTL removed, and what was deleted leaves the files of the last one."""
    repository = await managed.process()
    assert managed.manager.methods() == []
    await managed.history(repository, "a", "b", "c")
    put = set(managed.manager.blobs)
    assert managed.manager.expiring == set()
    assert await managed.ids() == put
    assert "job" in {metadata.job for _, _, metadata in managed.manager.calls}
    for number, text in enumerate("abc", 1):
        assert await managed.restored_text(await managed.process(), number=number) == text
    report = await repository.verify()
    assert not report.damaged
    await managed.collect()
    assert set(managed.manager.blobs) == await managed.ids()
    assert set(managed.manager.blobs) < put
    assert await managed.restored_text(await managed.process()) == "c"


@pytest.mark.parametrize("where, steps_min", [("entries", 30), ("manager", 10)])
async def test_a_crash_at_any_step_loses_nothing_and_leaks_nothing(tmp_path: Path, where: str, steps_min: int) -> None:
    steps_left, step = 0, 0

    async def crash() -> None:
        nonlocal steps_left
        steps_left = 0
        raise CrashError

    def count_down(method: str, blob_id: str) -> None:
        nonlocal steps_left
        steps_left -= 1
        if steps_left == 0:
            raise CrashError

    while steps_left <= 0:
        steps_left = step = step + 1
        (tmp_path / f"{step}").mkdir()
        world = ManagedWorld(tmp_path / f"{step}")
        await Repository.init(world.opened(), ttl_ms=TTL_MS, margin_ms=MARGIN_MS, collection_period_ms=TTL_MS)
        await world.history(await world.process(), "a")
        repository = await world.process()
        if where == "manager":
            world.manager.before = count_down
        else:
            world.store.before_request(step, crash)
        with suppress(CrashError):
            await world.old_history(repository, "b")
            await repository.collect(Retention(keep_last=1), delete_share_max=1)
        world.manager.before = lambda method, blob_id: None
        world.store.before_request(0, crash)  # never
        # Another process goes on. What the crash has left with a TTL, the manager ends.
        assert await world.restored_text(await world.process()) in {"a", "b"}
        await world.history(await world.process(), "c")
        await world.collect()
        world.manager.expire()
        assert await world.restored_text(await world.process()) == "c"
        assert set(world.manager.blobs) == await world.ids(), f"step {step}"
    assert step > steps_min
