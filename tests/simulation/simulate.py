"""Run one schedule, from its seed to a verdict."""

import contextlib
import functools
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import engine.follow.follow
from engine.records import indexes as index_io
from tests.simulation.checks.coverage import Coverage
from tests.simulation.faults.file_effects import counted_changes
from tests.simulation.model.decode_cache import remembered
from tests.simulation.model.outcome import Beginning, Outcome
from tests.simulation.model.processes import EPOCH_S, watched_locks
from tests.simulation.model.scheduler import World
from tests.simulation.model.virtual_loop import DeadlockError, run_virtual
from tests.simulation.scenarios.builder import BEGINNINGS_COUNT
from tests.simulation.scenarios.schedule import Advance, Do, Schedule, Step, StoreKind

_BUILT_S: Final = 3600.0
# What the repositories look like that schedules begin with; the first is empty.
_BEGINNINGS: Final[tuple[tuple[Step, ...], ...]] = (
    (),
    (Do(process=0, verb="push"), Do(process=0, verb="push", store=1)),
    (Do(process=0, verb="push"), Do(process=1, verb="push"), Do(process=0, verb="push", store=1)),
    (
        Do(process=0, verb="push", store=1),
        Do(process=0, verb="push"),
        Do(process=0, verb="push"),
        Do(process=0, verb="push"),
        Advance(ms=1000),
        Do(process=4, verb="collect", keep_last=2),
    ),
    (
        Do(process=0, verb="push"),
        Do(process=3, verb="name", choice=0),
        Do(process=0, verb="push"),
        Do(process=0, verb="push"),
    ),
)
assert len(_BEGINNINGS) == BEGINNINGS_COUNT


def simulate(schedule: Schedule, coverage: Coverage | None = None, *, keep_history: bool = False) -> Outcome:
    """Carry out a schedule and judge what it has left.

    Args:
        schedule: What happens.
        coverage: Where moments are counted.
        keep_history: Return the history too.
    """
    try:
        return _simulate(schedule, Coverage() if coverage is None else coverage, keep_history=keep_history)
    except DeadlockError as error:
        return _failed(f"7: {error}")
    except Exception as error:  # noqa: BLE001 - its seed is what matters, whatever it is
        at = traceback.extract_tb(error.__traceback__)[-1]
        return _failed(f"sim: {error!r} at {Path(at.filename).name}:{at.lineno}")


def _failed(violation: str) -> Outcome:
    return Outcome(violations=(violation,), effects=0, file_effects=0, requests=0, digest="")


def _simulate(schedule: Schedule, coverage: Coverage, *, keep_history: bool) -> Outcome:
    beginning = _build(schedule.store, schedule.beginning) if schedule.beginning else None
    with _scratch() as directory, contextlib.ExitStack() as stack:
        stack.enter_context(watched_locks())
        stack.enter_context(remembered())
        if schedule.deltas:
            stack.enter_context(mock.patch.object(index_io, "delta_pays", _delta_always))
            stack.enter_context(mock.patch.object(index_io, "WHOLE_BYTES_MAX", 0))
        # A process that is paused for hours keeps what it has claimed.
        stack.enter_context(mock.patch.object(engine.follow.follow, "STEP_LOOKS_MAX", 100))
        changes = stack.enter_context(counted_changes())
        world = World(schedule, directory, coverage, beginning=beginning, changes=changes)
        return run_virtual(world.live(keep_history=keep_history), seed=schedule.seed, start_s=EPOCH_S + _BUILT_S)


@functools.cache
def _build(store: StoreKind, beginning: int) -> Beginning:
    """Built once in a process: it takes as long as a small schedule."""
    schedule = Schedule(
        seed=beginning,
        store="memory" if store == "stale" else store,
        beginning=0,
        faults_per_mille=0,
        deltas=False,
        is_judged=False,
        themes=(),
        steps=_BEGINNINGS[beginning],
    )
    with _scratch() as directory:
        return run_virtual(World(schedule, directory, Coverage()).build(), seed=beginning, start_s=EPOCH_S)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory where files cost least."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="tidemark-sim-", dir=base))
    try:
        yield directory
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """It and everything below it, in a third of the time of `shutil.rmtree`: nobody else is there."""
    for at, directories, names in os.walk(directory, topdown=False):
        for name in names:
            os.unlink(f"{at}/{name}")  # noqa: PTH108 - pathlib takes longer than the call
        for name in directories:
            os.rmdir(f"{at}/{name}")  # noqa: PTH106 - as above
    directory.rmdir()


def _delta_always(*, whole_bytes: int, delta_bytes: int) -> bool:
    return True
