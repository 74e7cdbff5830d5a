"""Requests that fail and callers that are cancelled, anywhere in any history: what was committed is there, whole.

A failed call leaves nothing loaded, or what was loaded before; nothing pending, nothing captured, no changelog that was
not taken, no lock. The history, its faults and the steps at which a caller is cancelled follow from one seed.
"""

import asyncio
import copy
import random
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.errors import StoreError
from engine.errors import SnapshotUploadError
from index.errors import LineageError, VersionMissingError
from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import Bench, Conf, dir_of, interposed, settings_of
from tests.unit.engine.state.test_store_random import FAMILIES, Rows, World, check
from tidemark import StateStore

STEPS_COUNT = 50
REQUESTS = ["put", "put_if_absent", "get", "list_page", "delete"]
KEYS = ["", ".zip", ".changelog", ".sst", ".crc"]
KINDS = ["load", "write", "write", "commit", "commit", "commit", "abort", "maintain", "restart", "look", "family"]


class UnexpectedError(Exception):
    """A call failed, and no injected fault is the cause."""


class FaultyWorld(World):
    """A world in which calls fail, and callers lose their patience."""

    def __init__(self, root: Path, conf: Conf, rng: random.Random) -> None:
        super().__init__(root, settings_of(**conf))
        self.bench = Bench(root)
        self.files = interposed(self.bench)
        self.rng = rng
        # What has to be there, however few versions are retained.
        self.newest = StateVersion(0)

    @override
    async def open(self) -> StateStore:
        return await StateStore.open(await dir_of(self.files, self.bench.root), self.bench.new_work(), self.conf)

    async def attempt(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Do it, or fail at it; whether it was done."""
        fate = self.rng.random()
        if fate < 0.15:
            self.files.fail(self.rng.choice(REQUESTS), self.rng.choice(KEYS))
        task = asyncio.ensure_future(work)
        if 0.15 <= fate < 0.35:
            for _ in range(self.rng.randrange(1, 60)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            return False
        error = task.exception()
        if error is None:
            return True
        if not any("injected" in str(one) for one in (error, error.__cause__)) and not isinstance(
            error, SnapshotUploadError
        ):
            raise UnexpectedError from error
        return False

    async def one_step(self, kind: str) -> None:
        if kind in {"restart", "look"}:
            await self.with_another(kind)
        else:
            await self.with_store(kind)

    async def with_store(self, kind: str) -> None:
        store, rng = self.store, self.rng
        if kind == "load" or (self.now is None and kind in {"write", "commit", "family"}):
            of = rng.choice([self.newest, self.newest, *list(self.versions)[-3:]])
            await self.load_if_there(of)
        elif kind == "write":
            self.write(rng)
        elif kind == "family" and self.now is not None and self.conf.column_families:
            self.change_family(self.now, rng.choice(FAMILIES[1:]), drops=rng.random() < 0.3)
        elif kind == "commit":
            before = store.version
            if await self.attempt(self.commit(is_forced=rng.random() < 0.1)):
                self.newest = list(self.versions)[-1]
            else:
                assert before is not None
                assert store.version is None
                self.now = None
        elif kind == "abort":
            await store.abort()
            self.now = None
        elif kind == "maintain":
            await self.attempt(store.maintain())

    async def with_another(self, kind: str) -> None:
        if kind == "restart":
            await self.attempt(self.store.close())
            await _close(self.store)
            self.now = None
            self.store = await self.open()
        else:
            other = await self.open()
            if await self.attempt(other.load(self.newest.version, self.newest.unique_id, read_only=True)):
                check(other, self.versions[self.newest])
            await _close(other)

    async def load_if_there(self, of: StateVersion) -> None:
        self.now = None
        try:
            is_there = await self.attempt(self.store.load(of.version, of.unique_id))
        except UnexpectedError as error:
            # Too old, and deleted: the only way in which a version may be gone.
            gone = isinstance(error.__cause__, VersionMissingError | LineageError)
            if not gone or of == self.newest or self.conf.versions_retained_min > 10:
                raise
            self.versions.pop(of)
            return
        if is_there:
            self.newest = of
            self.now = copy.deepcopy(self.versions[of])
            check(self.store, self.now)

    async def finish(self) -> None:
        """Without any more faults: the newest version is there, and nothing is left over."""
        self.files._before.clear()
        expected: Rows = self.versions[self.newest]
        await self.store.load(self.newest.version, self.newest.unique_id)
        check(self.store, expected)
        try:
            await self.store.maintain()
        except SnapshotUploadError:
            await self.store.maintain()
        assert self.store.manager.known._pending == {}
        assert list(self.store._place.directory.glob("captured/*")) == []
        assert len(list(self.store._place.directory.glob("changelogs/written-*"))) <= 1
        await self.store.load(self.newest.version, self.newest.unique_id)
        check(self.store, expected)
        await self.store.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def _close(store: StateStore) -> None:
    try:
        await store.close()
    except SnapshotUploadError:
        return
    except StoreError as error:
        assert "injected" in str(error)  # noqa: PT017  (any other is a failure)


def live(seed: int) -> None:
    rng = random.Random(seed)
    conf: Conf = {
        "column_families": rng.random() < 0.6,
        "changelogs": rng.random() < 0.85,
        "deltas_per_snapshot": rng.randrange(5),
        "row_checksums": rng.random() < 0.3,
        "background_uploads": rng.random() < 0.6,
        "count_keys": rng.random() < 0.8,
        "codec": rng.choice(["lz4", "zstd"]),
        "versions_retained_min": rng.choice([2, 3, 1000]),
        "versions_deleted_min": 0,
    }

    async def run() -> None:
        with tempfile.TemporaryDirectory() as root:
            world = FaultyWorld(Path(root), conf, rng)
            world.store = await world.open()
            try:
                for _ in range(STEPS_COUNT):
                    await world.one_step(rng.choice(KINDS))
                await world.finish()
            finally:
                await _close(world.store)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_what_was_committed_outlives_faults_and_cancellations(seed: int) -> None:
    live(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_was_committed_outlives_many_faults_and_cancellations() -> None:
    for seed in range(1000, 1500):
        live(seed)
