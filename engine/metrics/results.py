"""Samples of the results of use cases, of open state stores, and of the status of a repository (`gather_status`)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from blobstore.base import list_blobs, read_blob
from blobstore.errors import AccessDeniedError, BlobNotFoundError
from engine.backup.backup import BackupResult
from engine.checkpoint.backup import CheckpointBackupResult
from engine.checkpoint.restore import RestoredCheckpoint
from engine.collect.report import CollectReport
from engine.errors import UnsafeStoreError
from engine.follow.follow import FollowStatus
from engine.inspect.verify import ProblemKind, VerifyReport
from engine.metrics.names import Sample, Samples, fields_shown
from engine.repository.repository import Repository
from engine.restore.restore import RestoreResult
from engine.runtime import read_now_ms
from engine.state.commit import SaveMetrics
from engine.state.load import LoadMetrics
from index.errors import FormatError
from index.plan.collect import DeleteReason
from index.plan.commits import Commit, RetentionPolicy
from index.plan.plan_format import AuditRecord, decode_audit
from index.snapshot.keys import AUDIT, parse_audit_key, run_began_at_ms
from index.snapshot.model import Scope

AUDIT_BYTES_MAX: Final = 64 * 1024 * 1024
# Of many collections that failed one after the other, this many are read.
AUDITS_READ_MAX: Final = 100
# No rule: everything is kept, and what a collection would delete then is what nothing needs.
_KEEP_ALL: Final = RetentionPolicy(rules=())


def add_result(samples: Samples, result: object, **labels: str) -> None:
    """Add the samples of the result of a use case, if its type has any; `labels` are those that it does not know."""
    figures: Mapping[str, float] = {}
    match result:
        case BackupResult(stats=stats):
            files = stats.files_added + stats.files_repacked
            figures = _shown(stats, "backup") | _uploaded(files, stats.bytes_uploaded, stats.seconds)
            labels = {"task": result.reference.task, "store": result.reference.store}
        case CheckpointBackupResult(is_new=True):
            figures = _checkpoint_backup(result)
        case RestoreResult():
            files, bytes_ = result.files_fetched + result.files_inline, result.bytes_total - result.bytes_reused
            figures = _shown(result, "restore") | _restored(files, bytes_, result.seconds)
        case RestoredCheckpoint():
            figures = {
                "restore_files_to_restore": result.files,
                "restore_to_restore_bytes": result.size_bytes,
                "restore_fetched_bytes": result.bytes_fetched,
                "restore_changelogs_replayed": result.changelogs,
                **_restored(result.files, result.size_bytes, result.seconds),
            }
        case CollectReport():
            figures = _shown(result, "collect") | {"collect_kept_commits": len(result.kept)}
            for total in result.totals:
                samples.add("collect_deleted_keys_total", total.count, reason=total.reason.name.lower())
                samples.add("collect_deleted_bytes_total", total.size_bytes, reason=total.reason.name.lower())
        case FollowStatus():
            figures = _shown(result, "follow")
        case VerifyReport():
            figures = _shown(result, "verify")
            _add_problems(samples, result)
    for name, value in figures.items():
        samples.add(name, value, **labels)


def _add_problems(samples: Samples, result: VerifyReport) -> None:
    for kind in ProblemKind:
        found = sum(problem.kind is kind and not problem.healed for problem in result.problems)
        samples.add("verify_problems", found, kind=kind.name.lower())
        if kind.is_damage:
            samples.add("verification_failures_total", found, kind=kind.name.lower())


def _shown(result: object, part: str) -> dict[str, float]:
    return {name: getattr(result, field) for field, name in fields_shown(part).items()}


def _checkpoint_backup(result: CheckpointBackupResult) -> dict[str, float]:
    """Return sums of all stores and of the query's own files."""
    sums = (result.state, result.query)
    added = sum(part.files_added for part in sums)
    return {
        "backup_files_to_upload": added,
        "backup_files_to_retain": sum(part.files for part in sums) - added,
        **_uploaded(added, sum(part.bytes_uploaded for part in sums), result.seconds),
    }


def _uploaded(files: int, bytes_: int, seconds: float) -> dict[str, float]:
    return {
        "backup_files_uploaded": files,
        "backup_uploaded_bytes": bytes_,
        "backup_upload_seconds": seconds,
        "backup_average_file_upload_seconds": seconds / files if files else 0.0,
        "backup_average_file_bytes": bytes_ / files if files else 0.0,
        "backup_upload_bytes_per_second": bytes_ / seconds if seconds else 0.0,
    }


def _restored(files: int, bytes_: int, seconds: float) -> dict[str, float]:
    return {
        "restore_files_restored": files,
        "restore_restored_bytes": bytes_,
        "restore_seconds": seconds,
        "restore_average_file_seconds": seconds / files if files else 0.0,
        "restore_bytes_per_second": bytes_ / seconds if seconds else 0.0,
    }


def state_samples(
    load: LoadMetrics | None,
    save: SaveMetrics | None,
    *,
    query: str = "",
    operator: int = 0,
    partition: int = 0,
    store: str = "default",
) -> tuple[Sample, ...]:
    """Make the samples of one state store, for `write_textfile` or an endpoint.

    They are of `StateStore.last_load` and `last_save`. `query` is what distinguishes queries, such as a name.
    """
    samples = Samples(query=query, operator=str(operator), partition=str(partition), store=store)
    for part, metrics in (("state_load", load), ("state_save", save)):
        for name, value in (_shown(metrics, part) if metrics is not None else {}).items():
            samples.add(name, value)
    if save is not None and save.uploaded is not None:
        samples.add("state_snapshot_uploaded_version", save.uploaded.version)
    return tuple(samples)


