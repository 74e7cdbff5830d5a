"""The verb `follow`, as a run that ends and as a process that goes on (design 0011)."""

import signal
import time
from pathlib import Path

import pytest

from tests.integration.conftest import SECOND, Shell, content
from tests.integration.test_cli_process import WAIT_S, Running

THIRD = {**SECOND, "000003.sst": b"3" * 200_000, "CURRENT": b"MANIFEST-3\n"}
ONE = ("--task", "0", "--store", "default")


def test_a_standby_is_kept_looked_at_and_claimed(two_commits: Shell) -> None:
    shell, standby = two_commits, two_commits.directory / "standby"
    before = shell.result("follow", "flights", str(standby), *ONE, "--status")
    assert (before["commit"], before["lag_commits"], before["promoted"]) == (None, 2, False)
    first = shell.result("follow", "flights", str(standby), *ONE, "--once")
    assert (first["commit"]["number"], first["commit"]["version"], first["lag_commits"]) == (2, 9, 0)
    assert first["commit"]["offsets"] == "2013-08"
    assert content(standby) == SECOND
    shell.run("backup", str(shell.tree("source", THIRD)))
    behind = shell.result("follow", "flights", str(standby), *ONE, "--status")
    assert (behind["lag_commits"], behind["newest_number"], behind["restored"]) == (1, 3, None)
    # SSTs that are there are not fetched; of the others the time in the backup counts.
    assert behind["lag_bytes"] >= len(THIRD["000003.sst"])
    second = shell.result("follow", "flights", str(standby), *ONE, "--once")
    assert second["restored"]["files_reused"] >= 2
    assert content(standby) == THIRD
    promoted = shell.run("follow", "flights", str(standby), *ONE, "--promote")
    write_id = shell.result("list")["commits"][0]["write_id"]
    assert promoted.stdout.splitlines()[0].startswith("commit 3, version 10, ")
    assert promoted.stdout.splitlines()[0].endswith(write_id)
    for way in ("--once", "--promote"):
        failure = shell.refused("follow", "flights", str(standby), *ONE, way, code=6)
        assert failure["error"] == "PromotedError"
    assert shell.result("follow", "flights", str(standby), *ONE, "--status")["promoted"] is True


def test_without_catching_up_the_lag_is_a_warning(two_commits: Shell) -> None:
    shell, standby = two_commits, two_commits.directory / "standby"
    shell.run("follow", "flights", str(standby), "--once")
    assert content(standby / "0" / "default") == SECOND
    shell.run("backup", str(shell.tree("source", THIRD)))
    result = shell.run("follow", "flights", str(standby), "--promote", "--no-catch-up")
    assert result.stdout.startswith("commit 2, ")
    assert "it lags by 1 commit, " in result.stderr
    assert content(standby / "0" / "default") == SECOND


