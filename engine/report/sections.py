"""The sections of a report that are about commits: over time, new against retained, rehearsals, lineage."""

from collections.abc import Iterator, Sequence
from typing import Final

from engine.drill.record import Entry, RestoreDrill
from engine.drill.summary import format_phase, format_slo
from engine.inspect.history import HistoryEntry, State, format_offsets
from engine.report import lineage
from engine.report.html import items, key, paragraph, table, tell
from engine.report.lineage import draw_lineage
from engine.report.model import JobFacts, ReportFacts
from engine.report.plots import NEW, RETAINED, plot_commits, plot_shares, short_time
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.text import count, human_bytes

OFFSETS_SHOWN_MAX: Final = 40
# Of the stores of a commit, whose unique ids are told.
STORES_TOLD_MAX: Final = 3
# The newest restore drills of a job, and lines of their history that cannot be read.
REHEARSALS_SHOWN_MAX: Final = 60
BROKEN_SHOWN_MAX: Final = 20


def tell_commits(facts: ReportFacts) -> Iterator[str]:
    """Commits over time: a plot and a table for each job."""
    for job in facts.jobs:
        entries = job.history.entries
        yield f"<h3>{tell(str(job.scope))}</h3>"
        if job.history.problems:
            yield paragraph("What follows leaves out what cannot be read:", "bad") + items(job.history.problems)
        if not entries:
            yield paragraph("It has no commits.", "note")
            continue
        yield plot_commits(entries[::-1], str(job.scope))
        yield table(
            ("commit", "version", "time (UTC)", "stores", "files", "size", "offsets", "names", "state"),
            [_commit_row(entry) for entry in entries],
            label=f"Commits of {job.scope}",
            numbers={"commit", "version", "stores", "files", "size"},
        )
        if job.history.older_count:
            yield paragraph(f"{count(job.history.older_count, 'older record')} not told here.", "note")


def _commit_row(entry: HistoryEntry) -> tuple[str, ...]:
    if entry.commit is None:
        return (str(entry.number), "", "", "", "", "", "", "", "cannot be read")
    record = entry.commit.record
    return (
        str(entry.number),
        str(record.version),
        short_time(entry.commit.committed_at_ms),
        f"{len(record.stores):,}",
        f"{sum(s.files_count for s in record.stores):,}",
        human_bytes(sum(s.size_bytes for s in record.stores)),
        format_offsets(record.offsets, OFFSETS_SHOWN_MAX),
        ", ".join(entry.names),
        _state(entry),
    )


def _state(entry: HistoryEntry) -> str:
    told = {
        State.OPEN: "",
        State.CLOSED: "closed by a collection",
        State.VOID: "void: it came too late",
        State.DAMAGED: "cannot be read",
        State.NAMED: "held by its name alone",
    }[entry.state]
    held = f"held by {entry.held_by}" if entry.held_by and entry.state is not State.NAMED else ""
    past = f"left behind by {entry.rewound_by}" if entry.rewound_by is not None else ""
    read = count(entry.pins_count, "reader") if entry.pins_count else ""
    return ", ".join(part for part in (told, held, past, read) if part)


def tell_shares(facts: ReportFacts) -> Iterator[str]:
    """New against retained bytes, for each job."""
    yield (
        f"<p class=note>What each commit uploaded, and what it took over from earlier ones:{key(NEW, 'new')}"
        f"{key(RETAINED, 'retained')}</p>"
    )
    for job in facts.jobs:
        told = [entry for entry in job.history.entries if entry.share is not None]
        if not told:
            continue
        yield f"<h3>{tell(str(job.scope))}</h3>"
        yield plot_shares(told[::-1], str(job.scope))
        yield table(
            ("commit", "new", "new files", "retained", "retained files", "uploaded"),
            [_share_row(entry) for entry in told],
            label=f"New and retained bytes of {job.scope}",
            numbers={"commit", "new", "new files", "retained", "retained files", "uploaded"},
        )


def _share_row(entry: HistoryEntry) -> tuple[str, ...]:
    share = entry.share
    if share is None:
        return (str(entry.number), "", "", "", "", "")
    return (
        str(entry.number),
        human_bytes(share.bytes_new),
        f"{share.files_new:,}",
        human_bytes(share.bytes_retained),
        f"{share.files_retained:,}",
        human_bytes(share.bytes_uploaded),
    )


