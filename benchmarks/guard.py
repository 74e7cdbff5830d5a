"""Whether this tree became slower than an earlier one: `python -m benchmarks.guard`, or `make bench PART=guard`.

Both trees do the same works in turn, with the same Python and libraries, through the command line, whose words stay the
same from release to release. Each run is a process, its start included. A work counts as slower if it takes more than
`SLOWER_TIMES` as long, in wall time or in CPU time, and the middle halves of both samples lie apart.

Ends with 1 if a work is slower. A release needs a run that ends with 0, or a line in the CHANGELOG that says why not.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.peers.figures import Key, Ratio, Sample, quartiles, ratio
from benchmarks.peers.processes import NOTHING, ROOT, Command, ContestantError, Usage, end_in_order, run, sample_of_run
from benchmarks.peers.report import table
from benchmarks.peers.servers import BUCKET, open_server
from benchmarks.peers.trees import KIB, MIB, Shape, change_files, difference, make_tree, tree_digests
from tests.servers import ceph_rgw

SLOWER_TIMES: Final = 1.1
EARLIER, NOW = "earlier", "now"
KEYS: Final[Mapping[str, Key]] = {"wall": lambda sample: sample.wall_s, "CPU": lambda sample: sample.cpu_s}
MANY: Final = Shape(name="5,000 files of 4 KiB", count=5000, size_bytes=4 * KIB)
SMALL: Final = Shape(name="2,000 files of 64 KiB", count=2000, size_bytes=64 * KIB)
LARGE: Final = Shape(name="8 files of 32 MiB", count=8, size_bytes=32 * MIB)
_MISSING_SHARE: Final = 10


class Program:
    """The command line of one tree, with a directory that is backed up and one that is restored to.

    Args:
        tree: The checkout.
        place: An empty directory in memory.
        url: Its repositories are below it.
        environment: How the store is reached.
    """

    def __init__(self, tree: Path, place: Path, url: str, environment: Mapping[str, str]) -> None:
        self.source, self.target = place / "source", place / "target"
        self._place = place
        self._url = url
        # A tree on the path comes before the one that is installed.
        self._environment = {**environment, "PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(place / "cache")}
        self._repositories = 0

    def run(self, *words: str) -> Usage:
        """Run a command on the newest of its repositories."""
        repository = f"{self._url}/{self._repositories}"
        return run(
            Command(
                arguments=(sys.executable, "-m", "engine.cli", *words),
                environment={**self._environment, "TIDEMARK_REPOSITORY": repository, "TIDEMARK_JOB": "guard"},
                directory=self._place,
            )
        )

    def begin_repository(self) -> None:
        """Make one that is empty."""
        self._repositories += 1
        self.run("init", "-q")

    def back_up(self) -> Usage:
        return self.run("backup", "-q", str(self.source))

    def restore(self, *options: str) -> Usage:
        return self.run("restore", "-q", str(self.target), *options)


def back_up_changes(program: Program, number: int) -> Usage:
    """A hundredth of the files changed."""
    change_files(program.source, number)
    return program.back_up()


def back_up_all(program: Program, number: int) -> Usage:  # noqa: ARG001 - as `Work.act` has it
    """A repository in which there is nothing."""
    program.begin_repository()
    return program.back_up()


def restore_all(program: Program, number: int) -> Usage:  # noqa: ARG001 - as `Work.act` has it
    """An empty target."""
    shutil.rmtree(program.target, ignore_errors=True)
    return program.restore()


def restore_onto(program: Program, number: int) -> Usage:
    """A target of which nothing is known, and one file in ten is missing."""
    restore_all(program, number)
    for path in sorted(program.target.iterdir())[::_MISSING_SHARE]:
        path.unlink()
    shutil.rmtree(program.target.with_name("cache"), ignore_errors=True)
    return program.restore("--replace")


class Work(NamedTuple):
    """What both do in turn, and the directory that is backed up before."""

    name: str
    shape: Shape
    act: Callable[[Program, int], Usage]


WORKS: Final = (
    Work("start and end", LARGE.scaled(0.1), lambda program, _: program.run("--version")),
    Work(f"backup, no change in {MANY.name}", MANY, lambda program, _: program.back_up()),
    Work(f"backup, 1 % changed of {MANY.name}", MANY, back_up_changes),
    Work(f"first backup of {SMALL.name}", SMALL, back_up_all),
    Work(f"restore of {SMALL.name}", SMALL, restore_all),
    Work(f"restore onto 90 % of {SMALL.name}", SMALL, restore_onto),
    Work(f"first backup of {LARGE.name}", LARGE, back_up_all),
    Work(f"restore of {LARGE.name}", LARGE, restore_all),
)


def measure(work: Work, programs: Mapping[str, Program], rounds: int) -> dict[str, list[Sample]]:
    """Let the programs do a work in turn, in another order in each round.

    Raises:
        ContestantError: A program failed, or its backup does not restore to what was backed up.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in programs}
    for program in programs.values():
        make_tree(work.shape, program.source)
        program.begin_repository()
        program.back_up()
    for number in range(1, rounds + 1):
        for name in sorted(programs, reverse=bool(number % 2)):
            usage = work.act(programs[name], number)
            sample = sample_of_run(
                usage,
                NOTHING,
                step=work.name,
                contestant=name,
                number=number,
                size_bytes=0,
                files_count=work.shape.count,
            )
            samples[name].append(sample)
    for name, program in programs.items():
        restore_all(program, 0)
        if wrong := difference(tree_digests(program.source), program.target):
            raise ContestantError(f"{work.name}, {name}: {wrong}")
    return samples


