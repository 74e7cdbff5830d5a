"""The tasks of a collection, each given to `mapInArrow`: list, mark, sweep, exclude and delete shards (R1)."""

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, Unknown
from blobstore.concurrency import map_bounded
from engine.collect.backend import COLLECT, KEYS_LISTED_MAX, Deleted, Listing, SweepResult, delete_keys, list_uploads
from engine.errors import UnsafeStoreError
from engine.records.roots import reachable_keys
from engine.spark.access import Access
from engine.spark.collection.shards import (
    ANSWER,
    FAILED,
    INVENTORY,
    LIVE,
    NOTHING,
    NOTHING_DIGEST,
    PLAN,
    UPLOADS,
    Row,
    batch_of,
    decode_inventory,
    encode_inventory,
    encode_plan,
    failures_to,
    read_inventory,
    read_plan,
    rows_of,
    run_has_ended,
    write_plan,
)
from engine.spark.errors import RunEndedError
from index.plan.collect import Protection, Upload, choose_uploads, sum_totals, waiting_until_ms
from index.plan.plan_format import SHARDS, Shard, digest_of, group_by_shard
from index.snapshot.keys import RunId, run_key
from index.snapshot.model import IndexReference

# Shards that a task works on at once, so that it does not wait for every answer; it holds their inventories meanwhile.
SHARDS_AT_ONCE: Final = 4
# A reference, and whether only pins lead to it.
MarkItem = tuple[IndexReference, bool]
REFERENCES_PER_ITEM: Final = 16
# Keys that a task holds before it passes them on: neighbours share most of theirs, which are passed on once.
KEYS_HELD_MAX: Final = 100_000
_NEWLINE: Final = "\n"

Item = TypeVar("Item")


def work_through(
    access: Access,
    items: Iterator[Item],
    work: Callable[[BlobStore, Item], Awaitable[list[Row]]],
    failed_before: Callable[[Item], Iterable[Row]] = lambda _: (),
) -> Iterator[pa.RecordBatch]:
    """Work on a few items at a time; the rows of each come in one batch, and nothing is begun after a failure.

    Failures of earlier tasks that come with an item are passed on, whatever becomes of the items beside it.
    """
    failed: list[Row] = []
    while not failed and (some := tuple(itertools.islice(items, SHARDS_AT_ONCE))):
        failed += [row for item in some for row in failed_before(item)]
        found: list[list[Row]] = []
        with failures_to(failed), access.borrow() as repository:
            store = repository.asynchronous.store

            async def work_here(item: Item, store: BlobStore = store) -> list[Row]:
                return await work(store, item)

            found = repository.loop.run(map_bounded(work_here, some, in_flight_max=SHARDS_AT_ONCE))
        yield from map(batch_of, found)
    yield batch_of(failed)


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """Works on the shards of a partition."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the rows of each shard; a failure is the last one."""

        async def work(store: BlobStore, row: Row) -> list[Row]:
            return await self.carry_out(store, SHARDS[row.position], row.data or b"")

        return work_through(self.access, rows_of(batches), work)

    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        raise NotImplementedError


def _answer(shard: Shard, answer: msgspec.Struct) -> Row:
    return Row(shard.position, ANSWER, msgspec.msgpack.encode(answer))


# ---------------------------------------------------------------------- list


class ListedShard(Listing, frozen=True, kw_only=True):
    """Sums of a shard's inventory."""

    listed_at_ms: int = 0  # the driver has the time that ages are judged by (D2)
    digest: bytes


