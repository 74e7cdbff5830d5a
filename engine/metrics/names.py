"""All metrics by name, what Samza and Spark call them, and values on their way to Prometheus.

Metrics of runs say what one verb did for one job: gauges are of the last run, counters of all that were counted. Those
of a repository's status are what `tidemark metrics` reads, those of a state store its last load and its last save, for
the process that has it; both are gauges. `job` is a label that Prometheus itself gives to what it reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

PREFIX: Final = "tidemark_"

Kind = Literal["counter", "gauge"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One fact under one name (Prometheus' rules: base units, `_total` at the end of a counter)."""

    name: str
    kind: Kind
    # One sentence; the names that others have for the fact follow it in what is exposed.
    help: str
    labels: tuple[str, ...] = ()
    # What Samza and Spark call it.
    samza: tuple[str, ...] = ()
    spark: tuple[str, ...] = ()

    @property
    def documentation(self) -> str:
        """The help with the names of others, so that who searches for those finds the metric."""
        others = [
            f"{whose}: {', '.join(names)}" for whose, names in (("Samza", self.samza), ("Spark", self.spark)) if names
        ]
        return f"{self.help} [{'; '.join(others)}]" if others else self.help


class Sample(msgspec.Struct, frozen=True, order=True):
    """One value. The values of the labels are in the order of the metric's."""

    name: str
    labels: tuple[str, ...]
    value: float


# ---------------------------------------------------------------------- runs

# The first two labels of every metric of a run.
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
    _metric("commits_skipped_total", "counter", "Commits that existed already.", samza=("commits-skipped",)),
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
    _gauge("restore_files_reused", "Files that were there already.", spark=("rocksdbFilesReused",)),
    _gauge("restore_fetched_bytes", "Bytes that were asked for, dead ones of packs included."),
    _gauge(
        "restore_seconds",
        "The whole restore.",
        samza=("restore-ns", "<s>-restore-ns"),
        spark=("rocksdbLoadLatencyMs",),
    ),
    _gauge("restore_get_snapshot_index_seconds", "Reading the index.", samza=("get-snapshot-index-ns",)),
    _gauge("restore_pre_restore_seconds", "Scanning the target, and preparing it.", samza=("<s>-pre-restore-ns",)),
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
    _gauge("restore_drill_seconds", "How long the restore drill took.", RUN),
    _gauge("restore_drill_slo_seconds", "How long it may take (`--slo`); absent without one.", RUN),
)

RUN_METRICS: Final = (*_RUNS, *_REQUESTS, *_PROGRESS, *_BACKUP, *_COMMIT, *_RESTORE, *_CARE)

# ---------------------------------------------------------------------- the status of a repository

_SCOPE: Final = ("job_name", "task")


def _repository(name: str, text: str, labels: tuple[str, ...] = (), *, samza: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}{name}", kind="gauge", help=text, labels=labels, samza=samza)


REPOSITORY_METRICS: Final = (
    _repository(
        "repository_up", "1: the repository could be read; 0: all else is what the last reading that went well found."
    ),
    _repository(
        "repository_read_timestamp_seconds", "When the last reading that went well began, by the store's clock."
    ),
    _repository("repository_read_seconds", "How long it took."),
    _repository("repository_ttl_seconds", "How long an upload lives that no commit takes over."),
    _repository("repository_collection_period_seconds", "How often collect is meant to run."),
    _repository("last_commit_number", "Number of the newest commit.", _SCOPE),
    _repository("last_commit_version", "Its version.", _SCOPE),
    _repository(
        "last_commit_timestamp_seconds",
        "When it was made, by the store's clock.",
        _SCOPE,
        samza=("last-async-commit-timestamp",),
    ),
    _repository("last_commit_age_seconds", "Seconds from the last good commit to the reading.", _SCOPE),
    _repository("last_commit_bytes", "Bytes of the files of all its stores.", _SCOPE),
    _repository("last_commit_files", "Their files.", _SCOPE),
    _repository("last_commit_stores", "Its stores.", _SCOPE),
    _repository("commits", "Commits that can be restored, those that only names hold included.", _SCOPE),
    _repository("repository_bytes", "Bytes of all blobs and indexes."),
    _repository("repository_live_bytes", "Bytes retained: those that a commit, a name or a reader needs."),
    _repository("repository_live_objects", "Blobs and indexes retained."),
    _repository(
        "orphan_bytes",
        "Bytes that nothing needs: state=waiting until they are a TTL old, expired until a collection comes; "
        "unfinished: of files that are being written, or that a killed writer has left (S3 does not report them).",
        ("state",),
    ),
    _repository("orphan_objects", "Blobs and indexes that nothing needs, and unfinished ones.", ("state",)),
    _repository(
        "blobs_at_risk",
        "Blobs and indexes that commits need: with a TTL still set (reason=ttl), or missing or too short (damaged).",
        ("reason",),
    ),
    _repository("verification_failures", "Problems that the reading found, as `verify` does, by kind.", ("kind",)),
    _repository(
        "last_collection_timestamp_seconds", "When the last collection that deleted what it meant to began; 0: none."
    ),
    _repository("last_collection_seconds", "How long it took."),
    _repository("last_collection_deleted_bytes", "Bytes that it freed."),
    _repository("collections_failed", "Collections since then that failed or were refused."),
)

