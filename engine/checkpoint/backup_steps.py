"""Back up a streaming query's checkpoint, step by step (design 0005, section 2).

`begin_backup` on one machine, `backup_store` on as many as there are, `finish_backup` on the first again. Until that
has made its record, nothing is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from blobstore.errors import BlobNotFoundError
from engine.backup.backup import BackupOptions, BackupResult, BackupStats
from engine.checkpoint.live import LiveStore
from engine.checkpoint.live_files import live_files
from engine.checkpoint.naming import hiding, located
from engine.checkpoint.query_files import QueryFiles
from engine.errors import CommitUnknownError, DamagedError, UsageError
from engine.local.hashing import hash_content
from engine.progress import NO_PROGRESS, Progress
from engine.records.indexes import read_index
from engine.records.missing import find_complete
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, QueryAt, StoreAt, StreamingCheckpoint
from index.display import DisplayMixin
from index.plan.commits import Commit
from index.snapshot.contents import files_of
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, CheckpointBackup, StoreId, decode_checkpoint_backup
from index.spark.lineage import Lineage
from index.text import count

OPERATION: Final = "backup checkpoint"
# The writer that got no answer is the only one that can find out at once what happened.
COMMIT_ATTEMPTS_MAX: Final = 3


class CheckpointBackupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup is going to be of; it can be sent to the processes that back up its stores."""

    scope: Scope
    query_id: str
    location: str
    at: QueryAt
    # The newest commit of the job, on which the backup's is made.
    parent: Commit | None
    # What that one is the backup of, if it is of this very batch (P1): then there is nothing to do.
    taken: CheckpointBackup | None = None

    def base(self, store: StoreId | None) -> StoreReference | None:
        """What the newest commit has of a store, or of the query's own files."""
        if self.parent is None:
            return None
        return self.parent.store(*((store.task, store.store) if store else (QUERY_TASK, QUERY_STORE)))


