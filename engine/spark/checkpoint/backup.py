"""Back up a checkpoint with hundreds of stores: each is backed up on whichever executor has room for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.errors import StoreUnavailableError
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import MOVED, CheckpointBackupResult, opened_checkpoint, run_backup
from engine.checkpoint.backup_steps import OPERATION, CheckpointBackupPlan, StoreBackup, backup_store
from engine.checkpoint.naming import DAMAGE_HINT, MOVED_HINT
from engine.errors import ConflictError, DamagedError, SourceChangedError, UnsafeSourceError
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from engine.spark.access import SCHEME, open_on_driver
from engine.spark.errors import TaskFailedError
from engine.spark.spread import CarryOut, StoreOutcome, StoresTask, StoreWork, spread
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StoreAt
from index.errors import FormatError, UnknownFormatError

# What the row of a store that failed says of its error, for the driver to know what to do next.
_CHANGED: Final = b"changed"
_GONE: Final = b"gone"
_DAMAGED: Final = b"damaged"
_CONFLICT: Final = b"conflict"
_UNAVAILABLE: Final = b"unavailable"
_ERRORS_TOLD_MAX: Final = 3


class BackupLiveStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition."""

    checkpoint: str
    checkpoint_settings: StoreSettings
    # By task and store.
    stores: dict[tuple[str, str], StoreAt]
    verify: bool
    scratch: str | None
    check_retained: bool = False

    @override
    def opened(self) -> contextlib.AbstractAsyncContextManager[CarryOut]:
        return self._opened()

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[CarryOut]:
        async with opened_checkpoint(self.checkpoint, self.checkpoint_settings) as root:

            async def carry_out(repository: Repository, work: StoreWork) -> StoreOutcome:
                return await self._back_up(repository, root, work)

            yield carry_out

    async def _back_up(self, repository: Repository, root: CheckpointDir, work: StoreWork) -> StoreOutcome:
        store = self.stores[work.task, work.store]
        scratch = Path(self.scratch) if self.scratch else None
        try:
            done = await backup_store(
                repository,
                root,
                self.scope,
                store,
                work.reference,
                verify=self.verify,
                check_retained=self.check_retained,
                scratch=scratch,
            )
        except (*MOVED, DamagedError, FormatError, ConflictError, StoreUnavailableError) as error:
            told = _told(error, work.path, root.location)
            return StoreOutcome(
                task=work.task, store=work.store, path=work.path, ok=False, error=told, result=_kind(error)
            )
        stats = done.result.stats
        return StoreOutcome(
            task=work.task,
            store=work.store,
            path=work.path,
            ok=True,
            files=stats.files_total,
            bytes_moved=stats.bytes_uploaded,
            bytes_kept=stats.bytes_retained,
            result=msgspec.msgpack.encode(done),
        )


