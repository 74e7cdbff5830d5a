"""Real stateful queries of every operator, on files that a test feeds: one file is one batch."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pandas as pd
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from typing_extensions import override

from engine.state.settings import ROCKSDB_PROVIDER
from index.spark.query_logs import JOIN_STORES
from tests.spark.state.forms import Forms, KeyForm

STREAMING: Final = "spark.sql.streaming."
STORE: Final = f"{STREAMING}stateStore."
CHANGELOGS: Final = f"{STORE}rocksdb.changelogCheckpointing.enabled"
FORMAT: Final = f"{STORE}checkpointFormatVersion"
CODEC: Final = f"{STORE}compression.codec"
ROW_CHECKSUMS: Final = f"{STORE}rowChecksum.enabled"
ENCODING: Final = f"{STORE}encodingFormat"
JOIN_FORMAT: Final = f"{STREAMING}join.stateFormatVersion"

PARTITIONS: Final = 2

# Snapshots and changelogs mix: a snapshot is due every other version, and uploaded as soon as may be.
CONF: Final = {
    f"{STORE}providerClass": ROCKSDB_PROVIDER,
    f"{STORE}minDeltasForSnapshot": "2",
    f"{STORE}maintenanceInterval": "100",
    # The coordinator of a JVM judges by the settings of its first query, and would force snapshots of the others.
    f"{STORE}forceSnapshotUploadOnLag": "false",
    CHANGELOGS: "true",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
}

SCHEMA: Final = "k string, v long, ts timestamp"


def stop_maintenance(spark: SparkSession) -> None:
    """Unload all state stores; else their maintenance may still write a snapshot of a query that has stopped."""
    spark.sparkContext._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()  # type: ignore[union-attr]


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A stateful query and what has to be known to compare its state."""

    name: str
    build: Callable[[Sequence[DataFrame]], DataFrame]
    sources: int = 1
    mode: str = "append"
    conf: dict[str, str] = msgspec.field(default_factory=dict)
    forms: Forms = Forms()
    stores: tuple[str, ...] = ("default",)
    # Whether its sources and its sink have names (Spark 4.3).
    is_named: bool = False


class StatefulQuery:
    """A query with its input and its checkpoint below one directory."""

    def __init__(self, spark: SparkSession, query: Query, root: Path, conf: Mapping[str, str] | None = None) -> None:
        self.query = query
        self.root = root
        self.checkpoint = root / "checkpoint"
        self.conf = CONF | query.conf | dict(conf or {})
        self._spark = spark
        self._fed = 0
        for source in range(query.sources):
            self._input(source).mkdir(parents=True, exist_ok=True)

    def _input(self, source: int) -> Path:
        return self.root / f"input-{source}"

    def session(self, conf: Mapping[str, str] | None = None) -> SparkSession:
        """A session of its own with the settings of this query."""
        session = self._spark.newSession()
        for key, value in (self.conf | dict(conf or {})).items():
            session.conf.set(key, value)
        return session

    def feed(self, batches: int = 1) -> None:
        """Write the files of the next batches."""
        for _ in range(batches):
            for source in range(self.query.sources):
                self.feed_rows(_rows(self._fed, source), source)
            self._fed += 1

    def feed_rows(self, rows: Iterable[Mapping[str, object]], source: int = 0) -> None:
        """Write one file."""
        directory = self._input(source)
        count = len(list(directory.iterdir()))
        file = directory / f"{count:04d}.json"
        hidden = directory / f".{file.name}"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # Spark takes files in the order of their times, to the millisecond.
        os.utime(hidden, (1_700_000_000 + count, 1_700_000_000 + count))
        hidden.rename(file)

    def run(
        self,
        conf: Mapping[str, str] | None = None,
        *,
        sink: Callable[[DataFrame, int], None] | None = None,
        foreach: Callable[[Row], None] | None = None,
        build: Callable[[Sequence[DataFrame]], DataFrame] | None = None,
    ) -> None:
        """Process every file that was fed and is new, each in a batch of its own.

        Raises:
            StreamingQueryException: The query failed.
        """
        writer = self._writer(self.session(conf), build or self.query.build)
        if sink is not None:
            writer = writer.foreachBatch(sink)
        elif foreach is not None:
            writer = writer.foreach(foreach)
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def start(self, every: str) -> StreamingQuery:
        """Start it with a batch that often, if there is a file, to run until it is stopped."""
        return self._writer(self.session(), self.query.build).trigger(processingTime=every).start()

    def _writer(self, session: SparkSession, build: Callable[[Sequence[DataFrame]], DataFrame]) -> DataStreamWriter:
        sources = [
            session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self._input(source)))
            for source in range(self.query.sources)
        ]
        writer = build(sources).writeStream.format("noop").outputMode(self.query.mode)
        return writer.option("checkpointLocation", str(self.checkpoint))

    def committed(self) -> tuple[int, ...]:
        """The batches that Spark says are committed."""
        return tuple(sorted(int(f.name) for f in (self.checkpoint / "commits").iterdir() if f.name.isdecimal()))

    def forget_commits(self, first: int) -> None:
        """Remove the commit files from a batch on, as if they had never been written, and the offsets after it."""
        for log, at_least in (("commits", first), ("offsets", first + 1)):
            for file in (self.checkpoint / log).iterdir():
                if file.name.isdecimal() and int(file.name) >= at_least:
                    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
                    file.unlink()


