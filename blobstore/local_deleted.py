"""Deleted blobs of a directory store that are kept for a while: `<root>/.deleted/<key>`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from blobstore.local_files import DurableDirs

# How often within the retention a purge looks through all that is kept.
_PURGES_PER_RETENTION: Final = 10


class DeletedBlobs:
    """Keeps deleted blobs, if it is to keep them at all. Blocks.

    Args:
        directory: `<root>/.deleted`.
        dirs: Makes the directories that are missing.
        retention_ms: How long they are kept at least; 0 keeps none.
    """

    def __init__(self, directory: Path, dirs: DurableDirs, retention_ms: int) -> None:
        self._directory = directory
        self._dirs = dirs
        self._retention_ms = retention_ms
        self._next_purge_ms = 0

    def path(self, key: str) -> Path:
        """Where a deleted blob is, if it is kept."""
        return self._directory / key

    def is_kept(self, key: str) -> bool:
        """Whether a deleted blob of this key can still be served."""
        return self._retention_ms > 0 and self.path(key).is_file()

    def delete(self, blob: Path, key: str) -> None:
        """Take a blob away: to where it is kept, or for good."""
        if self._retention_ms > 0:
            kept = self.path(key)
            # An earlier deleted blob may stand where a directory is needed now, or the reverse: then it is not kept.
            with suppress(NotADirectoryError, IsADirectoryError, FileExistsError):
                self._dirs.make(kept.parent)
                blob.replace(kept)
                return
        blob.unlink()

    def purge(self, now_ms: int) -> None:
        """Remove for good what was deleted longer ago than the retention; does nothing if it did so recently.

        The time of deletion is the change time of the inode, which the rename has set.
        """
        if self._retention_ms == 0 or now_ms < self._next_purge_ms:
            return
        self._next_purge_ms = now_ms + self._retention_ms // _PURGES_PER_RETENTION
        for directory, _, names in os.walk(self._directory):
            for name in names:
                kept = Path(directory, name)
                # Another process purges too.
                with suppress(FileNotFoundError):
                    if kept.stat().st_ctime_ns // 1_000_000 < now_ms - self._retention_ms:
                        kept.unlink()
