"""From a version in a checkpoint to an open, replayed store: ours against Spark's own, on state that Spark has written.

A real Spark query writes the state: an aggregation over 8 partitions, RocksDB provider, checkpoint format 2, changelogs
on; 10 of them lie above the last snapshot. Then all partitions are loaded, two at a time, by either side in turn:

- Spark: `RocksDB.load` in its JVM, which is what a task calls through the state store provider; no query, no planning,
  no task around it. Two threads of one warm JVM.
- tidemark: `StateStore.load`, in two warm processes.

Both verify file checksums, count keys and start from an empty local directory each time. Also measured: the records per
second of a replay, against putting them one by one.

Run `make bench`, or `python benchmarks/bench_state_load.py` for the tables alone. Environment:

- TIDEMARK_BENCH_STATE_MB: size of the state (1200; a quick look is fine with 50).
- TIDEMARK_BENCH_ROUNDS: how often each side loads it (5).
- TIDEMARK_BENCH_STATE_DIR: where the checkpoint is written and kept, for the next run; without it, nothing is kept.
"""

import asyncio
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import SparkSession

from engine.rocksdb.store import StoreWriter, spark_settings
from engine.state.changelogs import ChangelogWriter, KeyCounts, count_store, open_changelog, replay
from engine.state.load import LoadMetrics
from engine.state.settings import StateStoreSettings
from engine.state.store import StateStore
from index.spark.changelog import PUT

STATE_MB = int(os.environ.get("TIDEMARK_BENCH_STATE_MB", "1200"))
ROUNDS = int(os.environ.get("TIDEMARK_BENCH_ROUNDS", "5"))
PARTITIONS = 8
WORKERS = 2
# Versions above the snapshot, and which share of the keys each of them touches; a quarter of those are new.
CHANGELOGS = 10
TOUCHED = 0.01
# A key, a count and 384 bytes that do not compress well, as they are in RocksDB.
ROW_BYTES = 440
# Of the replay alone.
REPLAYED = 500_000

STORE = "spark.sql.streaming.stateStore."
CONF = {
    f"{STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{STORE}rocksdb.changelogCheckpointing.enabled": "true",
    f"{STORE}checkpointFormatVersion": "2",
    f"{STORE}maintenanceInterval": "200",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
}
STATE = "org.apache.spark.sql.execution.streaming.state"


class Load(msgspec.Struct, frozen=True):
    """One partition of the version to load."""

    partition: int
    version: int
    unique_id: str


class Loaded(msgspec.Struct, frozen=True):
    """What one side says about one partition."""

    num_keys: int
    seconds: float
    phases_s: Mapping[str, float]
    # Of the process, with opening and closing; whatever else this machine does is not in it.
    cpu_seconds: float


class Run(msgspec.Struct, frozen=True):
    """All partitions, by one side, once."""

    # From the first to the last, with opening and closing.
    seconds: float
    partitions: list[Loaded]
    cpu_seconds: float

    @property
    def within_s(self) -> float:
        """Seconds within the loads alone, as two workers share them."""
        return sum(partition.seconds for partition in self.partitions) / WORKERS


# --- the state, written by Spark


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.master(f"local[{WORKERS}]").appName("state load")
    for key, value in ({"spark.ui.enabled": "false", "spark.driver.memory": "4g"} | CONF).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def feed(directory: Path, number: int, ids: list[int] | range) -> None:
    """Put one file of input there; Spark takes files in the order of their times."""
    hidden = directory / f".{number:04d}.parquet"
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), hidden)
    os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
    hidden.rename(directory / f"{number:04d}.parquet")


