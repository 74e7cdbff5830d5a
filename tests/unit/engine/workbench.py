"""One store, one directory, and the two use cases that move bytes between them, with little data."""

from pathlib import Path
from typing import Any

from blobstore.base import BlobStore
from blobstore.memory import MemoryStore
from blobstore.wrappers.meter import MeteredStore
from engine.backup.backup import BackupResult, backup_source
from engine.backup.source import WholeDirectory
from engine.clock import SystemRuntime
from engine.local.cache import DigestCache
from engine.restore.restore import RestoreResult, restore_store
from engine.settings import TransferSettings
from index.snapshot.model import Scope
from index.snapshot.records import RepositoryRecord, StoreReference
from tests.doubles import InterposedStore

SCOPE = Scope("job")
REPOSITORY = RepositoryRecord(id="0" * 20, ttl_ms=86_400_000, margin_ms=3_600_000, collection_period_ms=86_400_000)
# Sizes that make each kind of file with little data: inline up to 16 bytes and 64 in all, packed up to 2 KiB, alone
# up to 8 KiB, cut above that.
SETTINGS = TransferSettings(
    inline_file_bytes_max=16,
    inline_bytes_max=64,
    pack_file_bytes_max=2048,
    pack_bytes_max=8192,
    chunk_bytes=4096,
    blob_bytes_max=8192,
    range_bytes=8192,
    memory_bytes_max=64 * 1024,
    in_flight_max=4,
)

Tree = dict[str, bytes]


class Workbench:
    """Backs up and restores; each backup is diffed against the one before unless told otherwise."""

    def __init__(self, root: Path, store: BlobStore | None = None) -> None:
        self.root = root
        self.inner = store or MemoryStore()
        self.metered = MeteredStore(self.inner)
        self.meter = self.metered.meter
        self.store = InterposedStore(self.metered)
        self.cache = DigestCache()
        self.runtime = SystemRuntime()
        self.settings = SETTINGS
        self.directory = root / "state"
        self.directory.mkdir()
        self.target = root / "target"
        self.newest: StoreReference | None = None
        self._version = 0

    def write(self, tree: Tree, *, below: Path | None = None) -> None:
        """Make the directory hold exactly these files; the ones that are right already stay untouched."""
        root = below or self.directory
        for path in sorted(root.rglob("*"), reverse=True):
            name = str(path.relative_to(root))
            if path.is_dir() and not any(wanted.startswith(f"{name}/") for wanted in tree):
                path.rmdir()
            elif path.is_file() and name not in tree:
                path.unlink()
        for name, data in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)

    async def backup(self, **changed: Any) -> BackupResult:
        self._version += 1
        arguments: dict[str, Any] = {
            "scope": SCOPE,
            "task": "0",
            "store_name": "default",
            "source": WholeDirectory(changed.pop("directory", self.directory)),
            "version": self._version,
            "unique_id": None,
            "base": self.newest,
            "repository": REPOSITORY,
            "settings": self.settings,
            "runtime": self.runtime,
            "cache": self.cache,
        }
        result = await backup_source(self.store, **(arguments | changed))
        self.newest = result.reference
        return result

    async def restore(self, **changed: Any) -> RestoreResult:
        arguments: dict[str, Any] = {
            "reference": self.newest,
            "target": self.target,
            "settings": self.settings,
            "runtime": self.runtime,
            "cache": self.cache,
        }
        return await restore_store(self.store, **(arguments | changed))

    def beside_target(self) -> list[str]:
        """What stands beside the target: nothing of ours, when all went well."""
        return sorted(path.name for path in self.root.iterdir() if path.name not in {"state", "target"})


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def read_tree(root: Path) -> Tree:
    """The files below a directory; an empty directory stands there as `name/`."""
    tree = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return tree | {
        f"{path.relative_to(root)}/": b"" for path in root.rglob("*") if path.is_dir() and not any(path.iterdir())
    }


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Permissions and modification time of each file."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode & 0o7777, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }
