"""The metrics of a state store's last load and last save, for the process that has it. All are gauges."""

from typing import Final

from engine.metrics.model import PREFIX, Metric

LABELS: Final = ("query", "operator", "partition", "store")


def _gauge(name: str, text: str, *spark: str, samza: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}state_{name}", kind="gauge", help=text, labels=LABELS, samza=samza, spark=spark)


# Beside each metric, the field of `LoadMetrics` or `SaveMetrics` that it tells.
LOAD_METRICS: Final = {
    "files_fetched": _gauge("load_files_fetched", "Files that came from the store.", "rocksdbFilesCopied"),
    "files_reused": _gauge("load_files_reused", "Files that were here already.", "rocksdbFilesReused"),
    "bytes_fetched": _gauge("load_fetched_bytes", "Bytes that came.", "rocksdbBytesCopied"),
    "changelogs": _gauge("load_changelogs_replayed", "Changelogs applied.", "rocksdbNumReplayChangelogFiles"),
    "records": _gauge("load_records_replayed", "Records in them."),
    "record_bytes": _gauge("load_replayed_bytes", "Bytes in them."),
    "snapshots_repaired": _gauge(
        "load_snapshots_repaired", "Snapshots put aside because they do not open.", "rocksdbNumSnapshotsAutoRepaired"
    ),
    "total_s": _gauge("load_seconds", "The whole load.", "rocksdbLoadLatencyMs"),
    "resolve_s": _gauge("load_resolve_seconds", "Finding out what to load."),
    "fetch_s": _gauge("load_fetch_seconds", "Fetching; it overlaps with applying."),
    "open_s": _gauge("load_open_seconds", "Opening RocksDB."),
    "replay_s": _gauge("load_replay_seconds", "Applying changelogs.", "rocksdbReplayChangelogLatencyMs"),
}
SAVE_METRICS: Final = {
    "records": _gauge("save_records", "Records of the changelog."),
    "changelog_bytes": _gauge("save_changelog_bytes", "Its bytes, as stored."),
    "total_s": _gauge("save_seconds", "The whole commit.", "rocksdbCommitFileSyncLatencyMs"),
    "changelog_s": _gauge(
        "save_changelog_seconds", "Writing the changelog to the store.", "rocksdbChangeLogWriterCommitLatencyMs"
    ),
    "flush_s": _gauge("save_flush_seconds", "Flushing RocksDB.", "rocksdbCommitFlushLatency"),
    "compact_s": _gauge("save_compact_seconds", "Compacting it.", "rocksdbCommitCompactLatency"),
    "checkpoint_s": _gauge(
        "save_checkpoint_seconds",
        "Making the rocksdb_checkpoint.",
        "rocksdbCommitCheckpointLatency",
        samza=("store-checkpoint-ns",),
    ),
    "files_copied": _gauge("save_files_copied", "Files of the last snapshot that were sent.", "rocksdbFilesCopied"),
    "files_reused": _gauge("save_files_reused", "Files that the store had already.", "rocksdbFilesReused"),
    "bytes_copied": _gauge("save_copied_bytes", "Bytes that were sent.", "rocksdbBytesCopied"),
    "zip_bytes": _gauge(
        "save_zip_bytes", "Bytes that went into its zip, uncompressed.", "rocksdbZipFileBytesUncompressed"
    ),
    "upload_s": _gauge("save_upload_seconds", "Sending it, zip included.", "rocksdbSaveZipFilesLatencyMs"),
    "uploads_failed": _gauge("save_uploads_failed", "Uploads that failed since the store was opened."),
}
UPLOADED: Final = _gauge("snapshot_uploaded_version", "Version of the last snapshot sent.", "snapshotLastUploaded")

STATE_METRICS: Final = (*LOAD_METRICS.values(), *SAVE_METRICS.values(), UPLOADED)
