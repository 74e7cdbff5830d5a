"""Gathering what a report tells: bounded, and past what is damaged."""

from collections.abc import Sequence
from typing import Final

from blobstore.base import BlobInfo, BlobStore, list_blobs, read_blob
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from blobstore.release import installed_release
from blobstore.wrappers.meter import MeteredStore
from engine.clock import read_now_ms
from engine.collect.collect import collect
from engine.collect.report import CollectReport
from engine.drill.record import DrillHistory, Entry
from engine.errors import EngineError
from engine.inspect.history import History, HistoryEntry, State, damaged_keys, read_history
from engine.inspect.verify import VerifyReport, verify
from engine.progress import NO_PROGRESS, Progress
from engine.records.inventory import list_room
from engine.records.log import list_all_logs
from engine.records.roots import reachable_keys
from engine.report.model import JobFacts, ReportFacts, Suspects
from engine.repository.reading import ReadingRepository
from index.errors import FormatError, UnsafeNameError
from index.plan.commits import Commit
from index.plan.plan_format import AuditRecord, decode_audit
from index.plan.retention import Retention, RetentionPolicy
from index.snapshot.keys import AUDIT, BLOBS, parse_audit_key, parse_upload_key
from index.snapshot.model import Scope
from index.snapshot.records import RepositoryRecord

JOBS_MAX: Final = 20
# Records of each job.
ENTRIES_MAX: Final = 60
AUDITS_MAX: Final = 60
AUDIT_BYTES_MAX: Final = 4 * 1024 * 1024
SUSPECTS_TOLD_MAX: Final = 20
READS_IN_FLIGHT_MAX: Final = 8


async def gather_report(
    repository: ReadingRepository,
    *,
    location: str,
    scopes: Sequence[Scope] = (),
    retention: Retention | RetentionPolicy | None = None,
    rehearsals: DrillHistory | None = None,
    rehearsals_from: str = "",
    entries_max: int = ENTRIES_MAX,
    progress: Progress = NO_PROGRESS,
) -> ReportFacts:
    """Look at a repository. Nothing in it changes.

    Requests: a LIST per 1,000 records; for each job those of `read_history`; a LIST of audit records and a GET for each
    of the newest `AUDITS_MAX`; those of `verify` for the commits told; with `retention` those of a dry run of
    `collect`, which reads all roots and lists everything; where a record is damaged, a LIST of all blobs and a GET or
    more for each index of its job.

    Args:
        repository: What to look at.
        location: Its URL, for the reader.
        scopes: Whose commits; none: of the `JOBS_MAX` jobs that committed last.
        retention: What a collection would keep; None: what it would delete is not told.
        rehearsals: The history of rehearsals.
        rehearsals_from: Where it stands, for the reader.
        entries_max: Records of each job.
        progress: Told of the indexes, as files.

    Raises:
        UnsafeStoreError: A log kept changing, or had holes.
        StoreError: As the store says. What is damaged is told, not raised.
    """
    store = MeteredStore(repository.store)
    gathering = _Gathering(store, repository.record, entries_max, progress)
    chosen, left_out = (tuple(scopes), 0) if scopes else await gathering.choose_scopes()
    entries = rehearsals.entries if rehearsals is not None else ()
    histories = [await gathering.read(scope) for scope in chosen]
    verified, verify_missing = await gathering.verify(histories)
    plan, plan_missing = await gathering.plan(retention)
    audits, audits_count, audits_broken = await gathering.read_audits()
    return ReportFacts(
        repository_id=repository.record.id,
        location=location,
        release=installed_release(),
        made_at_ms=await read_now_ms(store),
        jobs=tuple(
            JobFacts(
                scope=history.scope,
                history=history,
                rehearsals=_rehearsals_of(entries, repository.record.id, history.scope),
            )
            for history in histories
        ),
        jobs_left_out=left_out,
        rehearsals_from=rehearsals_from,
        rehearsals_broken=rehearsals.broken if rehearsals is not None else (),
        audits=audits,
        audits_count=audits_count,
        audits_broken=audits_broken,
        plan=plan,
        plan_missing=plan_missing,
        verified=verified,
        verify_missing=verify_missing,
        suspects=tuple([await gathering.suspect(h) for h in histories if damaged_keys(h)]),
        requests=dict(sorted(store.meter.requests.items())),
    )


def _rehearsals_of(entries: Sequence[Entry], repository_id: str, scope: Scope) -> tuple[Entry, ...]:
    return tuple(e for e in entries if e.repository_id == repository_id and Scope(e.job, e.task) == scope)


