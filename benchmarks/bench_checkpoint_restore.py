"""From a lost checkpoint to the first batch: what we need to bring it back, and what Spark then needs to start on it.

A real Spark query writes a checkpoint: an aggregation over 8 partitions, RocksDB provider, checkpoint format 2; 10
changelogs lie above the last snapshot. It is backed up. Then, in turn:

- `restore`, `restore, replayed`: `engine.spark.restore_checkpoint` on two executors' cores, without and with changelogs
  applied, from a repository in a directory into a new directory.
- `start, original`: the query is started on a copy of the original that has never been loaded here, until the batch
  that waits for it is committed; hard links make the copy, so no time is spent on it.
- `start, restored`, `start, replayed`: the same on the two that were restored. They have none of Hadoop's hidden
  checksums, so Spark also reads them without verifying those, which it does on the original.

All of it in one warm JVM; the first round is thrown away. The batch is a single row, so a start is what Spark needs to
load the state and to commit.

Run `make bench`, or `python benchmarks/bench_checkpoint_restore.py`. Environment: as `bench_state_load.py`, whose state
this is; TIDEMARK_BENCH_STATE_DIR keeps it for both.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import SparkSession

# Python looks beside a script; the other benchmark is found from the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_state_load import ROUNDS, STORE, feed, last_version, report_state, spark_session, write_state
from engine.checkpoint.backup import CheckpointBackupResult, backup_checkpoint
from engine.checkpoint.restore import RestoreChoice
from engine.repository.repository import SyncRepository
from engine.spark import restore_checkpoint

STEPS = ("restore", "restore, replayed", "start, original", "start, restored", "start, replayed")
POLL_S = 0.002


def back_up(checkpoint: Path, url: str) -> CheckpointBackupResult:
    SyncRepository.init(url).close()
    with SyncRepository.open(url) as repository:
        return repository.loop.run(backup_checkpoint(repository.asynchronous, checkpoint))


def link_checkpoint(checkpoint: Path, target: Path) -> None:
    """A copy under another path. Spark renames new files into place, so what is linked is never written to."""
    shutil.copytree(checkpoint, target, copy_function=os.link)


def start_query(spark: SparkSession, root: Path, checkpoint: Path) -> float:
    """Seconds from the start of the query to the commit of its first batch."""
    spark.conf.set(f"{STORE}minDeltasForSnapshot", "1000")
    committed = checkpoint / "commits" / str(newest_batch(checkpoint) + 1)
    rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(root / "input"))
    words = [F.sha2(F.concat(F.col("id").cast("string"), F.lit(word)), 512) for word in "abc"]
    counted = rows.groupBy("id").agg(F.count("*").alias("n"), F.max(F.concat(*words)).alias("payload"))
    writer = counted.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(checkpoint))
    began = time.perf_counter()
    query = writer.start()
    try:
        while not committed.exists():
            assert query.isActive, query.exception()
            time.sleep(POLL_S)
        return time.perf_counter() - began
    finally:
        query.stop()


def newest_batch(checkpoint: Path) -> int:
    return max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())


def measure(root: Path) -> dict[str, list[float]]:
    """Seconds of every step, by round; the first round is thrown away."""
    checkpoint = root / "checkpoint"
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    with spark_session() as spark, tempfile.TemporaryDirectory(dir=root.parent, prefix="restores-") as scratch:
        write_state(spark, root)
        report_state(checkpoint, last_version(checkpoint))
        url = f"file://{scratch}/repository"
        made = back_up(checkpoint, url)
        size_mib = (made.state.size_bytes + made.query.size_bytes) / 2**20
        print(f"backup of batch {made.backup.batch}: {size_mib:.0f} MiB in {made.seconds:.1f} s, every SST checked")
        feed(root / "input", newest_batch(checkpoint) + 1, [1])
        try:
            for number in range(ROUNDS + 1):
                taken = one_round(spark, root, url, Path(scratch, f"round-{number}"), number)
                for step in STEPS if number else ():
                    seconds[step].append(taken[step])
        finally:
            (root / "input" / f"{newest_batch(checkpoint) + 1:04d}.parquet").unlink()
    return seconds


def one_round(spark: SparkSession, root: Path, url: str, scratch: Path, number: int) -> dict[str, float]:
    """Every step once; which of the three is started first changes from round to round."""
    scratch.mkdir()
    taken: dict[str, float] = {}
    places = {"restore": scratch / "restored", "restore, replayed": scratch / "replayed"}
    for step, place in places.items():
        began = time.perf_counter()
        restored = restore_checkpoint(spark, url, place, RestoreChoice(replayed=step != "restore"))
        taken[step] = time.perf_counter() - began
        assert (restored.records > 0) == (step != "restore")
    link_checkpoint(root / "checkpoint", scratch / "original")
    names = ("original", "restored", "replayed")
    for name in (names[number % 3 :] + names[: number % 3])[:: 1 - 2 * (number // 3 % 2)]:
        taken[f"start, {name}"] = start_query(spark, root, scratch / name)
    shutil.rmtree(scratch)
    return taken


def report(seconds: Mapping[str, list[float]]) -> None:
    for step, values in seconds.items():
        print(f"{step:18} median {statistics.median(values):6.2f} s, from {min(values):6.2f} to {max(values):6.2f}")
    whole = {
        name: [a + b for a, b in zip(seconds[step], seconds[f"start, {name}"], strict=True)]
        for name, step in (("restored", "restore"), ("replayed", "restore, replayed"))
    }
    original = seconds["start, original"]
    for what, values in (
        ("start on the original / start on the restored", seconds["start, restored"]),
        ("start on the original / start on the replayed", seconds["start, replayed"]),
        ("start on the original / restore", seconds["restore"]),
        ("start on the original / restore, replayed", seconds["restore, replayed"]),
        ("start on the original / restore and start", whole["restored"]),
        ("start on the original / restore replayed and start", whole["replayed"]),
    ):
        ratio = statistics.median(a / b for a, b in zip(original, values, strict=True))
        print(f"{what:50} {ratio:.2f}")


def test_from_a_lost_checkpoint_to_the_first_batch(tmp_path: Path) -> None:
    kept = os.environ.get("TIDEMARK_BENCH_STATE_DIR")
    report(measure(Path(kept) if kept else tmp_path / "state"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        test_from_a_lost_checkpoint_to_the_first_batch(Path(directory))
