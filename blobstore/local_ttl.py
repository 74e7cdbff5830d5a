"""The TTLs of a directory store: `<root>/.ttl/<key>` is a symbolic link whose text tells the TTL of a blob.

A link takes text and name in one atomic step and needs no file of its own. Its text is `ttl:<n>ms`, counted from the
creation of the blob, or `ttl:removed`. Three rules keep it right with several processes at once, and through crashes:

- The link is durable before its blob becomes visible, and is dropped after the blob is. So a blob that was born with
  a TTL is never seen without one, which a collector would take for a commit's (design 0002, D2).
- The link stays when the TTL is removed. So a late `put_if_absent` finds one, and cannot put the TTL back (K2). A
  call that makes a link and then loses has nothing to undo; undoing could take the link from under the winner.
- The text is a duration. So it is right for whichever racer's content gets the name, and after a crash between link
  and blob for the next attempt. A link without a blob means nothing.

All this holds for keys that are minted once (K2). Where a key is deleted while another call creates it, or carries
another TTL the second time, the blob may end with either TTL or none.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from blobstore.errors import BlobCorruptError
from blobstore.local_files import DurableDirs, sync_dir

_REMOVED: Final = "ttl:removed"
_TTL = re.compile(r"ttl:([1-9][0-9]{0,17})ms")


class TtlLinks:
    """Reads and writes the links. Blocks.

    Args:
        directory: `<root>/.ttl`.
        dirs: Makes the directories that are missing.
        new_temp: Gives a path on the same file system that nothing else uses.
    """

    def __init__(self, directory: Path, dirs: DurableDirs, new_temp: Callable[[], Path]) -> None:
        self._directory = directory
        self._dirs = dirs
        self._new_temp = new_temp

    def read_ms(self, key: str) -> int | None:
        """The TTL of a blob; None if it has none or no longer has one.

        Raises:
            BlobCorruptError: The text of the link is not one that this module writes.
        """
        text = self._read(key)
        if text is None or text == _REMOVED:
            return None
        match = _TTL.fullmatch(text)
        if match is None:
            raise BlobCorruptError(
                f"its TTL link reads {text!r}",
                operation="stat",
                key=key,
                hint=f"somebody else wrote {self._path(key)}: remove it to make the blob permanent",
            )
        return int(match[1])

    def promise(self, key: str, ttl_ms: int, *, is_there: Callable[[], bool]) -> None:
        """Before a blob is created: make its link unless there is one.

        Args:
            key: Of the blob.
            ttl_ms: Its TTL.
            is_there: Whether the blob is there, asked anew at each call.
        """
        link = self._path(key)
        text = f"ttl:{ttl_ms}ms"
        self._dirs.make(link.parent)
        try:
            link.symlink_to(text)
        except FileExistsError:
            # The link of a racer, of a blob that is there by now, or of none: of a crash, or of a blob deleted since.
            # Only the last kind may be overwritten, and has no blob *after* its text was read.
            if self._read(key) != text and not is_there():
                self._replace(link, text)
        # Also where another made it: it may not have come to this yet, and this blob relies on it.
        sync_dir(link.parent)

    def set(self, key: str, ttl_ms: int) -> None:
        """Before a blob is replaced: the link that the new one is to have."""
        link = self._path(key)
        self._dirs.make(link.parent)
        self._replace(link, f"ttl:{ttl_ms}ms")
        sync_dir(link.parent)

    def remove(self, key: str) -> None:
        """Make a blob permanent that is there."""
        text = self._read(key)
        if text is None:
            return
        link = self._path(key)
        if text != _REMOVED:
            self._replace(link, _REMOVED)
        # Also the second time: who did it first may have died just before this.
        sync_dir(link.parent)

    def drop(self, key: str) -> None:
        """After a blob was deleted: its link, if it has one."""
        # What stays behind means nothing.
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / key

    def _read(self, key: str) -> str | None:
        path = self._path(key)
        try:
            return str(path.readlink())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            # A directory that holds the links of longer keys.
            if path.is_dir():
                return None
            raise

    def _replace(self, link: Path, text: str) -> None:
        temp = self._new_temp()
        temp.symlink_to(text)
        try:
            temp.replace(link)
        except OSError:
            temp.unlink()
            raise
