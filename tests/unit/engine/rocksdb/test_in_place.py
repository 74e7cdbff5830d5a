"""What is read in place is what RocksDB reads (design 0013); RocksDB is the judge."""

import asyncio
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    ChecksumType,
    DataBlockIndexType,
    DBCompressionType,
    Options,
    Rdict,
    WriteOptions,
)

from engine.errors import DamagedError, NotFoundError, UsageError
from engine.local.checksums import BLOCK_SUMS
from engine.rocksdb.in_place import StoreInPlace
from engine.rocksdb.live import LiveReader
from engine.rocksdb.merge import read_parent
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.sst_table import BlockCache
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from index.errors import UnknownFormatError
from index.rocksdb.lookup import BlockIndex, decode_deleted_ranges, decode_versions
from index.rocksdb.sst import IndexForm, checksum_modifier, decode_footer

Rows = dict[bytes, bytes]
OPERANDS = Path(__file__).parents[3] / "golden" / "spark_operands"


class LocalRanges:
    """Files of a directory; counts what is read."""

    def __init__(self, directory: Path) -> None:
        self.location = str(directory)
        self.requests: list[tuple[str, int, int]] = []
        self._directory = directory

    def names(self) -> Iterable[str]:
        return [path.name for path in self._directory.iterdir()]

    def size_bytes(self, name: str) -> int:
        try:
            return (self._directory / name).stat().st_size
        except FileNotFoundError as error:
            raise NotFoundError("is not there", operation="read", subject=name) from error

    async def read(self, name: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        del fresh
        self.requests.append((name, start, size_bytes))
        with (self._directory / name).open("rb") as file:
            file.seek(start)
            data = file.read(size_bytes)
        assert len(data) == size_bytes
        return data


def key(rng: random.Random, spread: int) -> bytes:
    number = rng.randrange(spread)
    # Of all the lengths that filters hash in ways of their own.
    return b"%06d" % number + b"x" * (number * 7 % 260 if number % 5 == 0 else 0)


def chosen_options(rng: random.Random) -> Options:
    """Options of a store, of small files and of all forms of tables that are read in place."""
    options = Options(raw_mode=True)
    options.set_write_buffer_size(64 << 20)
    options.set_target_file_size_base(rng.choice([4096, 65536, 64 << 20]))
    options.set_max_bytes_for_level_base(rng.choice([16384, 1 << 20]))
    options.set_level_zero_file_num_compaction_trigger(rng.choice([2, 4, 100]))
    compressions = [DBCompressionType.none, DBCompressionType.lz4, DBCompressionType.zstd, DBCompressionType.snappy]
    options.set_compression_type(rng.choice(compressions)())
    blocks = BlockBasedOptions()
    blocks.set_block_size(rng.choice([128, 1024, 4096]))
    blocks.set_format_version(rng.choice([2, 4, 5, 6]))
    blocks.set_checksum_type(rng.choice([ChecksumType.crc32c(), ChecksumType.xxhash(), ChecksumType.xxh3()]))
    if rng.random() < 0.7:
        blocks.set_bloom_filter(rng.choice([3, 10, 20]), block_based=False)
    if rng.random() < 0.3:
        blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
        blocks.set_metadata_block_size(256)
        blocks.set_partition_filters(rng.random() < 0.5)
    options.set_block_based_table_factory(blocks)
    return options


def write(db: Rdict, rng: random.Random, how: WriteOptions, spread: int) -> None:
    """Put a row, or delete one or a range of them."""
    of, kind = key(rng, spread), rng.random()
    if kind < 0.02:
        start, stop = sorted([of, key(rng, spread)])
        if start < stop:
            db.delete_range(start, stop, how)
    elif kind < 0.2:
        db.delete(of, how)
    else:
        db.put(of, rng.randbytes(rng.choice([0, 5, 300])), how)


def write_store(directory: Path, seed: int) -> None:
    """Write a store of several levels, of options and with writes that the seed chooses."""
    rng = random.Random(seed)
    is_logged, spread = rng.random() < 0.5, rng.choice([50, 2000])
    how = WriteOptions()
    how.disable_wal = not is_logged  # type: ignore[method-assign,assignment]  # rocksdict's stub errs
    db = Rdict(str(directory), chosen_options(rng))
    snapshots: list[Any] = []
    for turn in range(rng.randrange(1, 9)):
        for _ in range(rng.randrange(1, 400)):
            write(db, rng, how, spread)
            # Older versions of keys stay in the files while somebody could read them.
            if rng.random() < 0.01:
                snapshots.append(db.snapshot())
        if not is_logged or rng.random() < 0.5:
            db.flush()
        if turn % 3 == 2 and rng.random() < 0.5:
            begin, end = sorted([key(rng, spread), key(rng, spread)])
            db.compact_range(begin, end)
    del snapshots
    if is_logged:  # closing it would leave no rows in its log
        db.flush_wal(sync=True)
        copy = directory.with_name("copy")
        copy.mkdir()
        LiveReader(directory).copy(copy)
        db.close()
        shutil.rmtree(directory)
        copy.rename(directory)
    else:
        db.close()


def rows_of(directory: Path, merge_delimiter: bytes | None = None) -> Rows:
    with StoreReader.open(directory, RocksDbSettings(merge_delimiter=merge_delimiter)) as reader:
        return dict(reader.items())


def check_store(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    expected = rows_of(directory)
    everything = sorted(expected)

    async def check() -> None:
        store = await StoreInPlace.open(LocalRanges(directory), cache_bytes=rng.choice([0, 10_000, 1 << 26]))
        found = [row async for rows in store.chunks() for row in rows]
        assert found == sorted(expected.items())
        wanted = {key(rng, 2000) for _ in range(30)} | set(rng.sample(everything, min(30, len(everything))))
        for of in wanted:
            assert await store.get(of) == expected.get(of), of
        start, stop = sorted([key(rng, 2000), key(rng, 2000)])
        found = [row async for rows in store.chunks(start=start, stop=stop) for row in rows]
        assert found == [row for row in sorted(expected.items()) if start <= row[0] < stop]

    asyncio.run(check())


@pytest.mark.parametrize("seed", range(25))
def test_random_stores_are_read_as_rocksdb_reads_them(tmp_path: Path, seed: int) -> None:
    write_store(tmp_path / "store", seed)
    check_store(tmp_path / "store", seed)


def test_some_of_these_stores_have_rows_in_a_log_and_some_delete_ranges(tmp_path: Path) -> None:
    logs, ranges = 0, 0
    for seed in range(25):
        write_store(tmp_path / "store", seed)
        logs += any(log.stat().st_size for log in (tmp_path / "store").glob("*.log"))
        if not any(log.stat().st_size for log in (tmp_path / "store").glob("*.log")):
            ranges += bool(read_parent(tmp_path / "store").range_deletions)
        shutil.rmtree(tmp_path / "store")
    assert min(logs, ranges) > 3, (logs, ranges)


def unlogged() -> WriteOptions:
    how = WriteOptions()
    how.disable_wal = True  # type: ignore[method-assign,assignment]  # rocksdict's stub errs
    return how


async def test_a_file_that_only_deletes_ranges_is_read(tmp_path: Path) -> None:
    options = Options(raw_mode=True)
    options.set_disable_auto_compactions(True)
    db = Rdict(str(tmp_path / "store"), options)
    for n in range(10):
        db.put(b"k%d" % n, b"v", unlogged())
    db.flush()
    db.delete_range(b"k3", b"k6", unlogged())
    db.flush()
    db.close()
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    found = [row[0] async for rows in store.chunks() for row in rows]
    assert found == [b"k%d" % n for n in (0, 1, 2, 6, 7, 8, 9)]
    assert [await store.get(b"k%d" % n) for n in (2, 3, 5, 6)] == [b"v", None, None, b"v"]


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Two logs: of the first one a column family still needs rows."""
    db = Rdict(str(tmp_path / "open"), Options(raw_mode=True))
    other = db.create_column_family("a", Options(raw_mode=True))
    for n in range(5):
        db[b"k%d" % n] = b"v" * 50
    other[b"a"] = b"1"
    other.flush()
    for n in range(5, 8):
        db[b"k%d" % n] = b"v" * 50
    db.flush_wal(sync=True)
    (tmp_path / "store").mkdir()
    LiveReader(tmp_path / "open").copy(tmp_path / "store")
    other.close()
    db.close()
    assert len(logs_of(tmp_path / "store")) == 2
    return tmp_path / "store"


def logs_of(store: Path) -> list[Path]:
    return sorted(path for path in store.glob("*.log") if path.stat().st_size)


async def test_a_log_is_read_and_one_that_is_not_whole_is_not_guessed(logged: Path) -> None:
    store = await StoreInPlace.open(LocalRanges(logged))
    assert [row[0] async for rows in store.chunks() for row in rows] == [b"k%d" % n for n in range(8)]
    assert await store.get(b"a", "a") == b"1"
    first, last = logs_of(logged)
    whole = last.read_bytes()
    last.write_bytes(whole[:-10])
    store = await StoreInPlace.open(LocalRanges(logged))
    assert [row[0] async for rows in store.chunks() for row in rows] == [b"k%d" % n for n in range(7)]
    last.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(UnknownFormatError, match="write-ahead log that is not read") as caught:
        await StoreInPlace.open(LocalRanges(logged))
    assert "restore" in caught.value.hint
    last.write_bytes(whole)
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(UnknownFormatError, match="cut before the next one"):
        await StoreInPlace.open(LocalRanges(logged))


async def test_logs_that_would_take_too_much_memory_are_refused(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of_logs = sum(log.stat().st_size for log in logs_of(logged))
    monkeypatch.setattr("engine.rocksdb.in_place._LOGGED_BYTES_MAX", bytes_of_logs + 9 * 200)
    await StoreInPlace.open(LocalRanges(logged))
    monkeypatch.setattr("engine.rocksdb.in_place._LOGGED_BYTES_MAX", bytes_of_logs + 9 * 200 - 1)
    with pytest.raises(UnknownFormatError, match="more writes than are held in memory"):
        await StoreInPlace.open(LocalRanges(logged))


async def test_records_of_the_log_that_was_in_a_file_before_are_not_rows(tmp_path: Path) -> None:
    """Until its first write a log that takes the place of an older one has the records of that one."""
    options = Options(raw_mode=True)
    options.set_recycle_log_file_num(1)
    db = Rdict(str(tmp_path / "open"), options)
    for value in (b"old", b"new"):
        db[b"k"] = value
        db[b"gone"] = value
        db.flush()
    del db[b"gone"]
    db.flush()
    (tmp_path / "store").mkdir()
    LiveReader(tmp_path / "open").copy(tmp_path / "store")
    db.close()
    (log,) = logs_of(tmp_path / "store")
    assert b"new" in log.read_bytes()
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    assert [row async for rows in store.chunks() for row in rows] == [(b"k", b"new")]
    assert (await store.get(b"k"), await store.get(b"gone")) == (b"new", None)


async def test_keys_that_are_not_in_order_are_damage(tmp_path: Path) -> None:
    """As by a hostile writer, who writes the checksum too."""
    options = Options(raw_mode=True)
    options.set_compression_type(DBCompressionType.none())
    blocks = BlockBasedOptions()
    blocks.set_format_version(5)
    options.set_block_based_table_factory(blocks)
    db = Rdict(str(tmp_path / "store"), options)
    for name in (b"bkey", b"ckey", b"dkey"):
        db.put(name, b"v", unlogged())
    db.flush()
    db.close()
    (sst,) = (tmp_path / "store").glob("*.sst")
    data = sst.read_bytes()
    summed = BLOCK_SUMS[decode_footer(data[-53:], len(data)).checksum]
    # The first block of the file has all rows.
    end = next(n for n in range(1, len(data)) if summed(data[:n]) == int.from_bytes(data[n : n + 4], "little"))
    block = data[:end].replace(b"dkey", b"akey")
    sst.write_bytes(block + summed(block).to_bytes(4, "little") + data[end + 4 :])
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    with pytest.raises(DamagedError, match="behind a greater one"):
        [rows async for rows in store.chunks()]


def write_sst(directory: Path, rows: Rows, *, two_levels: bool = False, version: int = 5) -> Path:
    """Write a store of one file, in which a row has a block of its own."""
    options = Options(raw_mode=True)
    options.set_compression_type(DBCompressionType.zstd())
    blocks = BlockBasedOptions()
    blocks.set_format_version(version)
    blocks.set_block_size(1)
    if two_levels:
        blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
        blocks.set_metadata_block_size(1)
    options.set_block_based_table_factory(blocks)
    db = Rdict(str(directory), options)
    for of, value in rows.items():
        db.put(of, value, unlogged())
    db.flush()
    db.close()
    (file,) = directory.glob("*.sst")
    return file


async def test_a_row_too_large_to_be_read_in_place_is_no_damage(tmp_path: Path) -> None:
    write_sst(tmp_path / "store", {b"b": b"1", b"a": bytes(65 << 20)})
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    assert await store.get(b"b") == b"1"
    with pytest.raises(UnknownFormatError, match="data block that says that it holds 681"):
        await store.get(b"a")


@pytest.mark.parametrize("two_levels", [False, True])
async def test_an_index_that_leads_back_is_damage(tmp_path: Path, *, two_levels: bool) -> None:
    """As by a hostile writer, who writes the checksum too: a few bytes could have a block read for ever."""
    rows = {b"k%d" % n: random.Random(n).randbytes(200) for n in range(4)}
    file = write_sst(tmp_path / "store", rows, two_levels=two_levels)
    data = file.read_bytes()
    summed = BLOCK_SUMS[decode_footer(data[-53:], len(data)).checksum]
    # The handle of the third block, 222 bytes at 454, becomes that of the second one, at 227.
    at = data.index(b"\x02k2\xc6\x03\xde\x01")
    start, end = next(
        (start, end)
        for start in range(at, at - 40, -1)
        for end in range(at + 8, at + 60)
        if summed(data[start:end]) == int.from_bytes(data[end : end + 4], "little")
    )
    block = data[start:end].replace(b"k2\xc6\x03", b"k2\xe3\x01")
    file.write_bytes(data[:start] + block + summed(block).to_bytes(4, "little") + data[end + 4 :])
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    with pytest.raises(DamagedError, match="index leads to a block at offset 227 behind one that ends at 454"):
        [rows async for rows in store.chunks()]


async def test_a_block_that_would_begin_before_its_file_is_damage(tmp_path: Path) -> None:
    """As by a hostile writer, who writes the checksum of the footer too."""
    file = write_sst(tmp_path / "store", {b"k": b"v"}, version=6)
    data = file.read_bytes()
    found = decode_footer(data[-53:], len(data))
    footer = bytearray(found.summed)
    footer[13:17] = (1 << 24).to_bytes(4, "little")
    total = BLOCK_SUMS[found.checksum](bytes(footer))
    total += checksum_modifier(found.base_context_checksum, found.offset)
    footer[5:9] = (total % (1 << 32)).to_bytes(4, "little")
    file.write_bytes(data[:-53] + footer)
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    with pytest.raises(DamagedError, match=r"metaindex block at offset -[0-9]+ would reach beyond the file"):
        [rows async for rows in store.chunks()]


def test_an_index_that_says_long_keys_by_few_bytes_is_refused() -> None:
    trailer = bytes(8)
    long = bytes((0,)) + encode_varint(1_000_008) + b"k" * 1_000_000 + trailer + bytes((0, 1))
    repeated = encode_varint(1_000_008) + bytes((0, 0))
    index = BlockIndex(long + repeated * 1_000_000 + struct.pack("<II", 0, 1), IndexForm(delta=True))
    with pytest.raises(ValueError, match="longer keys"):
        next(index.seek(b"z"))


@pytest.mark.parametrize("decode", [decode_versions, decode_deleted_ranges])
def test_a_small_block_makes_no_memory_of_its_entries(decode: Callable[[bytes], object]) -> None:
    trailer = bytes((1, 9, 0, 0, 0, 0, 0, 0))
    long = bytes((0,)) + encode_varint(200_008) + bytes((0,)) + b"k" * 200_000 + trailer
    repeated = encode_varint(200_008) + bytes((0, 0))
    block = long + repeated * 5000 + struct.pack("<II", 0, 1)
    with pytest.raises((ValueError, NotImplementedError)):
        decode(block)
    many = bytes((0, 8, 0)) + trailer + bytes((8, 0, 0)) * 3_000_000 + struct.pack("<II", 0, 1)
    with pytest.raises((ValueError, NotImplementedError)):
        decode(many)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 11000, 500))
def test_ten_thousand_random_stores_are_read_as_rocksdb_reads_them(tmp_path: Path, seed: int) -> None:
    for each in range(seed, seed + 500):
        write_store(tmp_path / "store", each)
        check_store(tmp_path / "store", each)
        shutil.rmtree(tmp_path / "store")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two levels of many files: every key on the lower one, some on the upper one as well."""
    settings = RocksDbSettings(file_bytes=64 * 1024, level_base_bytes=64 * 1024)
    with StoreWriter.open(tmp_path / "large", settings, compactions_wait=True) as store:
        for part in (range(5000), range(0, 5000, 50)):
            store.ingest(write_ssts(tmp_path, len(part), [(b"key-%05d" % n, b"%05d" % n * 20) for n in part]))
    return tmp_path / "large"


def write_ssts(directory: Path, name: int, rows: list[tuple[bytes, bytes]]) -> list[Path]:
    run = SstRun(directory, name, RocksDbSettings(file_bytes=64 * 1024))
    run.put(rows)
    return run.finish()


async def test_a_key_costs_the_end_of_each_file_that_may_have_it_and_one_block(large: Path) -> None:
    files = LocalRanges(large)
    store = await StoreInPlace.open(files)
    files.requests.clear()
    assert await store.get(b"key-01234") == b"01234" * 20
    (_, start, end_bytes), (_, at, block_bytes), *more = sorted(files.requests, key=lambda of: -of[1])
    assert not more or len(more) == 1, "at most the end of a file that its filter passes over"
    assert at < start
    assert block_bytes < 8192 < end_bytes + 8192
    files.requests.clear()
    assert await store.get(b"key-01234") == b"01234" * 20
    assert files.requests == [], "what was read is in the cache"
    assert await store.get(b"key-01235x") is None
    assert len(files.requests) <= 1, "a filter says that it is not there"


async def test_a_scan_reads_ahead_and_no_further_than_its_end(large: Path) -> None:
    files = LocalRanges(large)
    store = await StoreInPlace.open(files, cache_bytes=0)
    files.requests.clear()
    assert sum([len(rows) async for rows in store.chunks(start=b"key-01000", stop=b"key-01010")]) == 10
    assert len(files.requests) <= 5
    files.requests.clear()
    assert sum([len(rows) async for rows in store.chunks()]) == 5000
    ssts = sum(name.endswith(".sst") for name in files.names())
    assert len(files.requests) < 8 * ssts


async def test_a_number_that_an_ingestion_wrote_into_a_file_is_no_damage(tmp_path: Path) -> None:
    """As by `write_global_seqno`: it is written after the checksum."""
    (written,) = write_ssts(tmp_path, 1, [(b"a", b"new"), (b"b", b"1")])
    db = Rdict(str(tmp_path / "store"), Options(raw_mode=True))
    db[b"a"] = b"old"
    db.flush()
    db.ingest_external_file([str(written)])
    db.close()
    ingested = max((tmp_path / "store").glob("*.sst"))
    before, name, after = ingested.read_bytes().partition(b"_file.global_seqno")
    ingested.write_bytes(before + name + b"\2" + after[1:])
    expected = {b"a": b"new", b"b": b"1"}
    assert rows_of(tmp_path / "store") == expected
    store = await StoreInPlace.open(LocalRanges(tmp_path / "store"))
    assert dict([row async for rows in store.chunks() for row in rows]) == expected


def encode_varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*data, value))


