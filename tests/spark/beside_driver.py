"""A query with a job beside it, in a process that a test kills: on its own, at a moment that the test has chosen.

`python -m tests.spark.beside_driver <settings>`, a JSON file with what `Settings` has. When the moment has come, a file
`hung` appears in the root, and the process waits for its end; without one, it ends when the input is read.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from engine.checkpoint.targets import DirectoryTarget
from engine.cli.app import main as run_command
from engine.rocksdb.store import StoreWriter
from engine.spark.stateful_job import StatefulJob
from tests.spark.counting import add
from tests.spark.short_lived import SHORT_LIVED

# Of the job beside the query, and of the query's backups.
JOB: Final = "beside"
QUERY_JOB: Final = "query"
DDL: Final = "id bigint, key string, amount bigint"
KEYS: Final = 7
CONF: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}

# In a batch: before the job runs, in one of its tasks, after its commit; and in a restore, after the job was rewound.
Moment = Literal["", "before", "within", "between", "publish"]


class Settings(msgspec.Struct, kw_only=True):
    """What the process is given."""

    root: str
    repository: str
    moment: Moment = ""
    batch: int = 0
    # Of `spark restore`.
    target: str = ""

    @property
    def checkpoint(self) -> Path:
        return Path(self.root, "query")


def feed(root: Path, files: int) -> None:
    """Add files of one batch each to the input; each repeats a row of the one before it, which the query drops."""
    directory = root / "in"
    directory.mkdir(parents=True, exist_ok=True)
    first = len(list(directory.iterdir()))
    for number in range(first, first + files):
        ids = range(max(0, number * 10 - 1), number * 10 + 10)
        lines = (f'{{"id": {id_}, "key": "key {id_ % KEYS}", "amount": {id_ % 13}}}\n' for id_ in ids)
        part = root / "part"
        part.write_text("".join(lines))
        os.utime(part, (1_700_000_000 + number, 1_700_000_000 + number))
        part.rename(directory / f"{number:04}.json")


@contextmanager
def opened_job(settings: Settings) -> Iterator[StatefulJob]:
    """Open the job. In the batch that is to hang, its task does, once its store has the rows."""
    root = Path(settings.root)

    def update(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
        add(store, batches, task)
        if (root / "within").exists():
            _hang(root)

    with StatefulJob(
        settings.repository, job=JOB, key_columns=["key"], tasks=2, update=update, local_root=root / "disk"
    ) as job:
        yield job


def run_query(spark: SparkSession, job: StatefulJob, settings: Settings, checkpoint: Path | None = None) -> None:
    """Run the query until its input is read, or until the moment has come."""
    root, checkpoint = Path(settings.root), checkpoint or settings.checkpoint
    apply = job.for_each_batch(checkpoint)

    def function(rows: DataFrame, batch_id: int) -> None:
        moment = settings.moment if batch_id == settings.batch else ""
        if moment == "before":
            _hang(root)
        if moment == "within":
            (root / "within").touch()
        apply(rows, batch_id)
        if moment == "between":
            _hang(root)

    for name, value in CONF.items():
        spark.conf.set(name, value)
    rows = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).json(str(root / "in")).dropDuplicates(["id"])
    stream = rows.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    stream.foreachBatch(function).start().awaitTermination()


def restore_words(settings: Settings) -> list[str]:
    """The command that takes both back."""
    words = ["spark", "restore", settings.repository, settings.target, "--job", QUERY_JOB, "--with-job", JOB]
    return [*words, "--batch", str(settings.batch), "--move-aside"]


def _hang(root: Path) -> None:
    (root / "hung").touch()
    time.sleep(3600)


def main(settings: Settings) -> int:
    """Run until killed, or to the end."""
    if settings.target:

        async def publish(*_: object, **__: object) -> None:
            _hang(Path(settings.root))

        DirectoryTarget.publish = publish  # type: ignore[method-assign]
        sys.argv[1:] = restore_words(settings)
        return run_command()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    with opened_job(settings) as job:
        run_query(spark, job, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)))
