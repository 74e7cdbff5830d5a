"""Read retention rules for many jobs from a file (design 0006, P5).

```toml
[[job]]
match = "flights-*"     # as in a shell; the first rule that matches is the one that counts
keep_last = 30
keep_since = "7d"       # or "2026-05-01", "yesterday 18:00", in UTC; what any of them keeps stays
keep_daily = 14         # and keep_hourly, keep_weekly, keep_monthly
keep_named = true       # as if left out

[[job]]
match = "ledger"
keep_all = true         # so does every job that no rule matches
```
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.errors import UsageError, bare_message
from engine.text import Moment, parse_moment
from index.display import iso_time
from index.plan.commits import Retention, RetentionPolicy, RetentionRule, shadows

POLICY_BYTES_MAX: Final = 1024 * 1024
_COUNTS: Final = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
# The keys of a rule, each with its type and what to write there.
_KEYS: Final[Mapping[str, tuple[type, str]]] = {
    "match": (str, 'write match = "flights-*", or match = "*" for all jobs'),
    **dict.fromkeys(_COUNTS, (int, "write a number from 1 on")),
    "keep_since": (str, 'write "7d", "2026-05-01" or "yesterday 18:00" (UTC)'),
    "keep_named": (bool, "write true or false"),
    "keep_all": (bool, "write true or false"),
}
_TABLE: Final = re.compile(r"\s*\[\[\s*job\s*\]\]")
_HEADING: Final = re.compile(r"\s*\[")


class PolicyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rule as it is written: a time may be relative to the store's present."""

    pattern: str
    keep_since: Moment | None = None
    keep_named: bool = True
    keep_all: bool = False
    # By the name that a `Retention` has for it.
    counts: dict[str, int] = {}

    def resolve(self, now_ms: int) -> RetentionRule:
        if self.keep_all:
            return RetentionRule(pattern=self.pattern, retention=None)
        since_ms = self.keep_since.resolve_ms(now_ms) if self.keep_since is not None else None
        retention = Retention(keep_since_ms=since_ms, keep_named=self.keep_named, **self.counts)
        return RetentionRule(pattern=self.pattern, retention=retention)


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a file, in their order."""

    entries: tuple[PolicyEntry, ...]

    def resolve(self, now_ms: int) -> RetentionPolicy:
        return RetentionPolicy(rules=tuple(entry.resolve(now_ms) for entry in self.entries))

    def resolve_past(self, now_ms: int) -> RetentionPolicy:
        """Return the policy for a collection that would use it at once.

        Raises:
            UsageError: A time is yet to come, such as "today 23:59": of every job its newest commit alone was current
                then, and something else was meant.
        """
        policy = self.resolve(now_ms)
        for rule in policy.rules:
            since_ms = rule.retention.keep_since_ms if rule.retention is not None else None
            if since_ms is not None and since_ms > now_ms:
                message = "is yet to come, and would keep the newest commits alone: the blob store says"
                subject = f"keep_since {iso_time(since_ms)}"
                hint = "write a time that is over, such as 7d or 'yesterday 18:00' (UTC); or keep_last alone"
                raise UsageError(f"{message} {iso_time(now_ms)}", operation="policy", subject=subject, hint=hint)
        return policy


def read_policy(path: Path) -> PolicyFile:
    """Read a file of rules, and refuse what would not be obeyed.

    Raises:
        UsageError: It cannot be read, is not TOML, has an unknown key or a value that is none, a rule that keeps
            nothing, or one that never counts because an earlier one matches all that it matches.
    """
    try:
        with path.open("rb") as file:
            data = file.read(POLICY_BYTES_MAX + 1)
        if len(data) > POLICY_BYTES_MAX:
            raise _wrong(path, 0, "exceeds 1 MiB", "this is not a file of rules")
        text = data.decode()
        document = tomllib.loads(text)
    except OSError as error:
        raise _wrong(path, 0, f"cannot be read: {error.strerror}", "check --policy") from error
    except RecursionError as error:
        raise _wrong(path, 0, "is nested too deeply", "this is not a file of rules") from error
    # Not UTF-8, not TOML, or a number with thousands of digits.
    except ValueError as error:
        raise _wrong(path, 0, f"invalid TOML: {error}", "correct it") from error
    lines = text.splitlines()
    for key in document:
        if key != "job":
            raise _wrong(path, _line_of(lines, key, 0), f"unknown key {key!r}", "begin each rule with [[job]]")
    tables = document.get("job")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise _wrong(path, 0, "has no rule", 'write [[job]], and below it match = "*" and keep_last = 30')
    starts = [number for number, line in enumerate(lines, start=1) if _TABLE.match(line)]
    entries: list[PolicyEntry] = []
    for position, table in enumerate(tables):
        start = starts[position] if len(starts) == len(tables) else 0
        entry = _entry(path, lines, start, table)
        if shadow := next((e.pattern for e in entries if shadows(e.pattern, entry.pattern)), None):
            hint = f"{shadow!r} is above it, and the first rule that matches counts: move it up, or remove it"
            raise _wrong(path, start, f"the rule for {entry.pattern!r} never counts", hint)
        entries.append(entry)
    return PolicyFile(entries=tuple(entries))


def check_since(since: Moment, *, subject: str) -> Moment:
    """Raise `UsageError` for a time from which on commits are kept, where nothing is so old."""
    if since.at_ms is not None and since.at_ms < 0:
        hint = "no commit is so old: write a later time, or keep_all in a policy"
        raise UsageError("is before 1970", operation="policy", subject=subject, hint=hint)
    return since


def _entry(path: Path, lines: list[str], start: int, table: Mapping[str, Any]) -> PolicyEntry:
    def wrong(key: str, message: str, hint: str) -> UsageError:
        return _wrong(path, _line_of(lines, key, start) if start else 0, message, hint)

    fields = dict(table)
    for key, value in fields.items():
        if key not in _KEYS:
            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0)[0]
            raise wrong(key, f"unknown key {key!r}", f"did you mean `{nearest}`?")
        kind, hint = _KEYS[key]
        # Its own type: to `isinstance`, true is a number.
        if type(value) is not kind or value == "" or (isinstance(value, int) and kind is int and value < 1):
            raise wrong(key, f"{key} is {value!r}", hint)
    if "match" not in fields:
        raise wrong("match", "a rule has no job to match", _KEYS["match"][1])
    if since := fields.get("keep_since"):
        try:
            fields["keep_since"] = check_since(parse_moment(since), subject=repr(since))
        except UsageError as error:
            raise wrong("keep_since", f"keep_since {error.subject} {bare_message(error)}", error.hint) from None
    counts: dict[str, int] = {name: fields.pop(name) for name in _COUNTS if name in fields}
    entry = PolicyEntry(pattern=fields.pop("match"), counts=counts, **fields)
    keeps_some = bool(counts) or entry.keep_since is not None
    if entry.keep_all == keeps_some:
        message = "keeps all and not all" if keeps_some else "keeps nothing but the newest commits"
        hint = "give keep_last, keep_since, keep_daily or the like; or keep_all"
        raise wrong("match", f"the rule for {entry.pattern!r} {message}", hint)
    return entry


def _line_of(lines: list[str], key: str, start: int) -> int:
    """Return the line of a key from the `start`-th to the next table; `start` itself if it is not there."""
    for number, line in enumerate(lines[start:], start=start + 1):
        if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=|\s*\[+\s*{re.escape(key)}\s*\]", line):
            return number
        if start and _HEADING.match(line):
            break
    return start


def _wrong(path: Path, line: int, message: str, hint: str) -> UsageError:
    where = f"{path}, line {line}" if line else str(path)
    return UsageError(message, operation="policy", subject=where, hint=hint)
