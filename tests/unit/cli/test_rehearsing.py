"""`tidemark bench restore`, as its user has it."""

import errno
import json
import random
from pathlib import Path

import pytest
from click.testing import Result

from engine import SyncRepository
from engine.rocksdb import StoreWriter
from index.model import Scope
from tests.unit.cli.conftest import Run

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A repository with a job of two RocksDB stores, and one with a name that is made to do harm."""
    url = f"file://{tmp_path}/repository"
    (tmp_path / "scratch").mkdir()
    chance = random.Random(7)
    with StoreWriter.open(tmp_path / "live") as store:
        for number in range(100):
            store.put(number.to_bytes(4), chance.randbytes(1000))
        store.checkpoint(tmp_path / "state")
    with SyncRepository.init(url) as repository:
        flights = [repository.backup(Scope("flights"), tmp_path / "state", task=task) for task in ("0", HOSTILE)]
        repository.commit(Scope("flights"), flights)
        repository.commit(Scope(HOSTILE), [repository.backup(Scope(HOSTILE), tmp_path / "state")])
    return url


def _page(tmp_path: Path) -> str:
    return (tmp_path / "report" / "rehearsals.html").read_text()


def _bench(run: Run, url: str, *words: str) -> Result:
    return run("bench", "restore", url, "-j", "flights", "--to", "scratch", "--report", "report", *words)


def test_a_rehearsal_tells_time_bound_and_forecast_and_leaves_a_report(run: Run, url: str, tmp_path: Path) -> None:
    result = _bench(run, url, "--slo", "5m")
    assert result.exit_code == 0, result.output
    for text in ("2 stores", "open RocksDB (2)", "SLO 5m: met", "bound by ", "16 executors", "10x, ", "report: "):
        assert text in result.stdout
    assert "flights" in _page(tmp_path)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_missed_slo_has_an_exit_code_of_its_own_and_a_report(run: Run, url: str, tmp_path: Path) -> None:
    result = _bench(run, url, "--slo", "1ms", "--one-line")
    assert result.exit_code == 11
    assert result.stdout.count("\n") == 1
    assert "SLO 1 ms: MISSED" in result.stdout
    assert "missed" in _page(tmp_path)


def test_a_duration_that_is_none_is_refused_before_anything_is_read(run: Run, url: str) -> None:
    assert _bench(run, url, "--slo", "soon").exit_code == 2


def test_to_nowhere_writes_nothing_but_the_report(run: Run, url: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    result = run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--report", "report", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["verb"], told["slo_met"], told["rehearsal"]["to_disk"]) == ("bench restore", None, False)
    assert {bound["bound"] for bound in told["bounds"]} == {"network", "requests", "cpu"}
    assert told["bound_by"] in {"network", "requests", "cpu"}
    assert {path.name for path in tmp_path.iterdir()} == before | {"report"}
    assert run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--keep").exit_code == 2


def test_the_history_grows_and_a_broken_line_is_told_and_stays(run: Run, url: str, tmp_path: Path) -> None:
    assert _bench(run, url).exit_code == 0
    history = tmp_path / "report" / "rehearsals.jsonl"
    with history.open("a") as file:
        file.write("half a li")
    second = _bench(run, url)
    assert second.exit_code == 0
    assert "line 2: is no rehearsal" in second.stderr
    assert "2 rehearsals" in _page(tmp_path)
    assert [line[:4] for line in history.read_text().splitlines()] == ['{"ou', "half", '{"ou']


def test_a_job_with_a_hostile_name_does_no_harm(run: Run, url: str, tmp_path: Path) -> None:
    result = run("bench", "restore", url, "-j", HOSTILE, "--to", "scratch", "--report", "report")
    assert result.exit_code == 0, result.output
    assert "<script" not in _page(tmp_path)


def test_a_failure_goes_down_in_the_history(run: Run, url: str, tmp_path: Path) -> None:
    for blob in (tmp_path / "repository" / "blobs").rglob("*"):
        if blob.is_file():
            blob.unlink()
    result = _bench(run, url)
    assert result.exit_code == 4
    assert "IncompleteError" in _page(tmp_path)


def test_a_job_that_is_not_there_leaves_no_report(run: Run, url: str, tmp_path: Path) -> None:
    result = run("bench", "restore", url, "-j", "fights", "--report", "report")
    assert result.exit_code == 7
    assert "flights" in result.stderr
    assert not (tmp_path / "report").exists()


def test_a_report_that_cannot_be_written_is_told_and_the_result_is_shown(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "report").write_text("in the way")
    result = run("bench", "restore", url, "-j", "flights", "--to", "scratch", "--report", "report/below")
    assert result.exit_code == 3
    assert "bound by" in result.stdout
    assert "no report" in result.stderr


def test_without_a_place_the_report_stands_below_the_home(run: Run, url: str, tmp_path: Path) -> None:
    place = {"XDG_STATE_HOME": str(tmp_path / "state-home"), "TMPDIR": str(tmp_path)}
    result = run("bench", "restore", url, "-j", "flights", "--keep", "--to", "scratch", **place)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "state-home" / "tidemark" / "rehearsals" / "rehearsals.html").is_file()
    kept = next((tmp_path / "scratch").iterdir())
    assert f"kept: {kept}" in result.stdout
    assert run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--no-report").stdout.count("report") == 0


def test_a_probe_that_fails_is_warned_of_and_the_slo_is_met(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("engine.rehearsal.run.probe_disk", full)
    result = _bench(run, url, "--slo", "5m")
    assert result.exit_code == 0, result.output
    told = "not measured, and no part of the verdict: disk: "
    assert f"warning: {told}" in result.stderr
    assert told in _page(tmp_path)


def test_the_group_by_itself_shows_its_help(run: Run) -> None:
    result = run("bench")
    assert result.exit_code == 0
    assert "restore" in result.stdout


def test_a_scratch_directory_that_does_not_go_is_told(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    result = _bench(run, url)
    assert result.exit_code == 0, result.output
    assert "could not be removed: " in result.stderr
