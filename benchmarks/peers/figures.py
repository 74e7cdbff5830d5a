"""Samples, and what is reported of them: medians, quartiles, ratios pair by pair, and when two are equal."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

Key = Callable[["Sample"], float]
KIB = 1024
MIB = 1024 * KIB


class Panel(NamedTuple):
    """One work: the seconds of each, and in words how many times as long as ours each rival took."""

    label: str
    took_s: Mapping[str, float]
    times: Mapping[str, str]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one contestant in one round."""

    step: str
    contestant: str
    round: int
    # The whole process, its start included; of a warm process, the work alone.
    wall_s: float
    user_s: float
    system_s: float
    peak_bytes: int
    # Of the work's payload: what the tree has, or what was to be moved.
    size_bytes: int
    # The `sync` that followed.
    sync_s: float = 0.0
    # Of that, starting the process and opening what it works on: as the client says itself, or as long as the same
    # contestant took in the same round with nothing to do.
    open_s: float = 0.0
    open_cpu_s: float = 0.0
    open_peak_bytes: int = 0
    # Of the directory at work.
    files_count: int = 0
    # Why this sample does not count; empty if it does.
    error: str = ""

    @property
    def work_s(self) -> float:
        """Wall time without starting and opening."""
        return max(self.wall_s - self.open_s, 1e-6)

    @property
    def durable_s(self) -> float:
        """`work_s` and the sync after it."""
        return self.work_s + self.sync_s

    @property
    def cpu_s(self) -> float:
        """The client's CPU seconds without starting and opening."""
        return max(self.user_s + self.system_s - self.open_cpu_s, 0.0)

    @property
    def cpu_s_per_gb(self) -> float:
        """The client's CPU seconds for each 10^9 bytes."""
        return self.cpu_s / (self.size_bytes / 1e9) if self.size_bytes else 0.0


class Quartiles(NamedTuple):
    """The median, and the middle half around it."""

    low: float
    median: float
    high: float

    def overlaps(self, other: "Quartiles") -> bool:
        """Whether the middle halves have a value in common: then the two are called equal."""
        return self.low <= other.high and other.low <= self.high


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least one value; the values themselves are the ends of what is possible."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of the values, by the nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class Ratio(NamedTuple):
    """How many times longer a peer took than we did, round by round."""

    quartiles: Quartiles
    equal: bool


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], key: Key) -> Ratio | None:
    """A peer's figure by ours, in pairs of one round each; None where there is no round that both ended well."""
    mine = {sample.round: key(sample) for sample in ours if not sample.error}
    pairs = [(mine[s.round], key(s)) for s in theirs if not s.error and mine.get(s.round)]
    if not pairs:
        return None
    ours_middle, theirs_middle = quartiles([a for a, _ in pairs]), quartiles([b for _, b in pairs])
    return Ratio(quartiles([b / a for a, b in pairs]), ours_middle.overlaps(theirs_middle))


class Memory(NamedTuple):
    """What one step held at its peak over idle, and what the rule of the project allows it."""

    over_idle_bytes: int
    allowed_bytes: int


def memory(samples: Sequence[Sample], in_flight_bytes: int) -> Memory | None:
    """Of all rounds, the highest peak over the lowest idle; None where idle was not looked at.

    The rule: 128 MiB, the bytes in flight, and 3 KiB for each file.
    """
    known = [sample for sample in good(samples) if sample.open_peak_bytes]
    if not known:
        return None
    over_idle_bytes = max(s.peak_bytes for s in known) - min(s.open_peak_bytes for s in known)
    return Memory(over_idle_bytes, 128 * MIB + in_flight_bytes + 3 * KIB * max(s.files_count for s in known))


def good(samples: Sequence[Sample]) -> list[Sample]:
    """Those that count."""
    return [sample for sample in samples if not sample.error]
