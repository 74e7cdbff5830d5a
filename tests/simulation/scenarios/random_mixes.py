"""Themes that lead to no single moment: names, crashes, bad lines, long pauses, anything; and the life of scopes."""

import msgspec

from tests.simulation.scenarios.builder import (
    BOUNDARY,
    COLLECTOR,
    HOUR_MS,
    KEEPER,
    OTHER,
    PROCESSES_IN_USE,
    READER,
    RECORD,
    SECOND,
    WRITER,
    Plot,
)
from tests.simulation.scenarios.schedule import Advance, Control, Do, Step, Trap, Verb


def names(plot: Plot) -> None:
    """Two who name at once, releases, and collections between them (K2, D5)."""
    for process in (KEEPER, READER):
        plot.do(process, "name", choice=plot.rng.randrange(3), wait=plot.one_in(2))
    plot.settle()
    if plot.one_in(2):
        effect = plot.pick("outage", "stop", "none")
        plot.trap(
            KEEPER, *plot.overtaking(commits=1), operation="put", prefix="names/", effect=effect, after=plot.one_in(2)
        )
    if plot.one_in(2):
        plot.do(KEEPER, "release", wait=False)
        plot.collect(wait=plot.one_in(2))
    else:
        then = (*plot.overtaking(commits=1), Do(process=READER, verb="collect"))
        operation = plot.rng.choice(("put", "get", "list_page"))
        plot.trap(KEEPER, *then, operation=operation, prefix="names/", after=plot.one_in(2))
        plot.do(KEEPER, "release")
    plot.do(READER, plot.rng.choice(("name", "release")), choice=plot.rng.randrange(3))
    plot.wake(KEEPER)
    plot.settle()
    if plot.one_in(2):
        plot.advance(2 * HOUR_MS)
        plot.collect()


def used_by_name(plot: Plot) -> None:
    """What a name stands for is rewound to, forked, renamed or restored while it is released and collected (D5)."""
    for _ in range(2):
        plot.push()
    if not plot.one_in(4):
        plot.advance(plot.times.ttl_ms)
    choice = plot.rng.randrange(1, 3)
    verb: Verb = plot.rng.choice(("rewind", "rewind", "fork", "name", "restore"))
    give = Do(process=KEEPER, verb="name", choice=choice)
    use = Do(process=READER, verb=verb, choice=choice, by_name=True)
    release = Do(process=SECOND, verb="release", choice=choice)
    operation, prefix = ("get", "blobs/") if verb == "restore" else ("put_if_absent", "")
    hold = Trap(process=READER, operation=operation, prefix=prefix, phase="before", effect="stop")
    variant = plot.rng.randrange(4)
    if variant < 2:
        # Given when the roots were read for the first time, used when the pins were for the second, released then.
        then: list[Step] = [hold, use, release]
        if plot.one_in(3):
            # Once the lease of the name itself is over, a collection may take what is released.
            then = [Advance(ms=HOUR_MS + plot.rng.randrange(HOUR_MS)), *then, plot.collection(OTHER)]
        again = Trap(process=COLLECTOR, operation="list_page", prefix="names/", phase="before", then=tuple(then))
        plot.trap(COLLECTOR, give, again, operation="put_if_absent", prefix="log/", suffix=BOUNDARY, after=False)
        plot.collect()
    elif variant == 2:
        plot.steps.append(give)
        if plot.one_in(2):
            plot.collect()
        operation, prefix = plot.rng.choice((("put", "pins/"), ("list_page", "names/"), ("put_if_absent", "")))
        effect = plot.pick("none", "none", "stop")
        then = [release, *plot.overtaking(commits=1)]
        plot.trap(READER, *then, operation=operation, prefix=prefix, after=plot.one_in(2), effect=effect)
        plot.steps.append(use)
        if plot.one_in(3):
            plot.advance(plot.rng.randrange(2 * HOUR_MS))
            plot.collect(SECOND)
    else:
        operation, prefix = plot.rng.choice(
            (("list_page", "pins/"), ("list_page", "names/"), ("list_page", "log/"), ("put_if_absent", "log/"))
        )
        then = [give, *([hold] if plot.one_in(2) else []), use, release]
        skip = plot.rng.randrange(2)
        plot.trap(COLLECTOR, *then, operation=operation, prefix=prefix, after=plot.one_in(2), skip=skip)
        plot.collect()
    plot.wake(READER)
    plot.settle()
    plot.do(READER, "restore", choice=plot.rng.randrange(2))
    plot.collect()


