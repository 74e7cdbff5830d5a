"""How a state store reads and writes: those settings of Spark's that decide about stored bytes or what they cost."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, Self, cast, get_args

import msgspec

from engine.errors import UsageError
from engine.rocksdb.store import RocksDbSettings, spark_settings
from engine.settings import MIB
from engine.state.compression import Codec

# Values of the setting `stateStore.providerClass`.
ROCKSDB_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HDFS_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"

_STREAMING: Final = "spark.sql.streaming."
_STORE: Final = f"{_STREAMING}stateStore."
_ROCKSDB: Final = f"{_STORE}rocksdb."
_REPAIR: Final = f"{_STORE}autoSnapshotRepair."

# Versions past the newest one to retain that have to be there before any is deleted, as a share of those retained.
_DELETED_MIN_RATIO: Final = 0.3

# Between two operands of a merge, by `merge_operator_version`.
_MERGE_DELIMITERS: Final = {1: b",", 2: b""}


class StateStoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one state store.

    The defaults are ours: checkpoint format 2 with changelogs. Spark's own are `SPARK_DEFAULTS`, and those for a
    checkpoint from before a setting was pinned `SPARK_OLD_CHECKPOINT`.
    """

    # 1: names are versions. 2: names carry unique ids, and changelogs their lineage (SPARK-49883).
    format_version: Literal[1, 2] = 2
    # Whether the state is of the HDFS-backed provider, as the query pins it; None: the names say it (0004, N1a).
    is_hdfs: bool | None = None
    # Whether a commit is a changelog, and a snapshot only now and then.
    changelogs: bool = True
    # The next snapshot is due this number of versions after the last one.
    deltas_per_snapshot: int = 10
    # Of changelogs.
    codec: Codec = "lz4"
    # Whether zips and changelogs get a `.crc`; Spark from 4.2 on, and we, write it for format 2 only.
    file_checksums: bool = True
    # Whether every row carries a checksum of its own.
    row_checksums: bool = False
    # One of this number of rows read is verified; 0 verifies none. Replay verifies all.
    row_check_ratio: int = 0
    # 1: operands of a merge are joined by a comma, as up to Spark 4.1. 2: by nothing.
    merge_operator_version: Literal[1, 2] = 2
    # Whether keys carry the number of a virtual column family.
    column_families: bool = False
    # How many versions stay loadable (design 0004, G1).
    versions_retained_min: int = 100
    # Nothing is deleted until this number can be; None: 30 % of `versions_retained_min`.
    versions_deleted_min: int | None = None
    # The most that are deleted at once; -1: any number.
    versions_deleted_max: int = -1
    # Whether the number of keys is kept, at the price of one read for every write.
    count_keys: bool = True
    # Whether an older snapshot may replace one that does not open (design 0004, R7).
    snapshot_repair: bool = True
    # How often the newest snapshot is tried before that.
    repair_after_failures: int = 1
    # How many versions the older snapshot may be behind.
    changes_replayed_max: int = 500
    # Whether every snapshot is compacted first.
    compact_on_commit: bool = False
    # Whether files that another executor may have deleted are uploaded again (design 0004, S4).
    check_stale_files: bool = True
    # Whether a snapshot is on its way as soon as it is made; else `maintain` sends it, as in Spark.
    background_uploads: bool = True
    # Requests of one load or one upload under way at once. Spark: one.
    fetches_max: int = 8
    # `merge_delimiter` in it is not looked at: it follows from `merge_operator_version`.
    rocksdb: RocksDbSettings = spark_settings()

    def __post_init__(self) -> None:
        """Refuse a number that is out of range, with a `UsageError`."""
        least = {
            "deltas_per_snapshot": 0,
            "row_check_ratio": 0,
            "versions_retained_min": 1,
            "versions_deleted_min": 0,
            "versions_deleted_max": -1,
            "repair_after_failures": 1,
            "changes_replayed_max": 0,
            "fetches_max": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"is less than {minimum}: {value}", operation="settings", subject=name)

    @property
    def merge_delimiter(self) -> bytes:
        """Return what is between two merged operands, as Spark writes it."""
        return _MERGE_DELIMITERS[self.merge_operator_version]

    @property
    def stale_versions_min(self) -> int:
        """Return how many versions have to be stale before any is deleted."""
        if self.versions_deleted_min is not None:
            return self.versions_deleted_min
        return _round(_DELETED_MIN_RATIO * self.versions_retained_min)

    @classmethod
    def from_conf(cls, conf: Mapping[str, str], base: Self | None = None) -> Self:
        """Read the settings from a Spark configuration; a value that cannot be read is a `UsageError`.

        Whether column families are in use is the operator's to know, and no key of Spark's says it.

        Args:
            conf: Full names, such as `spark.sql.streaming.stateStore.compression.codec`, and values as Spark prints
                them. Names that decide nothing here are passed over; those below `rocksdb.` may be of any case.
            base: What holds where `conf` says nothing; None: what Spark 4.3 does then (`SPARK_DEFAULTS`). Give
                `SPARK_OLD_CHECKPOINT`, with what is known from elsewhere, for the `conf` of an offset log.
        """
        start = cast("Self", SPARK_DEFAULTS) if base is None else base
        values = {_folded(name): value.strip() for name, value in conf.items()}
        changes = _read(values, _KEYS, cls)
        ratio = changes.pop("deleted_ratio", None)
        if ratio is not None:
            retained = changes.get("versions_retained_min", start.versions_retained_min)
            changes["versions_deleted_min"] = _round(ratio * retained)
        rocksdb = _read(values, _ROCKSDB_KEYS, RocksDbSettings)
        for field in _IN_MIB & rocksdb.keys():
            size_mib = rocksdb.pop(field)
            if size_mib > 0:  # -1 leaves the choice to us
                rocksdb[field] = size_mib * MIB
        return msgspec.structs.replace(start, rocksdb=msgspec.structs.replace(start.rocksdb, **rocksdb), **changes)


