"""Attempts at a batch that lost, and queries whose settings change: what is committed is what is read.

A run stamps the state with its number, so that two attempts at one version never hold the same bytes.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
import pytest
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from engine.state.query import StreamingCheckpoint
from engine.state.store import StateStore
from index.spark.names import StateVersion, changelog_name, parse_state_name
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import AGGREGATION, CHANGELOGS, CODEC, FORMAT, StatefulQuery

pytestmark = pytest.mark.spark

V2 = {FORMAT: "2", CODEC: "zstd"}
ON = {CHANGELOGS: "true"}
OFF = {CHANGELOGS: "false"}

Build = Callable[[Sequence[DataFrame]], DataFrame]


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> StatefulQuery:
    return StatefulQuery(spark, AGGREGATION, tmp_path, V2)


def stamped(run: int) -> Build:
    return lambda sources: sources[0].groupBy("k").agg(F.count("*").alias("n"), F.max(F.lit(run)).alias("run"))


def check_rows(query: StatefulQuery) -> dict[tuple[int, int], StateVersion]:
    """Every committed version by Spark's reader and ours. Returns which versions those are."""
    versions: dict[tuple[int, int], StateVersion] = {}
    ours = our_rows(query, query.committed(), query.root, versions=versions)
    assert ours == spark_rows(query, query.committed())
    return versions


def attempts(query: StatefulQuery, partition: int = 0) -> dict[int, set[StateVersion]]:
    """By version: every attempt that left a changelog or a snapshot."""
    found: dict[int, set[StateVersion]] = {}
    for file in (query.checkpoint / f"state/0/{partition}").iterdir():
        name = parse_state_name(file.name)
        if name is not None and not name.checksum:
            found.setdefault(name.of.version, set()).add(name.of)
    return found


async def write_as_another_attempt(query: StatefulQuery, batch: int, directory: Path) -> set[StateVersion]:
    """What a task does that worked on a batch too, and comes late: its own changelog of the same version."""
    checkpoint = await StreamingCheckpoint.open(query.checkpoint)
    written = set()
    for partition in range(2):
        files = checkpoint.state_dir(0, partition)
        settings = (await checkpoint.state(batch=batch - 1)).settings
        async with await StateStore.open(files, directory / f"late-{partition}", settings) as store:
            before = (await checkpoint.state(0, partition, batch=batch - 1)).at
            await store.load(before.version, before.unique_id)
            for key, value in list(store.items()):
                # The count of the row: a word after the byte of the encoder and the word of what is null.
                store.put(key, value[:9] + (1_000_000).to_bytes(8, "little") + value[17:])
            committed = await store.commit()
            written.add(StateVersion(committed.version, committed.unique_id))
    await checkpoint.close()
    return written


def counts(query: StatefulQuery, batch: int) -> set[int]:
    """The counts in the state after a batch, as we read them."""
    rows = our_rows(query, [batch], query.root)
    return {int.from_bytes(value[8:16], "little") for counter in rows.values() for _, _, value in counter}


@pytest.mark.soak
@pytest.mark.spark_case(45)
def test_an_attempt_whose_commit_was_never_written_counts_for_nothing(query: StatefulQuery) -> None:
    """A commit file is removed and the batch run again: the id in the new one is the only one that counts."""
    query.feed(3)
    query.run(build=stamped(1))
    (lost,) = attempts(query)[3]
    query.forget_commits(2)
    query.feed(2)
    query.run(build=stamped(2))
    versions = check_rows(query)
    assert len(versions) == 10
    assert attempts(query)[3] == {lost, versions[2, 0]}
    assert versions[2, 0] != lost


@pytest.mark.soak
@pytest.mark.spark_case(45)
def test_of_many_lost_attempts_none_counts(query: StatefulQuery) -> None:
    query.feed(5)
    query.run(build=stamped(1))
    for run in (2, 3, 4):
        query.forget_commits(4)
        query.run(build=stamped(run))
    versions = check_rows(query)
    found = attempts(query)
    assert [len(found[version]) for version in range(1, 6)] == [1, 1, 1, 1, 4]
    assert all(versions[version - 1, 0] in found[version] for version in found)


