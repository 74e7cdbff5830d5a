"""Shorten a schedule that fails: leave steps and faults out as long as it still fails (design 0007, S6)."""

import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from tests.simulation.scenarios.schedule import Advance, Schedule, Step, Trap

# Runs of the schedule; each takes some hundredths of a second.
ATTEMPTS_MAX: Final = 2_000
_ERROR: Final = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")


def code_of(violation: str) -> str:
    """What kind of violation it is: the rule or invariant before the first colon, and which error it names.

    A schedule made short must fail for the same reason: names, numbers and keys may be others.
    """
    rule, _, what = violation.partition(":")
    error = _ERROR.search(what)
    return rule if error is None else f"{rule} {error[0]}"


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], *, attempts_max: int = ATTEMPTS_MAX) -> Schedule:
    """The shortest schedule found that still fails.

    Args:
        schedule: One that fails.
        fails: Whether one does.
        attempts_max: At most this many are tried.
    """
    left = attempts_max
    is_shorter = True
    while is_shorter and left > 0:
        is_shorter = False
        for shorter in _shorter(schedule):
            left -= 1
            if fails(shorter):
                schedule = shorter
                is_shorter = True
                break
            if left <= 0:
                break
    return schedule


def _shorter(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are simpler, the much simpler ones first."""
    if schedule.effects_min:
        yield msgspec.structs.replace(schedule, effects_min=0)
    if schedule.faults_per_mille:
        yield msgspec.structs.replace(schedule, faults_per_mille=0)
    if schedule.deltas:
        yield msgspec.structs.replace(schedule, deltas=False)
    if schedule.beginning > 1:
        yield msgspec.structs.replace(schedule, beginning=1)
    steps = schedule.steps
    size = len(steps) // 2
    while size > 0:
        for at in range(0, len(steps), size):
            yield msgspec.structs.replace(schedule, steps=steps[:at] + steps[at + size :])
        size //= 2
    for at, step in enumerate(steps):
        for simpler in _simpler(step):
            yield msgspec.structs.replace(schedule, steps=(*steps[:at], simpler, *steps[at + 1 :]))


def _simpler(step: Step) -> Iterator[Step]:
    if isinstance(step, Advance) and step.ms > 1:
        yield Advance(ms=step.ms // 2)
    if isinstance(step, Trap):
        for at in range(len(step.then)):
            yield msgspec.structs.replace(step, then=step.then[:at] + step.then[at + 1 :])
        if step.skip:
            yield msgspec.structs.replace(step, skip=step.skip - 1)
