"""What a store was seen to do, and what that means: evidence in, verdicts and a profile out. Pure."""

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from blobstore.s3.settings import StoreProfile

SKEW_MS_MAX: Final = 300_000
# The figure that counts the rules which delete by the tag of a TTL.
BACKSTOPS: Final = "backstop"


class Check(enum.Enum):
    """What is looked at; the values are what people read."""

    CREATE = "conditional create"
    READ = "read after write"
    REPLACE = "whole replacement"
    RANGES = "ranges"
    LISTS = "list after write"
    TTL = "TTL by tag"
    MULTIPART = "multipart upload"
    CONDITIONAL_MULTIPART = "conditional multipart"
    ABORT = "multipart abort"
    DELETE = "batch delete"
    EMPTY = "empty objects"
    LIFECYCLE = "lifecycle rules"
    CLOCK = "clock"


class Verdict(enum.Enum):
    """What is to be thought of one check."""

    OK = "ok"
    # The store lacks it, and tidemark does without.
    MISSING = "missing"
    # Nothing is at risk, and somebody should know.
    WARNING = "warning"
    # Data could be lost.
    UNSAFE = "UNSAFE"
    DENIED = "denied"
    # It could not be found out: look again.
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "n/a"


class Failure(enum.Enum):
    """Why a check did not come to its end."""

    DENIED = "denied"
    UNAVAILABLE = "unavailable"
    NO_TIME = "no time"
    UNSUPPORTED = "unsupported"
    NOT_APPLICABLE = "not applicable"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one check has seen. Without `broken`, `lacking` and `failure`: all that it should."""

    check: Check
    # What was done and measured, for people; the same as numbers, with their unit in the name.
    figure: str = ""
    figures: Mapping[str, float] = {}
    # How the store broke a promise that data depends on.
    broken: str = ""
    # What it cannot do, which tidemark can do without.
    lacking: str = ""
    failure: Failure | None = None
    # Why it failed.
    reason: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one check."""

    check: Check
    verdict: Verdict
    figure: str
    figures: Mapping[str, float]
    # What it means for whoever uses the store.
    meaning: str


class _Meaning(msgspec.Struct, frozen=True):
    # What tidemark can rely on, or what it does without it, or what happens to whoever relies on it all the same.
    ok: str
    missing: str = ""
    unsafe: str = ""
    # What nobody knows if it may not be looked at; empty: as `missing`.
    denied: str = ""


_MEANINGS: Final = {
    Check.CREATE: _Meaning(
        "of any number of writers one wins", unsafe="two writers could both commit: tidemark refuses to write here"
    ),
    Check.READ: _Meaning("others see at once what was written", unsafe="commits could be overlooked: collect refuses"),
    Check.REPLACE: _Meaning("readers see the old or the new, whole", unsafe="readers can see half of a pin or name"),
    Check.RANGES: _Meaning("restores fetch parts in parallel", unsafe="restores cannot fetch parts of objects"),
    Check.LISTS: _Meaning(
        "lists can be believed: collect may delete",
        missing="collect refuses",
        unsafe="commits could be overlooked: collect refuses",
    ),
    Check.TTL: _Meaning(
        "commits remove TTLs; the lifecycle backstop works",
        missing="TTLs stay: what loses its commit waits for their end; no lifecycle backstop",
        unsafe="uploads would be taken for committed ones, and collected",
    ),
    Check.MULTIPART: _Meaning(
        "large bodies can go in parts", missing="every body goes in one PUT", unsafe="do not use this store"
    ),
    Check.CONDITIONAL_MULTIPART: _Meaning(
        "large creates go in parallel parts", missing="a create is one PUT, of up to 5 GiB"
    ),
    Check.ABORT: _Meaning(
        "collect frees what dead uploads hold", missing="only a lifecycle rule frees what dead uploads hold"
    ),
    Check.DELETE: _Meaning(
        "collect deletes 1,000 keys per request",
        missing="collect needs it: with these rights, or on this store, nothing is freed",
        unsafe="collect would delete what is in use: never run it here",
    ),
    Check.EMPTY: _Meaning("no exceptions", missing="tidemark stores none"),
    Check.LIFECYCLE: _Meaning(
        "`tidemark lifecycle` shows and installs the backstop",
        missing="no backstop: only collect frees what was never committed",
        unsafe="the store itself takes away what is needed: change the rule now (`tidemark lifecycle` shows all)",
        denied="nobody could see whether a rule takes away what is needed (--policy owner may)",
    ),
    Check.CLOCK: _Meaning(
        "times can be compared",
        missing="set this machine's clock: from 15 minutes on the store refuses every request",
        unsafe="creation times do not follow the store's clock, by which expiry is judged",
    ),
}
# Failing these says nothing about safety: others may have the rights, and the engine can do without.
_DISPENSABLE: Final = frozenset({Check.ABORT, Check.DELETE, Check.EMPTY, Check.LIFECYCLE})
_REQUIRED: Final = frozenset({Check.CREATE, Check.READ, Check.REPLACE, Check.RANGES, Check.LISTS, Check.CLOCK})


