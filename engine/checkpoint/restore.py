"""Bringing a streaming checkpoint back as one of its batches left it (design 0005, section 3).

First the files of the query, which say what its stores are; then every store, several at once, here or on Spark; then
all of it is put in its place. Until then the target is as it was.
"""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.opening import StoreSettings, local_path_of
from engine.checkpoint.object_target import ObjectTarget, directory_of
from engine.checkpoint.restore_run import CheckpointRestore, CheckpointRestorePlan, RestoreChoice, RestoredCheckpoint
from engine.checkpoint.store import StoreRestored, StoreToRestore, restore_store
from engine.checkpoint.targets import CheckpointTarget, DirectoryTarget
from engine.clock import Runtime, SystemRuntime
from engine.errors import TargetError
from engine.progress import NO_PROGRESS, Progress
from engine.repository.repository import Repository
from engine.settings import STORES_AT_ONCE, share_among
from engine.state.checkpoint_dir import store_url
from engine.state.restore import StateRestoreOptions, choose_state
from index.snapshot.contents import files_of

__all__ = [
    "CheckpointRestorePlan",
    "RestoreChoice",
    "RestoredCheckpoint",
    "make_target",
    "plan_checkpoint_restore",
    "restore_checkpoint",
]


async def restore_checkpoint(
    repository: Repository,
    target: str | Path | CheckpointTarget,
    *,
    job: str | None = None,
    batch: int | None = None,
    at_ms: int | None = None,
    replayed: bool = False,
    move_aside: bool = False,
    map_paths: Mapping[str, str] | None = None,
    spark_location: str | None = None,
    or_newest_complete: bool = False,
    stores_at_once: int = STORES_AT_ONCE,
    progress: Progress = NO_PROGRESS,
    store_settings: StoreSettings | None = None,
    runtime: Runtime | None = None,
) -> RestoredCheckpoint:
    """Bring a checkpoint back; a query that is started on it goes on after the batch.

    Args:
        repository: Where its backups are.
        target: A directory, or the URL of a prefix of an object store. With the latter everything is gathered on this
            machine first, in the system's place for temporary files; on Spark it is not.
        job: Whose backups; the only job that has any, if not given.
        batch: The batch to restore; the newest backup's if neither this nor `at_ms` is given.
        at_ms: A time by the store's clock: the backup that was the newest then.
        replayed: Apply changelogs here, so that the query starts at once.
        move_aside: A target that has content is moved aside first, and never deleted.
        map_paths: Where the files of file sources stand now: old prefixes to new ones.
        spark_location: What Spark calls the target; a URL, or an absolute path.
        or_newest_complete: Where something of the backup is missing, take the newest of which everything is there
            (design 0006, M2); found out beforehand, with a STAT for each blob of the backup.
        stores_at_once: So many stores are worked on at once.
        progress: Told of files and bytes.
        store_settings: How a target that is a URL is asked.
        runtime: Clock and random numbers.

    Raises:
        NotFoundError: There is no such job, backup or batch.
        UsageError: The arguments do not fit together, or a mapping of paths matches nothing.
        InvalidRequestError: The target does not follow the grammar of `open_store`.
        TargetError: The target may not be written, has content that may not be moved aside, or is the repository's
            place, above it or below it.
        DamagedError, FormatError: Something is missing or altered; the error names the file, and the blob.
        StoreError: As a store says. After any error the target is as it was, or, on an object store, lacks `commits/`;
            if what stood there is aside already, the error's hint and a note say where.
    """
    runtime = runtime or SystemRuntime()
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
    place = _place(target, runtime, choice, store_settings)
    restore = CheckpointRestore(repository, place, choice, runtime)
    at_once, transfer = share_among(repository.settings, stores_at_once)
    quiet = _StoresProgress(progress)

    async def one(item: StoreToRestore) -> StoreRestored:
        return await restore_store(
            repository,
            item,
            restore.directory / item.id.path,
            replayed=replayed,
            transfer=transfer,
            runtime=runtime,
            progress=quiet,
        )

    try:
        with restore.telling():
            async with restore.naming_complete():
                work = await restore.begin()
                files = sum(item.reference.files_count for item in work)
                progress.total(files=files, bytes_=sum(item.reference.size_bytes for item in work))
                restored = await map_bounded(one, work, in_flight_max=at_once)
            return await restore.finish(restored)
    finally:
        await restore.close()


