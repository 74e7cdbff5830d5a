"""Stores that others have written are opened with our options, and with nothing else (design 0004, C1)."""

import shutil
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
import rocksdict

from engine.errors import EngineError, UsageError
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter, spark_settings
from engine.settings import MIB

# RocksDB directories that Spark 4.3 has written, with operands in three SST files (WriteOperands.java beside them).
OPERANDS = Path(__file__).parents[3] / "golden" / "spark_operands"
K1, K2, K3 = b"\x01\x00k1", b"\x01\x00k2", b"\x01\x00k3"
MERGED = {
    b",": {K1: b"base,one,two", K2: b"put", K3: b"first,second"},
    b"": {K1: b"baseonetwo", K2: b"put", K3: b"firstsecond"},
}
NAMES = {b",": "comma", b"": "nothing"}


def unpacked(delimiter: bytes, directory: Path) -> Path:
    with zipfile.ZipFile(OPERANDS / f"{NAMES[delimiter]}.zip") as archive:
        archive.extractall(directory)
    return directory


def plant(directory: Path, section: str, line: str) -> None:
    """Add a line to the OPTIONS file that came with the data."""
    for options in directory.glob("OPTIONS-*"):
        text = options.read_text()
        assert section in text
        options.write_text(text.replace(section, f"{section}\n  {line}"))


@pytest.mark.parametrize("delimiter", NAMES)
def test_operands_that_spark_left_come_back_merged(tmp_path: Path, delimiter: bytes) -> None:
    with StoreReader.open(unpacked(delimiter, tmp_path / "db"), spark_settings(delimiter)) as store:
        assert dict(store.items()) == MERGED[delimiter]
        assert {key: store.get(key) for key in MERGED[delimiter]} == MERGED[delimiter]
        assert store.get_many([K3, K1]) == [MERGED[delimiter][K3], MERGED[delimiter][K1]]


@pytest.mark.parametrize("written_with", NAMES)
@pytest.mark.parametrize("opened_with", NAMES)
def test_the_delimiter_is_the_one_of_the_settings_whatever_the_directory_says(
    tmp_path: Path, written_with: bytes, opened_with: bytes
) -> None:
    with StoreWriter.open(unpacked(written_with, tmp_path / "db"), spark_settings(opened_with)) as store:
        assert dict(store.items()) == MERGED[opened_with]


@pytest.mark.parametrize("delimiter", NAMES)
def test_compaction_merges_with_the_same_delimiter(tmp_path: Path, delimiter: bytes) -> None:
    directory = unpacked(delimiter, tmp_path / "db")
    with StoreWriter.open(directory, spark_settings(delimiter)) as store:
        store.compact()
        assert dict(store.items()) == MERGED[delimiter]
        store.checkpoint(tmp_path / "checkpoint")
    # Nothing is left to be merged, so no operator is needed.
    with StoreReader.open(tmp_path / "checkpoint") as store:
        assert dict(store.items()) == MERGED[delimiter]


@pytest.mark.parametrize("delimiter", NAMES)
def test_merge_appends_behind_operands_that_spark_left(tmp_path: Path, delimiter: bytes) -> None:
    with StoreWriter.open(unpacked(delimiter, tmp_path / "db"), spark_settings(delimiter)) as store:
        store.merge(K3, b"third")
        store.merge(b"\x01\x00new", b"only")
        assert store.get(K3) == delimiter.join([b"first", b"second", b"third"])
        assert store.get(b"\x01\x00new") == b"only"


@pytest.mark.parametrize("way", [StoreReader, StoreWriter])
def test_operands_without_an_operator_are_refused(tmp_path: Path, way: type[StoreReader]) -> None:
    directory = unpacked(b"", tmp_path / "db")
    with pytest.raises(UsageError, match="operands") as raised:
        way.open(directory)
    assert raised.value.subject == str(directory)
    # It was closed again.
    with StoreWriter.open(directory, spark_settings(b"")) as store:
        assert store.get(K2) == b"put"


