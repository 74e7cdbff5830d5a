"""Finding out what a store really does: a battery of checks, verdicts, and a profile that binds all who open it.

Everything happens below a prefix of its own, `doctor/<random>/`, and is deleted at the end. Nothing of a repository
that is there is read or written, but its `profile`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, list_blobs
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.s3_profile import PROFILE_KEY, StoreProfile, encode_profile
from engine import doctor_checks as checks
from engine.bounded import first_error
from engine.clock import Ambient
from engine.doctor_patient import Patient, S3Powers, failure_of
from engine.doctor_verdict import Check, Evidence, Failure, Row, Verdict, choose_profile, judge

CLIENTS_COUNT: Final = 16
ROOT: Final = "doctor/"
CHECK_S_MAX: Final = 15.0
TOTAL_S_MAX: Final = 50.0
CLEANUP_S_MAX: Final = 10.0

# Hears which check begins, how many there are, and its number.
Told = Callable[[Check, int, int], None]


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` found out."""

    rows: tuple[Row, ...]
    # None: too little is known, or a store of this kind has none.
    profile: StoreProfile | None
    profile_written: bool
    # Why it was not, if it should have been.
    profile_error: str
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
    ambient: Ambient,
    release: str,
    save: bool,
    told: Told = lambda check, number, total: None,  # noqa: ARG005
) -> DoctorReport:
    """Look at a store.

    Args:
        open_client: Opens the store without wrappers and without its profile; called once for each client.
        ambient: Clock and chance.
        release: Of this tidemark, for the profile.
        save: Write the profile, if there is something to say.
        told: Hears of each check as it begins.

    Raises:
        StoreError: Not even the first request was answered: no such bucket, no rights at all, nobody there.
    """
    clients = [open_client() for _ in range(CLIENTS_COUNT)]
    patient = Patient(clients, f"{ROOT}{ambient.session()}/", ambient.monotonic_s)
    began_s = ambient.monotonic_s()
    left: tuple[str, ...] = ()
    left_reason = ""
    try:
        try:
            await _begin(patient)
            rows = await _examine(patient, ambient, told)
        finally:
            left, left_reason = await asyncio.shield(asyncio.ensure_future(_clean_up(patient)))
        profile = None
        if isinstance(clients[0], S3Powers):
            profile = choose_profile(rows, probed_at_ms=ambient.local_now_ms(), release=release)
        error = await _write_profile(clients[0], profile) if save and profile is not None else None
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return DoctorReport(
        rows=rows,
        profile=profile,
        profile_written=save and profile is not None and error is None,
        profile_error=error or "",
        hiccups_count=patient.hiccups,
        root=patient.root,
        left=left,
        left_reason=left_reason,
        took_s=round(ambient.monotonic_s() - began_s, 3),
    )


async def _begin(patient: Patient) -> None:
    """The first request: if that fails, there is nothing to look at."""
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            await patient.put(0, patient.key("first"), b"tidemark doctor")
    except TimeoutError:
        raise StoreUnavailableError(
            f"no answer within {CHECK_S_MAX:.0f} s", operation="put", key=patient.root
        ) from None


async def _examine(patient: Patient, ambient: Ambient, told: Told) -> tuple[Row, ...]:
    plan: dict[Check, Callable[[], Awaitable[Evidence]]] = {
        Check.CREATE: lambda: checks.check_create(patient),
        Check.READ: lambda: checks.check_read(patient),
        Check.REPLACE: lambda: checks.check_replace(patient),
        Check.RANGES: lambda: checks.check_ranges(patient),
        Check.LISTS: lambda: checks.check_lists(patient),
        Check.TTL: lambda: checks.check_ttl(patient),
        Check.MULTIPART: lambda: checks.check_multipart(patient, with_ttl=ttls_are(Verdict.OK)),
        Check.CONDITIONAL_MULTIPART: lambda: checks.check_conditional_multipart(patient),
        Check.ABORT: lambda: checks.check_abort(patient),
        Check.DELETE: lambda: checks.check_delete(patient),
        Check.EMPTY: lambda: checks.check_empty(patient),
        Check.CLOCK: lambda: checks.check_clock(patient, ambient.local_now_ms),
        Check.LATENCY: lambda: checks.measure_latency(patient),
        Check.THROUGHPUT: lambda: checks.measure_throughput(patient),
        Check.LIFECYCLE: lambda: checks.check_lifecycle(patient, ttls_stay=ttls_are(Verdict.MISSING, Verdict.UNSAFE)),
    }
    rows: dict[Check, Row] = {}

    def ttls_are(*verdicts: Verdict) -> bool:
        return rows[Check.TTL].verdict in verdicts

    until_s = ambient.monotonic_s() + TOTAL_S_MAX

    for check, look in plan.items():
        told(check, len(rows) + 1, len(plan))
        rows[check] = judge(await _look(check, look, min(CHECK_S_MAX, until_s - ambient.monotonic_s()), patient))
    return tuple(rows[check] for check in Check)


