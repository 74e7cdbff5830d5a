"""The verb `diff`."""

from collections.abc import Iterable

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli.choice import INDEXES_IN_FLIGHT_MAX, no_store, select_stores
from engine.cli.config import CommitChoice
from engine.cli.options import COMMIT, Verb, common_options, scope_options, store_options
from engine.cli.session import Session, choose_scope, with_session
from engine.cli.views import (
    CommitView,
    StoreDifferenceView,
    difference_lines,
    view_commit,
    view_difference,
    view_same_store,
)
from engine.repository.repository import Repository
from engine.repository.sync import SyncRepository
from index.plan.commits import Commit
from index.snapshot.delta import diff_indexes
from index.snapshot.model import DirIndex
from index.snapshot.records import StoreReference
from index.text import printable


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    """`diff`."""

    before: CommitView
    after: CommitView
    stores: tuple[StoreDifferenceView, ...]


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
    ours = {(s.task, s.store): s for s in select_stores(before, task, store)}
    theirs = {(s.task, s.store): s for s in select_stores(after, task, store)}
    if not ours and not theirs:
        raise no_store(after, task, store, "diff")
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
