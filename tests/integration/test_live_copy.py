"""A RocksDB is copied while another process writes to it, and each copy is a prefix of its history (design 0012)."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import rocksdict

from engine.backup.live import LiveRocksDb
from engine.errors import DamagedError, NotFoundError, SourceChangedError, UnsafeSourceError
from engine.local.checksums import crc32c
from engine.repository.repository import SyncRepository
from engine.rocksdb import live
from engine.rocksdb.live import LiveCopy, LiveReader
from index.errors import UnknownFormatError
from index.rocksdb import manifest
from index.snapshot.model import Scope
from tests.integration.live_writer import KINDS, OTHER, History, open_writer, options, read_rows, writing

ROOT = Path(__file__).parents[2]
KEYS = 1500
COPIES = int(os.environ.get("TIDEMARK_LIVE_COPIES", "10000"))
JOB = Scope("job")


def check_copies(root: Path, kind: str, count: int, *, keys: int = KEYS, rate: int = 0) -> list[LiveCopy]:
    """Take copies beside a writer, and compare each with the history of what it writes."""
    taken, history, numbers = [], History(keys), []
    with writing(root / "db", kind, keys, rate=rate):
        reader = LiveReader(root / "db")
        for _ in range(count):
            copy = root / "copy"
            copy.mkdir()
            taken.append(reader.copy(copy))
            rows = read_rows(copy)
            number = history.find(rows)
            assert number is not None, f"copy {len(taken)} is not a prefix: {taken[-1]}"
            if kind in {"families", "atomic"}:
                assert read_rows(copy, OTHER) == rows, f"copy {len(taken)} is of two times: {taken[-1]}"
            numbers.append(number)
            shutil.rmtree(copy)
        reader.close()
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_each_copy_is_a_prefix_of_the_history(tmp_path: Path, kind: str) -> None:
    taken = check_copies(tmp_path, kind, 25, rate=20_000)
    assert all(copy.bytes_copied == 0 for copy in taken)
    assert any(copy.log_bytes for copy in taken) == (kind not in {"no-wal", "atomic"})


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_many_copies_is_a_prefix_of_the_history(tmp_path: Path, kind: str) -> None:
    """5,000 of a store of some 120 SSTs with a write-ahead log, as many without one, and 1,000 of each other kind."""
    count = COPIES // 2 if kind in {"no-wal", "wal"} else COPIES // 10
    check_copies(tmp_path, kind, count, keys=6000, rate=5000)


@pytest.mark.parametrize("kind", ["wal", "no-wal"])
def test_backups_of_one_that_is_written_restore_to_a_prefix(tmp_path: Path, kind: str) -> None:
    history = History(KEYS)
    with SyncRepository.init(f"file://{tmp_path}/repository") as repository, writing(tmp_path / "db", kind, KEYS):
        with LiveRocksDb(tmp_path / "db") as source:
            for number in range(1, 4):
                repository.commit(JOB, [repository.backup(JOB, source)])
                source.clear()
                repository.find_and_restore(JOB, tmp_path / f"restored-{number}")
                assert history.find(read_rows(tmp_path / f"restored-{number}")) is not None
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_backup_uploads_only_what_is_new(tmp_path: Path) -> None:
    made = options("no-wal")
    # A compaction would make new files of old ones.
    made.set_disable_auto_compactions(disable=True)
    db = rocksdict.Rdict(str(tmp_path / "db"), made)
    unlogged = rocksdict.WriteOptions()
    unlogged.disable_wal = True  # type: ignore[method-assign,assignment]  # rocksdict's stub errs
    rows = {b"%08d" % n: os.urandom(500) for n in range(8000)}
    for key, value in rows.items():
        db.put(key, value, unlogged)
    db.flush()
    with SyncRepository.init(f"file://{tmp_path}/repository") as repository, LiveRocksDb(tmp_path / "db") as source:
        first = repository.backup(JOB, source)
        repository.commit(JOB, [first])
        assert first.stats.bytes_uploaded > 4_000_000
        for n in range(50):
            rows[b"new %d" % n] = b"%d" % n
            db.put(b"new %d" % n, b"%d" % n, unlogged)
        db.flush()
        plan = repository.plan_backup(JOB, source)
        second = repository.backup(JOB, source)
        assert second.stats.bytes_uploaded < 100_000
        assert plan.upload_bytes <= second.stats.bytes_uploaded
        assert second.stats.bytes_retained > 4_000_000
        repository.commit(JOB, [second])
        # Nothing of it has dropped the lock of this very process.
        with pytest.raises(UnsafeSourceError, match="is held"):
            repository.backup(JOB, tmp_path / "db")
        repository.find_and_restore(JOB, tmp_path / "restored")
    db.close()
    assert read_rows(tmp_path / "restored") == rows


def test_one_that_nobody_holds_any_more_is_copied_with_all_that_reached_its_log(tmp_path: Path) -> None:
    with writing(tmp_path / "db", "wal", KEYS) as writer:
        writer.kill()
        writer.wait()
        (tmp_path / "copy").mkdir()
        taken = LiveReader(tmp_path / "db").copy(tmp_path / "copy")
        assert taken.log_bytes > 0
        # What is left of it opens as RocksDB opens it after a crash.
        rows = read_rows(tmp_path / "copy")
        assert rows == read_rows(tmp_path / "db")
        assert History(KEYS).find(rows) is not None


def test_a_store_that_is_made_again_meanwhile_is_another_one(tmp_path: Path) -> None:
    """Its names, numbers and perhaps inodes are those of the one before."""
    reader = LiveReader(tmp_path / "db")
    for turn in range(3):
        db = open_writer(tmp_path / "db", "wal")
        for n in range(500):
            db[b"%d" % n] = b"%d" % turn * 100
        db.flush()
        db[b"last"] = b"%d" % turn
        (tmp_path / "copy").mkdir()
        reader.copy(tmp_path / "copy")
        expected = {**{b"%d" % n: b"%d" % turn * 100 for n in range(500)}, b"last": b"%d" % turn}
        assert read_rows(tmp_path / "copy") == expected
        db.close()
        shutil.rmtree(tmp_path / "copy")
        shutil.rmtree(tmp_path / "db")
    reader.close()


COPIER = """
import sys
from pathlib import Path
from engine.backup.live import LiveRocksDb
with LiveRocksDb(Path(sys.argv[1])) as source:
    for _ in range(1000):
        source._take()
        sys.stdout.write("taken\\n")
        sys.stdout.flush()
