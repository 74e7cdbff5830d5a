"""The directory of a state store, written by ours, and a repository that it is backed up to."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backup.backup import BackupOptions
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.plan.commits import Commit
from index.snapshot.model import LineageItem, UniqueId
from index.spark.names import StateVersion
from tests.unit.engine.conftest import JOB, World
from tests.unit.engine.state.state_store_kit import Bench, Ids, check_numbers, settings_of, write_numbers
from tidemark import StateStore

# Each file is a blob of its own, so that requests show the files.
PLAIN = TransferSettings(inline_file_bytes_max=0, pack_file_bytes_max=0, pack_bytes_max=0, chunk_bytes=4096)
# What one backup sends, another packs: a state store's small files are in packs and in the index.
PACKED = TransferSettings(inline_file_bytes_max=256)
DELTAS = 3


class StateWorld:
    """A history whose version n holds n and nothing else, with a snapshot every few versions."""

    def __init__(self, world: World, tmp_path: Path) -> None:
        self.world = world
        self.bench = Bench(tmp_path)
        self.ids: Ids = [None]
        self._works = itertools.count()

    async def process(self, settings: TransferSettings = PLAIN) -> Repository:
        """The repository as another process sees it."""
        repository = await Repository.open(self.world.store, settings=settings)
        self.world.store.requests.clear()
        return repository

    async def grow(self, versions: range, *, format_version: int = 2) -> None:
        """Make versions, each from the one before it."""
        async with self.bench.store(format_version=format_version, deltas_per_snapshot=DELTAS) as store:
            await write_numbers(store, self.ids, versions, maintain_every=1)

    async def lineage(self) -> tuple[LineageItem, ...]:
        """What Spark's changelog of the newest version says that it grew from."""
        async with self.bench.store(deltas_per_snapshot=DELTAS) as store:
            await store.load(len(self.ids) - 1, self.ids[-1], read_only=True)
            return store.lineage[:-1]

    async def backup(self, *, lineage: Sequence[LineageItem] | None = None, known: bool = True) -> Commit:
        """Back up the newest version, by default with the lineage that it has."""
        if lineage is None and known and self.ids[-1] is not None:
            lineage = await self.lineage()
        version = len(self.ids) - 1
        repository = await self.process()
        result = await repository.backup(
            JOB, self.bench.root, options=BackupOptions(version=version, unique_id=self.ids[-1], lineage=lineage)
        )
        return await repository.commit(JOB, [result], version=version)

    def of(self, version: int) -> StateVersion:
        """A version with its id."""
        return StateVersion(version, self.ids[version])

    def requests(self) -> list[tuple[str, str]]:
        """What was asked of the store since this was asked last."""
        asked = list(self.world.store.requests)
        self.world.store.requests.clear()
        return asked

    async def check(self, files: object, versions: Sequence[int]) -> None:
        """These versions load from there as they were written."""
        work = self.bench.tmp_path / f"read-{next(self._works)}"
        async with await StateStore.open(files, work, settings_of()) as store:  # type: ignore[arg-type]
            await check_numbers(store, self.ids, versions)

    async def check_version(self, files: object, version: int, unique_id: str | None) -> None:
        """Load one version."""
        work = self.bench.tmp_path / f"read-{next(self._works)}"
        async with await StateStore.open(files, work, settings_of()) as store:  # type: ignore[arg-type]
            await store.load(version, unique_id, read_only=True)


def names_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def unique(text: str) -> UniqueId:
    return UniqueId(text)


@pytest.fixture
def states(world: World, tmp_path: Path) -> StateWorld:
    return StateWorld(world, tmp_path)
