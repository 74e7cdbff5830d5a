"""The read side of a repository: finds commits, protects them, and reads what they hold."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypedDict, Unpack

from blobstore.base import BlobStore
from engine.clock import Runtime, SystemRuntime
from engine.errors import (
    CollectedError,
    NotFoundError,
    UsageError,
)
from engine.inspect.history import ENTRIES_MAX, History, read_history
from engine.local.cache import DigestCaches
from engine.progress import NO_PROGRESS, Progress
from engine.records import indexes as index_io
from engine.records.log import Noted, ScopeLog, list_scopes, load_log, load_scope
from engine.records.missing import MissingBlobs
from engine.records.names import list_names, read_name
from engine.records.pins import PinLease, hold_pin
from engine.restore.restore import read_index_of
from engine.settings import TransferSettings
from engine.state.restore import find_state_commit
from engine.state.sources import IndexStateFiles
from index.plan.commits import Commit, commit_of_name, fits
from index.snapshot.delta import IndexDifference, diff_indexes
from index.snapshot.keys import encode_component, parse_log_key
from index.snapshot.model import IndexReference, Scope, SnapshotIndex, UniqueId
from index.snapshot.records import NameRecord, RepositoryRecord, StoreReference
from index.text import iso_time

# A reader whose commit is collected before its pin stands chooses again this often.
CHOICES_MAX: Final = 3


class Choice(TypedDict, total=False):
    """The arguments of `Repository.find` that choose a commit."""

    number: int | None
    version: int | None
    unique_id: str | None
    at_ms: int | None
    name: str | None


class ReadingRepository:
    """What of a `Repository` changes nothing in it but pins."""

    def __init__(
        self,
        store: BlobStore,
        record: RepositoryRecord,
        *,
        settings: TransferSettings | None = None,
        runtime: Runtime | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Prefer `Repository.open`; arguments as there."""
        self.store = store
        self.record = record
        self.settings = settings or TransferSettings()
        self._runtime = runtime or SystemRuntime()
        # The id comes from the store: as one component it cannot lead out of the directory.
        # What this object has found missing: the next backup uploads it again (design 0006, M1).
        self.missing_blobs = MissingBlobs()
        self._digests = DigestCaches(
            cache_dir / encode_component(record.id) if cache_dir is not None else None,
            trust_stat=self.settings.trust_stat,
        )

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
        log = await self.log(scope)
        return await self._with_named(log) if with_named else log.commits[::-1]

    async def log(self, scope: Scope) -> ScopeLog:
        """Return the whole log of a scope: its commits, and which of its records are none."""
        return await load_scope(self.store, scope)

    async def _with_named(self, log: ScopeLog, noted: Noted | None = None) -> tuple[Commit, ...]:
        """Return the commits of a log, newest first, and then those that only names still hold."""
        commits, scope = log.commits[::-1], log.listing.scope
        there = {commit.pointer for commit in commits}
        return commits + tuple(
            commit_of_name(n) for n in await list_names(self.store, scope, noted) if n.source not in there
        )

    async def history(
        self,
        scope: Scope,
        *,
        entries_max: int = ENTRIES_MAX,
        since_ms: int | None = None,
        shares: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> History:
        """The newest records of a scope, with what each brought and what became of it; see `engine.inspect.history`."""
        return await read_history(
            self.store,
            self.record,
            scope,
            entries_max=entries_max,
            since_ms=since_ms,
            shares=shares,
            progress=progress,
        )

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
            FormatError: A record that may be the one that fits cannot be read.
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
        commits: Sequence[Commit] = ()
        if number is None and version is None and unique_id is None and at_ms is None:
            found = await self.latest(scope)
        else:
            log = await self.log(scope)
            commits = log.commits[::-1]
            found = next(
                (c for c in commits if fits(c, number=number, version=version, unique_id=unique_id, at_ms=at_ms)), None
            )
            self._check_choice(log, found, number)
        if found is None:
            time = None if at_ms is None else iso_time(at_ms)
            wanted = {"number": number, "version": version, "unique id": unique_id, "time": time}
            text = ", ".join(f"{k} {v}" for k, v in wanted.items() if v is not None) or "any commit"
            hint = _hint_of_oldest(commits, at_ms)
            for record in await self.names(scope) if commits and at_ms is None else ():
                if fits(commit_of_name(record), number=number, version=version, unique_id=unique_id, at_ms=None):
                    hint = f"the name {record.name!r} alone holds it: ask for that name"
            raise NotFoundError(f"nothing fits {text}", operation="find", subject=str(scope), hint=hint)
        return found

    @staticmethod
    def _check_choice(log: ScopeLog, found: Commit | None, number: int | None) -> None:
        """Refuse a choice where a record that cannot be read may be the one that fits."""
        if found is not None and number is not None:
            return
        for one in log.unreadable:
            place = parse_log_key(one.key)
            is_newer = found is None or place.number > found.record.number
            if place.kind == "commit" and (is_newer if number is None else place.number == number):
                raise one.error

    @contextlib.asynccontextmanager
    async def pinned(self, commit: Commit, purpose: str = "read") -> AsyncIterator[PinLease]:
        """Keep a commit from being collected while the block runs (design 0002, D5)."""
        async with hold_pin(self.store, self._runtime, commit, purpose=purpose) as lease:
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


def _hint_of_oldest(commits: Sequence[Commit], at_ms: int | None) -> str:
    """Where a time is before everything that is there, which is what there is; else nothing."""
    if at_ms is None or not commits or commits[-1].committed_at_ms <= at_ms:
        return ""
    return f"the oldest is commit {commits[-1].record.number}, of {iso_time(commits[-1].committed_at_ms)}"
