"""What the tests of the state store share: stores on a directory, a look at it, and stores that act up."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Body, BytesBody, Created, CreateOutcome
from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from blobstore.wrappers.forwarding import ForwardingStore
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.commit import Committed
from engine.state.load import LoadMetrics
from index.snapshot.model import UniqueId
from index.spark.names import parse_state_name
from tests.doubles import InterposedStore
from tidemark import StateStore, StateStoreSettings

Ids = list[UniqueId | None]
Conf = dict[str, Any]

both_formats = pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
with_and_without_families = pytest.mark.parametrize("families", [False, True], ids=["plain", "families"])
with_and_without_changelogs = pytest.mark.parametrize("changelogs", [False, True], ids=["zips", "changelogs"])


def settings_of(**changes: Any) -> StateStoreSettings:
    """As Spark runs: nothing is uploaded but by maintenance."""
    return StateStoreSettings(**{"background_uploads": False, "fetches_max": 4, **changes})


class Bench:
    """A directory of a state store and working directories for any number of stores on it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "state"
        self.tmp_path = tmp_path
        self._count = 0

    def new_work(self) -> Path:
        self._count += 1
        return self.tmp_path / f"work-{self._count}"

    @asynccontextmanager
    async def store(
        self, files: CheckpointDir | BlobStore | None = None, *, work: Path | None = None, **changes: Any
    ) -> AsyncIterator[StateStore]:
        """A store that is closed in the end."""
        place = self.root if files is None else await dir_of(files, self.root)
        opened = await StateStore.open(place, work or self.new_work(), settings_of(**changes))
        async with opened:
            yield opened

    def snapshots(self) -> list[int]:
        """Versions with a snapshot."""
        return self._versions("snapshot")

    def changelogs(self) -> list[int]:
        """Versions with a changelog."""
        return self._versions("changelog")

    def ssts(self) -> list[str]:
        directory = self.root / "SSTs"
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []

    def file(self, version: int, kind: str) -> Path:
        """The only zip or changelog of a version."""
        (found,) = (p for p in self.root.iterdir() if p.suffix == f".{kind}" and _version_of(p.name) == version)
        return found

    def _versions(self, kind: str) -> list[int]:
        if not self.root.exists():
            return []
        parsed = (parse_state_name(path.name) for path in self.root.iterdir())
        return sorted(p.of.version for p in parsed if p is not None and p.kind == kind and not p.checksum)


def _version_of(name: str) -> int:
    parsed = parse_state_name(name)
    return -1 if parsed is None else parsed.of.version


async def dir_of(files: CheckpointDir | BlobStore, root: Path) -> CheckpointDir:
    if isinstance(files, CheckpointDir):
        return files
    is_local = isinstance(files, InterposedStore | LateStore)
    return CheckpointDir(files, local_root=root if is_local else None)


def interposed(bench: Bench) -> InterposedStore:
    """The bench's directory, as a store that faults can be put into."""
    return InterposedStore(LocalStore(bench.root))


class LateStore(ForwardingStore):
    """A store that can take a file, say that it did not, and bring it much later: a task that nobody could kill."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.delayed = ""
        self._late: list[tuple[str, bytes, bool]] = []

    async def arrive(self) -> None:
        """What was delayed arrives."""
        for key, data, replaces in self._late:
            if replaces:
                await self._inner.put(key, BytesBody(data))
            else:
                await self._inner.put_if_absent(key, BytesBody(data))
        assert self._late
        self._late.clear()

    async def _delay(self, key: str, body: Body, *, replaces: bool) -> None:
        if self.delayed and self.delayed in key:
            data = b"".join([chunk async for chunk in body.read_chunks()])
            self._late.append((key, data, replaces))
            raise StoreUnavailableError("injected", operation="put", key=key)

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        await self._delay(key, body, replaces=True)
        return await super().put(key, body, ttl_ms=ttl_ms, repeatable=repeatable)

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        await self._delay(key, body, replaces=False)
        return await super().put_if_absent(key, body, ttl_ms=ttl_ms)


class FirstWinsStore(ForwardingStore):
    """A store that says that it has replaced a zip or a changelog, and has not, as a rename may."""

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        if parse_state_name(key) is None:
            return await super().put(key, body, ttl_ms=ttl_ms, repeatable=repeatable)
        outcome = await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        return outcome if isinstance(outcome, Created) else Created(created_at_ms=0)


def rows(store: StateStore, family: str = "default") -> dict[bytes, bytes]:
    """All rows of a family."""
    return dict(store.items(family=family))


def last_load(store: StateStore) -> LoadMetrics:
    """Metrics of the last load, of which there was one."""
    assert store.last_load is not None
    return store.last_load


async def write(
    store: StateStore, version: int, unique_id: UniqueId | None, puts: dict[bytes, bytes], deletes: Sequence[bytes] = ()
) -> Committed:
    """One version on top of another."""
    await store.load(version, unique_id)
    for key in deletes:
        store.delete(key)
    for key, value in puts.items():
        store.put(key, value)
    return await store.commit()


async def write_numbers(store: StateStore, ids: Ids, versions: range, *, maintain_every: int = 0) -> None:
    """Versions that hold their own number and nothing else.

    Args:
        ids: Of the versions so far, by version; ids are set as versions are made.
        versions: To be made, each loaded from the one before it.
        maintain_every: After how many versions to maintain; 0: never.
    """
    for version in versions:
        name = str(version).encode()
        committed = await write(store, version - 1, ids[version - 1], {name: name}, [str(version - 1).encode()])
        assert committed.version == version
        ids[version:] = [committed.unique_id]
        if maintain_every and version % maintain_every == 0:
            await store.maintain()


async def check_numbers(store: StateStore, ids: Ids, versions: Sequence[int]) -> None:
    """Each of these versions holds what `write_numbers` wrote."""
    for version in versions:
        await store.load(version, ids[version], read_only=True)
        name = str(version).encode()
        assert rows(store) == ({name: name} if version else {})