def closed_by_another(plot: Plot) -> None:
    """What a collection did not know is pinned between its last lists of pins and logs, and closed by another (D4)."""
    for _ in range(2):
        plot.push()
    plot.advance(plot.times.ttl_ms)
    verb: Verb = plot.rng.choice(("fork", "fork", "name"))
    hold = Trap(process=READER, operation="put_if_absent", phase="before", effect="stop")
    use = Do(process=READER, verb=verb, choice=0)
    close: list[Step] = [Do(process=SECOND, verb="forget", choice=1)]
    if plot.one_in(3):
        close = [Do(process=OTHER, verb="push"), plot.collection(SECOND)]
    prefix = plot.rng.choice(("names/", "names/", "log/"))
    again = Trap(process=COLLECTOR, operation="list_page", prefix=prefix, phase="before", then=(hold, use, *close))
    rewind = Do(process=WRITER, verb="rewind", choice=1)
    plot.trap(COLLECTOR, rewind, again, operation="put_if_absent", prefix="log/", suffix=BOUNDARY, after=False)
    plot.collect()
    plot.wake(READER)
    plot.settle()
    plot.push()
    plot.collect()


def crash(plot: Plot) -> None:
    """Somebody dies in the middle of something."""
    verb: Verb = plot.rng.choice(
        ("push", "push", "collect", "collect", "collect", "restore", "restore", "rewind", "fork", "name")
    )
    process = plot.rng.choice((WRITER, OTHER, COLLECTOR))
    operation = plot.rng.choice(("", "", "put_if_absent", "put", "remove_ttl", "get", "list_page"))
    if verb == "collect":
        operation = plot.rng.choice(("", "put_if_absent", "delete", "list_page"))
    plot.trap(process, operation=operation, effect="kill", after=plot.one_in(2), skip=plot.rng.randrange(5))
    plot.do(process, verb, choice=1)
    plot.push(OTHER)


def conflict(plot: Plot) -> None:
    """A create beside another one of the same key is answered with 409."""
    plot.trap(WRITER, effect="conflict", after=False, operation="put_if_absent", prefix="log/", suffix=RECORD)
    plot.push(WRITER, wait=False)
    plot.push(OTHER, wait=plot.one_in(2))
    plot.settle()


def bad_line(plot: Plot) -> None:
    """Requests hang, are refused, cut short, or altered on the way."""
    for process in plot.rng.sample(range(PROCESSES_IN_USE), 3):
        effect = plot.pick("hang", "never", "refused", "cut", "flip", "late", "lost")
        operation = "get" if effect in {"cut", "flip"} else plot.rng.choice(("", "put_if_absent", "list_page", "get"))
        plot.trap(process, operation=operation, effect=effect, after=False, skip=plot.rng.randrange(4))
    plot.push()
    plot.do(READER, "restore", choice=plot.rng.randrange(2))
    plot.collect()
    plot.push(OTHER)