async def plan_checkpoint_restore(
    repository: Repository,
    target: str | Path | CheckpointTarget,
    choice: RestoreChoice,
    *,
    stores_at_once: int = STORES_AT_ONCE,
    store_settings: StoreSettings | None = None,
    runtime: Runtime | None = None,
) -> CheckpointRestorePlan:
    """What `restore_checkpoint` would bring back. Nothing is written but a pin, and files that are gone afterwards.

    Args:
        target: Looked at, to say whether it would be refused.

    Raises:
        As `restore_checkpoint`.
    """
    runtime = runtime or SystemRuntime()
    place = _place(target, runtime, choice, store_settings)
    restore = CheckpointRestore(repository, _Unwritten(place), choice, runtime)
    try:
        work = await restore.begin()

        async def look(item: StoreToRestore) -> tuple[int, int, int]:
            at = item.store.at
            options = StateRestoreOptions(version=at.version, unique_id=at.unique_id, codec=item.store.settings.codec)
            chosen = await choose_state(repository.opened, item.reference, options)
            sizes = [entry.metadata.size_bytes for _, entry in files_of(chosen.index.dir)]
            return len(sizes), sum(sizes), len(chosen.resolution.changelogs)

        found = await map_bounded(look, work, in_flight_max=stores_at_once)
        return restore.planned(found)
    finally:
        await restore.close()


class _Unwritten:
    """A target that is looked at, and a place of the system's that is gathered in instead."""

    def __init__(self, target: CheckpointTarget) -> None:
        self._target = target
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.location, self.root, self.moved_aside = target.location, target.root, ""

    @property
    def directory(self) -> Path:
        return directory_of(self._scratch)

    async def place(self) -> tuple[str, ...]:
        return await self._target.place()

    async def check(self, query_id: str, batch: int) -> None:
        await self._target.check(query_id, batch)

    async def open(self, query_id: str, batch: int) -> None:
        await self.check(query_id, batch)
        self._scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))

    async def publish(self, published: Iterable[str] = ()) -> None:  # noqa: ARG002
        raise AssertionError("nothing is to be written")

    async def close(self) -> tuple[str, ...]:
        if self._scratch is not None:
            await run_blocking(self._scratch.cleanup)
        return await self._target.close()


class _StoresProgress:
    """Many stores that each tell what they have: the whole is told once, before them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def total(self, *, files: int, bytes_: int) -> None:
        """Known already."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self._progress.add(files=files, bytes_=bytes_)


def _place(
    target: str | Path | CheckpointTarget, runtime: Runtime, choice: RestoreChoice, settings: StoreSettings | None
) -> CheckpointTarget:
    if isinstance(target, str | Path):
        return make_target(target, runtime, move_aside=choice.move_aside, settings=settings)
    return target


def make_target(
    target: str | Path,
    runtime: Runtime,
    *,
    move_aside: bool,
    settings: StoreSettings | None = None,
) -> DirectoryTarget | ObjectTarget:
    """The place that a path or a URL stands for. Nothing is asked of it.

    Args:
        target: Of `s3a:` and `s3n:` as Spark has them the same is meant as of `s3:`.

    Raises:
        InvalidRequestError: It does not follow the grammar of `open_store`.
        TargetError: It names no place for a checkpoint.
    """
    path = local_path_of(target)
    if path is not None:
        return DirectoryTarget(path, runtime, move_aside=move_aside)
    location = str(target).rstrip("/")
    parent, _, name = store_url(location).rpartition("/")
    if not name or parent.endswith("/"):
        hint = "restore to s3://bucket/prefix"
        raise TargetError("is no prefix of a store", operation="restore", subject=location, hint=hint)
    return ObjectTarget(
        parent,
        name,
        location=location,
        runtime=runtime,
        move_aside=move_aside,
        settings=settings,
    )
