"""The verb `restore`."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from blobstore.errors import StoreError
from engine.cli.commit_options import choose_commit, commit_options
from engine.cli.exit_codes import ExitCode
from engine.cli.failures import Failure, describe
from engine.cli.options import (
    OR_NEWEST_COMPLETE_HELP,
    Setting,
    Verb,
    common_options,
    figures_option,
    scope_options,
    store_options,
    transfer_options,
)
from engine.cli.reading import choose_stores
from engine.cli.session import Session, choose_scope, with_session
from engine.config import CommitChoice, Moment
from engine.errors import DamagedError, EngineError
from engine.restore import OwnerPolicy, RestoreResult
from engine.sync import SyncRepository
from engine.views import CommitView, view_commit
from engine.words import human_bytes, human_duration, printable, table
from index.errors import FormatError
from index.keys import encode_component
from index.log import Commit
from index.model import Scope, StoreReference
from index.restore_plan import RestorePlan, ReusedFile


class RestoredStoreView(msgspec.Struct, frozen=True, kw_only=True):
    """One store that was restored, or was not: then `failure` says why and there is no `result`."""

    task: str
    store: str
    version: int
    unique_id: str
    target: str
    result: RestoreResult | None
    failure: Failure | None = None


class RestoreView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore`."""

    commit: CommitView
    # False: the store denied writing a pin, so that nothing protected the restore from a collection.
    pinned: bool
    # With --or-newest-complete: why it is not the commit that was chosen; empty if it is.
    instead_because: str
    stores: tuple[RestoredStoreView, ...]


class PlannedStoreView(msgspec.Struct, frozen=True, kw_only=True):
    """One store that would be restored."""

    task: str
    store: str
    version: int
    unique_id: str
    target: str
    files_fetched: int
    # As asked for, dead bytes between the files of a pack included.
    fetch_bytes: int
    fetch_requests: int
    files_reused: int
    bytes_reused: int
    files_inline: int
    bytes_inline: int
    files_empty: int
    fetched: tuple[str, ...]
    reused: tuple[str, ...]


class RestorePlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore --dry-run`."""

    dry_run: bool = True
    commit: CommitView
    stores: tuple[PlannedStoreView, ...]


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to restore and where to."""

    scope: Scope
    choice: CommitChoice
    # None: every store of the commit.
    store: tuple[str, str] | None
    target: Path
    owners: OwnerPolicy
    replace: bool
    files: tuple[str, ...]
    or_newest_complete: bool


@click.command(
    "restore",
    cls=Verb,
    short_help="Bring a store back into a directory.",
    prints=(RestoreView, RestorePlanView),
    example="tidemark restore /state/new -r file:///backups -j flights --version 8",
)
@click.argument("target", type=click.Path(path_type=Path), metavar="TARGET")
@scope_options()
@store_options(default=True)
@commit_options
@click.option("--all", "all_stores", is_flag=True, help="All stores of the commit, to TARGET/<task>/<store>.")
@click.option("--files", multiple=True, metavar="GLOB", help="Only files that match, such as '*.sst'; may be repeated.")
@click.option("--replace", is_flag=True, help="TARGET may have content: it is replaced, files that fit are reused.")
@click.option(
    "--owners",
    cls=Setting,
    type=click.Choice([policy.value for policy in OwnerPolicy]),
    default=OwnerPolicy.IGNORE.value,
    show_default=True,
    help="Recorded owners: leave, set where possible, or set or fail.",
)
@click.option("--or-newest-complete", is_flag=True, help=OR_NEWEST_COMPLETE_HELP)
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; say what would be fetched and reused.")
@figures_option
@transfer_options
@common_options
@with_session
def restore(
    session: Session,
    *,
    target: Path,
    job: str,
    commit_per_task: bool,
    task: str,
    store: str,
    number: int | None,
    version: CommitChoice | None,
    at: Moment | None,
    name: str | None,
    all_stores: bool,
    files: tuple[str, ...],
    replace: bool,
    owners: str,
    or_newest_complete: bool,
    dry_run: bool,
) -> ExitCode:
    """Bring a store back into the directory TARGET, whole or not at all.

    The newest commit, unless one of --number, --version, --at and --name chooses another. Ends with 3 if with --all
    some stores came back and others did not.
    """
    request = _Request(
        scope=choose_scope(job, commit_per_task=commit_per_task, task=task),
        choice=choose_commit(number=number, version=version, at=at, name=name),
        store=None if all_stores else (task, store),
        target=target,
        owners=OwnerPolicy(owners),
        replace=replace,
        files=files,
        or_newest_complete=or_newest_complete,
    )
    with session.open() as repository:
        if dry_run:
            _preview(session, repository, request)
            return ExitCode.OK
        view = _restore(session, repository, request)
    session.show(view, _restore_lines(view))
    if view.instead_because:
        session.warn(f"it is not the commit that was chosen: {view.instead_because}")
    if not view.pinned:
        session.warn("the store denied writing a pin: a collection at the same time could have taken the commit")
    for restored in view.stores:
        if restored.result is not None and restored.result.leftovers:
            session.warn(f"could not be removed: {', '.join(restored.result.leftovers)}")
    return _exit_code(view)


def _targets(request: _Request, commit: Commit) -> list[tuple[StoreReference, Path]]:
    """Which stores go where. Names of tasks and stores are made safe as in keys: they come from the store."""
    if request.store is None:
        return [
            (s, request.target / encode_component(s.task) / encode_component(s.store)) for s in commit.record.stores
        ]
    task, store = request.store
    return [(_the_store(commit, task, store), request.target)]


def _the_store(commit: Commit, task: str, store: str) -> StoreReference:
    return choose_stores(commit, task=task, store=store, operation="restore")[0]


def _restore(session: Session, repository: SyncRepository, request: _Request) -> RestoreView:
    if request.store is not None:
        return _restore_one(session, repository, request, *request.store)
    return _restore_all(session, repository, request)


def _restore_one(session: Session, repository: SyncRepository, request: _Request, task: str, store: str) -> RestoreView:
    with session.explaining(repository, request.scope), session.progress("restore") as progress:
        restored = repository.find_and_restore(
            request.scope,
            request.target,
            task=task,
            store=store,
            owners=request.owners,
            replace=request.replace,
            files=request.files,
            or_newest_complete=request.or_newest_complete,
            progress=progress,
            **session.choose(repository, request.choice),
        )
    reference = _the_store(restored.commit, task, store)
    view = _view_restored(reference, request.target, restored.result)
    return RestoreView(
        commit=view_commit(restored.commit),
        pinned=restored.pinned,
        instead_because=restored.instead_because,
        stores=(view,),
    )


def _restore_all(session: Session, repository: SyncRepository, request: _Request) -> RestoreView:
    choice, instead_because = session.choose(repository, request.choice), ""
    with contextlib.ExitStack() as stack:
        with session.explaining(repository, request.scope):
            if request.or_newest_complete:
                asked, choice = choice, repository.choose_complete(request.scope, **choice)
                instead_because = "" if choice == asked else "something of that one is missing"
            found = repository.find_pinned(request.scope, purpose="restore", **choice)
            commit, lease = stack.enter_context(found)
        stores = _restore_stores(session, repository, request, commit)
    return RestoreView(commit=view_commit(commit), pinned=lease.pinned, instead_because=instead_because, stores=stores)


def _restore_stores(
    session: Session, repository: SyncRepository, request: _Request, commit: Commit
) -> tuple[RestoredStoreView, ...]:
    """One store after the other; each by itself already uses all that it may of network and memory.

    Raises:
        Exception: The first failure, if no store came back.
    """
    done: list[RestoredStoreView] = []
    first: Exception | None = None
    for reference, target in _targets(request, commit):
        result, failure = None, None
        try:
            with session.progress("restore") as progress:
                result = repository.restore_reference(
                    reference,
                    target,
                    owners=request.owners,
                    replace=request.replace,
                    files=request.files,
                    progress=progress,
                )
        except (StoreError, EngineError, FormatError, OSError) as error:
            named = error
            if first is None and isinstance(error, DamagedError):
                # Of the first one alone: to find out which commit is whole may take long.
                named = repository.name_complete(request.scope, error)
            first = first or named
            failure = describe(named, "restore")
        done.append(_view_restored(reference, target, result, failure))
    if first is not None and all(view.result is None for view in done):
        raise first
    return tuple(done)


def _view_restored(
    reference: StoreReference, target: Path, result: RestoreResult | None, failure: Failure | None = None
) -> RestoredStoreView:
    return RestoredStoreView(
        task=reference.task,
        store=reference.store,
        version=reference.version,
        unique_id=reference.unique_id,
        target=str(target),
        result=result,
        failure=failure,
    )


def _exit_code(view: RestoreView) -> ExitCode:
    return ExitCode.PARTIAL if any(store.failure is not None for store in view.stores) else ExitCode.OK


def _restore_lines(view: RestoreView) -> list[str]:
    rows = [
        (
            printable(f"{store.task}/{store.store}"),
            printable(store.target),
            f"{r.files_total:,}",
            human_bytes(r.bytes_total),
            human_bytes(r.bytes_fetched),
            human_bytes(r.bytes_reused),
            f"{r.requests:,}",
            human_duration(int(r.seconds * 1000)),
        )
        for store in view.stores
        if (r := store.result) is not None
    ]
    lines = [_commit_line(view.commit), "", *_stores_table(("fetched", "reused", "requests", "time"), rows)]
    for store in view.stores:
        if store.failure is not None:
            lines.append(f"FAILED {printable(f'{store.task}/{store.store}')}: {printable(store.failure.message)}")
            lines.append(f"  hint: {printable(store.failure.hint)}")
    return lines


def _commit_line(commit: CommitView) -> str:
    return f"commit {commit.number}, version {commit.version}, {commit.committed_at}"


def _stores_table(columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> list[str]:
    return table(("store", "target", "files", "size", *columns), rows, right=("files", "size", *columns))


# ---------------------------------------------------------------------- dry run


def _preview(session: Session, repository: SyncRepository, request: _Request) -> None:
    commit = session.find(repository, request.scope, request.choice)
    targets = _targets(request, commit)
    with repository.pinned(commit, purpose="restore --dry-run"):
        stores = tuple(
            _view_plan(
                reference,
                target,
                repository.plan_restore(
                    reference, target, owners=request.owners, replace=request.replace, files=request.files
                ),
            )
            for reference, target in targets
        )
    view = RestorePlanView(commit=view_commit(commit), stores=stores)
    rows = [
        (
            printable(f"{store.task}/{store.store}"),
            printable(store.target),
            f"{reference.files_count:,}",
            human_bytes(reference.size_bytes),
            human_bytes(store.fetch_bytes),
            human_bytes(store.bytes_reused),
            f"{store.fetch_requests:,}",
        )
        for store, (reference, _) in zip(stores, targets, strict=True)
    ]
    lines = [_commit_line(view.commit), "", *_stores_table(("would fetch", "would reuse", "requests"), rows)]
    session.show(view, [*lines, "nothing was written"])


def _view_plan(reference: StoreReference, target: Path, plan: RestorePlan) -> PlannedStoreView:
    reused: tuple[ReusedFile, ...] = (*plan.links, *plan.copies)
    fetched = ["/".join(file.path) for file in plan.fetched]
    return PlannedStoreView(
        task=reference.task,
        store=reference.store,
        version=reference.version,
        unique_id=reference.unique_id,
        target=str(target),
        files_fetched=len(fetched),
        fetch_bytes=plan.fetch_bytes,
        fetch_requests=plan.fetch_requests,
        files_reused=len(reused),
        bytes_reused=sum(file.target.size_bytes for file in reused),
        files_inline=len(plan.inline),
        bytes_inline=sum(file.size_bytes for file in plan.inline),
        files_empty=len(plan.empty),
        fetched=tuple(sorted(fetched)),
        reused=tuple(sorted("/".join(file.target.path) for file in reused)),
    )
