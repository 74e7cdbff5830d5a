"""The verb `show`."""

from collections.abc import Iterable
from typing import Final

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli.choice import INDEXES_IN_FLIGHT_MAX, choose_stores
from engine.cli.config import CommitChoice
from engine.cli.options import COMMIT, Verb, common_options, scope_options, store_options
from engine.cli.session import Session, choose_scope, with_session
from engine.cli.views import (
    CommitView,
    StoreView,
    names_by_commit,
    store_lines,
    stores_table,
    view_commit,
    view_store,
)
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference
from index.text import printable, shortened

OFFSETS_LINE_MAX: Final = 400


class ShowView(msgspec.Struct, frozen=True, kw_only=True):
    """`show`."""

    commit: CommitView
    predecessor_number: int | None
    source_number: int | None
    source_job: str | None
    source_commit_task: str | None
    stores: tuple[StoreView, ...]


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


async def _view_stores(
    repository: Repository, references: Iterable[StoreReference], *, files: bool
) -> tuple[StoreView, ...]:
    """Some stores in their order; a few indexes are in memory at a time."""

    async def view(reference: StoreReference) -> StoreView:
        return view_store(reference, await repository.read_index(reference.index), files=files)

    return tuple(await map_bounded(view, references, in_flight_max=INDEXES_IN_FLIGHT_MAX))
