"""What a store was seen to do, and what that means: evidence in, verdicts and a profile out. Pure."""

import enum
from collections.abc import Iterable
from typing import Final

import msgspec

from blobstore.s3.settings import StoreProfile

SKEW_MS_MAX: Final = 300_000


class Check(enum.Enum):
    """What is looked at."""

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
    LIFECYCLE = "lifecycle rules"
    CLOCK = "clock"


class Verdict(enum.Enum):
    """The verdict on one check, or on all."""

    OK = "ok"
    # The store lacks it, and tidemark does without.
    MISSING = "missing"
    # Nothing is at risk, and somebody should know.
    WARNING = "warning"
    # Data could be lost.
    UNSAFE = "UNSAFE"
    DENIED = "denied"
    # It could not be determined: run it again.
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

    # What was done and seen, for people.
    figure: str = ""
    # A lifecycle rule deletes by the tag of a TTL.
    has_backstop: bool = False
    # How the store broke a promise that data depends on.
    broken: str = ""
    # What it cannot do, which tidemark can do without.
    lacking: str = ""
    failure: Failure | None = None
    # Why it failed.
    reason: str = ""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one check."""

    check: Check
    verdict: Verdict
    # As in `Evidence`.
    figure: str = ""
    # What it means for the users of the store.
    meaning: str = ""
    # As in `Evidence`.
    has_backstop: bool = False


class _Words(msgspec.Struct, frozen=True):
    # What tidemark can rely on, what it does without it, and what happens to those who rely on it all the same.
    ok: str
    missing: str = ""
    unsafe: str = ""
    # What remains unknown if these credentials may not look; empty: as `missing`.
    denied: str = ""


_WORDS: Final = {
    Check.CREATE: _Words(
        "of any number of writers one wins", "", "two writers could both commit: tidemark refuses to write here"
    ),
    Check.READ: _Words("others see at once what was written", "", "commits could be overlooked: collect refuses"),
    Check.REPLACE: _Words("readers see the old or the new, whole", "", "readers can see half of a pin or name"),
    Check.RANGES: _Words("restores fetch parts in parallel", "", "restores cannot fetch parts of objects"),
    Check.LISTS: _Words(
        "lists can be believed: collect may delete",
        "collect refuses",
        "commits could be overlooked: collect refuses",
    ),
    Check.TTL: _Words(
        "commits remove TTLs; the lifecycle backstop works",
        "TTLs stay: what loses its commit waits for their end; no lifecycle backstop",
        "uploads would be taken for committed ones, and collected",
    ),
    Check.MULTIPART: _Words("large bodies can go in parts", "every body goes in one PUT", "do not use this store"),
    Check.CONDITIONAL_MULTIPART: _Words("large creates go in parallel parts", "a create is one PUT, of up to 5 GiB"),
    Check.ABORT: _Words("collect frees what dead uploads hold", "only a lifecycle rule frees what dead uploads hold"),
    Check.DELETE: _Words(
        "collect deletes 1,000 keys per request",
        "collect needs it: with these rights, or on this store, nothing is freed",
        "collect would delete what is in use: never run it here",
    ),
    Check.LIFECYCLE: _Words(
        "`tidemark lifecycle` shows and installs the backstop",
        "no backstop: only collect frees what was never committed",
        "the store itself takes away what is needed: change the rule now (`tidemark lifecycle` shows all)",
        "nobody could see whether a rule takes away what is needed (--policy owner may)",
    ),
    Check.CLOCK: _Words(
        "times can be compared",
        "set this machine's clock: from 15 minutes on the store refuses every request",
        "creation times do not follow the store's clock, by which expiry is judged",
    ),
}
# Failing these says nothing about safety: others may have the rights, and the engine can do without.
_DISPENSABLE: Final = frozenset({Check.ABORT, Check.DELETE, Check.LIFECYCLE})
_REQUIRED: Final = frozenset({Check.CREATE, Check.READ, Check.REPLACE, Check.RANGES, Check.LISTS, Check.CLOCK})
# If one of them fails again and again, tidemark does without.
OPTIONAL: Final = frozenset({Check.TTL, Check.MULTIPART, Check.CONDITIONAL_MULTIPART, Check.ABORT})


def judge(check: Check, evidence: Evidence, *, needed: bool = False) -> CheckResult:
    """Return the verdict on one check.

    A broken promise is UNSAFE whatever else went wrong. What could not be determined is never UNSAFE, and more than a
    warning if something else depends on this check: if it is `needed`.
    """
    verdict, meaning = _judge(check, evidence, dispensable=check in _DISPENSABLE and not needed)
    return CheckResult(
        check=check, verdict=verdict, figure=evidence.figure, meaning=meaning, has_backstop=evidence.has_backstop
    )


def _judge(check: Check, evidence: Evidence, *, dispensable: bool) -> tuple[Verdict, str]:  # noqa: PLR0911  (each ending)
    words, reason = _WORDS[check], evidence.reason
    if evidence.broken:
        return Verdict.UNSAFE, f"{evidence.broken}: {words.unsafe}"
    if evidence.lacking:
        return Verdict.WARNING if check is Check.CLOCK else Verdict.MISSING, f"{evidence.lacking}: {words.missing}"
    match evidence.failure:
        case None:
            return Verdict.OK, words.ok
        case Failure.NOT_APPLICABLE:
            return Verdict.NOT_APPLICABLE, reason
        case Failure.UNSUPPORTED:
            verdict = Verdict.UNSAFE if check in _REQUIRED else Verdict.MISSING
            return verdict, f"{reason}: {words.missing or words.unsafe}"
        case Failure.DENIED:
            unknown = words.denied or (words.missing if dispensable else "") or reason
            return Verdict.WARNING if dispensable else Verdict.DENIED, f"denied to these credentials: {unknown}"
        case Failure.NO_TIME:
            return Verdict.UNKNOWN, f"run again: {reason}"
        case Failure.UNAVAILABLE:
            return Verdict.WARNING if dispensable else Verdict.UNKNOWN, f"run again: {reason}"


def judge_clock(*, ahead_ms: int, skew_ms: int) -> Evidence:
    """Compare three clocks.

    Args:
        ahead_ms: How far the store's clock is ahead of this machine's.
        skew_ms: How far a creation time was outside of the store's own clock before and after it.
    """
    seconds = f"{ahead_ms / 1000:+.1f} s"
    return Evidence(
        figure=f"store {seconds} of this machine",
        broken=f"an object was created {skew_ms / 1000:+.0f} s off the store's clock" if skew_ms > SKEW_MS_MAX else "",
        lacking=f"the store's clock is {seconds} of this machine's" if abs(ahead_ms) > SKEW_MS_MAX else "",
    )


def choose_profile(checks: Iterable[CheckResult], *, probed_at_ms: int, release: str) -> StoreProfile | None:
    """Choose the profile that binds everybody who opens the store (design 0003, P1).

    Returns:
        What was seen to work; what was not is denied (P3). None if too little is known to say anything, or if a
        lifecycle rule has to go first, or nobody could see whether one goes by a tag that would then stay: an earlier
        profile then stays.
    """
    by_check = {one.check: one for one in checks}
    verdicts = {check: one.verdict for check, one in by_check.items()}
    deciding = [verdicts[check] for check in (Check.CREATE, Check.READ, Check.LISTS, Check.TTL)]
    if Verdict.UNSAFE not in deciding and {Verdict.UNKNOWN, Verdict.DENIED} & set(deciding):
        return None
    lifecycle = by_check[Check.LIFECYCLE]
    if lifecycle.verdict is Verdict.UNSAFE:
        return None
    has_no_rule = lifecycle.verdict in {Verdict.MISSING, Verdict.NOT_APPLICABLE} or (
        lifecycle.verdict is Verdict.OK and not lifecycle.has_backstop
    )
    if verdicts[Check.TTL] is not Verdict.OK and not has_no_rule:
        # A profile without tags would stop commits from removing TTLs that a rule of the bucket goes by (0002, T1).
        return None

    def works(*wanted: Check) -> bool:
        return all(verdicts[check] is Verdict.OK for check in wanted)

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
    """Describe for people what everybody who opens the store will do and not do from now on."""
    refused = "is refused from now on: "
    collects = profile.atomic_create and profile.consistent_lists
    in_parts = profile.conditional_multipart
    return (
        "writing (init, backup, commit, name) " + ("works" if profile.atomic_create else f"{refused}creates can race"),
        "collect " + ("works" if collects else f"{refused}lists, creates or deletes cannot be trusted"),
        "TTLs are " + ("removed by commits" if profile.tags else "never removed; no lifecycle rule may delete by them"),
        "creates of more than one part go "
        + ("in parallel parts" if in_parts else f"as one PUT ({blob_bytes_max:,} bytes at most)"),
    )
