"""A repository: the public API. Everything else in `engine` is what it is made of."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypedDict, TypeVar, Unpack

import msgspec

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.opening import open_store
from engine import index_io
from engine.backup import BackupResult, backup_dir, plan_backup_dir
from engine.clock import Ambient, SystemAmbient
from engine.collect import CollectReport, Hands, collect
from engine.commit import CommitWriter
from engine.commit_record import ANY
from engine.digest_cache import DigestCaches
from engine.errors import (
    CollectedError,
    DamagedError,
    NotFoundError,
    StaleResultError,
    UnsafeStoreError,
    UsageError,
)
from engine.log_io import list_scopes, load_commits, load_log, read_record
from engine.names import list_names, read_name
from engine.naming import give_name, release_name
from engine.pins import PinLease, hold_pin
from engine.progress import NO_PROGRESS, Progress
from engine.restore import OwnerPolicy, RestoreResult, restore_store
from engine.restore_preview import plan_restore_store
from engine.store_checks import check_commits
from engine.transfer_settings import TransferSettings
from engine.verify import Level, VerifyReport, verify
from index.backup_plan import BackupPlan
from index.codec import decode_repository, encode_record
from index.index_diff import IndexDifference, diff_indexes
from index.keys import REPOSITORY, encode_component
from index.log import Commit, fits
from index.model import (
    CommitPointer,
    IndexReference,
    NameRecord,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    SnapshotIndex,
    StoreReference,
    UniqueId,
)
from index.naming import commit_of_name
from index.restore_plan import RestorePlan
from index.retention import Retention

Result = TypeVar("Result")

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
# A store that deletes by itself must leave a collector time: at least this, and three collection periods (T3).
BACKSTOP_MS_MIN: Final = 7 * DAY_MS

LATEST: Final = "latest"
# A reader whose commit is collected before its pin stands chooses again this often.
CHOICES_MAX: Final = 3
# What stands in the place of the repository record where `init` found that the store lets a create replace what is
# there: nobody opens it, and whoever looks at the object can read why.
REFUSED_STORE: Final = (
    b"tidemark init refused this store: a create-if-absent replaced what was there already, so two writers could both\n"
    b"win. Run `tidemark doctor`. Once the store is right, delete this object and run `tidemark init` again.\n"
)


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


class Repository:
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

    def __init__(
        self,
        store: BlobStore,
        record: RepositoryRecord,
        *,
        settings: TransferSettings | None = None,
        ambient: Ambient | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Prefer `Repository.open` or `Repository.init`."""
        self.store = store
        self.record = record
        self.settings = settings or TransferSettings()
        self._ambient = ambient or SystemAmbient()
        self._writers: dict[Scope, CommitWriter] = {}
        self._indexes = index_io.IndexCache()
        # The id comes from the store: as one component it cannot lead out of the directory.
        self._digests = DigestCaches(cache_dir / encode_component(record.id) if cache_dir is not None else None)

    @classmethod
    async def init(
        cls,
        store: str | BlobStore,
        *,
        ttl_ms: int = DAY_MS,
        margin_ms: int = HOUR_MS,
        collection_period_ms: int = DAY_MS,
        settings: TransferSettings | None = None,
        ambient: Ambient | None = None,
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
        if not 0 < margin_ms * 2 < ttl_ms or collection_period_ms <= 0:
            raise UsageError(
                f"ttl {ttl_ms} ms, margin {margin_ms} ms and collection period {collection_period_ms} ms do not fit",
                operation="init",
                hint="all are positive, and the margin is less than half of the TTL",
            )
        async with _opened(store) as opened:
            await _check_no_repository(opened)
            check_commits(opened, "init")
            if margin_ms <= opened.capabilities.created_late_ms:
                raise UsageError(
                    f"a margin of {margin_ms} ms is within the error of the store's times",
                    operation="init",
                    hint=f"use more than {opened.capabilities.created_late_ms} ms (design 0003, C3)",
                )
            if opened.capabilities.enforces_ttl and ttl_ms < max(BACKSTOP_MS_MIN, 3 * collection_period_ms):
                raise UsageError(
                    "the store deletes expired blobs by itself: the TTL is too short for that",
                    operation="init",
                    hint="use at least 7 days and three collection periods (design 0002, T3)",
                )
            ambient = ambient or SystemAmbient()
            record = RepositoryRecord(
                id=ambient.unique_id(), ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=collection_period_ms
            )
            match await opened.put_if_absent(REPOSITORY, BytesBody(encode_record(record))):
                case Created():
                    await _check_refuses_a_second(opened)
                case Unknown(reason=reason):
                    raise StoreUnavailableError(reason, operation="init", key=REPOSITORY)
                case Lost():
                    if (await _read_record(opened, "init")).id != record.id:
                        raise _is_repository()
        return cls(opened, record, settings=settings, ambient=ambient, cache_dir=cache_dir)

    @classmethod
    async def open(
        cls,
        store: str | BlobStore,
        *,
        settings: TransferSettings | None = None,
        ambient: Ambient | None = None,
        cache_dir: Path | None = None,
    ) -> Self:
        """Open a repository: one GET.

        Args:
            store: A URL or an open store.
            settings: How bytes are moved.
            ambient: Clock and chance.
            cache_dir: Where hashes of local files are kept from one process to the next; None keeps them in memory.

        Raises:
            NotFoundError: The store is no repository.
            UnknownFormatError: It was made by a newer tidemark.
            UnsafeStoreError: `init` has refused this store.
            StoreError: As the store says.
        """
        async with _opened(store) as opened:
            record = await _read_record(opened, "open")
        return cls(opened, record, settings=settings, ambient=ambient, cache_dir=cache_dir)

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
        progress: Progress = NO_PROGRESS,
    ) -> BackupResult:
        """Upload what changed in a directory since the newest commit. Nothing is visible until `commit`.

        Args:
            scope: The job or task that will commit it.
            directory: A RocksDB checkpoint, or any directory that nobody writes to.
            version: The caller's version of this store's state; the base's plus one if not given.
            base: What to diff against; the newest commit's snapshot of this store if not given, None for nothing.

        Raises:
            StaleResultError: The base that was given is gone, and the newest commit has another one.
            UnsafeSourceError: The directory is in use, changed meanwhile, or has entries that cannot be kept.
            DamagedError: The base's index is missing or altered.
            StoreError: As the store says.
        """

        async def back_up(base: StoreReference | None) -> BackupResult:
            async with self._digests.of(directory) as cache:
                return await backup_dir(
                    self.store,
                    scope=scope,
                    task=task,
                    store_name=store,
                    directory=directory,
                    version=version if version is not None else (base.version + 1 if base else 1),
                    unique_id=unique_id,
                    base=base,
                    repository=self.record,
                    settings=self.settings,
                    ambient=self._ambient,
                    cache=cache,
                    indexes=self._indexes,
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
    ) -> BackupPlan:
        """What `backup` would do; nothing is written. Arguments and errors as there."""

        async def plan(base: StoreReference | None) -> BackupPlan:
            async with self._digests.of(directory) as cache:
                return await plan_backup_dir(
                    self.store,
                    directory=directory,
                    base=base,
                    settings=self.settings,
                    ambient=self._ambient,
                    cache=cache,
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
    ) -> Commit:
        """Make backups visible, all or none; see `CommitWriter.commit` for arguments and errors."""
        return await self._writer(scope).commit(results, version=version, offsets=offsets, layout=layout, parent=parent)

    async def rewind(self, target: Commit) -> Commit:
        """Make an older commit the newest again, as a new commit (design 0002, C6)."""
        return await self._writer(target.scope).rewind(target)

    async def fork(self, target: Commit, scope: Scope) -> Commit:
        """Begin a new scope with the stores of a commit; no bytes are copied."""
        return await self._writer(scope).fork(target)

    async def name(self, commit: Commit, name: str) -> NameRecord:
        """Keep a commit under a name until the name is released; see `engine.naming.give_name`."""
        return await give_name(self.store, self.record, self._ambient, commit, name)

    async def release_name(self, scope: Scope, name: str) -> None:
        """Give up a name; see `engine.naming.release_name`."""
        await release_name(self.store, scope, name)

    # ------------------------------------------------------------------ reading

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

    # ------------------------------------------------------------------ care

    async def collect(
        self,
        retention: Retention,
        *,
        dry_run: bool = False,
        hands: Hands | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> CollectReport:
        """Delete what nothing keeps; see `engine.collect.collect`."""
        return await collect(self.store, self.record, retention, dry_run=dry_run, hands=hands, progress=progress)

    async def verify(
        self,
        commits: Sequence[Commit] | None = None,
        *,
        level: Level = Level.EXISTENCE,
        sample: float = 1.0,
        seed: int = 0,
        heal: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> VerifyReport:
        """Check commits, all of the repository's and what only names hold if none are given; see `engine.verify`.

        Where damage is found and commits were collected meanwhile, those that are left are checked again: what a
        collection took is no damage.
        """
        chosen = await self._all_commits() if commits is None else commits
        report = await verify(self.store, chosen, level=level, sample=sample, seed=seed, heal=heal, progress=progress)
        if not report.damaged:
            return report
        still_open = {(c.scope, c.pointer) for c in await self._all_commits()}
        left = [c for c in chosen if (c.scope, c.pointer) in still_open]
        if len(left) == len(chosen):
            return report
        return await self.verify(left, level=level, sample=sample, seed=seed, heal=heal, progress=progress)

    async def _all_commits(self) -> Sequence[Commit]:
        return [commit for scope in await self.scopes() for commit in await self.commits(scope, with_named=True)]

    # ------------------------------------------------------------------ inside

    def _writer(self, scope: Scope) -> CommitWriter:
        return self._writers.setdefault(scope, CommitWriter(self.store, self.record, scope, self._ambient))

    async def _with_base(
        self,
        scope: Scope,
        task: str,
        store: str,
        base: StoreReference | Literal["latest"] | None,
        use: Callable[[StoreReference | None], Awaitable[Result]],
    ) -> Result:
        """Work that reads the base's index, which no pin protects: a commit and a collection may come before it."""
        chosen = await self._newest(scope, task, store) if base == LATEST else base
        try:
            return await use(chosen)
        except DamagedError as error:
            if not index_io.is_missing(error):
                raise
            newest = await self._newest(scope, task, store, anew=True)
            if newest == chosen:
                raise
            if base != LATEST:
                raise StaleResultError(
                    "the base is gone, and the newest commit has another one",
                    operation="backup",
                    subject=f"{scope} {task}/{store}",
                ) from error
        return await use(newest)

    async def _newest(self, scope: Scope, task: str, store: str, *, anew: bool = False) -> StoreReference | None:
        newest = (await self._writer(scope).head(anew=anew)).newest
        return newest.store(task, store) if newest else None


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


@contextlib.asynccontextmanager
async def _opened(store: str | BlobStore) -> AsyncIterator[BlobStore]:
    """The store of a repository that is about to be opened; one that was opened here is closed if that fails."""
    if not isinstance(store, str):
        yield store
        return
    opened = open_store(store)
    try:
        yield opened
    except BaseException:
        await opened.close()
        raise


async def _read_record(store: BlobStore, operation: str) -> RepositoryRecord:
    def decode(data: bytes, *, subject: str) -> RepositoryRecord:
        if data == REFUSED_STORE:
            raise UnsafeStoreError(
                "`tidemark init` has refused this store: it lets a create replace what is there",
                operation=operation,
                subject=subject,
                hint="run `tidemark doctor`; once the store is right, delete this object and run `tidemark init` again",
            )
        return decode_repository(data, subject=subject)

    try:
        return await read_record(store, REPOSITORY, decode)
    except BlobNotFoundError as error:
        raise NotFoundError(
            "this store is no repository",
            operation=operation,
            hint="make it one with `tidemark init`, or check the URL",
        ) from error


async def _check_no_repository(store: BlobStore) -> None:
    """Look before the record is written: a store that creates twice would let it replace another one."""
    with contextlib.suppress(NotFoundError):
        await _read_record(store, "init")
        raise _is_repository()


def _is_repository() -> UsageError:
    return UsageError("is a repository already", operation="init", hint="open it instead of initialising it")


async def _check_refuses_a_second(store: BlobStore) -> None:
    """Create the record a second time, with bytes that nobody opens: they stand there only if the store lets them.

    Raises:
        UnsafeStoreError: It does.
        StoreUnavailableError: It did not answer.
    """
    match await store.put_if_absent(REPOSITORY, BytesBody(REFUSED_STORE)):
        case Created():
            raise UnsafeStoreError(
                "the store said Created to a second create of one key: two writers could both win",
                operation="init",
                subject=REPOSITORY,
                hint="run `tidemark doctor`. Nothing opens this store now: an object that says why stands at this key; "
                "once the store is right, delete it and run `tidemark init` again",
            )
        case Unknown(reason=reason):
            raise StoreUnavailableError(
                f"the repository is made, but whether the store refuses a second create is not known: {reason}",
                operation="init",
                key=REPOSITORY,
                hint="run `tidemark doctor` before you use it",
            )
        case Lost():
            pass
