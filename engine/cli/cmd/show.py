"""The verbs that only look: `list`, `show` and `diff`."""

from collections.abc import Iterable
from typing import Final

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli.config import CommitChoice
from engine.cli.options import COMMIT, Setting, Verb, common_options, scope_options, store_options
from engine.cli.session import Session, choose_scope, with_session
from engine.cli.views import (
    CommitView,
    ScopeView,
    StoreDifferenceView,
    StoreView,
    commits_table,
    difference_lines,
    names_by_commit,
    scopes_table,
    store_lines,
    stores_table,
    view_commit,
    view_difference,
    view_same_store,
    view_store,
)
from engine.errors import NotFoundError
from engine.records.log import load_log
from engine.repository.repository import Repository
from engine.repository.sync import SyncRepository
from index.plan.commits import NOTHING_VOUCHES, Commit
from index.snapshot.index_diff import diff_indexes
from index.snapshot.model import DirIndex, Scope
from index.snapshot.records import StoreReference
from index.text import printable, shortened

INDEXES_IN_FLIGHT_MAX: Final = 8
LOGS_IN_FLIGHT_MAX: Final = 16
OFFSETS_LINE_MAX: Final = 400


class ScopesView(msgspec.Struct, frozen=True, kw_only=True):
    """`list` without a job."""

    scopes: tuple[ScopeView, ...]


class CommitsView(msgspec.Struct, frozen=True, kw_only=True):
    """`list` of a job."""

    job: str
    commit_task: str | None
    commits: tuple[CommitView, ...]
    # Numbers of records that came after their lease and for which nothing vouches: no commits.
    late: tuple[int, ...]


class ShowView(msgspec.Struct, frozen=True, kw_only=True):
    """`show`."""

    commit: CommitView
    predecessor_number: int | None
    source_number: int | None
    source_job: str | None
    source_commit_task: str | None
    stores: tuple[StoreView, ...]


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    """`diff`."""

    before: CommitView
    after: CommitView
    stores: tuple[StoreDifferenceView, ...]


@click.command(
    "list",
    cls=Verb,
    short_help="List jobs, or the commits of a job.",
    prints=(CommitsView, ScopesView),
    example="tidemark list -r file:///backups --job flights",
)
@scope_options(job_required=False)
@click.option("--task", cls=Setting, metavar="TASK", help="With --commit-per-task: whose commits.  [default: 0]")
@click.option("--jobs", is_flag=True, help="List the jobs even if a job is set.")
@common_options
@with_session
def list_(session: Session, *, job: str | None, commit_per_task: bool, task: str | None, jobs: bool) -> None:
    """List the jobs of a repository, or the commits of one job, newest first."""
    scope = choose_scope(job, commit_per_task=commit_per_task, task=task) if job is not None and not jobs else None
    with session.open() as repository:
        if scope is None:
            _list_scopes(session, repository)
        else:
            _list_commits(session, repository, scope)


def _list_scopes(session: Session, repository: SyncRepository) -> None:
    async def look_at(scope: Scope) -> ScopeView:
        log = await load_log(repository.asynchronous.store, scope, past_damage=True)
        return ScopeView(
            job=scope.job,
            commit_task=scope.task,
            newest=view_commit(log.newest) if log.newest else None,
            # Nothing else closes the newest commit (design 0002, D3).
            forgotten=log.newest is None and bool(log.boundaries),
        )

    scopes = repository.loop.run(map_bounded(look_at, repository.scopes(), in_flight_max=LOGS_IN_FLIGHT_MAX))
    session.show(ScopesView(scopes=tuple(scopes)), scopes_table(scopes) if scopes else ["no commits yet"])


def _list_commits(session: Session, repository: SyncRepository, scope: Scope) -> None:
    log = repository.log(scope)
    commits = log.commits[::-1]
    late = [f"record {record.number} is {NOTHING_VOUCHES}, so that it is no commit" for record in log.void]
    if not commits:
        with session.explaining(repository, scope):
            raise NotFoundError("has no commits", operation="list", subject=str(scope), hint="; ".join(late))
    names = repository.names(scope)
    by_commit = names_by_commit(names)
    views = [view_commit(commit, by_commit) for commit in commits]
    # A name keeps a commit of which retention has taken the record.
    there = {commit.pointer for commit in commits}
    views += [view_commit(repository.find(scope, name=n.name)) for n in names if n.source not in there]
    view = CommitsView(
        job=scope.job, commit_task=scope.task, commits=tuple(views), late=tuple(record.number for record in log.void)
    )
    session.show(view, [*commits_table(views), *late])


@click.command(
    "show",
    cls=Verb,
    short_help="Show what a commit holds.",
    prints=(ShowView,),
    example="tidemark show -r file:///backups --job flights v8 --files",
)
@click.argument("commit", type=COMMIT, default="latest")
@scope_options()
@store_options(default=False)
@click.option("--files", is_flag=True, help="Each file: size, mode, and where its bytes stand.")
@common_options
@with_session
def show(
    session: Session,
    *,
    commit: CommitChoice,
    job: str,
    commit_per_task: bool,
    task: str | None,
    store: str | None,
    files: bool,
) -> None:
    """Show what a commit holds: stores, files, blobs, packs with their dead bytes, and lineage.

    COMMIT is latest (as when it is left out), a number, v8, 8_<uid>, @TIME or a name.
    """
    scope = choose_scope(job, commit_per_task=commit_per_task, task=task)
    with session.open() as repository:
        found = session.find(repository, scope, commit)
        names = names_by_commit(repository.names(scope))
        with repository.pinned(found, purpose="show"):
            references = choose_stores(found, task=task, store=store, operation="show")
            stores = repository.loop.run(_view_stores(repository.asynchronous, references, files=files))
    record = found.record
    view = ShowView(
        commit=view_commit(found, names),
        predecessor_number=record.predecessor.number if record.predecessor else None,
        source_number=record.source.number if record.source else None,
        source_job=record.source_scope.job if record.source_scope else None,
        source_commit_task=record.source_scope.task if record.source_scope else None,
        stores=stores,
    )
    session.show(view, _show_lines(found, view))


