"""The tasks of a collection, each given to `mapInArrow`: list, mark, sweep, exclude and delete shards (R1).

Between the steps go numbers, or one row for many keys: a row for each key would cost more than all else together. An
inventory or a plan is an object of the run, known by its digest (design 0006, R2, R4 and R5).
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, Unknown, read_blob
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from engine.collect.backend import COLLECT, KEYS_LISTED_MAX, Deleted, Listing, SweepResult, delete_keys, list_uploads
from engine.errors import DamagedError, UnsafeStoreError
from engine.records.roots import reachable_keys
from engine.spark.access import Access
from engine.spark.errors import RunEndedError, encode_error
from index.plan.collect import PlannedUpload, Protection, Upload, choose_uploads, sum_totals, waiting_until_ms
from index.plan.plan_format import SHARDS, Shard, decode_lines, digest_of, encode_line, group_by_shard
from index.snapshot.keys import RunId, run_key
from index.snapshot.model import IndexReference
from tidemark.errors import TidemarkError

# What is in `data`. An inventory or a plan is in it only where nothing may be written to the repository (P2).
ITEM: Final = "item"
ANSWER: Final = "answer"
INVENTORY: Final = "inventory"
LIVE: Final = "live"
FAILED: Final = "failed"
PLAN: Final = "plan"

ROWS: Final = pa.schema([("position", pa.int32()), ("kind", pa.string()), ("data", pa.binary())])
ROWS_DDL: Final = "position int, kind string, data binary"

# About 30 bytes for each upload.
INVENTORY_BYTES_MAX: Final = 1024 * 1024 * 1024
# A line has several times the bytes of its key in the inventory.
PLAN_BYTES_MAX: Final = 8 * INVENTORY_BYTES_MAX

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


class Row(NamedTuple):
    """One row: a shard's position, or of other work its place in order; what `data` is; the data."""

    position: int
    kind: str
    data: bytes | None


def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    """Return the rows of batches, one in Python's memory at a time."""
    for batch in batches:
        for values in zip(*batch.columns, strict=True):
            yield Row(*(value.as_py() for value in values))


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a batch."""
    return pa.RecordBatch.from_pylist([row._asdict() for row in rows], schema=ROWS)


async def read_inventory(store: BlobStore, run: RunId, shard: Shard) -> bytes:
    """Read the inventory of a shard; raise RunEndedError if it is gone."""
    return await _read(store, run_key(run, shard.inventory_name), INVENTORY_BYTES_MAX)


async def _read(store: BlobStore, key: str, size_bytes_max: int) -> bytes:
    try:
        return await read_blob(store.tagged(COLLECT), key, size_bytes_max=size_bytes_max)
    except BlobNotFoundError as error:
        raise run_has_ended(key) from error


def run_has_ended(key: str) -> RunEndedError:
    """Return the error for an object of a run that is gone (R4, R6)."""
    message = "is gone, or another: a collection that worked on the same run has ended it"
    return RunEndedError(message, operation="collect", subject=key)


def encode_inventory(uploads: tuple[Upload, ...], foreign: tuple[str, ...]) -> bytes:
    """Return what was listed as an Arrow stream."""
    columns = {
        "key": [u.key for u in uploads] + list(foreign),
        "size_bytes": [u.size_bytes for u in uploads] + [0] * len(foreign),
        "created_at_ms": [u.created_at_ms for u in uploads] + [0] * len(foreign),
        "foreign": [False] * len(uploads) + [True] * len(foreign),
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, UPLOADS, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.RecordBatch.from_pydict(columns, schema=UPLOADS))
    return bytes(sink.getvalue())


def decode_inventory(data: bytes, shard: Shard) -> pa.Table:
    """Return what was listed of a shard, with the columns of `UPLOADS`, in the order of the keys; foreign keys last.

    Raises:
        DamagedError: It is not what `encode_inventory` makes of this shard.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
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
    hint = "delete what is below runs/, on which nothing depends, and run it again"
    return DamagedError(reason, operation="collect", subject=shard.inventory_name, hint=hint)


