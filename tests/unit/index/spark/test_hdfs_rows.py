"""Rows of the HDFS-backed provider as RocksDB has them (0004, L7 and L8)."""

import struct
from typing import Final

import pytest

from engine.local.checksums import crc32c
from index.errors import RowChecksumError, UnsupportedRecordError
from index.spark.changelog import DELETE, PUT
from index.spark.checksums import unwrap_value
from index.spark.hdfs_rows import RowForm, prefix_key_splitter
from index.spark.schema import AtomType, DataType, DecimalType, Field, StructType

KEY: Final = struct.pack("<QQ8s", 0, 16 << 32 | 7, b"key-007")
VALUE: Final = struct.pack("<QQ", 0, 42)
PLAIN: Final = RowForm(False, crc32c)
SUMMED: Final = RowForm(True, crc32c)


def summed(key: bytes, value: bytes) -> bytes:
    return struct.pack("<I", crc32c(key + value, 0)) + value


def test_a_row_gets_the_version_that_rocksdb_s_encoders_write() -> None:
    assert PLAIN.to_rocksdb((PUT, KEY, VALUE)) == (PUT, b"\0" + KEY, b"\0" + VALUE)
    assert PLAIN.to_rocksdb((DELETE, KEY, b"")) == (DELETE, b"\0" + KEY, b"")
    assert PLAIN.from_rocksdb(b"\0" + KEY, b"\0" + VALUE) == (PUT, KEY, VALUE)


def test_what_spark_2_2_wrote_behind_a_value_is_passed_over() -> None:
    assert PLAIN.to_rocksdb((PUT, KEY, VALUE + b"\0\0\0\0")) == (PUT, b"\0" + KEY, b"\0" + VALUE)


def test_row_checksums_are_verified_and_made_again() -> None:
    kind, key, stored = SUMMED.to_rocksdb((PUT, KEY, summed(KEY, VALUE)))
    assert (kind, key) == (PUT, b"\0" + KEY)
    assert unwrap_value(key, stored, delimiter=b"", crc32c=crc32c) == b"\0" + VALUE
    assert SUMMED.from_rocksdb(key, b"\0" + VALUE) == (PUT, KEY, summed(KEY, VALUE))
    deleted = struct.pack("<I", crc32c(KEY, 0)) + KEY
    assert SUMMED.to_rocksdb((DELETE, deleted, b"")) == (DELETE, b"\0" + KEY, b"")


@pytest.mark.parametrize("record", [(PUT, KEY, VALUE), (PUT, KEY, b""), (DELETE, KEY, b""), (DELETE, b"", b"")])
def test_a_row_that_does_not_fit_its_checksum_is_refused(record: tuple[int, bytes, bytes]) -> None:
    with pytest.raises(RowChecksumError):
        SUMMED.to_rocksdb(record)


def key_of(*types: DataType) -> StructType:
    return StructType(tuple(Field(f"c{n}", of, True) for n, of in enumerate(types)))


TEXT, LONG = AtomType("string"), AtomType("long")


def test_a_key_is_split_as_rocksdb_s_encoder_for_prefix_scans_does() -> None:
    # As Spark wrote it: a session's key and its start.
    row = struct.pack("<QQq8s", 0, 24 << 32 | 7, 1_700_000_000, b"key-007")
    prefix = b"\0" + struct.pack("<QQ8s", 0, 16 << 32 | 7, b"key-007")
    rest = b"\0" + struct.pack("<Qq", 0, 1_700_000_000)
    assert prefix_key_splitter(key_of(TEXT, LONG), 1)(row) == struct.pack("<i", len(prefix)) + prefix + rest


def test_nulls_and_long_decimals_keep_their_places() -> None:
    wide = DecimalType(30, 2)
    # A null text; a null decimal, which keeps its two words; a long.
    row = struct.pack("<QQQq16s", 0b011, 0, 32 << 32, -5, bytes(16))
    prefix = b"\0" + struct.pack("<QQQ16s", 0b11, 0, 24 << 32, bytes(16))
    rest = b"\0" + struct.pack("<Qq", 0, -5)
    assert prefix_key_splitter(key_of(TEXT, wide, LONG), 2)(row) == struct.pack("<i", len(prefix)) + prefix + rest


def test_more_than_64_columns_take_another_word_of_nulls() -> None:
    row = bytes(8) + struct.pack("<Q", 0b10) + struct.pack("<66q", *range(66))
    whole = prefix_key_splitter(key_of(*[LONG] * 66), 1)(row)
    assert whole[4 : 4 + 17] == b"\0" + struct.pack("<Qq", 0, 0)
    assert whole[4 + 17 :] == b"\0" + bytes(8) + struct.pack("<Q", 0b1) + struct.pack("<65q", *range(1, 66))


@pytest.mark.parametrize("columns", [0, 2, 3])
def test_a_part_of_a_key_is_not_all_of_it(columns: int) -> None:
    with pytest.raises(UnsupportedRecordError):
        prefix_key_splitter(key_of(TEXT, LONG), columns)


@pytest.mark.parametrize("row", [b"", bytes(23), struct.pack("<QQq", 0, 24 << 32 | 7, 1)])
def test_a_row_that_cannot_be_is_refused(row: bytes) -> None:
    with pytest.raises(UnsupportedRecordError):
        prefix_key_splitter(key_of(TEXT, LONG), 1)(row)
