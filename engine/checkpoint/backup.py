"""Back up a streaming query's checkpoint while the query goes on (design 0005, section 2).

`backup_checkpoint` does all of it on this machine. `run_backup` is the same flow for any backend: `begin_backup` on one
machine, `backup_store` wherever the backend runs it, `finish_backup` on the first machine again. Nothing is visible
before that one has made the commit.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from blobstore.tracing import traced
from engine.backup.backup import BackupOptions, BackupResult, check_shrinking
from engine.checkpoint.check import check_logs, confirm_logs
from engine.checkpoint.errors import DAMAGE_HINT, QueryMovedOnError, error_context, redact_paths
from engine.checkpoint.findings import Finding, damaged_paths
from engine.checkpoint.live import LiveStore, QueryFiles, StoreToBackUp, live_files, sst_bytes
from engine.commit.writer import until_known
from engine.errors import (
    DamagedError,
    EngineError,
    NotFoundError,
    SourceChangedError,
    UnsafeSourceError,
    UsageError,
    bare_message,
)
from engine.local.digests import hash_content
from engine.records.find import find_complete
from engine.records.indexes import read_index
from engine.repository.repository import Repository
from engine.runtime import NO_PROGRESS, Progress, Runtime, SummedProgress
from engine.settings import STORES_AT_ONCE, TransferSettings, share_among
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, QueryAt, StreamingCheckpoint
from index.display import DisplayMixin, count, encodable
from index.errors import FormatError, VersionMissingError
from index.plan.commits import SHRINK_FLOOR_BYTES, Commit
from index.snapshot.contents import files_of
from index.snapshot.model import Scope, StoreReference
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, CheckpointBackup, StoreId, decode_checkpoint_backup
from index.spark.lineage import Lineage

OPERATION: Final = "backup checkpoint"
ATTEMPTS_MAX: Final = 3
# What the query may have done to what was being read (P6).
MOVED: Final = (UnsafeSourceError, VersionMissingError)


class BackupChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to back up, and how."""

    # The job that the backups belong to; `spark-<query id>` if not given.
    job: str | None = None
    # Whether what the newest backup has is looked for, and sent again where it is missing, also if that backup is of
    # this batch already (design 0006, M1); a STAT for each blob.
    check_retained: bool = False
    # Go on with the job also if its newest backup is of another place, whose batch this checkpoint lacks (P9).
    moved: bool = False
    # How many batches before the newest can be restored as well, as far as the checkpoint has their state (P3).
    keep_batches: int = 0
    # Take over what is damaged, as far as it is there and can be put together; the commit says so (P5).
    despite_damage: bool = False
    # Refuse to shrink the state stores, taken together, by more than this share of the bytes in their SSTs (0006, P8);
    # None: never refuse.
    shrink_max: float | None = None
    # Number of stores worked on at once on this machine.
    stores_at_once: int = STORES_AT_ONCE
    # Where files of a checkpoint on another store are fetched to; the system's place if not given.
    scratch: Path | None = None
    # How the checkpoint's store is asked; ignored where it is given as a store.
    checkpoint_settings: StoreSettings | None = None


class CheckpointBackupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch to back up, and what it is compared with."""

    scope: Scope
    query_id: str
    location: str
    at: QueryAt
    # The newest commit of the job, the parent of the one to come.
    parent: Commit | None
    # What that commit holds if it is of this very batch (P11): then there is nothing to do.
    taken: CheckpointBackup | None = None
    # The same stores at batches before this one, newest first.
    older: tuple[QueryAt, ...] = ()
    # Whether that commit was made despite damage.
    distrust: bool = False

    def base(self, task: str, store: str) -> StoreReference | None:
        return None if self.parent is None else self.parent.store(task, store)

    @property
    def stores(self) -> tuple[StoreToBackUp, ...]:
        older = [{store.id: store.at for store in query.stores} for query in self.older]
        return tuple(
            StoreToBackUp(
                store=s,
                base=self.base(s.id.task, s.id.store),
                older=tuple(versions[s.id] for versions in older),
                distrust=self.distrust,
            )
            for s in self.at.stores
        )


class StoreBackup(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one state store, or for the query's own files."""

    # None: the query's own files.
    id: StoreId | None
    result: BackupResult
    # Of the snapshot that it begins with.
    base_version: int = 0
    # In SSTs, now and in the newest backup.
    sst_bytes: int = 0
    base_sst_bytes: int = 0
    # The versions with ids that it grew from.
    lineage: Lineage = ()
    # How many were made of the checkpoint's store.
    source_requests: int = 0
    # SSTs that could not be checked, and why.
    unchecked: tuple[str, ...] = ()
    # What was taken over despite damage.
    findings: tuple[Finding, ...] = ()


