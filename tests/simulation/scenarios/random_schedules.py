"""Make a schedule from a seed: one or two themes that lead to a rare moment, among actions that happen anyway.

A random schedule meets "a collection between the record and the check" once in ten thousand schedules. A theme leads to
such a moment by a trap, and leaves to the rng who, when exactly, and what else happens.
"""

from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from tests.simulation.model.s3 import PAGES, page_max_of
from tests.simulation.scenarios.builder import (
    BEGINNINGS_COUNT,
    BOUNDARY,
    COLLECTOR,
    DAY_MS,
    ENFORCED,
    HOUR_MS,
    KEEPER,
    MINUTE_MS,
    OTHER,
    PROCESSES_IN_USE,
    READER,
    RECORD,
    SECOND,
    SECOND_MS,
    USUAL,
    WRITER,
    Plot,
    backstop_ms,
)
from tests.simulation.scenarios.random_mixes import (
    anything,
    bad_line,
    chain,
    closed_by_another,
    commit_again,
    conflict,
    crash,
    dropping,
    following,
    forgetting,
    long_pause,
    names,
    one_id,
    rescaled,
    resuming,
    used_by_name,
)
from tests.simulation.scenarios.random_store_faults import clock_jumps, copied, full_store, rotten, stale_for_one
from tests.simulation.scenarios.schedule import (
    TASK_SCOPE,
    Control,
    Do,
    Effect,
    Schedule,
    Step,
    StoreKind,
    Times,
    Trap,
    Verb,
    flat,
)

# ---------------------------------------------------------------------------------------------- themes


def lost_answer_at_commit(plot: Plot) -> None:
    """The record is there, and its writer was not informed (C3)."""
    effect = plot.pick("lost", "outage", "kill")
    plot.trap(WRITER, effect=effect, operation="put_if_absent", prefix="log/", suffix=RECORD)
    plot.push()
    if plot.one_in(2):
        plot.push(OTHER)
    plot.do(WRITER, "commit")
    plot.push()


def collection_before_the_check(plot: Plot) -> None:
    """Between the record and the LIST that follows it (C4)."""
    _age(plot)
    plot.trap(
        WRITER, *plot.overtaking(commits=plot.rng.randrange(3)), operation="put_if_absent", prefix="log/", suffix=RECORD
    )
    plot.push()
    plot.push()


def zombie(plot: Plot) -> None:
    """A writer is paused before its record, and wakes when its number is taken or closed (C4, D3)."""
    _age(plot)
    after = plot.one_in(4)
    then = plot.overtaking(commits=plot.rng.randrange(1, 4))
    plot.trap(WRITER, *then, after=after, effect="stop", operation="put_if_absent", prefix="log/", suffix=RECORD)
    plot.push()
    if plot.one_in(3):
        plot.advance(plot.rng.randrange(plot.times.ttl_ms))
        plot.collect()
    plot.wake(WRITER)
    plot.settle()
    plot.push()


