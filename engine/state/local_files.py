"""Files of a state store on this machine, and what a file manager knows of them in memory.

A file manager remembers which local file has which name in the store, and which snapshot names what. One lock guards
its maps, held for no longer than a look-up: a load or a commit and a deletion may use them from two threads with an
event loop each.

The private directory of one state store on this machine, and a RocksDB directory, of which the rest goes into the zip
or is not part of a snapshot:

```
<directory>/lock             held (flock) by the store that works here; stays when none does
<directory>/db               RocksDB's files of the loaded version
<directory>/captured/<n>     rocksdb_checkpoints, hard links to files of `db`, of snapshots that are not uploaded yet
<directory>/changelogs       what is being written for the next commit, and what was fetched to be replayed
<RocksDB>/000012.sst           an SST
<RocksDB>/archive/000008.log   an archived WAL
```

Nothing in the private directory outlives the process that holds the lock: the next one removes all of it. All
functions on files block.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from blobstore.concurrency import acquired
from engine.errors import DamagedError, TargetBusyError, TargetError, UnsafeSourceError
from engine.local.digests import READ_BYTES, ContentHasher, read_sst
from engine.local.scan import hold, opened
from index.errors import UnsafeNameError
from index.spark import retention
from index.spark.metadata import StoredFile
from index.spark.names import StateVersion, check_local_name, stored_name

# Where RocksDB keeps WALs that it does not write any more.
ARCHIVE: Final = "archive"


def local_path(directory: Path, local_name: str) -> Path:
    """Return the path of a file of this checked local name in a RocksDB directory."""
    return directory / local_name if local_name.endswith(".sst") else directory / ARCHIVE / local_name


def list_shared(directory: Path) -> tuple[Path, ...]:
    """List SSTs and archived WALs of a RocksDB directory, sorted by name; none if there is no directory.

    Raises:
        UnsafeSourceError: The directory cannot be read, or one of them has a name that RocksDB does not give.
    """
    try:
        found = [path for path in _entries(directory) if path.name.endswith(".sst")]
        found += [path for path in _entries(directory / ARCHIVE) if path.name.endswith(".log")]
        for path in found:
            check_local_name(path.name, path.suffix)
    except OSError as error:
        raise _unreadable(directory, error) from error
    except UnsafeNameError as error:
        reason = f"holds a file that RocksDB did not name: {error}"
        raise UnsafeSourceError(reason, operation="snapshot", subject=str(directory)) from error
    return tuple(sorted(found, key=lambda path: path.name))


def look_at(path: Path) -> retention.LocalStateFile:
    """Describe an SST or an archived WAL: a read of its end, or of all of it if that has no identity.

    What is not a regular file, or cannot be read, is an `UnsafeSourceError`.
    """
    try:
        with opened(path) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeSourceError("is not a regular file", operation="identify", subject=str(path))
            identity = read_sst(descriptor, status.st_size) if path.name.endswith(".sst") else None
            # From before it was read: a change in between shows.
            stamp = retention.FileStamp(status.st_ino, status.st_mtime_ns)
            return retention.LocalStateFile(
                path.name, status.st_size, identity or _hash(descriptor), stamp, is_linked=status.st_nlink > 1
            )
    except OSError as error:
        raise _unreadable(path, error) from error


def is_untouched(path: Path, file: retention.LocalStateFile) -> bool:
    """Return whether a file is still the one that was looked at, by its size and stamp; an `OSError` if it is gone."""
    status = path.lstat()
    return status.st_size == file.size_bytes and retention.FileStamp(status.st_ino, status.st_mtime_ns) == file.stamp


def remove_all_but(directory: Path, kept: Collection[str]) -> None:
    """Make a directory hold the SSTs and archived WALs of these local names, if they are there, and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in _entries(directory):
        if path.name == ARCHIVE and _is_directory(path):
            for archived in _entries(path):
                if archived.name not in kept or not archived.name.endswith(".log") or _is_directory(archived):
                    _remove(archived)
            if not _entries(path):
                path.rmdir()
        elif path.name not in kept or not path.name.endswith(".sst") or _is_directory(path):
            _remove(path)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        # RocksDB's last thread may remove files of a closed directory at the same time.
        path.unlink(missing_ok=True)


def _hash(descriptor: int) -> bytes:
    hasher = ContentHasher()
    while chunk := os.pread(descriptor, READ_BYTES, hasher.size_bytes):
        hasher.update(chunk)
    return hasher.blake3


