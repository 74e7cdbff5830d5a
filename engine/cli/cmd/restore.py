"""The verb `restore`, and its dry run."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.errors import Failure, describe
from engine.cli.output import Column, CommitView, format_took, tabulate, view_commit
from engine.cli.run import ExitCode
from engine.cli.session import Session, refuse_given, some, verb, was_given
from engine.errors import DamagedError
from engine.inspect.browse import is_checkpoint_backup
from engine.records.find import Choice, find_complete, key_of
from engine.restore.restore import RestoreOptions, RestoreResult, check_patterns, target_below
from engine.restore.write import OwnerPolicy
from engine.rocksdb.merge import CURRENT
from index.display import count
from index.plan.restore import ReusedFile
from index.snapshot.model import Scope, StoreReference
from tidemark.errors import TidemarkError


class RestoreArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to restore, where to, and how."""

    scope: Scope
    task: str
    store: str
    choice: CommitChoice
    target: Path
    all_stores: bool
    how: RestoreOptions
    or_newest_complete: bool
    dry_run: bool
    if_absent: bool


class TargetView(msgspec.Struct, frozen=True, kw_only=True):
    """A store of a commit, and where it goes."""

    json_omitted: ClassVar = ("reference",)
    json_properties: ClassVar = {name: f"reference.{name}" for name in ("task", "store", "version", "unique_id")}

    reference: StoreReference
    target: Path
    failure: Failure | None = None

    @property
    def place(self) -> str:
        return f"{self.reference.task}/{self.reference.store}"


class RestoredStoreView(TargetView, frozen=True, kw_only=True):
    """One store that was restored, or was not: then `failure` says why and there is no `result`."""

    result: RestoreResult | None = None


ViewT = TypeVar("ViewT", bound=TargetView)