class StoreBackup(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one store of a backup, or of the query's own files."""

    # None: the query's own files.
    id: StoreId | None
    result: BackupResult
    # Of the snapshot that it begins with.
    base_version: int = 0
    # The versions with ids that it grew from.
    lineage: Lineage = ()
    # How many were made of the checkpoint's store.
    source_requests: int = 0
    # SSTs of which nobody can tell whether they are whole, and why.
    unchecked: tuple[str, ...] = ()


class BackupTotals(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a backup has, and what was sent for it."""

    stores: int = 0
    files: int = 0
    size_bytes: int = 0
    files_added: int = 0
    bytes_added: int = 0
    # With what was packed again.
    bytes_uploaded: int = 0
    # Of the repository, and of the checkpoint if that is on another store than a file system.
    requests: int = 0
    source_requests: int = 0


class CheckpointBackupResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """A backup, and how it was taken."""

    json_properties: ClassVar = {
        "job": "commit.record.scope.job",
        "query_id": "backup.query_id",
        "batch": "backup.batch",
        "oldest_batch": "backup.oldest_batch",
        "location": "backup.location",
    }
    json_omitted: ClassVar = ("backup",)

    commit: Commit
    backup: CheckpointBackup
    # False: the newest backup is of this batch already, and nothing was done.
    is_new: bool
    # The state, and the query's own files.
    state: BackupTotals = BackupTotals()
    query: BackupTotals = BackupTotals()
    unchecked: tuple[str, ...] = ()
    attempts: int = 1
    seconds: float = 0.0


async def begin_backup(
    repository: Repository,
    root: CheckpointDir,
    *,
    job: str | None = None,
    check_retained: bool = False,
    moved: bool = False,
) -> CheckpointBackupPlan:
    """Find out which batch a backup is of, and what it will be compared with (P1, P2).

    Costs a list of `commits/`, two GETs of logs, one of `metadata`, a list and two or three requests for each operator,
    three GETs more if the newest backup is of the same batch, two if it is of another place; of the repository a list,
    and a GET or two, and a STAT for each index that is new in that backup if it is of the same batch.

    Args:
        repository: Where to.
        root: The checkpoint.
        job: As for `backup_checkpoint`.
        check_retained: Whether a backup of this batch has to be whole to count: a STAT for each blob of it.
        moved: As for `backup_checkpoint`.

    Raises:
        As `backup_checkpoint`.
    """
    checkpoint = StreamingCheckpoint(root)
    with located(root.location, None):
        query_id = await checkpoint.query_id()
    scope = Scope(job or f"spark-{query_id}")
    parent = await repository.head(scope)
    newest = None if parent is None else _backup_of(parent, query_id)
    with located(root.location, None):
        at = await checkpoint.at()
        if parent is not None and not at.stores:
            _check_stateless(parent)
    begun = CheckpointBackupPlan(scope=scope, query_id=query_id, location=_shown(root), at=at, parent=parent)
    if newest is not None and newest.location != begun.location and not moved:
        await _check_continues(repository, root, begun, newest)
    if parent is None or newest is None or newest.batch != at.batch or not await _is_taken(repository, root, begun):
        return begun
    try:
        # A commit of which something is gone is none: another one sends it again.
        await repository.settle(parent)
    except DamagedError:
        return begun
    if check_retained and await find_complete(repository.store, [parent]) is None:
        return begun
    return msgspec.structs.replace(begun, taken=newest)


async def _is_taken(repository: Repository, root: CheckpointDir, begun: CheckpointBackupPlan) -> bool:
    """Whether the newest backup, of a batch of this number, is of this very batch and has what has begun since.

    A query may have been taken back and come to this number again, which its logs say; and the offsets of the batch
    that follows are part of the backup (P7).
    """
    batch = begun.at.batch
    return await _has_logs(repository, root, begun, ((COMMITS, batch), (OFFSETS, batch), (OFFSETS, batch + 1)))


async def _check_continues(
    repository: Repository, root: CheckpointDir, begun: CheckpointBackupPlan, newest: CheckpointBackup
) -> None:
    """Refuse a checkpoint at another place that does not have the newest backed-up batch: two copies share a job (P9).

    Raises:
        UsageError: It lacks the batch, or has run another one under its number.
    """
    if not await _has_logs(repository, root, begun, ((COMMITS, newest.batch), (OFFSETS, newest.batch))):
        raise UsageError(
            f"{begun.location} does not have batch {newest.batch} that was backed up from {newest.location}",
            operation=OPERATION,
            subject=str(begun.scope),
            hint="give each copy of a checkpoint a job of its own (--job); to go on with this one alone, say --moved",
        )


async def _has_logs(
    repository: Repository, root: CheckpointDir, begun: CheckpointBackupPlan, entries: Sequence[tuple[str, int]]
) -> bool:
    """Compare entries of the checkpoint's logs with those of the newest backup; absent on both sides is equal."""
    reference = begun.base(None)
    if reference is None:
        return False
    try:
        index = await read_index(repository.store, reference.index)
    except DamagedError:
        # The next backup heals it, if it is missing, or says what is wrong (design 0006, M1).
        return False
    there = {path: file.blake3 for path, file in files_of(index.dir)}
    for log, number in entries:
        try:
            data = await root.read(f"{log}/{number}", size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError:
            now = None
        else:
            now = hash_content(data)
        if now != there.get((log, str(number))):
            return False
    return True


def _check_stateless(parent: Commit) -> None:
    """Refuse a query whose state has vanished: in version 1 its logs do not say whether it has any."""
    stores = [store for store in parent.record.stores if StoreId.parse(store.task, store.store) is not None]
    had = sum(store.version == parent.record.version for store in stores)
    if had:
        raise DamagedError(
            f"has no state, and the newest backup has {count(had, 'store')}", operation=OPERATION, subject="state"
        )


async def backup_store(
    repository: Repository,
    root: CheckpointDir,
    scope: Scope,
    store: StoreAt,
    base: StoreReference | None,
    *,
    verify: bool = True,
    check_retained: bool = False,
    scratch: Path | None = None,
    settings: TransferSettings | None = None,
    progress: Progress = NO_PROGRESS,
) -> StoreBackup:
    """Upload what one store of a backup has and the newest backup has not (P3 to P6).

    Costs of the checkpoint's store a list, a GET of the zip and of each file that is new; of the repository as any
    backup.

    Args:
        repository: Where to.
        root: The checkpoint.
        scope: Of the backup.
        store: What to take.
        base: What the newest commit has of the store.
        verify: As for `backup_checkpoint`.
        check_retained: As for `backup_checkpoint`.
        scratch: As for `backup_checkpoint`.
        settings: How bytes are moved, in place of the repository's own.
        progress: As for `backup_checkpoint`.

    Raises:
        UnsafeSourceError, VersionMissingError: The query has taken away a part, or it was never there.
        DamagedError, FormatError: A file is not whole.
        StaleResultError: Another backup was committed meanwhile.
        StoreError: As the stores say.
    """
    async with live_files(root.child(store.id.path), scratch) as files:
        live = LiveStore(files, store, verify=verify)
        with hiding(files.location, files.directory):
            result = await repository.backup(
                scope,
                live,
                task=store.id.task,
                store=store.id.store,
                options=BackupOptions(
                    version=store.at.version,
                    unique_id=store.at.unique_id,
                    base=base,
                    check_retained=check_retained,
                    settings=settings,
                ),
                progress=progress,
            )
    return StoreBackup(
        id=store.id,
        result=result,
        base_version=live.base_version,
        lineage=live.lineage,
        source_requests=live.requests,
        unchecked=tuple(live.unchecked),
    )


async def finish_backup(
    repository: Repository,
    root: CheckpointDir,
    begun: CheckpointBackupPlan,
    stores: Sequence[StoreBackup],
    *,
    verify: bool = True,
    check_retained: bool = False,
    scratch: Path | None = None,
    progress: Progress = NO_PROGRESS,
) -> CheckpointBackupResult:
    """Back up the files of the query, and make the commit (P2, P7, P8).

    Args:
        repository: Where to.
        root: The checkpoint.
        begun: From `begin_backup`.
        stores: What became of every store of it.
        verify: As for `backup_checkpoint`.
        check_retained: As for `backup_checkpoint`.
        scratch: As for `backup_checkpoint`.
        progress: As for `backup_checkpoint`.

    Raises:
        UsageError: A store is not among them.
        As `backup_checkpoint`.
    """
    at = begun.at
    missing = {store.id for store in at.stores} - {store.id for store in stores}
    if missing:
        raise UsageError(f"has no result for {min(missing)}", operation=OPERATION, subject=root.location)
    async with live_files(root, scratch) as found:
        files = QueryFiles(
            found,
            at=at,
            base_version_max=max((store.base_version for store in stores), default=None),
            lineages={store.id: store.lineage for store in stores if store.id is not None},
            verify=verify,
        )
        with hiding(found.location, found.directory):
            result = await repository.backup(
                begun.scope,
                files,
                task=QUERY_TASK,
                store=QUERY_STORE,
                options=BackupOptions(
                    version=at.batch + 1, base=begun.base(None), lineage=(), check_retained=check_retained
                ),
                progress=progress,
            )
    query = StoreBackup(id=None, result=result, source_requests=files.requests)
    backup = CheckpointBackup(
        query_id=begun.query_id, batch=at.batch, oldest_batch=files.oldest_batch, location=begun.location
    )
    commit = await _commit(repository, begun, [store.result for store in (*stores, query)], backup)
    return CheckpointBackupResult(
        commit=commit,
        backup=backup,
        is_new=True,
        state=_sums(stores),
        query=_sums([query]),
        unchecked=tuple(name for store in stores for name in store.unchecked),
    )


async def _commit(
    repository: Repository, begun: CheckpointBackupPlan, results: Sequence[BackupResult], backup: CheckpointBackup
) -> Commit:
    """Commit; while the outcome is unknown ask again with the same writer, which finds out (design 0002, C3)."""
    parent = begun.parent.pointer if begun.parent else None
    taken = {(result.reference.task, result.reference.store) for result in results}
    had = begun.parent.record.stores if begun.parent else ()
    # A state store that the query has no longer is in no backup from here on (design 0006, F3). What is named as no
    # query names its stores is somebody else's.
    dropped = [
        (s.task, s.store) for s in had if (s.task, s.store) not in taken and StoreId.parse(s.task, s.store) is not None
    ]
    left = COMMIT_ATTEMPTS_MAX
    while True:
        left -= 1
        try:
            return await repository.commit(
                begun.scope,
                results,
                version=backup.batch + 1,
                offsets=backup.encode(),
                parent=parent,
                dropped=dropped,
            )
        except CommitUnknownError:
            if not left:
                raise


def _backup_of(parent: Commit, query_id: str) -> CheckpointBackup:
    """What the newest commit of the job is a backup of; a job of something else is refused (P9)."""
    backup = decode_checkpoint_backup(parent.record.offsets)
    if backup is None or backup.query_id != query_id:
        has = "no checkpoint backup" if backup is None else f"one of query {backup.query_id}"
        raise UsageError(
            f"the newest commit is {has}, and this is query {query_id}",
            operation=OPERATION,
            subject=str(parent.scope),
            hint="give each query a job of its own",
        )
    return backup


def _shown(root: CheckpointDir) -> str:
    """Where a checkpoint is, as a backup says it; URLs have no credentials."""
    if root.local_root is not None:
        return str(root.local_root.absolute())
    return root.location


def _sums(stores: Sequence[StoreBackup]) -> BackupTotals:
    stats: list[BackupStats] = [store.result.stats for store in stores]
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
