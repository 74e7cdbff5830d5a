"""A checkpoint that our own state stores write, as Spark would, and what is in one."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from typing_extensions import override

from engine.local.checksums import crc32c
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import StoreRules
from engine.state.query import QueryAt, StreamingCheckpoint
from engine.state.settings import ROCKSDB_PROVIDER
from engine.state.store import open_query_state
from index.snapshot.model import UniqueId
from index.spark.checkpoint import StoreId
from index.spark.partition_keys import KeyRule
from index.spark.query_logs import BatchCommit, BatchOffsets, OperatorMetadata, OperatorStore, SourceOffset
from index.spark.schema import KeyForm, StructType
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id
from tidemark import StateStore, StateStoreSettings

Rows = dict[tuple[str, bytes], bytes]


def _text(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def _chunk(text: str) -> bytes:
    return (1).to_bytes(4, "big") + _text(text)


_ROW: Final = '{"type":"struct","fields":[{"name":"value","type":"binary","nullable":true,"metadata":{}}]}'
# As Spark stores them: of one table, and of the column families of a store.
ROW_SCHEMA: Final = _text("v2") + _chunk(_ROW) + _chunk(_ROW)
FAMILIES_SCHEMA: Final = (
    _text("v3")
    + (1).to_bytes(4, "big")
    + _text("default")
    + (b"\0\0" + _chunk(_ROW)) * 2
    + _chunk('{"keyStateEncoderType":"NoPrefixKeyStateEncoderSpec"}')
    + (0).to_bytes(4, "big")
)


async def rows_of(checkpoint: Path, scratch: Path, *, batch: int | None = None) -> dict[StoreId, Rows]:
    """Every row of every store of a checkpoint after a batch."""
    opened = await StreamingCheckpoint.open(checkpoint)
    query = await opened.at(batch)
    await opened.close()
    found: dict[StoreId, Rows] = {}
    for number, store in enumerate(query.stores):
        state = await open_query_state(
            checkpoint,
            scratch / f"rows-{number}",
            batch=query.batch,
            operator=store.id.operator,
            partition=store.id.partition,
            store=store.id.store,
        )
        async with state:
            families = state.families
            found[store.id] = {(f, key): value for f in families for key, value in state.items(family=f)}
    return found


class WrittenQuery:
    """A checkpoint that our own state stores write, batch by batch, as Spark would: one stateful operator.

    Args:
        root: Of the checkpoint.
        work: Where the stores work.
        format_version: Of its names.
        families: Whether the operator is one with column families, whose metadata names schema files.
        partitions: How many stores.
        planted: Rows that every batch puts beside its own.
        hashed: Whether each row is in the partition that `by_crc` says.
        file_offsets: Whether its offsets are those of a file source, one file a batch.
        settings: Of the stores.
    """

    def __init__(
        self,
        root: Path,
        work: Path,
        *,
        format_version: Literal[1, 2] = 2,
        families: bool = False,
        partitions: int = 2,
        planted: Mapping[bytes, bytes] | None = None,
        hashed: bool = False,
        file_offsets: bool = False,
        **settings: Any,
    ) -> None:
        self.root = root
        self.batch = -1
        self._work = work
        self._families = families
        self._file_offsets = file_offsets
        self._hashed = hashed
        self._planted = planted or {}
        self._settings = StateStoreSettings(
            format_version=format_version,
            column_families=families,
            **{"background_uploads": False, "deltas_per_snapshot": 3, **settings},
        )
        self._ids: list[UniqueId | None] = [None] * partitions
        # A batch that is planned again is planned at another time.
        self._clock = itertools.count(1_700_000_000_000)

    async def begin(self) -> Self:
        """Write what is there before the first batch."""
        _write(self.root / "metadata", encode_query_id("query-1"))
        paths = (f"file:{self.root}/state/0/_stateSchema/default/0_abc",) if self._families else ()
        store = OperatorStore(
            name="default", prefix_columns_count=0, partitions_count=len(self._ids), schema_paths=paths
        )
        version = 2 if self._families else 1
        name = "transformWithStateExec" if self._families else "stateStoreSave"
        data = encode_operator(OperatorMetadata(version=version, id=0, name=name, stores=(store,)))
        _write(self.root / "state/0/_metadata" / ("v2/0" if self._families else "metadata"), data)
        if self._families:
            _write(self.root / "state/0/_stateSchema/default/0_abc", FAMILIES_SCHEMA)
        else:
            _write(self.root / "state/0/0/_metadata/schema", ROW_SCHEMA)
        return self

    async def run(self, batches: int, *, lost: str = "") -> None:
        """Commit more batches; batch b puts, replaces and deletes rows that show which batch it is.

        Files of a pattern are `lost` before the commit.
        """
        checkpoint = await StreamingCheckpoint.open(self.root)
        for _ in range(batches):
            batch = self.batch + 1
            await self._plan(checkpoint, batch)
            for partition in range(len(self._ids)):
                self._ids[partition] = await self._commit(checkpoint, batch, partition)
            for path in self.root.glob(lost) if lost else ():
                path.unlink()
            ids: dict[int, tuple[tuple[UniqueId, ...], ...]] | None
            ids = None if self._ids[0] is None else {0: tuple((i,) for i in self._ids if i is not None)}
            await checkpoint.commits.add(batch, BatchCommit(version=1 if ids is None else 2, unique_ids=ids))
            self.batch = batch
        await checkpoint.close()

    async def plan(self) -> None:
        """Plan the next batch, as a query does that dies before it commits."""
        checkpoint = await StreamingCheckpoint.open(self.root)
        await self._plan(checkpoint, self.batch + 1)
        await checkpoint.close()

    async def _plan(self, checkpoint: StreamingCheckpoint, batch: int) -> None:
        line = f'{{"path":"file:///in/{batch}.json","timestamp":1,"batchId":{batch}}}'
        _write(self.root / f"sources/0/{batch}", f"v1\n{line}".encode())
        offset = f'{{"logOffset":{batch}}}' if self._file_offsets else None
        await checkpoint.offsets.add(
            batch, BatchOffsets(timestamp_ms=next(self._clock), conf=self._conf, offsets=(SourceOffset("0", offset),))
        )

    async def resume(self, root: Path, batch: int) -> None:
        """Go on from a batch in another place."""
        self.root, self.batch = root, batch
        checkpoint = await StreamingCheckpoint.open(root)
        query = await checkpoint.at(batch)
        await checkpoint.close()
        self._ids = [store.at.unique_id for store in query.stores]

    @property
    def _conf(self) -> dict[str, str]:
        state = "spark.sql.streaming.stateStore."
        return {
            f"{state}providerClass": ROCKSDB_PROVIDER,
            "spark.sql.shuffle.partitions": str(len(self._ids)),
            f"{state}compression.codec": self._settings.codec,
            f"{state}rocksdb.mergeOperatorVersion": str(self._settings.merge_operator_version),
            f"{state}rowChecksum.enabled": str(self._settings.row_checksums).lower(),
        }

    async def _commit(self, checkpoint: StreamingCheckpoint, batch: int, partition: int) -> UniqueId | None:
        files = checkpoint.state_dir(0, partition)
        async with await StateStore.open(files, self._work / str(partition), self._settings) as store:
            await store.load(batch, self._ids[partition])
            if self._families and batch == 0:
                store.add_family("lists", internal=False)
                store.add_family("$counts", internal=True)
            puts = {f"{partition}-{n}".encode(): f"of batch {batch}".encode() for n in range(batch, batch + 3)}
            puts |= self._planted
            for key, value in puts.items():
                if self._is_in(partition, key):
                    store.put(key, value)
            deleted = f"{partition}-{batch - 1}".encode()
            if self._is_in(partition, deleted):
                store.delete(deleted)
            if self._families and self._is_in(partition, b"list"):
                store.merge(b"list", b"%d" % batch, family="lists")
            if self._families and self._is_in(partition, b"%d" % batch):
                store.put(b"%d" % batch, b"1", family="$counts")
            committed = await store.commit()
            await store.maintain()
        return committed.unique_id

    def _is_in(self, partition: int, key: bytes) -> bool:
        return not self._hashed or crc32c(key) % len(self._ids) == partition


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def joined(found: dict[StoreId, Rows]) -> Rows:
    """The rows of all stores, of which no two have the same key."""
    rows: Rows = {}
    for each in found.values():
        assert not rows.keys() & each.keys()
        rows |= each
    return rows


RULE = KeyRule(
    operator=0,
    operator_name="stateStoreSave",
    store="default",
    family="default",
    rule="a test",
    form=KeyForm(),
    is_first=True,
    row=StructType(()),
    count=0,
)


def by_crc(_: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
    return [crc32c(key) % partitions for key in keys]


async def whole_key_rules(_: CheckpointDir, query: QueryAt) -> dict[tuple[int, str], StoreRules]:
    """Stand in for `read_key_rules`: these queries have keys that are not rows, and no schema.

    Every family is partitioned by the whole key.
    """

    class Every(dict[str, KeyRule]):
        @override
        def get(self, key: str, default: Any = None) -> Any:
            return RULE

    return {
        (operator.id, store): StoreRules(operator=operator, store=store, families=Every())
        for operator in query.operators
        for store in operator.stores
    }