"""


def test_what_a_killed_copier_left_is_removed_and_what_one_at_work_has_is_not(tmp_path: Path) -> None:
    def left() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if path.name.startswith(".db.tidemark-live-")]

    with writing(tmp_path / "db", "no-wal", KEYS), LiveRocksDb(tmp_path / "db") as at_work:
        at_work._take()
        for _ in range(3):
            command = [sys.executable, "-c", COPIER, str(tmp_path / "db")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as copier:
                assert copier.stdout is not None
                assert copier.stdout.readline() == "taken\n"
                copier.send_signal(signal.SIGKILL)
            assert len(left()) == 2
        with LiveRocksDb(tmp_path / "db") as source:
            assert len(left()) == 2
            source._take()
        assert [tmp_path / name for name in left()] == [at_work.directory.parent]
        assert History(KEYS).find(read_rows(at_work.directory)) is not None
    assert left() == []


# --- while logs are copied ---


def cannot_link(*_: object, **__: object) -> None:
    raise OSError(18, "Invalid cross-device link")


Meanwhile = Callable[[rocksdict.Rdict, Path], None]


def put(db: rocksdict.Rdict, names: str) -> None:
    for name in names:
        db[name.encode()] = name.encode() * 400


def flush(db: rocksdict.Rdict, directory: Path) -> None:
    """The log of what is flushed is deleted."""
    (log,) = (path for path in directory.glob("*.log") if path.stat().st_size)
    put(db, "b")
    db.flush()
    assert not log.exists()
    put(db, "c")


def flush_without_links(db: rocksdict.Rdict, directory: Path) -> None:
    """A log that has no other name may be cut before it is deleted."""
    flush(db, directory)


def use_again(db: rocksdict.Rdict, directory: Path) -> None:
    """The log of what is flushed becomes the one after the next."""
    (log,) = (path for path in directory.glob("*.log") if path.stat().st_size)
    inode = log.stat().st_ino
    for name in "bc":
        put(db, name)
        db.flush()
    put(db, "d")
    assert not log.exists()
    assert inode in {path.stat().st_ino for path in directory.glob("*.log")}


def ingest(db: rocksdict.Rdict, directory: Path) -> None:
    writer = rocksdict.SstFileWriter(rocksdict.Options(raw_mode=True))
    writer.open(str(directory.parent / "new.sst"))
    writer[b"z"] = b"z"
    writer.finish()
    db.ingest_external_file([str(directory.parent / "new.sst")])
    put(db, "b")


@pytest.mark.parametrize(
    "kind, meanwhile, attempts, keys",
    [
        ("wal", flush, 1, "ab"),
        ("wal", flush_without_links, 2, "abc"),
        ("recycled", use_again, 2, "abcd"),
        ("wal", ingest, 2, "abz"),
    ],
)
def test_only_what_a_log_does_not_outlive_begins_a_copy_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, meanwhile: Meanwhile, attempts: int, keys: str
) -> None:
    db = open_writer(tmp_path / "db", kind)
    put(db, "a")
    calls: list[object] = []
    if meanwhile is flush_without_links:
        monkeypatch.setattr(os, "link", cannot_link)

    def take(logs: Sequence[live._HeldLog], target: Path) -> int:
        calls.append(target)
        if len(calls) == 1:
            meanwhile(db, tmp_path / "db")
        return take_logs(logs, target)

    take_logs = live._take_logs
    monkeypatch.setattr(live, "_take_logs", take)
    (tmp_path / "copy").mkdir()
    with closing(LiveReader(tmp_path / "db")) as reader:
        assert reader.copy(tmp_path / "copy").attempts == attempts
    assert "".join(sorted(key.decode() for key in read_rows(tmp_path / "copy"))) == keys
    db.close()


_COMPRESSED_LOGS = """\
[Version]
  rocksdb_version=9.8.4
  options_file_version=1.1
