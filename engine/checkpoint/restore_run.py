"""One restore of a checkpoint, step by step: for whoever restores the stores here, and for whoever has Spark do it."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.errors import StoreError
from engine.checkpoint.adapting import cut_source_log, relocate
from engine.checkpoint.catalog import find_job, pinned_checkpoint_backup
from engine.checkpoint.store import StoreRestored, StoreToRestore
from engine.checkpoint.targets import CheckpointTarget, check_apart
from engine.clock import Runtime
from engine.errors import DamagedError, EngineError, UsageError
from engine.local.scan import DIR_FLAGS
from engine.records.find import require_store
from engine.records.missing import name_commit, naming_complete
from engine.repository.repository import Repository
from engine.restore.download import Downloader, DownloadPlace
from engine.restore.restore import read_index_of
from engine.restore.staging import target_errors
from engine.state.query import StreamingCheckpoint
from index.display import DisplayMixin
from index.errors import FormatError
from index.plan.commits import Commit
from index.plan.restore import plan_restore
from index.snapshot.contents import files_of, select_files
from index.snapshot.keys import check_file_name
from index.snapshot.model import FilePath, Scope, SnapshotIndex
from index.spark.checkpoint import (
    OFFSETS,
    QUERY_STORE,
    QUERY_TASK,
    SOURCES,
    CheckpointBackup,
    StoreId,
    decode_checkpoint_backup,
    select_query_files,
)
from index.spark.query_logs import decode_offsets
from index.spark.sources import newest_entry

_PURPOSE: Final = "restore checkpoint"
_SPARK_LOCATION: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)?/")


class RestoreChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to restore, and how."""

    # None: the only job of the repository that has backups.
    job: str | None = None
    # At most one of these two; the newest backup if neither is given (R1).
    batch: int | None = None
    at_ms: int | None = None
    # Whether changelogs are applied here (R7).
    replayed: bool = False
    # Whether a target with content may be moved aside (R3, R4).
    move_aside: bool = False
    # Of the inputs of file sources, old prefix to new (R5).
    map_paths: Mapping[str, str] = {}
    # What Spark calls the target, if it is not to follow from it and from the checkpoint (R5).
    spark_location: str | None = None
    # Where something of the backup is missing, take the newest of which everything is there (design 0006, M2).
    or_newest_complete: bool = False


