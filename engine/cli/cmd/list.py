"""The verb `list`."""

from typing import Final

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli import options as cli
from engine.cli.output import CommitView, names_by_commit, view_commit
from engine.cli.session import Session, verb
from engine.errors import NotFoundError
from engine.records.log import load_log
from engine.text import table
from index.display import human_bytes, printable, shortened
from index.plan.commits import NOTHING_VOUCHES
from index.snapshot.model import Scope

LOGS_IN_FLIGHT_MAX: Final = 16
OFFSETS_SHOWN_MAX: Final = 32


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


@verb("list", "List jobs, or the commits of a job.", prints=(CommitsView, ScopesView))
@cli.scope_options(job_required=False, task=True)
@click.option("--jobs", is_flag=True, help="List the jobs even if a job is set.")
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
    rows = []
    for scope in scopes:
        newest = ("-", "-", "forgotten" if scope.forgotten else "-", "-", "-", "-")
        if (c := scope.newest) is not None:
            newest = (str(c.number), str(c.version), c.committed_at, *_sizes(c))
        rows.append((printable(str(scope.scope)), *newest))
    headers = ("job", "newest", "version", "time (UTC)", "stores", "files", "size")
    lines = table(headers, rows, right=("newest", "version", "stores", "files", "size"))
    session.show(ScopesView(scopes=tuple(scopes)), lines if scopes else ["no commits yet"])


def _list_commits(session: Session, scope: Scope) -> None:
    repository = session.repository
    log = repository.log(scope)
    late = [f"record {record.number} is {NOTHING_VOUCHES}, so it is not a commit" for record in log.void]
    if not log.commits:
        with session.explaining(scope):
            raise NotFoundError("has no commits", operation="list", subject=str(scope), hint="; ".join(late))
    names = repository.names(scope)
    by_commit = names_by_commit(names)
    views = [view_commit(commit, by_commit) for commit in log.commits[::-1]]
    # A name keeps a commit of which retention has taken the record.
    there = {commit.pointer for commit in log.commits}
    views += [view_commit(repository.find(scope, name=n.name)) for n in names if n.source not in there]
    rows = [
        (
            str(c.number),
            str(c.version),
            c.committed_at,
            c.kind,
            *_sizes(c),
            printable(shortened(c.offsets, OFFSETS_SHOWN_MAX)) or "-",
            printable(", ".join(c.names)) or "-",
        )
        for c in views
    ]
    headers = ("number", "version", "time (UTC)", "kind", "stores", "files", "size", "offsets", "names")
    lines = table(headers, rows, right=("number", "version", "stores", "files", "size"))
    view = CommitsView(scope=scope, commits=tuple(views), late=tuple(record.number for record in log.void))
    session.show(view, [*lines, *late])


def _sizes(commit: CommitView) -> tuple[str, str, str]:
    return str(commit.stores_count), f"{commit.files_count:,}", human_bytes(commit.size_bytes)
