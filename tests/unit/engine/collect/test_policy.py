"""Retention rules as people write them down (design 0006, P5)."""

from pathlib import Path

import pytest

from engine.collect.policy import read_policy
from engine.errors import UsageError
from index.plan.commits import Retention, RetentionPolicy, RetentionRule

NOW_MS = 1_000_000_000


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_rules_are_read_in_their_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [[job]]
        match = "flights-*"
        keep_last = 30
        keep_since = "1d"
        keep_named = false

        [[job]]
        match = "ledger"
        keep_all = true

        [[job]]
        match = "*"
        keep_since = "1970-01-02"
        keep_daily = 7
        keep_monthly = 12
        """,
    )
    assert read_policy(path).resolve(NOW_MS) == RetentionPolicy(
        rules=(
            RetentionRule(
                pattern="flights-*",
                retention=Retention(keep_last=30, keep_since_ms=NOW_MS - 86_400_000, keep_named=False),
            ),
            RetentionRule(pattern="ledger", retention=None),
            RetentionRule(pattern="*", retention=Retention(keep_since_ms=86_400_000, keep_daily=7, keep_monthly=12)),
        )
    )


@pytest.mark.parametrize("since", ["today 23:59", "2099-01-01", "1970-01-12T13:46:40.001Z"])
def test_a_time_that_is_yet_to_come_keeps_nothing_and_is_refused(tmp_path: Path, since: str) -> None:
    rules = read_policy(written(tmp_path, f'[[job]]\nmatch = "a"\nkeep_last = 3\nkeep_since = "{since}"'))
    with pytest.raises(UsageError, match="is yet to come") as caught:
        rules.resolve_past(NOW_MS)
    assert "the blob store says 1970-01-12T13:46:40.000Z" in str(caught.value)


@pytest.mark.parametrize("since", ["0s", "today 13:46", "yesterday 23:59", "1970-01-12T13:46:40Z"])
def test_a_time_that_is_over_counts(tmp_path: Path, since: str) -> None:
    rules = read_policy(written(tmp_path, f'[[job]]\nmatch = "a"\nkeep_since = "{since}"\n'))
    assert rules.resolve_past(NOW_MS) == rules.resolve(NOW_MS)


@pytest.mark.parametrize(
    "text, line, message, hint",
    [
        ('[[job]]\nmatch = "a"\nkeep_lst = 3', 3, "unknown key 'keep_lst'", "`keep_last`"),
        ('[[job]]\nmatch = "a"\nkeep_last = 3\n[[job]]\nkeep_last = 1', 4, "no job to match", "match"),
        ('[[job]]\nmatch = "a"\nkeep_last = "3"', 3, "keep_last is '3'", "number"),
        ('[[job]]\nmatch = "a"\nkeep_last = 0', 3, "keep_last is 0", "from 1 on"),
        ('[[job]]\nmatch = "a"\nkeep_last = -2', 3, "keep_last is -2", "from 1 on"),
        ('[[job]]\nmatch = "a"\nkeep_last = true', 3, "keep_last is True", "number"),
        ('[[job]]\nmatch = "a"\nkeep_dayly = 7', 3, "unknown key 'keep_dayly'", "`keep_daily`"),
        ('[[job]]\nmatch = "a"\nkeep_weekly = 0', 3, "keep_weekly is 0", "from 1 on"),
        ('[[job]]\nmatch = "a"\nkeep_all = true\nkeep_monthly = 1', 2, "keeps all and not all", "keep_all"),
        ('[[job]]\nmatch = ""\nkeep_last = 1', 2, "match is ''", "match"),
        ('[[job]]\nmatch = "a"\nkeep_since = 2026-05-01', 3, "keep_since is", "yesterday 18:00"),
        ('[[job]]\nmatch = "a"\nkeep_since = "7x"', 3, "neither a time nor a duration", "36h"),
        ('[[job]]\nmatch = "a"\nkeep_last = 1\nkeep_named = 1', 4, "keep_named is 1", "true or false"),
        ('[[job]]\nmatch = "a"\nkeep_named = true', 2, "keeps nothing but the newest", "keep_last"),
        ('[[job]]\nmatch = "a"\nkeep_all = true\nkeep_last = 1', 2, "keeps all and not all", "keep_all"),
        ('[[job]]\nmatch = "*"\nkeep_last = 1\n\n[[job]]\nmatch = "a"\nkeep_last = 9', 5, "never counts", "'*'"),
        ('[[job]]\nmatch = "a"\nkeep_last = 1\n\n[[job]]\nmatch = "a"\nkeep_last = 9', 5, "never counts", "'a'"),
        ('[[job]]\nmatch = "**"\nkeep_last = 1\n\n[[job]]\nmatch = "a"\nkeep_last = 9', 5, "never counts", "'**'"),
        ('[[job]]\nmatch = "a*"\nkeep_last = 1\n\n[[job]]\nmatch = "ab"\nkeep_last = 9', 5, "never counts", "'a*'"),
        ('[[job]]\nmatch = "a"\nkeep_since = "1960-01-01"', 3, "before 1970", "later"),
        ("a = " + "[" * 5000, 0, "nested too deeply", "not a file of rules"),
        ("a = " + "1" * 5000, 0, "invalid TOML", "correct it"),
        ("[jobs]\nmatch = 1", 1, "unknown key 'jobs'", "[[job]]"),
        ("keep_last = 1", 1, "unknown key 'keep_last'", "[[job]]"),
        ("", 0, "has no rule", "[[job]]"),
        ('job = "a"', 0, "has no rule", "[[job]]"),
        ("[[job]", 0, "invalid TOML", "correct it"),
    ],
)
def test_what_would_not_be_obeyed_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str, hint: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_policy(path)
    assert caught.value.subject == (f"{path}, line {line}" if line else str(path))
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"#" * (1024 * 1024 + 1))
    for name in ("absent", "binary", "large"):
        with pytest.raises(UsageError):
            read_policy(tmp_path / name)
