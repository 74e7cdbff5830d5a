"""Check what Spark and Hadoop have written with checksums: rows, files, and the blocks of files.

- *Row checksums* (Spark 4.2): a CRC32C in front of every value, and of every key that a changelog deletes. A value is
  stored as `checksum, length, value`, both numbers little-endian; values that were merged follow each other with the
  delimiter of the merge operator between them. The checksum is over the key as it is in RocksDB, with the prefix of its
  column family, and the value. Off unless the query's offset log says otherwise (design 0004, L4).
- *File checksums* (Spark 4.1): the content of `<name>.crc` beside a snapshot or a changelog. A file without one is read
  without verification, as Spark does: the two are published one after the other.
- *Hadoop's hidden checksum files*: `.<name>.crc` beside every file that its local file system (`ChecksumFs`) has
  written: "crc" and NUL, the bytes per checksum (4), and a CRC32 of each chunk of that size (4 each), all big-endian.
  Hadoop refuses a file that does not fit; where there is no such file, it verifies nothing.

In every function `crc32c` is None where nothing is to be verified, and a key has the prefix of its column family.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from index.errors import FileChecksumError, RowChecksumError, UnknownFormatError
from index.java_text import decode_json, encode_jackson
from index.snapshot.model import SIZE_BYTES_MAX
from index.spark.changelog import DELETE, DELETE_RANGE, Record

# CRC32C of bytes, going on from the CRC of what came before (0 at first); unsigned.
Crc32c = Callable[[bytes, int], int]

_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AND_LENGTH = struct.Struct("<Ii")
_ROW_HINT: Final = "the row is damaged; load an older version, or restore the store from a backup"

CRC32C: Final = "CRC32C"
# Who made a checksum of ours, where Spark names an executor.
CREATOR: Final = "tidemark"
FILE_CHECKSUM_BYTES_MAX: Final = 64 * 1024

_UINT32: Final = 1 << 32
_INT32_MAX: Final = (1 << 31) - 1
_FILE_HINT: Final = "the file or its .crc is damaged; take both from a backup, or load an older version"

_MAGIC: Final = b"crc\0"
_HEAD_BYTES: Final = 8
_CRC_BYTES: Final = 4
# What Hadoop writes is 512. More than this is not a chunk that anybody sums up at once.
CHUNK_BYTES_MAX: Final = 1024 * 1024
_HADOOP_HINT: Final = (
    "one of the two was altered without the other; a reader through Hadoop's local file system refuses the file"
)


def wrap_value(key: bytes, value: bytes, crc32c: Crc32c) -> bytes:
    """Wrap a value as it is stored under `key`, put or merged; also the end of a DELETE_RANGE, under its begin."""
    return _CHECKSUM_AND_LENGTH.pack(crc32c(value, crc32c(key, 0)), len(value)) + value


def wrap_deleted_key(key: bytes, crc32c: Crc32c) -> bytes:
    """Wrap a key as it is in the DELETE of a changelog."""
    return _CHECKSUM.pack(crc32c(key, 0)) + key


def split_values(key: bytes, stored: bytes, *, delimiter: bytes, crc32c: Crc32c | None) -> list[bytes]:
    """Split what is stored under a key: the value that was put, and those merged to it, in order.

    The delimiter is that of the merge operator: `,` with its version 1, nothing with 2.

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
            raise _broken_row(key, f"has {end - at} bytes where a checksum and a length belong")
        checksum, length = _CHECKSUM_AND_LENGTH.unpack_from(stored, at)
        at = start + length
        if length < 0 or at > end:
            raise _broken_row(key, f"has a length of {length} with {end - start} bytes left")
        value = stored[start:at]
        if crc32c is not None and crc32c(value, key_crc32c) != checksum:
            raise _broken_row(key, f"does not fit its checksum {checksum:08x}")
        values.append(value)
        if at == end:
            return values
        if not stored.startswith(delimiter, at):
            raise _broken_row(key, f"has no delimiter {delimiter!r} between two values")
        at += len(delimiter)


def unwrap_value(key: bytes, stored: bytes, *, delimiter: bytes, crc32c: Crc32c | None) -> bytes:
    """Return the value as it would be without row checksums: merged values joined by the delimiter."""
    return delimiter.join(split_values(key, stored, delimiter=delimiter, crc32c=crc32c))


def unwrap_deleted_key(stored: bytes, crc32c: Crc32c | None) -> bytes:
    """Return the key that a DELETE of a changelog is about.

    Raises:
        RowChecksumError: The key does not fit its checksum, or is too short to have one.
    """
    if len(stored) < _CHECKSUM.size:
        raise _broken_row(stored, "is too short to have a checksum")
    (checksum,) = _CHECKSUM.unpack_from(stored)
    key = stored[_CHECKSUM.size :]
    if crc32c is not None and crc32c(key, 0) != checksum:
        raise _broken_row(key, f"does not fit its checksum {checksum:08x}")
    return key


def unwrap_record(record: Record, *, delimiter: bytes, crc32c: Crc32c | None) -> Record:
    """Return a record of a changelog as it is replayed: the key without checksum, and the value with it.

    Spark verifies every record that it replays. Errors are those of `split_values` and `unwrap_deleted_key`.
    """
    kind, key, value = record
    if kind == DELETE:
        return kind, unwrap_deleted_key(key, crc32c), value
    if kind == DELETE_RANGE:
        return kind, key, unwrap_value(key, value, delimiter=delimiter, crc32c=crc32c)
    if crc32c is not None:
        split_values(key, value, delimiter=delimiter, crc32c=crc32c)
    return record


def _broken_row(key: bytes, message: str) -> RowChecksumError:
    return RowChecksumError(message, subject=f"row with the key {key[:64].hex()}", hint=_ROW_HINT)


