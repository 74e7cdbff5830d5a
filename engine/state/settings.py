"""How a state store reads and writes: those settings of Spark's that decide about stored bytes or what they cost."""

import math
from collections.abc import Mapping
from typing import Final, Literal, Self, TypeVar, cast, get_args

import msgspec

from engine.errors import UsageError
from engine.rocksdb.store import MIB, RocksDbSettings, spark_settings

# What the setting `stateStore.providerClass` names.
ROCKSDB_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HDFS_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"

# Spark's names of codecs; what they mean is the business of `engine.state.compression`.
CodecName = Literal["lz4", "zstd", "snappy", "lzf"]
_Compression = Literal["none", "lz4", "snappy", "zstd"]

_STREAMING: Final = "spark.sql.streaming."
_STORE: Final = f"{_STREAMING}stateStore."
_ROCKSDB: Final = f"{_STORE}rocksdb."
_REPAIR: Final = f"{_STORE}autoSnapshotRepair."

# Versions past the newest one to retain that have to be there before any is deleted, as a share of those retained.
_DELETED_MIN_RATIO: Final = 0.3

# What stands between two operands of a merge, by `merge_operator_version`.
_MERGE_DELIMITERS: Final = {1: b",", 2: b""}

T = TypeVar("T")


class StateStoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one state store.

    The defaults are ours: checkpoint format 2 with changelogs. What Spark does without a word of configuration is
    `SPARK_DEFAULTS`, and what it does with a checkpoint from before a setting was pinned is `SPARK_OLD_CHECKPOINT`.
    """

    # 1: names are versions. 2: names carry unique ids, and changelogs their lineage (SPARK-49883).
    format_version: Literal[1, 2] = 2
    # Whether a commit is a changelog, and a snapshot only now and then.
    changelogs: bool = True
    # So many versions after the last snapshot, the next one is due.
    deltas_per_snapshot: int = 10
    # Of changelogs.
    codec: CodecName = "lz4"
    # Whether zips and changelogs get a `.crc`; Spark from 4.2 on, and we, write it for format 2 only.
    file_checksums: bool = True
    # Whether every row carries a checksum of its own.
    row_checksums: bool = False
    # Of so many rows read, one is verified; 0 verifies none. Replay verifies all.
    row_check_ratio: int = 0
    # 1: operands of a merge are joined by a comma, as up to Spark 4.1. 2: by nothing.
    merge_operator_version: Literal[1, 2] = 2
    # Whether keys carry the number of a virtual column family.
    column_families: bool = False
    # How many versions stay loadable (design 0004, G1).
    versions_retained_min: int = 100
    # Nothing is deleted until so many can be; None: 30 % of `versions_retained_min`.
    versions_deleted_min: int | None = None
    # At most so many are deleted at once; -1: any number.
    versions_deleted_max: int = -1
    # Whether the number of keys is kept, at the price of one read for every write.
    count_keys: bool = True
    # Whether an older snapshot may stand in for one that does not open (design 0004, R7).
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
        """Refuse numbers that make no sense.

        Raises:
            UsageError: A number is out of range.
        """
        least = {
            "deltas_per_snapshot": 0,
            "row_check_ratio": 0,
            "versions_retained_min": 1,
            "versions_deleted_max": -1,
            "repair_after_failures": 1,
            "changes_replayed_max": 0,
            "fetches_max": 1,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"is less than {minimum}: {getattr(self, name)}", operation="settings", subject=name)
        if self.versions_deleted_min is not None and self.versions_deleted_min < 0:
            reason = f"is negative: {self.versions_deleted_min}"
            raise UsageError(reason, operation="settings", subject="versions_deleted_min")

    @property
    def merge_delimiter(self) -> bytes:
        """What stands between two operands of a merge."""
        return _MERGE_DELIMITERS[self.merge_operator_version]

    @property
    def stale_versions_min(self) -> int:
        """`versions_deleted_min`, or what it is by default."""
        if self.versions_deleted_min is not None:
            return self.versions_deleted_min
        return _round(_DELETED_MIN_RATIO * self.versions_retained_min)

    @classmethod
    def from_conf(cls, conf: Mapping[str, str], base: Self | None = None) -> Self:
        """The settings that a Spark configuration stands for.

        Whether column families are in use is the operator's to know, and no key of Spark's says it.

        Args:
            conf: Full names, such as `spark.sql.streaming.stateStore.compression.codec`, and values as Spark prints
                them. Names that decide nothing here are passed over; those below `rocksdb.` may be of any case.
            base: What holds where `conf` says nothing; None: what Spark 4.3 does then (`SPARK_DEFAULTS`). Give
                `SPARK_OLD_CHECKPOINT`, with what is known from elsewhere, for the `conf` of an offset log.

        Raises:
            UsageError: A value cannot be read; the error names its key.
        """
        start = cast("Self", SPARK_DEFAULTS) if base is None else base
        said = _Conf(conf)
        rocksdb = msgspec.structs.replace(
            start.rocksdb,
            compression=said.choice(f"{_ROCKSDB}compression", get_args(_Compression), start.rocksdb.compression),
            write_buffer_bytes=said.mib(f"{_ROCKSDB}writeBufferSizeMB", start.rocksdb.write_buffer_bytes),
            block_cache_bytes=said.mib(f"{_ROCKSDB}blockCacheSizeMB", start.rocksdb.block_cache_bytes),
            open_files_max=said.number(f"{_ROCKSDB}maxOpenFiles", start.rocksdb.open_files_max),
        )
        retained = said.number(f"{_STREAMING}minBatchesToRetain", start.versions_retained_min)
        deleted_min = start.versions_deleted_min
        ratio = said.ratio(f"{_STREAMING}ratioExtraSpaceAllowedInCheckpoint")
        if ratio is not None:
            deleted_min = _round(ratio * retained)
        return msgspec.structs.replace(
            start,
            format_version=said.version(f"{_STORE}checkpointFormatVersion", start.format_version),
            changelogs=said.flag(f"{_ROCKSDB}changelogCheckpointing.enabled", start.changelogs),
            deltas_per_snapshot=said.number(f"{_STORE}minDeltasForSnapshot", start.deltas_per_snapshot),
            codec=said.choice(f"{_STORE}compression.codec", get_args(CodecName), start.codec),
            file_checksums=said.flag(f"{_STREAMING}checkpoint.fileChecksum.enabled", start.file_checksums),
            row_checksums=said.flag(f"{_STORE}rowChecksum.enabled", start.row_checksums),
            row_check_ratio=said.number(f"{_STORE}rowChecksum.readVerificationRatio", start.row_check_ratio),
            merge_operator_version=said.version(f"{_ROCKSDB}mergeOperatorVersion", start.merge_operator_version),
            versions_retained_min=retained,
            versions_deleted_min=deleted_min,
            versions_deleted_max=said.number(f"{_STORE}maxVersionsToDeletePerMaintenance", start.versions_deleted_max),
            count_keys=said.flag(f"{_ROCKSDB}trackTotalNumberOfRows", start.count_keys),
            snapshot_repair=said.flag(f"{_REPAIR}enabled", start.snapshot_repair),
            repair_after_failures=said.number(f"{_REPAIR}numFailuresBeforeActivating", start.repair_after_failures),
            changes_replayed_max=said.number(f"{_REPAIR}maxChangeFileReplay", start.changes_replayed_max),
            compact_on_commit=said.flag(f"{_ROCKSDB}compactOnCommit", start.compact_on_commit),
            check_stale_files=said.flag(f"{_ROCKSDB}checkStaleReusedFilesInSnapshot", start.check_stale_files),
            rocksdb=rocksdb,
        )


class _Conf:
    """Values of a Spark configuration, by full name."""

    def __init__(self, conf: Mapping[str, str]) -> None:
        # Spark takes the names below this prefix in any case.
        self._values = {self._folded(name): value.strip() for name, value in conf.items()}

    @staticmethod
    def _folded(name: str) -> str:
        return name.lower() if name.lower().startswith(_ROCKSDB.lower()) else name

    def _text(self, name: str) -> str | None:
        return self._values.get(self._folded(name))

    def flag(self, name: str, otherwise: bool) -> bool:  # noqa: FBT001  (a value, as of the methods beside it)
        """A truth value."""
        text = self._text(name)
        if text is None:
            return otherwise
        if text.lower() not in {"true", "false"}:
            raise _unreadable(name, text, "true or false")
        return text.lower() == "true"

    def number(self, name: str, otherwise: int) -> int:
        """A whole number."""
        text = self._text(name)
        if text is None:
            return otherwise
        try:
            return int(text)
        except ValueError:
            raise _unreadable(name, text, "a whole number") from None

    def ratio(self, name: str) -> float | None:
        """A number that need not be whole."""
        text = self._text(name)
        if text is None:
            return None
        try:
            found = float(text)
        except ValueError:
            raise _unreadable(name, text, "a number") from None
        if not 0 <= found <= 1:
            raise _unreadable(name, text, "a number from 0 to 1")
        return found

    def mib(self, name: str, otherwise: int) -> int:
        """A size in MiB, given back in bytes; -1 leaves the choice to us."""
        found = self.number(name, -1)
        return found * MIB if found > 0 else otherwise

    def choice(self, name: str, names: tuple[T, ...], otherwise: T) -> T:
        """One of a few names."""
        text = self._text(name)
        if text is None:
            return otherwise
        found = next((known for known in names if known == text.lower()), None)
        if found is None:
            raise _unreadable(name, text, "one of " + ", ".join(map(str, names)))
        return found

    def version(self, name: str, otherwise: Literal[1, 2]) -> Literal[1, 2]:
        """A version that is 1 or 2."""
        versions: tuple[Literal[1, 2], ...] = (1, 2)
        found = next((version for version in versions if version == self.number(name, otherwise)), None)
        if found is None:
            raise _unreadable(name, self._text(name) or "", "1 or 2")
        return found


def _unreadable(name: str, text: str, wanted: str) -> UsageError:
    return UsageError(f"{text!r} is not {wanted}", operation="settings", subject=name)


def _round(number: float) -> int:
    """As Java's Math.round: a half goes up."""
    return math.floor(number + 0.5)


# What Spark 4.3 does when its configuration says nothing.
SPARK_DEFAULTS: Final = StateStoreSettings(format_version=1, changelogs=False)

# And with a checkpoint whose offset log does not say: it is older than the setting.
SPARK_OLD_CHECKPOINT: Final = msgspec.structs.replace(SPARK_DEFAULTS, merge_operator_version=1)
