"""The verb `restore`."""

from pathlib import Path

import click
import msgspec

from engine.cli.choice import choose_commit, commit_options
from engine.cli.config import CommitChoice
from engine.cli.errors import Failure
from engine.cli.exit_codes import ExitCode
from engine.cli.options import (
    OR_NEWEST_COMPLETE_HELP,
    Setting,
    Verb,
    common_options,
    figures_option,
    scope_options,
    store_options,
    transfer_options,
    trust_stat_option,
)
from engine.cli.output import CommitView, view_commit
from engine.cli.restore_dry_run import RestorePlanView, show_plan
from engine.cli.restore_request import (
    RestoreRequest,
    choose_complete,
    chosen_commit,
    commit_line,
    failure_lines,
    store_by_store,
    stores_table,
    the_store,
)
from engine.cli.session import Session, choose_scope, with_session
from engine.repository.sync import SyncRepository
from engine.restore.restore import OwnerPolicy, RestoreOptions, RestoreResult, check_patterns
from engine.text import Moment
from index.snapshot.records import StoreReference
from index.text import human_bytes, human_duration, printable


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
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool
    # With --or-newest-complete: why it is not the commit that was chosen; empty if it is.
    instead_because: str
    stores: tuple[RestoredStoreView, ...]


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
@click.option(
    "--replace", is_flag=True, help="TARGET may have content: it is replaced, files with the right hash are reused."
)
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
@trust_stat_option
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
    some stores came back and others did not; --dry-run ends as the restore would, as far as looking can tell.
    """
    check_patterns(files)
    request = RestoreRequest(
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
            return show_plan(session, repository, request)
        view = (
            _restore_all(session, repository, request)
            if request.store is None
            else _restore_one(session, repository, request, *request.store)
        )
    for one in view.stores:
        if one.result is not None:
            session.note(one.result, task=one.task, store=one.store)
    session.note_value("restore_stores_failed", sum(one.failure is not None for one in view.stores))
    session.show(view, _restore_lines(view))
    if view.instead_because:
        session.warn(f"it is not the commit that was chosen: {view.instead_because}")
    if not view.pinned:
        session.warn("no pin could be written: a collection at the same time could have taken the commit")
    for restored in view.stores:
        if restored.result is not None and restored.result.leftovers:
            session.warn(f"could not be removed: {', '.join(restored.result.leftovers)}")
    return _exit_code(view)


def _restore_one(
    session: Session, repository: SyncRepository, request: RestoreRequest, task: str, store: str
) -> RestoreView:
    with session.explaining(repository, request.scope), session.progress("restore") as progress:
        restored = repository.find_and_restore(
            request.scope,
            request.target,
            task=task,
            store=store,
            or_newest_complete=request.or_newest_complete,
            options=RestoreOptions(owners=request.owners, replace=request.replace, files=request.files),
            progress=progress,
            **session.choose(repository, request.choice),
        )
    reference = the_store(restored.commit, task, store)
    view = _view_restored(reference, request.target, restored.result)
    return RestoreView(
        commit=view_commit(restored.commit),
        pinned=restored.pinned,
        instead_because=restored.instead_because,
        stores=(view,),
    )


def _restore_all(session: Session, repository: SyncRepository, request: RestoreRequest) -> RestoreView:
    def restore(reference: StoreReference, target: Path) -> RestoreResult:
        # One store after the other; each by itself already uses all that it may of network and memory.
        with session.progress("restore") as progress:
            return repository.restore_reference(
                reference,
                target,
                options=RestoreOptions(owners=request.owners, replace=request.replace, files=request.files),
                progress=progress,
            )

    choice, instead_because = choose_complete(session, repository, request)
    with chosen_commit(session, repository, request, choice, purpose="restore") as (commit, lease):
        stores = tuple(_view_restored(*outcome) for outcome in store_by_store(repository, request, commit, restore))
    return RestoreView(commit=view_commit(commit), pinned=lease.pinned, instead_because=instead_because, stores=stores)


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
    lines = [commit_line(view.commit), "", *stores_table(("fetched", "reused", "requests", "time"), rows)]
    for store in view.stores:
        lines += failure_lines(store.task, store.store, store.failure)
    return lines
