"""The hands of a collection that work in Spark's tasks; the driver holds numbers, and a digest of each shard (R1)."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
from msgspec.structs import replace
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.release import installed_release
from engine.collect.backend import KEYS_TOLD_MAX, CollectBackend, Deleted, Listing, Swept
from engine.collect.plan_writer import write_lines
from engine.collect.runs import Run, end_run, take_up_run
from engine.errors import UnsafeStoreError
from engine.records.roots import References
from engine.spark.access import Access
from engine.spark.collection.deleting import DeletedShard, DeleteTask, SparedShard, SpareItem, SpareTask
from engine.spark.collection.failures import raise_failures
from engine.spark.collection.listing import ListedShard, ListTask
from engine.spark.collection.marking import REFERENCES_PER_ITEM, MarkTask, SweepTask, SweptShard
from engine.spark.collection.plans import read_plan
from engine.spark.collection.rows import (
    ANSWER,
    FAILED,
    INVENTORY,
    ITEM,
    PLAN,
    ROWS,
    ROWS_DDL,
    SHARDS_AT_ONCE,
    ArrowTask,
    Row,
    batch_of,
    rows_of,
)
from engine.spark.errors import TaskFailedError, last_error
from engine.spark.spread import frame_of
from index.plan.collect import PlannedUpload, ReasonTotal, sum_totals
from index.plan.plan_format import (
    LINES_SUFFIX,
    POSITIONS_COUNT,
    SHARDS,
    Shard,
    carried_out_plans,
    decode_lines,
    group_by_shard,
)
from index.snapshot.keys import RunId

Answer = TypeVar("Answer")

# A task of fewer uploads costs more to start than it saves, once every core has one.
UPLOADS_PER_TASK: Final = 50_000
# Parts of a step of which nobody knows yet how much work it is, for each core, so that none waits long for another.
TASKS_PER_CORE: Final = 2


class SparkBackend(CollectBackend):
    """Lists, marks and deletes in tasks; lives in the driver for one collection. Its calls block a thread each.

    Args:
        spark: The session.
        access: What tasks open.
        store: The same store, open in the driver.
        partitions_max: Each step runs in at most so many tasks.
        cores: So many tasks run at once; a step has fewer only if there is less to do.
        dry_run: Nothing is written to the repository: inventory and plan stand in Spark's local checkpoints, which are
            never computed again; if one is lost, the collection fails.
        plan_to: Where the plan's lines are to go.
    """

    def __init__(
        self,
        spark: SparkSession,
        access: Access,
        store: BlobStore,
        *,
        partitions_max: int,
        cores: int,
        dry_run: bool = False,
        plan_to: BlobStore | None = None,
    ) -> None:
        self._spark = spark
        self._access = access
        self._store = store
        self._partitions_max = partitions_max
        self._cores = cores
        self._listed_count = 0
        self._dry_run = dry_run
        self._plan_to = plan_to
        self._plan_names = frozenset[str]()
        # None in a dry run.
        self._run: Run | None = None
        self._digests: tuple[bytes, ...] = ()
        # What SweepTask takes of inventories: where they stand, or they themselves.
        self._inventories: DataFrame | None = None
        # Of the last sweep, but for what is to go.
        self._swept = Swept()
        self._totals: dict[Shard, tuple[ReasonTotal, ...]] = {}
        # Of the plans that are not empty.
        self._plans: dict[Shard, bytes] = {}
        # In a dry run, what the tasks have planned.
        self._planned: DataFrame | None = None

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        listed_at_ms = now_ms
        if not self._dry_run:
            self._run = await take_up_run(self._store, self._access.record, run, now_ms, installed_release())
            listed_at_ms = self._run.began_at_ms
        listed = await asyncio.to_thread(self._list)
        self._digests = tuple(shard.digest for shard in listed)
        self._listed_count = sum(shard.count for shard in listed)
        foreign = [key for shard in listed for key in shard.foreign]
        return Listing(
            listed_at_ms=listed_at_ms,
            count=self._listed_count,
            size_bytes=sum(shard.size_bytes for shard in listed),
            newest_created_at_ms=max(shard.newest_created_at_ms for shard in listed),
            foreign_count=sum(shard.foreign_count for shard in listed),
            foreign=tuple(foreign[:KEYS_TOLD_MAX]),
            taken_up=self._run.id if self._run is not None and self._run.id != run else None,
        )

    @override
    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> Swept:
        answers = await asyncio.to_thread(self._sweep, references, now_ms)
        self._totals = {shard: answer.totals for shard, answer in answers.items()}
        self._plans = {shard: answer.digest for shard, answer in answers.items() if answer.digest is not None}
        swept = answers.values()
        self._swept = Swept(
            waiting_count=sum(s.waiting_count for s in swept),
            waiting_bytes=sum(s.waiting_bytes for s in swept),
            waiting_until_ms=max(s.waiting_until_ms for s in swept),
            live_count=sum(s.live_count for s in swept),
            live_bytes=sum(s.live_bytes for s in swept),
        )
        return await self._with_plan(self._swept)

    @override
    async def spare(self, keys: frozenset[str]) -> Swept:
        groups = group_by_shard(keys)
        items = {
            shard: msgspec.msgpack.encode(SpareItem(digest=self._plans[shard], keys=frozenset(group)))
            for shard, group in sorted(groups.items())
            if shard in self._plans
        }
        task = SpareTask(access=self._access, run=self._run_id())
        answers = await asyncio.to_thread(self._carry_out, items, task, SparedShard)
        for shard, answer in answers.items():
            self._totals[shard] = answer.totals
            del self._plans[shard]
            if answer.digest is not None:
                self._plans[shard] = answer.digest
        spared_count = sum(answer.spared_count for answer in answers.values())
        spared_bytes = sum(answer.spared_bytes for answer in answers.values())
        return await self._with_plan(
            replace(
                self._swept,
                live_count=self._swept.live_count + spared_count,
                live_bytes=self._swept.live_bytes + spared_bytes,
                spared_count=spared_count,
                spared_bytes=spared_bytes,
            )
        )

    @override
    async def delete(self, room: str) -> Deleted:
        items = {shard: digest for shard, digest in sorted(self._plans.items()) if shard.room == room}
        task = DeleteTask(access=self._access, run=self._run_id())
        answers = await asyncio.to_thread(self._carry_out, items, task, DeletedShard)
        failed = [key for answer in answers.values() for key in answer.failed]
        return Deleted(
            totals=sum_totals(total for answer in answers.values() for total in answer.totals),
            failed_count=sum(answer.failed_count for answer in answers.values()),
            failed=tuple(failed[:KEYS_TOLD_MAX]),
        )

    @override
    def planned_count(self, room: str) -> int:
        return sum(t.count for shard, totals in self._totals.items() if shard.room == room for t in totals)

    @override
    async def end(self) -> None:
        if self._run is not None:
            await end_run(self._store, self._run.id)

    def _list(self) -> list[ListedShard]:
        """Every shard's answer, in order; nothing is listed again later."""
        run, names = (None, frozenset[str]()) if self._run is None else (self._run.id, self._run.names)
        standing = frozenset(shard for shard in SHARDS if shard.inventory_name in names)
        task = ListTask(access=self._access, run=run, standing=standing)
        rows = [Row(shard.position, ITEM, None) for shard in SHARDS]
        frame = self._frame(rows, TASKS_PER_CORE * self._cores).mapInArrow(task, ROWS_DDL)
        frame, answers = self._evaluate(task, frame)
        self._inventories = frame.where(f"kind = '{INVENTORY}'") if run is None else None
        return list(self._all_answers(answers, ListedShard).values())

    def _sweep(self, references: References, now_ms: int) -> dict[Shard, SweptShard]:
        in_order = [(reference, reference in references.optional) for reference in references.neighbours]
        starts = range(0, len(in_order), REFERENCES_PER_ITEM)
        items = [msgspec.msgpack.encode(in_order[start : start + REFERENCES_PER_ITEM]) for start in starts]
        live = self._frame([Row(number, ITEM, item) for number, item in enumerate(items)], self._partitions_max)
        marks = live.mapInArrow(MarkTask(access=self._access), ROWS_DDL)
        inventories = self._inventories or self._frame([Row(shard.position, INVENTORY, None) for shard in SHARDS], 1)
        count = self._tasks(POSITIONS_COUNT, self._tasks_for(self._listed_count))
        sweep = SweepTask(
            access=self._access,
            run=None if self._run is None else self._run.id,
            now_ms=now_ms,
            protected=references.protected,
            digests=self._digests,
            carried_out={} if self._run is None else carried_out_plans(self._run.names),
        )
        by_shard = _by_partition(marks.union(inventories), count, f"position * {count} DIV {POSITIONS_COUNT}")
        frame, rows = self._evaluate(sweep, by_shard.mapInArrow(sweep, ROWS_DDL))
        self._planned = frame.where(f"kind = '{PLAN}'") if self._dry_run else None
        return self._all_answers(rows, SweptShard)

    @staticmethod
    def _all_answers(rows: Sequence[Row], kind: type[Answer]) -> dict[Shard, Answer]:
        """One answer of each shard, in order.

        Raises:
            UnsafeStoreError: One is missing or told twice: what Spark has promised does not hold.
        """
        if [row.position for row in rows] != list(range(POSITIONS_COUNT)):
            raise UnsafeStoreError(
                f"{len(rows)} answers came of {POSITIONS_COUNT} shards; nothing was deleted", operation="collect"
            )
        return _answers(rows, kind)

    async def _with_plan(self, swept: Swept) -> Swept:
        """The plan as it is now; its lines are written to where they are wanted, one shard after the other."""
        told: list[PlannedUpload] = []
        names: set[str] = set()
        async for shard, planned in self._read_plans():
            told += planned[: KEYS_TOLD_MAX - len(told)]
            if self._plan_to is not None:
                names.add(shard.plan_file)
                await write_lines(self._plan_to, shard.plan_file, planned)
            elif len(told) == KEYS_TOLD_MAX:
                break
        if self._plan_to is not None:
            # At most one for each shard: a batch.
            await self._plan_to.delete([f"{name}{LINES_SUFFIX}" for name in sorted(self._plan_names - names)])
            self._plan_names = frozenset(names)
        totals = sum_totals(total for totals in self._totals.values() for total in totals)
        return replace(swept, totals=totals, told=tuple(told))

    async def _read_plans(self) -> AsyncIterator[tuple[Shard, tuple[PlannedUpload, ...]]]:
        """The plans that are not empty, in the order of their keys, one at a time."""
        if self._planned is None:
            for shard, digest in sorted(self._plans.items()):
                yield shard, await read_plan(self._store, self._run_id(), shard, digest)
            return
        rows = await asyncio.to_thread(self._planned.toLocalIterator)
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            shard = SHARDS[row.position]
            yield shard, tuple(decode_lines(bytes(row.data), subject=shard.plan_file))

    def _carry_out(self, items: Mapping[Shard, bytes], task: ArrowTask, kind: type[Answer]) -> dict[Shard, Answer]:
        if not items:
            return {}
        tasks_max = self._tasks_for(sum(total.count for shard in items for total in self._totals[shard]))
        frame = self._frame([Row(shard.position, ITEM, data) for shard, data in items.items()], tasks_max)
        return _answers(self._evaluate(task, frame.mapInArrow(task, ROWS_DDL))[1], kind)

    def _tasks_for(self, uploads_count: int) -> int:
        return max(self._cores, -(-uploads_count // UPLOADS_PER_TASK))

    def _tasks(self, rows_count: int, tasks_max: int) -> int:
        return max(1, min(self._partitions_max, tasks_max, -(-rows_count // SHARDS_AT_ONCE)))

    def _frame(self, rows: Sequence[Row], tasks_max: int) -> DataFrame:
        """Rows in at most as many partitions as allowed, neighbours together."""
        table = pa.Table.from_batches([batch_of(rows)])
        count = self._tasks(len(rows), tasks_max)
        partitions = pa.array([number * count // len(rows) for number in range(len(rows))], pa.int32())
        frame = frame_of(self._spark, table.append_column("partition", partitions))
        return _by_partition(frame, count, "partition")

    def _evaluate(self, task: ArrowTask, frame: DataFrame) -> tuple[DataFrame, list[Row]]:
        """The rows that are no shard's inventory or plan, in order; and the frame, which has them all in a dry run."""
        try:
            if self._dry_run:
                frame = frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
            table = frame.where(f"kind IN ('{ANSWER}', '{FAILED}')").toArrow()
        except PySparkException as error:
            raise TaskFailedError(
                last_error(error),
                operation=f"collect, {type(task).__name__}",
                hint="nothing was deleted after this; run it again",
            ) from error
        rows = [row for batch in table.to_batches() for row in rows_of(iter([batch]))]
        raise_failures(rows)
        return frame, sorted(rows)

    def _run_id(self) -> RunId:
        if self._run is None:
            raise AssertionError("a dry run carries out nothing")
        return self._run.id


def _by_partition(frame: DataFrame, count: int, partition: str) -> DataFrame:
    """Rows where an expression says, in order there."""
    numbered = frame.selectExpr(*ROWS.names, f"CAST({partition} AS INT) AS partition")
    return numbered.repartitionById(count, "partition").sortWithinPartitions("position").select(*ROWS.names)


def _answers(rows: Sequence[Row], kind: type[Answer]) -> dict[Shard, Answer]:
    return {SHARDS[row.position]: msgspec.msgpack.decode(row.data or b"", type=kind) for row in rows}