class RestoreView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore`."""

    commit: CommitView
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool
    # With --or-newest-complete: why it is not the commit that was chosen; empty if it is.
    instead_because: str
    stores: tuple[RestoredStoreView, ...]


class PlannedStoreView(TargetView, frozen=True, kw_only=True):
    """One store that would be restored, or would not: then `failure` says why, and nothing is counted."""

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


class RestorePlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore --dry-run`."""

    dry_run: bool = True
    commit: CommitView
    # With --or-newest-complete: why it is not the commit that was chosen; empty if it is.
    instead_because: str
    stores: tuple[PlannedStoreView, ...]


class PresentView(msgspec.Struct, frozen=True, kw_only=True):
    """`restore --if-absent` where TARGET has content: nothing was read or written."""

    target: Path
    restored: bool = False


@verb("restore", "Bring a store back into a directory.", RestoreView, RestorePlanView, PresentView)
@click.argument("target", type=cli.TARGET, metavar="TARGET")
@cli.scope_options()
@cli.store_options(default=True)
@cli.commit_options
@cli.option("--all", "All its stores, to TARGET/<task>/<store>.", to="all_stores")
@cli.option("--files GLOB", "Only files that match, such as '*.sst'; may be repeated.", multiple=True)
@cli.option("--replace", "TARGET may have content: it is replaced, files with the right hash are reused.")
@cli.option("--if-absent", "Do nothing if TARGET has content.")
@cli.setting(
    "--owners",
    "Recorded owners: leave, set where possible, or set or fail.",
    click.Choice([policy.value for policy in OwnerPolicy]),
    default=OwnerPolicy.IGNORE.value,
    callback=lambda _ctx, _param, value: OwnerPolicy(value),
)
@cli.option("--deleted", "Read deleted versions of a bucket too.")
@cli.or_newest_complete_option
@cli.option("-n --dry-run", "Write nothing; say what would be fetched.")
@cli.figures_option
@cli.trust_stat_option
@cli.transfer_options
def restore(session: Session, options: RestoreArguments) -> ExitCode:
    """Bring a store back into the directory TARGET, whole or not at all.

    The newest commit, unless one of --number, --version, --at and --name chooses another. Ends with 3 if with --all
    some stores came back and others did not; --dry-run ends as the restore would, as far as reading can show.

    Example: tidemark restore /state/new -r file:///backups -j flights --version 8
    """
    check_patterns(options.how.files)
    if options.if_absent and (options.all_stores or options.how.replace):
        # Stores that are there may be of another commit than those that are not.
        hint = "leave it out; restore each store by itself"
        raise session.refusal("--if-absent is for one store, and not for --replace", hint)
    if options.all_stores:
        for name in ("store",) if options.scope.task is not None else ("task", "store"):
            refuse_given(name, "does not go with --all", "leave one of them out")
    # A new volume has a directory of its own: as a mount point it is refused, with a hint.
    is_volume = options.target.is_mount()
    if options.if_absent and not is_volume and options.target.is_dir() and any(options.target.iterdir()):
        target = options.target
        session.show(PresentView(target=target), [f"{target} has content: left as it is"])
        return ExitCode.OK
    if options.how.deleted:
        if options.dry_run and options.or_newest_complete:
            message, hint = "only the restore itself sees which deleted blobs can be read", "leave out one of the three"
            raise session.refusal(f"{message}: --deleted --or-newest-complete --dry-run", hint)
        s3 = msgspec.structs.replace(session.common.s3, serve_deleted=True)
        session.common = msgspec.structs.replace(session.common, s3=s3)
    with session.open():
        if options.dry_run:
            return _show_plan(session, options)
        view = _restore_all(session, options) if options.all_stores else _restore_one(session, options)
    restored = [(one, one.result) for one in view.stores if one.result is not None]
    for one, result in restored:
        session.record.note(result, task=one.reference.task, store=one.reference.store)
    session.record.values["restore_stores_failed"] = len(view.stores) - len(restored)
    columns: dict[str, Column] = {
        ">files": "result.files_total",
        ">size": "result.bytes_total",
        ">fetched": "result.bytes_fetched",
        ">reused": "result.bytes_reused",
        ">requests": "result.requests",
        ">time": lambda of: format_took(of.result.seconds),
    }
    code = _show(session, view, columns)
    _warn_of_the_rest(session, options, view.commit)
    session.warn_of_restore(pinned=view.pinned)
    for _, result in restored:
        session.warn_of_restore(pinned=True, leftovers=result.leftovers)
    return code


def _warn_of_the_rest(session: Session, options: RestoreArguments, commit: CommitView) -> None:
    """Warn where what was restored is less than one may have expected."""
    others = 0 if options.all_stores or was_given("task") or was_given("store") else commit.stores_count - 1
    if is_checkpoint_backup(commit.offsets):
        session.warn("this is the backup of a Spark checkpoint: `tidemark spark restore` makes a checkpoint of it")
    elif others:
        session.warn(f"commit {commit.number} has {count(others, 'other store')}: --all restores them too")


def _restore_one(session: Session, options: RestoreArguments) -> RestoreView:
    with session.explaining(options.scope), session.progress("restore") as progress:
        restored = session.repository.find_and_restore(
            options.scope,
            options.target,
            task=options.task,
            store=options.store,
            options=options.how,
            or_newest_complete=options.or_newest_complete,
            progress=progress,
            **session.choose(options.choice),
        )
    commit, because = view_commit(restored.commit), restored.instead_because
    reference = session.choose_stores(restored.commit, options.task, options.store)[0]
    stores = (RestoredStoreView(reference=reference, target=options.target, result=restored.result),)
    return RestoreView(commit=commit, pinned=restored.pinned, instead_because=because, stores=stores)


def _restore_all(session: Session, options: RestoreArguments) -> RestoreView:
    repository = session.repository
    damaged, restored = set[str](), set[Path]()
    choice, because = _choose_complete(session, options)
    while True:
        known, failure = len(damaged), None
        stores: tuple[RestoredStoreView, ...] = ()
        with session.pinned(options.scope, choice, purpose="restore") as (commit, lease):
            with session.progress("restore") as progress:
                # What an attempt at a newer commit has brought back, and nothing else, is replaced without being asked.
                done = repository.restore_stores(commit, options.target, options.how, progress, replaced=restored)
            restored.update(one.target for one in done if one.failure is None)
            damaged.update(key_of(one.failure) for one in done if isinstance(one.failure, DamagedError))
            views = [RestoredStoreView(reference=r.reference, target=r.target, result=r.result) for r in done]
            try:
                stores = _with_failures(session, options, zip(views, (r.failure for r in done), strict=True))
            except DamagedError as error:
                failure = error
        whole = None
        if options.or_newest_complete and len(damaged) > known and not options.how.files:
            commits = repository.commits(options.scope)
            whole = repository.loop.run(find_complete(repository.asynchronous.store, commits, damaged))
        if whole is not None:
            choice = Choice(number=whole.pointer.number)
            because = because or "something of that one is missing or altered"
        elif failure is not None:
            raise failure
        else:
            for left in sorted(restored.difference(store.target for store in stores)):
                session.warn(f"{left} is of a newer commit, and of no store of this one: remove it")
            _warn_of_others(session, options.target, {store.target for store in stores} | restored)
            return RestoreView(commit=view_commit(commit), pinned=lease.pinned, instead_because=because, stores=stores)


def _warn_of_others(session: Session, root: Path, known: Collection[Path]) -> None:
    """Warn of a RocksDB in the place of a store that this commit has not: of another one, perhaps."""
    others = sorted(str(path.parent) for path in root.glob(f"*/*/{CURRENT}") if path.parent not in known)
    if others:
        session.warn(f"there before, and of no store of this commit: {some(others)}")


def _show_plan(session: Session, options: RestoreArguments) -> ExitCode:
    """Show what a restore would do, without a write; it ends as the restore would, as far as reading can show."""

    def plan(reference: StoreReference, target: Path) -> tuple[PlannedStoreView, Exception | None]:
        try:
            found = session.repository.plan_restore(reference, target, options=options.how)
        except (TidemarkError, OSError) as error:
            return PlannedStoreView(reference=reference, target=target), error
        reused: tuple[ReusedFile, ...] = (*found.links, *found.copies)
        fetched = sorted("/".join(file.path) for file in found.fetched)
        planned = PlannedStoreView(
            reference=reference,
            target=target,
            files_total=found.files_count,
            bytes_total=found.size_bytes,
            files_fetched=len(fetched),
            fetch_bytes=found.fetch_bytes,
            fetch_requests=found.fetch_requests,
            files_reused=len(reused),
            bytes_reused=sum(file.target.size_bytes for file in reused),
            files_inline=len(found.inline),
            bytes_inline=sum(file.size_bytes for file in found.inline),
            files_empty=len(found.empty),
            fetched=tuple(fetched),
            reused=tuple(sorted("/".join(file.target.path) for file in reused)),
        )
        return planned, None

    choice, instead_because = _choose(session, options)
    with session.pinned(options.scope, choice, purpose="restore --dry-run") as (commit, _):
        if options.all_stores:
            targets = [(store, target_below(options.target, store)) for store in commit.record.stores]
        else:
            targets = [(session.choose_stores(commit, options.task, options.store)[0], options.target)]
        stores = _with_failures(session, options, itertools.starmap(plan, targets))
    view = RestorePlanView(commit=view_commit(commit), instead_because=instead_because, stores=stores)
    columns: dict[str, Column] = {
        ">files": "files_total",
        ">size": "bytes_total",
        ">would fetch": "fetch_bytes",
        ">would reuse": "bytes_reused",
        ">requests": "fetch_requests",
    }
    return _show(session, view, columns, "nothing was written")


def _choose(session: Session, options: RestoreArguments) -> tuple[Choice, str]:
    """Return which commit would be restored, and why it is not the one that was chosen."""
    if options.or_newest_complete and not options.all_stores:
        # A restore of one store finds out by restoring it, and does not mind what other stores miss.
        chosen = session.find(options.scope, options.choice)
        stores = session.choose_stores(chosen, options.task, options.store)[:1]
        looked_at = [msgspec.structs.replace(chosen, record=msgspec.structs.replace(chosen.record, stores=stores))]
        repository = session.repository
        if repository.loop.run(find_complete(repository.asynchronous.store, looked_at)) is not None:
            return session.choose(options.choice), ""
    return _choose_complete(session, options)


def _choose_complete(session: Session, options: RestoreArguments) -> tuple[Choice, str]:
    """Return which commit to restore all stores from, and why it is not the one that was chosen."""
    choice = session.choose(options.choice)
    # What is missing may be among what is deleted, and no list shows that: reading it does.
    if not options.or_newest_complete or options.how.deleted:
        return choice, ""
    with session.explaining(options.scope):
        complete = session.repository.choose_complete(options.scope, **choice)
    return complete, "" if complete == choice else "something of that one is missing"


def _with_failures(
    session: Session, options: RestoreArguments, done: Iterable[tuple[ViewT, Exception | None]]
) -> tuple[ViewT, ...]:
    """Return one store after the other with the failure that it had, if it had one; raise the first if all failed."""
    views: list[ViewT] = []
    first: Exception | None = None
    for view, failure in done:
        named = failure
        if first is None and isinstance(failure, DamagedError):
            # Of the first one alone: to find out which commit is whole may take long.
            named = session.repository.name_complete(options.scope, failure)
        first = first or named
        views.append(view if named is None else msgspec.structs.replace(view, failure=describe(named, "restore")))
    if first is not None and all(view.failure is not None for view in views):
        raise first
    return tuple(views)


def _show(session: Session, view: RestoreView | RestorePlanView, columns: Mapping[str, Column], *last: str) -> ExitCode:
    well = [store for store in view.stores if store.failure is None]
    lines = [view.commit.line, "", *tabulate(well, {"store": "place", "target": "target", **columns})]
    for store in view.stores:
        if (failure := store.failure) is not None:
            lines += [f"FAILED {store.place}: {failure.message}", f"  hint: {failure.hint}"]
    session.show(view, [*lines, *last])
    if view.instead_because:
        session.warn(f"it is not the commit that was chosen: {view.instead_because}")
    return ExitCode.OK if len(well) == len(view.stores) else ExitCode.PARTIAL
