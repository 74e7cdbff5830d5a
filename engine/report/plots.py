"""The plots of a report: commits over time, new against retained bytes, and what collections freed."""

from collections.abc import Sequence
from typing import Final

from engine.inspect.history import HistoryEntry
from engine.report import svg
from engine.report.html import framed
from engine.report.svg import Words
from index.plan.plan_format import AuditRecord
from index.text import count, human_bytes, iso_time

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TICKS_COUNT: Final = 4
NEW, RETAINED, FREED = svg.ORANGE, svg.BLUE, svg.GREEN


def choose_unit(largest_bytes: int) -> tuple[float, str]:
    """What to divide sizes by so that the largest of them has few digits, and its name."""
    power = 0
    while largest_bytes >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return float(1024**power), _UNITS[power]


def short_time(at_ms: int) -> str:
    """A time to the minute."""
    return iso_time(at_ms)[:16].replace("T", " ")


def plot_commits(entries: Sequence[HistoryEntry], name: str) -> str:
    """How large each commit was, at its time.

    Args:
        entries: The commits of one job, the oldest first; what cannot be read is left out.
        name: Of the job.
    """
    found = [(e, e.commit) for e in entries if e.commit is not None]
    sizes = [sum(s.size_bytes for s in commit.record.stores) for _, commit in found]
    divisor, unit = choose_unit(max(sizes, default=0))
    times = [commit.committed_at_ms for _, commit in found]
    titles = [
        f"commit {e.number}, version {commit.record.version}, {short_time(commit.committed_at_ms)}: {human_bytes(size)}"
        for (e, commit), size in zip(found, sizes, strict=True)
    ]
    points = [(float(at_ms), size / divisor) for at_ms, size in zip(times, sizes, strict=True)]
    told = f"{count(len(found), 'commit')}; the newest {titles[-1].removeprefix('commit ')}." if titles else ""
    words = Words(f"Commits of {name} over time", told)
    line = svg.Line(points=points, colour=svg.BLUE, title="size of the commits")
    return framed(svg.points_over_time(line, titles, words=words, unit=unit, ticks=_ticks(times)), words.title)


def _ticks(times: Sequence[int]) -> list[tuple[float, str]]:
    if not times:
        return []
    first, last = min(times), max(times)
    if first == last:
        return [(float(first), short_time(first))]
    steps = [first + (last - first) * n // (TICKS_COUNT - 1) for n in range(TICKS_COUNT)]
    # Of commits that are minutes apart the seconds matter, and of those that are seconds apart their fractions.
    if last - first >= TICKS_COUNT * 60_000:
        return [(float(at_ms), short_time(at_ms)) for at_ms in steps]
    end = 19 if last - first >= TICKS_COUNT * 1000 else 23
    return [(float(at_ms), iso_time(at_ms)[11:end]) for at_ms in steps]


def plot_shares(entries: Sequence[HistoryEntry], name: str) -> str:
    """New and retained bytes of each commit side by side; arguments as `plot_commits`."""
    found = [(entry, entry.share) for entry in entries if entry.share is not None]
    divisor, unit = choose_unit(max((share.bytes_new + share.bytes_retained for _, share in found), default=0))
    bars = [
        svg.Bar(
            parts=[(share.bytes_retained / divisor, RETAINED), (share.bytes_new / divisor, NEW)],
            title=f"commit {entry.number}: {human_bytes(share.bytes_new)} new, {human_bytes(share.bytes_retained)} "
            "retained",
            label=str(entry.number),
        )
        for entry, share in found
    ]
    new = sum(share.bytes_new for _, share in found)
    words = Words(
        f"New and retained bytes of {name}", f"{human_bytes(new)} were new in {count(len(found), 'commit')} together."
    )
    return framed(svg.stacked_bars(bars, words=words, unit=unit), words.title)


def plot_freed(audits: Sequence[AuditRecord]) -> str:
    """What each collection freed, the oldest first; one that did not come to its end is a red cross."""
    freed = [sum(total.size_bytes for total in audit.deleted) for audit in audits]
    divisor, unit = choose_unit(max(freed, default=0))
    bars = [
        svg.Bar(
            parts=[(size / divisor, FREED)] if audit.outcome in {"done", "partly"} else [],
            title=f"{short_time(audit.began_at_ms)}: {human_bytes(size)}, {audit.outcome}",
        )
        for audit, size in zip(audits, freed, strict=True)
    ]
    words = Words("Bytes that collections freed", f"{human_bytes(sum(freed))} in {count(len(audits), 'collection')}.")
    return framed(svg.stacked_bars(bars, words=words, unit=unit), words.title)
