"""When the blobs of a directory store were born: when they got their names.

That is the modification time, which `put_if_absent` sets just before link(2) and again after it. Where a process is
stopped before the link and dies right after it, the blob keeps a time that may be far too early; then the temporary
name is left, and the change time is that of the link. So as long as a blob has a temporary name, the later of the two
times counts, and whoever removes that name writes it down as the modification time before.

Writing it down moves the change time, as does chown(1). The temporary name is therefore first changed into one that
says the time, in one step: a reader meets the old name with the old change time or the new name.
"""

import os
from pathlib import Path
from typing import Final

_BORN: Final = ".born-"


class Births:
    """Tells and corrects the births of blobs. Blocks.

    Args:
        temp: The directory of the temporary names.
    """

    def __init__(self, temp: Path) -> None:
        self._temp = temp

    def read_ms(self, path: Path, found: os.stat_result) -> int:
        """When a blob was born.

        Args:
            path: Where it stands.
            found: What `lstat` has just told of it.
        """
        # Other names need not be temporary: a copy of the store may be made of links.
        while found.st_nlink > 1:
            born_ns = self._temporary_birth_ns(found)
            if born_ns is not None:
                return born_ns // 1_000_000
            # The name was removed meanwhile, or changed while the directory was read, or there was none.
            try:
                again = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
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

    def unlink_temp(self, temp: Path) -> None:
        """Remove a temporary name; a blob that it belongs to keeps its birth.

        Raises:
            OSError: It could not be removed, and tells the birth as it did before.
        """
        found = temp.lstat()
        born_ns = _birth_ns(temp.name, found)
        if found.st_nlink > 1 and born_ns != found.st_mtime_ns:
            if _BORN not in temp.name:
                temp = temp.replace(temp.with_name(f"{temp.name}{_BORN}{born_ns}"))
            os.utime(temp, ns=(found.st_atime_ns, born_ns), follow_symlinks=False)
        temp.unlink()

    def _temporary_birth_ns(self, found: os.stat_result) -> int | None:
        try:
            with os.scandir(self._temp) as entries:
                name = next((entry.name for entry in entries if entry.inode() == found.st_ino), None)
        except FileNotFoundError:
            return None
        return None if name is None else _birth_ns(name, found)


def modified_at_ms(found: os.stat_result) -> int:
    """The modification time of a file."""
    return found.st_mtime_ns // 1_000_000


def _birth_ns(name: str, found: os.stat_result) -> int:
    _, marked, born = name.partition(_BORN)
    if marked and born.isdigit():
        return int(born)
    return max(found.st_mtime_ns, found.st_ctime_ns)
