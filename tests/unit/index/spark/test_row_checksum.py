"""Row checksums, against values that Spark made."""

import pytest

from index.errors import RowChecksumError
from index.spark.changelog import DELETE, DELETE_RANGE, MERGE, PUT
from index.spark.checksums import (
    split_values,
    unwrap_deleted_key,
    unwrap_record,
    unwrap_value,
    wrap_deleted_key,
    wrap_value,
)

_TABLE = [0] * 256
for _byte in range(256):
    _remainder = _byte
    for _ in range(8):
        _remainder = _remainder >> 1 ^ (0x82F63B78 if _remainder & 1 else 0)
    _TABLE[_byte] = _remainder


def crc32c(data: bytes, crc: int) -> int:
    """Slow and from the definition; `index` itself takes a function."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


KEY = b"\1\0key"
# From KeyValueChecksumEncoder of Spark 4.3.0.
SPARK_VALUES = [
    (b"one", "777de51a030000006f6e65"),
    (b"", "8ecfa35d00000000"),
    (b"\xff\0two", "2cbbe57a05000000ff0074776f"),
]
SPARK_KEY = bytes.fromhex("8ecfa35d01006b6579")


def test_the_crc_of_these_tests_is_crc32c() -> None:
    assert crc32c(b"123456789", 0) == 0xE3069283
    assert crc32c(b"456789", crc32c(b"123", 0)) == 0xE3069283


@pytest.mark.spark_case(55)
@pytest.mark.parametrize("value,stored", SPARK_VALUES)
def test_a_value_is_wrapped_and_unwrapped_as_spark_does(value: bytes, stored: str) -> None:
    assert wrap_value(KEY, value, crc32c).hex() == stored
    assert unwrap_value(KEY, bytes.fromhex(stored), delimiter=b",", crc32c=crc32c) == value


@pytest.mark.spark_case(55)
def test_a_deleted_key_is_wrapped_and_unwrapped_as_spark_does() -> None:
    assert wrap_deleted_key(KEY, crc32c) == SPARK_KEY
    assert unwrap_deleted_key(SPARK_KEY, crc32c) == KEY


@pytest.mark.spark_case(55)
@pytest.mark.parametrize("delimiter", [b",", b""])
def test_values_that_were_merged_are_taken_apart_again(delimiter: bytes) -> None:
    values = [b"one", b"", b"a,b,", b","]
    stored = delimiter.join(wrap_value(KEY, value, crc32c) for value in values)
    assert split_values(KEY, stored, delimiter=delimiter, crc32c=crc32c) == values
    assert unwrap_value(KEY, stored, delimiter=delimiter, crc32c=crc32c) == delimiter.join(values)


@pytest.mark.spark_case(55)
@pytest.mark.parametrize("delimiter", [b",", b""])
def test_every_bit_of_a_row_is_covered(delimiter: bytes) -> None:
    stored = delimiter.join(wrap_value(KEY, value, crc32c) for value in (b"one", b"two"))
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RowChecksumError, match=KEY.hex()):
            split_values(KEY, bytes(damaged), delimiter=delimiter, crc32c=crc32c)
    for length in range(len(stored)):
        if length == len(wrap_value(KEY, b"one", crc32c)):
            continue  # the first value alone is a whole row
        with pytest.raises(RowChecksumError) as error:
            split_values(KEY, stored[:length], delimiter=delimiter, crc32c=crc32c)
        assert error.value.hint
    with pytest.raises(RowChecksumError):
        split_values(KEY + b"x", stored, delimiter=delimiter, crc32c=crc32c)


@pytest.mark.spark_case(55)
def test_a_deleted_key_that_was_changed_is_found() -> None:
    for damaged in (SPARK_KEY[:-1], SPARK_KEY + b"x", b"\0" + SPARK_KEY[1:], SPARK_KEY[:3], b""):
        with pytest.raises(RowChecksumError):
            unwrap_deleted_key(damaged, crc32c)


def test_without_a_crc_lengths_are_checked_and_contents_are_not() -> None:
    wrong = b"\0\0\0\0" + wrap_value(KEY, b"one", crc32c)[4:]
    assert unwrap_value(KEY, wrong, delimiter=b",", crc32c=None) == b"one"
    assert unwrap_deleted_key(b"\0\0\0\0key", None) == b"key"
    with pytest.raises(RowChecksumError, match="length"):
        unwrap_value(KEY, wrong[:-1], delimiter=b",", crc32c=None)


@pytest.mark.spark_case(55)
def test_records_of_a_changelog_are_verified_and_become_what_is_replayed() -> None:
    value = wrap_value(KEY, b"one", crc32c)
    cases = [
        ((PUT, KEY, value), (PUT, KEY, value)),
        ((MERGE, KEY, value), (MERGE, KEY, value)),
        ((DELETE, SPARK_KEY, b""), (DELETE, KEY, b"")),
        ((DELETE_RANGE, KEY, value), (DELETE_RANGE, KEY, b"one")),
    ]
    for record, replayed in cases:
        assert unwrap_record(record, delimiter=b",", crc32c=crc32c) == replayed
        assert unwrap_record(record, delimiter=b",", crc32c=None) == replayed
        kind, key, stored = record
        damaged = (kind, key, stored[:-1] + b"x") if stored else (kind, key[:-1] + b"x", stored)
        with pytest.raises(RowChecksumError):
            unwrap_record(damaged, delimiter=b",", crc32c=crc32c)
