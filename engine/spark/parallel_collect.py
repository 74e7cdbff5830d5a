"""Collection on Spark, for inventories that one machine would take too long to list, to mark and to delete.

The steps and their order are those of `engine.collect.collect` (design 0002, D4); here are the hands that do the three
whose work grows with the number of blobs. Records, boundaries, names and pins stay with the driver.

What was listed comes back to the driver as one Arrow table, about 100 bytes per blob, before any root is read. It must
not be a DataFrame that Spark would compute again when an executor is lost: blobs listed after the roots were read may
belong to a commit that the roots do not show, and D2 would take them for garbage.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from blobstore.base import BlobStore
from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from engine.collect import CollectReport, Marked, delete_keys, list_uploads
from engine.errors import DamagedError
from engine.index_io import is_missing
from engine.roots import References, reachable_keys
from engine.spark.access import Access, open_on_driver
from engine.spark.errors import TaskFailedError, last_error
from engine.transfer_settings import TransferSettings
from index.collect_plan import PlannedDelete, Upload
from index.keys import BLOBS, INDEXES, shard_prefixes
from index.model import IndexReference
from index.retention import Retention

# Keys that one task deletes before it answers.
DELETES_PER_TASK: Final = 10_000
REFERENCES_PER_TASK: Final = 16

UPLOADS: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("created_at_ms", pa.int64()),
        pa.field("expires_at_ms", pa.int64()),
        pa.field("ttl_known", pa.bool_()),
        # A key that tidemark never wrote: it is reported and left alone.
        pa.field("foreign", pa.bool_()),
    ]
)

KEYS: Final = pa.schema([pa.field("key", pa.string())])
# A key that is alive, or that something alive needs and that is missing.
MARKS: Final = pa.schema([pa.field("key", pa.string()), pa.field("missing", pa.bool_())])
WORK: Final = pa.schema([pa.field("partition", pa.int32()), pa.field("item", pa.binary())])

ArrowTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def collect(
    spark: SparkSession,
    url: str,
    retention: Retention,
    *,
    dry_run: bool = False,
    partitions_max: int | None = None,
    transfer: TransferSettings | None = None,
    store_settings: StoreSettings | None = None,
) -> CollectReport:
    """Delete what nothing keeps: `engine.collect.collect`, with the lists, the marks and the deletes in tasks.

    Args:
        spark: The session.
        url: A repository that every executor can reach.
        retention: Which commits stay; the newest of every scope always does.
        dry_run: Plan only: nothing is written or deleted, no TTL is removed.
        partitions_max: Each step runs in at most so many tasks; the session's shuffle partitions if not given.
        transfer: How bytes are moved.
        store_settings: How the repository's store is asked.

    Returns:
        What went, each key with its reason, and what stayed. Foreign keys outside the 256 shards are not seen.

    Raises:
        UnsafeStoreError: The store cannot be collected, or a listing had holes: nothing was deleted.
        DamagedError: An index is missing, or one that the driver reads is altered: nothing was deleted.
        FormatError: Something was written by a newer tidemark: nothing was deleted.
        TaskFailedError: A task failed for good, also by one of these: nothing was deleted after it.
        StoreError: As the store says: nothing was deleted after it.
    """
    if partitions_max is None:
        partitions_max = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    repository, access = open_on_driver(url, store=store_settings, transfer=transfer)
    with repository:
        hands = SparkHands(spark, access, partitions_max)
        return repository.collect(retention, dry_run=dry_run, hands=hands)


class ListTask(msgspec.Struct, frozen=True, kw_only=True):
    """Lists uploads below prefixes; given to `mapInArrow`."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One batch per prefix."""
        for prefix in _items(batches):
            with self.access.borrow() as repository:
                listing = list_uploads(repository.asynchronous.store, [prefix.decode()])
                uploads, foreign = repository.loop.run(listing)
            rows = [(*msgspec.structs.astuple(upload), False) for upload in uploads]
            rows += [(key, 0, 0, None, False, True) for key in foreign]
            if rows:
                columns = zip(*rows, strict=True)
                arrays = [pa.array(values, field.type) for values, field in zip(columns, UPLOADS, strict=True)]
                yield pa.record_batch(arrays, schema=UPLOADS)


class MarkTask(msgspec.Struct, frozen=True, kw_only=True):
    """Reads indexes and tells every key that they keep alive; given to `mapInArrow`."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One batch per group of indexes; a key may be told by several."""
        for group in _batched(_items(batches), REFERENCES_PER_TASK):
            references = [msgspec.msgpack.decode(item, type=tuple[IndexReference, bool]) for item in group]
            with self.access.borrow() as repository:
                keys, missing = repository.loop.run(_mark(repository.asynchronous.store, references))
            columns = [pa.array(sorted(keys), pa.string()), pa.array([missing] * len(keys), pa.bool_())]
            yield pa.record_batch(columns, schema=MARKS)


class DeleteTask(msgspec.Struct, frozen=True, kw_only=True):
    """Carries out planned deletes and tells which keys are still there; given to `mapInArrow`."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One batch per group of deletes."""
        for group in _batched(_items(batches), DELETES_PER_TASK):
            deletes = [msgspec.msgpack.decode(item, type=PlannedDelete) for item in group]
            with self.access.borrow() as repository:
                left = repository.loop.run(delete_keys(repository.asynchronous.store, deletes))
            yield pa.record_batch([pa.array(left, pa.string())], schema=KEYS)


