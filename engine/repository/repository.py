"""A repository: the public API, async and blocking. Its methods call functions of the other packages of `engine`."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from blobstore.tracing import traced
from engine.backup.backup import (
    LATEST,
    BackupOptions,
    BackupResult,
    BackupSource,
    WholeDirectory,
    backup_source,
    journal_name,
    plan_backup_source,
)
from engine.blocking import Blocking, Facade, Opening
from engine.collect.backend import DELETE_SHARE_MAX, CollectBackend, CollectOptions
from engine.collect.check import PlanCheck, verify_plan
from engine.collect.collect import collect
from engine.collect.report import CollectReport
from engine.commit.forget import ForgetReport, forget
from engine.commit.record import ANY, LayoutChange
from engine.commit.writer import CommitWriter
from engine.errors import DamagedError, IncompleteError, StaleResultError, bare_message
from engine.follow.follow import FollowStatus, FollowStep, Standby
from engine.inspect.discard import Discarded, discard
from engine.inspect.explain import Explanation, explain
from engine.inspect.history import ENTRIES_MAX, History, read_history
from engine.inspect.verify import Level, VerifyReport, verify, with_logs
from engine.local.digests import DigestCaches
from engine.records.find import (
    Choice,
    MissingBlobs,
    choose_complete,
    commits_with_named,
    find_commit,
    find_missing,
    find_pinned,
    key_of,
    name_complete,
    naming_complete,
    require_store,
)
from engine.records.indexes import is_missing, read_index
from engine.records.journal import UploadJournals
from engine.records.leases import PinLease, give_name, hold_pin, list_names, release_name
from engine.records.log import Noted, ScopeLog, list_scopes, load_log, load_scope
from engine.records.repository import (
    DAY_MS,
    HOUR_MS,
    OpenRepository,
    StoreAddress,
    check_times,
    noting_repository,
    opened_store,
    read_repository_record,
    write_repository_record,
)
from engine.records.roots import read_pins
from engine.repository.rescale import RescaledJob, RescaleOptions, rescale_job
from engine.restore.ranges import SnapshotRanges
from engine.restore.restore import (
    EarlyReading,
    Restored,
    RestoredAll,
    RestoredStore,
    RestoreOptions,
    RestoreResult,
    plan_restore_store,
    read_index_of,
    restore_chosen,
    restore_store,
    restore_stores,
)
from engine.rocksdb.in_place import StoreInPlace
from engine.runtime import NO_PROGRESS, Progress, Runtime, SummedProgress, read_now_ms
from engine.settings import TASKS_AT_ONCE, TransferSettings, share_among
from engine.state.restore import IndexStateFiles, RestoredState, StateRestoreOptions, find_state_commit, restore_state
from engine.text import without_credentials
from index.plan.backup import BackupPlan
from index.plan.commits import Commit, Retention, RetentionPolicy
from index.plan.restore import RestorePlan
from index.snapshot.contents import blobs_needed
from index.snapshot.delta import IndexDifference, diff_indexes
from index.snapshot.keys import INDEXES, encode_component
from index.snapshot.model import (
    CommitPointer,
    IndexReference,
    NameRecord,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    SnapshotIndex,
    StoreReference,
    UniqueId,
    as_scope,
)

Result = TypeVar("Result")
C = TypeVar("C")


def naming_repository(cls: type[C]) -> type[C]:
    """Let every error that leaves a public method that waits say in a note of which repository it is."""

    def named(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(self: "Repository", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as the method's own)
            with noting_repository(self.url):
                return await method(self, *args, **kwargs)

        return call

    for name, method in tuple(vars(cls).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, named(method))
    return cls


@naming_repository
class Repository:
    """One repository in one blob store, open. Use it as an async context manager, or call `close`.

    Attributes:
        opened: What it consists of, as every use case takes it.
        url: Where it was opened, without credentials; empty if it was opened with a blob store.

    Example:
        ```python
        async with await Repository.open("file:///backups/state") as repository:
            result = await repository.backup("flights", checkpoint_dir, task="0", store="facts")
            commit = await repository.commit("flights", [result], offsets="2013-08")
            await repository.restore(commit, target_dir, task="0", store="facts")
        ```
    """

    def __init__(
        self,
        store: BlobStore,
        record: RepositoryRecord,
        *,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        settings = settings or TransferSettings()
        # The id comes from the store: as one component it cannot lead out of the directory.
        digests_dir = Path(cache_dir) / encode_component(record.id) if cache_dir is not None else None
        self.opened = OpenRepository(
            store=store,
            record=record,
            settings=settings,
            runtime=runtime or Runtime(),
            digests=DigestCaches(digests_dir, trust_stat=settings.trust_stat),
            missing_blobs=MissingBlobs(digests_dir),
            journals=UploadJournals(digests_dir),
        )
        self.url = ""
        self._writers: dict[Scope, CommitWriter] = {}
        # This process knows what it has written itself (design 0011, F2).
        self._following = msgspec.structs.replace(self.opened, digests=DigestCaches(trust_stat=True))

    @classmethod
    async def init(
        cls,
        store: str | BlobStore,
        *,
        ttl_ms: int = DAY_MS,
        margin_ms: int = HOUR_MS,
        collection_period_ms: int = DAY_MS,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """Make a blob store a repository (design 0002, K1).

        Args:
            store: A URL or an open blob store.
            ttl_ms: Lifetime of an upload that no commit takes over; must exceed the longest backup plus commit.
            margin_ms: What must be left of it at a commit, for clocks and slow answers; less than half of `ttl_ms`.
            collection_period_ms: How often `collect` is meant to run.

        The rest is as for `open`. Requests: a GET, and the record twice, so that a blob store that would let two
        writers win is found out (design 0003, P2).

        Raises:
            UsageError: The blob store is a repository already, or the times do not fit together.
            UnsafeStoreError: What would be committed to this blob store is not safe there. Nothing was written, or it
                let a create replace what was there, and then nobody opens what was written in the record's place.
        """
        runtime = runtime or Runtime()
        record = RepositoryRecord(
            id=runtime.unique_id(), ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=collection_period_ms
        )
        check_times(record)
        async with opened_store(store) as opened:
            await write_repository_record(opened, record)
        repository = cls(opened, record, settings=settings, runtime=runtime, cache_dir=cache_dir)
        repository.url = without_credentials(store) if isinstance(store, str) else ""
        return repository

    @classmethod
    async def open(
        cls,
        store: str | BlobStore,
        *,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """Open a repository: one GET.

        `cache_dir` is where hashes of local files are kept from one process to the next; None keeps them in memory.

        Raises:
            NotFoundError: The blob store is not a repository.
            UnknownFormatError: It was made by a newer tidemark.
            UnsafeStoreError: `init` has refused this blob store.
        """
        async with opened_store(store) as opened:
            record = await read_repository_record(opened, "open")
        repository = cls(opened, record, settings=settings, runtime=runtime, cache_dir=cache_dir)
        repository.url = without_credentials(store) if isinstance(store, str) else ""
        return repository

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the blob store."""
        await self.store.close()

    @property
    def store(self) -> BlobStore:
        """Where the repository is."""
        return self.opened.store

    @property
    def record(self) -> RepositoryRecord:
        """What everybody who uses the repository agrees on."""
        return self.opened.record

    @property
    def settings(self) -> TransferSettings:
        """How bytes are moved."""
        return self.opened.settings

    @property
    def missing_blobs(self) -> MissingBlobs:
        """What was found missing or altered: the next backup uploads it again (design 0006, M1)."""
        return self.opened.missing_blobs

    # ------------------------------------------------------------------ backup and commit

    @traced("backup")
    async def backup(
        self,
        scope: str | Scope,
        source: str | Path | BackupSource,
        *,
        task: str = "0",
        store: str = "default",
        options: BackupOptions = BackupOptions(),
        progress: Progress = NO_PROGRESS,
    ) -> BackupResult:
        """Upload what changed since the newest commit. Nothing is visible until `commit`, by the job or task `scope`.

        The source is a RocksDB checkpoint, or any directory that nobody writes to; or what reads a part of one; or a
        `LiveRocksDb`, which a process may write to.

        Raises:
            StaleResultError: The base that was given is gone, and the newest commit has another one.
            UnsafeSourceError: The directory is in use, changed meanwhile, or has entries that cannot be kept; or a file
                of which bytes are missing has others here.
        """
        address = StoreAddress(as_scope(scope), task, store)
        found = WholeDirectory(Path(source)) if isinstance(source, str | Path) else source

        async def use(base: StoreReference | None) -> BackupResult:
            opened = self.opened
            if base is None and options.base == LATEST:
                head = await self._writer(scope).head()
                opened = msgspec.structs.replace(opened, journals=opened.journals.since(head.closed_at_ms))
            return await backup_source(opened, found, address, base, options, progress=progress)

        return await self._with_base(address, options, use)

    async def plan_backup(
        self,
        scope: str | Scope,
        source: str | Path | BackupSource,
        *,
        task: str = "0",
        store: str = "default",
        options: BackupOptions = BackupOptions(),
    ) -> BackupPlan:
        """Plan what `backup` would do; nothing is written. Arguments and errors as there."""
        address = StoreAddress(as_scope(scope), task, store)
        found = WholeDirectory(Path(source)) if isinstance(source, str | Path) else source
        return await self._with_base(
            address, options, lambda base: plan_backup_source(self.opened, found, base, options)
        )

    async def backup_many(
        self,
        scope: str | Scope,
        sources: Mapping[str, str | Path | BackupSource],
        *,
        store: str = "default",
        options: BackupOptions = BackupOptions(),
        progress: Progress = NO_PROGRESS,
    ) -> tuple[BackupResult, ...]:
        """Do `backup` for the store of each task, several at once, for one `commit`; `sources` are by task.

        All together stay within the memory and requests of one. The first failure cancels the others: nothing is
        visible, and from the same machine the next call does not send again what was uploaded. Errors as of `backup`.
        """
        parts = SummedProgress(progress)
        at_once, share = share_among(options.settings or self.settings, min(TASKS_AT_ONCE, len(sources)))
        how = msgspec.structs.replace(options, settings=share)

        async def back_up(task: str) -> BackupResult:
            return await self.backup(scope, sources[task], task=task, store=store, options=how, progress=parts.part())

        return tuple(await map_bounded(back_up, sources, in_flight_max=at_once))

    async def _with_base(
        self, address: StoreAddress, options: BackupOptions, use: Callable[[StoreReference | None], Awaitable[Result]]
    ) -> Result:
        # No pin protects the base's index, which the work reads: a commit and a collection may come before it. One that
        # is gone or altered though the newest commit needs it is missing, and the work is done again without it (M1).
        base = await self._newest(address) if options.base == LATEST else options.base
        try:
            with self.missing_blobs.recording():
                return await use(base)
        except DamagedError as error:
            if base is None or not (is_missing(error) or key_of(error).startswith(INDEXES)):
                raise
            newest = await self._newest(address, reload=True)
            if newest != base and options.base != LATEST:
                raise StaleResultError(
                    "the base is gone, and the newest commit has another one", operation="backup", subject=str(address)
                ) from error
        return await use(newest)

    async def _newest(self, address: StoreAddress, *, reload: bool = False) -> StoreReference | None:
        newest = (await self._writer(address.scope).head(reload=reload)).newest
        return newest.store(address.task, address.store) if newest else None

    async def commit(
        self,
        scope: str | Scope,
        results: Sequence[BackupResult],
        *,
        version: int | None = None,
        offsets: str = "",
        layout: ScopeLayout | LayoutChange | None = None,
        parent: CommitPointer | Literal["any"] | None = ANY,
        dropped: Collection[tuple[str, str]] = (),
    ) -> Commit:
        """Make backups visible, all or none; see `CommitWriter.commit` for arguments and errors."""
        try:
            commit = await self._writer(scope).commit(
                results, version=version, offsets=offsets, layout=layout, parent=parent, dropped=dropped
            )
        except DamagedError as error:
            self.missing_blobs.note([key_of(error)])
            await self._note_missing(as_scope(scope))
            raise
        addresses = [StoreAddress(r.scope, r.reference.task, r.reference.store) for r in results]
        await self.opened.journals.forget([journal_name(address) for address in addresses])
        return commit

    async def settle(self, newest: Commit) -> None:
        """Make the newest commit permanent, as the next one will do first (design 0002, T2).

        So a caller knows beforehand that something of it is missing, and the next backup heals it. Nothing is asked if
        this object has made the commit and knows it to be permanent.

        Raises:
            DamagedError: Something of it is missing; all that is has been noted in `missing_blobs`.
        """
        try:
            await self._writer(newest.scope).settle(newest.pointer)
        except DamagedError:
            await self._note_missing(newest.scope)
            raise

    async def _note_missing(self, scope: Scope) -> None:
        newest = await self.latest(scope)
        for reference in newest.record.stores if newest is not None else ():
            with suppress(DamagedError), self.missing_blobs.recording():
                needed = blobs_needed(await self.read_index(reference.index))
                self.missing_blobs.note(await find_missing(self.store, needed))

    async def head(self, scope: str | Scope) -> Commit | None:
        """Load the newest commit again: what the next `commit` of this object builds on."""
        return (await self._writer(scope).head(reload=True)).newest

    async def rewind(self, target: Commit) -> Commit:
        """Make an older commit the newest again, as a new commit (design 0002, C6)."""
        return await self._writer(target.scope).rewind(target)

    async def fork(self, target: Commit, scope: str | Scope) -> Commit:
        """Begin a new scope with the stores of a commit; no bytes are copied."""
        return await self._writer(scope).fork(target)

    async def rescale(
        self, scope: str | Scope, options: RescaleOptions, *, progress: Progress = NO_PROGRESS
    ) -> RescaledJob:
        """Give a job of `StatefulJob` another number of tasks, by one commit of its newest state (design 0010, T).

        Version and offsets stay. Who commits for the job meanwhile is refused, or refuses this.

        Raises:
            NotFoundError: The job has no commit.
            UsageError: The job does not say how its keys are spread, or a split has no key function, or that fails.
            MisplacedKeyError: A key is not in the task where its hash belongs, or is in two tasks.
            PartitionKeyError: The key function returns what does not fit the key columns of the job.
            StoreMergeError: A store cannot be merged or split.
            ConflictError: Another commit was made meanwhile.
            TargetError: The scratch directory cannot be written.
            DamagedError, LeaseExpiredError, CommitUnknownError, StoreError: As `restore`, `backup` and `commit`.
        """
        return await rescale_job(self, as_scope(scope), options, progress)

    async def forget(self, scope: str | Scope, *, with_names: bool = False, dry_run: bool = False) -> ForgetReport:
        """Close every commit of a job or task for ever; see `engine.commit.forget.forget`."""
        report = await forget(self.store, as_scope(scope), with_names=with_names, dry_run=dry_run)
        if not dry_run:
            # What its writer remembers is below the boundary, answered or not: the next one begins without it. Where no
            # boundary is known to be there, only this writer can find out what became of its records (design 0002, C3).
            self._writers.pop(as_scope(scope), None)
        return report

    async def name(self, commit: Commit, name: str) -> NameRecord:
        """Keep a commit under a name until the name is released; see `engine.records.leases.give_name`."""
        return await give_name(self.store, self.record, self.opened.runtime, commit, name)

    async def release_name(self, scope: str | Scope, name: str) -> None:
        """Give up a name; see `engine.records.leases.release_name`."""
        await release_name(self.store, as_scope(scope), name)

    def _writer(self, scope: str | Scope) -> CommitWriter:
        scope = as_scope(scope)
        return self._writers.setdefault(scope, CommitWriter(self.store, self.record, scope, self.opened.runtime))

    # ------------------------------------------------------------------ finding and reading

    async def scopes(self) -> tuple[Scope, ...]:
        """List every job or task that has commits."""
        return await list_scopes(self.store)

    async def latest(self, scope: str | Scope) -> Commit | None:
        """Return the newest commit, None if there is none."""
        return (await load_log(self.store, as_scope(scope))).newest

    async def commits(self, scope: str | Scope, *, with_named: bool = False) -> tuple[Commit, ...]:
        """Return every commit, newest first, and then, if asked for, what only names still hold; a GET for each."""
        log = await self.log(scope)
        return await commits_with_named(self.store, log) if with_named else log.commits[::-1]

    async def log(self, scope: str | Scope) -> ScopeLog:
        """Return the whole log of a scope: its commits, and its records that are not commits."""
        return await load_scope(self.store, as_scope(scope))

    async def history(
        self,
        scope: str | Scope,
        *,
        entries_max: int = ENTRIES_MAX,
        since_ms: int | None = None,
        shares: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> History:
        """Read the newest records of a scope, what each brought and what became of it; see `engine.inspect.history`."""
        store, record = self.store, self.record
        return await read_history(
            store, record, as_scope(scope), entries_max=entries_max, since_ms=since_ms, shares=shares, progress=progress
        )

    async def names(self, scope: str | Scope) -> tuple[NameRecord, ...]:
        """Return the names that hold in a scope, sorted: a LIST, and a GET for each name."""
        return await list_names(self.store, as_scope(scope))

    async def find(self, scope: str | Scope, **choice: Unpack[Choice]) -> Commit:
        """Find the newest commit that fits everything given; see `engine.records.find.find_commit`.

        What can be given are `number`, `version`, `unique_id` and `at_ms`; or `name`, and nothing else.
        """
        return await find_commit(self.store, as_scope(scope), **choice)

    def pinned(self, commit: Commit, purpose: str = "read") -> AbstractAsyncContextManager[PinLease]:
        """Keep a commit from being collected while the block runs (design 0002, D5)."""
        return hold_pin(self.store, self.opened.runtime, commit, purpose=purpose)

    def find_pinned(
        self, scope: str | Scope, *, purpose: str, **choice: Unpack[Choice]
    ) -> AbstractAsyncContextManager[tuple[Commit, PinLease]]:
        """Find a commit and pin it while the block runs; see `engine.records.find.find_pinned`."""
        return find_pinned(self.store, self.opened.runtime, as_scope(scope), purpose=purpose, **choice)

    async def choose_complete(self, scope: str | Scope, **choice: Unpack[Choice]) -> Choice:
        """Choose the same commit, or where something of it is missing the newest one that is whole (M2)."""
        return await choose_complete(self.store, as_scope(scope), choice)

    async def find_state(
        self,
        scope: str | Scope,
        *,
        version: int,
        unique_id: UniqueId | None = None,
        task: str = "0",
        store: str = "default",
    ) -> Commit:
        """Find the commit to restore a version of a Spark state store from: its own, or a later one that still has it.

        See `engine.state.restore.find_state_commit`.
        """
        commits = await self.commits(scope)
        return await find_state_commit(
            self.store, as_scope(scope), commits, task=task, store_name=store, version=version, unique_id=unique_id
        )

    @asynccontextmanager
    async def state_files(
        self, commit: Commit, *, task: str = "0", store: str = "default"
    ) -> AsyncIterator[IndexStateFiles]:
        """Open the directory of a Spark state store as a commit has it, pinned while the block runs.

        ```python
        async with repository.state_files(commit) as files:
            async with await StateStore.open(files, directory) as state:
                await state.load(version, unique_id, read_only=True)
        ```

        One or more GETs for the index; no listing of the state, ever (design 0004, R6).

        A NotFoundError says that the commit has no such store, or was collected meanwhile.
        """
        async with self._pinned_index(commit, task, store, "state") as index:
            yield IndexStateFiles(self.store, index, self.settings)

    @asynccontextmanager
    async def store_in_place(
        self, commit: Commit, *, task: str = "0", store: str = "default"
    ) -> AsyncIterator[StoreInPlace]:
        """Open a RocksDB store of a commit for reading in place, pinned while the block runs (design 0013).

        ```python
        async with repository.store_in_place(commit) as rows:
            value = await rows.get(b"user-17")
        ```

        Nothing is restored: each read fetches the blocks that it takes. Errors are those of `StoreInPlace.open`, and a
        NotFoundError says that the commit has no such store, or was collected meanwhile.
        """
        async with self._pinned_index(commit, task, store, "read") as index:
            yield await StoreInPlace.open(SnapshotRanges(self.store, index))

    @asynccontextmanager
    async def _pinned_index(self, commit: Commit, task: str, store: str, what: str) -> AsyncIterator[SnapshotIndex]:
        reference = require_store(commit, task, store)
        async with self.pinned(commit, purpose=f"{what} {task}/{store}"):
            index, _ = await read_index_of(self.store, reference)
            yield index

    async def read_index(self, reference: IndexReference) -> SnapshotIndex:
        """Read a snapshot index, checked, with deltas resolved; a `DamagedError` if it is missing or altered."""
        return await read_index(self.store, reference)

    async def diff(self, old: StoreReference, new: StoreReference) -> IndexDifference:
        """Compare two snapshots: two or more GETs, no file is read."""
        a, b = await self.read_index(old.index), await self.read_index(new.index)
        return diff_indexes(a.dir, b.dir)

    # ------------------------------------------------------------------ restore

    @traced("restore")
    async def restore(
        self,
        commit: Commit,
        target: str | Path,
        *,
        task: str = "0",
        store: str = "default",
        options: RestoreOptions = RestoreOptions(),
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """Restore one store of a commit to a directory, whole or not at all. The commit is pinned meanwhile.

        The target is absent, or empty, or with `replace` any directory: files with the right hash are reused (I2).
        After any error it is as it was.

        Raises:
            UsageError: A pattern is empty.
            NotFoundError: The commit has no such store or was collected meanwhile, or a pattern matches nothing.
            IncompleteError, DamagedError: A blob or an index is missing, or a blob is altered.
            TargetError: The target cannot be used.
        """
        address, reference = StoreAddress(commit.scope, task, store), require_store(commit, task, store)
        async with self._naming_complete(commit.scope), EarlyReading(self.opened, address, options) as early:
            early.begin(commit)
            async with self.pinned(commit, purpose=f"restore {task}/{store}"):
                return await restore_store(
                    self.opened, reference, Path(target), options, progress, reading=early.reading
                )

    @traced("restore")
    async def find_and_restore(
        self,
        scope: str | Scope,
        target: str | Path,
        *,
        task: str = "0",
        store: str = "default",
        options: RestoreOptions = RestoreOptions(),
        or_newest_complete: bool = False,
        progress: Progress = NO_PROGRESS,
        **choice: Unpack[Choice],
    ) -> Restored:
        """Find and restore in one: should the commit be collected in between, choose again, within a bound (D5).

        With `or_newest_complete`, where something of the commit is missing or altered, the newest one of the scope that
        can be restored is, if there is one (design 0006, M2). All else as `find` and `restore`.
        """
        address = StoreAddress(as_scope(scope), task, store)
        because, damaged = "", set[str]()
        while True:
            try:
                async with naming_complete(self.store, lambda: self.commits(scope), damaged=damaged):
                    restored = await restore_chosen(
                        self.opened, address, Path(target), choice, options, progress=progress
                    )
                    return msgspec.structs.replace(restored, instead_because=because)
            except IncompleteError as error:
                if not or_newest_complete or error.complete is None or key_of(error) in damaged:
                    raise
                damaged.add(key_of(error))
                because = because or f"{error.subject}: {bare_message(error)}"
                choice = Choice(number=error.complete.pointer.number)

    async def restore_reference(
        self,
        reference: StoreReference,
        target: str | Path,
        options: RestoreOptions = RestoreOptions(),
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """As `restore`, for a caller that holds the pin and the reference: no log is read."""
        return await restore_store(self.opened, reference, Path(target), options, progress)

    async def restore_all(
        self,
        of: Commit | Scope | str,
        target: str | Path,
        *,
        options: RestoreOptions = RestoreOptions(),
        progress: Progress = NO_PROGRESS,
        **choice: Unpack[Choice],
    ) -> RestoredAll:
        """Restore every store of a commit to `<target>/<task>/<store>`, several at once, the commit pinned.

        Of a job or task it is the newest commit, or the one of the choice, as for `find`. Each store is restored whole
        or not at all; after a failure the others go on, and then the first is raised. Errors as of `restore`.
        """
        async with AsyncExitStack() as stack:
            if isinstance(of, Commit):
                commit, lease = of, await stack.enter_async_context(self.pinned(of, purpose="restore all"))
            else:
                found = self.find_pinned(of, purpose="restore all", **choice)
                commit, lease = await stack.enter_async_context(found)
            async with self._naming_complete(commit.scope):
                stores = await self.restore_stores(commit, target, options, progress)
                for failure in [one.failure for one in stores if one.failure is not None][:1]:
                    restored = sum(one.failure is None for one in stores)
                    failure.add_note(f"{restored} of {len(stores)} stores were restored below {target}")
                    raise failure
        return RestoredAll(commit=commit, stores=stores, pinned=lease.pinned)

    async def restore_stores(
        self,
        commit: Commit,
        target: str | Path,
        options: RestoreOptions = RestoreOptions(),
        progress: Progress = NO_PROGRESS,
        *,
        replaced: Collection[Path] = (),
    ) -> tuple[RestoredStore, ...]:
        """As `restore_all`, for a caller that holds the pin and looks at each store's failure itself."""
        return await restore_stores(self.opened, commit, Path(target), options, progress, replaced=replaced)

    async def restore_state(
        self,
        commit: Commit,
        target: str | Path,
        *,
        task: str = "0",
        store: str = "default",
        options: StateRestoreOptions = StateRestoreOptions(),
        progress: Progress = NO_PROGRESS,
    ) -> RestoredState:
        """Restore of a Spark state store the files that one version is made of: a directory that Spark can load.

        The version may be older than the commit's if its directory still has it; `find_state` finds a commit for it.

        Raises:
            VersionMissingError, LineageError: The directory does not hold the version, or not all that it takes.
            FormatError: Its snapshot is not what Spark writes. The others are as in `restore`.
        """
        reference = require_store(commit, task, store)
        async with self.pinned(commit, purpose=f"restore {task}/{store}"):
            return await restore_state(self.opened, reference, Path(target), options, progress)

    async def plan_restore(
        self, reference: StoreReference, target: str | Path, options: RestoreOptions = RestoreOptions()
    ) -> RestorePlan:
        """Plan what `restore_reference` would do; nothing is written. Arguments and errors as there."""
        return await plan_restore_store(self.opened, reference, Path(target), options)

    async def name_complete(self, scope: str | Scope, error: DamagedError) -> DamagedError:
        """Make an error of `restore_reference` say which commit is whole, if something is missing (M2)."""
        return await name_complete(error, self.store, lambda: self.commits(scope))

    def _naming_complete(self, scope: Scope) -> AbstractAsyncContextManager[None]:
        return naming_complete(self.store, lambda: self.commits(scope))

    # ------------------------------------------------------------------ following

    async def follow(
        self,
        scope: str | Scope,
        directory: str | Path,
        *,
        task: str | None = None,
        store: str | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> FollowStep:
        """Bring a directory to the newest commit of a job or task, once: a follower calls this again and again.

        Only new files are fetched. At every moment the path leads to a whole directory of one commit, where the file
        system can exchange two names, and after any error to what it was (design 0011, F1 to F5).

        Args:
            scope: Whose commits.
            directory: Absent, empty, or what an earlier call with the same arguments has made.
            task: Only its stores. None: of all tasks.
            store: Only stores of this name. None: of all names. With `task`, the directory is that store's; without one
                of the two it has `TASK/STORE` for each store.

        Requests: one LIST and one GET while nothing is new; then as `find_and_restore`.

        Raises:
            NotFoundError: There is no commit, or it has no such store.
            PromotedError: A writer has claimed the directory.
            TargetBusyError: Another follower is at work.
            TargetError: The directory has content that is not a follower's, is in use, or cannot be written.
            DamagedError: Something of the newest commit is missing or altered.
        """
        return await Standby(self._following, as_scope(scope), Path(directory), task, store).follow(progress)

    async def follow_status(
        self, scope: str | Scope, directory: str | Path, *, task: str | None = None, store: str | None = None
    ) -> FollowStatus:
        """Read which commit a directory is of, and how far it is behind (design 0011, F11). Arguments as of `follow`.

        Nothing is written. Errors as of `follow`, but for promoted directories and damage: of a commit that cannot be
        read the lag is all bytes of its stores.
        """
        return await Standby(self._following, as_scope(scope), Path(directory), task, store).status()

    async def promote(
        self,
        scope: str | Scope,
        directory: str | Path,
        *,
        task: str | None = None,
        store: str | None = None,
        catch_up: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> FollowStatus:
        """Claim a directory for a writer: no follower touches it any more (design 0011, F6 to F10).

        Returns the exact commit that the writer goes on from, and the lag just before the claim. With `catch_up` the
        newest commit is brought there first, and a step of another process is waited for. Arguments and errors as of
        `follow`; a PromotedError says that somebody else was first.
        """
        return await Standby(self._following, as_scope(scope), Path(directory), task, store).promote(
            progress, catch_up=catch_up
        )

    # ------------------------------------------------------------------ collection and checks

    async def collect(
        self,
        retention: Retention | RetentionPolicy,
        *,
        dry_run: bool = False,
        delete_share_max: float = DELETE_SHARE_MAX,
        plan_to: BlobStore | None = None,
        backend: CollectBackend | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> CollectReport:
        """Delete what nothing keeps; see `engine.collect.collect`."""
        return await collect(
            self.store,
            self.record,
            retention,
            CollectOptions(dry_run=dry_run, delete_share_max=delete_share_max, plan_to=plan_to),
            backend=backend,
            runtime=self.opened.runtime,
            progress=progress,
        )

    async def explain(self, key: str, retention: Retention | RetentionPolicy) -> Explanation:
        """Find what leads to a key, and what a collection would do with it; see `engine.inspect.explain.explain`."""
        return await explain(self.store, self.record, retention, key)

    async def discard(self, key: str, *, dry_run: bool = False) -> Discarded:
        """Remove one object that cannot be read; see `engine.inspect.discard.discard`."""
        return await discard(self.store, key, dry_run=dry_run)

    async def verify_plan(self, plan: BlobStore, *, meant: Callable[[int], RetentionPolicy] | None = None) -> PlanCheck:
        """Check the plan of a collection by deriving it another way; see `engine.collect.check.verify_plan`."""
        return await verify_plan(self.store, self.record, plan, meant=meant)

    async def verify(
        self,
        commits: Sequence[Commit] | None = None,
        *,
        scope: str | Scope | None = None,
        level: Level = Level.EXISTENCE,
        sample: float = 1.0,
        seed: int = 0,
        heal: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> VerifyReport:
        """Check commits, or all of a scope or of the repository with names and logs; see `engine.inspect.verify`.

        Where damage is found and commits were collected meanwhile, those that are left are checked again: what a
        collection took is not damage.
        """
        logs: tuple[ScopeLog, ...] = ()
        noted = Noted()
        if commits is None:
            scopes = (as_scope(scope),) if scope is not None else await self.scopes()
            logs = tuple([await self.log(scope) for scope in scopes])
            commits = [commit for log in logs for commit in await commits_with_named(self.store, log, noted)]
            # Whose a damaged pin is nobody can say: it stops the collection of every job.
            await read_pins(self.store, self.record, await read_now_ms(self.store), noted)
        while True:
            report = await verify(
                self.store, commits, level=level, sample=sample, seed=seed, heal=heal, progress=progress
            )
            if not report.damaged:
                break
            self.missing_blobs.note(p.key for p in report.problems if p.kind.is_damage)
            everything = [c for scope in await self.scopes() for c in await self.commits(scope, with_named=True)]
            still_open = {(c.scope, c.pointer) for c in everything}
            left = [c for c in commits if (c.scope, c.pointer) in still_open]
            if len(left) == len(commits):
                break
            commits = left
        return with_logs(report, logs, noted.unreadable)


class SyncRepository(Facade[Repository]):
    """The methods of `Repository`, blocking, for callers without an event loop; a context manager, or call `close`."""

    open = Opening(Repository.open)
    init = Opening(Repository.init)

    @property
    def record(self) -> RepositoryRecord:
        """What everybody who uses the repository agrees on."""
        return self.asynchronous.record

    @contextmanager
    def find_pinned(
        self, scope: str | Scope, *, purpose: str, **choice: Unpack[Choice]
    ) -> Iterator[tuple[Commit, PinLease]]:
        """As `Repository.find_pinned`."""
        with self.inside(self.asynchronous.find_pinned(scope, purpose=purpose, **choice)) as found:
            yield found

    @contextmanager
    def pinned(self, commit: Commit, purpose: str = "read") -> Iterator[PinLease]:
        """As `Repository.pinned`."""
        with self.inside(self.asynchronous.pinned(commit, purpose)) as lease:
            yield lease

    backup = Blocking(Repository.backup)
    backup_many = Blocking(Repository.backup_many)
    plan_backup = Blocking(Repository.plan_backup)
    commit = Blocking(Repository.commit)
    settle = Blocking(Repository.settle)
    rewind = Blocking(Repository.rewind)
    rescale = Blocking(Repository.rescale)
    fork = Blocking(Repository.fork)
    name = Blocking(Repository.name)
    release_name = Blocking(Repository.release_name)
    scopes = Blocking(Repository.scopes)
    latest = Blocking(Repository.latest)
    commits = Blocking(Repository.commits)
    log = Blocking(Repository.log)
    history = Blocking(Repository.history)
    names = Blocking(Repository.names)
    find = Blocking(Repository.find)
    choose_complete = Blocking(Repository.choose_complete)
    name_complete = Blocking(Repository.name_complete)
    find_and_restore = Blocking(Repository.find_and_restore)
    restore = Blocking(Repository.restore)
    restore_all = Blocking(Repository.restore_all)
    restore_stores = Blocking(Repository.restore_stores)
    restore_reference = Blocking(Repository.restore_reference)
    follow = Blocking(Repository.follow)
    follow_status = Blocking(Repository.follow_status)
    promote = Blocking(Repository.promote)
    find_state = Blocking(Repository.find_state)
    restore_state = Blocking(Repository.restore_state)
    plan_restore = Blocking(Repository.plan_restore)
    read_index = Blocking(Repository.read_index)
    diff = Blocking(Repository.diff)
    forget = Blocking(Repository.forget)
    discard = Blocking(Repository.discard)
    collect = Blocking(Repository.collect)
    explain = Blocking(Repository.explain)
    verify_plan = Blocking(Repository.verify_plan)
    verify = Blocking(Repository.verify)
