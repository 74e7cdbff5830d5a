"""A check that is spread over executors finds what one here finds (design 0005, section 4)."""

import asyncio
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.check import check_checkpoint as check_here
from engine.checkpoint.findings import CheckReport
from engine.errors import NotFoundError
from engine.spark.checkpoint import check_checkpoint
from tests.spark.state.queries import (
    AGGREGATION,
    CHANGELOGS,
    CODEC,
    DEDUPLICATION_AND_AGGREGATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    LIMIT,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SESSION,
    TRANSFORM,
    WINDOWS,
    Query,
    StatefulQuery,
    join,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "spark"


def test_the_same_is_found_on_executors(spark: SparkSession, tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "lost-attempts", tmp_path / "query")
    damaged = min(root.glob("state/0/0/SSTs/000008*.sst"))
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)

    async def check_in_a_notebook() -> CheckReport:
        """Where an event loop runs."""
        return check_checkpoint(spark, root)

    report = asyncio.run(check_in_a_notebook())
    # The sources were left out of this copy.
    damage = [f.path for f in report.of_kind("damage") if not f.path.startswith("sources/")]
    assert damage == [damaged.relative_to(root).as_posix()]
    here = asyncio.run(check_here(root))
    assert msgspec.structs.replace(report, seconds=0.0) == msgspec.structs.replace(here, seconds=0.0)


def test_a_checkpoint_without_state_is_checked_without_executors(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        check_checkpoint(spark, tmp_path)
    (tmp_path / "metadata").write_bytes(b'{"id":"5b0a2b5e-0000-4000-8000-000000000000"}')
    assert check_checkpoint(spark, tmp_path).stores == 0


ALL = (WINDOWS, DEDUPLICATION_WITHIN, DEDUPLICATION_AND_AGGREGATION, SESSION, MAP_GROUPS, LIMIT, TRANSFORM)
CONFS = (
    {FORMAT: "1"},
    {FORMAT: "2", CODEC: "zstd", ROW_CHECKSUMS: "true"},
    {FORMAT: "1", CHANGELOGS: "false"},
    {FORMAT: "2", CHANGELOGS: "false"},
    {FORMAT: "2", CODEC: "snappy"},
)


@pytest.mark.soak
@pytest.mark.parametrize("conf", CONFS, ids=lambda conf: "-".join(conf.values()))
@pytest.mark.parametrize("query", [*ALL, *map(join, (1, 2, 3, 4))], ids=lambda query: query.name)
def test_nothing_is_found_in_what_queries_write(
    spark: SparkSession, tmp_path: Path, query: Query, conf: dict[str, str]
) -> None:
    running = StatefulQuery(spark, query, tmp_path, conf)
    for _ in range(2):
        running.feed(3)
        running.run()
    report = asyncio.run(check_here(running.checkpoint))
    assert report.findings == ()
    assert report.batches >= 6
    assert report.versions > 0


@pytest.mark.soak
@pytest.mark.parametrize("version", ["1", "2"])
def test_nothing_is_found_while_a_query_runs_and_deletes(spark: SparkSession, tmp_path: Path, version: str) -> None:
    few = {FORMAT: version, "spark.sql.streaming.minBatchesToRetain": "2"}
    running = StatefulQuery(spark, AGGREGATION, tmp_path, few)
    running.feed(1)
    running.run()
    running.feed(40)
    thread = threading.Thread(target=running.run)
    thread.start()
    checks = 0
    while thread.is_alive():
        report = asyncio.run(check_here(running.checkpoint))
        assert report.findings == ()
        checks += 1
    thread.join()
    assert checks > 3
