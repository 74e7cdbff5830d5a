"""The options that say what a collection keeps."""

from collections.abc import Callable
from pathlib import Path

import click

from engine.cli.options import MOMENT, Decorated
from engine.clock import read_now_ms
from engine.collect.policy import PolicyEntry, PolicyFile, check_since, read_policy
from engine.errors import UsageError
from engine.repository.sync import SyncRepository
from engine.text import Moment
from index.plan.retention import RetentionPolicy


def retention_options(function: Decorated) -> Decorated:
    """What is kept: a count, a time and names for all jobs, or a file of rules; for `choose_rules`."""
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
    """What the options say; None if they say nothing.

    Raises:
        UsageError: They contradict each other, the time is none, or the file is none.
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
