"""Real SSTs, made by RocksDB, and bytes that no RocksDB wrote."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rocksdict import (
    BlockBasedOptions,
    Checkpoint,
    ChecksumType,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
)

from index.rocksdb.sst import TAIL_BYTES, TAIL_BYTES_MAX, MoreBytesNeeded, SstCounts, parse_sst_counts, parse_sst_tail
from index.snapshot.dir_diff import is_same_file
from index.snapshot.model import SstIdentity
from tests.unit.index.builders import file_index, local_file

COMPRESSIONS: dict[str, Callable[[], DBCompressionType]] = {
    "none": DBCompressionType.none,
    "snappy": DBCompressionType.snappy,
    "lz4": DBCompressionType.lz4,
    "zlib": DBCompressionType.zlib,
    "zstd": DBCompressionType.zstd,
}
CHECKSUMS: dict[str, Callable[[], ChecksumType]] = {
    "none": ChecksumType.no_checksum,
    "crc32c": ChecksumType.crc32c,
    "xxhash": ChecksumType.xxhash,
    "xxhash64": ChecksumType.xxhash64,
    "xxh3": ChecksumType.xxh3,
}


def options(
    *,
    format_version: int | None = None,
    compression: str = "snappy",
    checksum: str | None = None,
    filters: bool = False,
) -> Options:
    result = Options(raw_mode=True)
    blocks = BlockBasedOptions()
    if format_version is not None:
        blocks.set_format_version(format_version)
    if checksum is not None:
        blocks.set_checksum_type(CHECKSUMS[checksum]())
    if filters:
        blocks.set_bloom_filter(10, False)
    result.set_block_based_table_factory(blocks)
    result.set_compression_type(COMPRESSIONS[compression]())
    return result


def make_ssts(directory: Path, opened_with: Options, keys: int = 300) -> list[Path]:
    db = Rdict(str(directory), opened_with)
    for n in range(keys):
        db[b"%08d" % n] = os.urandom(20)
    db.flush()
    db.close()
    return sorted(directory.glob("*.sst"))


def read_identity(path: Path, tail_bytes: int = TAIL_BYTES) -> SstIdentity | None:
    """As the engine does it: a small read at the tail, and more where that is asked for."""
    data = path.read_bytes()
    for _ in range(4):
        answer = parse_sst_tail(data[-tail_bytes:], len(data))
        if not isinstance(answer, MoreBytesNeeded):
            return answer
        assert tail_bytes < answer.tail_bytes <= len(data)
        tail_bytes = answer.tail_bytes
    pytest.fail("asked for more bytes again and again")


@pytest.fixture(scope="module")
def sst(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    (path,) = make_ssts(tmp_path_factory.mktemp("db"), options())
    return path.read_bytes()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("format_version", [None, 2, 5, 6])
def test_identity_of_a_real_sst_is_read(tmp_path: Path, format_version: int | None, compression: str) -> None:
    (path,) = make_ssts(tmp_path, options(format_version=format_version, compression=compression))
    identity = read_identity(path)
    assert identity is not None
    assert len(identity.session_id) == 20
    assert f"{identity.file_number:06d}" == path.stem
    assert read_identity(path, 1) == identity


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize("format_version", [0, 1, 4, 6])
def test_checksum_type_makes_no_difference(tmp_path: Path, format_version: int, checksum: str) -> None:
    (path,) = make_ssts(tmp_path, options(format_version=format_version, checksum=checksum, filters=True))
    identity = read_identity(path)
    assert identity is not None
    assert f"{identity.file_number:06d}" == path.stem


def test_entries_tombstones_and_bytes_are_as_they_were_written(tmp_path: Path) -> None:
    db = Rdict(str(tmp_path / "db"), options(compression="lz4"))
    for n in range(200):
        db[b"%08d" % n] = b"v" * 50
    db.flush()
    for n in range(30):
        del db[b"%08d" % n]
    db[b"00000150"] = b"other"
    db.flush()
    db.close()
    found = [parse_sst_counts(path.read_bytes()[-TAIL_BYTES:], path.stat().st_size) for path in tmp_path.rglob("*.sst")]
    assert sorted(found, key=lambda of: -of.entries) == [  # type: ignore[union-attr]
        SstCounts(entries=200, deletions=0, raw_bytes=200 * 58),
        SstCounts(entries=31, deletions=30, raw_bytes=31 * 8 + 5),
    ]


def test_two_forks_with_one_name_and_size_differ(tmp_path: Path) -> None:
    """The case for which name and size do not identify a file (design 0002, I1)."""
    origin = tmp_path / "origin"
    db = Rdict(str(origin), options())
    db[b"k"] = b"v"
    db.flush()
    for fork in ("a", "b"):
        checkpoint = Checkpoint(db)
        checkpoint.create_checkpoint(str(tmp_path / fork))
    db.close()
    before = {path.name for path in (tmp_path / "a").glob("*.sst")}
    for seed, fork in enumerate(("a", "b")):
        random_bytes = random.Random(seed)
        db = Rdict(str(tmp_path / fork), options(compression="none"))
        for n in range(2000):
            db[b"%08d" % n] = random_bytes.randbytes(50)
        db.flush()
        db.close()

    (a,) = [path for path in (tmp_path / "a").glob("*.sst") if path.name not in before]
    b = tmp_path / "b" / a.name
    assert b.stat().st_size == a.stat().st_size
    assert b.read_bytes() != a.read_bytes()
    one, other = read_identity(a), read_identity(b)
    assert one is not None
    assert other is not None
    assert one.file_number == other.file_number
    assert one.session_id != other.session_id

    local = local_file(a.name, a.read_bytes(), sst=one, identified=False)
    assert is_same_file(local, file_index(a.name, a.read_bytes(), sst=one))
    assert not is_same_file(local, file_index(a.name, b.read_bytes(), sst=other))


def test_hard_linked_sst_keeps_its_identity(tmp_path: Path) -> None:
    db = Rdict(str(tmp_path / "db"), options())
    db[b"k"] = b"v"
    db.flush()
    Checkpoint(db).create_checkpoint(str(tmp_path / "checkpoint"))
    db.close()
    (path,) = (tmp_path / "db").glob("*.sst")
    assert read_identity(tmp_path / "checkpoint" / path.name) == read_identity(path)


def test_ingested_sst_keeps_the_identity_of_its_writer(tmp_path: Path) -> None:
    """The number in the properties is the writer's, not that of the file's new name."""
    written = tmp_path / "written.sst"
    writer = SstFileWriter(options=options())
    writer.open(str(written))
    for n in range(10):
        writer[b"%04d" % n] = b"v"
    writer.finish()
    identity = read_identity(written)
    assert identity is not None

    db = Rdict(str(tmp_path / "db"), options())
    db[b"k"] = b"v"
    db.flush()
    db.ingest_external_file([str(written)], IngestExternalFileOptions())
    db.close()
    ssts = sorted((tmp_path / "db").glob("*.sst"))
    assert identity in [read_identity(path) for path in ssts]
    assert len({read_identity(path) for path in ssts}) == len(ssts) == 2


def test_sequence_number_written_by_an_ingestion_voids_the_identity() -> None:
    """Two stores that ingest one file at two sequence numbers hold different bytes."""
    name = b"rocksdb.external_sst_file.global_seqno"
    without = sst_of({**PROPERTIES, name: bytes(8)})
    assert parse_sst_tail(without, len(without)) == IDENTITY
    with_it = sst_of({**PROPERTIES, name: b"\x07" + bytes(7)})
    assert parse_sst_tail(with_it, len(with_it)) is None


PROPERTIES = {
    b"rocksdb.creating.session.identity": b"RCQT39JY6E1U4N923P4Y",
    b"rocksdb.original.file.number": b"\x91\x01",
}
IDENTITY = SstIdentity("RCQT39JY6E1U4N923P4Y", 145)
MAGIC = 0x88E241B785F4CFF7
MAGIC_LEGACY = 0xDB4775248B80FB57


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def common_prefix(a: bytes, b: bytes) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def block(entries: dict[bytes, bytes], *, shared: bool = False, compression: int = 0) -> bytes:
    body, previous = b"", b""
    for key, value in sorted(entries.items()):
        common = common_prefix(previous, key) if shared else 0
        body += varint(common) + varint(len(key) - common) + varint(len(value)) + key[common:] + value
        previous = key
    return body + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes((compression, 1, 2, 3, 4))


def sst_of(
    properties: dict[bytes, bytes],
    *,
    version: int = 5,
    shared: bool = False,
    compression: int = 0,
    padding: int = 100,
    metaindex: dict[bytes, bytes] | None = None,
) -> bytes:
    """A table as `table/format.cc` describes it, without any data block."""
    props = block(properties, shared=shared, compression=compression)
    handle = varint(padding) + varint(len(props) - 5)
    meta = block({b"rocksdb.properties": handle} if metaindex is None else metaindex)
    body = bytes(padding) + props + meta
    meta_handle = varint(padding + len(props)) + varint(len(meta) - 5)
    if version == 0:
        return body + meta_handle.ljust(40, b"\0") + MAGIC_LEGACY.to_bytes(8, "little")
    if version < 6:
        middle = meta_handle.ljust(40, b"\0")
    else:
        middle = b"\x3e\x00\x7a\x00" + bytes(8) + (len(meta) - 5).to_bytes(4, "little") + bytes(24)
    return body + b"\1" + middle + version.to_bytes(4, "little") + MAGIC.to_bytes(8, "little")


@pytest.mark.parametrize("version", [0, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("shared", [False, True])
def test_every_footer_and_key_compression_is_read(version: int, shared: bool) -> None:
    data = sst_of(PROPERTIES, version=version, shared=shared)
    assert parse_sst_tail(data, len(data)) == IDENTITY


def test_more_bytes_are_asked_for_until_they_suffice() -> None:
    data = sst_of({**PROPERTIES, b"user.collected": b"x" * 300_000})
    asked = []
    tail = 10
    while isinstance(answer := parse_sst_tail(data[-tail:], len(data)), MoreBytesNeeded):
        asked.append(answer.tail_bytes)
        tail = answer.tail_bytes
    assert answer == IDENTITY
    assert len(asked) == 3
    assert asked == sorted(asked)


def test_properties_out_of_reach_are_none() -> None:
    data = sst_of({**PROPERTIES, b"user.collected": b"x" * TAIL_BYTES_MAX})
    assert parse_sst_tail(data[-TAIL_BYTES:], len(data)) is None


NO_IDENTITY = [
    ("nothing", b""),
    ("not an SST", b"MANIFEST-000005\n"),
    ("zeros", bytes(4096)),
    ("a plain table", bytes(100) + (0x8242229663BF9564).to_bytes(8, "little")),
    ("a footer alone", sst_of(PROPERTIES)[-53:]),
    ("a magic alone", MAGIC.to_bytes(8, "little")),
    ("a legacy magic alone", MAGIC_LEGACY.to_bytes(8, "little")),
    ("no session id", sst_of({b"rocksdb.original.file.number": b"\x05"})),
    ("empty session id", sst_of({**PROPERTIES, b"rocksdb.creating.session.identity": b""})),
    ("session id of another form", sst_of({**PROPERTIES, b"rocksdb.creating.session.identity": b"\xff" * 20})),
    ("no file number", sst_of({b"rocksdb.creating.session.identity": b"RCQT39JY6E1U4N923P4Y"})),
    ("file number 0", sst_of({**PROPERTIES, b"rocksdb.original.file.number": b"\0"})),
    ("file number of 64 bits", sst_of({**PROPERTIES, b"rocksdb.original.file.number": b"\xff" * 9 + b"\x01"})),
    ("file number without end", sst_of({**PROPERTIES, b"rocksdb.original.file.number": b"\xff" * 11})),
    ("compressed properties", sst_of(PROPERTIES, compression=1)),
    ("no properties block", sst_of(PROPERTIES, metaindex={b"rocksdb.stats": b"\0\0"})),
    ("properties beyond the end", sst_of(PROPERTIES, metaindex={b"rocksdb.properties": b"\0" + varint(2**40)})),
    ("properties at the end of time", sst_of(PROPERTIES, metaindex={b"rocksdb.properties": varint(2**63) * 2})),
    ("handle cut short", sst_of(PROPERTIES, metaindex={b"rocksdb.properties": b"\x80"})),
    ("footer v6 without its magic", sst_of(PROPERTIES, version=6).replace(b"\x3e\x00\x7a\x00", bytes(4))),
]


@pytest.mark.parametrize("_shows,data", NO_IDENTITY, ids=[row[0] for row in NO_IDENTITY])
def test_file_without_identity_is_none(_shows: str, data: bytes) -> None:
    assert parse_sst_tail(data, len(data)) is None


def test_tail_longer_than_its_file_is_none(sst: bytes) -> None:
    assert parse_sst_tail(sst, len(sst) - 1) is None


def damaged(sst: bytes) -> Iterator[bytes]:
    """The last 1,200 bytes, each with three other values: footer, both meta blocks and what is before them."""
    for position in range(max(0, len(sst) - 1200), len(sst)):
        for flip in (0x01, 0x80, 0xFF):
            yield sst[:position] + bytes((sst[position] ^ flip,)) + sst[position + 1 :]


def test_damaged_bytes_never_raise(sst: bytes) -> None:
    for data in damaged(sst):
        answer = parse_sst_tail(data[-TAIL_BYTES:], len(data))
        if isinstance(answer, MoreBytesNeeded):
            assert TAIL_BYTES < answer.tail_bytes <= min(len(data), TAIL_BYTES_MAX)
            assert parse_sst_tail(data, len(data)) is None or isinstance(parse_sst_tail(data, len(data)), SstIdentity)


def test_cut_bytes_never_raise(sst: bytes) -> None:
    for size in range(len(sst)):
        data = sst[:size]
        assert parse_sst_tail(data[-TAIL_BYTES:], len(data)) is None
