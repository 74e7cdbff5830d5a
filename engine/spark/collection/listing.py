"""The inventory of a run: each shard listed once, written down, and told by its digest (design 0006, R2)."""

from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, Unknown, read_blob
from blobstore.errors import BlobNotFoundError
from engine.collect.backend import KEYS_TOLD_MAX
from engine.collect.in_process import list_uploads
from engine.collect.runs import COLLECT
from engine.errors import DamagedError, UnsafeStoreError
from engine.spark.collection.rows import ANSWER, INVENTORY, Row
from engine.spark.collection.shard_task import ShardTask
from engine.spark.errors import RunEndedError
from index.plan.collect import Upload
from index.plan.plan_format import Shard, digest_of
from index.snapshot.keys import RunId, run_key

# About 30 bytes for each upload.
INVENTORY_BYTES_MAX: Final = 1024 * 1024 * 1024

UPLOADS: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("created_at_ms", pa.int64()),
        # A key that tidemark never wrote: it is reported and left alone.
        pa.field("foreign", pa.bool_()),
    ],
    metadata={b"tidemark": b"inventory 1"},
)


class ListedShard(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver hears of a shard's inventory."""

    digest: bytes
    count: int
    size_bytes: int
    newest_created_at_ms: int
    foreign_count: int
    foreign: tuple[str, ...]


class ListTask(ShardTask, frozen=True, kw_only=True):
    """Lists shards that have no inventory yet, and counts what is in all of them."""

    # None: nothing may be written, and the inventories are given as rows.
    run: RunId | None
    # Shards whose inventory stands.
    standing: frozenset[Shard]

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        if self.run is None:
            inventory = await _list(store, shard)
        elif shard in self.standing:
            inventory = await read_inventory(store, self.run, shard)
        else:
            inventory = await self._list_down(store, self.run, shard)
        table = UPLOADS.empty_table() if inventory == NOTHING else decode_inventory(inventory, shard)
        foreign = table.filter(table["foreign"])["key"]
        listed = ListedShard(
            digest=digest_of(inventory),
            count=table.num_rows - len(foreign),
            size_bytes=pc.sum(table["size_bytes"]).as_py() or 0,
            newest_created_at_ms=pc.max(table["created_at_ms"]).as_py() or 0,
            foreign_count=len(foreign),
            foreign=tuple(foreign[:KEYS_TOLD_MAX].to_pylist()),
        )
        rows = [Row(shard.position, ANSWER, msgspec.msgpack.encode(listed))]
        return [*rows, Row(shard.position, INVENTORY, inventory)] if self.run is None else rows

    @staticmethod
    async def _list_down(store: BlobStore, run: RunId, shard: Shard) -> bytes:
        """List a shard and write down what was listed; what somebody else has written down first is what counts."""
        inventory = await _list(store, shard)
        key = run_key(run, shard.inventory_name)
        outcome = await store.tagged(COLLECT).put_if_absent(key, BytesBody(inventory))
        if isinstance(outcome, Unknown):
            raise UnsafeStoreError(f"no answer: {outcome.reason}", operation="collect", subject=key)
        return inventory if isinstance(outcome, Created) else await read_inventory(store, run, shard)


async def read_inventory(store: BlobStore, run: RunId, shard: Shard) -> bytes:
    """The inventory that stands.

    Raises:
        RunEndedError: It stands no more.
        StoreError: As the store says.
    """
    key = run_key(run, shard.inventory_name)
    try:
        return await read_blob(store.tagged(COLLECT), key, size_bytes_max=INVENTORY_BYTES_MAX)
    except BlobNotFoundError as error:
        raise run_has_ended(key) from error


def run_has_ended(key: str) -> RunEndedError:
    """What to raise where an object of a run is gone (R4, R6)."""
    return RunEndedError(
        "is gone, or another: a collection that worked on the same run has ended it", operation="collect", subject=key
    )


async def _list(store: BlobStore, shard: Shard) -> bytes:
    uploads, foreign = await list_uploads(store, [shard.prefix])
    return encode_inventory(uploads, foreign) if uploads or foreign else NOTHING


def encode_inventory(uploads: tuple[Upload, ...], foreign: tuple[str, ...]) -> bytes:
    """What was listed, as an Arrow stream."""
    columns = (
        [u.key for u in uploads] + list(foreign),
        [u.size_bytes for u in uploads] + [0] * len(foreign),
        [u.created_at_ms for u in uploads] + [0] * len(foreign),
        [False] * len(uploads) + [True] * len(foreign),
    )
    arrays = [pa.array(values, field.type) for values, field in zip(columns, UPLOADS, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, UPLOADS, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=UPLOADS))
    return bytes(sink.getvalue())


def decode_inventory(data: bytes, shard: Shard) -> pa.Table:
    """What was listed of a shard, with the columns of `UPLOADS`, in the order of the keys; foreign keys last.

    Raises:
        DamagedError: It is not what `encode_inventory` makes of this shard.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        # What an earlier release has listed has columns of TTLs too, of which nothing depends.
        table = table.select(UPLOADS.names)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(shard, f"does not decode: {error}") from error
    if not table.schema.equals(UPLOADS):
        raise _damaged(shard, "has other columns")
    if (
        any(column.null_count for column in table.itercolumns())
        or not pc.all(pc.starts_with(table["key"], shard.prefix), min_count=0).as_py()
    ):
        raise _damaged(shard, "has keys of other shards, or none")
    return table


def _damaged(shard: Shard, reason: str) -> DamagedError:
    return DamagedError(
        reason,
        operation="collect",
        subject=shard.inventory_name,
        hint="delete what is below runs/, of which nothing depends, and run it again",
    )


# Of a shard with nothing in it, as most are where a repository is small: it is read from nowhere again.
NOTHING: Final = encode_inventory((), ())
NOTHING_DIGEST: Final = digest_of(NOTHING)