# ---------------------------------------------------------------------- state stores

_STATE: Final = ("query", "operator", "partition", "store")


def _state(name: str, text: str, *spark: str, samza: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}state_{name}", kind="gauge", help=text, labels=_STATE, samza=samza, spark=spark)


# Beside each metric, the field of `LoadMetrics` or `SaveMetrics` that it shows.
LOAD_METRICS: Final = {
    "files_fetched": _state("load_files_fetched", "Files that came from the store.", "rocksdbFilesCopied"),
    "files_reused": _state("load_files_reused", "Files that were here already.", "rocksdbFilesReused"),
    "bytes_fetched": _state("load_fetched_bytes", "Bytes that came.", "rocksdbBytesCopied"),
    "changelogs": _state("load_changelogs_replayed", "Changelogs applied.", "rocksdbNumReplayChangelogFiles"),
    "records": _state("load_records_replayed", "Records in them."),
    "record_bytes": _state("load_replayed_bytes", "Bytes in them."),
    "snapshots_repaired": _state(
        "load_snapshots_repaired", "Snapshots put aside because they do not open.", "rocksdbNumSnapshotsAutoRepaired"
    ),
    "total_s": _state("load_seconds", "The whole load.", "rocksdbLoadLatencyMs"),
    "resolve_s": _state("load_resolve_seconds", "Finding out what to load."),
    "fetch_s": _state("load_fetch_seconds", "Fetching; it overlaps with applying."),
    "open_s": _state("load_open_seconds", "Opening RocksDB."),
    "replay_s": _state("load_replay_seconds", "Applying changelogs.", "rocksdbReplayChangelogLatencyMs"),
}
SAVE_METRICS: Final = {
    "records": _state("save_records", "Records of the changelog."),
    "changelog_bytes": _state("save_changelog_bytes", "Its bytes, as stored."),
    "total_s": _state("save_seconds", "The whole commit.", "rocksdbCommitFileSyncLatencyMs"),
    "changelog_s": _state(
        "save_changelog_seconds", "Writing the changelog to the store.", "rocksdbChangeLogWriterCommitLatencyMs"
    ),
    "flush_s": _state("save_flush_seconds", "Flushing RocksDB.", "rocksdbCommitFlushLatency"),
    "compact_s": _state("save_compact_seconds", "Compacting it.", "rocksdbCommitCompactLatency"),
    "checkpoint_s": _state(
        "save_checkpoint_seconds",
        "Making the rocksdb_checkpoint.",
        "rocksdbCommitCheckpointLatency",
        samza=("store-checkpoint-ns",),
    ),
    "files_copied": _state("save_files_copied", "Files of the last snapshot that were sent.", "rocksdbFilesCopied"),
    "files_reused": _state("save_files_reused", "Files that the store had already.", "rocksdbFilesReused"),
    "bytes_copied": _state("save_copied_bytes", "Bytes that were sent.", "rocksdbBytesCopied"),
    "zip_bytes": _state(
        "save_zip_bytes", "Bytes that went into its zip, uncompressed.", "rocksdbZipFileBytesUncompressed"
    ),
    "upload_s": _state("save_upload_seconds", "Sending it, zip included.", "rocksdbSaveZipFilesLatencyMs"),
    "uploads_failed": _state("save_uploads_failed", "Uploads that failed since the store was opened."),
}
UPLOADED: Final = _state("snapshot_uploaded_version", "Version of the last snapshot sent.", "snapshotLastUploaded")

STATE_METRICS: Final = (*LOAD_METRICS.values(), *SAVE_METRICS.values(), UPLOADED)

# ---------------------------------------------------------------------- values

METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric for metric in (*RUN_METRICS, *REPOSITORY_METRICS, *STATE_METRICS)
}


class Samples:
    """Values, each of a metric that exists and with the labels that it has.

    Args:
        labels: Labels that every value has, where its metric has them.
    """

    def __init__(self, **labels: str) -> None:
        self._common = labels
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Note a value, in place of an earlier one with the same labels.

        Args:
            name: Of the metric, without `tidemark_`.
            labels: Those that not every value has; one that is not given is empty.

        Raises:
            KeyError: There is no such metric, or it has no such label.
        """
        metric = METRICS[f"{PREFIX}{name}"]
        if unknown := labels.keys() - set(metric.labels):
            raise KeyError(f"{metric.name} has no label {min(unknown)}")
        values = {**self._common, **labels}
        self._values[metric.name, tuple(_writable(values.get(label, "")) for label in metric.labels)] = float(value)

    def update(self, samples: Iterable[Sample]) -> None:
        """Note values that are samples already."""
        for sample in samples:
            self._values[sample.name, sample.labels] = sample.value

    def __iter__(self) -> Iterator[Sample]:
        """Yield all values in the order of the table of metrics."""
        places = {name: place for place, name in enumerate(METRICS)}
        for name, labels in sorted(self._values, key=lambda key: (places[key[0]], key[1])):
            yield Sample(name, labels, self._values[name, labels])


def _writable(text: str) -> str:
    """Spell out bytes of the command line that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def labels_of(sample: Sample) -> Mapping[str, str]:
    """Return the labels of a sample by name."""
    return dict(zip(METRICS[sample.name].labels, sample.labels, strict=True))
