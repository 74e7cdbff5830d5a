"""Themes about the store itself: it is full, its clock jumps, it is copied to another place, or an object rots."""

from tests.simulation.scenarios.builder import (
    COLLECTOR,
    KEEPER,
    OTHER,
    PROCESSES_IN_USE,
    READER,
    RECORD,
    SECOND,
    WRITER,
    Plot,
)
from tests.simulation.scenarios.schedule import Control, Do, Happen, Verb


def full_store(plot: Plot) -> None:
    """Nothing can be put for a while, from the beginning of an action or from the middle of one."""
    plot.push(OTHER)
    if plot.one_in(2):
        plot.happen("fill")
    else:
        operation = plot.rng.choice(("put_if_absent", "put", "remove_ttl", "list_page"))
        process = plot.rng.choice((WRITER, COLLECTOR, KEEPER))
        plot.trap(process, Happen(what="fill"), operation=operation, after=plot.one_in(2), skip=plot.rng.randrange(3))
    verbs: tuple[Verb, ...] = ("push", "collect", "restore", "rewind", "fork", "name", "release", "heal")
    for verb in plot.rng.sample(verbs, 4):
        plot.do(plot.rng.randrange(PROCESSES_IN_USE), verb, choice=plot.rng.randrange(2))
    plot.do(READER, "restore", choice=plot.rng.randrange(2))
    plot.happen("empty")
    plot.do(WRITER, "commit")
    plot.push(OTHER)


def copied(plot: Plot) -> None:
    """A repository is moved, now or when all its leases are long over; nothing that counted is lost (C5)."""
    for _ in range(plot.rng.randrange(1, 4)):
        plot.push(plot.rng.choice((WRITER, OTHER)))
    if plot.one_in(2):
        plot.do(KEEPER, plot.rng.choice(("name", "fork", "rewind")), choice=1)
    if plot.one_in(3):
        plot.trap(WRITER, operation="remove_ttl", effect="kill", after=plot.one_in(2))
        plot.push()
    if plot.one_in(4):
        # A void record is copied too.
        plot.trap(WRITER, after=False, effect="adrift", operation="put_if_absent", prefix="log/", suffix=RECORD)
        plot.push()
        plot.advance(plot.times.ttl_ms)
        if plot.one_in(2):
            plot.collect()
        plot.land()
    if plot.one_in(3):
        plot.collect()
    plot.advance(plot.rng.choice((0, plot.times.ttl_ms // 2, plot.times.ttl_ms, 3 * plot.times.ttl_ms)))
    plot.happen("copy")
    plot.do(READER, "restore", choice=plot.rng.randrange(2))
    variant = plot.rng.randrange(4)
    if variant == 0:
        plot.collect()
    elif variant == 1:
        plot.do(KEEPER, plot.rng.choice(("rewind", "fork", "name")), choice=plot.rng.randrange(3))
    elif variant == 2:
        plot.push()
        plot.advance(plot.times.ttl_ms)
    plot.collect(SECOND)
    plot.push()
    plot.do(READER, "restore")


def clock_jumps(plot: Plot) -> None:
    """The clock of the store goes far ahead for a while, and is put right (C5, D2).

    Where the store deletes by itself its clock is a service's, which does not jump.
    """
    ahead_ms = plot.rng.choice((plot.times.margin_ms, plot.times.ttl_ms // 2, 2 * plot.times.ttl_ms))
    if plot.is_enforced:
        ahead_ms = 0
    # A collector whose own clock is right can see it (S2).
    plot.steps.append(Control(process=COLLECTOR, what="skew"))
    plot.do(WRITER, "backup")
    plot.happen("step", ms=ahead_ms)
    plot.collect()
    plot.happen("step", ms=-ahead_ms)
    plot.do(WRITER, "commit")
    plot.push()
    plot.collect()


def rotten(plot: Plot) -> None:
    """A byte of any one object outside `blobs/` is another one (D9)."""
    plot.push(OTHER)
    plot.push(scope=1)
    plot.do(KEEPER, plot.rng.choice(("name", "fork", "restore", "backup")), choice=1)
    prefix = plot.rng.choice(("log/", "log/", "indexes/", "pins/", "names/", "audit/", ""))
    plot.happen("flip", prefix=prefix, choice=plot.rng.randrange(1 << 20))
    verbs: tuple[Verb, ...] = ("push", "collect", "restore", "rewind", "fork", "heal", "push")
    for verb in plot.rng.sample(verbs, 3):
        process = plot.rng.randrange(PROCESSES_IN_USE)
        plot.do(process, verb, scope=plot.rng.randrange(2), choice=plot.rng.randrange(2))
    plot.collect()
    plot.push(scope=1)


def stale_for_one(plot: Plot) -> None:
    """One process goes by lists that are a minute old, beside a collector whose lists are fresh (D4, D5)."""
    plot.stale = (plot.rng.choice((WRITER, KEEPER, READER)),)
    (stale,) = plot.stale
    verbs: tuple[Verb, ...] = ("push", "rewind", "fork", "name", "restore", "collect", "push", "restore")
    plot.push(OTHER)
    if plot.one_in(2):
        plot.advance(plot.times.ttl_ms)
    # It lists everything shortly before.
    plot.do(stale, plot.rng.choice(("push", "restore")), choice=1)
    operation, prefix = plot.rng.choice((("delete", ""), ("put_if_absent", "log/"), ("list_page", "log/")))
    then = [Do(process=stale, verb=plot.rng.choice(verbs), choice=plot.rng.randrange(3)) for _ in range(2)]
    plot.trap(COLLECTOR, *then, operation=operation, prefix=prefix, after=plot.one_in(2))
    plot.collect()
    for _ in range(2):
        plot.do(stale, plot.rng.choice(verbs), choice=plot.rng.randrange(3))
    plot.push(OTHER)
    plot.push(stale)
