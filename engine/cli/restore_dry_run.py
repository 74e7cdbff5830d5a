"""`restore --dry-run`: what a restore would do, store by store."""

from pathlib import Path

import msgspec

from engine.cli.errors import Failure
from engine.cli.exit_codes import ExitCode
from engine.cli.output import CommitView, view_commit
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
from engine.cli.session import Session
from engine.records.find import Choice
from engine.records.missing import find_complete
from engine.repository.sync import SyncRepository
from engine.restore.restore import RestoreOptions
from index.plan.restore import RestorePlan, ReusedFile
from index.snapshot.records import StoreReference
from index.text import human_bytes, printable


class PlannedStoreView(msgspec.Struct, frozen=True, kw_only=True):
    """One store that would be restored, or would not: then `failure` says why, and nothing is counted."""

    task: str
    store: str
    version: int
    unique_id: str
    target: str
    # All that would be restored.
    files_total: int = 0
    bytes_total: int = 0
    files_fetched: int = 0
    # As asked for, dead bytes between the files of a pack included.
    fetch_bytes: int = 0
    fetch_requests: int = 0
    files_reused: int = 0
    bytes_reused: int = 0
    files_inline: int = 0
    bytes_inline: int = 0
    files_empty: int = 0
    fetched: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    failure: Failure | None = None


class RestorePlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore --dry-run`."""

    dry_run: bool = True
    commit: CommitView
    # With --or-newest-complete: why it is not the commit that was chosen; empty if it is.
    instead_because: str
    stores: tuple[PlannedStoreView, ...]


def show_plan(session: Session, repository: SyncRepository, request: RestoreRequest) -> ExitCode:
    """Show what a restore would do, without a write.

    Returns:
        What the restore would end with, as far as looking can tell.

    Raises:
        Exception: What the restore would end with, if no store would come back.
    """

    def plan(reference: StoreReference, target: Path) -> RestorePlan:
        return repository.plan_restore(
            reference,
            target,
            options=RestoreOptions(owners=request.owners, replace=request.replace, files=request.files),
        )

    choice, instead_because = _choose(session, repository, request)
    with chosen_commit(session, repository, request, choice, purpose="restore --dry-run") as (commit, _):
        stores = tuple(_view_plan(*outcome) for outcome in store_by_store(repository, request, commit, plan))
    view = RestorePlanView(commit=view_commit(commit), instead_because=instead_because, stores=stores)
    session.show(view, _plan_lines(view))
    if instead_because:
        session.warn(f"it is not the commit that was chosen: {instead_because}")
    return ExitCode.PARTIAL if any(store.failure is not None for store in stores) else ExitCode.OK


def _choose(session: Session, repository: SyncRepository, request: RestoreRequest) -> tuple[Choice, str]:
    """Which commit would be restored, and why it is not the one that was chosen."""
    if request.or_newest_complete and request.store is not None:
        # A restore of one store finds out by restoring it, and does not mind what other stores miss.
        chosen = session.find(repository, request.scope, request.choice)
        alone = msgspec.structs.replace(chosen.record, stores=(the_store(chosen, *request.store),))
        looked_at = [msgspec.structs.replace(chosen, record=alone)]
        if repository.loop.run(find_complete(repository.asynchronous.store, looked_at)) is not None:
            return session.choose(repository, request.choice), ""
    return choose_complete(session, repository, request)


def _view_plan(
    reference: StoreReference, target: Path, plan: RestorePlan | None, failure: Failure | None
) -> PlannedStoreView:
    view = PlannedStoreView(
        task=reference.task,
        store=reference.store,
        version=reference.version,
        unique_id=reference.unique_id,
        target=str(target),
        failure=failure,
    )
    if plan is None:
        return view
    reused: tuple[ReusedFile, ...] = (*plan.links, *plan.copies)
    fetched = ["/".join(file.path) for file in plan.fetched]
    return msgspec.structs.replace(
        view,
        files_total=plan.files_count,
        bytes_total=plan.size_bytes,
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


def _plan_lines(view: RestorePlanView) -> list[str]:
    rows = [
        (
            printable(f"{store.task}/{store.store}"),
            printable(store.target),
            f"{store.files_total:,}",
            human_bytes(store.bytes_total),
            human_bytes(store.fetch_bytes),
            human_bytes(store.bytes_reused),
            f"{store.fetch_requests:,}",
        )
        for store in view.stores
        if store.failure is None
    ]
    lines = [commit_line(view.commit), "", *stores_table(("would fetch", "would reuse", "requests"), rows)]
    for store in view.stores:
        lines += failure_lines(store.task, store.store, store.failure)
    return [*lines, "nothing was written"]
