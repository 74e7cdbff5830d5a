"""How long a collection on Spark takes, and how much memory, for millions of blobs under 20,000 snapshots on 2 cores.

Each size is a repository of its own (`collect_world`): records and snapshot indexes are real; blobs are rows that a
store lists, and deletes that it counts. A tenth of them is garbage; what goes has to be exactly that. Each collection
runs in processes of its own: a driver, its JVM, and Spark's Python workers, whose memory is looked at from outside.

Run `make bench`, or `python -m benchmarks.bench_collect` for the table alone. Environment:

- TIDEMARK_BENCH_BLOBS: sizes, with commas (1000000,3000000,10000000; a quick look is fine with 100000).
- TIDEMARK_BENCH_COLLECT_DIR: where the repositories are built and kept, for the next run; 3 GB for 10 million. Without
  it, nothing is kept.
- TIDEMARK_BENCH_HEAP: of the JVM (1200m).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from benchmarks.collect_world import KEEP_LAST, SNAPSHOTS, CountingAccess, CountingStores, World, build, deleted, load
from blobstore.opening import StoreSettings
from engine.blocking import LoopThread
from engine.collect.backend import Deleted, Listing, SweepResult
from engine.collect.report import CollectReport
from engine.records.roots import References
from engine.repository.repository import Repository, SyncRepository
from engine.settings import TransferSettings
from engine.spark.collection.backend import SparkBackend
from index.plan.collect import DeleteReason
from index.plan.commits import Retention
from index.snapshot.keys import BLOBS, INDEXES, RunId

ROOT = Path(__file__).resolve().parents[1]
SIZES = [int(size) for size in os.environ.get("TIDEMARK_BENCH_BLOBS", "1000000,3000000,10000000").split(",")]
HEAP = os.environ.get("TIDEMARK_BENCH_HEAP", "1200m")
MIB = 1024 * 1024
MEMORY_MAX = 4096 * MIB
# Of the time for 10 million blobs by that for 3 million.
RATIO_MAX = 4.0
LOOK_S = 0.1
PARTITIONS = 32
CORES = 2
# Smaller ones are shells on their way to something else.
SHOWN_MIN = 10 * MIB

Answer = TypeVar("Answer")


class Outcome(msgspec.Struct, kw_only=True):
    """One size."""

    blobs: int
    index_mb: int
    seconds: float
    # By step, by the clock on the wall.
    steps: dict[str, float]
    deleted: int
    # The most that each process had, and the most that all had at one time.
    memory_mib: dict[str, int] = {}
    peak_mib: int = 0
    # Of all processes, from the start of the session on: what a machine with other work still reports.
    cpu_seconds: float = 0.0


class TimedBackend(SparkBackend):
    """Reports how long each step took."""

    def __init__(self, spark: SparkSession, access: CountingAccess, stores: CountingStores) -> None:
        super().__init__(spark, access, stores, partitions_max=PARTITIONS, cores=CORES)
        self.seconds: dict[str, float] = {}

    async def _timed(self, step: str, work: Awaitable[Answer]) -> Answer:
        started_s = time.perf_counter()
        answer = await work
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started_s
        return answer

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        return await self._timed("list", super().list_uploads(run, now_ms))

    @override
    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> SweepResult:
        return await self._timed("mark and sweep", super().sweep(references, now_ms, ttl_ms))

    @override
    async def delete(self, prefix: str) -> Deleted:
        return await self._timed("delete", super().delete(prefix))

    @override
    async def end(self) -> None:
        return await self._timed("end", super().end())


def start_spark() -> SparkSession:
    os.environ |= {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    os.environ.pop("SPARK_HOME", None)
    session = (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", HEAP)
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    # Workers are started, and import what they need.
    session.range(2).mapInArrow(lambda batches: batches, "id bigint").count()
    return session


def run_here(root: Path) -> None:
    """Collect one world; what a driver process does."""
    world, spark = load(root), start_spark()
    started_s = time.perf_counter()
    stores = CountingStores(root)
    with SyncRepository(LoopThread(), Repository(stores, world.record)) as repository:
        access = CountingAccess(
            url=f"bench://{root}",
            record=world.record,
            store=StoreSettings(),
            transfer=TransferSettings(),
            root=str(root),
        )
        backend = TimedBackend(spark, access, stores)
        report = repository.collect(Retention(keep_last=KEEP_LAST), backend=backend)
    seconds = time.perf_counter() - started_s
    check(world, report)
    steps = backend.seconds | {"the driver's own": seconds - sum(backend.seconds.values())}
    outcome = Outcome(
        blobs=world.blobs,
        index_mb=world.index_bytes // 1_000_000,
        seconds=seconds,
        steps=steps,
        deleted=report.deletes_count,
    )
    print(msgspec.json.encode(outcome).decode(), flush=True)
    spark.stop()


def check(world: World, report: CollectReport) -> None:
    """What went, what waits and what lives is what was built so."""
    root = Path(world.root)
    gone_blobs, gone_indexes = deleted(root, BLOBS), deleted(root, INDEXES)
    assert gone_blobs == msgspec.structs.replace(world.dead_blobs, size_bytes=0)
    assert gone_indexes == msgspec.structs.replace(world.dead_indexes, size_bytes=0)
    uploads = [t for t in report.totals if t.reason is DeleteReason.UNREACHABLE_UPLOAD]
    dead = world.dead_blobs + world.dead_indexes
    assert (sum(t.count for t in uploads), sum(t.size_bytes for t in uploads)) == (dead.count, dead.size_bytes)
    waiting = world.waiting_blobs
    assert (report.waiting_count, report.waiting_bytes) == (waiting.count, waiting.size_bytes)
    assert report.live_count == world.blobs + SNAPSHOTS - dead.count - waiting.count
    assert report.listed_count == world.blobs + SNAPSHOTS
    assert report.failed_count == 0


class Watch:
    """Looks at the memory of a process and of all below it."""

    def __init__(self, pid: int) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self.peak = 0
        self._cpu: dict[str, float] = {}
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def cpu_seconds(self) -> float:
        return sum(self._cpu.values())

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            now = list(processes(self._pid))
            for name, size_bytes, cpu_seconds in now:
                self.most[name] = max(self.most[name], size_bytes)
                self._cpu[name] = cpu_seconds
            self.peak = max(self.peak, sum(size_bytes for _, size_bytes, _ in now))


def processes(root: int) -> Iterator[tuple[str, int, float]]:
    """Name, resident bytes and seconds of CPU of a process and of all below it."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(path.name))
    pending = [root]
    while pending:
        pid = pending.pop()
        pending += children[pid]
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            kind = "JVM" if "java" in words.split("\0")[0] else "Python worker" if "daemon" in words else "driver"
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            cpu_seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            yield f"{kind} {pid}", pages * os.sysconf("SC_PAGE_SIZE"), cpu_seconds


