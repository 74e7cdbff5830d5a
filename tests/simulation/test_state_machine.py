"""Hypothesis chooses who does what next, on the simulated bucket, against the judge's plain dicts (design 0007)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from typing_extensions import override

from tests.simulation.checks.coverage import Coverage
from tests.simulation.model.processes import EPOCH_S, watched_locks
from tests.simulation.model.scheduler import World
from tests.simulation.model.virtual_loop import VirtualLoop
from tests.simulation.scenarios.builder import DAY_MS, TTL_MS
from tests.simulation.scenarios.schedule import Advance, Control, Do, Effect, Schedule, Step, StoreKind, Trap, Verb

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


def test_a_put_that_lands_after_somebody_deleted_its_object_is_reported() -> None:
    with begun(seed=0) as machine:
        machine.set_trap(effect="late", operation="", phase="before", process=1, skip=2)
        machine.write(process=1, store=0, verb="push")
        machine.tamper(choice=1, once_in=0)


def test_a_copy_of_a_pin_that_lands_after_its_commit_was_collected_keeps_nothing() -> None:
    with begun(seed=984) as machine:
        machine.write(process=0, store=0, verb="push")
        machine.heal(process=0)
        machine.write_beside_others(process=0, wait=False)
        machine.set_trap(effect="late", operation="", phase="before", process=2, skip=4)
        machine.restore(choice=1, process=2, where=0)
        for ms in (3_600_000, 3_600_000, 14_400_000):
            machine.wait(ms=ms)
        machine.collect(keep_last=1, process=0, wait=False)


def test_a_copy_of_a_pin_that_lands_while_all_is_at_rest_stays_for_its_time_and_the_margin() -> None:
    with begun(seed=522) as machine:
        machine.wait(ms=1000)
        machine.write_beside_others(process=2, wait=False)
        machine.wait(ms=1000)
        machine.set_trap(effect="late", operation="", phase="before", process=2, skip=2)
        for _ in range(4):
            machine.wait(ms=1000)
        machine.restore(choice=0, process=2, where=0)
        machine.wait(ms=1000)
        machine.wait(ms=14_400_000)


@contextmanager
def begun(*, seed: int) -> Iterator[RepositoryMachine]:
    """A machine whose rules are called one by one, as they were when one of its histories failed; judged at the end."""
    machine = RepositoryMachine()
    machine.begin(seed=seed, store="memory", faults=0)
    try:
        yield machine
        machine.nothing_is_lost()
    finally:
        machine.teardown()


@pytest.mark.parametrize("store, verb", [(0, "commit"), (1, "push")])
def test_a_scope_of_which_the_only_record_came_too_late_is_shown_and_forgotten(store: int, verb: Verb) -> None:
    with begun(seed=0) as machine:
        machine.write(process=0, store=0, verb="backup")
        machine.wait(ms=14_400_000)
        machine.write(process=0, store=store, verb=verb)
        machine.heal(process=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_histories_that_hypothesis_finds(request: pytest.FixtureRequest) -> None:
    """The same ones every time, unless others are asked for by `--hypothesis-seed`."""
    run_state_machine_as_test(
        RepositoryMachine,
        settings=settings(
            max_examples=1000,
            stateful_step_count=40,
            deadline=None,
            derandomize=request.config.getoption("--hypothesis-seed") is None,
            suppress_health_check=QUIET,
        ),
    )
