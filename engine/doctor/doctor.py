"""Find out what a store really does: a battery of checks, verdicts, and a profile that binds all who open it.

Everything happens below a prefix of its own, `doctor/<random>/`, and is deleted at the end. Nothing of a repository
that is there is written but its `profile`, and nothing read but its record, where a lifecycle rule goes by its TTL.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Final

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, StoreError, StoreUnavailableError
from blobstore.s3.settings import PROFILE_KEY, StoreProfile, encode_profile
from engine.doctor import checks as run
from engine.doctor.checks import Evidence, NotApplicableError, NoTimeError, S3Capabilities, StoreProbe
from engine.errors import UnsafeStoreError
from engine.records.repository import check_unused
from engine.runtime import Runtime
from index.snapshot.keys import REPOSITORY

CLIENTS_COUNT: Final = 16
ROOT: Final = "doctor/"
CHECK_S_MAX: Final = 15.0
# Whether a store answers at all, after a check that had no answer.
ALIVE_S_MAX: Final = 6.0
# From the first request on: the checks end, cleaning up ends, and so does the writing of the profile.
CHECKS_S_MAX: Final = 44.0
CLEAN_S_MAX: Final = 53.0
TOTAL_S_MAX: Final = 57.0


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


# Is called with the check that begins, its number, and the number of all.
OnCheck = Callable[[Check, int, int], None]


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


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one check."""

    check: Check
    verdict: Verdict
    # As in `Evidence`.
    figure: str = ""
    # What it means for the users of the blob store.
    meaning: str = ""
    # As in `Evidence`.
    has_backstop: bool = False


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` found out."""

    json_omitted: ClassVar = frozenset({"error"})
    json_properties: ClassVar = {"safe": "safe", "verdict": "verdict", "profile_error": "profile_error"}

    checks: tuple[CheckResult, ...]
    # Null: too little is known, or a blob store of this kind has none.
    profile: StoreProfile | None
    profile_written: bool
    # Why it was not, if it should have been.
    error: StoreError | None
    # Requests that the blob store did not answer, or with "try again".
    hiccups_count: int
    # The prefix of this run; what could not be deleted below it at the end, and why.
    root: str
    left: tuple[str, ...]
    left_reason: str
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all checks: unsafe, denied, unknown, or ok."""
        found = {one.verdict for one in self.checks}
        return next((v for v in (Verdict.UNSAFE, Verdict.DENIED, Verdict.UNKNOWN) if v in found), Verdict.OK)

    @property
    def safe(self) -> bool:
        return self.verdict is Verdict.OK

    @property
    def profile_error(self) -> str:
        return str(self.error or "")


async def examine_store(
    open_client: Callable[[], BlobStore],
    *,
    runtime: Runtime,
    release: str,
    save: bool,
    on_check: OnCheck = lambda check, number, total: None,  # noqa: ARG005
) -> DoctorReport:
    """Examine a store.

    `open_client` opens it without wrappers and without its profile, once for each client. `save` writes the profile,
    with this `release` of tidemark, if there is something to say.

    Raises:
        StoreError: Not even the first request was answered: no such bucket, no rights at all, nobody there.
    """
    clients = [open_client() for _ in range(CLIENTS_COUNT)]
    probe = StoreProbe(clients, f"{ROOT}{runtime.session()}/", runtime.monotonic_s)
    began_s = runtime.monotonic_s()

    def left_s(until_s: float) -> float:
        return max(0.0, began_s + until_s - runtime.monotonic_s())

    profile = error = None
    try:
        try:
            await _begin(probe)
            checks = await _examine(probe, runtime, on_check, lambda: left_s(CHECKS_S_MAX))
        finally:
            left, left_reason = await asyncio.shield(asyncio.ensure_future(_clean_up(probe, left_s(CLEAN_S_MAX))))
        if isinstance(clients[0], S3Capabilities):
            profile = choose_profile(checks, probed_at_ms=runtime.local_now_ms(), release=release)
        if save and profile is not None:
            error = await _write_profile(clients[0], profile, left_s(TOTAL_S_MAX))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return DoctorReport(
        checks=checks,
        profile=profile,
        profile_written=save and profile is not None and error is None,
        error=error,
        hiccups_count=probe.hiccups,
        root=probe.root,
        left=left,
        left_reason=left_reason,
        took_s=round(runtime.monotonic_s() - began_s, 3),
    )


async def _begin(probe: StoreProbe) -> None:
    """Make the first request: if that fails, there is nothing to look at."""
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            try:
                await check_unused(probe.client(0), "doctor")
            except UnsafeStoreError:
                if await probe.stat(0, REPOSITORY) is None:
                    raise
            await probe.put(0, probe.key("first"), b"tidemark doctor")
    except TimeoutError:
        raise StoreUnavailableError(f"no answer within {CHECK_S_MAX:.0f} s", operation="put", key=probe.root) from None


async def _examine(
    probe: StoreProbe, runtime: Runtime, on_check: OnCheck, left_s: Callable[[], float]
) -> tuple[CheckResult, ...]:
    plan: dict[Check, Callable[[], Awaitable[Evidence]]] = {
        Check.CREATE: lambda: run.check_create(probe),
        Check.READ: lambda: run.check_read(probe),
        Check.REPLACE: lambda: run.check_replace(probe),
        Check.RANGES: lambda: run.check_ranges(probe),
        Check.LISTS: lambda: run.check_lists(probe),
        Check.TTL: lambda: run.check_ttl(probe),
        Check.LIFECYCLE: lambda: run.check_lifecycle(probe, ttls_stay=ttls_are(Verdict.MISSING, Verdict.UNSAFE)),
        Check.MULTIPART: lambda: run.check_multipart(probe, with_ttl=ttls_are(Verdict.OK)),
        Check.CONDITIONAL_MULTIPART: lambda: run.check_conditional_multipart(probe),
        Check.ABORT: lambda: run.check_abort(probe),
        Check.DELETE: lambda: run.check_delete(probe),
        Check.CLOCK: lambda: run.check_clock(probe, runtime.local_now_ms),
    }
    results: dict[Check, CheckResult] = {}

    def ttls_are(*verdicts: Verdict) -> bool:
        return results[Check.TTL].verdict in verdicts

    for check, look in plan.items():
        on_check(check, len(results) + 1, len(plan))
        found = await _look(check, look, left_s, probe)
        # Without tags a rule may delete what is committed: then the verdict on rules is needed.
        results[check] = judge(check, found, needed=check is Check.LIFECYCLE and not ttls_are(Verdict.OK))
    return tuple(results[check] for check in Check)


async def _look(
    check: Check, look: Callable[[], Awaitable[Evidence]], left_s: Callable[[], float], probe: StoreProbe
) -> Evidence | Exception:
    """Run a check; one that tidemark can do without and that fails is run a second time."""
    lacking = ""
    for _ in range(2):
        try:
            return await _run(look, left_s(), probe)
        except (StoreError, NotApplicableError, NoTimeError, TimeoutError) as error:
            # An answer, and not one that asks for less, may say that the store cannot do it. One request that hung, of
            # many connections, says nothing about what the store can do.
            is_answer = isinstance(error, StoreUnavailableError) and not error.asks_for_less
            if not (check in _OPTIONAL and is_answer and await probe.is_alive(min(ALIVE_S_MAX, left_s()))):
                return error
            lacking = f"fails every time ({error})"
    # Everything else works: this is how the store says that it cannot do it.
    return Evidence(lacking=lacking)


async def _run(look: Callable[[], Awaitable[Evidence]], left_s: float, probe: StoreProbe) -> Evidence:
    """Run a check within its time (TimeoutError), and that of the whole examination (NoTimeError)."""
    if left_s <= 0:
        raise NoTimeError("there was no time for it")
    timeout_s = min(CHECK_S_MAX, left_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await look()
    except TimeoutError:
        probe.hiccups += 1
        if timeout_s < CHECK_S_MAX:
            reason = f"there was no time for it: not done within the {timeout_s:.0f} s that were left"
            raise NoTimeError(reason) from None
        raise TimeoutError(f"not done within {timeout_s:.0f} s") from None


async def _clean_up(probe: StoreProbe, timeout_s: float) -> tuple[tuple[str, ...], str]:
    """Delete all that may have been written; return what is left, and why."""
    store = probe.client(0)
    try:
        async with asyncio.timeout(timeout_s):
            keys = set(probe.keys)
            try:
                listed = {blob.key async for blob in list_blobs(store, probe.root)}
            except StoreError:
                listed = keys
            reason = await _abort_uploads(probe, store)
            # Also what the list lacks: it may be one that lies.
            left = await _delete(probe, store, sorted(keys | listed))
            return tuple(key for key in left if key in listed), next(iter(left.values()), reason)
    except TimeoutError:
        return tuple(probe.keys), f"not done within {timeout_s:.0f} s"


async def _delete(probe: StoreProbe, store: BlobStore, keys: Sequence[str]) -> dict[str, str]:
    """Delete keys; return why some of them stay."""
    left: dict[str, str] = {}
    for start in range(0, len(keys), DELETE_BATCH_MAX):
        batch = keys[start : start + DELETE_BATCH_MAX]
        try:
            failures = await probe.tried(store.delete, batch)
            left |= {failure.key: failure.reason for failure in failures}
        except StoreError as error:
            left |= dict.fromkeys(batch, str(error))
    return left


async def _abort_uploads(probe: StoreProbe, store: BlobStore) -> str:
    """Abort unfinished uploads; return why that failed, if it did."""
    try:
        try:
            listed = await store.list_unfinished(probe.root)
            # Those of unknown keys are listed too, and are others'.
            puts = tuple(put for put in listed if put.key.startswith(probe.root))
        except StoreError:
            puts = tuple(probe.unfinished)
        failures = await store.abort_unfinished(puts) if puts else ()
    except StoreError as error:
        return str(error)
    return failures[0].reason if failures else ""


async def _write_profile(store: BlobStore, profile: StoreProfile, timeout_s: float) -> StoreError | None:
    """Write the profile; return the error, which changes nothing of what was found."""
    try:
        async with asyncio.timeout(timeout_s):
            await store.put(PROFILE_KEY, BytesBody(encode_profile(profile)))
    except StoreError as error:
        return error
    except TimeoutError:
        return StoreUnavailableError(f"not done within {timeout_s:.0f} s", operation="put", key=PROFILE_KEY)
    return None


# ---------------------------------------------------------------------- verdicts and the profile


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
        "lists can be believed: collect may delete", "collect refuses", "commits could be overlooked: collect refuses"
    ),
    Check.TTL: _Words(
        "commits remove TTLs; the lifecycle backstop works",
        "TTLs stay: what loses its commit waits for their end; no lifecycle backstop",
        "uploads would be taken for committed ones, and collected",
    ),
    Check.MULTIPART: _Words("large bodies can go in parts", "every body goes in one PUT", "do not use this blob store"),
    Check.CONDITIONAL_MULTIPART: _Words("large creates go in parallel parts", "a create is one PUT, of up to 5 GiB"),
    Check.ABORT: _Words("collect frees what dead uploads hold", "only a lifecycle rule frees what dead uploads hold"),
    Check.DELETE: _Words(
        "collect deletes 1,000 keys per request",
        "collect needs it: with these rights, or on this blob store, nothing is freed",
        "collect would delete what is in use: never run it here",
    ),
    Check.LIFECYCLE: _Words(
        "`tidemark lifecycle` shows and installs the backstop",
        "no backstop: only collect frees what was never committed",
        "the blob store itself takes away what is needed: change the rule now (`tidemark lifecycle` shows all)",
        "nobody could see whether a rule takes away what is needed (--policy owner may)",
    ),
    Check.CLOCK: _Words(
        "times can be compared",
        "set this machine's clock: from 15 minutes on the blob store refuses every request",
        "creation times do not follow the blob store's clock, by which expiry is judged",
    ),
}
# Failing these says nothing about safety: others may have the rights, and the engine can do without.
_DISPENSABLE: Final = frozenset({Check.ABORT, Check.DELETE, Check.LIFECYCLE})
_REQUIRED: Final = frozenset({Check.CREATE, Check.READ, Check.REPLACE, Check.RANGES, Check.LISTS, Check.CLOCK})
# If one of them fails again and again, tidemark does without.
_OPTIONAL: Final = frozenset({Check.TTL, Check.MULTIPART, Check.CONDITIONAL_MULTIPART, Check.ABORT})


def judge(check: Check, found: Evidence | Exception, *, needed: bool = False) -> CheckResult:
    """Return the verdict on a check by what it has seen, or by the error that ended it.

    A broken promise is UNSAFE. What could not be determined is never UNSAFE, and more than a warning if something else
    depends on this check: if it is `needed`.
    """
    words, dispensable = _WORDS[check], check in _DISPENSABLE and not needed
    seen = found if isinstance(found, Evidence) else Evidence()
    match found:
        case Evidence():
            verdict, meaning = Verdict.OK, words.ok
            if found.broken:
                verdict, meaning = Verdict.UNSAFE, f"{found.broken}: {words.unsafe}"
            elif found.lacking:
                verdict = Verdict.WARNING if check is Check.CLOCK else Verdict.MISSING
                meaning = f"{found.lacking}: {words.missing}"
        case NotApplicableError():
            verdict, meaning = Verdict.NOT_APPLICABLE, str(found)
        case AccessDeniedError():
            unknown = words.denied or (words.missing if dispensable else "") or str(found)
            verdict = Verdict.WARNING if dispensable else Verdict.DENIED
            meaning = f"denied to these credentials: {unknown}"
        case NoTimeError():
            verdict, meaning = Verdict.UNKNOWN, f"run again: {found}"
        case StoreUnavailableError() | TimeoutError():
            verdict = Verdict.WARNING if dispensable else Verdict.UNKNOWN
            meaning = f"run again: {found}"
        case _:
            verdict = Verdict.UNSAFE if check in _REQUIRED else Verdict.MISSING
            meaning = f"{found}: {words.missing or words.unsafe}"
    return CheckResult(
        check=check, verdict=verdict, figure=seen.figure, meaning=meaning, has_backstop=seen.has_backstop
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
