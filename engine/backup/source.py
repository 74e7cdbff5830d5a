"""The source of a backup: files below one directory of this machine, all of them or a selection."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from engine.local.scan import changed_error, find_difference, scan_dir
from engine.rocksdb.lock import check_not_held
from index.plan.backup import PlannedFile
from index.snapshot.dir_diff import LocalDir
from index.snapshot.model import LineageItem, SnapshotIndex


class BackupSource(Protocol):
    """Files below one directory. Made for one backup."""

    # Where they are read; absolute.
    directory: Path
    # Whether the directory is there for the next backup too, so that hashes of its files are worth keeping.
    is_lasting: bool

    @property
    def lineage(self) -> Sequence[LineageItem] | None:
        """The versions that its state grew from, oldest first; known once it was looked at. None: it does not know."""
        return None

    async def look(self, previous: SnapshotIndex | None) -> LocalDir:
        """List what there is to back up.

        Args:
            previous: What it will be compared with; None: nothing.

        Returns:
            Files and directories, sorted by name. A file that carries its `blake3` already is known to be the one of
            `previous`: it is not read, and need not be in the directory.

        Raises:
            EngineError, FormatError, StoreError: It cannot be backed up.
        """
        ...

    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        """Get ready for the reading of some files.

        Returns:
            What `look` would say now if files came into the directory for it; None if all were there.

        Raises:
            EngineError, FormatError, StoreError: One of them must not be backed up.
        """
        ...

    async def check_held_still(self) -> None:
        """Make sure, after the last byte was read, that nothing has changed since `look`.

        Raises:
            UnsafeSourceError: What was looked at is not what was read (design 0002, I3).
        """
        ...


class WholeDirectory(BackupSource):
    """A rocksdb_checkpoint, or any directory that nobody writes to: everything in it. A link at its end is refused."""

    is_lasting = True

    def __init__(self, directory: Path) -> None:
        # Absolute: whatever becomes of the working directory meanwhile.
        self.directory = directory.absolute()
        self._scanned = LocalDir(name="")

    @override
    async def look(self, previous: SnapshotIndex | None) -> LocalDir:
        self._scanned = await asyncio.to_thread(self._scan)
        return self._scanned

    def _scan(self) -> LocalDir:
        scanned = scan_dir(self.directory)
        check_not_held(self.directory, scanned)
        return scanned

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        return None

    @override
    async def check_held_still(self) -> None:
        before = self._scanned
        difference = await asyncio.to_thread(lambda: find_difference(before, scan_dir(self.directory, before)))
        if difference is not None:
            raise changed_error(self.directory.joinpath(*difference))
