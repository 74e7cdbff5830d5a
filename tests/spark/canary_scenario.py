"""A session on S3 that goes well, and several that fail; everything that they say or send is written down.

Run as a process of its own, so that the driver, its JVM and the workers have the credentials in their environment from
the start: `python -m tests.spark.canary_scenario <settings>`, a JSON file with what `Settings` has.
"""

import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from pyspark import cloudpickle
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.retry import RetrySettings
from engine.blocking import LoopThread
from engine.collect.backend import CollectOptions
from engine.repository.repository import Repository, SyncRepository
from engine.rocksdb.store import RocksDbSettings
from engine.settings import TransferSettings
from engine.spark import JobOptions, SparkOptions, StatefulJob, backup_results, backup_stores, collect, restore_stores
from engine.spark.access import Access, open_on_driver
from engine.spark.collection.backend import SparkBackend
from engine.spark.collection.tasks import DeleteTask, ExcludeTask, ListTask, MarkTask, SweepTask
from engine.spark.spread import BackupStores, RestoreStores, StoreWork, spread
from engine.spark.store_task import RESULT_DDL, TASK_COLUMN, JobRun, UpdateTask
from index.plan.collect import NOTHING_PROTECTED
from index.plan.commits import Commit, Retention
from index.snapshot.keys import RunId
from index.snapshot.model import Scope
from tests.spark.counting import SUMS_DDL, add, read_sums
from tests.spark.short_lived import SHORT_LIVED

SCOPE = Scope("stores")
PACKAGES = ("index", "blobstore", "engine")
# Spark's own profile for sessions of Python says little, whatever level is asked for.
LOG4J = """
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
logger.python.name = org.apache.spark.api.python
logger.python.level = debug
logger.scheduler.name = org.apache.spark.scheduler
logger.scheduler.level = debug
logger.deploy.name = org.apache.spark.deploy
logger.deploy.level = debug
"""


class Settings(msgspec.Struct, kw_only=True):
    """What the scenario is given."""

    # Where everything goes that was said or sent.
    out: str
    disk: str
    # A server that believes any credentials, and a bucket on it.
    endpoint_url: str
    bucket: str
    # By name: URL and endpoint of a repository that cannot be used.
    failing: dict[str, tuple[str, str]]
    # Those of which workers raise errors too. Each costs a worker, and a new one takes its time.
    raising: tuple[str, ...]


