"""Mark and sweep in tasks: the keys that are alive, and what of a shard's inventory is not among them (D2, R1)."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from engine.records.roots import reachable_keys
from engine.spark.access import Access
from engine.spark.collection.failures import failures_to
from engine.spark.collection.listing import (
    NOTHING_DIGEST,
    decode_inventory,
    read_inventory,
    run_has_ended,
)
from engine.spark.collection.plans import encode_plan, read_plan, write_plan
from engine.spark.collection.rows import ANSWER, FAILED, LIVE, PLAN, SHARDS_AT_ONCE, Row, batch_of, rows_of
from engine.spark.errors import RunEndedError
from index.plan.collect import Protection, ReasonTotal, Upload, choose_uploads, sum_deletes, waiting_until_ms
from index.plan.plan_format import SHARDS, Shard, digest_of, group_by_shard
from index.snapshot.keys import RunId
from index.snapshot.model import IndexReference

# A reference, and whether only pins lead to it.
MarkItem = tuple[IndexReference, bool]
REFERENCES_PER_ITEM: Final = 16
# Keys that a task holds before it passes them on: neighbours share most of theirs, which are passed on once.
KEYS_HELD_MAX: Final = 100_000
_NEWLINE: Final = "\n"


class MarkTask(msgspec.Struct, frozen=True, kw_only=True):
    """Reads indexes and tells every key that they keep alive, by shards; given to `mapInArrow`."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row for each shard and some 100,000 keys; a key may be told by several. A failure is the last one."""
        held: set[str] = set()
        failed: list[Row] = []
        for row in rows_of(batches):
            references = msgspec.msgpack.decode(row.data or b"", type=tuple[MarkItem, ...])
            with failures_to(failed), self.access.borrow() as repository:
                held |= repository.loop.run(_mark(repository.asynchronous.store, references))
            if failed:
                # What is planned without these keys is told to nobody, and so never carried out (R4).
                yield batch_of(failed)
                return
            if len(held) >= KEYS_HELD_MAX:
                yield _live_rows(held)
                held = set()
        yield _live_rows(held)


