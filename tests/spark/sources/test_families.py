"""Column families as typed rows, held against Spark's own reader of them."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.repository.repository import Repository
from tests.spark.sources.reading import TIMERS, by_us, family_by_spark, ran, reading_session, rows_of, types_of
from tests.spark.state.queries import (
    ENCODING,
    EXPIRING,
    FORMAT,
    REMINDING,
    ROW_CHECKSUMS,
    STORE,
    TRANSFORM,
    Query,
    StatefulQuery,
    WiderTally,
    join,
    transforming,
)

pytestmark = pytest.mark.spark

V1: Final = {FORMAT: "1"}
V2: Final = {FORMAT: "2"}
AVRO: Final = {ENCODING: "avro"}
COMMAS: Final = {f"{STORE}rocksdb.mergeOperatorVersion": "1"}
PROCESSING: Final = f"$proc{TIMERS}"
FAMILIES: Final = {
    TRANSFORM.name: ("count", "items", "seen"),
    EXPIRING.name: ("count", "items", "seen", PROCESSING),
    REMINDING.name: ("fired", f"$event{TIMERS}"),
    "join3": ("left-keyToNumValues", "left-keyWithIndexToValue", "right-keyToNumValues", "right-keyWithIndexToValue"),
    "join4": ("left-keyWithTsToValues", "left-tsWithKey", "right-keyWithTsToValues", "right-tsWithKey"),
}


def check_families(query: StatefulQuery, batches: Iterable[int | None] = (None,)) -> None:
    """Names, types and rows of every family that Spark's reader reads, after these batches."""
    session = reading_session(query)
    for family in FAMILIES[query.query.name]:
        for batch in batches:
            at = {} if batch is None else {"batch": batch}
            ours, theirs = by_us(session, query, family=family, **at), family_by_spark(session, query, family, batch)
            columns = theirs.columns[:-1]
            assert ours.columns == ["operator", "partition", "store", "version", *columns]
            for name in columns:
                assert types_of(ours.schema[name].dataType) == types_of(theirs.schema[name].dataType)
            rows = rows_of(theirs, theirs.columns)
            assert rows_of(ours, theirs.columns) == rows
            assert rows, "the family has no rows: nothing is shown"


def check_indexes(query: StatefulQuery) -> None:
    """What Spark keeps for itself beside variables that expire follows from these, and can be read as well."""
    session = reading_session(query)

    def read(family: str) -> list[Any]:
        return by_us(session, query, family=family).collect()

    items, seen, timers = read("items"), read("seen"), read(PROCESSING)
    assert {(row.key.expirationMs, row.key.elementKey) for row in read("$ttl_count")} == {
        (row.value.ttlExpirationMs, row.key) for row in read("count")
    }
    assert {(row.key.expirationMs, *row.key.elementKey) for row in read("$ttl_seen")} == {
        (row.user_map_value.ttlExpirationMs, row.key, row.user_map_key) for row in seen
    }
    assert Counter((*row.key,) for row in read("$procTimers_timestampToKey")) == Counter(
        (row.expiration_timestamp_ms, row.key) for row in timers
    )
    assert {row.key: row.value["count"] for row in read("$count_items")} == Counter(row.key for row in items)
    least: dict[Any, int] = {}
    for row in items:
        least[row.key] = min(least.get(row.key, 2**63), row.list_element.ttlExpirationMs)
    assert {row.key: row.value.expirationMs for row in read("$min_items")} == least
    assert {(row.key.expirationMs, row.key.elementKey) for row in read("$ttl_items")} == {
        (expires, key) for key, expires in least.items()
    }


@pytest.mark.soak
def test_variables_that_expire_and_timers_are_read_as_spark_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    query = ran(spark, EXPIRING, tmp_path, V2, batches=2)
    check_families(query)
    session = reading_session(query)
    with pytest.raises(PySparkException, match=r"(?s)no column family other.*it has \$count_items.*, seen;"):
        by_us(session, query, family="other").collect()
    with pytest.raises(PySparkException, match=r"(?s)`family` \(\$count_items, .*rows=bytes"):
        by_us(session, query, rows="typed").collect()


@pytest.mark.parametrize(
    "query, conf", [(TRANSFORM, V2 | AVRO), (join(4), V2)], ids=["variables in Avro", "join of format 4"]
)
def test_variables_in_avro_and_the_lists_of_a_join_are_read_as_spark_reads_them(
    spark: SparkSession, tmp_path: Path, query: Query, conf: dict[str, str]
) -> None:
    check_families(ran(spark, query, tmp_path, conf, batches=2))


