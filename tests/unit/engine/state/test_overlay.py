"""Changes laid over a snapshot show the rows that a replay of them makes."""

import functools
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import rocksdict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import DamagedError, EngineError
from engine.rocksdb.store import StoreWriter, spark_settings
from engine.runtime import Runtime
from engine.state import overlay
from engine.state.changelogs import ChangelogWriter, Opener, open_changelog, replay
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.load import StateLoader
from engine.state.local_files import WorkingDir
from engine.state.overlay import OverlaidStore, gather_changes
from index.errors import FormatError, RowChecksumError
from index.snapshot.model import UniqueId
from index.spark.changelog import DELETE, DELETE_RANGE, MERGE, PUT, Record
from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import Bench, Conf, both_formats, settings_of, with_and_without_families

PREFIXES: Final = (b"", b"\x01\x00", b"\x02\x00", b"\x02\x00k", b"\xff\xff", b"\x03")

keys = st.builds(
    lambda family, number, rest: family + b"k%02d" % number + rest,
    st.sampled_from([b"\x01\x00", b"\x02\x00", b"\xff\xff"]),
    st.integers(0, 30),
    st.sampled_from([b"", b"\x00", b"\xff"]),
)
changes = st.one_of(st.tuples(keys, st.binary(max_size=9)), st.tuples(keys, st.none()))
lists = st.lists(changes, max_size=60)


def written(path: Path, records: Sequence[Record]) -> Opener:
    with ChangelogWriter(path, "lz4", 2) as writer:
        for record in records:
            writer.write(record)
        writer.finish()
    return functools.partial(open_changelog, path, "lz4")


def record_of(change: tuple[bytes, bytes | None]) -> Record:
    key, value = change
    return (DELETE, key, b"") if value is None else (PUT, key, value)


def laid_over(directory: Path, openers: Sequence[Opener]) -> OverlaidStore:
    store = OverlaidStore.open(directory, spark_settings(b""))
    assert store.lay_over(openers) is not None
    return store


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    flushed=st.lists(lists, min_size=1, max_size=3),
    compacted=st.integers(0, 3),
    logs=st.lists(lists, max_size=3),
    rows_max=st.integers(4, 40),
    bytes_max=st.integers(16, 400),
)
def test_rows_are_those_of_a_replay(
    flushed: list[list[tuple[bytes, bytes | None]]],
    compacted: int,
    logs: list[list[tuple[bytes, bytes | None]]],
    rows_max: int,
    bytes_max: int,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        with StoreWriter.open(root / "db", spark_settings(b"")) as db:
            # Files on level 0 above those of the last level.
            for number, batch in enumerate(flushed):
                db.write_batch(dict(batch))
                db.flush()
                if number < compacted:
                    db.compact()
        openers = [written(root / f"{n}.changelog", list(map(record_of, log))) for n, log in enumerate(logs, 1)]
        shutil.copytree(root / "db", root / "replayed")
        with (
            StoreWriter.open(root / "replayed", spark_settings(b"")) as replayed,
            laid_over(root / "db", openers) as store,
        ):
            found = gather_changes(openers)
            assert found is not None
            assert found[1] == replay(replayed, openers)
            for prefix in PREFIXES:
                expected = list(replayed.items(prefix))
                assert list(store.items(prefix)) == expected
                chunks = list(store.chunks(prefix, rows_max=rows_max, bytes_max=bytes_max))
                assert [row for chunk in chunks for row in chunk] == expected
                assert all(0 < len(chunk) <= rows_max for chunk in chunks)
            rows = dict(replayed.items())
            for start in sorted(rows)[::7]:
                assert list(store.items(start=start)) == list(replayed.items(start=start))
            named = sorted({key for batch in (*flushed, *logs) for key, _ in batch})
            assert store.get_many(named) == [rows.get(key) for key in named]
            assert store.count(prefix_bytes=2) == replayed.count(prefix_bytes=2)
            assert store.count() == replayed.count()


def test_chunks_are_bounded_however_many_changes_there_are_between_two_rows(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        db.write_batch({b"a": b"1", b"z": b"1"})
        db.flush()
    log = written(tmp_path / "1.changelog", [(PUT, b"k%05d" % n, b"v" * 100) for n in range(5_000)])
    with laid_over(tmp_path / "db", [log]) as store:
        chunks = list(store.chunks(rows_max=1_000, bytes_max=20_000))
    assert sum(map(len, chunks)) == 5_002
    assert max(len(key) + len(value) for chunk in chunks for key, value in chunk) <= 106
    assert max(sum(len(key) + len(value) for key, value in chunk) for chunk in chunks) <= 20_000 + 2 * 106


@pytest.mark.parametrize("record", [(MERGE, b"k", b"x"), (DELETE_RANGE, b"a", b"b")], ids=["MERGE", "DELETE_RANGE"])
def test_other_records_are_left_to_a_replay(tmp_path: Path, record: Record) -> None:
    first = written(tmp_path / "1.changelog", [(PUT, b"a", b"1")])
    second = written(tmp_path / "2.changelog", [(PUT, b"b", b"1"), record, (PUT, b"c", b"1")])
    assert gather_changes([first]) is not None
    assert gather_changes([first, second]) is None


def test_large_changelogs_are_left_to_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written(tmp_path / "1.changelog", [(PUT, b"k%03d" % n, b"v" * 96) for n in range(100)])
    taken_bytes = 2 * 100 * 100
    monkeypatch.setattr(overlay, "OVERLAID_BYTES_MAX", taken_bytes)
    assert gather_changes([log, log]) is not None
    monkeypatch.setattr(overlay, "OVERLAID_BYTES_MAX", taken_bytes - 1)
    assert gather_changes([log, log]) is None


def test_many_records_are_left_to_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written(tmp_path / "1.changelog", [(PUT, b"k", b"v")] * 100)
    monkeypatch.setattr(overlay, "OVERLAID_RECORDS_MAX", 200)
    assert gather_changes([log, log]) is not None
    assert gather_changes([log, log, log]) is None


def test_a_second_column_family_is_damage(tmp_path: Path) -> None:
    # Open for reading only, RocksDB would leave its rows out and say nothing.
    db = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=True))
    db.create_column_family("other", rocksdict.Options(raw_mode=True))
    db.close()
    with pytest.raises(DamagedError, match="other"):
        OverlaidStore.open(tmp_path / "db")


