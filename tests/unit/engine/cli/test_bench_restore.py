"""`tidemark bench restore`, as its user has it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from engine.rocksdb.store import StoreWriter
from index.snapshot.model import Scope
from tests.unit.engine.cli.conftest import Run
from tidemark import SyncRepository

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A repository with a job of two RocksDB stores, and one with a name that is made to do harm."""
    url = f"file://{tmp_path}/repository"
    (tmp_path / "scratch").mkdir()
    rng = random.Random(7)
    with StoreWriter.open(tmp_path / "live") as store:
        for number in range(100):
            store.put(number.to_bytes(4), rng.randbytes(1000))
        store.checkpoint(tmp_path / "state")
    with SyncRepository.init(url) as repository:
        flights = [repository.backup(Scope("flights"), tmp_path / "state", task=task) for task in ("0", HOSTILE)]
        repository.commit(Scope("flights"), flights)
        repository.commit(Scope(HOSTILE), [repository.backup(Scope(HOSTILE), tmp_path / "state")])
    return url


def _history(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "report" / "restore-drills.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _bench(run: Run, url: str, *words: str) -> Result:
    return run("bench", "restore", url, "-j", "flights", "--to", "scratch", "--report", "report", *words)


def test_a_drill_shows_time_bytes_and_forecast_and_adds_to_the_history(run: Run, url: str, tmp_path: Path) -> None:
    result = _bench(run, url, "--slo", "5m")
    assert result.exit_code == 0, result.output
    for text in ("2 stores", "open RocksDB (2)", "SLO 5m: met", "fetched ", "16 executors", "10x, ", "history: "):
        assert text in result.stdout
    assert [line["job"] for line in _history(tmp_path)] == ["flights"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_missed_slo_has_an_exit_code_of_its_own_and_a_report(run: Run, url: str, tmp_path: Path) -> None:
    result = _bench(run, url, "--slo", "1ms", "--one-line")
    assert result.exit_code == 11
    assert result.stdout.count("\n") == 1
    assert "SLO 1 ms: MISSED" in result.stdout
    assert [line["slo_ms"] for line in _history(tmp_path)] == [1]


def test_a_duration_that_is_none_is_refused_before_anything_is_read(run: Run, url: str) -> None:
    assert _bench(run, url, "--slo", "soon").exit_code == 2


def test_to_nowhere_writes_nothing_but_the_report(run: Run, url: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    result = run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--report", "report", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["verb"], shown["slo_met"], shown["to_disk"], shown["kept_at"]) == ("bench restore", None, False, "")
    assert shown["total_s"] == shown["find_s"] + shown["restore_s"] + shown["open_s"] > 0
    (line,) = _history(tmp_path)
    assert line == {name: shown[name] for name in line}
    assert {path.name for path in tmp_path.iterdir()} == before | {"report"}
    assert run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--keep").exit_code == 2


def test_the_history_grows_and_a_broken_line_stays(run: Run, url: str, tmp_path: Path) -> None:
    assert _bench(run, url).exit_code == 0
    history = tmp_path / "report" / "restore-drills.jsonl"
    with history.open("a") as file:
        file.write("half a li")
    assert _bench(run, url).exit_code == 0
    assert [line[:4] for line in history.read_text().splitlines()] == ['{"sc', "half", '{"sc']


def test_a_job_with_a_hostile_name_does_no_harm(run: Run, url: str, tmp_path: Path) -> None:
    result = run("bench", "restore", url, "-j", HOSTILE, "--to", "scratch", "--report", "report")
    assert result.exit_code == 0, result.output
    assert [line["job"] for line in _history(tmp_path)] == [HOSTILE]


def test_a_failure_goes_down_in_the_history(run: Run, url: str, tmp_path: Path) -> None:
    for blob in (tmp_path / "repository" / "blobs").rglob("*"):
        if blob.is_file():
            blob.unlink()
    result = _bench(run, url)
    assert result.exit_code == 4
    assert [line["error"] for line in _history(tmp_path)] == ["IncompleteError"]


def test_a_job_that_is_not_there_leaves_no_report(run: Run, url: str, tmp_path: Path) -> None:
    result = run("bench", "restore", url, "-j", "fights", "--report", "report")
    assert result.exit_code == 7
    assert "flights" in result.stderr
    assert not (tmp_path / "report").exists()


def test_a_history_that_cannot_be_written_is_a_warning_and_the_result_is_shown(
    run: Run, url: str, tmp_path: Path
) -> None:
    (tmp_path / "report").write_text("in the way")
    result = run("bench", "restore", url, "-j", "flights", "--to", "scratch", "--report", "report/below")
    assert result.exit_code == 3
    assert "forecast" in result.stdout
    assert "not in the history" in result.stderr


def test_without_a_place_the_history_stands_below_the_home(run: Run, url: str, tmp_path: Path) -> None:
    place = {"XDG_STATE_HOME": str(tmp_path / "state-home"), "TMPDIR": str(tmp_path)}
    result = run("bench", "restore", url, "-j", "flights", "--keep", "--to", "scratch", **place)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "state-home" / "tidemark" / "drills" / "restore-drills.jsonl").is_file()
    kept = next((tmp_path / "scratch").iterdir())
    assert f"kept: {kept}" in result.stdout
    assert run("bench", "restore", url, "-j", "flights", "--to-nowhere", "--no-report").stdout.count("history") == 0


def test_the_group_by_itself_shows_its_help(run: Run) -> None:
    result = run("bench")
    assert result.exit_code == 0
    assert "restore" in result.stdout


def test_a_scratch_directory_that_does_not_go_is_reported(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    result = _bench(run, url)
    assert result.exit_code == 0, result.output
    assert "could not be removed: " in result.stderr
