"""Restoring a streaming checkpoint in parallel on Spark: the stores on the executors, the rest on the driver (0005, 3).

A directory has to be one that every executor sees and, as the same user, may write beside. To an object store each task
publishes its stores itself, and what makes a checkpoint of them, `commits/` above all, comes from the driver when all
are there. What stands at a prefix is moved aside only after a rehearsal: every store is fetched, verified and, if that
is asked for, replayed once, and thrown away; so it is read twice then.

A task that Spark repeats finds what an earlier attempt left, and takes its place; of a lost attempt at a replayed
store, SSTs may stay that nothing names, as Spark's own lost attempts leave them.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.concurrency import run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.object_target import ObjectTarget, files_below, publish_files
from engine.checkpoint.restore import make_target
from engine.checkpoint.restore_run import CheckpointRestore, RestoreChoice, RestoredCheckpoint
from engine.checkpoint.store import StoreRestored, StoreToRestore, restore_store
from engine.checkpoint.targets import DirectoryTarget
from engine.clock import SystemRuntime
from engine.errors import DamagedError, TargetBusyError
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from engine.spark.access import open_on_driver
from engine.spark.errors import TaskFailedError
from engine.spark.spread import StoreOutcome, StoresTask, StoreWork, spread
from engine.spark.tasks import BUSY_WAIT_S, BUSY_WAITS_MAX
from engine.state.checkpoint_dir import CheckpointDir, store_url
from index.errors import FormatError
from index.snapshot.model import Scope

# So many of the stores that failed are told of.
FAILURES_TOLD_MAX: Final = 3
_DAMAGE_HINT: Final = "where something is missing, `--or-newest-complete` takes the newest backup that is whole"
# What a store's failure begins with if stored data is missing or altered.
_DAMAGE: Final = frozenset({DamagedError.__name__, *(kind.__name__ for kind in FormatError.__subclasses__())})


class RestoreCheckpointStores(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition, each below a directory or below the URL of a prefix."""

    replayed: bool
    # Where the checkpoint is gathered if that is a directory, else where it is published.
    root: str
    is_directory: bool
    target_settings: StoreSettings
    # Publish nothing: only see that every store can be had.
    rehearses: bool = False
    # By task and store.
    wanted: dict[tuple[str, str], StoreToRestore]

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        """Restore one store."""
        item = self.wanted[work.task, work.store]
        if self.is_directory:
            restored = await self._restore(repository, item, Path(self.root, item.id.path))
        else:
            restored = await self._publish(repository, item)
        return StoreOutcome(
            task=work.task,
            store=work.store,
            path=work.path,
            ok=True,
            files=restored.files,
            bytes_moved=restored.bytes_fetched,
            result=msgspec.msgpack.encode(restored),
        )

    async def _restore(self, repository: Repository, item: StoreToRestore, target: Path) -> StoreRestored:
        for _ in range(BUSY_WAITS_MAX):
            with contextlib.suppress(TargetBusyError):
                # Spark may have lost an attempt that had come to its end: what that left may go.
                return await restore_store(
                    repository,
                    item,
                    target,
                    replayed=self.replayed,
                    transfer=repository.settings,
                    runtime=SystemRuntime(),
                    replace=True,
                )
            await asyncio.sleep(BUSY_WAIT_S)
        raise TargetBusyError("another attempt does not end", operation="restore", subject=str(target))

    async def _publish(self, repository: Repository, item: StoreToRestore) -> StoreRestored:
        if self.replayed:
            # Two attempts make two zips of one name: the checksum of the one must never stand beside the other.
            unsummed = msgspec.structs.replace(item.store.settings, file_checksums=False)
            item = msgspec.structs.replace(item, store=msgspec.structs.replace(item.store, settings=unsummed))
        scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))
        directory = await CheckpointDir.open(self.root, settings=self.target_settings)
        try:
            local = Path(scratch.name, item.id.path)
            restored = await self._restore(repository, item, local)
            if not self.rehearses:
                files = await run_blocking(files_below, Path(scratch.name))
                await publish_files(directory, Path(scratch.name), files)
                restored = msgspec.structs.replace(restored, published=tuple(files))
        finally:
            await directory.close()
            await run_blocking(scratch.cleanup)
        return restored


def restore_checkpoint(
    spark: SparkSession,
    url: str,
    target: str | Path,
    *,
    job: str | None = None,
    batch: int | None = None,
    at_ms: int | None = None,
    replayed: bool = False,
    move_aside: bool = False,
    map_paths: Mapping[str, str] | None = None,
    spark_location: str | None = None,
    or_newest_complete: bool = False,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
    target_settings: StoreSettings | None = None,
) -> RestoredCheckpoint:
    """Bring a checkpoint back, its stores on the executors.

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        target: A directory that every executor sees under this path, or the URL of a prefix of an object store. Content
            of a prefix that is moved aside goes before the first store comes, and after all of them were fetched once,
            to see that they can be: they are read twice then.
        job: As `engine.checkpoint.restore.restore_checkpoint`, as are the next seven.
        partitions_max: Work is spread over at most so many; see `default_partitions` if not given.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.
        target_settings: How a target that is a URL is asked; as the repository's if not given.

    Raises:
        DamagedError: Something of a store is missing or altered; the first few are named.
        TaskFailedError: A store could not be restored otherwise, or Spark itself gave up.
        As `engine.checkpoint.restore.restore_checkpoint`.
    """
    choice = RestoreChoice(
        job=job,
        batch=batch,
        at_ms=at_ms,
        replayed=replayed,
        move_aside=move_aside,
        map_paths=map_paths or {},
        spark_location=spark_location,
        or_newest_complete=or_newest_complete,
    )
    settings = target_settings or store_settings or StoreSettings()
    runtime = SystemRuntime()
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)
    with repository:
        place = make_target(target, runtime, move_aside=move_aside, settings=settings)
        restore = CheckpointRestore(repository.asynchronous, place, choice, runtime)
        try:
            with restore.telling():
                wanted = repository.loop.run(restore.begin())
                is_directory = isinstance(place, DirectoryTarget)
                task = RestoreCheckpointStores(
                    access=access,
                    scope=Scope(restore.job),
                    replayed=replayed,
                    root=str(restore.directory) if is_directory else store_url(str(target)),
                    is_directory=is_directory,
                    target_settings=settings,
                    wanted={(item.id.task, item.id.store): item for item in wanted},
                )
                if isinstance(place, ObjectTarget):
                    if place.has_content:
                        _carry_out(spark, msgspec.structs.replace(task, rehearses=True), partitions_max)
                    repository.loop.run(place.clear())
                restored = _carry_out(spark, task, partitions_max)
                return repository.loop.run(restore.finish(restored))
        finally:
            repository.loop.run(restore.close())


def _carry_out(
    spark: SparkSession, task: RestoreCheckpointStores, partitions_max: int | None
) -> tuple[StoreRestored, ...]:
    """What became of the stores, all of them.

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
        told = "; ".join(failed[:FAILURES_TOLD_MAX])
        is_damage = any(row["error"].partition(":")[0] in _DAMAGE for row in rows)
        raise (DamagedError if is_damage else TaskFailedError)(
            f"{len(failed)} of {len(rows)} stores were not restored: {told}",
            operation="restore checkpoint",
            subject=str(task.scope),
            hint=_DAMAGE_HINT if is_damage else "",
        )
    return tuple(restored_of(row["result"]) for row in rows)


def restored_of(result: bytes) -> StoreRestored:
    """What an outcome says of its store."""
    return msgspec.msgpack.decode(result, type=StoreRestored)
