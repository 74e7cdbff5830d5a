"""The plans of shards where they stand in a run, each named by the digest of its lines (design 0006, R4 and R5)."""

from collections.abc import Iterable
from typing import Final

from blobstore.base import BlobStore, BytesBody, read_blob
from blobstore.errors import BlobNotFoundError
from engine.collect.runs import COLLECT
from engine.errors import DamagedError
from engine.spark.collection.listing import INVENTORY_BYTES_MAX, run_has_ended
from index.plan.collect import PlannedUpload
from index.plan.plan_format import Shard, decode_lines, digest_of, encode_line
from index.snapshot.keys import RunId, run_key

# A line has several times the bytes of its key in the inventory.
PLAN_BYTES_MAX: Final = 8 * INVENTORY_BYTES_MAX


async def write_plan(store: BlobStore, run: RunId, shard: Shard, plan: bytes) -> None:
    """Write a shard's plan, unless it is empty. Its name follows from its bytes, so that it replaces only its like."""
    if plan:
        await store.tagged(COLLECT).put(run_key(run, shard.plan_name(digest_of(plan))), BytesBody(plan))


def encode_plan(planned: Iterable[PlannedUpload]) -> bytes:
    """The lines of a plan, in the order of the keys."""
    return b"".join(encode_line(p) for p in sorted(planned, key=lambda p: p.key))


async def read_plan(store: BlobStore, run: RunId, shard: Shard, digest: bytes) -> tuple[PlannedUpload, ...]:
    """The plan with this digest: the one that this collection has made, and no other (R4).

    Raises:
        RunEndedError: It is not there any more.
        DamagedError: It is not what was planned.
        StoreError: As the store says.
    """
    key = run_key(run, shard.plan_name(digest))
    try:
        data = await read_blob(store.tagged(COLLECT), key, size_bytes_max=PLAN_BYTES_MAX)
    except BlobNotFoundError as error:
        raise run_has_ended(key) from error
    if digest_of(data) != digest:
        raise DamagedError("is not what was planned", operation="collect", subject=key)
    return tuple(decode_lines(data, subject=key))