@pytest.mark.parametrize(
    "words, code, hint",
    [
        (("flights", "standby", "--once", "--promote"), 2, "give one of them"),
        (("flight", "standby", "--once"), 7, "the repository has flights"),
        (("flights", "source", "--once"), 9, "absent or empty"),
        (("flights", "repository/blobs/standby", "--once"), 9, "beside the repository"),
        (("flights", "standby", "--once", "--task", "7"), 7, "tidemark show"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_hint(
    two_commits: Shell, words: tuple[str, ...], code: int, hint: str
) -> None:
    assert hint in two_commits.refused("follow", *words, code=code)["hint"]
    assert content(two_commits.directory / "source") == SECOND
    assert not list(two_commits.directory.glob("repository/blobs/.*"))


class Following(Running):
    """A process that follows into `standby`, until it is ended."""

    def __init__(self, shell: Shell, *words: str) -> None:
        self._standby = shell.directory / "standby"
        super().__init__(shell, "follow", "flights", str(self._standby), *ONE, "--every", "100ms", *words)

    def wait_for(self, files: dict[str, bytes]) -> None:
        self.wait(lambda: content(self._standby) == files)


def wait_for_figure(file: Path, number: int) -> None:
    """Wait until a look has ended at a commit."""
    deadline = time.monotonic() + WAIT_S
    while (
        not file.exists()
        or f'follow_commit_number{{job_name="flights",verb="follow"}} {number}.0' not in file.read_text()
    ):
        assert time.monotonic() < deadline, "the commit did not come"
        time.sleep(0.05)


def test_a_follower_goes_on_through_commits_and_trouble_until_it_is_ended(two_commits: Shell) -> None:
    shell, log = two_commits, two_commits.directory / "repository" / "log"
    figures = shell.directory / "figures.prom"
    following = Following(shell, "--metrics-file", str(figures))
    wait_for_figure(figures, 2)
    # Nothing of the job is there for a while.
    log.rename(log.with_name("away"))
    time.sleep(0.5)
    log.with_name("away").rename(log)
    shell.run("backup", str(shell.tree("source", THIRD)))
    following.wait_for(THIRD)
    wait_for_figure(figures, 3)
    code, out, err = following.end(signal.SIGTERM)
    assert code == 0, err
    assert out.startswith("commit 3, version 10, ")
    assert "stays at commit 2: " in err
    assert 'tidemark_follow_lag_commits{job_name="flights",verb="follow"} 0.0' in figures.read_text()


def test_the_end_of_a_follower_whose_looks_fail_is_no_success(two_commits: Shell) -> None:
    shell, figures = two_commits, two_commits.directory / "figures.prom"
    following = Following(shell, "--metrics-file", str(figures))
    wait_for_figure(figures, 2)
    log = shell.directory / "repository" / "log"
    log.rename(log.with_name("away"))
    following.wait(lambda: 'run_exit_code{job_name="flights",verb="follow"} 7.0' in figures.read_text())
    assert following.end(signal.SIGTERM)[0] == 0
    assert 'run_exit_code{job_name="flights",verb="follow"} 7.0' in figures.read_text()


def test_a_look_that_never_comes_is_waited_for(two_commits: Shell) -> None:
    following = Following(two_commits, "--every", "999999999w")
    following.wait_for(SECOND)
    time.sleep(0.5)
    assert following.end(signal.SIGTERM)[0] == 0


def test_a_follower_ends_when_a_writer_has_claimed_its_directory(two_commits: Shell) -> None:
    shell, standby = two_commits, two_commits.directory / "standby"
    following = Following(shell)
    following.wait_for(SECOND)
    shell.run("follow", "flights", str(standby), *ONE, "--promote")
    out, err = following.process.communicate(timeout=WAIT_S)
    assert (following.process.returncode, out) == (6, "")
    assert "a writer has claimed it, at commit 2" in err
    shell.run("backup", str(shell.tree("source", THIRD)))
    assert content(standby) == SECOND


def test_a_killed_follower_leaves_an_exact_commit_and_another_goes_on(two_commits: Shell, tmp_path: Path) -> None:
    """Killed at whatever it is at, five times, beside a writer; every single effect: tests/simulation/faults."""
    shell, standby = two_commits, two_commits.directory / "standby"
    states = [SECOND]
    for number in range(5):
        following = Following(shell)
        following.wait_for(states[-1])
        states.append({**SECOND, "CURRENT": b"MANIFEST-%d\n" % (number + 4), "000009.sst": b"%d" % number * 90_000})
        shell.run("backup", str(shell.tree("source", states[-1])))
        time.sleep(0.04 * number)
        assert following.end(signal.SIGKILL)[0] == -signal.SIGKILL
        commit = shell.result("follow", "flights", str(standby), *ONE, "--status")["commit"]
        assert content(standby) == states[commit["number"] - 2]
    assert shell.result("follow", "flights", str(standby), *ONE, "--promote")["commit"]["number"] == 7
    assert content(standby) == states[-1]