def _folded(name: str) -> str:
    """Spark takes the names below this prefix in any case."""
    return name.lower() if name.lower().startswith(_ROCKSDB.lower()) else name


def _read(values: Mapping[str, str], keys: Mapping[str, str], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Read the fields of a struct that are there, each from the text of its key, by its type."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct)} | {"deleted_ratio": float}
    texts = {field: values[_folded(name)] for field, name in keys.items() if _folded(name) in values}
    return {field: _parse(text, types[field], keys[field]) for field, text in texts.items()}


def _parse(text: str, kind: object, name: str) -> bool | int | float | str:
    """Read a value as Spark does: `true` or `false`, a whole number, a share, or one of the names of a `Literal`."""
    if choices := (True, False) if kind is bool else get_args(kind):
        by_text = {str(choice).lower(): choice for choice in choices}
        if text.lower() not in by_text:
            raise UsageError(f"{text!r} is not one of {', '.join(by_text)}", operation="settings", subject=name)
        return cast("bool | int | str", by_text[text.lower()])
    with contextlib.suppress(ValueError):
        if kind is not float:
            return int(text)
        if 0 <= (share := float(text)) <= 1:
            return share
    wanted = "a number from 0 to 1" if kind is float else "a whole number"
    raise UsageError(f"{text!r} is not {wanted}", operation="settings", subject=name)


PROVIDER_KEY: Final = f"{_STORE}providerClass"
ENCODING_KEY: Final = f"{_STORE}encodingFormat"
CODEC_KEY: Final = f"{_STORE}compression.codec"
# By field: the key of Spark's.
_KEYS: Final[dict[str, str]] = {
    "format_version": f"{_STORE}checkpointFormatVersion",
    "changelogs": f"{_ROCKSDB}changelogCheckpointing.enabled",
    "deltas_per_snapshot": f"{_STORE}minDeltasForSnapshot",
    "codec": CODEC_KEY,
    "file_checksums": f"{_STREAMING}checkpoint.fileChecksum.enabled",
    "row_checksums": f"{_STORE}rowChecksum.enabled",
    "row_check_ratio": f"{_STORE}rowChecksum.readVerificationRatio",
    "merge_operator_version": f"{_ROCKSDB}mergeOperatorVersion",
    "versions_retained_min": f"{_STREAMING}minBatchesToRetain",
    "deleted_ratio": f"{_STREAMING}ratioExtraSpaceAllowedInCheckpoint",
    "versions_deleted_max": f"{_STORE}maxVersionsToDeletePerMaintenance",
    "count_keys": f"{_ROCKSDB}trackTotalNumberOfRows",
    "snapshot_repair": f"{_REPAIR}enabled",
    "repair_after_failures": f"{_REPAIR}numFailuresBeforeActivating",
    "changes_replayed_max": f"{_REPAIR}maxChangeFileReplay",
    "compact_on_commit": f"{_ROCKSDB}compactOnCommit",
    "check_stale_files": f"{_ROCKSDB}checkStaleReusedFilesInSnapshot",
}
_ROCKSDB_KEYS: Final[dict[str, str]] = {
    "compression": f"{_ROCKSDB}compression",
    "write_buffer_bytes": f"{_ROCKSDB}writeBufferSizeMB",
    "block_cache_bytes": f"{_ROCKSDB}blockCacheSizeMB",
    "open_files_max": f"{_ROCKSDB}maxOpenFiles",
}
_IN_MIB: Final = frozenset({"write_buffer_bytes", "block_cache_bytes"})


def _round(number: float) -> int:
    """Round as Java's Math.round: a half goes up."""
    return math.floor(number + 0.5)


# What Spark 4.3 does when its configuration says nothing.
SPARK_DEFAULTS: Final = StateStoreSettings(format_version=1, changelogs=False)

# And with a checkpoint whose offset log does not say: it is older than the setting.
SPARK_OLD_CHECKPOINT: Final = msgspec.structs.replace(SPARK_DEFAULTS, merge_operator_version=1)
