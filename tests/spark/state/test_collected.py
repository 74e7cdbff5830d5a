"""A query goes on beside a collection of what its checkpoint has left behind (design 0014)."""

import asyncio
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.collect import CheckpointCollected, CheckpointLook, CollectChoice, collect_checkpoint
from tests.spark.state.queries import AGGREGATION, Query, StatefulQuery, join
from tests.spark.state.test_rescaled import PARTITIONS, V1, V2, everywhere
from tests.spark.state.test_restored import grown

pytestmark = pytest.mark.spark

STATE = "spark.sql.streaming.stateStore."
# Spark deletes whatever it may, as often as it can.
AGGRESSIVE = {
    PARTITIONS: "2",
    "spark.sql.streaming.minBatchesToRetain": "2",
    f"{STATE}minDeltasForSnapshot": "1",
    f"{STATE}maintenanceInterval": "200ms",
    f"{STATE}rocksdb.changelogCheckpointing.enabled": "true",
}
HOUR_MS = 3_600_000
UUID = str(uuid.UUID(int=7))


def plant(checkpoint: Path, *, has_ids: bool) -> set[str]:
    """Leave behind an orphan, which stays; with ids a lost attempt and a dead operator too, which are returned."""
    planted = set[str]()
    if has_ids:
        [some, *_] = sorted((checkpoint / "state" / "0" / "1").glob("*_*.changelog"))
        lost = f"state/0/1/{some.name.split('_')[0]}_{UUID}.changelog"
        shutil.copyfile(some, checkpoint / lost)
        planted = {lost, f"state/7/0/1_{UUID}.zip", f"state/7/0/SSTs/000001-{UUID}.sst"}
    for path in (*planted, f"state/0/1/SSTs/000001-{UUID}.sst"):
        file = checkpoint / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes(b"planted")
        os.utime(file, (time.time() - 7200,) * 2)
    return planted


def check_goes_on(spark: SparkSession, query: Query, conf: dict[str, str], root: Path, rounds: int) -> None:
    collected = grown(spark, query, root / "collected", AGGRESSIVE | conf, batches=4)
    twin = grown(spark, query, root / "twin", AGGRESSIVE | conf, batches=4)
    choice = CollectChoice(older_than_ms=HOUR_MS, taken_share_max=1)

    def look(before: CheckpointLook | None) -> tuple[CheckpointCollected, CheckpointLook]:
        return asyncio.run(collect_checkpoint(collected.checkpoint, root / "aside", before, choice))

    for _ in range(rounds):
        planted = plant(collected.checkpoint, has_ids=conf != V1)
        first, before = look(None)
        assert {each.path for each in first.found} <= planted
        feed(collected, twin)
        # Spark's maintenance may have deleted some of it by then.
        there = {path for path in planted if (collected.checkpoint / path).exists()}
        found, _ = look(before)
        assert {each.path for each in found.taken} <= planted
        assert not any((collected.checkpoint / path).exists() for path in there), (there, found)
        feed(collected, twin)
    newest = collected.committed()[-1]
    assert newest == twin.committed()[-1]
    assert everywhere(collected, newest) == everywhere(twin, newest)
    report = asyncio.run(check_checkpoint(collected.checkpoint))
    assert report.is_sound, report.findings


def feed(*queries: StatefulQuery) -> None:
    for query in queries:
        query.feed(2)
        query.run()


@pytest.mark.parametrize("conf", [V2, pytest.param(V1, marks=pytest.mark.soak)], ids=["V2", "V1"])
def test_a_query_goes_on_beside_a_collection(spark: SparkSession, tmp_path: Path, conf: dict[str, str]) -> None:
    check_goes_on(spark, AGGREGATION, conf, tmp_path, rounds=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
# A join commits several batches for each feed, and two looks have to have one in common.
@pytest.mark.parametrize("query, retained", [(AGGREGATION, 2), (join(3), 8)], ids=["aggregation", "join"])
def test_a_query_goes_on_beside_many_collections(
    spark: SparkSession, tmp_path: Path, query: Query, retained: int
) -> None:
    conf = V2 | {"spark.sql.streaming.minBatchesToRetain": str(retained)}
    check_goes_on(spark, query, conf, tmp_path, rounds=20)
