"""A repository: the public API. Everything else in `engine` is what it is made of."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

from typing_extensions import override

from blobstore.base import BlobStore
from engine.backup.backup import BackupResult, backup_source, plan_backup_dir
from engine.backup.source import BackupSource, WholeDirectory
from engine.clock import Runtime, SystemRuntime
from engine.commit.forget import ForgetReport, forget
from engine.commit.record import ANY
from engine.commit.writer import CommitWriter
from engine.errors import DamagedError, StaleResultError
from engine.local.cache import DigestCache
from engine.progress import NO_PROGRESS, Progress
from engine.records import indexes as index_io
from engine.records.missing import find_missing, key_of
from engine.records.repository import (
    DAY_MS,
    HOUR_MS,
    REFUSED_STORE,
    check_times,
    opened_store,
    read_repository_record,
    write_repository_record,
)
from engine.repository.caring import CaringRepository
from engine.repository.reading import Choice, require_store
from engine.repository.restoring import Restored
from engine.settings import TransferSettings
from index.plan.backup import BackupPlan
from index.plan.commits import Commit
from index.snapshot.contents import blobs_needed
from index.snapshot.model import LineageItem, Scope, UniqueId
from index.snapshot.records import CommitPointer, RepositoryRecord, ScopeLayout, StoreReference

__all__ = ["DAY_MS", "HOUR_MS", "LATEST", "REFUSED_STORE", "Choice", "Repository", "Restored", "require_store"]

Result = TypeVar("Result")

LATEST: Final = "latest"


class Repository(CaringRepository):
    """One repository in one store, open. Use it as an async context manager, or call `close`.

    Example:
        ```python
        async with await Repository.open("file:///backups/state") as repository:
            scope = Scope("flights")
            result = await repository.backup(scope, checkpoint_dir, task="0", store="facts")
            commit = await repository.commit(scope, [result], offsets="2013-08")
            await repository.restore(commit, target_dir, task="0", store="facts")
        ```
    """

    @override
    def __init__(
        self,
        store: BlobStore,
        record: RepositoryRecord,
        *,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Prefer `Repository.open` or `Repository.init`."""
        super().__init__(store, record, settings=settings, runtime=runtime, cache_dir=cache_dir)
        self._writers: dict[Scope, CommitWriter] = {}
        self._indexes = index_io.IndexCache()

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
        cache_dir: Path | None = None,
    ) -> Self:
        """Make a store a repository (design 0002, K1).

        Args:
            store: A URL or an open store.
            ttl_ms: How long an upload lives that no commit takes over; must exceed the longest backup plus commit.
            margin_ms: What must be left of it at a commit, for clocks and slow answers; less than half of `ttl_ms`.
            collection_period_ms: How often `collect` is meant to run.
            cache_dir: As for `open`.

        Requests: a GET, and the record twice, so that a store that would let two writers win is found out (design 0003,
        P2).

        Raises:
            UsageError: The store is a repository already, or the times do not fit together.
            UnsafeStoreError: What would be committed to this store is not safe there. Nothing was written, or it let a
                create replace what was there, and then what stands in the record's place is opened by nobody.
            StoreError: As the store says.
        """
        runtime = runtime or SystemRuntime()
        record = RepositoryRecord(
            id=runtime.unique_id(), ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=collection_period_ms
        )
        check_times(record)
        async with opened_store(store) as opened:
            await write_repository_record(opened, record)
        return cls(opened, record, settings=settings, runtime=runtime, cache_dir=cache_dir)

    @classmethod
    async def open(
        cls,
        store: str | BlobStore,
        *,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: Path | None = None,
    ) -> Self:
        """Open a repository: one GET.

        Args:
            store: A URL or an open store.
            settings: How bytes are moved.
            runtime: Clock and random numbers.
            cache_dir: Where hashes of local files are kept from one process to the next; None keeps them in memory.

        Raises:
            NotFoundError: The store is no repository.
            UnknownFormatError: It was made by a newer tidemark.
            UnsafeStoreError: `init` has refused this store.
            StoreError: As the store says.
        """
        async with opened_store(store) as opened:
            record = await read_repository_record(opened, "open")
        return cls(opened, record, settings=settings, runtime=runtime, cache_dir=cache_dir)

    # ------------------------------------------------------------------ writing

    async def backup(
        self,
        scope: Scope,
        directory: Path,
        *,
        task: str = "0",
        store: str = "default",
        version: int | None = None,
        unique_id: UniqueId | None = None,
        base: StoreReference | Literal["latest"] | None = LATEST,
        lineage: Sequence[LineageItem] | None = None,
        missing: Collection[str] = (),
        check_retained: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> BackupResult:
        """Upload what changed in a directory since the newest commit. Nothing is visible until `commit`.

        Args:
            scope: The job or task that will commit it.
            directory: A RocksDB checkpoint, or any directory that nobody writes to.
            version: The caller's version of this store's state; the base's plus one if not given.
            base: What to diff against; the newest commit's snapshot of this store if not given, None for nothing.
            lineage: The versions that this one grew from, oldest first: Spark's lineage of a state store's version
                (design 0004, R6). If not given, the base and what it grew from; of a state store's directory, nothing.
            missing: Blobs that are known to be missing, besides those that this object has met (`missing_blobs`): files
                with bytes in them are uploaded again, as are all if the base's index is missing (design 0006, M1).
            check_retained: Look for such blobs: a STAT for each that is retained.

        Raises:
            StaleResultError: The base that was given is gone, and the newest commit has another one.
            UnsafeSourceError: The directory is in use, changed meanwhile, or has entries that cannot be kept; or a file
                of which bytes are missing has others here.
            StoreError: As the store says.
        """
        return await self.backup_source(
            scope,
            WholeDirectory(directory),
            task=task,
            store=store,
            version=version,
            unique_id=unique_id,
            base=base,
            lineage=lineage,
            missing=missing,
            check_retained=check_retained,
            progress=progress,
        )

    async def backup_source(
        self,
        scope: Scope,
        source: BackupSource,
        *,
        task: str = "0",
        store: str = "default",
        version: int | None = None,
        unique_id: UniqueId | None = None,
        base: StoreReference | Literal["latest"] | None = LATEST,
        lineage: Sequence[LineageItem] | Callable[[], Sequence[LineageItem]] | None = None,
        missing: Collection[str] = (),
        check_retained: bool = False,
        settings: TransferSettings | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> BackupResult:
        """As `backup`, of what a source says, such as a part of a directory.

        Args:
            scope: The job or task that will commit it.
            source: What is backed up.
            lineage: As for `backup`; or what tells it once the source was looked at.
            settings: How bytes are moved, in place of the repository's own.
        """

        async def back_up(base: StoreReference | None, gone: frozenset[str]) -> BackupResult:
            async with self._digests_of(source) as cache:
                return await backup_source(
                    self.store,
                    scope=scope,
                    task=task,
                    store_name=store,
                    source=source,
                    version=version if version is not None else (base.version + 1 if base else 1),
                    unique_id=unique_id,
                    base=base,
                    repository=self.record,
                    settings=settings or self.settings,
                    runtime=self._runtime,
                    cache=cache,
                    indexes=self._indexes,
                    lineage=lineage,
                    missing=gone.union(missing),
                    check_retained=check_retained,
                    progress=progress,
                )

        return await self._with_base(scope, task, store, base, back_up)

    async def plan_backup(
        self,
        scope: Scope,
        directory: Path,
        *,
        task: str = "0",
        store: str = "default",
        base: StoreReference | Literal["latest"] | None = LATEST,
        check_retained: bool = False,
    ) -> BackupPlan:
        """What `backup` would do; nothing is written. Arguments and errors as there."""

        async def plan(base: StoreReference | None, gone: frozenset[str]) -> BackupPlan:
            async with self._digests.of(directory) as cache:
                return await plan_backup_dir(
                    self.store,
                    directory=directory,
                    base=base,
                    settings=self.settings,
                    cache=cache,
                    missing=gone,
                    check_retained=check_retained,
                )

        return await self._with_base(scope, task, store, base, plan)

    async def commit(
        self,
        scope: Scope,
        results: Sequence[BackupResult],
        *,
        version: int | None = None,
        offsets: str = "",
        layout: ScopeLayout | None = None,
        parent: CommitPointer | Literal["any"] | None = ANY,
        dropped: Collection[tuple[str, str]] = (),
    ) -> Commit:
        """Make backups visible, all or none; see `CommitWriter.commit` for arguments and errors."""
        try:
            return await self._writer(scope).commit(
                results, version=version, offsets=offsets, layout=layout, parent=parent, dropped=dropped
            )
        except DamagedError as error:
            self.missing_blobs.note([key_of(error)])
            await self._note_missing(scope)
            raise

    async def settle(self, newest: Commit) -> None:
        """Make the newest commit permanent, as the next one will do first (design 0002, T2).

        For whoever wants to know beforehand that something of it is missing: then the next backup heals it. Nothing is
        asked if this object has made the commit and knows it to be permanent.

        Raises:
            DamagedError: Something of it is missing; all that is has been noted in `missing_blobs`.
            StoreError: As the store says.
        """
        try:
            await self._writer(newest.scope).settle(newest.pointer)
        except DamagedError:
            await self._note_missing(newest.scope)
            raise

    async def _note_missing(self, scope: Scope) -> None:
        """Look for all that the newest commit misses, once it is known that it misses something."""
        newest = await self.latest(scope)
        for reference in newest.record.stores if newest is not None else ():
            with contextlib.suppress(DamagedError), self.missing_blobs.recording():
                index = await self.read_index(reference.index)
                self.missing_blobs.note(await find_missing(self.store, blobs_needed(index)))

    async def head(self, scope: Scope) -> Commit | None:
        """The newest commit, looked at anew: what the next `commit` of this object builds on."""
        return (await self._writer(scope).head(anew=True)).newest

    async def rewind(self, target: Commit) -> Commit:
        """Make an older commit the newest again, as a new commit (design 0002, C6)."""
        return await self._writer(target.scope).rewind(target)

    async def fork(self, target: Commit, scope: Scope) -> Commit:
        """Begin a new scope with the stores of a commit; no bytes are copied."""
        return await self._writer(scope).fork(target)

    # ------------------------------------------------------------------ care

    async def forget(self, scope: Scope, *, with_names: bool = False, dry_run: bool = False) -> ForgetReport:
        """Close every commit of a job or task for ever; see `engine.commit.forget.forget`."""
        report = await forget(self.store, scope, with_names=with_names, dry_run=dry_run)
        if not dry_run:
            # What its writer remembers is below the boundary, answered or not: the next one begins anew. Where no
            # boundary is known to stand, only this writer can find out what became of its records (design 0002, C3).
            self._writers.pop(scope, None)
        return report

    # ------------------------------------------------------------------ inside

    @contextlib.asynccontextmanager
    async def _digests_of(self, source: BackupSource) -> AsyncIterator[DigestCache]:
        """What is known of the files of a source; of one that will not be there again, nothing."""
        if source.is_lasting:
            async with self._digests.of(source.directory) as cache:
                yield cache
        else:
            yield DigestCache()

    def _writer(self, scope: Scope) -> CommitWriter:
        return self._writers.setdefault(scope, CommitWriter(self.store, self.record, scope, self._runtime))

    async def _with_base(
        self,
        scope: Scope,
        task: str,
        store: str,
        base: StoreReference | Literal["latest"] | None,
        use: Callable[[StoreReference | None, frozenset[str]], Awaitable[Result]],
    ) -> Result:
        """Work that reads the base's index, which no pin protects: a commit and a collection may come before it.

        One that is gone though the newest commit needs it is a gap, and the work is done again without it (M1).
        """
        chosen = await self._newest(scope, task, store) if base == LATEST else base
        try:
            with self.missing_blobs.recording():
                return await use(chosen, self.missing_blobs.keys)
        except DamagedError as error:
            if chosen is None or not index_io.is_missing(error):
                raise
            newest = await self._newest(scope, task, store, anew=True)
            if newest != chosen and base != LATEST:
                raise StaleResultError(
                    "the base is gone, and the newest commit has another one",
                    operation="backup",
                    subject=f"{scope} {task}/{store}",
                ) from error
        return await use(newest, self.missing_blobs.keys)

    async def _newest(self, scope: Scope, task: str, store: str, *, anew: bool = False) -> StoreReference | None:
        newest = (await self._writer(scope).head(anew=anew)).newest
        return newest.store(task, store) if newest else None
