"""Which commit of a job a verb works on, and which stores of it."""

from typing import Final

import click

from engine.cli.config import CommitChoice, check_new_name
from engine.cli.options import MOMENT, VERSION, Decorated
from engine.errors import NotFoundError, UsageError
from engine.text import Moment
from index.plan.commits import Commit
from index.snapshot.records import StoreReference

# Of the option --task, where it chooses a log.
TASK_HELP: Final = "With --commit-per-task: whose commits.  [default: 0]"
# Indexes of a commit that are in memory at a time.
INDEXES_IN_FLIGHT_MAX: Final = 8


def commit_options(function: Decorated) -> Decorated:
    """Which commit; `choose_commit` takes what they say."""
    at = "The newest then: 2026-05-01T12:30:00Z, 36h for 36 hours ago, or 'yesterday 18:00' (UTC)."
    for add in (
        click.option("--name", metavar="NAME", help="The commit of this name."),
        click.option("--at", type=MOMENT, metavar="TIME", help=at),
        click.option(
            "--version", type=VERSION, metavar="V[_UID]", help="The newest of this version, or of V and unique id."
        ),
        click.option("--number", type=click.IntRange(min=1), metavar="N", help="The commit of this number."),
    ):
        function = add(function)
    return function


def choose_commit(
    *, number: int | None, version: CommitChoice | None, at: Moment | None, name: str | None
) -> CommitChoice:
    """What `commit_options` say.

    Raises:
        UsageError: More than one of them is given, or the name reads like something else.
    """
    if sum(given is not None for given in (number, version, at, name)) > 1:
        raise UsageError(
            "more than one of --number, --version, --at and --name",
            operation="restore",
            hint="each chooses a commit alone",
        )
    if name is not None:
        check_new_name(name)
    return version or CommitChoice(number=number, at=at, name=name)


def choose_stores(commit: Commit, *, task: str | None, store: str | None, operation: str) -> tuple[StoreReference, ...]:
    """The stores of a commit that somebody asked for, all if neither is given.

    Raises:
        NotFoundError: There is none.
    """
    found = select_stores(commit, task, store)
    if not found:
        raise no_store(commit, task, store, operation)
    return found


def select_stores(commit: Commit, task: str | None, store: str | None) -> tuple[StoreReference, ...]:
    """Return the stores of a commit of that task and name; None is any."""
    return tuple(s for s in commit.record.stores if task in {None, s.task} and store in {None, s.store})


def no_store(commit: Commit, task: str | None, store: str | None, operation: str) -> NotFoundError:
    """Return the error that a commit has no such store."""
    have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8])
    return NotFoundError(
        f"commit {commit.pointer.number} has no store {task or '*'}/{store or '*'}",
        operation=operation,
        subject=str(commit.scope),
        hint=f"it has {have or 'none at all'}",
    )
