"""The command line as real processes: signals, pipes, and two of them at once."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Shell

COMMAND = [sys.executable, "-m", "engine.cli"]
ROOT = Path(__file__).parents[2]
WAIT_S = 60
MIB = 1024 * 1024


class Running:
    """A command that goes on until it is ended."""

    def __init__(self, shell: Shell, *words: str) -> None:
        environment = {**shell.environment, "PYTHONPATH": str(ROOT), "HOME": str(shell.directory)}
        environment["PYTHONFAULTHANDLER"] = "1"
        self.process = subprocess.Popen(
            [*COMMAND, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, "it did not come"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def end(self, number: int) -> tuple[int, str, str]:
        self.process.send_signal(number)
        try:
            out, err = self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            # Says where each thread is.
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError("it goes on:\n" + self.process.communicate()[1]) from None
        return self.process.returncode, out, err


# A store that never answers a request for a blob, so that a run can be interrupted in the middle.
HANGING = """
import asyncio, sys
from blobstore.local.store import LocalStore

async def hang(self, key, *args, **kwargs):
    if not key.startswith("blobs/"):
        return await put_if_absent(self, key, *args, **kwargs)
    print("uploading", file=sys.stderr, flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        print("cleaned up", file=sys.stderr, flush=True)

put_if_absent, LocalStore.put_if_absent = LocalStore.put_if_absent, hang
from engine.cli import main
sys.exit(main())
"""


TIDYING = """
async def tidy():
    print("tidying", file=sys.stderr, flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)
"""

# Logs each step, so that a backup of a moment says anything at all.
TALKATIVE = """
import sys
import engine.cli.output
engine.cli.output.LOG_PERIOD_S = 0
from engine.cli import main
sys.exit(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing left over from other users, and a repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEMARK", "XDG"))}
    return {
        **clean,
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "TIDEMARK_REPOSITORY": f"file://{tmp_path}/repository",
        "TIDEMARK_JOB": "flights",
    }


def run(environment: dict[str, str], *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, in the directory of the repository."""
    done = subprocess.run(
        [*COMMAND, *words],
        env=environment,
        cwd=Path(environment["HOME"]).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def result_of(environment: dict[str, str], *words: str, code: int = 0) -> dict[str, Any]:
    """The JSON object that a run prints."""
    done = run(environment, *words, "--json", code=code)
    result: dict[str, Any] = json.loads(done.stdout or done.stderr)
    return result


def source(tmp_path: Path, text: str = "x") -> str:
    """A directory with one file that is a blob and one that is not."""
    root = tmp_path / "source"
    root.mkdir(exist_ok=True)
    (root / "state").write_bytes(text.encode() * 300_000)
    (root / "CURRENT").write_text(text)
    return str(root)


def test_state_goes_from_one_process_to_the_next(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    run(environment, "backup", source(tmp_path, "a"))
    run(environment, "backup", source(tmp_path, "b"))
    assert [c["number"] for c in result_of(environment, "list")["commits"]] == [2, 1]
    assert "2 files" not in run(environment, "restore", "target", "--number", "1").stderr
    assert (tmp_path / "target" / "CURRENT").read_text() == "a"
    first = result_of(environment, "restore", "target", "--replace")["stores"][0]["result"]
    again = result_of(environment, "restore", "target", "--replace")["stores"][0]["result"]
    assert (first["files_fetched"], again["files_fetched"], again["files_reused"]) == (1, 0, 1)
    assert (tmp_path / "target" / "CURRENT").read_text() == "b"


def test_of_two_backups_on_one_parent_the_second_is_a_conflict(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    for name in ("first", "second"):
        run(environment, "backup", source(tmp_path, name), "--no-commit", "--result", f"{name}.json")
    run(environment, "commit", "first.json")
    failure = result_of(environment, "commit", "second.json", code=6)
    assert failure["error"] == "StaleResultError"
    run(environment, "restore", "target")
    assert (tmp_path / "target" / "CURRENT").read_text() == "first"


def test_backups_at_the_same_time_each_commit_or_say_conflict(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    words = [*COMMAND, "backup", source(tmp_path), "--json"]
    runs = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outcomes = [(process.communicate(timeout=60), process.returncode) for process in runs]
    codes = sorted(code for _, code in outcomes)
    assert set(codes) <= {0, 6}, outcomes
    assert len(result_of(environment, "list")["commits"]) == codes.count(0) >= 1
    assert result_of(environment, "verify", "--level", "content")["problems"] == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_run_cleans_up_and_leaves_the_repository_as_it_was(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals, code: int, as_json: bool
) -> None:
    run(environment, "init")
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, "backup", source(tmp_path), *(["--json"] if as_json else [])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whatever started the tests may have had hanging up ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509  (it takes no lock)
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "uploading\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    # Cancelled work ends before the process says so.
    assert err.startswith("cleaned up\n")
    if as_json:
        failure = json.loads(err.removeprefix("cleaned up\n"))
        assert (failure["error"], failure["code"]) == ("KeyboardInterrupt", code)
    else:
        assert "error: interrupted\n" in err
        assert "hint: nothing is half done" in err
    assert result_of(environment, "list", "--jobs")["scopes"] == []
    run(environment, "backup", source(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_still_cleans_up(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    """Without a word of asyncio's about what it did not get to (F15)."""
    run(environment, "init")
    slow = HANGING.replace("    finally:\n", "    finally:\n        await tidy()\n").replace(
        "async def hang", TIDYING + "\nasync def hang"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "backup", source(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "uploading\n"
    process.send_signal(number)
    assert process.stderr.readline() == "tidying\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "error: interrupted\n" in err
    assert "destroyed" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_a_backup_that_is_killed_again_and_again_sends_what_was_in_flight_twice(
    kills: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    run(environment, "init")
    files = {f"{number:06}.sst": os.urandom(MIB) for number in range(3 * kills)}
    (tmp_path / "state").mkdir()
    for name, data in files.items():
        (tmp_path / "state" / name).write_bytes(data)
    words = ["backup", str(tmp_path / "state"), "--in-flight-max", "1", "--bwlimit", f"{8 * MIB}"]
    blobs = tmp_path / "repository" / "blobs"

    def sent() -> int:
        return sum(path.is_file() for path in blobs.rglob("*-*"))

    for _ in range(kills):
        before = sent()
        with subprocess.Popen([*COMMAND, *words], env=environment, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + WAIT_S
            while sent() < before + 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
    done = result_of(environment, *words)["stats"]
    assert done["blobs_resumed"] + done["blobs"] == len(files)
    assert done["blobs_resumed"] >= kills
    # Of each attempt at most the blob whose note had not been written.
    assert len(files) <= sent() <= len(files) + kills
    run(environment, "restore", "target")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == files


def test_who_ignores_hanging_up_is_not_interrupted_by_it(tmp_path: Path, environment: dict[str, str]) -> None:
    """As under `nohup`."""
    run(environment, "init")
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", HANGING, "backup", source(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while process.stderr.readline() != "uploading\n":
        pass
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_a_reader_that_leaves_early_is_no_error_to_shout_about(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    process = subprocess.Popen(
        [*COMMAND, "list", "--jobs"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 1
    process.stderr.close()
    assert err == ""


def test_a_result_that_cannot_be_printed_is_an_error(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "list", "--jobs"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "error: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_drawn_on_a_terminal_only(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    words = [*COMMAND, "backup", source(tmp_path)]
    environment |= {"TERM": "xterm", "COLUMNS": "80"}
    for quiet in (False, True):
        master, terminal = pty.openpty()
        done = subprocess.run(
            [*words, *(["--quiet"] if quiet else [])],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            timeout=60,
            check=False,
        )
        os.close(terminal)
        drawn = b"" if quiet else os.read(master, 65536)
        os.close(master)
        assert done.returncode == 0
        assert (b"backup " in drawn) is not quiet
        assert drawn == b"" or drawn.endswith(b"\x1b[2K")
        source(tmp_path, "changed")
    assert run(environment, "backup", source(tmp_path, "again")).stderr == ""


def test_the_command_starts_without_spark(environment: dict[str, str]) -> None:
    program = (
        "import sys, engine.cli; print([m for m in ('pyspark', 'pandas', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]"


def test_a_result_file_that_never_ends_can_be_interrupted(tmp_path: Path, environment: dict[str, str]) -> None:
    run(environment, "init")
    os.mkfifo(tmp_path / "result.json")
    process = subprocess.Popen(
        [*COMMAND, "commit", str(tmp_path / "result.json")], env=environment, stderr=subprocess.PIPE, text=True
    )
    with (tmp_path / "result.json").open("w"):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "error: interrupted" in err


# The sole importer of Spark with a verb around it, so that what it needs is all that is tested.
ON_SPARK = """
import sys, click
from engine.cli import main, tidemark
from engine.cli.session import spark_session

@tidemark.command("start")
def start():
    with spark_session():
        pass

sys.exit(main())
"""


def test_without_java_a_verb_on_spark_says_what_to_do(environment: dict[str, str], tmp_path: Path) -> None:
    without = {**environment, "JAVA_HOME": str(tmp_path / "no-java"), "TIDEMARK_JSON": "1"}
    words = [sys.executable, "-c", ON_SPARK, "start"]
    done = subprocess.run(words, env=without, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    failure = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, failure["error"], failure["message"]) == (
        2,
        "UsageError",
        "spark: Spark does not start here",
    )
    assert "JAVA_HOME" in failure["hint"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_log_that_nobody_reads_any_more_fails_no_backup(
    tmp_path: Path, environment: dict[str, str], form: str
) -> None:
    run(environment, "init")
    reader, writer = os.pipe()
    os.close(reader)
    words = ["backup", source(tmp_path), "--log-format", form, "--metrics-file", "/absent/directory/t.prom"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", TALKATIVE, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert b"commit 1 of flights" in done.stdout