def run_apart(root: Path) -> Outcome:
    """Collect a world in a process of its own, and watch it."""
    for path in root.glob("deleted-*"):
        path.unlink()
    command = [sys.executable, "-m", "benchmarks.bench_collect", "--here", str(root.absolute())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        watch = Watch(child.pid)
        answer = child.communicate()[0]
        watch.end()
    assert child.returncode == 0
    outcome = msgspec.json.decode(answer.splitlines()[-1], type=Outcome)
    outcome.peak_mib = watch.peak // MIB
    outcome.cpu_seconds = round(watch.cpu_seconds, 1)
    outcome.memory_mib = {
        name: size_bytes // MIB for name, size_bytes in sorted(watch.most.items()) if size_bytes > SHOWN_MIN
    }
    return outcome


def measure() -> list[Outcome]:
    """Every size, the smallest first."""
    outcomes = []
    with contextlib.ExitStack() as stack:
        kept = os.environ.get("TIDEMARK_BENCH_COLLECT_DIR")
        base = Path(kept or stack.enter_context(tempfile.TemporaryDirectory()))
        for size in sorted(SIZES):
            root = base / str(size)
            if not (root / "world").exists():
                root.mkdir(parents=True)
                started_s = time.perf_counter()
                build(root, size)
                print(f"built {size:,} blobs in {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
            outcomes.append(run_apart(root))
            print(table(outcomes[-1:]), file=sys.stderr)
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """For people."""
    lines = []
    for o in outcomes:
        steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in o.steps.items())
        memory = ", ".join(f"{name.rpartition(' ')[0]} {size}" for name, size in o.memory_mib.items())
        size = f"{o.blobs:>12,} blobs, {o.index_mb:,} MB of indexes, {o.deleted:,} deleted"
        lines.append(f"{size}: {o.seconds:.1f} s, {o.cpu_seconds:.1f} s of CPU")
        lines.append(f"{'':>14}s: {steps}")
        lines.append(f"{'':>14}MiB: {o.peak_mib} at once; {memory}")
    return "\n".join(lines)


def test_collections_of_millions_of_blobs_stay_within_4_gib() -> None:
    outcomes = measure()
    print(f"\n{table(outcomes)}")
    assert all(o.peak_mib * MIB <= MEMORY_MAX for o in outcomes)
    seconds = {o.blobs: o.seconds for o in outcomes}
    if {3_000_000, 10_000_000} <= seconds.keys():
        assert seconds[10_000_000] / seconds[3_000_000] <= RATIO_MAX


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run_here(Path(sys.argv[2]))
    else:
        found = measure()
        print(table(found))
        print(json.dumps(msgspec.to_builtins(found)))
