"""Stores merged by reference are what RocksDB says of them (design 0010, R1 to R6); RocksDB is the judge."""

import random
from pathlib import Path

import pytest
from rocksdict import Options, Rdict, WriteOptions

from engine.errors import DamagedError, NotFoundError
from engine.local.checksums import crc32c
from engine.rocksdb.merge import merge_stores, read_parent
from engine.rocksdb.store import StoreReader, StoreWriter, spark_settings
from index.errors import StoreMergeError
from index.rocksdb.manifest import decode_manifest, encode_manifest

Rows = dict[bytes, bytes]


def key(number: int) -> bytes:
    return b"key-%06d" % number


def options() -> Options:
    made = Options(raw_mode=True)
    # RocksDB's default, with its consistency checks: it is what judges.
    made.set_paranoid_checks(True)
    return made


def make_parent(
    directory: Path, number: int, count: int, *, files: int = 2, families: tuple[str, ...] = ()
) -> dict[str, Rows]:
    """A store of every `count`-th key, with a compacted run and files of level 0 that overwrite and delete."""
    rng = random.Random(number)
    rows: dict[str, Rows] = {}
    unlogged = WriteOptions()
    unlogged.disable_wal = True  # type: ignore[method-assign,assignment]  # rocksdict's stub errs
    db = Rdict(str(directory), options())
    for name in ("default", *families):
        family = db if name == "default" else db.create_column_family(name, options())
        mine = rows.setdefault(name, {})
        for n in range(number, 1200, count):
            mine[key(n)] = b"%s first %d" % (name.encode(), n)
            family.put(key(n), mine[key(n)], unlogged)
        family.flush()
        family.compact_range(None, None)
        for turn in range(files):
            for n in rng.sample(range(number, 1200, count), 12):
                if n % 3:
                    mine[key(n)] = b"again %d" % turn
                    family.put(key(n), mine[key(n)], unlogged)
                else:
                    mine.pop(key(n), None)
                    family.delete(key(n), unlogged)
            family.flush()
        if name != "default":
            family.close()
    db.close()
    return rows


def rows_of(directory: Path, family: str = "default") -> Rows:
    db = Rdict(str(directory), options(), {name: options() for name in Rdict.list_cf(str(directory), options())})
    opened = db if family == "default" else db.get_column_family(family)
    found: Rows = {bytes(k): v for k, v in opened.items()}  # type: ignore[arg-type]  # all keys are bytes in raw mode
    if family != "default":
        opened.close()
    db.close()
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 8, 25])
def test_rows_are_those_of_all_parents_and_survive_put_flush_and_compaction(tmp_path: Path, count: int) -> None:
    parents = [tmp_path / f"parent-{n}" for n in range(count)]
    rows: Rows = {}
    for n, parent in enumerate(parents):
        rows |= make_parent(parent, n, count, files=n % 4)["default"]
    inodes = {path.stat().st_ino for parent in parents for path in parent.glob("*.sst")}

    plan = merge_stores(parents, tmp_path / "merged")

    assert {path.stat().st_ino for path in (tmp_path / "merged").glob("*.sst")} == inodes
    levels = [level for level, _ in plan.state.families[0].files]
    assert {6 - n for n in range(min(count, 6))} <= set(levels)
    with StoreReader.open(tmp_path / "merged") as reader:
        assert dict(reader.items()) == rows
    with StoreWriter.open(tmp_path / "merged") as writer:
        for n in range(0, 1200, 7):
            rows[key(n)] = b"after"
            writer.put(key(n), b"after")
        writer.delete(key(5))
        rows.pop(key(5), None)
        writer.flush()
        assert dict(writer.items()) == rows
        writer.compact(force=True)
        assert dict(writer.items()) == rows
    assert rows_of(tmp_path / "merged") == rows


def test_column_families_are_merged_by_name(tmp_path: Path) -> None:
    orders = (("a", "b"), ("b", "a"))
    made = [make_parent(tmp_path / str(n), n, 2, families=order) for n, order in enumerate(orders)]
    merge_stores([tmp_path / "0", tmp_path / "1"], tmp_path / "merged")
    for name in ("default", "a", "b"):
        assert rows_of(tmp_path / "merged", name) == made[0][name] | made[1][name]


def test_parents_whose_ranges_are_apart_share_a_level(tmp_path: Path) -> None:
    for n in range(3):
        with StoreWriter.open(tmp_path / str(n)) as writer:
            writer.put(key(n), b"value")
            writer.flush()
            writer.compact(force=True)
    plan = merge_stores([tmp_path / str(n) for n in range(3)], tmp_path / "merged")
    assert [level for level, _ in plan.state.families[0].files] == [6, 6, 6]


