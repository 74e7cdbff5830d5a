import pickle
import re
from pathlib import Path

import pytest
import rocksdict
from typing_extensions import override

from engine.errors import DamagedError, EngineError, NotFoundError, UnsafeSourceError, UsageError
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter

SMALL = RocksDbSettings(write_buffer_bytes=64 * 1024, file_bytes=64 * 1024, level_base_bytes=256 * 1024)


def filled(directory: Path, count: int = 1000) -> Path:
    with StoreWriter.open(directory, SMALL) as store:
        store.write_batch({b"k%06d" % n: b"v%d" % n for n in range(count)})
        store.flush()
    return directory


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        store.put(b"b", b"2")
        store.put(b"a", b"1")
        store.write_batch({b"c": b"3", b"d": b"4", b"a": None})
        store.put(b"e", b"")
        store.delete(b"d")
        store.delete(b"never there")
        assert list(store.items()) == [(b"b", b"2"), (b"c", b"3"), (b"e", b"")]
        assert store.get(b"c") == b"3"
        assert store.get(b"a") is None
        assert store.get(b"e") == b""
        assert store.get_many([b"c", b"a"]) == [b"3", None]
        assert store.get_many([]) == []


@pytest.mark.parametrize(
    "prefix, start, expected",
    [
        (b"", b"", [b"a1", b"a2", b"b1", b"\xff\xff"]),
        (b"a", b"", [b"a1", b"a2"]),
        (b"a", b"a2", [b"a2"]),
        (b"a", b"b", []),
        (b"b", b"a", [b"b1"]),
        (b"\xff", b"", [b"\xff\xff"]),
        (b"c", b"", []),
    ],
)
def test_a_scan_stays_within_its_prefix(tmp_path: Path, prefix: bytes, start: bytes, expected: list[bytes]) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        store.write_batch(dict.fromkeys([b"a1", b"a2", b"b1", b"\xff\xff"], b"v"))
        assert [key for key, _ in store.items(prefix, start=start)] == expected