def _unreadable(path: Path, error: OSError) -> UnsafeSourceError:
    return UnsafeSourceError(error.strerror or str(error), operation="identify", subject=str(path))


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
        self.directory = directory
        self.db = directory / _DB
        # Of changelogs.
        self.fetched = directory / _CHANGELOGS / "fetched"
        self._lock = lock
        self._numbers = itertools.count(1)

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
            lock = _take(directory)
            place = cls(directory, lock)
            place._remove_all()
            for path in (place.db, directory / _CAPTURED, directory / _CHANGELOGS, place.fetched):
                path.mkdir()
        except BaseException as error:
            _release(lock)
            if isinstance(error, OSError):
                raise unwritable_error("open", error) from error
            raise
        return place

    def new_captured(self) -> Path:
        return self.directory / _CAPTURED / str(next(self._numbers))

    def new_changelog(self) -> Path:
        return self.directory / _CHANGELOGS / f"written-{next(self._numbers)}"

    def clear_fetched(self) -> None:
        remove_tree(self.fetched)
        self.fetched.mkdir()

    def _remove_all(self) -> None:
        for name in (_DB, _CAPTURED, _CHANGELOGS):
            remove_tree(self.directory / name)

    def close(self) -> None:
        """Remove everything but the lock, and release it; once is enough."""
        if self._lock < 0:
            return
        try:
            self._remove_all()
        except OSError as error:
            raise unwritable_error("close", error) from error
        finally:
            lock, self._lock = self._lock, -1
            _release(lock)


def working_dir(directory: Path) -> AbstractAsyncContextManager[WorkingDir]:
    """Hold a working directory for a block; errors as `WorkingDir.open`."""
    return acquired(partial(WorkingDir.open, directory), WorkingDir.close)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, also while RocksDB's last thread still removes files of it."""
    for _ in range(_REMOVE_ATTEMPTS_MAX):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # The directory, or a file in it that was removed first.
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
        hint = "give the state store a directory of its own: everything in it is removed"
        raise TargetError(f"holds something else: {foreign[0]}", operation="open", subject=str(directory), hint=hint)


