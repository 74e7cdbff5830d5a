"""A query with asynchronous progress tracking logs only some batches, which does no damage (design 0005, K2)."""

import asyncio
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.repository.repository import SyncRepository
from index.spark.query_logs import decode_offsets

pytestmark = pytest.mark.spark

DEADLINE_S = 120.0


def start(spark: SparkSession, checkpoint: Path) -> StreamingQuery:
    """Start a query that writes its logs every two seconds at most; Spark allows that for few sinks."""
    stream = spark.readStream.format("rate").option("rowsPerSecond", 20).load().writeStream.format("noop")
    stream = stream.option("asyncProgressTrackingEnabled", "true")
    stream = stream.option("asyncProgressTrackingCheckpointIntervalMs", "2000")
    return stream.option("checkpointLocation", str(checkpoint)).trigger(processingTime="50 milliseconds").start()


def batches_of(log: Path) -> list[int]:
    return sorted(int(path.name) for path in log.glob("[0-9]*"))


def skipped(checkpoint: Path) -> list[int]:
    """The batches of which neither file is there, before the newest that is committed."""
    commits = batches_of(checkpoint / "commits")
    logged = {*commits, *batches_of(checkpoint / "offsets")}
    return [batch for batch in range(commits[0], commits[-1]) if batch not in logged] if commits else []


def test_batches_that_spark_did_not_log_are_no_damage(spark: SparkSession, url: str, tmp_path: Path) -> None:
    checkpoint, restored = tmp_path / "query", tmp_path / "restored"
    query = start(spark, checkpoint)
    ends_at_s = time.monotonic() + DEADLINE_S
    while not skipped(checkpoint):
        assert query.isActive, query.exception()
        assert time.monotonic() < ends_at_s, batches_of(checkpoint / "commits")
        time.sleep(0.2)
    query.stop()
    logged = batches_of(checkpoint / "commits")
    (warning,) = asyncio.run(check_checkpoint(checkpoint)).findings
    assert (warning.kind, warning.path) == ("warning", f"commits/{skipped(checkpoint)[0]}")
    assert "asyncProgressTrackingEnabled" in warning.hint
    with SyncRepository.open(url) as repository:
        done = repository.loop.run(backup_checkpoint(repository.asynchronous, checkpoint, BackupChoice(job="query")))
        assert (done.backup.batch, done.backup.damaged, done.findings) == (logged[-1], 0, (warning,))
        repository.loop.run(restore_checkpoint(repository.asynchronous, restored, RestoreChoice(job="query")))
    assert batches_of(restored / "commits") == [logged[-1]]
    assert asyncio.run(check_checkpoint(restored)).findings == ()
    name = f"offsets/{logged[-1]}"
    reached = decode_offsets((restored / name).read_bytes(), subject=name).offsets[0].offset
    query = start(spark, restored)
    while not query.recentProgress:
        assert query.isActive, query.exception()
        assert time.monotonic() < ends_at_s
        time.sleep(0.2)
    progress = query.recentProgress[0]
    query.stop()
    assert (progress.batchId, str(progress.sources[0].startOffset)) == (logged[-1] + 1, reached)
