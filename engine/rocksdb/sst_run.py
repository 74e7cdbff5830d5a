"""Sorted rows as SSTs of the usual size, to be ingested into a store."""

from collections.abc import Iterable
from pathlib import Path

from engine.rocksdb.store import RocksDbSettings, SstWriter


class SstRun:
    """Writes the rows of one target, in the order of their keys, to SSTs of the usual size."""

    def __init__(self, directory: Path, target: int, settings: RocksDbSettings) -> None:
        self._directory, self._target, self._settings = directory, target, settings
        self._files: list[Path] = []
        self._writer: SstWriter | None = None
        self._left_bytes = 0

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        writer = self._writer
        for key, value in rows:
            if writer is None or self._left_bytes <= 0:
                self.finish()
                path = self._directory / f"{self._target}-{len(self._files)}.sst"
                self._writer = writer = SstWriter(path, self._settings)
                self._files.append(path)
                self._left_bytes = self._settings.file_bytes
            writer.put(key, value)
            self._left_bytes -= len(key) + len(value)

    def finish(self) -> list[Path]:
        """Finish the file that is being written; return all of them."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None
        return self._files
