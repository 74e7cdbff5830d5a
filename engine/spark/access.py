"""Reach the same repository from the driver and the tasks of one run; each process keeps it open from task to task.

Spark forks its Python workers from a daemon and gives each worker one task after another. What a task borrows here
is opened in the worker, never in the daemon, and stays open for the next task that asks for the same. A worker ends
without running anything of ours, and the kernel closes its connections; any other process closes them at its exit.

1. What is kept is used by the process that opened it. A process that is forked later starts from nothing, and lets
   alone what it inherited: it lacks the parent's threads, and closing a connection would change the parent's epoll.
2. A borrower who is interrupted (by a signal, or because Spark wants no more rows) takes the repository along: nobody
   knows in what state it is. An error leaves it as it is: it was an answer.
3. At most `kept_max` are kept. What was used longest ago is closed first, and what is in use is not closed at all.
"""

import atexit
import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from blobstore.opening import StoreSettings, open_store
from blobstore.tracing import incoming, outgoing, span
from engine.blocking import LoopThread
from engine.errors import UsageError
from engine.repository.repository import Repository, SyncRepository
from engine.settings import TransferSettings
from index.snapshot.model import RepositoryRecord

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
KEPT_MAX: Final = 8
T = TypeVar("T")
R = TypeVar("R")


class SparkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How work on Spark reaches a repository and is spread."""

    # Partitions of work; None: `default_partitions`.
    partitions_max: int | None = None
    # How bytes are moved.
    transfer: TransferSettings = TransferSettings()
    # How the repository's store is reached.
    store: StoreSettings = StoreSettings()


def in_context(task: Callable[[T], Iterator[R]], name: str = "") -> Callable[[T], Iterator[R]]:
    """Return a task for `mapInArrow` that goes on with the trace of this moment; the task itself if there is none."""
    headers = outgoing()

    def run(batches: T) -> Iterator[R]:
        with incoming(headers), span(name or type(task).__name__):
            yield from task(batches)

    return run if headers else task


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where a repository is and how to treat it, as it travels to a task. Each process finds its own credentials."""

    url: str
    record: RepositoryRecord
    store: StoreSettings
    transfer: TransferSettings

    def open(self) -> SyncRepository:
        """Open the repository without a request: the driver has read its record."""
        repository = Repository(open_store(self.url, self.store), self.record, settings=self.transfer)
        return SyncRepository(LoopThread(), repository)

    @contextlib.contextmanager
    def borrow(self, transfer: TransferSettings | None = None) -> Iterator[SyncRepository]:
        """Borrow the repository for a block; its connections stay open for the next task that this process runs.

        What a repository remembers of directories and indexes is forgotten after the block: a worker lives for long,
        and its tasks work on directories that are never seen again.
        """
        with cached_here().borrow((self.url, self.record.id, self.store), self.open) as kept:
            settings = transfer or self.transfer
            yield SyncRepository(kept.loop, Repository(kept.asynchronous.store, self.record, settings=settings))


def open_on_driver(url: str, options: SparkOptions) -> tuple[SyncRepository, Access]:
    """Open a repository that tasks will use too.

    Raises:
        UsageError: Other processes cannot reach it.
        NotFoundError: There is no repository.
        StoreError: As the store says.
    """
    url, store, transfer = absolute(url), options.store, options.transfer
    with contextlib.ExitStack() as undo:
        opened, loop = open_store(url, store), LoopThread()
        undo.callback(loop.stop)
        undo.callback(lambda: loop.run(opened.close()))
        repository = SyncRepository(loop, loop.run(Repository.open(opened, settings=transfer)))
        if not repository.asynchronous.store.capabilities.shared:
            hint = "use a file:// or s3:// URL"
            raise UsageError("only this process can reach the blob store", operation="open", hint=hint)
        undo.pop_all()
    return repository, Access(url=url, record=repository.record, store=store, transfer=transfer)


def absolute(location: str | Path) -> str:
    """Return a location with its path made absolute: a relative one would mean another directory in every process."""
    return location if isinstance(location, str) and SCHEME.match(location) else str(Path(location).absolute())


class RepositoryCache:
    """Open repositories, each with an event loop of its own; at most `kept_max` stay open unused."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._lock = threading.Lock()
        # The one used last at the end.
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    @contextlib.contextmanager
    def borrow(self, key: Hashable, open_new: Callable[[], SyncRepository]) -> Iterator[SyncRepository]:
        """Lend the repository of a key, opened without a request if it is not kept; several threads may have it."""
        with self._locked_then_closing_idle():
            kept = self._kept.get(key)
            if kept is None or not kept.repository.loop.is_running:
                kept = self._kept[key] = _Kept(open_new())
            self._kept.move_to_end(key)
            kept.users_count += 1
        is_interrupted = False
        try:
            yield kept.repository
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception)
            raise
        finally:
            with self._locked_then_closing_idle() as idle:
                kept.users_count -= 1
                kept.is_forgotten |= is_interrupted
                if kept.is_forgotten and self._kept.get(key) is kept:
                    del self._kept[key]
                if kept.is_forgotten and not kept.users_count:
                    idle.append(kept.repository)

    def close(self) -> None:
        with self._locked_then_closing_idle(0):
            pass

    @contextlib.contextmanager
    def _locked_then_closing_idle(self, left_max: int | None = None) -> Iterator[list[SyncRepository]]:
        """Hold the lock for a block, and close after it what it lists and what is idle, that used longest ago first."""
        with self._lock:
            closing: list[SyncRepository] = []
            yield closing
            idle = [key for key, kept in self._kept.items() if not kept.users_count]
            count = len(self._kept) - (self._kept_max if left_max is None else left_max)
            closing += [self._kept.pop(key).repository for key in idle[: max(0, count)]]
        for repository in closing:
            # No concern of the task that happens to be here; what cannot be closed goes with the process.
            with contextlib.suppress(Exception):
                repository.close()


class _Kept(msgspec.Struct):
    repository: SyncRepository
    users_count: int = 0
    is_forgotten: bool = False


# By process id.
_of_processes: Final[dict[int, RepositoryCache]] = {}


def cached_here() -> RepositoryCache:
    """Return the cache of this process."""
    if not _of_processes:
        atexit.register(lambda: cached_here().close())
    return _of_processes.setdefault(os.getpid(), RepositoryCache())
