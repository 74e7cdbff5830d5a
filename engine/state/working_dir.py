"""The private directory of one state store on this machine.

```
<directory>/lock             held (flock) by the store that works here; stays when none does
<directory>/db               RocksDB's files of the loaded version
<directory>/captured/<n>     rocksdb_checkpoints, hard links to files of `db`, of snapshots that are not uploaded yet
<directory>/changelogs       what is being written for the next commit, and what was fetched to be replayed
```

Nothing in it outlives the process that holds the lock: whoever takes it next removes all of it. Everything here blocks
and is made for a thread.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from engine.errors import TargetBusyError, TargetError

_LOCK: Final = "lock"
_DB: Final = "db"
_CAPTURED: Final = "captured"
_CHANGELOGS: Final = "changelogs"
_OURS: Final = frozenset({_LOCK, _DB, _CAPTURED, _CHANGELOGS})

# RocksDB closes a directory and may still be deleting old files of it.
_REMOVE_ATTEMPTS_MAX: Final = 5


class WorkingDir:
    """The claim on such a directory, from `open` to `close`."""

    def __init__(self, directory: Path, lock: int) -> None:
        """Prefer `open`."""
        self.directory = directory
        self._lock = lock
        self._captured_count = 0
        self._written_count = 0

    @classmethod
    def open(cls, directory: Path) -> "WorkingDir":
        """Make the directory, lock it, and remove what a process that is gone left there.

        Raises:
            TargetBusyError: Another store works there, in this process or in another one.
            TargetError: It holds something else, or cannot be written.
        """
        directory = directory.absolute()
        lock = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _check_ours(directory)
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _take(lock, directory)
            place = cls(directory, lock)
            place.clear()
        except OSError as error:
            _release(lock)
            raise no_room("open", error) from error
        except BaseException:
            _release(lock)
            raise
        return place

    @property
    def db(self) -> Path:
        """Where RocksDB is."""
        return self.directory / _DB

    @property
    def fetched(self) -> Path:
        """Where changelogs are fetched to."""
        return self.directory / _CHANGELOGS / "fetched"

    def new_captured(self) -> Path:
        """A path, free as yet, for one more rocksdb_checkpoint."""
        self._captured_count += 1
        return self.directory / _CAPTURED / str(self._captured_count)

    def new_changelog(self) -> Path:
        """A path, free as yet, for one more changelog."""
        self._written_count += 1
        return self.directory / _CHANGELOGS / f"written-{self._written_count}"

    def clear(self) -> None:
        """Remove everything but the lock, and make the directories anew."""
        for name in (_DB, _CAPTURED, _CHANGELOGS):
            remove_tree(self.directory / name)
            (self.directory / name).mkdir()
        self.fetched.mkdir()

    def clear_fetched(self) -> None:
        """Remove the changelogs that were fetched."""
        remove_tree(self.fetched)
        self.fetched.mkdir()

    def close(self) -> None:
        """Remove everything but the lock, and release it; once is enough."""
        if self._lock < 0:
            return
        try:
            for name in (_DB, _CAPTURED, _CHANGELOGS):
                remove_tree(self.directory / name)
        except OSError as error:
            raise no_room("close", error) from error
        finally:
            lock, self._lock = self._lock, -1
            _release(lock)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, also while RocksDB's last thread still removes files of it."""
    for _ in range(_REMOVE_ATTEMPTS_MAX):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # The directory, or a file in it that somebody else removed first.
            if not path.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(path)


def _check_ours(directory: Path) -> None:
    names = sorted(entry.name for entry in directory.iterdir())
    foreign = [name for name in names if name not in _OURS or _LOCK not in names]
    if foreign:
        raise TargetError(
            f"holds something else: {foreign[0]}",
            operation="open",
            subject=str(directory),
            hint="give the state store a directory of its own: everything in it is removed",
        )


def _take(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        raise TargetBusyError(
            "another state store works in it",
            operation="open",
            subject=str(directory),
            hint="give each store a working directory of its own, or close the other one",
        ) from error


def _release(lock: int) -> None:
    if lock >= 0:
        with contextlib.suppress(OSError):
            # Closing alone would leave it to a process that was forked off meanwhile.
            fcntl.flock(lock, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(lock)


def no_room(operation: str, error: OSError) -> TargetError:
    """What to raise where the working directory cannot be written."""
    hint = "choose another working directory"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hint = "free space where the working directory is"
    subject = str(error.filename or "")
    return TargetError(error.strerror or str(error), operation=operation, subject=subject, hint=hint)
