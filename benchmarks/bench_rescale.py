"""Another number of state partitions: `tidemark spark rescale` against Spark's own offline repartition (4.2 and newer).

A real Spark query writes the state: an aggregation over 8 partitions, RocksDB provider, checkpoint format 2, with a
snapshot of the newest version. Then, in turn, for each of MOVES:

- Spark: `StreamingCheckpointManager.repartition` in a warm JVM, on a copy of hard links. It shuffles all rows, and adds
  a batch to the checkpoint.
- tidemark: `tidemark spark rescale` as a new process. It hashes every key, and makes a new checkpoint beside it.

Bytes written are those of files that the checkpoint did not have before. What Spark writes is the whole state.

Run `make bench PART=rescale`, or `python benchmarks/bench_rescale.py`. Environment: TIDEMARK_BENCH_STATE_MB (1200) and
TIDEMARK_BENCH_ROUNDS (5), as of `bench_state_load.py`.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

# Python looks beside a script; the other benchmarks are found from the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_checkpoint_restore import link_checkpoint
from benchmarks.bench_state_load import PARTITIONS, ROUNDS, ROW_BYTES, STATE_MB, feed, run_query, spark_session

# A merge, a split, and a number that does neither alone.
MOVES = (PARTITIONS // 2, PARTITIONS * 2, PARTITIONS * 3 // 4)
MIB = 1024 * 1024


def write_state(spark: SparkSession, root: Path) -> None:
    (root / "input").mkdir(parents=True)
    keys = STATE_MB * MIB // ROW_BYTES
    bulk = max(2, STATE_MB // 300)
    for n in range(bulk):
        feed(root / "input", n, range(keys * n // bulk, keys * (n + 1) // bulk))
    run_query(spark, root, deltas=1, snapshot_of=bulk)


def inodes(directory: Path) -> dict[int, int]:
    """The size of each file, by its inode."""
    found = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return {of.st_ino: of.st_size for of in found}


def timed(work: Callable[[], object], source: Path, target: Path) -> tuple[float, int]:
    """Seconds, and bytes of files at the target that the source does not have."""
    before = inodes(source)
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return seconds, sum(size for inode, size in inodes(target).items() if inode not in before)


def by_spark(spark: SparkSession, source: Path, target: Path, partitions: int) -> tuple[float, int]:
    link_checkpoint(source, target)
    manager = spark._streamingCheckpointManager  # noqa: SLF001 - so Spark has it
    return timed(lambda: manager.repartition(str(target), partitions, enforce_exactly_once_sink=False), source, target)


def by_tidemark(_: SparkSession, source: Path, target: Path, partitions: int) -> tuple[float, int]:
    words = ["spark", "rescale", str(source), str(target), "--partitions", str(partitions), "--quiet"]
    command = [sys.executable, "-m", "engine.cli", *words]
    return timed(lambda: subprocess.run(command, check=True), source, target)


def measure(root: Path) -> None:
    sides = {"Spark": by_spark, "tidemark": by_tidemark}
    with spark_session() as spark, tempfile.TemporaryDirectory(dir=root.parent, prefix="rescaled-") as scratch:
        write_state(spark, root)
        source = root / "checkpoint"
        for partitions in MOVES:
            move = f"{PARTITIONS} -> {partitions:2}"
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            written: dict[str, int] = {}
            for number in range(ROUNDS):
                turn = list(sides)[:: 1 - 2 * (number % 2)]
                for side in turn:
                    target = Path(scratch, f"{partitions}-{number}-{side}")
                    took, written[side] = sides[side](spark, source, target, partitions)
                    seconds[side].append(took)
                    subprocess.run(["rm", "-rf", target], check=True)
            for side, values in seconds.items():
                spread = f"from {min(values):6.1f} to {max(values):6.1f}"
                share = 100 * written[side] / written["Spark"]
                size = f"{written[side] / MIB:8,.1f} MiB, {share:.2f} % of what Spark writes"
                print(f"{move}, {side:8} median {statistics.median(values):6.1f} s, {spread}; written {size}")
            ratios = [a / b for a, b in zip(seconds["Spark"], seconds["tidemark"], strict=True)]
            print(f"{move}, Spark's time / tidemark's: {statistics.median(ratios):.1f}")


def test_another_number_of_partitions(tmp_path: Path) -> None:
    measure(tmp_path / "state")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory, "state"))
