"""A rescaled checkpoint is Spark's own: its query goes on as if it always had these partitions (0010, section 3)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from engine.arrow.key_hashes import partitions_of
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.groups import RescaleFigures
from engine.checkpoint.rescale import RescaleChoice, rescale_checkpoint
from engine.checkpoint.rescale_stores import Here
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import MisplacedKeyError
from engine.repository.repository import SyncRepository
from engine.spark.checkpoint import rescale_checkpoint as rescale_on_spark
from engine.spark.checkpoint import restore_checkpoint as restore_on_spark
from index.spark.query_logs import decode_offsets
from tests.spark.state.forms import StateRow
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import (
    AGGREGATION,
    DEDUPLICATION,
    FORMAT,
    KEYLESS,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SCHEMA,
    STREAMING,
    TRANSFORM,
    Query,
    StatefulQuery,
    join,
    stop_maintenance,
)
from tests.spark.state.test_restored import grown

pytestmark = pytest.mark.spark

PARTITIONS = "spark.sql.shuffle.partitions"
OFFSETS_VERSION = f"{STREAMING}offsetLog.formatVersion"
V1, V2 = {FORMAT: "1"}, {FORMAT: "2"}


def everywhere(query: StatefulQuery, batch: int) -> list[Counter[StateRow]]:
    """The rows of each store in all partitions, by Spark's reader."""
    return [sum(spark_rows(query, [batch], store).values(), Counter()) for store in query.query.stores]


def to_sink(into: dict[int, Counter[Row]]) -> Callable[[DataFrame, int], None]:
    def sink(rows: DataFrame, batch: int) -> None:
        assert batch not in into
        into[batch] = Counter(rows.collect())

    return sink


def here(_: SparkSession, source: Path, target: Path, partitions: int) -> RescaleFigures:
    choice = RescaleChoice(partitions=partitions)
    return asyncio.run(rescale_checkpoint(source, target, choice, Here(partitioner=partitions_of)))


def on_spark(spark: SparkSession, source: Path, target: Path, partitions: int) -> RescaleFigures:
    return rescale_on_spark(spark, source, target, RescaleChoice(partitions=partitions))


def backed_up(source: Path, target: Path) -> str:
    """Back a checkpoint up; return the URL of the repository."""
    url = f"file://{target.parent}/backup of {target.name}"
    with SyncRepository.init(url) as repository:
        repository.loop.run(backup_checkpoint(repository.asynchronous, source))
    return url


def from_backup(_: SparkSession, source: Path, target: Path, partitions: int) -> RescaleFigures:
    choice = RestoreChoice(partitions=partitions)
    with SyncRepository.open(backed_up(source, target)) as repository:
        work = restore_checkpoint(repository.asynchronous, target, choice, partitioner=partitions_of)
        restored = repository.loop.run(work)
    assert restored.rescaled is not None
    assert restored.stores == restored.rescaled.stores
    return restored.rescaled


def from_backup_on_spark(spark: SparkSession, source: Path, target: Path, partitions: int) -> RescaleFigures:
    restored = restore_on_spark(spark, backed_up(source, target), target, RestoreChoice(partitions=partitions))
    assert restored.rescaled is not None
    return restored.rescaled


Way = Callable[[SparkSession, Path, Path, int], RescaleFigures]
WAYS: Sequence[Way] = (here, on_spark, from_backup, from_backup_on_spark)


def check_rescaled(
    spark: SparkSession, tmp_path: Path, query: Query, conf: Mapping[str, str], steps: Sequence[tuple[int, Way]]
) -> None:
    (before, _), *after = steps
    conf = {**conf, PARTITIONS: str(before)}
    original = grown(spark, query, tmp_path / "query", conf)
    batch = original.committed()[-1]
    rows = everywhere(original, batch)
    place = original.checkpoint
    for partitions, way in after:
        target = tmp_path / f"to-{partitions}"
        made = way(spark, place, target, partitions)
        assert made.partitions == partitions
        if query is not TRANSFORM:  # of a list, Spark shows each element as a row
            assert made.keys_checked >= sum(map(Counter.total, rows))
        place = target
    report = asyncio.run(check_checkpoint(place))
    assert report.is_sound
    assert not report.warnings
    count = 1 if query is KEYLESS else after[-1][0]
    rescaled = StatefulQuery(spark, query, original.root, conf)
    rescaled.checkpoint = place
    assert everywhere(rescaled, batch) == rows
    for n, store in enumerate(query.stores):
        assert our_rows(rescaled, [batch], tmp_path / f"ours-{n}", store) == spark_rows(rescaled, [batch], store)

    described = spark.read.format("state-metadata").load(str(place)).select("numPartitions").distinct().collect()
    assert [row.numPartitions for row in described] == [count]
    # Spark takes the number of partitions from the logs, whatever its session says.
    original.feed(3)
    outputs: tuple[dict[int, Counter[Row]], ...] = ({}, {})
    for run, into in zip((original, rescaled), outputs, strict=True):
        run.run(sink=to_sink(into))
    newest = original.committed()[-1]
    assert rescaled.committed()[-1] == newest
    assert outputs[0] == outputs[1]
    assert min(outputs[1]) == batch + 1
    assert everywhere(rescaled, newest) == everywhere(original, newest)
    pinned = decode_offsets((place / "offsets" / str(newest)).read_bytes())
    assert (pinned.version, pinned.conf[PARTITIONS]) == (int(conf.get(OFFSETS_VERSION, "1")), str(after[-1][0]))
    assert {path.name for path in place.glob("state/0/[0-9]*")} == set(map(str, range(count)))


