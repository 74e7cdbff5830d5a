"""Where state is read from: a checkpoint, or a backup of one in a repository. The driver and its tasks see the same.

What travels to a task says where to look and holds no credentials: each process finds its own. A place opens the files
of a store, and the logs and the metadata of the query laid out as in a checkpoint; each for a block, with the loop
thread that runs what is asked of them.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from engine.blocking import LoopThread
from engine.checkpoint.catalog import find_checkpoint_backup, find_job
from engine.records.find import require_store
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of, staged_restore
from engine.spark.access import Access, absolute, open_on_driver
from engine.spark.sources.options import SourceOptions
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.sources import IndexStateFiles, StateFiles
from index.plan.commits import Commit
from index.snapshot.contents import files_of, select_files
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, SOURCES, StoreId
from index.spark.schema import SCHEMA_BYTES_MAX

_SCHEMA: Final = "_metadata/schema"
# Where Spark lets a worker keep what is too large for memory.
_LOCAL_DIRS: Final = "SPARK_LOCAL_DIRS"

R = TypeVar("R")


class CheckpointPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, by its path or URL."""

    location: str
    settings: StoreSettings = StoreSettings()

    def of(self, *stores: StoreId) -> "CheckpointPlace":  # noqa: ARG002  # all of it is one place
        """Return the same."""
        return self

    @contextlib.contextmanager
    def open_store(self, store: StoreId) -> Iterator[tuple[LoopThread, StateFiles]]:
        """Open the files of a store."""
        with self.open_root() as (loop, directory):
            yield loop, directory.child(store.path)

    @contextlib.contextmanager
    def open_logs(self, scratch: Path) -> Iterator[tuple[LoopThread, CheckpointDir]]:  # noqa: ARG002  # no copy is made
        """Open the logs and the metadata of the query."""
        with self.open_root() as opened:
            yield opened

    @contextlib.contextmanager
    def open_root(self) -> Iterator[tuple[LoopThread, CheckpointDir]]:
        """Open the root of the checkpoint."""
        loop = LoopThread()
        try:
            directory = loop.run(CheckpointDir.open(self.location, settings=self.settings))
            try:
                yield loop, directory
            finally:
                loop.run(directory.close())
        finally:
            loop.stop()


class BackupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint backup in a repository. What is read of it is pinned meanwhile (design 0002, D5)."""

    access: Access
    commit: Commit

    def of(self, *stores: StoreId) -> "BackupPlace":
        """Keep these stores and the query's own: a task is not sent what all others read."""
        wanted = {(QUERY_TASK, QUERY_STORE), *((of.task, of.store) for of in stores)}
        kept = tuple(store for store in self.commit.record.stores if (store.task, store.store) in wanted)
        record = msgspec.structs.replace(self.commit.record, stores=kept)
        return msgspec.structs.replace(self, commit=msgspec.structs.replace(self.commit, record=record))

    @contextlib.contextmanager
    def open_store(self, store: StoreId) -> Iterator[tuple[LoopThread, StateFiles]]:
        """Open the files of a store."""
        with self.open_index(store.task, store.store) as opened:
            yield opened

    @contextlib.contextmanager
    def open_index(self, task: str, store: str) -> Iterator[tuple[LoopThread, IndexStateFiles]]:
        """Open the files of any store of the commit, also of the query's own."""
        with self.access.borrow() as repository:
            files = repository.asynchronous.state_files(self.commit, task=task, store=store)
            with inside(repository.loop, files) as opened:
                yield repository.loop, opened

    @contextlib.contextmanager
    def open_logs(self, scratch: Path) -> Iterator[tuple[LoopThread, CheckpointDir]]:
        """Bring the logs to this machine, without those of sources, which may be long."""
        with self.access.borrow() as repository:
            target = scratch / "query"
            repository.loop.run(self._fetch_logs(repository.asynchronous, target))
            directory = repository.loop.run(CheckpointDir.open(target))
            try:
                yield repository.loop, directory
            finally:
                repository.loop.run(directory.close())

    async def _fetch_logs(self, repository: Repository, target: Path) -> None:
        reference = require_store(self.commit, QUERY_TASK, QUERY_STORE)
        opened = repository.opened.without_digests()
        async with repository.pinned(self.commit, "read logs"), staged_restore(opened, target) as staged:
            index, requests = await read_index_of(repository.store, reference)
            wanted = [(path, entry) for path, entry in files_of(index.dir) if path[0] != SOURCES]
            await staged.download(select_files(index, wanted), requests=requests)
            await staged.publish()


Place: TypeAlias = CheckpointPlace | BackupPlace


def find_place(options: SourceOptions, batch: int | None) -> Place:
    """Find the state after a batch, the newest if none is given. For the driver.

    Raises:
        NotFoundError: There is no such repository, job or checkpoint backup.
        UsageError: Several jobs have checkpoint backups, and none is named; or other processes cannot reach the store.
        StoreError: As the store says.
    """
    settings = StoreSettings(s3=options.s3)
    if options.repository is None:
        return CheckpointPlace(location=absolute(options.checkpoint or ""), settings=settings)
    repository, access = open_on_driver(options.repository, store=settings)
    with repository:
        job = options.job or repository.loop.run(find_job(repository.asynchronous))
        commit, _ = repository.loop.run(find_checkpoint_backup(repository.asynchronous, job, batch=batch))
    return BackupPlace(access=access, commit=commit)


async def read_schema(files: StateFiles) -> bytes | None:
    """Read the schema of a store's rows from the files of its partition 0; None if there is none."""
    try:
        return await files.read(_SCHEMA, size_bytes_max=SCHEMA_BYTES_MAX)
    except BlobNotFoundError:
        return None


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """Make a directory for a block, where Spark keeps its temporary files if it says where."""
    roots = (root for root in os.environ.get(_LOCAL_DIRS, "").split(",") if os.access(root, os.W_OK))
    with tempfile.TemporaryDirectory(prefix="tidemark-", dir=next(roots, None), ignore_cleanup_errors=True) as found:
        yield Path(found)


@contextlib.contextmanager
def inside(loop: LoopThread, context: contextlib.AbstractAsyncContextManager[R]) -> Iterator[R]:
    """Enter an asynchronous context for a block that has no loop."""

    async def enter() -> R:
        return await context.__aenter__()

    async def leave() -> None:
        await context.__aexit__(None, None, None)

    entered = loop.run(enter())
    try:
        yield entered
    finally:
        loop.run(leave())
