"""One damage at a time to each file of a real checkpoint: `check` names it, and a backup refuses it (0005, P5).

And the batches that `--keep-batches` keeps: a query goes on from the oldest of them (0005, P3).
"""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from blobstore.memory import MemoryStore
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.errors import DamagedError
from engine.records.indexes import read_index
from engine.repository.repository import Repository
from engine.state.settings import HDFS_PROVIDER
from index.errors import FormatError
from index.plan.commits import Commit
from index.snapshot.contents import files_of
from index.spark.checkpoint import StoreId
from tests.spark.checkpoint.shows import Show, flip_byte
from tests.spark.state.queries import (
    AGGREGATION,
    CHANGELOGS,
    DEDUPLICATION_AND_AGGREGATION,
    FORMAT,
    KEYLESS,
    LIMIT,
    ROW_CHECKSUMS,
    STORE,
    TRANSFORM,
    Query,
    StatefulQuery,
    join,
    stop_maintenance,
)

pytestmark = pytest.mark.spark

ALL_BATCHES: Final = 99
soak = pytest.mark.soak


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    flip_byte(path, path.stat().st_size // 2)


Damage = Callable[[Path], None]
DAMAGES: Final[tuple[Damage, ...]] = (_flip, _cut, Path.unlink)


def written(spark: SparkSession, root: Path, query: Query, conf: dict[str, str]) -> Path:
    """A checkpoint of Spark with two snapshots, and a changelog above the newer one; Spark writes it no more."""
    show = Show(spark, query, root, {f"{STORE}minDeltasForSnapshot": "2", **conf}, batches=5)
    show.run("sink")
    stop_maintenance(spark)
    return show.checkpoint


def names_in(root: Path, *, hidden: bool = False) -> list[str]:
    """All files of a checkpoint, without what Spark or Hadoop left behind, or with Hadoop's checksums."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
    return sorted(
        path.relative_to(root).as_posix() for path in files if hidden or not path.name.startswith((".", "_SUCCESS"))
    )


def without_hidden(root: Path, target: Path) -> Path:
    """A copy as it would be on an object store."""
    return Path(shutil.copytree(root, target, ignore=shutil.ignore_patterns(".*")))


async def back_up(checkpoint: Path, **choice: object) -> tuple[str, set[str]]:
    """Back up to a new repository: why it was refused, with nothing committed, or else the files that were taken."""
    repository = await Repository.init(MemoryStore())
    try:
        done = await backup_checkpoint(repository, checkpoint, BackupChoice(**choice))  # type: ignore[arg-type]
    except (DamagedError, FormatError) as error:
        refused = str(error)
    else:
        return "", await files_in(repository, done.commit)
    assert await repository.scopes() == ()
    return refused, set()


async def files_in(repository: Repository, commit: Commit) -> set[str]:
    """The files of a backup, as they are in the checkpoint."""
    taken: set[str] = set()
    for reference in commit.record.stores:
        store = StoreId.parse(reference.task, reference.store)
        index = await read_index(repository.store, reference.index)
        taken |= {"/".join((*(store.path.split("/") if store else ()), *path)) for path, _ in files_of(index.dir)}
    return taken


async def look(checkpoint: Path, name: str, damage: Damage) -> tuple[str, list[str]]:
    """Damage one file: what a backup of all batches says, and what check names.

    What both say is the same, but for a file that no batch needs, such as the changelog of a version that is a snapshot
    too: check reads it, a backup does not take it.
    """
    path = checkpoint / name
    sound, status = path.read_bytes(), path.stat()
    damage(path)
    report = await check_checkpoint(checkpoint)
    refused, taken = await back_up(checkpoint, keep_batches=ALL_BATCHES)
    path.write_bytes(sound)
    path.touch()
    assert path.stat().st_size == status.st_size
    damaged = [finding.path for finding in report.of_kind("damage")]
    is_passed_over = not refused and damage is not Path.unlink and name not in taken
    assert bool(damaged) == bool(refused) or is_passed_over, (name, damage, damaged, refused)
    return refused, damaged


def newest_of_each_kind(names: list[str]) -> list[str]:
    """One file of each directory and ending; of a log the newest but one, which has others to compare it with."""
    kinds: dict[tuple[str, str], str] = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        if parent.startswith("state/") and "/0/0" not in f"/{parent.removeprefix('state')}/":
            continue
        kinds[parent, last.partition(".")[2]] = name
    return list(kinds.values())


@pytest.fixture(scope="module")
def checkpoint(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("damage")
    yield written(spark, root, AGGREGATION, {FORMAT: "2"})
    shutil.rmtree(root)


@pytest.mark.parametrize("damage", DAMAGES, ids=["flip", "cut", "delete"])
def test_a_backup_refuses_what_check_calls_damage(checkpoint: Path, tmp_path: Path, damage: Damage) -> None:
    copy = without_hidden(checkpoint, tmp_path / "copy")

    async def look_at_each() -> None:
        assert (await check_checkpoint(copy)).findings == ()
        assert (await back_up(copy))[1] > {"metadata", "sources/0/0"}
        for name in newest_of_each_kind(names_in(copy)):
            refused, damaged = await look(copy, name, damage)
            is_named = name in damaged
            # A flip may be of a letter that only Hadoop's checksum shows; without a zip changelogs lead to its version.
            is_lost = not (
                damage is _flip or name.endswith(".crc") or (damage is Path.unlink and name.endswith(".zip"))
            )
            assert is_named or not is_lost or name.startswith("commits/"), (name, damaged)
            assert not is_named or not refused or name.rpartition("/")[2] in refused, (name, refused)

    asyncio.run(look_at_each())


_HDFS: Final = {f"{STORE}providerClass": HDFS_PROVIDER}
# Without changelogs the files of one store of every operator are alike.
KINDS: Final = [
    *(
        (query, {FORMAT: version})
        for query in (AGGREGATION, DEDUPLICATION_AND_AGGREGATION, TRANSFORM, LIMIT, KEYLESS, join(2), join(3))
        for version in ("1", "2")
    ),
    *((query, {FORMAT: "2", CHANGELOGS: "false"}) for query in (AGGREGATION, TRANSFORM)),
    *((query, _HDFS) for query in (AGGREGATION, DEDUPLICATION_AND_AGGREGATION, LIMIT, KEYLESS, join(2), join(3))),
    (AGGREGATION, _HDFS | {ROW_CHECKSUMS: "true"}),
]


def _name(value: object) -> str:
    if isinstance(value, Query):
        return value.name
    assert isinstance(value, dict)
    return "-".join(each.rpartition(".")[2] for each in value.values())


@soak
@pytest.mark.parametrize("hidden", [False, True], ids=["object store", "hidden"])
@pytest.mark.parametrize("query, conf", KINDS, ids=_name)
def test_every_file_of_every_kind(
    spark: SparkSession, tmp_path: Path, query: Query, conf: dict[str, str], hidden: bool
) -> None:
    root = written(spark, tmp_path / "show", query, conf)
    copy = without_hidden(root, tmp_path / "copy")
    if hidden:
        shutil.copytree(root, copy, dirs_exist_ok=True)

    async def look_at_each() -> None:
        assert (await check_checkpoint(copy)).findings == ()
        assert (await back_up(copy, keep_batches=ALL_BATCHES))[1]
        for name in names_in(copy):
            for damage in DAMAGES:
                await look(copy, name, damage)

    asyncio.run(look_at_each())


@pytest.mark.parametrize(
    "query, version",
    [
        (AGGREGATION, "2"),
        *(pytest.param(query, v, marks=soak) for query in (AGGREGATION, TRANSFORM, join(2)) for v in ("1", "2")),
    ],
    ids=lambda p: p.name if isinstance(p, Query) else p,
)
def test_a_query_goes_on_from_the_oldest_batch_that_is_kept(
    spark: SparkSession, tmp_path: Path, url: str, query: Query, version: str
) -> None:
    show = Show(spark, query, tmp_path / "show", {FORMAT: version, f"{STORE}minDeltasForSnapshot": "2"}, batches=7)
    expected = show.run("sink")

    async def take_back() -> int:
        async with await Repository.open(url) as repository:
            newest = await backup_checkpoint(repository, show.checkpoint, BackupChoice(job="newest"))
            kept = await backup_checkpoint(repository, show.checkpoint, BackupChoice(job="kept", keep_batches=4))
            oldest = kept.backup.oldest_batch
            assert oldest <= kept.backup.batch - 4 < newest.backup.oldest_batch
            await restore_checkpoint(repository, tmp_path / "older", RestoreChoice(job="kept", batch=oldest))
        assert (await check_checkpoint(tmp_path / "older")).findings == ()
        return oldest

    oldest = asyncio.run(take_back())
    assert show.committed(tmp_path / "older") == oldest
    again = show.run("again", tmp_path / "older")
    assert min(again) == oldest + 1
    assert again == {batch: rows for batch, rows in expected.items() if batch > oldest}


@soak
@pytest.mark.parametrize("version", ["1", "2"])
def test_what_a_query_purges_meanwhile_is_no_damage(spark: SparkSession, tmp_path: Path, version: str) -> None:
    few = {
        FORMAT: version,
        "spark.sql.streaming.minBatchesToRetain": "2",
        "spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint": "0",
        f"{STORE}maintenanceInterval": "100ms",
        f"{STORE}minDeltasForSnapshot": "2",
    }
    running = StatefulQuery(spark, AGGREGATION, tmp_path, few)
    running.feed(1)
    running.run()
    running.feed(40)
    thread = threading.Thread(target=running.run)
    thread.start()
    backups = 0

    async def back_up_meanwhile() -> None:
        nonlocal backups
        repository = await Repository.init(MemoryStore())
        while thread.is_alive():
            done = await backup_checkpoint(repository, running.checkpoint, BackupChoice(keep_batches=1))
            assert done.findings == ()
            backups += done.is_new

    try:
        asyncio.run(back_up_meanwhile())
    finally:
        thread.join()
    assert backups > 3
