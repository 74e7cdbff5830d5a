"""Starting a contestant as a process of its own, and reading from the operating system what it took."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.peers.clients.job import DONE, MARK, OPENED
from benchmarks.peers.figures import Sample

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = Path(__file__).with_name("launcher.py")
SHOWN_BYTES = 2000
SHOWN_LINES = 6
# Results are published: what a program says is shown without the paths of the machine.
_PATH = re.compile(r"(?<![\w:/.])/[\w.+-]+(?:/[\w.+-]*)+")
# Anyone who takes longer hangs.
TIMEOUT_S = 1800.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A program with its arguments and what it finds in its environment beside the usual."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    directory: Path = ROOT


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a process took, its children included."""

    wall_s: float
    user_s: float
    system_s: float
    peak_bytes: int
    # Of that, what went by until the client said that it was open, and after it said that it was done: what starting,
    # opening and ending a process take, as a run with nothing to do shows it for others. 0 if it does not say.
    opened_s: float = 0.0
    opened_cpu_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """User and system together."""
        return self.user_s + self.system_s


NOTHING = Usage(wall_s=0.0, user_s=0.0, system_s=0.0, peak_bytes=0)


class ContestantError(Exception):
    """A contestant's process failed; the message has the end of what it said."""


def run(command: Command) -> Usage:
    """Run a command to its end.

    Raises:
        ContestantError: It ended with another code than 0, or said that it was open and never that it was done.
    """
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-") as directory:
        report, said, mark = (Path(directory) / name for name in ("usage", "said", "mark"))
        launcher = (sys.executable, "-I", "-S", str(LAUNCHER), str(report))
        with said.open("wb") as out:
            process = subprocess.Popen(
                [*launcher, *command.arguments],
                env=environment(command.environment) | {MARK: str(mark)},
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise ContestantError(f"{Path(command.arguments[0]).name} took longer than {TIMEOUT_S:.0f} s") from None
            finally:
                # An interrupt must not leave it running either.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        wall_s, user_s, system_s, peak_bytes, code = report.read_text().split()
        if code != "0":
            lines = said.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip().splitlines()
            tail = " | ".join(line.strip() for line in lines[-SHOWN_LINES:])
            raise ContestantError(f"{Path(command.arguments[0]).name} ended with {code}: {without_paths(tail)}")
        usage = Usage(wall_s=float(wall_s), user_s=float(user_s), system_s=float(system_s), peak_bytes=int(peak_bytes))
        return _without_work(usage, mark.read_text() if mark.exists() else "")


def _without_work(usage: Usage, marks: str) -> Usage:
    """With what starting, opening and ending took, if the client has said when it was open."""
    at: dict[str, tuple[float, float]] = {}
    for line in marks.splitlines():
        moment, at_s, cpu_s = line.split()
        at[moment] = float(at_s), float(cpu_s)
    if OPENED not in at:
        return usage
    if DONE not in at:
        # An idle run would be subtracted from it, and that ends in another way.
        raise ContestantError("said that it was open, and ended without saying that it was done")
    (opened_at_s, opened_cpu_s), (done_at_s, done_cpu_s) = at[OPENED], at[DONE]
    return msgspec.structs.replace(
        usage, opened_s=usage.wall_s - (done_at_s - opened_at_s), opened_cpu_s=usage.cpu_s - (done_cpu_s - opened_cpu_s)
    )


def without_paths(text: str) -> str:
    """A text in which every absolute path of two names and more is `PATH`."""
    return _PATH.sub("PATH", text)


def run_idle(command: Command) -> Usage:
    """Run what has nothing to do three times, and take the run in the middle: it is subtracted from others."""
    return sorted((run(command) for _ in range(3)), key=lambda usage: usage.wall_s)[1]


def sample_of_run(
    usage: Usage,
    opened: Usage,
    *,
    step: str,
    contestant: str,
    number: int,
    size_bytes: int,
    files_count: int,
    sync_s: float = 0.0,
    error: str = "",
) -> Sample:
    """What a process took, as a sample; `opened` is what the same one took with nothing to do."""
    return Sample(
        step=step,
        contestant=contestant,
        round=number,
        wall_s=usage.wall_s,
        user_s=usage.user_s,
        system_s=usage.system_s,
        peak_bytes=usage.peak_bytes,
        size_bytes=size_bytes,
        files_count=files_count,
        sync_s=sync_s,
        open_s=usage.opened_s or opened.wall_s,
        open_cpu_s=usage.opened_cpu_s or opened.cpu_s,
        open_peak_bytes=opened.peak_bytes,
        error=error,
    )


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what points S3 clients, or tidemark, somewhere else."""
    foreign = ("AWS_", "RCLONE_", "RESTIC_", "S3_", "TIDEMARK_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept | proxies | {"AWS_EC2_METADATA_DISABLED": "true"} | dict(more)


def end_in_order() -> None:
    """Let SIGTERM end this process as an exit does, so that servers stop and what fills the memory is deleted."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def sync(directory: Path) -> float:
    """Bring the file system of a directory to its disk; how many seconds that took."""
    began_s = time.perf_counter()
    subprocess.run(["sync", "-f", str(directory)], check=True)
    return time.perf_counter() - began_s
