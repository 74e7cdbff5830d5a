"""A checkpoint that was restored is Spark's own: its reader sees the same rows, and its query goes on from there."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, RestoredCheckpoint, restore_checkpoint
from engine.errors import IncompleteError
from engine.repository.repository import Repository, SyncRepository
from engine.spark.checkpoint import restore_checkpoint as restore_on_spark
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import AGGREGATION, FORMAT, ROW_CHECKSUMS, STORE, TRANSFORM, Query, StatefulQuery, join

pytestmark = pytest.mark.spark

Case = tuple[Query, Mapping[str, str], bool]
V1, V2 = {FORMAT: "1"}, {FORMAT: "2"}
ROWS_SUMMED = {FORMAT: "2", ROW_CHECKSUMS: "true"}


async def back_up(url: str, query: StatefulQuery) -> None:
    async with await Repository.open(url) as repository:
        await backup_checkpoint(repository, query.checkpoint)


async def restore(url: str, target: Path, *, replayed: bool = False, batch: int | None = None) -> RestoredCheckpoint:
    async with await Repository.open(url) as repository:
        return await restore_checkpoint(repository, target, RestoreChoice(replayed=replayed, batch=batch))


def grown(spark: SparkSession, query: Query, root: Path, conf: Mapping[str, str], batches: int = 5) -> StatefulQuery:
    made = StatefulQuery(spark, query, root, conf)
    made.feed(batches)
    made.run()
    return made


def moved(spark: SparkSession, query: StatefulQuery, conf: Mapping[str, str], checkpoint: Path) -> StatefulQuery:
    """The same query with the same input, on another checkpoint; the first one is gone."""
    query.checkpoint.rename(query.root / "gone")
    other = StatefulQuery(spark, query.query, query.root, conf)
    other.checkpoint = checkpoint
    return other


def check_goes_on(spark: SparkSession, query: StatefulQuery, restored: StatefulQuery, conf: Mapping[str, str]) -> None:
    """Both queries get the same further batches, and their states are the same after each."""
    before = restored.committed()[-1]
    query.feed(2)
    restored.run()
    newest = restored.committed()[-1]
    assert newest >= before + 2
    after = [spark_rows(restored, [newest], store) for store in restored.query.stores]
    uninterrupted = StatefulQuery(spark, query.query, query.root, conf)
    uninterrupted.checkpoint = query.root / "gone"
    # Its schema files were where they are named.
    uninterrupted.checkpoint.rename(query.checkpoint)
    uninterrupted.checkpoint = query.checkpoint
    uninterrupted.run()
    assert uninterrupted.committed()[-1] == newest
    assert after == [spark_rows(uninterrupted, [newest], store) for store in restored.query.stores]


CASES = [
    pytest.param((TRANSFORM, V2, True), id="transformWithState-V2-replayed", marks=pytest.mark.soak),
    pytest.param((AGGREGATION, V1, True), id="aggregation-V1-replayed", marks=pytest.mark.soak),
    pytest.param((join(2), V2, True), id="join2-V2-replayed", marks=pytest.mark.soak),
    pytest.param((join(3), V2, True), id="join3-V2-replayed", marks=pytest.mark.soak),
    pytest.param((join(4), V2, True), id="join4-V2-replayed", marks=pytest.mark.soak),
    pytest.param((join(3), V2, False), id="join3-V2", marks=pytest.mark.soak),
    pytest.param((TRANSFORM, V2, False), id="transformWithState-V2", marks=pytest.mark.soak),
    pytest.param((TRANSFORM, V1, True), id="transformWithState-V1-replayed", marks=pytest.mark.soak),
    pytest.param((TRANSFORM, ROWS_SUMMED, True), id="transformWithState-rows-replayed", marks=pytest.mark.soak),
    pytest.param((AGGREGATION, ROWS_SUMMED, True), id="aggregation-rows-replayed", marks=pytest.mark.soak),
    pytest.param((AGGREGATION, V2, False), id="aggregation-V2", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("case", CASES)
def test_a_restored_query_goes_on_as_if_nothing_had_happened(
    spark: SparkSession, tmp_path: Path, url: str, case: Case
) -> None:
    query, conf, replayed = case
    original = grown(spark, query, tmp_path / "query", conf)
    asyncio.run(back_up(url, original))
    batch = original.committed()[-1]
    before = [spark_rows(original, [batch], store) for store in query.stores]

    found = asyncio.run(restore(url, tmp_path / "elsewhere", replayed=replayed))

    assert (found.batch, found.moved_aside) == (batch, "")
    restored = moved(spark, original, conf, tmp_path / "elsewhere")
    assert [spark_rows(restored, [batch], store) for store in query.stores] == before
    ours = [our_rows(restored, [batch], tmp_path / f"ours-{n}", store) for n, store in enumerate(query.stores)]
    assert ours == before
    if replayed:
        assert not list(restored.checkpoint.rglob("*.changelog"))
    check_goes_on(spark, original, restored, conf)


@pytest.mark.soak
@pytest.mark.parametrize("batch", [1, 10])
def test_an_older_batch_goes_on_with_the_batches_that_came_after_it(
    spark: SparkSession, tmp_path: Path, url: str, batch: int
) -> None:
    conf = {FORMAT: "2", f"{STORE}minDeltasForSnapshot": "100"}  # so that every batch can be restored
    seen: list[dict[int, list[Row]]] = [{}, {}]

    def run(query: StatefulQuery, into: dict[int, list[Row]]) -> None:
        query.run(sink=lambda rows, number: into.update({number: sorted(rows.collect())}))

    original = StatefulQuery(spark, AGGREGATION, tmp_path / "query", conf)
    original.feed(14)
    run(original, seen[0])
    # As Spark leaves the log of a source some time after it was compacted.
    for entry in range(9):
        (original.checkpoint / f"sources/0/{entry}").unlink()
    asyncio.run(back_up(url, original))

    asyncio.run(restore(url, tmp_path / "elsewhere", batch=batch))

    restored = moved(spark, original, conf, tmp_path / "elsewhere")
    run(restored, seen[1])
    assert sorted(seen[1]) == list(range(batch + 1, 14))
    assert seen[1] == {number: rows for number, rows in seen[0].items() if number > batch}


def test_stores_are_restored_on_the_executors(spark: SparkSession, tmp_path: Path, url: str) -> None:
    original = grown(spark, AGGREGATION, tmp_path / "query", V2)
    asyncio.run(back_up(url, original))
    before = spark_rows(original, [4])
    shutil.copytree(original.checkpoint, tmp_path / "elsewhere")
    with SyncRepository.open(url) as repository:
        newest = repository.latest(repository.scopes()[0])
    assert newest is not None
    index = tmp_path / "repository" / next(r.index.key for r in newest.record.stores if r.task == "0-1")
    data = index.read_bytes()
    index.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    altered = r"read index indexes/.* \(state/0/1\); 1 of 2 stores failed$"
    with pytest.raises(IncompleteError, match=altered):
        restore_on_spark(spark, url, tmp_path / "elsewhere", RestoreChoice(move_aside=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "query", "repository"]
    index.write_bytes(data)

    found = restore_on_spark(spark, url, tmp_path / "elsewhere", RestoreChoice(replayed=True, move_aside=True))

    assert found.stores == 2
    assert Path(found.moved_aside).name.startswith("elsewhere.aside-")
    restored = moved(spark, original, V2, tmp_path / "elsewhere")
    assert spark_rows(restored, [4]) == before
    assert not list(restored.checkpoint.rglob("*.changelog"))
