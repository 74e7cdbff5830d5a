"""Deleted blobs of a directory store that are kept for a while: `<root>/.deleted/<key>`."""

import os
from contextlib import suppress
from typing import Final

from blobstore.local.dirs import StoreDirs, read_regular, split_key
from blobstore.local.walk import is_component

DELETED: Final = ".deleted"
# How often within the retention a purge looks through all that is kept.
_PURGES_PER_RETENTION: Final = 10


class DeletedBlobs:
    """Keeps deleted blobs, if it is to keep them at all. Blocks.

    Args:
        dirs: Of the store.
        retention_ms: How long they are kept at least; 0 keeps none.
    """

    def __init__(self, dirs: StoreDirs, retention_ms: int) -> None:
        self._dirs = dirs
        self._retention_ms = retention_ms
        self._next_purge_ms = 0

    def is_kept(self, key: str) -> bool:
        """Return whether a deleted blob of this key can still be served."""
        if self._retention_ms == 0:
            return False
        directory, name = split_key(f"{DELETED}/{key}")
        with suppress(FileNotFoundError, NotADirectoryError), self._dirs.opened(directory) as kept:
            return read_regular(name, kept) is not None
        return False

    def delete(self, key: str, directory: int) -> None:
        """Take a blob away: to where it is kept, or for good.

        Args:
            key: Of the blob.
            directory: Descriptor of the directory that it is in.
        """
        below, name = split_key(f"{DELETED}/{key}")
        if self._retention_ms > 0:
            # An earlier deleted blob may stand where a directory is needed now, or the reverse: then it is not kept.
            with (
                suppress(NotADirectoryError, IsADirectoryError, FileExistsError),
                self._dirs.opened(below, make=True) as kept,
            ):
                os.replace(name, name, src_dir_fd=directory, dst_dir_fd=kept)
                return
        os.unlink(name, dir_fd=directory)

    def purge(self, now_ms: int) -> None:
        """Remove for good what was deleted longer ago than the retention; does nothing if it did so recently.

        The time of deletion is the change time of the inode, which the rename has set.
        """
        if self._retention_ms == 0 or now_ms < self._next_purge_ms:
            return
        self._next_purge_ms = now_ms + self._retention_ms // _PURGES_PER_RETENTION
        with self._dirs.opened(DELETED) as top:
            for _, _, names, directory in os.fwalk(".", dir_fd=top):
                for name in filter(is_component, names):
                    found = read_regular(name, directory)
                    if found is not None and found.st_ctime_ns // 1_000_000 < now_ms - self._retention_ms:
                        # Another process purges too.
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=directory)
