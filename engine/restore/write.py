"""Write the files of a restore: create, verify, give their metadata, sync; those of a pack as its bytes come.

Everything here blocks and is made for a thread, that of packs for the one that reads the bytes (design 0008, B7). A
directory that is being built is private (`engine.restore.staging`), and every path is relative to its descriptor.
"""

import functools
import grp
import os
import pwd
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import Buffer, Sink
from blobstore.errors import BlobCorruptError
from blobstore.local.files import flush, write_all_at
from engine.errors import TargetError
from engine.local.digests import ContentHasher, hash_content
from engine.local.scan import NEW_FILE_FLAGS, READ_FLAGS, is_untouched, local_file
from index.plan.restore import RESTORED_MODE, FetchedRun, RestoredFile, ReusedFile
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileMetadata

# Files are made in groups of this size and then synced: the first sync of a group does most of the work for all.
SYNC_GROUP_MAX: Final = 64
COPY_BYTES: Final = 1024 * 1024


class OwnerPolicy(StrEnum):
    """What a restore does about the recorded owner and group of each file."""

    # Files belong to the user who restores.
    IGNORE = "ignore"
    # They are given to the recorded owner and group where these exist here and the system allows it.
    RESTORE = "restore"
    # As RESTORE, but a restore that cannot do it fails.
    REQUIRE = "require"


class WrittenFile(msgspec.Struct, frozen=True):
    """A file as it is in the new directory, after its sync."""

    file: RestoredFile
    local: LocalFile


def create_file(root: int, file: RestoredFile) -> int:
    """Create an empty file, open for writing; nobody else may read it until `seal_file`."""
    return os.open("/".join(file.path), NEW_FILE_FLAGS, 0o600, dir_fd=root)


class FilePlace(Sink):
    """Where in an open file the bytes of a blob go, hashed on their way; another's place begins at `size_bytes_max`."""

    def __init__(self, descriptor: int, offset: int, *, size_bytes_max: int) -> None:
        self._descriptor, self._offset, self._size_bytes_max = descriptor, offset, size_bytes_max
        # Of the bytes that came so far.
        self.hasher = ContentHasher()

    @override
    def write(self, data: Buffer) -> None:
        at = self.hasher.size_bytes
        if at + len(data) > self._size_bytes_max:
            raise BlobCorruptError(f"yields more than {self._size_bytes_max} bytes", operation="get")
        self.hasher.update(data)
        write_all_at(self._descriptor, self._offset + at, data)


def seal_file(descriptor: int, file: RestoredFile, owners: OwnerPolicy) -> WrittenFile:
    """Give a file its owner, permissions and time, and sync it. TargetError: the owner is required, and refused."""
    metadata = file.entry.metadata
    if owners is not OwnerPolicy.IGNORE:
        _set_owner(descriptor, file.entry.name, metadata, required=owners is OwnerPolicy.REQUIRE)
    os.fchmod(descriptor, metadata.mode & RESTORED_MODE)
    os.utime(descriptor, ns=(metadata.modified_at_ns, metadata.modified_at_ns))
    flush(descriptor)
    return WrittenFile(file, local_file(file.entry.name, os.fstat(descriptor)))


def write_files(
    root: int, files: Sequence[RestoredFile], owners: OwnerPolicy, fill: Callable[[int, RestoredFile], bool]
) -> list[WrittenFile]:
    """Write files in groups that are synced together: what `fill` has not filled with the right bytes is not there."""
    written: list[WrittenFile] = []
    for start in range(0, len(files), SYNC_GROUP_MAX):
        made: list[tuple[int, RestoredFile]] = []
        try:
            for file in files[start : start + SYNC_GROUP_MAX]:
                made.append((create_file(root, file), file))
                if not fill(*made[-1]):
                    os.unlink("/".join(file.path), dir_fd=root)
                    os.close(made.pop()[0])
            written.extend(seal_file(descriptor, file, owners) for descriptor, file in made)
        finally:
            for descriptor, _ in made:
                os.close(descriptor)
    return written


def write_inline(descriptor: int, file: RestoredFile) -> bool:
    """Write the bytes that the index has of a file, or none; they are known to be right."""
    write_all_at(descriptor, 0, file.entry.inline or b"")
    return True


