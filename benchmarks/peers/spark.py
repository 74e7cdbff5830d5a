"""Work (e): 64 stores restored on Spark, on one core and on two, from a server that is 20 ms further away.

`engine.spark.restore_stores` in two sessions that are there already, `local[1]` and `local[2]`, in turn; the first
restore of each, for which Spark starts its Python workers, is not counted. Each file is too large for a pack, so that
it is a request of its own.

Server, proxy, Java and both sessions share the cores of one machine. With 16 requests at once for each of Spark's
cores, as everybody has it, little is left of 20 ms, and the machine itself is the limit; with 4 it is the distance, as
it would be with machines of their own. Both are shown, each by its name.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import override

from benchmarks.peers.contestants import OURS, Place
from benchmarks.peers.counting import open_proxy
from benchmarks.peers.delaying import open_delay
from benchmarks.peers.figures import ratio
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.processes import ROOT, ContestantError
from benchmarks.peers.run import Run
from benchmarks.peers.servers import open_server
from benchmarks.peers.trees import KIB, Shape, difference, make_tree, tree_bytes, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

STORES = 64
FILES = 24
FILE_BYTES = 260 * KIB
DELAY_S = 0.02
# What each step sets of ours.
STEPS: dict[str, dict[str, object]] = {"restore": {}, "restore, 4 requests at once per core": {"in_flight_max": 4}}
ONE, TWO = f"{OURS}, 1 core", f"{OURS}, 2 cores"
CORES = {ONE: 1, TWO: 2}
STORE_NAME = "default"


class WarmSpark(WarmTidemark):
    """A Spark session that is there already."""

    module = "spark_client"

    def __init__(self, place: Place, settings: dict[str, object], *, cores: int, java_home: str) -> None:
        self._java_home = java_home
        super().__init__(place, settings | {"cores": cores})

    @override
    def environment(self) -> dict[str, str]:
        spark = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        return super().environment() | spark | {"JAVA_HOME": self._java_home, "SPARK_LOCAL_IP": "127.0.0.1"}


def restore_on_spark(work: Run) -> Outcome:
    """All rounds, and one restore that is counted."""
    stores = max(2, round(STORES * work.scale))
    java_home = find_java_home()
    with open_server(work.server, work.memory) as server, ExitStack() as stack:
        title = f"Restore of {stores} stores on Spark, {DELAY_S * 1000:.0f} ms added to each request"
        outcome = work.begin(title, server.kind)
        outcome.contestants = {name: f"local[{cores}], the session is there already" for name, cores in CORES.items()}
        source, target = work.memory / "source", work.restore_root / "target"
        for number in range(stores):
            make_tree(Shape(name="store", count=FILES, size_bytes=FILE_BYTES), source / f"{number:04d}")
        place, settings = Place.of(server), dict(work.settings)
        init_repository(place, settings)
        with WarmTidemark(place, settings) as ours:
            ours.ask("backup_stores", source)
            ours.ask("commit")
        expected = {_restored(path): digest for path, digest in tree_digests(source).items()}
        far = place.at(stack.enter_context(open_delay(place.endpoint_url, DELAY_S)))
        for step, more in STEPS.items():
            with ExitStack() as sessions_end:
                sessions = {
                    name: sessions_end.enter_context(WarmSpark(far, settings | more, cores=cores, java_home=java_home))
                    for name, cores in CORES.items()
                }
                _restores(work, outcome, step, sessions, expected)
            found = ratio(outcome.of(step, TWO), outcome.of(step, ONE), lambda s: s.work_s)
            if found:
                outcome.notes.append(f"{step}: one core takes {found.quartiles.median:.2f} times as long as two")
        _count(outcome, place, settings, java_home, target)
    shutil.rmtree(target, ignore_errors=True)
    return outcome


def _restores(
    work: Run, outcome: Outcome, step: str, sessions: Mapping[str, WarmSpark], expected: dict[str, str]
) -> None:
    """The rounds of one step; round 0, which starts Spark's workers, is not counted."""
    target = work.restore_root / "target"
    for number in range(work.rounds + 1):
        for name, session in sessions.items():
            shutil.rmtree(target, ignore_errors=True)
            answer = session.ask("restore", target)
            if not number:
                continue
            sample = sample_of(
                answer,
                step=step,
                contestant=name,
                number=number,
                size_bytes=tree_bytes(target),
                files_count=len(expected),
                error=difference(expected, target),
            )
            outcome.samples.append(sample)
            text = f"{sample.work_s:.3f} s, CPU {sample.cpu_s:.2f} s {sample.error}"
            work.report(f"{step} {number} {name:20} {text}")


def _count(outcome: Outcome, place: Place, settings: dict[str, object], java_home: str, target: Path) -> None:
    """One more restore, through the proxy that counts, and not delayed."""
    with open_proxy(place.endpoint_url) as proxy:
        counted_at = place.at(proxy.endpoint_url)
        with WarmSpark(counted_at, settings, cores=CORES[TWO], java_home=java_home) as session:
            shutil.rmtree(target, ignore_errors=True)
            proxy.counted()
            session.ask("restore", target)
            counts = dict(proxy.counted())
            outcome.requests.append(Requests(step=next(iter(STEPS)), contestant=TWO, counts=counts))


def _restored(path: str) -> str:
    """Where a file of `source` is after a restore."""
    task, _, name = path.partition("/")
    return f"{task}/{STORE_NAME}/{name}"


def find_java_home() -> str:
    """A Java that Spark starts with.

    Raises:
        ContestantError: There is none.
    """
    command = [sys.executable, str(ROOT / "scripts" / "java_home.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ContestantError(f"there is no Java for Spark: {found.stderr.strip()}")
    return found.stdout.strip()