def _show_lines(commit: Commit, view: ShowView) -> list[str]:
    c = view.commit
    lines = [f"commit   {c.number} of {printable(str(commit.scope))}, version {c.version}, {c.committed_at}, {c.kind}"]
    if view.source_number is not None:
        source = Scope(view.source_job, view.source_commit_task) if view.source_job is not None else commit.scope
        lines.append(f"from     commit {view.source_number} of {printable(str(source))}")
    if view.predecessor_number is not None:
        lines.append(f"after    commit {view.predecessor_number}")
    if c.names:
        lines.append(f"names    {printable(', '.join(c.names))}")
    if c.offsets:
        lines.append(f"offsets  {printable(shortened(c.offsets, OFFSETS_LINE_MAX))}")
    lines += ["", *stores_table(view.stores)]
    for store in view.stores:
        if len(view.stores) == 1 or store.files:
            title = [f"store {printable(store.task)}/{printable(store.store)}"] if len(view.stores) > 1 else []
            lines += ["", *title, *store_lines(store)]
    return lines


@click.command(
    "diff",
    cls=Verb,
    short_help="Show which files differ between two commits.",
    prints=(DiffView,),
    example="tidemark diff -r file:///backups --job flights 11 latest",
)
@click.argument("a", type=COMMIT)
@click.argument("b", type=COMMIT, default="latest")
@scope_options()
@store_options(default=False)
@common_options
@with_session
def diff(
    session: Session,
    *,
    a: CommitChoice,
    b: CommitChoice,
    job: str,
    commit_per_task: bool,
    task: str | None,
    store: str | None,
) -> None:
    """Show which files differ between two commits: + added, - removed, ~ changed.

    A and B are each latest, a number, v8, 8_<uid>, @TIME or a name. Files are compared by size, content hash and
    mode; only indexes are read.
    """
    scope = choose_scope(job, commit_per_task=commit_per_task, task=task)
    with session.open() as repository:
        before, after = session.find(repository, scope, a), session.find(repository, scope, b)
        with repository.pinned(before, purpose="diff"), repository.pinned(after, purpose="diff"):
            stores = _diff_stores(repository, before, after, task=task, store=store)
    view = DiffView(before=view_commit(before), after=view_commit(after), stores=stores)
    lines = [f"{_moment(view.before)} -> {_moment(view.after)}"]
    for compared in stores:
        title = [f"store {printable(compared.task)}/{printable(compared.store)}"] if len(stores) > 1 else []
        lines += ["", *title, *difference_lines(compared)]
    session.show(view, lines)


def _moment(commit: CommitView) -> str:
    return f"commit {commit.number} ({commit.committed_at})"


def _diff_stores(
    repository: SyncRepository, before: Commit, after: Commit, *, task: str | None, store: str | None
) -> tuple[StoreDifferenceView, ...]:
    ours = {(s.task, s.store): s for s in _selected(before, task, store)}
    theirs = {(s.task, s.store): s for s in _selected(after, task, store)}
    if not ours and not theirs:
        raise _no_store(after, task, store, "diff")
    pairs = [(ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())]
    return repository.loop.run(_compare(repository.asynchronous, pairs))


async def _compare(
    repository: Repository, pairs: Iterable[tuple[StoreReference | None, StoreReference | None]]
) -> tuple[StoreDifferenceView, ...]:
    async def directory(reference: StoreReference | None) -> DirIndex:
        return (await repository.read_index(reference.index)).dir if reference is not None else DirIndex("")

    async def compare(pair: tuple[StoreReference | None, StoreReference | None]) -> StoreDifferenceView:
        before, after = pair
        if before is not None and after is not None and before.index == after.index:
            return view_same_store(after)
        return view_difference(before, after, diff_indexes(await directory(before), await directory(after)))

    return tuple(await map_bounded(compare, pairs, in_flight_max=INDEXES_IN_FLIGHT_MAX))


def choose_stores(commit: Commit, *, task: str | None, store: str | None, operation: str) -> tuple[StoreReference, ...]:
    """The stores of a commit that somebody asked for, all if neither is given.

    Raises:
        NotFoundError: There is none.
    """
    found = _selected(commit, task, store)
    if not found:
        raise _no_store(commit, task, store, operation)
    return found


def _selected(commit: Commit, task: str | None, store: str | None) -> tuple[StoreReference, ...]:
    return tuple(s for s in commit.record.stores if task in {None, s.task} and store in {None, s.store})


def _no_store(commit: Commit, task: str | None, store: str | None, operation: str) -> NotFoundError:
    have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8])
    return NotFoundError(
        f"commit {commit.pointer.number} has no store {task or '*'}/{store or '*'}",
        operation=operation,
        subject=str(commit.scope),
        hint=f"it has {have or 'none at all'}",
    )


async def _view_stores(
    repository: Repository, references: Iterable[StoreReference], *, files: bool
) -> tuple[StoreView, ...]:
    """Some stores in their order; a few indexes are in memory at a time."""

    async def view(reference: StoreReference) -> StoreView:
        return view_store(reference, await repository.read_index(reference.index), files=files)

    return tuple(await map_bounded(view, references, in_flight_max=INDEXES_IN_FLIGHT_MAX))