# Of a shard with nothing in it, as most are where a repository is small: it is never read again.
NOTHING: Final = encode_inventory((), ())
NOTHING_DIGEST: Final = digest_of(NOTHING)


def encode_plan(planned: Iterable[PlannedUpload]) -> bytes:
    """Return the lines of a plan, in the order of the keys."""
    return b"".join(encode_line(p) for p in sorted(planned, key=lambda p: p.key))


async def write_plan(store: BlobStore, run: RunId, shard: Shard, plan: bytes) -> None:
    """Write a shard's plan, unless it is empty. Its name follows from its bytes, so that it replaces only its like."""
    if plan:
        await store.tagged(COLLECT).put(run_key(run, shard.plan_name(digest_of(plan))), BytesBody(plan))


async def read_plan(store: BlobStore, run: RunId, shard: Shard, digest: bytes) -> tuple[PlannedUpload, ...]:
    """Read the plan with this digest: the one that this collection has made, and no other (R4).

    RunEndedError: it is not there any more. DamagedError: it is not what was planned.
    """
    key = run_key(run, shard.plan_name(digest))
    data = await _read(store, key, PLAN_BYTES_MAX)
    if digest_of(data) != digest:
        raise DamagedError("is not what was planned", operation="collect", subject=key)
    return tuple(decode_lines(data, subject=key))


# Shards that a task works on at once, so that it does not wait for every answer; it holds their inventories meanwhile.
SHARDS_AT_ONCE: Final = 4
# A reference, and whether only pins lead to it.
MarkItem = tuple[IndexReference, bool]
REFERENCES_PER_ITEM: Final = 16
# Keys that a task holds before it passes them on: neighbours share most of theirs, which are passed on once.
KEYS_HELD_MAX: Final = 100_000
_NEWLINE: Final = "\n"


@contextlib.contextmanager
def failures_to(rows: list[Row]) -> Iterator[None]:
    """Append the error of the block to a list, as a row for the driver."""
    try:
        yield
    except TidemarkError as error:
        rows.append(Row(0, FAILED, encode_error(error)))


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """Works on the shards of a partition, each with its rows, which come one after the other."""

    access: Access

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work on a few shards at a time; the rows of each come in one batch, and nothing is begun after a failure.

        Failures of earlier tasks that come with a shard are passed on, whatever becomes of the shards beside it.
        """
        by_shard = itertools.groupby(rows_of(batches), key=lambda row: row.position)
        shards = ((SHARDS[position], list(rows)) for position, rows in by_shard)
        failed: list[Row] = []
        while not failed and (some := list(itertools.islice(shards, SHARDS_AT_ONCE))):
            failed += [row for _, rows in some for row in rows if row.kind == FAILED]
            found: list[list[Row]] = []
            with failures_to(failed):
                found = self._carry_out_all(some)
            yield from map(batch_of, found)
        yield batch_of(failed)

    def _carry_out_all(self, some: Sequence[tuple[Shard, list[Row]]]) -> list[list[Row]]:
        async def work(item: tuple[Shard, list[Row]]) -> list[Row]:
            shard, rows = item
            if any(row.kind == FAILED for row in rows):
                return []
            return await self.carry_out(repository.asynchronous.store, shard, rows)

        with self.access.borrow() as repository:
            return repository.loop.run(map_bounded(work, some, in_flight_max=SHARDS_AT_ONCE))

    async def carry_out(self, store: BlobStore, shard: Shard, rows: Sequence[Row]) -> list[Row]:
        raise NotImplementedError


def _answer(shard: Shard, answer: msgspec.Struct) -> Row:
    return Row(shard.position, ANSWER, msgspec.msgpack.encode(answer))


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
    async def carry_out(self, store: BlobStore, shard: Shard, rows: Sequence[Row]) -> list[Row]:
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
        answer = _answer(shard, listed)
        return [answer] if self.run is not None else [answer, Row(shard.position, INVENTORY, inventory)]


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
    """Sums of a shard's plan."""

    # Of the plan; None if there is nothing to delete, and then no object either.
    digest: bytes | None = None


