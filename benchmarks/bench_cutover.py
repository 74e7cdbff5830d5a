"""A query that moves to twice the partitions while it runs: `tidemark spark follow` and `cutover`.

A real Spark query writes the state, of two sizes: an aggregation over 8 partitions, RocksDB provider, checkpoint format
2, changelogs on. Then it goes on with BATCH_ROWS rows a batch, and `tidemark spark follow --partitions 16` follows it
as a process of its own. Measured, of each size:

- the lag: how many batches the replica is behind, looked at ten times a second;
- the pause of the cut-over: from the moment when the source is closed, with the query still running, to the moment when
  a query can be started at the replica, and to its first commit there, which has the state loaded by Spark. Closed in
  the middle of a batch, the query still commits it, so the pause from that commit on is reported apart. The rival is
  what one does without it: stop the query, `tidemark spark rescale`, start it there.

Run `make bench PART=cutover`, or `python benchmarks/bench_cutover.py`. Environment: TIDEMARK_BENCH_SIZES_MB
("1000 4000").
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

# Python looks beside a script; the other benchmarks are found from the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_state_load import PARTITIONS, ROW_BYTES, STORE, feed, run_query, spark_session

SIZES_MB = [int(size) for size in os.environ.get("TIDEMARK_BENCH_SIZES_MB", "1000 4000").split()]
BATCH_ROWS = 10_000
# Of the query that is followed.
TRIGGER_S = 2
FOLLOWED_BATCHES = 15
MIB = 1024 * 1024


class Figures(msgspec.Struct, frozen=True):
    """What was measured of one size."""

    lags: list[int]
    # From the close of the source.
    ready_s: float
    first_commit_s: float
    # From the last commit of the query there, or from the close if that came later.
    idle_s: float
    # Of the rival, from its stop.
    rescaled_s: float
    rescaled_commit_s: float


def newest(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return max((int(path.name) for path in log.iterdir() if path.name.isdigit()), default=-1)
    return -1


def wait_for(log: Path, batch: int, seconds: float = 1800) -> float:
    """Wait until a batch is there; return the moment."""
    deadline = time.monotonic() + seconds
    while newest(log) < batch:
        assert time.monotonic() < deadline, f"{log} did not get to batch {batch}"
        time.sleep(0.01)
    return time.monotonic()


def start(spark: SparkSession, root: Path, checkpoint: Path) -> StreamingQuery:
    """Start the query of `run_query`, which goes on."""
    rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(root / "input"))
    words = [F.sha2(F.concat(F.col("id").cast("string"), F.lit(word)), 512) for word in "abc"]
    counted = rows.groupBy("id").agg(F.count("*").alias("n"), F.max(F.concat(*words)).alias("payload"))
    writer = counted.writeStream.format("noop").outputMode("update").trigger(processingTime=f"{TRIGGER_S} seconds")
    return writer.option("checkpointLocation", str(checkpoint)).start()


@contextlib.contextmanager
def feeding(root: Path, number: int, keys: int) -> Iterator[None]:
    """Put a file of input there now and then, more often than a batch takes one."""
    stop = threading.Event()
    rng = random.Random(number)

    def run() -> None:
        for n in range(number, number + 100_000):
            feed(root / "input", n, [rng.randrange(keys) for _ in range(BATCH_ROWS)])
            if stop.wait(TRIGGER_S / 2):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def following(source: Path, target: Path) -> Iterator[None]:
    words = ["spark", "follow", str(source), str(target), "--partitions", str(2 * PARTITIONS), "--every", "200ms"]
    process = subprocess.Popen([sys.executable, "-m", "engine.cli", *words, "--quiet"])
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def lags_of(source: Path, target: Path) -> list[int]:
    """Look at the lag until the query has gone on by some batches, once what came during the copy is caught up with."""
    while newest(target / "commits") < newest(source / "commits"):
        time.sleep(0.1)
    until, lags = newest(source / "commits") + FOLLOWED_BATCHES, []
    while (now := newest(source / "commits")) < until:
        lags.append(now - newest(target / "commits"))
        time.sleep(0.1)
    return lags


def tidemark(*words: str) -> bytes:
    return subprocess.run([sys.executable, "-m", "engine.cli", *words], check=True, capture_output=True).stdout


def measure_size(spark: SparkSession, root: Path, size_mb: int) -> Figures:
    source, target = root / "checkpoint", root / "replica"
    (root / "input").mkdir(parents=True)
    keys = size_mb * MIB // ROW_BYTES
    bulk = max(2, size_mb // 300)
    for n in range(bulk):
        feed(root / "input", n, range(keys * n // bulk, keys * (n + 1) // bulk))
    run_query(spark, root, deltas=1, snapshot_of=bulk)
    spark.conf.set(f"{STORE}minDeltasForSnapshot", "10")
    with feeding(root, bulk, keys):
        query = start(spark, root, source)
        wait_for(source / "commits", bulk + 1)
        with following(source, target):
            wait_for(target / "commits", bulk + 1)
            lags = lags_of(source, target)
        # The query still runs, and is closed in the middle of its work.
        done = msgspec.json.decode(tidemark("spark", "cutover", str(source), str(target), "--json"))
        ready, ready_at = time.monotonic(), (target / "metadata").stat().st_mtime
        last_commit_at = (source / "commits" / str(done["batch"])).stat().st_mtime
        with contextlib.suppress(Exception):
            query.awaitTermination()
        copy = start(spark, root, target)
        first = wait_for(target / "commits", done["batch"] + 1) - ready + done["pause_s"]
        # The rival moves the same query once more.
        wait_for(target / "commits", done["batch"] + 3)
        copy.stop()
        began = time.monotonic()
        tidemark("spark", "rescale", str(target), str(root / "rescaled"), "--partitions", str(PARTITIONS * 4))
        rescaled_s = time.monotonic() - began
        copy = start(spark, root, root / "rescaled")
        commit_s = wait_for(root / "rescaled" / "commits", newest(target / "commits") + 1) - began
        copy.stop()
    idle_s = min(done["pause_s"], ready_at - last_commit_at)
    return Figures(lags, done["pause_s"], first, idle_s, rescaled_s, commit_s)


def measure(root: Path, sizes_mb: list[int]) -> None:
    found = []
    for size_mb in sizes_mb:
        with spark_session() as spark:
            figures = measure_size(spark, root / str(size_mb), size_mb)
        found.append(figures)
        lags = sorted(figures.lags)
        size, ready_s, commit_s = f"{size_mb:5} MB", figures.ready_s, figures.first_commit_s
        print(f"{size}: lag at most {lags[-1]} batches, median {lags[len(lags) // 2]}")
        print(f"{size}: closed to ready {ready_s:.2f} s, to the first commit {commit_s:.1f} s")
        print(f"{size}: of that after the query's last commit {figures.idle_s:.2f} s")
        print(f"{size}: stopped and rescaled, {figures.rescaled_s:.1f} s, {figures.rescaled_commit_s:.1f} s")
        subprocess.run(["rm", "-rf", root / str(size_mb)], check=True)
    if len(found) > 1:
        first, last = found[0], found[-1]
        print(f"pause of the largest / of the smallest: {last.ready_s / first.ready_s:.2f}")
        print(f"after the last commit: {last.idle_s / first.idle_s:.2f}")


def test_a_cutover_beside_its_query(tmp_path: Path) -> None:
    measure(tmp_path, SIZES_MB[:1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), SIZES_MB)