def test_merging_needs_a_delimiter(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as store, pytest.raises(UsageError, match="no merge operator"):
        store.merge(b"k", b"v")


@pytest.mark.parametrize("delimiter", [b";", b"}", b"\n", b"ab", b"\xff"])
def test_a_delimiter_that_options_cannot_say_is_refused(tmp_path: Path, delimiter: bytes) -> None:
    with pytest.raises(UsageError, match="between operands"):
        StoreWriter.open(tmp_path / "db", RocksDbSettings(merge_delimiter=delimiter))


@pytest.mark.parametrize("delimiter", [None, b"", b","])
@pytest.mark.parametrize("option", ["wal_dir", "db_log_dir"])
def test_directories_that_an_options_file_names_stay_untouched(
    tmp_path: Path, delimiter: bytes | None, option: str
) -> None:
    outside = tmp_path / "outside"
    with StoreWriter.open(tmp_path / "db", spark_settings(delimiter)) as store:
        store.put(b"k", b"v")
        store.flush()
    plant(tmp_path / "db", "[DBOptions]", f"{option}={outside}")
    with StoreWriter.open(tmp_path / "db", spark_settings(delimiter)) as store:
        store.put(b"l", b"w")
        store.flush()
        assert store.get(b"k") == b"v"
    assert not outside.exists()


@pytest.mark.parametrize("delimiter", [None, b""])
def test_an_options_file_decides_nothing_about_the_column_family(tmp_path: Path, delimiter: bytes | None) -> None:
    directory = tmp_path / "db"
    StoreWriter.open(directory, spark_settings(delimiter)).close()
    plant(directory, '[CFOptions "default"]', "disable_auto_compactions=true\n  num_levels=2\n  ttl=7")
    with StoreWriter.open(directory, spark_settings(delimiter)) as store:
        store.put(b"k", b"v")
        store.flush()
    (written, *_) = sorted(directory.glob("OPTIONS-*"), reverse=True)
    text = written.read_text()
    assert "disable_auto_compactions=false" in text
    assert "num_levels=7" in text
    assert "ttl=7\n" not in text


@pytest.mark.parametrize("junk", [b"", b"\x00" * 100, b"[Version]\n", b'[CFOptions "default"]\n merge_operator=x\n'])
def test_an_options_file_that_is_junk_does_not_matter(tmp_path: Path, junk: bytes) -> None:
    directory = unpacked(b"", tmp_path / "db")
    for options in directory.glob("OPTIONS-*"):
        options.write_bytes(junk)
    with StoreReader.open(directory, spark_settings(b"")) as store:
        assert dict(store.items()) == MERGED[b""]


def test_compactions_wait_if_they_are_asked_to(tmp_path: Path) -> None:
    settings = RocksDbSettings(level_zero_files=2)

    def levels(store: StoreWriter) -> list[int]:
        return [file["level"] for file in store._db.live_files()]

    with StoreWriter.open(tmp_path / "db", settings, compactions_wait=True) as store:
        for n in range(6):
            store.write_batch({b"%06d" % key: b"%d" % n for key in range(1000)})
            store.flush()
        assert levels(store) == [0] * 6
        store.begin_compactions()
        store.begin_compactions()
        deadline = time.monotonic() + 30
        while len(levels(store)) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(levels(store)) <= 2
        assert dict(store.items()) == {b"%06d" % key: b"5" for key in range(1000)}
    # It was for that one time, and with no delimiter too.
    (written, *_) = sorted((tmp_path / "db").glob("OPTIONS-*"), reverse=True)
    assert "disable_auto_compactions=false" in written.read_text()


def test_settings_count_for_a_store_that_is_there_already(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", RocksDbSettings(write_buffer_bytes=MIB)) as store:
        store.put(b"k", b"v")
        store.flush()
    StoreWriter.open(tmp_path / "db", RocksDbSettings(write_buffer_bytes=2 * MIB)).close()
    (written, *_) = sorted((tmp_path / "db").glob("OPTIONS-*"), reverse=True)
    assert f"write_buffer_size={2 * MIB}\n" in written.read_text()


def test_files_are_of_the_format_that_spark_asks_for(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "db", spark_settings(b"")).close()
    (written, *_) = sorted((tmp_path / "db").glob("OPTIONS-*"), reverse=True)
    text = written.read_text()
    for line in (
        "format_version=5",
        "block_size=4096",
        "filter_policy=bloomfilter",
        "compression=kLZ4Compression",
        "comparator=leveldb.BytewiseComparator",
        "write_buffer_size=67108864",
        "max_bytes_for_level_base=268435456",
        "target_file_size_base=67108864",
        "level0_file_num_compaction_trigger=4",
        "max_open_files=-1",
    ):
        assert f"  {line}\n" in text, line


def test_a_store_on_more_levels_than_usual_is_read(tmp_path: Path) -> None:
    options = rocksdict.Options(raw_mode=True)
    options.set_num_levels(12)
    db = rocksdict.Rdict(str(tmp_path / "db"), options)
    db[b"k"] = b"v"
    db.flush()
    lowest = rocksdict.CompactOptions()
    lowest.set_change_level(True)
    lowest.set_target_level(9)
    db.compact_range(None, None, lowest)
    db.close()
    with StoreReader.open(tmp_path / "db", spark_settings(b"")) as store:
        assert dict(store.items()) == {b"k": b"v"}


def test_what_an_open_leaves_in_the_directory(tmp_path: Path) -> None:
    directory = unpacked(b"", tmp_path / "db")
    before = {path.name for path in directory.iterdir()}
    StoreReader.open(directory, spark_settings(b"")).close()
    assert {path.name for path in directory.iterdir()} - before == {"rocksdict-config.json"}
    StoreWriter.open(directory, spark_settings(b"")).close()
    ours = {"LOG", "LOCK", "IDENTITY", "rocksdict-config.json"}
    rewritten = ("MANIFEST-", "OPTIONS-", ".log")
    added = {path.name for path in directory.iterdir()} - before
    assert ours <= added
    assert all(any(part in name for part in rewritten) for name in added - ours)


def test_many_changes_are_one_write_and_none_removes(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        store.write_batch({b"b": b"1", b"a": b"2", b"c": b"3"})
        store.write_batch({b"b": None, b"a": b"4", b"missing": None})
        assert list(store.items()) == [(b"a", b"4"), (b"c", b"3")]


@pytest.mark.parametrize(
    "begin, end, left",
    [
        (b"b", b"d", [b"a", b"d", b"e"]),
        (b"", b"c", [b"c", b"d", b"e"]),
        (b"bb", b"\xff", [b"a", b"b"]),
        (b"c", b"c", [b"a", b"b", b"c", b"d", b"e"]),
        (b"d", b"b", [b"a", b"b", b"c", b"d", b"e"]),
    ],
)
def test_a_range_goes_without_its_end(tmp_path: Path, begin: bytes, end: bytes, left: list[bytes]) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        store.write_batch(dict.fromkeys([b"a", b"b", b"c", b"d", b"e"], b""))
        store.delete_range(begin, end)
        assert [key for key, _ in store.items()] == left


def test_keys_are_counted_by_their_first_bytes(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        assert store.count() == {}
        assert store.count(prefix_bytes=2) == {}
        store.write_batch({b"\x01\x00a": b"", b"\x01\x00b": b"", b"\x02\x00a": b"", b"\x01": b"", b"": b""})
        assert store.count() == {b"": 5}
        assert store.count(prefix_bytes=2) == {b"": 1, b"\x01": 1, b"\x01\x00": 2, b"\x02\x00": 1}


def test_counting_a_damaged_store_is_an_error_and_not_a_smaller_number(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", msgspec.structs.replace(spark_settings(), compression="none")) as store:
        store.write_batch({b"k%06d" % n: b"v" * 50 for n in range(10_000)})
        store.flush()
    (sst,) = (tmp_path / "db").glob("*.sst")
    data = bytearray(sst.read_bytes())
    data[len(data) // 2] ^= 1
    shutil.copy(sst, tmp_path / "whole")
    sst.write_bytes(data)
    with StoreReader.open(tmp_path / "db") as store, pytest.raises(EngineError, match="Corruption"):
        store.count()
