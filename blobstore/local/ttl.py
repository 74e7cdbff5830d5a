"""The TTLs of a directory store: `<root>/.ttl/<key>` is a symbolic link whose text is the TTL of a blob.

A link takes text and name in one atomic step and needs no file of its own. Its text is `ttl:<n>ms`, counted from the
creation of the blob, or `ttl:removed`. Three rules keep it right with several processes at once, and through crashes:

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
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from blobstore.base import UnfinishedPut
from blobstore.errors import BlobCorruptError
from blobstore.local.dirs import ReadDirs, StoreDirs, split_key, walk_keys
from blobstore.local.files import sync_dir
from blobstore.local.temp import TEMP, TempFiles, modified_at_ms

TTL: Final = ".ttl"
# What `UnfinishedPut.upload_id` says of a link whose blob never came.
LINK: Final = "ttl link"
_REMOVED: Final = "ttl:removed"
_TTL = re.compile(r"ttl:([1-9][0-9]{0,17})ms")


class TtlLinks:
    """Reads and writes the links. Blocks.

    Args:
        dirs: Of the store.
        temp_files: Of the store.
    """

    def __init__(self, dirs: StoreDirs, temp_files: TempFiles) -> None:
        self._dirs = dirs
        self._temp_files = temp_files

    def read_ms(self, key: str, dirs: ReadDirs) -> int | None:
        """Return the TTL of a blob; None if it has none or no longer has one.

        Raises:
            BlobCorruptError: The text of the link is not one that this module writes.
        """
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
        """Make the link of a blob that is about to be created, unless there is one.

        Args:
            key: Of the blob.
            ttl_ms: Its TTL.
            is_there: Returns whether the blob is there now.
        """
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
        """Make a blob permanent that is there."""
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
                        left.append(UnfinishedPut(key=key, upload_id=LINK, begun_at_ms=modified_at_ms(found)))
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
