"""The verb `commit`, and how every verb commits."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from engine.backup.backup import BackupResult
from engine.cli.choices import choose_scope
from engine.cli.config import CommitChoice
from engine.cli.options import STORE, figures_option, scope_options
from engine.cli.output import committed_line
from engine.cli.result_file import check_uploaded, read_result
from engine.cli.session import Session, verb
from engine.commit.record import ANY
from engine.errors import CommitUnknownError, UsageError
from engine.records.settle import settle_record
from engine.repository.repository import SyncRepository
from index.plan.commits import Commit
from index.snapshot.model import CommitPointer, Scope

# The writer that got no answer is the only one that can find out at once what happened; a new process cannot.
COMMIT_ATTEMPTS_MAX: Final = 3


def commit_until_known(
    repository: SyncRepository,
    scope: Scope,
    results: Sequence[BackupResult],
    *,
    version: int | None,
    offsets: str,
    parent: CommitPointer | Literal["any"] | None = ANY,
    dropped: Collection[tuple[str, str]] = (),
) -> Commit:
    """Commit; while the outcome is unknown ask again with the same writer, which finds out (design 0002, C3).

    Raises as `CommitWriter.commit`; `CommitUnknownError` if it is unknown still.
    """
    left = COMMIT_ATTEMPTS_MAX
    try:
        while True:
            left -= 1
            try:
                return repository.commit(
                    scope, results, version=version, offsets=offsets, parent=parent, dropped=dropped
                )
            except CommitUnknownError:
                if not left:
                    raise
    except KeyboardInterrupt as error:
        error.add_note("the commit was under way and may exist: `tidemark list` shows it")
        raise


class CommitResultView(msgspec.Struct, frozen=True, kw_only=True):
    """`commit`."""

    commit: Commit
    settled: bool
    # True: an earlier run of the same command had made this commit already.
    already: bool


@verb("commit", "Make several backups visible as one commit.", prints=(CommitResultView,))
@click.argument(
    "results", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, metavar="[RESULT]..."
)
@scope_options()
@click.option(
    "--drop-store",
    "dropped",
    type=STORE,
    multiple=True,
    metavar="TASK/STORE",
    help="A store that the job no longer has; may be repeated.",
)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N", help="Version of the commit.  [default: the last plus one]"
)
@click.option("--offsets", default=None, metavar="TEXT", help="Your position in the input, kept with the commit.")
@figures_option
def commit(
    session: Session,
    *,
    results: tuple[Path, ...],
    job: str,
    commit_per_task: bool,
    dropped: tuple[tuple[str, str], ...],
    version: int | None,
    offsets: str | None,
) -> None:
    """Make several backups visible as one commit, all or none.

    RESULT are files that `tidemark backup --no-commit --result FILE` wrote, at most one per store. Stores of the job
    that have none keep what they had, but for those that are dropped: collect takes them with the last commit that has
    them. Running it again with the same words changes nothing. Without files, the offsets stay as they are.

    Example: tidemark commit task-*.json -r file:///backups -j flights --offsets 42
    """
    if not results and not dropped:
        raise UsageError("there is nothing to commit", operation="commit", hint="give RESULT files, or --drop-store")
    with session.open() as repository:
        made = [read_result(path, repository_id=repository.record.id) for path in results]
        parent: CommitPointer | Literal["any"] = ANY
        already: Commit | None = None
        if made:
            scope = _scope_of(results, made, job, commit_per_task=commit_per_task)
            dropped = _still_to_drop(repository, scope, dropped, repository.latest(scope))
            already = _find_committed(repository, scope, made, dropped, version=version, offsets=offsets or "")
        else:
            scope = choose_scope(job, commit_per_task=commit_per_task, task=dropped[0][0])
            newest = session.find(repository, scope, CommitChoice())
            parent = newest.pointer
            offsets = newest.record.offsets if offsets is None else offsets
            dropped = _still_to_drop(repository, scope, dropped, newest)
            if not dropped and offsets == newest.record.offsets and version in {None, newest.record.version}:
                already = newest
        if already is None:
            checked = [
                repository.loop.run(check_uploaded(repository.asynchronous, path, result))
                for path, result in zip(results, made, strict=True)
            ]
            with session.record.timed("commit"):
                done = commit_until_known(
                    repository, scope, checked, version=version, offsets=offsets or "", parent=parent, dropped=dropped
                )
        else:
            # The attempt before may have ended between the commit and the removal of the TTLs (design 0002, T1).
            repository.loop.run(settle_record(repository.asynchronous.store, already.record))
            done = msgspec.structs.replace(already, settled=True)
    session.record.commit_skipped = already is not None
    view = CommitResultView(commit=done, settled=done.settled, already=already is not None)
    session.show(view, [f"{committed_line(done)}{' (it was committed already)' if already else ''}"])


def _scope_of(paths: Sequence[Path], results: Sequence[BackupResult], job: str, *, commit_per_task: bool) -> Scope:
    """Return the scope that all results belong to; with `commit_per_task` each task has its own."""
    scope = results[0].scope
    for path, result in zip(paths, results, strict=True):
        if result.scope != scope or result.scope.job != job or (result.scope.task is not None) != commit_per_task:
            raise UsageError(
                f"belongs to {result.scope}{', which commits by itself' if result.scope.task is not None else ''}",
                operation="commit",
                subject=str(path),
                hint="give results of this job only; with --commit-per-task of one task only",
            )
    return scope


def _still_to_drop(
    repository: SyncRepository, scope: Scope, dropped: tuple[tuple[str, str], ...], newest: Commit | None
) -> tuple[tuple[str, str], ...]:
    """Return what is to be dropped, less what an earlier run of the command has dropped.

    A store that the newest commit does not have and an older one had was dropped. One that no commit has that is still
    there may be misspelled: it stays, and is refused.
    """
    absent = {store for store in dropped if newest is None or newest.store(*store) is None}
    if not absent:
        return dropped
    had = {(s.task, s.store) for commit in repository.commits(scope) for s in commit.record.stores}
    return tuple(store for store in dropped if store not in absent & had)


def _find_committed(
    repository: SyncRepository,
    scope: Scope,
    results: Sequence[BackupResult],
    dropped: Collection[tuple[str, str]],
    *,
    version: int | None,
    offsets: str,
) -> Commit | None:
    """Return the newest commit if it is exactly what is to be committed: then an earlier attempt went through."""
    newest = repository.latest(scope)
    if newest is None or newest.record.offsets != offsets or version not in {None, newest.record.version}:
        return None
    if any(newest.store(task, store) is not None for task, store in dropped):
        return None
    held = [(newest.store(r.reference.task, r.reference.store), r.reference) for r in results]
    return newest if all(there is not None and there.index == made.index for there, made in held) else None
