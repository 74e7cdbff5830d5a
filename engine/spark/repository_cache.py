"""The repositories that a process keeps open from task to task, so that a task need not connect anew.

Spark forks its Python workers from a daemon and gives each worker one task after another. What a task borrows here
is opened in the worker, never in the daemon, and stays open for the next task that asks for the same. A worker ends
without running anything of ours, and the kernel closes its connections; any other process closes them at its exit.

1. What is kept is used by the process that opened it. A process that is forked later starts from nothing, and lets
   alone what it inherited: the parent's threads are not in it, and closing a connection would tell the parent's epoll.
2. A borrower who is interrupted (by a signal, or because Spark wants no more rows) takes the repository along: nobody
   knows in what state it is. An error leaves it as it is: it was an answer.
3. At most `kept_max` are kept. What was used longest ago is closed first, and what is in use is not closed at all.
"""

import atexit
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from engine.repository.sync import SyncRepository

KEPT_MAX: Final = 8


class RepositoryCache:
    """Open repositories, each with an event loop of its own, for threads that borrow them.

    Args:
        kept_max: How many stay open while nobody uses them.
    """

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._lock = threading.Lock()
        # The one used last at the end.
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    @contextlib.contextmanager
    def borrow(self, key: Hashable, open_new: Callable[[], SyncRepository]) -> Iterator[SyncRepository]:
        """A repository for the block; several threads may have it at once.

        Args:
            key: What tells repositories apart that must not be taken for one another.
            open_new: Opens it if it is not kept; makes no request.
        """
        kept = self._take(key, open_new)
        try:
            yield kept.repository
        except Exception:
            raise
        except BaseException:
            self._forget(key, kept)
            raise
        finally:
            self._give_back(kept)

    def close(self) -> None:
        """Close everything that nobody uses."""
        with self._lock:
            idle = self._drop_idle(0)
        _close_all(idle)

    def _take(self, key: Hashable, open_new: Callable[[], SyncRepository]) -> "_Kept":
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or not kept.repository.loop.is_running:
                kept = self._kept[key] = _Kept(open_new())
            self._kept.move_to_end(key)
            kept.users_count += 1
            idle = self._drop_idle(self._kept_max)
        _close_all(idle)
        return kept

    def _give_back(self, kept: "_Kept") -> None:
        with self._lock:
            kept.users_count -= 1
            idle = self._drop_idle(self._kept_max)
            if kept.is_forgotten and not kept.users_count:
                idle.append(kept.repository)
        _close_all(idle)

    def _forget(self, key: Hashable, kept: "_Kept") -> None:
        with self._lock:
            kept.is_forgotten = True
            if self._kept.get(key) is kept:
                del self._kept[key]

    def _drop_idle(self, left_max: int) -> list[SyncRepository]:
        """Take out what is idle, the one used longest ago first, until no more than so many are left."""
        idle = [key for key, kept in self._kept.items() if not kept.users_count]
        return [self._kept.pop(key).repository for key in idle[: max(0, len(self._kept) - left_max)]]


class _Kept:
    """One repository, and how many use it now."""

    def __init__(self, repository: SyncRepository) -> None:
        self.repository = repository
        self.users_count = 0
        self.is_forgotten = False


# By process id.
_of_processes: Final[dict[int, RepositoryCache]] = {}


def cached_here() -> RepositoryCache:
    """What this process keeps."""
    kept = _of_processes.get(os.getpid())
    if kept is None:
        if not _of_processes:
            atexit.register(_close_here)
        kept = _of_processes.setdefault(os.getpid(), RepositoryCache())
    return kept


def _close_here() -> None:
    if (kept := _of_processes.get(os.getpid())) is not None:
        kept.close()


def _close_all(repositories: list[SyncRepository]) -> None:
    """Close repositories that nobody will use again."""
    for repository in repositories:
        # It is no concern of the task that happens to be here, and what cannot be closed goes with the process.
        with contextlib.suppress(Exception):
            repository.close()
