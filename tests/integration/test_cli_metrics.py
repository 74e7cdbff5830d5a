"""What Prometheus is shown by the command line: the figures of runs, and the status of a repository."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blobstore.wrappers.retry import RetryingStore
from engine.metrics.names import METRICS, RUN
from index.display import printable
from tests.integration.conftest import FIRST, SECOND, Shell
from tests.integration.test_cli_process import HANGING, ROOT, source
from tests.integration.test_cli_spark import AGGREGATION
from tests.integration.test_cli_spark import Shell as SparkShell

Values = dict[tuple[str, ...], float]
OF_RUNS: Final = {name for name, metric in METRICS.items() if metric.labels[: len(RUN)] == RUN}
OF_STATE_STORES: Final = {name for name in METRICS if name.startswith("tidemark_state_")}
# Reported only by runs that went wrong in their way, and by checkpoints.
ELSEWHERE: Final = {
    "tidemark_run_errors_total",
    "tidemark_restore_changelogs_replayed",
    "tidemark_restore_drill_seconds",
    "tidemark_restore_drill_slo_seconds",
}


def read(text: str) -> Values:
    """By name without its beginning, verb and the other labels that are not empty but the job's."""
    return {
        (
            sample.name.removeprefix("tidemark_"),
            *(sample.labels[label] for label in ("verb",) if label in sample.labels),
            *(v for k, v in sorted(sample.labels.items()) if v and k not in {"verb", "job_name", "task", "store"}),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def file(own_directory: Path) -> Path:
    """The file of figures, which the settings name."""
    file = own_directory / "tidemark.prom"
    (own_directory / "tidemark.toml").write_text(f'metrics_file = "{file}"\n')
    return file


def test_a_name_moves_no_cursor_and_stays_a_label(shell: Shell) -> None:
    """What is printed is for a terminal, and for Prometheus (F11)."""
    job = 'a\x1b[2J\x07\u2028\x0b"b\\c\n#d'
    shell.run("init", "--margin", "30m")
    shell.run("backup", str(shell.tree("source", FIRST)), "--job", job)
    text = shell.run("metrics").stdout
    assert all(line.isprintable() for line in text.split("\n"))
    jobs = {
        sample.labels["job_name"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "job_name" in sample.labels
    }
    assert printable(job) in jobs


def test_each_run_adds_its_figures_to_one_file(shell: Shell, file: Path) -> None:
    shell.run("init", "--margin", "30m")
    assert not file.exists()
    shell.run("backup", str(shell.tree("source", FIRST)))
    first = read(file.read_text())
    uploaded = sum(map(len, FIRST.values()))
    assert first["backup_to_upload_bytes", "backup"] == uploaded
    assert first["backup_files_to_upload", "backup"] == first["backup_files_uploaded", "backup"] == 4
    assert first["backup_sub_dirs_to_upload", "backup"] == 1
    assert first["store_sent_bytes_total", "backup"] > uploaded - len(FIRST["CURRENT"])
    assert first["run_files_done", "backup"] == first["run_files_planned", "backup"] == 4
    assert first["run_remaining_bytes", "backup"] == 0
    assert 0 < first["backup_dir_diff_seconds", "backup"] < first["backup_upload_seconds", "backup"]
    assert 0 < first["run_open_seconds", "backup"] < first["run_seconds", "backup"]
    assert first["commit_calls_total", "backup"] == 1
    assert first["commit_cleanup_seconds", "backup"] > 0

    shell.run("backup", str(shell.tree("source", SECOND)), "--no-commit", "--result", "r.json")
    shell.run("commit", "r.json")
    shell.run("commit", "r.json")
    shell.run("restore", "target", "--number", "1")
    shell.run("verify", "--level", "content")
    shell.run("collect", "--keep-last", "1")
    shown = read(file.read_text())
    assert shown["runs_total", "backup", "0"] == shown["runs_total", "backup --no-commit", "0"] == 1
    assert shown["backup_files_to_retain", "backup --no-commit"] == 1
    assert shown["backup_files_to_remove", "backup --no-commit"] == 3
    assert (shown["commit_calls_total", "backup"], shown["commit_calls_total", "commit"]) == (1, 2)
    # Nothing was committed by that run: it is not a success of `backup`.
    assert ("commit_calls_total", "backup --no-commit") not in shown
    success = ("run_last_success_timestamp_seconds", "backup")
    assert shown[success] == first[success]
    assert shown["commits_skipped_total", "commit"] == 1
    assert shown["restore_files_restored", "restore"] == shown["restore_files_to_restore", "restore"] == 4
    assert shown["restore_restored_bytes", "restore"] == uploaded
    parts = ("get_snapshot_index", "pre_restore", "post_restore")
    seconds = [shown[f"restore_{part}_seconds", "restore"] for part in parts]
    assert all(0 < part < shown["restore_seconds", "restore"] for part in seconds)
    assert sum(seconds) < shown["restore_seconds", "restore"]
    assert shown["verify_commits", "verify"] == 2
    assert shown["verify_read_bytes", "verify"] > uploaded
    assert shown["verification_failures_total", "verify", "blob_missing"] == 0
    assert shown["collect_deleted_keys_total", "collect", "closed_commit"] == 1
    assert shown["collect_kept_commits", "collect"] == 1
    assert shown["collect_live_bytes", "collect"] < shown["collect_listed_bytes", "collect"]
    requests = {key[2] for key in shown if key[:2] == ("store_requests_total", "collect")}
    assert {"list_page", "get", "delete"} <= requests
    # No metric is a name alone.
    shell.run("backup", str(shell.tree("source", FIRST)))
    shell.run("follow", "flights", "standby", "--once")
    assert read(file.read_text())["follow_lag_commits", "follow"] == 0
    names = set(re.findall(r"^(tidemark_\w+)", file.read_text(), re.MULTILINE))
    assert names == OF_RUNS - ELSEWHERE


def test_a_run_that_fails_is_reported_with_its_exit_code_and_the_last_success_stays(
    two_commits: Shell, file: Path
) -> None:
    shell = two_commits
    shell.run("restore", "target")
    before = read(file.read_text())
    shell.run("restore", "target", code=9)
    (shell.directory / "repository" / min_blob(shell)).unlink()
    shell.run("verify", code=4)
    shell.run("restore", "other", "--all", "--number", "1", code=4)
    shown = read(file.read_text())
    assert shown["run_exit_code", "restore"] == 4
    assert shown["run_errors_total", "restore", "TargetError"] == 1
    assert shown["run_errors_total", "restore", "IncompleteError"] == 1
    assert shown["runs_total", "restore", "0"] == shown["runs_total", "restore", "9"] == 1
    success = ("run_last_success_timestamp_seconds", "restore")
    assert shown[success] == before[success] < shown["run_end_timestamp_seconds", "restore"]
    assert ("restore_seconds", "restore") not in shown
    # Two commits need it.
    assert shown["verification_failures_total", "verify", "blob_missing"] == 2
    assert shown["verify_problems", "verify", "blob_missing"] == 2


def min_blob(shell: Shell) -> str:
    """The path of a large blob."""
    root = shell.directory / "repository"
    return str(max((root / "blobs").rglob("*-*"), key=lambda p: p.stat().st_size).relative_to(root))


def test_a_dry_run_has_no_figures(two_commits: Shell, file: Path) -> None:
    shell = two_commits
    shell.grow_old()
    source = str(shell.tree("source", FIRST))
    shell.run("backup", "-n", source)
    shell.run("restore", "-n", "target")
    shell.run("collect", "-n", "--keep-last", "1", "--delete-at-most", "0.000001", code=10)
    shell.run("backup", "-n", "/nonexistent", code=2)
    assert not file.exists()
    shell.run("collect", "--keep-last", "1", "--delete-at-most", "0.000001", code=10)
    before = file.read_bytes()
    shell.run("collect", "-n", "--keep-last", "1")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ("-q", "/nonexistent"),
        (".", "--version", "-1"),
        (".", "--nope"),
        (".", "--nope", "--json", "--check-retained"),
        (),
        (".", "--repository", ""),
        (".", "--no-commit", "--nope", "--job", "flights"),
        (".", "--s3-connect-timeout-s", "-1"),
    ],
)
def test_a_command_line_that_is_refused_is_a_run_that_failed(shell: Shell, file: Path, words: tuple[str, ...]) -> None:
    shell.run("init")
    shell.run("backup", str(shell.tree("source", FIRST)))
    shell.run("backup", *words, code=2)
    shown = read(file.read_text())
    verb = "backup --no-commit" if "--no-commit" in words else "backup"
    assert shown["run_exit_code", verb] == 2
    assert shown["runs_total", verb, "2"] == shown["runs_total", "backup", "0"] == 1
    assert 'runs_total{code="2",job_name="flights"' in file.read_text()
    assert shown["run_last_success_timestamp_seconds", "backup"] > 0


def test_what_is_no_run_of_a_verb_has_no_figures(shell: Shell, file: Path) -> None:
    shell.run("init")
    shell.run("list", "--nope", code=2)
    shell.run("backup", "--help")
    shell.run("collect", "explain", "--nope", code=2)
    assert not file.exists()


def test_a_refused_command_line_finds_the_file_as_any_other(shell: Shell) -> None:
    shell.run("backup", "/nonexistent", "--metrics-file", "flag.prom", code=2)
    shell.run("backup", "/nonexistent", code=2, TIDEMARK_METRICS_FILE="variable.prom")
    Path("other.toml").write_text('[backup]\nmetrics_file = "key.prom"\n')
    shell.run("backup", "--nope", "--config", "other.toml", code=2)
    for name in ("flag", "variable", "key"):
        assert read(Path(f"{name}.prom").read_text())["run_exit_code", "backup"] == 2
    warned = shell.run("backup", "/nonexistent", "--metrics-file", "/absent/t.prom", "--log-format", "json", code=2)
    assert [json.loads(line)["level"] for line in warned.stderr.splitlines()] == ["warning", "error"]


def test_a_file_that_cannot_be_written_is_a_warning(two_commits: Shell) -> None:
    done = two_commits.run("verify", "--metrics-file", "/absent/directory/t.prom")
    assert "warning: there are no figures of this run" in done.stderr
    Path("t.prom").write_text("hello\n")
    assert "what it had is given up" in two_commits.run("verify", "--metrics-file", "t.prom").stderr
    assert read(Path("t.prom").read_text())["run_exit_code", "verify"] == 0


def test_figures_that_cannot_be_made_change_nothing_of_the_result(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise IndexError("string index out of range")

    monkeypatch.setattr("engine.metrics.exposition.add_run", broken)
    done = two_commits.run("backup", str(two_commits.tree("source", FIRST)), "--metrics-file", "t.prom")
    assert "warning: there are no figures of this run: IndexError: string index" in done.stderr


def test_a_job_that_is_no_text_is_a_usage_error(shell: Shell) -> None:
    shell.run("init")
    source = str(shell.tree("source", FIRST))
    shell.run("backup", source, "--job", "\udcff", "--metrics-file", "t.prom", code=2)
    shown = read(Path("t.prom").read_text())
    assert shown["runs_total", "backup", "2"] == 1


def test_restore_drill_writes_its_time_and_slo(two_commits: Shell, file: Path) -> None:
    two_commits.run("bench", "restore", "--to-nowhere", "--no-report", "--slo", "5m")
    shown = read(file.read_text())
    assert (
        0 < shown["restore_drill_seconds", "bench restore"] < shown["restore_drill_slo_seconds", "bench restore"] == 300
    )


def test_checkpoints_there_and_back_are_reported(own_directory: Path, file: Path) -> None:
    shell = SparkShell(own_directory)
    checkpoint = shell.checkpoint(AGGREGATION)
    for _ in range(2):
        shell.run("spark", "backup", str(checkpoint))
    shell.run("spark", "restore", "there", "--replayed")
    shown = read(file.read_text())
    assert shown["commit_calls_total", "spark backup"] == 2
    assert shown["commits_skipped_total", "spark backup"] == 1
    assert shown["restore_changelogs_replayed", "spark restore"] > 0
    assert shown["restore_restored_bytes", "spark restore"] > 0


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_has_figures_too(own_directory: Path, file: Path, number: signal.Signals, code: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TIDEMARK_REPOSITORY": f"file://{own_directory}/repository",
        "TIDEMARK_JOB": "flights",
    }
    Shell(own_directory).run("init")
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, "backup", source(own_directory)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "uploading\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    shown = read(file.read_text())
    assert process.returncode == shown["run_exit_code", "backup"] == code
    assert shown["run_errors_total", "backup", "KeyboardInterrupt"] == 1
    assert shown["run_remaining_bytes", "backup"] > 0


# ---------------------------------------------------------------------- the status of a repository


def test_the_condition_of_a_repository_as_text_as_a_file_and_as_json(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("backup", str(shell.tree("source", FIRST)), "--no-commit", "--result", "r.json")
    text = shell.run("metrics").stdout
    shown = read(text)
    assert shown["last_commit_number",] == 2
    assert shown["repository_up",] == 1
    assert shown["orphan_bytes", "waiting"] > 0
    assert 0 <= shown["last_commit_age_seconds",] < 60
    assert shell.run("metrics", "--textfile", "m.prom").stdout.endswith(" values in m.prom\n")
    assert read(Path("m.prom").read_text()).keys() == shown.keys()
    samples = shell.result("metrics")["samples"]
    assert {"name": "tidemark_commits", "labels": {"job_name": "flights", "task": ""}, "value": 2.0} in samples
    only = read(shell.run("metrics", "--commits-only", "--job", "flights").stdout)
    assert ("last_commit_number",) in only
    assert ("orphan_bytes", "waiting") not in only
    shell.run("collect", "--keep-last", "1")
    names = set(re.findall(r"^(tidemark_\w+)", shell.run("metrics").stdout, re.MULTILINE))
    assert names == METRICS.keys() - OF_RUNS - OF_STATE_STORES


def test_all_names_are_listed_with_those_of_others_without_a_repository(shell: Shell) -> None:
    lines = shell.run("metrics", "--names", TIDEMARK_REPOSITORY="").stdout.splitlines()
    assert any(line.split()[0] == "tidemark_backup_uploaded_bytes" and "bytes-uploaded" in line for line in lines)
    assert "no repository" in shell.run("metrics", code=2, TIDEMARK_REPOSITORY="").stderr


@pytest.mark.parametrize("address", ["nine", "host.example:80", "127.0.0.1:70000", "1:2:3", "[::1]", ""])
def test_an_address_that_is_none_is_refused(two_commits: Shell, address: str) -> None:
    assert "HOST:PORT" in two_commits.refused("metrics", "--listen", address, code=2)["hint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_asked_to_stop(two_commits: Shell, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli", "metrics", "--listen", "0", "--every", "1h"],
        env={**os.environ, **two_commits.environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    serving = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics), .*\n", process.stderr.readline())
    assert serving is not None

    def fetch() -> Values:
        with urllib.request.urlopen(serving[1], timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return read(answer.read().decode())

    until_s = time.monotonic() + 30
    while (first := fetch())["repository_up",] != 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert first["last_commit_number",] == 2
    # Not read again within the hour.
    two_commits.run("rewind", "1")
    assert fetch() == first
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "stopped\n")


def test_a_port_that_is_taken_is_reported(two_commits: Shell) -> None:
    with urllib.request.socket.create_server(("127.0.0.1", 0)) as taken:  # type: ignore[attr-defined]
        port = taken.getsockname()[1]
        assert "cannot listen there" in two_commits.refused("metrics", "--listen", str(port), code=2)["message"]


# ---------------------------------------------------------------------- no secrets


def test_no_credential_and_no_url_is_reported_anywhere(
    own_directory: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryingStore, "_wait_s", lambda *_: 0.0)
    secrets = {"AWS_ACCESS_KEY_ID": "AKIAHUNTER2HUNTER2AB", "AWS_SECRET_ACCESS_KEY": "s3cret/hunter2+hunter2"}
    environment = {
        **secrets,
        "AWS_SESSION_TOKEN": "token-hunter2",
        "TIDEMARK_REPOSITORY": "s3://bucket-hunter2/prefix",
        "TIDEMARK_S3_ENDPOINT_URL": "http://127.0.0.1:1",
        "TIDEMARK_S3_REGION": "eu-west-1",
        "TIDEMARK_LOG_FORMAT": "json",
        "TIDEMARK_S3_CONNECT_TIMEOUT_S": "0.2",
    }
    shell = Shell(own_directory)
    done = shell.run("verify", code=5, **environment)
    assert json.loads(done.stderr.splitlines()[-1])["fields"]["code"] == 5
    text = file.read_text() + done.stderr
    shown = read(file.read_text())
    assert shown["run_errors_total", "verify", "StoreUnavailableError"] == 1
    assert shown["store_retries_total", "verify"] > 0
    # One that is late is asked for twice, and is one attempt.
    assert shown["store_request_errors_total", "verify", "get"] > shown["store_retries_total", "verify"]
    assert "HUNTER2" not in text
    assert not re.search("s3cret|token-hunter2", text)
    assert "hunter2" not in file.read_text()
