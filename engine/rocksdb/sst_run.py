"""Sorted rows as SSTs of the usual size, to be ingested into a store."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from engine.rocksdb.store import RocksDbSettings, SstWriter


class SstRun:
    """Writes the rows of one target, in the order of their keys, to SSTs of the usual size."""

    def __init__(self, directory: Path, target: int, settings: RocksDbSettings) -> None:
        self._directory, self._target, self._settings = directory, target, settings
        self._files: list[Path] = []
        self._writer: SstWriter | None = None
        self._left_bytes = 0

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write the next rows."""
        # Where each row ends, behind its key and its value.
        ends = list(itertools.accumulate(map(len, itertools.chain.from_iterable(rows))))[1::2]
        at = done_bytes = 0
        while at < len(rows):
            if self._writer is None or self._left_bytes <= 0:
                self.finish()
                path = self._directory / f"{self._target}-{len(self._files)}.sst"
                self._writer = SstWriter(path, self._settings)
                self._files.append(path)
                self._left_bytes = self._settings.file_bytes
            # With the row that fills the file.
            end = min(bisect_left(ends, done_bytes + self._left_bytes) + 1, len(rows))
            self._writer.put(rows[at:end])
            self._left_bytes -= ends[end - 1] - done_bytes
            at, done_bytes = end, ends[end - 1]

    def finish(self) -> list[Path]:
        """Finish the file that is being written; return all of them."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None
        return self._files
