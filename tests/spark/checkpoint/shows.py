"""A query whose results are kept batch by batch, so that two runs of it can be compared exactly."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.state.queries import SCHEMA, Query, StatefulQuery

DEADLINE_S: Final = 90.0

# The rows of each batch, as text and in order.
Results = dict[int, list[str]]


class Show:
    """A query, its input, and as many checkpoints and sinks below one directory as a test wants.

    Every batch is one file of each source, all of which are there from the start: so the batches of every run are made
    of the same rows, and a sink that writes one file for each batch is idempotent.
    """

    def __init__(
        self,
        spark: SparkSession,
        query: Query,
        root: Path,
        conf: Mapping[str, str] | None = None,
        *,
        batches: int,
        is_fed: bool = False,
    ) -> None:
        """Feed the input, unless another process has."""
        self.root = root
        self.batches = batches
        self._stateful = StatefulQuery(spark, query, root, conf)
        if not is_fed:
            self._stateful.feed(batches)

    @property
    def checkpoint(self) -> Path:
        """Where the first run has its checkpoint."""
        return self._stateful.checkpoint

    def session(self) -> SparkSession:
        """A session with the query's settings."""
        return self._stateful.session()

    def start(
        self,
        sink: str,
        checkpoint: Path | None = None,
        *,
        listener: StreamingQueryListener | None = None,
        before: Callable[[int], None] | None = None,
        available_now: bool = False,
    ) -> StreamingQuery:
        """Start a run.

        Args:
            sink: The name of its sink.
            checkpoint: Its checkpoint; the first run's if not given.
            listener: Hears of this query.
            before: Called with the number of each batch that the sink is given, before it writes.
            available_now: Whether it ends when it has read everything.
        """
        session = self._stateful.session()
        if listener is not None:
            session.streams.addListener(listener)
        query = self._stateful.query
        sources = []
        for n in range(query.sources):
            reader = session.readStream.name(f"source_{n}") if query.is_named else session.readStream
            sources.append(reader.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self._stateful._input(n))))
        directory = self.root / sink
        directory.mkdir(exist_ok=True)

        def write(frame: DataFrame, batch: int) -> None:
            rows = sorted(json.dumps(row.asDict(recursive=True), default=str) for row in frame.collect())
            if before is not None:
                before(batch)
            hidden = directory / f".{batch}"
            hidden.write_text("\n".join(rows))
            hidden.rename(directory / str(batch))

        writer = query.build(sources).writeStream.foreachBatch(write).outputMode(query.mode)
        if query.is_named:
            writer._jwrite.name("sink")
        writer = writer.option("checkpointLocation", str(checkpoint or self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(
        self, sink: str, checkpoint: Path | None = None, *, listener: StreamingQueryListener | None = None
    ) -> Results:
        """Run to the end of the input; what the sink has then."""
        query = self.start(sink, checkpoint, listener=listener, available_now=True)
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return self.results(sink)

    def results(self, sink: str) -> Results:
        """What a sink has."""
        files = (file for file in (self.root / sink).iterdir() if file.name.isdecimal())
        return {int(file.name): file.read_text().splitlines() for file in files}

    def copy_results(self, sink: str, to: str) -> None:
        """Begin a sink with what another one has."""
        shutil.copytree(self.root / sink, self.root / to)

    def forget_commits(self, first: int) -> None:
        """Take the first run's checkpoint back, as if no batch from this one on had been committed."""
        self._stateful.forget_commits(first)

    def committed(self, checkpoint: Path | None = None) -> int:
        """The newest committed batch; -1 if there is none."""
        commits = (checkpoint or self.checkpoint) / "commits"
        names = [file.name for file in commits.iterdir()] if commits.exists() else []
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def wait_for(self, batch: int, query: StreamingQuery | None = None) -> None:
        """Wait until a batch is committed."""
        wait_until(lambda: self.committed() >= batch or (query is not None and not query.isActive))
        if query is not None and query.exception() is not None:
            raise AssertionError(str(query.exception()))
        assert self.committed() >= batch


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: It does not come to that.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def flip_byte(file: Path, at: int) -> None:
    """Alter one byte of a file, and leave its times as they were."""
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 0x01
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
