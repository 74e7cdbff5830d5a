"""Back up a checkpoint with hundreds of stores, each on an executor that is free.

The flow is that of `engine.checkpoint.backup`; only its backend is another one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.errors import StoreUnavailableError
from engine.checkpoint.backup import (
    MOVED,
    OPERATION,
    BackupChoice,
    CheckpointBackupPlan,
    CheckpointBackupResult,
    StoreBackup,
    StoreToBackUp,
    backup_store,
    opened_checkpoint,
    run_backup,
)
from engine.checkpoint.errors import DAMAGE_HINT, MOVED_HINT
from engine.clock import SystemRuntime
from engine.errors import ConflictError, DamagedError, SourceChangedError, UnsafeSourceError
from engine.repository.repository import Repository
from engine.spark.access import SparkOptions, absolute, open_on_driver
from engine.spark.errors import TaskFailedError
from engine.spark.spread import CarryOut, StoreOutcome, StoresTask, StoreWork, spread
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import FormatError, UnknownFormatError

# What the row of a store that failed says of its error, for the driver to know what to do next.
_CHANGED: Final = b"changed"
_GONE: Final = b"gone"
_DAMAGED: Final = b"damaged"
_CONFLICT: Final = b"conflict"
_UNAVAILABLE: Final = b"unavailable"
_ERRORS_SHOWN_MAX: Final = 3


class BackupLiveStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition."""

    checkpoint: str
    # By task and store.
    stores: dict[tuple[str, str], StoreToBackUp]
    choice: BackupChoice

    @override
    def opened(self) -> contextlib.AbstractAsyncContextManager[CarryOut]:
        return self._opened()

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[CarryOut]:
        async with opened_checkpoint(self.checkpoint, self.choice.checkpoint_settings) as root:

            async def carry_out(repository: Repository, work: StoreWork) -> StoreOutcome:
                return await self._back_up(repository, root, work)

            yield carry_out

    async def _back_up(self, repository: Repository, root: CheckpointDir, work: StoreWork) -> StoreOutcome:
        try:
            done = await backup_store(repository, root, self.scope, self.stores[work.task, work.store], self.choice)
        except (*MOVED, DamagedError, FormatError, ConflictError, StoreUnavailableError) as error:
            message = _message(error, work.path, root.location)
            return StoreOutcome(
                task=work.task, store=work.store, path=work.path, ok=False, error=message, result=_kind(error)
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
    choice: BackupChoice | None = None,
    *,
    options: SparkOptions | None = None,
) -> CheckpointBackupResult:
    """Back up a checkpoint, its stores spread over the executors by their bytes.

    Args:
        spark: The session; it need not be the one that runs the query.
        url: A repository that every executor can reach.
        checkpoint: The checkpointLocation as every executor can reach it: a path or a URL.
        choice: What, and how; `scratch` is a directory here and on each executor.
        options: How the repository is reached, and the work spread.

    Raises:
        As `engine.checkpoint.backup.backup_checkpoint`, but what is not whole is always a DamagedError, a part
        that is gone an UnsafeSourceError, and what else a store fails with a TaskFailedError.
    """
    location = absolute(checkpoint)
    asked = choice or BackupChoice()
    options = options or SparkOptions()
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)

    def spread_stores(plan: CheckpointBackupPlan) -> Sequence[StoreBackup]:
        stores = {(item.store.id.task, item.store.id.store): item for item in plan.stores}
        if not stores:
            return ()
        task = BackupLiveStores(access=access, scope=plan.scope, checkpoint=location, stores=stores, choice=asked)
        work = [
            StoreWork(task=item.store.id.task, store=item.store.id.store, path=item.store.id.path, reference=item.base)
            for item in plan.stores
        ]
        outcomes = spread(spark, task, work, options.partitions_max).toArrow().to_pylist()
        return _results([StoreOutcome(**row) for row in outcomes], location)

    async def back_up() -> CheckpointBackupResult:
        async def back_up_stores(plan: CheckpointBackupPlan) -> Sequence[StoreBackup]:
            return await asyncio.to_thread(spread_stores, plan)

        async with opened_checkpoint(location, asked.checkpoint_settings) as root:
            return await run_backup(repository.asynchronous, root, back_up_stores, asked, runtime=SystemRuntime())

    with repository:
        return repository.loop.run(back_up())


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


def _message(error: Exception, path: str, location: str) -> str:
    """Format an error with its notes, for a driver that names the checkpoint itself."""
    text = "; ".join([str(error).replace(f"{location}/", ""), *getattr(error, "__notes__", ())])
    return text if path in text else f"{path}: {text}"


def _results(outcomes: Sequence[StoreOutcome], location: str) -> tuple[StoreBackup, ...]:
    """Decode the results of all stores, or raise what is wrong with some: damage first, then what moved."""
    for kind, error, hint in (
        (b"", TaskFailedError, ""),
        (_DAMAGED, DamagedError, DAMAGE_HINT),
        (_CONFLICT, ConflictError, ""),
        (_CHANGED, SourceChangedError, MOVED_HINT),
        (_GONE, UnsafeSourceError, MOVED_HINT),
    ):
        if message := _first_errors(kind, outcomes):
            raise error(message, operation=OPERATION, subject=location, hint=hint)
    if message := _first_errors(_UNAVAILABLE, outcomes):
        raise StoreUnavailableError(message, operation=OPERATION, key=location)
    return tuple(msgspec.msgpack.decode(outcome.result, type=StoreBackup) for outcome in outcomes)


def _first_errors(kind: bytes, outcomes: Sequence[StoreOutcome]) -> str:
    """Join the first errors of the stores that failed in one way; "" if none did."""
    found = [outcome.error for outcome in outcomes if not outcome.ok and outcome.result == kind]
    more = f", and {len(found) - _ERRORS_SHOWN_MAX} more" if len(found) > _ERRORS_SHOWN_MAX else ""
    return "; ".join(found[:_ERRORS_SHOWN_MAX]) + more
