"""A query whose state is the HDFS-backed provider's, Spark's default: backed up, restored, resumed, checked, read."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import DamagedError, ProviderError
from engine.repository.repository import SyncRepository
from engine.spark.sources.sources import register_sources
from engine.state.settings import HDFS_PROVIDER
from engine.state.store import SyncStateStore
from index.errors import FormatError
from tests.spark.checkpoint.shows import Show
from tests.spark.checkpoint.test_destroy_and_resume import assert_resumes
from tests.spark.state.queries import (
    AGGREGATION,
    CODEC,
    DEDUPLICATION,
    MAP_GROUPS,
    ROW_CHECKSUMS,
    SESSION,
    STORE,
    Query,
    join,
)

pytestmark = pytest.mark.spark

HDFS: Final = {f"{STORE}providerClass": HDFS_PROVIDER}
RowSet = set[tuple[bytes, bytes]]


def with_repository(url: str, do: Callable[..., Any], *args: Any) -> Any:
    with SyncRepository.open(url) as repository:
        return repository.loop.run(do(repository.asynchronous, *args))


def backed_up_while_running(show: Show, url: str) -> None:
    """Back a query up within its batch 4, at batch 3, and lose its checkpoint."""
    taken: list[int] = []

    def back_up(number: int) -> None:
        if number == 4 and not taken:
            choice = BackupChoice(keep_batches=2)
            taken.append(with_repository(url, backup_checkpoint, show.checkpoint, choice).backup.batch)

    running = show.start("sink", before=back_up)
    show.wait_for(4, running)
    running.stop()
    assert taken == [3]
    shutil.rmtree(show.checkpoint)


@pytest.mark.parametrize(
    "query, conf",
    [
        pytest.param(MAP_GROUPS, {ROW_CHECKSUMS: "true"}, marks=pytest.mark.soak),
        pytest.param(AGGREGATION, {}, marks=pytest.mark.soak),
        pytest.param(AGGREGATION, {CODEC: "zstd"}, marks=pytest.mark.soak),
        pytest.param(DEDUPLICATION, {}, marks=pytest.mark.soak),
        pytest.param(SESSION, {}, marks=pytest.mark.soak),
        pytest.param(AGGREGATION, {ROW_CHECKSUMS: "true"}, marks=pytest.mark.soak),
        pytest.param(join(2), {}, marks=pytest.mark.soak),
    ],
    ids=lambda value: value.name if isinstance(value, Query) else "+".join(value.values()) or "plain",
)
async def test_a_restored_query_comes_to_the_results_of_one_that_was_not_lost(
    spark: SparkSession, tmp_path: Path, url: str, query: Query, conf: dict[str, str]
) -> None:
    show = Show(spark, query, tmp_path / "show", {**HDFS, **conf}, batches=7)
    expected = show.run("expected", tmp_path / "uninterrupted")
    backed_up_while_running(show, url)
    for name, choice in (
        ("plain", RestoreChoice()),
        ("replayed", RestoreChoice(replayed=True)),
        ("older", RestoreChoice(batch=2)),
    ):
        target = tmp_path / "elsewhere" / name
        restored = with_repository(url, restore_checkpoint, target, choice)
        assert restored.batch == (2 if name == "older" else 3)
        assert (await check_checkpoint(target)).findings == ()
        if name == "replayed":
            assert {file.name for file in target.glob("state/0/*/*.*")} <= {"4.snapshot"}
            assert not list(target.glob("state/**/*.delta"))
        assert_resumes(show, target, expected, name)
        assert (await check_checkpoint(target)).findings == ()
    assert rows_of(tmp_path / "elsewhere" / "replayed") == rows_of(tmp_path / "uninterrupted")


def rows_of(checkpoint: Path, batch: int | None = None) -> list[RowSet]:
    """Read all rows of every default store of operator 0."""
    found = []
    for partition in sorted(checkpoint.glob("state/0/[0-9]*")):
        scratch = checkpoint.with_name(f"scratch-{checkpoint.name}-{partition.name}")
        store = (
            "default"
            if list(partition.glob("*.delta")) or list(partition.glob("*.snapshot"))
            else "left-keyToNumValues"
        )
        with SyncStateStore.of_query(
            checkpoint, scratch, partition=int(partition.name), batch=batch, store=store
        ) as state:
            found.append(set(state.items()))
        shutil.rmtree(scratch)
    return found


async def test_each_damaged_file_is_named(spark: SparkSession, tmp_path: Path, url: str) -> None:
    show = Show(spark, AGGREGATION, tmp_path / "show", HDFS, batches=6)
    show.run("sink")
    assert (await check_checkpoint(show.checkpoint)).findings == ()
    files = [*show.checkpoint.glob("state/0/*/*.delta"), *show.checkpoint.glob("state/0/*/*.snapshot")]
    assert any(file.suffix == ".snapshot" for file in files)
    for file in files:
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    for file in files:
        name = file.relative_to(show.checkpoint).as_posix()
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:middle],
            whole[:-1],
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            b"",
        ):
            file.write_bytes(damaged)
            found = (await check_checkpoint(show.checkpoint)).findings
            assert [finding.path for finding in found if finding.kind == "damage"] == [name], name
        file.write_bytes(whole)
    assert (await check_checkpoint(show.checkpoint)).findings == ()
    newest = show.checkpoint / "state/0/0/6.delta"
    newest.unlink()
    newest.with_name("6.snapshot").unlink(missing_ok=True)
    found = (await check_checkpoint(show.checkpoint)).findings
    assert {finding.path for finding in found} == {"state/0/0/6.delta"}
    with pytest.raises((DamagedError, FormatError), match=r"6\.delta"):
        with_repository(url, backup_checkpoint, show.checkpoint)


def test_state_is_read_and_not_written(spark: SparkSession, tmp_path: Path) -> None:
    show = Show(spark, AGGREGATION, tmp_path / "show", HDFS, batches=3)
    show.run("sink")
    assert rows_of(show.checkpoint, 0) != rows_of(show.checkpoint)
    directory = show.checkpoint / "state/0/0"
    with SyncStateStore.open(directory, tmp_path / "scratch") as state, pytest.raises(ProviderError):
        state.load(3)


def typed_rows(spark: SparkSession, format_: str, path: Path, **options: str | int) -> list[tuple[object, ...]]:
    """Read keys and values of a state; Spark's own reader, and ours, put them in columns of the same names."""
    rows = spark.read.format(format_).options(**options).load(str(path)).select("key.*", "value.*").collect()
    return sorted(map(tuple, rows))


@pytest.mark.parametrize(
    "query", [AGGREGATION, pytest.param(SESSION, marks=pytest.mark.soak)], ids=lambda query: query.name
)
def test_typed_rows_are_those_that_spark_reads(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    show = Show(spark, query, tmp_path / "show", HDFS, batches=5)
    show.run("sink")
    # Of its own: sessions made of one that knows the sources refuse to register them again.
    spark = spark.newSession()
    register_sources(spark)
    expected: list[tuple[object, ...]] = []
    for batch in (1, 4):
        expected = typed_rows(spark, "statestore", show.checkpoint, batchId=batch)
        assert typed_rows(spark, "tidemark_state", show.checkpoint, batch=batch, rows="typed") == expected
        assert expected
    before = typed_rows(spark, "statestore", show.checkpoint, batchId=1)
    options: dict[str, str | int] = {"rows": "typed", "from_batch": 1, "to_batch": 4}
    changed = spark.read.format("tidemark_state_diff").options(**options).load(str(show.checkpoint)).collect()
    kinds = Counter(row["change"] for row in changed)
    assert kinds["added"] + len(before) - kinds["removed"] == len(expected)
    after = {(*row["key"], *row["after"]) for row in changed if row["after"]}
    assert after == set(expected) - set(before)
