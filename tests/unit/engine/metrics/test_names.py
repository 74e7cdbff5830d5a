"""The table of metrics: every name that Samza and Spark have, and what Prometheus asks of ours."""

import re
from itertools import chain

import pytest

from engine.metrics.names import _TABLE, METRICS, Samples, fields_shown, labels_of
from engine.state.commit import SaveMetrics
from engine.state.load import LoadMetrics

# Samza's BlobStoreBackupManagerMetrics, BlobStoreRestoreManagerMetrics and TaskInstanceMetrics; `<s>` is a store.
SAMZA_BACKUP = """init-ns files-to-upload bytes-to-upload files-uploaded bytes-uploaded files-remaining bytes-remaining
    files-to-retain bytes-to-retain upload-ns cleanup-ns avg-file-upload-ns avg-file-size-bytes upload-rate
    <s>-dir-diff-ns <s>-upload-ns <s>-files-to-upload <s>-files-to-retain <s>-files-to-remove
    <s>-sub-dirs-to-upload <s>-sub-dirs-to-retain <s>-sub-dirs-to-remove
    <s>-bytes-to-upload <s>-bytes-to-retain <s>-bytes-to-remove"""
SAMZA_RESTORE = """init-ns get-snapshot-index-ns restore-ns files-to-restore bytes-to-restore files-restored
    bytes-restored files-remaining bytes-remaining restore-rate avg-file-restore-ns <s>-pre-restore-ns <s>-restore-ns
    <s>-post-restore-ns"""
SAMZA_TASK = """commit-calls commits-timed-out commits-skipped commit-exceptions commit-ns commit-sync-ns
    commit-async-ns snapshot-ns store-checkpoint-ns async-upload-ns async-cleanup-ns last-commit-ns
    last-async-commit-timestamp"""
# Of Spark's RocksDB state store those of loads, saves and files; the others are RocksDB's own, of its JVM.
SPARK = """rocksdbFilesCopied rocksdbFilesReused rocksdbBytesCopied rocksdbZipFileBytesUncompressed
    rocksdbNumReplayChangelogFiles rocksdbNumSnapshotsAutoRepaired rocksdbLoadLatencyMs rocksdbReplayChangelogLatencyMs
    rocksdbCommitFileSyncLatencyMs rocksdbChangeLogWriterCommitLatencyMs rocksdbCommitFlushLatency
    rocksdbCommitCompactLatency rocksdbCommitCheckpointLatency rocksdbSaveZipFilesLatencyMs snapshotLastUploaded"""


@pytest.mark.parametrize("name", sorted({*SAMZA_BACKUP.split(), *SAMZA_RESTORE.split(), *SAMZA_TASK.split()}))
def test_every_metric_of_samza_has_one_of_ours_that_says_so(name: str) -> None:
    ours = [metric for metric in METRICS.values() if name in metric.samza]
    assert ours
    assert all(f"Samza: {', '.join(metric.samza)}" in metric.documentation for metric in ours)


@pytest.mark.parametrize("name", SPARK.split())
def test_every_metric_of_sparks_state_files_has_one_of_ours_that_says_so(name: str) -> None:
    ours = [metric for metric in METRICS.values() if name in metric.spark]
    assert ours
    assert all(f"Spark: {', '.join(metric.spark)}" in metric.documentation for metric in ours)


def test_no_name_of_others_is_made_up() -> None:
    samza = {*SAMZA_BACKUP.split(), *SAMZA_RESTORE.split(), *SAMZA_TASK.split()}
    assert set(chain.from_iterable(metric.samza for metric in METRICS.values())) == samza
    assert set(chain.from_iterable(metric.spark for metric in METRICS.values())) == set(SPARK.split())


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric: object) -> None:
    shown = METRICS[metric.name]  # type: ignore[attr-defined]
    assert re.fullmatch(r"tidemark_[a-z][a-z_]*[a-z]", shown.name)
    assert shown.name.endswith("_total") == (shown.kind == "counter")
    assert not re.search(r"_(ms|ns|millis|latency|kib|mib)(_|$)", shown.name)
    assert all(re.fullmatch(r"[a-z_]+", label) for label in shown.labels)
    assert "\n" not in shown.help
    assert shown.help[0].isupper() or shown.help[0].isdigit()
    # A unit is at the end of the name, before `_total`.
    for unit in ("seconds", "bytes"):
        if f"_{unit}" in shown.name:
            assert shown.name.removesuffix("_total").endswith((f"_{unit}", f"_{unit}_per_second")), shown.name


def test_no_name_is_there_twice() -> None:
    rows = [row for row in _TABLE.splitlines() if row and not row.startswith(("[", " "))]
    assert len(METRICS) == len(rows)


def test_every_number_of_a_load_and_a_save_has_a_metric() -> None:
    shown = {"of", "base", "was_loaded", "uploaded", "snapshot_made", "snapshot_inline", "files_renewed"}
    assert set(fields_shown("state_load")) == set(LoadMetrics.__struct_fields__) - shown
    assert set(fields_shown("state_save")) == set(SaveMetrics.__struct_fields__) - shown


def test_a_value_needs_a_metric_and_its_labels() -> None:
    samples = Samples(verb="backup", job_name="flights")
    samples.add("runs_total", 1, code="0")
    samples.add("runs_total", 2, code="0")
    (sample,) = samples
    assert (sample.value, labels_of(sample)) == (2.0, {"verb": "backup", "job_name": "flights", "code": "0"})
    with pytest.raises(KeyError):
        samples.add("runs", 1)
    with pytest.raises(KeyError, match="no label colour"):
        samples.add("runs_total", 1, colour="red")
