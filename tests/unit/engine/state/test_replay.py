"""Replay against a plain dict that takes one record after another."""

import functools
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from engine.errors import DamagedError
from engine.rocksdb.store import RocksDbSettings, StoreWriter, spark_settings
from engine.state import changelogs as replay_module
from engine.state.changelogs import (
    ChangelogReader,
    ChangelogWriter,
    KeyCounts,
    Replayed,
    count_store,
    open_changelog,
    replay,
)
from index.errors import DamagedChangelogError
from index.spark.changelog import DELETE, DELETE_RANGE, MERGE, PUT, Record

OPERANDS = Path(__file__).parents[3] / "golden" / "spark_operands"
FAMILIES = (b"\x01\x00", b"\x02\x00", b"\x03\x00")
Opener = Callable[[], AbstractContextManager[ChangelogReader]]


def is_internal(key: bytes) -> bool:
    return key[:2] == FAMILIES[2]


def written(path: Path, records: Sequence[Record]) -> Opener:
    with ChangelogWriter(path, "lz4", 2) as writer:
        for kind, key, value in records:
            match kind:
                case 0x01:
                    writer.write((PUT, key, value))
                case 0x11:
                    writer.write((MERGE, key, value))
                case 0x10:
                    writer.write((DELETE, key, b""))
                case _:
                    writer.write((DELETE_RANGE, key, value))
        writer.finish()
    return functools.partial(open_changelog, path, "lz4")


def apply(state: dict[bytes, bytes], records: Sequence[Record], delimiter: bytes) -> None:
    """The model."""
    for kind, key, value in records:
        match kind:
            case 0x01:
                state[key] = value
            case 0x11:
                state[key] = state[key] + delimiter + value if key in state else value
            case 0x10:
                state.pop(key, None)
            case _:
                for gone in [k for k in state if key <= k < value]:
                    del state[gone]


def counts_of(state: dict[bytes, bytes]) -> KeyCounts:
    internal = sum(map(is_internal, state))
    return KeyCounts(len(state) - internal, internal)


def some_records(rng: random.Random, count: int, keys: int) -> list[Record]:
    def key() -> bytes:
        return rng.choice(FAMILIES) + b"%04d" % rng.randrange(keys)

    records: list[Record] = []
    for n in range(count):
        match rng.choices([PUT, MERGE, DELETE, DELETE_RANGE], [6, 5, 3, 0.05])[0]:
            case 0x10:
                records.append((DELETE, key(), b""))
            case 0x20:
                family = rng.choice(FAMILIES)
                begin = rng.randrange(keys)
                records.append((DELETE_RANGE, family + b"%04d" % begin, family + b"%04d" % (begin + 20)))
            case kind:
                records.append((kind, key(), b"%d" % n * rng.randrange(3)))
    return records


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "BATCH_KEYS", 7)
    monkeypatch.setattr(replay_module, "BATCH_BYTES", 300)
    monkeypatch.setattr(replay_module, "_LOOKUP_KEYS", 3)


def check_random_history(directory: Path, seed: int, *, by_scan: bool) -> None:
    rng = random.Random(seed)
    delimiter = rng.choice([b"", b","])
    state: dict[bytes, bytes] = {}
    with StoreWriter.open(directory / "db", spark_settings(delimiter)) as db:
        base = some_records(rng, 200, 60)
        apply(state, [record for record in base if record[0] == PUT], delimiter)
        db.write_batch(dict(state))
        if rng.random() < 0.5:
            db.flush()
        # Where a store has far more keys than are looked up, it is not scanned.
        more = 0 if by_scan else 1_000_000
        before = counts_of(state)
        logs = [some_records(rng, rng.randrange(300), 60) for _ in range(4)]
        openers = [written(directory / f"{n}.changelog", log) for n, log in enumerate(logs, 1)]
        for log in logs:
            apply(state, log, delimiter)
        done = replay(db, openers, before=KeyCounts(before.keys + more, before.internal_keys), is_internal=is_internal)
        assert dict(db.items()) == state
        after = counts_of(state)
        assert done == Replayed(
            changelogs=4,
            records=sum(map(len, logs)),
            size_bytes=sum(len(key) + len(value) for log in logs for _, key, value in log),
            counts=KeyCounts(after.keys + more, after.internal_keys),
        )
        assert count_store(db, is_internal) == after


