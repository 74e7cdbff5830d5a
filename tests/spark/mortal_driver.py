"""A Spark driver that a test may kill: each line of its input is a command, each line of its output an answer.

    python -m tests.spark.mortal_driver URL LOCAL_ROOT

`run` updates and commits the job once, `collect` collects. An answer is JSON: `ok`, and a number, or an error's name.
What a version holds follows from the version alone (`sums_of`), so that anybody can judge a restore.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from engine.spark import StatefulJob, collect
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.spark.counting import add
from tests.spark.short_lived import SHORT_LIVED

JOB = Scope("mortal")
TASKS = 2
KEYS = 20
KEEP_LAST = 3


def rows_of(version: int) -> list[tuple[str, int]]:
    """What a version adds."""
    return [(f"key {number}", version + number) for number in range(KEYS)]


def sums_of(version: int) -> dict[str, tuple[int, int]]:
    """What every key has then: how often it was seen, and the sum of its amounts."""
    return {
        f"key {number}": (version, sum(earlier + number for earlier in range(1, version + 1))) for number in range(KEYS)
    }


def run_once(spark: SparkSession, job: StatefulJob) -> dict[str, Any]:
    """The version after the newest, no matter who made that."""
    newest = job.latest()
    version = newest.record.version + 1 if newest is not None else 1
    rows = spark.createDataFrame(rows_of(version), "key string, amount bigint")
    done = job.run(rows, version=version, offsets=f"v{version}")
    return {"ok": True, "number": done.commit.pointer.number, "version": done.commit.record.version}


def collect_once(spark: SparkSession, url: str) -> dict[str, Any]:
    """Few are kept, so that there is something to delete each time."""
    report = collect(spark, url, Retention(keep_last=KEEP_LAST), delete_share_max=1)
    return {"ok": not report.failed_count, "number": report.deletes_count}


def main() -> None:
    """Answer until the input ends."""
    url, local_root = sys.argv[1:]
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    spark = (
        SparkSession.builder.master("local[2,4]")
        .appName("mortal driver")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "512m")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    with StatefulJob(
        url, job=JOB.job, key_columns=["key"], tasks=TASKS, update=add, local_root=Path(local_root)
    ) as job:
        answer({"ok": True})
        for line in sys.stdin:
            try:
                answer(run_once(spark, job) if line.strip() == "run" else collect_once(spark, url))
            except Exception as error:  # noqa: BLE001  # whatever it is, the test judges it
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                answer({"ok": False, "error": type(error).__name__})
    spark.stop()


def answer(shown: dict[str, Any]) -> None:
    """One line, at once."""
    sys.stdout.write(f"{json.dumps(shown)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
