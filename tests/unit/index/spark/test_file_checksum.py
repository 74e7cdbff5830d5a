"""The `.crc` file beside a snapshot or a changelog."""

import msgspec
import pytest

from index.errors import FileChecksumError, UnknownFormatError
from index.spark.checksums import (
    ChecksumCreator,
    FileChecksum,
    check_file_checksum,
    decode_file_checksum,
    encode_file_checksum,
)

# Written by Spark 4.3.0.
SPARK_TEXT = (
    b'{"algorithm":"CRC32C","value":-2,"mainFileSize":507,"timestampMs":1700000000000,'
    b'"creator":{"executorId":"driver","taskInfo":"Task= 0.0, Stage= 10.0"}}'
)
CHECKSUM = FileChecksum(
    algorithm="CRC32C",
    value=-2,
    main_file_size_bytes=507,
    timestamp_ms=1700000000000,
    creator=ChecksumCreator(executor_id="driver", task_info="Task= 0.0, Stage= 10.0"),
)


def test_a_checksum_file_is_written_and_read_as_spark_does() -> None:
    assert encode_file_checksum(CHECKSUM) == SPARK_TEXT
    assert decode_file_checksum(SPARK_TEXT, subject="3.zip.crc") == CHECKSUM


@pytest.mark.parametrize(
    "crc32c,value", [(0, 0), (1770606157, 1770606157), (0x7FFFFFFF, 2**31 - 1), (0x80000000, -(2**31)), (2**32 - 2, -2)]
)
def test_the_value_is_a_signed_number_of_32_bits(crc32c: int, value: int) -> None:
    checksum = FileChecksum.of_file(crc32c=crc32c, size_bytes=507, timestamp_ms=1)
    assert checksum.value == value
    assert checksum.crc32c == crc32c
    assert decode_file_checksum(encode_file_checksum(checksum), subject="") == checksum


def test_unknown_fields_are_passed_over_and_the_creator_may_be_empty() -> None:
    text = b'{"later":1,"algorithm":"CRC32C","value":1,"mainFileSize":2,"timestampMs":3,"creator":{}}'
    ours = FileChecksum.of_file(crc32c=1, size_bytes=2, timestamp_ms=3)
    assert decode_file_checksum(text, subject="") == msgspec.structs.replace(ours, creator=ChecksumCreator())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"crc\0\0\0\2\0",
        b"{}",
        SPARK_TEXT[:-1],
        SPARK_TEXT.replace(b"-2", b"4294967294"),
        SPARK_TEXT.replace(b"-2", b"-2147483649"),
        SPARK_TEXT.replace(b"507", b"-1"),
        SPARK_TEXT.replace(b"507", b"9223372036854775808"),
        SPARK_TEXT.replace(b"507", b"5.5"),
        SPARK_TEXT.replace(b"driver", b"\xff"),
        SPARK_TEXT.replace(b"driver", b"x" * 70_000),
    ],
)
def test_what_is_no_checksum_file_is_refused_and_named(text: bytes) -> None:
    """The second is Hadoop's own kind of `.crc`, which is beside files on a local disk."""
    with pytest.raises(FileChecksumError, match=r"^3\.zip\.crc: ") as error:
        decode_file_checksum(text, subject="3.zip.crc")
    assert error.value.hint


@pytest.mark.spark_case(51)
def test_a_file_that_does_not_fit_its_checksum_is_corrupt() -> None:
    check_file_checksum(CHECKSUM, crc32c=2**32 - 2, size_bytes=507, subject="3.zip")
    for crc32c, size_bytes in ((2**32 - 3, 507), (2**32 - 2, 506), (2, 507)):
        with pytest.raises(FileChecksumError, match=r"^3\.zip: .*fffffffe"):
            check_file_checksum(CHECKSUM, crc32c=crc32c, size_bytes=size_bytes, subject="3.zip")


def test_a_checksum_of_another_algorithm_is_an_error_that_says_to_upgrade() -> None:
    later = decode_file_checksum(SPARK_TEXT.replace(b"CRC32C", b"XXH3"), subject="3.zip.crc")
    with pytest.raises(UnknownFormatError, match="XXH3") as error:
        check_file_checksum(later, crc32c=2**32 - 2, size_bytes=507, subject="3.zip")
    assert "upgrade" in error.value.hint
