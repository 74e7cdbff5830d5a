"""Define a schedule: who does what, in which order, and what goes wrong meanwhile.

A schedule is a value. It is made from a seed (`random_schedules.py`), can be written down and read again, and any of
its steps can be left out: a step that makes no sense any more does nothing. So a failure can be made short.
"""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

PROCESSES_MAX: Final = 8
# One task of the first job, which commits for itself.
TASK_SCOPE: Final = 3

Verb = Literal[
    "backup",  # of one store; the result waits in its process
    "commit",  # what waits in the process
    "push",  # both
    "again",  # what its process has committed last, as if it had not
    "hand",  # what waits goes to process `other`, as a task's result goes to the driver
    "restore",
    "follow",  # into a directory that all processes share
    "promote",  # the same; `choice` 1: without catching up
    "fork",
    "rewind",
    "name",
    "release",
    "collect",
    "heal",
    "drop",  # a commit that a store is no more
    "rescale",  # a commit of another number of tasks, in which files of any store may come from any other
    "forget",
]
Phase = Literal["before", "after"]
# What a trap does. To the process: stop, kill. To the operation, so that anyone who asked has given up: outage (phase
# "before": not carried out, "after": carried out), adrift (a put that lands when the schedule says, or at the end). To
# one request of it, which is then tried again: lost, late, refused, conflict, hang, never, cut, flip.
Effect = Literal[
    "none", "stop", "kill", "outage", "adrift", "lost", "late", "refused", "conflict", "hang", "never", "cut", "flip"
]
# The second kind of store, and its modes.
StoreKind = Literal["s3", "memory", "expiring", "stale"]


class Do(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="do"):
    """A process begins an action; if it is still at another one, after that."""

    process: int
    verb: Verb
    # Which scope (two jobs, the newest fork, one task of the first job), and which store of it.
    scope: int = 0
    store: int = 0
    # A choice that the verb makes of what there is, modulo how much there is: of commits the n-th newest, of names ...
    choice: int = 0
    # Of a fork, rewind, name or restore: the commit is the one that this name stands for.
    by_name: bool = False
    # Of a collection: how many commits stay; 0: those of the last `since_ms`.
    keep_last: int = 1
    since_ms: int = 0
    other: int = 0
    # Of a backup: a unique id that others have too; 0: one of its own.
    label: int = 0
    # Of a backup: the content, which others have too; 0: one of its own.
    tree: int = 0
    # Of a restore: which directory. One with content is replaced.
    target: int = 0
    # False: the next step does not wait for the end of the action.
    wait: bool = True


class Trap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="trap"):
    """Armed for the next request of a kind: what happens to it, and what others do just then."""

    process: int
    # Of the store's contract, such as "put_if_absent"; "" is any.
    operation: str
    # What the key begins with, and how it ends.
    prefix: str = ""
    suffix: str = ""
    phase: Phase = "after"
    effect: Effect = "none"
    # This many such requests pass before.
    skip: int = 0
    # While the request waits, or its process is stopped.
    then: tuple["Step", ...] = ()


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="control"):
    """Something happens to a process, or to its clock."""

    process: int
    what: Literal["kill", "stop", "wake", "skew"]
    # How far its clock goes wrong.
    skew_ms: int = 0


class Advance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="advance"):
    """Time passes, for everybody."""

    ms: int


class Land(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="land"):
    """Requests that are on their way, and that their clients have given up, arrive."""


class Happen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="happen"):
    """Something happens to the store itself."""

    # fill, empty: no put is carried out any more, or they are again. step: its clock jumps by `ms`. copy: everything is
    # moved to another place, and is as young as the copy. flip: a byte of the `choice`-th object below `prefix` rots,
    # but of none in `blobs/`.
    what: Literal["fill", "empty", "step", "copy", "flip"]
    ms: int = 0
    choice: int = 0
    prefix: str = ""


class Settle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="settle"):
    """Whatever is under way, and not stopped, comes to its end."""


Step = Do | Trap | Control | Advance | Land | Happen | Settle


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What a repository is made with, in ms."""

    ttl_ms: int
    margin_ms: int
    period_ms: int


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, in a world that its seed decides: order of tasks, ids, contents, delays, faults."""

    seed: int
    store: StoreKind
    # Which repository it finds (`tests.simulation.simulate`); 0: an empty one.
    beginning: int
    # Those of the repository; the usual ones if not given.
    times: Times | None = None
    # Processes whose lists may be a minute old; of a store that is stale by itself everybody's are.
    stale: tuple[int, ...] = ()
    # Of a thousand requests this many go wrong at random.
    faults_per_mille: int
    # Indexes are stored as differences wherever there is a base, and not only where it pays.
    deltas: bool
    # All processes are of one machine, on which backups that are broken off leave their journals.
    journals: bool = False
    # Keys in a page of a list.
    page_max: int = 1000
    # What is left is judged once everybody is gone, and not only what is there at the end of the steps.
    is_judged: bool = True
    # This many effects there have to be: steps that make some are added at the end, until there are.
    effects_min: int = 0
    themes: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """Number of steps, those of traps counted."""
        return sum(1 for _ in flat(self.steps))

    @property
    def is_of_task(self) -> bool:
        """Whether one task of the first job commits for itself."""
        return any(isinstance(step, Do) and step.scope == TASK_SCOPE for step in flat(self.steps))


def flat(steps: tuple[Step, ...]) -> Iterator[Step]:
    """Every step, those of traps after their trap."""
    for step in steps:
        yield step
        if isinstance(step, Trap):
            yield from flat(step.then)


def encode_schedule(schedule: Schedule) -> str:
    """One line of JSON, from which `decode_schedule` makes the same schedule."""
    return msgspec.json.encode(schedule).decode()


def decode_schedule(text: str) -> Schedule:
    """The inverse of `encode_schedule`."""
    return msgspec.json.decode(text, type=Schedule)


def show_schedule(schedule: Schedule) -> str:
    """A schedule as people read it, a step a line."""
    how = f"{schedule.faults_per_mille} faults of 1,000 requests{', deltas' if schedule.deltas else ''}"
    times = schedule.times
    made = f", ttl {times.ttl_ms} ms, margin {times.margin_ms} ms, period {times.period_ms} ms" if times else ""
    made += f", stale lists for {', '.join(f'p{n}' for n in schedule.stale)}" if schedule.stale else ""
    where = f"store {schedule.store}, beginning {schedule.beginning}{made}"
    lines = [f"seed {schedule.seed}, {where}, themes {', '.join(schedule.themes)}, {how}"]
    lines += _shown(schedule.steps, 1)
    return "\n".join(lines)


def _shown(steps: tuple[Step, ...], depth: int) -> list[str]:
    lines: list[str] = []
    for step in steps:
        fields = {k: v for k, v in msgspec.to_builtins(step).items() if k not in {"type", "then"}}
        kind = fields.pop("type", type(step).__name__.lower())
        who = f"p{fields.pop('process')} " if "process" in fields else ""
        what = " ".join([str(fields.pop(k)) for k in ("verb", "what") if k in fields] or [kind])
        lines.append("  " * depth + who + what + "".join(f" {k}={v}" for k, v in fields.items()))
        if isinstance(step, Trap):
            lines += _shown(step.then, depth + 1)
    return lines
