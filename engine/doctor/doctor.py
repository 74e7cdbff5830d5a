"""Finding out what a store really does: a battery of checks, verdicts, and a profile that binds all who open it.

Everything happens below a prefix of its own, `doctor/<random>/`, and is deleted at the end. Nothing of a repository
that is there is written but its `profile`, and nothing read but its record, where a lifecycle rule goes by its TTL.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, list_blobs
from blobstore.concurrency import first_error
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.s3.settings import PROFILE_KEY, StoreProfile, encode_profile
from engine.clock import Runtime
from engine.doctor import checks
from engine.doctor.probe import NoTimeError, S3Powers, StoreProbe, failure_of
from engine.doctor.verdict import Check, Evidence, Row, Verdict, choose_profile, judge
from engine.errors import UnsafeStoreError
from engine.records.repository import check_unused
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

# Hears which check begins, how many there are, and its number.
OnCheck = Callable[[Check, int, int], None]


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` found out."""

    rows: tuple[Row, ...]
    # None: too little is known, or a store of this kind has none.
    profile: StoreProfile | None
    profile_written: bool
    # Why it was not, if it should have been.
    profile_error: StoreError | None
    # Requests that the store did not answer, or with "try again".
    hiccups_count: int
    # What could not be deleted at the end, below `root`, and why.
    root: str
    left: tuple[str, ...]
    left_reason: str
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """The worst of all: UNSAFE, denied, unknown, or ok."""
        found = {row.verdict for row in self.rows}
        return next((v for v in (Verdict.UNSAFE, Verdict.DENIED, Verdict.UNKNOWN) if v in found), Verdict.OK)


async def examine_store(
    open_client: Callable[[], BlobStore],
    *,
    runtime: Runtime,
    release: str,
    save: bool,
    on_check: OnCheck = lambda check, number, total: None,  # noqa: ARG005
) -> DoctorReport:
    """Look at a store.

    Args:
        open_client: Opens the store without wrappers and without its profile; called once for each client.
        runtime: Clock and random numbers.
        release: Of this tidemark, for the profile.
        save: Write the profile, if there is something to say.
        on_check: Hears of each check as it begins.

    Raises:
        StoreError: Not even the first request was answered: no such bucket, no rights at all, nobody there.
    """
    clients = [open_client() for _ in range(CLIENTS_COUNT)]
    probe = StoreProbe(clients, f"{ROOT}{runtime.session()}/", runtime.monotonic_s)
    began_s = runtime.monotonic_s()

    def left_s(until_s: float) -> float:
        return max(0.0, began_s + until_s - runtime.monotonic_s())

    left: tuple[str, ...] = ()
    left_reason = ""
    try:
        try:
            await _begin(probe)
            rows = await _examine(probe, runtime, on_check, functools.partial(left_s, CHECKS_S_MAX))
        finally:
            left, left_reason = await asyncio.shield(asyncio.ensure_future(_clean_up(probe, left_s(CLEAN_S_MAX))))
        profile = None
        if isinstance(clients[0], S3Powers):
            profile = choose_profile(rows, probed_at_ms=runtime.local_now_ms(), release=release)
        error = None
        if save and profile is not None:
            error = await _write_profile(clients[0], profile, left_s(TOTAL_S_MAX))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return DoctorReport(
        rows=rows,
        profile=profile,
        profile_written=save and profile is not None and error is None,
        profile_error=error,
        hiccups_count=probe.hiccups,
        root=probe.root,
        left=left,
        left_reason=left_reason,
        took_s=round(runtime.monotonic_s() - began_s, 3),
    )


async def _begin(probe: StoreProbe) -> None:
    """The first request: if that fails, there is nothing to look at."""
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
) -> tuple[Row, ...]:
    # What is only measured comes last: there may be no time for it.
    plan: dict[Check, Callable[[], Awaitable[Evidence]]] = {
        Check.CREATE: lambda: checks.check_create(probe),
        Check.READ: lambda: checks.check_read(probe),
        Check.REPLACE: lambda: checks.check_replace(probe),
        Check.RANGES: lambda: checks.check_ranges(probe),
        Check.LISTS: lambda: checks.check_lists(probe),
        Check.TTL: lambda: checks.check_ttl(probe),
        Check.LIFECYCLE: lambda: checks.check_lifecycle(probe, ttls_stay=ttls_are(Verdict.MISSING, Verdict.UNSAFE)),
        Check.MULTIPART: lambda: checks.check_multipart(probe, with_ttl=ttls_are(Verdict.OK)),
        Check.CONDITIONAL_MULTIPART: lambda: checks.check_conditional_multipart(probe),
        Check.ABORT: lambda: checks.check_abort(probe),
        Check.DELETE: lambda: checks.check_delete(probe),
        Check.EMPTY: lambda: checks.check_empty(probe),
        Check.CLOCK: lambda: checks.check_clock(probe, runtime.local_now_ms),
    }
    rows: dict[Check, Row] = {}

    def ttls_are(*verdicts: Verdict) -> bool:
        return rows[Check.TTL].verdict in verdicts

    for check, look in plan.items():
        on_check(check, len(rows) + 1, len(plan))
        evidence = await _look(check, look, left_s, probe)
        # Without tags a rule may delete what is committed: then it is no matter of taste whether there is one.
        rows[check] = judge(evidence, needed=check is Check.LIFECYCLE and not ttls_are(Verdict.OK))
    return tuple(rows[check] for check in Check)


