"""The figures of a run, from what it noted and what it showed."""

from collections.abc import Sequence

import msgspec

from engine.backup.backup import BackupStats
from engine.checkpoint.backup import PictureSums
from engine.cli.cmd.backup import BackupView
from engine.cli.cmd.bench_restore import RehearsalView
from engine.cli.cmd.commit import CommitResultView
from engine.cli.cmd.restore import RestoreView
from engine.cli.cmd.spark_backup import SparkBackupView
from engine.cli.cmd.spark_restore import SparkRestoreView
from engine.cli.cmd.verify import VerifyView
from engine.cli.collect_view import CollectView
from engine.cli.exit_codes import ExitCode
from engine.cli.run_record import RunRecord
from engine.errors import CommitUnknownError
from engine.inspect.verify import ProblemKind
from engine.metrics.samples import Samples
from engine.restore.restore import RestoreResult


def figures_of(
    run: RunRecord, *, verb: str, job: str, code: int, error: BaseException | None, ended_at_ms: int, seconds: float
) -> Samples:
    """Everything that one run tells.

    Args:
        run: What it noted.
        verb: As people say it.
        job: As the command line or the settings say it; empty where none was named.
        code: The exit code.
        error: What ended it, if anything did.
        ended_at_ms: By this machine's clock.
        seconds: How long it took.
    """
    samples = Samples(verb=verb, job_name=job)
    samples.add("runs_total", 1, code=str(int(code)))
    samples.add("run_exit_code", code)
    samples.add("run_end_timestamp_seconds", ended_at_ms / 1000)
    samples.add("run_seconds", seconds)
    if error is not None:
        samples.add("run_errors_total", 1, error=_class_name(error))
    if code == ExitCode.OK:
        samples.add("run_last_success_timestamp_seconds", ended_at_ms / 1000)
    if "open" in run.seconds:
        samples.add("run_open_seconds", run.seconds["open"])
    _add_requests(samples, run)
    _add_progress(samples, run)
    _add_commit(samples, run, error)
    if run.view is not None:
        _add_view(samples, run.view)
    return samples


def _class_name(error: BaseException) -> str:
    """Of an error its public class: its text may repeat what nobody is to read in a metric."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_"))


def _add_requests(samples: Samples, run: RunRecord) -> None:
    meter = run.meter
    for operation, number in meter.requests.items():
        samples.add("store_requests_total", number, operation=operation)
        samples.add("store_request_errors_total", meter.errors[operation], operation=operation)
        samples.add("store_request_seconds_total", meter.seconds[operation], operation=operation)
    samples.add("store_retries_total", meter.retries)
    samples.add("store_sent_bytes_total", meter.bytes_out)
    samples.add("store_received_bytes_total", meter.bytes_in)


def _add_progress(samples: Samples, run: RunRecord) -> None:
    done = run.progress
    samples.add("run_files_planned", done.files_total)
    samples.add("run_planned_bytes", done.bytes_total)
    samples.add("run_files_done", done.files)
    samples.add("run_done_bytes", done.bytes)
    samples.add("run_files_remaining", max(0, done.files_total - done.files))
    samples.add("run_remaining_bytes", max(0, done.bytes_total - done.bytes))


def _add_commit(samples: Samples, run: RunRecord, error: BaseException | None) -> None:
    """Of a run that came to committing; one that had nothing to commit skipped it."""
    match run.view:
        case CommitResultView(already=skipped):
            pass
        case SparkBackupView(is_new=is_new):
            skipped = not is_new
        case _:
            skipped = False
            if "commit" not in run.seconds:
                return
    samples.add("commit_calls_total", 1)
    samples.add("commits_skipped_total", int(skipped))
    samples.add("commit_exceptions_total", int(error is not None))
    samples.add("commits_timed_out_total", int(isinstance(error, CommitUnknownError)))
    if "commit" in run.seconds:
        samples.add("commit_seconds", run.seconds["commit"])
        samples.add("commit_cleanup_seconds", run.meter.seconds["remove_ttl"])


def _add_view(samples: Samples, view: msgspec.Struct) -> None:
    match view:
        case BackupView():
            _add_backup(samples, view.stats, task=view.task, store=view.store)
        case SparkBackupView(is_new=True):
            _add_picture(samples, (view.state, view.query), view.seconds)
        case RestoreView():
            for store in view.stores:
                if store.result is not None:
                    _add_restore(samples, store.result, task=store.task, store=store.store)
            samples.add("restore_stores_failed", sum(store.failure is not None for store in view.stores))
        case SparkRestoreView():
            _add_checkpoint(samples, view)
        case _:
            _add_care(samples, view)


def _add_care(samples: Samples, view: msgspec.Struct) -> None:
    match view:
        case CollectView():
            _add_collection(samples, view)
        case VerifyView():
            _add_verification(samples, view)
        case RehearsalView():
            samples.add("rehearsal_seconds", view.total_s)
            if view.rehearsal.slo_ms is not None:
                samples.add("rehearsal_slo_seconds", view.rehearsal.slo_ms / 1000)
        case _:
            pass


def _add_backup(samples: Samples, stats: BackupStats, *, task: str, store: str) -> None:
    files = stats.files_added + stats.files_repacked
    rates = {
        "backup_average_file_upload_seconds": stats.seconds / files if files else 0.0,
        "backup_average_file_bytes": stats.bytes_uploaded / files if files else 0.0,
        "backup_upload_bytes_per_second": stats.bytes_uploaded / stats.seconds if stats.seconds else 0.0,
    }
    figures = {
        "backup_files_to_upload": stats.files_added,
        "backup_to_upload_bytes": stats.bytes_added,
        "backup_files_uploaded": files,
        "backup_uploaded_bytes": stats.bytes_uploaded,
        "backup_files_to_retain": stats.files_retained,
        "backup_to_retain_bytes": stats.bytes_retained,
        "backup_files_to_remove": stats.files_removed,
        "backup_to_remove_bytes": stats.bytes_removed,
        "backup_sub_dirs_to_upload": stats.sub_dirs_added,
        "backup_sub_dirs_to_retain": stats.sub_dirs_retained,
        "backup_sub_dirs_to_remove": stats.sub_dirs_removed,
        "backup_dir_diff_seconds": stats.diff_seconds,
        "backup_upload_seconds": stats.seconds,
        "backup_healed_bytes": stats.bytes_healed,
    }
    for name, value in (figures | rates).items():
        samples.add(name, value, task=task, store=store)


def _add_picture(samples: Samples, sums: Sequence[PictureSums], seconds: float) -> None:
    """Of a checkpoint, all stores and the query's own files together."""
    files = sum(part.files for part in sums)
    added = sum(part.files_added for part in sums)
    uploaded_bytes = sum(part.bytes_uploaded for part in sums)
    samples.add("backup_files_to_upload", added)
    samples.add("backup_files_uploaded", added)
    samples.add("backup_uploaded_bytes", uploaded_bytes)
    samples.add("backup_files_to_retain", files - added)
    samples.add("backup_upload_seconds", seconds)
    samples.add("backup_average_file_upload_seconds", seconds / added if added else 0.0)
    samples.add("backup_average_file_bytes", uploaded_bytes / added if added else 0.0)
    samples.add("backup_upload_bytes_per_second", uploaded_bytes / seconds if seconds else 0.0)