def _take(directory: Path) -> int:
    with contextlib.suppress(BlockingIOError):
        lock = hold(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        if lock >= 0:
            return lock
    hint = "give each store a working directory of its own, or close the other one"
    raise TargetBusyError("another state store works in it", operation="open", subject=str(directory), hint=hint)


def _release(lock: int) -> None:
    if lock >= 0:
        with contextlib.suppress(OSError):
            # Closing alone would leave it to a process that was forked off meanwhile.
            fcntl.flock(lock, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(lock)


def unwritable_error(operation: str, error: OSError) -> TargetError:
    """Return the error of a working directory that cannot be written."""
    is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    hint = "free space where the working directory is" if is_full else "choose another working directory"
    subject = str(error.filename or "")
    return TargetError(error.strerror or str(error), operation=operation, subject=subject, hint=hint)


class CapturedFile(msgspec.Struct, frozen=True):
    """One SST or archived WAL of a snapshot."""

    stored: StoredFile
    local: retention.LocalStateFile
    # Whether the store has it already under that name.
    is_reused: bool


# Size and time of a zip in a listing, in bytes and ms: they show that it was overwritten, if it can be.
ZipStamp: TypeAlias = tuple[int, int]


class _Named(msgspec.Struct, frozen=True):
    paths: frozenset[str]
    # None: it was put there by this process, which has not seen it listed yet.
    stamp: ZipStamp | None


class StateFileMap:
    """The memory of one file manager. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By local name: what is true of the files in the working directory.
        self._shared: dict[str, retention.SharedFile] = {}
        # Uploads that are not complete, and the paths that their snapshots will name: no later snapshot may name what
        # they put there (S1), and nothing of it may be deleted.
        self._pending: dict[str, frozenset[str]] = {}
        self._named: dict[StateVersion, _Named] = {}
        # Paths that uploads have named which ended meanwhile; a list for each `watch_uploads`.
        self._watches: list[list[str]] = []
        # The oldest version that the last deletion kept, and the newest snapshot that was put there.
        self.oldest_seen = 1
        self.newest_seen: int | None = None

    def forget_all(self) -> None:
        """Forget the working directory, so that all is fetched and uploaded again, as it is empty or damaged (S5)."""
        with self._lock:
            self._shared = {}

    def begin_load(
        self, version: int, local: Sequence[retention.LocalStateFile], wanted: Sequence[StoredFile]
    ) -> frozenset[str]:
        """Choose the local names that stay for a snapshot, and forget all others; it holds even if the load fails."""
        with self._lock:
            kept = retention.choose_kept(local, wanted, self._shared, self._pending)
            self._shared = retention.as_fetched(self._shared, kept, version)
            return kept

    def end_load(self, version: int, fetched: Sequence[tuple[StoredFile, retention.LocalStateFile]]) -> None:
        with self._lock:
            self._shared |= {local.name: retention.SharedFile.of(stored, local, version) for stored, local in fetched}

    def capture(
        self, local: Sequence[retention.LocalStateFile], *, version: int, upload_id: str
    ) -> tuple[CapturedFile, ...]:
        """Decide the name of each file of a new snapshot, once and for all (S1 to S3).

        An altered file is a `DamagedError`; nothing is known of any file then (S5).
        """
        with self._lock:
            altered = retention.find_altered(local, self._shared)
            if altered:
                self._shared = {}
                which = f"{len(altered)} of {len(local)} files"
                reason = f"was written to since it was fetched or uploaded, as {which} were"
                hint = "RocksDB never does that; load the version again, which fetches every file"
                raise DamagedError(reason, operation="snapshot", subject=altered[0], hint=hint)
            reused = retention.choose_reused(local, self._shared, version=version, pending=self._pending)
            files: list[CapturedFile] = []
            shared: dict[str, retention.SharedFile] = {}
            for file in local:
                new = StoredFile(file.name, stored_name(file.name, upload_id), file.size_bytes)
                is_reused = file.name in reused
                known = self._shared[file.name] if is_reused else retention.SharedFile.of(new, file, version, upload_id)
                shared[file.name] = known
                files.append(CapturedFile(known.stored, file, is_reused))
            # Files that are gone from the working directory go from here: another history may make them again.
            self._shared = shared
            self._pending[upload_id] = _paths(files)
            return tuple(files)

    def begin_upload(self, upload_id: str, files: Sequence[CapturedFile]) -> None:
        with self._lock:
            self._pending[upload_id] = self._pending.get(upload_id, frozenset()) | _paths(files)

    def end_upload(
        self, of: StateVersion, upload_id: str, files: Sequence[CapturedFile], renewed: Sequence[CapturedFile]
    ) -> None:
        """Note that an upload is complete, its zip included. What was loaded meanwhile is not touched (S4)."""
        with self._lock:
            self._named[of] = _Named(_paths(files), None)
            for file in renewed:
                known = self._shared.get(file.local.name)
                if known is not None and known.identity == file.local.identity and known.version < of.version:
                    self._shared[file.local.name] = msgspec.structs.replace(
                        known, stored=file.stored, version=of.version, upload_id=upload_id
                    )
            self._end(upload_id)
            self.newest_seen = max(of.version, self.newest_seen or 0)

    def discard(self, upload_id: str) -> None:
        """Forget an upload that will never be complete."""
        with self._lock:
            self._shared = {name: file for name, file in self._shared.items() if file.upload_id != upload_id}
            # Its zip may be there all the same, if the store never said.
            self._end(upload_id)

    def _end(self, upload_id: str) -> None:
        paths = self._pending.pop(upload_id, frozenset())
        for watch in self._watches:
            watch.extend(paths)

    def newest_use(self, path: str) -> int:
        """Return the newest version known to name a file of `SSTs/` or `logs/`; 0 if none is."""
        with self._lock:
            return max((of.version for of, named in self._named.items() if path in named.paths), default=0)

    def named_by(self, of: StateVersion, stamp: ZipStamp) -> frozenset[str] | None:
        """Return the paths that a snapshot names, if they are known; a name with an id is never overwritten."""
        with self._lock:
            named = self._named.get(of)
            return None if named is None or (of.unique_id is None and named.stamp != stamp) else named.paths

    def remember_named(self, of: StateVersion, paths: Collection[str], stamp: ZipStamp | None) -> None:
        with self._lock:
            self._named[of] = _Named(frozenset(paths), stamp)

    def forget_named(self, versions: Collection[StateVersion]) -> None:
        """Forget snapshots that are gone, or may be overwritten from now on."""
        with self._lock:
            for of in versions:
                self._named.pop(of, None)

    def forget_named_from(self, version: int) -> None:
        """Forget snapshots without ids from this version on: after a load of it they are written again."""
        with self._lock:
            kept = {of: named for of, named in self._named.items() if of.unique_id is not None or of.version < version}
            self._named = kept

    @contextmanager
    def watch_uploads(self) -> Iterator[Collection[str]]:
        """Collect, while the block runs, the paths named by uploads that ended since it began."""
        watch: list[str] = []
        with self._lock:
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches = [other for other in self._watches if other is not watch]

    def give_up(self, paths: Collection[str], uploaded: Collection[str]) -> tuple[str, ...]:
        """Return the files that may be deleted, as no upload names them; from now on none that begins will.

        No snapshot that stays names these paths. `uploaded` is what `watch_uploads` has shown since before the
        snapshots were listed.
        """
        with self._lock:
            in_use = frozenset(uploaded).union(*self._pending.values())
            given_up = tuple(path for path in paths if path not in in_use)
            gone = frozenset(given_up)
            self._shared = {name: file for name, file in self._shared.items() if file.stored.path not in gone}
            return given_up


def _paths(files: Iterable[CapturedFile]) -> frozenset[str]:
    return frozenset(file.stored.path for file in files)
