"""All metrics by name, what Samza and Spark call them, and values on their way to Prometheus.

Metrics of runs say what one verb did for one job: gauges are of the last run, counters of all that were counted. Those
of a repository's status are what `tidemark metrics` reads, those of a state store its last load and its last save, for
the process that has it; both are gauges. `job` is a label that Prometheus itself gives to what it reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Literal

import msgspec

from index.display import encodable

PREFIX: Final = "tidemark_"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One fact under one name (Prometheus' rules: base units, `_total` at the end of a counter)."""

    name: str
    # One sentence; the names that others have for the fact follow it in what is exposed.
    help: str
    labels: tuple[str, ...] = ()
    # What Samza and Spark call it.
    samza: tuple[str, ...] = ()
    spark: tuple[str, ...] = ()

    json_properties: ClassVar = {"kind": "kind"}

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"

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


# The first two labels of every metric of a run.
RUN: Final = ("verb", "job_name")

# `[labels]` of the metrics below it, then `name{another label}: help | names in Samza | names in Spark`; an indented
# line goes on with the one above it. A field of a result that is shown as it is comes first.
_TABLE: Final = """
[verb job_name]
runs_total{code}: Runs, by their exit code.
run_errors_total{error}: Runs that an error ended, by its class.
run_exit_code: Exit code of the last run; 0 is done.
run_end_timestamp_seconds: When the last run ended, by the clock of its machine.
run_last_success_timestamp_seconds: When the last run ended that ended with 0.
run_seconds: How long the last run took.
run_open_seconds: Opening the repository. | init-ns
store_requests_total{operation}: Requests to the blob store, repeated ones included.
store_request_errors_total{operation}: Requests that failed or were refused.
store_request_seconds_total{operation}: Seconds of requests, added up.
store_retries_total: Requests that were made again after a failure.
store_sent_bytes_total: Bytes of bodies, each time that they were sent.
store_received_bytes_total: Bytes of blobs, each time that they came.
run_files_planned: Files to move, read or delete, as the last run planned.
run_planned_bytes: Their bytes.
run_files_done: Files that it got done, also if it failed.
run_done_bytes: Their bytes.
run_files_remaining: Files that were left at its end. | files-remaining
run_remaining_bytes: Their bytes. | bytes-remaining
[verb job_name task store]
files_added backup_files_to_upload: Files that were added or changed. | files-to-upload <s>-files-to-upload
bytes_added backup_to_upload_bytes: Their bytes. | bytes-to-upload <s>-bytes-to-upload
backup_files_uploaded: Files of which bytes were sent or put into the index. | files-uploaded | rocksdbFilesCopied
backup_uploaded_bytes: Bytes sent as blobs, once each. | bytes-uploaded | rocksdbBytesCopied
files_retained backup_files_to_retain: Files that the base has, so that they were not sent. |
    files-to-retain <s>-files-to-retain | rocksdbFilesReused
bytes_retained backup_to_retain_bytes: Their bytes. | bytes-to-retain <s>-bytes-to-retain
files_removed backup_files_to_remove: Files that the base has and the directory has not. | <s>-files-to-remove
bytes_removed backup_to_remove_bytes: Their bytes. | <s>-bytes-to-remove
sub_dirs_added backup_sub_dirs_to_upload: Sub-directories that are new. | <s>-sub-dirs-to-upload
sub_dirs_retained backup_sub_dirs_to_retain: Sub-directories that the base has, too. | <s>-sub-dirs-to-retain
sub_dirs_removed backup_sub_dirs_to_remove: Sub-directories that only the base has. | <s>-sub-dirs-to-remove
diff_seconds backup_dir_diff_seconds: Looking at the directory and at what has changed: it must hold still. |
    <s>-dir-diff-ns snapshot-ns commit-sync-ns
backup_upload_seconds: The whole backup, up to the result that can be committed. | upload-ns <s>-upload-ns
    async-upload-ns
backup_average_file_upload_seconds: The whole by the files uploaded. | avg-file-upload-ns
backup_average_file_bytes: Bytes uploaded by files uploaded. | avg-file-size-bytes
backup_upload_bytes_per_second: Bytes uploaded by the whole. | upload-rate
bytes_healed backup_healed_bytes: Bytes that were sent again because they were missing in the blob store.
[verb job_name]
commit_calls_total: Commits that were asked for. | commit-calls
commits_timed_out_total: Commits of unknown outcome. | commits-timed-out
commits_skipped_total: Commits that existed already. | commits-skipped
commit_exceptions_total: Commits that failed. | commit-exceptions
commit_seconds: The last commit, with the removal of TTLs. | commit-ns commit-async-ns last-commit-ns |
    rocksdbCommitFileSyncLatencyMs
commit_cleanup_seconds: Requests that removed TTLs, beside it and after it, added up. | cleanup-ns async-cleanup-ns
[verb job_name task store]
files_total restore_files_to_restore: Files of the snapshot. | files-to-restore
bytes_total restore_to_restore_bytes: Their bytes. | bytes-to-restore
restore_files_restored: Files that were fetched, or written from the index. | files-restored | rocksdbFilesCopied
restore_restored_bytes: Their bytes. | bytes-restored | rocksdbBytesCopied
files_reused restore_files_reused: Files that were there already. | | rocksdbFilesReused
bytes_fetched restore_fetched_bytes: Bytes that were asked for, dead ones of packs included.
restore_seconds: The whole restore. | restore-ns <s>-restore-ns | rocksdbLoadLatencyMs
index_seconds restore_get_snapshot_index_seconds: Reading the index. | get-snapshot-index-ns
prepare_seconds restore_pre_restore_seconds: Scanning the target, and preparing it. | <s>-pre-restore-ns
publish_seconds restore_post_restore_seconds: From the last byte to the rename; bytes are verified as they come. |
    <s>-post-restore-ns
restore_average_file_seconds: The whole by the files restored. | avg-file-restore-ns
restore_bytes_per_second: Bytes restored by the whole. | restore-rate
restore_changelogs_replayed: Changelogs applied. | | rocksdbNumReplayChangelogFiles
[verb job_name]
restore_stores_failed: Stores that did not come back.
commit_number follow_commit_number: Number of the commit that the followed directory is of; 0: nothing is there.
lag_commits follow_lag_commits: Commits by which it is behind the newest one.
lag_bytes follow_lag_bytes: Bytes that would be fetched to catch up.
lag_seconds follow_lag_seconds: Seconds since the oldest commit that it lacks came to the blob store.
collect_deleted_keys_total{reason}: Keys that collections deleted.
collect_deleted_bytes_total{reason}: Bytes of blobs and indexes deleted.
failed_count collect_failed_keys_total: Keys that could not be deleted.
collect_kept_commits: Commits that stay.
listed_bytes collect_listed_bytes: Bytes of all blobs and indexes, before the deletion.
live_bytes collect_live_bytes: Bytes that something needs.
waiting_bytes collect_waiting_bytes: Orphan bytes that stay until they are a TTL old.
verification_failures_total{kind}: Things found missing or altered.
verify_problems{kind}: What the last run found; at_risk is a TTL that is left to remove.
commits_count verify_commits: Commits that it checked.
blobs_count verify_blobs: Blobs that it looked for.
bytes_read verify_read_bytes: Bytes that it read and hashed.
restore_drill_seconds: How long the restore drill took.
restore_drill_slo_seconds: How long it may take (`--slo`); absent without one.
[]
repository_up: 1: the repository could be read; 0: all else is what the last reading that went well found.
repository_read_timestamp_seconds: When the last reading that went well began, by the blob store's clock.
repository_read_seconds: How long it took.
repository_ttl_seconds: How long an upload lives that no commit takes over.
repository_collection_period_seconds: How often collect is meant to run.
[job_name task]
last_commit_number: Number of the newest commit.
last_commit_version: Its version.
last_commit_timestamp_seconds: When it was made, by the blob store's clock. | last-async-commit-timestamp
last_commit_age_seconds: Seconds from the last good commit to the reading.
last_commit_bytes: Bytes of the files of all its stores.
last_commit_files: Their files.
last_commit_stores: Its stores.
commits: Commits that can be restored, those that only names hold included.
[]
repository_bytes: Bytes of all blobs and indexes.
repository_live_bytes: Bytes retained: those that a commit, a name or a reader needs.
repository_live_objects: Blobs and indexes retained.
orphan_bytes{state}: Bytes that nothing needs: state=waiting until they are a TTL old, expired until a collection
    comes; unfinished: of files that are being written, or that a killed writer has left (S3 does not report them).
orphan_objects{state}: Blobs and indexes that nothing needs, and unfinished ones.
blobs_at_risk{reason}: Blobs and indexes that commits need: with a TTL still set (reason=ttl), or missing or too short
    (damaged).
verification_failures{kind}: Problems that the reading found, as `verify` does, by kind.
last_collection_timestamp_seconds: When the last collection that deleted what it meant to began; 0: none.
last_collection_seconds: How long it took.
last_collection_deleted_bytes: Bytes that it freed.
collections_failed: Collections since then that failed or were refused.
[query operator partition store]
files_fetched state_load_files_fetched: Files that came from the blob store. | | rocksdbFilesCopied
files_reused state_load_files_reused: Files that were here already. | | rocksdbFilesReused
bytes_fetched state_load_fetched_bytes: Bytes that came. | | rocksdbBytesCopied
changelogs state_load_changelogs_replayed: Changelogs applied. | | rocksdbNumReplayChangelogFiles
records state_load_records_replayed: Records in them.
record_bytes state_load_replayed_bytes: Bytes in them.
snapshots_repaired state_load_snapshots_repaired: Snapshots put aside because they do not open. | |
    rocksdbNumSnapshotsAutoRepaired
total_s state_load_seconds: The whole load. | | rocksdbLoadLatencyMs
resolve_s state_load_resolve_seconds: Finding out what to load.
fetch_s state_load_fetch_seconds: Fetching; it overlaps with applying.
open_s state_load_open_seconds: Opening RocksDB.
replay_s state_load_replay_seconds: Applying changelogs. | | rocksdbReplayChangelogLatencyMs
records state_save_records: Records of the changelog.
changelog_bytes state_save_changelog_bytes: Its bytes, as stored.
total_s state_save_seconds: The whole commit. | | rocksdbCommitFileSyncLatencyMs
changelog_s state_save_changelog_seconds: Writing the changelog to the blob store. | |
    rocksdbChangeLogWriterCommitLatencyMs
flush_s state_save_flush_seconds: Flushing RocksDB. | | rocksdbCommitFlushLatency
compact_s state_save_compact_seconds: Compacting it. | | rocksdbCommitCompactLatency
checkpoint_s state_save_checkpoint_seconds: Making the rocksdb_checkpoint. | store-checkpoint-ns |
    rocksdbCommitCheckpointLatency
files_copied state_save_files_copied: Files of the last snapshot that were sent. | | rocksdbFilesCopied
files_reused state_save_files_reused: Files that the blob store had already. | | rocksdbFilesReused
bytes_copied state_save_copied_bytes: Bytes that were sent. | | rocksdbBytesCopied
zip_bytes state_save_zip_bytes: Bytes that went into its zip, uncompressed. | | rocksdbZipFileBytesUncompressed
upload_s state_save_upload_seconds: Sending it, zip included. | | rocksdbSaveZipFilesLatencyMs
uploads_failed state_save_uploads_failed: Uploads that failed since the state store was opened.
state_snapshot_uploaded_version: Version of the last snapshot sent. | | snapshotLastUploaded
"""