def backup_checkpoint(
    spark: SparkSession,
    url: str,
    checkpoint: str | Path,
    *,
    job: str | None = None,
    verify: bool = True,
    check_retained: bool = False,
    moved: bool = False,
    scratch: Path | None = None,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
    checkpoint_settings: StoreSettings | None = None,
) -> CheckpointBackupResult:
    """As `engine.checkpoint.backup.backup_checkpoint`, its stores spread over the executors by their bytes.

    Args:
        spark: The session; it need not be the one that runs the query.
        url: A repository that every executor can reach.
        checkpoint: The checkpointLocation as every executor can reach it: a path or a URL.
        job: Which job has the backups of this query; `spark-<query id>` if not given.
        verify: Whether what is new is checked before it is taken over.
        check_retained: As for `engine.checkpoint.backup.backup_checkpoint`.
        moved: As for `engine.checkpoint.backup.backup_checkpoint`.
        scratch: As for `engine.checkpoint.backup.backup_checkpoint`, here and on each executor.
        partitions_max: Work is spread over at most so many; see `default_partitions` if not given.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.
        checkpoint_settings: How the checkpoint's store is asked.

    Raises:
        As `engine.checkpoint.backup.backup_checkpoint`, but what is not whole is always a DamagedError, a part
        that is gone an UnsafeSourceError, and what else a store fails with a TaskFailedError.
    """
    location = str(checkpoint)
    # A relative path would mean another directory in every process.
    location = location if SCHEME.match(location) else str(Path(location).absolute())
    settings = checkpoint_settings or StoreSettings()
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)

    def spread_stores(begun: CheckpointBackupPlan) -> Sequence[StoreBackup]:
        task = BackupLiveStores(
            access=access,
            scope=begun.scope,
            checkpoint=location,
            checkpoint_settings=settings,
            stores={(store.id.task, store.id.store): store for store in begun.at.stores},
            verify=verify,
            check_retained=check_retained,
            scratch=None if scratch is None else str(scratch),
        )
        work = [
            StoreWork(task=store.id.task, store=store.id.store, path=store.id.path, reference=begun.base(store.id))
            for store in begun.at.stores
        ]
        if not work:
            return ()
        outcomes = spread(spark, task, work, partitions_max).toArrow().to_pylist()
        return _results([StoreOutcome(**row) for row in outcomes], location)

    async def take() -> CheckpointBackupResult:
        async def back_up_stores(begun: CheckpointBackupPlan) -> Sequence[StoreBackup]:
            return await asyncio.to_thread(spread_stores, begun)

        async with opened_checkpoint(location, settings) as root:
            return await run_backup(
                repository.asynchronous,
                root,
                back_up_stores,
                job=job,
                verify=verify,
                check_retained=check_retained,
                moved=moved,
                scratch=scratch,
            )

    with repository:
        return repository.loop.run(take())


def _kind(error: Exception) -> bytes:
    if isinstance(error, SourceChangedError):
        return _CHANGED
    if isinstance(error, MOVED):
        return _GONE
    if isinstance(error, ConflictError):
        return _CONFLICT
    if isinstance(error, StoreUnavailableError):
        return _UNAVAILABLE
    # What a newer Spark wrote is not damaged.
    return b"" if isinstance(error, UnknownFormatError) else _DAMAGED


def _told(error: Exception, path: str, location: str) -> str:
    """An error with its notes, as the driver tells it of a checkpoint that it names itself."""
    told = "; ".join([str(error).replace(f"{location}/", ""), *getattr(error, "__notes__", ())])
    return told if path in told else f"{path}: {told}"


def _results(outcomes: Sequence[StoreOutcome], location: str) -> tuple[StoreBackup, ...]:
    """What became of every store, or the error that says what is wrong with some: damage first, then what moved."""
    for kind, error, hint in (
        (b"", TaskFailedError, ""),
        (_DAMAGED, DamagedError, DAMAGE_HINT),
        (_CONFLICT, ConflictError, ""),
        (_CHANGED, SourceChangedError, MOVED_HINT),
        (_GONE, UnsafeSourceError, MOVED_HINT),
    ):
        told = _told_of(kind, outcomes)
        if told:
            raise error(told, operation=OPERATION, subject=location, hint=hint)
    told = _told_of(_UNAVAILABLE, outcomes)
    if told:
        raise StoreUnavailableError(told, operation=OPERATION, key=location)
    return tuple(msgspec.msgpack.decode(outcome.result, type=StoreBackup) for outcome in outcomes)


def _told_of(kind: bytes, outcomes: Sequence[StoreOutcome]) -> str:
    """What the stores say that failed in one way, as far as anybody reads."""
    found = [outcome.error for outcome in outcomes if not outcome.ok and outcome.result == kind]
    more = f", and {len(found) - _ERRORS_TOLD_MAX} more" if len(found) > _ERRORS_TOLD_MAX else ""
    return "; ".join(found[:_ERRORS_TOLD_MAX]) + more
