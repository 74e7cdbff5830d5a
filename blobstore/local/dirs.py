"""The directories of a directory store, and what it keeps in them beside the blobs: temporary names and TTL links.

Every component below the root is opened by itself, relative to the directory above it, without following a link, and
must be a directory (design 0002, S2): so nobody who may write to a part of the store leads a write, a rename or a
deletion out of it. Descriptors are held for one step only, so that a store that is moved, wiped or sent to another
process needs no care.

A blob is as old as its name. That is its modification time, which `put_if_absent` sets just before link(2) and again
after it. Where a process is stopped before the link and dies right after it, the blob keeps a time that may be far too
early; then the temporary name in `<root>/.tmp` is left, and the change time is that of the link. So as long as a blob
has a temporary name, the later of the two times counts, and before that name is removed it is written down as the
modification time. Writing it down moves the change time, as does chown(1). The temporary name is therefore first
changed into one that says the time, in one step: a reader meets the old name with the old change time or the new name.

`<root>/.ttl/<key>` is a symbolic link whose text is the TTL of a blob: a link takes text and name in one atomic step
and needs no file of its own. The text is `ttl:<n>ms`, counted from the creation of the blob, or `ttl:removed`. Three
rules keep it right with several processes at once, and through crashes:

- The link is durable before its blob becomes visible, and is dropped after the blob is. So a blob that was created with
  a TTL is never seen without one, which a reader would take for a commit's (design 0002, C5).
- The link stays when the TTL is removed. So a late `put_if_absent` finds one, and cannot put the TTL back (K2). A
  call that makes a link and then loses has nothing to undo; undoing could take the link from under the winner.
- The text is a duration. So it is right for whichever racer's content gets the name, and after a crash between link
  and blob for the next attempt. A link without a blob means nothing, and goes with the puts that were never finished.

All this holds for keys that are minted once (K2). Where a key is deleted while another call creates it, or carries
another TTL the second time, the blob may end with either TTL or none.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from blobstore.base import UnfinishedPut, is_component
from blobstore.errors import BlobCorruptError
from blobstore.local.files import make_durable, sync_dir

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# How many directories are remembered as durable.
_DURABLE_MAX: Final = 10_000

TEMP: Final = ".tmp"
_CREATED: Final = ".born-"
# The names that this module makes. Whatever else is in the directory is somebody else's.
_OURS: Final = re.compile(r"[0-9a-f]{32}(?:\.born-[0-9]+)?")
_MOVED_BY_LINKS: Final = ("st_ino", "st_nlink", "st_ctime_ns")
TTL: Final = ".ttl"
# What `UnfinishedPut.upload_id` says of a link whose blob never came.
LINK: Final = "ttl link"
_REMOVED: Final = "ttl:removed"
_TTL = re.compile(r"ttl:([1-9][0-9]{0,17})ms")


class StoreDirs:
    """Opens and makes the directories below a root. Blocks.

    Args:
        root: Made too, with its parents, where a directory is to be made. Links that lead to it are followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # Directories whose names this process has synced, all the way up to the root. Others may have been made by
        # a process that has not synced them yet.
        self._durable: set[str] = set()
        self._shared_mode: int | None = None

    @property
    def shared_mode(self) -> int:
        """Return the permissions that others than the owner get: those of the root, if its owner shares it.

        Permission to write for the group, or the set-group-ID bit, shares with the group; permission to write for
        everybody shares with everybody. What a umask leaves for reading shares nothing.
        """
        if self._shared_mode is None:
            with suppress(OSError):
                mode = self.root.stat().st_mode
                by_group = mode & (stat.S_IRWXG | stat.S_ISGID) if mode & (stat.S_IWGRP | stat.S_ISGID) else 0
                self._shared_mode = by_group | (mode & stat.S_IRWXO if mode & stat.S_IWOTH else 0)
        return self._shared_mode or 0

    def share(self, file: int) -> None:
        """Give others the permissions on a new file that they have on the root; the umask has no say."""
        if self.shared_mode:
            os.fchmod(file, 0o600 | self.shared_mode & 0o066)

    @contextmanager
    def opened(self, directory: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory, by its path below the root, for the block; `OSError` with ELOOP for a link on the way.

        With `make` it and its parents are made unless they are there, and their names made durable.
        """
        descriptor = self._open(directory, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, directory: str, *, make: bool) -> int:
        try:
            at = os.open(self.root, _FLAGS)
        except FileNotFoundError:
            if not make:
                raise
            make_durable(self.root, 0o700)
            at = os.open(self.root, _FLAGS)
        path = ""
        for name in directory.split("/") if directory else ():
            path = f"{path}/{name}" if path else name
            try:
                below = self._enter(at, name, path, make=make)
            except OSError as error:
                error.filename = str(self.root / path)
                raise
            finally:
                os.close(at)
            at = below
        return at

    def _enter(self, above: int, name: str, path: str, *, make: bool) -> int:
        is_made, is_durable = False, path in self._durable
        try:
            found = _open_below(above, name)
        except FileNotFoundError:
            if not make:
                raise
            is_durable = False
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=above)
                is_made = True
            found = _open_below(above, name)
        with ExitStack() as undo:
            undo.callback(os.close, found)
            if is_made and self.shared_mode:
                # Not by its name, which a link may have by now.
                os.fchmod(found, 0o700 | self.shared_mode)
            if make and not is_durable:
                sync_dir(above)
                if len(self._durable) >= _DURABLE_MAX:
                    self._durable.clear()
                self._durable.add(path)
            undo.pop_all()
        return found


class ReadDirs(ExitStack):
    """Opens one directory after the other and keeps the last one open: what follows is mostly in it too. Blocks."""

    def __init__(self, dirs: StoreDirs) -> None:
        super().__init__()
        self._dirs = dirs
        self._directory: str | None = None
        self._descriptor: int | None = None

    def enter(self, directory: str) -> int | None:
        """Open a directory, which stays open until the next call for another one; None if it is not there."""
        if directory != self._directory:
            self.close()
            self._directory = self._descriptor = None
            with suppress(FileNotFoundError, NotADirectoryError):
                self._descriptor = self.enter_context(self._dirs.opened(directory))
            self._directory = directory
        return self._descriptor

    def find(self, key: str) -> tuple[int, os.stat_result] | None:
        """Return the open directory of a key and what `lstat` says of its file; None if it has no regular file."""
        directory, name = split_key(key)
        if (opened := self.enter(directory)) is None or (found := read_regular(name, opened)) is None:
            return None
        return opened, found


def _open_below(above: int, name: str) -> int:
    try:
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def split_key(key: str) -> tuple[str, str]:
    """Split a key into its directory and its name there."""
    directory, _, name = key.rpartition("/")
    return directory, name


def read_regular(name: str, directory: int) -> os.stat_result | None:
    """Return what `lstat` says of a regular file; None if there is none of this name."""
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return found if stat.S_ISREG(found.st_mode) else None
    return None


def walk_keys(dirs: ReadDirs, prefix: str, start_after: str, *, links: bool = False) -> Iterator[str]:
    """Yield the keys that start with `prefix` and sort after `start_after`, in their order. Blocks.

    They are those of regular files, or with `links` those of symbolic links. Names that no key has are passed over:
    those with a leading dot, and whatever a person or a file system left there.
    """
    # A directory represents all keys that start with its name and `/`, so it sorts as that: `a-b` is before `a/b`,
    # though `a` is before `a-b`. What is on top of the stack comes next.
    stack = _entries(dirs, prefix[: prefix.rfind("/") + 1], prefix, start_after, links=links)
    while stack:
        entry = stack.pop()
        if entry.endswith("/"):
            stack += _entries(dirs, entry, prefix, start_after, links=links)
        else:
            yield entry


def _entries(dirs: ReadDirs, directory: str, prefix: str, start_after: str, *, links: bool) -> list[str]:
    """Return the files and directories (with `/` at their end) of one directory that may matter, last one first."""
    found: list[str] = []
    descriptor = dirs.enter(directory.removesuffix("/"))
    if descriptor is None:
        return []
    with os.scandir(descriptor) as scan:
        for entry in scan:
            if not is_component(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                below = f"{directory}{entry.name}/"
                # All its keys come after `start_after`, or that is one of them.
                in_range = below > start_after or start_after.startswith(below)
                if in_range and (below.startswith(prefix) or prefix.startswith(below)):
                    found.append(below)
            elif entry.is_symlink() if links else entry.is_file(follow_symlinks=False):
                key = directory + entry.name
                if key > start_after and key.startswith(prefix):
                    found.append(key)
    found.sort(reverse=True)
    return found


class TempFiles:
    """Makes and removes the temporary names of a store. Blocks."""

    def __init__(self, dirs: StoreDirs) -> None:
        self._dirs = dirs

    def new_name(self) -> str:
        return secrets.token_hex(16)

    def now_ms(self) -> int:
        """Return the clock of the file system, which shows only on a new file."""
        name = self.new_name()
        with self._dirs.opened(TEMP, make=True) as temps:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=temps))
            try:
                return _modified_at_ms(os.stat(name, dir_fd=temps, follow_symlinks=False))
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=temps)

    def read_creation_ms(self, name: str, directory: int, found: os.stat_result) -> int:
        """Return when a blob was created, of whose file `lstat` has just said `found`."""
        # Other names need not be temporary: a copy of the store may be made of links.
        while found.st_nlink > 1:
            created_ns = self._kept_time_ns(found)
            if created_ns is not None:
                return created_ns // 1_000_000
            # The name was removed meanwhile, or changed while the directory was read, or there was none.
            try:
                again = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                break
            is_unchanged = all(getattr(again, field) == getattr(found, field) for field in _MOVED_BY_LINKS)
            found = again
            if is_unchanged:
                break
        return _modified_at_ms(found)

    def unlink(self, name: str) -> None:
        """Remove a temporary name; a blob that it belongs to keeps its creation time, also where this fails."""
        with self._dirs.opened(TEMP) as temps:
            found = os.stat(name, dir_fd=temps, follow_symlinks=False)
            created_ns = _creation_ns(name, found)
            if found.st_nlink > 1 and created_ns != found.st_mtime_ns:
                if _CREATED not in name:
                    marked = f"{name}{_CREATED}{created_ns}"
                    os.replace(name, marked, src_dir_fd=temps, dst_dir_fd=temps)
                    name = marked
                os.utime(name, ns=(found.st_atime_ns, created_ns), dir_fd=temps, follow_symlinks=False)
            os.unlink(name, dir_fd=temps)

    def list_left(self) -> list[UnfinishedPut]:
        """Return what processes that live or died have in the directory, as puts of unknown keys."""
        left: list[UnfinishedPut] = []
        with suppress(FileNotFoundError), self._dirs.opened(TEMP) as temps:
            with os.scandir(temps) as entries:
                names = [entry.name for entry in entries if is_temp_name(entry.name)]
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=temps, follow_symlinks=False)
                    # A link is a TTL on its way to its name.
                    if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
                        # The bytes of a file with a second name are a blob's.
                        size_bytes = found.st_size if found.st_nlink == 1 else 0
                        begun_at_ms, key = _modified_at_ms(found), f"{TEMP}/{name}"
                        put = UnfinishedPut(key=key, upload_id=name, begun_at_ms=begun_at_ms, size_bytes=size_bytes)
                        left.append(put)
        return left

    def _kept_time_ns(self, found: os.stat_result) -> int | None:
        with suppress(FileNotFoundError), self._dirs.opened(TEMP) as temps, os.scandir(temps) as entries:
            name = next((entry.name for entry in entries if entry.inode() == found.st_ino), None)
            return None if name is None else _creation_ns(name, found)
        return None


def is_temp_name(name: str) -> bool:
    """Return whether a temporary name is one that a store makes."""
    return _OURS.fullmatch(name) is not None


def _modified_at_ms(found: os.stat_result) -> int:
    return found.st_mtime_ns // 1_000_000


def _creation_ns(name: str, found: os.stat_result) -> int:
    _, marked, created = name.partition(_CREATED)
    if marked and created.isascii() and created.isdigit():
        return int(created)
    return max(found.st_mtime_ns, found.st_ctime_ns)


class TtlLinks:
    """Reads and writes the links of a store. Blocks."""

    def __init__(self, dirs: StoreDirs, temp_files: TempFiles) -> None:
        self._dirs = dirs
        self._temp_files = temp_files

    def read_ms(self, key: str, dirs: ReadDirs) -> int | None:
        """Return the TTL of a blob; None if it has none or no longer has one."""
        directory, name = split_key(f"{TTL}/{key}")
        links = dirs.enter(directory)
        text = None if links is None else _read(name, links)
        if text is None or text == _REMOVED:
            return None
        match = _TTL.fullmatch(text)
        if match is None:
            message = f"its TTL link reads {text!r}"
            hint = f"somebody else wrote {self._dirs.root / TTL / key}: remove it to make the blob permanent"
            raise BlobCorruptError(message, operation="stat", key=key, hint=hint)
        return int(match[1])

    def promise(self, key: str, ttl_ms: int, *, is_there: Callable[[], bool]) -> None:
        """Make the link of a blob that is about to be created, unless there is one; `is_there`: the blob is."""
        directory, name = split_key(f"{TTL}/{key}")
        text = f"ttl:{ttl_ms}ms"
        with self._dirs.opened(directory, make=True) as links:
            try:
                os.symlink(text, name, dir_fd=links)
            except FileExistsError:
                # The link of a racer, of a blob that is there by now, or of none: of a crash, or of a blob deleted
                # since. Only the last kind may be overwritten, and has no blob *after* its text was read.
                if _read(name, links) != text and not is_there():
                    self._replace(name, links, text)
            # Also where another made it: it may not have come to this yet, and this blob relies on it.
            sync_dir(links)

    def set(self, key: str, ttl_ms: int) -> None:
        """Make the link of a blob that is about to be replaced."""
        directory, name = split_key(f"{TTL}/{key}")
        with self._dirs.opened(directory, make=True) as links:
            self._replace(name, links, f"ttl:{ttl_ms}ms")
            sync_dir(links)

    def remove(self, key: str) -> None:
        directory, name = split_key(f"{TTL}/{key}")
        with ReadDirs(self._dirs) as dirs:
            links = dirs.enter(directory)
            if links is None or (text := _read(name, links)) is None:
                return
            if text != _REMOVED:
                self._replace(name, links, _REMOVED)
            # Also the second time: who did it first may have died just before this.
            sync_dir(links)

    def drop(self, directory: str, names: list[str]) -> None:
        """Remove the links of deleted blobs of one directory, where they have some."""
        # What stays behind means nothing.
        with suppress(OSError), self._dirs.opened(f"{TTL}/{directory}".removesuffix("/")) as links:
            for name in names:
                with suppress(OSError):
                    if _read(name, links) is not None:
                        os.unlink(name, dir_fd=links)

    def list_left(self, prefix: str) -> list[UnfinishedPut]:
        """Return the links of a prefix that have no blob: of puts under way, and of puts that ended too early."""
        left: list[UnfinishedPut] = []
        with ReadDirs(self._dirs) as links, ReadDirs(self._dirs) as blobs:
            for below in walk_keys(links, f"{TTL}/{prefix}", "", links=True):
                key = below.removeprefix(f"{TTL}/")
                directory, name = split_key(key)
                linked = links.enter(f"{TTL}/{directory}".removesuffix("/"))
                if linked is not None and blobs.find(key) is None:
                    with suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=linked, follow_symlinks=False)
                        left.append(UnfinishedPut(key=key, upload_id=LINK, begun_at_ms=_modified_at_ms(found)))
        return left

    def _replace(self, name: str, links: int, text: str) -> None:
        temp = self._temp_files.new_name()
        with self._dirs.opened(TEMP, make=True) as temps:
            os.symlink(text, temp, dir_fd=temps)
            try:
                os.replace(temp, name, src_dir_fd=temps, dst_dir_fd=links)
            except OSError:
                os.unlink(temp, dir_fd=temps)
                raise


def _read(name: str, links: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=links)
    except FileNotFoundError:
        return None
    except OSError as error:
        # A directory that holds the links of longer keys.
        if error.errno == errno.EINVAL and stat.S_ISDIR(os.stat(name, dir_fd=links, follow_symlinks=False).st_mode):
            return None
        raise