def _read_table() -> Iterator[tuple[str, Metric]]:
    """Yield each metric with the field that it shows, if it has one."""
    labels: tuple[str, ...] = ()
    for row in _TABLE.strip().replace("\n    ", " ").splitlines():
        if row.startswith("["):
            labels = tuple(row.strip("[]").split())
            continue
        given, _, rest = row.partition(": ")
        text, *others = rest.split("|")
        samza, spark, *_ = *(tuple(names.split()) for names in others), (), ()
        field, _, name = given.rpartition(" ")
        name, _, own = name.removesuffix("}").partition("{")
        all_labels = (*labels, own) if own else labels
        yield field, Metric(name=f"{PREFIX}{name}", help=text.strip(), labels=all_labels, samza=samza, spark=spark)


_ROWS: Final = tuple(_read_table())
METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for _, metric in _ROWS}


def fields_shown(part: str) -> dict[str, str]:
    """Return the metrics that show a field of a result, those of a backup being `backup_...`, by the field."""
    names = ((field, metric.name.removeprefix(PREFIX)) for field, metric in _ROWS if field)
    return {field: name for field, name in names if name.startswith(f"{part}_")}


class Samples:
    """Values, each of a metric that exists and with the labels that it has."""

    def __init__(self, **labels: str) -> None:
        # What every value has, where its metric has it.
        self._common = labels
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Note a value, in place of an earlier one with the same labels; a label that is not given is empty.

        The name is without `tidemark_`. KeyError: there is no such metric, or it has no such label.
        """
        metric = METRICS[f"{PREFIX}{name}"]
        if unknown := labels.keys() - set(metric.labels):
            raise KeyError(f"{metric.name} has no label {min(unknown)}")
        values = {**self._common, **labels}
        self._values[metric.name, tuple(encodable(values.get(label, "")) for label in metric.labels)] = float(value)

    def update(self, samples: Iterable[Sample]) -> None:
        self._values |= {(sample.name, sample.labels): sample.value for sample in samples}

    def __iter__(self) -> Iterator[Sample]:
        """Yield all values in the order of the table of metrics."""
        places = {name: place for place, name in enumerate(METRICS)}
        for name, labels in sorted(self._values, key=lambda key: (places[key[0]], key[1])):
            yield Sample(name, labels, self._values[name, labels])


def labels_of(sample: Sample) -> Mapping[str, str]:
    """Return the labels of a sample by name."""
    return dict(zip(METRICS[sample.name].labels, sample.labels, strict=True))
