"""The verb `backup --live`, beside processes that hold what it backs up and write to it (design 0012)."""

import contextlib
import signal
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Shell, content
from tests.integration.live_writer import History, open_writer, read_rows, writing
from tests.integration.test_cli_process import Running

KEYS, RATE = 1000, 5000


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    shell.run("init")
    # A compaction may halve what these small ones have.
    shell.environment["TIDEMARK_SHRINK_MAX"] = "100%"
    return shell


def check_restored(shell: Shell, commit: int, *tasks: str) -> None:
    """Each task of a commit is a prefix of what its writer wrote."""
    for task in tasks:
        target = shell.directory / f"restored-{commit}-{task}"
        shell.run("restore", str(target), "--number", str(commit), "--task", task)
        assert History(KEYS).find(read_rows(target)) is not None


def test_one_that_is_held_is_backed_up_only_with_the_option(shell: Shell) -> None:
    database = shell.directory / "db"
    with writing(database, "wal", KEYS, rate=RATE):
        assert "backup --live" in shell.refused("backup", str(database), code=9)["hint"]
        plan = shell.result("backup", str(database), "--live", "--dry-run")
        assert plan["files_added"] > 3
        for number in (1, 2):
            done = shell.result("backup", str(database), "--live")
            assert done["commit"]["number"] == number
            check_restored(shell, number, "0")
        result = shell.directory / "result.json"
        shell.run("backup", str(database), "--live", "--no-commit", "--result", str(result))
        assert shell.result("commit", str(result))["commit"]["number"] == 3
        check_restored(shell, 3, "0")
    # With nobody, and a scratch directory of its own.
    (shell.directory / "scratch").mkdir()
    shell.run("backup", str(database), "--live", "--scratch", str(shell.directory / "scratch"))
    assert [path.name for path in shell.directory.rglob("*.tidemark-live-*")] == []


def test_all_tasks_below_a_directory_are_one_commit(shell: Shell) -> None:
    root = shell.directory / "tasks"
    (root / "not-a-task").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for task, kind in (("0_0", "wal"), ("0_1", "no-wal")):
            stack.enter_context(writing(root / task, kind, KEYS, rate=RATE))
        plan = shell.result("backup", str(root), "--live", "--tasks", "--dry-run")
        assert sorted(plan["tasks"]) == ["0_0", "0_1"]
        done = shell.result("backup", str(root), "--live", "--tasks", "--offsets", "7")
        assert [task["task"] for task in done["tasks"]] == ["0_0", "0_1"]
        assert (done["commit"]["number"], done["commit"]["stores_count"]) == (1, 2)
        check_restored(shell, 1, "0_0", "0_1")
        figures = shell.directory / "figures.prom"
        words = ("backup", str(root), "--live", "--tasks", "--metrics-file", str(figures))
        lines = shell.run(*words).stdout.splitlines()
        assert all(f'task="{task}"' in figures.read_text() for task in ("0_0", "0_1"))
        assert lines[-1].startswith("commit 2 of flights, version 2: 2 stores, ")
        check_restored(shell, 2, "0_0", "0_1")
    # A task that has moved to another machine keeps what it had; a new one comes along.
    (root / "0_1").rename(shell.directory / "elsewhere")
    (root / "0_2").mkdir()
    shell.run("backup", str(root), "--live", "--tasks", code=0)
    assert shell.result("list")["commits"][0]["stores_count"] == 2
    open_writer(root / "0_2", "wal").close()
    shell.run("backup", str(root), "--tasks")
    assert shell.result("list")["commits"][0]["stores_count"] == 3


@pytest.mark.parametrize(
    "words, code, hint",
    [
        (("db", "--every", "1s"), 2, "add it"),
        (("db", "--scratch", "."), 2, "add it"),
        (("db", "--live", "--every", "1s", "--dry-run"), 2, "leave --dry-run"),
        (("db", "--live", "--every", "1s", "--version", "7"), 2, "leave --dry-run"),
        (("db", "--live", "--tasks", "--commit-per-task"), 2, "--commit-per-task out"),
        (("db", "--live", "--tasks"), 7, "each task is a directory"),
        (("empty", "--live"), 7, "that has its CURRENT"),
        (("db", "--live", "--scratch", "/proc"), 9, "choose a scratch directory"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_hint(shell: Shell, words: tuple[str, ...], code: int, hint: str) -> None:
    (shell.directory / "empty").mkdir()
    open_writer(shell.directory / "db", "wal").close()
    directory, *rest = words
    assert hint in shell.refused("backup", str(shell.directory / directory), *rest, code=code)["hint"]


class SideCar(Running):
    """A process that backs up again and again, until it is ended."""

    def __init__(self, shell: Shell, *words: str) -> None:
        super().__init__(shell, "backup", *words, "--live", "--every", "200ms")


def commits(shell: Shell) -> int:
    log = shell.directory / "repository" / "log"
    return sum(1 for path in log.rglob("*") if path.is_file())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_side_car_goes_on_through_trouble_until_it_is_ended(shell: Shell, number: int) -> None:
    database, figures = shell.directory / "db", shell.directory / "figures.prom"
    with writing(database, "wal", KEYS, rate=RATE):
        car = SideCar(shell, str(database), "--metrics-file", str(figures))
        car.wait(lambda: commits(shell) >= 2)
        # For a while it is not one that could be read.
        (database / "CURRENT").rename(database / "away")
        time.sleep(0.6)
        (database / "away").rename(database / "CURRENT")
        there = commits(shell)
        car.wait(lambda: commits(shell) >= there + 2)
        code, out, err = car.end(number)
    assert code == 0, err
    assert "commit " in out.splitlines()[-1]
    assert "stays at commit" in err
    assert "tidemark_" in figures.read_text()
    newest = shell.result("list")["commits"][0]["number"]
    for commit in {1, newest // 2 + 1, newest}:
        check_restored(shell, commit, "0")
    assert [path.name for path in shell.directory.glob(".*tidemark-live*")] == []


def test_without_a_change_a_side_car_makes_no_commit(shell: Shell) -> None:
    database = shell.directory / "db"
    db = open_writer(database, "wal")
    db[b"key"] = b"value"
    car = SideCar(shell, str(database))
    car.wait(lambda: commits(shell) == 1)
    uploads = shell.directory / "repository" / "indexes"
    before = sum(1 for path in uploads.rglob("*") if path.is_file())
    car.wait(lambda: sum(1 for path in uploads.rglob("*") if path.is_file()) > before + 1)
    assert commits(shell) == 1
    db[b"key"] = b"another value"
    car.wait(lambda: commits(shell) == 2)
    assert car.end(signal.SIGTERM)[0] == 0
    db.close()


def test_a_killed_side_car_leaves_whole_commits_and_the_next_one_cleans_up(shell: Shell) -> None:
    database = shell.directory / "db"
    with writing(database, "no-wal", KEYS, rate=RATE):
        for turn in range(3):
            there = commits(shell)
            car = SideCar(shell, str(database))
            car.wait(lambda there=there: commits(shell) > there)  # type: ignore[misc]
            time.sleep(0.05 * turn)
            assert car.end(signal.SIGKILL)[0] == -signal.SIGKILL
        shell.run("backup", str(database), "--live")
        newest = shell.result("list")["commits"][0]["number"]
        for commit in range(1, newest + 1):
            check_restored(shell, commit, "0")
    assert [path.name for path in shell.directory.glob(".*tidemark-live*")] == []
    assert content(shell.directory / f"restored-{newest}-0").keys() >= {"CURRENT"}
