"""What a client in Python is asked to do: `python -m benchmarks.peers.clients.NAME JOB`, the job as JSON.

Nothing but the standard library: boto3's client reads this in an environment that has nothing else.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step of one client."""

    # `start` imports and does nothing, `open` also says hello to the server, `upload` and `restore` do that and work.
    verb: str
    endpoint_url: str
    bucket: str
    region: str
    access_key: str
    secret_key: str
    # Where the tree comes from, or goes to.
    directory: str = ""
    # Below this prefix of the bucket.
    prefix: str = "tree"
    # Connections at once.
    workers: int = 16
    # What only one client understands.
    options: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """As it is on a command line."""
        return json.dumps(asdict(self))

    def key(self, name: str) -> str:
        """Of a file's path below `directory`."""
        return f"{self.prefix}/{name}"

    def files(self) -> Iterator[tuple[str, Path, int]]:
        """Key, path and size of each file to upload."""
        root = Path(self.directory)
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield self.key(str(path.relative_to(root))), path, path.stat().st_size

    def target(self, key: str) -> Path:
        """Where a key is restored to; its directory is there."""
        path = Path(self.directory) / key.removeprefix(f"{self.prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


# The environment names the file.
MARK = "BENCH_MARK"
# What its lines begin with.
OPENED, DONE = "opened", "done"


def opened() -> None:
    """Say that everything is imported and open, and that the work begins: this moment, and the CPU seconds so far.

    Exact, where a run with nothing to do is an estimate. The clock is the system's, the same in all processes.
    """
    _mark(OPENED)


def main(steps: Callable[[Job], None]) -> None:
    """Carry out the job of the command line, and say that it is done: what is left is the end of the process."""
    steps(Job(**json.loads(sys.argv[1])))
    _mark(DONE)


def leave() -> NoReturn:
    """Say that it is done, and end the process at once, without the interpreter's way out."""
    _mark(DONE)
    os._exit(0)


def _mark(moment: str) -> None:
    if path := os.environ.get(MARK):
        with Path(path).open("a", encoding="ascii") as marks:
            marks.write(f"{moment} {time.clock_gettime(time.CLOCK_MONOTONIC)} {time.process_time()}\n")
