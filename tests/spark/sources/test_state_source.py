"""Rows of state, held against Spark's own reader of them."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, In

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.repository.repository import Repository
from engine.spark.sources.plan import SourceOptions, load_store, look_up, plan_read, plan_state
from engine.spark.sources.sources import register_sources, wanted_keys
from engine.state.files import StateFileManager
from engine.state.overlay import OverlaidStore
from engine.state.settings import HDFS_PROVIDER
from index.errors import FormatError, UnknownFormatError
from index.spark.checkpoint import decode_checkpoint_backup
from index.spark.query_logs import JOIN_STORES
from tests.spark.sources.reading import RICH, by_spark, by_us, ran, reading_session, rows_of, types_of
from tests.spark.state.forms import StateRow
from tests.spark.state.oracle import spark_rows
from tests.spark.state.queries import (
    AGGREGATION,
    CHANGELOGS,
    DEDUPLICATION,
    DEDUPLICATION_WITHIN,
    FORMAT,
    LIMIT,
    MAP_GROUPS,
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

GOLDEN = Path(__file__).parents[2] / "golden" / "spark"
pytestmark = pytest.mark.spark

V2 = {FORMAT: "2"}
HDFS = {f"{STORE}providerClass": HDFS_PROVIDER}
COLUMNS = ["operator", "partition", "store", "version", "key", "value"]
BYTES = ["operator", "partition", "store", "version", "family", "key", "value"]


@pytest.fixture(scope="module")
def joined(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> StatefulQuery:
    return ran(spark, join(2), tmp_path_factory.mktemp("joined"), V2, batches=2)


@pytest.fixture
def checkpoint(counted: StatefulQuery, tmp_path: Path) -> Path:
    shutil.copytree(counted.checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


def test_every_type_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    query = ran(spark, RICH, tmp_path, V2, batches=2)
    session = reading_session(query)
    ours, theirs = by_us(session, query), by_spark(session, query)
    assert rows_of(ours) == rows_of(theirs)
    for name in ("key", "value"):
        assert types_of(ours.schema[name].dataType) == types_of(theirs.schema[name].dataType)
    assert ours.columns == COLUMNS


def test_each_store_of_a_join_is_a_table_and_all_together_are_bytes(joined: StatefulQuery) -> None:
    session = reading_session(joined)
    store = JOIN_STORES[1]
    assert rows_of(by_us(session, joined, store=store)) == rows_of(by_spark(session, joined, store))
    together = by_us(session, joined)
    assert together.columns == BYTES
    counts = {row.store: row[1] for row in together.groupBy("store").count().collect()}
    assert set(counts) == set(JOIN_STORES)
    assert counts[store] == by_us(session, joined, store=store, rows="bytes").count()


def test_a_backup_is_read_as_the_checkpoint_it_is_of(counted: StatefulQuery, tmp_path: Path, url: str) -> None:
    async def backup() -> int:
        async with await Repository.open(url) as repository:
            commit = (await backup_checkpoint(repository, counted.checkpoint, BackupChoice(job="query"))).commit
        backup = decode_checkpoint_backup(commit.record.offsets)
        assert backup is not None
        return backup.oldest_batch

    oldest = asyncio.run(backup())
    session = reading_session(counted)
    read = session.read.format("tidemark_state").option("repository", url)
    assert rows_of(read.load()) == rows_of(by_us(session, counted))
    with pytest.raises(PySparkException, match="has no checkpoint backup"):
        read.option("job", "other").load()
    older = read.option("job", "query").option("batch", oldest).option("partition", "1").load()
    assert rows_of(older) == rows_of(by_us(session, counted, batch=oldest, partition=1))


@pytest.mark.parametrize("most, tasks", [(None, 1), ("1", 2), ("0", 2)])
def test_small_stores_are_read_by_one_task(
    counted: StatefulQuery, tmp_path: Path, url: str, most: str | None, tasks: int
) -> None:
    session = reading_session(counted)
    options = {} if most is None else {"max_partition_bytes": most}
    read = by_us(session, counted, **options)
    assert read.rdd.getNumPartitions() == tasks
    assert rows_of(read) == rows_of(by_spark(session, counted))

    async def backup() -> None:
        async with await Repository.open(url) as repository:
            await backup_checkpoint(repository, counted.checkpoint)

    asyncio.run(backup())
    backed_up = session.read.format("tidemark_state").option("repository", url).options(**options).load()
    assert backed_up.rdd.getNumPartitions() == tasks
    assert rows_of(backed_up) == rows_of(read)


def test_changelogs_are_laid_over_a_snapshot(counted: StatefulQuery) -> None:
    session = reading_session(counted)
    laid_over = 0
    for batch in counted.committed():
        assert rows_of(by_us(session, counted, batch=batch)) == rows_of(by_spark(session, counted, batch=batch))
        for read in plan_state(SourceOptions(checkpoint=str(counted.checkpoint)), batch).stores:
            with load_store(read) as loaded:
                laid_over += isinstance(loaded.db, OverlaidStore) and bool(loaded.db._changes)
    assert laid_over


def test_a_damaged_block_is_an_error_and_never_fewer_rows(counted: StatefulQuery, checkpoint: Path) -> None:
    session = reading_session(counted)
    read = session.read.format("tidemark_state").option("rows", "bytes")
    for sst in checkpoint.glob("state/0/*/SSTs/*.sst"):
        data = bytearray(sst.read_bytes())
        data[10] ^= 1
        sst.write_bytes(data)
    with pytest.raises(PySparkException, match="DamagedError"):
        read.load(str(checkpoint)).collect()


@pytest.mark.soak
@pytest.mark.parametrize("conf", [V2, {}, HDFS], ids=["format 2", "format 1", "HDFS-backed"])
@pytest.mark.parametrize(
    "query",
    [AGGREGATION, WINDOWS, DEDUPLICATION, DEDUPLICATION_WITHIN, SESSION, MAP_GROUPS, LIMIT, RICH],
    ids=lambda query: query.name,
)
def test_every_operator_at_every_batch_is_read_as_spark_reads_it(
    spark: SparkSession, tmp_path: Path, query: Query, conf: dict[str, str]
) -> None:
    made = ran(spark, query, tmp_path, conf, batches=5)
    session = reading_session(made)
    for batch in made.committed():
        ours = by_us(session, made, batch=batch, rows="typed")
        assert rows_of(ours) == rows_of(by_spark(session, made, batch=batch))


@pytest.mark.soak
@pytest.mark.parametrize(
    "conf", [{ROW_CHECKSUMS: "true"}, {CHANGELOGS: "false"}], ids=["row checksums", "snapshots only"]
)
def test_rows_are_the_same_however_they_are_kept(spark: SparkSession, tmp_path: Path, conf: dict[str, str]) -> None:
    made = ran(spark, AGGREGATION, tmp_path, V2 | conf)
    session = reading_session(made)
    assert rows_of(by_us(session, made)) == rows_of(by_spark(session, made))


@pytest.mark.soak
@pytest.mark.parametrize("state_format", [1, 2])
def test_all_stores_of_a_join_are_read_as_spark_reads_them(
    spark: SparkSession, tmp_path: Path, joined: StatefulQuery, state_format: int
) -> None:
    made = joined
    if state_format == 1:
        made = ran(spark, join(1), tmp_path, V2, batches=2)
        lend_schemas(made, joined)
    session = reading_session(made)
    for store in JOIN_STORES:
        assert rows_of(by_us(session, made, store=store)) == rows_of(by_spark(session, made, store))


@pytest.mark.soak
@pytest.mark.parametrize("query", [TRANSFORM, join(3), join(4)], ids=lambda query: query.name)
def test_column_families_are_read_as_bytes(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    made = ran(spark, query, tmp_path, V2, batches=2)
    session = reading_session(made)
    ours: Counter[StateRow] = Counter()
    read = by_us(session, made)
    assert read.columns == BYTES
    for row in read.collect():
        ours.update(made.query.forms.of_ours(row.family, bytes(row.key), bytes(row.value), b""))
    theirs: Counter[StateRow] = sum(spark_rows(made, [made.committed()[-1]]).values(), Counter())
    assert ours == theirs
    with pytest.raises(PySparkException, match="rows=bytes"):
        by_us(session, made, rows="typed").collect()


def test_keys_are_looked_up_without_an_sst_on_a_disk(
    counted: StatefulQuery, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def backup() -> None:
        async with await Repository.open(url) as repository:
            await backup_checkpoint(repository, counted.checkpoint)

    asyncio.run(backup())
    # A version without a snapshot has changelogs alone, and is replayed as ever.
    looked_up = 0
    here = SourceOptions(checkpoint=str(counted.checkpoint))
    for options, batch in (*((here, of) for of in counted.committed()), (SourceOptions(repository=url), None)):
        for read in plan_state(options, batch).stores:
            with load_store(read) as loaded:
                expected = dict(loaded.items(b"", "default", b""))
            try:
                with monkeypatch.context() as patched, load_store(read, in_place=True) as loaded:
                    patched.setattr(StateFileManager, "load_snapshot", None)
                    looked_up += len(expected)
                    assert dict(loaded.get_many(sorted(expected), "default")) == expected
                    assert loaded.get_many([b"absent"], "default") == []
                    assert dict(loaded.items(b"", "default", b"")) == expected
                    chunks = loaded.chunks("default", rows_max=2, bytes_max=100)
                    assert [row for chunk in chunks for row in chunk] == sorted(expected.items())
            except UnknownFormatError as error:
                assert "no snapshot" in str(error)  # noqa: PT017
            assert look_up(read, sorted(expected), None) == {"default": sorted(expected.items())}
    assert looked_up > len(counted.committed())


def test_stored_checkpoints_are_read_in_place_as_they_are_loaded(spark: SparkSession) -> None:
    del spark
    alike = set()
    for offsets in sorted(GOLDEN.glob("*/offsets")):
        for read in plan_state(SourceOptions(checkpoint=str(offsets.parent)), None).stores:
            try:
                with load_store(read, in_place=True) as loaded:
                    found = {name: dict(loaded.items(b"", name, b"")) for name in loaded.families.names}
            except FormatError:
                continue  # its changelogs have operands, or it is not whole
            with load_store(read) as loaded:
                assert found == {name: dict(loaded.items(b"", name, b"")) for name in loaded.families.names}
            alike.add(offsets.parent.name)
    assert alike == {"changelog-v1-lz4", "changelog-v3-lz4", "lost-attempts"}


@pytest.mark.parametrize("pattern", ["*.zip", "SSTs/*.sst"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_lookup_repairs_what_a_whole_read_repairs(
    counted: StatefulQuery, tmp_path: Path, pattern: str, *, is_cut: bool
) -> None:
    copy = shutil.copytree(counted.checkpoint, tmp_path / "copy")
    for file in copy.glob(f"state/0/*/{pattern}"):
        if is_cut:
            file.write_bytes(file.read_bytes()[:-20])
        else:
            file.unlink()
    for whole, read in zip(
        *(plan_state(SourceOptions(checkpoint=str(of)), None).stores for of in (counted.checkpoint, copy)), strict=True
    ):
        with load_store(whole) as loaded:
            expected = sorted(loaded.items(b"", "default", b""))
        assert look_up(read, [key for key, _ in expected], "default") == {"default": expected}


def session_that_pushes(query: StatefulQuery) -> Iterator[SparkSession]:
    session = reading_session(query)
    register_sources(session, push_filters=True)
    yield session
    session.conf.set("spark.sql.python.filterPushdown.enabled", "false")


@pytest.fixture
def pushed(counted: StatefulQuery) -> Iterator[SparkSession]:
    yield from session_that_pushes(counted)


def test_filters_on_keys_mean_what_they_say(counted: StatefulQuery, pushed: SparkSession) -> None:
    session = reading_session(counted)
    names = sorted(row[0] for row in by_us(session, counted).select("key.k").collect())
    first, last = names[0], names[-1]
    conditions = f"key.k = '{first}'", f"key.k in ('{first}', '{last}', 'nix')", f"key.k > '{first}'", "key.k = 'nix'"
    counts = []
    for condition in conditions:
        expected = rows_of(by_us(session, counted).where(condition))
        assert rows_of(by_us(pushed, counted).where(condition)) == expected
        counts.append(expected.total())
    assert counts == [1, 2, len(names) - 1, 0]
    table = plan_read(SourceOptions(checkpoint=str(counted.checkpoint)), None).table
    assert table is not None
    assert len(wanted_keys(table, [EqualTo(("key", "k"), first)]) or ()) == 1
    assert len(wanted_keys(table, [In(("key", "k"), (first, last, "nix"))]) or ()) == 3
    assert wanted_keys(table, [GreaterThan(("key", "k"), first)]) is None


def test_a_filter_on_keys_reads_no_sst_that_cannot_have_them(
    counted: StatefulQuery, pushed: SparkSession, tmp_path: Path
) -> None:
    first = min(by_us(reading_session(counted), counted).select("key.k", "partition").collect())
    copy = shutil.copytree(counted.checkpoint, tmp_path / "copy")
    other = copy / f"state/0/{1 - first.partition}"
    for file in (other / "SSTs").iterdir():
        file.unlink()
    # Nor can it be replayed.
    newest = max(int(file.name.partition("_")[0]) for file in other.glob("*.zip"))
    for file in other.glob("*.changelog"):
        if int(file.name.partition("_")[0]) <= newest:
            file.unlink()
    read = pushed.read.format("tidemark_state")
    assert [row.key.k for row in read.load(str(copy)).where(f"key.k = '{first.k}'").collect()] == [first.k]
    with pytest.raises(PySparkException, match="Error"):
        read.load(str(copy)).count()


@pytest.fixture
def pushing(joined: StatefulQuery) -> Iterator[SparkSession]:
    yield from session_that_pushes(joined)


@pytest.mark.soak
@pytest.mark.parametrize(
    "condition",
    [
        "partition = 1",
        "partition in (0, 7) and store like 'left%'",
        "version > 1 and not store = 'left-keyToNumValues'",
        "version < 2",
        "operator is null or partition = 0",
        "operator <=> 0 and partition >= 1",
    ],
)
def test_filters_that_are_pushed_down_mean_what_they_say(
    joined: StatefulQuery, pushing: SparkSession, condition: str
) -> None:
    """A new DataFrame for each use: Spark keeps what was pushed for all uses of one."""
    expected = Counter(by_us(reading_session(joined), joined).where(condition).select("partition", "store").collect())
    assert Counter(by_us(pushing, joined).where(condition).select("partition", "store").collect()) == expected


@pytest.mark.soak
def test_a_store_that_a_pushed_filter_leaves_out_is_not_opened(
    joined: StatefulQuery, pushing: SparkSession, tmp_path: Path
) -> None:
    shutil.copytree(joined.checkpoint, tmp_path / "copy")
    for file in (tmp_path / "copy/state/0/1/right-keyToNumValues").iterdir():
        if file.is_file():
            file.write_bytes(b"not what it was")
    read = pushing.read.format("tidemark_state")
    left = read.load(str(tmp_path / "copy")).where("store like 'left%'")
    assert left.count() == by_us(reading_session(joined), joined).where("store like 'left%'").count()
    with pytest.raises(PySparkException, match="Error"):
        read.load(str(tmp_path / "copy")).count()


@pytest.mark.soak
def test_a_use_of_a_dataframe_is_not_filtered_as_another_one(joined: StatefulQuery) -> None:
    rows = by_us(reading_session(joined), joined)
    whole = rows.count()
    parts = [rows.where(f"partition = {partition}") for partition in (0, 1)]
    assert sum(part.count() for part in parts) == parts[0].union(parts[1]).count() == rows.count() == whole
