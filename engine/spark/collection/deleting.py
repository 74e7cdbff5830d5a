"""Carrying out the plans of shards in tasks: what is spared is taken out first (design 0002, D4; 0006, R5)."""

from collections.abc import Sequence

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody
from engine.collect.backend import KEYS_TOLD_MAX
from engine.collect.in_process import delete_keys
from engine.collect.runs import COLLECT
from engine.spark.collection.plans import encode_plan, read_plan, write_plan
from engine.spark.collection.rows import ANSWER, Row
from engine.spark.collection.shard_task import ShardTask
from index.plan.collect import ReasonTotal, sum_deletes
from index.plan.plan_format import Shard, digest_of
from index.snapshot.keys import RunId, run_key


class SpareItem(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's plan, and keys that may stand in it."""

    digest: bytes
    keys: frozenset[str]


class SparedShard(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a plan, and what is not."""

    digest: bytes | None
    totals: tuple[ReasonTotal, ...]
    spared_count: int
    spared_bytes: int


class SpareTask(ShardTask, frozen=True, kw_only=True):
    """Writes plans again without what the second reading of the roots leads to."""

    run: RunId

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        item = msgspec.msgpack.decode(data, type=SpareItem)
        planned = await read_plan(store, self.run, shard, item.digest)
        left = [p for p in planned if p.key not in item.keys]
        plan = encode_plan(left)
        await write_plan(store, self.run, shard, plan)
        spared = SparedShard(
            digest=digest_of(plan) if plan else None,
            totals=sum_deletes(left),
            spared_count=len(planned) - len(left),
            spared_bytes=sum(p.size_bytes for p in planned) - sum(p.size_bytes for p in left),
        )
        return [Row(shard.position, ANSWER, msgspec.msgpack.encode(spared))]


class DeletedShard(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a shard's plan."""

    totals: tuple[ReasonTotal, ...]
    failed_count: int
    failed: tuple[str, ...]


class DeleteTask(ShardTask, frozen=True, kw_only=True):
    """Carries out plans, and marks each that is done; one that is marked already is not carried out again."""

    run: RunId

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        planned = await read_plan(store, self.run, shard, data)
        mark = run_key(self.run, shard.done_name(data))
        left: Sequence[str] = ()
        if await store.tagged(COLLECT).stat(mark) is None:
            left = await delete_keys(store, planned)
            if not left:
                await store.tagged(COLLECT).put(mark, BytesBody(b""))
        here = frozenset(left)
        deleted = DeletedShard(
            totals=sum_deletes(p for p in planned if p.key not in here),
            failed_count=len(here),
            failed=tuple(sorted(here)[:KEYS_TOLD_MAX]),
        )
        return [Row(shard.position, ANSWER, msgspec.msgpack.encode(deleted))]
