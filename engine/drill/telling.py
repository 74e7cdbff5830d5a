"""A restore drill in words: the same on a terminal and in a report."""

from collections.abc import Sequence
from typing import Final

from engine.drill.forecast import EXECUTORS, SIZES, Forecast
from engine.drill.model import Rehearsal
from index.text import count, human_bytes, human_duration

# From here on without a fraction; from here on in milliseconds; and in whole ones.
_WHOLE_S: Final = 100
_SECOND_S: Final = 1
_WHOLE_MS_S: Final = 0.01

ASSUMPTIONS: Final = (
    "at best: the store gives each executor what it gave this machine; at worst: all of them together no more bytes "
    "per second. A store that many share is between the two. Executors are machines like this one, each with a disk."
)


def seconds(value: float) -> str:
    """A measured time; of a short one the digits that matter."""
    if value >= _WHOLE_S:
        return human_duration(round(value * 1000))
    if value >= _SECOND_S:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= _WHOLE_MS_S or not value else f"{value * 1000:.2f} ms"


def headline(rehearsal: Rehearsal) -> str:
    """Of what and how much."""
    what = f"{count(rehearsal.stores_count, 'store')}, {human_bytes(rehearsal.size_bytes)}"
    where = "to disk" if rehearsal.to_disk else "to nowhere: read and hashed, nothing written or opened"
    files = count(rehearsal.files_count, "file")
    return f"commit {rehearsal.commit_number}, version {rehearsal.version}: {what} in {files}, {where}"


def phases(rehearsal: Rehearsal) -> list[tuple[str, float]]:
    """What came after what, and how long it took."""
    told = [("find the commit", rehearsal.find_s), ("restore", rehearsal.restore_s)]
    if rehearsal.measured.opened_count:
        told.append((f"open RocksDB ({rehearsal.measured.opened_count:,})", rehearsal.open_s))
    return told


def forecast_rows(rehearsal: Rehearsal, forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """A line for each size: the size, then for each number of executors best and worst."""
    by_place = {(f.size, f.executors): f for f in forecasts}
    return [
        (
            f"{size}x, {human_bytes(size * rehearsal.size_bytes)}",
            *(_range(by_place[size, executors]) for executors in EXECUTORS),
        )
        for size in SIZES
    ]


def slo_line(rehearsal: Rehearsal) -> str:
    """Whether it was fast enough; empty if nobody said what is."""
    if rehearsal.slo_ms is None:
        return ""
    return f"SLO {human_duration(rehearsal.slo_ms)}: {'MISSED' if rehearsal.is_slow else 'met'}"


def summary_line(rehearsal: Rehearsal) -> str:
    """All of it in one line, for a log."""
    restored = f"restored {human_bytes(rehearsal.size_bytes)} in {seconds(rehearsal.total_s)}"
    return "; ".join(line for line in (restored, headline(rehearsal), slo_line(rehearsal)) if line)


def _range(forecast: Forecast) -> str:
    best, worst = seconds(forecast.best_s), seconds(forecast.worst_s)
    return best if best == worst else f"{best} to {worst}"
