"""Metrics of the last load and the last commit of a state store, and of what its file manager moved.

Where Spark has a number for it, its name is beside it: a metric of the operator in the query's progress, or a key of
its load and commit latencies; of the file manager, Spark's `RocksDBFileManagerMetrics`.
"""

import msgspec

from index.spark.names import StateVersion


class FilesLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """One `load_snapshot`."""

    files_fetched: int = 0
    files_reused: int = 0
    bytes_fetched: int = 0


class SnapshotUploaded(msgspec.Struct, frozen=True, kw_only=True):
    """One `upload_snapshot`."""

    files_copied: int = 0
    files_reused: int = 0
    # Of the files copied, those that had been reused and were copied again, as they may have been deleted (S4).
    files_renewed: int = 0
    bytes_copied: int = 0
    # What went into the zip, uncompressed; Spark's `zipFileBytesUncompressed`.
    zip_bytes: int = 0
    seconds: float = 0.0


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """One `delete_old_versions`."""

    # The oldest snapshot that stays; 0: nothing was deleted.
    oldest_kept: int = 0
    snapshots: int = 0
    changelogs: int = 0
    # SSTs and logs that only deleted snapshots named, and those that none named.
    files: int = 0
    orphans: int = 0
    checksums: int = 0


class LoadMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One `load`."""

    # What was loaded.
    of: StateVersion
    # The snapshot that it was built on; None: on nothing.
    base: StateVersion | None = None
    # It was loaded already.
    was_loaded: bool = False
    # Files of the snapshot that came from the store, and those that were here already.
    # Spark: rocksdbFilesCopied, rocksdbFilesReused, rocksdbBytesCopied, of the last load or save.
    files_fetched: int = 0
    files_reused: int = 0
    bytes_fetched: int = 0
    # Changelogs replayed (Spark: rocksdbNumReplayChangelogFiles), and what was in them.
    changelogs: int = 0
    records: int = 0
    record_bytes: int = 0
    # Snapshots that were rejected because they do not open. Spark: rocksdbNumSnapshotsAutoRepaired, which is 0 or 1.
    snapshots_repaired: int = 0
    # Seconds of the whole (Spark: rocksdbLoadLatencyMs), and of its phases; fetches of both kinds overlap.
    total_s: float = 0.0
    resolve_s: float = 0.0
    fetch_s: float = 0.0
    open_s: float = 0.0
    # Spark: rocksdbReplayChangelogLatencyMs.
    replay_s: float = 0.0


class SaveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One `commit`, and the last snapshot that was uploaded, which may be of an older one."""

    # What was committed; None before the first commit.
    of: StateVersion | None = None
    # The changelog: records and stored bytes.
    records: int = 0
    changelog_bytes: int = 0
    # Whether a snapshot was made; whether it was uploaded before the commit returned.
    snapshot_made: bool = False
    snapshot_inline: bool = False
    # Seconds of the whole (Spark: rocksdbCommitFileSyncLatencyMs for what goes to the store), and of its phases.
    total_s: float = 0.0
    # Spark: rocksdbChangeLogWriterCommitLatencyMs.
    changelog_s: float = 0.0
    # Of the snapshot on this machine. Spark: rocksdbCommitFlushLatency, rocksdbCommitCompactLatency and
    # rocksdbCommitCheckpointLatency; here a rocksdb_checkpoint flushes what is left to flush itself.
    flush_s: float = 0.0
    compact_s: float = 0.0
    checkpoint_s: float = 0.0
    # The last snapshot that was uploaded. Spark: the snapshotLastUploaded metric of each partition.
    uploaded: StateVersion | None = None
    # Spark: rocksdbFilesCopied, rocksdbFilesReused, rocksdbBytesCopied, rocksdbZipFileBytesUncompressed.
    files_copied: int = 0
    files_reused: int = 0
    bytes_copied: int = 0
    zip_bytes: int = 0
    # Spark: rocksdbSaveZipFilesLatencyMs is the part of it that the zip takes.
    upload_s: float = 0.0
    # Uploads that failed since the store was opened.
    uploads_failed: int = 0
