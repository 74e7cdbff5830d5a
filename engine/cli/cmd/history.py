"""The verbs that say which commits there are: `list`, and `history` with what each brought and what became of it."""

from typing import ClassVar, Final

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli import options as cli
from engine.cli.output import Column, CommitView, extend, names_by_commit, tabulate, view_commit
from engine.cli.session import Session, verb
from engine.inspect.browse import is_checkpoint_backup
from engine.inspect.history import ENTRIES_MAX, NAMES_SHOWN_MAX, HistoryEntry, State, describe_entry, format_offsets
from engine.records.find import NO_COMMITS
from engine.records.leases import list_names
from engine.records.log import Noted, load_log
from engine.text import Moment, Prose
from index.display import count, iso_time, shortened
from index.plan.commits import NOTHING_VOUCHES
from index.snapshot.model import Scope

LOGS_IN_FLIGHT_MAX: Final = 16
LISTED_OFFSETS_MAX: Final = 32


class ScopeView(msgspec.Struct, frozen=True, kw_only=True):
    """What commits as one, with its newest commit."""

    scope: Scope
    newest: CommitView | None
    # All its commits were closed for ever (`forget`), and nothing was committed since.
    forgotten: bool = False


class ScopesView(msgspec.Struct, frozen=True, kw_only=True):
    """`list` without a job."""

    scopes: tuple[ScopeView, ...]


class CommitsView(msgspec.Struct, frozen=True, kw_only=True):
    """`list` of a job."""

    scope: Scope
    commits: tuple[CommitView, ...]
    # Numbers of records that came after their lease and for which nothing vouches: no commits.
    late: tuple[int, ...]


@verb("list", "List jobs, or the commits of a job.", CommitsView, ScopesView)
@cli.scope_options(job_required=False, task=True)
@cli.option("--jobs", "List the jobs even if a job is set.")
def list_(session: Session, *, scope: Scope | None, jobs: bool) -> None:
    """List the jobs of a repository, or the commits of one job, newest first.

    Example: tidemark list -r file:///backups --job flights
    """
    with session.open():
        if scope is None or jobs:
            _list_scopes(session)
        else:
            _list_commits(session, scope)


def _list_scopes(session: Session) -> None:
    repository = session.repository

    async def look_at(scope: Scope) -> ScopeView:
        log = await load_log(repository.asynchronous.store, scope, past_damage=True)
        # Nothing else closes the newest commit (design 0002, D3).
        forgotten = log.newest is None and bool(log.boundaries)
        return ScopeView(scope=scope, newest=view_commit(log.newest) if log.newest else None, forgotten=forgotten)

    scopes = repository.loop.run(map_bounded(look_at, repository.scopes(), in_flight_max=LOGS_IN_FLIGHT_MAX))
    columns: dict[str, Column] = {
        "job": "scope",
        ">newest": "newest.number",
        ">version": "newest.version",
        "time (UTC)": lambda of: "forgotten" if of.forgotten else of.newest and of.newest.committed_at,
        ">stores": "newest.stores_count",
        ">files": "newest.files_count",
        ">size": "newest.size_bytes",
    }
    session.show(ScopesView(scopes=tuple(scopes)), tabulate(scopes, columns) if scopes else ["no commits yet"])


def _list_commits(session: Session, scope: Scope) -> None:
    repository = session.repository
    log = repository.log(scope)
    late = [f"record {record.number} is {NOTHING_VOUCHES}, so it is not a commit" for record in log.void]
    if not log.commits:
        session.refuse_empty(scope, hint="; ".join(late) or NO_COMMITS)
    noted = Noted()
    names = repository.loop.run(list_names(repository.asynchronous.store, scope, noted))
    unreadable = (*log.unreadable, *noted.unreadable)
    left_out = [f"left out: {one.error}; `tidemark verify` says what can be done" for one in unreadable]
    by_commit = names_by_commit(names)
    views = [view_commit(commit, by_commit) for commit in log.commits[::-1]]
    # A name keeps a commit of which retention has taken the record.
    there = {commit.pointer for commit in log.commits}
    views += [view_commit(repository.find(scope, name=n.name)) for n in names if n.source not in there]
    columns: dict[str, Column] = {
        ">number": "number",
        ">version": "version",
        "time (UTC)": "committed_at_ms",
        "kind": "kind",
        ">stores": "stores_count",
        ">files": "files_count",
        ">size": "size_bytes",
        "offsets": lambda of: shortened(of.offsets, LISTED_OFFSETS_MAX),
        "names": "names",
    }
    lines = tabulate(views, columns)
    view = CommitsView(scope=scope, commits=tuple(views), late=tuple(record.number for record in log.void))
    session.show(view, [*lines, *late, *left_out])