@pytest.mark.parametrize("by_scan", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_random_history_ends_where_one_record_after_another_does(tmp_path: Path, seed: int, by_scan: bool) -> None:
    check_random_history(tmp_path, seed, by_scan=by_scan)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("by_scan", [False, True])
@pytest.mark.parametrize("seed", range(100, 112))
def test_where_batches_end_does_not_matter(tmp_path: Path, seed: int, by_scan: bool) -> None:
    check_random_history(tmp_path, seed, by_scan=by_scan)


K = b"\x01\x00k"


@pytest.mark.parametrize(
    "base, records, expected",
    [
        pytest.param(None, [], None, id="nothing happens"),
        pytest.param(None, [(PUT, K, b"1"), (PUT, K, b"2")], b"2", id="the last put wins"),
        pytest.param(b"0", [(DELETE, K, b""), (PUT, K, b"1")], b"1", id="a put after a delete"),
        pytest.param(b"0", [(PUT, K, b"1"), (DELETE, K, b"")], None, id="a delete after a put"),
        pytest.param(None, [(DELETE, K, b"")], None, id="a delete of nothing"),
        pytest.param(None, [(PUT, K, b"")], b"", id="an empty value is a value"),
        pytest.param(b"0", [(MERGE, K, b"1")], b"0,1", id="an operand after the stored value"),
        pytest.param(b"", [(MERGE, K, b"1")], b",1", id="an operand after an empty stored value"),
        pytest.param(None, [(MERGE, K, b"1")], b"1", id="an operand alone"),
        pytest.param(None, [(MERGE, K, b""), (MERGE, K, b"")], b",", id="empty operands"),
        pytest.param(b"0", [(MERGE, K, b"1"), (MERGE, K, b"2")], b"0,1,2", id="operands in order"),
        pytest.param(b"0", [(PUT, K, b"1"), (MERGE, K, b"2")], b"1,2", id="an operand after a put"),
        pytest.param(b"0", [(DELETE, K, b""), (MERGE, K, b"2")], b"2", id="an operand after a delete"),
        pytest.param(b"0", [(MERGE, K, b"1"), (PUT, K, b"2")], b"2", id="a put after an operand"),
        pytest.param(b"0", [(MERGE, K, b"1"), (DELETE, K, b"")], None, id="a delete after an operand"),
        pytest.param(
            b"0", [(PUT, K, b"1"), (MERGE, K, b"2"), (DELETE, K, b""), (MERGE, K, b"3")], b"3", id="all of it in turn"
        ),
        pytest.param(b"0", [(MERGE, K, b"1"), (DELETE_RANGE, b"", b"\xff")], None, id="a range after an operand"),
        pytest.param(b"0", [(DELETE_RANGE, b"", b"\xff"), (MERGE, K, b"1")], b"1", id="an operand after a range"),
        pytest.param(b"0", [(DELETE_RANGE, K, K)], b"0", id="an empty range"),
        pytest.param(b"0", [(DELETE_RANGE, b"", K)], b"0", id="a range that ends before the key"),
        pytest.param(b"0", [(DELETE_RANGE, K, K + b"\x00")], None, id="a range of one key"),
    ],
)
def test_what_becomes_of_one_key(
    tmp_path: Path, base: bytes | None, records: list[Record], expected: bytes | None
) -> None:
    with StoreWriter.open(tmp_path / "db", spark_settings(b",")) as db:
        db.write_batch({K: base})
        before = KeyCounts(int(base is not None))
        done = replay(db, [written(tmp_path / "1.changelog", records)], before=before)
        assert db.get(K) == expected
        assert done.counts == KeyCounts(int(expected is not None))


@pytest.mark.parametrize("name, delimiter", [("comma", b","), ("nothing", b"")])
def test_operands_are_appended_to_those_that_spark_left_in_the_files(
    tmp_path: Path, name: str, delimiter: bytes
) -> None:
    with zipfile.ZipFile(OPERANDS / f"{name}.zip") as archive:
        archive.extractall(tmp_path / "db")
    log = written(tmp_path / "4.changelog", [(MERGE, b"\x01\x00k3", b"third"), (MERGE, b"\x01\x00k4", b"new")])
    with StoreWriter.open(tmp_path / "db", spark_settings(delimiter)) as db:
        done = replay(db, [log], before=KeyCounts(1))
        assert db.get(b"\x01\x00k3") == delimiter.join([b"first", b"second", b"third"])
        assert db.get(b"\x01\x00k4") == b"new"
        assert done.counts == KeyCounts(2)


def test_without_counting_nothing_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written(tmp_path / "1.changelog", [(PUT, K, b"1"), (DELETE, b"\x01\x00l", b""), (DELETE_RANGE, b"a", b"b")])
    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        monkeypatch.setattr(db, "get_many", None)
        monkeypatch.setattr(db, "items", None)
        monkeypatch.setattr(db, "count", None)
        done = replay(db, [log])
        monkeypatch.undo()
        assert dict(db.items()) == {K: b"1"}
    assert done.counts is None


def test_where_most_of_a_store_changes_one_scan_stands_for_most_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Record] = [(PUT, b"%06d" % (n * 2), b"v") for n in range(8_000)]
    log = written(tmp_path / "1.changelog", records)
    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        db.write_batch({b"%06d" % n: b"" for n in range(10_000)})
        looked_up: list[int] = []
        get_many = db.get_many

        def counting(keys: Sequence[bytes]) -> list[bytes | None]:
            looked_up.append(len(keys))
            return get_many(keys)

        monkeypatch.setattr(db, "get_many", counting)
        done = replay(db, [log], before=KeyCounts(10_000))
        assert done.counts == KeyCounts(13_000)
        assert sum(looked_up) <= 2_048
        looked_up.clear()
        again = replay(db, [log], before=KeyCounts(100_000))
        assert again.counts == KeyCounts(100_000)
        assert sum(looked_up) == 8_000


