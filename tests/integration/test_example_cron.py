"""The example for cron: its lines are lines of cron, and what they run does what its exit codes promise."""

import fcntl
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.integration.conftest import Shell
from tests.integration.schedules import check_schedule

CRON: Final = Path(__file__).parents[2] / "examples" / "cron"
SCRIPT: Final = CRON / "nightly.sh"
_VARIABLE: Final = re.compile(r"([A-Z_]+)=(.*)")
# Where the example says that its files go.
PLACES: Final = {
    "/usr/local/lib/tidemark/nightly.sh": str(SCRIPT),
    "/etc/tidemark/retention.toml": str(CRON / "retention.toml"),
}


def read_crontab() -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Variables; and schedule, user and command of each line."""
    variables, lines = {}, []
    for line in (CRON / "tidemark.cron").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if match := _VARIABLE.fullmatch(line):
            variables[match[1]] = match[2]
        else:
            *schedule, user, command = line.split(maxsplit=6)
            lines.append((" ".join(schedule), user, command))
    return variables, lines


class Night:
    """Runs commands as cron would: little environment, and a `tidemark` on the PATH."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.log = shell.directory / "nightly.log"
        self.lock = shell.directory / "lock"
        self.alert = shell.directory / "alert"
        programs = shell.directory / "bin"
        programs.mkdir()
        tidemark = programs / "tidemark"
        tidemark.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m engine.cli "$@"\n')
        tidemark.chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(shell.directory),
            "PYTHONPATH": os.fspath(CRON.parents[1]),
            "TIDEMARK_REPOSITORY": shell.environment["TIDEMARK_REPOSITORY"],
            "NIGHTLY_LOG": str(self.log),
            "NIGHTLY_LOCK": str(self.lock),
            "NIGHTLY_ALERT": f"cat >>{shlex.quote(str(self.alert))}",
            "NIGHTLY_WAIT_S": "0",
        }

    def run(self, command: str, code: int, **variables: str) -> str:
        """Run a command that ends with a code; returns what cron would mail."""
        done = subprocess.run(
            ["sh", "-c", command],
            env=self.environment | variables,
            cwd=self.shell.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stderr == ""
        assert self.log.read_text().splitlines()[-1].split(maxsplit=2)[2].startswith(f"{code} ")
        assert (self.alert.read_text() if self.alert.exists() else "") == done.stdout
        self.alert.unlink(missing_ok=True)
        return done.stdout


@pytest.fixture
def night(two_commits: Shell) -> Night:
    return Night(two_commits)


def test_its_lines_are_lines_of_cron() -> None:
    variables, lines = read_crontab()
    assert {"SHELL", "PATH", "MAILTO", "TIDEMARK_REPOSITORY"} <= variables.keys()
    assert not [name for name in variables if re.search("KEY|SECRET|TOKEN", name)]
    assert [shlex.split(command)[1] for _, _, command in lines] == ["collect", "verify", "bench"]
    for schedule, user, command in lines:
        check_schedule(schedule)
        assert user == "tidemark"
        assert "%" not in command


def test_every_line_runs_and_is_silent_where_all_is_well(night: Night) -> None:
    _, lines = read_crontab()
    for _, _, command in lines:
        for place, here in PLACES.items():
            command = command.replace(place, here)  # noqa: PLW2901  # as `sed` would
        assert night.run(command, 0) == ""
    said = night.log.read_text().splitlines()
    assert [line.split()[1] for line in said] == ["collect", "verify", "bench"]
    assert "deleted 0 keys" in said[0]
    assert "no damage" in said[1]
    assert "SLO 5m: met" in said[2]


def test_what_would_delete_too_much_is_refused_and_reported(night: Night) -> None:
    night.shell.grow_old()
    collect = f"{SCRIPT} collect --keep-last 1"
    shown = night.run(collect, 10, TIDEMARK_COLLECT_DELETE_AT_MOST="1%")
    assert "10 refused" in shown
    assert "--delete-at-most 100%" in shown
    assert night.run(f"{collect} --delete-at-most 100%", 0) == ""


def test_what_was_done_in_part_is_reported(night: Night) -> None:
    (night.shell.directory / "repository" / "audit").write_text("in the way of audit records")
    shown = night.run(f"{SCRIPT} collect --keep-last 1 --delete-at-most 100% --one-line", 3)
    assert "NO audit record" in shown


def test_damage_is_reported(night: Night) -> None:
    blobs = (night.shell.directory / "repository" / "blobs").rglob("*")
    next(path for path in blobs if path.is_file() and path.stat().st_size > 100_000).unlink()
    shown = night.run(f"{SCRIPT} verify", 4)
    assert "4 DAMAGED" in shown
    assert "blob" in shown


def test_whatever_else_fails_is_reported(night: Night) -> None:
    nowhere = f"file://{night.shell.directory}/nowhere"
    assert "7 FAILED" in night.run(f"{SCRIPT} verify", 7, TIDEMARK_REPOSITORY=nowhere)
    assert "2 FAILED" in night.run(f"{SCRIPT} collect --no-such-option", 2)


def test_two_verbs_take_turns(night: Night) -> None:
    with night.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another verb" in night.run(f"{SCRIPT} verify", 75)
    assert night.run(f"{SCRIPT} verify", 0) == ""