def run_query(spark: SparkSession, root: Path, deltas: int, snapshot_of: int | None = None) -> None:
    """Process what was fed, a file a batch; wait for the snapshot of a version, if one is wanted."""
    spark.conf.set(f"{STORE}minDeltasForSnapshot", str(deltas))
    rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(root / "input"))
    words = [F.sha2(F.concat(F.col("id").cast("string"), F.lit(word)), 512) for word in "abc"]
    counted = rows.groupBy("id").agg(F.count("*").alias("n"), F.max(F.concat(*words)).alias("payload"))
    query = (
        counted.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(root / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        state = root / "checkpoint" / "state" / "0"
        deadline = time.monotonic() + 300
        while snapshot_of is not None and len(list(state.glob(f"[0-9]*/{snapshot_of}_*.zip"))) < PARTITIONS:
            assert time.monotonic() < deadline, "Spark did not upload its snapshots"
            time.sleep(0.2)
    finally:
        query.stop()


def write_state(spark: SparkSession, root: Path, state_mb: int = STATE_MB) -> None:
    """A checkpoint with a snapshot of nearly everything and changelogs above it."""
    if (root / "whole").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    (root / "input").mkdir(parents=True)
    rng = random.Random(1)
    keys = state_mb * 1024 * 1024 // ROW_BYTES
    bulk = max(2, state_mb // 300)
    for n in range(bulk):
        feed(root / "input", n, range(keys * n // bulk, keys * (n + 1) // bulk))
    run_query(spark, root, deltas=1, snapshot_of=bulk)
    for n in range(bulk, bulk + CHANGELOGS):
        feed(root / "input", n, [rng.randrange(keys * 4 // 3) for _ in range(int(keys * TOUCHED))])
    run_query(spark, root, deltas=1_000)
    (root / "whole").touch()


def last_version(checkpoint: Path) -> list[Load]:
    """The last committed version of every partition, from the commit log."""
    batch = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    commit = json.loads((checkpoint / "commits" / str(batch)).read_text().split("\n", 1)[1])
    return [Load(partition, batch + 1, ids[0]) for partition, ids in enumerate(commit["stateUniqueIds"]["0"])]


# --- the two sides


def load_ours(checkpoint: Path, scratch: Path, load: Load) -> Loaded:
    """In a worker process: one partition, opened, loaded and closed; only the load is timed."""

    async def work() -> Loaded:
        # What the JVM side has: the columns of an aggregation need no families.
        settings = StateStoreSettings(column_families=False)
        directory = checkpoint / "state" / "0" / str(load.partition)
        store = await StateStore.open(directory, scratch / f"ours-{load.partition}", settings)
        try:
            began = time.perf_counter()
            await store.load(load.version, load.unique_id)
            seconds = time.perf_counter() - began
            metrics = store.last_load
            assert isinstance(metrics, LoadMetrics)
            phases = {name: getattr(metrics, f"{name}_s") for name in ("resolve", "fetch", "open", "replay")}
            return Loaded(store.num_keys, seconds, phases, 0.0)
        finally:
            await store.close()

    began_cpu = time.process_time()
    loaded = asyncio.run(work())
    return msgspec.structs.replace(loaded, cpu_seconds=time.process_time() - began_cpu)


def load_theirs(spark: SparkSession, checkpoint: Path, scratch: Path, load: Load) -> Loaded:
    """In a thread: one partition by Spark's own class, loaded and closed; only the load is timed."""
    jvm: Any = spark._jvm
    state = functools.reduce(getattr, STATE.split("."), jvm)
    session_conf = spark._jsparkSession.sessionState().conf()
    local = scratch / f"theirs-{load.partition}"
    local.mkdir()
    conf = state.RocksDBConf.apply(state.StateStoreConf(session_conf, jvm.scala.collection.immutable.HashMap()))
    none = jvm.scala.Option.empty()
    store = state.RocksDB(
        str(checkpoint / "state" / "0" / str(load.partition)),
        conf,
        jvm.java.io.File(str(local)),
        spark._jsparkSession.sessionState().newHadoopConf(),
        f"partition {load.partition}",
        False,  # no column families
        True,  # unique ids
        load.partition,
        none,
        none,
    )
    try:
        unique_id = jvm.scala.Option.apply(load.unique_id)
        began = time.perf_counter()
        store.load(load.version, unique_id, False, False)
        seconds = time.perf_counter() - began
        store.refreshRecordedMetricsForTest()  # they are recorded by commits alone
        metrics = store.metricsOpt().get()
        loads = metrics.loadMetrics()
        phases = {}
        iterator = loads.iterator()
        while iterator.hasNext():
            pair = iterator.next()
            if not str(pair._1()).startswith("num"):
                phases[str(pair._1())] = int(pair._2()) / 1000
        return Loaded(int(metrics.numUncommittedKeys()), seconds, phases, 0.0)
    finally:
        store.close()


def timed_loads(pool: Executor, one: Callable[[Load], Loaded], loads: list[Load]) -> Run:
    began = time.perf_counter()
    loaded = list(pool.map(one, loads))
    return Run(time.perf_counter() - began, loaded, sum(partition.cpu_seconds for partition in loaded))


def timed_loads_of_spark(spark: SparkSession, pool: Executor, one: Callable[[Load], Loaded], loads: list[Load]) -> Run:
    """One process works for all: its processor time is taken around all of it, compactions and compiling included."""
    gateway: Any = spark.sparkContext._gateway
    began_cpu = cpu_seconds_of(gateway.proc.pid)
    run = timed_loads(pool, one, loads)
    return msgspec.structs.replace(run, cpu_seconds=cpu_seconds_of(gateway.proc.pid) - began_cpu)


def cpu_seconds_of(pid: int) -> float:
    """What a process has used so far, all threads of it; not known but on Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_loads(root: Path, *, rounds: int = ROUNDS, state_mb: int = STATE_MB) -> dict[str, list[Run]]:
    """Runs over all partitions, by side, taken in turn; the first of each is thrown away."""
    checkpoint = root / "checkpoint"
    results: dict[str, list[Run]] = {"tidemark": [], "Spark": []}
    context = multiprocessing.get_context("spawn")
    with (
        spark_session() as spark,
        ProcessPoolExecutor(WORKERS, mp_context=context) as processes,
        ThreadPoolExecutor(WORKERS) as threads,
    ):
        write_state(spark, root, state_mb)
        loads = last_version(checkpoint)
        report_state(checkpoint, loads)
        for n, side in itertools.product(range(rounds + 1), results):
            with tempfile.TemporaryDirectory(dir=root, prefix="loads-", ignore_cleanup_errors=True) as directory:
                if side == "tidemark":
                    run = timed_loads(processes, functools.partial(load_ours, checkpoint, Path(directory)), loads)
                else:
                    one = functools.partial(load_theirs, spark, checkpoint, Path(directory))
                    run = timed_loads_of_spark(spark, threads, one, loads)
            if n:
                results[side].append(run)
    return results


# --- replay alone


def measure_replay(root: Path) -> dict[str, list[float]]:
    """Records per second into a store that has two thirds of the keys."""
    rng = random.Random(2)
    value = rng.randbytes(60)

    def key(n: int) -> bytes:
        return b"\x00" + (n * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") + bytes(16)

    with StoreWriter.open(root / "base", spark_settings(b"")) as db:
        for start in range(0, 2 * REPLAYED, 50_000):
            db.write_batch({key(n): value for n in range(start, start + 50_000)})
        db.flush()
    with ChangelogWriter(root / "1.changelog", "lz4", 1) as writer:
        for n in range(REPLAYED):
            writer.write((PUT, key(rng.randrange(3 * REPLAYED)), value + b"%d" % n))
        writer.finish()
    opener = functools.partial(open_changelog, root / "1.changelog", "lz4")

    def one_by_one(db: StoreWriter, *, count: bool) -> int:
        added = 0
        with opener() as changelog:
            for _, record_key, record_value in itertools.chain.from_iterable(changelog):
                if count and db.get(record_key) is None:
                    added += 1
                db.put(record_key, record_value)
        return added

    def replayed(db: StoreWriter, *, count: bool) -> int:
        stored = 2 * REPLAYED
        done = replay(db, [opener], before=KeyCounts(stored) if count else None)
        return 0 if done.counts is None else done.counts.keys - stored

    rates: dict[str, list[float]] = {}
    for n, count, (name, work) in itertools.product(
        range(ROUNDS), (True, False), (("replay", replayed), ("one by one", one_by_one))
    ):
        shutil.copytree(root / "base", root / "work")
        with StoreWriter.open(root / "work", spark_settings(b"")) as db:
            began = time.perf_counter()
            added = work(db, count=count)
            rates.setdefault(f"{name}, {'counting keys' if count else 'not counting'}", []).append(
                REPLAYED / (time.perf_counter() - began)
            )
            if n == 0 and count:
                assert count_store(db).keys == 2 * REPLAYED + added
        shutil.rmtree(root / "work")
    return rates


# --- what came out


def report_state(checkpoint: Path, loads: list[Load]) -> None:
    stores = [checkpoint / "state" / "0" / str(load.partition) for load in loads]
    newest = max(int(path.name.split("_")[0]) for path in stores[0].glob("*.zip"))
    sst_bytes = sum(path.stat().st_size for store in stores for path in store.glob("SSTs/*.sst"))
    log_bytes = sum(
        path.stat().st_size
        for store in stores
        for path in store.glob("*.changelog")
        if int(path.name.split("_")[0]) > newest
    )
    print(
        f"state: version {loads[0].version} on snapshot {newest}, {len(loads)} partitions, SSTs {sst_bytes / 2**20:.0f}"
        f" MiB, changelogs above them {log_bytes / 2**20:.0f} MiB"
    )


def report_loads(results: Mapping[str, list[Run]]) -> None:
    """What counts is the seconds within the loads; opening and closing around them are in the whole."""
    for side, runs in results.items():
        phases: dict[str, float] = {}
        for partition in itertools.chain.from_iterable(run.partitions for run in runs):
            for name, spent in partition.phases_s.items():
                phases[name] = phases.get(name, 0.0) + spent / len(runs) / WORKERS
        shown = ", ".join(f"{name} {spent:.2f}" for name, spent in sorted(phases.items()))
        within = [run.within_s for run in runs]
        print(
            f"{side:9} median {statistics.median(within):6.2f} s, from {min(within):6.2f} to {max(within):6.2f};"
            f" whole {statistics.median(run.seconds for run in runs):6.2f};"
            f" processor {statistics.median(run.cpu_seconds for run in runs):6.2f}; phases: {shown}"
        )
    pairs = list(zip(results["tidemark"], results["Spark"], strict=True))
    for name in ("within_s", "seconds", "cpu_seconds"):
        ratio = statistics.median(getattr(theirs, name) / getattr(ours, name) for ours, theirs in pairs)
        print(f"Spark / tidemark, pair by pair, {name:11} median {ratio:.2f}")


def report_replay(rates: Mapping[str, list[float]]) -> None:
    for name, values in rates.items():
        print(f"{name:26} median {statistics.median(values) / 1000:6.0f} thousand records/s")


def test_loading_a_version_against_spark(tmp_path: Path) -> None:
    kept = os.environ.get("TIDEMARK_BENCH_STATE_DIR")
    results = measure_loads(Path(kept) if kept else tmp_path / "state")
    ours, theirs = ([loaded.num_keys for loaded in runs[0].partitions] for runs in results.values())
    assert ours == theirs
    assert sum(ours) > STATE_MB * 1024 * 1024 // ROW_BYTES
    report_loads(results)


def test_replaying_against_putting_one_by_one(tmp_path: Path) -> None:
    report_replay(measure_replay(tmp_path))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        test_loading_a_version_against_spark(Path(directory))
        test_replaying_against_putting_one_by_one(Path(directory))
