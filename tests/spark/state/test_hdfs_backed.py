"""State of Spark's HDFS-backed provider: backed up, restored and converted, and its query goes on from there."""

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import ConvertChoice, convert_checkpoint
from engine.state.settings import HDFS_PROVIDER, ROCKSDB_PROVIDER
from tests.spark.checkpoint.shows import Show
from tests.spark.state.queries import (
    AGGREGATION,
    CODEC,
    DEDUPLICATION,
    DEDUPLICATION_AND_AGGREGATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    KEYLESS,
    LIMIT,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SESSION,
    STORE,
    WINDOWS,
    Query,
    join,
)
from tests.spark.state.test_restored import back_up, restore

pytestmark = pytest.mark.spark

HDFS = {f"{STORE}providerClass": HDFS_PROVIDER}
ROCKSDB = {f"{STORE}providerClass": ROCKSDB_PROVIDER}
EVERY = (
    AGGREGATION,
    SESSION,
    WINDOWS,
    DEDUPLICATION,
    DEDUPLICATION_WITHIN,
    DEDUPLICATION_AND_AGGREGATION,
    MAP_GROUPS,
    join(2),
    join(3),
    LIMIT,
    KEYLESS,
)
SHORT = {"aggregation"}
queries = pytest.mark.parametrize(
    "query",
    [pytest.param(query, marks=() if query.name in SHORT else (pytest.mark.soak,), id=query.name) for query in EVERY],
)


@queries
@pytest.mark.parametrize("rows", ["", pytest.param("summed", marks=pytest.mark.soak)])
def test_every_way_on_leads_to_the_results_of_a_run_that_never_failed(
    spark: SparkSession, tmp_path: Path, url: str, query: Query, rows: str
) -> None:
    conf = HDFS | {ROW_CHECKSUMS: str(bool(rows)).lower()}
    whole = Show(spark, query, tmp_path / "show", conf, batches=8)
    expected = whole.run("expected", tmp_path / "uninterrupted")
    # The same input once more, taken back to what was committed after batch 4.
    whole.run("sink")
    whole.forget_commits(5)
    assert asyncio.run(check_checkpoint(whole.checkpoint)).is_sound

    asyncio.run(back_up(url, whole._stateful))
    for name, replayed, batch in (("plain", False, None), ("replayed", True, None), ("older", False, 3)):
        target = tmp_path / "elsewhere" / name
        restored = asyncio.run(restore(url, target, replayed=replayed, batch=batch))
        assert restored.batch == (batch or 4)
        whole.copy_results("sink", name)
        assert whole.run(name, target) == expected
    for name, choice, after in (
        ("rocksdb", ConvertChoice(provider="rocksdb"), ROCKSDB | {FORMAT: "1"}),
        ("ids", ConvertChoice(provider="rocksdb", format_version=2, codec="zstd"), ROCKSDB | {FORMAT: "2"}),
        ("codec", ConvertChoice(codec="snappy"), HDFS | {CODEC: "snappy"}),
    ):
        target = tmp_path / "elsewhere" / name
        asyncio.run(convert_checkpoint(whole.checkpoint, target, choice))
        report = asyncio.run(check_checkpoint(target))
        assert report.is_sound
        assert not report.warnings
        converted = Show(spark, query, tmp_path / "show", conf | after, batches=8, is_fed=True)
        whole.copy_results("sink", name)
        assert converted.run(name, target) == expected
        written = {path.suffix for path in target.glob("state/**/[0-9]*.*")}
        assert bool(written & {".delta"}) == (name == "codec")
        assert asyncio.run(check_checkpoint(target)).is_sound