def link_file(root: int, source: int, reused: ReusedFile) -> WrittenFile | None:
    """Give an unchanging file of the directory `source` a second name.

    None, and nothing is done, if it is not the one that was looked at, has rights that no restored file has, or the
    file system makes no such link.
    """
    path = "/".join(reused.target.path)
    try:
        descriptor = os.open(path, READ_FLAGS, dir_fd=source)
    except OSError:
        return None
    try:
        before = os.fstat(descriptor)
        # The ctime counts here even of an SST: nothing reads the bytes of a link again, and a copy is hashed.
        if not is_untouched(reused.local, before) or stat.S_IMODE(before.st_mode) & ~RESTORED_MODE:
            return None
        try:
            os.link(path, path, src_dir_fd=source, dst_dir_fd=root, follow_symlinks=False)
        except OSError:
            return None
        linked = os.stat(path, dir_fd=root, follow_symlinks=False)
        # The link changes the ctime; everything else must be what it was, of the same inode.
        same = os.path.samestat(linked, before) and linked.st_size == before.st_size
        if not same or linked.st_mtime_ns != before.st_mtime_ns:
            os.unlink(path, dir_fd=root)
            return None
        flush(descriptor)
        return WrittenFile(reused.target, local_file(reused.target.entry.name, linked))
    finally:
        os.close(descriptor)


def copy_into(source: int, descriptor: int, file: RestoredFile) -> bool:
    """Copy a file of the directory `source`; return whether it was there and had the right bytes."""
    hasher = ContentHasher()
    try:
        reader = os.open("/".join(file.path), READ_FLAGS, dir_fd=source)
    except OSError:
        return False
    try:
        while chunk := _read(reader, min(COPY_BYTES, file.size_bytes - hasher.size_bytes), hasher.size_bytes):
            write_all_at(descriptor, hasher.size_bytes, chunk)
            hasher.update(chunk)
    finally:
        os.close(reader)
    return hasher.blake3 == file.entry.blake3


def stat_again(root: int, written: WrittenFile) -> LocalFile | None:
    """Stat a restored file again, if all that happened to it is that it lost or got a second name.

    Every write would have set the modification time, which is the recorded one and not this moment's.
    """
    try:
        status = os.stat("/".join(written.file.path), dir_fd=root, follow_symlinks=False)
    except OSError:
        return None
    known, now = written.local, local_file(written.local.name, status)
    same = stat.S_ISREG(status.st_mode) and (now.device, now.inode) == (known.device, known.inode)
    return now if same and now.metadata == known.metadata else None


def _read(descriptor: int, size_bytes: int, at: int) -> bytes:
    """Read a piece of a file; nothing where the disk has lost it: then the hash is not the right one."""
    with suppress(OSError):
        return os.pread(descriptor, size_bytes, at)
    return b""


def _set_owner(descriptor: int, name: str, metadata: FileMetadata, *, required: bool) -> None:
    try:
        uid, gid = _number_of(metadata.owner, pwd.getpwnam), _number_of(metadata.group, grp.getgrnam)
        now = os.fstat(descriptor)
        if (uid, gid) != (now.st_uid, now.st_gid):
            os.fchown(descriptor, uid, gid)
    except (KeyError, OverflowError, PermissionError) as error:
        if required:
            message = f"cannot belong to {metadata.owner}:{metadata.group} here"
            hint = "restore as root where these exist, or let owners be restored where possible or ignored"
            raise TargetError(message, operation="restore", subject=name, hint=hint) from error


@functools.lru_cache(maxsize=1024)
def _number_of(name: str, look_up: Callable[[str], pwd.struct_passwd | grp.struct_group]) -> int:
    """Return the number of a user or group; -1, which changes nothing, if none was recorded.

    A name of digits is that of one who had no name where the file came from. A `KeyError` says that there is none here.
    """
    if not name:
        return -1
    return int(name) if name.isdecimal() else look_up(name)[2]


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
    """Writes those files of a range that are right into the directory `root`, which is being built.

    `end` has to be called once no bytes come any more, and `close` whatever happened.
    """

    def __init__(self, root: int, run: FetchedRun, files: Sequence[RestoredFile], owners: OwnerPolicy) -> None:
        super().__init__(run, files)
        self._root, self._owners = root, owners
        self._unsynced: list[tuple[int, RestoredFile]] = []
        self._open: tuple[int, RestoredFile] | None = None
        # The files that are there, synced.
        self.written: list[WrittenFile] = []

    @override
    def write(self, data: Buffer) -> None:
        with _AT_WORK.permits:
            super().write(data)

    @override
    def on_piece(self, file: RestoredFile, at: int, piece: memoryview) -> None:
        if self._open is None:
            self._open = create_file(self._root, file), file
        write_all_at(self._open[0], at, piece)

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
        """Sync what is right, and remove what came in part. Raises as `seal_file`, and as the file system says."""
        self._discard()
        self._seal()

    def close(self) -> None:
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