class ChecksumCreator(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who made a checksum; for people only."""

    executor_id: str = ""
    task_info: str = ""


class FileChecksum(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The checksum of one file, over its bytes as stored; fields as in Spark's JSON, in its order."""

    algorithm: str
    # A Java int: the CRC as a signed number of 32 bits.
    value: int
    main_file_size_bytes: int = msgspec.field(name="mainFileSize")
    # By the clock of the machine that wrote it.
    timestamp_ms: int
    creator: ChecksumCreator

    @property
    def crc32c(self) -> int:
        """The CRC as everybody but Java writes it: unsigned."""
        return self.value % _UINT32

    @classmethod
    def of_file(cls, *, crc32c: int, size_bytes: int, timestamp_ms: int) -> "FileChecksum":
        return cls(
            algorithm=CRC32C,
            value=crc32c if crc32c <= _INT32_MAX else crc32c - _UINT32,
            main_file_size_bytes=size_bytes,
            timestamp_ms=timestamp_ms,
            creator=ChecksumCreator(executor_id=CREATOR),
        )


def encode_file_checksum(checksum: FileChecksum) -> bytes:
    """Encode the `.crc` file as Spark writes it, for every value that `decode_file_checksum` returns."""
    return encode_jackson(checksum)


def decode_file_checksum(data: bytes, *, subject: str) -> FileChecksum:
    """Decode what `encode_file_checksum` encodes; unknown fields are ignored.

    Raises:
        FileChecksumError: It is not JSON of this form, or a number is out of range.
    """
    if len(data) > FILE_CHECKSUM_BYTES_MAX:
        raise FileChecksumError(f"is {len(data)} bytes long", subject=subject, hint=_FILE_HINT)
    what = "is not a checksum file"
    checksum = decode_json(data, FileChecksum, FileChecksumError, what, subject=subject, hint=_FILE_HINT)
    if not -_INT32_MAX - 1 <= checksum.value <= _INT32_MAX or not 0 <= checksum.main_file_size_bytes <= SIZE_BYTES_MAX:
        raise FileChecksumError("has a number that is out of range", subject=subject, hint=_FILE_HINT)
    return checksum


def check_file_checksum(expected: FileChecksum, *, crc32c: int, size_bytes: int, subject: str) -> None:
    """Compare a file that was read with its checksum; `crc32c` is unsigned, over the bytes as stored.

    Raises:
        FileChecksumError: They differ: Spark's CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED.
        UnknownFormatError: The checksum is of another algorithm.
    """
    if expected.algorithm != CRC32C:
        message = f"has a checksum of the algorithm {expected.algorithm!r}; this tidemark knows {CRC32C}"
        raise UnknownFormatError(message, subject=subject, hint="a newer Spark has written it; upgrade tidemark")
    wanted_bytes = expected.main_file_size_bytes
    if (crc32c, size_bytes) != (expected.crc32c, wanted_bytes):
        found = f"has {size_bytes} bytes with the CRC32C {crc32c:08x}"
        message = f"{found}, and its checksum file wants {wanted_bytes} with {expected.crc32c:08x}"
        raise FileChecksumError(message, subject=subject, hint=_FILE_HINT)


def hadoop_checksum_name(name: str) -> str:
    """Return the name of the hidden file beside a file."""
    return f".{name}.crc"


def hadoop_checksum_bytes(size_bytes: int, chunk_bytes: int = 512) -> int:
    """Return the size of the hidden file of a file of this size."""
    return _HEAD_BYTES + _CRC_BYTES * -(-size_bytes // chunk_bytes)


class HadoopSums:
    """Compares a file, as it is read, with `stored`, the content of its hidden checksum file.

    FileChecksumError: what is stored is not such a file, or from the methods, the file is another one.
    """

    def __init__(self, stored: bytes, *, subject: str) -> None:
        self._subject = subject
        self._stored = stored
        self._at = _HEAD_BYTES
        self._rest = b""
        self._chunk_bytes = int.from_bytes(stored[4:_HEAD_BYTES], "big")
        sums_bytes = len(stored) - _HEAD_BYTES
        is_sized = sums_bytes >= 0 and sums_bytes % _CRC_BYTES == 0
        if stored[:4] != _MAGIC or not is_sized or not 0 < self._chunk_bytes <= CHUNK_BYTES_MAX:
            raise self._misfit("has a hidden .crc that is none of Hadoop's")

    def update(self, data: bytes) -> None:
        view = memoryview(self._rest + data)
        size, stored, at, crc32 = self._chunk_bytes, self._stored, self._at, zlib.crc32
        whole = len(view) // size * size
        for start in range(0, whole, size):
            if crc32(view[start : start + size]) != int.from_bytes(stored[at : at + _CRC_BYTES], "big"):
                raise self._changed(at)
            at += _CRC_BYTES
        if at > len(stored):
            raise self._changed(len(stored))
        self._at = at
        self._rest = bytes(view[whole:])

    def finish(self) -> None:
        """Say that these were all."""
        if self._rest:
            found = zlib.crc32(self._rest)
            if self._stored[self._at : self._at + _CRC_BYTES] != found.to_bytes(_CRC_BYTES, "big"):
                raise self._changed(self._at)
            self._at += _CRC_BYTES
        if self._at != len(self._stored):
            raise self._misfit("is shorter than the file that Hadoop's hidden .crc was written for")

    def _changed(self, at: int) -> FileChecksumError:
        place = (at - _HEAD_BYTES) // _CRC_BYTES * self._chunk_bytes
        return self._misfit(f"does not fit Hadoop's hidden .crc from byte {place} on")

    def _misfit(self, message: str) -> FileChecksumError:
        return FileChecksumError(message, subject=self._subject, hint=_HADOOP_HINT)
