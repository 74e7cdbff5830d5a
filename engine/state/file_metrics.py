"""What the last load and the last save of a file manager moved; Spark's `RocksDBFileManagerMetrics`."""

import msgspec


class FilesLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """One `load_snapshot`."""

    files_fetched: int = 0
    files_reused: int = 0
    bytes_fetched: int = 0
    # Of the zip, uncompressed.
    zip_bytes: int = 0
    seconds: float = 0.0


class SnapshotUploaded(msgspec.Struct, frozen=True, kw_only=True):
    """One `upload_snapshot`."""

    files_copied: int = 0
    files_reused: int = 0
    # Of the files copied, those that had been reused and were copied again, as somebody may have deleted them (S4).
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