def is_slower(found: Ratio) -> bool:
    """Whether the second of two takes longer than noise explains."""
    return found.quartiles.median > SLOWER_TIMES and not found.equal


def row_of(work: str, samples: Mapping[str, Sequence[Sample]]) -> tuple[list[str], bool]:
    """A line of the table, and whether the work became slower."""
    cells, slower = [work], False
    for key in KEYS.values():
        before, after = (quartiles([key(sample) for sample in samples[name]]).median for name in (EARLIER, NOW))
        found = ratio(samples[EARLIER], samples[NOW], key)
        assert found is not None
        slower |= is_slower(found)
        cells += [f"{before:.3f}", f"{after:.3f}", f"{found.quartiles.median:.2f}{' =' if found.equal else ''}"]
    return [*cells, "**slower**" if slower else ""], slower


@contextlib.contextmanager
def checkout(commit: str, directory: Path) -> Iterator[Path]:
    """An earlier commit's tree, for as long as the context lasts."""
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(directory), commit], check=True)
    try:
        # Where bytecode is not written, each run would compile again what has none.
        compiled = [str(tree / package) for tree in (directory, ROOT) for package in ("blobstore", "engine", "index")]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *compiled], check=True)
        yield directory
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)


def newest_release() -> str | None:
    """The newest tag `v...` behind this commit; None without one."""
    words = ["git", "-C", str(ROOT), "describe", "--tags", "--match", "v*", "--abbrev=0"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def choose_stores(asked: str | None) -> Sequence[str]:
    """The one that was asked for; else each of which there is a server."""
    return [asked] if asked else ["directory", *(() if ceph_rgw.why_missing() else ("ceph",))]


@contextlib.contextmanager
def open_place(store: str, memory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL below which repositories are made, and the variables that lead there."""
    if store == "directory":
        yield f"file://{memory / 'repositories'}", {}
    else:
        with open_server("ceph", memory) as server:
            yield f"s3://{BUCKET}", server.server.environment()


def compare(commit: str, stores: Sequence[str], rounds: int, memory: Path) -> bool:
    """Print a table for each store; whether no work became slower."""
    fast = True
    with checkout(commit, memory / "earlier-tree") as tree:
        for store in stores:
            rows = []
            with open_place(store, memory / store) as (url, environment):
                for number, work in enumerate(WORKS):
                    programs = {}
                    for name, checked_out in ((EARLIER, tree), (NOW, ROOT)):
                        place = memory / store / name
                        shutil.rmtree(place, ignore_errors=True)
                        place.mkdir(parents=True)
                        programs[name] = Program(checked_out, place, f"{url}/{number}-{name}", environment)
                    row, slower = row_of(work.name, measure(work, programs, rounds))
                    rows.append(row)
                    fast &= not slower
                    print(f"{store}: {' '.join(row)}", file=sys.stderr, flush=True)
            head = ["work", *(f"{key}, {what}" for key in KEYS for what in (f"{EARLIER}, s", f"{NOW}, s", "times"))]
            print(f"\n{store}, {rounds} rounds, medians; `=` where the middle halves overlap\n")
            print("\n".join(table((*head, ""), rows)), flush=True)
    return fast


def main() -> None:
    """Compare this tree with an earlier one."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", metavar="COMMIT", help="the earlier tree; without it the newest tag v...")
    parser.add_argument("--store", choices=("directory", "ceph"), help="without it both, where Ceph is installed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory, with 4 GiB free")
    options = parser.parse_args()
    commit = options.base or newest_release()
    if commit is None:
        parser.error("there is no tag v... to compare with; name a commit by --base")
    stores = choose_stores(options.store)
    with tempfile.TemporaryDirectory(prefix="tidemark-guard-", dir=options.memory) as memory:
        fast = compare(commit, stores, options.rounds, Path(memory))
    sys.exit(0 if fast else f"slower than {commit}: the lines that say so")


if __name__ == "__main__":
    main()
