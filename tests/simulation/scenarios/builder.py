"""Build a schedule step by step: the operations that random schedules are written in."""

from random import Random
from typing import Any, Final, Literal

from blobstore.s3 import bucket_rules as s3_bucket
from tests.simulation.scenarios.schedule import (
    Advance,
    Control,
    Do,
    Effect,
    Happen,
    Land,
    Settle,
    Step,
    Times,
    Trap,
    Verb,
)

SECOND_MS: Final = 1000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
# What the repositories of simulations are made with; the second pair where the store deletes by itself (T3).
TTL_MS: Final = 4 * HOUR_MS
MARGIN_MS: Final = 20 * MINUTE_MS
ENFORCED_TTL_MS: Final = 7 * DAY_MS
USUAL: Final = Times(ttl_ms=TTL_MS, margin_ms=MARGIN_MS, period_ms=TTL_MS)
ENFORCED: Final = Times(ttl_ms=ENFORCED_TTL_MS, margin_ms=MARGIN_MS, period_ms=DAY_MS)

# Who plays what; any process can do anything.
WRITER, OTHER, READER, KEEPER, COLLECTOR, SECOND = range(6)
PROCESSES_IN_USE: Final = 6
# As many as `tests.simulation.simulate` knows.
BEGINNINGS_COUNT: Final = 5
# Two texts that distinguish the objects of a log.
RECORD: Final = ".commit"
BOUNDARY: Final = ".boundary"


def backstop_ms(times: Times) -> int:
    """Return after how long a store deletes by itself what carries a TTL: no sooner than T3 lets it."""
    days = s3_bucket.backstop_days(ttl_ms=times.ttl_ms, margin_ms=times.margin_ms, collection_period_ms=times.period_ms)
    return days * DAY_MS


class Plot:
    """A schedule in the making."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"schedule {seed}")
        self.steps: list[Step] = []
        self.times = USUAL
        # The store deletes by itself what is old enough.
        self.is_enforced = False
        # Whose lists may be old.
        self.stale: tuple[int, ...] = ()
        # Indexes are stored as differences wherever there is a base.
        self.deltas = False
        # All processes are of one machine, with journals of what was uploaded.
        self.journals = False

    def one_in(self, n: int) -> bool:
        return self.rng.randrange(n) == 0

    def pick(self, *those: Effect) -> Effect:
        return self.rng.choice(those)

    def do(self, process: int, verb: Verb, *, wait: bool = True, by_name: bool = False, **how: int) -> None:
        self.steps.append(Do(process=process, verb=verb, wait=wait, by_name=by_name, **how))

    def push(self, process: int = WRITER, *, wait: bool = True, scope: int = 0, label: int = 0) -> None:
        self.do(process, "push", wait=wait, scope=scope, store=int(self.one_in(4)), label=label)

    def collect(self, process: int = COLLECTOR, *, wait: bool = True) -> None:
        self.steps.append(self.collection(process, wait=wait))

    def collection(self, process: int = COLLECTOR, *, wait: bool = True) -> Do:
        if self.one_in(6):
            since_ms = self.rng.randrange(5 * MINUTE_MS)
            return Do(process=process, verb="collect", keep_last=0, since_ms=since_ms, wait=wait)
        return Do(process=process, verb="collect", keep_last=self.rng.choice((1, 1, 1, 2)), wait=wait)

    def trap(
        self,
        process: int,
        *then: Step,
        operation: str,
        prefix: str = "",
        suffix: str = "",
        after: bool = True,
        effect: Effect = "none",
        skip: int = 0,
    ) -> None:
        self.steps.append(
            Trap(
                process=process,
                operation=operation,
                prefix=prefix,
                suffix=suffix,
                phase="after" if after else "before",
                effect=effect,
                skip=skip,
                then=then,
            )
        )

    def overtaking(self, *, commits: int) -> tuple[Step, ...]:
        """What others do meanwhile: commits by another writer, then a collection that keeps little."""
        pushes = [Do(process=OTHER, verb="push", store=int(self.one_in(4))) for _ in range(commits)]
        return (*pushes, self.collection())

    def advance(self, ms: int) -> None:
        self.steps.append(Advance(ms=ms))

    def wake(self, process: int) -> None:
        self.steps.append(Control(process=process, what="wake"))

    def kill(self, process: int) -> None:
        self.steps.append(Control(process=process, what="kill"))

    def settle(self) -> None:
        self.steps.append(Settle())

    def land(self) -> None:
        self.steps.append(Land())

    def happen(self, what: Literal["fill", "empty", "step", "copy", "flip"], **how: Any) -> None:
        self.steps.append(Happen(what=what, **how))
