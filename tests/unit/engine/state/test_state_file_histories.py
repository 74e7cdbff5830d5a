"""Random histories of two executors on one directory: whatever they do, what is to be retained loads whole."""

import random
from pathlib import Path

import pytest

from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.file_manager import CapturedSnapshot
from index.state_names import StateVersion
from tests.doubles import InterposedStore
from tests.unit.engine.state.state_bench import OTHERS, Content, StateBench, at, needed, tree

RETAINED = 4
STEPS = 80


class History:
    """What was committed, version by version: the one chain that counts. A step back cuts it."""

    def __init__(self, root: Path, seed: int, *, unique_ids: bool) -> None:
        self.root = root
        self.chance = random.Random(seed)
        self.unique_ids = unique_ids
        self.store = InterposedStore(MemoryStore())
        self.chain: list[tuple[StateVersion, Content]] = []
        self.late: list[tuple[StateBench, CapturedSnapshot, Content]] = []
        self.executors: list[StateBench] = []
        # The oldest version that no deletion was allowed to take.
        self.oldest = 0
        self.files_made = 0
        self.names_made = 0

    async def begin(self) -> None:
        directory = (await CheckpointDir.open(self.store)).child("state/0/0")
        for name in ("a", "b"):
            root = self.root / name
            root.mkdir()
            self.executors.append(StateBench(root, directory, versions_retained_min=RETAINED))

    def next_content(self) -> Content:
        """As RocksDB would go on: some files are gone, new ones have the next numbers, none changes."""
        last = self.chain[-1][1] if self.chain else dict(OTHERS)
        kept = {name: data for name, data in last.items() if not name.endswith(".sst") or self.chance.random() < 0.7}
        number = len([name for name in last if name.endswith(".sst")]) + len(self.chain) * 3
        for _ in range(self.chance.randint(0, 2)):
            number += 1
            self.files_made += 1
            # The same names and sizes come again after a step back, with other content.
            kept[f"{number:06d}.sst"] = f"{self.files_made:08d}".encode()
        return kept

    def next_of(self) -> StateVersion:
        self.names_made += 1
        return at(len(self.chain) + 1, f"id{self.names_made}" if self.unique_ids else None)

    async def step(self) -> None:
        executor = self.chance.choice(self.executors)
        last = self.chain[-1] if self.chain else None
        await executor.load(None if last is None else last[0])
        assert tree(executor.working) == ({} if last is None else last[1])
        of, content = self.next_of(), self.next_content()
        match self.chance.randrange(10):
            case 0 if self.unique_ids:
                # An attempt that is given up, and whose snapshot comes when nobody waits for it any more.
                self.late.append((executor, executor.capture(content, of), content))
            case 1:
                operation = "put_if_absent" if self.unique_ids else "put"
                self.store.fail(operation, ".zip")
                with pytest.raises(StoreUnavailableError):
                    await executor.save(content, of)
            case 2 if self.unique_ids and last is not None and last[0].version > self.oldest:
                # The query is taken back, by no more than what is retained.
                oldest = max(self.oldest, len(self.chain) - RETAINED + 1, 1)
                del self.chain[self.chance.randint(oldest, len(self.chain)) :]
            case _:
                await executor.save(content, of)
                self.chain.append((of, content))

    async def upload_late(self) -> None:
        if self.late and self.chance.random() < 0.3:
            executor, captured, content = self.late.pop(self.chance.randrange(len(self.late)))
            await executor.manager.upload_snapshot(captured)
            await executor.load(captured.of)
            assert tree(executor.working) == content

    async def delete(self) -> None:
        current = self.chain[-1][0]
        executor = self.chance.choice(self.executors)
        deleted_max = self.chance.choice([-1, 1, 2])
        await executor.manager.delete_old_versions(versions_deleted_max=deleted_max, needed=needed(current, current))
        self.oldest = max(self.oldest, current.version - RETAINED + 1)
        for of, content in [item for item in self.chain if item[0].version >= self.oldest]:
            await executor.load(of)
            assert tree(executor.working) == content


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unique_ids", [False, True], ids=["V1", "V2"])
async def test_what_is_retained_loads_whole_after_any_history(tmp_path: Path, seed: int, unique_ids: bool) -> None:
    history = History(tmp_path, seed, unique_ids=unique_ids)
    await history.begin()
    for _ in range(STEPS):
        await history.step()
        await history.upload_late()
        if history.chain and history.chance.random() < 0.3:
            await history.delete()
    # And there is little else: what was deleted is not only the zips.
    listed = len(await history.executors[0].names("SSTs"))
    assert listed < history.files_made
