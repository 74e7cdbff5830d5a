"""A backup of a checkpoint that the executors take: the same as one machine takes (design 0005, section 2)."""

import asyncio
import contextlib
import re
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import SparkSession

from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.checkpoint import backup as live
from engine.checkpoint.backup import BackupChoice, CheckpointBackupResult, StoreBackup, backup_store, begin_backup
from engine.checkpoint.errors import DAMAGE_HINT, QueryMovedOnError
from engine.checkpoint.live import StoreToBackUp
from engine.checkpoint.restore import RestoreChoice
from engine.errors import ConflictError, DamagedError, IncompleteError, NotFoundError, StaleResultError
from engine.repository.repository import Repository, SyncRepository
from engine.spark.access import SparkOptions
from engine.spark.checkpoint import StoresWork, backup_checkpoint, restore_checkpoint, worst_of
from engine.spark.errors import decode_error
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint
from engine.state.store import open_query_state
from index.errors import FormatError, VersionMissingError
from index.plan.commits import Commit
from tests.spark.state.queries import AGGREGATION, FORMAT, STORE, TRANSFORM, Query, StatefulQuery, join
from tests.unit.engine.checkpoint.live_query import LiveQuery, check_rows, restore_backup
from tidemark.errors import TidemarkError

pytestmark = pytest.mark.spark

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint of five partitions after 4 batches and after 6."""
    root = tmp_path_factory.mktemp("checkpoints")

    async def make() -> None:
        query = LiveQuery(root / "query", partitions=5)
        for batches in (4, 6):
            await query.run(batches - query.batches)
            shutil.copytree(query.root, root / str(batches))
        await query.close()

    run(make())
    return {batches: root / str(batches) for batches in (4, 6)}


async def restored(url: str, commit: Commit, target: Path) -> Path:
    async with await Repository.open(url) as repository:
        return await restore_backup(repository, commit, target)


def test_executors_take_the_backup_that_one_machine_takes(
    spark: SparkSession, url: str, tmp_path: Path, checkpoints: dict[int, Path]
) -> None:
    checkpoint = tmp_path / "query"
    shutil.copytree(checkpoints[4], checkpoint)
    first = backup_checkpoint(spark, url, checkpoint)
    assert (first.backup.batch, first.is_new, first.state.stores) == (3, True, 5)
    assert not backup_checkpoint(spark, url, checkpoint).is_new
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoints[6], checkpoint)
    second = backup_checkpoint(spark, url, f"file://{checkpoint}", options=SparkOptions(partitions_max=2))
    assert second.commit.record.predecessor == first.commit.pointer
    assert 0 < second.state.files_added < second.state.files
    target = run(restored(url, second.commit, tmp_path / "restored"))
    run(check_rows(target, tmp_path, batch=5, partitions=5))


def test_damage_that_an_executor_finds_is_damage_and_names_the_file(
    spark: SparkSession, url: str, tmp_path: Path, checkpoints: dict[int, Path]
) -> None:
    checkpoint = tmp_path / "query"
    shutil.copytree(checkpoints[4], checkpoint)
    (damaged,) = checkpoint.glob("state/0/3/4_*.changelog")
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises((DamagedError, FormatError), match=damaged.name) as caught:
        backup_checkpoint(spark, url, checkpoint)
    with pytest.raises(type(caught.value)) as here, SyncRepository.open(url) as repository:
        repository.loop.run(live.backup_checkpoint(repository.asynchronous, checkpoint))
    assert str(caught.value) == f"{here.value}; 1 of 5 stores failed"
    for attribute in ("operation", "subject", "hint"):
        assert getattr(caught.value, attribute) == getattr(here.value, attribute)


def test_what_is_gone_is_looked_for_again_and_then_damage(
    spark: SparkSession, url: str, tmp_path: Path, checkpoints: dict[int, Path]
) -> None:
    checkpoint = tmp_path / "query"
    shutil.copytree(checkpoints[4], checkpoint)
    for path in checkpoint.glob("state/0/[13]/SSTs/*.sst"):
        path.unlink()
    with pytest.raises(DamagedError, match=r"state/0/1: version .*; .*state/0/3: .*; 2 of 5 stores failed$") as caught:
        backup_checkpoint(spark, url, checkpoint)
    assert caught.value.hint == DAMAGE_HINT
    assert isinstance(caught.value.__cause__, VersionMissingError)


def test_a_restore_names_the_stores_that_lack_something_and_the_backup_that_is_whole(
    spark: SparkSession, url: str, tmp_path: Path, checkpoints: dict[int, Path]
) -> None:
    commits = []
    for batches in (4, 6):
        shutil.rmtree(tmp_path / "query", ignore_errors=True)
        shutil.copytree(checkpoints[batches], tmp_path / "query")
        commits.append(backup_checkpoint(spark, url, tmp_path / "query").commit)
    for of in commits[-1].record.stores:
        if of.task in {"0-1", "0-3"}:
            (tmp_path / "repository" / of.index.key).unlink()
    lacking = r"^read index indexes/.* \(state/0/1\); read index indexes/.* \(state/0/3\); 2 of 5 stores failed$"
    with pytest.raises(IncompleteError, match=lacking) as caught:
        restore_checkpoint(spark, url, tmp_path / "restored")
    whole = "the backup of batch 3 is the newest of which everything is there; `--or-newest-complete` takes it"
    assert caught.value.hint.startswith(whole)
    assert not (tmp_path / "restored").exists()
    restored = restore_checkpoint(spark, url, tmp_path / "restored", RestoreChoice(or_newest_complete=True))
    assert restored.batch == 3


async def failures_of(kind: str, scratch: Path) -> list[tuple[str, TidemarkError]]:
    """What executors say of a query on another store of whose files of a kind each is damaged or gone."""
    query = LiveQuery(scratch / "query", MemoryStore())
    await query.run(5)
    await query.close()
    root = CheckpointDir(query.files or MemoryStore(), location="s3://bucket/query")
    repository = await Repository.init(MemoryStore())
    begun = await begin_backup(repository, root, BackupChoice())

    async def back_up(at: tuple[Repository, CheckpointDir], item: StoreToBackUp) -> StoreBackup:
        return await backup_store(*at, begun.scope, item, BackupChoice(scratch=scratch))

    work = StoresWork(
        operation=live.OPERATION,
        subject=root.location,
        work=begun.stores,
        do=back_up,
        opened=lambda repository: contextlib.nullcontext((repository, root)),
    )
    for status in await root.walk("state"):
        if status.path.endswith(kind):
            data = bytearray(await root.read(status.path))
            data[len(data) // 2] ^= 0x55
            await root.publish(status.path, bytes(data), overwrite=True)
        elif kind == "gone" and status.path.endswith(".sst"):
            await root.delete([status.path])
    if kind in {"busy", "stale"}:
        busy = StoreUnavailableError("busy", operation="get")
        error = busy if kind == "busy" else StaleResultError("another backup", operation="backup")

        async def refuse(*_: Any, **__: Any) -> None:
            raise error

        repository.backup = refuse  # type: ignore[method-assign, assignment]
    answers = await work.do_each(repository, range(len(work.work)), 1)
    return [(of.id.path, decode_error(failed or b"")) for of, (_, failed) in zip(work.work, answers, strict=True)]


@pytest.mark.parametrize(
    "kind, expected, shown",
    [
        (".sst", DamagedError, r"check {}/0/0/SSTs/[^ ]*\.sst: .*; check {}/0/1/SSTs/"),
        (".zip", FormatError, r"{}/0/0/[^ ]*\.zip: .*; {}/0/1/"),
        ("gone", VersionMissingError, r"{}/0/0: version .*SSTs/[^ ]* is not there; {}/0/1: "),
        ("busy", StoreUnavailableError, r"get: busy \(state/0/0\); get: busy \(state/0/1\)"),
        ("stale", ConflictError, r"backup: another backup \(state/0/0\); .*\(state/0/1\)"),
    ],
)
def test_what_executors_refuse_names_store_and_file(
    tmp_path: Path, kind: str, expected: type[TidemarkError], shown: str
) -> None:
    error = worst_of(run(failures_of(kind, tmp_path)), 2)
    assert isinstance(error, expected)
    assert re.match(shown.replace("{}", "s3://bucket/query/state"), str(error)), str(error)
    assert str(error).endswith("; 2 of 2 stores failed")
    assert str(tmp_path) not in str(error)
    assert "rocksdb_checkpoint" not in error.hint


Rows = dict[str, dict[tuple[str, bytes], bytes]]


async def rows_of(checkpoint: Path, work: Path, batch: int) -> Rows:
    """Every row of every store after a batch."""
    opened = await StreamingCheckpoint.open(checkpoint)
    found: Rows = {}
    for number, store in enumerate((await opened.at(batch)).stores):
        of = store.id
        async with await open_query_state(
            checkpoint, work / str(number), batch=batch, operator=of.operator, partition=of.partition, store=of.store
        ) as state:
            found[of.path] = {(family, k): v for family in state.families for k, v in state.items(family=family)}
    return found


async def take_while(url: str, query: StatefulQuery, running: threading.Thread) -> list[CheckpointBackupResult]:
    """Backups of a query, one after the other, until it ends; and one after that."""
    backups: list[CheckpointBackupResult] = []
    async with await Repository.open(url) as repository:
        ended = False
        while not ended:
            ended = not running.is_alive()
            try:
                done = await live.backup_checkpoint(repository, query.checkpoint)
            except (NotFoundError, QueryMovedOnError):
                await asyncio.sleep(0.1)
                continue
            if done.is_new:
                backups.append(done)
    return backups


@pytest.mark.soak
@pytest.mark.parametrize("state_format", [1, 2], ids=["V1", "V2"])
@pytest.mark.parametrize(
    "query, retained",
    # With few, maintenance deletes what is being read; with all, every backup can be compared.
    [(AGGREGATION, 2), (AGGREGATION, 100), (TRANSFORM, 100), (join(2), 2), (join(4), 100)],
    ids=lambda value: value.name if isinstance(value, Query) else str(value),
)
def test_every_backup_of_a_running_query_is_of_one_batch(
    *, spark: SparkSession, url: str, tmp_path: Path, query: Query, state_format: int, retained: int
) -> None:
    conf = {
        FORMAT: str(state_format),
        f"{STORE}minDeltasForSnapshot": "2",
        f"{STORE}maintenanceInterval": "200ms",
        "spark.sql.streaming.minBatchesToRetain": str(retained),
    }
    batches = 10
    running = StatefulQuery(spark, query, tmp_path, conf)
    running.feed(batches)
    thread = threading.Thread(target=running.run)
    thread.start()
    backups = run(take_while(url, running, thread))
    thread.join()
    assert backups[-1].backup.batch == running.committed()[-1] >= batches - 1
    assert len(backups) > 2
    for number, done in enumerate(backups):
        target = run(restored(url, done.commit, tmp_path / f"restored-{number}"))
        batch = done.backup.batch
        found = run(rows_of(target, tmp_path / f"found-{number}", batch))
        assert any(found.values())
        if retained > batches or done is backups[-1]:
            assert found == run(rows_of(running.checkpoint, tmp_path / f"there-{number}", batch))
