"""A streaming query without Spark: real state stores, and the logs and metadata that Spark would write around them."""

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blobstore.base import BlobStore
from engine.repository.repository import Repository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint
from engine.state.settings import ROCKSDB_PROVIDER
from engine.state.store import open_query_state
from index.plan.commits import Commit
from index.snapshot.model import UniqueId
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, StoreId
from index.spark.query_logs import BatchCommit, BatchOffsets, OperatorMetadata, OperatorStore
from tests.unit.engine.checkpoint.written_query import ROW_SCHEMA
from tests.unit.engine.state.state_store_kit import settings_of
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id
from tidemark import StateStore

Rows = dict[bytes, bytes]
DELTAS = 3


class LiveQuery:
    """One operator of one store in each partition. Batch n puts n under `last`, and under one more key.

    Args:
        root: Of the checkpoint; what the query leaves on this machine otherwise is beside it.
        files: The checkpoint, if it is on another store than a file system.
        format_version: Of its state.
        partitions: How many.
        settings: Of the state stores.
    """

    def __init__(
        self,
        root: Path,
        files: BlobStore | None = None,
        *,
        format_version: int = 2,
        partitions: int = 2,
        **settings: Any,
    ) -> None:
        self.root = root
        self.files = files
        self.query_id = str(uuid.uuid4())
        self.batches = 0
        self._settings = settings_of(
            **{"format_version": format_version, "deltas_per_snapshot": DELTAS, "file_checksums": True, **settings}
        )
        self._ids: list[list[UniqueId | None]] = [[None] for _ in range(partitions)]
        self._works = itertools.count()
        # Of each partition, as its task keeps it from batch to batch.
        self._stores: dict[int, StateStore] = {}

    @property
    def location(self) -> Path | BlobStore:
        return self.files or self.root

    async def directory(self) -> CheckpointDir:
        return await CheckpointDir.open(self.location)

    def ids(self, version: int) -> list[UniqueId | None]:
        """Of a version, by partition."""
        return [ids[version] for ids in self._ids]

    async def start(self) -> None:
        """What is there before the first batch."""
        directory = await self.directory()
        await directory.publish("metadata", encode_query_id(self.query_id), overwrite=False)
        stores = (OperatorStore(name="default", prefix_columns_count=0, partitions_count=len(self._ids)),)
        operator = OperatorMetadata(id=0, name="stateStoreSave", stores=stores)
        await directory.publish("state/0/_metadata/metadata", encode_operator(operator), overwrite=False)
        await directory.publish("state/0/0/_metadata/schema", ROW_SCHEMA, overwrite=False)
        await directory.publish("sources/0/0", b"v1\n{}", overwrite=False)

    async def run(self, batches: int = 1, *, commit: bool = True, maintain: bool = True) -> None:
        """Run batches. Without `commit` the last one stops before its commit is written."""
        if not self.batches:
            await self.start()
        directory = await self.directory()
        checkpoint = StreamingCheckpoint(directory)
        for batch in range(self.batches, self.batches + batches):
            conf = {
                "spark.sql.streaming.stateStore.providerClass": ROCKSDB_PROVIDER,
                "spark.sql.streaming.stateStore.compression.codec": "lz4",
                "spark.sql.shuffle.partitions": str(len(self._ids)),
            }
            await checkpoint.offsets.add(batch, BatchOffsets(conf=conf, timestamp_ms=batch))
            for partition, ids in enumerate(self._ids):
                if partition not in self._stores:
                    self._stores[partition] = await self._open(partition)
                unique_id = await self._write(self._stores[partition], partition, batch, ids[batch])
                if maintain:
                    await self._stores[partition].maintain()
                ids[batch + 1 :] = [unique_id]
            if commit or batch < self.batches + batches - 1:
                unique_ids: dict[int, tuple[tuple[UniqueId, ...], ...]] = {
                    0: tuple((ids[batch + 1] or UniqueId(""),) for ids in self._ids)
                }
                is_first = self._settings.format_version == 1
                entry = BatchCommit() if is_first else BatchCommit(version=2, unique_ids=unique_ids)
                await checkpoint.commits.add(batch, entry)
        self.batches += batches if commit else batches - 1

    async def write(self, partition: int, version: int, *, value: bytes = b"") -> UniqueId | None:
        """One version on top of another by an attempt of a task that nobody waits for."""
        async with await self._open(partition) as store:
            return await self._write(store, partition, version, self.ids(version)[partition], value)

    async def _open(self, partition: int) -> StateStore:
        directory = (await self.directory()).child(StoreId(0, partition).path)
        work = self.root.with_name(f"{self.root.name}-work-{next(self._works)}")
        return await StateStore.open(directory, work, self._settings)

    @staticmethod
    async def _write(
        store: StateStore, partition: int, version: int, unique_id: UniqueId | None, value: bytes = b""
    ) -> UniqueId | None:
        await store.load(version, unique_id)
        for key, text in rows_at(partition, version + 1).items():
            store.put(key, value or text)
        return (await store.commit()).unique_id

    async def close(self) -> None:
        """The query ends."""
        for store in self._stores.values():
            await store.close()


NewQuery = Callable[..., LiveQuery]


def rows_at(partition: int, version: int) -> Rows:
    """What version n puts."""
    return {b"last": b"%d" % version, b"%d/%d" % (partition, version): b"of version %d" % version * 20}


def all_rows(partition: int, version: int) -> Rows:
    """What a version holds."""
    rows: Rows = {}
    for of in range(1, version + 1):
        rows |= rows_at(partition, of)
    return rows


async def restore_backup(repository: Repository, commit: Commit, target: Path) -> Path:
    """Everything that a backup has, where it was in the checkpoint."""
    await repository.restore(commit, target, task=QUERY_TASK, store=QUERY_STORE)
    for reference in commit.record.stores:
        store = StoreId.parse(reference.task, reference.store)
        if store is not None:
            (target / store.path).parent.mkdir(parents=True, exist_ok=True)
            await repository.restore(commit, target / store.path, task=reference.task, store=reference.store)
    return target


async def check_rows(checkpoint: Path, work: Path, *, batch: int, partitions: int = 2) -> None:
    """A checkpoint whose newest batch is this one, and whose state is that of `LiveQuery` after it."""
    opened = await StreamingCheckpoint.open(checkpoint)
    assert (await opened.committed_batches())[-1] == batch
    for partition in range(partitions):
        store = await open_query_state(checkpoint, work / f"{batch}-{partition}", partition=partition)
        async with store:
            assert dict(store.items()) == all_rows(partition, batch + 1)


def names_below(root: Path) -> set[str]:
    """Every file, hidden or not."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def stats_below(root: Path) -> dict[str, tuple[int, int, int]]:
    """What a stat shows of everything below a directory."""
    return {
        str(path.relative_to(root)): (status.st_ino, status.st_ctime_ns, status.st_mtime_ns)
        for path in sorted(root.rglob("*"))
        for status in [path.lstat()]
    }
