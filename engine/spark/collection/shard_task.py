"""What the tasks of a collection have in common that work on one shard after the other."""

import itertools
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from engine.spark.access import Access
from engine.spark.collection.failures import failures_to
from engine.spark.collection.rows import SHARDS_AT_ONCE, Row, batch_of, rows_of
from index.plan.plan_format import SHARDS, Shard


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """Works on the shards of a partition, a few at a time; given to `mapInArrow`."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that come out, those of a shard in one batch; a failure is the last one."""
        rows = rows_of(batches)
        failed: list[Row] = []
        while not failed and (some := tuple(itertools.islice(rows, SHARDS_AT_ONCE))):
            found: list[list[Row]] = []
            with failures_to(failed), self.access.borrow() as repository:
                store = repository.asynchronous.store

                async def carry_out(row: Row, store: BlobStore = store) -> list[Row]:
                    return await self.carry_out(store, SHARDS[row.position], row.data or b"")

                found = repository.loop.run(map_bounded(carry_out, some, in_flight_max=SHARDS_AT_ONCE))
            yield from map(batch_of, found)
        yield batch_of(failed)

    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        """Work on one shard."""
        raise NotImplementedError