def test_a_scan_does_not_see_later_writes(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as store:
        store.put(b"a", b"1")
        scan = store.items()
        store.put(b"b", b"2")
        assert [key for key, _ in scan] == [b"a"]


def test_a_scan_that_is_still_held_does_not_keep_the_store_open(tmp_path: Path) -> None:
    store = StoreWriter.open(filled(tmp_path / "db"))
    scan = store.items()
    next(scan)
    store.close()
    with StoreWriter.open(tmp_path / "db") as again:
        assert again.get(b"k000000") == b"v0"
    with pytest.raises(UsageError, match="closed during a scan"):
        next(scan)


def test_a_closed_store_refuses_and_closes_twice(tmp_path: Path) -> None:
    for store in (StoreWriter.open(tmp_path / "db"), StoreReader.open(filled(tmp_path / "db2"))):
        store.close()
        store.close()
        with pytest.raises(UsageError, match="closed"):
            store.get(b"a")
        with pytest.raises(UsageError, match="closed"):
            store.items()


def test_a_store_is_open_for_writing_once(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db"), pytest.raises(UnsafeSourceError):
        StoreWriter.open(tmp_path / "db")


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_reading_what_is_no_store_is_refused_and_creates_nothing(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "db"
    if kind == "empty":
        directory.mkdir()
    with pytest.raises(NotFoundError):
        StoreReader.open(directory)
    assert not directory.exists() or not list(directory.iterdir())


def test_reading_changes_nothing_of_the_store(tmp_path: Path) -> None:
    directory = filled(tmp_path / "db")
    before = {p.name: p.stat().st_mtime_ns for p in directory.iterdir() if p.suffix != ".json"}
    with StoreReader.open(directory) as store:
        assert len(list(store.items())) == 1000
    after = {p.name: p.stat().st_mtime_ns for p in directory.iterdir() if p.suffix != ".json"}
    assert after == before


def test_a_damaged_block_is_an_error_and_not_the_end_of_the_data(tmp_path: Path) -> None:
    directory = filled(tmp_path / "db")
    for sst in directory.glob("*.sst"):
        data = bytearray(sst.read_bytes())
        data[100] ^= 0xFF
        sst.write_bytes(data)
    with StoreReader.open(directory) as store:
        with pytest.raises(DamagedError, match="checksum"):
            list(store.items())
        with pytest.raises(DamagedError, match="checksum"):
            store.get(b"k000001")


def test_a_checkpoint_is_complete_and_stays_as_it_was(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", SMALL) as store:
        store.put(b"a", b"in memory only")
        store.checkpoint(tmp_path / "checkpoint")
        store.put(b"a", b"later")
        with pytest.raises(UsageError, match="already"):
            store.checkpoint(tmp_path / "checkpoint")
    with StoreReader.open(tmp_path / "checkpoint") as reader:
        assert reader.get(b"a") == b"in memory only"


def test_a_store_can_be_opened_again_after_a_checkpoint(tmp_path: Path) -> None:
    store = StoreWriter.open(tmp_path / "db")
    store.checkpoint(tmp_path / "checkpoint")
    store.close()
    StoreWriter.open(tmp_path / "db").close()


def test_what_was_not_checkpointed_is_lost_with_the_process_and_the_rest_is_not(tmp_path: Path) -> None:
    directory = filled(tmp_path / "db")
    with StoreWriter.open(directory) as store:
        store.put(b"unflushed", b"v")
        store.checkpoint(tmp_path / "checkpoint")
    assert all(p.stat().st_size == 0 for p in (tmp_path / "checkpoint").glob("*.log"))


def test_small_buffers_make_many_files_and_compaction_merges_them(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", SMALL) as store:
        for n in range(20_000):
            store.put(b"%08d" % (n * 7919 % 20_000), (b"%d" % n) * 20)
        store.flush()
        assert len(store._db.live_files()) >= 6
        store.compact()
        assert all(file["level"] > 0 for file in store._db.live_files())
        assert len(list(store.items())) == 20_000


def test_options_that_came_with_the_data_decide_nothing(tmp_path: Path) -> None:
    directory = filled(tmp_path / "db")
    outside = tmp_path / "outside"
    for options in directory.glob("OPTIONS-*"):
        planted = f"[DBOptions]\n  wal_dir={outside}\n  db_log_dir={outside}\n"
        options.write_text(options.read_text().replace("[DBOptions]\n", planted))
    with StoreWriter.open(directory) as store:
        store.put(b"a", b"1")
        store.flush()
        assert store.get(b"k000001") == b"v1"
    assert not outside.exists()


def test_pickled_values_come_back_as_bytes_and_are_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Planted:
        @override
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, (f"open({str(marker)!r}, 'w')",))

    with StoreWriter.open(tmp_path / "db") as store:
        store.put(b"key", b"\x05" + pickle.dumps(Planted()))
        store.flush()
    (tmp_path / "db" / "rocksdict-config.json").write_text('{"raw_mode":false,"prefix_extractors":{}}')
    with StoreReader.open(tmp_path / "db") as reader:
        (value,) = [value for _, value in reader.items()]
    assert b"eval" in value
    assert not marker.exists()


def test_a_store_of_pickles_is_refused(tmp_path: Path) -> None:
    database = rocksdict.Rdict(str(tmp_path / "db"))
    database["key"] = 1
    database.close()
    with pytest.raises(EngineError, match="comparator"):
        StoreReader.open(tmp_path / "db")


@pytest.mark.parametrize("key", ["text", 7, None])
def test_keys_that_are_not_bytes_are_refused(tmp_path: Path, key: object) -> None:
    with StoreWriter.open(tmp_path / "db") as store, pytest.raises(UsageError, match="bytes"):
        store.put(key, b"v")  # type: ignore[arg-type]


def test_a_store_whose_files_are_missing_is_refused_by_name(tmp_path: Path) -> None:
    directory = filled(tmp_path / "db")
    for sst in directory.glob("*.sst"):
        sst.unlink()
    with pytest.raises(EngineError, match=re.escape(str(directory))):
        StoreWriter.open(directory)
