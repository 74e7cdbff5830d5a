"""Spark's file checksums: what stands in `<name>.crc` beside a snapshot or a changelog (Spark 4.1 and newer).

A file without one is read without verification, as Spark does: the two are published one after the other.
"""

from typing import Final

import msgspec

from index.decoding import UNDECODABLE
from index.errors import FileChecksumError, UnknownFormatError
from index.snapshot.model import SIZE_BYTES_MAX
from index.spark.java_text import encode_jackson

CRC32C: Final = "CRC32C"
FILE_CHECKSUM_BYTES_MAX: Final = 64 * 1024

_UINT32 = 1 << 32
_INT32_MAX: Final = (1 << 31) - 1
_HINT: Final = "the file or its .crc is damaged; take both from a backup, or load an older version"


class FileChecksum(msgspec.Struct, frozen=True, kw_only=True):
    """The checksum of one file, over its bytes as stored."""

    algorithm: str = CRC32C
    # A Java int: the CRC as a signed number of 32 bits.
    value: int
    main_file_size_bytes: int
    # By the clock of the machine that wrote it.
    timestamp_ms: int
    # For people only: Spark's executor and task.
    executor_id: str = ""
    task_info: str = ""

    @property
    def crc32c(self) -> int:
        """The CRC as everybody but Java writes it: unsigned."""
        return self.value % _UINT32

    @classmethod
    def of_file(
        cls, *, crc32c: int, size_bytes: int, timestamp_ms: int, executor_id: str = "", task_info: str = ""
    ) -> "FileChecksum":
        """The checksum of a file with this unsigned CRC32C and size."""
        return cls(
            value=crc32c if crc32c <= _INT32_MAX else crc32c - _UINT32,
            main_file_size_bytes=size_bytes,
            timestamp_ms=timestamp_ms,
            executor_id=executor_id,
            task_info=task_info,
        )


class _SparkCreator(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    executor_id: str = ""
    task_info: str = ""


class _SparkChecksum(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    algorithm: str
    value: int
    main_file_size: int
    timestamp_ms: int
    creator: _SparkCreator


_decoder = msgspec.json.Decoder(_SparkChecksum)


def encode_file_checksum(checksum: FileChecksum) -> bytes:
    """The `.crc` file as Spark writes it, for every value that `decode_file_checksum` gives."""
    creator = _SparkCreator(executor_id=checksum.executor_id, task_info=checksum.task_info)
    return encode_jackson(
        _SparkChecksum(
            algorithm=checksum.algorithm,
            value=checksum.value,
            main_file_size=checksum.main_file_size_bytes,
            timestamp_ms=checksum.timestamp_ms,
            creator=creator,
        )
    )


def decode_file_checksum(data: bytes, *, subject: str) -> FileChecksum:
    """The inverse of `encode_file_checksum`; unknown fields are ignored.

    Args:
        data: The whole `.crc` file.
        subject: Its name, for errors.

    Raises:
        FileChecksumError: It is not JSON of this form, or a number is out of range.
    """
    if len(data) > FILE_CHECKSUM_BYTES_MAX:
        raise FileChecksumError(f"is {len(data)} bytes long", subject=subject, hint=_HINT)
    try:
        wire = _decoder.decode(data)
    except UNDECODABLE as error:
        raise FileChecksumError(f"is not a checksum file: {error}", subject=subject, hint=_HINT) from error
    if not -_INT32_MAX - 1 <= wire.value <= _INT32_MAX or not 0 <= wire.main_file_size <= SIZE_BYTES_MAX:
        raise FileChecksumError("has a number that is out of range", subject=subject, hint=_HINT)
    return FileChecksum(
        algorithm=wire.algorithm,
        value=wire.value,
        main_file_size_bytes=wire.main_file_size,
        timestamp_ms=wire.timestamp_ms,
        executor_id=wire.creator.executor_id,
        task_info=wire.creator.task_info,
    )


def check_file_checksum(expected: FileChecksum, *, crc32c: int, size_bytes: int, subject: str) -> None:
    """Compare a file that was read with its checksum.

    Args:
        expected: From the `.crc` file.
        crc32c: Of the bytes as stored, unsigned.
        size_bytes: How many bytes there were.
        subject: The name of the file, for errors.

    Raises:
        FileChecksumError: They differ: Spark's CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED.
        UnknownFormatError: The checksum is of another algorithm.
    """
    if expected.algorithm != CRC32C:
        raise UnknownFormatError(
            f"has a checksum of the algorithm {expected.algorithm!r}; this tidemark knows {CRC32C}",
            subject=subject,
            hint="a newer Spark has written it; upgrade tidemark",
        )
    if (crc32c, size_bytes) != (expected.crc32c, expected.main_file_size_bytes):
        raise FileChecksumError(
            f"has {size_bytes} bytes with the CRC32C {crc32c:08x}, and its checksum file wants "
            f"{expected.main_file_size_bytes} with {expected.crc32c:08x}",
            subject=subject,
            hint=_HINT,
        )
