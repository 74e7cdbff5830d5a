"""What changed between two batches, and which files there are."""

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.repository.repository import Repository
from engine.state.files import StateFileManager
from engine.state.query import StreamingCheckpoint
from tests.spark.sources.reading import by_us, ran, reading_session
from tests.spark.state.queries import FORMAT, SESSION, TRANSFORM, Query, StatefulQuery

pytestmark = pytest.mark.spark

V2 = {FORMAT: "2"}
KINDS = {"snapshot", "changelog", "sst"}


def diff(session: SparkSession, query: StatefulQuery, **options: object) -> DataFrame:
    texts = {name: str(value) for name, value in options.items()}
    return session.read.format("tidemark_state_diff").options(**texts).load(str(query.checkpoint))


def state(session: SparkSession, query: StatefulQuery, batch: int) -> dict[str, Row]:
    """Values by what a key is, with its family where rows are bytes."""
    rows = by_us(session, query, batch=batch).collect()
    return {repr((row.partition, getattr(row, "family", None), row.key)): row.value for row in rows}


def check_diff(session: SparkSession, query: StatefulQuery, first: int, last: int) -> Counter[str]:
    """A difference against the two states it is of. Returns how many changes of each kind there are."""
    before, after = state(session, query, first), state(session, query, last)
    expected = {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }
    rows = diff(session, query, from_batch=first, to_batch=last).collect()
    found = {repr((row.partition, getattr(row, "family", None), row.key)): (row.before, row.after) for row in rows}
    assert len(rows) == len(found)
    assert found == expected
    kinds = {(True, False): "added", (False, True): "removed", (False, False): "changed"}
    assert all(row.change == kinds[row.before is None, row.after is None] for row in rows)
    return Counter(row.change for row in rows)


def test_a_difference_is_what_turns_one_state_into_the_other(counted: StatefulQuery) -> None:
    session = reading_session(counted)
    kinds = check_diff(session, counted, 0, 3)
    assert kinds["added"] > 0
    assert kinds["changed"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("query", [SESSION, TRANSFORM], ids=lambda query: query.name)
def test_a_difference_has_what_went_too(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    made = ran(spark, query, tmp_path, V2, batches=5)
    session = reading_session(made)
    newest = made.committed()[-1]
    kinds = sum((check_diff(session, made, batch, newest) for batch in range(newest)), Counter[str]())
    assert {"added", "removed"} <= set(kinds) <= {"added", "removed", "changed"}
    assert diff(session, made, from_batch=newest).count() == 0


async def needed_of(checkpoint: Path) -> set[str]:
    """What the newest batch takes of its stores, by way of what a load resolves."""
    opened = await StreamingCheckpoint.open(checkpoint)
    query = await opened.at()
    names: set[str] = set()
    for store in query.stores:
        manager = StateFileManager(opened.state_dir(store.id.operator, store.id.partition, store.id.store))
        resolution = await manager.resolve(store.at.version, store.at.unique_id)
        names |= {f"{store.id.path}/{of}.changelog" for of in resolution.changelogs}
        if resolution.base is not None:
            names.add(f"{store.id.path}/{resolution.base}.zip")
            zipped = await manager.read_snapshot(resolution.base)
            names |= {f"{store.id.path}/SSTs/{file.stored_name}" for file in zipped.metadata.sst_files}
    await opened.close()
    return names


def test_the_files_of_a_checkpoint_are_all_there_and_distinguished(counted: StatefulQuery, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copy"
    shutil.copytree(counted.checkpoint, checkpoint)
    (checkpoint / "state/0/1/notes.txt").write_text("foreign")
    (checkpoint / "state/0/99").mkdir()
    (checkpoint / "state/0/99/1.changelog").write_text("of no batch")
    read = reading_session(counted).read.format("tidemark_files").load(str(checkpoint))
    rows = {row.path: row for row in read.collect()}
    below = {os.path.relpath(Path(root) / name, checkpoint) for root, _, names in os.walk(checkpoint) for name in names}
    assert {path for path in below if "/." not in f"/{path}"} <= set(rows) <= below
    assert all(row.size_bytes == (checkpoint / path).stat().st_size for path, row in rows.items())
    needed = {path for path, row in rows.items() if row.needed and row.kind in KINDS}
    assert needed == asyncio.run(needed_of(checkpoint))
    assert (rows["commits/3"].kind, rows["commits/3"].version, rows["commits/3"].needed) == ("commits", 4, True)
    assert [rows["state/0/1/notes.txt"][name] for name in ("kind", "needed", "partition")] == ["foreign", False, 1]
    assert rows["state/0/0/_metadata/schema"].kind == "schema"
    assert [rows["state/0/99/1.changelog"][name] for name in ("kind", "needed", "operator")] == ["foreign", False, 0]


def test_files_of_a_chosen_store_alone_and_null_where_it_is_damaged(counted: StatefulQuery, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copy"
    shutil.copytree(counted.checkpoint, checkpoint)
    read = reading_session(counted).read.format("tidemark_files").option("partition", "1")
    rows = read.load(str(checkpoint)).collect()
    assert all(row.path.startswith("state/0/1/") and row.partition == 1 for row in rows)
    for row in rows:
        if row.kind in {"snapshot", "changelog"}:
            (checkpoint / row.path).unlink()
    assert {row.needed for row in read.load(str(checkpoint)).collect()} == {None}


def test_the_files_of_a_backup_are_reported_with_their_hashes(counted: StatefulQuery, tmp_path: Path, url: str) -> None:
    async def backup() -> None:
        async with await Repository.open(url) as repository:
            await backup_checkpoint(repository, counted.checkpoint, BackupChoice(job="query"))

    asyncio.run(backup())
    session = reading_session(counted)
    rows = session.read.format("tidemark_files").option("repository", url).load().collect()
    assert {row.path for row in rows if row.kind in KINDS and row.needed} == asyncio.run(needed_of(counted.checkpoint))
    assert all(len(row.blake3) == 64 for row in rows)
    assert {"metadata", "commits/3", "offsets/3"} <= {row.path for row in rows if row.needed}
