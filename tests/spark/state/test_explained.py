"""What `spark explain` says of Spark's own queries: against Spark SQL over all rows, and requests that were counted."""

import asyncio
import time
from pathlib import Path
from typing import Final

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
import pytest
from pyspark.sql import SparkSession

from blobstore.checkpoint_files import FileStatus
from engine.checkpoint.explain import ExplainChoice, StateExplained, explain_checkpoint
from engine.spark.checkpoint import explain_checkpoint as explain_on_spark
from engine.state.checkpoint_dir import opened_checkpoint
from index.spark.requests import Prices, measure_requests
from tests.spark.file_events import FileEvents
from tests.spark.sources.reading import by_spark, by_us, ran, reading_session
from tests.spark.state.queries import (
    CHANGELOGS,
    DEDUPLICATION_WITHIN,
    FORMAT,
    SESSION,
    STORE,
    WINDOWS,
    StatefulQuery,
    stop_maintenance,
)

pytestmark = pytest.mark.spark

FULL: Final = ExplainChoice(full=True)
HOUR_MS: Final = 3_600_000
# What counted requests cost, by S3's list prices of a thousand; deletes cost nothing.
USD: Final = {"PUT": 0.005, "COPY": 0.005, "LIST": 0.005, "GET": 0.0004, "DELETE": 0.0}
EVENT_TIMES: Final = {
    WINDOWS.name: "unix_millis(key.window.end)",
    SESSION.name: "unix_millis(value.session_window.end)",
    DEDUPLICATION_WITHIN.name: "value.expiresAtMicros div 1000",
}


def explained(query: StatefulQuery, choice: ExplainChoice | None = None) -> StateExplained:
    return asyncio.run(explain_checkpoint(query.checkpoint, choice))


@pytest.mark.parametrize(
    "query",
    [WINDOWS, *(pytest.param(of, marks=pytest.mark.soak) for of in (SESSION, DEDUPLICATION_WITHIN))],
    ids=lambda query: query.name,
)
def test_full_figures_are_those_of_spark_sql_over_all_rows(spark: SparkSession, tmp_path: Path, query: object) -> None:
    made = ran(spark, query, tmp_path, {FORMAT: "2"}, batches=4)  # type: ignore[arg-type]
    session, found = reading_session(made), explained(made, FULL)
    (operator,) = found.operators
    (family,) = operator.families
    rows = by_spark(session, made).withColumn("at_ms", F.expr(EVENT_TIMES[made.query.name]))
    assert found.watermark_ms is not None
    left = F.col("at_ms") - found.watermark_ms
    counted, oldest, newest, due, soon = rows.agg(
        F.count("*"), F.min("at_ms"), F.max("at_ms"), F.count_if(left <= 0), F.count_if((left > 0) & (left <= HOUR_MS))
    ).collect()[0]
    assert operator.rows == family.rows == counted > 0
    assert family.ages is not None
    assert family.ages.expires
    assert (family.ages.oldest_ms, family.ages.newest_ms) == (oldest, newest)
    assert (family.ages.due, family.ages.within_1h, family.ages.within_1d) == (due, soon, 0)
    by_partition = {row.partition: row["count"] for row in rows.groupBy("partition").count().collect()}
    assert {of.partition: of.rows for of in found.stores if of.rows} == by_partition
    size = F.sum(F.length("key") + F.length("value"))
    assert by_us(session, made, rows="bytes").agg(size).collect()[0][0] == operator.row_bytes
    # By the column `k` alone.
    heaviest = {row.k: row["count"] for row in rows.groupBy(F.col("key.k").alias("k")).count().collect()}
    assert all(heaviest[group.key.removeprefix("k=")] == group.rows for group in family.heaviest)
    assert not family.heaviest_error_bytes
    # Quick, as the batch of each snapshot left them.
    for of in explained(made).stores:
        then = by_spark(session, made, batch=of.batch).where(F.col("partition") == of.partition).count()
        assert of.rows == then
    assert explain_on_spark(spark, made.checkpoint).operators == found.operators


@pytest.mark.soak
@pytest.mark.parametrize("conf", [{FORMAT: "2"}, {FORMAT: "1", CHANGELOGS: "false"}], ids=["changelogs", "snapshots"])
def test_a_price_is_within_a_tenth_of_requests_that_were_counted(
    spark: SparkSession, tmp_path: Path, conf: dict[str, str]
) -> None:
    """They are counted while the query runs, as `FileEvents` sees them; a second run has all directories.

    Both are of this run alone, without the snapshots that Spark uploads once more when it unloads the stores.
    """
    conf = conf | {"spark.sql.shuffle.partitions": "5", f"{STORE}minDeltasForSnapshot": "5"}
    query = ran(spark, WINDOWS, tmp_path, conf)
    stop_maintenance(spark)
    before, prices = query.committed(), Prices()
    query.feed(20)
    with FileEvents(query.checkpoint) as events:
        query.run()
    stop_maintenance(spark)
    counted_usd = sum(count * USD[name] for name, count in events.counts.items()) / 1000
    began_ms = (query.checkpoint / "commits" / str(before[-1])).stat().st_mtime * 1000
    listed = [of for of in asyncio.run(listing(query)) if of.modified_at_ms >= int(began_ms)]
    rate = measure_requests(listed)
    assert rate is not None
    batches = len(query.committed()) - len(before)
    found_usd = rate.requests_usd_per_day(prices) / rate.batches_per_day * batches
    assert found_usd == pytest.approx(counted_usd, rel=0.1), dict(events.counts)


@pytest.mark.soak
@pytest.mark.timeout(3 * HOUR_MS // 1000)
def test_a_price_is_within_a_tenth_of_requests_that_were_counted_over_an_hour(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of a query that runs all the time, with a batch every ten seconds and Spark's own intervals of maintenance."""
    usual = {f"{STORE}maintenanceInterval": "60s", f"{STORE}minDeltasForSnapshot": "10"}
    conf = {FORMAT: "2", "spark.sql.shuffle.partitions": "5", **usual}
    query = StatefulQuery(spark, WINDOWS, tmp_path, conf)
    query.feed(3)
    query.run()
    stop_maintenance(spark)
    live = query.start("10 seconds")
    try:
        with FileEvents(query.checkpoint) as events:
            ends_at_s = time.monotonic() + HOUR_MS / 1000
            while time.monotonic() < ends_at_s:
                query.feed()
                time.sleep(10)
    finally:
        live.stop()
    counted_usd = sum(count * USD[name] for name, count in events.counts.items()) / 1000
    cost = explained(query).cost
    assert cost is not None
    assert cost.requests_usd_per_day / 24 == pytest.approx(counted_usd, rel=0.1), (dict(events.counts), cost)


async def listing(query: StatefulQuery) -> tuple[FileStatus, ...]:
    async with opened_checkpoint(query.checkpoint) as root:
        return await root.walk()