def long_pause(plot: Plot) -> None:
    """Nobody does anything for longer than a TTL, between a backup and its commit (C5, D2)."""
    plot.do(WRITER, "backup")
    ttl_ms = plot.times.ttl_ms
    plot.advance(plot.rng.choice((ttl_ms // 2, ttl_ms - plot.times.margin_ms, ttl_ms, 2 * ttl_ms)))
    plot.collect()
    plot.do(WRITER, "commit")
    plot.push()


def anything(plot: Plot) -> None:
    """Any mix, at random."""
    verbs: tuple[Verb, ...] = ("push", "push", "push", "collect", "restore", "name", "release", "rewind", "fork")
    for _ in range(plot.rng.randrange(4, 9)):
        plot.do(
            plot.rng.randrange(PROCESSES_IN_USE),
            plot.rng.choice(verbs),
            choice=plot.rng.randrange(4),
            keep_last=plot.rng.randrange(1, 3),
            wait=plot.one_in(3),
            target=plot.rng.randrange(2),
        )
        if plot.one_in(5):
            plot.advance(plot.rng.randrange(plot.times.ttl_ms))
        if plot.one_in(6):
            process = plot.rng.randrange(PROCESSES_IN_USE)
            plot.steps.append(Control(process=process, what=plot.rng.choice(("kill", "stop", "wake"))))
    for process in range(PROCESSES_IN_USE):
        plot.wake(process)
    plot.settle()


def forgetting(plot: Plot) -> None:
    """A scope is forgotten while others write to it, and begins again (D8)."""
    forget = Do(process=KEEPER, verb="forget", choice=plot.rng.randrange(2))
    again = Do(process=OTHER, verb="push")
    plot.push()
    variant = plot.rng.randrange(5)
    if variant < 3:
        # A writer sleeps, or waits, while the scope is forgotten, and before or after its record is there.
        then: list[Step] = [forget]
        if plot.one_in(2):
            then += [again, again]
        if plot.one_in(2):
            then.append(plot.collection())
        after = plot.one_in(3)
        effect = plot.pick("stop", "stop", "none")
        plot.trap(WRITER, *then, after=after, effect=effect, operation="put_if_absent", prefix="log/", suffix=RECORD)
        plot.push()
    elif variant == 3:
        effect = plot.pick("stop", "kill", "outage", "lost", "adrift", "none")
        after = effect != "adrift" and plot.one_in(2)
        then = [again, Do(process=WRITER, verb="push")] if effect == "none" or plot.one_in(2) else []
        plot.trap(KEEPER, *then, after=after, effect=effect, operation="put_if_absent", prefix="log/", suffix=BOUNDARY)
        plot.steps.append(forget)
        plot.push()
        plot.steps.append(forget)
        plot.land()
    else:
        plot.do(KEEPER, "name", choice=plot.rng.randrange(2))
        plot.steps.append(forget)
    plot.settle()
    if plot.one_in(3):
        plot.collect()
    plot.wake(WRITER)
    plot.wake(KEEPER)
    plot.settle()
    # The first of each may find that what it remembers is closed.
    plot.push(OTHER)
    plot.push()
    plot.push(plot.rng.choice((WRITER, OTHER)))
    if plot.one_in(2):
        plot.collect()


def dropping(plot: Plot) -> None:
    """A store is dropped while others write (F3)."""
    for store in range(2):
        plot.do(WRITER, "push", store=store)
    if plot.one_in(2):
        effect = plot.pick("none", "stop", "lost", "outage", "kill")
        then = plot.overtaking(commits=plot.rng.randrange(2))
        after = plot.one_in(2)
        plot.trap(WRITER, *then, after=after, effect=effect, operation="put_if_absent", prefix="log/", suffix=RECORD)
    plot.do(WRITER, "drop", choice=plot.rng.randrange(2), wait=plot.one_in(2))
    if plot.one_in(2):
        plot.do(OTHER, plot.rng.choice(("drop", "push")))
    plot.wake(WRITER)
    plot.settle()
    plot.do(WRITER, "commit")
    if plot.one_in(2):
        plot.do(KEEPER, plot.rng.choice(("rewind", "fork", "name")), choice=1)
    plot.collect()
    plot.do(OTHER, "drop")
    plot.push()


def chain(plot: Plot) -> None:
    """Differences to differences, whose bases collections take away where they can (P2)."""
    plot.deltas = True
    for _ in range(plot.rng.randrange(3, 6)):
        plot.push(plot.rng.choice((WRITER, WRITER, OTHER)))
        if plot.one_in(4):
            plot.collect()
    if plot.one_in(2):
        then = plot.overtaking(commits=1)
        plot.trap(READER, *then, operation="get", prefix="indexes/", after=plot.one_in(2), skip=plot.rng.randrange(3))
        plot.do(READER, "restore", choice=plot.rng.randrange(3))
    else:
        plot.do(KEEPER, plot.rng.choice(("rewind", "fork", "name")), choice=plot.rng.randrange(3))
        plot.collect()


def commit_again(plot: Plot) -> None:
    """A result is committed a second time, once the scope holds again what it was made against (C2, D2)."""
    # Of a scope that is empty at first, or not.
    scope, variant = plot.rng.randrange(2), plot.rng.randrange(3)
    if variant == 0:
        plot.push(scope=scope)
        plot.do(WRITER, "push", scope=scope)
        plot.do(KEEPER, "rewind", scope=scope, choice=1)
    elif variant == 1:
        plot.do(WRITER, "push", scope=scope, store=1)
        plot.do(WRITER, "drop", scope=scope)
    else:
        plot.do(WRITER, "push", scope=scope)
        plot.do(KEEPER, "forget", scope=scope, choice=1)
    again = Do(process=WRITER, verb="again", scope=scope)
    if plot.one_in(4):
        plot.advance(plot.rng.randrange(plot.times.ttl_ms))
    if plot.one_in(2):
        operation, prefix = plot.rng.choice((("delete", "indexes/"), ("delete", "log/"), ("put_if_absent", "log/")))
        plot.trap(COLLECTOR, again, prefix=prefix, operation=operation, after=plot.one_in(2))
    plot.collect()
    plot.steps.append(again)
    if plot.one_in(2):
        plot.advance(plot.rng.randrange(plot.times.ttl_ms))
    plot.collect()
    plot.do(READER, "restore", scope=scope)
    plot.push(scope=scope)


def following(plot: Plot) -> None:
    """A directory follows a job beside commits, collections and rewinds, and is promoted (design 0011)."""
    scope = plot.rng.randrange(2)
    if scope:
        plot.push(scope=scope)
    plot.do(READER, "follow", scope=scope)
    for _ in range(plot.rng.randrange(2, 4)):
        plot.do(plot.rng.choice((WRITER, OTHER)), "push", scope=scope)
        if plot.one_in(3):
            plot.do(KEEPER, "rewind", scope=scope, choice=1)
        if plot.one_in(2):
            plot.advance(plot.times.ttl_ms)
        follower = plot.rng.choice((READER, READER, SECOND))
        operation, prefix = plot.rng.choice(
            (("list_page", "log/"), ("put", "pins/"), ("get", "indexes/"), ("get", "blobs/"), ("get", "blobs/"))
        )
        effect = plot.pick("none", "none", "none", "none", "stop", "kill", "kill", "lost", "outage", "flip")
        effect = effect if effect != "flip" or operation == "get" else "none"
        then: list[Step] = [Do(process=OTHER, verb="push", scope=scope) for _ in range(plot.rng.randrange(3))]
        then.append(plot.collection())
        if plot.one_in(3):
            then.insert(0, Do(process=KEEPER, verb="promote", scope=scope, choice=1))
        plot.trap(follower, *then, operation=operation, prefix=prefix, after=plot.one_in(2), effect=effect)
        plot.do(follower, "follow", scope=scope, wait=plot.one_in(2))
        if effect == "stop" and plot.one_in(2):
            # Longer than a pin lasts.
            plot.advance(3 * HOUR_MS)
            plot.collect()
        plot.wake(follower)
        plot.settle()
    promoting = plot.rng.sample((READER, SECOND, KEEPER), 2)
    for process in promoting:
        plot.do(process, "promote", scope=scope, choice=plot.rng.randrange(2), wait=plot.one_in(2))
    plot.settle()
    plot.push(scope=scope)
    plot.do(READER, "follow", scope=scope)


def resuming(plot: Plot) -> None:
    """A backup that was broken off goes on in another process of the machine (design 0002, U1 to U6)."""
    plot.journals = True
    scope = plot.rng.randrange(2)
    if scope:
        plot.push(scope=scope)
    for _ in range(plot.rng.randrange(2, 5)):
        # Below it are the trees of backups that have one of their own.
        tree = plot.rng.randrange(1_000_000, 2_000_000)
        first, second = plot.rng.choice(((WRITER, WRITER), (WRITER, SECOND), (SECOND, WRITER)))
        operation, prefix = plot.rng.choice(
            (
                ("put_if_absent", "blobs/"),
                ("put_if_absent", "blobs/"),
                ("put_if_absent", "blobs/"),
                ("put_if_absent", "indexes/"),
                ("put_if_absent", "log/"),
                ("remove_ttl", "blobs/"),
            )
        )
        effect = plot.pick("kill", "kill", "kill", "kill", "stop", "outage", "adrift")
        skip = plot.rng.randrange(6) if prefix == "blobs/" else 0
        plot.trap(first, operation=operation, prefix=prefix, after=plot.one_in(2), effect=effect, skip=skip)
        plot.do(first, "push", scope=scope, tree=tree, wait=effect != "stop")
        if plot.one_in(2):
            # Past half of the lease, the lease, or the TTL.
            plot.advance(plot.rng.randrange(plot.times.ttl_ms))
        if plot.one_in(2):
            plot.collect(wait=plot.one_in(2))
        if plot.one_in(4):
            plot.do(KEEPER, plot.rng.choice(("rewind", "forget", "push")), scope=scope, choice=1, wait=plot.one_in(2))
        if plot.one_in(3):
            plot.trap(second, plot.collection(), operation="stat", prefix="blobs/", after=plot.one_in(2))
        plot.do(second, "push", scope=scope, tree=tree, wait=plot.one_in(2))
        if plot.one_in(3):
            plot.advance(plot.rng.randrange(plot.times.ttl_ms))
        plot.wake(first)
        plot.settle()
        if plot.one_in(2):
            plot.do(first, "commit", scope=scope)
    plot.land()
    plot.collect()
    plot.push(scope=scope)


def one_id(plot: Plot) -> None:
    """Two snapshots have one unique id; what counts is which index a result was made against (C2, C3)."""
    plot.push(label=1)
    if plot.one_in(2):
        # On one of them a result is made, and committed when the other one is there.
        plot.do(WRITER, "push", label=2)
        plot.do(OTHER, "backup", label=3)
        plot.do(WRITER, "rewind", choice=1)
        plot.do(WRITER, "push", label=2)
        plot.collect()
        # By a driver that has loaded nothing before.
        plot.do(OTHER, "hand", other=SECOND)
        plot.do(SECOND, "commit")
    else:
        # The answer to the first one is lost, and a second one is made.
        effect = plot.pick("outage", "outage", "adrift")
        plot.trap(
            WRITER, effect=effect, after=effect == "outage", operation="put_if_absent", prefix="log/", suffix=RECORD
        )
        plot.do(WRITER, "push", label=2)
        plot.do(WRITER, "push", label=2)
        plot.land()
        plot.do(WRITER, "push", label=2)
    plot.do(READER, "restore")
    plot.collect()


def rescaled(plot: Plot) -> None:
    """A job gets another number of tasks beside commits, collections, rewinds and other rescales (0010, T5)."""
    for store in range(2):
        plot.do(WRITER, "push", store=store)
    plot.do(WRITER, "backup", store=plot.rng.randrange(2))
    if plot.one_in(2):
        plot.advance(plot.times.ttl_ms)
    rescale = Do(process=KEEPER, verb="rescale", choice=plot.rng.randrange(2))
    beside: list[Step] = [
        Do(process=OTHER, verb="push", store=plot.rng.randrange(2)),
        Do(process=SECOND, verb="rescale", choice=1),
        Do(process=OTHER, verb="rewind", choice=1),
        Do(process=OTHER, verb="drop"),
    ]
    then = plot.rng.sample(beside, plot.rng.randrange(3))
    if plot.one_in(2):
        then.append(plot.collection())
    variant = plot.rng.randrange(4)
    if variant < 2:
        effect = plot.pick("none", "none", "stop", "kill", "lost", "outage", "adrift")
        prefix = plot.rng.choice(("log/", "log/", "indexes/", "blobs/"))
        after = effect != "adrift" and plot.one_in(2)
        plot.trap(KEEPER, *then, operation="put_if_absent", prefix=prefix, after=after, effect=effect)
        plot.steps.append(rescale)
    elif variant == 2:
        operation, prefix = plot.rng.choice((("delete", "indexes/"), ("delete", ""), ("put_if_absent", "log/")))
        plot.trap(COLLECTOR, rescale, *then, operation=operation, prefix=prefix, after=plot.one_in(2))
        plot.collect()
    else:
        plot.steps += [msgspec.structs.replace(step, wait=False) for step in (rescale, *then) if isinstance(step, Do)]
    plot.wake(KEEPER)
    plot.land()
    plot.settle()
    # Of a rescale that had no answer; of a result from before.
    plot.do(KEEPER, "commit")
    plot.do(WRITER, "commit")
    plot.push(plot.rng.choice((WRITER, OTHER)))
    if plot.one_in(2):
        plot.do(KEEPER, plot.rng.choice(("rewind", "fork", "name", "rescale")), choice=plot.rng.randrange(3))
    plot.collect()
    plot.do(READER, "restore", choice=plot.rng.randrange(2))
