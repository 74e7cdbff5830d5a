"""Which rule counts for which job (design 0006, P5)."""

import pytest

from index.plan.commits import (
    KeepReason,
    LogListing,
    Retention,
    RetentionPolicy,
    RetentionRule,
    as_policy,
    choose_kept,
    shadows,
    valid_commits,
)
from index.snapshot.model import CommitRecord, Scope, WriteId

ONE, TWO = Retention(keep_last=1), Retention(keep_last=2)
POLICY = RetentionPolicy(
    rules=(
        RetentionRule(pattern="flights-eu", retention=None),
        RetentionRule(pattern="flights-*", retention=ONE),
        RetentionRule(pattern="job[12]", retention=TWO),
    )
)


@pytest.mark.parametrize(
    "job, retention",
    [
        ("flights-eu", None),
        ("flights-us", ONE),
        ("flights-", ONE),
        ("Flights-us", None),
        ("flights", None),
        ("job1", TWO),
        ("job3", None),
    ],
)
def test_the_first_rule_that_matches_counts_and_no_rule_keeps_all(job: str, retention: Retention | None) -> None:
    assert POLICY.choose(job) == retention


def test_one_rule_for_all_jobs_is_a_star() -> None:
    assert as_policy(ONE).choose("any job, täsk and * too") == ONE
    assert as_policy(POLICY) is POLICY


def test_rules_that_count_for_no_job_are_reported() -> None:
    assert POLICY.unused(["flights-eu", "job1"]) == ("flights-*",)
    assert POLICY.unused([]) == ("flights-eu", "flights-*", "job[12]")


def test_a_job_without_a_rule_keeps_every_valid_commit() -> None:
    scope = Scope("job")
    listing = LogListing(scope=scope, records=((1, 1), (2, 2), (3, 3)), boundaries=())
    records = {
        n: CommitRecord(scope=scope, number=n, write_id=WriteId(f"w{n}"), valid_until_ms=0 if n == 2 else 10**15)
        for n in (1, 2, 3)
    }
    kept = choose_kept(valid_commits(listing, records, ()), None)
    assert {pointer.number: reason for pointer, reason in kept.items()} == {1: KeepReason.UNRULED, 3: KeepReason.NEWEST}


def test_jobs_that_no_rule_matches_are_reported() -> None:
    assert POLICY.unruled(["ledger", "flights-eu", "job3", "ledger"]) == ("job3", "ledger")


@pytest.mark.parametrize(
    "earlier, later, expected",
    [
        ("*", "a", True),
        ("**", "a*", True),
        ("?*", "*", True),
        ("*?*", "[ab]", True),
        ("??*", "a*", False),
        ("a*", "ab", True),
        ("a*", "ab*", True),
        ("a*", "a?c", True),
        ("a*z", "a*", False),
        ("a*]", "a[bc]", False),
        ("a?", "ab", True),
        ("a?", "a*", False),
        ("a[bc]", "ab", True),
        ("a[*]", "a*", False),
        ("ab", "a*", False),
    ],
)
def test_a_pattern_that_never_counts_is_known(earlier: str, later: str, expected: bool) -> None:
    assert shadows(earlier, later) is expected