async def gather_status(
    repository: Repository, *, monotonic_s: Callable[[], float], jobs: Collection[str] = (), commits_only: bool = False
) -> Samples:
    """Read the status of a repository; nothing is written.

    There are no orphans in it where they are unknown: an index that a commit needs is missing, the store is one
    that cannot be collected, or something may not be read.

    Requests: those of `Repository.commits` for each job; then, unless `commits_only`, of a collection's dry run, of
    `verify` by a listing, and a GET for the newest audit record.

    Commits are of `jobs` only, none given means all. `commits_only` reads nothing but the logs of commits: no orphans,
    nothing at risk, no collections.

    Raises:
        EngineError, FormatError, StoreError: As the use cases named above.
    """
    began_s = monotonic_s()
    now_ms = await read_now_ms(repository.store)
    samples = Samples()
    record = repository.record
    samples.add("repository_ttl_seconds", record.ttl_ms / 1000)
    samples.add("repository_collection_period_seconds", record.collection_period_ms / 1000)
    for scope in await repository.scopes():
        if not jobs or scope.job in jobs:
            _add_commits(samples, scope, await repository.commits(scope, with_named=True), now_ms)
    if not commits_only:
        # Of the whole repository: what is wrong with records themselves is of no commit.
        verified = await repository.verify()
        _add_risks(samples, verified)
        if not any(problem.kind is ProblemKind.INDEX_DAMAGED for problem in verified.problems):
            with suppress(UnsafeStoreError, AccessDeniedError):
                _add_orphans(samples, await repository.collect(_KEEP_ALL, dry_run=True))
        await _add_collections(samples, repository)
    samples.add("repository_up", 1)
    samples.add("repository_read_timestamp_seconds", now_ms / 1000)
    samples.add("repository_read_seconds", monotonic_s() - began_s)
    return samples


def _add_commits(samples: Samples, scope: Scope, commits: Sequence[Commit], now_ms: int) -> None:
    """Add the metrics of one job or task; a forgotten one has no commits, and no metrics."""
    labels = {"job_name": scope.job, "task": scope.task or ""}
    samples.add("commits", len(commits), **labels)
    newest = next((commit for commit in commits if commit.name is None), None)
    if newest is None:
        return
    record = newest.record
    for name, value in (
        ("number", newest.pointer.number),
        ("version", record.version),
        ("timestamp_seconds", newest.committed_at_ms / 1000),
        ("age_seconds", max(0, now_ms - newest.committed_at_ms) / 1000),
        ("bytes", record.state_bytes),
        ("files", sum(store.files_count for store in record.stores)),
        ("stores", len(record.stores)),
    ):
        samples.add(f"last_commit_{name}", value, **labels)


def _add_risks(samples: Samples, report: VerifyReport) -> None:
    by_kind = {kind: len({p.key for p in report.problems if p.kind is kind}) for kind in ProblemKind}
    for kind, number in by_kind.items():
        if kind not in {ProblemKind.AT_RISK, ProblemKind.CONTENT_WRONG}:
            samples.add("verification_failures", number, kind=kind.name.lower())
    samples.add("blobs_at_risk", by_kind[ProblemKind.AT_RISK], reason="ttl")
    lost = (ProblemKind.INDEX_DAMAGED, ProblemKind.BLOB_MISSING, ProblemKind.BLOB_SHORT)
    samples.add("blobs_at_risk", sum(by_kind[kind] for kind in lost), reason="damaged")


def _add_orphans(samples: Samples, report: CollectReport) -> None:
    samples.add("repository_bytes", report.listed_bytes)
    samples.add("repository_live_bytes", report.live_bytes)
    samples.add("repository_live_objects", report.live_count)
    expired = [total for total in report.totals if total.reason is DeleteReason.UNREACHABLE_UPLOAD]
    unfinished = [total for total in report.totals if total.reason is DeleteReason.UNFINISHED_UPLOAD]
    for state, size_bytes, count, totals in (
        ("waiting", report.waiting_bytes, report.waiting_count, []),
        ("expired", 0, 0, expired),
        ("unfinished", report.unfinished_bytes, report.unfinished_count, unfinished),
    ):
        samples.add("orphan_bytes", size_bytes + sum(total.size_bytes for total in totals), state=state)
        samples.add("orphan_objects", count + sum(total.count for total in totals), state=state)


async def _add_collections(samples: Samples, repository: Repository) -> None:
    """Add what the newest audit records have (design 0006, A1); nothing where they may not be read."""
    keys: list[str] = []
    try:
        async for blob in list_blobs(repository.store, AUDIT):
            try:
                parse_audit_key(blob.key)
            except FormatError:
                continue  # another program's
            keys.append(blob.key)
        failed = 0
        for key in reversed(keys[-AUDITS_READ_MAX:]):
            audit: AuditRecord | None = None
            # One that is gone meanwhile, or that this release cannot read, is none that has freed anything.
            with suppress(BlobNotFoundError, FormatError):
                data = await read_blob(repository.store, key, size_bytes_max=AUDIT_BYTES_MAX)
                audit = decode_audit(data, subject=key)
            if audit is not None and audit.outcome in {"done", "partly"}:
                samples.add("last_collection_timestamp_seconds", run_began_at_ms(audit.run) / 1000)
                samples.add("last_collection_seconds", audit.seconds)
                samples.add("last_collection_deleted_bytes", sum(total.size_bytes for total in audit.deleted))
                break
            failed += 1
        else:
            samples.add("last_collection_timestamp_seconds", 0)
        samples.add("collections_failed", failed)
    except AccessDeniedError:
        return
