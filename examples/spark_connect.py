"""A streaming query over Spark Connect that loses its checkpoint: looked at, backed up, restored, and gone on with.

The client has no JVM and no executors: a server has them, and everything that grows with the state runs there. A query
counts words, a batch at a time. Its state is read as a DataFrame, its checkpoint is backed up, and the
checkpoint is lost. It is restored, checked and gone on with, what it has come to is compared with plain SQL, and what
nobody needs any more is collected.

Run it with `python examples/spark_connect.py [sc://HOST | local[2]] [DIRECTORY]`; without a server it starts one in
this process. The server's Python has to have tidemark, and the directory has to be one that client and server both see.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from tidemark import BackupChoice, RestoreChoice, Retention, SyncRepository
from tidemark.spark import backup_checkpoint, check_checkpoint, collect, register_sources, restore_checkpoint

BATCHES: Final = 2
WORDS: Final = 50

STORE: Final = "spark.sql.streaming.stateStore."
CONF: Final = {
    f"{STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{STORE}rocksdb.changelogCheckpointing.enabled": "true",
    f"{STORE}checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "2",
}


def main() -> int:
    """Run the scenario; 0 if its end is the expected one."""
    server = sys.argv[1] if len(sys.argv) > 1 else "local[2]"
    root = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="tidemark-")).absolute()  # noqa: PLR2004
    spark = SparkSession.builder.remote(server).getOrCreate()
    try:
        return 0 if run(spark, root) else 1
    finally:
        spark.stop()


def run(spark: SparkSession, root: Path) -> bool:
    """Run the scenario, below a directory, and return whether the query came to what it should."""
    for key, value in CONF.items():
        spark.conf.set(key, value)
    register_sources(spark)
    repository = f"file://{root / 'repository'}"
    SyncRepository.init(repository).close()
    lost, restored = root / "checkpoint", root / "restored"

    for batch in range(BATCHES):
        arrive(spark, batch, root)
        run_query(spark, root, checkpoint=lost)
        backup = backup_checkpoint(spark, repository, lost, BackupChoice(job="words"))
        state = backup.state
        print(f"batch {backup.backup.batch}: {state.files} files of {state.stores} stores, {state.files_added} new")
    changed = spark.read.format("tidemark_state_diff").options(from_batch=0, to_batch=BATCHES - 1).load(str(lost))
    print("changed since batch 0:", {row.change: row[1] for row in changed.groupBy("change").count().collect()})

    shutil.rmtree(lost)
    back = restore_checkpoint(spark, repository, restored, RestoreChoice(job="words", replayed=True))
    report = check_checkpoint(spark, restored)
    print(f"restored after batch {back.batch}: {back.files} files, {len(report.findings)} findings")
    arrive(spark, BATCHES, root)
    run_query(spark, root, checkpoint=restored)

    kept = collect(spark, repository, Retention(keep_last=1), delete_share_max=1)
    print(f"collected {kept.deletes_count} keys")
    return is_equal(counted_by_state(spark, restored), counted_by_sql(spark, root))


def arrive(spark: SparkSession, batch: int, root: Path) -> None:
    """One file becomes one batch."""
    rows = spark.range(batch * WORDS, (batch + 3) * WORDS).selectExpr("concat('word-', id) AS word")
    rows.coalesce(1).write.mode("append").parquet(str(root / "words"))


def run_query(spark: SparkSession, root: Path, *, checkpoint: Path) -> None:
    """Count what has arrived and is new."""
    words = spark.readStream.schema("word string").parquet(str(root / "words"))
    writer = words.groupBy("word").count().writeStream.outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()


def counted_by_state(spark: SparkSession, checkpoint: Path) -> DataFrame:
    """Return the words and their counts, out of the state itself."""
    state = spark.read.format("tidemark_state").load(str(checkpoint))
    return state.selectExpr("key.word", "value.count")


def counted_by_sql(spark: SparkSession, root: Path) -> DataFrame:
    """Return the same, out of everything that has arrived."""
    return spark.read.parquet(str(root / "words")).groupBy("word").count()


def is_equal(found: DataFrame, expected: DataFrame) -> bool:
    """Whether two DataFrames have the same rows."""
    rows, others = (sorted(map(tuple, frame.collect())) for frame in (found, expected))
    print(f"{len(rows)} words.", "Equal." if rows == others else "NOT EQUAL.")
    return rows == others


if __name__ == "__main__":
    sys.exit(main())
