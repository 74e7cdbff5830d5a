"""How much state one machine backs up and brings back in an hour: `make bench PART=throughput`.

States of 4, 8 and 16 GB, as files of 64 MiB of bytes that nothing compresses, go by the command line into a repository
in a directory and into one on Ceph RGW, and come back. Source and target are on one disk, where the directory is, too;
Ceph keeps its blobs in memory, so that it gets no state above four tenths of that, and runs on the same cores. Each run
is a process, its start included; what came back of the largest is compared.

The forecast for many executors multiplies: it assumes that the store and its network serve all of them as fast as one.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.guard import Program, choose_stores, open_place
from benchmarks.peers.figures import quartiles
from benchmarks.peers.processes import ROOT, ContestantError, Usage, end_in_order, sync
from benchmarks.peers.report import table
from benchmarks.peers.trees import MIB, difference, tree_bytes, tree_digests, write_random

FILE_BYTES: Final = 64 * MIB
TIB: Final = 2**40
# The forecast's job, and what TiDB's documentation says of its BR: a full restore, for each node of the cluster.
FORECAST_BYTES, EXECUTORS = 10**12, 16
BR_TIB_PER_HOUR: Final = 2.0


class Figure(NamedTuple):
    """The runs of one step with one size."""

    store: str
    step: str
    size_bytes: int
    runs: Sequence[Usage]

    @property
    def wall_s(self) -> float:
        return quartiles([run.wall_s for run in self.runs]).median

    @property
    def cpu_s(self) -> float:
        return quartiles([run.cpu_s for run in self.runs]).median

    def row(self) -> tuple[str, ...]:
        """Sizes, times, and the speed of the machine and of one of its cores, if that did nothing else."""
        per_s, per_core_s = self.size_bytes / self.wall_s, self.size_bytes / self.cpu_s
        return (
            self.store,
            self.step,
            f"{self.size_bytes / 1e9:.1f} GB",
            f"{self.wall_s:.1f} s",
            f"{self.cpu_s:.1f} s",
            f"{per_s * 60 / 1e9:.0f}",
            f"{per_s * 3600 / TIB:.2f}",
            f"{per_core_s * 3600 / TIB:.2f}",
        )


# In memory a blob takes half as much again as on a disk.
_MEMORY_SHARE: Final = 0.4
_HEAD = ("repository", "step", "state", "wall", "client CPU", "GB/min", "TiB/h", "TiB/h for a core of client CPU")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_sources(root: Path, sizes_gb: Sequence[int]) -> dict[int, Path]:
    """Make the largest state; the smaller ones are links to its first files."""
    largest = root / "state"
    largest.mkdir()
    names = [f"{number:06d}.sst" for number in range(round(max(sizes_gb) * 1e9 / FILE_BYTES))]
    for name in names:
        write_random(largest / name, FILE_BYTES)
    sources = {}
    for size_gb in sizes_gb:
        sources[size_gb] = root / f"state-{size_gb}"
        sources[size_gb].mkdir()
        for name in names[: round(size_gb * 1e9 / FILE_BYTES)]:
            os.link(largest / name, sources[size_gb] / name)
    return sources


def measure(store: str, place: Path, sources: dict[int, Path], rounds: int) -> list[Figure]:
    """Back up and restore each state.

    Raises:
        ContestantError: It failed, or what came back is not what was backed up.
    """
    figures = []
    for size_gb, source in sources.items():
        ups: list[Usage] = []
        downs: list[Usage] = []
        for number in range(rounds):
            is_last = (size_gb, number) == (max(sources), rounds - 1)
            with tempfile.TemporaryDirectory(dir=place) as name, open_place(store, Path(name)) as (url, environment):
                program = Program(ROOT, Path(name), url, environment)
                program.source = source
                program.begin_repository()
                for act, usages in ((program.back_up, ups), (program.restore, downs)):
                    # What was written before is not on its way to the disk any more.
                    sync(place)
                    usages.append(act())
                if is_last and (wrong := difference(tree_digests(source), program.target)):
                    raise ContestantError(f"{store}: {wrong}")
        size_bytes = tree_bytes(source)
        figures += [Figure(store, "backup", size_bytes, ups), Figure(store, "restore", size_bytes, downs)]
        for figure in figures[-2:]:
            print(" ".join(figure.row()), file=sys.stderr, flush=True)
    return figures


def forecast(figures: Sequence[Figure]) -> str:
    """Say how long many machines like this one would take."""
    lines = []
    for store in dict.fromkeys(figure.store for figure in figures):
        *_, last = (figure for figure in figures if (figure.store, figure.step) == (store, "restore"))
        per_s = last.size_bytes / last.wall_s
        minutes = FORECAST_BYTES / EXECUTORS / per_s / 60
        lines.append(
            f"- {store}: {FORECAST_BYTES / 1e12:g} TB on {EXECUTORS} executors like this machine ({os.cpu_count()} "
            f"cores, shared with the repository) in {minutes:.1f} minutes, if the store serves "
            f"{EXECUTORS * per_s / 1e9:.1f} GB/s; TiDB's BR, at its published {BR_TIB_PER_HOUR:g} TiB/h a node, would "
            f"take {FORECAST_BYTES / EXECUTORS / TIB / BR_TIB_PER_HOUR * 60:.1f} on as many nodes, for which its "
            "makers advise 16 cores and NVMe disks"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table and the forecast."""
    end_in_order()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sizes", default="4,8,16", help="in GB, with commas")
    parser.add_argument("--store", choices=("directory", "ceph"), help="without it both, where Ceph is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=ROOT / "build", help="has three times the largest size free")
    options = parser.parse_args()
    sizes_gb = sorted(int(size) for size in options.sizes.split(","))
    options.disk.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.disk).free < 3.2e9 * max(sizes_gb):
        parser.error(f"{options.disk} has too little space for {max(sizes_gb)} GB three times")
    with tempfile.TemporaryDirectory(prefix="throughput-", dir=options.disk) as place:
        sources = make_sources(Path(place), sizes_gb)
        figures = []
        for store in choose_stores(options.store):
            bytes_max = _MEMORY_SHARE * _memory_bytes() if store == "ceph" else math.inf
            fitting = {size_gb: source for size_gb, source in sources.items() if size_gb * 1e9 <= bytes_max}
            figures += measure(store, Path(place), fitting, options.rounds)
    print("\n".join(table(_HEAD, [figure.row() for figure in figures])))
    print(f"\n{forecast(figures)}", flush=True)


if __name__ == "__main__":
    main()