def _rows(batch: int, source: int) -> list[dict[str, object]]:
    """Rows of which some keys are new, some known, and whose time goes on by a minute and a half with every batch."""
    at = batch * 90
    rows = []
    for n in range(14 - 4 * source):
        second = at + n * 4
        rows.append(
            {
                "k": f"key-{(batch * 5 + n * (1 + source)) % 19:03d}",
                "v": batch * 100 + n,
                "ts": f"2024-01-01 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}",
            }
        )
    return rows


def _late(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("ts", "1 minute")


def _aggregation(sources: Sequence[DataFrame]) -> DataFrame:
    return sources[0].groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("s"), F.max("k").alias("longest"))


def _windows(sources: Sequence[DataFrame]) -> DataFrame:
    return _late(sources[0]).groupBy(F.window("ts", "1 minute"), "k").agg(F.count("*").alias("n"))


def _join(sources: Sequence[DataFrame], how: str) -> DataFrame:
    left = _late(sources[0])
    right = _late(sources[1]).select(F.col("k").alias("k2"), F.col("v").alias("v2"), F.col("ts").alias("ts2"))
    near = "k = k2 and ts2 >= ts - interval 30 seconds and ts2 <= ts + interval 30 seconds"
    return left.join(right, F.expr(near), how)


def _count_on(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    before = state.get[0] if state.exists else 0
    count = before + sum(len(frame) for frame in frames)
    if count % 4 == 3:
        state.remove()
    else:
        state.update((count,))
    yield pd.DataFrame({"k": [key[0]], "n": [count]})


def _map_groups(sources: Sequence[DataFrame]) -> DataFrame:
    rows = sources[0].select("k", "v").groupBy("k")
    return rows.applyInPandasWithState(_count_on, "k string, n long", "n long", "update", "NoTimeout")


class Tally(StatefulProcessor):
    """Keeps a value, a list and a map for each key; the list is emptied and a map's key removed now and then."""

    count_schema = "n long"

    @override
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", self.count_schema)
        self._items = handle.getListState("items", "v long")
        self._seen = handle.getMapState("seen", "v long", "n long")

    @override
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = (self._count.get() or (0,))[0]
        values = [row.v for row in rows]
        if before % 3 == 2:
            self._items.clear()
        if before % 4 == 3:
            self._items.put([(value,) for value in values])
        for value in values:
            self._items.appendValue((value,))
            kind = (value % 5,)
            times = (self._seen.getValue(kind) or (0,))[0]
            if times % 3 == 2:
                self._seen.removeKey(kind)
            else:
                self._seen.updateValue(kind, (times + 1,))
        self._count.update((before + len(values),))
        yield Row(k=key[0], n=before + len(values))

    @override
    def close(self) -> None:
        pass


class WiderTally(Tally):
    """The same with a wider number and one more field in the counts of some keys, which Avro allows."""

    count_schema = "n double, note string"

    @override
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] < "key-010":
            self._count.update((0.5, "new"))
        yield Row(k=key[0], n=0)


class Expiring(StatefulProcessor):
    """Keeps what expires in an hour, and a timer for each batch of a key."""

    ttl_ms: Final = 3_600_000

    @override
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long, share double, note string", self.ttl_ms)
        self._items = handle.getListState("items", "v long, text string", self.ttl_ms)
        self._seen = handle.getMapState("seen", "v long", "n long", self.ttl_ms)

    @override
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = [row.v for row in rows]
        for value in values:
            self._items.appendValue((value, None if value % 3 == 0 else f"text {value}"))
            self._seen.updateValue((value % 3 - 1,), (value,))
        self._count.update((len(values), values[0] / 3, None if values[0] % 2 else "日本"))
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + self.ttl_ms)
        yield Row(k=key[0], n=len(values))

    @override
    def close(self) -> None:
        pass


class Reminding(StatefulProcessor):
    """Has a timer half a minute after each row of a key, by the time of events; some fire."""

    @override
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._fired = handle.getValueState("fired", "n int")

    @override
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._handle.registerTimer(row.v * 1000 + timerValues.getCurrentWatermarkInMs())
        if not self._fired.exists():
            self._fired.update((0,))
        yield Row(k=key[0], n=0)

    @override
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        fired = (self._fired.get() or (0,))[0] + 1
        self._fired.update((fired,))
        yield Row(k=key[0], n=fired)

    @override
    def close(self) -> None:
        pass


