"""Which commits are kept: the last N, those since a time, the named ones; one rule for each job (design 0006, P5)."""

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

import msgspec

from index.errors import IndexInvariantError
from index.plan.commits import Commit
from index.snapshot.records import CommitPointer


class KeepReason(StrEnum):
    """Why a commit is kept."""

    NEWEST = "newest"
    LAST = "keep-last"
    SINCE = "keep-since"
    NAMED = "keep-named"
    UNRULED = "no rule for this job"


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """A rule with at least one way to keep something; the newest valid commit of a scope is kept whatever it says."""

    # This many of the newest valid commits.
    keep_last: int = 0
    # Every commit at or after this time by the store's clock, and the one that was the newest at that time.
    keep_since_ms: int | None = None
    # Commits that a name refers to stay in the log; what a name holds is safe either way.
    keep_named: bool = True

    def __post_init__(self) -> None:
        """Refuse a rule that keeps nothing.

        Raises:
            IndexInvariantError: Neither a count nor a time is given, or one is negative.
        """
        if self.keep_last < 0 or (self.keep_since_ms is not None and self.keep_since_ms < 0):
            raise IndexInvariantError(
                "counts and times are not negative", subject="retention", hint="give a positive number"
            )
        if self.keep_last == 0 and self.keep_since_ms is None:
            raise IndexInvariantError(
                "keeps nothing by itself", subject="retention", hint="give --keep-last N or --keep-since TIME"
            )


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of the jobs whose name matches."""

    # As in a shell, case and all: `*` any text, `?` one character, `[abc]` one of these.
    pattern: str
    # None: everything.
    retention: Retention | None


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for many jobs; the first whose pattern a job's name matches is the one that counts (design 0006, P5)."""

    rules: tuple[RetentionRule, ...]

    def choose(self, job: str) -> Retention | None:
        """Return the retention of a job; None keeps everything, as for a job that no rule matches."""
        rule = self._rule(job)
        return None if rule is None else rule.retention

    def ageless(self) -> "RetentionPolicy":
        """Return the rules as where nothing is old: one that keeps what came since a time keeps everything."""
        return RetentionPolicy(
            rules=tuple(
                msgspec.structs.replace(rule, retention=msgspec.structs.replace(rule.retention, keep_since_ms=0))
                if rule.retention is not None and rule.retention.keep_since_ms is not None
                else rule
                for rule in self.rules
            )
        )

    def unused(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns of the rules that count for none of these jobs: perhaps they are misspelled."""
        used = {rule.pattern for job in jobs if (rule := self._rule(job)) is not None}
        return tuple(rule.pattern for rule in self.rules if rule.pattern not in used)

    def unruled(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """Return the jobs that no rule matches: everything of them is kept, perhaps by oversight."""
        return tuple(job for job in sorted(set(jobs)) if self._rule(job) is None)

    def _rule(self, job: str) -> RetentionRule | None:
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(job, rule.pattern)), None)


def shadows(earlier: str, later: str) -> bool:
    """Return whether a pattern is known to match all that a later one matches, so that the later one never counts."""
    # No job has an empty name.
    if earlier == later or (set(earlier) <= {"*", "?"} and "*" in earlier and earlier.count("?") <= 1):
        return True
    if "[" in later or (not set("?[").isdisjoint(earlier) and not set("*?").isdisjoint(later)):
        return False
    # What is any text in the later pattern has to fall into what is any text in the earlier one.
    return fnmatch.fnmatchcase(later, earlier)


def as_policy(retention: Retention | RetentionPolicy) -> RetentionPolicy:
    """Return a retention as the policy that has it for every job."""
    if isinstance(retention, RetentionPolicy):
        return retention
    return RetentionPolicy(rules=(RetentionRule(pattern="*", retention=retention),))


def choose_kept(
    commits: Sequence[Commit], retention: Retention | None, named: Collection[CommitPointer] = ()
) -> dict[CommitPointer, KeepReason]:
    """Return the commits to keep, each with the first reason that applies; never none of some.

    Args:
        commits: The valid commits of one scope, oldest first.
        retention: The rule; None keeps everything.
        named: Records of this scope that a name refers to.
    """
    kept: dict[CommitPointer, KeepReason] = {}
    if not commits:
        return kept
    kept[commits[-1].pointer] = KeepReason.NEWEST
    if retention is None:
        return kept | {commit.pointer: KeepReason.UNRULED for commit in commits[:-1]}
    if retention.keep_last:
        for commit in commits[-retention.keep_last :]:
            kept.setdefault(commit.pointer, KeepReason.LAST)
    if retention.keep_since_ms is not None:
        older = [c for c in commits if c.committed_at_ms < retention.keep_since_ms]
        for commit in (*older[-1:], *commits[len(older) :]):
            kept.setdefault(commit.pointer, KeepReason.SINCE)
    if retention.keep_named:
        for commit in commits:
            if commit.pointer in named:
                kept.setdefault(commit.pointer, KeepReason.NAMED)
    return kept
