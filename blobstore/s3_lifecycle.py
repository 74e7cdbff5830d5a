"""The lifecycle rules of a repository: the backstop of design 0002, T3 and design 0003, L4. Pure.

A rule is what the SDK gives: a dict with `ID`, `Status`, `Filter` and what is to happen. Of a bucket's rules two are
ours, known by their ids; all others are passed on exactly as they were read.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

DAY_MS: Final = 24 * 3_600_000
DAYS_MIN: Final = 7
COLLECTION_PERIODS_MIN: Final = 3
# What S3 allows.
ID_LENGTH_MAX: Final = 255
RULES_MAX: Final = 1000

TTL_TAG: Final = "tidemark"
EXPIRING: Final = "expiring"

Rule = dict[str, Any]

_PREFIX_LENGTH_MAX: Final = 200
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")


class LifecyclePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a bucket's rules; a change of a rule is its removal and its addition."""

    # Rules of others: they stay as they are.
    others: tuple[Rule, ...]
    # Ours that stay, go and come.
    kept: tuple[Rule, ...]
    removed: tuple[Rule, ...]
    added: tuple[Rule, ...]

    @property
    def changes(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.removed or self.added)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules as they will be."""
        return (*self.others, *self.kept, *self.added)


def rule_ids(prefix: str) -> tuple[str, str]:
    """The ids of the two rules of a repository: that which deletes, and that which aborts."""
    name = _UNSAFE.sub(lambda m: "".join(f"~{byte:02X}" for byte in m[0].encode()), prefix)
    if len(name) > _PREFIX_LENGTH_MAX:
        name = f"{name[:_PREFIX_LENGTH_MAX]}-{hashlib.sha256(prefix.encode()).hexdigest()[:16]}"
    return f"tidemark-expire-{name}", f"tidemark-abort-{name}"


def backstop_days(*, ttl_ms: int, collection_period_ms: int) -> int:
    """After how many days the store itself may delete an upload (design 0002, T3)."""
    return max(
        DAYS_MIN,
        -(-(ttl_ms + DAY_MS) // DAY_MS),
        -(-COLLECTION_PERIODS_MIN * collection_period_ms // DAY_MS),
    )


def backstop_rules(prefix: str, *, days: int) -> tuple[Rule, Rule]:
    """The two rules of a repository.

    Args:
        prefix: Of the repository in the bucket, without slashes at its ends; empty for the whole bucket.
        days: As `backstop_days`.
    """
    expire_id, abort_id = rule_ids(prefix)
    tag = {"Key": TTL_TAG, "Value": EXPIRING}
    root = f"{prefix}/" if prefix else ""
    return (
        {
            "ID": expire_id,
            "Status": "Enabled",
            "Filter": {"And": {"Prefix": root, "Tags": [tag]}} if root else {"Tag": tag},
            "Expiration": {"Days": days},
        },
        {
            "ID": abort_id,
            "Status": "Enabled",
            "Filter": {"Prefix": root},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
        },
    )


def plan_lifecycle(existing: Iterable[Rule], wanted: Sequence[Rule], *, prefix: str) -> LifecyclePlan:
    """Decide what becomes of a bucket's rules.

    Args:
        existing: All rules of the bucket.
        wanted: Those that this repository is to have: `backstop_rules`, or none to remove them.
        prefix: Of the repository.

    Returns:
        `others` + `kept` + `removed` are exactly `existing`; `kept` + `added` do exactly what `wanted` say.
    """
    ids = rule_ids(prefix)
    others: list[Rule] = []
    kept: list[Rule] = []
    removed: list[Rule] = []
    wanted_left = {rule["ID"]: rule for rule in wanted}
    for rule in existing:
        if rule.get("ID") not in ids:
            others.append(rule)
            continue
        same = wanted_left.get(rule["ID"])
        if same is not None and _meaning(same) == _meaning(rule):
            kept.append(rule)
            del wanted_left[rule["ID"]]
        else:
            removed.append(rule)
    return LifecyclePlan(
        others=tuple(others), kept=tuple(kept), removed=tuple(removed), added=tuple(wanted_left.values())
    )


def same_rules(one: Iterable[Rule], other: Iterable[Rule]) -> bool:
    """Whether two sets of rules do the same, in whatever order and form a store tells them."""
    return sorted(map(repr, map(_meaning, one))) == sorted(map(repr, map(_meaning, other)))


def describe_rule(rule: Rule) -> str:
    """What a rule does, in one line for people."""
    prefix, tags, rest = _parts(rule)
    done = "; ".join(f"{name}: {_told(value)}" for name, value in sorted(rest.items()) if name not in {"ID", "Status"})
    match rest:
        case {"Expiration": {"Days": days}} if len(rest) == len(("ID", "Status", "Expiration")):
            done = f"delete {days} days after creation"
        case {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days}} if len(rest) == len(
            ("ID", "Status", "Abort")
        ):
            done = f"abort multipart uploads {days} days after their begin"
    where = f"below {prefix}" if prefix else "whole bucket"
    tagged = f" tagged {', '.join(f'{key}={value}' for key, value in tags)}" if tags else ""
    off = "" if rest.get("Status") == "Enabled" else f" ({rest.get('Status')})"
    return f"{where}{tagged}: {done}{off}"


def _parts(rule: Rule) -> tuple[str, list[tuple[str, str]], Rule]:
    """Prefix, tags, and the rest of a rule, however its filter is spelled."""
    rest = {name: value for name, value in rule.items() if name not in {"Filter", "Prefix"}}
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    prefix = found.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or ""
    tags = [*([found["Tag"]] if found.get("Tag") else []), *(both.get("Tags") or [])]
    more = {
        name: value
        for name, value in {**found, **both}.items()
        if name not in {"And", "Prefix", "Tag", "Tags"} and value
    }
    return prefix, sorted((tag["Key"], tag["Value"]) for tag in tags), {**rest, **({"Filter": more} if more else {})}


def _meaning(rule: Rule) -> tuple[str, list[tuple[str, str]], list[tuple[str, Any]]]:
    prefix, tags, rest = _parts(rule)
    return prefix, tags, [(name, _sorted(value)) for name, value in sorted(rest.items())]


def _sorted(value: Any) -> Any:  # noqa: ANN401  (whatever a rule may hold)
    if isinstance(value, dict):
        return [(name, _sorted(inner)) for name, inner in sorted(value.items())]
    return [_sorted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _told(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_told, value))
    return str(value)
