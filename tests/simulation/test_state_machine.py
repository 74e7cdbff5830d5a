"""Hypothesis chooses who does what next, on the simulated bucket, against the judge's plain dicts (design 0007)."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from typing_extensions import override

from tests.simulation.coverage import Coverage
from tests.simulation.director import World
from tests.simulation.plot import DAY_MS, TTL_MS
from tests.simulation.processes import EPOCH_S, watched_locks
from tests.simulation.schedule import Advance, Control, Do, Effect, Schedule, Step, StoreKind, Trap, Verb
from tests.simulation.virtual_loop import VirtualLoop

PROCESSES = st.integers(0, 3)
CHOICES = st.integers(0, 3)


class RepositoryMachine(RuleBasedStateMachine):
    """Write, back up, commit, kill, resume as a zombie, restore at a version, fork, rewind, collect, skew, tamper."""

    @initialize(seed=st.integers(0, 1000), store=st.sampled_from(["memory", "s3"]), faults=st.sampled_from([0, 5]))
    def begin(self, seed: int, store: StoreKind, faults: int) -> None:
        schedule = Schedule(
            seed=seed, store=store, beginning=0, faults_per_mille=faults, deltas=seed % 2 == 0, themes=(), steps=()
        )
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.scratch = tempfile.TemporaryDirectory(prefix="tidemark-sim-", dir=base, ignore_cleanup_errors=True)
        self.locks = watched_locks()
        self.locks.__enter__()
        self.loop = VirtualLoop(seed, EPOCH_S)
        self.world = World(schedule, Path(self.scratch.name), Coverage())
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self.world.begin()

    def take(self, step: Step) -> None:
        self.loop.run_until_complete(self.world.run((step,)))

    @rule(process=PROCESSES, verb=st.sampled_from(["push", "backup", "commit", "push"]), store=st.integers(0, 1))
    def write(self, process: int, verb: Verb, store: int) -> None:
        self.take(Do(process=process, verb=verb, store=store))

    @rule(process=PROCESSES, wait=st.booleans())
    def write_beside_others(self, process: int, *, wait: bool) -> None:
        self.take(Do(process=process, verb="push", wait=wait))

    @rule(process=PROCESSES, choice=CHOICES, where=st.integers(0, 1))
    def restore(self, process: int, choice: int, where: int) -> None:
        self.take(Do(process=process, verb="restore", choice=choice, target=where))

    @rule(process=PROCESSES, verb=st.sampled_from(["fork", "rewind", "name", "release"]), choice=CHOICES)
    def protect(self, process: int, verb: Verb, choice: int) -> None:
        self.take(Do(process=process, verb=verb, choice=choice))

    @rule(process=PROCESSES, keep_last=st.integers(1, 2), wait=st.booleans())
    def collect(self, process: int, keep_last: int, *, wait: bool) -> None:
        self.take(Do(process=process, verb="collect", keep_last=keep_last, wait=wait))

    @rule(process=PROCESSES)
    def heal(self, process: int) -> None:
        self.take(Do(process=process, verb="heal"))

    @rule(
        process=PROCESSES,
        operation=st.sampled_from(["", "put_if_absent", "put", "delete", "remove_ttl", "list_page", "get"]),
        effect=st.sampled_from(["stop", "kill", "outage", "lost", "late", "hang", "refused"]),
        skip=st.integers(0, 5),
        phase=st.sampled_from(["before", "after"]),
    )
    def set_trap(self, process: int, operation: str, effect: Effect, skip: int, phase: Any) -> None:
        self.take(Trap(process=process, operation=operation, effect=effect, skip=skip, phase=phase))

    @rule(process=PROCESSES, what=st.sampled_from(["kill", "stop", "wake", "wake"]))
    def control(self, process: int, what: Any) -> None:
        self.take(Control(process=process, what=what))

    @rule(process=PROCESSES, skew_ms=st.integers(-DAY_MS, DAY_MS))
    def skew(self, process: int, skew_ms: int) -> None:
        self.take(Control(process=process, what="skew", skew_ms=skew_ms))

    @rule(ms=st.sampled_from([1000, TTL_MS // 4, TTL_MS]))
    def wait(self, ms: int) -> None:
        self.take(Advance(ms=ms))

    @rule(choice=st.integers(0, 50), once_in=st.integers(0, 7))
    def tamper(self, choice: int, once_in: int) -> None:
        if once_in == 0:
            self.world.tamper(choice)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            judge = self.world.judge()
            judge.check_now()
            assert judge.violations == []

    @override
    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            outcome = self.loop.run_until_complete(self.world.finish())
            assert outcome.violations == ()
        finally:
            self.loop.end()
            self.locks.__exit__(None, None, None)
            self.scratch.cleanup()


QUIET = list(HealthCheck)


def test_histories_that_hypothesis_finds() -> None:
    run_state_machine_as_test(
        RepositoryMachine,
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=QUIET
        ),
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_histories_that_hypothesis_finds() -> None:
    run_state_machine_as_test(
        RepositoryMachine,
        settings=settings(max_examples=1000, stateful_step_count=40, deadline=None, suppress_health_check=QUIET),
    )
