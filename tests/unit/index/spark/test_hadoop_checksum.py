import zlib

import pytest

from index.errors import FileChecksumError
from index.spark.checksums import HadoopSums, hadoop_checksum_bytes, hadoop_checksum_name

DATA = bytes(range(256)) * 5


def stored(data: bytes, chunk_bytes: int = 512) -> bytes:
    """As Hadoop writes it."""
    sums = [zlib.crc32(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    return b"crc\0" + chunk_bytes.to_bytes(4, "big") + b"".join(s.to_bytes(4, "big") for s in sums)


def check(data: bytes, hidden: bytes, piece_bytes: int = 700) -> None:
    sums = HadoopSums(hidden, subject="5.zip")
    for at in range(0, len(data), piece_bytes):
        sums.update(data[at : at + piece_bytes])
    sums.finish()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, len(DATA)])
@pytest.mark.parametrize("piece_bytes", [1, 512, 700, 4096])
def test_a_file_fits_the_checksum_that_was_written_for_it(size: int, piece_bytes: int) -> None:
    check(DATA[:size], stored(DATA[:size]), piece_bytes)
    assert len(stored(DATA[:size])) == hadoop_checksum_bytes(size)


def test_a_file_that_spark_wrote_fits() -> None:
    """`commits/0` of a query of Spark 4.3 on a local directory, and `commits/.0.crc`."""
    ids = '{"0":[["6facd28e-b018-485e-8aa0-182975da9c28"]]}'
    commit = f'v2\n{{"nextBatchWatermarkMs":0,"stateUniqueIds":{ids}}}'.encode()
    check(commit, bytes.fromhex("6372630000000200bd6ac6bd"))


@pytest.mark.parametrize("at", range(0, len(DATA), 97))
def test_any_other_byte_is_found(at: int) -> None:
    altered = bytearray(DATA)
    altered[at] ^= 0x40
    with pytest.raises(FileChecksumError, match=f"from byte {at // 512 * 512} on"):
        check(bytes(altered), stored(DATA))


@pytest.mark.parametrize("size", [0, 512, 1000, 1024, len(DATA) - 1])
def test_a_file_that_was_cut_short_is_found(size: int) -> None:
    with pytest.raises(FileChecksumError):
        check(DATA[:size], stored(DATA))


@pytest.mark.parametrize("more", [b"x", b"x" * 600, b"x" * 5000])
def test_a_file_that_was_continued_is_found(more: bytes) -> None:
    with pytest.raises(FileChecksumError):
        check(DATA[:1024] + more, stored(DATA[:1024]))


@pytest.mark.parametrize(
    "hidden",
    [b"", b"crc\0", b"crd\0\x00\x00\x02\x00", b"crc\0\x00\x00\x00\x00", b"crc\0\xff\xff\xff\xff", stored(DATA)[:-1]],
)
def test_what_is_no_checksum_file_is_refused(hidden: bytes) -> None:
    with pytest.raises(FileChecksumError, match="none of Hadoop's"):
        HadoopSums(hidden, subject="5.zip")


def test_it_is_hidden_beside_its_file() -> None:
    assert hadoop_checksum_name("5.zip") == ".5.zip.crc"
