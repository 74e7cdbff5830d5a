"""Back up and restore many stores at once on Spark, as `spread` does.

Running the same restore again fetches the stores that are missing, and no other bytes but indexes.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar, Unpack

import msgspec
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from blobstore.concurrency import run_blocking
from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import TargetBusyError, TargetError, UsageError
from engine.records.find import Choice
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions, RestoreResult, plan_restore_store
from engine.spark.access import SparkOptions, open_on_driver
from engine.spark.claims import ReadyStore
from engine.spark.spread import StoreOutcome, StoresTask, StoreWork, spread
from engine.spark.store_task import JobRun, state_of
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope, StoreReference

T = TypeVar("T")

# What pins are held for.
PURPOSE: Final = "restore on Spark"
# How long an attempt waits for another one at the same target: an hour.
BUSY_WAITS_MAX: Final = 3600
BUSY_WAIT_S: Final = 1.0


class BackupStores(StoresTask, frozen=True, kw_only=True):
    """Backs up the stores of a partition, each against its reference."""

    version: int
    check_retained: bool = False

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        options = BackupOptions(version=self.version, base=work.reference, check_retained=self.check_retained)
        result = await repository.backup(self.scope, Path(work.path), task=work.task, store=work.store, options=options)
        return work.done(
            files=result.reference.files_count,
            bytes_moved=result.stats.bytes_uploaded,
            bytes_kept=result.stats.bytes_retained,
            result=msgspec.msgpack.encode(result),
        )


class RestoreStores(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition, each into its path."""

    replace: bool

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        reference, target = _reference_of(work), Path(work.path)
        result = await when_free(lambda: self._restore(repository, reference, target))
        return work.done(files=reference.files_count, bytes_moved=result.bytes_fetched, bytes_kept=result.bytes_reused)

    async def _restore(self, repository: Repository, reference: StoreReference, target: Path) -> RestoreResult:
        try:
            return await repository.restore_reference(reference, target, options=RestoreOptions(replace=self.replace))
        except TargetBusyError:
            raise
        except TargetError:
            # Spark may repeat a task that had restored some of its stores: what is there is no obstacle then.
            if not await holds_snapshot(repository, reference, target):
                raise
        return await repository.restore_reference(reference, target, options=RestoreOptions(replace=True))


async def when_free(restore: Callable[[], Awaitable[T]]) -> T:
    """Restore; while another attempt at this task is at work, which Spark would stop if this one answered, wait.

    Raises:
        TargetBusyError: It does not end.
    """
    for _ in range(BUSY_WAITS_MAX):
        with contextlib.suppress(TargetBusyError):
            return await restore()
        await asyncio.sleep(BUSY_WAIT_S)
    return await restore()


async def holds_snapshot(repository: Repository, reference: StoreReference, target: Path) -> bool:
    """Return whether a directory has exactly the files of a snapshot, by their hashes.

    Raises:
        TargetError: It is not a directory, or is in use.
        DamagedError: The index is missing or altered.
        StoreError: As the store says.
    """
    opened = repository.opened.without_digests()
    plan = await plan_restore_store(opened, reference, target, RestoreOptions(replace=True))

    def has_rest() -> bool:
        """Return whether the small files are there, too, and no others; the larger ones are known to be right."""
        if plan.files_count != sum(path.is_file() for path in target.rglob("*")):
            return False
        for file in (*plan.inline, *plan.empty):
            path = target.joinpath(*file.path)
            if (
                not path.is_file()
                or path.stat().st_size != file.size_bytes
                or path.read_bytes() != (file.entry.inline or b"")
            ):
                return False
        return True

    return plan.fetch_requests == 0 and await asyncio.to_thread(has_rest)


class RestoreForRun(StoresTask, frozen=True, kw_only=True):
    """Restores the stores of a partition to where the next run of a job claims them."""

    run: JobRun

    @override
    async def carry_out(self, repository: Repository, work: StoreWork) -> StoreOutcome:
        reference = _reference_of(work)
        ready = ReadyStore(state_of(reference), self.run.id)
        claims = self.run.claims(work.task)
        moved, kept = 0, reference.size_bytes
        with claims.begin() as attempt:
            # In a thread: there may be much to delete, and other stores are at work.
            await run_blocking(claims.remove_dead_attempts)
            await run_blocking(attempt.remove_stale, ready.state, self.run.id)
            if all(other.state != ready.state for other in claims.ready()):
                result = await repository.restore_reference(reference, attempt.directory)
                moved, kept = result.bytes_fetched, result.bytes_reused
                attempt.give_back(ready)
        done = work.done(files=reference.files_count, bytes_moved=moved, bytes_kept=kept)
        return msgspec.structs.replace(done, path=str(claims.directory))


