"""A converted checkpoint is Spark's own: the query goes on from it in the other format as if nothing had happened."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import ConvertChoice, convert_checkpoint
from engine.errors import DamagedError
from engine.spark import convert_checkpoint as convert_on_spark
from index.errors import FormatError
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import (
    AGGREGATION,
    CODEC,
    DEDUPLICATION,
    DEDUPLICATION_AND_AGGREGATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    KEYLESS,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SESSION,
    TRANSFORM,
    WINDOWS,
    Query,
    join,
)
from tests.spark.state.test_restored import check_goes_on, grown, moved

pytestmark = pytest.mark.spark

EVERY = (
    AGGREGATION,
    KEYLESS,
    WINDOWS,
    DEDUPLICATION,
    DEDUPLICATION_WITHIN,
    DEDUPLICATION_AND_AGGREGATION,
    SESSION,
    MAP_GROUPS,
    TRANSFORM,
    join(2),
    join(3),
    join(4),
)
CASES = [
    pytest.param(
        query, before, after, id=f"{query.name}-{before}-to-{after}", marks=() if is_short else (pytest.mark.soak,)
    )
    for query in EVERY
    for before, after in (("1", "2"), ("2", "1"))
    for is_short in (query.name == "aggregation" and after == "2",)
]


def check_converted(
    spark: SparkSession,
    tmp_path: Path,
    query: Query,
    conf: Mapping[str, str],
    choice: ConvertChoice,
    after: Mapping[str, str],
) -> None:
    original = grown(spark, query, tmp_path / "query", conf)
    batch = original.committed()[-1]
    before = [spark_rows(original, [batch], store) for store in query.stores]

    done = asyncio.run(convert_checkpoint(original.checkpoint, tmp_path / "elsewhere", choice))

    assert done.batch == batch
    report = asyncio.run(check_checkpoint(tmp_path / "elsewhere"))
    assert report.is_sound
    assert not report.warnings
    converted = moved(spark, original, {**conf, **after}, tmp_path / "elsewhere")
    assert [spark_rows(converted, [batch], store) for store in query.stores] == before
    ours = [our_rows(converted, [batch], tmp_path / f"ours-{n}", store) for n, store in enumerate(query.stores)]
    assert ours == before
    check_goes_on(spark, original, converted, conf)
    # Spark has written in the new format, too.
    with_ids = [path.name for path in converted.checkpoint.glob("state/*/*/**/*.changelog") if "_" in path.name]
    assert bool(with_ids) == (after[FORMAT] == "2")


@pytest.mark.parametrize("query, before, after", CASES)
def test_a_converted_query_goes_on_as_if_nothing_had_happened(
    spark: SparkSession, tmp_path: Path, query: Query, before: str, after: str
) -> None:
    choice = ConvertChoice(format_version=1 if after == "1" else 2)
    check_converted(spark, tmp_path, query, {FORMAT: before}, choice, {FORMAT: after})


@pytest.mark.soak
@pytest.mark.parametrize("query", [AGGREGATION, TRANSFORM, join(2)], ids=lambda query: query.name)
def test_row_checksums_and_another_codec(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    conf = {FORMAT: "1", ROW_CHECKSUMS: "true", CODEC: "lz4"}
    choice = ConvertChoice(format_version=2, codec="zstd")
    check_converted(spark, tmp_path, query, conf, choice, {FORMAT: "2", CODEC: "zstd"})


def test_stores_are_converted_on_the_executors(spark: SparkSession, tmp_path: Path) -> None:
    original = grown(spark, AGGREGATION, tmp_path / "query", {FORMAT: "1"}, batches=3)
    batch = original.committed()[-1]
    rows = spark_rows(original, [batch])
    done = convert_on_spark(spark, original.checkpoint, tmp_path / "elsewhere", ConvertChoice(format_version=2))
    assert (done.batch, done.stores) == (batch, 2)
    assert asyncio.run(check_checkpoint(tmp_path / "elsewhere")).is_sound
    converted = moved(spark, original, {FORMAT: "2"}, tmp_path / "elsewhere")
    assert spark_rows(converted, [batch]) == rows
    newest = max(converted.checkpoint.glob("state/0/1/*.zip"))
    newest.write_bytes(newest.read_bytes()[:-30])
    with pytest.raises((DamagedError, FormatError), match=newest.name):
        convert_on_spark(spark, converted.checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()
