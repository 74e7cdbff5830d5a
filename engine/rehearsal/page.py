"""The page: a section for each job, with plots, forecast and history (design 0009, G1 to G3)."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from engine.rehearsal import svg
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
from engine.whole_file import write_whole
from engine.words import count, human_bytes, iso_time, printable, shortened
from index.errors import FormatError
from index.model import Scope

PAGE_NAME: Final = "rehearsals.html"
JOBS_MAX: Final = 50
# Of each job, the newest.
SHOWN_MAX: Final = 60
BROKEN_SHOWN_MAX: Final = 20
TEXT_LENGTH_MAX: Final = 400

_FIND, _RESTORE, _NOWHERE, _OPEN = "#7fb2d6", "#1b6ca8", "#8d9aa5", "#d99a2b"
_BEST, _WORST = "#1b9e77", "#d95f02"
_BOUND_COLOUR, _OTHER_COLOUR = "#1b6ca8", svg.GREY

# No script, no image, no font, no address: the page asks nobody for anything, whatever a name in it may say.
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Rehearsed restores</title>
<style>
body { font: 15px/1.45 sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-top: 2px solid #1b6ca8; padding-top: .6rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: 14px; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e3e8ec; vertical-align: top; }
td { overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
.big { font-size: 1.6rem; }
.bad { color: #c0392b; }
.note { color: #566; font-size: 14px; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
</style></head><body>
<h1>Rehearsed restores</h1>
"""


def write_page(path: Path, history: History) -> None:
    """Write the page of a history, replacing an older one at once.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, make_page(history).encode(), for_all=True)


def make_page(history: History) -> str:
    """The page as HTML."""
    by_job: dict[tuple[str, Scope], list[Entry]] = {}
    for entry in history.entries:
        place = entry.repository_id, Scope(entry.job, entry.task)
        # Put in anew, so that the one rehearsed last stands last.
        by_job[place] = [*by_job.pop(place, []), entry]
    jobs = list(reversed(by_job.items()))
    body = [_broken(history.broken)] if history.broken else []
    body += [_section(repository_id, scope, entries) for (repository_id, scope), entries in jobs[:JOBS_MAX]]
    if len(jobs) > JOBS_MAX:
        body.append(f"<p class=note>{len(jobs) - JOBS_MAX} more jobs stand in the history alone.</p>")
    return _HEAD + "\n".join(body) + "\n</body></html>\n"


def _text(text: str) -> str:
    """A text of anybody's, as what it is: a text."""
    return escape(shortened(printable(text), TEXT_LENGTH_MAX))


def _broken(broken: Sequence[FormatError]) -> str:
    items = "".join(f"<li>{_text(str(error))}</li>" for error in broken[:BROKEN_SHOWN_MAX])
    told = count(len(broken), "line of the history is", "lines of the history are")
    return f"<p class=bad>{told} left out, and still there:</p><ul class=note>{items}</ul>"


def _section(repository_id: str, scope: Scope, entries: Sequence[Entry]) -> str:
    done = [entry for entry in entries if isinstance(entry, Rehearsal)]
    parts = [f"<h2>{_text(str(scope))}</h2><p class=note>repository {_text(repository_id)}</p>"]
    if not isinstance(entries[-1], Rehearsal):
        failed = entries[-1]
        told = f"{failed.error}: {failed.message}"
        parts.append(f"<p class=bad>The last rehearsal failed, {iso_time(failed.began_at_ms)}: {_text(told)}</p>")
    if done:
        parts.append(_last(done[-1]))
    parts.append(_history(entries[-SHOWN_MAX:]))
    return "\n".join(parts)


