"""The metrics of runs: what one verb did for one job. Gauges are of the last run, counters of all that were counted."""

from typing import Final

from engine.metrics.model import PREFIX, Kind, Metric

# Of every metric here the first two.
# `job` is a label that Prometheus itself gives to whatever it reads.
RUN: Final = ("verb", "job_name")
_STORE: Final = (*RUN, "task", "store")


def _metric(
    name: str,
    kind: Kind,
    text: str,
    labels: tuple[str, ...] = RUN,
    *,
    samza: tuple[str, ...] = (),
    spark: tuple[str, ...] = (),
) -> Metric:
    return Metric(name=f"{PREFIX}{name}", kind=kind, help=text, labels=labels, samza=samza, spark=spark)


def _gauge(
    name: str, text: str, labels: tuple[str, ...] = _STORE, *, samza: tuple[str, ...] = (), spark: tuple[str, ...] = ()
) -> Metric:
    return _metric(name, "gauge", text, labels, samza=samza, spark=spark)


_RUNS: Final = (
    _metric("runs_total", "counter", "Runs, by their exit code.", (*RUN, "code")),
    _metric("run_errors_total", "counter", "Runs that an error ended, by its class.", (*RUN, "error")),
    _gauge("run_exit_code", "Exit code of the last run; 0 is done.", RUN),
    _gauge("run_end_timestamp_seconds", "When the last run ended, by the clock of its machine.", RUN),
    _gauge("run_last_success_timestamp_seconds", "When the last run ended that ended with 0.", RUN),
    _gauge("run_seconds", "How long the last run took.", RUN),
    _gauge("run_open_seconds", "Opening the repository.", RUN, samza=("init-ns",)),
)

_REQUESTS: Final = (
    _metric("store_requests_total", "counter", "Requests to the store, repeated ones included.", (*RUN, "operation")),
    _metric("store_request_errors_total", "counter", "Requests that failed or were refused.", (*RUN, "operation")),
    _metric("store_request_seconds_total", "counter", "Seconds of requests, added up.", (*RUN, "operation")),
    _metric("store_retries_total", "counter", "Requests that were made again after a failure."),
    _metric("store_sent_bytes_total", "counter", "Bytes of bodies, each time that they were sent."),
    _metric("store_received_bytes_total", "counter", "Bytes of blobs, each time that they came."),
)

_PROGRESS: Final = (
    _gauge("run_files_planned", "Files to move, read or delete, as the last run planned.", RUN),
    _gauge("run_planned_bytes", "Their bytes.", RUN),
    _gauge("run_files_done", "Files that it got done, also if it failed.", RUN),
    _gauge("run_done_bytes", "Their bytes.", RUN),
    _gauge("run_files_remaining", "Files that were left at its end.", RUN, samza=("files-remaining",)),
    _gauge("run_remaining_bytes", "Their bytes.", RUN, samza=("bytes-remaining",)),
)

_BACKUP: Final = (
    _gauge(
        "backup_files_to_upload",
        "Files that were added or changed.",
        samza=("files-to-upload", "<s>-files-to-upload"),
    ),
    _gauge("backup_to_upload_bytes", "Their bytes.", samza=("bytes-to-upload", "<s>-bytes-to-upload")),
    _gauge(
        "backup_files_uploaded",
        "Files of which bytes were sent or put into the index.",
        samza=("files-uploaded",),
        spark=("rocksdbFilesCopied",),
    ),
    _gauge(
        "backup_uploaded_bytes",
        "Bytes sent as blobs, once each.",
        samza=("bytes-uploaded",),
        spark=("rocksdbBytesCopied",),
    ),
    _gauge(
        "backup_files_to_retain",
        "Files that the base has, so that they were not sent.",
        samza=("files-to-retain", "<s>-files-to-retain"),
        spark=("rocksdbFilesReused",),
    ),
    _gauge("backup_to_retain_bytes", "Their bytes.", samza=("bytes-to-retain", "<s>-bytes-to-retain")),
    _gauge(
        "backup_files_to_remove", "Files that the base has and the directory has not.", samza=("<s>-files-to-remove",)
    ),
    _gauge("backup_to_remove_bytes", "Their bytes.", samza=("<s>-bytes-to-remove",)),
    _gauge("backup_sub_dirs_to_upload", "Sub-directories that are new.", samza=("<s>-sub-dirs-to-upload",)),
    _gauge("backup_sub_dirs_to_retain", "Sub-directories that the base has, too.", samza=("<s>-sub-dirs-to-retain",)),
    _gauge("backup_sub_dirs_to_remove", "Sub-directories that only the base has.", samza=("<s>-sub-dirs-to-remove",)),
    _gauge(
        "backup_dir_diff_seconds",
        "Looking at the directory and at what has changed: it must hold still.",
        samza=("<s>-dir-diff-ns", "snapshot-ns", "commit-sync-ns"),
    ),
    _gauge(
        "backup_upload_seconds",
        "The whole backup, up to the result that can be committed.",
        samza=("upload-ns", "<s>-upload-ns", "async-upload-ns"),
    ),
    _gauge("backup_average_file_upload_seconds", "The whole by the files uploaded.", samza=("avg-file-upload-ns",)),
    _gauge("backup_average_file_bytes", "Bytes uploaded by files uploaded.", samza=("avg-file-size-bytes",)),
    _gauge("backup_upload_bytes_per_second", "Bytes uploaded by the whole.", samza=("upload-rate",)),
    _gauge("backup_healed_bytes", "Bytes that were sent again because they were missing in the store."),
)

