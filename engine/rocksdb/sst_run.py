"""Sorted rows as SSTs of the usual size, to be ingested into a store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from engine.rocksdb.store import RocksDbSettings, SstWriter, put_each

# The number of rows after which the size of a file is compared.
_ROWS_AT_ONCE: Final = 256


class SstRun:
    """Writes the rows of one target, in the order of their keys, to SSTs of the usual size."""

    def __init__(self, directory: Path, target: int, settings: RocksDbSettings) -> None:
        self._directory, self._target, self._settings = directory, target, settings
        self._files: list[Path] = []
        self._writer: SstWriter | None = None

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            self.writer().put(rows[at : at + _ROWS_AT_ONCE])

    def writer(self) -> SstWriter:
        """Return what takes the next row: of another file, once this one has its size."""
        if self._writer is None or self._writer.size_bytes >= self._settings.file_bytes:
            self.finish()
            path = self._directory / f"{self._target}-{len(self._files)}.sst"
            self._writer = SstWriter(path, self._settings)
            self._files.append(path)
        return self._writer

    def finish(self) -> list[Path]:
        """Finish the file that is being written; return all of them."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None
        return self._files


def put_by_target(rows: Sequence[tuple[bytes, bytes]], targets: Sequence[int], runs: Mapping[int, SstRun]) -> None:
    """Write each of the next rows by the run of its target."""
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        next_targets = targets[at : at + _ROWS_AT_ONCE]
        writers = {target: runs[target].writer() for target in set(next_targets)}
        put_each(rows[at : at + _ROWS_AT_ONCE], [*map(writers.__getitem__, next_targets)])
