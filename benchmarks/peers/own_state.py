"""Works (g) to (i), which need no server: Spark's state opened by a task, the same as a DataFrame, and our start.

The first two hold ours against Spark's own code on state that a real query has written, as `bench_state_load` and
`bench_read_state` say; the third holds our command line against a Python that does nothing.
"""

import os
import shutil
import sys
from collections.abc import Iterable

from benchmarks import bench_read_state as read
from benchmarks import bench_state_load as load
from benchmarks.peers.contestants import OURS
from benchmarks.peers.figures import Sample
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.processes import Command, run
from benchmarks.peers.run import Run
from benchmarks.peers.spark import find_java_home

SERVER = "local"
SPARK_LOAD, STATESTORE, BARE = "Spark's RocksDB.load", "Spark's statestore", "python -c pass"
LOAD_MB = 1200
READ_MB = (2, 200, 1000)
STARTS = ("--version", "backup --help")
MB = 1024 * 1024


def load_versions(work: Run) -> Outcome:
    """All partitions of one version, from an empty directory to an open store, two at a time."""
    os.environ["JAVA_HOME"] = find_java_home()
    state_mb = max(10, round(LOAD_MB * work.scale))
    outcome = work.begin(f"Open the last version of Spark state of 1.2 GB, {load.CHANGELOGS} changelogs", SERVER)
    outcome.contestants = {OURS: "`StateStore.load`", SPARK_LOAD: "in its JVM, without a query or a task around it"}
    results = load.measure_loads(work.memory / "load", rounds=work.rounds, state_mb=state_mb)
    for side, runs in zip((OURS, SPARK_LOAD), results.values(), strict=True):
        wall = [one.within_s for one in runs]
        outcome.samples += _samples("load", side, zip(wall, (one.cpu_seconds for one in runs), strict=True), state_mb)
    return outcome


def read_state(work: Run) -> Outcome:
    """Three sizes, each summed up."""
    os.environ["JAVA_HOME"] = find_java_home()
    outcome = work.begin("Sum up Spark state as a DataFrame", SERVER)
    outcome.contestants = {OURS: "`tidemark_state`", STATESTORE: "Spark's own data source"}
    for state_mb in (max(2, round(size * work.scale)) for size in READ_MB):
        root = work.memory / "read"
        results = read.measure(root, rounds=work.rounds, state_mb=state_mb, names=("sum up",))["sum up"]
        for side, seconds in zip((OURS, STATESTORE), results.values(), strict=True):
            outcome.samples += _samples(read_step(state_mb), side, ((one, 0.0) for one in seconds), state_mb)
        shutil.rmtree(root)
    return outcome


def read_step(state_mb: int) -> str:
    """The step that sums up state of a size."""
    return f"sum up {state_mb:,} MB of state"


def start_programs(work: Run) -> Outcome:
    """Processes from start to end, of which the CPU time counts."""
    outcome = work.begin("Start the command line", SERVER)
    outcome.contestants = {OURS: "the installed program", BARE: "the same Python with nothing to do"}
    program = os.path.join(os.path.dirname(sys.executable), "tidemark")  # noqa: PTH118, PTH120 - links are not followed
    for number in range(work.rounds + 1):
        for step in STARTS:
            for name, arguments in ((OURS, (program, *step.split())), (BARE, (sys.executable, "-c", "pass"))):
                usage = run(Command(arguments=arguments))
                if number:  # the first one compiles
                    outcome.samples.append(
                        Sample(
                            step=step,
                            contestant=name,
                            round=number,
                            wall_s=usage.wall_s,
                            user_s=usage.user_s,
                            system_s=usage.system_s,
                            peak_bytes=usage.peak_bytes,
                            size_bytes=0,
                        )
                    )
    return outcome


def _samples(step: str, name: str, took: Iterable[tuple[float, float]], state_mb: int) -> list[Sample]:
    return [
        Sample(
            step=step,
            contestant=name,
            round=number,
            wall_s=wall_s,
            user_s=cpu_s,
            system_s=0.0,
            peak_bytes=0,
            size_bytes=state_mb * MB,
        )
        for number, (wall_s, cpu_s) in enumerate(took, 1)
    ]
