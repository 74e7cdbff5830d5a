"""Makes the golden files that Spark wrote: run once for each release of Spark, never again for an old one.

    JAVA_HOME=... PYTHONPATH=. python -m tests.golden.make_spark_golden tests/golden/spark

Of small real queries with one partition: changelogs of version 1 to 4 in every codec, with lz4 the whole checkpoint
with its snapshots, and the logs of a few other queries. `<query>.rows.json` has the rows of every version by Spark's
own reader (family, key, value): they are the same however they were written. What Hadoop and the query keep for
themselves is left out. Written by Spark 4.3.0.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import SparkSession

from tests.spark.state.queries import (
    AGGREGATION,
    CODEC,
    FORMAT,
    ROW_CHECKSUMS,
    SCHEMA,
    STORE,
    STREAMING,
    TRANSFORM,
    Query,
    StatefulQuery,
    join,
)

ONE_PARTITION: Final = {"spark.sql.shuffle.partitions": "1"}
HDFS: Final = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"

# By the version of their changelogs.
QUERIES: Final[dict[int, tuple[Query, dict[str, str]]]] = {
    1: (AGGREGATION, {FORMAT: "1"}),
    2: (TRANSFORM, {FORMAT: "1"}),
    3: (AGGREGATION, {FORMAT: "2"}),
    4: (TRANSFORM, {FORMAT: "2"}),
}
CODECS: Final = ("lz4", "zstd", "snappy", "lzf")
BATCHES: Final = 3


def main(target: Path) -> None:
    """Write every directory that is not there.

    Raises:
        SystemExit: Rows differ from those that are there.
    """
    target.mkdir(exist_ok=True)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    for version, (query, conf) in QUERIES.items():
        for codec in CODECS:
            name = f"changelog-v{version}-{codec}"
            run = make(spark, target / name, query, conf | {CODEC: codec}, part_of[codec])
            if run is not None:
                write_rows(run, target / f"{query.name}.rows.json")
    v2 = {FORMAT: "2"}
    make(spark, target / "row-checksums", TRANSFORM, v2 | {ROW_CHECKSUMS: "true"}, is_state)
    make(spark, target / "join", join(2), v2, is_log)
    make(spark, target / "hdfs-provider", AGGREGATION, {f"{STORE}providerClass": HDFS}, is_state)
    make_named(spark, target / "named-sources-and-sinks")
    make_attempts(spark, target / "lost-attempts")
    spark.stop()


def make(
    spark: SparkSession, target: Path, query: Query, conf: dict[str, str], is_kept: Callable[[Path], bool]
) -> StatefulQuery | None:
    """Run a query and keep what of its checkpoint is small and to the point; None if it is there."""
    if target.exists():
        return None
    run = StatefulQuery(spark, query, Path(tempfile.mkdtemp()), ONE_PARTITION | conf)
    run.feed(BATCHES)
    run.run()
    keep(run.checkpoint, target, is_kept)
    return run


def write_rows(run: StatefulQuery, target: Path) -> None:
    """Write the rows of a store after every batch, as Spark reads them; or see that they are what is there."""
    found = {}
    for batch in run.committed():
        reader = run.session().read.format("statestore").options(batchId=batch, _readAllColumnFamilies="true")
        rows = reader.load(str(run.checkpoint)).collect()
        found[str(batch)] = sorted(
            [row.column_family_name, bytes(row.key_bytes).hex(), bytes(row.value_bytes).hex()] for row in rows
        )
    text = json.dumps(found, indent=0) + "\n"
    if target.exists() and target.read_text() != text:
        raise SystemExit(f"{target} has other rows")
    target.write_text(text)


def make_named(spark: SparkSession, target: Path) -> None:
    """Offsets of version 2 and commits of version 3, which have names for sources and sinks."""
    if target.exists():
        return
    run = StatefulQuery(spark, AGGREGATION, Path(tempfile.mkdtemp()), ONE_PARTITION | {FORMAT: "2"})
    run.feed(BATCHES)
    evolution = f"{STREAMING}queryEvolution."
    session = run.session(
        {
            f"{evolution}enableSourceEvolution": "true",
            f"{evolution}enableSinkEvolution": "true",
            f"{STREAMING}offsetLog.formatVersion": "2",
        }
    )
    reader = session.readStream.name("clicks").schema(SCHEMA).option("maxFilesPerTrigger", 1)
    rows = reader.json(str(run.root / "input-0")).groupBy("k").agg(F.count("*"))
    writer = rows.writeStream.option("checkpointLocation", str(run.checkpoint)).outputMode("update").format("noop")
    writer._jwrite.name("counts")
    writer.trigger(availableNow=True).start().awaitTermination()
    keep(run.checkpoint, target, is_log)


def make_attempts(spark: SparkSession, target: Path) -> None:
    """A long history with two attempts at its fifth and eighth version, and a snapshot now and then."""
    if target.exists():
        return
    conf = ONE_PARTITION | {FORMAT: "2", f"{STORE}minDeltasForSnapshot": "4"}
    run = StatefulQuery(spark, AGGREGATION, Path(tempfile.mkdtemp()), conf)
    for batches, lost in ((5, 4), (3, 7), (2, None)):
        run.feed(batches)
        run.run()
        if lost is not None:
            run.forget_commits(lost)
            run.run()
    keep(run.checkpoint, target, is_state)
    write_rows(run, target / "rows.json")


def is_log(name: Path) -> bool:
    """The logs and what is known of the operators."""
    return "state" not in name.parts or ("_metadata" in name.parts and name.name != "schema")


def is_changelog(name: Path) -> bool:
    """Changelogs and what names them."""
    return name.suffix == ".changelog" or "commits" in name.parts


def is_state(name: Path) -> bool:
    """Everything."""
    return True


part_of: Final = dict.fromkeys(CODECS, is_changelog) | {"lz4": is_state}


def keep(checkpoint: Path, target: Path, is_kept: Callable[[Path], bool]) -> None:
    """Copy the files of a checkpoint."""
    for file in sorted(checkpoint.rglob("*")):
        name = file.relative_to(checkpoint)
        is_own = "sources" in name.parts or any(part.startswith((".", "_stateSchema")) for part in name.parts)
        if file.is_file() and not is_own and is_kept(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
