"""Restore a streaming checkpoint in parallel on Spark: the stores on the executors, the rest on the driver (0005, 3).

A directory has to be one that every executor sees and, as the same user, may write beside. To an object store each task
publishes its stores itself, and what makes a checkpoint of them, `commits/` above all, comes from the driver when all
are there. What a prefix holds is moved aside only after a trial: every store is fetched, verified and, if that is asked
for, replayed once, and thrown away; so it is read twice then.

A task that Spark repeats finds what an earlier attempt left, and replaces it; of a lost attempt at a replayed store,
SSTs may stay that nothing names, as Spark's own lost attempts leave them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.concurrency import run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import opened_checkpoint
from engine.checkpoint.restore import CheckpointRestore, RestoreChoice, RestoredCheckpoint, make_target, run_restore
from engine.checkpoint.store import StoreRestored, StoreToRestore, restore_store
from engine.checkpoint.targets import DirectoryTarget, ObjectTarget, files_below, publish_files
from engine.clock import Runtime
from engine.errors import DamagedError
from engine.repository.repository import Repository
from engine.spark.access import SparkOptions, open_on_driver
from engine.spark.errors import TaskFailedError
from engine.spark.spread import StoreOutcome, StoresTask, StoreWork, spread
from engine.spark.tasks import when_free
from engine.state.checkpoint_dir import store_url
from index.errors import FormatError
from index.snapshot.model import Scope

# Number of failed stores whose errors are shown.
FAILURES_SHOWN_MAX: Final = 3
_DAMAGE_HINT: Final = "where something is missing, `--or-newest-complete` takes the newest backup that is whole"
# What a store's failure begins with if stored data is missing or altered.
_DAMAGE: Final = frozenset({DamagedError.__name__, *(kind.__name__ for kind in FormatError.__subclasses__())})


class RestoreCheckpointStores(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition, each below a directory or below the URL of a prefix."""

    # Where the checkpoint is gathered if that is a directory, else where it is published.
    root: str
    is_directory: bool
    target_settings: StoreSettings
    # Publish nothing: only see that every store can be fetched.
    is_trial: bool = False
    # By task and store.
    wanted: dict[tuple[str, str], StoreToRestore]

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        item = self.wanted[work.task, work.store]
        if self.is_directory:
            restored = await self._restore(repository, item, Path(self.root, item.id.path))
        else:
            restored = await self._publish(repository, item)
        return work.done(
            files=restored.files, bytes_moved=restored.bytes_fetched, result=msgspec.msgpack.encode(restored)
        )

    async def _restore(self, repository: Repository, item: StoreToRestore, target: Path) -> StoreRestored:
        # Spark may have lost an attempt that had come to its end: what that left may go.
        return await when_free(
            lambda: restore_store(
                repository, item, target, transfer=repository.settings, runtime=Runtime(), replace=True
            )
        )

    async def _publish(self, repository: Repository, item: StoreToRestore) -> StoreRestored:
        if item.replayed:
            # Two attempts make two zips of one name: the checksum of the one must never be beside the other.
            unsummed = msgspec.structs.replace(item.store.settings, file_checksums=False)
            item = msgspec.structs.replace(item, store=msgspec.structs.replace(item.store, settings=unsummed))
        scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))
        try:
            async with opened_checkpoint(self.root, self.target_settings) as directory:
                restored = await self._restore(repository, item, Path(scratch.name, item.id.path))
                if not self.is_trial:
                    files = await run_blocking(files_below, Path(scratch.name))
                    await publish_files(directory, Path(scratch.name), files)
                    restored = msgspec.structs.replace(restored, published=tuple(files))
        finally:
            await run_blocking(scratch.cleanup)
        return restored


def restore_checkpoint(
    spark: SparkSession,
    url: str,
    target: str | Path,
    choice: RestoreChoice | None = None,
    *,
    options: SparkOptions | None = None,
) -> RestoredCheckpoint:
    """Restore a checkpoint, its stores on the executors.

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        target: A directory that every executor sees under this path, or the URL of a prefix of an object store. Content
            of a prefix that is moved aside goes before the first store comes, and after all of them were fetched once,
            to see that they can be: they are read twice then.
        choice: What, and how. A target that is a URL is asked as the repository's store if `target_settings` is None.
        options: How the repository is reached, and the work spread.

    Raises:
        DamagedError: Something of a store is missing or altered; the first few are named.
        TaskFailedError: A store could not be restored otherwise, or Spark itself gave up.
        As `engine.checkpoint.restore.restore_checkpoint`.
    """
    choice, options = choice or RestoreChoice(), options or SparkOptions()
    settings, partitions_max = choice.target_settings or options.store, options.partitions_max
    choice = msgspec.structs.replace(choice, target_settings=settings)
    runtime = Runtime()
    place = make_target(target, runtime, choice)
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)

    async def restore_stores(restore: CheckpointRestore, work: tuple[StoreToRestore, ...]) -> Sequence[StoreRestored]:
        is_directory = isinstance(place, DirectoryTarget)
        task = RestoreCheckpointStores(
            access=access,
            scope=Scope(restore.job),
            root=str(restore.directory) if is_directory else store_url(str(target)),
            is_directory=is_directory,
            target_settings=settings,
            wanted={(item.id.task, item.id.store): item for item in work},
        )
        if isinstance(place, ObjectTarget):
            if place.has_content:
                trial = msgspec.structs.replace(task, is_trial=True)
                await run_blocking(_carry_out, spark, trial, partitions_max)
            await place.clear()
        # To its end: tasks still write to the staging directory, and rely on the pin.
        return await run_blocking(_carry_out, spark, task, partitions_max)

    with repository:
        return repository.loop.run(run_restore(repository.asynchronous, place, choice, restore_stores, runtime))


def _carry_out(
    spark: SparkSession, task: RestoreCheckpointStores, partitions_max: int | None
) -> tuple[StoreRestored, ...]:
    """Restore all stores on the executors.

    Raises:
        DamagedError, TaskFailedError: One could not be restored; the first few are named.
    """
    work = [
        StoreWork(task=item.id.task, store=item.id.store, path=item.id.path, reference=item.reference)
        for item in task.wanted.values()
    ]
    if not work:
        return ()
    rows = spread(spark, task, work, partitions_max).select("path", "ok", "error", "result").toArrow().to_pylist()
    failed = [f"{row['path']}: {row['error']}" for row in rows if not row["ok"]]
    if failed:
        errors = "; ".join(failed[:FAILURES_SHOWN_MAX])
        is_damage = any(row["error"].partition(":")[0] in _DAMAGE for row in rows)
        raise (DamagedError if is_damage else TaskFailedError)(
            f"{len(failed)} of {len(rows)} stores were not restored: {errors}",
            operation="restore checkpoint",
            subject=str(task.scope),
            hint=_DAMAGE_HINT if is_damage else "",
        )
    return tuple(msgspec.msgpack.decode(row["result"], type=StoreRestored) for row in rows)