class BackupTotals(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a backup, and what was sent for it."""

    stores: int = 0
    files: int = 0
    size_bytes: int = 0
    files_added: int = 0
    bytes_added: int = 0
    # With what was packed again.
    bytes_uploaded: int = 0
    # Of the repository, and of the checkpoint if that is on another blob store than a file system.
    requests: int = 0
    source_requests: int = 0


class CheckpointBackupResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint backup, and what it cost."""

    commit: Commit
    backup: CheckpointBackup
    # False: the newest backup is of this batch already, and nothing was done.
    is_new: bool
    # The state, and the query's own files.
    state: BackupTotals = BackupTotals()
    query: BackupTotals = BackupTotals()
    unchecked: tuple[str, ...] = ()
    # Warnings of the check of the logs, and the damage that was taken over.
    findings: tuple[Finding, ...] = ()
    attempts: int = 1
    seconds: float = 0.0

    json_properties: ClassVar = {
        "job": "commit.record.scope.job",
        "query_id": "backup.query_id",
        "batch": "backup.batch",
        "oldest_batch": "backup.oldest_batch",
        "location": "backup.location",
        "damage": "backup.damage",
    }
    json_omitted: ClassVar = ("backup",)


class BackupPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before any file but zips and a few changelogs is read."""

    dry_run: bool = True
    job: str
    query_id: str
    batch: int
    # The newest backup is of this batch already.
    is_taken: bool
    stores: int
    # The state; the query's own files are few and small.
    files: int
    size_bytes: int
    # Of these, what the newest backup does not have by name: an upper bound of what would be uploaded.
    files_new: int
    bytes_new: int


# A backend: backs up the stores of a plan, all of them, here or on executors.
BackUpStores = Callable[[CheckpointBackupPlan], Awaitable[Sequence[StoreBackup]]]


async def backup_checkpoint(
    repository: Repository,
    location: str | Path | BlobStore,
    choice: BackupChoice | None = None,
    *,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> CheckpointBackupResult:
    """Back up a query's newest committed batch. The query may run meanwhile.

    Requests: section 7 of design 0005. `location` is the checkpointLocation: a path, a URL as `open_store` takes it, or
    a blob store that has it as its root.

    Raises:
        NotFoundError: There is no checkpoint, or no batch is committed.
        ProviderError: The state is not RocksDB's.
        UsageError: The job has something else than backups of this query, or those of another copy of it (P9).
        DamagedError, FormatError: A file is not whole (P5), or not there; the error names it, and nothing was
            committed.
        QueryMovedOnError: The query took away what was being read, again and again (P6).
        ConflictError: Another backup of the query was committed meanwhile.
        ShrunkError: The stores shrink by more than they may; nothing was committed.
        StoreError: As the blob stores say.
    """
    choice = choice or BackupChoice()
    async with opened_checkpoint(location, choice.checkpoint_settings) as root:
        at_once, share = share_among(repository.settings, choice.stores_at_once)
        sums = SummedProgress(progress)

        async def back_up_stores(plan: CheckpointBackupPlan) -> Sequence[StoreBackup]:
            async def back_up(work: StoreToBackUp) -> StoreBackup:
                return await backup_store(
                    repository, root, plan.scope, work, choice, settings=share, progress=sums.part()
                )

            return await map_bounded(back_up, plan.stores, in_flight_max=at_once)

        return await run_backup(
            repository, root, back_up_stores, choice, progress=sums.part(), runtime=runtime or Runtime()
        )


@traced("spark.backup")
async def run_backup(
    repository: Repository,
    root: CheckpointDir,
    back_up_stores: BackUpStores,
    choice: BackupChoice,
    *,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime,
) -> CheckpointBackupResult:
    """Carry out all steps with a backend for the stores; again if the query moves on under it (P6)."""
    began_s = runtime.monotonic_s()
    failed: tuple[int, Exception] | None = None
    look = root.look()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        look = look.look(again=True)
        plan = await _begin_checked(repository, look, choice)
        if plan.parent is not None and plan.taken is not None:
            return CheckpointBackupResult(commit=plan.parent, backup=plan.taken, is_new=False, attempts=attempt)
        try:
            findings = await refuse_damaged_logs(look, despite_damage=choice.despite_damage)
            stores = await back_up_stores(plan)
            done = await finish_backup(repository, look, plan, stores, choice, findings=findings, progress=progress)
        except MOVED as error:
            # What is missing at a batch is missing: only a query that goes on is worth another look.
            if failed is not None and failed[0] == plan.at.batch and not isinstance(error, SourceChangedError):
                if isinstance(error, VersionMissingError):
                    message = bare_message(error)
                    raise DamagedError(message, operation=OPERATION, subject=error.subject, hint=DAMAGE_HINT) from error
                raise
            failed = plan.at.batch, error
            continue
        return msgspec.structs.replace(done, attempts=attempt, seconds=runtime.monotonic_s() - began_s)
    assert failed is not None  # noqa: S101  # every other end of an attempt leaves the loop
    message = f"was read {ATTEMPTS_MAX} times, and each time the query took away a part; the last time at batch "
    message += f"{failed[0]}: {failed[1]}"
    raise QueryMovedOnError(message, operation=OPERATION, subject=root.location) from failed[1]


async def _begin_checked(repository: Repository, root: CheckpointDir, choice: BackupChoice) -> CheckpointBackupPlan:
    """Begin as `begin_backup`; where the logs do not say what to back up, damage is the reason, if there is any."""
    try:
        return await begin_backup(repository, root, choice)
    except (NotFoundError, UsageError, FormatError) as error:
        if isinstance(error, UsageError) and not error.subject.startswith(root.location):
            raise  # of the job
        await refuse_damaged_logs(root)
        raise


async def refuse_damaged_logs(root: CheckpointDir, *, despite_damage: bool = False) -> tuple[Finding, ...]:
    """Find what `check` finds in the logs and the metadata of the query (P5, K2). DamagedError: it is damage."""
    findings = (await confirm_logs(root, await check_logs(root))).findings
    damaged = [finding for finding in findings if finding.kind == "damage"]
    if damaged and not despite_damage:
        more = len(damaged_paths(damaged)) - 1
        message = damaged[0].message + (f"; and {count(more, 'file')} more" if more else "")
        subject = f"{root.location}/{damaged[0].path}"
        raise DamagedError(message, operation=OPERATION, subject=subject, hint=DAMAGE_HINT)
    return findings


async def preview_backup(
    repository: Repository, location: str | Path | BlobStore, choice: BackupChoice | None = None
) -> BackupPreview:
    """Find out what `backup_checkpoint` would do; nothing is written."""
    choice = choice or BackupChoice()
    async with opened_checkpoint(location, choice.checkpoint_settings) as root:
        logs = root.look()
        plan = await _begin_checked(repository, logs, msgspec.structs.replace(choice, check_retained=False))
        if plan.taken is None:
            await refuse_damaged_logs(logs, despite_damage=choice.despite_damage)

        async def look(work: StoreToBackUp) -> tuple[int, int, int, int, int, int]:
            base = None if work.distrust else work.base
            previous = None if base is None else await read_index(repository.store, base.index)
            async with live_files(root.child(work.store.id.path), choice.scratch) as files:
                live = LiveStore(files, work, despite_damage=choice.despite_damage)
                with error_context(files.location, private=files.directory):
                    chosen, known = await live.choose(previous)
            base_bytes = await _base_sst_bytes(repository, work, live)
            new = [file.metadata.size_bytes for path, file in chosen.items() if path not in known]
            size_bytes = sum(file.metadata.size_bytes for file in chosen.values())
            return len(chosen), size_bytes, len(new), sum(new), base_bytes, live.sst_bytes

        found = await map_bounded(look, plan.stores, in_flight_max=choice.stores_at_once)
    files, size_bytes, files_new, bytes_new = (sum(row[at] for row in found) for at in range(4))
    if plan.taken is None:
        _check_shrinking(plan, [row[4:] for row in found], choice)
    return BackupPreview(
        job=plan.scope.job,
        query_id=plan.query_id,
        batch=plan.at.batch,
        is_taken=plan.taken is not None,
        stores=len(plan.at.stores),
        files=files,
        size_bytes=size_bytes,
        files_new=files_new,
        bytes_new=bytes_new,
    )


async def begin_backup(repository: Repository, root: CheckpointDir, choice: BackupChoice) -> CheckpointBackupPlan:
    """Find out which batch is to be backed up, and what it is compared with (P1, P2, P9).

    Costs a list of `commits/`, two GETs of logs, one of `metadata`, a list and two or three requests for each operator,
    three GETs more if the newest backup is of the same batch, two if it is of another place; of the repository a list,
    and a GET or two, and a STAT for each index that is new in that backup if it is of the same batch.
    """
    checkpoint = StreamingCheckpoint(root)
    with error_context(root.location, None):
        query_id = await checkpoint.query_id()
    scope = Scope(choice.job or f"spark-{query_id}")
    parent = await repository.head(scope)
    newest = None if parent is None else _backup_of(parent, query_id)
    with error_context(root.location, None):
        at = await checkpoint.at()
        if parent is not None and not at.stores:
            _check_stateless(parent)
    location = root.location if root.local_root is None else encodable(str(root.local_root.absolute()))
    plan = CheckpointBackupPlan(scope=scope, query_id=query_id, location=location, at=at, parent=parent)
    if choice.keep_batches:
        plan = msgspec.structs.replace(plan, older=await _older(checkpoint, at, choice.keep_batches))
    if parent is None or newest is None:
        return plan
    plan = msgspec.structs.replace(plan, distrust=newest.damaged > 0)
    is_elsewhere = newest.location != location and not choice.moved
    if is_elsewhere and root.local_root is not None:
        # By a symbolic link it may be the same directory.
        places = await run_blocking(lambda: {os.path.realpath(place) for place in (newest.location, location)})
        is_elsewhere = len(places) > 1
    entries = [(COMMITS, newest.batch), (OFFSETS, newest.batch)]
    if is_elsewhere and not await _has_logs(repository, root, plan, entries):
        # Two copies share a job: this one lacks the newest backed-up batch, or has run another one under its number.
        message = f"{location} does not have batch {newest.batch} that was backed up from {newest.location}"
        hint = "give each copy of a checkpoint a job of its own (--job); to go on with this one alone, say --moved"
        raise UsageError(message, operation=OPERATION, subject=str(scope), hint=hint)
    # A query may have been taken back and come to this number again, which its logs say; and the offsets of the batch
    # that follows are part of the backup (P7).
    entries += [(OFFSETS, newest.batch + 1)]
    if plan.distrust and not choice.despite_damage:
        return plan
    if newest.batch != at.batch or not await _has_logs(repository, root, plan, entries):
        return plan
    try:
        # A commit of which something is gone does not count: another one sends it again.
        await repository.settle(parent)
    except DamagedError:
        return plan
    if choice.check_retained and await find_complete(repository.store, [parent]) is None:
        return plan
    return msgspec.structs.replace(plan, taken=newest)


async def _older(checkpoint: StreamingCheckpoint, at: QueryAt, batches_max: int) -> tuple[QueryAt, ...]:
    """Read the batches right before one, newest first, as far as they are there and can be read."""
    found: list[QueryAt] = []
    for batch in range(at.batch - 1, max(-1, at.batch - 1 - batches_max), -1):
        try:
            older = await checkpoint.at(batch)
        except (EngineError, FormatError):
            break  # purged; or damaged, which the check of the logs finds
        if {store.id for store in older.stores} != {store.id for store in at.stores}:
            break  # of another shape: the backup has no place for all of it
        found.append(older)
    return tuple(found)


def _check_shrinking(plan: CheckpointBackupPlan, ssts: Sequence[Sequence[int]], choice: BackupChoice) -> None:
    """Refuse stores with so much less in their SSTs, taken together, that they may be the wrong ones (0006, P8)."""
    before_bytes, after_bytes = sum(before for before, _ in ssts), sum(after for _, after in ssts)
    subject = f"state of {plan.location}"
    check_shrinking(before_bytes, after_bytes, choice.shrink_max, subject=subject, floor_bytes=SHRINK_FLOOR_BYTES)


def _check_stateless(parent: Commit) -> None:
    """Refuse a query whose state has vanished: in version 1 its logs do not say whether it has any."""
    stores = [store for store in parent.record.stores if StoreId.parse(store.task, store.store) is not None]
    had = sum(store.version == parent.record.version for store in stores)
    if had:
        message = f"has no state, and the newest backup has {count(had, 'store')}"
        raise DamagedError(message, operation=OPERATION, subject="state")


async def _has_logs(
    repository: Repository, root: CheckpointDir, plan: CheckpointBackupPlan, entries: Sequence[tuple[str, int]]
) -> bool:
    """Compare entries of the checkpoint's logs with those of the newest backup; absent on both sides is equal."""
    reference = plan.base(QUERY_TASK, QUERY_STORE)
    if reference is None:
        return False
    try:
        index = await read_index(repository.store, reference.index)
    except DamagedError:
        # The next backup heals it, if it is missing, or says what is wrong (design 0006, M1).
        return False
    there = {path: file.blake3 for path, file in files_of(index.dir)}
    for log, number in entries:
        now = None
        with contextlib.suppress(BlobNotFoundError):
            now = hash_content(await root.read(f"{log}/{number}", size_bytes_max=ENTRY_BYTES_MAX))
        if now != there.get((log, str(number))):
            return False
    return True


async def backup_store(
    repository: Repository,
    root: CheckpointDir,
    scope: Scope,
    work: StoreToBackUp,
    choice: BackupChoice,
    *,
    settings: TransferSettings | None = None,
    progress: Progress = NO_PROGRESS,
) -> StoreBackup:
    """Upload what one store of a batch has and the newest backup lacks (P3 to P6).

    Costs of the checkpoint's store a list, a GET of the zip and of each file that is new; of the repository as any
    backup. `settings` say how bytes are moved, in place of the repository's own.

    Raises:
        UnsafeSourceError, VersionMissingError: The query has taken away a part, or it was never there.
        DamagedError, FormatError: A file is not whole.
        StaleResultError: Another backup was committed meanwhile.
        StoreError: As the blob stores say.
    """
    store = work.store
    options = BackupOptions(
        version=store.at.version,
        unique_id=store.at.unique_id,
        base=work.base,
        check_retained=choice.check_retained,
        by_content=work.distrust,
        settings=settings,
    )
    async with live_files(root.child(store.id.path), choice.scratch) as files:
        live = LiveStore(files, work, despite_damage=choice.despite_damage)
        with redact_paths(files.location, files.directory):
            result = await repository.backup(
                scope, live, task=store.id.task, store=store.id.store, options=options, progress=progress
            )
    return StoreBackup(
        id=store.id,
        result=result,
        base_version=live.base_version,
        sst_bytes=live.sst_bytes,
        base_sst_bytes=await _base_sst_bytes(repository, work, live),
        lineage=live.lineage,
        source_requests=live.requests,
        unchecked=tuple(live.unchecked),
        findings=tuple(live.findings.found),
    )


async def _base_sst_bytes(repository: Repository, work: StoreToBackUp, live: LiveStore) -> int:
    """Return how many bytes of SSTs the newest backup has of a store; 0 if that is not to be had."""
    if work.base is None or not work.distrust:
        return live.base_sst_bytes
    # Its content was not looked at, as it is not believed; that it was so large is.
    with contextlib.suppress(DamagedError, FormatError):
        return sst_bytes(dict(files_of((await read_index(repository.store, work.base.index)).dir)))
    return 0


async def finish_backup(
    repository: Repository,
    root: CheckpointDir,
    plan: CheckpointBackupPlan,
    stores: Sequence[StoreBackup],
    choice: BackupChoice,
    *,
    findings: tuple[Finding, ...] = (),
    progress: Progress = NO_PROGRESS,
) -> CheckpointBackupResult:
    """Back up the files of the query, and make the commit (P2, P7, P8).

    Raises:
        UsageError: A store has no result.
        ShrunkError: The stores have so much less than the newest backup that they may be the wrong ones.
        As `backup_checkpoint`.
    """
    at = plan.at
    missing = {store.id for store in at.stores} - {store.id for store in stores}
    if missing:
        raise UsageError(f"has no result for {min(missing)}", operation=OPERATION, subject=root.location)
    _check_shrinking(plan, [(store.base_sst_bytes, store.sst_bytes) for store in stores], choice)
    root = root.look()
    # Another run of the query may have taken the batch meanwhile, and planned the next one again.
    root.forget([f"{COMMITS}/{at.batch}", f"{OFFSETS}/{at.batch}", f"{OFFSETS}/{at.batch + 1}"])
    async with live_files(root, choice.scratch) as found:
        files = QueryFiles(
            found,
            at=at,
            # Without state, the batches to keep are as many as the caller wants.
            base_version_max=max((s.base_version for s in stores), default=max(0, at.batch - choice.keep_batches) + 1),
            lineages={store.id: store.lineage for store in stores if store.id is not None},
            despite_damage=choice.despite_damage,
            distrust=plan.distrust,
        )
        with redact_paths(found.location, found.directory):
            base, check = plan.base(QUERY_TASK, QUERY_STORE), choice.check_retained
            options = BackupOptions(
                version=at.batch + 1, base=base, lineage=(), check_retained=check, by_content=plan.distrust
            )
            result = await repository.backup(
                plan.scope, files, task=QUERY_TASK, store=QUERY_STORE, options=options, progress=progress
            )
    query = StoreBackup(id=None, result=result, source_requests=root.requests)
    findings += (*files.findings.found, *(found for store in stores for found in store.findings))
    backup = CheckpointBackup(
        query_id=plan.query_id, batch=at.batch, oldest_batch=files.oldest_batch, location=plan.location
    ).with_damage(damaged_paths(findings))
    commit = await _commit(repository, plan, [store.result for store in (*stores, query)], backup)
    return CheckpointBackupResult(
        commit=commit,
        backup=backup,
        is_new=True,
        state=_totals(stores),
        query=_totals([query]),
        unchecked=tuple(name for store in stores for name in store.unchecked),
        findings=findings,
    )


async def _commit(
    repository: Repository, plan: CheckpointBackupPlan, results: Sequence[BackupResult], backup: CheckpointBackup
) -> Commit:
    parent = plan.parent.pointer if plan.parent else None
    taken = {(result.reference.task, result.reference.store) for result in results}
    had = plan.parent.record.stores if plan.parent else ()
    # A state store that the query has no longer is in no backup from here on (design 0006, F3). What is named as no
    # query names its stores belongs to another writer.
    dropped = [
        (s.task, s.store) for s in had if (s.task, s.store) not in taken and StoreId.parse(s.task, s.store) is not None
    ]
    version, offsets = backup.batch + 1, backup.encode()
    return await until_known(
        lambda: repository.commit(plan.scope, results, version=version, offsets=offsets, parent=parent, dropped=dropped)
    )


def _backup_of(parent: Commit, query_id: str) -> CheckpointBackup:
    """Decode the backup of the newest commit of the job; a job of something else is refused (P9)."""
    backup = decode_checkpoint_backup(parent.record.offsets)
    if backup is None or backup.query_id != query_id:
        has = "no checkpoint backup" if backup is None else f"one of query {backup.query_id}"
        message, hint = f"the newest commit is {has}, and this is query {query_id}", "give each query a job of its own"
        raise UsageError(message, operation=OPERATION, subject=str(parent.scope), hint=hint)
    return backup


def _totals(stores: Sequence[StoreBackup]) -> BackupTotals:
    stats = [store.result.stats for store in stores]
    return BackupTotals(
        stores=len(stores),
        files=sum(item.files_total for item in stats),
        size_bytes=sum(item.bytes_total for item in stats),
        files_added=sum(item.files_added for item in stats),
        bytes_added=sum(item.bytes_added for item in stats),
        bytes_uploaded=sum(item.bytes_uploaded for item in stats),
        requests=sum(item.requests for item in stats),
        source_requests=sum(store.source_requests for store in stores),
    )