class SweptShard(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver hears of a shard's plan."""

    live_count: int
    live_bytes: int
    totals: tuple[ReasonTotal, ...]
    waiting_count: int
    waiting_bytes: int
    waiting_until_ms: int
    # Of the plan; None if there is nothing to delete, and then no object either.
    digest: bytes | None


_NOTHING_SWEPT: Final = msgspec.msgpack.encode(
    SweptShard(live_count=0, live_bytes=0, totals=(), waiting_count=0, waiting_bytes=0, waiting_until_ms=0, digest=None)
)


class SweepTask(msgspec.Struct, frozen=True, kw_only=True):
    """Takes from each shard's inventory what is alive, and plans for the rest; given to `mapInArrow`.

    The rows of a shard come one after the other: what is alive, and one of its inventory, which has it or says that it
    stands in the store.
    """

    access: Access
    # None: nothing may be written, and the plans are given as rows.
    run: RunId | None
    now_ms: int
    protected: Protection
    # Of each shard's inventory, by position: what stands in the store has to be what the driver knows of.
    digests: tuple[bytes, ...]
    # By shard, the plans that somebody has carried out in this run before it was taken up (R5).
    carried_out: Mapping[int, tuple[bytes, ...]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of one shard after the other; a failure is the last one."""
        failed: list[Row] = []
        shards = itertools.groupby(rows_of(batches), key=lambda row: row.position)
        told = (_Told.of(SHARDS[position], rows) for position, rows in shards)
        while not failed and (some := tuple(itertools.islice(told, SHARDS_AT_ONCE))):
            found: list[list[Row]] = []
            failed += [row for one in some for row in one.failed]
            with failures_to(failed), self.access.borrow() as repository:
                store = repository.asynchronous.store

                async def sweep(one: _Told, store: BlobStore = store) -> list[Row]:
                    return await self._sweep(store, one)

                found = repository.loop.run(map_bounded(sweep, some, in_flight_max=SHARDS_AT_ONCE))
            yield from map(batch_of, found)
        yield batch_of(failed)

    async def _sweep(self, store: BlobStore, told: "_Told") -> list[Row]:
        shard, inventory = told.shard, told.inventory
        if self.digests[shard.position] == NOTHING_DIGEST:
            return [Row(shard.position, ANSWER, _NOTHING_SWEPT)]
        if inventory is None and self.run is not None:
            inventory = await read_inventory(store, self.run, shard)
        if inventory is None or digest_of(inventory) != self.digests[shard.position]:
            raise run_has_ended(shard.inventory_name)
        table = decode_inventory(inventory, shard)
        table = table.filter(pc.invert(table["foreign"]))
        is_live = pc.is_in(table["key"], value_set=pa.array(told.live, pa.string()))
        alive, unreachable = table.filter(is_live), _uploads(table.filter(pc.invert(is_live)))
        gone = await self._gone(store, shard)
        unreachable = [upload for upload in unreachable if upload.key not in gone]
        ttl_ms = self.access.record.ttl_ms
        planned = choose_uploads(unreachable, self.now_ms, ttl_ms, self.protected)
        chosen = frozenset(p.key for p in planned)
        waiting = [upload for upload in unreachable if upload.key not in chosen]
        plan = encode_plan(planned)
        swept = SweptShard(
            live_count=alive.num_rows,
            live_bytes=pc.sum(alive["size_bytes"]).as_py() or 0,
            totals=sum_deletes(planned),
            waiting_count=len(waiting),
            waiting_bytes=sum(u.size_bytes for u in waiting),
            waiting_until_ms=waiting_until_ms(waiting, ttl_ms),
            digest=digest_of(plan) if plan else None,
        )
        rows = [Row(shard.position, ANSWER, msgspec.msgpack.encode(swept))]
        if self.run is None:
            return [*rows, Row(shard.position, PLAN, plan)] if plan else rows
        await write_plan(store, self.run, shard, plan)
        return rows

    async def _gone(self, store: BlobStore, shard: Shard) -> frozenset[str]:
        """Keys that were listed, and that this run has deleted since."""
        gone: set[str] = set()
        if self.run is None:
            return frozenset()
        for digest in self.carried_out.get(shard.position, ()):
            # Without the plan nobody knows what it had: it is deleted, and counted, once more.
            with contextlib.suppress(RunEndedError):
                gone.update(p.key for p in await read_plan(store, self.run, shard, digest))
        return frozenset(gone)


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one shard."""

    shard: Shard
    live: list[str]
    inventory: bytes | None
    failed: list[Row]

    @classmethod
    def of(cls, shard: Shard, rows: Iterable[Row]) -> "_Told":
        """Sort rows by what they say."""
        live: list[str] = []
        inventory: bytes | None = None
        failed: list[Row] = []
        for row in rows:
            if row.kind == LIVE:
                live += (row.data or b"").decode().split(_NEWLINE)
            elif row.kind == FAILED:
                failed.append(row)
            else:
                inventory = row.data
        return cls(shard=shard, live=live, inventory=inventory, failed=failed)


async def _mark(store: BlobStore, references: Sequence[MarkItem]) -> frozenset[str]:
    """What is alive."""
    optional = frozenset(reference for reference, is_optional in references if is_optional)
    return await reachable_keys(store, [r for r, _ in references], optional=optional)


def _live_rows(keys: set[str]) -> pa.RecordBatch:
    groups = sorted(group_by_shard(keys).items())
    return batch_of([Row(shard.position, LIVE, _NEWLINE.join(group).encode()) for shard, group in groups])


def _uploads(table: pa.Table) -> list[Upload]:
    columns = [table[name].to_pylist() for name in Upload.__struct_fields__]
    return [Upload(*row) for row in zip(*columns, strict=True)]
