"""Our restore of many stores on Spark, in a process that goes on: a session with as many cores as the job says.

Requests and answers are those of `warm_client`. CPU is that of all processes of the session; memory is that of Spark's
Python workers, in which our code runs, the largest of them over the process that they are forked from.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from benchmarks.peers.clients.job import Job, main
from benchmarks.peers.clients.tidemark_client import SCOPE, store_settings, transfer_settings, url_of
from benchmarks.peers.clients.warm_client import FORGET_PEAK, STATUS, Answer, Request, WarmClient, memory_bytes
from engine.spark import SparkOptions, restore_stores

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_DAEMON: Final = b"pyspark.daemon"


class SparkClient(WarmClient):
    """One session."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._spark = (
            SparkSession.builder.master(f"local[{job.options['cores']}]")
            .appName("tidemark benchmark")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.memory", "1g")
            .getOrCreate()
        )
        self._spark.sparkContext.setLogLevel("ERROR")

    @override
    async def measure(self, request: Request) -> Answer:
        workers = _workers()
        for worker in workers:
            (worker / FORGET_PEAK.name).write_text("5")
        before_s = _cpu_s()
        answer = await super().measure(request)
        workers = _workers()
        idle_bytes = min((memory_bytes("VmRSS", worker / STATUS.name) for worker in workers), default=0)
        peak_bytes = max((memory_bytes("VmHWM", worker / STATUS.name) for worker in workers), default=0)
        return msgspec.structs.replace(
            answer, user_s=_cpu_s() - before_s, system_s=0.0, peak_bytes=peak_bytes, idle_bytes=idle_bytes
        )

    @override
    async def work(self, request: Request) -> tuple[int, int]:
        # A thread: the call blocks, and has an event loop of its own beneath it.
        return await asyncio.to_thread(self._restore, Path(request.directory)), 0

    @override
    async def reopen(self) -> None:
        """Nothing is open between two restores but what Spark's workers keep."""

    def _restore(self, target: Path) -> int:
        outcomes = restore_stores(
            self._spark,
            url_of(self._job),
            SCOPE,
            target,
            options=SparkOptions(transfer=transfer_settings(self._job), store=store_settings(self._job)),
        ).collect()
        for outcome in outcomes:
            if not outcome["ok"]:
                raise RuntimeError(f"task {outcome['task']}: {outcome.asDict()}")
        return len(outcomes)


def _family() -> Sequence[Path]:
    """This process and all that have come from it, in the order of their ids."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {os.getpid()}
    # Ids start over some time: a child's may be the smaller one.
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return [Path("/proc") / str(pid) for pid in sorted(family)]


def _workers() -> Sequence[Path]:
    """Spark's Python daemon, and the workers that it has forked."""
    found = []
    for path in _family():
        try:
            if _DAEMON in (path / "cmdline").read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def _cpu_s() -> float:
    """What the family has taken, with those of its members that have ended."""
    ticks = 0
    for path in _family():
        try:
            ticks += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / _TICKS_PER_S


def serve(job: Job) -> None:
    """Answer on what was standard output; Spark and Java have the terminal for theirs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = answers
    os.environ.pop("SPARK_HOME", None)
    asyncio.run(SparkClient(job).serve())


if __name__ == "__main__":
    main(serve)
