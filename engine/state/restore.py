"""A Spark state store in a repository: the files of its snapshot index, and one version restored (design 0004, R6).

An index is never listed; what is restored is in Spark's format.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import ByteBudget, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError, NotFoundError
from engine.local.scratch import scratch_dir
from engine.records.repository import OpenRepository
from engine.restore.download import download_index
from engine.restore.ranges import SnapshotRanges
from engine.restore.restore import RestoreResult, TargetOptions, read_index_of, staged_restore
from engine.restore.staging import target_errors
from engine.runtime import NO_PROGRESS, Progress
from engine.settings import TransferSettings
from engine.state.checkpoint_dir import READ_BYTES_MAX
from engine.state.compression import Codec
from engine.state.files import StateFileManager
from engine.state.settings import StateStoreSettings
from engine.state.zips import ZIP_BYTES_MAX, read_state_zip
from index.display import DisplayMixin
from index.errors import LineageError, VersionMissingError
from index.plan.commits import Commit
from index.snapshot.contents import files_of, select_files
from index.snapshot.model import FileIndex, Scope, SnapshotIndex, StoreReference, UniqueId
from index.spark.lineage import Lineage, Resolution, present_in_index, resolve, target_in_index
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion, snapshot_name
from index.spark.retention import select_state_files

# The most indexes that are read of commits after a version, whose directories may still hold it.
INDEXES_READ_MAX: Final = 8


class IndexStateFiles:
    """The files that a snapshot index names as `StateFiles`, each fetched with the checks and limits of a restore.

    What it is of has to stay protected while this is in use: see `Repository.state_files`. The settings limit all
    fetches together.
    """

    def __init__(self, store: BlobStore, index: SnapshotIndex, settings: TransferSettings) -> None:
        self.index = index
        self._ranges = SnapshotRanges(store, index)
        self.location = self._ranges.location
        # GETs of blobs so far, and the files that they brought; parts of files are not among them.
        self.requests = 0
        self.bytes_fetched = 0
        self._store = store
        self._settings = settings
        self._budget = ByteBudget(settings.memory_bytes_max)
        self._headers: dict[StateVersion, Lineage] = {}
        # Not of a plain directory, or one of version 0: a request for a version is refused later.
        with contextlib.suppress(VersionMissingError):
            self._headers = present_in_index(index).headers

    async def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.index.dir.files_present)

    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        size_bytes = self._find(path).metadata.size_bytes
        if size_bytes > size_bytes_max:
            raise self._misfit(path, f"has {size_bytes} bytes, and at most {size_bytes_max} are read")
        async with scratch_dir() as scratch:
            target = scratch / "content"
            await self.fetch(path, target)
            return await run_blocking(target.read_bytes)

    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        found = self._find(path).metadata.size_bytes
        if size_bytes is not None and found != size_bytes:
            raise self._misfit(path, f"has {found} bytes instead of {size_bytes}")
        if size_bytes_max is not None and found > size_bytes_max:
            raise self._misfit(path, f"has {found} bytes, and at most {size_bytes_max} were expected")
        async with AsyncExitStack() as resources:
            with target_errors(target):
                own = await resources.enter_async_context(scratch_dir(target.parent, ".tidemark-"))
            # One file into a directory of its own, as if it were all of the snapshot.
            index = select_files(self.index, [self._ranges.entries[path]])
            done = await download_index(self._store, index, own, self._settings, target=target, budget=self._budget)
            self.requests += done.requests
            with target_errors(target):
                await run_blocking((own / path).replace, target)
        self.bytes_fetched += found
        return found

    async def read_range(self, path: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        self._find(path)
        return await self._ranges.read(path, start, size_bytes, fresh=fresh)

    def known_lineage(self, of: StateVersion) -> Lineage | None:
        return self._headers.get(of)

    async def close(self) -> None:
        """Do nothing: the repository closes its store."""

    def _find(self, path: str) -> FileIndex:
        found = self._ranges.entries.get(path)
        if found is None:
            raise BlobNotFoundError("is not a file of the snapshot", operation="get", key=f"{self.location}/{path}")
        return found[1]

    def _misfit(self, path: str, message: str) -> DamagedError:
        return DamagedError(message, operation="fetch", subject=f"{self.location}/{path}")


class RestoredState(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which version was restored, from which files, and how it went."""

    resolution: Resolution
    result: RestoreResult


class ChosenState(msgspec.Struct, frozen=True, kw_only=True):
    """What a version is made of, and the snapshot index reduced to its files."""

    resolution: Resolution
    index: SnapshotIndex
    # GETs that it took to know.
    requests: int