def test_nothing_can_be_written(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "db").close()
    with laid_over(tmp_path / "db", []) as store, pytest.raises(EngineError):
        store.put(b"k", b"v")


# --- as the loader has it


class Scanned(NamedTuple):
    """What a load shows of a version."""

    rows: dict[str, list[tuple[bytes, bytes]]]
    is_overlaid: bool
    records: int


async def scan(bench: Bench, conf: Conf, version: int, unique_id: UniqueId | None, *, overlays: bool = True) -> Scanned:
    files = await CheckpointDir.open(bench.root)
    place = WorkingDir.open(bench.new_work())
    loader = StateLoader(StateFileManager(files, settings_of(count_keys=False, **conf)), place, Runtime())
    try:
        state, metrics = await loader.load(StateVersion(version, unique_id), {}, read_only=True, overlays=overlays)
        try:
            found = {
                family: [row for chunk in state.chunks(family, rows_max=8, bytes_max=200) for row in chunk]
                for family in state.families.names
            }
            return Scanned(found, isinstance(state.db, OverlaidStore), metrics.records)
        finally:
            state.db.close()
    finally:
        place.close()
        await files.close()


async def history(bench: Bench, conf: Conf, *, merges: bool = False, drops: bool = False) -> list[UniqueId | None]:
    """A snapshot at version 2 and three changelogs above it; the fourth version may merge, or remove a range."""
    ids: list[UniqueId | None] = [None]
    rng = random.Random(3)
    async with bench.store(**conf, deltas_per_snapshot=100) as store:
        for version in range(1, 6):
            await store.load(version - 1, ids[-1])
            if conf.get("column_families") and version == 1:
                store.add_family("more")
                store.add_family("$internal", internal=True)
            for _ in range(40):
                family, key = rng.choice(store.families), b"k%02d" % rng.randrange(30)
                if rng.random() < 0.3:
                    store.delete(key, family)
                else:
                    store.put(key, b"%d of %d" % (rng.randrange(9), version), family)
            if merges and version == 4:
                store.merge(b"k01", b"x", "more")
            if drops and version == 4:
                assert store.drop_family("more")
            ids.append((await store.commit(snapshot=version == 2)).unique_id)
    return ids


