"""What `doctor` does to a store to see what it has of what tidemark can do without."""

import asyncio

from blobstore.base import BytesBody, Created, CreateOutcome, Unknown
from blobstore.concurrency import map_bounded
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from blobstore.s3.lifecycle import DAYS_MIN, backstop_days, is_backstop, threats
from blobstore.s3.settings import KIB, PART_BYTES_MIN
from engine.doctor.probe import ATTEMPTS_MAX, PAUSE_S, TTL_MS, Patient, pattern
from engine.doctor.verdict import BACKSTOPS, Check, Evidence
from index.errors import FormatError
from index.snapshot.codec import decode_repository
from index.snapshot.keys import REPOSITORY


async def check_multipart(patient: Patient, *, with_ttl: bool) -> Evidence:
    """An upload in parts becomes one object, whole, with the TTL that it was begun with."""
    s3 = patient.s3
    data = pattern(PART_BYTES_MIN + 1 * KIB, "parts")
    key = patient.fresh_key("multipart")

    async def create() -> CreateOutcome:
        ttl_ms = TTL_MS if with_ttl else None
        return await s3[0].put_parts_if_absent(key, BytesBody(data), ttl_ms=ttl_ms, part_bytes=PART_BYTES_MIN)

    await patient.tried(create)
    if await patient.read(1, key) != data:
        return Evidence(check=Check.MULTIPART, broken="an upload in parts became something else")
    if not with_ttl:
        return Evidence(check=Check.MULTIPART, figure="2 parts")
    info = await patient.stat(2, key)
    if info is None or info.expires_at_ms is None:
        return Evidence(check=Check.MULTIPART, broken="an upload in parts lost its TTL")
    return Evidence(check=Check.MULTIPART, figure="2 parts, TTL kept")


async def check_conditional_multipart(patient: Patient) -> Evidence:
    """Of several multipart uploads of one key one can be completed, and none where the object is there."""
    s3 = patient.s3
    key, taken = patient.fresh_key("conditional/race"), patient.fresh_key("conditional/taken")
    await patient.create(0, taken, b"first")
    late = await patient.tried(lambda: s3[0].put_parts_if_absent(taken, BytesBody(b"second")))
    if isinstance(late, Unknown):
        raise StoreUnavailableError(late.reason, operation="put_if_absent", key=taken)
    if isinstance(late, Created) or await patient.read(1, taken) != b"first":
        return Evidence(
            check=Check.CONDITIONAL_MULTIPART, lacking="completing an upload replaced an object that was there"
        )

    bodies = [f"upload {number}".encode() for number in range(4)]

    async def enter(number: int) -> CreateOutcome:
        body = BytesBody(bodies[number])
        return await patient.tried(lambda: s3[number % len(s3)].put_parts_if_absent(key, body))

    outcomes = await asyncio.gather(*map(enter, range(len(bodies))))
    winners = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Created)]
    unclear = [outcome.reason for outcome in outcomes if isinstance(outcome, Unknown)]
    won = len(winners)
    if not won and unclear:
        raise StoreUnavailableError(f"nobody knows who won: {unclear[0]}", operation="put_if_absent", key=key)
    lacking = "" if won == 1 else f"{won} of {len(bodies)} uploads of one key were completed"
    if won == 1 and await patient.read(1, key) != bodies[winners[0]]:
        lacking = "what was there after a race is not what its winner wrote"
    return Evidence(
        check=Check.CONDITIONAL_MULTIPART,
        figure=f"a race of {len(bodies)}: {won} won",
        figures={"won": won},
        lacking=lacking,
    )


async def check_abort(patient: Patient) -> Evidence:
    """An upload that nobody finishes is found, and given up."""
    s3 = patient.s3
    key = patient.fresh_key("abort/unfinished")
    begun = await patient.tried(lambda: s3[0].begin_upload(key))
    patient.unfinished.append(begun)
    store = patient.client(1)

    async def found() -> bool:
        puts = await patient.tried(lambda: store.list_unfinished(patient.root + "abort/"))
        return any(put.upload_id == begun.upload_id for put in puts)

    async def becomes(there: bool) -> bool:  # noqa: FBT001  (it says what it waits for)
        # No store promises that this list is up to date.
        for _ in range(ATTEMPTS_MAX):
            if await found() is there:
                return True
            await asyncio.sleep(PAUSE_S)
        return False

    if not await becomes(there=True):
        return Evidence(check=Check.ABORT, lacking="an unfinished upload is not listed")
    if failures := await patient.tried(lambda: store.abort_unfinished([begun])):
        reason = failures[0].reason
        kind = AccessDeniedError if _is_denial(reason) else StoreUnavailableError
        raise kind(reason, operation="abort_unfinished", key=key)
    if not await becomes(there=False):
        return Evidence(check=Check.ABORT, lacking="an unfinished upload cannot be given up")
    if await patient.stat(2, key) is not None:
        return Evidence(check=Check.ABORT, lacking="an upload that was given up is there all the same")
    return Evidence(check=Check.ABORT, figure="begun, found, given up")


