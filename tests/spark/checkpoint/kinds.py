"""Kinds of checkpoints: an operator of Spark with those settings that change what is stored, one row each.

`test_matrix` takes every kind through a loss with the providers that `providers` names. What a provider or a release
of Spark does not do is in the row too, with its reason.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
import pandas as pd
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from typing_extensions import override

from engine.state.settings import HDFS_PROVIDER, ROCKSDB_PROVIDER
from tests.spark.state.queries import (
    AGGREGATION,
    CHANGELOGS,
    CODEC,
    DEDUPLICATION,
    DEDUPLICATION_AND_AGGREGATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    JOIN_FORMAT,
    KEYLESS,
    LIMIT,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SESSION,
    STORE,
    STREAMING,
    TRANSFORM,
    WINDOWS,
    Query,
    _join,
    _late,
    join,
)

Provider = Literal["V1", "V2", "HDFS"]
PROVIDERS: Final[dict[Provider, dict[str, str]]] = {
    "V1": {f"{STORE}providerClass": ROCKSDB_PROVIDER, FORMAT: "1"},
    "V2": {f"{STORE}providerClass": ROCKSDB_PROVIDER, FORMAT: "2"},
    "HDFS": {f"{STORE}providerClass": HDFS_PROVIDER, FORMAT: "1"},
}
ROWS = Sequence[DataFrame]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A query, and what has to be known to take it through a loss."""

    query: Query
    # Of Spark 4.0 and 4.1 the first of RocksDB's is tried, and of 4.0 nothing else.
    providers: tuple[Provider, ...] = ("V2", "HDFS")
    # The first release of Spark that has it, and the first whose HDFS-backed provider does not refuse it.
    since: tuple[int, int] = (4, 0)
    hdfs_since: tuple[int, int] = (4, 0)
    # Whether times of this machine's clock are part of the state: then its rows are counted, and not compared.
    is_clocked: bool = False
    # Whether the source always has another batch.
    is_endless: bool = False
    # Whether Spark's own reader of stored bytes can read it.
    is_read_by_spark: bool = True

    @property
    def name(self) -> str:
        """Return the name of the query."""
        return self.query.name


# --- Aggregations -----------------------------------------------------------------------------------------------------


def _several(sources: ROWS) -> DataFrame:
    v = F.col("v")
    found = (
        F.avg(v),
        F.stddev(v),
        F.min("ts"),
        F.max_by("k", "v"),
        F.first("v"),
        F.collect_list("v"),
        F.collect_set("k"),
    )
    return sources[0].groupBy((v % 7).alias("g"), "k").agg(*(each.alias(f"a{n}") for n, each in enumerate(found)))


def _approximate(sources: ROWS) -> DataFrame:
    return sources[0].groupBy((F.col("v") % 3).alias("g")).agg(F.approx_count_distinct("k").alias("n"))


def _sliding(sources: ROWS) -> DataFrame:
    return _late(sources[0]).groupBy(F.window("ts", "1 minute", "20 seconds")).agg(F.sum("v").alias("s"))


def _wide(sources: ROWS) -> DataFrame:
    """Keys and values of every type that a state has, some of them null."""
    v, k = F.col("v"), F.col("k")
    odd = F.when(v % 3 != 0, v)
    key = F.struct(
        k.alias("name"),
        odd.cast("decimal(30,4)").alias("decimal"),
        F.struct((v % 2 == 0).alias("even"), F.array(k, F.lit(None)).alias("list")).alias("inner"),
    )
    value = F.struct(
        F.col("ts"),
        F.col("ts").cast("date").alias("date"),
        odd.cast("double").alias("double"),
        odd.cast("short").alias("short"),
        F.encode(k, "utf-8").alias("binary"),
        F.create_map(k, odd).alias("map"),
        F.array_repeat(F.struct(k, odd.alias("o")), 2).alias("list"),
        F.expr("interval '3' day").alias("interval"),
    )
    return sources[0].groupBy(key.alias("key")).agg(F.first(value).alias("first"), F.count(odd).alias("n"))


def _two_aggregations(sources: ROWS) -> DataFrame:
    first = _late(sources[0]).groupBy(F.window("ts", "20 seconds"), "k").agg(F.count("*").alias("n"))
    return first.groupBy(F.window(F.window_time("window"), "1 minute")).agg(F.sum("n").alias("n"))


def _windows_without_duplicates(sources: ROWS) -> DataFrame:
    rows = _late(sources[0]).dropDuplicatesWithinWatermark(["k"])
    return rows.groupBy(F.window("ts", "1 minute")).agg(F.count("*").alias("n"))


def _aggregated_join(sources: ROWS) -> DataFrame:
    joined = _join(sources, "inner")
    return joined.groupBy(F.window("ts", "1 minute")).agg(F.count("*").alias("n"), F.sum("v2").alias("s"))


