"""Options that several verbs share: which job, store and commit they work on, and what a collection keeps."""

from pathlib import Path
from typing import Final

import click

from engine.cli.config import CommitChoice, check_new_name
from engine.cli.options import MOMENT, PATH, VERSION, Decorated
from engine.clock import read_now_ms
from engine.collect.policy import PolicyEntry, PolicyFile, check_since, read_policy
from engine.errors import NotFoundError, UsageError
from engine.repository.repository import SyncRepository
from engine.text import Moment
from index.errors import UnsafeNameError
from index.plan.commits import Commit, RetentionPolicy
from index.snapshot.keys import encode_component, encode_scope
from index.snapshot.model import Scope, StoreReference

# Indexes of a commit that are in memory at a time.
INDEXES_IN_FLIGHT_MAX: Final = 8


def choose_scope(job: str, *, commit_per_task: bool, task: str | None) -> Scope:
    """Return the scope that a job's commits belong to; `UsageError` if the job or the task fits no key."""
    scope = Scope(job, (task or "0") if commit_per_task else None)
    try:
        encode_scope(scope)
    except UnsafeNameError as error:
        raise UsageError(str(error), operation="read", subject="--job", hint=error.hint) from None
    return scope


def check_component(option: str, name: str) -> str:
    """Return the name of a task, store or commit; `UsageError` if it fits no key."""
    try:
        encode_component(name)
    except UnsafeNameError as error:
        raise UsageError(str(error), operation="read", subject=option, hint=error.hint) from None
    return name


def commit_options(function: Decorated) -> Decorated:
    """Add the options that choose a commit; a verb takes them as its parameter or field `choice`."""
    at = "The newest then: 2026-05-01T12:30:00Z, 36h for 36 hours ago, or 'yesterday 18:00' (UTC)."
    version = "The newest of this version, or of V and unique id."
    for add in (
        click.option("--name", metavar="NAME", help="The commit of this name."),
        click.option("--at", type=MOMENT, metavar="TIME", help=at),
        click.option("--version", type=VERSION, metavar="V[_UID]", help=version),
        click.option("--number", type=click.IntRange(min=1), metavar="N", help="The commit of this number."),
    ):
        function = add(function)
    return function


def choose_commit(
    *, number: int | None, version: CommitChoice | None, at: Moment | None, name: str | None
) -> CommitChoice:
    """Return the commit that `commit_options` choose; `UsageError` if they are several, or no name is one."""
    if sum(given is not None for given in (number, version, at, name)) > 1:
        message, hint = "more than one of --number, --version, --at and --name", "each chooses a commit alone"
        raise UsageError(message, operation="restore", hint=hint)
    if name is not None:
        check_new_name(name)
    return version or CommitChoice(number=number, at=at, name=name)


def select_stores(commit: Commit, task: str | None, store: str | None) -> tuple[StoreReference, ...]:
    """Return the stores of a commit of that task and name; None is any."""
    return tuple(s for s in commit.record.stores if task in {None, s.task} and store in {None, s.store})


def choose_stores(commit: Commit, *, task: str | None, store: str | None, operation: str) -> tuple[StoreReference, ...]:
    """Return the stores of a commit that were asked for, None being any; `NotFoundError` if there is none."""
    if found := select_stores(commit, task, store):
        return found
    raise no_store(commit, task, store, operation)


def no_store(commit: Commit, task: str | None, store: str | None, operation: str) -> NotFoundError:
    """Return the error that a commit has no such store."""
    have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8])
    message = f"commit {commit.pointer.number} has no store {task or '*'}/{store or '*'}"
    return NotFoundError(
        message, operation=operation, subject=str(commit.scope), hint=f"it has {have or 'none at all'}"
    )


# ---------------------------------------------------------------------- retention


def retention_options(function: Decorated) -> Decorated:
    """Add what is to be kept: a count, a time and names for all jobs, or a file of rules; a verb takes `rules`."""
    policy = "Rules for many jobs, in place of the three above; docs/how-to/choose-retention.md shows one."
    since = "Keep what was current then or later: 7d, 2026-05-01, 'yesterday 18:00' (UTC)."
    for add in (
        click.option("--policy", type=PATH, metavar="FILE", help=policy),
        click.option("--keep-named/--no-keep-named", default=True, help="Keep records that have names."),
        click.option("--keep-since", type=MOMENT, metavar="TIME", help=since),
        click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N of each job."),
    ):
        function = add(function)
    return function


def choose_rules(
    keep_last: int | None, keep_since: Moment | None, policy: Path | None, *, keep_named: bool
) -> PolicyFile | None:
    """Return the rules that `retention_options` make; None if nothing is said; `UsageError` if they are wrong."""
    if policy is not None:
        if keep_last is not None or keep_since is not None or not keep_named:
            hint = "put --keep-last, --keep-since and --no-keep-named into the file, or leave --policy out"
            raise UsageError("--policy has the rules for all jobs", operation="collect", hint=hint)
        return read_policy(policy)
    if keep_last is None and keep_since is None:
        return None
    if keep_since is not None:
        check_since(keep_since, subject="--keep-since")
    entry = PolicyEntry(pattern="*", keep_last=keep_last or 0, keep_since=keep_since, keep_named=keep_named)
    return PolicyFile(entries=(entry,))


def resolve_rules(repository: SyncRepository, rules: PolicyFile, *, dry_run: bool = True) -> RetentionPolicy:
    """Return the rules with times by the store's clock, which is asked only if a rule has a time.

    Of a `dry_run` nothing is closed by them: this machine's clock does where the store does not say its own.

    Raises:
        UsageError: A time is yet to come.
        StoreError: The store does not say its clock.
    """
    if all(entry.keep_since is None for entry in rules.entries):
        return rules.resolve(0)
    store = repository.asynchronous.store
    return rules.resolve_past(repository.loop.run(read_now_ms(store) if dry_run else store.now_ms()))
