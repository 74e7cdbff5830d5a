"""The page: a section for each job, with plots, forecast and history (design 0009, G1 to G3)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine import svg
from engine.page import framed, items, key, make_page, paragraph, table, tell
from engine.rehearsal.forecast import EXECUTORS, forecast
from engine.rehearsal.history import History
from engine.rehearsal.model import Bound, Entry, Rehearsal
from engine.rehearsal.telling import (
    ASSUMPTIONS,
    figures,
    forecast_rows,
    headline,
    load_line,
    phases,
    seconds,
    slo_line,
    verdict_line,
)
from engine.rehearsal.verdict import judge
from engine.svg import Words
from engine.whole_file import write_whole
from engine.words import count, human_bytes, iso_time
from index.errors import FormatError
from index.model import Scope

PAGE_NAME: Final = "rehearsals.html"
JOBS_MAX: Final = 50
# Of each job, the newest.
SHOWN_MAX: Final = 60
BROKEN_SHOWN_MAX: Final = 20

_FIND, _RESTORE, _NOWHERE, _OPEN = svg.PALE, svg.BLUE, svg.GREY, svg.ORANGE
_BEST, _WORST = svg.GREEN, svg.RED


def write_page(path: Path, history: History) -> None:
    """Write the page of a history, replacing an older one at once.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, make_rehearsals_page(history).encode())


def make_rehearsals_page(history: History) -> str:
    """The page as HTML."""
    by_job: dict[tuple[str, Scope], list[Entry]] = {}
    for entry in history.entries:
        place = entry.repository_id, Scope(entry.job, entry.task)
        # Put in anew, so that the one rehearsed last stands last.
        by_job[place] = [*by_job.pop(place, []), entry]
    jobs = list(reversed(by_job.items()))
    body = [tell_broken(history.broken)] if history.broken else []
    for (repository_id, scope), entries in jobs[:JOBS_MAX]:
        body.append(f"<h2>{tell(str(scope))}</h2>{paragraph(f'repository {repository_id}', 'note')}")
        body.append(tell_rehearsals(entries, level=3))
    if len(jobs) > JOBS_MAX:
        body.append(paragraph(f"{len(jobs) - JOBS_MAX} more jobs stand in the history alone.", "note"))
    return make_page("Rehearsed restores", body)


def tell_broken(broken: Sequence[FormatError]) -> str:
    """The lines of a history that say nothing."""
    told = count(len(broken), "line of the history is", "lines of the history are")
    return paragraph(f"{told} left out, and still there:", "bad") + items(map(str, broken[:BROKEN_SHOWN_MAX]))


def tell_rehearsals(entries: Sequence[Entry], *, level: int) -> str:
    """All that is to say of the rehearsals of one job, the oldest first; at least one.

    Args:
        entries: The rehearsals.
        level: Of the headings.
    """
    done = [entry for entry in entries if isinstance(entry, Rehearsal)]
    parts = []
    if not isinstance(entries[-1], Rehearsal):
        failed = entries[-1]
        told = f"{failed.error}: {failed.message}"
        parts.append(f"<p class=bad>The last rehearsal failed, {iso_time(failed.began_at_ms)}: {tell(told)}</p>")
    if done:
        parts.append(_last(done[-1], level))
    parts.append(_history(entries[-SHOWN_MAX:], level))
    return "\n".join(parts)


def _heading(level: int, told: str) -> str:
    return f"<h{level}>{told}</h{level}>"


def _last(rehearsal: Rehearsal, level: int) -> str:
    began = f"{iso_time(rehearsal.began_at_ms)}, tidemark {rehearsal.release}"
    slo = slo_line(rehearsal)
    slo_told = f' <span class="{"bad" if rehearsal.is_slow else "note"}">{tell(slo)}</span>' if slo else ""
    return "\n".join(
        (
            f"<p><span class=big>{tell(seconds(rehearsal.total_s))}</span>{slo_told}</p>",
            f"<p>{tell(headline(rehearsal))}<br><span class=note>{tell(began)}</span></p>",
            _heading(level, "Phases"),
            _phases(rehearsal),
            *(paragraph(warning, "bad") for warning in (load_line(rehearsal), *rehearsal.warnings) if warning),
            _heading(level, "What bound it"),
            _bounds(rehearsal),
            _heading(level, "Forecast"),
            _forecast(rehearsal),
        )
    )


