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
from engine.clock import Runtime
from engine.errors import ConflictError, DamagedError, EngineError, SourceChangedError, UnsafeSourceError
from engine.repository.repository import Repository
from engine.spark.access import SparkOptions, absolute, open_on_driver
from engine.spark.errors import TaskFailedError
from engine.spark.spread import CarryOut, StoreOutcome, StoresTask, StoreWork, spread
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import FormatError, UnknownFormatError, VersionMissingError

# What the row of a store that failed says of its error, for the driver to know what to do next.
_KINDS: Final[dict[type[Exception], bytes]] = {
    SourceChangedError: b"changed",
    UnsafeSourceError: b"gone",
    VersionMissingError: b"gone",
    DamagedError: b"damaged",
    FormatError: b"damaged",
    # What a newer Spark wrote is not damaged.
    UnknownFormatError: b"",
    ConflictError: b"conflict",
    StoreUnavailableError: b"unavailable",
}
# What the driver raises for them: damage first, then what moved.
_RAISED: Final[tuple[tuple[bytes, type[EngineError], str], ...]] = (
    (b"", TaskFailedError, ""),
    (b"damaged", DamagedError, DAMAGE_HINT),
    (b"conflict", ConflictError, ""),
    (b"changed", SourceChangedError, MOVED_HINT),
    (b"gone", UnsafeSourceError, MOVED_HINT),
)
_ERRORS_SHOWN_MAX: Final = 3


class BackupLiveStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition."""

    checkpoint: str
    # By task and store.
    stores: dict[tuple[str, str], StoreToBackUp]
    choice: BackupChoice

    @override
    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[CarryOut]:
        async with opened_checkpoint(self.checkpoint, self.choice.checkpoint_settings) as root:
            yield lambda repository, work: self._back_up(repository, root, work)

    async def _back_up(self, repository: Repository, root: CheckpointDir, work: StoreWork) -> StoreOutcome:
        try:
            done = await backup_store(repository, root, self.scope, self.stores[work.task, work.store], self.choice)
        except tuple(_KINDS) as error:
            kind = next(_KINDS[of] for of in type(error).__mro__ if of in _KINDS)
            return work.failed(_message(error, work.path, root.location), kind)
        stats = done.result.stats
        return work.done(
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

    with repository, repository.inside(opened_checkpoint(location, asked.checkpoint_settings)) as root:
        return repository.loop.run(
            run_backup(
                repository.asynchronous,
                root,
                lambda plan: asyncio.to_thread(spread_stores, plan),
                asked,
                runtime=Runtime(),
            )
        )


def _message(error: Exception, path: str, location: str) -> str:
    """Format an error with its notes, for a driver that names the checkpoint itself."""
    text = "; ".join([str(error).replace(f"{location}/", ""), *getattr(error, "__notes__", ())])
    return text if path in text else f"{path}: {text}"


def _results(outcomes: Sequence[StoreOutcome], location: str) -> tuple[StoreBackup, ...]:
    """Decode the results of all stores, or raise what is wrong with some."""
    failed: dict[bytes, list[str]] = {}
    for outcome in outcomes:
        if not outcome.ok:
            failed.setdefault(outcome.result, []).append(outcome.error)
    messages = {
        kind: "; ".join(errors[:_ERRORS_SHOWN_MAX])
        + (f", and {len(errors) - _ERRORS_SHOWN_MAX} more" if len(errors) > _ERRORS_SHOWN_MAX else "")
        for kind, errors in failed.items()
    }
    for kind, error, hint in _RAISED:
        if kind in messages:
            raise error(messages[kind], operation=OPERATION, subject=location, hint=hint)
    if messages:
        raise StoreUnavailableError(messages[b"unavailable"], operation=OPERATION, key=location)
    return tuple(msgspec.msgpack.decode(outcome.result, type=StoreBackup) for outcome in outcomes)