def _last(rehearsal: Rehearsal) -> str:
    verdict = judge(rehearsal)
    rows = figures(rehearsal, verdict)
    slo = slo_line(rehearsal)
    slo_told = f' <span class="{"bad" if rehearsal.is_slow else "note"}">{escape(slo)}</span>' if slo else ""
    steps = [
        (name, s, colour, seconds(s))
        for (name, s), colour in zip(phases(rehearsal), (_FIND, _RESTORE, _OPEN), strict=False)
    ]
    alone = [
        (bound.value, s, _BOUND_COLOUR if bound is verdict.bound else _OTHER_COLOUR, seconds(s)) for bound, s, _ in rows
    ]
    of = rehearsal.open_s if verdict.bound is Bound.ROCKSDB_OPEN else rehearsal.restore_s
    began = f"{iso_time(rehearsal.began_at_ms)}, tidemark {rehearsal.release}"
    return "\n".join(
        (
            f"<p><span class=big>{escape(seconds(rehearsal.total_s))}</span>{slo_told}</p>",
            f"<p>{_text(headline(rehearsal))}<br><span class=note>{_text(began)}</span></p>",
            "<h3>Phases</h3>",
            svg.rows(steps, whole=0),
            f"<p class=bad>{escape(load_line(rehearsal))}</p>",
            *(f"<p class=bad>{_text(warning)}</p>" for warning in rehearsal.warnings),
            f"<h3>What bound it</h3><p>{escape(verdict_line(verdict))}. What would help: {escape(verdict.hint)}.</p>",
            "<p class=note>How long each would have taken by itself; the dashed line is what it took together.</p>",
            svg.rows(alone, whole=of),
            _table(("", "alone", "figures"), [(bound.value, seconds(s), behind) for bound, s, behind in rows]),
            _forecast(rehearsal),
        )
    )


def _forecast(rehearsal: Rehearsal) -> str:
    forecasts = forecast(rehearsal)
    of_this = [f for f in forecasts if f.size == 1]
    limit = rehearsal.slo_ms / 1000 if rehearsal.slo_ms is not None else None
    drawn = svg.lines(
        [
            svg.Line(points=[(f.executors, f.worst_s) for f in of_this], colour=_WORST, title="at worst"),
            svg.Line(points=[(f.executors, f.best_s) for f in of_this], colour=_BEST, title="at best"),
        ],
        ticks=EXECUTORS,
        limit=limit,
        unit="s",
        x_name="executors",
    )
    headers = ("size", *(count(n, "executor") for n in EXECUTORS))
    not_told = "" if rehearsal.to_disk else " Nothing was written: a disk, and the opening of RocksDB, come on top."
    return "\n".join(
        (
            f"<h3>Forecast</h3><p class=note>{escape(ASSUMPTIONS + not_told)}</p>",
            _table(headers, forecast_rows(rehearsal, forecasts)),
            f"<p class=note>This size:{_key(_BEST, 'at best')}{_key(_WORST, 'at worst')}</p>",
            drawn,
        )
    )


def _history(entries: Sequence[Entry]) -> str:
    bars = [svg.Bar(parts=_parts(entry), title=f"{iso_time(entry.began_at_ms)}: {_told(entry)}") for entry in entries]
    done = [entry for entry in entries if isinstance(entry, Rehearsal)]
    slo_ms = done[-1].slo_ms if done else None
    rows = [(iso_time(entry.began_at_ms), *_row(entry)) for entry in reversed(entries)]
    keys = (
        _key(_FIND, "find the commit")
        + _key(_RESTORE, "restore")
        + _key(_NOWHERE, "restore to nowhere")
        + _key(_OPEN, "open RocksDB")
    )
    return "\n".join(
        (
            f"<h3>History</h3><p class=note>{count(len(entries), 'rehearsal')}, the newest on the right:{keys}</p>",
            svg.stacked_bars(bars, limit=slo_ms / 1000 if slo_ms is not None else None, unit="s"),
            _table(("began", "time", "bound by", "size", "to", "SLO"), rows),
        )
    )


def _parts(entry: Entry) -> list[tuple[float, str]]:
    if not isinstance(entry, Rehearsal):
        return []
    return [(entry.find_s, _FIND), (entry.restore_s, _RESTORE if entry.to_disk else _NOWHERE), (entry.open_s, _OPEN)]


def _told(entry: Entry) -> str:
    return (
        seconds(entry.total_s) if isinstance(entry, Rehearsal) else shortened(printable(entry.error), TEXT_LENGTH_MAX)
    )


def _row(entry: Entry) -> tuple[str, ...]:
    if not isinstance(entry, Rehearsal):
        return "failed", f"{entry.error}: {entry.message}", "", "", ""
    to = "disk" if entry.to_disk else "nowhere"
    missed = {True: "missed", False: "met"}[entry.is_slow] if entry.slo_ms is not None else ""
    return seconds(entry.total_s), judge(entry).bound.value, human_bytes(entry.size_bytes), to, missed


def _key(colour: str, name: str) -> str:
    return f'<span class=key style="background:{colour}"></span>{escape(name)}'


def _table(headers: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
