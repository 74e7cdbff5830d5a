"""A state store's directory, working directories, and a file manager between them; a test says what files there are."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from engine.state import files as state_files
from engine.state.changelogs import ChangelogWriter
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import CapturedSnapshot, Deleted, SnapshotUploaded, StateFileManager
from engine.state.settings import StateStoreSettings
from index.snapshot.model import UniqueId
from index.spark.changelog import changelog_version
from index.spark.lineage import Lineage, Resolution
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion
from index.spark.retention import StateListing

# What RocksDB has beside SSTs, and may not be empty.
OTHERS = {"CURRENT": b"MANIFEST-000005\n", "MANIFEST-000005": b"manifest", "OPTIONS-000007": b"options"}

Content = dict[str, bytes]


def files(**sizes: int) -> Content:
    """`files(s1=10, l2=5)`: `000001.sst` of 10 bytes, `archive/000002.log` of 5, and what is always there."""
    made = dict(OTHERS)
    for name, size in sizes.items():
        kind, number = name[0], int(name[1:])
        made[f"{number:06d}.sst" if kind == "s" else f"archive/{number:06d}.log"] = bytes([number % 256]) * size
    return made


def at(version: int, unique_id: str | None = None) -> StateVersion:
    return StateVersion(version, None if unique_id is None else UniqueId(unique_id))


def fill(directory: Path, content: Content) -> Path:
    for name, data in content.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def tree(directory: Path) -> Content:
    """Everything in a directory, hidden or not."""
    found = sorted(path for path in directory.rglob("*") if not path.is_dir())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def new_changelog(
    of: StateVersion, path: Path, *, column_families: bool = False, lineage: Lineage = ()
) -> ChangelogWriter:
    version = changelog_version(column_families=column_families, unique_ids=of.unique_id is not None)
    return ChangelogWriter(path, "lz4", version, lineage)


async def delete_old_versions(
    manager: StateFileManager, *, needed: Resolution | None = None, versions_deleted_min: int = 0, **settings: int
) -> Deleted:
    """Delete by other settings, which are the manager's from then on."""
    changed = settings | {"versions_deleted_min": versions_deleted_min}
    manager.settings = msgspec.structs.replace(manager.settings, **changed)
    return await state_files.delete_old_versions(manager, needed=needed)


class StateBench:
    """One manager. Its rocksdb_checkpoints are made of what a test gives, and are side by side."""

    def __init__(self, root: Path, directory: CheckpointDir, **settings: Any) -> None:
        self.root = root
        self.directory = directory
        runtime = settings.pop("runtime", None)
        self.manager = StateFileManager(directory, StateStoreSettings(**settings), runtime=runtime)
        self.working = root / "working"
        self._checkpoints = 0

    def beside(self, root: Path, **settings: Any) -> "StateBench":
        """Another executor's manager of the same directory."""
        root.mkdir()
        return StateBench(root, self.directory, **settings)

    def capture(self, content: Content, of: StateVersion, num_keys: int = 0) -> CapturedSnapshot:
        self._checkpoints += 1
        source = fill(self.root / f"checkpoint-{self._checkpoints}", content)
        metadata = StateMetadata(
            num_keys=num_keys, column_family_ids=(), column_family_internal=(), column_family_id_max=0
        )
        return self.manager.capture(source, of, metadata)

    async def save(self, content: Content, of: StateVersion, num_keys: int = 0) -> SnapshotUploaded:
        return await self.manager.upload_snapshot(self.capture(content, of, num_keys))

    async def load(self, of: StateVersion | None) -> StateMetadata:
        return await self.manager.load_snapshot(of, self.working)

    async def changelog(self, of: StateVersion, data: bytes = b"changes") -> None:
        path = self.root / f"written-{of}"
        path.write_bytes(data)
        await self.manager.publish_changelog(of, path)

    async def names(self, path: str = "") -> list[str]:
        return [status.name for status in await self.directory.list(path) if not status.is_directory]

    async def listing(self) -> StateListing:
        return StateListing.of_names(await self.manager.files.names())

    async def versions(self, suffix: str) -> list[int]:
        found = (name.removesuffix(suffix).split("_")[0] for name in await self.names() if name.endswith(suffix))
        return sorted(map(int, found))


async def wait_for_the_clock() -> None:
    """Until the next file is younger, by the clock of any file system here."""
    await asyncio.sleep(0.02)


def needed(target: StateVersion, base: StateVersion | None, *changelogs: StateVersion) -> Resolution:
    return Resolution(target, base, changelogs)