@pytest.mark.soak
@pytest.mark.parametrize("encoding", [{}, AVRO], ids=["rows", "Avro"])
@pytest.mark.parametrize("form", [V1, V2], ids=["format 1", "format 2"])
@pytest.mark.parametrize("query", [TRANSFORM, EXPIRING, REMINDING], ids=lambda query: query.name)
def test_every_variable_at_every_batch_is_read_as_spark_reads_it(
    spark: SparkSession, tmp_path: Path, query: Query, form: dict[str, str], encoding: dict[str, str]
) -> None:
    made = ran(spark, query, tmp_path, form | encoding)
    check_families(made, made.committed())
    if query == EXPIRING:
        check_indexes(made)
    as_bytes, session = ["family", "key", "value"], reading_session(made)
    (family, *_) = FAMILIES[query.name]
    all_rows = by_us(session, made).where(f"family = '{family}'")
    assert rows_of(by_us(session, made, family=family, rows="bytes"), as_bytes) == rows_of(all_rows, as_bytes)


@pytest.mark.soak
@pytest.mark.parametrize(
    "conf",
    [{ROW_CHECKSUMS: "true"}, COMMAS, {ROW_CHECKSUMS: "true"} | COMMAS | AVRO],
    ids=["row checksums", "commas", "row checksums, commas, Avro"],
)
def test_lists_are_the_same_however_they_are_merged(spark: SparkSession, tmp_path: Path, conf: dict[str, str]) -> None:
    check_families(ran(spark, TRANSFORM, tmp_path, V2 | conf))


@pytest.mark.soak
@pytest.mark.parametrize(
    "conf", [V1, V2, V2 | {ROW_CHECKSUMS: "true"} | COMMAS], ids=["format 1", "format 2", "merged"]
)
@pytest.mark.parametrize("state_format", [3, 4])
def test_every_family_of_a_join_is_read_as_spark_reads_it(
    spark: SparkSession, tmp_path: Path, conf: dict[str, str], state_format: int
) -> None:
    made = ran(spark, join(state_format), tmp_path, conf)
    check_families(made, made.committed()[1:])


@pytest.mark.soak
def test_values_of_an_older_schema_are_read_with_the_newest(spark: SparkSession, tmp_path: Path) -> None:
    made = ran(spark, TRANSFORM, tmp_path, V2 | AVRO, batches=2)
    made.feed(2)
    made.run(build=transforming(WiderTally(), "None"))
    check_families(made, made.committed())
    session = reading_session(made)
    notes = Counter(row.value.note for row in by_us(session, made, family="count").collect())
    assert notes[None] > 0 < notes["new"]
    changes = session.read.format("tidemark_state_diff").options(from_batch="0", family="count", rows="typed")
    changed = [row for row in changes.load(str(made.checkpoint)).collect() if row.change == "changed"]
    assert {row.before.note for row in changed} == {None}
    assert "new" in {row.after.note for row in changed}


@pytest.mark.soak
@pytest.mark.parametrize("family", ["count", "items", "seen", PROCESSING])
@pytest.mark.parametrize("conf", [V2, V2 | AVRO], ids=["rows", "Avro"])
def test_a_difference_leads_from_one_batch_to_the_other(
    spark: SparkSession, tmp_path: Path, conf: dict[str, str], family: str
) -> None:
    made = ran(spark, EXPIRING, tmp_path, conf, batches=2)
    session = reading_session(made)
    before, after = (by_us(session, made, family=family, batch=batch) for batch in (0, 1))
    read = session.read.format("tidemark_state_diff").options(from_batch="0", to_batch="1", family=family)
    changes = read.load(str(made.checkpoint))
    columns = before.columns[4:]
    keys = columns if family == PROCESSING else columns[:-1]
    assert changes.columns[4:] == (keys if family == PROCESSING else [*keys, "before", "after"])

    def state(frame: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for row in frame.collect():
            found.setdefault(repr([row[key] for key in keys]), []).append(row[columns[-1]])
        return found

    found, kinds = state(before), set()
    for row in changes.collect():
        key = repr([row[key] for key in keys])
        kinds.add(row.change)
        for name, wanted in (("before", key in found), ("after", row.change != "removed")):
            if family != PROCESSING:
                assert (row[name] is not None) == wanted
        if row.change == "removed":
            del found[key]
        else:
            value = row[columns[-1]] if family == PROCESSING else row.after
            found[key] = value if family == "items" else [value]
    assert found == state(after)
    assert "added" in kinds


@pytest.mark.soak
def test_a_backup_has_the_families_too(spark: SparkSession, tmp_path: Path, url: str) -> None:
    made = ran(spark, TRANSFORM, tmp_path, V2 | AVRO, batches=2)
    session = reading_session(made)
    expected = rows_of(by_us(session, made, family="seen"), ("key", "user_map_key", "user_map_value"))

    async def backup() -> None:
        async with await Repository.open(url) as repository:
            await backup_checkpoint(repository, made.checkpoint, BackupChoice(job="query"))

    asyncio.run(backup())
    shutil.rmtree(made.checkpoint)
    read = session.read.format("tidemark_state").option("repository", url).option("family", "seen").load()
    assert rows_of(read, ("key", "user_map_key", "user_map_value")) == expected
    assert expected
