"""Note finished uploads on this machine, so that a backup that was broken off goes on (design 0002, U1 to U6)."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec

from blobstore.base import Body
from blobstore.concurrency import run_blocking
from engine.local.digests import Digest, hash_content, read_own_file
from engine.runtime import Runtime
from index.errors import UNDECODABLE, FormatError
from index.snapshot.invariants import check_session
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import BlobKey, RepositoryRecord, Scope

# Keys of the first attempt of a session have counters below this, those of each later one a random part above it.
ATTEMPT_UPLOADS_MAX: Final = 1 << 24
_COUNTER_MAX: Final = ATTEMPT_UPLOADS_MAX**2 - 1


class _Begin(msgspec.Struct, frozen=True):
    """The first line of a journal."""

    store: str
    session: str


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """A blob that the store has acknowledged."""

    counter: Annotated[int, msgspec.Meta(ge=0, le=_COUNTER_MAX)]
    size_bytes: int
    blake3: bytes
    # By this machine's clock: it makes nothing valid, and a wrong one costs an upload (U3).
    noted_at_ms: int


class HashedBody(Body, Protocol):
    """A `Body` that knows the hash of its bytes, once it was read."""

    async def read_digest(self) -> Digest: ...


class UploadJournal:
    """One attempt to upload one store: its session, and what earlier attempts of that session have left."""

    def __init__(self, scope: Scope, session: str, attempt: int = 0, notes: Sequence[_Note] = ()) -> None:
        self.session = session
        # Of the uploads of this attempt, and of its index.
        self.counter_first = attempt * ATTEMPT_UPLOADS_MAX
        self.scope = scope
        self._notes = {(note.size_bytes, note.blake3): note for note in notes}
        self._sizes = {note.size_bytes for note in notes}
        self._file: int | None = None
        # A thread may still write when its task was cancelled and the file is closed.
        self._lock = threading.Lock()

    def has_size(self, size_bytes: int) -> bool:
        """Return whether a blob of this size may be there, so that it pays to hash the bytes before they are sent."""
        return size_bytes in self._sizes

    def take(self, size_bytes: int, blake3: bytes) -> BlobKey | None:
        """Return the blob of an earlier attempt that has these bytes, once."""
        note = self._notes.pop((size_bytes, blake3), None)
        return None if note is None else self.key(note.counter)

    def key(self, counter: int) -> BlobKey:
        return upload_key(BLOBS, self.scope, self.session, counter)

    async def note(self, counter: int, body: HashedBody, now_ms: int) -> None:
        """Note a blob of this attempt that the store has acknowledged."""
        if self._file is not None:
            blake3 = (await body.read_digest()).blake3
            await run_blocking(self._write, _Note(counter, body.size_bytes, blake3, now_ms))

    def write_to(self, descriptor: int, begin: _Begin | None = None) -> None:
        """Write to an open file from now on, which has no beginning yet if one is given. Blocks."""
        self._file = descriptor
        if begin is not None:
            self._write(begin)

    def close(self) -> None:
        """Let another attempt go on."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    # Also where a process that was forked meanwhile has it too.
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                os.close(self._file)
            self._file = None

    def _write(self, line: _Begin | _Note) -> None:
        # A note that cannot be written costs an upload, and fails no backup.
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                # After whatever an attempt that was killed has left of its last line.
                os.write(self._file, b"\n" + msgspec.json.encode(line))


class UploadJournals:
    """The journals of the stores of one repository, below its cache directory. Without one nothing is noted."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir

    async def open(
        self, scope: Scope, store: str, *, runtime: Runtime, record: RepositoryRecord, spent: str
    ) -> UploadJournal:
        """Begin an attempt to upload a store; go on with the session of an earlier one that has ended.

        Args:
            scope: Whose commit will take it.
            store: What its journal is called, as no other.
            runtime: For this machine's clock, and new random parts of keys.
            record: Of the repository: a note is used until half of its lease is over (U3).
            spent: The session of the snapshot that the attempt builds on, which is over (U2).
        """
        fresh = UploadJournal(scope, runtime.session())
        if self._cache_dir is None:
            return fresh
        lease_ms = record.ttl_ms - record.margin_ms
        now_ms = runtime.local_now_ms()
        since = range(now_ms - lease_ms // 2, now_ms + 1)
        return await run_blocking(_go_on, self._path(self._cache_dir, store), store, fresh, spent, since)

    async def forget(self, store: str) -> None:
        """Forget what was noted of a store, as a commit has it, or has refused it (U4)."""
        if self._cache_dir is not None:
            await run_blocking(_unlink, self._path(self._cache_dir, store))

    def _path(self, cache_dir: Path, store: str) -> Path:
        return cache_dir / f"{hash_content(store.encode())[:16].hex()}.uploads"


def _go_on(path: Path, store: str, fresh: UploadJournal, spent: str, noted_ms: range) -> UploadJournal:
    """Go on with a journal of which notes are of that time, or begin it again; without a file if it is in use."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Who holds it may still be uploading, or be asleep.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begin, notes = _read(path)
            usable = [note for note in notes if note.noted_at_ms in noted_ms]
            if begin is not None and begin.store == store and begin.session != spent and usable:
                # What is random in a new session is another for each attempt of an old one.
                journal = UploadJournal(fresh.scope, begin.session, int(fresh.session[:6], 16) or 1, usable)
                journal.write_to(descriptor)
            else:
                os.ftruncate(descriptor, 0)
                journal = fresh
                journal.write_to(descriptor, _Begin(store, fresh.session))
        except BaseException:
            os.close(descriptor)
            raise
        return journal
    return fresh


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _read(path: Path) -> tuple[_Begin | None, Sequence[_Note]]:
    lines = [line for line in read_own_file(path).split(b"\n") if line]
    notes = []
    try:
        begin = msgspec.json.decode(lines[0] if lines else b"", type=_Begin)
        check_session(begin.session, "U2", "session")
    except (FormatError, *UNDECODABLE):
        return None, ()
    for line in lines[1:]:
        with contextlib.suppress(*UNDECODABLE):
            notes.append(msgspec.json.decode(line, type=_Note))
    return begin, notes
