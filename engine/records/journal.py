"""Note finished uploads on this machine, so that a backup that was broken off goes on (design 0002, U1 to U6)."""

import contextlib
import fcntl
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec

from blobstore.base import BlobStore, Body
from blobstore.concurrency import run_blocking
from blobstore.errors import StoreError
from engine.local.digests import CACHE_BYTES_MAX, Digest, hash_content
from engine.local.scan import opened
from engine.runtime import Runtime
from index.errors import UNDECODABLE, FormatError
from index.snapshot.invariants import check_session
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import BlobKey, RepositoryRecord, Scope

# A later attempt of a session has a random number, its uploads counters from this many times that number on.
ATTEMPT_UPLOADS_MAX: Final = 1 << 20
_ATTEMPT_MAX: Final = (1 << 28) - 1
# A session ends after this number of attempts: what refuses one of them cannot refuse all that follow.
ATTEMPTS_MAX: Final = 64
# A note is used for this part of a lease; the rest is left for the attempt that uses it.
_USABLE_PART: Final = 4
_CHECK_BYTES: Final = 8

# Which sessions the snapshot that is built on has blobs of.
SpentSessions = Callable[[], Collection[str]]


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that begins, with size 0 and no hash; or a blob that the store has acknowledged."""

    store: str
    session: str
    counter: Annotated[int, msgspec.Meta(ge=0, lt=ATTEMPT_UPLOADS_MAX * (_ATTEMPT_MAX + 1))]
    size_bytes: int
    blake3: bytes
    # By this machine's clock: it makes nothing valid, and a wrong one costs uploads (U3).
    noted_at_ms: int
    check: bytes = b""

    def sealed(self) -> "_Line":
        """Return the line with its checksum: a note that was altered would name another blob."""
        return msgspec.structs.replace(self, check=hash_content(msgspec.json.encode(self))[:_CHECK_BYTES])


class HashedBody(Body, Protocol):
    """A `Body` that knows the hash of its bytes, once it was read."""

    async def read_digest(self) -> Digest: ...


class UploadJournal:
    """One attempt to upload one store: its session, and what earlier attempts of that session have left."""

    def __init__(self, scope: Scope, store: str, runtime: Runtime) -> None:
        self.session = runtime.session()
        # Of the uploads of this attempt, and of its index.
        self.counter_first = 0
        self._scope, self._runtime = scope, runtime
        # What it is called, as no other.
        self.store = store
        # By the store's clock: what was created before is too old to be used (U3). Until it is known all is.
        self.usable_from_ms = sys.maxsize
        self._notes: dict[tuple[int, bytes], list[_Line]] = {}
        # How many notes there are of each size.
        self._sizes: Counter[int] = Counter()
        self._file: int | None = None
        # A thread may still open or write when its task was cancelled and the journal is closed.
        self._lock, self._is_closed = threading.Lock(), False

    @property
    def goes_on(self) -> bool:
        """Whether the session is one of an earlier attempt."""
        return self.counter_first > 0

    def has_size(self, size_bytes: int) -> bool:
        """Return whether a blob of this size may be there, so that it pays to hash the bytes before they are sent."""
        return self._sizes[size_bytes] > 0

    def take(self, size_bytes: int, blake3: bytes) -> BlobKey | None:
        """Return the blob of an earlier attempt that has these bytes, each once."""
        if not (notes := self._notes.get((size_bytes, blake3))):
            return None
        self._sizes[size_bytes] -= 1
        return self.key(notes.pop().counter)

    def key(self, counter: int) -> BlobKey:
        return upload_key(BLOBS, self._scope, self.session, counter)

    async def note(self, counter: int, body: HashedBody) -> None:
        """Note a blob of this attempt that the store has acknowledged."""
        if self._file is not None:
            await run_blocking(self._write, counter, body.size_bytes, (await body.read_digest()).blake3)

    def open(self, path: Path, lease_ms: int, uploads_count: int, spent: SpentSessions | None) -> None:
        """Go on with what a file has, or begin it again; note nothing if it is in use, or cannot be had. Blocks.

        Without `spent` it is begun again.
        """
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                if not _is_own(descriptor):
                    # Nothing of it is read or written. The next attempt makes another.
                    path.unlink()
                    return
                # An attempt that has it may still be uploading, or be asleep.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lines = () if spent is None else _read(descriptor, self.store)
                if spent is None or not self._go_on(lines, lease_ms, uploads_count, spent):
                    os.ftruncate(descriptor, 0)
                with self._lock:
                    if not self._is_closed:
                        self._file, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            # Before the first upload: no later attempt may have this number.
            self._write(self.counter_first, 0, b"")

    def _go_on(self, lines: Sequence[_Line], lease_ms: int, uploads_count: int, spent: SpentSessions) -> bool:
        now_ms = self._runtime.local_now_ms()
        noted_ms = range(now_ms - lease_ms // _USABLE_PART, now_ms + 1)
        usable = [line for line in lines if line.size_bytes and line.noted_at_ms in noted_ms]
        begun = {line.counter // ATTEMPT_UPLOADS_MAX for line in lines}
        is_full = uploads_count >= ATTEMPT_UPLOADS_MAX or len(begun) >= ATTEMPTS_MAX
        if not usable or is_full or lines[0].session in spent():
            return False
        attempt = 0
        # What is random in a new session is another for each attempt of an old one.
        while attempt in begun or not attempt:
            attempt = int(self._runtime.session()[:7], 16)
        self.session, self.counter_first = lines[0].session, attempt * ATTEMPT_UPLOADS_MAX
        for line in usable:
            self._notes.setdefault((line.size_bytes, line.blake3), []).append(line)
            self._sizes[line.size_bytes] += 1
        return True

    def close(self) -> None:
        """Let another attempt go on."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    # Also where a process that was forked meanwhile has it too.
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                os.close(self._file)
            self._file, self._is_closed = None, True

    def _write(self, counter: int, size_bytes: int, blake3: bytes) -> None:
        line = _Line(self.store, self.session, counter, size_bytes, blake3, self._runtime.local_now_ms()).sealed()
        # A note that cannot be written costs an upload, and fails no backup.
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                # After whatever an attempt that was killed has left of its last line.
                os.write(self._file, b"\n" + msgspec.json.encode(line))