class RestoredCheckpoint(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What was restored, from what, and what it took."""

    json_properties: ClassVar = {"query_id": "backup.query_id", "source": "backup.location"}
    json_omitted: ClassVar = ("backup",)

    job: str
    commit: Commit
    backup: CheckpointBackup
    # The batch that the query goes on after, and the oldest one that is in its logs.
    batch: int
    oldest_batch: int
    location: str
    # Where what stood at the target is now; "" if nothing did.
    moved_aside: str
    stores: int
    # Of the stores and of the query.
    files: int
    size_bytes: int
    bytes_fetched: int
    # GETs of indexes and blobs.
    requests: int
    # What was replayed.
    changelogs: int = msgspec.field(name="changelogs_replayed")
    records: int = msgspec.field(name="records_replayed")
    seconds: float
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool
    # Paths that could not be removed.
    leftovers: tuple[str, ...] = ()


class CheckpointRestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore would bring back."""

    json_properties: ClassVar = {"query_id": "backup.query_id", "source": "backup.location"}
    json_omitted: ClassVar = ("backup",)

    job: str
    commit: Commit
    backup: CheckpointBackup
    batch: int
    oldest_batch: int
    location: str
    stores: int
    files: int
    size_bytes: int
    # Changelogs that would be applied with `replayed`, or are left for Spark to apply.
    changelogs: int


class CheckpointRestore:
    """One restore, from the choice of the backup to the last file; `close` ends it, however far it came.

    Args:
        repository: Where from.
        target: Where to; closed by `close`.
        choice: What.
        runtime: Clock.
    """

    def __init__(
        self, repository: Repository, target: CheckpointTarget, choice: RestoreChoice, runtime: Runtime
    ) -> None:
        self._repository = repository
        self._target = target
        self._choice = choice
        self._runtime = runtime
        self._begun_s = runtime.monotonic_s()
        self._resources = contextlib.AsyncExitStack()
        self._wanted: set[StoreId] = set()
        self._requests = self._files = self._size_bytes = self._bytes_fetched = 0

    @property
    def directory(self) -> Path:
        """Where the checkpoint is gathered; a store belongs to `StoreId.path` below it."""
        return self._target.directory

    def naming_complete(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Let an error of a block that something is missing say which backup is whole (design 0006, M2)."""
        return naming_complete(
            self._repository.store, lambda: self._repository.commits(Scope(self.job)), name=_name_backup
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Let an error that ends the block say where what stood at the target is, if that was moved aside by then."""
        try:
            yield
        except BaseException as error:
            if aside := self._target.moved_aside:
                error.add_note(f"what stood at {self._target.location} is at {aside}, whole")
                if isinstance(error, EngineError | StoreError | FormatError):
                    error.hint = f"what stood there is at {aside}: keep it, and restore again; {error.hint}"
            raise

    async def begin(self) -> tuple[StoreToRestore, ...]:
        """Choose and pin the backup, claim the target, and bring back the files of the query.

        Returns:
            The stores that are to be restored.

        Raises:
            As `restore_checkpoint`.
        """
        choice = self._choice
        if choice.spark_location is not None and not _SPARK_LOCATION.match(choice.spark_location):
            hint = "give a URL such as s3a://bucket/prefix, or an absolute path"
            raise UsageError(
                "Spark would take it for a relative path", operation="restore", subject=choice.spark_location, hint=hint
            )
        await check_apart(self._target, self._repository.store)
        self.job = choice.job or await find_job(self._repository)
        self.commit, self.backup, self._lease = await self._resources.enter_async_context(
            pinned_checkpoint_backup(
                self._repository,
                self.job,
                batch=choice.batch,
                at_ms=choice.at_ms,
                purpose=_PURPOSE,
                or_newest_complete=choice.or_newest_complete,
            )
        )
        # Another backup than the one that was asked for need not have the batch.
        has_batch = choice.batch is not None and self.backup.oldest_batch <= choice.batch <= self.backup.batch
        self.batch = choice.batch if choice.batch is not None and has_batch else self.backup.batch
        self.oldest_batch = self.batch if choice.replayed else self.backup.oldest_batch
        reference = require_store(self.commit, QUERY_TASK, QUERY_STORE)
        index, self._requests = await read_index_of(self._repository.store, reference)
        entries = dict(files_of(index.dir))
        chosen = select_query_files(entries, oldest_batch=self.oldest_batch, batch=self.batch)
        selected = select_files(index, [(path, entries[path]) for path in chosen])
        await self._target.open(self.backup.query_id, self.batch)
        await self._fetch_query(selected)
        work = await self._stores()
        self._wanted = {item.id for item in work}
        await run_blocking(self._adapt)
        return work

    async def finish(self, restored: Sequence[StoreRestored]) -> RestoredCheckpoint:
        """Put everything in its place.

        Args:
            restored: What became of the stores, all of them.

        Raises:
            TargetError: The target has changed meanwhile, or cannot be written.
            StoreError: As the store says.
            UsageError: A store is missing, and the checkpoint would not be whole.
        """
        if missing := self._wanted - {store.id for store in restored}:
            told = ", ".join(map(str, sorted(missing)))
            raise UsageError(f"stores were not restored: {told}", operation="restore", subject=self._target.location)
        await self._target.publish([path for store in restored for path in store.published])
        leftovers = await self._target.close()
        return RestoredCheckpoint(
            job=self.job,
            commit=self.commit,
            backup=self.backup,
            batch=self.batch,
            oldest_batch=self.oldest_batch,
            location=self._target.location,
            moved_aside=self._target.moved_aside,
            stores=len(restored),
            files=self._files + sum(store.files for store in restored),
            size_bytes=self._size_bytes + sum(store.size_bytes for store in restored),
            bytes_fetched=self._bytes_fetched + sum(store.bytes_fetched for store in restored),
            requests=self._requests + sum(store.requests for store in restored),
            changelogs=sum(store.changelogs for store in restored),
            records=sum(store.records for store in restored),
            seconds=self._runtime.monotonic_s() - self._begun_s,
            pinned=self._lease.pinned,
            leftovers=leftovers,
        )

    def planned(self, stores: Sequence[tuple[int, int, int]]) -> CheckpointRestorePlan:
        """What would be restored; of each store the number of files, their bytes, and the number of changelogs."""
        return CheckpointRestorePlan(
            job=self.job,
            commit=self.commit,
            backup=self.backup,
            batch=self.batch,
            oldest_batch=self.oldest_batch,
            location=self._target.location,
            stores=len(stores),
            files=self._files + sum(files for files, _, _ in stores),
            size_bytes=self._size_bytes + sum(size_bytes for _, size_bytes, _ in stores),
            changelogs=sum(changelogs for _, _, changelogs in stores),
        )

    async def close(self) -> None:
        """Remove what was gathered, and release the pin."""
        try:
            await self._target.close()
        finally:
            await self._resources.aclose()

    async def _fetch_query(self, index: SnapshotIndex) -> None:
        """Bring the files of the query into the directory, synced."""
        repository = self._repository
        plan = plan_restore(index, {}, range_bytes=repository.settings.range_bytes, owners_count=False)
        root = await run_blocking(_open_with_dirs, self.directory, plan.dirs)
        try:
            done = await Downloader(
                repository.store,
                index.metadata,
                DownloadPlace(self.directory, root),
                settings=repository.settings,
            ).download(plan)
        finally:
            os.close(root)
        self._requests += done.requests
        self._bytes_fetched += done.bytes_fetched

    async def _stores(self) -> tuple[StoreToRestore, ...]:
        """The stores of the batch, as the files of the query say, and where the backup has them."""
        checkpoint = await StreamingCheckpoint.open(self.directory)
        try:
            query_id = await checkpoint.query_id()
            if query_id != self.backup.query_id:
                raise self._damaged(f"is of query {query_id}, not of {self.backup.query_id}", "metadata")
            query = await checkpoint.at(self.batch)
        finally:
            await checkpoint.close()
        references = {(r.task, r.store): r for r in self.commit.record.stores if r.version == self.backup.batch + 1}
        work = []
        for store in query.stores:
            reference = references.get((store.id.task, store.id.store))
            if reference is None:
                raise self._damaged("is not in the backup, and the query has it", f"store {store.id}")
            work.append(StoreToRestore(store=store, reference=reference))
        return tuple(work)

    def _adapt(self) -> None:
        """Let the files of the query fit their batch and their place. Blocks."""
        for log in self._source_logs():
            cut_source_log(*log)
        relocate(
            self.directory,
            self._choice.spark_location or self._target.root,
            exact=self._choice.spark_location is not None,
            map_paths=self._choice.map_paths,
        )
        sizes = [path.stat().st_size for path in self.directory.rglob("*") if path.is_file()]
        self._files, self._size_bytes = len(sizes), sum(sizes)

    def _source_logs(self) -> Iterator[tuple[Path, int]]:
        """The logs of file sources, and the entry that each is to end with."""
        newest = max(int(path.name) for path in (self.directory / OFFSETS).iterdir())
        name = f"{OFFSETS}/{newest}"
        for offset in decode_offsets((self.directory / name).read_bytes(), subject=name).offsets:
            entry = newest_entry(offset)
            log = self.directory / SOURCES / check_file_name(offset.source)
            if entry is not None and log.is_dir():
                yield log, entry

    def _damaged(self, reason: str, subject: str) -> DamagedError:
        hint = "the backup is not whole; restore from another one"
        where = f"commit {self.commit.pointer.number} of {self.job}: {subject}"
        return DamagedError(reason, operation="restore", subject=where, hint=hint)


def _name_backup(commit: Commit) -> str:
    backup = decode_checkpoint_backup(commit.record.offsets)
    return name_commit(commit) if backup is None else f"the backup of batch {backup.batch}"


def _open_with_dirs(directory: Path, dirs: Sequence[FilePath]) -> int:
    with target_errors(directory):
        for path in dirs:
            directory.joinpath(*path).mkdir()
        return os.open(directory, DIR_FLAGS)