class ListTask(ShardTask, frozen=True, kw_only=True):
    """Lists shards that have no inventory yet, and counts what is in all of them (D2, R2)."""

    # None: nothing may be written, and the inventories are given as rows.
    run: RunId | None
    # Shards whose inventory is there.
    listed: frozenset[Shard]

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        if self.run is None:
            inventory = await _list(store, shard)
        elif shard in self.listed:
            inventory = await read_inventory(store, self.run, shard)
        else:
            inventory = await _write_inventory(store, self.run, shard)
        table = UPLOADS.empty_table() if inventory == NOTHING else decode_inventory(inventory, shard)
        foreign = table.filter(table["foreign"])["key"]
        listed = ListedShard(
            digest=digest_of(inventory),
            count=table.num_rows - len(foreign),
            size_bytes=pc.sum(table["size_bytes"]).as_py() or 0,
            newest_created_at_ms=pc.max(table["created_at_ms"]).as_py() or 0,
            foreign_count=len(foreign),
            foreign=tuple(foreign[:KEYS_LISTED_MAX].to_pylist()),
        )
        rows = [_answer(shard, listed)]
        return [*rows, Row(shard.position, INVENTORY, inventory)] if self.run is None else rows


async def _write_inventory(store: BlobStore, run: RunId, shard: Shard) -> bytes:
    """List a shard and write its inventory; one that another collection has written first is what counts."""
    inventory = await _list(store, shard)
    key = run_key(run, shard.inventory_name)
    outcome = await store.tagged(COLLECT).put_if_absent(key, BytesBody(inventory))
    if isinstance(outcome, Unknown):
        raise UnsafeStoreError(f"no answer: {outcome.reason}", operation="collect", subject=key)
    return inventory if isinstance(outcome, Created) else await read_inventory(store, run, shard)


async def _list(store: BlobStore, shard: Shard) -> bytes:
    uploads, foreign = await list_uploads(store, [shard.prefix])
    return encode_inventory(uploads, foreign) if uploads or foreign else NOTHING


# ---------------------------------------------------------------------- mark and sweep


class MarkTask(msgspec.Struct, frozen=True, kw_only=True):
    """Reads indexes, and passes on every key that they keep alive, by shards."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return one row for each shard and some 100,000 keys; a key may come twice. A failure is the last one."""
        held: set[str] = set()
        failed: list[Row] = []
        for row in rows_of(batches):
            items = msgspec.msgpack.decode(row.data or b"", type=tuple[MarkItem, ...])
            optional = frozenset(reference for reference, is_optional in items if is_optional)
            with failures_to(failed), self.access.borrow() as repository:
                store = repository.asynchronous.store
                held |= repository.loop.run(reachable_keys(store, [r for r, _ in items], optional=optional))
            if failed:
                # What is planned without these keys reaches nobody, and so is never carried out (R4).
                yield batch_of(failed)
                return
            if len(held) >= KEYS_HELD_MAX:
                yield _live_rows(held)
                held = set()
        yield _live_rows(held)


def _live_rows(keys: set[str]) -> pa.RecordBatch:
    groups = sorted(group_by_shard(keys).items())
    return batch_of([Row(shard.position, LIVE, _NEWLINE.join(group).encode()) for shard, group in groups])


class SweepShard(SweepResult, frozen=True, kw_only=True):
    """Sums of a shard's plan, or of what was taken out of it."""

    # Of the plan; None if there is nothing to delete, and then no object either.
    digest: bytes | None = None


