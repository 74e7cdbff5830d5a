"""A rehearsal in words: the same ones on a terminal and on the page."""

from collections.abc import Sequence
from typing import Final

from engine.rehearsal.forecast import EXECUTORS, SIZES, Forecast
from engine.rehearsal.model import Bound, Measured, Rehearsal
from engine.rehearsal.verdict import BUSY_SHARE_MAX, Verdict
from engine.words import count, human_bytes, human_duration

EXPLAINS_SHARE_MIN: Final = 0.5
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


def verdict_line(verdict: Verdict) -> str:
    """What bound it, and how sure that is."""
    phase = "opening" if verdict.bound is Bound.ROCKSDB_OPEN else "restore"
    line = f"bound by {verdict.bound.value}"
    if verdict.explained < EXPLAINS_SHARE_MIN:
        share = f"{verdict.explained:.0%}"
        line += f", but weakly: it explains {share} of the {phase}; the rest was waiting that no figure here shows"
    else:
        line += f": it explains {verdict.explained:.0%} of the {phase}"
    if verdict.near:
        line += f"; {' and '.join(bound.value for bound in verdict.near)} as good as equal"
    return line


def figures(rehearsal: Rehearsal, verdict: Verdict) -> list[tuple[Bound, float, str]]:
    """Each bound with the time that it alone would have taken, and the figures behind that; the longest first."""
    m = rehearsal.measured
    busy = "; the processor held the probe up: it is faster than that" if m.network_busy >= BUSY_SHARE_MAX else ""
    behind = {
        Bound.NETWORK: f"{human_bytes(m.bytes_fetched)}; {_rate(m.network_bytes_per_s)} bare; "
        f"of the requests' time {_waited(m):.0%} went by waiting{busy}",
        Bound.REQUESTS: f"{count(m.requests_count, 'GET')}, {rehearsal.in_flight_max} at once, "
        f"{seconds(m.round_trip_s)} each; in the restore first bytes after {seconds(m.first_byte_p50_s)} (p50), "
        f"{seconds(m.first_byte_p99_s)} (p99), {seconds(m.first_byte_max_s)} (slowest)",
        Bound.CPU: f"{seconds(m.cpu_s)} of {count(rehearsal.cores_count, 'processor')}, "
        f"{seconds(m.loop_cpu_s)} of them in the event loop",
        Bound.DISK: f"{human_bytes(m.bytes_written)} at {_rate(m.disk_bytes_per_s)}, and "
        f"{count(m.files_written, 'file')} at {seconds(m.disk_file_s)}, written and synced",
        Bound.ROCKSDB_OPEN: f"{count(m.opened_count, 'database')}, {rehearsal.stores_at_once} at once; "
        f"the slowest {seconds(m.open_slowest_s)}",
    }
    rows = [(bound, alone_s, behind[bound]) for bound, alone_s in verdict.alone_s.items()]
    return sorted(rows, key=lambda row: -row[1])


def load_line(rehearsal: Rehearsal) -> str:
    """Whether the machine was busy with other work; empty if it was not."""
    load, cores = rehearsal.measured.load, rehearsal.cores_count
    if load <= cores:
        return ""
    return (
        f"this machine was busy when it began (load {load:.1f} on {count(cores, 'processor')}): the times are too long"
    )


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


def summary_line(rehearsal: Rehearsal, verdict: Verdict) -> str:
    """All of it in one line, for a log."""
    parts = [
        f"restored {human_bytes(rehearsal.size_bytes)} in {seconds(rehearsal.total_s)}",
        f"bound by {verdict.bound.value}",
        headline(rehearsal),
    ]
    return "; ".join([*parts, *([line] if (line := slo_line(rehearsal)) else [])])


def _range(forecast: Forecast) -> str:
    best, worst = seconds(forecast.best_s), seconds(forecast.worst_s)
    return best if best == worst else f"{best} to {worst}"


def _waited(measured: Measured) -> float:
    waits_s = measured.answers_s + measured.bytes_s
    return waits_s / (waits_s + measured.taker_s) if waits_s else 0.0


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(round(bytes_per_s))}/s"