class SweepTask(ShardTask, frozen=True, kw_only=True):
    """Takes from each shard's inventory what is alive, and plans for the rest (D2).

    The rows of a shard are what is alive, and one of its inventory, which has it or says that it is in the store.
    """

    # None: nothing may be written, and the plans are given as rows.
    run: RunId | None
    now_ms: int
    protected: Protection
    # Of each shard's inventory, by position: what is in the store has to be what the driver knows of.
    digests: tuple[bytes, ...]
    # By shard, the plans that were carried out in this run before it was resumed (R5).
    carried_out: Mapping[int, tuple[bytes, ...]]

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, rows: Sequence[Row]) -> list[Row]:
        if self.digests[shard.position] == NOTHING_DIGEST:
            return [_answer(shard, SweepShard())]
        inventory = next((row.data for row in rows if row.kind == INVENTORY), None)
        if inventory is None and self.run is not None:
            inventory = await read_inventory(store, self.run, shard)
        if inventory is None or digest_of(inventory) != self.digests[shard.position]:
            raise run_has_ended(shard.inventory_name)
        table = decode_inventory(inventory, shard)
        table = table.filter(pc.invert(table["foreign"]))
        live = [key for row in rows if row.kind == LIVE for key in (row.data or b"").decode().split(_NEWLINE)]
        is_live = pc.is_in(table["key"], value_set=pa.array(live, pa.string()))
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
        answer = _answer(shard, sweep_result)
        if self.run is None:
            return [answer, Row(shard.position, PLAN, plan)] if plan else [answer]
        await write_plan(store, self.run, shard, plan)
        return [answer]

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


# What is known of a shard's plan, and keys that may be in it.
ExcludeItem = tuple[SweepShard, frozenset[str]]


class ExcludeTask(ShardTask, frozen=True, kw_only=True):
    """Writes plans again without what the second reading of the roots leads to (D4)."""

    run: RunId

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, rows: Sequence[Row]) -> list[Row]:
        result, keys = msgspec.msgpack.decode(rows[0].data or b"", type=ExcludeItem)
        planned = await read_plan(store, self.run, shard, result.digest or b"")
        left = [p for p in planned if p.key not in keys]
        plan = encode_plan(left)
        await write_plan(store, self.run, shard, plan)
        count = len(planned) - len(left)
        size_bytes = sum(p.size_bytes for p in planned) - sum(p.size_bytes for p in left)
        without = msgspec.structs.replace(
            result,
            totals=sum_totals(left),
            digest=digest_of(plan) if plan else None,
            live_count=result.live_count + count,
            live_bytes=result.live_bytes + size_bytes,
            excluded_count=count,
            excluded_bytes=size_bytes,
        )
        return [_answer(shard, without)]


class DeleteTask(ShardTask, frozen=True, kw_only=True):
    """Carries out plans, and marks each that is done; one that is marked already is not carried out again (R5)."""

    run: RunId

    @override
    async def carry_out(self, store: BlobStore, shard: Shard, rows: Sequence[Row]) -> list[Row]:
        digest = rows[0].data or b""
        planned = await read_plan(store, self.run, shard, digest)
        mark = run_key(self.run, shard.done_name(digest))
        left: Sequence[str] = ()
        if await store.tagged(COLLECT).stat(mark) is None:
            left = await delete_keys(store, planned)
            if not left:
                await store.tagged(COLLECT).put(mark, BytesBody(b""))
        here = frozenset(left)
        totals = sum_totals(p for p in planned if p.key not in here)
        deleted = Deleted(totals=totals, failed_count=len(here), failed=tuple(sorted(here)[:KEYS_LISTED_MAX]))
        return [_answer(shard, deleted)]
