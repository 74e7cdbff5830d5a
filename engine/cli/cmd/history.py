"""The verb `history`: the commits of a job with what each brought, what became of it, and how to restore it."""

from typing import ClassVar, Final

import click
import msgspec

from engine.cli import options as cli
from engine.cli.output import extend, view_commit
from engine.cli.session import Session, verb
from engine.errors import NotFoundError
from engine.inspect.history import ENTRIES_MAX, HistoryEntry, State, format_offsets
from engine.text import Moment, table
from index.display import count, human_bytes, iso_time, printable, shortened
from index.snapshot.model import Scope

OFFSETS_SHOWN_MAX: Final = 24
NAMES_SHOWN_MAX: Final = 32


class HistoryEntryView(HistoryEntry, frozen=True, kw_only=True):
    """One record; what cannot be read of it is null or empty, and so is what a commit brought if nobody has looked."""

    json_omitted: ClassVar = ("commit", "share")
    json_properties: ClassVar = {
        "version": "commit.record.version",
        "committed_at_ms": "commit.committed_at_ms",
        # The commit that a rewind or a fork took its stores from, and whose that is.
        "source_number": "commit.record.source.number",
        "source_job": "commit.record.source_scope.job",
        "source_commit_task": "commit.record.source_scope.task",
        "new_files": "share.files_new",
        "new_bytes": "share.bytes_new",
        "retained_files": "share.files_retained",
        "retained_bytes": "share.bytes_retained",
        "uploaded_bytes": "share.bytes_uploaded",
    }

    # commit, rewind or fork; empty of a damaged record that no name holds.
    kind: str = ""
    stores_count: int = 0
    files_count: int = 0
    size_bytes: int = 0
    offsets: str = ""
    # What `restore`, `fork` and `keys` take for it; empty: it cannot be restored.
    restore_options: str = ""


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """`history`."""

    scope: Scope
    # Records that exist and were not asked for.
    older_count: int
    entries: tuple[HistoryEntryView, ...]
    problems: tuple[str, ...]


@verb("history", "Show what each commit of a job brought, and became.", prints=(HistoryView,))
@cli.scope_options(task=True)
@cli.limit_option(ENTRIES_MAX, 10_000, text="Maximum number of records, the newest first.")
@click.option(
    "--since", type=cli.MOMENT, metavar="TIME", help="None from before: 7d, 2026-05-01, 'yesterday 18:00' (UTC)."
)
@click.option("--no-sizes", is_flag=True, help="No reading of indexes, and so no sizes of what each commit brought.")
def history(session: Session, *, scope: Scope, limit: int, since: Moment | None, no_sizes: bool) -> None:
    """Show the records of a job, newest first: what each brought, what became of it, and how to restore it.

    New is what a commit uploaded, retained what earlier ones had; the index of each store that is new in a commit is
    read for it. Damage is shown in its place, and the rest goes on.

    Example: tidemark history -r file:///backups --job flights --since 7d
    """
    with session.open() as repository:
        since_ms = session.resolve_ms(since) if since is not None else None
        with session.progress("history") as progress:
            shares = not no_sizes
            found = repository.history(scope, entries_max=limit, since_ms=since_ms, shares=shares, progress=progress)
        if not found.entries:
            with session.explaining(scope):
                message = "has no commits" if since_ms is None else f"has no commits since {iso_time(since_ms)}"
                raise NotFoundError(message, operation="history", subject=str(scope))
    entries = tuple(map(_view_entry, found.entries))
    view = HistoryView(scope=found.scope, older_count=found.older_count, entries=entries, problems=found.problems)
    for problem in found.problems:
        session.warn(f"left out: {problem}")
    session.show(view, _lines(view))


def _view_entry(entry: HistoryEntry) -> HistoryEntryView:
    restore_options = f"--name {entry.held_by}" if entry.held_by else f"--number {entry.number}"
    view = extend(HistoryEntryView, entry, restore_options=restore_options if entry.restores else "")
    if entry.commit is None:
        return view
    record, shown = entry.commit.record, view_commit(entry.commit)
    sums = {name: getattr(shown, name) for name in ("stores_count", "files_count", "size_bytes")}
    return msgspec.structs.replace(view, kind=record.kind, offsets=record.offsets, **sums)


def _lines(view: HistoryView) -> list[str]:
    rows = [
        (
            str(e.number),
            "-" if e.commit is None else str(e.commit.record.version),
            "-" if e.commit is None else iso_time(e.commit.committed_at_ms).replace("T", " ").removesuffix("Z")[:-4],
            "-" if e.share is None else human_bytes(e.share.bytes_new),
            "-" if e.share is None else f"{e.share.files_new:,}",
            "-" if e.share is None else human_bytes(e.share.bytes_retained),
            str(e.stores_count),
            format_offsets(e.offsets, OFFSETS_SHOWN_MAX) or "-",
            printable(shortened(", ".join(e.names), NAMES_SHOWN_MAX)) or "-",
            _describe(e, view.scope),
        )
        for e in view.entries
    ]
    headers = ("number", "version", "time (UTC)", "new", "files", "retained", "stores", "offsets", "names", "what")
    lines = table(headers, rows, right=("number", "version", "new", "files", "retained", "stores"))
    lines += [f"problem with {e.number}: {printable(e.problem)}" for e in view.entries if e.problem]
    if view.older_count:
        lines.append(f"{count(view.older_count, 'older record')}: see them with --limit or an earlier --since")
    shown = next((e for e in view.entries if e.restore_options), None)
    if shown is None:
        return lines
    options = printable(shown.restore_options)
    if shown.state is State.OPEN and (commit := shown.commit) is not None:
        options += f", or --version {commit.record.version}, --at {iso_time(commit.committed_at_ms)}"
    return [
        *lines,
        "",
        f"restore one: tidemark restore TARGET {options};",
        "`rewind` makes it the newest again, `fork` begins another job with it, `keys` looks into it",
    ]


_BECAME: Final = {
    State.CLOSED: "closed by a collection",
    State.VOID: "void: it came too late",
    State.DAMAGED: "DAMAGED",
    State.NAMED: "held by its name alone",
}


def _describe(entry: HistoryEntryView, scope: Scope) -> str:
    """Say in a few words what became of a record."""
    parts = []
    record = entry.commit.record if entry.commit is not None else None
    if record is not None and record.kind != "commit" and record.source is not None:
        elsewhere = record.source_scope not in {None, scope}
        where = f" of {printable(str(record.source_scope))}" if elsewhere else ""
        parts.append(f"{record.kind} {'to' if record.kind == 'rewind' else 'from'} {record.source.number}{where}")
    if entry.rewound_by is not None:
        parts.append(f"left behind by {entry.rewound_by}")
    if entry.state in _BECAME:
        parts.append(_BECAME[entry.state])
    if entry.restores and entry.state not in {State.OPEN, State.NAMED}:
        parts.append(f"held by {printable(shortened(entry.names[0], NAMES_SHOWN_MAX))}")
    if entry.pins_count:
        parts.append(f"being read ({count(entry.pins_count, 'pin')})")
    return ", ".join(parts) or entry.kind
