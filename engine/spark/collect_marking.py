"""Mark and sweep in tasks: the keys that are alive, and what of a shard's inventory is not among them (D2, R1)."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from blobstore.base import BlobStore, BytesBody
from blobstore.bounded import map_bounded
from engine.collect import plan_upload_deletes
from engine.errors import DamagedError
from engine.index_io import is_missing
from engine.roots import reachable_keys
from engine.runs import COLLECT
from engine.spark.access import Access
from engine.spark.collect_listing import UPLOADS, decode_inventory, read_inventory, run_has_ended
from engine.spark.collect_rows import ANSWER, LIVE, MISSING, PLAN, SHARDS_AT_ONCE, Row, batch_of, rows_of
from index.collect_plan import PlannedUpload, ReasonTotal, Upload, sum_deletes
from index.keys import INDEXES, RunId, run_key
from index.model import IndexReference
from index.plan_file import encode_line
from index.run_file import SHARDS, Shard, digest_of, group_by_shard

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
        """One row for each shard and some 100,000 keys; a key may be told by several. Or a row for what is missing."""
        held: set[str] = set()
        for row in rows_of(batches):
            references = msgspec.msgpack.decode(row.data or b"", type=tuple[MarkItem, ...])
            with self.access.borrow() as repository:
                keys, missing = repository.loop.run(_mark(repository.asynchronous.store, references))
            if missing is not None:
                yield batch_of([Row(0, MISSING, missing.encode())])
            held |= keys
            if len(held) >= KEYS_HELD_MAX:
                yield _live_rows(held)
                held = set()
        yield _live_rows(held)


class SweptShard(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver hears of a shard's plan."""

    live_count: int
    live_bytes: int
    # Live indexes that carry a TTL, or of which the listing did not tell.
    unsettled: tuple[str, ...]
    totals: tuple[ReasonTotal, ...]
    waiting_count: int
    waiting_bytes: int
    # Of the plan; None if there is nothing to delete, and then no object either.
    digest: bytes | None


class SweepTask(msgspec.Struct, frozen=True, kw_only=True):
    """Takes from each shard's inventory what is alive, and plans for the rest; given to `mapInArrow`.

    The rows of a shard come one after the other: what is alive, and one of its inventory, which has it or says that it
    stands in the store.
    """

    access: Access
    # None: nothing may be written, and the plans are given as rows.
    run: RunId | None
    now_ms: int
    # Of each shard's inventory, by position: what stands in the store has to be what the driver knows of.
    digests: tuple[bytes, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of one shard after the other."""
        shards = itertools.groupby(rows_of(batches), key=lambda row: row.position)
        told = (_Told.of(SHARDS[position], rows) for position, rows in shards)
        while some := tuple(itertools.islice(told, SHARDS_AT_ONCE)):
            yield batch_of([row for one in some for row in one.missing])
            with self.access.borrow() as repository:
                store = repository.asynchronous.store

                async def sweep(one: _Told, store: BlobStore = store) -> list[Row]:
                    return await self._sweep(store, one)

                found = repository.loop.run(map_bounded(sweep, some, in_flight_max=SHARDS_AT_ONCE))
            yield from map(batch_of, found)

    async def _sweep(self, store: BlobStore, told: "_Told") -> list[Row]:
        shard, inventory = told.shard, told.inventory
        if inventory is None and self.run is not None:
            inventory = await read_inventory(store, self.run, shard)
        if inventory is None or digest_of(inventory) != self.digests[shard.position]:
            raise run_has_ended(shard.inventory_name)
        table = decode_inventory(inventory, shard)
        table = table.filter(pc.invert(table["foreign"]))
        is_live = pc.is_in(table["key"], value_set=pa.array(told.live, pa.string()))
        alive, unreachable = table.filter(is_live), _uploads(table.filter(pc.invert(is_live)))
        planned = await plan_upload_deletes(store, unreachable, self.now_ms, self.access.record.ttl_ms)
        plan = encode_plan(planned)
        doomed_bytes = sum(p.size_bytes for p in planned)
        swept = SweptShard(
            live_count=alive.num_rows,
            live_bytes=pc.sum(alive["size_bytes"]).as_py() or 0,
            unsettled=_unsettled(alive) if shard.room == INDEXES else (),
            totals=sum_deletes(planned),
            waiting_count=len(unreachable) - len(planned),
            waiting_bytes=sum(u.size_bytes for u in unreachable) - doomed_bytes,
            digest=digest_of(plan) if plan else None,
        )
        rows = [Row(shard.position, ANSWER, msgspec.msgpack.encode(swept))]
        if self.run is None:
            return [*rows, Row(shard.position, PLAN, plan)] if plan else rows
        await write_plan(store, self.run, shard, plan)
        return rows


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one shard."""

    shard: Shard
    live: list[str]
    inventory: bytes | None
    missing: list[Row]

    @classmethod
    def of(cls, shard: Shard, rows: Iterable[Row]) -> "_Told":
        """Sort rows by what they say."""
        live: list[str] = []
        inventory: bytes | None = None
        missing: list[Row] = []
        for row in rows:
            if row.kind == LIVE:
                live += (row.data or b"").decode().split(_NEWLINE)
            elif row.kind == MISSING:
                missing.append(row)
            else:
                inventory = row.data
        return cls(shard=shard, live=live, inventory=inventory, missing=missing)


async def write_plan(store: BlobStore, run: RunId, shard: Shard, plan: bytes) -> None:
    """Write a shard's plan, unless it is empty. Its name follows from its bytes, so that it replaces only its like."""
    if plan:
        await store.put(run_key(run, shard.plan_name(digest_of(plan))), BytesBody(plan), metadata=COLLECT)


def encode_plan(planned: Iterable[PlannedUpload]) -> bytes:
    """The lines of a plan, in the order of the keys."""
    return b"".join(encode_line(p) for p in sorted(planned, key=lambda p: p.key))


async def _mark(store: BlobStore, references: Sequence[MarkItem]) -> tuple[frozenset[str], str | None]:
    """What is alive, and what is missing: the driver tells damage from being overtaken."""
    optional = frozenset(reference for reference, is_optional in references if is_optional)
    try:
        return await reachable_keys(store, [r for r, _ in references], optional=optional), None
    except DamagedError as error:
        if not is_missing(error):
            raise
        return frozenset(), error.subject


def _live_rows(keys: set[str]) -> pa.RecordBatch:
    groups = sorted(group_by_shard(keys).items())
    return batch_of([Row(shard.position, LIVE, _NEWLINE.join(group).encode()) for shard, group in groups])


def _unsettled(alive: pa.Table) -> tuple[str, ...]:
    carries = pc.or_(pc.invert(alive["ttl_known"]), pc.is_valid(alive["expires_at_ms"]))
    return tuple(alive.filter(carries)["key"].to_pylist())


def _uploads(table: pa.Table) -> list[Upload]:
    columns = [table[name].to_pylist() for name in UPLOADS.names if name != "foreign"]
    return [Upload(*row) for row in zip(*columns, strict=True)]
