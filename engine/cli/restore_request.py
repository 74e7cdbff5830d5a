"""What a `restore` is asked for, and what it has in common with its dry run."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from blobstore.errors import StoreError
from engine.cli.choice import choose_stores
from engine.cli.config import CommitChoice
from engine.cli.errors import Failure, describe
from engine.cli.output import CommitView
from engine.cli.session import Session
from engine.errors import DamagedError, EngineError
from engine.records.find import Choice
from engine.records.pins import PinLease
from engine.repository.sync import SyncRepository
from engine.restore.restore import OwnerPolicy
from engine.text import table
from index.errors import FormatError
from index.plan.commits import Commit
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference
from index.text import printable

Done = TypeVar("Done")
# Of a store where it belongs, and what was done or why it was not.
Outcome = tuple[StoreReference, Path, Done | None, Failure | None]


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
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


@contextlib.contextmanager
def chosen_commit(
    session: Session, repository: SyncRepository, request: RestoreRequest, choice: Choice, *, purpose: str
) -> Iterator[tuple[Commit, PinLease]]:
    """The commit, protected."""
    with contextlib.ExitStack() as stack:
        with session.explaining(repository, request.scope):
            found = stack.enter_context(repository.find_pinned(request.scope, purpose=purpose, **choice))
        yield found


def choose_complete(session: Session, repository: SyncRepository, request: RestoreRequest) -> tuple[Choice, str]:
    """Which commit to restore all stores from, and why it is not the one that was chosen."""
    choice = session.choose(repository, request.choice)
    if not request.or_newest_complete:
        return choice, ""
    with session.explaining(repository, request.scope):
        complete = repository.choose_complete(request.scope, **choice)
    return complete, "" if complete == choice else "something of that one is missing"


def targets_of(request: RestoreRequest, commit: Commit) -> list[tuple[StoreReference, Path]]:
    """Which stores go where. Names of tasks and stores are made safe as in keys: they come from the store."""
    if request.store is None:
        return [
            (s, request.target / encode_component(s.task) / encode_component(s.store)) for s in commit.record.stores
        ]
    return [(the_store(commit, *request.store), request.target)]


def the_store(commit: Commit, task: str, store: str) -> StoreReference:
    """The one store that was asked for."""
    return choose_stores(commit, task=task, store=store, operation="restore")[0]


def store_by_store(
    repository: SyncRepository,
    request: RestoreRequest,
    commit: Commit,
    do: Callable[[StoreReference, Path], Done],
) -> list[Outcome[Done]]:
    """Do something for one store after the other, and go on after a failure.

    Raises:
        Exception: The first failure, if there is nothing else.
    """
    outcomes: list[Outcome[Done]] = []
    first: Exception | None = None
    for reference, target in targets_of(request, commit):
        try:
            outcomes.append((reference, target, do(reference, target), None))
        except (StoreError, EngineError, FormatError, OSError) as error:
            named = error
            if first is None and isinstance(error, DamagedError):
                # Of the first one alone: to find out which commit is whole may take long.
                named = repository.name_complete(request.scope, error)
            first = first or named
            outcomes.append((reference, target, None, describe(named, "restore")))
    if first is not None and all(failure is not None for *_, failure in outcomes):
        raise first
    return outcomes


def commit_line(commit: CommitView) -> str:
    """Which commit it is."""
    return f"commit {commit.number}, version {commit.version}, {commit.committed_at}"


def stores_table(columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each store: name, target, files, size, and some columns of numbers."""
    return table(("store", "target", "files", "size", *columns), rows, right=("files", "size", *columns))


def failure_lines(task: str, store: str, failure: Failure | None) -> list[str]:
    """Why one store failed, if it did."""
    if failure is None:
        return []
    return [
        f"FAILED {printable(f'{task}/{store}')}: {printable(failure.message)}",
        f"  hint: {printable(failure.hint)}",
    ]