_COMMIT: Final = (
    _metric("commit_calls_total", "counter", "Commits that were asked for.", samza=("commit-calls",)),
    _metric("commits_timed_out_total", "counter", "Commits of unknown outcome.", samza=("commits-timed-out",)),
    _metric("commits_skipped_total", "counter", "Commits that stood already.", samza=("commits-skipped",)),
    _metric("commit_exceptions_total", "counter", "Commits that failed.", samza=("commit-exceptions",)),
    _gauge(
        "commit_seconds",
        "The last commit, with the removal of TTLs.",
        RUN,
        samza=("commit-ns", "commit-async-ns", "last-commit-ns"),
        spark=("rocksdbCommitFileSyncLatencyMs",),
    ),
    _gauge(
        "commit_cleanup_seconds",
        "Requests that removed TTLs after it, added up.",
        RUN,
        samza=("cleanup-ns", "async-cleanup-ns"),
    ),
)

_RESTORE: Final = (
    _gauge("restore_files_to_restore", "Files of the snapshot.", samza=("files-to-restore",)),
    _gauge("restore_to_restore_bytes", "Their bytes.", samza=("bytes-to-restore",)),
    _gauge(
        "restore_files_restored",
        "Files that were fetched, or written from the index.",
        samza=("files-restored",),
        spark=("rocksdbFilesCopied",),
    ),
    _gauge("restore_restored_bytes", "Their bytes.", samza=("bytes-restored",), spark=("rocksdbBytesCopied",)),
    _gauge("restore_files_reused", "Files that stood there already.", spark=("rocksdbFilesReused",)),
    _gauge("restore_fetched_bytes", "Bytes that were asked for, dead ones of packs included."),
    _gauge(
        "restore_seconds",
        "The whole restore.",
        samza=("restore-ns", "<s>-restore-ns"),
        spark=("rocksdbLoadLatencyMs",),
    ),
    _gauge("restore_get_snapshot_index_seconds", "Reading the index.", samza=("get-snapshot-index-ns",)),
    _gauge("restore_pre_restore_seconds", "Looking at what is there, and making room.", samza=("<s>-pre-restore-ns",)),
    _gauge(
        "restore_post_restore_seconds",
        "From the last byte to the rename; bytes are verified as they come.",
        samza=("<s>-post-restore-ns",),
    ),
    _gauge("restore_average_file_seconds", "The whole by the files restored.", samza=("avg-file-restore-ns",)),
    _gauge("restore_bytes_per_second", "Bytes restored by the whole.", samza=("restore-rate",)),
    _gauge("restore_changelogs_replayed", "Changelogs applied.", spark=("rocksdbNumReplayChangelogFiles",)),
    _gauge("restore_stores_failed", "Stores that did not come back.", RUN),
)

_CARE: Final = (
    _metric("collect_deleted_keys_total", "counter", "Keys that collections deleted.", (*RUN, "reason")),
    _metric("collect_deleted_bytes_total", "counter", "Bytes of blobs and indexes deleted.", (*RUN, "reason")),
    _metric("collect_failed_keys_total", "counter", "Keys that could not be deleted."),
    _gauge("collect_kept_commits", "Commits that stay.", RUN),
    _gauge("collect_listed_bytes", "Bytes of all blobs and indexes, before the deletion.", RUN),
    _gauge("collect_live_bytes", "Bytes that something needs.", RUN),
    _gauge("collect_waiting_bytes", "Orphan bytes that stay until they are a TTL old.", RUN),
    _metric("verification_failures_total", "counter", "Things found missing or altered.", (*RUN, "kind")),
    _gauge("verify_problems", "What the last run found; at_risk is a TTL that is left to remove.", (*RUN, "kind")),
    _gauge("verify_commits", "Commits that it checked.", RUN),
    _gauge("verify_blobs", "Blobs that it looked for.", RUN),
    _gauge("verify_read_bytes", "Bytes that it read and hashed.", RUN),
    _gauge("rehearsal_seconds", "What the rehearsed restore took.", RUN),
    _gauge("rehearsal_slo_seconds", "What it may take; absent where nobody said.", RUN),
)

RUN_METRICS: Final = (*_RUNS, *_REQUESTS, *_PROGRESS, *_BACKUP, *_COMMIT, *_RESTORE, *_CARE)
