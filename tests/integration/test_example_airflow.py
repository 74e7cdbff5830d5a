"""The example for Airflow: what it does with each exit code, and, where Airflow is installed, whole runs of it.

Airflow has an environment of its own. Its command `airflow` on the PATH is enough for the test that needs it; the
others have doubles of the few names that the example imports.
"""

import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from engine.cli.run import ExitCode
from tests.integration.conftest import Shell
from tests.integration.schedules import check_schedule

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "airflow" / "tidemark_nightly.py"
RETENTION: Final = EXAMPLE.parents[1] / "cron" / "retention.toml"
CHECKPOINT: Final = Path(__file__).parents[1] / "golden" / "spark" / "lost-attempts"
AIRFLOW: Final = shutil.which("airflow")


class AirflowException(Exception):  # noqa: N818
    """As in Airflow: the task is run again, as often as `retries` says."""


class AirflowFailException(AirflowException):
    """As in Airflow: the task is not run again."""


class AirflowSkipException(AirflowException):
    """As in Airflow: the task is skipped."""


class Night:
    """The example, loaded with doubles of Airflow: its settings, its tasks in their order, and its variables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variables: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.tasks: dict[str, Callable[[], None]] = {}

        def dag(**settings: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
            self.settings = settings
            return lambda function: function

        def task(function: Any = None, **_: Any) -> Any:
            return (lambda: function) if function else lambda function: lambda: function

        def chain(*tasks: Callable[[], None]) -> None:
            self.tasks = {each.__name__: each for each in tasks}

        class Variable:
            @staticmethod
            def get(key: str, default: str) -> str:
                return self.variables.get(key, default)

        sdk, exceptions = ModuleType("airflow.sdk"), ModuleType("airflow.sdk.exceptions")
        vars(sdk).update(Variable=Variable, chain=chain, dag=dag, task=task)
        for each in (AirflowException, AirflowFailException, AirflowSkipException):
            setattr(exceptions, each.__name__, each)
        for module in (ModuleType("airflow"), sdk, exceptions):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        spec = importlib.util.spec_from_file_location("tidemark_nightly", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def command(self, directory: Path, script: str) -> None:
        """Let the command be this script."""
        command = directory / "tidemark"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        self.variables["tidemark_command"] = str(command)


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Night:
    night = Night(monkeypatch)
    night.command(tmp_path, f'exec {shlex.quote(sys.executable)} -m engine.cli "$@"')
    monkeypatch.setenv("PYTHONPATH", os.fspath(EXAMPLE.parents[2]))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return night


@pytest.fixture
def repository(night: Night, two_commits: Shell, tmp_path: Path) -> Shell:
    night.variables |= {
        "tidemark_repository": two_commits.environment["TIDEMARK_REPOSITORY"],
        "tidemark_policy": str(RETENTION),
        "tidemark_scratch": str(tmp_path),
    }
    return two_commits


def whole_checkpoint(copy: Path) -> Path:
    """A copy of a checkpoint that Spark wrote, with the log of read files that is not kept with it."""
    shutil.copytree(CHECKPOINT, copy)
    log = copy / "sources" / "0"
    log.mkdir(parents=True)
    for entry in range(10):
        line = json.dumps({"path": f"file:///in/{entry}", "timestamp": 1, "batchId": entry})
        (log / (f"{entry}.compact" if entry == 9 else str(entry))).write_text(f"v1\n{line}")
    return copy


def test_it_runs_one_command_at_a_time_and_holds_no_credentials(night: Night) -> None:
    assert list(night.tasks) == ["backup", "verify", "drill", "collect"]
    check_schedule(night.settings["schedule"])
    assert night.settings["max_active_runs"] == 1
    assert not night.settings["catchup"]
    assert night.settings["default_args"]["retries"] > 0
    assert not re.search("ACCESS_KEY|SECRET|TOKEN|PASSWORD", EXAMPLE.read_text(), re.IGNORECASE)


def test_its_variables_are_those_that_it_names(night: Night) -> None:
    names = set(re.findall(r'Variable\.get\("(\w+)"', EXAMPLE.read_text()))
    assert night.module.__doc__ is not None
    assert names == set(re.findall(r"^    (tidemark_\w+)", night.module.__doc__, re.MULTILINE))


@pytest.mark.parametrize("code", [*ExitCode, 75, 127])
def test_each_exit_code_is_done_tried_again_or_left_to_a_person(
    night: Night, tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    night.command(tmp_path, f"echo said; echo warned >&2; printf '\\351\\n' >&2; exit {int(code)}")
    wanted = {0: None, 3: None, 5: AirflowException}.get(int(code), AirflowFailException)
    raised = None
    with caplog.at_level(logging.WARNING):
        try:
            night.module.run_tidemark("verify")
        except AirflowException as error:
            raised = error
    assert (type(raised) if raised else None) is wanted
    assert bool(caplog.records) == (code == 3)
    assert capfd.readouterr().out == "said\nwarned\n\ufffd\n"


def test_who_stops_a_task_stops_its_command(night: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night.command(tmp_path, "trap 'touch stopped; exit 143' TERM; echo begun; for _ in $(seq 100); do sleep 0.1; done")
    monkeypatch.chdir(tmp_path)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(night.module, "print", stop, raising=False)
    with pytest.raises(KeyboardInterrupt):
        night.module.run_tidemark("verify")
    assert (tmp_path / "stopped").exists()


def test_every_task_runs_in_a_repository_that_was_only_initialised(
    night: Night, shell: Shell, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shell.run("init")
    night.variables |= {
        "tidemark_repository": shell.environment["TIDEMARK_REPOSITORY"],
        "tidemark_policy": str(RETENTION),
        "tidemark_scratch": str(tmp_path),
    }
    with pytest.raises(AirflowSkipException):
        night.tasks["backup"]()
    night.variables["tidemark_checkpoint"] = str(whole_checkpoint(tmp_path / "checkpoint"))
    said = ("commit 1 of flights", "no damage", "SLO 5m: met", "kept 1 commit")
    for task, expected in zip(night.tasks.values(), said, strict=True):
        task()
        assert expected in capfd.readouterr().out
    assert not caplog.records


def test_a_command_that_is_not_there_waits_for_a_person(night: Night, tmp_path: Path) -> None:
    night.variables["tidemark_command"] = str(tmp_path / "gone")
    with pytest.raises(AirflowFailException, match="gone"):
        night.module.run_tidemark("verify")


def test_what_would_delete_too_much_waits_for_a_person(
    night: Night, repository: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.grow_old()
    policy = tmp_path / "retention.toml"
    policy.write_text('[[job]]\nmatch = "*"\nkeep_last = 1\n')
    night.variables["tidemark_policy"] = str(policy)
    monkeypatch.setenv("TIDEMARK_COLLECT_DELETE_AT_MOST", "1%")
    with pytest.raises(AirflowFailException, match="collect ended with 10"):
        night.tasks["collect"]()


# ---------------------------------------------------------------------- under Airflow itself


class Airflow:
    """An Airflow of its own directory, with the example, whose only retry comes after a second."""

    def __init__(self, night: Night, home: Path) -> None:
        home.mkdir()
        dags = home / "dags"
        dags.mkdir()
        text = EXAMPLE.read_text()
        for old, new in (('"retries": 3', '"retries": 1'), ("minutes=10", "seconds=1")):
            assert old in text
            text = text.replace(old, new)
        (dags / EXAMPLE.name).write_text(text)
        variables = {f"AIRFLOW_VAR_{name.upper()}": value for name, value in night.variables.items()}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "PYTEST"))},
            **variables,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        }
        self.run("db", "migrate")

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        assert AIRFLOW is not None
        return subprocess.run(
            [AIRFLOW, *words],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=240,
        )

    def night(self, **variables: str) -> tuple[bool, str, list[str]]:
        """Whether a run succeeded, what it printed, and what became of its tasks, in order."""
        done = self.run("dags", "test", "tidemark_nightly", **variables)
        return done.returncode == 0, done.stdout, re.findall(r"new_state=(\w+)", done.stdout)


@pytest.fixture
def airflow(night: Night, repository: Shell, tmp_path: Path) -> Airflow:
    if AIRFLOW is None:
        pytest.skip("no `airflow` on the PATH")
    return Airflow(night, tmp_path / "airflow")


def test_airflow_runs_every_task_and_retries_only_what_was_unavailable(
    airflow: Airflow, repository: Shell, tmp_path: Path
) -> None:
    ok, printed, states = airflow.night()
    assert ok, printed
    assert states == ["skipped", "success", "success", "success"]

    repository.grow_old()
    policy = tmp_path / "retention.toml"
    policy.write_text('[[job]]\nmatch = "*"\nkeep_last = 1\n')
    ok, printed, states = airflow.night(AIRFLOW_VAR_TIDEMARK_POLICY=str(policy), TIDEMARK_COLLECT_DELETE_AT_MOST="1%")
    assert (ok, states) == (False, ["skipped", "success", "success", "failed"]), printed
    assert "collect ended with 10" in printed

    away = tmp_path / "away"
    away.write_text("#!/bin/sh\nexit 5\n")
    away.chmod(0o755)
    ok, printed, states = airflow.night(AIRFLOW_VAR_TIDEMARK_COMMAND=str(away))
    assert (ok, states) == (False, ["skipped", "up_for_retry", "failed"]), printed