def tell_all_rehearsals(facts: ReportFacts) -> Iterator[str]:
    """How long a restore would take: what was rehearsed."""
    if facts.rehearsals_broken:
        left_out = count(len(facts.rehearsals_broken), "line of the history", "lines of the history")
        yield paragraph(f"Left out, and still there: {left_out}.", "bad")
        yield items(map(str, facts.rehearsals_broken[:BROKEN_SHOWN_MAX]))
    rehearsed = [job for job in facts.jobs if job.rehearsals]
    for job in rehearsed:
        yield f"<h3>{tell(str(job.scope))}</h3>"
        yield from _tell_rehearsals(job.rehearsals)
    missing = [str(job.scope) for job in facts.jobs if not job.rehearsals]
    if missing:
        where = f" in {facts.rehearsals_from}" if facts.rehearsals_from else ""
        hint = f"Never rehearsed, as far as the history{where} says: {', '.join(missing)}."
        yield paragraph(hint, "note")
        yield "<p class=note>Rehearse a restore with <code>tidemark bench restore</code>.</p>"


def _tell_rehearsals(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the restore drills of one job, the newest first."""
    shown = entries[: -REHEARSALS_SHOWN_MAX - 1 : -1]
    headers = ("began (UTC)", "time", "find", "restore", "open", "size", "to", "SLO")
    yield table(headers, [_rehearsal_row(entry) for entry in shown], label="Rehearsals")


def _rehearsal_row(entry: Entry) -> tuple[str, ...]:
    began = short_time(entry.began_at_ms)
    if not isinstance(entry, RestoreDrill):
        return (began, "failed", f"{entry.error}: {entry.message}", "", "", "", "", "")
    times = (format_phase(s) for s in (entry.total_s, entry.find_s, entry.restore_s, entry.open_s))
    to = "disk" if entry.to_disk else "nowhere"
    return (began, *times, human_bytes(entry.size_bytes), to, format_slo(entry).removeprefix("SLO "))


def tell_lineage(facts: ReportFacts) -> Iterator[str]:
    """Which commit grew from which: a graph, and a table with unique ids."""
    keys = (
        key(lineage.COMMIT, "commit")
        + key(lineage.REWIND, "rewind")
        + key(lineage.FORK, "fork")
        + key(lineage.LEFT_BEHIND, "left behind, or closed")
    )
    yield f"<p class=note>From left to right as they came, a lane for each job:{keys}</p>"
    yield draw_lineage(facts.jobs) or paragraph("There are no commits.", "note")
    for job in facts.jobs:
        rows = [_lineage_row(entry, entry.commit) for entry in job.history.entries if entry.commit is not None]
        if rows:
            yield f"<h3>{tell(str(job.scope))}</h3>"
            yield table(
                ("commit", "kind", "after", "from", "names", "versions and unique ids"),
                rows,
                label=f"Lineage of {job.scope}",
                numbers={"commit", "after"},
            )


def _lineage_row(entry: HistoryEntry, commit: Commit) -> tuple[str, ...]:
    record = commit.record
    scope = record.source_scope or record.scope
    return (
        str(entry.number),
        record.kind if commit.name is None else "named",
        str(record.predecessor.number) if record.predecessor is not None else "",
        f"{record.source.number} of {scope}" if record.source is not None else "",
        ", ".join(entry.names),
        _unique_ids(commit),
    )


def _unique_ids(commit: Commit) -> str:
    stores = commit.record.stores
    many = len(stores) > 1
    told = [f"{f'{s.task}/{s.store} ' if many else ''}{s.version}_{s.unique_id}" for s in stores[:STORES_TOLD_MAX]]
    left = len(stores) - len(told)
    return ", ".join(told) + (f" and {left:,} more" if left else "")


def tell_jobs(jobs: Sequence[JobFacts], left_out: int) -> Iterator[str]:
    """All jobs in one table."""
    yield table(
        ("job", "records", "newest", "version", "time (UTC)", "size", "last rehearsal"),
        [_job_row(job) for job in jobs],
        label="Jobs",
        numbers={"records", "newest", "version", "size"},
    )
    if left_out:
        yield paragraph(f"{count(left_out, 'more job')}: see one with --job.", "note")


def _job_row(job: JobFacts) -> tuple[str, ...]:
    entries = job.history.entries
    newest = next((e.commit for e in entries if e.commit is not None and e.restores), None)
    records = f"{len(entries) + job.history.older_count:,}"
    last = short_time(job.rehearsals[-1].began_at_ms) if job.rehearsals else "never"
    name = str(Scope(job.scope.job, job.scope.task))
    if newest is None:
        return (name, records, "", "", "", "", last)
    return (
        name,
        records,
        str(newest.record.number),
        str(newest.record.version),
        short_time(newest.committed_at_ms),
        human_bytes(sum(s.size_bytes for s in newest.record.stores)),
        last,
    )