class Notebook:
    """Writes down, one file for each thing that is said."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def write(self, name: str, data: bytes | str) -> None:
        self._count += 1
        path = self._directory / f"{self._count:03} {name}"
        path.write_bytes(data if isinstance(data, bytes) else data.encode(errors="surrogateescape"))

    def error(self, name: str, error: BaseException) -> None:
        """An error with all that leads to it, in every form that it may be passed on in."""
        parts = ["".join(traceback.format_exception(error))]
        chain: list[BaseException | None] = [error]
        seen: set[int] = set()
        while chain:
            one = chain.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            chain += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
            parts += [str(one), repr(one), repr(one.args), repr(vars(one)), repr(getattr(one, "__notes__", ()))]
            try:
                parts.append(repr(pickle.dumps(one)))
                parts.append(repr(cloudpickle.dumps(one)))
            except (TypeError, pickle.PicklingError) as unpicklable:
                parts.append(repr(unpicklable))
        self.write(f"{name} {type(error).__name__}", "\n".join(parts))

    def failing(self, name: str, call: Callable[[], object]) -> None:
        """Write down how a call fails.

        Raises:
            AssertionError: It does not fail.
        """
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test is about
            self.error(name, error)
        else:
            raise AssertionError(f"{name} went well: {result!r}")


def settings_of(endpoint_url: str) -> StoreSettings:
    retry = RetrySettings(attempts_max=2, first_wait_s=0.01, deadline_s=10)
    return StoreSettings(s3=S3Settings(endpoint_url=endpoint_url, path_style=True), retry=retry)


def start_spark(out: Path) -> SparkSession:
    events, log4j = out / "events", out / "log4j2.properties"
    events.mkdir()
    log4j.write_text(LOG4J)
    return (
        SparkSession.builder.master("local[2]")
        .appName("canary")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", events.as_uri())
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={log4j.as_uri()} {SHORT_LIVED}")
        .getOrCreate()
    )


def record_closures(notebook: Notebook) -> None:
    """Write down everything that is pickled for workers."""
    dumps = CloudPickleSerializer.dumps

    def recorded(self: CloudPickleSerializer, command: object) -> bytes:
        data: bytes = dumps(self, command)  # type: ignore[no-untyped-call]
        notebook.write("closure", data)
        return data

    CloudPickleSerializer.dumps = recorded  # type: ignore[method-assign]


def fill(root: Path) -> list[tuple[str, str, Path]]:
    stores = []
    for number in range(2):
        directory = root / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").write_bytes(os.urandom(50_000))
        stores.append((str(number), "state", directory))
    return stores


def run_good_scenario(spark: SparkSession, given: Settings, notebook: Notebook) -> tuple[Access, Commit]:
    """A job, a fleet and a collection; what is needed to ask for the same elsewhere."""
    url, settings = f"s3://{given.bucket}/state", settings_of(given.endpoint_url)
    disk = Path(given.disk)
    SyncRepository.init(open_store(url, settings)).close()
    months = [spark.range(n, n + 20).selectExpr("concat('k', id % 7) AS key", "id AS amount") for n in (0, 10)]
    with StatefulJob(
        url,
        job="sums",
        key_columns=["key"],
        tasks=2,
        update=add,
        local_root=disk / "job",
        options=JobOptions(store_settings=settings),
    ) as job:
        for month in months:
            job.run(month)
        frame = job.read(spark, read_sums, SUMS_DDL)
        assert frame.count() == 7
        note_plan(notebook, "plan of a read", frame)
        note_plan(notebook, "plan of a restore", job.restore_stores(spark))
    outcomes = backup_stores(spark, url, SCOPE, fill(disk / "stores"), options=SparkOptions(store=settings))
    with SyncRepository.open(open_store(url, settings)) as repository:
        commit = repository.commit(SCOPE, backup_results(outcomes))
        notebook.write("repository", repr(repository) + repr(vars(repository)) + repr(vars(repository.asynchronous)))
    restored = restore_stores(spark, url, SCOPE, disk / "restored", options=SparkOptions(store=settings))
    assert restored.where("NOT ok").count() == 0
    note_plan(notebook, "plan of outcomes", restored)
    report = collect(spark, url, Retention(keep_last=1), delete_share_max=1, options=SparkOptions(store=settings))
    assert report.deletes
    notebook.write("report", repr(report))
    with SyncRepository.open(open_store(url, settings)) as repository:
        access = Access(url=url, record=repository.record, store=settings, transfer=TransferSettings())
    return access, commit


def note_plan(notebook: Notebook, name: str, frame: Any) -> None:
    said = StringIO()
    with redirect_stdout(said):
        for mode in ("extended", "formatted", "codegen", "cost"):
            frame.explain(mode=mode)
    notebook.write(name, said.getvalue())


def fail(
    spark: SparkSession, notebook: Notebook, name: str, *, access: Access, commit: Commit, disk: Path, raises: bool
) -> None:
    """What a driver and workers can want of a repository that cannot be used."""
    notebook.failing(f"{name}: the driver opens", lambda: open_on_driver(access.url, SparkOptions(store=access.store)))
    notebook.failing(f"{name}: the driver writes", lambda: write(access, commit))
    backup = BackupStores(access=access, scope=SCOPE, version=9)
    restore = RestoreStores(access=access, scope=SCOPE, replace=False)
    work = [
        StoreWork(task=r.task, store=r.store, path=str(disk / "stores" / r.task), reference=r)
        for r in commit.record.stores
    ]
    elsewhere = [msgspec.structs.replace(item, path=f"{item.path} {name}") for item in work]
    for task, items in ((backup, work), (restore, elsewhere)):
        rows = spread(spark, task, items, 1).toArrow().to_pylist()
        assert [row["ok"] for row in rows] == [False, False], rows
        notebook.write(f"{name}: rows", repr(rows))
    notebook.write(f"{name}: access", repr(access) + repr(vars_of(access)))
    if not raises:
        return
    backend = SparkBackend(spark, access, MemoryStore(), CollectOptions(dry_run=True), partitions_max=1, cores=1)
    notebook.failing(f"{name}: workers list", backend._list)
    run = JobRun(
        access=access,
        scope=SCOPE,
        store="state",
        local_root=str(disk / name),
        id="0" * 20,
        bases={},
        rocksdb=RocksDbSettings(),
    )
    frame = spark.range(4).selectExpr("'k' AS key", "id AS amount", f"0 AS {TASK_COLUMN}").coalesce(1)
    update = UpdateTask(run=run, version=1, update=add)
    notebook.failing(f"{name}: workers back up", frame.mapInArrow(update, RESULT_DDL).toArrow)
    named = RunId(f"{1:020d}-{1:020x}")
    collecting = (
        ListTask(access=access, run=named, listed=frozenset()),
        MarkTask(access=access),
        SweepTask(access=access, run=named, now_ms=0, protected=NOTHING_PROTECTED, digests=(), carried_out={}),
        ExcludeTask(access=access, run=named),
        DeleteTask(access=access, run=named),
    )
    for one in (backup, restore, update, *collecting):
        notebook.write(f"{name}: {type(one).__name__}", cloudpickle.dumps(one))
        notebook.write(f"{name}: {type(one).__name__}", repr(one))


def write(access: Access, commit: Commit) -> None:
    loop = LoopThread()
    repository = SyncRepository(loop, Repository(open_store(access.url, access.store), access.record))
    with repository:
        repository.name(commit, "kept")


def vars_of(value: Any) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def main() -> None:
    """Run all scenarios."""
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)
    out = Path(given.out)
    logging.basicConfig(filename=out / "python.log")
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.DEBUG)
    notebook = Notebook(out)
    spark = start_spark(out)
    record_closures(notebook)
    access, commit = run_good_scenario(spark, given, notebook)
    for name, (url, endpoint_url) in given.failing.items():
        changed = msgspec.structs.replace(access, url=url, store=settings_of(endpoint_url))
        raises = name in given.raising
        fail(spark, notebook, name, access=changed, commit=commit, disk=Path(given.disk), raises=raises)
    for name in ("botocore", "aiobotocore", "aiohttp", "urllib3"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO), name
    spark.stop()
    sys.stdout.write("shown\n")


if __name__ == "__main__":
    main()
