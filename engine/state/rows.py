"""Row checksums at work: written with every row, verified at every replay, and now and then when rows are read."""

from pathlib import Path

from engine.local.hashing import crc32c
from engine.rocksdb.store import RocksDbSettings, StoreReader
from index.spark.changelog import Record
from index.spark.checksums import Crc32c, split_values, unwrap_record, unwrap_value, wrap_deleted_key, wrap_value


class RowChecks:
    """The checksums of one store's rows.

    Args:
        delimiter: What stands between two operands of a merge.
        ratio: Of so many rows read one is verified; 0 verifies none.
    """

    def __init__(self, delimiter: bytes, ratio: int) -> None:
        self._delimiter = delimiter
        self._ratio = ratio
        self._reads = 0

    def wrap(self, stored_key: bytes, value: bytes) -> bytes:
        """A value, an operand, or the end of a range, as it is stored under a key."""
        return wrap_value(stored_key, value, crc32c)

    def wrap_deleted(self, stored_key: bytes) -> bytes:
        """A key as it stands in a changelog that deletes it."""
        return wrap_deleted_key(stored_key, crc32c)

    def read(self, stored_key: bytes, stored: bytes) -> bytes:
        """The value that is stored under a key, verified if it is its turn.

        Raises:
            RowChecksumError: It does not fit its checksum, or is no value with one.
        """
        return unwrap_value(stored_key, stored, delimiter=self._delimiter, crc32c=self._turn())

    def replayed(self, record: Record) -> Record:
        """A record of a changelog as it goes into RocksDB, verified.

        Raises:
            RowChecksumError: It does not fit its checksum.
        """
        return unwrap_record(record, delimiter=self._delimiter, crc32c=crc32c)

    def check_snapshot(self, directory: Path, settings: RocksDbSettings) -> None:
        """Verify the rows of a rocksdb_checkpoint: all of them, or one of so many. Blocks.

        Raises:
            RowChecksumError: One does not fit its checksum.
            DamagedError: RocksDB cannot read it.
        """
        if not self._ratio:
            return
        with StoreReader.open(directory, settings) as reader:
            for stored_key, stored in reader.items():
                check = self._turn()
                if check is not None:
                    split_values(stored_key, stored, delimiter=self._delimiter, crc32c=check)

    def _turn(self) -> Crc32c | None:
        if not self._ratio:
            return None
        self._reads += 1
        return crc32c if self._reads % self._ratio == 0 else None