[DBOptions]
  wal_compression=kZSTD
  recycle_log_file_num=2
[CFOptions "default"]
[TableOptions/BlockBasedTable "default"]
"""


def test_a_compressed_log_in_the_place_of_an_older_one_is_copied_to_its_end(tmp_path: Path) -> None:
    # rocksdict has no call for the compression of logs.
    (tmp_path / "OPTIONS-000001").write_text(_COMPRESSED_LOGS)
    (tmp_path / "rocksdict-config.json").write_text('{"raw_mode":true,"prefix_extractors":{}}')
    made, _ = rocksdict.Options.load_latest(str(tmp_path))
    made.create_if_missing(create_if_missing=True)
    db = rocksdict.Rdict(str(tmp_path / "db"), made)
    with closing(LiveReader(tmp_path / "db")) as reader:
        for number in range(40):
            db[number.to_bytes()] = os.urandom(1 + number * 37)
            if number % 7 == 0:
                db.flush()
            copy = tmp_path / f"copy-{number}"
            copy.mkdir()
            reader.copy(copy)
            assert sorted(read_rows(copy)) == [key.to_bytes() for key in range(number + 1)]
    db.close()


def test_a_log_that_the_listing_has_missed_begins_a_copy_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = open_writer(tmp_path / "db", "families")
    other = db.get_column_family(OTHER)
    other[b"key"] = b"value"
    # Flushes the default family alone: the other one still needs the log before.
    put(db, "a")
    db.flush()
    put(db, "b")
    listed: list[list[str]] = []

    def names(reader: LiveReader, pattern: re.Pattern[str]) -> Collection[str]:
        found = list(all_names(reader, pattern))
        listed.append(found)
        return found[:1] if pattern is live._LOG and len(listed) == 1 else found

    all_names = LiveReader._names
    monkeypatch.setattr(LiveReader, "_names", names)
    (tmp_path / "copy").mkdir()
    with closing(LiveReader(tmp_path / "db")) as reader:
        attempts = reader.copy(tmp_path / "copy").attempts
    assert len(listed[1]) > 1
    assert attempts == 2
    other.close()
    db.close()


def append(path: Path, edit: manifest.VersionEdit) -> None:
    record = manifest.encode_edit(edit)
    typed = b"\1" + record
    with path.open("ab") as log:
        log.write(manifest.mask_crc(crc32c(typed)).to_bytes(4, "little") + len(record).to_bytes(2, "little") + typed)


def test_half_a_group_is_judged_when_its_end_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_writer(tmp_path / "db", "families").close()
    path = max((tmp_path / "db").glob("MANIFEST-*"))
    for family, left in ((0, 2), (1, 1)):
        append(path, manifest.VersionEdit(family=family, log_number=1000, group_left=left))
    # As the end of nothing that is new, half of a group is none.
    (tmp_path / "copy").mkdir()
    with closing(LiveReader(tmp_path / "db")) as reader:
        assert reader.copy(tmp_path / "copy").attempts == 1
    calls: list[int] = []

    def hold(reader: LiveReader, least: int, target: Path, held: ExitStack) -> list[live._HeldLog]:
        if not calls:
            append(path, manifest.VersionEdit(group_left=0))
        calls.append(least)
        return hold_logs(reader, least, target, held)

    hold_logs = LiveReader._hold_logs
    monkeypatch.setattr(LiveReader, "_hold_logs", hold)
    (tmp_path / "again").mkdir()
    with closing(LiveReader(tmp_path / "db")) as reader:
        assert reader.copy(tmp_path / "again").attempts == 2
    assert calls[0] < calls[1] == 1000


# --- refusals ---


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    db = open_writer(tmp_path / "db", "wal")
    for n in range(4000):
        db[b"%08d" % n] = os.urandom(400)
    db.flush()
    db.close()
    return tmp_path / "db"


def refusal(directory: Path, kind: type[Exception]) -> str:
    target = directory.parent / "copy"
    target.mkdir()
    with pytest.raises(kind) as caught:
        LiveReader(directory).copy(target)
    assert not (target / "CURRENT").exists()
    return str(caught.value)


def test_a_directory_that_is_not_a_store_is_refused(tmp_path: Path, closed: Path) -> None:
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", NotFoundError)
    shutil.rmtree(tmp_path / "copy")
    refusal(tmp_path / "nowhere", UnsafeSourceError)
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "link").symlink_to(closed)
    refusal(tmp_path / "link", UnsafeSourceError)


@pytest.mark.parametrize("current", [b"MANIFEST-../../etc\n", b"MANIFEST-000005", b"", b"MANIFEST-000005\n" * 9])
def test_a_name_in_current_that_is_not_of_a_manifest_is_refused(closed: Path, current: bytes) -> None:
    (closed / "CURRENT").write_bytes(current)
    refusal(closed, DamagedError)


def test_files_that_are_not_as_the_manifest_says_are_refused(tmp_path: Path, closed: Path) -> None:
    sst = min(closed.glob("*.sst"))
    whole = sst.read_bytes()
    sst.write_bytes(whole[:-1])
    assert sst.name in refusal(closed, DamagedError)
    shutil.rmtree(tmp_path / "copy")
    sst.unlink()
    assert sst.name in refusal(closed, DamagedError)
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "elsewhere").write_bytes(whole)
    sst.symlink_to(tmp_path / "elsewhere")
    assert "a symbolic link" in refusal(closed, UnsafeSourceError)


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize("pattern", ["MANIFEST-*", "OPTIONS-*", "999999.log"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, closed: Path, pattern: str, kind: str) -> None:
    path = max(closed.glob(pattern), default=closed / pattern)
    with suppress(FileNotFoundError):
        path.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    refusal(closed, UnsafeSourceError)


def test_a_manifest_that_is_gone_is_damage(closed: Path) -> None:
    max(closed.glob("MANIFEST-*")).unlink()
    assert "MANIFEST" in refusal(closed, DamagedError)


def test_logs_that_are_elsewhere_are_refused(tmp_path: Path) -> None:
    made = options("wal")
    made.set_wal_dir(str(tmp_path / "logs"))
    db = rocksdict.Rdict(str(tmp_path / "db"), made)
    db[b"key"] = b"value"
    assert "elsewhere" in refusal(tmp_path / "db", UnsafeSourceError)
    db.close()


def test_blob_files_are_refused_by_name(tmp_path: Path) -> None:
    made = options("wal")
    made.set_enable_blob_files(val=True)
    made.set_min_blob_size(10)
    db = rocksdict.Rdict(str(tmp_path / "db"), made)
    db[b"key"] = b"value" * 100
    db.flush()
    assert "blob" in refusal(tmp_path / "db", UnknownFormatError)
    db.close()


def test_one_that_is_written_faster_than_it_is_copied_ends_with_an_error(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = max(closed.glob("MANIFEST-*"))

    def rolled_over(reader: LiveReader, target: Path) -> None:
        del reader, target
        shutil.copyfile(path, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    monkeypatch.setattr(LiveReader, "_take_options", rolled_over)
    monkeypatch.setattr("engine.rocksdb.live.ATTEMPTS_MAX", 10)
    assert "faster than it could be copied" in refusal(closed, SourceChangedError)


def test_files_are_copied_where_they_cannot_be_linked(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", cannot_link)
    target = closed.parent / "copy"
    target.mkdir()
    taken = LiveReader(closed).copy(target)
    assert taken.bytes_copied == sum(path.stat().st_size for path in target.glob("*.sst")) > 0
    assert read_rows(target) == read_rows(closed)