def flip_byte(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


def test_a_cache_keeps_what_was_used_last() -> None:
    cache = BlockCache(100)
    for number in range(10):
        cache.put(("a", number), number, 30)
        assert cache.get(("a", 0)) == 0
    assert [number for number in range(10) if cache.get(("a", number)) is not None] == [0, 8, 9]


async def test_each_flipped_byte_of_an_sst_is_damage_or_changes_no_row(large: Path) -> None:
    expected = rows_of(large)
    sst = max(large.glob("*.sst"), key=lambda path: path.stat().st_size)  # noqa: ASYNC240
    rng = random.Random(1)
    size = sst.stat().st_size
    for at in (*rng.sample(range(size), 60), *range(size - 60, size)):
        flip_byte(sst, at)
        try:
            store = await StoreInPlace.open(LocalRanges(large))
            assert dict([row async for rows in store.chunks() for row in rows]) == expected, at
        except (DamagedError, UnknownFormatError):
            pass
        flip_byte(sst, at)


async def test_operands_are_joined_as_rocksdb_joins_them(tmp_path: Path) -> None:
    for name, delimiter in (("comma", b","), ("nothing", b"")):
        with zipfile.ZipFile(OPERANDS / f"{name}.zip") as packed:
            packed.extractall(tmp_path / name)
        expected = rows_of(tmp_path / name, delimiter)
        store = await StoreInPlace.open(LocalRanges(tmp_path / name))
        chunks = store.chunks(merge_delimiter=delimiter)
        assert dict([row async for rows in chunks for row in rows]) == expected
        for of, value in expected.items():
            assert await store.get(of, merge_delimiter=delimiter) == value
        with pytest.raises(UsageError, match="operands"):
            [rows async for rows in store.chunks()]


async def test_what_is_not_read_in_place_is_refused_by_name(tmp_path: Path) -> None:
    options = Options(raw_mode=True)
    blocks = BlockBasedOptions()
    blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    options.set_block_based_table_factory(blocks)
    db = Rdict(str(tmp_path / "hashed"), options)
    db[b"k"] = b"v"
    db.flush()
    db.close()
    store = await StoreInPlace.open(LocalRanges(tmp_path / "hashed"))
    with pytest.raises(UnknownFormatError, match="hash index, which is not read in place") as caught:
        await store.get(b"k")
    assert "restore" in caught.value.hint
    with pytest.raises(NotFoundError, match="no column family 'nix'"):
        await store.get(b"k", "nix")