def _add_restore(samples: Samples, result: RestoreResult, *, task: str, store: str) -> None:
    files = result.files_fetched + result.files_inline
    bytes_ = result.bytes_total - result.bytes_reused
    figures = {
        "restore_files_to_restore": result.files_total,
        "restore_to_restore_bytes": result.bytes_total,
        "restore_files_restored": files,
        "restore_restored_bytes": bytes_,
        "restore_files_reused": result.files_reused,
        "restore_fetched_bytes": result.bytes_fetched,
        "restore_seconds": result.seconds,
        "restore_get_snapshot_index_seconds": result.index_seconds,
        "restore_pre_restore_seconds": result.prepare_seconds,
        "restore_post_restore_seconds": result.publish_seconds,
        "restore_average_file_seconds": result.seconds / files if files else 0.0,
        "restore_bytes_per_second": bytes_ / result.seconds if result.seconds else 0.0,
    }
    for name, value in figures.items():
        samples.add(name, value, task=task, store=store)


def _add_checkpoint(samples: Samples, view: SparkRestoreView) -> None:
    samples.add("restore_files_to_restore", view.files)
    samples.add("restore_to_restore_bytes", view.size_bytes)
    samples.add("restore_files_restored", view.files)
    samples.add("restore_restored_bytes", view.size_bytes)
    samples.add("restore_fetched_bytes", view.bytes_fetched)
    samples.add("restore_seconds", view.seconds)
    samples.add("restore_average_file_seconds", view.seconds / view.files if view.files else 0.0)
    samples.add("restore_bytes_per_second", view.size_bytes / view.seconds if view.seconds else 0.0)
    samples.add("restore_changelogs_replayed", view.changelogs_replayed)


def _add_collection(samples: Samples, view: CollectView) -> None:
    samples.add("collect_kept_commits", len(view.kept))
    samples.add("collect_listed_bytes", view.listed_bytes)
    samples.add("collect_live_bytes", view.live_bytes)
    samples.add("collect_waiting_bytes", view.waiting_bytes)
    samples.add("collect_failed_keys_total", view.failed_count)
    for total in view.totals:
        samples.add("collect_deleted_keys_total", total.count, reason=total.reason)
        samples.add("collect_deleted_bytes_total", total.size_bytes, reason=total.reason)


def _add_verification(samples: Samples, view: VerifyView) -> None:
    for kind in ProblemKind:
        found = sum(problem.kind == kind.name.lower() and not problem.healed for problem in view.problems)
        samples.add("verify_problems", found, kind=kind.name.lower())
        if kind is not ProblemKind.AT_RISK:
            samples.add("verification_failures_total", found, kind=kind.name.lower())
    samples.add("verify_commits", view.commits_count)
    samples.add("verify_blobs", view.blobs_count)
    samples.add("verify_read_bytes", view.bytes_read)