class StateRestoreOptions(TargetOptions, frozen=True, kw_only=True):
    """Which version of a state store is restored, and how."""

    # The snapshot's own if not given.
    version: int | None = None
    # The version's; None: the one that the index knows for it, and else none.
    unique_id: UniqueId | None = None
    # Of changelogs, should the header of one have to be read: `stateStore.compression.codec`.
    codec: Codec = "lz4"


async def choose_state(
    repository: OpenRepository, reference: StoreReference, options: StateRestoreOptions
) -> ChosenState:
    """Choose what `restore_state` would bring back. Arguments and errors as there."""
    index, requests = await read_index_of(repository.store, reference, repository.pace)
    files = IndexStateFiles(repository.store, index, repository.settings)
    version = index.metadata.version if options.version is None else options.version
    found = options.unique_id if options.unique_id is not None else _known_id(index, version)
    unique_id = target_in_index(version, found, index)
    manager = StateFileManager(files, StateStoreSettings(codec=options.codec))
    resolution = await manager.resolve(version, unique_id)
    selected = await _select(files, resolution)
    return ChosenState(resolution=resolution, index=selected, requests=requests + files.requests)


async def restore_state(
    repository: OpenRepository,
    reference: StoreReference,
    target: Path,
    options: StateRestoreOptions = StateRestoreOptions(),
    progress: Progress = NO_PROGRESS,
) -> RestoredState:
    """Restore the files that one version is made of, and nothing else, of the directory that a commit has.

    Requests: those of a restore of these files; one GET more for each changelog whose header has to be read, which is
    none if the index has the version's lineage.

    Raises:
        VersionMissingError, LineageError: The directory does not hold the version, or not all that it takes.
        DamagedError, FormatError: The snapshot is damaged or hostile. The others are as in a restore.
    """
    with repository.missing_blobs.recording():
        async with staged_restore(repository, target, options, progress) as staged:
            chosen = await choose_state(repository, reference, options)
            await staged.download(chosen.index, requests=chosen.requests)
            return RestoredState(resolution=chosen.resolution, result=await staged.publish())


async def find_state_commit(
    store: BlobStore,
    scope: Scope,
    commits: Sequence[Commit],
    *,
    task: str,
    store_name: str,
    version: int,
    unique_id: UniqueId | None,
) -> Commit:
    """Find the commit to restore a version of a state store from; without a unique id, of whatever id.

    That is the newest one whose backup of the store is of the version; else the oldest of those after it whose backup
    still has all that it takes. Requests: none if a commit is of the version; else one GET, or a few with deltas, for
    each index that is read. The commits are newest first; errors name the scope.

    Raises:
        NotFoundError: None of them has it, or of the first `INDEXES_READ_MAX` after it.
        DamagedError, StoreError: An index is missing or altered; as the store says.
    """
    candidates = [(c, r) for c in commits if (r := c.store(task, store_name)) is not None]
    for commit, reference in candidates:
        if reference.version == version and unique_id in {None, reference.unique_id}:
            return commit
    later = {r.index: (c, r) for c, r in candidates if r.version > version}  # of equal ones, the oldest
    for commit, reference in list(later.values())[::-1][:INDEXES_READ_MAX]:
        index, _ = await read_index_of(store, reference)
        found = unique_id if unique_id is not None else _known_id(index, version)
        with contextlib.suppress(VersionMissingError, LineageError):
            resolve(version, target_in_index(version, found, index), present_in_index(index))
            return commit
    wanted = str(StateVersion(version, unique_id))
    reason = f"no commit has version {wanted} of {task}/{store_name}"
    hint = "it was never backed up, or was collected since; `tidemark list` shows what there is"
    raise NotFoundError(reason, operation="find", subject=str(scope), hint=hint)


def _known_id(index: SnapshotIndex, version: int) -> UniqueId | None:
    metadata = index.metadata
    if version == metadata.version:
        return metadata.unique_id
    return next((item.unique_id for item in metadata.lineage if item.version == version), None)


async def _select(files: IndexStateFiles, resolution: Resolution) -> SnapshotIndex:
    present = dict(files_of(files.index.dir))
    metadata: StateMetadata | None = None
    if resolution.rocksdb_snapshot is not None:
        name = snapshot_name(resolution.rocksdb_snapshot)
        data = await files.read(name, size_bytes_max=ZIP_BYTES_MAX)
        metadata = (await run_blocking(read_state_zip, data, subject=f"{files.location}/{name}")).metadata
        # It has been fetched and verified: no need to do so again.
        present[name,] = msgspec.structs.replace(present[name,], inline=data, blobs=())
    return select_files(files.index, select_state_files(resolution, metadata, present).items())
