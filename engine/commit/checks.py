"""What a writer asks the store before it sends a commit record, and what the log says of one that was sent."""

from collections.abc import Iterable

from blobstore.base import BlobStore, list_blobs
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from engine.backup.backup import BackupResult
from engine.commit.record import Head
from engine.errors import (
    CommitLostError,
    EngineError,
    FencedError,
    LeaseExpiredError,
    UnsafeStoreError,
    UsageError,
)
from engine.records.log import LOAD_ATTEMPTS_MAX, list_log, read_boundaries, read_commit, read_vouched
from engine.records.settle import REQUESTS_IN_FLIGHT_MAX, has_ttl
from index.plan.commits import Commit, Verdict, judge_record, valid_commits
from index.snapshot.keys import LOG, commit_key, encode_component
from index.snapshot.model import IndexReference, Scope
from index.snapshot.records import CommitRecord


async def check_granularity(store: BlobStore, scope: Scope, operation: str, first: Commit | None = None) -> None:
    """A job commits as a whole or by task, never both: a store belongs to exactly one scope (K3).

    Args:
        store: Where the logs are.
        scope: Whose commit it is.
        operation: For the error.
        first: The first commit of the scope. Of two kinds that began side by side the one goes on whose first record
            was created first by the store's clock, or the whole job; None before there is one.

    Raises:
        UsageError: There is a log of the other kind, and it came first.
        StoreError: As the store says.
    """
    job = f"{LOG}{encode_component(scope.job)}"
    other = f"{job}@" if scope.task is None else f"{job}/"
    began_ms = min([blob.created_at_ms async for blob in list_blobs(store, other)], default=None)
    if began_ms is None:
        return
    if first is None or (began_ms, scope.task is None) < (first.created_at_ms, scope.task is not None):
        raise UsageError(
            "the job already commits " + ("task by task" if scope.task is None else "as a whole"),
            operation=operation,
            subject=str(scope),
            hint="use the same kind of scope, or another job name",
        )


async def find_committed(store: BlobStore, head: Head, results: Iterable[BackupResult]) -> frozenset[IndexReference]:
    """Find the results that were committed before: the TTL of their indexes is gone.

    That happens after a rewind, a drop or a forget. Such an index is not new in another record: only so does an index
    without a TTL prove that the record that names it as new was acknowledged (T4).

    Requests: one STAT for each result whose store the head has carried over or does not have.

    Raises:
        LeaseExpiredError: The index of a result is gone.
        StoreError: As the store says.
    """

    async def is_old(result: BackupResult) -> bool:
        carries_ttl = await has_ttl(store, result.reference.index.key)
        if carries_ttl is None:
            raise LeaseExpiredError("the index is gone", operation="commit", subject=result.reference.index.key)
        return not carries_ttl

    asked = [result for result in results if store.capabilities.removes_ttl and head.may_know(result)]
    old = await map_bounded(is_old, asked, in_flight_max=REQUESTS_IN_FLIGHT_MAX)
    return frozenset(result.reference.index for result, found in zip(asked, old, strict=True) if found)


async def acknowledge(store: BlobStore, record: CommitRecord) -> Commit:
    """C4 and C5: one LIST from the record's number on decides between acknowledged, lost, fenced and void.

    Args:
        store: Where the log is.
        record: One that was created.

    Raises:
        CommitLostError: Later records do not descend from it.
        FencedError: A collector has closed it.
        LeaseExpiredError: It came too late, and is void.
        UsageError: It is the first of its scope, and the job has begun in the other way before (K3).
        UnsafeStoreError: The log does not hold still, or the record is not listed.
        StoreError: As the store says.
    """
    for _ in range(LOAD_ATTEMPTS_MAX):
        listing = await list_log(store, record.scope, from_number=record.number)
        try:
            boundaries = await read_boundaries(store, listing)
            # A boundary that lists this record has seen it in the chain; only without one can later records contradict.
            numbers = [number for number, _ in listing.records if number > record.number and not boundaries]
            records = {number: await read_commit(store, record.scope, number) for number in numbers}
            newer = valid_commits(listing, records, boundaries, await read_vouched(store, listing, records, boundaries))
        except BlobNotFoundError:
            continue
        verdict = judge_record(record, listing, boundaries, newer)
        if isinstance(verdict, Commit):
            if record.predecessor is None:
                # Two kinds may both have looked before either of them wrote (K3).
                await check_granularity(store, record.scope, record.kind, verdict)
            return verdict
        raise _refusal(verdict, record)
    raise UnsafeStoreError("the log keeps changing", operation=record.kind, subject=str(record.scope))


def _refusal(verdict: Verdict, record: CommitRecord) -> EngineError:
    """Why a record is not acknowledged, as an error."""
    scope = str(record.scope)
    match verdict:
        case Verdict.FENCED:
            return FencedError(f"a boundary does not list record {record.number}", operation=record.kind, subject=scope)
        case Verdict.VOID:
            return LeaseExpiredError(
                f"record {record.number} was created after the lease of its uploads: it is void",
                operation=record.kind,
                subject=scope,
                hint=_hint_when_late(record),
            )
        case Verdict.LOST:
            return CommitLostError(
                f"later records do not descend from record {record.number}", operation=record.kind, subject=scope
            )
        case Verdict.NOT_LISTED:
            return UnsafeStoreError(
                "the record just written is not in the listing",
                operation=record.kind,
                subject=commit_key(record.scope, record.number),
            )


def _hint_when_late(record: CommitRecord) -> str:
    """What holds a copy's blobs is a pin, not a backup."""
    return "" if record.kind == "commit" else f"{record.kind} again: it took longer than its pin holds"