async def _look(
    check: Check, look: Callable[[], Awaitable[Evidence]], left_s: Callable[[], float], probe: StoreProbe
) -> Evidence:
    """What a check has seen, also if it did not come to its end."""
    error = await _seen(look, left_s(), probe)
    if isinstance(error, Evidence):
        return error
    if check in _OPTIONAL and _may_be_a_no(error) and await _is_alive(probe, left_s()):
        again = await _seen(look, left_s(), probe)
        if isinstance(again, Evidence):
            return again
        if _may_be_a_no(again) and await _is_alive(probe, left_s()):
            # It fails every time, and everything else works: this is how the store says that it cannot do it.
            return Evidence(check=check, lacking=f"fails every time ({again})")
        error = again
    return Evidence(check=check, failure=failure_of(error), reason=str(error))


async def _seen(look: Callable[[], Awaitable[Evidence]], left_s: float, probe: StoreProbe) -> Evidence | Exception:
    """What a check has seen, or what kept it from its end."""
    if left_s <= 0:
        return NoTimeError("there was no time for it")
    timeout_s = min(CHECK_S_MAX, left_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await look()
    except Exception as raised:
        error = first_error(raised) if isinstance(raised, BaseExceptionGroup) else raised
        if failure_of(error) is None:
            raise
    if not isinstance(error, TimeoutError):
        assert isinstance(error, Exception)  # noqa: S101  (what has a failure is one)
        return error
    probe.hiccups += 1
    if timeout_s < CHECK_S_MAX:
        return NoTimeError(f"there was no time for it: not done within the {timeout_s:.0f} s that were left")
    return TimeoutError(f"not done within {timeout_s:.0f} s")


def _may_be_a_no(error: Exception) -> bool:
    """Whether this could be the store's way to say that it cannot do it: an answer, and not one that asks for less.

    One request that hung, of many connections, says nothing about what the store can do.
    """
    return isinstance(error, StoreUnavailableError) and not error.asks_for_less


# If one of them fails again and again, tidemark does without.
_OPTIONAL: Final = frozenset({Check.TTL, Check.MULTIPART, Check.CONDITIONAL_MULTIPART, Check.ABORT})


async def _is_alive(probe: StoreProbe, left_s: float) -> bool:
    try:
        async with asyncio.timeout(min(ALIVE_S_MAX, left_s)):
            return await probe.is_alive()
    except TimeoutError:
        return False


async def _clean_up(probe: StoreProbe, timeout_s: float) -> tuple[tuple[str, ...], str]:
    """Delete all that may have been written; returns what is left, and why."""
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
            left, why = await _delete(probe, store, sorted(keys | listed))
            return tuple(key for key in left if key in listed), why or reason
    except TimeoutError:
        return tuple(probe.keys), f"not done within {timeout_s:.0f} s"


async def _delete(probe: StoreProbe, store: BlobStore, keys: Sequence[str]) -> tuple[tuple[str, ...], str]:
    left: list[str] = []
    reason = ""
    for start in range(0, len(keys), DELETE_BATCH_MAX):
        batch = keys[start : start + DELETE_BATCH_MAX]
        try:
            failures = await probe.tried(lambda batch=batch: store.delete(batch))  # type: ignore[misc]
        except StoreError as error:
            left += batch
            reason = str(error)
            continue
        left += [failure.key for failure in failures]
        reason = failures[0].reason if failures else reason
    return tuple(left), reason


async def _abort_uploads(probe: StoreProbe, store: BlobStore) -> str:
    """Why unfinished uploads could not be given up, if so."""
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
    except BaseExceptionGroup as errors:
        return str(first_error(errors))
    return failures[0].reason if failures else ""


async def _write_profile(store: BlobStore, profile: StoreProfile, timeout_s: float) -> StoreError | None:
    """Why it could not be written, if so."""
    try:
        async with asyncio.timeout(timeout_s):
            await store.put(PROFILE_KEY, BytesBody(encode_profile(profile)))
    except StoreError as error:
        return error
    except TimeoutError:
        return StoreUnavailableError(f"not done within {timeout_s:.0f} s", operation="put", key=PROFILE_KEY)
    return None
