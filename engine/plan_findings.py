"""What the check of a collection's plan finds (design 0006, P6)."""

from collections import Counter
from enum import StrEnum
from typing import Final

import msgspec

from index.collect_plan import ReasonTotal
from index.keys import RunId
from index.plan_file import PlanSummary
from index.told import Told

# Keys of one kind that are named in the report.
TOLD_MAX: Final = 1000


class WrongKind(StrEnum):
    """Why a line should not stand in a plan."""

    REACHABLE = "something that is kept leads to it"
    UNEXPIRED = "it was younger than the TTL"
    SIZE = "its size is another"
    TIMES = "its creation time is another"
    REPEATED = "it is planned twice"


class WrongKey(msgspec.Struct, frozen=True, kw_only=True):
    """One planned key that is wrong."""

    key: str
    kind: WrongKind


class PlanCheck(Told, msgspec.Struct, frozen=True, kw_only=True):
    """What the check of a plan has found. Of keys the first `TOLD_MAX` are named, the counts are of all."""

    run: RunId
    planned_count: int
    planned_bytes: int
    listed_count: int
    indexes_count: int
    wrong_count: int
    wrong: tuple[WrongKey, ...]
    # Eligible when the plan was made, and not in it.
    missed_count: int
    missed_bytes: int
    missed: tuple[str, ...]
    # Where header or totals say something else than the store, the rules or the lines do.
    contradictions: tuple[str, ...]
    # Roots of the plan that are gone by now: what only they kept looks missed.
    changed: tuple[str, ...]
    # Neither wrong nor missed: came after the plan; planned and gone; planned, and kept by what came later.
    later_count: int
    gone_count: int
    rescued_count: int
    # Unreachable and younger than the TTL: rightly in no plan.
    waiting_count: int
    # Whether what is meant to be kept was given to compare with; else the plan's own retention is believed.
    retention_compared: bool
    # The sets did not fit into memory.
    on_disk: bool

    @property
    def is_right(self) -> bool:
        """Whether nothing in the plan is wrong."""
        return not self.wrong_count and not self.contradictions

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missed."""
        return not self.missed_count

    @property
    def is_over(self) -> bool:
        """Whether all that was planned is gone, by a collection since: then there is nothing left to compare."""
        return 0 < self.planned_count == self.gone_count


class Findings:
    """Counts, and the first few of what is counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[WrongKey] = []
        self.missed: list[str] = []
        self.missed_bytes = 0

    def add_wrong(self, key: str, kind: WrongKind) -> None:
        """A planned key that is wrong."""
        self.counts["wrong"] += 1
        if len(self.wrong) < TOLD_MAX:
            self.wrong.append(WrongKey(key=key, kind=kind))

    def add_missed(self, key: str, size_bytes: int) -> None:
        """An eligible key that the plan lacks."""
        self.counts["missed"] += 1
        self.missed_bytes += size_bytes
        if len(self.missed) < TOLD_MAX:
            self.missed.append(key)


def compare_totals(summary: PlanSummary, totals: tuple[ReasonTotal, ...]) -> list[str]:
    """Where the summary of a plan tells something else than its lines add up to, by reason and together."""
    lines_count = sum(total.count for total in totals)
    size_bytes = sum(total.size_bytes for total in totals)
    said = [("lines", summary.lines_count, lines_count), ("bytes", summary.size_bytes, size_bytes)]
    found = [f"the summary tells {told} {what}, and there are {there}" for what, told, there in said if told != there]
    found += [
        f"the summary has {told.count} lines and {told.size_bytes} bytes of {told.reason.value!r}: not so"
        for told in summary.totals
        if told not in totals and (told.count or told.size_bytes)
    ]
    if missing := {total.reason for total in totals} - {told.reason for told in summary.totals}:
        found.append(f"the summary tells nothing of {', '.join(sorted(repr(reason.value) for reason in missing))}")
    return found