async def check_delete(patient: Patient) -> Evidence:
    """A batch deletes what it names, there or not, and nothing else."""
    doomed = [patient.key(f"delete/{number:03d}") for number in range(100)]
    spared = [patient.key(f"delete/{number:03d}-spared") for number in range(0, 100, 10)]
    absent = [f"{patient.root}delete/absent-{number}" for number in range(20)]

    async def put(numbered: tuple[int, str]) -> None:
        await patient.put(*numbered, b"x")

    await map_bounded(put, enumerate([*doomed, *spared]), in_flight_max=len(patient.clients))
    began_s = patient.monotonic_s()
    failures = await patient.tried(lambda: patient.client(0).delete([*doomed, *absent]))
    took_ms = 1000 * (patient.monotonic_s() - began_s)
    failed = {failure.key: failure.reason for failure in failures}
    if failed.keys() & set(doomed):
        reason = failed[min(failed)]
        if _is_denial(reason):
            raise AccessDeniedError(reason, operation="delete")
        return Evidence(check=Check.DELETE, lacking=f"{len(failed)} of 120 keys were not deleted ({reason})")
    left = {patient.root + name for name in await patient.listed(1, "delete/")}
    figures = {"keys": 120.0, "ms": round(took_ms, 1)}
    figure = f"100 keys and 20 absent ones in {took_ms:.0f} ms"
    if set(spared) - left:
        return Evidence(check=Check.DELETE, figure=figure, broken="keys were deleted that nobody had named")
    if set(doomed) & left:
        return Evidence(check=Check.DELETE, figure=figure, broken="keys were there still that it said were deleted")
    lacking = "deleting what is not there is an error" if failed else ""
    return Evidence(check=Check.DELETE, figure=figure, figures=figures, lacking=lacking)


def _is_denial(reason: str) -> bool:
    return "denied" in reason.lower()


async def check_empty(patient: Patient) -> Evidence:
    """An object may have no bytes at all."""
    key = patient.key("empty")
    await patient.put(0, key, b"")
    info = await patient.stat(1, key)
    content = await patient.read(2, key)
    part = await patient.range(3, key, 0, 0)
    is_right = info is not None and info.size_bytes == 0 and content == part == b""
    return Evidence(
        check=Check.EMPTY,
        figure="written, read, and a range of it",
        lacking="" if is_right else "an empty object came back as something else",
    )


async def _read_days_min(patient: Patient) -> int:
    """How long a backstop has to wait for the repository that is there; the least where there is none yet."""
    data = await patient.read(0, REPOSITORY)
    try:
        record = decode_repository(data or b"", subject=REPOSITORY)
    except FormatError:
        return DAYS_MIN
    return backstop_days(
        ttl_ms=record.ttl_ms, margin_ms=record.margin_ms, collection_period_ms=record.collection_period_ms
    )


async def check_lifecycle(patient: Patient, *, ttls_stay: bool) -> Evidence:
    """The rules of the bucket can be read, and none takes away what is committed, or what soon may be."""
    s3 = patient.s3[0]
    rules = await patient.tried(s3.read_lifecycle)
    backstops = sum(is_backstop(rule, s3.prefix) for rule in rules)
    days_min = await _read_days_min(patient) if backstops else DAYS_MIN
    found = threats(rules, s3.prefix, days_min=days_min, ttls_stay=ttls_stay)
    return Evidence(
        check=Check.LIFECYCLE,
        figure=f"{len(rules)} in the bucket, backstop {'installed' if backstops else 'not installed'}",
        figures={"rules": len(rules), BACKSTOPS: backstops},
        broken="; ".join(found),
    )
