"""Options that several verbs share: which job, store and commit they work on, and what a collection keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import msgspec
from typing_extensions import override

from engine.cli.config import CommitChoice, check_new_name
from engine.cli.options import MOMENT, VERSION, Decorated
from engine.cli.session import choose_scope
from engine.clock import read_now_ms
from engine.collect.policy import PolicyEntry, PolicyFile, check_since, read_policy
from engine.errors import NotFoundError, UsageError
from engine.repository.sync import SyncRepository
from engine.text import Moment
from index.plan.commits import Commit
from index.plan.retention import RetentionPolicy
from index.snapshot.model import Scope
from index.snapshot.records import StoreReference

# Indexes of a commit that are in memory at a time.
INDEXES_IN_FLIGHT_MAX: Final = 8


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`scope_options` with `store_options`."""

    job: str
    commit_per_task: bool
    task: str
    store: str

    def __post_init__(self) -> None:
        """Refuse a name that fits no key."""
        choose_scope(self.job, commit_per_task=self.commit_per_task, task=self.task)

    @property
    def scope(self) -> Scope:
        """The scope that the job's commits belong to."""
        return choose_scope(self.job, commit_per_task=self.commit_per_task, task=self.task)


class CommitOptions(StoreOptions, frozen=True, kw_only=True):
    """The same with `commit_options`."""

    number: int | None
    version: CommitChoice | None
    at: Moment | None
    name: str | None

    @override
    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        super().__post_init__()
        choose_commit(number=self.number, version=self.version, at=self.at, name=self.name)

    @property
    def choice(self) -> CommitChoice:
        """The commit that was chosen."""
        return choose_commit(number=self.number, version=self.version, at=self.at, name=self.name)


def commit_options(function: Decorated) -> Decorated:
    """Add the options of `CommitOptions` that choose a commit."""
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
    """Return the commit that `commit_options` choose.

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
    """Return the stores of a commit that were asked for, all if neither is given.

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


# ---------------------------------------------------------------------- retention


class RetentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`retention_options`."""

    keep_last: int | None
    keep_since: Moment | None
    keep_named: bool
    policy: Path | None

    @property
    def rules(self) -> PolicyFile | None:
        """What is kept; None where nothing is said."""
        return choose_rules(self.keep_last, self.keep_since, self.policy, keep_named=self.keep_named)


def retention_options(function: Decorated) -> Decorated:
    """Add the options of `RetentionOptions`: a count, a time and names for all jobs, or a file of rules."""
    adds: tuple[Callable[[Decorated], Decorated], ...] = (
        click.option(
            "--policy",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Rules for many jobs, in place of the three above; docs/how-to/choose-retention.md shows one.",
        ),
        click.option(
            "--keep-named/--no-keep-named", default=True, show_default=True, help="Keep records that have names."
        ),
        click.option(
            "--keep-since",
            type=MOMENT,
            metavar="TIME",
            help="Keep what was current then or later: 7d, 2026-05-01, 'yesterday 18:00' (UTC).",
        ),
        click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N of each job."),
    )
    for add in adds:
        function = add(function)
    return function


def choose_rules(
    keep_last: int | None, keep_since: Moment | None, policy: Path | None, *, keep_named: bool
) -> PolicyFile | None:
    """Return the rules that the options make; None if nothing is said.

    Raises:
        UsageError: They contradict each other, the time or the file is invalid.
    """
    if policy is not None:
        if keep_last is not None or keep_since is not None or not keep_named:
            raise UsageError(
                "--policy has the rules for all jobs",
                operation="collect",
                hint="put --keep-last, --keep-since and --no-keep-named into the file, or leave --policy out",
            )
        return read_policy(policy)
    if keep_last is None and keep_since is None:
        return None
    if keep_since is not None:
        check_since(keep_since, subject="--keep-since")
    entry = PolicyEntry(pattern="*", keep_last=keep_last or 0, keep_since=keep_since, keep_named=keep_named)
    return PolicyFile(entries=(entry,))


def resolve_rules(repository: SyncRepository, rules: PolicyFile, *, dry_run: bool = True) -> RetentionPolicy:
    """Return the rules with times by the store's clock, which is asked only if a rule has a time.

    Args:
        repository: Whose store it is.
        rules: With times, or ages.
        dry_run: Nothing is closed by them: this machine's clock does where the store does not say its own.

    Raises:
        UsageError: A time is yet to come.
        StoreError: The store does not say its clock.
    """
    if all(entry.keep_since is None for entry in rules.entries):
        return rules.resolve(0)
    store = repository.asynchronous.store
    return rules.resolve_past(repository.loop.run(read_now_ms(store) if dry_run else store.now_ms()))
