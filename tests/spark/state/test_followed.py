"""A replica is Spark's own state, batch by batch, and its query goes on there once it is cut over (0011, Q1 to Q9)."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from engine.arrow.key_hashes import partitions_of
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.cutover import CutoverChoice, cut_over
from engine.checkpoint.follower import FollowChoice, opened_follower
from tests.spark.state.queries import (
    AGGREGATION,
    DEDUPLICATION,
    KEYLESS,
    MAP_GROUPS,
    REMINDING,
    ROW_CHECKSUMS,
    SESSION,
    TRANSFORM,
    WINDOWS,
    Query,
    StatefulQuery,
    join,
)
from tests.spark.state.test_hdfs_backed import HDFS
from tests.spark.state.test_rescaled import PARTITIONS, V1, V2, everywhere, to_sink
from tests.spark.state.test_restored import grown

pytestmark = pytest.mark.spark


def refusal_of(query: StatefulQuery) -> str:
    """What Spark says when the query is started."""
    # Of the JVM, or of PySpark.
    with pytest.raises(Exception, match=r"MappingException|MALFORMED_LOG_FILE") as refused:
        query.run()
    return str(refused.value)


def check_followed(
    spark: SparkSession, tmp_path: Path, query: Query, conf: Mapping[str, str], before: int, choice: FollowChoice
) -> None:
    original = grown(spark, query, tmp_path / "query", {**conf, PARTITIONS: str(before)}, batches=2)
    copy = StatefulQuery(spark, query, original.root, original.conf)
    copy.checkpoint = tmp_path / "target"

    async def follow() -> None:
        async with opened_follower(original.checkpoint, copy.checkpoint, choice, partitioner=partitions_of) as follower:
            await follower.step()
            for _ in range(4):
                original.feed(1)
                await asyncio.to_thread(original.run)
                step = await follower.step()
                assert step.copied == ""
                assert step.batches >= 1
                newest = original.committed()[-1]
                assert step.batch == newest
                # It can be read while it follows; Spark reads no HDFS-backed state so.
                assert choice.provider or await asyncio.to_thread(everywhere, copy, newest) == everywhere(
                    original, newest
                )

    asyncio.run(follow())
    assert "this is a replica of a running query; `tidemark spark cutover`" in refusal_of(copy)
    done = asyncio.run(
        cut_over(original.checkpoint, copy.checkpoint, CutoverChoice(wait_s=0), partitioner=partitions_of)
    )
    batch = original.committed()[-1]
    assert (done.batch, done.planned_batch, done.batches) == (batch, None, 0)
    report = asyncio.run(check_checkpoint(copy.checkpoint))
    assert report.is_sound, report.findings
    assert not report.warnings

    original.feed(3)
    assert "the query has moved to" in refusal_of(original)
    fence = original.checkpoint / "offsets" / str(batch + 1)
    assert str(copy.checkpoint) in fence.read_text()
    fence.unlink()
    outputs: tuple[dict[int, Counter[Row]], ...] = ({}, {})
    for run, into in zip((original, copy), outputs, strict=True):
        run.run(sink=to_sink(into))
    newest = original.committed()[-1]
    assert copy.committed()[-1] == newest
    assert outputs[0] == outputs[1]
    assert min(outputs[1]) == batch + 1
    assert choice.provider or everywhere(copy, newest) == everywhere(original, newest)


KINDS = [
    (query, which, conf, numbers)
    for query in (AGGREGATION, DEDUPLICATION, WINDOWS, SESSION, MAP_GROUPS, TRANSFORM, join(2), join(3), join(4))
    for which, conf in (("V1", V1), ("V2", V2), ("rows", {**V2, ROW_CHECKSUMS: "true"}))
    for numbers in ((4, 2), (2, 4), (4, 6), (3, None))
    if which == "V2" or query.name in {"aggregation", "transformWithState", "join2"}
] + [(query, "V2", V2, numbers) for query in (KEYLESS, REMINDING) for numbers in ((2, 4), (4, 2))]


@pytest.mark.parametrize(
    "query, conf, before, after",
    [
        pytest.param(
            query,
            conf,
            *numbers,
            id=f"{query.name}-{which}-{'-'.join(map(str, numbers))}",
            marks=() if (query, which, numbers) == (AGGREGATION, "V2", (4, 6)) else pytest.mark.soak,
        )
        for query, which, conf, numbers in KINDS
    ],
)
def test_a_followed_query_goes_on_at_its_replica(
    spark: SparkSession, tmp_path: Path, query: Query, conf: Mapping[str, str], before: int, after: int | None
) -> None:
    check_followed(spark, tmp_path, query, conf, before, FollowChoice(partitions=after, snapshot_every=2))


@pytest.mark.soak
@pytest.mark.parametrize("query", [AGGREGATION, DEDUPLICATION, SESSION, join(2)], ids=lambda query: query.name)
def test_a_query_that_is_hdfs_backed_is_followed_with_rocksdb(
    spark: SparkSession, tmp_path: Path, query: Query
) -> None:
    check_followed(spark, tmp_path, query, HDFS, 2, FollowChoice(provider="rocksdb", snapshot_every=2))