def void_record(plot: Plot) -> None:
    """A record arrives after the lease of its uploads (C5)."""
    effect = plot.pick("stop", "adrift")
    plot.trap(WRITER, after=False, effect=effect, operation="put_if_absent", prefix="log/", suffix=RECORD)
    plot.push()
    plot.advance(plot.times.ttl_ms - plot.times.margin_ms // plot.rng.choice((1, 2, 4)))
    if plot.one_in(3):
        plot.collect()
    plot.wake(WRITER)
    plot.land()
    plot.settle()
    plot.push(plot.rng.choice((WRITER, OTHER)))
    plot.collect()


def interrupted_ttl_removal(plot: Plot) -> None:
    """The commit is acknowledged, or as good as, and some of its uploads keep their TTL (T1, T2)."""
    effect = plot.pick("kill", "outage", "stop", "kill")
    plot.trap(WRITER, operation="remove_ttl", effect=effect, after=plot.one_in(2), skip=plot.rng.randrange(3))
    plot.push()
    variant = plot.rng.randrange(4)
    if variant == 0:
        plot.advance(plot.times.ttl_ms)
        plot.collect()
    elif variant == 1:
        plot.do(KEEPER, plot.rng.choice(("fork", "name", "rewind")), choice=plot.rng.randrange(2))
    elif variant == 2:
        plot.do(KEEPER, "heal")
    plot.push(OTHER)
    plot.wake(WRITER)
    plot.settle()


def late_put(plot: Plot) -> None:
    """A put arrives long after its client has given it up (K2)."""
    prefix = plot.rng.choice(("blobs/", "indexes/", "log/", "log/"))
    plot.trap(
        WRITER, operation="put_if_absent", prefix=prefix, after=False, effect=plot.pick("adrift", "adrift", "late")
    )
    plot.push()
    plot.push(plot.rng.choice((WRITER, OTHER)))
    if plot.one_in(2):
        plot.collect()
    if plot.one_in(4):
        plot.advance(plot.times.ttl_ms)
        plot.collect()
    plot.land()
    plot.do(WRITER, "commit")


def lost_answer_at_a_boundary(plot: Plot) -> None:
    """A collector does not know whether its boundary is there: it deletes nothing."""
    effect = plot.pick("lost", "lost", "outage", "outage", "kill", "adrift")
    plot.push()
    plot.trap(
        COLLECTOR, effect=effect, after=effect != "adrift", operation="put_if_absent", prefix="log/", suffix=BOUNDARY
    )
    plot.collect()
    if plot.one_in(2):
        plot.push(OTHER)
    plot.land()
    plot.collect(plot.rng.choice((COLLECTOR, SECOND)))


def two_collectors(plot: Plot) -> None:
    """Side by side, or one within the other."""
    plot.push(OTHER)
    if plot.one_in(2):
        plot.collect(COLLECTOR, wait=False)
        plot.collect(SECOND, wait=False)
        if plot.one_in(2):
            plot.push(WRITER, wait=False)
        plot.settle()
        return
    then: list[Step] = [plot.collection(SECOND)]
    if plot.one_in(2):
        then.insert(0, Do(process=OTHER, verb="push"))
    operation, prefix = plot.rng.choice(
        (("put_if_absent", "log/"), ("delete", "log/"), ("delete", "indexes/"), ("list_page", "log/"), ("delete", ""))
    )
    plot.trap(COLLECTOR, *then, prefix=prefix, operation=operation, after=plot.one_in(2), effect=_pause(plot))
    plot.collect(COLLECTOR)
    plot.wake(COLLECTOR)
    plot.settle()


def _protect_against_collect(plot: Plot, verb: Verb) -> None:
    """A protector and a collector, each in the middle of the other (D5)."""
    plot.push(OTHER)
    _age(plot)
    choice = plot.rng.randrange(1, 3)
    kind = plot.rng.randrange(4)
    if kind == 0:
        plot.do(KEEPER, verb, choice=choice, wait=False)
        plot.collect(wait=False)
        plot.settle()
    elif kind == 1:
        operation, prefix = plot.rng.choice((("put", "pins/"), ("list_page", "log/"), ("put_if_absent", "")))
        then = (plot.collection(),) if plot.one_in(2) else plot.overtaking(commits=1)
        plot.trap(KEEPER, *then, prefix=prefix, operation=operation, after=plot.one_in(2), effect=_pause(plot))
        plot.do(KEEPER, verb, choice=choice)
        if plot.one_in(3):
            plot.advance(plot.rng.randrange(2 * HOUR_MS))
            plot.collect(SECOND)
    else:
        operation, prefix = plot.rng.choice(
            (("list_page", "pins/"), ("list_page", "log/"), ("put_if_absent", "log/"), ("delete", ""))
        )
        then = (Do(process=KEEPER, verb=verb, choice=choice),)
        plot.trap(COLLECTOR, *then, prefix=prefix, operation=operation, after=plot.one_in(2), effect=_pause(plot))
        plot.collect()
    plot.wake(KEEPER)
    plot.wake(COLLECTOR)
    plot.settle()


def _age(plot: Plot) -> None:
    """Mostly let what is there become old enough to be deleted (D2)."""
    if not plot.one_in(4):
        plot.advance(plot.times.ttl_ms)


def _pause(plot: Plot) -> Effect:
    """The request waits for the others, or its whole process is paused until it is woken."""
    return plot.pick("none", "none", "stop")


def fork_against_collect(plot: Plot) -> None:
    _protect_against_collect(plot, "fork")
    plot.do(KEEPER, "push", scope=2)


def name_against_collect(plot: Plot) -> None:
    _protect_against_collect(plot, "name")


def rewind_against_collect(plot: Plot) -> None:
    _protect_against_collect(plot, "rewind")


def restore_against_collect(plot: Plot) -> None:
    _protect_against_collect(plot, "restore")


def repack_against_restore(plot: Plot) -> None:
    """A restore reads a pack while backups pack its files again and a collection takes the old one (P1, D5)."""
    _age(plot)
    then = [Do(process=OTHER, verb="push") for _ in range(2)]
    is_short = not plot.one_in(3)
    plot.trap(
        READER,
        *then,
        plot.collection(),
        operation=plot.rng.choice(("get", "get", "put")),
        prefix=plot.rng.choice(("blobs/", "indexes/", "")),
        after=plot.one_in(2),
        effect=plot.pick("none", "stop", "kill") if is_short else "stop",
    )
    plot.do(READER, "restore", choice=plot.rng.randrange(2), target=plot.rng.randrange(2))
    if not is_short:
        # Longer than a pin lasts: nothing protects the reader any more.
        plot.advance(3 * HOUR_MS)
        plot.collect()
    plot.wake(READER)
    plot.settle()


def second_attempt(plot: Plot) -> None:
    """Two attempts at one task, both of whose results reach a driver (C2)."""
    plot.do(WRITER, "backup", wait=False)
    plot.do(OTHER, "backup", wait=False)
    plot.settle()
    plot.do(WRITER, "hand", other=SECOND)
    plot.do(SECOND, "commit")
    plot.do(OTHER, plot.rng.choice(("hand", "commit")), other=SECOND)
    plot.do(SECOND, "commit")
    plot.push(OTHER, wait=False)
    plot.push(WRITER, wait=False)
    plot.settle()


ACTORS_MIN: Final = 3
EFFECTS_MIN: Final = 40
PAGED_EVERY: Final = 4
OTHER_TIMES_EVERY: Final = 6
TWO_THEMES_EVERY: Final = 8
# Themes beside the others, in the schedules of some seeds: as one of `THEMES` each would make another schedule of every
# seed. With the number of seeds of which one has it, and its rest.
BESIDE: Final[tuple[tuple[Callable[[Plot], None], int, int], ...]] = (
    (rescaled, 10, 9),
    (following, 16, 9),
    (resuming, 16, 5),
    (used_by_name, 10, 7),
    (closed_by_another, 16, 3),
)
THEMES: Final[tuple[Callable[[Plot], None], ...]] = (
    lost_answer_at_commit,
    collection_before_the_check,
    zombie,
    void_record,
    interrupted_ttl_removal,
    late_put,
    lost_answer_at_a_boundary,
    two_collectors,
    fork_against_collect,
    name_against_collect,
    rewind_against_collect,
    restore_against_collect,
    repack_against_restore,
    second_attempt,
    names,
    crash,
    conflict,
    bad_line,
    long_pause,
    anything,
    forgetting,
    dropping,
    chain,
    commit_again,
    clock_jumps,
    copied,
    full_store,
    rotten,
    stale_for_one,
    one_id,
    # These meet what they are for less often than the others.
    fork_against_collect,
    fork_against_collect,
    fork_against_collect,
    name_against_collect,
    rewind_against_collect,
    rewind_against_collect,
    repack_against_restore,
    repack_against_restore,
    names,
    names,
    second_attempt,
    interrupted_ttl_removal,
    two_collectors,
    forgetting,
    forgetting,
    crash,
    name_against_collect,
    lost_answer_at_a_boundary,
    one_id,
    stale_for_one,
    stale_for_one,
)
# Of a hundred schedules.
_STORES: Final[tuple[tuple[StoreKind, int], ...]] = (("s3", 50), ("memory", 38), ("expiring", 10), ("stale", 2))


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    plot = Plot(seed)
    rng = plot.rng
    kinds, weights = zip(*_STORES, strict=True)
    store = rng.choices(kinds, weights)[0]
    is_enforced = plot.is_enforced = store == "expiring"
    plot.deltas = plot.one_in(4)
    # One task commits for itself; what a schedule finds is of the whole job.
    is_of_task = plot.one_in(12)
    if plot.one_in(3):
        skew_ms = rng.choice((-3 * DAY_MS, -HOUR_MS, HOUR_MS, 3 * DAY_MS))
        plot.steps.append(Control(process=rng.randrange(PROCESSES_IN_USE), what="skew", skew_ms=skew_ms))
    usual = plot.times = ENFORCED if is_enforced else USUAL
    if plot.one_in(2 if is_enforced else OTHER_TIMES_EVERY):
        # Where the store deletes by itself collections run on time, each of which takes its own.
        plot.times = _times(rng, period_ms_min=DAY_MS if is_enforced else MINUTE_MS)
    beginning = 0 if is_of_task or plot.times != usual else rng.randrange(BEGINNINGS_COUNT)
    if not beginning:
        plot.push()
        plot.push(rng.choice((WRITER, WRITER, OTHER)))
    chosen = rng.sample(THEMES, 2 if plot.one_in(TWO_THEMES_EVERY) else 1)
    for theme in chosen:
        theme(plot)
        if plot.one_in(4):
            # Clocks go backwards, too.
            skew_ms = rng.randrange(-DAY_MS, DAY_MS)
            plot.steps.append(Control(process=rng.randrange(PROCESSES_IN_USE), what="skew", skew_ms=skew_ms))
    # By numbers of their own: what a seed leads to otherwise is what it led to before.
    for theme, every, rest in BESIDE:
        if seed % every == rest:
            chosen.append(theme)
            theme(plot)
    if is_enforced and plot.one_in(2):
        plot.do(WRITER, "backup")
        plot.advance(backstop_ms(plot.times) + DAY_MS)
    if len({step.process for step in flat(tuple(plot.steps)) if isinstance(step, Do)}) < ACTORS_MIN:
        plot.collect()
        plot.push(OTHER)
        plot.push(WRITER)
    steps = tuple(plot.steps)
    return Schedule(
        seed=seed,
        store=store,
        beginning=beginning,
        faults_per_mille=rng.choice((0, 0, 2, 10)),
        deltas=plot.deltas,
        journals=plot.journals,
        times=None if plot.times == usual else plot.times,
        stale=plot.stale if store == "memory" else (),
        page_max=_page_max(seed),
        effects_min=EFFECTS_MIN,
        themes=tuple(theme.__name__ for theme in chosen),
        steps=tuple(_of_task(step) for step in steps) if is_of_task else steps,
    )


def _times(rng: Random, *, period_ms_min: int) -> Times:
    """Any that `init` accepts, from minutes to weeks, each scale as likely as the others."""
    ttl_ms = int(10 * MINUTE_MS * (30 * DAY_MS / (10 * MINUTE_MS)) ** rng.random())
    margin_ms = rng.randrange(2 * SECOND_MS, ttl_ms // 2)
    period_ms = int(period_ms_min * (30 * DAY_MS / period_ms_min) ** rng.random())
    return Times(ttl_ms=ttl_ms, margin_ms=margin_ms, period_ms=period_ms)


def _page_max(seed: int) -> int:
    """A list of a page a key takes ten times as long to simulate: most schedules have few pages."""
    return page_max_of(seed) if seed % PAGED_EVERY == 0 else PAGES[-1]


def _of_task(step: Step) -> Step:
    if isinstance(step, Do) and step.scope == 0:
        return msgspec.structs.replace(step, scope=TASK_SCOPE)
    if isinstance(step, Trap):
        return msgspec.structs.replace(step, then=tuple(map(_of_task, step.then)))
    return step