@both_formats
@with_and_without_families
@pytest.mark.parametrize("row_checksums", [False, True], ids=["bare", "checksums"])
async def test_every_version_is_read_as_a_replay_makes_it(
    bench: Bench, format_version: int, families: bool, row_checksums: bool
) -> None:
    conf: Conf = {
        "format_version": format_version,
        "column_families": families,
        "row_checksums": row_checksums,
        "row_check_ratio": 1,
    }
    ids = await history(bench, conf)
    for version in range(1, 6):
        found = await scan(bench, conf, version, ids[version])
        replayed = await scan(bench, conf, version, ids[version], overlays=False)
        assert found.rows == replayed.rows
        assert any(found.rows.values())
        # With families the first version is a snapshot. Where there is none, changes are laid over nothing.
        newest_snapshot = 2 if version > 1 else int(families)
        assert found.records == replayed.records == 40 * (version - newest_snapshot)
        assert found.is_overlaid == (newest_snapshot > 0)
        assert not replayed.is_overlaid


@pytest.mark.parametrize("what", ["merges", "drops", "large"])
async def test_a_version_is_replayed_where_changes_cannot_be_laid_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    conf: Conf = {"column_families": True}
    ids = await history(bench, conf, merges=what == "merges", drops=what == "drops")
    if what == "drops":
        bench.file(4, "zip").unlink()  # the snapshot that a dropped family comes with
    if what == "large":
        monkeypatch.setattr(overlay, "OVERLAID_RECORDS_MAX", 39)
    assert (await scan(bench, conf, 3, ids[3])).is_overlaid == (what != "large")
    found = await scan(bench, conf, 4, ids[4])
    assert not found.is_overlaid
    assert found == await scan(bench, conf, 4, ids[4], overlays=False)


@pytest.mark.parametrize("damage", ["cut", "flipped", "row"])
async def test_a_damaged_changelog_is_the_same_error(bench: Bench, damage: str) -> None:
    conf: Conf = {"row_checksums": True, "file_checksums": False}
    ids = await history(bench, conf)
    path = bench.file(4, "changelog")
    if damage == "row":
        with open_changelog(path, "lz4") as log:
            records, header = [record for batch in log for record in batch], log.header
        with ChangelogWriter(path, "lz4", header.version, header.lineage) as writer:
            for kind, key, value in records:
                writer.write((kind, key, value.replace(b" of ", b" or ")) if kind == PUT else (DELETE, key, b""))
            writer.finish()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-40] if damage == "cut" else data)
    errors: list[Exception] = []
    for overlays in (True, False):
        with pytest.raises((EngineError, FormatError)) as caught:
            await scan(bench, conf, 5, ids[5], overlays=overlays)
        errors.append(caught.value)
    assert {type(error) for error in errors} == {RowChecksumError if damage == "row" else type(errors[1])}
    assert str(errors[0]) == str(errors[1])


async def test_settings_that_do_not_fit_a_snapshot_are_the_same_error(bench: Bench) -> None:
    ids = await history(bench, {"column_families": True})
    errors: list[str] = []
    for overlays in (True, False):
        with pytest.raises((EngineError, FormatError)) as caught:
            await scan(bench, {"column_families": False}, 5, ids[5], overlays=overlays)
        errors.append(f"{type(caught.value)} {caught.value}")
    assert errors[0] == errors[1]


async def test_a_snapshot_that_does_not_open_is_repaired_from_an_older_one(bench: Bench) -> None:
    conf: Conf = {"file_checksums": False}
    ids = await history(bench, conf)
    async with bench.store(**conf, deltas_per_snapshot=1) as store:
        await store.load(5, ids[5])
        store.put(b"last", b"1")
        ids.append((await store.commit(snapshot=True)).unique_id)
    expected = await scan(bench, conf, 6, ids[6], overlays=False)
    bench.file(6, "zip").write_bytes(b"no zip")
    found = await scan(bench, conf, 6, ids[6])
    assert (found.rows, found.is_overlaid, found.records) == (expected.rows, True, 40 * 3 + 1)


async def test_nothing_of_rocksdb_is_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = await history(bench, {})
    before: dict[str, bytes] = {}
    opening = OverlaidStore.open

    def noting(directory: Path, *args: Any, **options: Any) -> OverlaidStore:
        before.update({path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()})
        return opening(directory, *args, **options)

    closing = OverlaidStore.close

    def comparing(self: OverlaidStore) -> None:
        closing(self)
        after = {path.name: path.read_bytes() for path in self.directory.iterdir() if path.is_file()}
        assert {name: after.pop(name) for name in before} == before
        assert not [name for name in after if name not in {"LOG", "rocksdict-config.json"}]

    monkeypatch.setattr(OverlaidStore, "open", noting)
    monkeypatch.setattr(OverlaidStore, "close", comparing)
    assert (await scan(bench, {}, 5, ids[5])).is_overlaid
    assert before
