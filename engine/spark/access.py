"""How the driver and the tasks of one run reach the same repository."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from blobstore.opening import StoreSettings, open_store
from engine.blocking import LoopThread
from engine.errors import UsageError
from engine.repository.repository import Repository
from engine.repository.sync import SyncRepository
from engine.settings import TransferSettings
from engine.spark.repository_cache import cached_here
from index.snapshot.records import RepositoryRecord

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What travels to a task: where the repository is and how to treat it. Each process finds its own credentials."""

    url: str
    record: RepositoryRecord
    store: StoreSettings
    transfer: TransferSettings

    def open(self) -> SyncRepository:
        """The repository, without a request: the driver has read its record."""
        repository = Repository(open_store(self.url, self.store), self.record, settings=self.transfer)
        return SyncRepository(LoopThread(), repository)

    @contextlib.contextmanager
    def borrow(self, transfer: TransferSettings | None = None) -> Iterator[SyncRepository]:
        """The repository for a block; its connections stay open for the next task that this process runs.

        What a repository remembers of directories and indexes is forgotten after the block: a worker lives for long,
        and its tasks work on directories that are never seen again.

        Args:
            transfer: How bytes are moved, in place of what travelled.
        """
        with cached_here().borrow((self.url, self.record.id, self.store), self.open) as kept:
            settings = transfer or self.transfer
            yield SyncRepository(kept.loop, Repository(kept.asynchronous.store, self.record, settings=settings))


def open_on_driver(
    url: str, *, store: StoreSettings | None = None, transfer: TransferSettings | None = None
) -> tuple[SyncRepository, Access]:
    """Open a repository that tasks will use too.

    Raises:
        UsageError: Other processes cannot reach it.
        NotFoundError: There is no repository.
        StoreError: As the store says.
    """
    # A relative path would mean another directory in every process.
    url = url if SCHEME.match(url) else str(Path(url).absolute())
    store, transfer = store or StoreSettings(), transfer or TransferSettings()
    opened, loop = open_store(url, store), LoopThread()
    try:
        repository = SyncRepository(loop, loop.run(Repository.open(opened, settings=transfer)))
    except BaseException:
        try:
            loop.run(opened.close())
        finally:
            loop.stop()
        raise
    if not repository.asynchronous.store.capabilities.shared:
        repository.close()
        raise UsageError("only this process can reach the store", operation="open", hint="use a file:// or s3:// URL")
    return repository, Access(url=url, record=repository.record, store=store, transfer=transfer)
