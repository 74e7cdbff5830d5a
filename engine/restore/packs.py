"""The files in a range of a pack, as its bytes come: separated, hashed, and for a restore written.

Everything here blocks and is made for the thread that reads the bytes (design 0008, B7).
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from blobstore.errors import BlobCorruptError
from blobstore.sink import Buffer, Sink
from engine.local.copy import write_at
from engine.local.hashing import ContentHasher, hash_content
from engine.restore.write import SYNC_GROUP_MAX, OwnerPolicy, WrittenFile, create_file, seal_file
from index.plan.restore import FetchedRun, RestoredFile


def cores_count() -> int:
    """Count the processors that this process may use: of a container or a task set, its share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _AtWork:
    """Packs that are taken apart at once: more threads than cores take the interpreter from each other (0008, R9)."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(cores_count())

    def reset(self) -> None:
        """Make new permits in a forked child: no thread there gives back those that were held."""
        self.permits = threading.Semaphore(cores_count())


_AT_WORK: Final = _AtWork()
os.register_at_fork(after_in_child=_AT_WORK.reset)


class PackReader(Sink):
    """Finds which of the wanted files of a range are right; bytes of others, and dead ones, pass by."""

    def __init__(self, run: FetchedRun, files: Sequence[RestoredFile]) -> None:
        self._run = run
        self._at = run.start
        # They are in the order of their offsets and do not overlap, as `plan_restore` has it.
        self._next = deque(files)
        self._hasher: ContentHasher | None = None
        self._wrong: list[RestoredFile] = []

    @property
    def wrong(self) -> tuple[RestoredFile, ...]:
        """The files whose bytes are not theirs, or have not come."""
        return (*self._wrong, *self._next)

    @override
    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        if self._at + len(view) > self._run.start + self._run.size_bytes:
            raise BlobCorruptError(f"yields more than {self._run.size_bytes} bytes", operation="get", key=self._run.key)
        while view and self._next:
            file = self._next[0]
            at = self._at - file.entry.blobs[0].blob_offset_bytes
            if at < 0:
                taken = min(-at, len(view))
            elif at and self._hasher is None:
                self._wrong.append(self._next.popleft())  # its first bytes have passed by
                continue
            else:
                taken = min(file.size_bytes - at, len(view))
                self._take(file, at, view[:taken])
            self._at += taken
            view = view[taken:]
        self._at += len(view)

    def _take(self, file: RestoredFile, at: int, piece: memoryview) -> None:
        self.on_piece(file, at, piece)
        if len(piece) == file.size_bytes:
            blake3 = hash_content(piece)
        else:
            self._hasher = hasher = self._hasher or ContentHasher()
            hasher.update(piece)
            if hasher.size_bytes < file.size_bytes:
                return
            blake3, self._hasher = hasher.blake3, None
        self._next.popleft()
        is_right = blake3 == file.entry.blake3
        if not is_right:
            self._wrong.append(file)
        self.on_end(file, is_right=is_right)

    def on_piece(self, file: RestoredFile, at: int, piece: memoryview) -> None:
        """Take bytes of a file, from `at` on; nobody knows yet whether they are right."""

    def on_end(self, file: RestoredFile, *, is_right: bool) -> None:
        """Take note that all bytes of a file have come."""


class PackWriter(PackReader):
    """Writes those files of a range that are right into a directory that is being built.

    `end` has to be called once no bytes come any more, and `close` whatever happened. `root` is the descriptor of the
    directory, `written` has the files that are there, synced.
    """

    def __init__(self, root: int, run: FetchedRun, files: Sequence[RestoredFile], owners: OwnerPolicy) -> None:
        super().__init__(run, files)
        self._root = root
        self._owners = owners
        self._unsynced: list[tuple[int, RestoredFile]] = []
        self._open: tuple[int, RestoredFile] | None = None
        self.written: list[WrittenFile] = []

    @override
    def write(self, data: Buffer) -> None:
        with _AT_WORK.permits:
            super().write(data)

    @override
    def on_piece(self, file: RestoredFile, at: int, piece: memoryview) -> None:
        if self._open is None:
            self._open = create_file(self._root, file), file
        write_at(self._open[0], at, piece)

    @override
    def on_end(self, file: RestoredFile, *, is_right: bool) -> None:
        if self._open is None or not is_right:
            self._discard()
            return
        self._unsynced.append(self._open)
        self._open = None
        # Together: the first sync of a group does most of the work for all.
        if len(self._unsynced) == SYNC_GROUP_MAX:
            # It waits for a disk, and others may work meanwhile.
            _AT_WORK.permits.release()
            try:
                self._seal()
            finally:
                _AT_WORK.permits.acquire()

    def end(self) -> None:
        """Sync what is right, and remove what came in part.

        Raises:
            OSError: The target cannot be written.
            TargetError: As `seal_file`.
        """
        self._discard()
        self._seal()

    def close(self) -> None:
        """Close every file."""
        for descriptor, _ in (*self._unsynced, *filter(None, (self._open,))):
            os.close(descriptor)
        self._unsynced.clear()
        self._open = None

    def _discard(self) -> None:
        if self._open is not None:
            descriptor, file = self._open
            self._open = None
            os.close(descriptor)
            os.unlink("/".join(file.path), dir_fd=self._root)

    def _seal(self) -> None:
        for descriptor, file in self._unsynced:
            self.written.append(seal_file(descriptor, file, self._owners))
        for descriptor, _ in self._unsynced:
            os.close(descriptor)
        self._unsynced.clear()
