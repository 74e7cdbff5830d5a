"""Backing up and restoring many stores at once on a real Spark."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from blobstore.opening import StoreSettings
from engine.errors import NotFoundError, UsageError
from engine.repository.repository import SyncRepository
from engine.restore.staging import Staging
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.settings import TransferSettings
from engine.spark import SparkOptions, backup_results, backup_stores, restore_stores
from engine.spark.access import Access
from engine.spark.spread import OUTCOME_SCHEMA, RestoreStores, StoreOutcome, StoreWork
from index.plan.commits import Commit
from index.snapshot.model import Scope
from tidemark import Repository

pytestmark = pytest.mark.spark

SCOPE = Scope("job")
SMALL = RocksDbSettings(write_buffer_bytes=64 * 1024)
STORES = [(str(task), name) for task in range(3) for name in ("facts", "routes")]


@pytest.fixture
def repository(url: str) -> Iterator[SyncRepository]:
    with SyncRepository.open(url) as opened:
        yield opened


def fill(root: Path, generation: int) -> list[tuple[str, str, Path]]:
    """A closed RocksDB store for each of STORES, each with more in it every generation."""
    found = []
    for position, (task, name) in enumerate(STORES):
        directory = root / task / name
        directory.parent.mkdir(parents=True, exist_ok=True)
        with StoreWriter.open(directory, SMALL) as store:
            content = {b"%d-%d-%d" % (generation, position, n): b"v" * 50 for n in range(50 * (position + 1))}
            store.write_batch(content)
            store.flush()
        found.append((task, name, directory))
    return found


def content(directory: Path) -> dict[bytes, bytes]:
    with StoreReader.open(directory) as store:
        return dict(store.items())


def commit_generation(spark: SparkSession, url: str, repository: SyncRepository, root: Path, generation: int) -> Commit:
    outcomes = backup_stores(spark, url, SCOPE, fill(root, generation))
    return repository.commit(SCOPE, backup_results(outcomes), offsets=f"generation {generation}")


def test_stores_come_back_as_they_were_backed_up(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    stores = fill(tmp_path / "disk", 1)
    frame = spark.createDataFrame([(t, s, str(p)) for t, s, p in stores], "task string, store string, path string")
    outcomes = backup_stores(spark, url, SCOPE, frame, version=5)
    assert outcomes.columns == OUTCOME_SCHEMA.names
    rows = outcomes.toArrow().to_pylist()
    assert [(row["task"], row["store"], row["ok"], row["error"]) for row in rows] == [(*s, True, "") for s in STORES]
    assert all(row["bytes_moved"] > 0 and row["seconds"] > 0 and row["mb_per_s"] > 0 for row in rows)
    assert all(row["files"] >= 4 for row in rows)
    repository.commit(SCOPE, backup_results(outcomes), version=5)
    restored = restore_stores(spark, url, SCOPE, tmp_path / "restored").toArrow().to_pylist()
    assert [row["ok"] for row in restored] == [True] * len(STORES)
    for task, name, directory in stores:
        assert content(tmp_path / "restored" / task / name) == content(directory)


def test_a_second_backup_moves_only_what_is_new_and_older_commits_can_be_chosen(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    first = commit_generation(spark, url, repository, tmp_path / "disk", 1)
    before = {s: content(tmp_path / "disk" / Path(*s)) for s in STORES}
    outcomes = backup_stores(spark, url, SCOPE, fill(tmp_path / "disk", 2)).toArrow().to_pylist()
    assert all(row["bytes_kept"] > 0 for row in outcomes)
    commit_generation(spark, url, repository, tmp_path / "disk", 2)
    restore_stores(
        spark, url, SCOPE, tmp_path / "restored", number=first.pointer.number, options=SparkOptions(partitions_max=2)
    )
    assert {s: content(tmp_path / "restored" / Path(*s)) for s in STORES} == before


def test_one_store_that_cannot_be_backed_up_costs_only_itself(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    first = commit_generation(spark, url, repository, tmp_path / "disk", 1)
    stores = fill(tmp_path / "disk", 2)
    shutil.rmtree(stores[2][2])
    with StoreWriter.open(stores[4][2]):
        outcomes = backup_stores(spark, url, SCOPE, stores, options=SparkOptions(partitions_max=2))
    rows = outcomes.toArrow().to_pylist()
    assert [row["ok"] for row in rows] == [True, True, False, True, False, True]
    assert "UnsafeSourceError" in rows[4]["error"]
    second = repository.commit(SCOPE, backup_results(outcomes))
    for position, (task, name) in enumerate(STORES):
        assert (second.store(task, name) == first.store(task, name)) == (position in {2, 4})


def test_one_store_that_cannot_be_restored_costs_only_itself(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    newest = commit_generation(spark, url, repository, tmp_path / "disk", 1)
    damaged = newest.store("1", "facts")
    assert damaged is not None
    (tmp_path / "repository").joinpath(*damaged.index.key.split("/")).write_bytes(b"altered")
    occupied = tmp_path / "restored" / "2" / "routes"
    occupied.mkdir(parents=True)
    (occupied / "precious").write_text("do not touch")
    rows = (
        restore_stores(spark, url, SCOPE, tmp_path / "restored", options=SparkOptions(partitions_max=1))
        .toArrow()
        .to_pylist()
    )
    errors = {(row["task"], row["store"]): row["error"].split(":")[0] for row in rows if not row["ok"]}
    assert errors == {("1", "facts"): "DamagedError", ("2", "routes"): "TargetError"}
    assert (occupied / "precious").read_text() == "do not touch"
    for task, name in STORES:
        assert (tmp_path / "restored" / task / name / "CURRENT").exists() == ((task, name) not in errors)


def test_restoring_over_what_is_there_reuses_it(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    commit_generation(spark, url, repository, tmp_path / "disk", 1)
    restore_stores(spark, url, SCOPE, tmp_path / "restored")
    again = restore_stores(spark, url, SCOPE, tmp_path / "restored", replace=True).toArrow().to_pylist()
    assert all(row["ok"] and row["bytes_moved"] == 0 and row["bytes_kept"] > 0 for row in again)


def test_restoring_again_what_stands_there_as_committed_is_no_error(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    commit_generation(spark, url, repository, tmp_path / "disk", 1)
    restore_stores(spark, url, SCOPE, tmp_path / "restored")
    changed, extended, cut = (tmp_path / "restored" / str(task) / "facts" for task in range(3))
    (changed / "CURRENT").write_text("MANIFEST-000099\n")
    (extended / "more").touch()
    next(cut.glob("*.sst")).unlink()
    rows = restore_stores(spark, url, SCOPE, tmp_path / "restored").toArrow().to_pylist()
    assert [(row["store"], row["ok"]) for row in rows] == [("facts", False), ("routes", True)] * 3
    assert {row["error"].split(":")[0] for row in rows} == {"", "TargetError"}
    assert (extended / "more").exists()


def test_what_is_not_there_is_said_before_any_work(spark: SparkSession, url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        restore_stores(spark, url, SCOPE, tmp_path / "restored")
    with pytest.raises(NotFoundError):
        restore_stores(spark, f"file://{tmp_path / 'nowhere'}", SCOPE, tmp_path / "restored")
    assert backup_stores(spark, url, SCOPE, []).count() == 0


def test_the_same_store_twice_is_refused(spark: SparkSession, url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        backup_stores(spark, url, SCOPE, [("0", "s", tmp_path / "a"), ("0", "s", tmp_path / "b")])


def test_a_second_attempt_at_a_restore_waits_for_the_first(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    """Of two attempts Spark takes the one that answers first: a refusal at once would stop the one at work."""
    commit = commit_generation(spark, url, repository, tmp_path / "disk", 1)
    reference = commit.store("1", "facts")
    assert reference is not None
    target = tmp_path / "restored"
    access = Access(url=url, record=repository.record, store=StoreSettings(), transfer=TransferSettings())
    task = RestoreStores(access=access, scope=SCOPE, replace=False)
    work = StoreWork(task="1", store="facts", path=str(target), reference=reference)

    async def both() -> StoreOutcome:
        async with await Repository.open(url) as opened:
            first = Staging(target, "0" * 20, replace=False)
            first.open()
            second = asyncio.create_task(task.carry_out(opened, work))
            await asyncio.sleep(0.3)
            assert not second.done()
            first.close()
            return await second

    outcome = asyncio.run(both())
    assert outcome.ok
    assert outcome.bytes_moved > 0
