"""Gather the facts of a report: bounded, and past what is damaged."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore, list_blobs, read_blob
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from blobstore.wrappers.forwarding import MeteredStore
from engine.clock import read_now_ms
from engine.drill.record import DrillHistory, Entry
from engine.errors import EngineError
from engine.inspect.history import History, State, damaged_keys, read_history
from engine.inspect.verify import VerifyReport, verify
from engine.progress import NO_PROGRESS, Progress
from engine.records.log import list_all_logs
from engine.repository.repository import Repository
from index.errors import FormatError
from index.plan.commits import Commit
from index.plan.plan_format import AuditRecord, decode_audit
from index.snapshot.keys import AUDIT, parse_audit_key
from index.snapshot.model import Scope

JOBS_MAX: Final = 20
# Records of each job.
ENTRIES_MAX: Final = 60
AUDITS_MAX: Final = 60
AUDIT_BYTES_MAX: Final = 4 * 1024 * 1024
READS_IN_FLIGHT_MAX: Final = 8


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is asked for."""

    # The URL of the repository, for the reader.
    location: str
    # Whose commits; none: of the `JOBS_MAX` jobs that committed last.
    scopes: Sequence[Scope] = ()
    drills: DrillHistory = DrillHistory()
    # Where the drills are from, for the reader; empty: nowhere.
    drills_from: str = ""
    # Records of each job.
    entries_max: int = ENTRIES_MAX


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one job, or of one task that commits by itself."""

    scope: Scope
    history: History
    # Its restore drills in this repository, the oldest first.
    drills: tuple[Entry, ...] = ()

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        reasons = (entry.problem for entry in self.history.entries if entry.state is State.DAMAGED)
        return tuple(zip(damaged_keys(self.history), reasons, strict=True))


class ReportFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of the page."""

    request: ReportRequest
    repository_id: str
    release: str
    # By the store's clock.
    made_at_ms: int
    jobs: tuple[JobFacts, ...]
    # Jobs beside these.
    jobs_left_out: int = 0
    # The newest, the oldest of them first, and the number of all.
    audits: tuple[AuditRecord, ...] = ()
    audits_count: int = 0
    audits_broken: tuple[str, ...] = ()
    # None: `verify_missing` says why.
    verified: VerifyReport | None = None
    verify_missing: str = ""
    # Requests that the report took, by operation.
    requests: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def risks_count(self) -> int | None:
        """Return the number of keys that are missing, damaged or have a TTL; None: it is unknown."""
        if self.verified is None:
            return None
        return len(self.verified.problems) + sum(len(job.damaged) for job in self.jobs)


async def gather_report(
    repository: Repository, request: ReportRequest, *, progress: Progress = NO_PROGRESS
) -> ReportFacts:
    """Look at a repository. Nothing in it changes.

    Requests: a LIST per 1,000 records; for each job those of `read_history`; a LIST of audit records and a GET for each
    of the newest `AUDITS_MAX`; those of `verify` for the commits reported.

    Args:
        repository: What to look at.
        request: What is asked for.
        progress: Hears of the indexes, as files.

    Raises:
        UnsafeStoreError: A log kept changing, or had holes.
        StoreError: As the store says. Damage is reported, not raised.
    """
    store = MeteredStore(repository.store)

    async def read(scope: Scope, *, shares: bool = True) -> History:
        return await read_history(
            store, repository.record, scope, entries_max=request.entries_max, shares=shares, progress=progress
        )

    chosen, left_out = tuple(request.scopes), 0
    if not chosen:
        logs = await list_all_logs(store)
        # Those whose newest record is youngest, by name.
        newest = sorted(logs, key=lambda log: -max((created for _, created in log.records), default=0))
        chosen = tuple(sorted((log.scope for log in newest[:JOBS_MAX]), key=str))
        left_out = len(logs) - len(chosen)
    histories = [await read(scope) for scope in chosen]
    verified, verify_missing = await _verify(store, histories, read)
    audits, audits_count, audits_broken = await _read_audits(store)
    own = [entry for entry in request.drills.entries if entry.repository_id == repository.record.id]
    return ReportFacts(
        request=request,
        repository_id=repository.record.id,
        release=installed_release(),
        made_at_ms=await read_now_ms(store),
        jobs=tuple(
            JobFacts(scope=h.scope, history=h, drills=tuple(e for e in own if Scope(e.job, e.task) == h.scope))
            for h in histories
        ),
        jobs_left_out=left_out,
        audits=audits,
        audits_count=audits_count,
        audits_broken=audits_broken,
        verified=verified,
        verify_missing=verify_missing,
        requests=dict(sorted(store.meter.requests.items())),
    )


async def _verify(
    store: BlobStore, histories: Sequence[History], read: Callable[..., Awaitable[History]]
) -> tuple[VerifyReport | None, str]:
    """Find what is missing or still has a TTL; or return why that is unknown."""
    commits = commits_of(histories)
    try:
        report = await verify(store, commits)
        if not report.problems:
            return report, ""
        # What a concurrent collection took since is fine: only commits that are still there count.
        now = [await read(history.scope, shares=False) for history in histories]
        there = {(commit.scope, commit.pointer) for commit in commits_of(now)}
        left = [commit for commit in commits if (commit.scope, commit.pointer) in there]
        return (report if len(left) == len(commits) else await verify(store, left)), ""
    except (EngineError, FormatError) as error:
        return None, f"{type(error).__name__}: {error}"


async def _read_audits(store: BlobStore) -> tuple[tuple[AuditRecord, ...], int, tuple[str, ...]]:
    """Read the newest audit records, oldest first; also return the number of all, and what cannot be read."""
    keys = sorted([blob.key async for blob in list_blobs(store, AUDIT)])
    broken: list[str] = []

    async def read(key: str) -> AuditRecord | None:
        try:
            parse_audit_key(key)
            return decode_audit(await read_blob(store, key, size_bytes_max=AUDIT_BYTES_MAX), subject=key)
        except BlobNotFoundError:
            return None  # collected since it was listed
        except FormatError as error:
            broken.append(str(error))
            return None

    found = await map_bounded(read, keys[-AUDITS_MAX:], in_flight_max=READS_IN_FLIGHT_MAX)
    return tuple(record for record in found if record is not None), len(keys), tuple(broken)


def commits_of(histories: Sequence[History]) -> list[Commit]:
    """Return the commits of some histories that can be restored."""
    return [e.commit for history in histories for e in history.entries if e.commit is not None and e.restores]
