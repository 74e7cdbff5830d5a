import itertools
from pathlib import Path

import pytest

from blobstore.base import BlobStore, list_blobs
from blobstore.memory import MemoryStore
from engine.backup.backup import BackupOptions, BackupResult
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.model import Scope
from tests.doubles import InterposedStore, SteppedClock
from tests.opaque_store import OpaqueStore

TTL_MS = 3_600_000
MARGIN_MS = 600_000
JOB = Scope("job")


class World:
    """A repository in memory whose clock a test moves, and directories whose content is a dict."""

    def __init__(self, store: InterposedStore, clock: SteppedClock, directory: Path) -> None:
        self.store = store
        self.clock = clock
        self.directory = directory
        self._names = itertools.count()

    async def process(self) -> Repository:
        """The repository as another process sees it: nothing remembered."""
        return await Repository.open(self.store)

    def tree(self, files: dict[str, bytes]) -> Path:
        """A new directory with these files."""
        root = self.directory / f"tree-{next(self._names)}"
        root.mkdir()
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        return root

    def target(self) -> Path:
        """A path where nothing is."""
        return self.directory / f"target-{next(self._names)}"

    async def backup(
        self, repository: Repository, text: str, *, task: str = "0", scope: Scope = JOB, version: int | None = None
    ) -> BackupResult:
        """Back up a small tree that has `text` in a file of its own blob, a packed and an inline one."""
        tree = self.tree(text_tree(text))
        return await repository.backup(scope, tree, task=task, options=BackupOptions(version=version))

    async def history(self, repository: Repository, *texts: str, scope: Scope = JOB) -> list[Commit]:
        """Commits of these texts, a second apart."""
        commits = []
        for text in texts:
            commits.append(
                await repository.commit(scope, [await self.backup(repository, text, scope=scope)], offsets=text)
            )
            self.clock.advance(1000)
        return commits

    async def old_history(self, repository: Repository, *texts: str) -> list[Commit]:
        """Commits of these texts, whose uploads are all older than the TTL by now."""
        commits = await self.history(repository, *texts)
        self.clock.advance(TTL_MS)
        return commits

    async def keys(self, prefix: str = "") -> set[str]:
        """What the store holds, no matter who may see it."""
        return {blob.key async for blob in list_blobs(self.store.inner, prefix)}

    async def restored_text(self, repository: Repository, **choice: object) -> str:
        """What the chosen commit's store restores to, checked to be a whole tree."""
        target = self.target()
        await repository.find_and_restore(JOB, target, **choice)  # type: ignore[arg-type]
        files = {str(p.relative_to(target)): p.read_bytes() for p in sorted(target.rglob("*")) if p.is_file()}
        text = files["CURRENT"].decode()
        assert files == text_tree(text)
        return text


def text_tree(text: str) -> dict[str, bytes]:
    return {
        "CURRENT": text.encode(),
        "MANIFEST-000005": f"manifest of {text}".encode() * 100,
        "archive/000009.log": f"log of {text}".encode() * 40_000,
        "always": b"the same" * 1000,
    }


async def make_world(inner: BlobStore, clock: SteppedClock, directory: Path) -> World:
    store = InterposedStore(inner)
    await Repository.init(store, ttl_ms=TTL_MS, margin_ms=MARGIN_MS, collection_period_ms=TTL_MS)
    return World(store, clock, directory)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    clock = SteppedClock()
    return await make_world(MemoryStore(clock=clock), clock, tmp_path)


@pytest.fixture
async def opaque_world(tmp_path: Path) -> World:
    """On a store whose lists do not show TTLs."""
    clock = SteppedClock()
    return await make_world(OpaqueStore(clock=clock), clock, tmp_path)


@pytest.fixture
async def lasting_world(tmp_path: Path) -> World:
    """On a store that cannot remove TTLs either."""
    clock = SteppedClock()
    return await make_world(OpaqueStore(clock=clock, removes_ttl=False), clock, tmp_path)