class SparkHands:
    """Lists, marks and deletes in tasks; lives in the driver for one collection. Its calls block a thread each."""

    def __init__(self, spark: SparkSession, access: Access, partitions_max: int) -> None:
        self._spark = spark
        self._access = access
        self._partitions_max = partitions_max
        self._listing = UPLOADS.empty_table()

    async def list_uploads(self) -> tuple[str, ...]:
        """As `engine.collect.Hands`."""
        return await asyncio.to_thread(self._list)

    async def mark(self, references: References) -> Marked:
        """As `engine.collect.Hands`."""
        return await asyncio.to_thread(self._mark, references)

    async def delete(self, room: Sequence[PlannedDelete]) -> tuple[str, ...]:
        """As `engine.collect.Hands`."""
        return await asyncio.to_thread(self._delete, room)

    def _list(self) -> tuple[str, ...]:
        """Every upload, and the foreign keys beside them; nothing is listed again later."""
        prefixes = [prefix.encode() for room in (BLOBS, INDEXES) for prefix in shard_prefixes(room)]
        listed = self._run(prefixes, 1, ListTask(access=self._access), UPLOADS)
        self._listing = listed.filter(pc.invert(listed["foreign"]))
        return tuple(sorted(listed.filter(listed["foreign"])["key"].to_pylist()))

    def _mark(self, references: References) -> Marked:
        in_order = sorted(references.everything, key=lambda r: r.key)
        items = [msgspec.msgpack.encode((reference, reference in references.optional)) for reference in in_order]
        marks = self._frame(items, REFERENCES_PER_TASK, MarkTask(access=self._access), MARKS).distinct()
        # What is missing need not have been listed. Of what is live only indexes are asked for: their TTL tells that of
        # their blobs (design 0002, T1).
        wanted = (
            self._spark.createDataFrame(self._listing)
            .join(marks, "key", "full")
            .where(
                "missing OR size_bytes IS NOT NULL AND (missing IS NULL"
                f" OR startswith(key, '{INDEXES}') AND (NOT ttl_known OR expires_at_ms IS NOT NULL))"
            )
        )
        found = self._answer("mark", lambda: wanted.select(*UPLOADS.names[:-1], "missing").toArrow())
        columns = [column.to_pylist() for column in found.columns]
        rows = list(zip(*columns, strict=True))
        for key, *_, missing in rows:
            if missing:
                raise DamagedError("is missing", operation="read index", subject=key) from BlobNotFoundError(
                    "a task did not find it", operation="get", key=key
                )
        uploads = [(Upload(*row[:-1]), row[-1] is not None) for row in rows]
        unreachable = tuple(u for u, is_live in uploads if not is_live)
        listed_bytes = pc.sum(self._listing["size_bytes"]).as_py() or 0
        return Marked(
            unreachable=unreachable,
            unsettled=frozenset(u.key for u, is_live in uploads if is_live),
            live_count=self._listing.num_rows - len(unreachable),
            live_bytes=listed_bytes - sum(u.size_bytes for u in unreachable),
        )

    def _delete(self, room: Sequence[PlannedDelete]) -> tuple[str, ...]:
        items = [msgspec.msgpack.encode(delete) for delete in room]
        task = DeleteTask(access=self._access)
        return tuple(sorted(self._run(items, DELETES_PER_TASK, task, KEYS)["key"].to_pylist()))

    def _run(self, items: Sequence[bytes], per_task: int, task: ArrowTask, schema: pa.Schema) -> pa.Table:
        if not items:
            return schema.empty_table()
        return self._answer(type(task).__name__, self._frame(items, per_task, task, schema).toArrow)

    def _frame(self, items: Sequence[bytes], per_task: int, task: ArrowTask, schema: pa.Schema) -> DataFrame:
        """A task over items, in at most as many partitions as allowed and at least `per_task` items in each."""
        count = max(1, min(self._partitions_max, -(-len(items) // per_task)))
        numbers = pa.array([position % count for position in range(len(items))], pa.int32())
        work = self._spark.createDataFrame(pa.table([numbers, pa.array(items, pa.binary())], schema=WORK))
        return work.repartitionById(count, "partition").mapInArrow(task, _ddl(schema))

    def _answer(self, step: str, evaluate: Callable[[], pa.Table]) -> pa.Table:
        try:
            return evaluate()
        except PySparkException as error:
            raise TaskFailedError(
                last_error(error), operation=f"collect, {step}", hint="nothing was deleted after this; run it again"
            ) from error


async def _mark(store: BlobStore, references: Sequence[tuple[IndexReference, bool]]) -> tuple[frozenset[str], bool]:
    """What is alive; or, and then True, what is missing: the driver tells damage from being overtaken."""
    optional = frozenset(reference for reference, is_optional in references if is_optional)
    try:
        return await reachable_keys(store, [r for r, _ in references], optional=optional), False
    except DamagedError as error:
        if not is_missing(error):
            raise
        return frozenset({error.subject}), True


def _items(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    for batch in batches:
        yield from batch.column("item").to_pylist()


def _batched(items: Iterator[bytes], count: int) -> Iterator[list[bytes]]:
    while group := list(itertools.islice(items, count)):
        yield group


def _ddl(schema: pa.Schema) -> str:
    names = {pa.string(): "string", pa.int64(): "bigint", pa.bool_(): "boolean"}
    return ", ".join(f"{field.name} {names[field.type]}" for field in schema)