class _Gathering:
    """The steps, each of which survives what is damaged."""

    def __init__(self, store: BlobStore, record: RepositoryRecord, entries_max: int, progress: Progress) -> None:
        self._store = store
        self._record = record
        self._entries_max = entries_max
        self._progress = progress

    async def choose_scopes(self) -> tuple[tuple[Scope, ...], int]:
        """The scopes whose newest record is youngest, by name; and how many are left out."""
        logs = await list_all_logs(self._store)
        newest = sorted(logs, key=lambda log: -max((created for _, created in log.records), default=0))
        chosen = sorted((log.scope for log in newest[:JOBS_MAX]), key=str)
        return tuple(chosen), len(logs) - len(chosen)

    async def read(self, scope: Scope) -> History:
        """The history of one scope."""
        return await read_history(
            self._store, self._record, scope, entries_max=self._entries_max, progress=self._progress
        )

    async def verify(self, histories: Sequence[History]) -> tuple[VerifyReport | None, str]:
        """What is missing or still has a TTL of the commits that are told; or why nobody knows."""
        commits = commits_of(histories)
        try:
            report = await verify(self._store, commits)
            if not report.problems:
                return report, ""
            # What a collection beside this took since is no risk: only commits that are still there count.
            now = [await read_history(self._store, self._record, h.scope, entries_max=self._entries_max, shares=False)
                   for h in histories]  # fmt: skip
            there = {(commit.scope, commit.pointer) for commit in commits_of(now)}
            left = [commit for commit in commits if (commit.scope, commit.pointer) in there]
            return (report if len(left) == len(commits) else await verify(self._store, left)), ""
        except (EngineError, FormatError) as error:
            return None, f"{type(error).__name__}: {error}"

    async def plan(self, retention: Retention | RetentionPolicy | None) -> tuple[CollectReport | None, str]:
        """What a collection would do; or why nobody knows."""
        if retention is None:
            return None, "it was not said what is kept: give --keep-last, --keep-since or --policy"
        try:
            return await collect(self._store, self._record, retention, dry_run=True), ""
        except (EngineError, FormatError) as error:
            return None, f"a collection would refuse: {type(error).__name__}: {error}"

    async def read_audits(self) -> tuple[tuple[AuditRecord, ...], int, tuple[str, ...]]:
        """The newest audit records, oldest first; how many there are; what of them cannot be read."""
        keys = sorted([blob.key async for blob in list_blobs(self._store, AUDIT)])
        broken: list[str] = []

        async def read(key: str) -> AuditRecord | None:
            try:
                parse_audit_key(key)
                return decode_audit(await read_blob(self._store, key, size_bytes_max=AUDIT_BYTES_MAX), subject=key)
            except BlobNotFoundError:
                return None  # collected since it was listed
            except FormatError as error:
                broken.append(str(error))
                return None

        found = await map_bounded(read, keys[-AUDITS_MAX:], in_flight_max=READS_IN_FLIGHT_MAX)
        return tuple(record for record in found if record is not None), len(keys), tuple(broken)

    async def suspect(self, history: History) -> Suspects:
        """What no record that can be read leads to, of a job in which one cannot."""
        damaged = [entry for entry in history.entries if entry.state is State.DAMAGED]
        records = tuple(zip(damaged_keys(history), map(_tell_damage, damaged), strict=True))
        readable = {s.index for commit in commits_of([history]) for s in commit.record.stores}
        try:
            reached = await reachable_keys(self._store, readable)
        except (EngineError, FormatError) as error:
            return Suspects(scope=history.scope, records=records, count=0, size_bytes=0, keys=(), hidden=str(error))

        def is_lost(blob: BlobInfo) -> bool:
            try:
                return blob.key not in reached and parse_upload_key(blob.key).scope == history.scope
            except UnsafeNameError:
                return False

        lost = [blob for blob in await list_room(self._store, BLOBS, lambda blob: blob) if is_lost(blob)]
        return Suspects(
            scope=history.scope,
            records=records,
            count=len(lost),
            size_bytes=sum(blob.size_bytes for blob in lost),
            keys=tuple(blob.key for blob in lost[:SUSPECTS_TOLD_MAX]),
            hidden="" if not history.older_count else "older records were not read, and may lead to some of them",
        )


def _tell_damage(entry: HistoryEntry) -> str:
    return f"{entry.problem}; what it had is held by {entry.held_by}" if entry.held_by else entry.problem


def commits_of(histories: Sequence[History]) -> list[Commit]:
    """What of some histories can be restored."""
    return [e.commit for history in histories for e in history.entries if e.commit is not None and e.restores]