class SweepTask(msgspec.Struct, frozen=True, kw_only=True):
    """Takes from each shard's inventory what is alive, and plans for the rest (D2).

    The rows of a shard come one after the other: what is alive, and one of its inventory, which has it or says that it
    is in the store.
    """

    access: Access
    # None: nothing may be written, and the plans are given as rows.
    run: RunId | None
    now_ms: int
    protected: Protection
    # Of each shard's inventory, by position: what is in the store has to be what the driver knows of.
    digests: tuple[bytes, ...]
    # By shard, the plans that were carried out in this run before it was resumed (R5).
    carried_out: Mapping[int, tuple[bytes, ...]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the rows of one shard after the other; a failure is the last one."""
        shards = itertools.groupby(rows_of(batches), key=lambda row: row.position)
        inputs = (_SweepInput(SHARDS[position], rows) for position, rows in shards)
        return work_through(self.access, inputs, self._sweep, lambda given: given.failed)

    async def _sweep(self, store: BlobStore, given: "_SweepInput") -> list[Row]:
        shard, inventory = given.shard, given.inventory
        if given.failed:
            return []
        if self.digests[shard.position] == NOTHING_DIGEST:
            return [_answer(shard, SweepShard())]
        if inventory is None and self.run is not None:
            inventory = await read_inventory(store, self.run, shard)
        if inventory is None or digest_of(inventory) != self.digests[shard.position]:
            raise run_has_ended(shard.inventory_name)
        table = decode_inventory(inventory, shard)
        table = table.filter(pc.invert(table["foreign"]))
        is_live = pc.is_in(table["key"], value_set=pa.array(given.live, pa.string()))
        alive, others = table.filter(is_live), table.filter(pc.invert(is_live))
        gone = await self._gone(store, shard)
        columns = (others[name].to_pylist() for name in Upload.__struct_fields__)
        unreachable = [Upload(*row) for row in zip(*columns, strict=True) if row[0] not in gone]
        ttl_ms = self.access.record.ttl_ms
        planned = choose_uploads(unreachable, self.now_ms, ttl_ms, self.protected)
        chosen = frozenset(p.key for p in planned)
        waiting = [upload for upload in unreachable if upload.key not in chosen]
        plan = encode_plan(planned)
        sweep_result = SweepShard(
            live_count=alive.num_rows,
            live_bytes=pc.sum(alive["size_bytes"]).as_py() or 0,
            totals=sum_totals(planned),
            waiting_count=len(waiting),
            waiting_bytes=sum(u.size_bytes for u in waiting),
            waiting_until_ms=waiting_until_ms(waiting, ttl_ms),
            digest=digest_of(plan) if plan else None,
        )
        rows = [_answer(shard, sweep_result)]
        if self.run is None:
            return [*rows, Row(shard.position, PLAN, plan)] if plan else rows
        await write_plan(store, self.run, shard, plan)
        return rows

    async def _gone(self, store: BlobStore, shard: Shard) -> frozenset[str]:
        """Return the keys that were listed, and that this run has deleted since."""
        gone: set[str] = set()
        if self.run is None:
            return frozenset()
        for digest in self.carried_out.get(shard.position, ()):
            # Without the plan nobody knows what it had: it is deleted, and counted, once more.
            with contextlib.suppress(RunEndedError):
                gone.update(p.key for p in await read_plan(store, self.run, shard, digest))
        return frozenset(gone)


class _SweepInput:
    """The rows of one shard, by what they are."""

    def __init__(self, shard: Shard, rows: Iterable[Row]) -> None:
        self.shard = shard
        self.live: list[str] = []
        self.inventory: bytes | None = None
        self.failed: list[Row] = []
        for row in rows:
            if row.kind == LIVE:
                self.live += (row.data or b"").decode().split(_NEWLINE)
            elif row.kind == FAILED:
                self.failed.append(row)
            else:
                self.inventory = row.data


# ---------------------------------------------------------------------- exclude and delete


class ExcludeItem(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of a shard's plan, and keys that may be in it."""

    digest: bytes
    keys: frozenset[str]


class ExcludeTask(ShardTask, frozen=True, kw_only=True):
    """Writes plans again without what the second reading of the roots leads to (D4)."""

    run: RunId

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, data: bytes) -> list[Row]:
        item = msgspec.msgpack.decode(data, type=ExcludeItem)
        planned = await read_plan(store, self.run, shard, item.digest)
        left = [p for p in planned if p.key not in item.keys]
        plan = encode_plan(left)
        await write_plan(store, self.run, shard, plan)
        excluded = SweepShard(
            digest=digest_of(plan) if plan else None,
            totals=sum_totals(left),
            excluded_count=len(planned) - len(left),
            excluded_bytes=sum(p.size_bytes for p in planned) - sum(p.size_bytes for p in left),
        )
        return [_answer(shard, excluded)]


class DeleteTask(ShardTask, frozen=True, kw_only=True):
    """Carries out plans, and marks each that is done; one that is marked already is not carried out again (R5)."""

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
        deleted = Deleted(
            totals=sum_totals(p for p in planned if p.key not in here),
            failed_count=len(here),
            failed=tuple(sorted(here)[:KEYS_LISTED_MAX]),
        )
        return [_answer(shard, deleted)]
