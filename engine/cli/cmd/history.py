"""The verb `history`: the commits of a job with what each brought, what became of it, and how to restore it."""

from typing import Final

import click
import msgspec

from engine.cli.options import MOMENT, limit_option, scope_options
from engine.cli.output import view_commit
from engine.cli.session import Session, verb
from engine.errors import NotFoundError
from engine.inspect.history import ENTRIES_MAX, HistoryEntry, State, format_offsets
from engine.text import Moment, table
from index.snapshot.model import Scope
from index.text import count, human_bytes, iso_time, printable, shortened

OFFSETS_SHOWN_MAX: Final = 24
NAMES_SHOWN_MAX: Final = 32


class HistoryEntryView(msgspec.Struct, frozen=True, kw_only=True):
    """One record; what cannot be read of it is null or empty."""

    number: int
    # open, closed, void, damaged or named.
    state: str
    # commit, rewind or fork; empty of a damaged record that no name holds.
    kind: str = ""
    version: int | None = None
    committed_at_ms: int | None = None
    # The commit that a rewind or a fork took its stores from, and whose that is.
    source_number: int | None = None
    source_job: str | None = None
    source_commit_task: str | None = None
    # The rewind that left it behind.
    rewound_by: int | None
    stores_count: int = 0
    files_count: int = 0
    size_bytes: int = 0
    # Null: nobody has looked, or an index cannot be read.
    new_files: int | None = None
    new_bytes: int | None = None
    retained_files: int | None = None
    retained_bytes: int | None = None
    uploaded_bytes: int | None = None
    offsets: str = ""
    names: tuple[str, ...]
    pins_count: int
    # What `restore`, `fork` and `keys` take for it; empty: it cannot be restored.
    restore_options: str
    problem: str

    @property
    def committed_at(self) -> str:
        return iso_time(self.committed_at_ms) if self.committed_at_ms is not None else ""


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """`history`."""

    scope: Scope
    # Records that exist and were not asked for.
    older_count: int
    entries: tuple[HistoryEntryView, ...]
    problems: tuple[str, ...]


@verb("history", "Show what each commit of a job brought, and became.", prints=(HistoryView,))
@scope_options(task=True)
@limit_option(ENTRIES_MAX, 10_000, text="Maximum number of records, the newest first.")
@click.option("--since", type=MOMENT, metavar="TIME", help="None from before: 7d, 2026-05-01, 'yesterday 18:00' (UTC).")
@click.option("--no-sizes", is_flag=True, help="No reading of indexes, and so no sizes of what each commit brought.")
def history(session: Session, *, scope: Scope, limit: int, since: Moment | None, no_sizes: bool) -> None:
    """Show the records of a job, newest first: what each brought, what became of it, and how to restore it.

    New is what a commit uploaded, retained what earlier ones had; the index of each store that is new in a commit is
    read for it. Damage is shown in its place, and the rest goes on.

    Example: tidemark history -r file:///backups --job flights --since 7d
    """
    with session.open() as repository:
        since_ms = session.resolve_ms(repository, since) if since is not None else None
        with session.progress("history") as progress:
            found = repository.history(
                scope, entries_max=limit, since_ms=since_ms, shares=not no_sizes, progress=progress
            )
        if not found.entries:
            with session.explaining(repository, scope):
                message = "has no commits" if since_ms is None else f"has no commits since {iso_time(since_ms)}"
                raise NotFoundError(message, operation="history", subject=str(scope))
    view = HistoryView(
        scope=found.scope,
        older_count=found.older_count,
        entries=tuple(map(_view_entry, found.entries)),
        problems=found.problems,
    )
    for problem in found.problems:
        session.warn(f"left out: {problem}")
    session.show(view, _lines(view))


def _view_entry(entry: HistoryEntry) -> HistoryEntryView:
    restore_options = ""
    if entry.restores:
        restore_options = f"--name {entry.held_by}" if entry.held_by else f"--number {entry.number}"
    view = HistoryEntryView(
        number=entry.number,
        state=entry.state.value,
        rewound_by=entry.rewound_by,
        names=entry.names,
        pins_count=entry.pins_count,
        restore_options=restore_options,
        problem=entry.problem,
    )
    if (commit := entry.commit) is not None:
        record, sums = commit.record, view_commit(commit)
        view = msgspec.structs.replace(
            view,
            kind=record.kind,
            version=record.version,
            committed_at_ms=commit.committed_at_ms,
            source_number=record.source.number if record.source is not None else None,
            source_job=record.source_scope.job if record.source_scope is not None else None,
            source_commit_task=record.source_scope.task if record.source_scope is not None else None,
            stores_count=sums.stores_count,
            files_count=sums.files_count,
            size_bytes=sums.size_bytes,
            offsets=record.offsets,
        )
    if (share := entry.share) is not None:
        view = msgspec.structs.replace(
            view,
            new_files=share.files_new,
            new_bytes=share.bytes_new,
            retained_files=share.files_retained,
            retained_bytes=share.bytes_retained,
            uploaded_bytes=share.bytes_uploaded,
        )
    return view


def _lines(view: HistoryView) -> list[str]:
    rows = [
        (
            str(e.number),
            "-" if e.version is None else str(e.version),
            e.committed_at.replace("T", " ").removesuffix("Z")[:-4] or "-",
            "-" if e.new_bytes is None else human_bytes(e.new_bytes),
            "-" if e.new_files is None else f"{e.new_files:,}",
            "-" if e.retained_bytes is None else human_bytes(e.retained_bytes),
            str(e.stores_count),
            format_offsets(e.offsets, OFFSETS_SHOWN_MAX) or "-",
            printable(shortened(", ".join(e.names), NAMES_SHOWN_MAX)) or "-",
            _describe(e, view),
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
    if shown.state == State.OPEN:
        options += f", or --version {shown.version}, --at {shown.committed_at}"
    return [
        *lines,
        "",
        f"restore one: tidemark restore TARGET {options};",
        "`rewind` makes it the newest again, `fork` begins another job with it, `keys` looks into it",
    ]


_BECAME: Final = {
    State.CLOSED.value: "closed by a collection",
    State.VOID.value: "void: it came too late",
    State.DAMAGED.value: "DAMAGED",
    State.NAMED.value: "held by its name alone",
}


def _describe(entry: HistoryEntryView, of: HistoryView) -> str:
    """Say in a few words what became of a record."""
    parts = []
    if entry.kind in {"rewind", "fork"} and entry.source_number is not None:
        source = Scope(entry.source_job, entry.source_commit_task) if entry.source_job is not None else of.scope
        where = f" of {printable(str(source))}" if source != of.scope else ""
        parts.append(f"{entry.kind} {'to' if entry.kind == 'rewind' else 'from'} {entry.source_number}{where}")
    if entry.rewound_by is not None:
        parts.append(f"left behind by {entry.rewound_by}")
    if entry.state in _BECAME:
        parts.append(_BECAME[entry.state])
    if entry.restore_options and entry.state not in {State.OPEN, State.NAMED}:
        parts.append(f"held by {printable(shortened(entry.names[0], NAMES_SHOWN_MAX))}")
    if entry.pins_count:
        parts.append(f"being read ({count(entry.pins_count, 'pin')})")
    return ", ".join(parts) or entry.kind