# --- Joins ------------------------------------------------------------------------------------------------------------


def _joined(how: str, *, state_format: int = 2) -> Query:
    return Query(
        name=f"join{state_format} {how}",
        build=lambda sources: _join(sources, how),
        sources=2,
        conf={JOIN_FORMAT: str(state_format)},
    )


def _join_of_all(sources: ROWS) -> DataFrame:
    """Without a watermark nothing is ever removed."""
    return sources[0].join(sources[1].select("k", F.col("v").alias("v2")), "k")


def _window_join(sources: ROWS) -> DataFrame:
    sides = [
        _late(rows).select(F.window("ts", "30 seconds").alias("w"), "k", F.col("v").alias(f"v{n}"))
        for n, rows in enumerate(sources)
    ]
    return sides[0].join(sides[1], ["w", "k"], "leftOuter")


# --- State of one's own -----------------------------------------------------------------------------------------------


def _count_until(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count rows, and end a key when the watermark has passed its newest row by ten seconds."""
    if state.hasTimedOut:
        counted = state.get[0]
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "n": [-counted]})
        return
    rows = pd.concat(list(frames))
    counted = len(rows) + (state.get[0] if state.exists else 0)
    state.update((counted,))
    state.setTimeoutTimestamp(max(int(rows["ts"].max().timestamp() * 1000) + 10_000, state.getCurrentWatermarkMs() + 1))
    yield pd.DataFrame({"k": [key[0]], "n": [counted]})


def _count_for_an_hour(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    counted = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
    state.update((counted,))
    state.setTimeoutDuration(3_600_000)
    yield pd.DataFrame({"k": [key[0]], "n": [counted]})


def _map_groups(function: Any, timeout: str) -> Callable[[ROWS], DataFrame]:
    def build(sources: ROWS) -> DataFrame:
        groups = _late(sources[0]).groupBy("k")
        return groups.applyInPandasWithState(function, "k string, n long", "n long", "update", timeout)

    return build


class _Keeper(StatefulProcessor):
    """Keeps a value, a list and a map for each key, for ever; what it says is how much it has."""

    ttl_ms: int | None = None

    @override
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long", self.ttl_ms)
        self._items = handle.getListState("items", "v long", self.ttl_ms)
        self._seen = handle.getMapState("seen", "v long", "n long", self.ttl_ms)

    @override
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        values = [int(value) for frame in rows for value in frame["v"]]
        yield self._said(key, self._keep(values))

    def _keep(self, values: list[int]) -> int:
        counted: int = (self._count.get() or (0,))[0] + len(values)
        self._count.update((counted,))
        for value in values:
            self._items.appendValue((value,))
            self._seen.updateValue((value % 5,), (value,))
        if counted % 4 == 3:
            self._seen.removeKey((values[0] % 5,))
            self._items.put([(value,) for value in values])
        return counted + 1000 * len(list(self._items.get())) + 1_000_000 * len(list(self._seen.keys()))

    def _said(self, key: Any, number: int) -> pd.DataFrame:
        return pd.DataFrame({"k": [key[0]], "n": [number]})

    @override
    def close(self) -> None:
        pass


class _ForAnHour(_Keeper):
    ttl_ms: int | None = 3_600_000


class _Timed(_Keeper):
    """Sets a timer for each key, with the first of its rows, and forgets the key when it expires."""

    after_ms = 100_000

    def _now_ms(self, timers: Any) -> int:
        return int(timers.getCurrentWatermarkInMs())

    @override
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        if not self._count.exists():
            self._handle.registerTimer(self._now_ms(timerValues) + self.after_ms)
        yield from super().handleInputRows(key, rows, timerValues)

    @override
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        counted = (self._count.get() or (0,))[0]
        for each in (self._count, self._items, self._seen):
            each.clear()
        yield self._said(key, -counted)


class _TimedByClock(_Timed):
    """Its timers are of the clock, and none expires while a test runs."""

    after_ms = 3_600_000

    @override
    def _now_ms(self, timers: Any) -> int:
        return int(timers.getCurrentProcessingTimeInMs())


class _Begun(_Keeper):
    """Begins with a state that another query left."""

    @override
    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        self._keep([int(value) for value in initialState["v"]])


def _transform(processor: StatefulProcessor, time: str = "None", *, begun: bool = False) -> Callable[[ROWS], DataFrame]:
    def build(sources: ROWS) -> DataFrame:
        rows = _late(sources[0]) if time == "EventTime" else sources[0]
        begin = [(f"key-{n:03d}", n) for n in range(6)]
        return rows.groupBy("k").transformWithStateInPandas(
            statefulProcessor=processor,
            outputStructType="k string, n long",
            outputMode="Update",
            timeMode=time,
            initialState=rows.sparkSession.createDataFrame(begin, "k string, v long").groupBy("k") if begun else None,
        )

    return build


class _Passing(StatefulProcessor):
    """Counts rows, and passes each on with its time, for an operator after this one."""

    @override
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    @override
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            counted = (self._count.get() or (0,))[0] + len(frame)
            self._count.update((counted,))
            yield pd.DataFrame({"at": frame["ts"], "n": counted})

    @override
    def close(self) -> None:
        pass


def _transform_then_windows(sources: ROWS) -> DataFrame:
    passed = (
        _late(sources[0])
        .groupBy("k")
        .transformWithStateInPandas(
            statefulProcessor=_Passing(),
            outputStructType="at timestamp, n long",
            outputMode="Append",
            timeMode="EventTime",
            eventTimeColumnName="at",
        )
    )
    return passed.groupBy(F.window("at", "1 minute")).agg(F.sum("n").alias("n"))


# --- Sources ----------------------------------------------------------------------------------------------------------


def _rate(sources: ROWS) -> DataFrame:
    rate = sources[0].sparkSession.readStream.format("rate-micro-batch").option("rowsPerBatch", 10)
    rows = rate.option("startTimestamp", 1_700_000_000_000).option("advanceMillisPerBatch", 30_000).load()
    return rows.groupBy((F.col("value") % 7).alias("k")).agg(F.count("*").alias("n"), F.max("timestamp").alias("at"))


def _union(sources: ROWS) -> DataFrame:
    both = _late(sources[0]).unionByName(sources[1].withWatermark("ts", "30 seconds"))
    return both.groupBy(F.window("ts", "1 minute"), "k").agg(F.count("*").alias("n"))


# --- The table --------------------------------------------------------------------------------------------------------


def _kind(name: str, build: Callable[[ROWS], DataFrame], **rest: Any) -> Kind:
    of_query = {field: rest.pop(field) for field in ("mode", "sources", "conf") if field in rest}
    return Kind(query=Query(name=name, build=build, **of_query), **rest)


def _set(query: Query, name: str, conf: dict[str, str], **rest: Any) -> Kind:
    """A query whose settings alone make the kind."""
    return Kind(query=msgspec.structs.replace(query, name=f"{query.name} {name}", conf=query.conf | conf), **rest)


# Each variable of a state of one's own is a column family, of which the HDFS-backed provider has only one.
_NEVER: Final = (99, 0)
_FAMILIES: Final[dict[str, Any]] = {"hdfs_since": _NEVER}
_FIRST: Final[dict[str, Any]] = {"providers": ("V1", "HDFS")}
# Settings of RocksDB, which mean nothing to the other provider.
_ROCKSDB_V1: Final[dict[str, Any]] = {"providers": ("V1",)}
_ROCKSDB_V2: Final[dict[str, Any]] = {"providers": ("V2",)}
_ALL: Final[dict[str, Any]] = {"providers": ("V1", "V2", "HDFS")}
# Such a query always wants another batch without data, and a run of what there is would never end.
_CLOCK: Final[dict[str, Any]] = {
    "is_clocked": True,
    "mode": "update",
    "conf": {f"{STREAMING}noDataMicroBatches.enabled": "false"},
}
_EVOLUTION: Final = {
    f"{STREAMING}queryEvolution.enableSourceEvolution": "true",
    f"{STREAMING}queryEvolution.enableSinkEvolution": "true",
    f"{STREAMING}offsetLog.formatVersion": "2",
}
_PURGED: Final = {f"{STREAMING}minBatchesToRetain": "3", f"{STREAMING}ratioExtraSpaceAllowedInCheckpoint": "0"}

KINDS: Final[tuple[Kind, ...]] = (
    Kind(query=AGGREGATION, **_ALL),
    # This and `limit` fail with V2 on Spark 4.0, which awaits ids of as many partitions as other operators have.
    Kind(query=KEYLESS, **_FIRST),
    Kind(query=WINDOWS),
    Kind(query=DEDUPLICATION, **_FIRST),
    Kind(query=DEDUPLICATION_WITHIN),
    Kind(query=DEDUPLICATION_AND_AGGREGATION, **_FIRST),
    Kind(query=SESSION, **_ALL),
    Kind(query=MAP_GROUPS, **_FIRST),
    Kind(query=LIMIT, is_read_by_spark=False, **_FIRST),
    Kind(query=TRANSFORM, since=(4, 1), hdfs_since=_NEVER, **_ALL),
    Kind(query=join(2), **_ALL),
    Kind(query=join(3), since=(4, 1), hdfs_since=(4, 2)),
    Kind(query=join(4), since=(4, 2)),
    _kind("several aggregates", _several, mode="update"),
    _kind("approximate distinct", _approximate, mode="complete", **_FIRST),
    _kind("sliding windows", _sliding, mode="update"),
    _kind("wide types", _wide, mode="update", **_FIRST),
    _kind("two aggregations", _two_aggregations),
    _kind("windows without duplicates", _windows_without_duplicates, **_FIRST),
    _kind("aggregated join", _aggregated_join, sources=2),
    _kind("union", _union, sources=2, **_FIRST),
    _kind("join without watermark", _join_of_all, sources=2),
    _kind("join of windows", _window_join, sources=2, **_FIRST),
    _kind("stateless", lambda sources: sources[0].where("v % 2 = 0"), **_ROCKSDB_V2),
    _kind("rate", _rate, mode="update", is_endless=True),
    Kind(query=_joined("inner"), **_FIRST),
    Kind(query=_joined("rightOuter")),
    Kind(query=_joined("fullOuter"), **_FIRST),
    Kind(query=_joined("leftSemi")),
    Kind(query=_joined("fullOuter", state_format=3), since=(4, 1), hdfs_since=(4, 2), **_FIRST),
    _kind("map groups, event time", _map_groups(_count_until, "EventTimeTimeout"), mode="update"),
    _kind("map groups, clock", _map_groups(_count_for_an_hour, "ProcessingTimeTimeout"), **_CLOCK, **_FIRST),
    _kind("transform in pandas", _transform(_Keeper()), mode="update", **_FAMILIES),
    _kind("transform, TTL", _transform(_ForAnHour(), "ProcessingTime"), **_CLOCK, **_FAMILIES),
    _kind("transform, event timers", _transform(_Timed(), "EventTime"), mode="update", **_FAMILIES),
    _kind("transform, clock timers", _transform(_TimedByClock(), "ProcessingTime"), **_CLOCK, **_FAMILIES),
    _kind("transform from a state", _transform(_Begun(), begun=True), mode="update", **_FAMILIES),
    _kind("transform then windows", _transform_then_windows, **_FAMILIES),
    _set(TRANSFORM, "avro", {f"{STORE}encodingFormat": "avro"}, since=(4, 1), **_FAMILIES),
    _set(TRANSFORM, "commas", {f"{STORE}rocksdb.mergeOperatorVersion": "1"}, since=(4, 2), **_FAMILIES),
    _set(TRANSFORM, "row checksums", {ROW_CHECKSUMS: "true"}, since=(4, 2), **_FAMILIES),
    _set(AGGREGATION, "format 1", {f"{STREAMING}aggregation.stateFormatVersion": "1"}),
    _set(MAP_GROUPS, "format 1", {f"{STREAMING}flatMapGroupsWithState.stateFormatVersion": "1"}),
    _set(SESSION, "merged early", {f"{STREAMING}sessionWindow.merge.sessions.in.local.partition": "true"}),
    _set(AGGREGATION, "lzf", {CODEC: "lzf"}, **_FIRST),
    _set(AGGREGATION, "zstd", {CODEC: "zstd"}),
    _set(AGGREGATION, "snappy", {CODEC: "snappy"}, **_FIRST),
    _set(AGGREGATION, "row checksums", {ROW_CHECKSUMS: "true"}, since=(4, 2)),
    _set(AGGREGATION, "no changelogs", {CHANGELOGS: "false"}, providers=("V1", "V2")),
    _set(AGGREGATION, "rows not counted", {f"{STORE}rocksdb.trackTotalNumberOfRows": "false"}, **_ROCKSDB_V2),
    _set(AGGREGATION, "compacted", {f"{STORE}rocksdb.compactOnCommit": "true"}, **_ROCKSDB_V1),
    _set(AGGREGATION, "SSTs in zstd", {f"{STORE}rocksdb.compression": "zstd"}, **_ROCKSDB_V2),
    _set(AGGREGATION, "table format 3", {f"{STORE}rocksdb.formatVersion": "3"}, **_ROCKSDB_V1),
    _set(AGGREGATION, "files not summed", {f"{STREAMING}checkpoint.fileChecksum.enabled": "false"}, since=(4, 1)),
    _set(AGGREGATION, "one partition", {"spark.sql.shuffle.partitions": "1"}, **_FIRST),
    _set(AGGREGATION, "a snapshot each", {f"{STORE}minDeltasForSnapshot": "1"}),
    _set(AGGREGATION, "purged", _PURGED, **_FIRST),
    _set(AGGREGATION, "source compacted", {f"{STREAMING}fileSource.log.compactInterval": "2"}),
    _set(msgspec.structs.replace(AGGREGATION, is_named=True), "names", _EVOLUTION, since=(4, 3)),
    _set(WINDOWS, "no empty batches", {f"{STREAMING}noDataMicroBatches.enabled": "false"}, **_FIRST),
    _set(_joined("inner"), "greatest watermark", {f"{STREAMING}multipleWatermarkPolicy": "max"}),
)
