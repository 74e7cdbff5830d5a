"""Real SSTs of every form that rocksdict writes, and each byte of small ones altered (design 0005, K3)."""

import os
from pathlib import Path
from typing import Any

import pytest
from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    ChecksumType,
    DBCompressionType,
    Options,
    Rdict,
    SstFileWriter,
)

from engine.checkpoint.file_check import SstReport, check_sst
from engine.errors import DamagedError
from engine.local.checksums import BLOCK_SUMS
from index.rocksdb.sst import CRC32C, MAGIC

GOLDEN = Path(__file__).parents[3] / "golden" / "spark"
COMPRESSIONS = ("none", "snappy", "zlib", "bz2", "lz4", "lz4hc", "zstd")


def write_sst(
    directory: Path,
    *,
    rows: int = 300,
    value_bytes: int = 40,
    compression: str = "lz4",
    version: int = 5,
    checksum: str = "xxh3",
    restart_interval: int = 1,
    partitioned: bool = False,
    deleted: bool = False,
    dictionary_bytes: int = 0,
) -> Path:
    """One SST, as RocksDB flushes it."""
    blocks = BlockBasedOptions()
    blocks.set_block_size(512)
    blocks.set_format_version(version)
    blocks.set_bloom_filter(10, block_based=False)
    blocks.set_checksum_type(getattr(ChecksumType, checksum)())
    blocks.set_index_block_restart_interval(restart_interval)
    if partitioned:
        blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
        blocks.set_partition_filters(True)
        blocks.set_metadata_block_size(64)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(getattr(DBCompressionType, compression)())
    if dictionary_bytes:
        options.set_compression_options(-14, 3, 0, dictionary_bytes)
    store = Rdict(str(directory), options)
    for number in range(rows):
        store[b"key-%06d" % number] = (b"%d" % number * value_bytes)[:value_bytes]
    if deleted:
        store.delete_range(b"key-000010", b"key-000020")
    store.flush()
    store.close()
    (path,) = directory.glob("*.sst")
    return path


def is_damaged(path: Path) -> bool:
    try:
        check_sst(path)
    except DamagedError as error:
        return error.subject == str(path)
    return False


def check_flips(path: Path) -> None:
    """Every byte altered, those of the footer in two ways: each is found."""
    data = path.read_bytes()
    unseen = []
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            for mask in (0x01, 0x80) if at >= len(data) - 60 else (1 << at % 8,):
                os.pwrite(file.fileno(), bytes([byte ^ mask]), at)
                if not is_damaged(path):
                    unseen.append(at)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert not unseen
    assert not check_sst(path).unchecked


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("version", [0, 5])
def test_whole_files_of_every_compression_pass(tmp_path: Path, compression: str, version: int) -> None:
    report = check_sst(write_sst(tmp_path / "db", compression=compression, version=version))
    assert not report.unchecked
    # Properties, metaindex, index and filter beside those of the data.
    assert report.blocks > 30


@pytest.mark.parametrize("checksum", ["crc32c", "xxhash", "xxhash64", "xxh3"])
@pytest.mark.parametrize("version", [3, 4, 6])
@pytest.mark.parametrize("partitioned", [False, True], ids=["whole", "partitioned"])
def test_whole_files_of_every_form_pass(tmp_path: Path, checksum: str, version: int, partitioned: bool) -> None:
    form: dict[str, Any] = {"version": version, "partitioned": partitioned, "restart_interval": 4 * partitioned + 1}
    report = check_sst(write_sst(tmp_path / "db", checksum=checksum, **form))
    assert not report.unchecked
    assert (report.blocks > 40) == partitioned


