"""Restore a streaming checkpoint as one of its batches left it (design 0005, section 3).

First the files of the query, which say what its stores are; then every store, several at once, here or on Spark; then
all of it is put in its place. Until then the target is as it was.
"""

import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.local.files import flush
from blobstore.opening import StoreSettings, check_url, local_path_of
from blobstore.tracing import traced
from engine.checkpoint.beside import find_batch_commit, take_back
from engine.checkpoint.groups import (
    GroupRescaled,
    GroupToRescale,
    RescaleFigures,
    add_up,
    check_partitions,
    ids_of,
    plan_groups,
    rewritten,
)
from engine.checkpoint.processes import Processes
from engine.checkpoint.rescale_stores import Here, look_here, of_backup, rescale_here
from engine.checkpoint.store import StoreRestored, StoreToRestore, bring_row_schema, restore_store
from engine.checkpoint.targets import CheckpointTarget, DirectoryTarget, ObjectTarget, check_apart, files_below
from engine.errors import CollectedError, DamagedError, IncompleteError, NotFoundError, TargetError, UsageError
from engine.local.scratch import scratch_dir
from engine.records.find import CHOICES_MAX, find_complete, name_commit, naming_complete, require_store
from engine.repository.repository import Repository
from engine.restore.download import download_index
from engine.restore.restore import read_index_of
from engine.runtime import NO_PROGRESS, AddedProgress, Progress, Runtime, Stopwatch
from engine.settings import STORES_AT_ONCE, share_among
from engine.state.checkpoint_dir import opened_checkpoint, store_url
from engine.state.key_rules import Partitioner, partitions_of
from engine.state.query import StreamingCheckpoint
from engine.state.restore import IndexStateFiles, StateRestoreOptions, choose_state
from index.display import DisplayMixin, iso_time
from index.plan.commits import Commit
from index.snapshot.contents import files_of, select_files
from index.snapshot.keys import check_file_name
from index.snapshot.model import Scope
from index.spark.checkpoint import (
    OFFSETS,
    QUERY_STORE,
    QUERY_TASK,
    SOURCES,
    CheckpointBackup,
    PathMap,
    StoredBackup,
    StoreId,
    choose_checkpoint_backup,
    decode_checkpoint_backup,
    join_entries,
    newest_entries,
    plan_cut,
    relocate_operator,
    select_query_files,
    single_operators,
)
from index.spark.names import check_store_dir
from index.spark.query_logs import decode_offsets
from tidemark.errors import TidemarkError


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
    # Where something of the backup is missing, take the newest of which everything is there (design 0006, M2).
    or_newest_complete: bool = False
    # A job of `StatefulJob.for_each_batch` in the same repository, which is taken back to the batch too (J2).
    with_job: str | None = None
    # Another number of state partitions (design 0010, section 3); changelogs are applied then. None: as it was.
    partitions: int | None = None
    # Number of stores worked on at once on this machine.
    stores_at_once: int = STORES_AT_ONCE
    # How a target that is a URL is asked.
    target_settings: StoreSettings | None = None


class CheckpointRestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore would write, or has written."""

    dry_run: bool = True
    job: str
    commit: Commit
    backup: CheckpointBackup
    # The batch that the query goes on after, and the oldest one that is in its logs.
    batch: int
    oldest_batch: int
    location: str
    stores: int
    # Of the stores and of the query.
    files: int
    size_bytes: int
    # Changelogs that would be applied with `replayed`, or are left for Spark to apply.
    changelogs: int
    # The job beside the query, and the number of its commit that it is taken back to; "" and 0 without one.
    with_job: str = ""
    job_commit: int = 0
    # Where another number of partitions is chosen.
    rescaled: RescaleFigures | None = None

    json_properties: ClassVar = {"query_id": "backup.query_id", "source": "backup.location", "damage": "backup.damage"}
    json_omitted: ClassVar = ("backup",)


class RestoredCheckpoint(DisplayMixin, CheckpointRestorePlan, frozen=True, kw_only=True):
    """What was restored, from which backup, and what it cost."""

    # Where the former content of the target is now; "" if there was none.
    moved_aside: str
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


# A backend: restores the stores, all of them, here or on executors.
RestoreStores = Callable[["CheckpointRestore", tuple[StoreToRestore, ...]], Awaitable[Sequence[StoreRestored]]]
# The same for another number of partitions.
RescaleStores = Callable[["CheckpointRestore", tuple[GroupToRescale, ...]], Awaitable[Sequence[GroupRescaled]]]


async def restore_checkpoint(
    repository: Repository,
    target: str | Path | CheckpointTarget,
    choice: RestoreChoice | None = None,
    *,
    partitioner: Partitioner = partitions_of,
    processes: Processes | None = None,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> RestoredCheckpoint:
    """Restore a checkpoint; a query that is started on it goes on after the batch.

    Without a choice it is the newest backup of the only job that has any. To the URL of a prefix of an object store,
    everything is gathered on this machine first, in the system's place for temporary files; on Spark it is not.
    `partitioner` hashes keys where another number of partitions is chosen, in `processes`, as of `rescale_checkpoint`.

    Raises:
        MisplacedKeyError, PartitionKeyError, StoreMergeError: With another number of partitions, as
            `engine.checkpoint.rescale.rescale_checkpoint`.
        NotFoundError: There is no such job, backup or batch.
        UsageError: The choice does not fit together, or a mapping of paths matches nothing.
        InvalidRequestError: The target does not follow the grammar of `open_store`.
        TargetError: The target may not be written, has content that may not be moved aside, or is the repository's
            place, above it or below it.
        DamagedError, FormatError: Something is missing or altered; the error names the file, and the blob.
        StoreError: As a blob store says. After any error the target is as it was, or, on an object store, lacks
            `commits/`; if what was there is aside already, the error's hint and a note say where.
    """
    choice, runtime = choice or RestoreChoice(), runtime or Runtime()
    at_once, transfer = share_among(repository.settings, choice.stores_at_once)
    done = AddedProgress(progress)

    async def restore_stores(restore: CheckpointRestore, work: tuple[StoreToRestore, ...]) -> Sequence[StoreRestored]:
        async def one(item: StoreToRestore) -> StoreRestored:
            place = restore.directory / item.id.path
            return await restore_store(repository, item, place, transfer=transfer, runtime=runtime, progress=done)

        files = sum(item.reference.files_count for item in work)
        progress.total(files=files, bytes_=sum(item.reference.size_bytes for item in work))
        return await map_bounded(one, work, in_flight_max=at_once)

    async def rescale_stores(restore: CheckpointRestore, work: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
        references = [reference for item in work for reference in item.references]
        progress.total(files=sum(r.files_count for r in references), bytes_=sum(r.size_bytes for r in references))
        how = Here(
            partitioner=partitioner, groups_at_once=at_once, processes=processes, progress=progress, runtime=runtime
        )
        return await rescale_here(of_backup(repository.store, transfer), work, restore.directory, how)

    place = target_of(choice, target, runtime) if isinstance(target, str | Path) else target
    return await run_restore(repository, place, choice, (restore_stores, rescale_stores), runtime)


@traced("spark.restore")
async def run_restore(
    repository: Repository,
    target: CheckpointTarget,
    choice: RestoreChoice,
    backends: tuple[RestoreStores, RescaleStores],
    runtime: Runtime,
) -> RestoredCheckpoint:
    """Carry out all steps of `restore_checkpoint` with backends for the stores."""
    restore_stores, rescale_stores = backends
    restore = CheckpointRestore(repository, target, choice, runtime)

    async def commits() -> Sequence[Commit]:
        return await repository.commits(Scope(restore.job)) if restore.job else ()

    async with contextlib.aclosing(restore):
        try:
            async with naming_complete(repository.store, commits, name=_name_backup):
                work = await restore.begin()
                if choice.partitions is None:
                    restored = await restore_stores(restore, work)
                else:
                    restored = await restore.rescale(work, choice.partitions, rescale_stores)
            return await restore.finish(restored)
        except BaseException as error:
            if aside := target.moved_aside:
                error.add_note(f"the former content of {target.location} is at {aside}, whole")
                if isinstance(error, TidemarkError):
                    error.hint = f"its former content is at {aside}: keep it, and restore again; {error.hint}"
            raise


async def plan_checkpoint_restore(
    repository: Repository,
    target: str | Path | CheckpointTarget,
    choice: RestoreChoice,
    *,
    partitioner: Partitioner = partitions_of,
    processes: Processes | None = None,
) -> CheckpointRestorePlan:
    """Find out what `restore_checkpoint` would restore, or what it would refuse.

    Nothing is written but a pin, and files that are deleted again. With another number of partitions the state is
    fetched, and every key hashed.
    """
    runtime = Runtime()
    place = target_of(choice, target, runtime) if isinstance(target, str | Path) else target
    restore = CheckpointRestore(repository, place, choice, runtime)
    async with contextlib.aclosing(restore):
        async with scratch_dir() as scratch:
            work = await restore.begin(scratch)
            if choice.partitions is not None:
                at_once, transfer = share_among(repository.settings, choice.stores_at_once)
                how = Here(partitioner=partitioner, groups_at_once=at_once, processes=processes, runtime=runtime)
                opened, below = of_backup(repository.store, transfer), scratch / "stores"
                await restore.rescale(work, choice.partitions, lambda _, groups: look_here(opened, groups, below, how))

        async def look(item: StoreToRestore) -> StoreRestored:
            at = item.store.at
            options = StateRestoreOptions(version=at.version, unique_id=at.unique_id, codec=item.store.settings.codec)
            chosen = await choose_state(repository.opened, item.reference, options)
            sizes = [entry.metadata.size_bytes for _, entry in files_of(chosen.index.dir)]
            return StoreRestored(
                id=item.id, files=len(sizes), size_bytes=sum(sizes), changelogs=len(chosen.resolution.changelogs)
            )

        return restore.planned(await map_bounded(look, work, in_flight_max=choice.stores_at_once))


class CheckpointRestore:
    """One restore, from the choice of the backup to the last file; `aclose` ends it, and closes the target.

    `job` is empty until it is found; `directory` is where the checkpoint is gathered, once it has begun: a store
    belongs to `StoreId.path` below it.
    """

    def __init__(
        self, repository: Repository, target: CheckpointTarget, choice: RestoreChoice, runtime: Runtime
    ) -> None:
        self._repository = repository
        self._target = target
        if choice.partitions is not None:
            check_partitions(choice.partitions)
            choice = msgspec.structs.replace(choice, replayed=True)
        self._choice = choice
        self.job = choice.job or ""
        self._watch = Stopwatch(runtime)
        self._resources = contextlib.AsyncExitStack()
        self._runtime = runtime
        self._wanted: set[StoreId] = set()
        self._rescaled: RescaleFigures | None = None
        # Of the job beside the query.
        self._job_commit: Commit | None = None
        self._requests = self._files = self._size_bytes = self._bytes_fetched = 0

    async def begin(self, scratch: Path | None = None) -> tuple[StoreToRestore, ...]:
        """Choose and pin the backup, claim the target, and restore the files of the query; return its stores.

        With `scratch` they are gathered there, and the target is only looked at.
        """
        choice = self._choice
        await check_apart(self._target, self._repository.store)
        self.job = self.job or await find_job(self._repository)
        await self._pin_backup()
        # Another backup than the one that was asked for need not have the batch.
        has_batch = choice.batch is not None and self.backup.oldest_batch <= choice.batch <= self.backup.batch
        self.batch = choice.batch if choice.batch is not None and has_batch else self.backup.batch
        self.oldest_batch = self.batch if choice.replayed else self.backup.oldest_batch
        if choice.with_job is not None:
            query_id = self.backup.query_id
            self._job_commit = await find_batch_commit(self._repository, choice.with_job, query_id, self.batch)
        reference = require_store(self.commit, QUERY_TASK, QUERY_STORE)
        index, self._requests = await read_index_of(self._repository.store, reference)
        entries = dict(files_of(index.dir))
        chosen = select_query_files(entries, oldest_batch=self.oldest_batch, batch=self.batch)
        selected = select_files(index, [(path, entries[path]) for path in chosen])
        if scratch is None:
            await self._target.open(self.backup.query_id, self.batch)
        else:
            await self._target.check(self.backup.query_id, self.batch)
        self.directory = scratch or self._target.directory
        fetched = await download_index(self._repository.store, selected, self.directory, self._repository.settings)
        self._requests += fetched.requests
        self._bytes_fetched += fetched.bytes_fetched
        if choice.partitions is not None:
            await self._bring_schemas()
        work = await self._stores()
        self._wanted = {item.id for item in work}
        await run_blocking(adapt_query_files, self.directory, self._target.root, choice.map_paths)
        await run_blocking(self._count)
        return work

    async def _pin_backup(self) -> None:
        """Find the backup and keep it from being collected until this is closed (R9, and design 0002, D5).

        Raises as `find_checkpoint_backup`. CollectedError: every choice was collected before its pin was written.
        IncompleteError: the newest complete one was asked for, and none is.
        """
        repository, choice = self._repository, self._choice
        for attempt in range(CHOICES_MAX):
            chosen = await find_checkpoint_backup(repository, self.job, batch=choice.batch, at_ms=choice.at_ms)
            if choice.or_newest_complete:
                chosen = await _or_newest_complete(repository, self.job, chosen)
            self.commit, self.backup = chosen
            try:
                pin = repository.pinned(self.commit, "restore checkpoint")
                self._lease = await self._resources.enter_async_context(pin)
            except CollectedError:
                if attempt == CHOICES_MAX - 1:
                    raise
            else:
                return

    async def rescale(
        self, work: Sequence[StoreToRestore], partitions: int, backend: RescaleStores
    ) -> list[StoreRestored]:
        """Make the stores of another number of partitions, and rewrite the files of the query for them."""
        references = {item.id: item.reference for item in work}
        async with opened_checkpoint(self.directory) as root:
            groups = await plan_groups(root, self.query, partitions, self._runtime, references=references)
        ids = ids_of(groups)
        rewrite = rewritten(self.query, ids, {}, partitions=partitions)

        def write() -> None:
            # They hold nothing but schemas, which are part of the work by now.
            for item in work:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self.directory / item.id.path)
            for path in files_below(self.directory):
                _change(self.directory / path, partial(rewrite, path))
            self._count()

        await run_blocking(write)
        self._wanted = set(ids)
        made = await backend(self, groups)
        self._rescaled = add_up(self.query, partitions, made, groups)
        return [store for group in made for store in group.stores]

    async def finish(self, restored: Sequence[StoreRestored]) -> RestoredCheckpoint:
        """Put everything in its place. UsageError: a store is missing, and the checkpoint would not be whole."""
        if missing := self._wanted - {store.id for store in restored}:
            names = ", ".join(map(str, sorted(missing)))
            raise UsageError(f"stores were not restored: {names}", operation="restore", subject=self._target.location)
        if self._job_commit is not None:
            # First: a query that is ahead of its job is refused, and one behind it would plan a batch again (J2).
            await take_back(self._repository, self._job_commit)
        await self._target.publish({store.id: store.published for store in restored})
        leftovers = await self._target.aclose()
        return RestoredCheckpoint(
            **msgspec.structs.asdict(self.planned(restored)) | {"dry_run": False},
            moved_aside=self._target.moved_aside,
            bytes_fetched=self._bytes_fetched + sum(store.bytes_fetched for store in restored),
            requests=self._requests + sum(store.requests for store in restored),
            records=sum(store.records for store in restored),
            seconds=self._watch.total_s(),
            pinned=self._lease.pinned,
            leftovers=leftovers,
        )

    def planned(self, stores: Sequence[StoreRestored]) -> CheckpointRestorePlan:
        return CheckpointRestorePlan(
            job=self.job,
            commit=self.commit,
            backup=self.backup,
            batch=self.batch,
            oldest_batch=self.oldest_batch,
            location=self._target.location,
            stores=len(stores) if self._rescaled is None else self._rescaled.stores,
            files=self._files + sum(store.files for store in stores),
            size_bytes=self._size_bytes + sum(store.size_bytes for store in stores),
            changelogs=sum(store.changelogs for store in stores),
            with_job=self._choice.with_job or "",
            job_commit=self._job_commit.pointer.number if self._job_commit is not None else 0,
            rescaled=self._rescaled,
        )

    async def aclose(self) -> None:
        try:
            await self._target.aclose()
        finally:
            await self._resources.aclose()

    async def _stores(self) -> tuple[StoreToRestore, ...]:
        """List the stores of the batch, as the files of the query say, and where the backup has them."""
        stores = self.commit.record.stores
        # The schema that shows which operators have one partition comes with their stores, or was brought.
        single = single_operators(stores, self.backup.batch + 1) if self._choice.partitions is None else ()
        async with opened_checkpoint(self.directory) as root:
            checkpoint = StreamingCheckpoint(root, single=single)
            query_id = await checkpoint.query_id()
            if query_id != self.backup.query_id:
                raise self._damaged(f"is of query {query_id}, not of {self.backup.query_id}", "metadata")
            self.query = query = await checkpoint.at(self.batch)
        references = {(r.task, r.store): r for r in stores if r.version == self.backup.batch + 1}
        work = []
        for store in query.stores:
            reference = references.get((store.id.task, store.id.store))
            if reference is None:
                raise self._damaged("is not in the backup, and the query has it", f"store {store.id}")
            work.append(StoreToRestore(store=store, reference=reference, replayed=self._choice.replayed))
        return tuple(work)

    async def _bring_schemas(self) -> None:
        for reference in self.commit.record.stores:
            of = StoreId.parse(reference.task, reference.store)
            if of is None or of.partition != 0 or reference.version != self.backup.batch + 1:
                continue
            check_store_dir(of.store)
            index, requests = await read_index_of(self._repository.store, reference)
            files = IndexStateFiles(self._repository.store, index, self._repository.settings)
            await bring_row_schema(files, self.directory, of)
            self._requests += requests + files.requests

    def _count(self) -> None:
        sizes = [path.stat().st_size for path in self.directory.rglob("*") if path.is_file()]
        self._files, self._size_bytes = len(sizes), sum(sizes)

    def _damaged(self, reason: str, subject: str) -> DamagedError:
        hint = "the backup is not whole; restore from another one"
        where = f"commit {self.commit.pointer.number} of {self.job}: {subject}"
        return DamagedError(reason, operation="restore", subject=where, hint=hint)


def _name_backup(commit: Commit) -> str:
    backup = decode_checkpoint_backup(commit.record.offsets)
    return name_commit(commit) if backup is None else f"the backup of batch {backup.batch}"


def adapt_query_files(checkpoint: Path, root: str, map_paths: Mapping[str, str]) -> None:
    """Change the files of a query to fit their batch and their place, `root` (R2, R5). Blocks."""
    batches = sorted(int(path.name) for path in (checkpoint / OFFSETS).iterdir())
    logs = [f"{OFFSETS}/{batch}" for batch in batches]
    history = [decode_offsets((checkpoint / name).read_bytes(), subject=name).offsets for name in logs]
    paths = [path.relative_to(checkpoint).parts for path in checkpoint.glob(f"{SOURCES}/*/*")]
    for name, entry in newest_entries(history, paths).items():
        log = checkpoint / SOURCES / check_file_name(name)
        if log.is_dir():
            _cut_source_log(log, entry)
    _relocate(checkpoint, root, map_paths)


def _cut_source_log(log: Path, newest: int) -> None:
    """Cut the log of a file source so that it ends with an entry (R2). Blocks."""
    cut = plan_cut([path.name for path in log.iterdir()], newest)
    if cut.written:
        files = [(f"{SOURCES}/{log.name}/{name}", (log / name).read_bytes()) for name in cut.joined]
        write_like(log / cut.written, join_entries(files, newest), (log / cut.joined[-1]).stat())
    for name in cut.dropped:
        (log / name).unlink()


def _relocate(checkpoint: Path, root: str, map_paths: Mapping[str, str]) -> None:
    """Rewrite what names an absolute path: `root` is for `relocate_operator` (R5). Blocks."""
    for file in sorted(checkpoint.glob("state/*/_metadata/v2/*")):
        _change(file, partial(relocate_operator, target=root, subject=file.relative_to(checkpoint).as_posix()))
    if not map_paths:
        return
    inputs = PathMap(map_paths)
    for file in sorted(checkpoint.glob(f"{SOURCES}/**/*")):
        if file.is_file():
            _change(file, inputs.relocate_log)
    if inputs.unused:
        message = f"nothing in {SOURCES}/ begins with {', '.join(sorted(inputs.unused))}"
        hint = "give the old prefix as the query had it; only file sources name paths"
        raise UsageError(message, operation="map paths", hint=hint)


def _change(file: Path, rewrite: Callable[[bytes], bytes]) -> None:
    before = file.read_bytes()
    if (after := rewrite(before)) != before:
        write_like(file, after, file.stat())


def write_like(file: Path, data: bytes, like: os.stat_result, *, is_synced: bool = True) -> None:
    """Write a file with the time and permissions of another one; synced, if it is to stay there (R8)."""
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fchmod(opened.fileno(), like.st_mode & 0o777)
        os.utime(opened.fileno(), ns=(like.st_atime_ns, like.st_mtime_ns))
        if is_synced:
            flush(opened.fileno())


def target_of(choice: RestoreChoice, target: str | Path, runtime: Runtime) -> CheckpointTarget:
    """Make the target of a restore, as `make_target`."""
    return make_target(target, runtime, move_aside=choice.move_aside, settings=choice.target_settings)


def make_target(
    target: str | Path, runtime: Runtime, *, move_aside: bool, settings: StoreSettings | None
) -> CheckpointTarget:
    """Make the target that a path or a URL names: `s3a:` and `s3n:`, as Spark has them, mean the same as `s3:`.

    Raises:
        InvalidRequestError: It does not follow the grammar of `open_store`.
        TargetError: It names no place for a checkpoint.
    """
    if isinstance(target, str) and target.startswith("~"):
        hint = "write the path, or ./ before it if that is its name"
        raise TargetError("begins with ~, as only shells read", operation="restore", subject=target, hint=hint)
    path = local_path_of(target)
    if path is not None:
        # What does not exist on the way back is not made: it might be in the source.
        path = path.resolve() if ".." in path.parts else path
        return DirectoryTarget(path, runtime, move_aside=move_aside)
    location = str(target).rstrip("/")
    check_url(store_url(location))  # what is refused is not repeated: it may hold a secret
    parent, _, name = store_url(location).rpartition("/")
    if not name or parent.endswith("/"):
        hint = "restore to s3://bucket/prefix"
        raise TargetError("not a prefix of a bucket", operation="restore", subject=location, hint=hint)
    return ObjectTarget(parent, name, location=location, runtime=runtime, move_aside=move_aside, settings=settings)


# ---------------------------------------------------------------------- the backups of a job (P8, P9 and R1)

_FIND: Final = "find backup"
# Ranges of batches that a hint lists.
_SHOWN_MAX: Final = 8
_HINT: Final = "take one with `tidemark spark backup`"


async def find_job(repository: Repository) -> str:
    """Return the only job of a repository that has backups; a list, and for each job two requests or three.

    NotFoundError: there is none. UsageError: there are several; it names them, with their places and newest batches.
    """
    found: list[tuple[str, CheckpointBackup]] = []
    for scope in await repository.scopes():
        newest = await repository.latest(scope) if scope.task is None else None
        backup = None if newest is None else decode_checkpoint_backup(newest.record.offsets)
        if backup is not None:
            found.append((scope.job, backup))
    if not found:
        raise NotFoundError("the repository has no checkpoint backup", operation=_FIND, hint=_HINT)
    if len(found) > 1:
        said = "; ".join(f"{job}: {backup.location}, batch {backup.batch}" for job, backup in found)
        raise UsageError("more than one job has checkpoint backups", operation=_FIND, hint=f"choose a job: {said}")
    return found[0][0]


async def find_checkpoint_backup(
    repository: Repository, job: str | None, *, batch: int | None = None, at_ms: int | None = None
) -> StoredBackup:
    """Find the backup that a batch, or a time, is restored from; the newest if neither is given (R1).

    Without a job as `find_job`. NotFoundError: there is none; it says which there are. UsageError: both are given.
    """
    job = job or await find_job(repository)
    if batch is not None and at_ms is not None:
        raise UsageError("a batch and a time are given", operation=_FIND, subject=job, hint="give one of them")
    if batch is None and at_ms is None:
        latest = await repository.latest(Scope(job))
        backup = None if latest is None else decode_checkpoint_backup(latest.record.offsets)
        if latest is not None and backup is not None:
            return latest, backup
    backups = await _list_backups(repository, job)
    found = choose_checkpoint_backup(backups, batch=batch, at_ms=at_ms)
    if found is not None:
        return found
    if not backups:
        raise NotFoundError("the job has no checkpoint backup", operation=_FIND, subject=job, hint=_HINT)
    wanted = f"batch {batch}" if at_ms is None else iso_time(at_ms)
    oldest, newest = (iso_time(backups[at][0].committed_at_ms) for at in (-1, 0))
    ranges: list[tuple[int, int]] = []
    for first, last in sorted((backup.oldest_batch, backup.batch) for _, backup in backups):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    shown = (f"{first} to {last}" if first < last else f"{first}" for first, last in ranges[-_SHOWN_MAX:])
    few = "…, " * (len(ranges) > _SHOWN_MAX) + ", ".join(shown)
    hint = f"batches that can be restored: {few}; backups of {oldest} to {newest}"
    raise NotFoundError(f"no backup has {wanted}", operation=_FIND, subject=job, hint=hint)


async def _list_backups(repository: Repository, job: str) -> tuple[StoredBackup, ...]:
    """List every backup of a job, newest first: one GET for each commit."""
    commits = await repository.commits(Scope(job))
    return tuple((c, backup) for c in commits if (backup := decode_checkpoint_backup(c.record.offsets)) is not None)


async def _or_newest_complete(repository: Repository, job: str, chosen: StoredBackup) -> StoredBackup:
    """Return a backup; if something of it is missing, the newest that is whole (0006, M2). IncompleteError: none is."""
    if await find_complete(repository.store, [chosen[0]]) is not None:
        return chosen
    backups = await _list_backups(repository, job)
    complete = await find_complete(repository.store, [commit for commit, _ in backups])
    if complete is None:
        message = f"something of the backup of batch {chosen[1].batch} is missing, and of every other one"
        raise IncompleteError(message, operation=_FIND, subject=job)
    return next(taken for taken in backups if taken[0].pointer == complete.pointer)
