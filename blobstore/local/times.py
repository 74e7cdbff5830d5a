"""When the blobs of a directory store were created and when they expire: its temporary names and its links.

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
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from blobstore.base import UnfinishedPut
from blobstore.errors import BlobCorruptError
from blobstore.local.dirs import ReadDirs, StoreDirs, split_key, walk_keys
from blobstore.local.files import sync_dir

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
                        left.append(
                            UnfinishedPut(
                                key=f"{TEMP}/{name}",
                                upload_id=name,
                                begun_at_ms=_modified_at_ms(found),
                                # The bytes of a file with a second name are a blob's.
                                size_bytes=found.st_size if found.st_nlink == 1 else 0,
                            )
                        )
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
            raise BlobCorruptError(
                f"its TTL link reads {text!r}",
                operation="stat",
                key=key,
                hint=f"somebody else wrote {self._dirs.root / TTL / key}: remove it to make the blob permanent",
            )
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
        """Make the link that a blob is to have which is about to be replaced."""
        directory, name = split_key(f"{TTL}/{key}")
        with self._dirs.opened(directory, make=True) as links:
            self._replace(name, links, f"ttl:{ttl_ms}ms")
            sync_dir(links)

    def remove(self, key: str) -> None:
        directory, name = split_key(f"{TTL}/{key}")
        with ReadDirs(self._dirs) as dirs:
            links = dirs.enter(directory)
            text = None if links is None else _read(name, links)
            if links is None or text is None:
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