def test_a_merged_store_is_merged_again(tmp_path: Path) -> None:
    rows: Rows = {}
    for n in range(4):
        rows |= make_parent(tmp_path / str(n), n, 4)["default"]
    merge_stores([tmp_path / "0", tmp_path / "1"], tmp_path / "01")
    merge_stores([tmp_path / "2", tmp_path / "3"], tmp_path / "23")
    merge_stores([tmp_path / "01", tmp_path / "23"], tmp_path / "all")
    assert rows_of(tmp_path / "all") == rows


def test_a_manifest_that_is_written_again_is_as_good(tmp_path: Path) -> None:
    rows = make_parent(tmp_path / "store", 0, 1)["default"]
    (manifest,) = (tmp_path / "store").glob("MANIFEST-*")
    state = decode_manifest(manifest.read_bytes(), crc32c=crc32c, subject="MANIFEST")
    manifest.write_bytes(encode_manifest(state, crc32c=crc32c))
    assert rows_of(tmp_path / "store") == rows


def test_a_live_manifest_says_what_rocksdb_says_after_each_flush(tmp_path: Path) -> None:
    manual = options()
    # A compaction of RocksDB's own could come between the two looks.
    manual.set_disable_auto_compactions(True)
    db = Rdict(str(tmp_path / "live"), manual)
    (path,) = (tmp_path / "live").glob("MANIFEST-*")
    for turn in range(30):
        db[key(turn)] = b"value"
        db.flush()
        if turn % 10 == 9:
            db.compact_range(None, None)
        data = path.read_bytes()
        state = decode_manifest(data, crc32c=crc32c, is_live=True, subject="MANIFEST")
        found = {(level, f"/{file.number:06d}.sst", file.size_bytes) for level, file in state.families[0].files}
        assert found == {(file["level"], file["name"], file["size"]) for file in db.live_files()}
        # What was there before the last append is a store too.
        decode_manifest(data[:-1], crc32c=crc32c, is_live=True, subject="MANIFEST")
    db.close()


def test_deletions_of_ranges_are_refused_until_they_are_compacted(tmp_path: Path) -> None:
    make_parent(tmp_path / "whole", 0, 2)
    rows = make_parent(tmp_path / "deleting", 1, 2)["default"]
    with StoreWriter.open(tmp_path / "deleting") as writer:
        writer.delete_range(key(0), key(600))
        writer.flush()
    parents = [tmp_path / "whole", tmp_path / "deleting"]
    with pytest.raises(StoreMergeError, match="deletions of ranges"):
        merge_stores(parents, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with StoreWriter.open(tmp_path / "deleting") as writer:
        writer.compact(force=True)
    merge_stores(parents, tmp_path / "merged")
    left = {k: v for k, v in rows.items() if k >= key(600)}
    assert rows_of(tmp_path / "merged") == rows_of(tmp_path / "whole") | left


def test_rows_in_a_log_are_refused(tmp_path: Path) -> None:
    db = Rdict(str(tmp_path / "live"), options())
    db[b"key"] = b"value"
    with pytest.raises(StoreMergeError, match="write-ahead log"):
        merge_stores([tmp_path / "live"], tmp_path / "merged")
    db.close()


def test_other_column_families_are_refused(tmp_path: Path) -> None:
    make_parent(tmp_path / "plain", 0, 2)
    make_parent(tmp_path / "families", 1, 2, families=("a",))
    with pytest.raises(StoreMergeError, match="column families a, default"):
        merge_stores([tmp_path / "plain", tmp_path / "families"], tmp_path / "merged")


def test_what_is_not_a_whole_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        merge_stores([tmp_path], tmp_path / "merged")
    make_parent(tmp_path / "store", 0, 2)
    sst = next((tmp_path / "store").glob("*.sst"))
    sst.write_bytes(sst.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="another size"):
        merge_stores([tmp_path / "store"], tmp_path / "merged")
    (tmp_path / "store" / "CURRENT").write_bytes(b"../MANIFEST-000001\n")
    with pytest.raises(DamagedError, match="does not name a MANIFEST"):
        merge_stores([tmp_path / "store"], tmp_path / "merged")


def test_a_forced_compaction_takes_deletions_of_ranges_out_of_a_file_that_could_have_been_moved(tmp_path: Path) -> None:
    directory = tmp_path / "parent"
    with StoreWriter.open(directory, spark_settings(b"")) as store:
        store.write_batch({b"b": b"1", b"z": b"2"})
        store.delete_range(b"a", b"c")
        store.flush()
        store.checkpoint(tmp_path / "before")
        store.compact(force=True)
        store.checkpoint(tmp_path / "after")
    assert read_parent(tmp_path / "before").range_deletions
    assert not read_parent(tmp_path / "after").range_deletions
    merge_stores([tmp_path / "after"], tmp_path / "merged")
    with StoreReader.open(tmp_path / "merged", spark_settings(b"")) as reader:
        assert list(reader.items()) == [(b"z", b"2")]