# One of them is short, and goes all ways.
CHAIN = (4, 2, 4, 1, 3)
RATIOS = ((4, 2), (2, 1), (2, 4), (4, 6), (6, 4), CHAIN)
KINDS = [
    (query, which, conf, numbers)
    for query in (AGGREGATION, DEDUPLICATION, MAP_GROUPS, TRANSFORM, join(2), join(3), join(4), KEYLESS)
    for which, conf in (("V1", V1), ("V2", V2), ("rows", {**V2, ROW_CHECKSUMS: "true", OFFSETS_VERSION: "2"}))
    for numbers in RATIOS
    if which == "V2" or query.name in {"aggregation", "transformWithState", "join2"}
] + [
    # Where one partition is pinned, nothing but the schema shows that there are no grouping keys, or some.
    (query, which, conf, numbers)
    for query in (KEYLESS, AGGREGATION)
    for which, conf in (("V1", V1), ("V2", V2))
    for numbers in ((1, 4), (4, 1, 4))
]


@pytest.mark.parametrize(
    "query, conf, steps",
    [
        pytest.param(
            query,
            conf,
            # Each step in another way, and the steps of each case from another way on.
            [(number, WAYS[(case + step - 1) % len(WAYS)]) for step, number in enumerate(numbers)],
            id=f"{query.name}-{which}-{'-'.join(map(str, numbers))}",
            marks=() if (query, which, numbers) == (AGGREGATION, "V2", CHAIN) else pytest.mark.soak,
        )
        for case, (query, which, conf, numbers) in enumerate(KINDS)
    ],
)
def test_a_rescaled_query_goes_on_as_if_nothing_had_happened(
    spark: SparkSession, tmp_path: Path, query: Query, conf: Mapping[str, str], steps: Sequence[tuple[int, Way]]
) -> None:
    check_rescaled(spark, tmp_path, query, conf, steps)


def test_a_key_that_lies_where_its_rule_does_not_say_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    original = grown(spark, AGGREGATION, tmp_path / "query", {**V1, PARTITIONS: "2"}, batches=2)
    # Else it may write a snapshot of one partition where the other one is by then.
    stop_maintenance(spark)
    state = original.checkpoint / "state" / "0"
    # The schema is in the first.
    for name in ("0", "1"):
        (state / name).rename(state / f"was-{name}")
    for name, was in (("0", "was-1"), ("1", "was-0")):
        (state / was).rename(state / name)
    (state / "1" / "_metadata").rename(state / "0" / "_metadata")
    for way in WAYS:
        for partitions in (1, 4):
            target = tmp_path / f"{way.__name__} {partitions}"
            with pytest.raises(MisplacedKeyError, match=r"key k='key-...' is in partition . of 2, and belongs in"):
                way(spark, original.checkpoint, target, partitions)
            assert not target.exists()


@pytest.mark.soak
@pytest.mark.parametrize("partitions", [2, 8])
def test_a_batch_that_was_planned_and_not_committed_keeps_its_number_and_its_rows(
    spark: SparkSession, tmp_path: Path, partitions: int
) -> None:
    original = grown(spark, AGGREGATION, tmp_path / "query", {**V2, PARTITIONS: "4"})
    planned = original.committed()[-1]
    original.forget_commits(planned)
    target = tmp_path / "elsewhere"
    asyncio.run(
        rescale_checkpoint(
            original.checkpoint, target, RescaleChoice(partitions=partitions), Here(partitioner=partitions_of)
        )
    )
    rescaled = StatefulQuery(spark, AGGREGATION, original.root, original.conf)
    rescaled.checkpoint = target
    assert rescaled.committed()[-1] == planned - 1
    outputs: tuple[dict[int, Counter[Row]], ...] = ({}, {})
    for run, into in zip((original, rescaled), outputs, strict=True):
        run.run(sink=to_sink(into))
    assert outputs[0] == outputs[1]
    assert set(outputs[1]) == {planned}
    assert everywhere(rescaled, planned) == everywhere(original, planned)


@pytest.mark.soak
def test_a_file_sink_has_every_row_once_over_two_rescalings(spark: SparkSession, tmp_path: Path) -> None:
    query = StatefulQuery(spark, DEDUPLICATION, tmp_path / "query", {**V2, PARTITIONS: "4"})
    output = tmp_path / "output"

    def run(checkpoint: Path) -> None:
        query.feed(2)
        reader = query.session().readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        rows = DEDUPLICATION.build([reader.json(str(query.root / "input-0"))])
        writer = rows.writeStream.format("json").option("checkpointLocation", str(checkpoint))
        writer.trigger(availableNow=True).start(str(output)).awaitTermination()

    place = query.checkpoint
    run(place)
    for partitions in (2, 6):
        target = tmp_path / f"to-{partitions}"
        asyncio.run(
            rescale_checkpoint(place, target, RescaleChoice(partitions=partitions), Here(partitioner=partitions_of))
        )
        place = target
        run(place)
    # The sink passes over a batch whose number it has.
    batches = sorted(int(path.name) for path in (output / "_spark_metadata").iterdir() if path.name.isdecimal())
    assert batches == list(range(6))
    words = [row.k for row in spark.read.schema(SCHEMA).json(str(output)).collect()]
    assert sorted(words) == sorted(f"key-{n:03d}" for n in range(19))
