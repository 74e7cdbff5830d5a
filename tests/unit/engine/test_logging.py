"""What a program learns that configures Python's `logging`, and that any other one is shown errors alone."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from blobstore.base import BytesBody
from blobstore.errors import AccessDeniedError, InvalidRequestError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, open_store
from blobstore.wrappers.forwarding import InFlightLimit
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from engine.errors import CommitLostError, LeaseExpiredError
from engine.repository.repository import Repository
from engine.text import Where
from index.plan.commits import Retention
from tests.doubles import InterposedStore
from tests.unit.engine.conftest import JOB, TTL_MS, World

Lines = list[tuple[str, str]]


def lines(caplog: pytest.LogCaptureFixture, logger: str) -> Lines:
    """The level and text of each line of a logger; they are forgotten."""
    found = [(each.levelname, each.getMessage()) for each in caplog.records if each.name == logger]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("engine", "blobstore"):
        caplog.set_level(logging.DEBUG, name)


def place(world: World) -> str:
    return f"memory:{id(world.store.inner)}"


async def test_a_backup_and_its_commit_are_a_line_each(world: World, caplog: pytest.LogCaptureFixture) -> None:
    repository = await world.process()
    result = await world.backup(repository, "a", version=7)
    stats = result.stats
    said = f"backed up version 7: 4 files, of them 4 new and 0 retained; {stats.bytes_uploaded} bytes uploaded"
    key = result.reference.index.key
    assert lines(caplog, "engine.backup.backup") == [
        ("INFO", f"{place(world)} job 0/default: {said}; its index is {key}")
    ]
    await repository.commit(JOB, [result], version=7)
    acknowledged = f"{place(world)} job: commit 1 of version 7 is acknowledged; settled: True"
    assert lines(caplog, "engine.commit.writer") == [("INFO", acknowledged)]


async def test_a_commit_that_is_lost_or_void_is_a_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first, second = await world.process(), await world.process()
    results = [await world.backup(repository, "a") for repository in (first, second)]
    # Both have looked before either writes.
    await first._writer(JOB).head()
    await second._writer(JOB).head()
    await first.commit(JOB, results[:1])
    caplog.clear()
    with pytest.raises(CommitLostError):
        await second.commit(JOB, results[1:])
    ((level, said),) = lines(caplog, "engine.commit.writer")
    assert level == "WARNING"
    assert said.startswith(f"{place(world)} job: CommitLostError: ")
    late = await world.backup(first, "b")
    world.clock.advance(TTL_MS)
    with pytest.raises(LeaseExpiredError):
        await first.commit(JOB, [late])
    ((level, said),) = lines(caplog, "engine.commit.writer")
    assert (level, said.startswith(f"{place(world)} job: LeaseExpiredError: ")) == ("WARNING", True)


async def test_ttls_that_a_commit_could_not_remove_are_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    repository = await world.process()
    result = await world.backup(repository, "a")
    world.store.fail("remove_ttl", "")
    assert not (await repository.commit(JOB, [result])).settled
    (warned, acknowledged) = lines(caplog, "engine.commit.writer")
    assert warned[0] == "WARNING"
    assert "commit 1 keeps TTLs until the next one" in warned[1]
    assert acknowledged[1].endswith("settled: False")


async def test_a_restore_says_from_which_commit_and_what_it_fetched(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    repository = await world.process()
    await world.history(repository, "a", "b")
    restored = await repository.find_and_restore(JOB, target := world.target())
    fetched = restored.result.bytes_fetched
    said = f"restored version 2 of commit 2 to {target}: 4 files, {fetched} bytes fetched, 0 reused"
    assert lines(caplog, "engine.restore.restore") == [("INFO", f"{place(world)} job 0/default: {said}")]


async def test_a_pin_that_cannot_be_written_or_released_is_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    repository = await world.process()
    (commit,) = await world.history(repository, "a")
    world.store.fail("put", "pins/", AccessDeniedError("no", operation="put"))
    async with repository.pinned(commit, "look"):
        ((level, said),) = lines(caplog, "engine.records.leases")
    assert (level, said) == (
        "WARNING",
        f"{place(world)} job: pin for look cannot be written, so that nothing protects the work: put: no",
    )
    async with repository.pinned(commit, "look"):
        world.store.fail("put", "pins/")
    ((level, said),) = lines(caplog, "engine.records.leases")
    assert (level, "pin for look was not released" in said) == ("WARNING", True)


async def test_a_collection_says_what_it_deleted_and_why(world: World, caplog: pytest.LogCaptureFixture) -> None:
    repository = await world.process()
    await world.old_history(repository, "a", "b", "c")
    report = await repository.collect(Retention(keep_last=1), delete_share_max=1, dry_run=True)
    assert lines(caplog, "engine.collect.collect") == []
    report = await repository.collect(Retention(keep_last=1), delete_share_max=1)
    said = [(level, text.partition(": ")[2]) for level, text in lines(caplog, "engine.collect.collect")]
    assert said == [
        ("INFO", f"deleted {total.count} keys, {total.size_bytes} bytes: {total.reason.value}")
        for total in report.totals
    ]
    assert len(said) > 1


async def test_a_collection_that_breaks_off_says_what_it_has_deleted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    repository = await world.process()
    await world.old_history(repository, "a", "b", "c")
    world.store.fail("delete", "blobs/", AccessDeniedError("no", operation="delete"))
    with pytest.raises(AccessDeniedError):
        await repository.collect(Retention(keep_last=1), delete_share_max=1)
    said = [(level, text.partition(": ")[2]) for level, text in lines(caplog, "engine.collect.collect")]
    assert [level for level, _ in said] == ["INFO", "INFO", "WARNING"]
    assert said[0][1].startswith("deleted 2 keys")
    assert said[2][1].endswith("no answer came: they may be gone")


async def test_each_retry_is_a_line_and_that_a_store_asks_for_less_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = InterposedStore(MemoryStore())
    retrying = RetryingStore(store, RetrySettings(first_wait_s=0), limit=InFlightLimit(8))
    store.fail("put", "k", StoreUnavailableError("busy", operation="put", key="k", asks_for_less=True))
    await retrying.put("k", BytesBody(b""))
    assert lines(caplog, "blobstore.wrappers.retry") == [
        ("WARNING", "put k: busy; now 4 requests at once"),
        ("DEBUG", "attempt 2, after: put k: busy"),
    ]


async def test_an_opening_and_each_request_are_lines_for_who_wants_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path), StoreSettings(in_flight_max=3))
    ((level, said),) = lines(caplog, "blobstore.opening")
    assert (level, said.startswith(f"open {tmp_path}: 3 requests at once")) == ("DEBUG", True)
    await store.put("k", BytesBody(b""))
    await store.delete(["k", "l"])
    assert lines(caplog, "blobstore.wrappers.forwarding") == [("DEBUG", "put k"), ("DEBUG", "delete 2 keys")]
    await store.close()


@pytest.mark.parametrize("url", ["//u:SECRET@host/x", "S3//u:SECRET@b/x", "file:/u:SECRET@host/x", "/x?sig=SECRET"])
async def test_a_path_that_was_meant_as_a_url_shows_no_secret(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(url)
    assert "open a directory: 16" in caplog.text
    assert "SECRET" not in f"{caplog.text} {Where(store, 'job') if '?' not in url else ''}"


async def test_no_place_key_or_answer_can_forge_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(str(tmp_path / "a\nERROR forged"))
    with pytest.raises(InvalidRequestError):
        await store.stat("a\nERROR forged")
    flaky = InterposedStore(MemoryStore())
    flaky.fail("stat", "k", StoreUnavailableError("busy\nERROR forged", operation="stat", key="k", asks_for_less=True))
    await RetryingStore(flaky, RetrySettings(first_wait_s=0), limit=InFlightLimit(8)).stat("k")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert all(r"\nERROR forged" in line and "\n" not in line for line in said)


async def test_a_name_that_moves_the_cursor_is_spelled_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tree").mkdir()
    async with await Repository.init(MemoryStore()) as repository:
        await repository.backup(JOB, tmp_path / "tree", store="a\x1b[2Jb\n")
    ((_, said),) = lines(caplog, "engine.backup.backup")
    assert r"0/a\x1b[2Jb\n: backed up" in said


@pytest.mark.parametrize("level, seen", [("warning", ""), ("error", "not backed up\n")])
def test_only_errors_are_seen_where_nobody_has_configured_logging(level: str, seen: str) -> None:
    """An error is logged where no caller is left to raise it to."""
    program = f"import engine, logging; logging.getLogger('engine.spark.listener').{level}('not backed up')"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", seen)
    configured = f"import logging; logging.basicConfig(format='%(name)s %(message)s'); {program}"
    done = subprocess.run([sys.executable, "-c", configured], check=True, capture_output=True, text=True)
    assert done.stderr == "engine.spark.listener not backed up\n"


@pytest.mark.parametrize("name", ["engine", "engine.spark"])
def test_an_error_is_seen_once_by_who_configures_this_package_alone(name: str) -> None:
    program = (
        f"import engine, logging; logging.getLogger('{name}').addHandler(logging.StreamHandler());"
        "logging.getLogger('engine.spark.listener').error('not backed up')"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stderr == "not backed up\n"


def test_blobstore_alone_shows_nothing() -> None:
    program = "import blobstore, logging; logging.getLogger('blobstore.wrappers.retry').warning('busy')"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
