"""What Spark's queries leave is what we read: every committed version, row by row, by Spark's own reader."""

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from engine.state.changelogs import open_changelog
from engine.state.query import StreamingCheckpoint
from index.snapshot.model import LineageItem
from index.spark.names import changelog_name, snapshot_name
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import (
    AGGREGATION,
    CHANGELOGS,
    CODEC,
    DEDUPLICATION,
    DEDUPLICATION_AND_AGGREGATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    JOIN_FORMAT,
    LIMIT,
    MAP_GROUPS,
    PARTITIONS,
    ROW_CHECKSUMS,
    SESSION,
    STORE,
    TRANSFORM,
    WINDOWS,
    Query,
    StatefulQuery,
    join,
    lend_schemas,
)

pytestmark = pytest.mark.spark

BATCHES: Final = 6
# Of the whole query; one where it is not here.
STORES: Final = {"join2": 4, DEDUPLICATION_AND_AGGREGATION.name: 2}
MERGE_OPERATOR: Final = f"{STORE}rocksdb.mergeOperatorVersion"

V1: Final = {FORMAT: "1"}
V2: Final = {FORMAT: "2"}
SNAPSHOTS_ONLY: Final = {CHANGELOGS: "false"}


class Case(msgspec.Struct, frozen=True):
    query: Query
    conf: dict[str, str]

    @override
    def __repr__(self) -> str:
        said = [self.query.name, f"V{self.conf[FORMAT]}"]
        said += [value for key, value in self.conf.items() if key == CODEC]
        said += ["no changelogs"] * (CHANGELOGS in self.conf)
        said += ["row checksums"] * (ROW_CHECKSUMS in self.conf)
        said += ["commas"] * (MERGE_OPERATOR in self.conf)
        return " ".join(said)


# Two ways to encode a key, lists and maps, both formats; joins are read in tests/spark/sources. `test_attempts` and
# `test_written_by_us` have an aggregation.
FEW: Final = (Case(TRANSFORM, V2), Case(SESSION, V1 | SNAPSHOTS_ONLY))

