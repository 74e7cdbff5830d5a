"""Spark's RocksDB state store in Python: versions of a key-value state, in Spark's directories (design 0004).

```python
async with await StateStore.open("s3://bucket/checkpoint/state/0/0", Path("/tmp/work")) as store:
    await store.load(0)
    store.put(b"key", b"value")
    committed = await store.commit()
    await store.load(committed.version, committed.unique_id)
```

A store belongs to one task: its asynchronous methods run one at a time, and rows are read and written between them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

from blobstore.concurrency import run_blocking
from engine.blocking import Blocking, Direct, Facade, Opening
from engine.errors import DamagedError, NotLoadedError, UsageError
from engine.runtime import Runtime
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.commit import Committed, Maintained, SaveMetrics, StateCommits
from engine.state.files import Deleted, StateFileManager, delete_old_versions
from engine.state.load import LoadMetrics, StateLoader, check_target
from engine.state.loaded import DEFAULT_FAMILY, LoadedState, rebased
from engine.state.local_files import WorkingDir, unwritable_error
from engine.state.query import StreamingCheckpoint
from engine.state.settings import StateStoreSettings
from index.snapshot.model import LineageItem, UniqueId
from index.spark.lineage import Resolution
from index.spark.metadata import NOT_COUNTED
from index.spark.names import StateVersion
from index.spark.query_logs import DEFAULT_STORE


class StateStore:
    """One state store: one partition of one operator, open for one task at a time.

    Rows may be read and written from `load` on, and again after `commit`, which then builds on what it committed. After
    `abort`, and after every error of `load` and `commit`, nothing is loaded (design 0004, C5).

    Raises:
        NotLoadedError: From everything that needs a loaded version.
        UsageError: From every method: the store is closed, or another call is under way.
    """

    def __init__(
        self, files: StateFiles, place: WorkingDir, settings: StateStoreSettings, runtime: Runtime, *, owns_files: bool
    ) -> None:
        self.settings = settings
        # None before the first load.
        self.last_load: LoadMetrics | None = None
        self._files = files
        self._owns_files = owns_files
        self._place = place
        self._runtime = runtime
        self._manager = StateFileManager(files, settings, runtime=runtime)
        self._loader = StateLoader(self._manager, place, runtime)
        self._commits = StateCommits(self._manager, place, runtime, rocksdb=self._loader.rocksdb, rebase=self._rebase)
        self._loaded: LoadedState | None = None
        # Of the last version that was loaded to be written on, or committed. A deletion counts from it and keeps what
        # it needs (design 0004, G4), also after an abort: the query will want it again. What was loaded to be read only
        # counts for nothing, and before there is such a version nothing is deleted.
        self._needed: Resolution | None = None
        # Held by the method that runs: one at a time; meanwhile rows can be neither read nor written.
        self._mutex = asyncio.Lock()
        # That method; "" for none.
        self._busy_with = ""
        self._is_closed = False
        self._is_released = False

    @classmethod
    async def open(
        cls,
        files: StateFiles | str | Path,
        directory: str | Path,
        settings: StateStoreSettings | None = None,
        *,
        runtime: Runtime | None = None,
        owns_files: bool = False,
    ) -> Self:
        """Open a store. Nothing is loaded, and nothing is asked of the files.

        Args:
            files: The directory of the store: a path, a URL as `open_store` takes it, or an open `CheckpointDir`,
                which stays the caller's to close; or files that can only be read, such as those of a snapshot index.
            directory: On this machine, private to this store: what else is in it is refused, and what a dead process
                left is removed.
            settings: Of the store.
            runtime: Ids and durations.
            owns_files: Whether `close`, and a failure of this call, close `files` that were open already.

        Raises:
            TargetBusyError: Another store works in `directory`.
            TargetError: `directory` cannot be used.
            InvalidRequestError: The URL does not follow the grammar.
        """
        opened: StateFiles = await CheckpointDir.open(files) if isinstance(files, str | Path) else files
        owns_files = owns_files or opened is not files
        places: list[WorkingDir] = []
        try:
            await run_blocking(lambda: places.append(WorkingDir.open(Path(directory))))
            settings, runtime = settings or StateStoreSettings(), runtime or Runtime()
            return cls(opened, places[0], settings, runtime, owns_files=owns_files)
        except BaseException:
            for place in places:
                await run_blocking(place.close)
            if owns_files:
                await opened.close()
            raise

    @asynccontextmanager
    async def _exclusive(self, operation: str) -> AsyncIterator[None]:
        """Run a method that keeps rows from being used; what it could not write on this machine is a `TargetError`."""
        self._check_open(operation)
        async with self._mutex:
            self._check_open(operation)
            self._busy_with = operation
            try:
                yield
            except OSError as error:
                raise unwritable_error(operation, error) from error
            finally:
                self._busy_with = ""

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise UsageError("the state store is closed", operation=operation, subject=self._files.location)

    @property
    def version(self) -> int | None:
        """The loaded version; None if none is loaded."""
        return None if self._loaded is None else self._loaded.target.version

    @property
    def unique_id(self) -> UniqueId | None:
        """Its unique id; None without one."""
        return None if self._loaded is None else self._loaded.target.unique_id

    @property
    def lineage(self) -> tuple[LineageItem, ...]:
        """Versions from the newest known snapshot to the loaded one; empty without ids."""
        return () if self._loaded is None else self._loaded.resolution.lineage

    @property
    def num_keys(self) -> int:
        """Number of keys, uncommitted changes included, internal column families not; -1: not counted."""
        return NOT_COUNTED if self._loaded is None else self._loaded.counts.keys

    @property
    def num_internal_keys(self) -> int:
        """Number of keys of internal column families; as `num_keys`."""
        return NOT_COUNTED if self._loaded is None else self._loaded.counts.internal_keys

    @property
    def families(self) -> tuple[str, ...]:
        """The column families of the loaded version, in the order they were made; `default` if there are none."""
        return self._reading("families").families.names

    @property
    def last_save(self) -> SaveMetrics:
        """Return what the last saves did and took."""
        return self._commits.last_save

    @property
    def manager(self) -> StateFileManager:
        """Return the manager of its files."""
        return self._manager

    async def load(
        self, version: int, unique_id: str | None = None, *, read_only: bool = False, empty: bool = False
    ) -> None:
        """Load a version; what was written and not committed is gone.

        Args:
            version: 0 is empty.
            unique_id: From the commit log; None with format 1, for version 0, and for a version of format 1 that is to
                be continued with format 2.
            read_only: Refuse writes; needed for files that cannot be written.
            empty: Start from nothing, whatever there is of this version; its commit is a snapshot (SPARK-54420).

        Raises:
            VersionMissingError: The version cannot be put together; the error names what is missing.
            LineageError: A header does not lead back to a snapshot.
            SnapshotRepairError: No snapshot opens that is near enough.
            DamagedError, FormatError: What it takes is damaged, a changelog for instance.
            TargetError: The working directory is full.
            StoreError: The blob store did not answer.
            UsageError: The arguments make no sense.
        """
        target = check_target(
            version, unique_id, self._files, self.settings.format_version, read_only=read_only, empty=empty
        )
        async with self._exclusive("load"):
            try:
                if not read_only:
                    # Without ids, the snapshot of an abandoned attempt would take the place of its successor's.
                    await self._commits.uploads.revoke(lambda made: made.of.unique_id is None and made.of > target)
                loaded = self._loaded
                if loaded is not None and not empty and loaded.still_is(target, read_only=read_only):
                    self.last_load = LoadMetrics(of=target, base=loaded.resolution.base, was_loaded=True)
                else:
                    loaded = await self._build(target, read_only=read_only, empty=empty)
                if read_only:
                    loaded.cancel()
                    loaded.is_read_only = True
                else:
                    await self._begin(loaded)
                    if not empty:
                        self._needed = loaded.resolution
            except BaseException:
                await self._unload()
                raise

    async def _build(self, target: StateVersion, *, read_only: bool, empty: bool) -> LoadedState:
        """Build a version in place of the loaded one, whose lineage may save the read of a header (C2)."""
        lineage = [StateVersion(item.version, item.unique_id) for item in self.lineage]
        at = lineage.index(target) if target in lineage else 0
        known = {target: self.lineage[:at]} if at else {}
        await self._unload()
        try:
            # Kept at once: whatever fails from here on, the caller closes it.
            self._loaded, self.last_load = await self._loader.load(target, known, read_only=read_only, empty=empty)
            return self._loaded
        finally:
            # Also what a failed load has fetched: before the next one, the store may have been healed.
            await run_blocking(self._place.clear_fetched)

    def _rebase(self, snapshot: StateVersion) -> None:
        if self._loaded is not None:
            self._loaded.resolution = rebased(self._loaded.resolution, snapshot)
        if self._needed is not None:
            self._needed = rebased(self._needed, snapshot)

    async def _begin(self, loaded: LoadedState) -> None:
        """Prepare for the next version, with its id and its changelog."""
        unique_id = self._runtime.unique_id() if self.settings.format_version > 1 else None
        await run_blocking(loaded.begin, self._place.new_changelog(), unique_id)

    async def _unload(self) -> None:
        """Forget what is loaded. The files stay, for the next load to find the same SSTs."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if loaded.is_damaged:
                # On this machine, perhaps, and not in the store.
                self._manager.known.forget_all()
            try:
                await run_blocking(loaded.cancel)
            finally:
                await run_blocking(loaded.db.close)

    def get(self, key: bytes, family: str = DEFAULT_FAMILY) -> bytes | None:
        """Return the value of a key, committed or not; None if there is none.

        Raises:
            DamagedError: A block does not match its checksum.
            RowChecksumError: The row does not fit its checksum, if it is this row's turn.
        """
        return self._reading("get").get(key, family)

    def items(
        self, prefix: bytes = b"", *, family: str = DEFAULT_FAMILY, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the keys of a family with this prefix, from `start` on, in order, and their values.

        Later writes are not seen. The iterator ends with what is loaded: going on after that is a `UsageError`.
        Raises as `get`.
        """
        return self._reading("scan").items(prefix, family, start)

    def chunks(
        self, family: str = DEFAULT_FAMILY, *, rows_max: int, bytes_max: int
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Iterate over a family as `items`, in lists of at most `rows_max` rows and about `bytes_max` bytes."""
        return self._reading("scan").chunks(family, rows_max=rows_max, bytes_max=bytes_max)

    def put(self, key: bytes, value: bytes, family: str = DEFAULT_FAMILY) -> None:
        """Set the value of a key.

        Raises:
            TargetError: The working directory is full, also from the methods below. Nothing can be committed then.
        """
        self._writing("put").put(key, value, family)

    def merge(self, key: bytes, operand: bytes, family: str = DEFAULT_FAMILY) -> None:
        """Append to the value of a key, behind the delimiter of the merge operator if there is a value.

        Raises:
            UsageError: There are changelogs and no column families (design 0004, L3).
        """
        self._writing("merge").merge(key, operand, family)

    def delete(self, key: bytes, family: str = DEFAULT_FAMILY) -> None:
        """Remove a key; one that is not there is no error."""
        self._writing("delete").delete(key, family)

    def add_family(self, name: str, *, internal: bool = False) -> bool:
        """Add a column family; False if it is there. The next commit is a snapshot."""
        return self._writing("add family").add_family(name, is_internal=internal)

    def drop_family(self, name: str) -> bool:
        """Remove a column family and its rows; False if it is not there. The next commit is a snapshot.

        The changelog has it as a record that Spark reads from 4.2 on.
        """
        return self._writing("drop family").drop_family(name)

    def _reading(self, operation: str) -> LoadedState:
        self._check_open(operation)
        if self._busy_with:
            hint = "wait until it has ended: rows cannot be used meanwhile"
            reason = f"a {self._busy_with} is under way"
            raise UsageError(reason, operation=operation, subject=self._files.location, hint=hint)
        return self._of_now(operation)

    def _of_now(self, operation: str) -> LoadedState:
        if self._loaded is None:
            raise NotLoadedError("no version is loaded", operation=operation, subject=self._files.location)
        return self._loaded

    def _writing(self, operation: str) -> LoadedState:
        loaded = self._reading(operation)
        loaded.check_writable(operation)
        return loaded

    async def commit(self, *, snapshot: bool = False) -> Committed:
        """Make the changes the next version: durable, and whole or not at all (design 0004, C3 to C6).

        After that the new version is the loaded one. After an error nothing is loaded: load the version from before and
        do the work again. With format 1 its second attempt takes the place of the first. If only the working directory
        is too full to go on, the version is there, and nothing is loaded either.

        Args:
            snapshot: Make a snapshot, and wait for it.

        Raises:
            CheckpointFileExistsError: With ids: a file of this name is there already.
            CheckpointUnknownError: The blob store never said whether it took the changelog: the version may be there.
            RowChecksumError: A row of a snapshot that is waited for is damaged.
            StoreError, EngineError: The version is not there.
        """
        async with self._exclusive("commit"):
            loaded = self._of_now("commit")
            try:
                loaded.check_committable()
                built_on = loaded.resolution
                committed = await self._commits.commit(loaded, force=snapshot)
                # Until it is loaded again, another attempt may count in its place, and needs what both were built on.
                self._needed = built_on if self.settings.versions_retained_min == 1 else loaded.resolution
            except BaseException as error:
                loaded.is_damaged = loaded.is_damaged or isinstance(error, DamagedError)
                await self._unload()
                raise
            try:
                await self._begin(loaded)
            except BaseException as error:
                await self._unload()
                # Where it is only too full to go on, the version is there: to do it again would be to do it twice.
                if not isinstance(error, OSError):
                    raise
            return committed

    async def abort(self) -> None:
        """Forget what was written since the last commit, and what is loaded (design 0004, C5)."""
        async with self._exclusive("abort"):
            await self._unload()

    async def maintain(self) -> Maintained:
        """Wait for the snapshot that is being uploaded, and delete versions that are not needed any more.

        Other methods run beside uploads; the deletion waits for `load` and `commit`, and they for it. Nothing is
        deleted before a version was loaded to be written on, or committed.

        Raises:
            SnapshotUploadError: The last snapshot was not uploaded, for the reason given. Nothing was deleted.
            StoreError: As the blob store says.
        """
        self._check_open("maintain")
        uploads = self._commits.uploads
        await uploads.settle()
        uploads.raise_failure("maintain")
        deleted = Deleted()
        async with self._mutex:
            self._check_open("maintain")
            # A backup of a directory says itself that it cannot be written.
            if self._needed is not None or not isinstance(self._files, CheckpointDir):
                if self._loaded is not None and self._loaded.is_read_only:
                    # It stays readable, but what it is made of may go.
                    self._loaded.is_outlived = True
                deleted = await delete_old_versions(self._manager, needed=self._needed)
        return Maintained(uploaded=uploads.take_uploaded(), deleted=deleted, deletion_waits=self._needed is None)

    async def close(self) -> None:
        """Finish uploads that go on in the background, and give everything back; once is enough.

        Raises:
            SnapshotUploadError: The last snapshot was not uploaded. Everything was given back.
            TargetError: The working directory could not be cleared.
        """
        self._is_closed = True
        async with self._mutex:
            if self._is_released:
                return
            self._is_released = True
            async with AsyncExitStack() as stack:
                if self._owns_files:
                    stack.push_async_callback(self._files.close)
                stack.push_async_callback(run_blocking, self._place.close)
                stack.push_async_callback(self._unload)
                await self._commits.uploads.close()
        self._commits.uploads.raise_failure("close")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # What went wrong in the block counts more than what goes wrong here.
        try:
            await self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and closing the state store failed: {failure}")


async def open_query_state(
    location: str | Path,
    directory: str | Path,
    *,
    batch: int | None = None,
    operator: int = 0,
    partition: int = 0,
    store: str = DEFAULT_STORE,
) -> StateStore:
    """Open one store of a query as a committed batch, by default the newest, left it; loaded to be read.

    `location` is the root of the checkpoint, a path or a URL as `open_store` takes it, and `directory` as for
    `StateStore.open`. `operator` and `partition` are Spark's numbers; `store` is a name: `default`, or one of a join's
    stores.

    Raises:
        NotFoundError: The batch is not committed, or had no such operator, partition or store.
        ProviderError: The state is not RocksDB's (design 0004, B4).
        EngineError, FormatError, StoreError: As `StateStore.open` and `StateStore.load`.
    """
    checkpoint = await StreamingCheckpoint.open(location)
    try:
        found = await checkpoint.state(operator, partition, store, batch=batch)
    finally:
        await checkpoint.close()
    files = await CheckpointDir.open(location, found.id.path)
    opened = await StateStore.open(files, directory, found.settings, owns_files=True)
    try:
        await opened.load(found.at.version, found.at.unique_id, read_only=True)
    except BaseException:
        await opened.close()
        raise
    return opened


class SyncStateStore(Facade[StateStore]):
    """The methods of `StateStore`, blocking. Use it as a context manager, or call `close`.

    Rows are read and written in the calling thread; snapshots go on their way in a thread of the store's own.
    """

    open = Opening(StateStore.open)
    of_query = Opening(open_query_state)
    load = Blocking(StateStore.load)
    commit = Blocking(StateStore.commit)
    abort = Blocking(StateStore.abort)
    maintain = Blocking(StateStore.maintain)
    get = Direct(StateStore.get)
    items = Direct(StateStore.items)
    put = Direct(StateStore.put)
    merge = Direct(StateStore.merge)
    delete = Direct(StateStore.delete)
    add_family = Direct(StateStore.add_family)
    drop_family = Direct(StateStore.drop_family)

    @property
    def version(self) -> int | None:
        """Return the loaded version; None if none is loaded."""
        return self.asynchronous.version

    @property
    def unique_id(self) -> UniqueId | None:
        """Return the unique id of the loaded version; None without one."""
        return self.asynchronous.unique_id

    @property
    def lineage(self) -> tuple[LineageItem, ...]:
        """Return the versions from the newest known snapshot to the loaded one; empty without ids."""
        return self.asynchronous.lineage

    @property
    def num_keys(self) -> int:
        """Return the number of keys, internal ones not counted."""
        return self.asynchronous.num_keys

    @property
    def num_internal_keys(self) -> int:
        """Return the number of keys of internal column families."""
        return self.asynchronous.num_internal_keys

    @property
    def families(self) -> tuple[str, ...]:
        """Return the names of the column families."""
        return self.asynchronous.families

    @property
    def last_load(self) -> LoadMetrics | None:
        """Return what the last load did and took; None before the first."""
        return self.asynchronous.last_load

    @property
    def last_save(self) -> SaveMetrics:
        """Return what the last saves did and took."""
        return self.asynchronous.last_save
