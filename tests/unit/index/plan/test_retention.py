"""Which rule counts for which job (design 0006, P5)."""

from datetime import datetime

import msgspec
import pytest

from index.errors import IndexInvariantError
from index.plan.commits import (
    Commit,
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


def commit_at(number: int, at: str) -> Commit:
    at_ms = int(datetime.fromisoformat(f"{at}+00:00").timestamp() * 1000)
    record = CommitRecord(scope=Scope("job"), number=number, write_id=WriteId(f"w{number}"), valid_until_ms=10**15)
    return Commit(record=record, created_at_ms=at_ms, committed_at_ms=at_ms)


# Two of one hour, of one day, of one week that ends with a Sunday, of one month, and of one year.
TIMES = (
    "2024-12-30T12:00",
    "2025-01-01T12:00",
    "2026-03-01T09:00",
    "2026-03-02T09:00",
    "2026-03-31T23:00",
    "2026-04-01T00:00",
    "2026-04-01T00:59",
    "2026-04-01T01:00",
)


@pytest.mark.parametrize(
    "retention, kept",
    [
        (Retention(keep_hourly=1), [8]),
        (Retention(keep_hourly=3), [5, 7, 8]),
        (Retention(keep_daily=3), [4, 5, 8]),
        (Retention(keep_weekly=4), [2, 3, 4, 8]),
        (Retention(keep_monthly=2), [5, 8]),
        (Retention(keep_monthly=4), [1, 2, 5, 8]),
        (Retention(keep_daily=2, keep_monthly=3), [2, 5, 8]),
        (Retention(keep_last=2, keep_hourly=2), [7, 8]),
        (Retention(keep_daily=100), [1, 2, 3, 4, 5, 8]),
        (Retention(keep_daily=10**40), [1, 2, 3, 4, 5, 8]),
    ],
)
def test_the_newest_of_each_period_is_kept(retention: Retention, kept: list[int]) -> None:
    commits = [commit_at(number, at) for number, at in enumerate(TIMES, start=1)]
    found = choose_kept(commits, retention)
    assert sorted(pointer.number for pointer in found) == sorted(kept)


def test_commits_after_a_step_of_the_clock_fill_no_period_and_stay() -> None:
    """The clock was 40 days ahead for the fourth commit, whose time all that follow have (0002, C7)."""
    days = ("2026-01-01", "2026-01-02", "2026-01-03", *("2026-02-12",) * 20, "2026-02-13")
    commits = [commit_at(number, f"{day}T00:00") for number, day in enumerate(days, start=1)]
    kept = sorted(p.number for p in choose_kept(commits, Retention(keep_daily=2)))
    assert kept == [4, *range(5, 24), 24]
    assert sorted(p.number for p in choose_kept(commits, Retention(keep_last=1))) == [24]


def test_each_reason_is_that_of_its_period() -> None:
    commits = [commit_at(number, at) for number, at in enumerate(TIMES, start=1)]
    found = choose_kept(commits, Retention(keep_hourly=2, keep_daily=2, keep_weekly=2, keep_monthly=9))
    assert {pointer.number: reason.value for pointer, reason in found.items()} == {
        8: "newest",
        7: "keep-hourly",
        5: "keep-daily",
        4: "keep-weekly",
        2: "keep-monthly",
        1: "keep-monthly",
    }


@pytest.mark.parametrize("kind", ["hourly", "daily", "weekly", "monthly"])
def test_a_rule_by_periods_keeps_all_where_nothing_is_old(kind: str) -> None:
    commits = [commit_at(number, at) for number, at in enumerate(TIMES, start=1)]
    retention = msgspec.convert({f"keep_{kind}": 1}, Retention)
    assert len(choose_kept(commits, as_policy(retention).ageless().choose("job"))) == len(TIMES)


def test_a_time_that_no_calendar_has_is_a_period_too() -> None:
    commits = [msgspec.structs.replace(commit_at(1, TIMES[0]), committed_at_ms=10**17)]
    assert len(choose_kept(commits, Retention(keep_monthly=1, keep_weekly=1))) == 1


@pytest.mark.parametrize("counts", [{}, {"keep_daily": -1}, {"keep_last": 1, "keep_weekly": -3}])
def test_a_rule_that_keeps_nothing_or_less_is_refused(counts: dict[str, int]) -> None:
    with pytest.raises((IndexInvariantError, msgspec.ValidationError)):
        msgspec.convert(counts, Retention)
