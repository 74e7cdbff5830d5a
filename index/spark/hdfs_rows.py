"""Translate rows of Spark's HDFS-backed provider into those of its RocksDB provider, and back (design 0004, L7, L8).

Its files hold the bytes of a row and nothing else. RocksDB's encoders put a version before each row, and split a key
whose first fields are looked up together. Row checksums are over the bytes that a provider stores.
"""

import struct
from collections.abc import Callable
from typing import Final

import msgspec

from index.errors import RowChecksumError, UnsupportedRecordError
from index.spark.changelog import DELETE, PUT, Record
from index.spark.checksums import Crc32c, unwrap_deleted_key, wrap_value
from index.spark.schema import StructType
from index.spark.unsafe_row import HALF, PLACE, WIDE_BYTES, WORD, is_in_word, null_bytes

# Of an unsafe row, before its bytes.
_ROW_VERSION: Final = b"\0"
_CHECKSUM: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<i")
_HINT: Final = "the row is damaged; restore the checkpoint from a backup"

# Splits the bytes of a key row as RocksDB's encoder for the operator does; None: it stays whole.
SplitKey = Callable[[bytes], bytes]


class RowForm(msgspec.Struct, frozen=True):
    """How the rows of one store are translated."""

    row_checksums: bool
    crc32c: Crc32c
    split_key: SplitKey | None = None

    def to_rocksdb(self, record: Record) -> Record:
        """Return a record of a `.delta` or `.snapshot` as it goes into RocksDB.

        Raises:
            RowChecksumError: It does not fit its checksum.
        """
        kind, key, value = record
        if kind == DELETE:
            return kind, self._key(unwrap_deleted_key(key, self.crc32c) if self.row_checksums else key), b""
        if self.row_checksums:
            checksum, value = value[: _CHECKSUM.size], value[_CHECKSUM.size :]
            if checksum != _CHECKSUM.pack(self.crc32c(value, self.crc32c(key, 0))):
                subject = f"row with the key {key[:64].hex()}"
                raise RowChecksumError("does not fit its checksum", subject=subject, hint=_HINT)
        stored_key = self._key(key)
        # Spark 2.2 wrote four bytes too many behind some values, which its successors pass over.
        row = _ROW_VERSION + value[: len(value) // WORD * WORD]
        return kind, stored_key, wrap_value(stored_key, row, self.crc32c) if self.row_checksums else row

    def from_rocksdb(self, key: bytes, value: bytes) -> Record:
        """Return the record of a `.snapshot` for a row of a store that was translated without splitting keys.

        The value is without checksum.
        """
        key, value = key.removeprefix(_ROW_VERSION), value.removeprefix(_ROW_VERSION)
        if self.row_checksums:
            value = _CHECKSUM.pack(self.crc32c(value, self.crc32c(key, 0))) + value
        return PUT, key, value

    def _key(self, key: bytes) -> bytes:
        return _ROW_VERSION + key if self.split_key is None else self.split_key(key)


def prefix_key_splitter(key: StructType, prefix_columns: int) -> SplitKey:
    """Return what encodes a key for a scan by its first columns: their row with its length before it, then the rest.

    UnsupportedRecordError: the key has fewer columns.
    """
    if not 0 < prefix_columns < len(key.fields):
        reason = f"has {len(key.fields)} columns, and {prefix_columns} of them are to lead"
        raise UnsupportedRecordError(reason, subject="key", hint="the metadata of the operator is of another query")
    in_words = tuple(is_in_word(field.type) for field in key.fields)

    def split(row: bytes) -> bytes:
        prefix = _ROW_VERSION + _project(row, in_words, range(prefix_columns))
        rest = _ROW_VERSION + _project(row, in_words, range(prefix_columns, len(in_words)))
        return _LENGTH.pack(len(prefix)) + prefix + rest

    return split


def _project(row: bytes, in_words: tuple[bool, ...], columns: range) -> bytes:
    """Return the unsafe row of some columns of an unsafe row, as Spark's projection writes it."""
    fixed_at = null_bytes(len(in_words))
    nulls = 0
    words: list[bytes] = []
    data = b""
    data_at = null_bytes(len(columns)) + WORD * len(columns)
    if len(row) < fixed_at + WORD * len(in_words):
        raise UnsupportedRecordError(f"has {len(row)} bytes and {len(in_words)} columns", subject="row", hint=_HINT)
    for number, column in enumerate(columns):
        word = row[fixed_at + WORD * column : fixed_at + WORD * (column + 1)]
        is_null = bool(row[column // 8] >> column % 8 & 1)
        nulls |= is_null << number
        if not in_words[column] and word != bytes(WORD):
            (place,) = PLACE.unpack(word)
            offset, size = place >> HALF, place & (1 << HALF) - 1
            # A null that keeps its place: a decimal of many digits.
            taken = WIDE_BYTES if is_null else -(-size // WORD) * WORD
            if offset + taken > len(row):
                raise UnsupportedRecordError("has a value beyond its end", subject="row", hint=_HINT)
            word = PLACE.pack(data_at + len(data) << HALF | size)
            data += row[offset : offset + taken]
        words.append(word)
    return nulls.to_bytes(null_bytes(len(columns)), "little") + b"".join(words) + data
