"""Where the files of a state store are: a directory, or a snapshot index of one, which is never listed (0004, R6)."""

import contextlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError
from engine.local.transfer import ByteBudget
from engine.restore.download import download_index
from engine.restore.staging import target_errors
from engine.settings import TransferSettings
from engine.state.checkpoint_dir import READ_BYTES_MAX
from index.errors import VersionMissingError
from index.snapshot.contents import files_of, select_files
from index.snapshot.model import FileIndex, SnapshotIndex
from index.spark.lineage import HeaderNeeded, Lineage, Present, Resolution, present_in_index
from index.spark.names import StateVersion


async def resolve_with(
    ask: Callable[[Present], Resolution | HeaderNeeded],
    present: Present,
    read_header: Callable[[StateVersion], Awaitable[Lineage]],
) -> Resolution:
    """Resolve a version, reading the headers that decide, one after the other (design 0004, R2).

    `ask` is `index.spark.lineage.resolve` or `index.spark.retention.find_base` of what is present.
    """
    while isinstance(answer := ask(present), HeaderNeeded):
        present = present.with_header(answer.changelog, await read_header(answer.changelog))
    return answer


class StateFiles(Protocol):
    """The files of one state store: those of a `CheckpointDir`, or of a snapshot index of one (design 0004, R6).

    Paths are names in its directory, or `SSTs/<name>` and `logs/<name>`.
    """

    @property
    def location(self) -> str:
        """Its name in errors."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether it is a `CheckpointDir`, and not a backup of one."""
        ...

    async def names(self) -> tuple[str, ...]:
        """List the names of the files directly in the directory; none if there is no directory."""
        ...

    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Read a small file.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is larger than `size_bytes_max`, and so not what it has to be.
            StoreError: As the store says.
        """
        ...

    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        """Copy a file to this machine, whole or not at all, and return its size.

        Args:
            path: Of the file.
            target: Its new name; replaced if it is there. Its directory exists.
            size_bytes: What it has to have; None if that is not known.
            size_bytes_max: What it may have; None for any size.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is not what it has to be.
            TargetError: The target cannot be written.
            StoreError: As the store says.
        """
        ...

    def known_lineage(self, of: StateVersion) -> Lineage | None:
        """Return the lineage in the header of this changelog, where that is known without reading it; else None."""
        ...

    async def close(self) -> None:
        """Release what was opened for it."""
        ...


class IndexStateFiles(StateFiles):
    """The files that a snapshot index names, each fetched with the checks and limits of a restore.

    What it is of has to stay protected while this is in use: see `Repository.state_files`. The settings limit all
    fetches together.

    Attributes:
        index: Of the directory of a state store.
        requests: GETs of blobs so far.
    """

    def __init__(self, store: BlobStore, index: SnapshotIndex, settings: TransferSettings) -> None:
        self.index = index
        self.requests = 0
        self._store = store
        self._settings = settings
        self._budget = ByteBudget(settings.memory_bytes_max)
        self._entries = {"/".join(path): (path, entry) for path, entry in files_of(index.dir)}
        self._headers: dict[StateVersion, Lineage] = {}
        # Not of a plain directory, or one of version 0: a request for a version is refused later.
        with contextlib.suppress(VersionMissingError):
            self._headers = present_in_index(index).headers

    @property
    @override
    def location(self) -> str:
        metadata = self.index.metadata
        return f"{metadata.job}/{metadata.task}/{metadata.store}@{metadata.version}_{metadata.unique_id}"

    @property
    @override
    def is_writable(self) -> bool:
        return False

    @override
    async def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.index.dir.files_present)

    @override
    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        size_bytes = self._find(path).metadata.size_bytes
        if size_bytes > size_bytes_max:
            raise self._misfit(path, f"has {size_bytes} bytes, and at most {size_bytes_max} are read")
        with tempfile.TemporaryDirectory(prefix="tidemark-") as scratch:
            target = Path(scratch) / "content"
            await self.fetch(path, target)
            return await run_blocking(target.read_bytes)

    @override
    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        found = self._find(path).metadata.size_bytes
        if size_bytes is not None and found != size_bytes:
            raise self._misfit(path, f"has {found} bytes instead of {size_bytes}")
        if size_bytes_max is not None and found > size_bytes_max:
            raise self._misfit(path, f"has {found} bytes, and at most {size_bytes_max} were expected")
        # Noted in the thread, which makes it even if this is cancelled meanwhile.
        privates: list[tempfile.TemporaryDirectory[str]] = []

        def make_private() -> None:
            privates.append(tempfile.TemporaryDirectory(prefix=".tidemark-", dir=target.parent))

        try:
            with target_errors(target):
                await run_blocking(make_private)
            await self._download(path, Path(privates[0].name), target)
            with target_errors(target):
                await run_blocking(Path(privates[0].name, path).replace, target)
        finally:
            for private in privates:
                await run_blocking(private.cleanup)
        return found

    @override
    def known_lineage(self, of: StateVersion) -> Lineage | None:
        return self._headers.get(of)

    @override
    async def close(self) -> None:
        """Do nothing: the repository closes its store."""

    def _find(self, path: str) -> FileIndex:
        found = self._entries.get(path)
        if found is None:
            raise BlobNotFoundError("is not a file of the snapshot", operation="get", key=f"{self.location}/{path}")
        return found[1]

    async def _download(self, path: str, private: Path, target: Path) -> None:
        """Restore one file into a directory of its own, as if it were all of the snapshot."""
        index = select_files(self.index, [self._entries[path]])
        done = await download_index(self._store, index, private, self._settings, target=target, budget=self._budget)
        self.requests += done.requests

    def _misfit(self, path: str, message: str) -> DamagedError:
        return DamagedError(message, operation="fetch", subject=f"{self.location}/{path}")