def test_rows_are_checked_before_they_count(tmp_path: Path) -> None:
    log = written(tmp_path / "1.changelog", [(PUT, b"k1", b"1"), (PUT, b"k2", b"bad")])
    checked: list[Record] = []

    def check(record: Record) -> Record:
        checked.append(record)
        if record[2] == b"bad":
            raise DamagedError("does not match", operation="check row")
        return (record[0], record[1] + b"!", record[2])

    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        with pytest.raises(DamagedError, match="does not match"):
            replay(db, [log], check_row=check)
        assert dict(db.items()) == {}
        good = written(tmp_path / "2.changelog", [(PUT, b"k1", b"1")])
        replay(db, [good], check_row=check)
        assert dict(db.items()) == {b"k1!": b"1"}
    assert [key for _, key, _ in checked] == [b"k1", b"k2", b"k1"]


def test_a_changelog_that_is_cut_short_is_an_error_and_closed(tmp_path: Path) -> None:
    whole = written(tmp_path / "1.changelog", [(PUT, b"k%d" % n, b"%d" % (n * 7919)) for n in range(20_000)])
    data = (tmp_path / "1.changelog").read_bytes()
    (tmp_path / "2.changelog").write_bytes(data[: len(data) // 2])
    cut = functools.partial(open_changelog, tmp_path / "2.changelog", "lz4")

    cut_short = pytest.raises((DamagedError, DamagedChangelogError), match=r"2\.changelog")
    with StoreWriter.open(tmp_path / "db", RocksDbSettings()) as db, cut_short:
        replay(db, [whole, cut])
    assert tmp_path / "2.changelog" not in [fd.resolve() for fd in Path("/proc/self/fd").iterdir()]


def test_changelogs_are_opened_one_after_another(tmp_path: Path) -> None:
    log = written(tmp_path / "1.changelog", [(PUT, b"k", b"v")])
    steps: list[str] = []

    @contextmanager
    def opener() -> Iterator[ChangelogReader]:
        with log() as reader:
            steps.append("open")
            yield reader
        steps.append("close")

    with StoreWriter.open(tmp_path / "db") as db:
        assert replay(db, [opener] * 5).changelogs == 5
    assert steps == ["open", "close"] * 5


def test_memory_is_bounded_however_much_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "BATCH_BYTES", 1024 * 1024)
    log = written(tmp_path / "1.changelog", [(PUT, b"k%08d" % n, b"v" * 500) for n in range(25_000)])
    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        tracemalloc.start()
        try:
            replay(db, [log], before=KeyCounts())
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert db.count() == {b"": 25_000}
    assert peak_bytes < 8 * 1024 * 1024


def test_memory_is_bounded_where_operands_meet_large_values(tmp_path: Path) -> None:
    large = b"v" * 1_000_000
    keys = [b"\x01\x00list%02d" % n for n in range(60)]
    log = written(tmp_path / "1.changelog", [(MERGE, key, b"x") for key in keys])
    with StoreWriter.open(tmp_path / "db", spark_settings(b"")) as db:
        for key in keys:
            db.put(key, large)
        tracemalloc.start()
        try:
            replay(db, [log], before=KeyCounts())
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert all(db.get(key) == large + b"x" for key in keys)
    assert peak_bytes < 80 * 1024 * 1024


@pytest.mark.parametrize("begin_after_bytes", [1, 10**9])
def test_compactions_that_wait_begin_with_the_end_at_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin_after_bytes: int
) -> None:
    monkeypatch.setattr(replay_module, "COMPACTED_AFTER_BYTES", begin_after_bytes)
    first = written(tmp_path / "1.changelog", [(PUT, b"k", b"v")])
    waiting: list[bool] = []
    with StoreWriter.open(tmp_path / "db", spark_settings(b""), compactions_wait=True) as db:

        def second() -> AbstractContextManager[ChangelogReader]:
            waiting.append(db._compactions_wait)
            return first()

        replay(db, [first, second])
        assert waiting == [begin_after_bytes > 1]
        assert not db._compactions_wait


def test_an_empty_replay_does_nothing(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "db") as db:
        assert replay(db, [], before=KeyCounts()) == Replayed(counts=KeyCounts())
        assert count_store(db) == KeyCounts()