@pytest.mark.soak
@pytest.mark.spark_case(34)
@pytest.mark.parametrize("phases", [(ON, OFF, ON), (OFF, ON, OFF)], ids=["on, off, on", "off, on, off"])
def test_changelogs_may_come_and_go(query: StatefulQuery, phases: tuple[dict[str, str], ...]) -> None:
    for phase in phases:
        query.feed(3)
        query.run(phase)
    versions = check_rows(query)
    names = {file.name for file in (query.checkpoint / "state/0/0").iterdir()}
    has_changelog = [changelog_name(versions[batch, 0]) in names for batch in range(9)]
    assert has_changelog == [phase is ON for phase in phases for _ in range(3)]


@pytest.mark.soak
@pytest.mark.spark_case(35)
@pytest.mark.parametrize("changelogs", [ON, OFF], ids=["changelogs", "snapshots only"])
def test_two_jobs_of_one_batch_are_two_attempts(query: StatefulQuery, changelogs: dict[str, str]) -> None:
    def twice(rows: DataFrame, batch: int) -> None:
        rows.collect()
        rows.collect()

    query.feed(5)
    query.run(changelogs, sink=twice)
    versions = check_rows(query)
    found = attempts(query)
    assert all(len(found[batch + 1]) == 2 and versions[batch, 0] in found[batch + 1] for batch in range(5))


def fail_first(value: int) -> int:
    """Fails the first attempt at a task: at the end of it, when its state is committed already."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0 and context.partitionId() == 0:
        raise RuntimeError("the first attempt fails")
    return value


def fail_first_row(row: Row) -> None:
    """The same, as a sink."""
    fail_first(0)


@pytest.mark.soak
@pytest.mark.spark_case(36)
@pytest.mark.parametrize("place", ["in the query", "in foreach"])
def test_a_task_that_was_tried_again_has_one_state(spark: SparkSession, tmp_path: Path, place: str) -> None:
    query = StatefulQuery(spark, AGGREGATION, tmp_path, V2)
    query.feed(5)
    if place == "in the query":
        fails = F.udf(fail_first, "long", useArrow=False)
        query.run(build=lambda sources: stamped(1)(sources).withColumn("n", fails("n")))
    else:
        query.run(build=stamped(1), foreach=fail_first_row)
    versions = check_rows(query)
    found = attempts(query)
    assert all(versions[batch, 0] in found[batch + 1] for batch in range(5))
    if place == "in the query":
        assert any(len(each) == 2 for each in found.values()), "no attempt came as far as to leave a state"


@pytest.mark.soak
@pytest.mark.spark_case(37)
def test_a_query_that_failed_and_was_started_again_has_one_state(query: StatefulQuery) -> None:
    def failing(rows: DataFrame, batch: int) -> None:
        rows.collect()
        if batch == 3:
            raise RuntimeError("the machine is gone")

    query.feed(6)
    with pytest.raises(StreamingQueryException, match="the machine is gone"):
        query.run(build=stamped(1), sink=failing)
    assert query.committed() == (0, 1, 2)
    (lost,) = attempts(query)[4]
    query.run(build=stamped(2))
    versions = check_rows(query)
    assert attempts(query)[4] == {lost, versions[3, 0]}
    assert versions[3, 0] != lost


@pytest.mark.soak
@pytest.mark.spark_case(44)
@pytest.mark.parametrize("committed", [True, False], ids=["after the commit", "before it"])
def test_a_changelog_that_comes_late_counts_for_nothing(
    query: StatefulQuery, tmp_path: Path, *, committed: bool
) -> None:
    query.feed(4)
    query.run(build=stamped(1))
    if not committed:
        query.forget_commits(3)
    late = asyncio.run(write_as_another_attempt(query, 3, tmp_path))
    query.run(build=stamped(1))
    query.feed(2)
    query.run(build=stamped(1))
    versions = check_rows(query)
    assert late & attempts(query)[4]
    assert not late & set(versions.values())
    assert max(counts(query, 3)) < 1_000_000


@pytest.mark.soak
@pytest.mark.spark_case(44)
def test_without_ids_a_changelog_that_comes_late_takes_the_place_of_the_committed_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What format 2 is there to prevent: Spark's reader and ours both see the late one."""
    query = StatefulQuery(
        spark, AGGREGATION, tmp_path, {FORMAT: "1"} | {"spark.sql.streaming.stateStore.minDeltasForSnapshot": "9"}
    )
    query.feed(4)
    query.run(build=stamped(1))
    assert max(counts(query, 3)) < 1_000_000
    asyncio.run(write_as_another_attempt(query, 3, tmp_path))
    check_rows(query)
    assert counts(query, 3) == {1_000_000}
