"""A restore drill for people, and the forecast from one (design 0009, F1 to F5). Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.drill.record import RestoreDrill
from engine.text import table
from index.text import count, human_bytes, human_duration

SIZES: Final = (1, 2, 10)
EXECUTORS: Final = (1, 4, 16)
# From here on without a fraction; from here on in milliseconds; and in whole ones.
_WHOLE_S: Final = 100
_SECOND_S: Final = 1
_WHOLE_MS_S: Final = 0.01


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast; both times are in seconds."""

    # Multiple of the bytes, files and requests of the drill, in the same stores.
    size: int
    executors: int
    # Each executor gets from the store what this machine got.
    best_s: float
    # All executors together get no more bytes per second from it than this machine got.
    worst_s: float


def forecast(
    drill: RestoreDrill, *, sizes: Sequence[int] = SIZES, executors: Sequence[int] = EXECUTORS
) -> tuple[Forecast, ...]:
    """Forecast restores of the same state, at multiples of its size and over several machines with a disk of their own.

    Returns:
        For each size, each number of executors. For 1 and 1 it is the measurement.
    """
    # A store is restored by one executor: none has less to do than the largest.
    largest = min(1.0, drill.largest_store_bytes / max(1, drill.size_bytes))

    def at(size: int, number: int) -> Forecast:
        share = size * max(1 / number, largest)
        opened_s = drill.find_s + share * drill.open_s
        best_s, worst_s = opened_s + share * drill.restore_s, opened_s + size * drill.restore_s
        return Forecast(size=size, executors=number, best_s=best_s, worst_s=worst_s)

    return tuple(at(size, number) for size in sizes for number in executors)


def format_phase(seconds: float) -> str:
    """Format a measured time; of a short one the digits that matter."""
    if seconds >= _WHOLE_S:
        return human_duration(round(seconds * 1000))
    if seconds >= _SECOND_S:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= _WHOLE_MS_S or not seconds else f"{seconds * 1000:.2f} ms"


def format_slo(drill: RestoreDrill) -> str:
    """Return whether the drill met its SLO; empty if it had none."""
    if drill.slo_ms is None:
        return ""
    return f"SLO {human_duration(drill.slo_ms)}: {'MISSED' if drill.is_slow else 'met'}"


def summary_line(drill: RestoreDrill) -> str:
    """Format the drill as one line, for a log."""
    restored = f"restored {human_bytes(drill.size_bytes)} in {format_phase(drill.total_s)}"
    return "; ".join(line for line in (restored, _headline(drill), format_slo(drill)) if line)


def summary_lines(drill: RestoreDrill) -> list[str]:
    """Format the drill with its phases and the forecast."""
    measured = drill.measured
    phases = [("find the commit", drill.find_s), ("restore", drill.restore_s)]
    if measured.opened_count:
        phases.append((f"open RocksDB ({measured.opened_count:,})", drill.open_s))
    phases.append(("total", drill.total_s))
    rows = [
        (
            f"{size}x, {human_bytes(size * drill.size_bytes)}",
            *(_format_range(found) for found in forecast(drill, sizes=(size,))),
        )
        for size in SIZES
    ]
    slo = format_slo(drill)
    return [
        _headline(drill),
        f"fetched {human_bytes(measured.bytes_fetched)} in {count(measured.requests_count, 'request')}",
        "",
        *table(("phase", "time"), [(name, format_phase(s)) for name, s in phases], right=("time",)),
        *([slo] if slo else []),
        "",
        *table(("forecast", *(count(number, "executor") for number in EXECUTORS)), rows),
        "From a store that gives each executor what it gave this machine, to one that gives all of them that together.",
    ]


def _headline(drill: RestoreDrill) -> str:
    what = f"{count(drill.stores_count, 'store')}, {human_bytes(drill.size_bytes)}"
    where = "to disk" if drill.to_disk else "to nowhere: read and hashed, nothing written or opened"
    files = count(drill.files_count, "file")
    return f"commit {drill.commit_number}, version {drill.version}: {what} in {files}, {where}"


def _format_range(found: Forecast) -> str:
    best, worst = format_phase(found.best_s), format_phase(found.worst_s)
    return best if best == worst else f"{best} to {worst}"