async def _look(check: Check, look: Callable[[], Awaitable[Evidence]], timeout_s: float, patient: Patient) -> Evidence:
    """What a check has seen, also if it did not come to its end."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            return await look()
    except Exception as raised:
        error = first_error(raised) if isinstance(raised, BaseExceptionGroup) else raised
        failure = failure_of(error)
        if failure is None:
            raise
        reason = f"not done within {timeout_s:.0f} s" if isinstance(error, TimeoutError) else str(error)
    is_busy = getattr(error, "asks_for_less", False)
    if failure is Failure.UNAVAILABLE and check in _OPTIONAL and not is_busy and await _is_alive(patient):
        # It fails every time, and everything else works: this is how the store says that it cannot do it.
        return Evidence(check=check, lacking=f"fails every time ({reason})")
    return Evidence(check=check, failure=failure, reason=reason)


# If one of them fails again and again, tidemark does without.
_OPTIONAL: Final = frozenset({Check.TTL, Check.MULTIPART, Check.CONDITIONAL_MULTIPART, Check.ABORT, Check.LIFECYCLE})


async def _is_alive(patient: Patient) -> bool:
    try:
        async with asyncio.timeout(checks.BULK_S_MAX):
            return await patient.is_alive()
    except TimeoutError:
        return False


async def _clean_up(patient: Patient) -> tuple[tuple[str, ...], str]:
    """Delete all that may have been written; returns what is left, and why."""
    store = patient.client(0)
    try:
        async with asyncio.timeout(CLEANUP_S_MAX):
            keys = set(patient.keys)
            try:
                listed = {blob.key async for blob in list_blobs(store, patient.root)}
            except StoreError:
                listed = keys
            reason = await _abort_uploads(patient, store)
            # Also what the list lacks: it may be one that lies.
            left, why = await _delete(patient, store, sorted(keys | listed))
            return tuple(key for key in left if key in listed), why or reason
    except TimeoutError:
        return tuple(patient.keys), f"not done within {CLEANUP_S_MAX:.0f} s"


async def _delete(patient: Patient, store: BlobStore, keys: Sequence[str]) -> tuple[tuple[str, ...], str]:
    left: list[str] = []
    reason = ""
    for start in range(0, len(keys), DELETE_BATCH_MAX):
        batch = keys[start : start + DELETE_BATCH_MAX]
        try:
            failures = await patient.tried(lambda batch=batch: store.delete(batch))  # type: ignore[misc]
        except StoreError as error:
            left += batch
            reason = str(error)
            continue
        left += [failure.key for failure in failures]
        reason = failures[0].reason if failures else reason
    return tuple(left), reason


async def _abort_uploads(patient: Patient, store: BlobStore) -> str:
    """Why unfinished uploads could not be given up, if so."""
    try:
        try:
            puts = await store.list_unfinished(patient.root)
        except StoreError:
            puts = tuple(patient.unfinished)
        failures = await store.abort_unfinished(puts) if puts else ()
    except StoreError as error:
        return str(error)
    except BaseExceptionGroup as errors:
        return str(first_error(errors))
    return failures[0].reason if failures else ""


async def _write_profile(store: BlobStore, profile: StoreProfile) -> str | None:
    """Why it could not be written, if so."""
    try:
        await store.put(PROFILE_KEY, BytesBody(encode_profile(profile)))
    except StoreError as error:
        return str(error)
    return None
