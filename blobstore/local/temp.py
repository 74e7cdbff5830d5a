"""The temporary names of a directory store, in `<root>/.tmp`, and the creation times that they keep.

A blob is as old as its name. That is its modification time, which `put_if_absent` sets just before link(2) and again
after it. Where a process is stopped before the link and dies right after it, the blob keeps a time that may be far too
early; then the temporary name is left, and the change time is that of the link. So as long as a blob has a temporary
name, the later of the two times counts, and before that name is removed it is written down as the modification time.

Writing it down moves the change time, as does chown(1). The temporary name is therefore first changed into one that
says the time, in one step: a reader meets the old name with the old change time or the new name.
"""

import os
import re
import secrets
import stat
from contextlib import suppress
from typing import Final

from blobstore.base import UnfinishedPut
from blobstore.local.dirs import StoreDirs

TEMP: Final = ".tmp"
_CREATED: Final = ".born-"
# The names that this module makes. Whatever else is in the directory is somebody else's.
_OURS: Final = re.compile(r"[0-9a-f]{32}(?:\.born-[0-9]+)?")


class TempFiles:
    """Makes and removes temporary names. Blocks.

    Args:
        dirs: Of the store.
    """

    def __init__(self, dirs: StoreDirs) -> None:
        self._dirs = dirs

    def new_name(self) -> str:
        """Return a name that nothing else uses."""
        return secrets.token_hex(16)

    def now_ms(self) -> int:
        """Return the clock of the file system, which shows only on a new file."""
        name = self.new_name()
        with self._dirs.opened(TEMP, make=True) as temps:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=temps))
            try:
                return modified_at_ms(os.stat(name, dir_fd=temps, follow_symlinks=False))
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=temps)

    def read_creation_ms(self, name: str, directory: int, found: os.stat_result) -> int:
        """Return when a blob was created.

        Args:
            name: Of its file.
            directory: Descriptor of the directory that it is in.
            found: What `lstat` has just said of it.
        """
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
            unchanged = (again.st_ino, again.st_nlink, again.st_ctime_ns) == (
                found.st_ino,
                found.st_nlink,
                found.st_ctime_ns,
            )
            found = again
            if unchanged:
                break
        return modified_at_ms(found)

    def unlink(self, name: str) -> None:
        """Remove a temporary name; a blob that it belongs to keeps its creation time.

        Raises:
            OSError: It could not be removed, and says the time as it did before.
        """
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
                        begun_at_ms = modified_at_ms(found)
                        left.append(
                            UnfinishedPut(
                                key=f"{TEMP}/{name}", upload_id=name, begun_at_ms=begun_at_ms, size_bytes=size_bytes
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


def modified_at_ms(found: os.stat_result) -> int:
    """Return the modification time of a file."""
    return found.st_mtime_ns // 1_000_000


def _creation_ns(name: str, found: os.stat_result) -> int:
    _, marked, created = name.partition(_CREATED)
    if marked and created.isascii() and created.isdigit():
        return int(created)
    return max(found.st_mtime_ns, found.st_ctime_ns)
