"""Samples of the results of use cases, and of the state stores that a process has open."""

from collections.abc import Mapping

from engine.backup.backup import BackupResult
from engine.checkpoint.backup import CheckpointBackupResult
from engine.checkpoint.restore import RestoredCheckpoint
from engine.collect.report import CollectReport
from engine.inspect.verify import ProblemKind, VerifyReport
from engine.metrics.names import LOAD_METRICS, PREFIX, SAVE_METRICS, UPLOADED, Sample, Samples
from engine.restore.restore import RestoreResult
from engine.state.metrics import LoadMetrics, SaveMetrics


def add_result(samples: Samples, result: object, **labels: str) -> None:
    """Add the samples of the result of a use case, if its type has any; `labels` are those that it does not know."""
    figures: Mapping[str, float] = {}
    match result:
        case BackupResult():
            figures = _backup(result)
            labels = {"task": result.reference.task, "store": result.reference.store}
        case CheckpointBackupResult(is_new=True):
            figures = _checkpoint_backup(result)
        case RestoreResult():
            figures = _restore(result)
        case RestoredCheckpoint():
            figures = _restored_checkpoint(result)
        case CollectReport():
            _add_collection(samples, result)
        case VerifyReport():
            _add_verification(samples, result)
        case _:
            pass
    for name, value in figures.items():
        samples.add(name, value, **labels)


def _backup(result: BackupResult) -> Mapping[str, float]:
    stats = result.stats
    return {
        "backup_files_to_upload": stats.files_added,
        "backup_to_upload_bytes": stats.bytes_added,
        "backup_files_to_retain": stats.files_retained,
        "backup_to_retain_bytes": stats.bytes_retained,
        "backup_files_to_remove": stats.files_removed,
        "backup_to_remove_bytes": stats.bytes_removed,
        "backup_sub_dirs_to_upload": stats.sub_dirs_added,
        "backup_sub_dirs_to_retain": stats.sub_dirs_retained,
        "backup_sub_dirs_to_remove": stats.sub_dirs_removed,
        "backup_dir_diff_seconds": stats.diff_seconds,
        "backup_healed_bytes": stats.bytes_healed,
        **_uploaded(stats.files_added + stats.files_repacked, stats.bytes_uploaded, stats.seconds),
    }


def _checkpoint_backup(result: CheckpointBackupResult) -> Mapping[str, float]:
    """Return sums of all stores and of the query's own files."""
    sums = (result.state, result.query)
    added = sum(part.files_added for part in sums)
    return {
        "backup_files_to_upload": added,
        "backup_files_to_retain": sum(part.files for part in sums) - added,
        **_uploaded(added, sum(part.bytes_uploaded for part in sums), result.seconds),
    }


def _uploaded(files: int, bytes_: int, seconds: float) -> Mapping[str, float]:
    return {
        "backup_files_uploaded": files,
        "backup_uploaded_bytes": bytes_,
        "backup_upload_seconds": seconds,
        "backup_average_file_upload_seconds": seconds / files if files else 0.0,
        "backup_average_file_bytes": bytes_ / files if files else 0.0,
        "backup_upload_bytes_per_second": bytes_ / seconds if seconds else 0.0,
    }


def _restore(result: RestoreResult) -> Mapping[str, float]:
    files = result.files_fetched + result.files_inline
    return {
        "restore_files_to_restore": result.files_total,
        "restore_to_restore_bytes": result.bytes_total,
        "restore_files_reused": result.files_reused,
        "restore_fetched_bytes": result.bytes_fetched,
        "restore_get_snapshot_index_seconds": result.index_seconds,
        "restore_pre_restore_seconds": result.prepare_seconds,
        "restore_post_restore_seconds": result.publish_seconds,
        **_restored(files, result.bytes_total - result.bytes_reused, result.seconds),
    }


def _restored_checkpoint(result: RestoredCheckpoint) -> Mapping[str, float]:
    return {
        "restore_files_to_restore": result.files,
        "restore_to_restore_bytes": result.size_bytes,
        "restore_fetched_bytes": result.bytes_fetched,
        "restore_changelogs_replayed": result.changelogs,
        **_restored(result.files, result.size_bytes, result.seconds),
    }


def _restored(files: int, bytes_: int, seconds: float) -> Mapping[str, float]:
    return {
        "restore_files_restored": files,
        "restore_restored_bytes": bytes_,
        "restore_seconds": seconds,
        "restore_average_file_seconds": seconds / files if files else 0.0,
        "restore_bytes_per_second": bytes_ / seconds if seconds else 0.0,
    }


def _add_collection(samples: Samples, result: CollectReport) -> None:
    samples.add("collect_kept_commits", len(result.kept))
    samples.add("collect_listed_bytes", result.listed_bytes)
    samples.add("collect_live_bytes", result.live_bytes)
    samples.add("collect_waiting_bytes", result.waiting_bytes)
    samples.add("collect_failed_keys_total", result.failed_count)
    for total in result.totals:
        samples.add("collect_deleted_keys_total", total.count, reason=total.reason.name.lower())
        samples.add("collect_deleted_bytes_total", total.size_bytes, reason=total.reason.name.lower())


def _add_verification(samples: Samples, result: VerifyReport) -> None:
    for kind in ProblemKind:
        found = sum(problem.kind is kind and not problem.healed for problem in result.problems)
        samples.add("verify_problems", found, kind=kind.name.lower())
        if kind is not ProblemKind.AT_RISK:
            samples.add("verification_failures_total", found, kind=kind.name.lower())
    samples.add("verify_commits", result.commits_count)
    samples.add("verify_blobs", result.blobs_count)
    samples.add("verify_read_bytes", result.bytes_read)


def state_samples(
    load: LoadMetrics | None,
    save: SaveMetrics | None,
    *,
    query: str = "",
    operator: int = 0,
    partition: int = 0,
    store: str = "default",
) -> tuple[Sample, ...]:
    """Make the samples of the last load and the last save of one state store, for `write_textfile` or an endpoint.

    Args:
        load: `StateStore.last_load`.
        save: `StateStore.last_save`.
        query: What distinguishes queries, such as a name.
        operator: Of the query, and so on.
        partition: See `operator`.
        store: See `operator`.
    """
    samples = Samples(query=query, operator=str(operator), partition=str(partition), store=store)
    for metrics, names in ((load, LOAD_METRICS), (save, SAVE_METRICS)):
        if metrics is not None:
            for field, metric in names.items():
                samples.add(metric.name.removeprefix(PREFIX), getattr(metrics, field))
    if save is not None and save.uploaded is not None:
        samples.add(UPLOADED.name.removeprefix(PREFIX), save.uploaded.version)
    return tuple(samples)
