"""Directories that our state store writes are Spark's: its reader sees what we do, and its query goes on from there."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from engine.state.commit import Committed
from engine.state.query import StreamingCheckpoint
from engine.state.settings import StateStoreSettings
from engine.state.store import StateStore
from index.spark.names import StateFileName, parse_state_name
from index.spark.query_logs import BatchCommit
from tests.spark.state.oracle import our_rows, spark_rows
from tests.spark.state.queries import AGGREGATION, CODEC, FORMAT, PARTITIONS, TRANSFORM, StatefulQuery

pytestmark = pytest.mark.spark

V1 = {FORMAT: "1"}
V2 = {FORMAT: "2"}

# Commits change nothing that was not their own to change.
BASE = StateStoreSettings(deltas_per_snapshot=7)


def word(value: bytes, field: int) -> int:
    """A field of a row: behind the byte of the encoder and the word of what is null."""
    return int.from_bytes(value[9 + 8 * field :][:8], "little", signed=True)


def with_word(value: bytes, field: int, number: int) -> bytes:
    at = 9 + 8 * field
    return value[:at] + number.to_bytes(8, "little", signed=True) + value[at + 8 :]


def text_row(text: str) -> bytes:
    """A row of one short text, as the encoder of keys has it."""
    data = text.encode()
    return b"\0" + struct.pack("<QII", 0, len(data), 16) + data + b"\0" * (-len(data) % 8)


def text_of(key: bytes) -> str:
    """The other way round."""
    return key[17 : 17 + int.from_bytes(key[9:13], "little")].decode()


@asynccontextmanager
async def stores(query: StatefulQuery, base: StateStoreSettings = BASE) -> AsyncIterator[list[StateStore]]:
    """Our stores of every partition, at the last committed version."""
    checkpoint = await StreamingCheckpoint.open(query.checkpoint)
    batch = query.committed()[-1]
    settings = (await checkpoint.state(batch=batch, base=base)).settings
    opened = []
    try:
        for partition in range(PARTITIONS):
            directory = query.root / f"ours-{partition}"
            store = await StateStore.open(checkpoint.state_dir(0, partition), directory, settings)
            opened.append(store)
            of = (await checkpoint.state(0, partition, batch=batch)).at
            await store.load(of.version, of.unique_id)
        yield opened
    finally:
        for store in opened:
            await store.close()
        await checkpoint.close()


async def add_batch(query: StatefulQuery, committed: list[Committed]) -> int:
    """Write the logs of a batch that reads nothing new: offsets before it, and the commit with its ids after it."""
    checkpoint = await StreamingCheckpoint.open(query.checkpoint)
    before = (await checkpoint.committed_batches())[-1]
    offsets, last_commit = await checkpoint.offsets.get(before), await checkpoint.commits.get(before)
    assert offsets is not None
    assert last_commit is not None
    batch = before + 1
    assert {each.version for each in committed} == {batch + 1}
    later = msgspec.structs.replace(offsets, timestamp_ms=offsets.timestamp_ms + 1000)
    assert await checkpoint.offsets.add(batch, later)
    assert not await checkpoint.offsets.add(batch, offsets)
    ids = tuple((each.unique_id,) for each in committed if each.unique_id is not None)
    commit = BatchCommit(version=last_commit.version, unique_ids={0: ids} if ids else None)
    assert await checkpoint.commits.add(batch, commit)
    assert not await checkpoint.commits.add(batch, BatchCommit())
    await checkpoint.close()
    return batch


async def write_aggregation(query: StatefulQuery, versions: int) -> dict[str, int]:
    """Change counts, remove rows and bring them back, version by version. Returns the count of every key at the end."""
    removed: dict[tuple[int, bytes], bytes] = {}
    async with stores(query) as opened:
        for n in range(versions):
            committed = []
            for partition, store in enumerate(opened):
                rows = list(store.items())
                for at, (key, value) in enumerate(rows):
                    if (at + n) % 3 == 0:
                        store.put(key, with_word(value, 0, word(value, 0) + 1000 + n))
                    elif (at + n) % 7 == 0:
                        removed[partition, key] = value
                        store.delete(key)
                for of, key in [each for each in removed if each[0] == partition and n % 4 == 3]:
                    store.put(key, removed.pop((of, key)))
                store.put(text_row(f"own-{partition}-{n:02d}"), rows[0][1])
                committed.append(await store.commit())
            await add_batch(query, committed)
            for store in opened:
                await store.maintain()
        return {text_of(key): word(value, 0) for store in opened for key, value in store.items()}


def collect_into(found: dict[str, int]) -> Callable[[DataFrame, int], None]:
    def sink(rows: DataFrame, batch: int) -> None:
        found.update({row.k: row.n for row in rows.collect()})

    return sink


def state_files(query: StatefulQuery, partition: int) -> list[StateFileName]:
    names = [parse_state_name(file.name) for file in (query.checkpoint / f"state/0/{partition}").iterdir()]
    return [name for name in names if name is not None and not name.checksum]


@pytest.mark.parametrize(
    "form, versions",
    [
        pytest.param(V2, 7, id="V2, 7 versions"),
        pytest.param(V2, 30, id="V2, 30 versions", marks=pytest.mark.soak),
        pytest.param(V1, 30, id="V1, 30 versions", marks=pytest.mark.soak),
    ],
)
def test_spark_reads_every_version_that_we_wrote_and_goes_on_from_it(
    spark: SparkSession, tmp_path: Path, form: dict[str, str], versions: int
) -> None:
    query = StatefulQuery(spark, AGGREGATION, tmp_path, form)
    query.feed(2)
    query.run()
    expected = asyncio.run(write_aggregation(query, versions))
    batches = query.committed()
    assert batches == tuple(range(versions + 2))
    snapshots = {name.of.version for name in state_files(query, 0) if name.kind == "snapshot" and name.of.version > 2}
    assert len(snapshots) >= versions // BASE.deltas_per_snapshot - 1

    theirs = spark_rows(query, batches)
    assert our_rows(query, batches, tmp_path / "read") == theirs
    assert len({frozenset(rows.items()) for rows in theirs.values()}) == len(theirs)

    # The keys that the query had brought, and where it had put them; some of them are removed, and begin again.
    fed = sorted({f"key-{n:03d}" for n in range(19)})
    assert len(expected.keys() & set(fed)) > 10
    found: dict[str, int] = {}
    query.feed_rows([{"k": key, "v": 1, "ts": "2024-01-01 00:00:00"} for key in fed] * 2)
    query.feed_rows([{"k": "new", "v": 1, "ts": "2024-01-01 00:00:00"}])
    query.run(sink=collect_into(found))
    assert found == {key: expected.get(key, 0) + 2 for key in fed} | {"new": 1}
    batches = query.committed()
    assert len(batches) == versions + 4
    assert our_rows(query, batches[-4:], tmp_path / "again") == spark_rows(query, batches[-4:])


async def write_transform(query: StatefulQuery, versions: int) -> dict[str, int]:
    """Count up, append to the lists, and remove from the maps. Returns the count of every key at the end."""
    async with stores(query) as opened:
        for n in range(versions):
            committed = []
            for store in opened:
                rows = list(store.items(family="count"))
                for at, (key, value) in enumerate(rows):
                    store.put(key, with_word(value, 0, word(value, 0) + 1), "count")
                    if (at + n) % 2:
                        item = with_word(value, 0, 10_000 + n)
                        store.merge(key, len(item).to_bytes(4, "little") + item, "items")
                        counter = store.get(key, "$rowCounter_items")
                        counter = with_word(value, 0, 1 + (word(counter, 0) if counter else 0))
                        store.put(key, counter, "$rowCounter_items")
                for at, (key, value) in enumerate(list(store.items(family="seen"))):
                    if at % 5 == n:
                        store.delete(key, "seen")
                    else:
                        store.put(key, with_word(value, 0, 1), "seen")
                committed.append(await store.commit())
            await add_batch(query, committed)
        return {text_of(key): word(value, 0) for store in opened for key, value in store.items(family="count")}


@pytest.mark.soak
@pytest.mark.parametrize("form", [V1, V2, V2 | {CODEC: "zstd"}], ids=["V1", "V2", "V2 zstd"])
def test_spark_goes_on_from_column_families_that_we_wrote(
    spark: SparkSession, tmp_path: Path, form: dict[str, str]
) -> None:
    query = StatefulQuery(spark, TRANSFORM, tmp_path, form)
    query.feed(3)
    query.run()
    expected = asyncio.run(write_transform(query, 9))
    batches = query.committed()
    assert our_rows(query, batches, tmp_path / "read") == spark_rows(query, batches)

    found: dict[str, int] = {}
    query.feed_rows([{"k": key, "v": 1, "ts": "2024-01-01 00:00:00"} for key in sorted(expected)])
    query.run(sink=collect_into(found))
    assert found == {key: count + 1 for key, count in expected.items()}
    batches = query.committed()
    assert our_rows(query, batches[-3:], tmp_path / "again") == spark_rows(query, batches[-3:])