OFFSETS_SHOWN_MAX: Final = 24


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


@verb("history", "Show what each commit of a job brought, and became.", HistoryView)
@cli.scope_options(task=True)
@cli.option("--limit N", "Maximum number of records, the newest first.", click.IntRange(1, 10_000), default=ENTRIES_MAX)
@cli.option("--since TIME", "None from before: 7d, 2026-05-01, 'yesterday 18:00' (UTC).", cli.MOMENT)
@cli.option("--no-sizes", "No reading of indexes, and so no sizes of what each commit brought.")
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
            if since_ms is None:
                session.refuse_empty(scope)
            session.refuse_empty(scope, f"has no commits since {iso_time(since_ms)}", "name an earlier --since")
    entries = tuple(map(_view_entry, found.entries))
    view = HistoryView(scope=found.scope, older_count=found.older_count, entries=entries, problems=found.problems)
    for problem in found.problems:
        session.warn(f"left out: {problem}")
    session.show(view, _history_lines(view))


def _view_entry(entry: HistoryEntry) -> HistoryEntryView:
    restore_options = f"--name {entry.held_by}" if entry.held_by else f"--number {entry.number}"
    view = extend(HistoryEntryView, entry, restore_options=restore_options if entry.restores else "")
    if entry.commit is None:
        return view
    record, shown = entry.commit.record, view_commit(entry.commit)
    sums = {name: getattr(shown, name) for name in ("stores_count", "files_count", "size_bytes")}
    return msgspec.structs.replace(view, kind=record.kind, offsets=record.offsets, **sums)


def _history_lines(view: HistoryView) -> list[str]:
    columns: dict[str, Column] = {
        ">number": "number",
        ">version": "commit.record.version",
        # To the second.
        "time (UTC)": lambda of: of.commit and iso_time(of.commit.committed_at_ms).replace("T", " ")[:-5],
        ">new": "share.bytes_new",
        ">files": "share.files_new",
        ">retained": "share.bytes_retained",
        ">stores": "stores_count",
        "offsets": lambda of: format_offsets(of.offsets, OFFSETS_SHOWN_MAX),
        "names": lambda of: shortened(", ".join(of.names), NAMES_SHOWN_MAX),
        "what": lambda of: describe_entry(of, view.scope),
    }
    lines = tabulate(view.entries, columns)
    lines += [f"problem with {e.number}: {e.problem}" for e in view.entries if e.problem]
    if view.older_count:
        lines.append(f"{count(view.older_count, 'older record')}: see them with --limit or an earlier --since")
    shown = next((e for e in view.entries if e.restore_options), None)
    if shown is None:
        return lines
    if is_checkpoint_backup(shown.offsets):
        return [
            *lines,
            "",
            f"restore a batch: tidemark spark restore CHECKPOINT --job {view.scope.job} --batch N;",
            Prose("a backup may hold batches before its own; without --batch it is the newest"),
        ]
    options = shown.restore_options
    if shown.state is State.OPEN and (commit := shown.commit) is not None:
        options += f", or --version {commit.record.version}, --at {iso_time(commit.committed_at_ms)}"
    return [
        *lines,
        "",
        f"restore one: tidemark restore TARGET {options};",
        Prose("`rewind` makes it the newest again, `fork` begins another job with it, `keys` looks into it"),
    ]
