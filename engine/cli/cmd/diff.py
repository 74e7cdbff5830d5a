"""The verb `diff`."""

from collections.abc import Sequence

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import CommitView, view_commit
from engine.cli.session import INDEXES_IN_FLIGHT_MAX, Session, verb
from engine.repository.repository import Repository
from index.display import human_bytes, printable
from index.snapshot.delta import ComparedFile, diff_indexes
from index.snapshot.model import DirIndex, Scope, StoreReference


class StoreDifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """One store on two sides; a unique id is null on the side that has no such store."""

    task: str
    store: str
    before_unique_id: str | None
    after_unique_id: str | None
    added: tuple[ComparedFile, ...] = ()
    removed: tuple[ComparedFile, ...] = ()
    changed: tuple[ComparedFile, ...] = ()
    unchanged_count: int = 0
    unchanged_bytes: int = 0


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    """`diff`."""

    before: CommitView
    after: CommitView
    stores: tuple[StoreDifferenceView, ...]


@verb("diff", "Show which files differ between two commits.", prints=(DiffView,))
@click.argument("a", type=cli.COMMIT)
@click.argument("b", type=cli.COMMIT, default="latest")
@cli.scope_options()
@cli.store_options(default=False)
def diff(
    session: Session, *, a: CommitChoice, b: CommitChoice, scope: Scope, task: str | None, store: str | None
) -> None:
    """Show which files differ between two commits: + added, - removed, ~ changed.

    A and B are each latest, a number, v8, 8_<uid>, @TIME or a name. Files are compared by size, content hash and
    mode; only indexes are read.

    Example: tidemark diff -r file:///backups --job flights 11 latest
    """
    with session.open() as repository:
        before, after = session.find(scope, a), session.find(scope, b)
        with repository.pinned(before, purpose="diff"), repository.pinned(after, purpose="diff"):
            ours = session.choose_stores(before, task, store, required=False)
            theirs = session.choose_stores(after, task, store, required=not ours)
            differences = repository.loop.run(_compare(repository.asynchronous, ours, theirs))
    view = DiffView(before=view_commit(before), after=view_commit(after), stores=differences)
    lines = [" -> ".join(f"commit {c.number} ({c.committed_at})" for c in (view.before, view.after))]
    for compared in differences:
        title = [f"store {printable(compared.task)}/{printable(compared.store)}"] if len(differences) > 1 else []
        lines += ["", *title, *_difference_lines(compared)]
    session.show(view, lines)


async def _compare(
    repository: Repository, ours: Sequence[StoreReference], theirs: Sequence[StoreReference]
) -> tuple[StoreDifferenceView, ...]:
    befores, afters = ({(s.task, s.store): s for s in stores} for stores in (ours, theirs))

    async def directory(reference: StoreReference | None) -> DirIndex:
        return (await repository.read_index(reference.index)).dir if reference is not None else DirIndex("")

    async def compare(place: tuple[str, str]) -> StoreDifferenceView:
        before, after = befores.get(place), afters.get(place)
        ids = (before.unique_id if before else None, after.unique_id if after else None)
        view = StoreDifferenceView(task=place[0], store=place[1], before_unique_id=ids[0], after_unique_id=ids[1])
        if before is not None and after is not None and before.index == after.index:
            # The later commit carries it over: nothing differs, and nothing has to be read.
            return msgspec.structs.replace(view, unchanged_count=after.files_count, unchanged_bytes=after.size_bytes)
        difference = diff_indexes(await directory(before), await directory(after))
        return msgspec.structs.replace(
            view,
            added=difference.added,
            removed=difference.removed,
            changed=difference.changed,
            unchanged_count=len(difference.unchanged),
            unchanged_bytes=sum(file.after_bytes or 0 for file in difference.unchanged),
        )

    places = sorted(befores.keys() | afters.keys())
    return tuple(await map_bounded(compare, places, in_flight_max=INDEXES_IN_FLIGHT_MAX))


def _difference_lines(store: StoreDifferenceView) -> list[str]:
    """Format the files that differ, each with a sign and its sizes, and a line of sums."""
    signs = (("+", store.added), ("-", store.removed), ("~", store.changed))
    rows = [(sign, file, _sizes(file)) for sign, files in signs for file in files]
    width = max((len(sizes) for _, _, sizes in rows), default=0)
    lines = [f"{sign} {sizes.rjust(width)}  {printable('/'.join(file.path))}" for sign, file, sizes in rows]
    lines.append(
        f"{len(store.added):,} added, {len(store.removed):,} removed, {len(store.changed):,} changed,"
        f" {store.unchanged_count:,} unchanged ({human_bytes(store.unchanged_bytes)})"
    )
    return lines


def _sizes(file: ComparedFile) -> str:
    if file.before_bytes is None or file.after_bytes is None:
        return human_bytes(file.before_bytes or file.after_bytes or 0)
    mode = "mode, " if file.mode_changed else ""
    if file.before_bytes == file.after_bytes:
        return f"{mode}{human_bytes(file.after_bytes)}"
    return f"{mode}{human_bytes(file.before_bytes)} -> {human_bytes(file.after_bytes)}"