_QUERIES: Final = (
    AGGREGATION,
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
ALL: Final = (
    *(Case(query, form | changelogs) for query in _QUERIES for form in (V1, V2) for changelogs in ({}, SNAPSHOTS_ONLY)),
    *(
        Case(query, form | {CODEC: codec})
        for query in (AGGREGATION, TRANSFORM)
        for form in (V1, V2)
        for codec in ("zstd", "snappy", "lzf")
    ),
    Case(join(4), V1 | {CODEC: "snappy"}),
    *(Case(query, form | {ROW_CHECKSUMS: "true"}) for query in (AGGREGATION, TRANSFORM, join(4)) for form in (V1, V2)),
    *(Case(query, V2 | {MERGE_OPERATOR: "1"}) for query in (TRANSFORM, join(4))),
    Case(TRANSFORM, V2 | {MERGE_OPERATOR: "1", ROW_CHECKSUMS: "true"}),
)


def check_rows(query: StatefulQuery, directory: Path, *, batches_min: int = BATCHES) -> None:
    """Every version of every store of every operator, and that the test is about something."""
    batches = query.committed()
    assert len(batches) >= batches_min
    operators = asyncio.run(_operators(query))
    assert operators
    for operator, stores in operators.items():
        for store in stores:
            theirs = spark_rows(query, batches, store, operator)
            ours = our_rows(query, batches, directory / str(operator), store, operator)
            assert ours == theirs
            assert {batch for batch, _ in theirs} == set(batches)
            states = {frozenset(rows.items()) for rows in theirs.values()}
            assert len(states) > 2, "the state hardly changes: nothing is shown"


async def _operators(query: StatefulQuery) -> dict[int, tuple[str, ...]]:
    checkpoint = await StreamingCheckpoint.open(query.checkpoint)
    found = {operator.id: operator.stores for operator in (await checkpoint.at()).operators}
    assert await checkpoint.committed_batches() == query.committed()
    await checkpoint.close()
    return found


async def check_chain(query: StatefulQuery, *, changelogs: bool) -> int:
    """Ids in the commit log are those of files, and headers lead from each to the one before. Returns how many."""
    checkpoint = await StreamingCheckpoint.open(query.checkpoint)
    checked = 0
    for operator in (await checkpoint.at()).operators:
        for partition in range(operator.partitions_count):
            for store in operator.stores:
                before: LineageItem | None = None
                files = checkpoint.state_dir(operator.id, partition, store)
                names = {status.name for status in await files.list()}
                for batch in query.committed():
                    of = (await checkpoint.state(operator.id, partition, store, batch=batch)).at
                    assert of.unique_id is not None
                    assert of.version == batch + 1
                    if changelogs:
                        assert files.local_root is not None
                        codec = (await checkpoint.state(operator.id, store=store, batch=batch)).settings.codec
                        with open_changelog(files.local_root / changelog_name(of), codec) as changelog:
                            lineage = changelog.header.lineage
                        assert lineage[-1:] == (() if before is None else (before,))
                    else:
                        assert snapshot_name(of) in names
                    before = LineageItem(of.version, of.unique_id)
                    checked += 1
    await checkpoint.close()
    return checked


@pytest.mark.parametrize("case", FEW, ids=repr)
def test_every_version_is_what_sparks_reader_says(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    query = StatefulQuery(spark, case.query, tmp_path, case.conf)
    query.feed(4)
    query.run()
    check_rows(query, tmp_path, batches_min=4)


@pytest.mark.soak
@pytest.mark.spark_case(38)
@pytest.mark.parametrize("case", ALL, ids=repr)
def test_every_version_of_every_query_is_what_sparks_reader_says(
    spark: SparkSession, tmp_path: Path, case: Case
) -> None:
    query = StatefulQuery(spark, case.query, tmp_path, case.conf)
    query.feed(BATCHES)
    query.run()
    check_rows(query, tmp_path)
    if case.conf[FORMAT] == "2":
        checked = asyncio.run(check_chain(query, changelogs=CHANGELOGS not in case.conf))
        assert checked == STORES.get(case.query.name, 1) * PARTITIONS * len(query.committed())


@pytest.mark.soak
@pytest.mark.parametrize("form", [V1, V2], ids=["V1", "V2"])
def test_a_join_of_the_first_state_format_too(spark: SparkSession, tmp_path: Path, form: dict[str, str]) -> None:
    """Spark 4.3 starts one only if it is set not to care for its schema, which its reader is then lent."""
    lender = StatefulQuery(spark, join(2), tmp_path / "lender", form)
    query = StatefulQuery(spark, join(1), tmp_path / "query", form)
    for each in (lender, query):
        each.feed(BATCHES)
        each.run()
    lend_schemas(query, lender)
    assert query.conf[JOIN_FORMAT] == "1"
    check_rows(query, tmp_path)


@pytest.mark.soak
@pytest.mark.spark_case(38)
@pytest.mark.parametrize("changelogs", [True, False], ids=["changelogs", "snapshots only"])
def test_a_limit_keeps_one_partition(spark: SparkSession, tmp_path: Path, *, changelogs: bool) -> None:
    """Spark writes no schema for it, so that its own reader cannot read it; ours can."""
    query = StatefulQuery(spark, LIMIT, tmp_path, V2 | ({} if changelogs else SNAPSHOTS_ONLY))
    query.feed(BATCHES)
    query.run()
    assert asyncio.run(check_chain(query, changelogs=changelogs)) == len(query.committed())
    rows = our_rows(query, query.committed(), tmp_path)
    counts = [int.from_bytes(value[8:16], "little") for (_, _), found in sorted(rows.items()) for _, _, value in found]
    assert counts == [14, 20, 20, 20, 20, 20]
