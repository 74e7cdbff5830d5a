"""Claim the directories that one machine has of one store: each attempt at a task works on one of its own.

```
<local root>/<repository id>/<scope>/<task>/<store>/
    ready-<version>-<run>-<index>       a finished store, closed; the name says exactly which state it is
    attempt-<id>/                       the directory of one attempt
        lock                            held with flock for as long as the attempt lives
        db/                             the store that it works on
        checkpoint/                     what it backs up
```

The rules, which together are I4 of design 0002:

1. A `ready-` directory is claimed by renaming it into the directory of one attempt. The rename succeeds for one of any
   number of attempts, and with it the name is gone: nobody can take a store that was written to for the state that
   the name had promised. A state is that of one index, by its hash: two snapshots may have the same unique id.
2. An attempt touches its own directory only. It makes a state claimable by renaming its closed `db` to a name that
   carries an index of its own. Nothing is ever deleted under a `ready-` name: it is renamed into an attempt first,
   so that nobody claims a directory that is half gone.
3. An attempt whose lock is free is of a dead process, and the next one removes it. The lock is the
   kernel's: `kill -9` frees it, and a process that merely stalls keeps it.
4. `ready-` directories are a cache. Each is either backed up or comes from a backup, so removing one costs a restore
   and loses nothing. A starting attempt removes all but two kinds: the state that it was asked to start from, and
   states made by its own run, of which the driver may yet commit one. So each store keeps on a machine at most the
   states of one run, however often runs fail. No comparison of versions is involved, which a rewind would mislead.
   A state that a reader has restored carries `READERS` for its run, and a reader removes those of other states: so
   readers keep one state more.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import msgspec

from engine.errors import TargetError, UsageError
from engine.local.scan import hold
from engine.runtime import Runtime
from index.errors import UnsafeNameError
from index.snapshot.keys import decode_component, encode_component, encode_scope
from index.snapshot.model import Scope

TRIES_MAX: Final = 10
# In place of a run: the state was restored to be read, and no driver will commit it.
READERS: Final = "0" * 20

_READY = re.compile(r"ready-(?P<version>\d{1,19})-(?P<run>[0-9a-f]{20})-(?P<index>.+)")
_ATTEMPT = re.compile(r"attempt-[0-9a-f]{20}")


class StoreState(msgspec.Struct, frozen=True, order=True):
    """Which state of a store: its version, for people, and the index that it was backed up as."""

    version: int
    # SHA-256 of the stored index, in hexadecimal; in directories of older releases a unique id, which nobody wants.
    index: str


class ReadyStore(msgspec.Struct, frozen=True, order=True):
    """The name of a `ready-` directory."""

    state: StoreState
    # The run of the job that made or restored it.
    run: str

    def encode(self) -> str:
        return f"ready-{self.state.version}-{self.run}-{encode_component(self.state.index)}"

    @classmethod
    def decode(cls, name: str) -> "ReadyStore | None":
        """Invert `encode`; return None for a name that it does not make."""
        found = _READY.fullmatch(name)
        if found is None:
            return None
        try:
            return cls(StoreState(int(found["version"]), decode_component(found["index"])), found["run"])
        except UnsafeNameError:
            return None


class StoreClaims:
    """One store's directory on this machine."""

    def __init__(self, root: Path, *, repository_id: str, scope: Scope, task: str, store: str) -> None:
        parts = (encode_component(repository_id), encode_scope(scope), encode_component(task), encode_component(store))
        self.directory = root.joinpath(*parts)

    def begin(self) -> "Attempt":
        try:
            # The state is as private as the user's other files: what others may read, the user decides above it.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(TRIES_MAX):
                root = self.directory / f"attempt-{Runtime().session()}"
                root.mkdir()
                # Between these two lines another attempt may find the lock free and remove the directory.
                lock = _try_lock(root)
                if lock is not None:
                    return Attempt(self, root, lock)
        except OSError as error:
            raise TargetError(str(error), operation="claim", subject=str(self.directory)) from error
        message = f"{TRIES_MAX} new directories were removed by other attempts"
        raise TargetError(message, operation="claim", subject=str(self.directory))

    def ready(self) -> tuple[ReadyStore, ...]:
        try:
            names = [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError:
            return ()
        return tuple(sorted(filter(None, map(ReadyStore.decode, names))))

    def remove_dead_attempts(self) -> int:
        removed = 0
        for root in self.directory.iterdir():
            if _ATTEMPT.fullmatch(root.name) and (lock := _try_lock(root)) is not None:
                _remove_attempt(root, lock)
                removed += 1
        return removed


class Attempt:
    """The directory of one attempt, to be used in a `with` block; what is in it at the end is removed."""

    def __init__(self, claims: StoreClaims, root: Path, lock: int) -> None:
        self.directory = root / "db"
        self.checkpoint_directory = root / "checkpoint"
        self._claims = claims
        self._root = root
        self._lock = lock
        self._discarded = 0

    def claim(self, wanted: StoreState) -> ReadyStore | None:
        """Take a finished store of exactly this state, if this machine has one that nobody else takes."""
        for ready in self._claims.ready():
            if ready.state == wanted and self._take(ready, self.directory):
                return ready
        return None

    def discard(self) -> None:
        self.directory.rename(self._next_discarded())

    def remove_stale(self, wanted: StoreState | None, run: str) -> int:
        """Remove finished stores that neither are wanted nor come from this run (rule 4); return how many."""
        return self._remove(ready for ready in self._claims.ready() if ready.state != wanted and ready.run != run)

    def remove_read(self, wanted: StoreState) -> int:
        """Remove what earlier readers have restored and this one does not want (rule 4); return how many."""
        return self._remove(ready for ready in self._claims.ready() if ready.state != wanted and ready.run == READERS)

    def finish(self, state: StoreState, run: str) -> None:
        """Make the closed store claimable as this state; it is not there yet: two attempts never make the same one."""
        target = self._claims.directory / ReadyStore(state, run).encode()
        try:
            self.directory.rename(target)
        except OSError as error:
            raise UsageError(str(error), operation="finish", subject=str(target)) from error

    def give_back(self, ready: ReadyStore) -> None:
        """Put a store that was only read back under its name, unless the machine has that state already.

        What cannot be put back is removed with the attempt: a cache that is not kept costs a restore.
        """
        if all(other.state != ready.state for other in self._claims.ready()):
            with contextlib.suppress(OSError):
                self.directory.rename(self._claims.directory / ready.encode())

    def _remove(self, states: Iterable[ReadyStore]) -> int:
        return sum(self._take(ready, self._next_discarded()) for ready in states)

    def _next_discarded(self) -> Path:
        self._discarded += 1
        return self._root / f"discarded-{self._discarded}"

    def _take(self, ready: ReadyStore, target: Path) -> bool:
        try:
            (self._claims.directory / ready.encode()).rename(target)
        except FileNotFoundError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _remove_attempt(self._root, self._lock)


def _try_lock(root: Path) -> int | None:
    """Take the lock of an attempt; None if another process holds it or the attempt is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
        # If the attempt was removed meanwhile, so was this very file: the lock of an unlinked file locks nothing.
        lock = hold(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        return lock if lock >= 0 else None
    return None


def _remove_attempt(root: Path, lock: int) -> None:
    """Remove an attempt of which the lock is held, the lock last, and free the lock.

    RocksDB's threads may still delete files of a store just closed, hence errors are ignored: what stays has a free
    lock and goes with the next attempt.
    """
    for entry in root.iterdir():
        if entry.name != "lock":
            shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)
