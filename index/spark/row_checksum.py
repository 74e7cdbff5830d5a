"""Spark's row checksums: a CRC32C in front of every value, and of every key that a changelog deletes (Spark 4.2).

A value is stored as `checksum, length, value`, both numbers little-endian; values that were merged stand one after the
other with the delimiter of the merge operator between them. The checksum is over the key as it is in RocksDB, with the
prefix of its column family, and the value. Off unless the query's offset log says otherwise (design 0004, L4).
"""

import struct
from collections.abc import Callable
from typing import Final

from index.errors import RowChecksumError
from index.spark.changelog import DELETE, DELETE_RANGE, Record

# CRC32C of bytes, going on from the CRC of what came before (0 at first); unsigned.
Crc32c = Callable[[bytes, int], int]

_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AND_LENGTH = struct.Struct("<Ii")
_HINT: Final = "the row is damaged; load an older version, or restore the store from a backup"


def wrap_value(key: bytes, value: bytes, crc32c: Crc32c) -> bytes:
    """A value as it is stored under `key`, put or merged; also the end of a DELETE_RANGE, whose key is its begin."""
    return _CHECKSUM_AND_LENGTH.pack(crc32c(value, crc32c(key, 0)), len(value)) + value


def wrap_deleted_key(key: bytes, crc32c: Crc32c) -> bytes:
    """A key as it stands in the DELETE of a changelog."""
    return _CHECKSUM.pack(crc32c(key, 0)) + key


def split_values(key: bytes, stored: bytes, *, delimiter: bytes, crc32c: Crc32c | None) -> list[bytes]:
    """The values that stand under a key: one that was put, and those that were merged to it, in order.

    Args:
        key: With the prefix of its column family.
        stored: The value in RocksDB.
        delimiter: Of the merge operator: `,` with its version 1, nothing with 2.
        crc32c: None: do not verify.

    Raises:
        RowChecksumError: A value does not fit its checksum, or the lengths do not add up.
    """
    values: list[bytes] = []
    at = 0
    end = len(stored)
    key_crc32c = 0 if crc32c is None else crc32c(key, 0)
    while True:
        start = at + _CHECKSUM_AND_LENGTH.size
        if start > end:
            raise _broken(key, f"has {end - at} bytes where a checksum and a length belong")
        checksum, length = _CHECKSUM_AND_LENGTH.unpack_from(stored, at)
        at = start + length
        if length < 0 or at > end:
            raise _broken(key, f"has a length of {length} with {end - start} bytes left")
        value = stored[start:at]
        if crc32c is not None and crc32c(value, key_crc32c) != checksum:
            raise _broken(key, f"does not fit its checksum {checksum:08x}")
        values.append(value)
        if at == end:
            return values
        if not stored.startswith(delimiter, at):
            raise _broken(key, f"has no delimiter {delimiter!r} between two values")
        at += len(delimiter)


def unwrap_value(key: bytes, stored: bytes, *, delimiter: bytes, crc32c: Crc32c | None) -> bytes:
    """The value as it would be without row checksums: merged values joined by the delimiter.

    Raises:
        RowChecksumError: As for `split_values`.
    """
    return delimiter.join(split_values(key, stored, delimiter=delimiter, crc32c=crc32c))


def unwrap_deleted_key(stored: bytes, crc32c: Crc32c | None) -> bytes:
    """The key that a DELETE of a changelog is about.

    Args:
        stored: The key of the record.
        crc32c: None: do not verify.

    Raises:
        RowChecksumError: The key does not fit its checksum, or is too short to have one.
    """
    if len(stored) < _CHECKSUM.size:
        raise _broken(stored, "is too short to have a checksum")
    (checksum,) = _CHECKSUM.unpack_from(stored)
    key = stored[_CHECKSUM.size :]
    if crc32c is not None and crc32c(key, 0) != checksum:
        raise _broken(key, f"does not fit its checksum {checksum:08x}")
    return key


def unwrap_record(record: Record, *, delimiter: bytes, crc32c: Crc32c | None) -> Record:
    """A record of a changelog as it is replayed: keys without checksums, and values with them, as RocksDB holds them.

    Args:
        record: From the decoder, of a store with row checksums.
        delimiter: As for `split_values`.
        crc32c: None: do not verify. Spark verifies every record that it replays.

    Raises:
        RowChecksumError: As for `split_values` and `unwrap_deleted_key`.
    """
    kind, key, value = record
    if kind == DELETE:
        return kind, unwrap_deleted_key(key, crc32c), value
    if kind == DELETE_RANGE:
        return kind, key, unwrap_value(key, value, delimiter=delimiter, crc32c=crc32c)
    if crc32c is not None:
        split_values(key, value, delimiter=delimiter, crc32c=crc32c)
    return record


def _broken(key: bytes, message: str) -> RowChecksumError:
    return RowChecksumError(message, subject=f"row with the key {key[:64].hex()}", hint=_HINT)
