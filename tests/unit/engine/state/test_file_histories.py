"""Random histories of two executors on one directory: whatever they do, what is to be retained loads whole."""

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.state.changelogs import open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import CapturedSnapshot
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import PUT
from index.spark.lineage import Lineage, Resolution
from index.spark.names import StateVersion
from tests.doubles import InterposedStore
from tests.unit.engine.state.state_bench import (
    OTHERS,
    Content,
    StateBench,
    at,
    delete_old_versions,
    new_changelog,
    tree,
)

RETAINED = 4
STEPS = 80


class Made(msgspec.Struct, frozen=True):
    """A committed version: a changelog always, and now and then a snapshot of this content."""

    of: StateVersion
    content: Content
    has_snapshot: bool
    # What the header of its changelog says.
    lineage: Lineage


class History:
    """What was committed, version by version: the one chain that counts. A step back cuts it."""

    def __init__(self, root: Path, seed: int, *, unique_ids: bool) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.unique_ids = unique_ids
        self.store = InterposedStore(MemoryStore())
        self.chain: list[Made] = []
        self.late: list[tuple[StateBench, CapturedSnapshot, Content]] = []
        self.executors: list[StateBench] = []
        # The oldest version that no deletion was allowed to take.
        self.oldest = 0
        self.files_made = 0
        self.names_made = 0
        self.deleted = 0

    async def begin(self) -> None:
        directory = (await CheckpointDir.open(self.store)).child("state/0/0")
        for name in ("a", "b"):
            root = self.root / name
            root.mkdir()
            self.executors.append(StateBench(root, directory, versions_retained_min=RETAINED))

    def next_content(self) -> Content:
        """As RocksDB would go on: some files are gone, new ones have the next numbers, none changes."""
        last = self.chain[-1].content if self.chain else dict(OTHERS)
        kept = {name: data for name, data in last.items() if not name.endswith(".sst") or self.rng.random() < 0.7}
        number = len([name for name in last if name.endswith(".sst")]) + len(self.chain) * 3
        for _ in range(self.rng.randint(0, 2)):
            number += 1
            self.files_made += 1
            # The same names and sizes come again after a step back, with other content.
            kept[f"{number:06d}.sst"] = f"{self.files_made:08d}".encode()
        return kept

    def next_of(self) -> StateVersion:
        self.names_made += 1
        return at(len(self.chain) + 1, f"id{self.names_made}" if self.unique_ids else None)

    def next_lineage(self) -> Lineage:
        """From the newest snapshot of the chain on, as a load knows it."""
        items: list[LineageItem] = []
        for made in reversed(self.chain if self.unique_ids else []):
            items.append(LineageItem(made.of.version, UniqueId(str(made.of.unique_id))))
            if made.has_snapshot:
                break
        return tuple(reversed(items))

    async def load(self, executor: StateBench, made: Made | None) -> Resolution | None:
        """Load a version as far as that goes with files that are none of RocksDB's: its base, and its changelogs."""
        if made is None:
            await executor.load(None)
            return None
        scratch = self.root / "scratch"
        scratch.mkdir()
        known = self.chain[: made.of.version]
        found = await executor.manager.resolve(made.of.version, made.of.unique_id, scratch=scratch)
        number = 0 if found.base is None else found.base.version
        await executor.load(found.base)
        assert tree(executor.working) == (known[number - 1].content if number else {})
        assert found.base is None or found.base == known[number - 1].of
        assert found.changelogs == tuple(other.of for other in known[number:])
        for of, path in zip(
            found.changelogs, await executor.manager.fetch_changelogs(found.changelogs, scratch), strict=True
        ):
            with open_changelog(path, "lz4", of) as changelog:
                assert [record for records in changelog for record in records] == [(PUT, b"of", str(of).encode())]
        shutil.rmtree(scratch)
        return found

    async def commit(self, executor: StateBench, of: StateVersion) -> Lineage:
        lineage = self.next_lineage()
        path = self.root / f"{of}.changelog"
        with new_changelog(of, path, column_families=False, lineage=lineage) as writer:
            writer.write((PUT, b"of", str(of).encode()))
            writer.finish()
        await executor.manager.publish_changelog(of, path)
        path.unlink()
        return lineage

    async def step(self) -> None:
        executor = self.rng.choice(self.executors)
        last = self.chain[-1] if self.chain else None
        await self.load(executor, last)
        of, content = self.next_of(), self.next_content()
        match self.rng.randrange(10):
            case 0 if self.unique_ids:
                # An attempt that is given up, and whose snapshot comes when nobody waits for it any more.
                self.late.append((executor, executor.capture(content, of), content))
            case 1 if self.unique_ids:
                # One that lost, and was quick: all of it is there.
                await self.commit(executor, of)
                await executor.save(content, of)
            case 2:
                operation = "put_if_absent" if self.unique_ids else "put"
                self.store.fail(operation, ".zip")
                with pytest.raises(StoreUnavailableError):
                    await executor.save(content, of)
            case 3 if self.unique_ids and last is not None and last.of.version > self.oldest:
                # The query is taken back, by no more than what is retained.
                oldest = max(self.oldest, len(self.chain) - RETAINED + 1, 1)
                del self.chain[self.rng.randint(oldest, len(self.chain)) :]
            case _:
                has_snapshot = self.rng.random() < 0.4
                if has_snapshot:
                    await executor.save(content, of)
                lineage = await self.commit(executor, of)
                self.chain.append(Made(of, content, has_snapshot, lineage))

    async def upload_late(self) -> None:
        if self.late and self.rng.random() < 0.3:
            executor, captured, content = self.late.pop(self.rng.randrange(len(self.late)))
            await executor.manager.upload_snapshot(captured)
            await executor.load(captured.of)
            assert tree(executor.working) == content

    async def delete(self) -> None:
        executor = self.rng.choice(self.executors)
        current = await self.load(executor, self.chain[-1])
        deleted_max = self.rng.choice([-1, 1, 2])
        deleted = await delete_old_versions(executor.manager, versions_deleted_max=deleted_max, needed=current)
        self.deleted += deleted.snapshots
        self.oldest = max(self.oldest, self.chain[-1].of.version - RETAINED + 1)
        for made in self.chain:
            if made.of.version >= self.oldest:
                await self.load(executor, made)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("unique_ids", [False, True], ids=["V1", "V2"])
async def test_what_is_retained_loads_whole_after_any_history(tmp_path: Path, seed: int, unique_ids: bool) -> None:
    history = History(tmp_path, seed, unique_ids=unique_ids)
    await history.begin()
    for _ in range(STEPS):
        await history.step()
        await history.upload_late()
        if history.chain and history.rng.random() < 0.3:
            await history.delete()
    assert history.deleted
    # And there is little else: what was deleted is not only the zips.
    listed = len(await history.executors[0].names("SSTs"))
    assert listed < history.files_made
