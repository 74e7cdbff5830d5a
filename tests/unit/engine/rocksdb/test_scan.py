"""A scan in lists gives what a scan row by row gives, and like it never takes damage for the end."""

from itertools import chain
from pathlib import Path

import pytest

from engine.errors import DamagedError, UsageError
from engine.rocksdb.store import StoreReader, StoreWriter, spark_settings
from engine.state.store import StateStore
from tests.unit.engine.state.state_store_kit import settings_of

SETTINGS = spark_settings(b"")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Keys of three prefixes, in two files; values of 0 to 1,999 bytes."""
    with StoreWriter.open(tmp_path / "db", SETTINGS) as db:
        for start in (0, 1):
            rows = {b"%c%05d" % (b"abc"[n % 3], n): b"%d" % n * (n % 400) for n in range(start, 3000, 2)}
            db.write_batch(dict(rows))
            db.flush()
    return tmp_path / "db"


@pytest.mark.parametrize("prefix", [b"", b"a", b"b", b"c", b"b0123", b"x", b"\0", b"a00000"])
@pytest.mark.parametrize("rows_max, bytes_max", [(1, 1), (7, 2**20), (2**20, 5000), (2**20, 2**30)])
def test_lists_hold_what_a_scan_finds(directory: Path, prefix: bytes, rows_max: int, bytes_max: int) -> None:
    with StoreReader.open(directory, SETTINGS) as db:
        chunks = list(db.chunks(prefix, rows_max=rows_max, bytes_max=bytes_max))
        assert list(chain.from_iterable(chunks)) == list(db.items(prefix))
        assert all(0 < len(chunk) <= rows_max for chunk in chunks)


def test_a_list_ends_soon_after_it_has_its_bytes(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", SETTINGS) as db:
        db.write_batch({b"%05d" % n: bytes(50_000) for n in range(300)})
        sizes = [sum(map(len, chain.from_iterable(c))) for c in db.chunks(rows_max=10**6, bytes_max=500_000)]
    assert sum(sizes) == 300 * 50_005
    assert max(sizes) < 1_100_000


def test_the_rows_are_those_at_the_call(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", SETTINGS) as db:
        db.write_batch({b"%03d" % n: b"old" for n in range(100)})
        chunks = db.chunks(rows_max=10, bytes_max=2**20)
        first = next(chunks)
        db.write_batch({b"%03d" % n: b"new" for n in range(200)})
        assert first + list(chain.from_iterable(chunks)) == [(b"%03d" % n, b"old") for n in range(100)]


def test_an_end_that_came_too_early_is_found_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocksdict's iterator ends at whatever it cannot read; the next look may find it readable."""
    with StoreReader.open(directory, SETTINGS) as db:
        chunks = db.chunks(b"b", rows_max=100, bytes_max=2**20)
        found = next(chunks)
        monkeypatch.setattr(chunks, "_rows", iter(()))
        assert found + list(chain.from_iterable(chunks)) == list(db.items(b"b"))


@pytest.mark.parametrize("at", [10, 10_000, 25_000])
def test_a_damaged_block_is_an_error_wherever_it_is(directory: Path, at: int) -> None:
    (sst, *_) = sorted(directory.glob("*.sst"))
    data = bytearray(sst.read_bytes())
    data[at] ^= 1
    sst.write_bytes(data)
    with StoreReader.open(directory, SETTINGS) as db, pytest.raises(DamagedError):
        list(db.chunks(rows_max=100, bytes_max=2**20))


def test_a_scan_that_is_held_does_not_keep_the_store_open(directory: Path) -> None:
    db = StoreReader.open(directory, SETTINGS)
    chunks = db.chunks(rows_max=10, bytes_max=2**20)
    next(chunks)
    db.close()
    with pytest.raises(UsageError, match="closed"):
        next(chunks)
    with StoreWriter.open(directory, SETTINGS) as again:
        assert again.get(b"a00000") is not None


@pytest.mark.parametrize("row_checksums", [True, False])
async def test_families_come_without_their_prefixes_and_rows_without_checksums(
    tmp_path: Path, *, row_checksums: bool
) -> None:
    settings = settings_of(column_families=True, row_checksums=row_checksums, row_check_ratio=1)
    async with await StateStore.open(tmp_path / "state", tmp_path / "work", settings) as store:
        await store.load(0)
        for family in ("default", "other"):
            store.add_family(family)
            for n in range(50):
                store.put(b"%03d" % n, family.encode(), family)
        store.merge(b"999", b"late", "other")
        for family in store.families:
            rows = list(chain.from_iterable(store.chunks(family, rows_max=7, bytes_max=2**20)))
            assert rows == list(store.items(family=family))
            assert len(rows) == (51 if family == "other" else 50)
