"""Collection on Spark, for inventories that one machine would take too long to list, to mark and to delete.

The steps and their order are those of `engine.collect.collect` (design 0002, D4; 0006, Steps on Spark). Records,
boundaries, names and pins stay with the driver, with numbers and a digest of each shard; tasks do what grows with the
number of uploads (R1).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from blobstore import installed_release
from blobstore.base import BlobStore
from engine.collect.backend import (
    DELETE_SHARE_MAX,
    KEYS_LISTED_MAX,
    NO_OPTIONS,
    CollectBackend,
    CollectOptions,
    Deleted,
    Listing,
    SweepResult,
    write_lines,
)
from engine.collect.report import CollectReport
from engine.collect.runs import Run, end_run, resume_run
from engine.errors import DamagedError, UnsafeStoreError
from engine.records.indexes import is_missing
from engine.records.roots import References
from engine.spark.access import Access, SparkOptions, in_context, open_on_driver
from engine.spark.collection import tasks
from engine.spark.errors import decode_error, task_errors
from engine.spark.spread import ArrowTask, default_partitions, frame_of
from index.plan import plan_format
from index.plan.collect import PlannedUpload, sum_totals
from index.plan.commits import Retention, RetentionPolicy
from index.snapshot.keys import RunId

Answer = TypeVar("Answer")
# Of a `SweepResult`.
_SUMMED: Final = ("waiting_count", "waiting_bytes", "live_count", "live_bytes", "excluded_count", "excluded_bytes")

# A task of fewer uploads costs more to start than it saves, once every core has one.
UPLOADS_PER_TASK: Final = 50_000
# Parts of a step whose work is not known yet, for each core, so that none waits long for another.
TASKS_PER_CORE: Final = 2


def collect(
    spark: SparkSession,
    url: str,
    retention: Retention | RetentionPolicy,
    *,
    dry_run: bool = False,
    delete_share_max: float = DELETE_SHARE_MAX,
    plan_to: BlobStore | None = None,
    options: SparkOptions | None = None,
) -> CollectReport:
    """Delete what nothing keeps: `engine.collect.collect`, with the lists, the marks and the deletes in tasks.

    A collection that died is resumed where it was (design 0006, R3 and R5). Foreign keys outside the 256 shards of a
    prefix are not seen.

    Args:
        url: A repository that every executor can reach.
        retention: Which commits stay; the newest of every scope always does.
        dry_run: Plan only: nothing is written or deleted, no TTL is removed.
        delete_share_max: The largest share of all bytes that may go (P4).
        plan_to: Where the driver writes the plan.
        options: The most tasks of a step are the session's shuffle partitions if not given.

    Raises:
        RunEndedError: Another collection that worked on the same run has ended it: nothing was deleted after that.
        StoreError: As the blob store says: nothing was deleted after it but what the same step had begun.
        TaskFailedError: A task failed for good by something else: nothing was deleted after that step.
        As `engine.collect.collect`.
    """
    options = options or SparkOptions()
    repository, access = open_on_driver(url, options)
    with repository:
        backend = SparkBackend(
            spark,
            access,
            repository.asynchronous.store,
            CollectOptions(dry_run=dry_run, plan_to=plan_to),
            partitions_max=options.partitions_max or int(spark.conf.get("spark.sql.shuffle.partitions") or 1),
            cores=default_partitions(spark),
        )
        return repository.collect(
            retention, dry_run=dry_run, delete_share_max=delete_share_max, plan_to=plan_to, backend=backend
        )


class SparkBackend(CollectBackend):
    """Lists, marks and deletes in tasks; lives in the driver for one collection. Its calls block a thread each.

    With `dry_run` nothing is written to the repository: inventory and plan are in Spark's local checkpoints, which are
    never computed again; if one is lost, the collection fails. A step has `partitions_max` tasks at the most, and fewer
    than `cores` only if there is less to do.
    """

    def __init__(
        self,
        spark: SparkSession,
        access: Access,
        store: BlobStore,
        options: CollectOptions = NO_OPTIONS,
        *,
        partitions_max: int,
        cores: int,
    ) -> None:
        self._spark = spark
        self._access = access
        self._store = store
        self._partitions_max = partitions_max
        self._cores = cores
        self._listed_count = 0
        self._dry_run = options.dry_run
        self._plan_to = options.plan_to
        self._plan_names = frozenset[str]()
        # None in a dry run.
        self._run: Run | None = None
        self._digests: tuple[bytes, ...] = ()
        # In a dry run, the inventories.
        self._inventories: DataFrame | None = None
        # As the plans are now.
        self._sweep_results: dict[plan_format.Shard, tasks.SweepShard] = {}
        # In a dry run, what the tasks have planned.
        self._planned: DataFrame | None = None

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        listed_at_ms = now_ms
        if not self._dry_run:
            self._run = await resume_run(self._store, self._access.record, run, now_ms, installed_release())
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
            foreign=tuple(foreign[:KEYS_LISTED_MAX]),
            resumed_from=self._run.id if self._run is not None and self._run.id != run else None,
        )

    @override
    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> SweepResult:
        self._sweep_results = await asyncio.to_thread(self._sweep, references, now_ms)
        return await self._result()

    @override
    async def exclude(self, keys: frozenset[str]) -> SweepResult:
        groups = sorted(plan_format.group_by_shard(keys).items())
        planned = ((shard, self._sweep_results[shard], group) for shard, group in groups)
        items = {shard: msgspec.msgpack.encode((result, group)) for shard, result, group in planned if result.digest}
        task = tasks.ExcludeTask(access=self._access, run=self._run_id())
        self._sweep_results |= await asyncio.to_thread(self._carry_out, items, task, tasks.SweepShard)
        return await self._result()

    @override
    async def delete(self, prefix: str) -> Deleted:
        items = {shard: digest for shard, digest in self._plans() if shard.kind_prefix == prefix}
        task = tasks.DeleteTask(access=self._access, run=self._run_id())
        answers = await asyncio.to_thread(self._carry_out, items, task, Deleted)
        failed = [key for answer in answers.values() for key in answer.failed]
        return Deleted(
            totals=sum_totals(total for answer in answers.values() for total in answer.totals),
            failed_count=sum(answer.failed_count for answer in answers.values()),
            failed=tuple(failed[:KEYS_LISTED_MAX]),
        )

    @override
    def so_far(self, prefix: str) -> Deleted:
        planned = (result.planned_count for shard, result in self._sweep_results.items() if shard.kind_prefix == prefix)
        return Deleted(totals=(), unknown_count=sum(planned))

    @override
    async def end(self) -> None:
        if self._run is not None:
            await end_run(self._store, self._run.id)

    def _list(self) -> list[tasks.ListedShard]:
        """Return every shard's answer, in order; nothing is listed again later."""
        run, names = (None, frozenset[str]()) if self._run is None else (self._run.id, self._run.names)
        is_listed = frozenset(shard for shard in plan_format.SHARDS if shard.inventory_name in names)
        task = tasks.ListTask(access=self._access, run=run, listed=is_listed)
        rows = [tasks.Row(shard.position, tasks.ITEM, None) for shard in plan_format.SHARDS]
        frame, answers = self._evaluate(task, self._frame(rows, TASKS_PER_CORE * self._cores))
        self._inventories = frame.where(f"kind = '{tasks.INVENTORY}'") if run is None else None
        return list(_all_answers(answers, tasks.ListedShard).values())

    def _sweep(self, references: References, now_ms: int) -> dict[plan_format.Shard, tasks.SweepShard]:
        in_order = [(reference, reference in references.optional) for reference in references.neighbours]
        starts = range(0, len(in_order), tasks.REFERENCES_PER_ITEM)
        items = [msgspec.msgpack.encode(in_order[start : start + tasks.REFERENCES_PER_ITEM]) for start in starts]
        live = self._frame([tasks.Row(n, tasks.ITEM, item) for n, item in enumerate(items)], self._partitions_max)
        marks = live.mapInArrow(in_context(tasks.MarkTask(access=self._access)), tasks.ROWS_DDL)
        there = [tasks.Row(shard.position, tasks.INVENTORY, None) for shard in plan_format.SHARDS]
        inventories = self._inventories or self._frame(there, 1)
        count = self._tasks(plan_format.POSITIONS_COUNT, self._tasks_for(self._listed_count))
        sweep = tasks.SweepTask(
            access=self._access,
            run=None if self._run is None else self._run.id,
            now_ms=now_ms,
            protected=references.protected,
            digests=self._digests,
            carried_out={} if self._run is None else plan_format.carried_out_plans(self._run.names),
        )
        by_shard = _by_partition(
            marks.union(inventories), count, f"position * {count} DIV {plan_format.POSITIONS_COUNT}"
        )
        frame, rows = self._evaluate(sweep, by_shard)
        self._planned = frame.where(f"kind = '{tasks.PLAN}'") if self._dry_run else None
        return _all_answers(rows, tasks.SweepShard)

    async def _result(self) -> SweepResult:
        """Return the result with the plan as it is now; write its lines where they are wanted, shard by shard."""
        first: list[PlannedUpload] = []
        names: set[str] = set()
        async for shard, planned in self._read_plans():
            first += planned[: KEYS_LISTED_MAX - len(first)]
            if self._plan_to is not None:
                names.add(shard.plan_file)
                await write_lines(self._plan_to, shard.plan_file, planned)
            elif len(first) == KEYS_LISTED_MAX:
                break
        if self._plan_to is not None:
            # At most one for each shard: a batch.
            await self._plan_to.delete([f"{n}{plan_format.LINES_SUFFIX}" for n in sorted(self._plan_names - names)])
            self._plan_names = frozenset(names)
        result = self._sweep_results.values()
        return SweepResult(
            totals=sum_totals(total for shard in result for total in shard.totals),
            waiting_until_ms=max(shard.waiting_until_ms for shard in result),
            first=tuple(first),
            **{name: sum(getattr(shard, name) for shard in result) for name in _SUMMED},
        )

    def _plans(self) -> list[tuple[plan_format.Shard, bytes]]:
        """Return the digests of the plans that are not empty, in the order of their keys."""
        found = sorted(self._sweep_results.items())
        return [(shard, result.digest) for shard, result in found if result.digest is not None]

    async def _read_plans(self) -> AsyncIterator[tuple[plan_format.Shard, tuple[PlannedUpload, ...]]]:
        """Read the plans that are not empty, in the order of their keys, one at a time."""
        if self._planned is None:
            for shard, digest in self._plans():
                yield shard, await tasks.read_plan(self._store, self._run_id(), shard, digest)
            return
        rows = await asyncio.to_thread(self._planned.toLocalIterator)
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            shard = plan_format.SHARDS[row.position]
            yield shard, tuple(plan_format.decode_lines(bytes(row.data), subject=shard.plan_file))

    def _carry_out(
        self, items: Mapping[plan_format.Shard, bytes], task: ArrowTask, kind: type[Answer]
    ) -> dict[plan_format.Shard, Answer]:
        if not items:
            return {}
        tasks_max = self._tasks_for(sum(self._sweep_results[shard].planned_count for shard in items))
        frame = self._frame([tasks.Row(shard.position, tasks.ITEM, data) for shard, data in items.items()], tasks_max)
        return _answers(self._evaluate(task, frame)[1], kind)

    def _tasks_for(self, uploads_count: int) -> int:
        return max(self._cores, -(-uploads_count // UPLOADS_PER_TASK))

    def _tasks(self, rows_count: int, tasks_max: int) -> int:
        return max(1, min(self._partitions_max, tasks_max, -(-rows_count // tasks.SHARDS_AT_ONCE)))

    def _frame(self, rows: Sequence[tasks.Row], tasks_max: int) -> DataFrame:
        """Return rows in at most as many partitions as allowed, neighbours together."""
        table = pa.Table.from_batches([tasks.batch_of(rows)])
        count = self._tasks(len(rows), tasks_max)
        partitions = pa.array([number * count // len(rows) for number in range(len(rows))], pa.int32())
        frame = frame_of(self._spark, table.append_column("partition", partitions))
        return _by_partition(frame, count, "partition")

    def _evaluate(self, task: ArrowTask, frame: DataFrame) -> tuple[DataFrame, list[tasks.Row]]:
        """Return what a task makes of a frame, in a dry run with inventories or plans; and the answers in order.

        Raises what a task failed with, or as `task_errors`.
        """
        frame = frame.mapInArrow(in_context(task), tasks.ROWS_DDL)
        with task_errors(f"collect, {type(task).__name__}", hint="nothing was deleted after this; run it again"):
            if self._dry_run:
                frame = frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
            table = frame.where(f"kind IN ('{tasks.ANSWER}', '{tasks.FAILED}')").toArrow()
        rows = [row for batch in table.to_batches() for row in tasks.rows_of(iter([batch]))]
        errors = [decode_error(row.data or b"") for row in rows if row.kind == tasks.FAILED]
        if errors:
            # First one that no other collector explains.
            raise min(errors, key=lambda error: isinstance(error, DamagedError) and is_missing(error))
        return frame, sorted(rows)

    def _run_id(self) -> RunId:
        if self._run is None:
            raise AssertionError("a dry run carries out nothing")
        return self._run.id


def _by_partition(frame: DataFrame, count: int, partition: str) -> DataFrame:
    """Return rows in the partitions that an expression names, in order there."""
    numbered = frame.selectExpr(*tasks.ROWS.names, f"CAST({partition} AS INT) AS partition")
    return numbered.repartitionById(count, "partition").sortWithinPartitions("position").select(*tasks.ROWS.names)


def _answers(rows: Sequence[tasks.Row], kind: type[Answer]) -> dict[plan_format.Shard, Answer]:
    return {plan_format.SHARDS[row.position]: msgspec.msgpack.decode(row.data or b"", type=kind) for row in rows}


def _all_answers(rows: Sequence[tasks.Row], kind: type[Answer]) -> dict[plan_format.Shard, Answer]:
    """Return one answer of each shard, in order; if one is missing or comes twice, Spark's promise does not hold."""
    if [row.position for row in rows] != list(range(plan_format.POSITIONS_COUNT)):
        message = f"{len(rows)} answers came of {plan_format.POSITIONS_COUNT} shards; nothing was deleted"
        raise UnsafeStoreError(message, operation="collect")
    return _answers(rows, kind)