class UploadJournals:
    """The journals of the stores of one repository, below its cache directory. Without one nothing is noted."""

    def __init__(self, cache_dir: Path | None = None, *, usable_from_ms: int = 0) -> None:
        self._cache_dir = cache_dir
        # What the store created before is not used again.
        self._usable_from_ms = usable_from_ms
        self._is_tidy = False

    def since(self, closed_at_ms: int) -> "UploadJournals":
        """Return journals of which no upload from before a job was forgotten is used: a commit refuses it (D8)."""
        journals = UploadJournals(self._cache_dir, usable_from_ms=closed_at_ms)
        journals._is_tidy, self._is_tidy = self._is_tidy, True
        return journals

    async def open(
        self,
        journal: UploadJournal,
        repository: BlobStore,
        record: RepositoryRecord,
        uploads_count: int,
        spent: SpentSessions | None,
    ) -> None:
        """Let an attempt go on with the session of an earlier one that has ended, if there is one (U2).

        Requests: one for the store's time, if it goes on. `spent` is asked only where there is a journal; None for an
        attempt that sends all.
        """
        if self._cache_dir is None:
            return
        lease_ms = record.ttl_ms - record.margin_ms
        path = self._path(self._cache_dir, journal.store)
        await run_blocking(journal.open, path, lease_ms, uploads_count, spent)
        if not self._is_tidy:
            self._is_tidy = True
            await run_blocking(_remove_older, path, lease_ms)
        if journal.goes_on:
            # Without an answer nothing is young enough; whether that fails the backup is for the upload to say.
            with contextlib.suppress(StoreError):
                young_from_ms = await repository.now_ms() - lease_ms // _USABLE_PART
                journal.usable_from_ms = max(young_from_ms, self._usable_from_ms)

    async def forget(self, stores: Collection[str]) -> None:
        """Forget what was noted of stores, as a commit has it (U4)."""
        if (cache_dir := self._cache_dir) is not None:
            await run_blocking(_forget, [self._path(cache_dir, store) for store in stores])

    def _path(self, cache_dir: Path, store: str) -> Path:
        return cache_dir / f"{hash_content(store.encode())[:16].hex()}.uploads"


def _forget(paths: Iterable[Path]) -> None:
    """Remove journals, but for those that an attempt has: its session is over by U2."""
    for path in paths:
        with contextlib.suppress(OSError), opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _remove_older(journal: Path, lease_ms: int) -> None:
    """Remove journals that are a lease older than one of now: no note of them is used, and no commit may end them."""
    with contextlib.suppress(OSError):
        since_ns = journal.lstat().st_mtime_ns - lease_ms * 1_000_000
        _forget(path for path in journal.parent.glob("*.uploads") if path.lstat().st_mtime_ns < since_ns)


def _is_own(descriptor: int) -> bool:
    """Return whether a file is one that only its owner, who is this user, can have written to, by this one name."""
    status, others = os.fstat(descriptor), stat.S_IWGRP | stat.S_IWOTH
    is_alone = status.st_nlink == 1 and status.st_uid == os.geteuid() and not status.st_mode & others
    return stat.S_ISREG(status.st_mode) and is_alone


def _read(descriptor: int, store: str) -> Sequence[_Line]:
    """Read the lines of a journal that fit together: of this store, and of the session of the first one."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > CACHE_BYTES_MAX:
        return ()
    lines: list[_Line] = []
    for data in filter(None, os.pread(descriptor, size_bytes, 0).split(b"\n")):
        with contextlib.suppress(FormatError, *UNDECODABLE):
            line = msgspec.json.decode(data, type=_Line)
            check_session(line.session, "U2", "session")
            is_whole = line == msgspec.structs.replace(line, check=b"").sealed()
            if is_whole and line.store == store and (not lines or line.session == lines[0].session):
                lines.append(line)
    return lines