def transforming(processor: StatefulProcessor, time_mode: str) -> Callable[[Sequence[DataFrame]], DataFrame]:
    """A query of one processor."""

    def build(sources: Sequence[DataFrame]) -> DataFrame:
        rows = _late(sources[0]) if time_mode == "EventTime" else sources[0]
        return rows.groupBy("k").transformWithState(
            statefulProcessor=processor, outputStructType="k string, n long", outputMode="Update", timeMode=time_mode
        )

    return build


AGGREGATION: Final = Query(name="aggregation", build=_aggregation, mode="update")
# Spark plans it with one partition.
KEYLESS: Final = Query(name="keyless", build=lambda sources: sources[0].agg(F.count("*").alias("n")), mode="update")
WINDOWS: Final = Query(name="windows", build=_windows)
DEDUPLICATION: Final = Query(name="dropDuplicates", build=lambda sources: sources[0].dropDuplicates(["k"]))
DEDUPLICATION_WITHIN: Final = Query(
    name="dropDuplicatesWithinWatermark", build=lambda sources: _late(sources[0]).dropDuplicatesWithinWatermark(["k"])
)
SESSION: Final = Query(
    name="session",
    build=lambda sources: _late(sources[0]).groupBy(F.session_window("ts", "9 seconds"), "k").count(),
    forms=Forms({"default": KeyForm("prefix", ("bytes",), ("word",))}),
)
MAP_GROUPS: Final = Query(name="flatMapGroupsWithState", build=_map_groups, mode="update")
LIMIT: Final = Query(name="limit", build=lambda sources: sources[0].limit(20))
DEDUPLICATION_AND_AGGREGATION: Final = Query(
    name="dropDuplicates+aggregation",
    build=lambda sources: _late(sources[0]).dropDuplicates(["k", "ts"]).groupBy("k").count(),
    mode="update",
)
TRANSFORM: Final = Query(
    name="transformWithState",
    build=transforming(Tally(), "None"),
    mode="update",
    forms=Forms({"seen": KeyForm("prefix", (("bytes",),), (("word",),))}, frozenset({"items"})),
)

EXPIRING: Final = Query(
    name="expiring",
    build=transforming(Expiring(), "ProcessingTime"),
    mode="update",
    # By such a time there is always one batch more.
    conf={f"{STREAMING}noDataMicroBatches.enabled": "false"},
)
REMINDING: Final = Query(name="reminding", build=transforming(Reminding(), "EventTime"), mode="update")

_TIMED: Final = {
    f"{side}-{family}": form
    for side in ("left", "right")
    for family, form in (
        ("keyWithTsToValues", KeyForm("after", ("bytes",))),
        ("tsWithKey", KeyForm("before", ("bytes",))),
    )
}


def join(state_format: int) -> Query:
    """A stream-stream join, outer where Spark allows it, so that the state also says which rows found a match."""
    # Outer joins of format 1 are refused since they were found to be wrong (SPARK-26154).
    how = "inner" if state_format == 1 else "leftOuter"
    # Spark 4.3 has no writer for the schema of format 1, and starts such a query only if the schema is none of
    # its business (`lend_schemas` then gives its reader one).
    unchecked = {f"{STORE}stateSchemaCheck": "false"} if state_format == 1 else {}
    return Query(
        name=f"join{state_format}",
        build=lambda sources: _join(sources, how),
        sources=2,
        conf={JOIN_FORMAT: str(state_format)} | unchecked,
        forms=Forms(_TIMED, frozenset(_TIMED)) if state_format == 4 else Forms(),
        stores=JOIN_STORES if state_format <= 2 else ("default",),
    )


# By name, for a driver in a process of its own.
QUERIES: Final = {query.name: query for query in (AGGREGATION, SESSION, TRANSFORM, join(2), join(4))}


def lend_schemas(query: StatefulQuery, lender: StatefulQuery) -> None:
    """Give the stores of a join of format 1 the schemas of one of format 2, which has one more field in its values."""
    matched = b',{"name":"matched","type":"boolean","nullable":true,"metadata":{}}'
    for schema in sorted(lender.checkpoint.glob("state/0/0/*/_metadata/schema")):
        data = schema.read_bytes()
        if matched in data:
            # The last of two texts, each after its length.
            at = data.rindex(b'{"type":"struct"')
            value = data[at:].replace(matched, b"")
            data = data[: at - 2] + len(value).to_bytes(2, "big") + value
        target = query.checkpoint / schema.relative_to(lender.checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name(".schema.crc").unlink(missing_ok=True)
        target.write_bytes(data)
