"""A follower and a cut-over that are killed at any moment, beside a query that runs (design 0011, Q3 and Q9)."""

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from engine.checkpoint.check import check_checkpoint
from tests.spark.state.queries import AGGREGATION, FORMAT, SCHEMA, StatefulQuery
from tests.spark.state.test_rescaled import PARTITIONS, everywhere
from tests.spark.state.test_restored import grown

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(900)]

KILLS = 12


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "engine.cli", "spark", *words]


@contextlib.contextmanager
def running(query: StatefulQuery) -> Iterator[None]:
    """The query runs in this process, and gets a file to read now and then."""
    rows = query.session().readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(query.root / "input-0"))
    writer = AGGREGATION.build([rows]).writeStream.format("noop").outputMode("update")
    started = writer.option("checkpointLocation", str(query.checkpoint)).trigger(processingTime="500 milliseconds")
    stop = threading.Event()

    def feed() -> None:
        while not stop.wait(0.4):
            query.feed()

    thread = threading.Thread(target=feed)
    thread.start()
    run = started.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(StreamingQueryException):
            run.processAllAvailable()
        run.stop()


@pytest.mark.parametrize("format_version", ["1", "2"])
@pytest.mark.parametrize("partitions", [2, 8])
def test_killed_followers_leave_exact_batches(
    spark: SparkSession, tmp_path: Path, format_version: str, partitions: int
) -> None:
    rng = random.Random(f"{format_version}-{partitions}")
    original = grown(spark, AGGREGATION, tmp_path / "query", {FORMAT: format_version, PARTITIONS: "4"}, batches=2)
    copy = StatefulQuery(spark, AGGREGATION, original.root, original.conf)
    copy.checkpoint = tmp_path / "target"
    follow = command("follow", str(original.checkpoint), str(copy.checkpoint), "--every", "100ms", "-q")
    follow += ["--partitions", str(partitions), "--snapshot-every", "2"]
    cut_over = command("cutover", str(original.checkpoint), str(copy.checkpoint), "--json")
    with running(original):
        for _ in range(KILLS):
            process = subprocess.Popen(follow)
            # It takes a second to start.
            time.sleep(1 + 3 * rng.random())
            process.send_signal(signal.SIGKILL)
            process.wait()
        subprocess.run([*follow, "--once"], check=True)
        for _ in range(KILLS):
            cutting = subprocess.Popen(cut_over, stdout=subprocess.DEVNULL)
            time.sleep(0.8 + rng.random())
            cutting.send_signal(signal.SIGKILL)
            cutting.wait()
        done = subprocess.run(cut_over, stdout=subprocess.PIPE, check=False)
    # 6: an earlier one was done, whether it could say so or not.
    assert done.returncode in {0, 6}, done.stdout
    batch = copy.committed()[-1]
    assert original.committed()[-1] >= batch
    if done.returncode == 0:
        assert msgspec.json.decode(done.stdout)["batch"] == batch
    assert everywhere(copy, batch) == everywhere(original, batch)
    report = asyncio.run(check_checkpoint(copy.checkpoint))
    assert report.is_sound, report.findings
    copy.run()
    newest = copy.committed()[-1]
    assert newest > batch
    # What the query would have, had it never moved.
    again = StatefulQuery(spark, AGGREGATION, original.root, {**original.conf, PARTITIONS: "3"})
    again.checkpoint = tmp_path / "again"
    again.run()
    assert everywhere(copy, newest) == everywhere(again, again.committed()[-1])
