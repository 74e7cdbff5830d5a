"""One store, one directory, and the two use cases that move bytes between them, with little data."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import MeteredStore
from engine.backup.backup import BackupOptions, BackupResult, WholeDirectory, backup_source
from engine.local.digests import DigestCache, DigestCaches
from engine.records.repository import OpenRepository, StoreAddress
from engine.restore.restore import RestoreOptions, RestoreResult, read_index_of, restore_store, staged_restore
from engine.runtime import NO_PROGRESS, Pace, Runtime
from engine.settings import TransferSettings
from index.snapshot.model import RepositoryRecord, Scope, StoreReference
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


class _OneCache(DigestCaches):
    """One cache for all directories: a backup's files may be hard links of another's."""

    def __init__(self, cache: DigestCache) -> None:
        super().__init__()
        self._cache = cache

    @override
    @contextlib.asynccontextmanager
    async def of(self, directory: Path) -> AsyncIterator[DigestCache]:
        yield self._cache


class Workbench:
    """Backs up and restores; each backup is diffed against the one before by default."""

    def __init__(self, root: Path, store: BlobStore | None = None) -> None:
        self.root = root
        self.inner = store or MemoryStore()
        self.metered = MeteredStore(self.inner)
        self.meter = self.metered.meter
        self.store = InterposedStore(self.metered)
        self.cache = DigestCache()
        self.runtime = Runtime()
        self.pace = Pace()
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

    def opened(self, **changed: Any) -> OpenRepository:
        parts: dict[str, Any] = {
            "store": self.store,
            "record": REPOSITORY,
            "settings": self.settings,
            "runtime": self.runtime,
            "digests": _OneCache(self.cache),
            "pace": self.pace,
        }
        return OpenRepository(**(parts | changed))

    async def backup(self, **changed: Any) -> BackupResult:
        self._version += 1
        parts = {name: changed.pop(name) for name in ("indexes",) if name in changed}
        source = WholeDirectory(changed.pop("directory", self.directory))
        base = changed.pop("base", self.newest)
        names = {name: changed.pop(name) for name in ("task", "store") if name in changed}
        progress = changed.pop("progress", NO_PROGRESS)
        options = BackupOptions(**({"version": self._version} | changed))
        address = StoreAddress(SCOPE, **names)
        result = await backup_source(self.opened(**parts), source, address, base, options, progress=progress)
        self.newest = result.reference
        return result

    async def restore(
        self,
        *,
        reference: StoreReference | None = None,
        target: Path | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> RestoreResult:
        """`meanwhile` comes when everything is downloaded, and nothing is published."""
        reference, target = reference or self.newest, target or self.target
        assert reference is not None
        if meanwhile is None:
            return await restore_store(self.opened(), reference, target, RestoreOptions(**options))
        async with staged_restore(self.opened(), target, RestoreOptions(**options)) as staged:
            index, requests = await read_index_of(self.store, reference)
            await staged.download(index, requests=requests)
            await meanwhile()
            return await staged.publish()

    def beside_target(self) -> list[str]:
        """What is beside the target: nothing of ours, when all went well."""
        return sorted(path.name for path in self.root.iterdir() if path.name not in {"state", "target"})


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def read_tree(root: Path) -> Tree:
    """The files below a directory; an empty directory is there as `name/`."""
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
