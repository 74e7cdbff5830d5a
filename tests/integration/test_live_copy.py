"""A RocksDB is copied while another process writes to it, and each copy is a prefix of its history (design 0012)."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import rocksdict

from engine.backup.live import LiveRocksDb
from engine.errors import DamagedError, NotFoundError, SourceChangedError, UnsafeSourceError
from engine.repository.repository import SyncRepository
from engine.rocksdb.live import LiveCopy, LiveReader
from index.errors import UnknownFormatError
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
    manifest = max(closed.glob("MANIFEST-*"))

    def rolled_over(reader: LiveReader, target: Path) -> None:
        del reader, target
        shutil.copyfile(manifest, manifest.with_suffix(".new"))
        manifest.with_suffix(".new").rename(manifest)

    monkeypatch.setattr(LiveReader, "_take_options", rolled_over)
    monkeypatch.setattr("engine.rocksdb.live.ATTEMPTS_MAX", 10)
    assert "faster than it could be copied" in refusal(closed, SourceChangedError)


def test_files_are_copied_where_they_cannot_be_linked(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    target = closed.parent / "copy"
    target.mkdir()
    taken = LiveReader(closed).copy(target)
    assert taken.bytes_copied == sum(path.stat().st_size for path in target.glob("*.sst")) > 0
    assert read_rows(target) == read_rows(closed)