def _reference_of(work: StoreWork) -> StoreReference:
    if work.reference is None:
        raise UsageError("there is nothing to restore", operation="restore", subject=work.path)
    return work.reference


def backup_stores(
    spark: SparkSession,
    url: str,
    scope: Scope,
    stores: DataFrame | Iterable[tuple[str, str, str | Path]],
    *,
    version: int | None = None,
    check_retained: bool = False,
    options: SparkOptions | None = None,
) -> DataFrame:
    """Back up many directories, each against its store in the newest commit. Nothing is visible until a commit.

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        scope: The scope of the commit to come.
        stores: Task, store and path of each, or a DataFrame with columns of these names. A path is read on whichever
            executor gets it, so it is on a shared file system unless there is only one machine.
        version: The caller's version of all of them; the newest commit's plus one if not given.
        check_retained: As for `Repository.backup`.
        options: How the repository is reached and the work spread.

    Returns:
        One row per store, see `StoreOutcome`. Commit those that are ok with `backup_results`.

    Raises:
        TaskFailedError: Spark itself gave up; nothing was committed.
        StoreError: The newest commit could not be read.
    """
    options = options or SparkOptions()
    if isinstance(stores, DataFrame):
        rows = stores.select("task", "store", "path").toArrow().to_pylist()
        stores = [(row["task"], row["store"], row["path"]) for row in rows]
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)
    with repository:
        newest = repository.latest(scope)
        work = [
            StoreWork(
                task=task,
                store=store,
                path=str(Path(path).absolute()),
                reference=newest.store(task, store) if newest else None,
            )
            for task, store, path in stores
        ]
        next_version = version if version is not None else (newest.record.version + 1 if newest else 1)
        task = BackupStores(access=access, scope=scope, version=next_version, check_retained=check_retained)
        return spread(spark, task, work, options.partitions_max)


def backup_results(outcomes: DataFrame) -> tuple[BackupResult, ...]:
    """Return what `backup_stores` has made, for `Repository.commit`: one per row that is ok."""
    results = outcomes.where("ok").select("result").toArrow().column("result").to_pylist()
    return tuple(msgspec.msgpack.decode(result, type=BackupResult) for result in results)


def restore_stores(
    spark: SparkSession,
    url: str,
    scope: Scope,
    target_root: str | Path,
    *,
    replace: bool = False,
    or_newest_complete: bool = False,
    options: SparkOptions | None = None,
    **choice: Unpack[Choice],
) -> DataFrame:
    """Restore every store of a commit into `<target_root>/<task>/<store>`, in parallel.

    The commit is pinned until the last store is done (design 0002, D5).

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        scope: Whose stores.
        target_root: A directory on whichever executor gets a store.
        replace: What is there already may be replaced, and is reused where its hash is right (I2). Without it a store
            that is there exactly as committed is fine, anything else is an error.
        or_newest_complete: Where something of that commit is missing, take the newest of which everything is there
            (design 0006, M2); found out beforehand, with a STAT for each of its blobs.
        options: How the repository is reached and the work spread.
        choice: Which commit, as for `Repository.find`; the newest if nothing is given.

    Returns:
        One row per store, see `StoreOutcome`.

    Raises:
        NotFoundError: There is no such commit.
        TaskFailedError: Spark itself gave up.
        StoreError: The commit could not be read or pinned.
    """
    options, root = options or SparkOptions(), Path(target_root).absolute()
    repository, access = open_on_driver(url, store=options.store, transfer=options.transfer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(repository)
        if or_newest_complete:
            choice = repository.choose_complete(scope, **choice)
        commit, _ = stack.enter_context(repository.find_pinned(scope, purpose=PURPOSE, **choice))
        work = [
            StoreWork(
                task=reference.task,
                store=reference.store,
                path=str(root / encode_component(reference.task) / encode_component(reference.store)),
                reference=reference,
            )
            for reference in commit.record.stores
        ]
        return spread(spark, RestoreStores(access=access, scope=scope, replace=replace), work, options.partitions_max)