def _phases(rehearsal: Rehearsal) -> str:
    steps = [
        (name, s, colour, seconds(s))
        for (name, s), colour in zip(phases(rehearsal), (_FIND, _RESTORE, _OPEN), strict=False)
    ]
    told = "; ".join(f"{name} {duration}" for name, _, _, duration in steps)
    return framed(svg.rows(steps, words=Words("Phases of the last rehearsal", told), whole=0), "Phases")


def _bounds(rehearsal: Rehearsal) -> str:
    verdict = judge(rehearsal)
    found = figures(rehearsal, verdict)
    of = rehearsal.open_s if verdict.bound is Bound.ROCKSDB_OPEN else rehearsal.restore_s
    alone = [(bound.value, s, svg.BLUE if bound is verdict.bound else svg.GREY, seconds(s)) for bound, s, _ in found]
    words = Words("What each would have taken by itself", verdict_line(verdict))
    return "\n".join(
        (
            f"<p>{tell(verdict_line(verdict))}. What would help: {tell(verdict.hint)}.</p>",
            paragraph("How long each would have taken by itself; the dashed line is what it took together.", "note"),
            framed(svg.rows(alone, words=words, whole=of), words.title),
            table(
                ("", "alone", "figures"),
                [(bound.value, seconds(s), behind) for bound, s, behind in found],
                label="What bound it",
            ),
        )
    )


def _forecast(rehearsal: Rehearsal) -> str:
    forecasts = forecast(rehearsal)
    of_this = [f for f in forecasts if f.size == 1]
    drawn = svg.lines(
        [
            svg.Line(points=[(f.executors, f.worst_s) for f in of_this], colour=_WORST, title="at worst"),
            svg.Line(points=[(f.executors, f.best_s) for f in of_this], colour=_BEST, title="at best"),
        ],
        words=Words("Forecast for this size", "Seconds at worst and at best, by the number of executors."),
        ticks=EXECUTORS,
        limit=rehearsal.slo_ms / 1000 if rehearsal.slo_ms is not None else None,
        unit="s",
        x_name="executors",
    )
    headers = ("size", *(count(n, "executor") for n in EXECUTORS))
    not_told = "" if rehearsal.to_disk else " Nothing was written: a disk, and the opening of RocksDB, come on top."
    return "\n".join(
        (
            paragraph(ASSUMPTIONS + not_told, "note"),
            table(headers, forecast_rows(rehearsal, forecasts), label="Forecast"),
            f"<p class=note>This size:{key(_BEST, 'at best')}{key(_WORST, 'at worst')}</p>",
            framed(drawn, "Forecast for this size"),
        )
    )


def _history(entries: Sequence[Entry], level: int) -> str:
    bars = [svg.Bar(parts=_parts(entry), title=f"{iso_time(entry.began_at_ms)}: {_told(entry)}") for entry in entries]
    done = [entry for entry in entries if isinstance(entry, Rehearsal)]
    slo_ms = done[-1].slo_ms if done else None
    rows = [(iso_time(entry.began_at_ms), *_row(entry)) for entry in reversed(entries)]
    keys = (
        key(_FIND, "find the commit")
        + key(_RESTORE, "restore")
        + key(_NOWHERE, "restore to nowhere")
        + key(_OPEN, "open RocksDB")
    )
    words = Words("Rehearsals", "Seconds of each rehearsal, the newest on the right.")
    limit = slo_ms / 1000 if slo_ms is not None else None
    return "\n".join(
        (
            _heading(level, "History"),
            f"<p class=note>{count(len(entries), 'rehearsal')}, the newest on the right:{keys}</p>",
            framed(svg.stacked_bars(bars, words=words, limit=limit, unit="s"), words.title),
            table(("began", "time", "bound by", "size", "to", "SLO"), rows, label="Rehearsals"),
        )
    )


def _parts(entry: Entry) -> list[tuple[float, str]]:
    if not isinstance(entry, Rehearsal):
        return []
    return [(entry.find_s, _FIND), (entry.restore_s, _RESTORE if entry.to_disk else _NOWHERE), (entry.open_s, _OPEN)]


def _told(entry: Entry) -> str:
    return seconds(entry.total_s) if isinstance(entry, Rehearsal) else entry.error


def _row(entry: Entry) -> tuple[str, ...]:
    if not isinstance(entry, Rehearsal):
        return "failed", f"{entry.error}: {entry.message}", "", "", ""
    to = "disk" if entry.to_disk else "nowhere"
    missed = {True: "missed", False: "met"}[entry.is_slow] if entry.slo_ms is not None else ""
    return seconds(entry.total_s), judge(entry).bound.value, human_bytes(entry.size_bytes), to, missed
