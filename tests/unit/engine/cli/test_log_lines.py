"""Structured logs: what goes to stderr is one JSON object in a line, and the result stays what it was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.unit.engine.cli.conftest import Run


def lines_of(result: Result) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in result.stderr.splitlines()]
    for line in lines:
        assert line.keys() == {"schema", "time", "level", "verb", "message", "fields"}
        assert line["schema"] == 1
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["message"]
    return lines


@pytest.mark.parametrize(
    "words, verb, code",
    [
        (("list", "-r", "memory://nothing", "--log-format", "json"), "list", 7),
        (("spark", "backup", "x", "-r", "memory://nothing", "--log-format=json"), "spark backup", 7),
        (("list", "--nope", "--log-format", "json"), "list", 2),
        (("list", "--nope", "--log-format=json"), "list", 2),
        (("nope", "--log-format", "json"), "tidemark", 2),
    ],
)
def test_an_error_is_a_line_with_the_object_that_json_has(
    run: Run, words: tuple[str, ...], verb: str, code: int
) -> None:
    result = run(*words)
    (line,) = lines_of(result)
    assert (result.exit_code, line["level"], line["verb"], line["fields"]["code"]) == (code, "error", verb, code)
    assert line["message"] == line["fields"]["message"]
    assert line["fields"]["hint"]
    assert result.stdout == ""


def test_it_can_be_set_for_all_runs(run: Run, tmp_path: Path) -> None:
    assert lines_of(run("list", "-r", "memory://nothing", TIDEMARK_LOG_FORMAT="json"))
    assert lines_of(run("list", "--nope", TIDEMARK_LOG_FORMAT="json"))
    (tmp_path / "tidemark.toml").write_text('log_format = "json"\n')
    assert lines_of(run("list", "-r", "memory://nothing"))
    assert run("list", "-r", "memory://nothing", "--log-format", "text").stderr.startswith("error: ")


def test_a_traceback_is_a_field(run: Run) -> None:
    (line,) = lines_of(run("list", "-r", "memory://nothing", "--log-format", "json", "--debug"))
    assert "NotFoundError" in line["fields"]["traceback"]
    assert "traceback" not in lines_of(run("list", "-r", "memory://nothing", "--log-format", "json"))[0]["fields"]


def test_progress_and_warnings_are_lines_and_the_result_is_as_ever(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cli.output.LOG_PERIOD_S", 0)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "state").write_bytes(b"x" * 300_000)
    environment = {"TIDEMARK_REPOSITORY": f"file://{tmp_path}/repository", "TIDEMARK_JOB": "flights"}
    run("init", **environment)
    result = run("backup", "source", "--log-format", "json", "--metrics-file", "/absent/x.prom", **environment)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("commit 1 of flights")
    lines = lines_of(result)
    progress = [line for line in lines if line["level"] == "info"]
    assert progress[-1]["fields"]["bytes"] == progress[-1]["fields"]["bytes_total"] == 300_000
    assert progress[-1]["message"].startswith("backup: 1 of 1 files")
    assert [line["message"].split(":")[0] for line in lines if line["level"] == "warning"] == [
        "there are no figures of this run"
    ]
    # With --json the result is one object on stdout, and the log is still one.
    as_json = run("restore", "target", "--log-format", "json", "--json", **environment)
    assert json.loads(as_json.stdout)["verb"] == "restore"
    assert lines_of(as_json)
    assert run("restore", "other", "--log-format", "json", "--quiet", **environment).stderr == ""


def test_a_stored_text_cannot_break_a_line(run: Run) -> None:
    result = run("list", "-r", "memory://nothing", "--job", "a\nb\x1b[2J", "--log-format", "json")
    (line,) = lines_of(result)
    assert "\n" not in line["message"]
    assert "\x1b" not in line["message"]