@pytest.mark.parametrize(
    "form, data_blocks",
    [
        ({"rows": 0, "deleted": True}, 0),
        ({"rows": 1}, 1),
        ({"rows": 3000, "deleted": True}, 333),
        ({"rows": 3000, "compression": "zstd", "dictionary_bytes": 2048}, 334),
        # Larger than what is read at once.
        ({"rows": 3, "value_bytes": 3_000_000, "compression": "none"}, 3),
        ({"rows": 3, "value_bytes": 3_000_000, "compression": "none", "checksum": "crc32c", "version": 6}, 3),
        ({"rows": 3, "value_bytes": 3_000_000, "compression": "none", "checksum": "xxhash64"}, 3),
    ],
)
def test_whole_files_of_every_size_pass(tmp_path: Path, form: dict[str, Any], data_blocks: int) -> None:
    path = write_sst(tmp_path / "db", **form)
    report = check_sst(path)
    others = report.blocks - data_blocks
    assert not report.unchecked
    # Metaindex, properties and index; a filter, what is deleted by range, and a dictionary.
    assert 3 <= others <= 6


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/state/0/0/SSTs/*.sst")), ids=lambda path: path.parts[-6])
def test_files_that_spark_wrote_pass(path: Path) -> None:
    assert not check_sst(path).unchecked


@pytest.mark.parametrize(
    "form",
    [
        {"rows": 40},
        {"rows": 40, "version": 6},
        {"rows": 0, "deleted": True},
        {"rows": 20, "version": 0, "checksum": "crc32c", "compression": "zlib"},
        {"rows": 40, "version": 4, "checksum": "xxhash", "restart_interval": 16},
        {"rows": 20, "version": 6, "checksum": "xxhash64", "compression": "none"},
        {"rows": 70, "partitioned": True, "restart_interval": 4},
    ],
    ids=lambda form: "-".join(map(str, form.values())),
)
def test_each_byte_that_is_altered_is_found(tmp_path: Path, form: dict[str, Any]) -> None:
    check_flips(write_sst(tmp_path / "db", **form))


def test_each_byte_of_a_file_of_sparks_that_is_altered_is_found(tmp_path: Path) -> None:
    path = tmp_path / "golden.sst"
    path.write_bytes(next(iter(GOLDEN.glob("lost-attempts/state/0/0/SSTs/*.sst"))).read_bytes())
    check_flips(path)


def test_a_file_that_was_cut_short_or_continued_is_damaged(tmp_path: Path) -> None:
    path = write_sst(tmp_path / "db", rows=40)
    data = path.read_bytes()
    for altered in (b"", data[:20], data[:-1], data[: len(data) // 2], data + b"\0", b"\0" + data, data[:600] + data):
        path.write_bytes(altered)
        with pytest.raises(DamagedError):
            check_sst(path)


def test_the_error_says_which_block_it_is(tmp_path: Path) -> None:
    path = write_sst(tmp_path / "db", compression="none")
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"data block at offset 2945 of 486 bytes does not fit its checksum"):
        check_sst(path)


def test_a_block_of_another_place_is_found_only_by_checksums_of_places(tmp_path: Path) -> None:
    path = write_sst(tmp_path / "db", compression="none", version=6)
    data = path.read_bytes()
    swapped = data[548:1096] + data[:548] + data[1096:]
    path.write_bytes(swapped)
    with pytest.raises(DamagedError, match="data block at offset 0"):
        check_sst(path)


def test_a_number_that_an_ingestion_wrote_into_a_file_is_no_damage(tmp_path: Path) -> None:
    """As by `write_global_seqno`: it is written after the checksum."""
    path = tmp_path / "written.sst"
    writer = SstFileWriter(Options(raw_mode=True))
    writer.open(str(path))
    writer[b"a"] = b"1"
    writer.finish()
    before, name, after = path.read_bytes().partition(b"_file.global_seqno")
    path.write_bytes(before + name + b"\2" + after[1:])
    assert check_sst(path).blocks == 4
    path.write_bytes(before[:-1] + b"\0" + name + b"\2" + after[1:])
    assert is_damaged(path)


@pytest.mark.parametrize("version", [5, 6])
def test_a_file_without_checksums_is_no_damage_and_not_checked(tmp_path: Path, version: int) -> None:
    report = check_sst(write_sst(tmp_path / "db", checksum="no_checksum", version=version))
    assert "no checksums" in report.unchecked


def test_a_table_of_another_kind_is_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "000007.sst"
    path.write_bytes(bytes(100) + 0x8242229663BF9564.to_bytes(8, "little"))
    assert check_sst(path) == SstReport(unchecked="is a plain table, which has no checksums of blocks")


def test_a_file_that_is_not_there_is_reported_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="cannot be read") as raised:
        check_sst(tmp_path / "000007.sst")
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_what_is_no_file_is_no_damage_that_goes_unnamed(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="cannot be read"):
        check_sst(tmp_path)


def small_block(*entries: tuple[bytes, bytes]) -> bytes:
    """A block as it is in a file, of entries shorter than 128 bytes."""
    listed = b"".join(bytes((0, len(key), len(value))) + key + value for key, value in entries)
    contents = listed + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\0"
    return contents + BLOCK_SUMS[CRC32C](contents).to_bytes(4, "little")


@pytest.mark.parametrize("repeated", ["partition", "block"])
def test_an_index_of_two_levels_leads_nowhere_twice(tmp_path: Path, repeated: str) -> None:
    """Each block again and again would be read for as long as a file's author likes."""
    data = small_block((b"k", b"v"))
    handle = bytes((0, len(data) - 5))
    body = data
    places = []
    for _ in range(2):
        places.append(bytes((len(body), len(small_block((b"", handle))) - 5)))
        body += small_block((b"", handle))
    places = [places[0]] * 2 if repeated == "partition" else places

    def add(block: bytes) -> bytes:
        nonlocal body
        found = varint(len(body)) + varint(len(block) - 5)
        body += block
        return found

    index = add(small_block(*((b"", place) for place in places)))
    form = ((b"rocksdb.block.based.table.index.type", b"\2\0\0\0"),)
    properties = add(small_block(*form))
    metaindex = add(small_block((b"rocksdb.properties", properties)))
    path = tmp_path / "1.sst"
    end = (5).to_bytes(4, "little") + MAGIC.to_bytes(8, "little")
    path.write_bytes(body + bytes([CRC32C]) + (metaindex + index).ljust(40, b"\0") + end)
    with pytest.raises(DamagedError, match="leads back to offset"):
        check_sst(path)


def varint(number: int) -> bytes:
    return bytes((number,)) if number < 128 else bytes((number & 127 | 128, number >> 7))
