"""From Spark's configuration to settings."""

import msgspec
import pytest

from engine.errors import UsageError
from engine.settings import MIB
from engine.state.settings import SPARK_DEFAULTS, SPARK_OLD_CHECKPOINT, StateStoreSettings

STREAMING = "spark.sql.streaming"
STORE = "spark.sql.streaming.stateStore"


def test_a_configuration_that_says_nothing_is_spark_43() -> None:
    settings = StateStoreSettings.from_conf({})
    assert settings == SPARK_DEFAULTS
    assert (settings.format_version, settings.changelogs, settings.codec) == (1, False, "lz4")
    assert (settings.merge_operator_version, settings.merge_delimiter) == (2, b"")
    assert (settings.versions_retained_min, settings.stale_versions_min, settings.versions_deleted_max) == (100, 30, -1)
    assert (settings.repair_after_failures, settings.changes_replayed_max) == (1, 500)


def test_every_key_of_sparks_is_read() -> None:
    settings = StateStoreSettings.from_conf(
        {
            f"{STREAMING}.minBatchesToRetain": "10",
            f"{STREAMING}.ratioExtraSpaceAllowedInCheckpoint": "0.25",
            f"{STREAMING}.checkpoint.fileChecksum.enabled": "false",
            f"{STORE}.checkpointFormatVersion": "2",
            f"{STORE}.minDeltasForSnapshot": "0",
            f"{STORE}.compression.codec": "zstd",
            f"{STORE}.maxVersionsToDeletePerMaintenance": "7",
            f"{STORE}.rowChecksum.enabled": "TRUE",
            f"{STORE}.rowChecksum.readVerificationRatio": "3",
            f"{STORE}.autoSnapshotRepair.enabled": "false",
            f"{STORE}.autoSnapshotRepair.numFailuresBeforeActivating": "2",
            f"{STORE}.autoSnapshotRepair.maxChangeFileReplay": "9",
            f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
            f"{STORE}.rocksdb.COMPACTONCOMMIT": "true",
            f"{STORE}.rocksdb.trackTotalNumberOfRows": "false",
            f"{STORE}.rocksdb.mergeOperatorVersion": "1",
            f"{STORE}.rocksdb.checkStaleReusedFilesInSnapshot": "false",
            f"{STORE}.rocksdb.compression": "snappy",
            f"{STORE}.rocksdb.writeBufferSizeMB": "8",
            f"{STORE}.rocksdb.blockCacheSizeMB": "-1",
            f"{STORE}.rocksdb.maxOpenFiles": "-1",
            "spark.sql.shuffle.partitions": "2",
        }
    )
    rocksdb = SPARK_DEFAULTS.rocksdb
    assert settings == StateStoreSettings(
        format_version=2,
        changelogs=True,
        deltas_per_snapshot=0,
        codec="zstd",
        file_checksums=False,
        row_checksums=True,
        row_check_ratio=3,
        merge_operator_version=1,
        versions_retained_min=10,
        versions_deleted_min=3,
        versions_deleted_max=7,
        count_keys=False,
        snapshot_repair=False,
        repair_after_failures=2,
        changes_replayed_max=9,
        compact_on_commit=True,
        check_stale_files=False,
        rocksdb=msgspec.structs.replace(rocksdb, compression="snappy", write_buffer_bytes=8 * MIB, open_files_max=-1),
    )
    assert settings.merge_delimiter == b","


def test_a_checkpoint_from_before_a_setting_was_pinned_has_what_held_then() -> None:
    pinned = {f"{STORE}.compression.codec": "lz4"}
    assert StateStoreSettings.from_conf(pinned, SPARK_OLD_CHECKPOINT).merge_operator_version == 1
    newer = {**pinned, f"{STORE}.rocksdb.mergeOperatorVersion": "2"}
    assert StateStoreSettings.from_conf(newer, SPARK_OLD_CHECKPOINT).merge_operator_version == 2


def test_what_is_known_from_elsewhere_stands_where_the_configuration_is_silent() -> None:
    known = StateStoreSettings(format_version=2, column_families=True, fetches_max=3)
    assert StateStoreSettings.from_conf({}, known) == known


@pytest.mark.parametrize(
    "key, value",
    [
        (f"{STORE}.checkpointFormatVersion", "3"),
        (f"{STORE}.checkpointFormatVersion", "two"),
        (f"{STORE}.compression.codec", "gzip"),
        (f"{STORE}.rowChecksum.enabled", "yes"),
        (f"{STREAMING}.minBatchesToRetain", "many"),
        (f"{STREAMING}.ratioExtraSpaceAllowedInCheckpoint", "1.5"),
        (f"{STREAMING}.ratioExtraSpaceAllowedInCheckpoint", "x"),
        (f"{STORE}.rocksdb.maxOpenFiles", "true"),
    ],
)
def test_a_value_that_cannot_be_read_is_reported_by_its_key(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=key) as failure:
        StateStoreSettings.from_conf({key: value})
    assert value in str(failure.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"deltas_per_snapshot": -1},
        {"versions_retained_min": 0},
        {"versions_deleted_min": -1},
        {"versions_deleted_max": -2},
        {"row_check_ratio": -1},
        {"repair_after_failures": 0},
        {"fetches_max": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    (name,) = changes
    with pytest.raises(UsageError, match=name):
        StateStoreSettings(**changes)  # type: ignore[arg-type]


def test_settings_can_be_stored() -> None:
    settings = StateStoreSettings(codec="lzf", versions_deleted_min=4)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=StateStoreSettings) == settings


@pytest.mark.parametrize("retained, stale", [(100, 30), (10, 3), (5, 2), (1, 0)])
def test_the_space_that_deletions_leave_is_rounded_as_java_does(retained: int, stale: int) -> None:
    assert StateStoreSettings(versions_retained_min=retained).stale_versions_min == stale
