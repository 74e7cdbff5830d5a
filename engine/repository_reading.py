"""The read side of a repository: finds commits, protects them, and brings back what they hold."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypedDict, Unpack

import msgspec

from blobstore.base import BlobStore
from engine import index_io
from engine.clock import Ambient, SystemAmbient
from engine.digest_cache import DigestCaches
from engine.errors import CollectedError, DamagedError, NotFoundError, UsageError
from engine.log_io import list_scopes, load_commits, load_log
from engine.names import list_names, read_name
from engine.pins import PinLease, hold_pin
from engine.progress import NO_PROGRESS, Progress
from engine.restore import OwnerPolicy, RestoreResult, read_index_of, restore_store
from engine.restore_preview import plan_restore_store
from engine.state.compression import Codec
from engine.state.index_files import IndexStateFiles
from engine.state.restore import RestoredState, find_state_commit, restore_state
from engine.transfer_settings import TransferSettings
from index.index_diff import IndexDifference, diff_indexes
from index.keys import encode_component
from index.log import Commit, fits
from index.model import (
    CommitPointer,
    IndexReference,
    NameRecord,
    RepositoryRecord,
    Scope,
    SnapshotIndex,
    StoreReference,
    UniqueId,
)
from index.naming import commit_of_name
from index.restore_plan import RestorePlan

# A reader whose commit is collected before its pin stands chooses again this often.
CHOICES_MAX: Final = 3


class Choice(TypedDict, total=False):
    """The arguments of `Repository.find` that choose a commit."""

    number: int | None
    version: int | None
    unique_id: str | None
    at_ms: int | None
    name: str | None


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """Which commit was restored and how it went."""

    commit: Commit
    result: RestoreResult
    # False: the store denied writing a pin, so that nothing protected the restore from a collection.
    pinned: bool


class ReadingRepository:
    """What of a `Repository` changes nothing in it but pins."""

    def __init__(
        self,
        store: BlobStore,
        record: RepositoryRecord,
        *,
        settings: TransferSettings | None = None,
        ambient: Ambient | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Prefer `Repository.open`; arguments as there."""
        self.store = store
        self.record = record
        self.settings = settings or TransferSettings()
        self._ambient = ambient or SystemAmbient()
        # The id comes from the store: as one component it cannot lead out of the directory.
        self._digests = DigestCaches(cache_dir / encode_component(record.id) if cache_dir is not None else None)

    async def __aenter__(self) -> Self:
        """The repository itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """Release the store."""
        await self.store.close()

    @property
    def cache_error(self) -> OSError | None:
        """Why a digest cache could not be kept. That costs the next run time and nothing else: nothing is raised."""
        return self._digests.error

    async def scopes(self) -> tuple[Scope, ...]:
        """Every job or task that has commits."""
        return await list_scopes(self.store)

    async def latest(self, scope: Scope) -> Commit | None:
        """The newest commit, None if there is none."""
        return (await load_log(self.store, scope)).newest

    async def commits(self, scope: Scope, *, with_named: bool = False) -> tuple[Commit, ...]:
        """Every commit, newest first: one GET for each.

        Args:
            with_named: What only names still hold comes at the end: one LIST more, and a GET for each name.
        """
        commits = tuple(reversed(await load_commits(self.store, scope)))
        if not with_named:
            return commits
        there = {commit.pointer for commit in commits}
        return commits + tuple(commit_of_name(n) for n in await self.names(scope) if n.source not in there)

    async def names(self, scope: Scope) -> tuple[NameRecord, ...]:
        """The names that hold in a scope, sorted: a LIST, and a GET for each name."""
        return await list_names(self.store, scope)

    async def find(
        self,
        scope: Scope,
        *,
        number: int | None = None,
        version: int | None = None,
        unique_id: str | None = None,
        at_ms: int | None = None,
        name: str | None = None,
    ) -> Commit:
        """One commit: the newest that fits everything given; the newest of all if nothing is.

        Args:
            number: Its number in the scope.
            version: The caller's version; with `unique_id` the version of the store that has it.
            unique_id: The id of any of its stores, as in `version_uniqueId`, or the record's write id.
            at_ms: A time by the store's clock: the commit that was the newest then.
            name: A name given to it, and nothing else; it is found even after retention has closed its record.

        Raises:
            NotFoundError: None fits.
            UsageError: A name and something else is given.
        """
        if name is not None:
            if any(other is not None for other in (number, version, unique_id, at_ms)):
                raise UsageError(
                    "a name says it all",
                    operation="find",
                    subject=name,
                    hint="give a name, or a number, version, unique id or time",
                )
            return commit_of_name(await read_name(self.store, scope, name))
        if number is None and version is None and unique_id is None and at_ms is None:
            found = await self.latest(scope)
        else:
            commits = await self.commits(scope)
            found = next(
                (c for c in commits if fits(c, number=number, version=version, unique_id=unique_id, at_ms=at_ms)), None
            )
        if found is None:
            wanted = {"number": number, "version": version, "unique id": unique_id, "time": at_ms}
            text = ", ".join(f"{k} {v}" for k, v in wanted.items() if v is not None) or "any commit"
            raise NotFoundError(f"nothing fits {text}", operation="find", subject=str(scope))
        return found

    @contextlib.asynccontextmanager
    async def pinned(self, commit: Commit, purpose: str = "read") -> AsyncIterator[PinLease]:
        """Keep a commit from being collected while the block runs (design 0002, D5)."""
        async with hold_pin(self.store, self._ambient, commit, purpose=purpose) as lease:
            yield lease

    @contextlib.asynccontextmanager
    async def find_pinned(
        self, scope: Scope, *, purpose: str, **choice: Unpack[Choice]
    ) -> AsyncIterator[tuple[Commit, PinLease]]:
        """`find` and `pinned` in one: a commit that is collected before its pin stands is chosen again (D5).

        Raises:
            NotFoundError: None fits.
            CollectedError: Every choice was collected under our hands.
        """
        async with contextlib.AsyncExitStack() as stack:
            for attempt in range(CHOICES_MAX):
                commit = await self.find(scope, **choice)
                try:
                    lease = await stack.enter_async_context(self.pinned(commit, purpose))
                except CollectedError:
                    if attempt == CHOICES_MAX - 1:
                        raise
                    continue
                yield commit, lease
                return

    async def restore(
        self,
        commit: Commit,
        target: Path,
        *,
        task: str = "0",
        store: str = "default",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        pin: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """Bring one store of a commit back into a directory, whole or not at all.

        Args:
            target: Absent, or empty, or with `replace` any directory: then its files are reused where they fit (I2).
            owners: What to do about the recorded owners.
            pin: Protect the commit meanwhile; False if the caller holds a pin already.

        Raises:
            NotFoundError: The commit has no such store, or was collected meanwhile.
            DamagedError: A blob is missing or altered; the target is as it was.
            TargetError: The target cannot be used.
            StoreError: As the store says; the target is as it was.
        """
        reference = require_store(commit, task, store)
        async with contextlib.AsyncExitStack() as stack:
            if pin:
                await stack.enter_async_context(self.pinned(commit, purpose=f"restore {task}/{store}"))
            return await self.restore_reference(reference, target, owners=owners, replace=replace, progress=progress)

    async def find_and_restore(
        self,
        scope: Scope,
        target: Path,
        *,
        task: str = "0",
        store: str = "default",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        progress: Progress = NO_PROGRESS,
        **choice: Unpack[Choice],
    ) -> Restored:
        """`find` and `restore` in one: should the commit be collected in between, choose again, within a bound (D5).

        Raises:
            As `find` and `restore`.
        """
        overtaken: tuple[CommitPointer, DamagedError] | None = None
        for attempt in range(CHOICES_MAX):
            async with self.find_pinned(scope, purpose=f"restore {task}/{store}", **choice) as (commit, lease):
                if overtaken is not None and overtaken[0] == commit.pointer:
                    raise overtaken[1]
                try:
                    result = await self.restore(
                        commit,
                        target,
                        task=task,
                        store=store,
                        owners=owners,
                        replace=replace,
                        pin=False,
                        progress=progress,
                    )
                    return Restored(commit=commit, result=result, pinned=lease.pinned)
                except DamagedError as error:
                    # Only an unprotected reader may have been overtaken by a collection; otherwise damage is damage.
                    if lease.pinned or attempt == CHOICES_MAX - 1:
                        raise
                    overtaken = commit.pointer, error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def restore_reference(
        self,
        reference: StoreReference,
        target: Path,
        *,
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """As `restore`, for a caller that holds the pin and the reference: no log is read."""
        async with self._digests.of(target) as cache:
            return await restore_store(
                self.store,
                reference=reference,
                target=target,
                settings=self.settings,
                ambient=self._ambient,
                cache=cache,
                owners=owners,
                replace=replace,
                progress=progress,
            )

    async def find_state(
        self, scope: Scope, *, version: int, unique_id: UniqueId | None = None, task: str = "0", store: str = "default"
    ) -> Commit:
        """The commit to restore a version of a Spark state store from: its own, or a later one that still has it.

        One GET for each commit, and one or more for each index that has to be looked into, of at most 8 commits.

        Raises:
            NotFoundError: No commit has it.
            DamagedError: An index is missing or altered.
            StoreError: As the store says.
        """
        commits = await self.commits(scope)
        return await find_state_commit(
            self.store, scope, commits, task=task, store_name=store, version=version, unique_id=unique_id
        )

    @contextlib.asynccontextmanager
    async def state_files(
        self, commit: Commit, *, task: str = "0", store: str = "default"
    ) -> AsyncIterator[IndexStateFiles]:
        """The directory of a Spark state store as a commit has it, for `StateStore.open`; pinned while the block runs.

        ```python
        async with repository.state_files(commit) as files:
            async with await StateStore.open(files, directory) as state:
                await state.load(version, unique_id, read_only=True)
        ```

        One or more GETs for the index; no listing of the state, ever (design 0004, R6).

        Raises:
            NotFoundError: The commit has no such store, or was collected meanwhile.
            DamagedError: The index is missing or altered.
            StoreError: As the store says.
        """
        reference = require_store(commit, task, store)
        async with self.pinned(commit, purpose=f"state {task}/{store}"):
            index, _ = await read_index_of(self.store, reference)
            yield IndexStateFiles(self.store, index, self.settings)

    async def restore_state(
        self,
        commit: Commit,
        target: Path,
        *,
        version: int | None = None,
        unique_id: UniqueId | None = None,
        task: str = "0",
        store: str = "default",
        codec: Codec = "lz4",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        pin: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> RestoredState:
        """Bring back of a Spark state store the files that one version is made of: a directory that Spark can load.

        Args:
            target: As for `restore`.
            version: The one that the commit is of, or an older one that its directory still has; the former if not
                given. `find_state` finds a commit for a version.
            unique_id: The version's; if not given, the one that the commit knows for it.
            codec: Of changelogs, should a lineage have to be read from one: `stateStore.compression.codec`.
            owners: As for `restore`.
            pin: Protect the commit meanwhile; False if the caller holds a pin already.

        Raises:
            VersionMissingError: The directory does not hold the version, or not all that it takes; the error names it.
            LineageError: Its lineage has a gap or does not lead back.
            FormatError: Its snapshot is not what Spark writes, or names a file that is not a name.
            NotFoundError, DamagedError, TargetError, StoreError: As `restore`; the target is as it was.
        """
        reference = require_store(commit, task, store)
        async with contextlib.AsyncExitStack() as stack:
            if pin:
                await stack.enter_async_context(self.pinned(commit, purpose=f"restore {task}/{store}"))
            cache = await stack.enter_async_context(self._digests.of(target))
            return await restore_state(
                self.store,
                reference=reference,
                target=target,
                version=version,
                unique_id=unique_id,
                codec=codec,
                settings=self.settings,
                ambient=self._ambient,
                cache=cache,
                owners=owners,
                replace=replace,
                progress=progress,
            )

    async def plan_restore(
        self,
        reference: StoreReference,
        target: Path,
        *,
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
    ) -> RestorePlan:
        """What `restore_reference` would do; nothing is written. Arguments and errors as there."""
        async with self._digests.of(target) as cache:
            return await plan_restore_store(
                self.store,
                reference=reference,
                target=target,
                settings=self.settings,
                cache=cache,
                owners=owners,
                replace=replace,
            )

    async def read_index(self, reference: IndexReference) -> SnapshotIndex:
        """One snapshot index, checked; deltas are resolved.

        Raises:
            DamagedError: It is missing or altered.
        """
        return await index_io.read_index(self.store, reference)

    async def diff(self, old: StoreReference, new: StoreReference) -> IndexDifference:
        """What changed between two snapshots: two or more GETs, no file is read."""
        a, b = await self.read_index(old.index), await self.read_index(new.index)
        return diff_indexes(a.dir, b.dir)


def require_store(commit: Commit, task: str, store: str) -> StoreReference:
    """The reference of one store of a commit.

    Raises:
        NotFoundError: The commit has no such store.
    """
    reference = commit.store(task, store)
    if reference is None:
        have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8])
        raise NotFoundError(
            f"commit {commit.pointer.number} has no store {task}/{store}",
            operation="find",
            subject=str(commit.scope),
            hint=f"it has {have or 'none'}",
        )
    return reference