def judge(evidence: Evidence, *, needed: bool = False) -> Row:  # noqa: PLR0911  (one for each way a check can end)
    """The verdict on one check.

    A promise that was broken is UNSAFE whatever else went wrong. What could not be found out is never UNSAFE.

    Args:
        evidence: What was seen.
        needed: Something else depends on what this check finds out, so that not to know it is more than a warning.
    """
    meaning = _MEANINGS[evidence.check]
    dispensable = evidence.check in _DISPENSABLE and not needed
    match evidence:
        case Evidence(broken=text) if text:
            return _row(evidence, Verdict.UNSAFE, f"{text}: {meaning.unsafe}")
        case Evidence(lacking=text) if text:
            verdict = Verdict.WARNING if evidence.check is Check.CLOCK else Verdict.MISSING
            return _row(evidence, verdict, f"{text}: {meaning.missing}")
        case Evidence(failure=None):
            return _row(evidence, Verdict.OK, meaning.ok)
        case Evidence(failure=Failure.NOT_APPLICABLE, reason=text):
            return _row(evidence, Verdict.NOT_APPLICABLE, text)
        case Evidence(failure=Failure.UNSUPPORTED, reason=text):
            verdict = Verdict.UNSAFE if evidence.check in _REQUIRED else Verdict.MISSING
            return _row(evidence, verdict, f"{text}: {meaning.missing or meaning.unsafe}")
        case Evidence(failure=Failure.DENIED, reason=text):
            verdict = Verdict.WARNING if dispensable else Verdict.DENIED
            unknown = meaning.denied or (meaning.missing if dispensable else "") or text
            return _row(evidence, verdict, f"denied to these credentials: {unknown}")
        case Evidence(failure=Failure.NO_TIME, reason=text):
            return _row(evidence, Verdict.UNKNOWN, f"run again: {text}")
        case Evidence(reason=text):
            return _row(evidence, Verdict.WARNING if dispensable else Verdict.UNKNOWN, f"run again: {text}")


def _row(evidence: Evidence, verdict: Verdict, meaning: str) -> Row:
    return Row(check=evidence.check, verdict=verdict, figure=evidence.figure, figures=evidence.figures, meaning=meaning)


def choose_profile(rows: Iterable[Row], *, probed_at_ms: int, release: str) -> StoreProfile | None:
    """The profile that binds everybody who opens the store (design 0003, P1).

    Args:
        rows: Every verdict.
        probed_at_ms: By this machine's clock.
        release: Of this tidemark.

    Returns:
        What was seen to work; what was not is denied (P3). None if too little could be found out to say anything, or if
        a lifecycle rule has to go first, or nobody could see whether one goes by a tag that would then stay: what an
        earlier look has found then stays.
    """
    by_check = {row.check: row for row in rows}
    verdicts = {check: row.verdict for check, row in by_check.items()}
    deciding = [verdicts[check] for check in (Check.CREATE, Check.READ, Check.LISTS, Check.TTL)]
    if Verdict.UNSAFE not in deciding and {Verdict.UNKNOWN, Verdict.DENIED} & set(deciding):
        return None
    lifecycle = by_check[Check.LIFECYCLE]
    if lifecycle.verdict is Verdict.UNSAFE:
        return None
    has_no_rule = lifecycle.verdict in {Verdict.MISSING, Verdict.NOT_APPLICABLE} or (
        lifecycle.verdict is Verdict.OK and not lifecycle.figures.get(BACKSTOPS)
    )
    if verdicts[Check.TTL] is not Verdict.OK and not has_no_rule:
        # A profile without tags would stop commits from removing TTLs that a rule of the bucket goes by (0002, T1).
        return None

    def works(*checks: Check) -> bool:
        return all(verdicts[check] is Verdict.OK for check in checks)

    return StoreProfile(
        # Where a TTL is lost at once, "no TTL" no longer means "committed" (design 0002, C5): nothing may be written.
        atomic_create=works(Check.CREATE) and verdicts[Check.TTL] is not Verdict.UNSAFE,
        consistent_lists=works(Check.READ, Check.LISTS) and verdicts[Check.DELETE] is not Verdict.UNSAFE,
        tags=works(Check.TTL),
        conditional_multipart=works(Check.MULTIPART, Check.CONDITIONAL_MULTIPART),
        probed_at_ms=probed_at_ms,
        tidemark=release,
    )


def describe_profile(profile: StoreProfile, *, blob_bytes_max: int) -> tuple[str, ...]:
    """What everybody who opens the store will do and not do from now on, for people."""
    refused = "is refused from now on: "
    return (
        "writing (init, backup, commit, name) " + ("works" if profile.atomic_create else f"{refused}creates can race"),
        "collect "
        + (
            "works"
            if profile.atomic_create and profile.consistent_lists
            else f"{refused}lists, creates or deletes cannot be trusted"
        ),
        "TTLs are " + ("removed by commits" if profile.tags else "never removed; no lifecycle rule may delete by them"),
        "creates of more than one part go "
        + ("in parallel parts" if profile.conditional_multipart else f"as one PUT ({blob_bytes_max:,} bytes at most)"),
    )


def judge_clock(*, ahead_ms: int, skew_ms: int, figures: Mapping[str, float]) -> Evidence:
    """What three clocks say of each other.

    Args:
        ahead_ms: How far the store's clock is ahead of this machine's.
        skew_ms: How far a creation time was outside of the store's own clock before and after it.
        figures: As they are.
    """
    seconds = f"{ahead_ms / 1000:+.1f} s"
    return Evidence(
        check=Check.CLOCK,
        figure=f"store {seconds} of this machine",
        figures=figures,
        broken=f"an object was created {skew_ms / 1000:+.0f} s off the store's clock" if skew_ms > SKEW_MS_MAX else "",
        lacking=f"the store's clock is {seconds} of this machine's" if abs(ahead_ms) > SKEW_MS_MAX else "",
    )
