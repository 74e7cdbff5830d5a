"""Run jobs on Spark whose tasks keep state in RocksDB, committed as one with the position in the input."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, Self

import msgspec
import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from typing_extensions import override

from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from engine.checkpoint.beside import BatchOffsets, decode_batch_offsets
from engine.errors import CommitLostError, DamagedError, UsageError
from engine.local.digests import hash_content
from engine.rocksdb.store import RocksDbSettings
from engine.runtime import Runtime
from engine.settings import TransferSettings
from engine.spark import store_task
from engine.spark.access import SparkOptions, in_context, open_on_driver
from engine.spark.errors import BatchMismatchError, PartitioningError, TaskFailedError, last_error
from engine.spark.spread import PURPOSE, RestoreForRun, StoreWork, frame_of, spread
from engine.state.checkpoint_dir import opened_checkpoint
from engine.state.query import ENTRY_BYTES_MAX, OFFSETS, StreamingCheckpoint
from index.display import DisplayMixin
from index.plan.commits import Commit
from index.snapshot.model import Scope, ScopeLayout
from index.spark.task_keys import KEY_HASH, TASKS_MAX

# Commits that DataFrames of the state may be read from at the same time.
PINS_MAX: Final = 8


async def _read_batch(checkpoint: str | Path, batch: int, settings: StoreSettings) -> BatchOffsets:
    async with opened_checkpoint(checkpoint, settings) as directory:
        try:
            query_id = await StreamingCheckpoint(directory).query_id()
            planned = await directory.read(f"{OFFSETS}/{batch}", size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError as error:
            message, hint = f"has no offsets of batch {batch}", "name the checkpointLocation of the query"
            subject = directory.location
            raise BatchMismatchError(message, operation="for each batch", subject=subject, hint=hint) from error
    return BatchOffsets(query_id=query_id, batch=batch, planned=hash_content(planned).hex())


class JobCommit(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """The commit of one run."""

    commit: Commit
    # One per task that had rows, in the order of tasks; the others' stores were carried over.
    tasks: tuple[store_task.TaskReport, ...]
    seconds: float
    # The version had been committed before: nothing was run.
    repeated: bool = False
    # Task and name of the stores that were left out, because `drop_other_stores` says so (design 0006, F3).
    dropped: tuple[tuple[str, str], ...] = ()
    # Those of another name that the commit still has: another job's or program's, or left from an earlier name.
    carried_over: tuple[tuple[str, str], ...] = ()


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a `StatefulJob`."""

    # The name of the store within its task. Stores of another name are carried over from commit to commit, and listed
    # in `JobCommit.carried_over`: they may be somebody else's.
    store: str = "state"
    # Leave every store of another name, in all tasks, out of the next commit: the job had them before and has no others
    # beside it. They are collected with the last commit that has them; to go back, rewind.
    drop_other_stores: bool = False
    # Columns that the rows of a task are sorted by; none: any order.
    order_by: tuple[str | Column, ...] = ()
    # Let each attempt ask with a STAT for each blob whether what its store had is still there, and upload again what is
    # not (design 0006, M1). What the driver finds missing as it settles the newest commit is always uploaded again.
    check_retained: bool = False
    # How stores are written.
    rocksdb: RocksDbSettings = RocksDbSettings()
    # How bytes are moved, and how the repository's store is reached.
    transfer: TransferSettings = TransferSettings()
    store_settings: StoreSettings = StoreSettings()


class StatefulJob:
    """A job that updates one RocksDB store per task and commits all of them as one.

    Each row belongs to the task that its key columns hash to, so that one task sees every row of a key. Attempts of
    a task may fail, be repeated, run twice at the same time or come back from the dead: each works on a directory of
    its own (design 0002, I4), writes blobs that no commit refers to, and returns a reference. Only the driver
    commits, once, on top of the commit that the run began with (C2): what other attempts have made is never seen
    and ends with its TTL.

    One driver at a time makes progress; of two, one is refused with a `ConflictError`, and loads again by running
    again. Use it as a context manager, or call `close`: it holds a repository and the pins of its readers.
    docs/how-to/spark.md has an example.
    """

    def __init__(
        self,
        url: str,
        *,
        job: str,
        key_columns: Sequence[str],
        tasks: int,
        update: store_task.UpdateStore,
        local_root: str | Path,
        options: JobOptions | None = None,
    ) -> None:
        """Open the repository.

        Args:
            url: A repository that the driver and every executor can reach; credentials are found by each process.
            key_columns: Columns of every DataFrame to come, of the same types each time.
            tasks: How many stores there are: as many as before, or as `tidemark rescale` has made.
            update: Called once per task that has rows, with its store, its rows and its name, on an executor. It
                reads the batches to their end, keeps nothing outside the store, and may be called again for the same
                rows by another attempt.
            local_root: A directory on a local disk of each executor, for stores at work and for the next run.

        Raises:
            UsageError: The arguments contradict each other.
            NotFoundError: There is no repository.
        """
        if not 0 < tasks <= TASKS_MAX:
            raise UsageError(f"{tasks} is not within 1 and {TASKS_MAX}", operation="stateful job", subject="tasks")
        if not key_columns or len(set(key_columns)) < len(key_columns):
            raise UsageError("are missing or repeated", operation="stateful job", subject="key_columns")
        self.scope = Scope(job)
        self._key_columns = tuple(key_columns)
        self._tasks = tasks
        self._update = update
        self._local_root = str(Path(local_root).absolute())
        self._options = options = options or JobOptions()
        self._runtime = Runtime()
        reached = SparkOptions(store=options.store_settings, transfer=options.transfer)
        self._repository, self._access = open_on_driver(url, reached)
        # Of the commits that were read, by write id, the one read last at the end.
        self._pins: OrderedDict[str, contextlib.ExitStack] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def __reduce__(self) -> NoReturn:
        """Refuse to travel. Over Spark Connect the function of a `foreachBatch` does, with everything it refers to."""
        raise UsageError(
            "a job is bound to the process that opened it",
            operation="stateful job",
            subject=str(self.scope),
            hint="open it inside the function: over Spark Connect a foreachBatch runs on the server",
        )

    def close(self) -> None:
        """Release the readers' pins and the repository."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._repository.close)
            for pin in self._pins.values():
                stack.push(pin)
            self._pins.clear()

    def latest(self) -> Commit | None:
        """Return the newest commit, whose `record` has the version and offsets to go on from; None before the first."""
        return self._repository.latest(self.scope)

    def run(self, rows: DataFrame, *, version: int | None = None, offsets: str = "") -> JobCommit:
        """Apply rows to the stores of their tasks, and commit all stores together with the offsets.

        Running a version again that is the newest, with the same offsets, does nothing and returns its commit: so a
        caller who does not know whether a run was committed (a crash, `CommitUnknownError`) simply repeats it, and
        Spark's `foreachBatch` may repeat its last batch.

        Args:
            rows: All rows of this version; evaluated once, except where Spark repeats a task.
            version: Greater than the newest commit's; that one's plus one if not given.
            offsets: The caller's position in the input after these rows, opaque.

        Raises:
            UsageError: Version, offsets, columns or number of tasks do not fit the job's newest commit.
            DamagedError: The commit is made, and something that is new in it is gone.
            ConflictError: Another driver has committed meanwhile: run again.
            TaskFailedError: A task failed as often as Spark allows; nothing was committed.
            CommitUnknownError: No answer to the commit: run again with the same version and offsets.
            LeaseExpiredError: The run took longer than the repository's TTL; nothing was committed.
            AnalysisException: Spark cannot make a plan for the rows.
            StoreError: As the blob store says; nothing was committed.
        """
        started_s = self._runtime.monotonic_s()
        layout = self._layout(rows)
        parent = self.latest()
        if parent is not None:
            self._check_layout(parent, layout)
            if version == parent.record.version and offsets == parent.record.offsets:
                # Nothing is to build on a commit of which something is gone.
                self._repository.settle(parent)
                others = self._other_stores(parent)
                return JobCommit(commit=parent, tasks=(), seconds=0.0, repeated=True, carried_over=others)
            if version is not None and version <= parent.record.version:
                raise UsageError(
                    f"version {version} with offsets {offsets!r} does not follow version {parent.record.version} "
                    f"with offsets {parent.record.offsets!r}",
                    operation="run",
                    subject=str(self.scope),
                    hint="go on from `latest()`; to go back, rewind the job to an older commit first",
                )
            # Before the attempts make the stores on the disks newer than what they would be uploaded again from.
            with contextlib.suppress(DamagedError):
                self._repository.settle(parent)
        next_version = version if version is not None else (parent.record.version + 1 if parent else 1)
        reports = self._attempt_all(rows, parent, next_version)
        dropped = self._other_stores(parent) if self._options.drop_other_stores else ()
        backups, base = [report.backup for report in reports], parent.pointer if parent else None
        commit = self._repository.commit(
            self.scope, backups, version=next_version, offsets=offsets, layout=layout, parent=base, dropped=dropped
        )
        seconds = self._runtime.monotonic_s() - started_s
        others = self._other_stores(commit)
        return JobCommit(commit=commit, tasks=reports, seconds=seconds, dropped=dropped, carried_over=others)

    def for_each_batch(self, checkpoint: str | Path) -> Callable[[DataFrame, int], None]:
        """Return a function for `foreachBatch` of a streaming query, which applies each batch exactly once (J1).

        The version is the batch id. A batch that comes again, because the query died between the job's commit and its
        own, is not applied twice; its rows are only read, so that the query's own state has them.

        Args:
            checkpoint: The query's checkpointLocation. Its `metadata` says which query it is, and `offsets/<batch>`
                what the batch is made of; both are stored in the job's offsets.

        Raises:
            BatchMismatchError: By the function: the batch neither repeats nor follows the job's newest version, is of
                another query, or was planned again. Otherwise the function raises as `run`.
            NotFoundError: By the function: there is no checkpoint.
        """

        def apply(rows: DataFrame, batch_id: int) -> None:
            reading = _read_batch(checkpoint, batch_id, self._options.store_settings)
            offsets = self._repository.loop.run(reading)
            newest = self.latest()
            self._check_follows(offsets, newest)
            done = self.run(rows, version=batch_id, offsets=offsets.encode())
            if done.repeated:
                # State of the query itself is written as its rows are read: passed over, it would lack this batch.
                rows.write.format("noop").mode("overwrite").save()

        return apply

    def _check_follows(self, offsets: BatchOffsets, newest: Commit | None) -> None:
        """Refuse a batch that is not the one to apply or to pass over now (design 0005, J1)."""
        wrong = ""
        if newest is None:
            wrong = "" if offsets.batch == 0 else "the job has no commit"
        else:
            version = newest.record.version
            known = decode_batch_offsets(newest)
            if known is None or known.query_id != offsets.query_id:
                wrong = f"the job is at version {version}, of something else: {newest.record.offsets!r}"
            elif offsets.batch not in {version, version + 1}:
                wrong = f"the job is at version {version}"
            elif offsets.batch == version and offsets != known:
                wrong = "the job has applied this batch, and the query has planned it again, perhaps of other rows"
        if wrong:
            message = f"batch {offsets.batch} of query {offsets.query_id} does not fit: {wrong}"
            raise BatchMismatchError(message, operation="for each batch", subject=str(self.scope))

    def read(self, spark: SparkSession, function: store_task.ReadStore, schema: str) -> DataFrame:
        """Return a DataFrame made from every store at the newest commit, task by task.

        It is lazy and may be evaluated often: it stays with the commit that was the newest at this call. That commit
        is pinned until the job is closed, or until `PINS_MAX` newer ones have been read (design 0002, D5).

        Args:
            function: Called on an executor with an open store and the name of its task; yields Arrow batches.
            schema: Of those batches, as DDL.

        Raises:
            NotFoundError: The commit was collected before it was pinned: call again.
            StoreError: As the blob store says.
        """
        commit = self.latest()
        if commit is not None:
            self._pin(commit)
        task = store_task.ReadTask(run=self._begin_run(commit), read=function)
        names = sorted(task.run.bases)
        numbers = pa.array(range(len(names)), pa.int32())
        work = frame_of(spark, pa.table({"task": pa.array(names, pa.string()), "partition": numbers}))
        return work.repartitionById(max(1, len(names)), "partition").mapInArrow(in_context(task), schema)

    def restore_stores(self, spark: SparkSession, *, partitions_max: int | None = None) -> DataFrame:
        """Bring every store of the newest commit to where the next run finds it, in parallel.

        A run restores what it misses by itself; this is for having it done beforehand, and for seeing how long it
        takes. Where there are several machines a store may be restored on one and wanted on another. Returns and raises
        as `engine.spark.restore_stores`.
        """
        with self._repository.find_pinned(self.scope, purpose=PURPOSE) as (commit, _):
            run = self._begin_run(commit)
            bases = run.bases.values()
            work = [StoreWork(task=of.task, store=of.store, path=run.local_root, reference=of) for of in bases]
            return spread(spark, RestoreForRun(access=self._access, scope=self.scope, run=run), work, partitions_max)

    def _pin(self, commit: Commit) -> None:
        """Pin a commit for its readers; of more than PINS_MAX pins, release the one longest unused."""
        write_id = commit.pointer.write_id
        if write_id not in self._pins:
            pin = contextlib.ExitStack()
            pin.enter_context(self._repository.pinned(commit, purpose="read on Spark"))
            self._pins[write_id] = pin
        self._pins.move_to_end(write_id)
        if len(self._pins) > PINS_MAX:
            self._pins.popitem(last=False)[1].close()

    def _attempt_all(self, rows: DataFrame, parent: Commit | None, version: int) -> tuple[store_task.TaskReport, ...]:
        """Run the attempts of all tasks; return one report for each task that has rows."""
        task = store_task.UpdateTask(run=self._begin_run(parent), version=version, update=self._update)
        key = sf.pmod(sf.hash(*self._key_columns), sf.lit(self._tasks))
        placed = rows.withColumn(store_task.TASK_COLUMN, key).repartitionById(self._tasks, store_task.TASK_COLUMN)
        if self._options.order_by:
            placed = placed.sortWithinPartitions(*self._options.order_by)
        try:
            collected = placed.mapInArrow(in_context(task), store_task.RESULT_DDL).toArrow()
        except AnalysisException:
            # Not a task but the caller's DataFrame: Spark's own words are the best.
            raise
        except PySparkException as error:
            # A run builds on the newest commit without a pin: the newest is never collected (design 0002, D3). If it is
            # the newest no more, a task may have missed its blobs, and the run has lost, whatever its tasks have met.
            newest = self.latest()
            if newest is not None and (parent is None or newest.pointer != parent.pointer):
                message = f"commit {newest.pointer.number} was made meanwhile"
                raise CommitLostError(message, operation="run", subject=str(self.scope)) from error
            raise TaskFailedError(last_error(error), operation="run", subject=str(self.scope)) from error
        reports = [
            msgspec.msgpack.decode(data, type=store_task.TaskReport) for data in collected.column("report").to_pylist()
        ]
        reports.sort(key=lambda report: int(report.task))
        if len({report.task for report in reports}) < len(reports):
            raise PartitioningError("a task ran in several partitions", operation="run", subject=str(self.scope))
        return tuple(reports)

    def _other_stores(self, commit: Commit | None) -> tuple[tuple[str, str], ...]:
        stores = commit.record.stores if commit else ()
        return tuple((s.task, s.store) for s in stores if s.store != self._options.store)

    def _begin_run(self, commit: Commit | None) -> store_task.JobRun:
        """Make what travels to the tasks of one run; without credentials."""
        stores = commit.record.stores if commit else ()
        return store_task.JobRun(
            access=self._access,
            scope=self.scope,
            store=self._options.store,
            local_root=self._local_root,
            id=self._runtime.session(),
            bases={reference.task: reference for reference in stores if reference.store == self._options.store},
            rocksdb=self._options.rocksdb,
            missing=self._repository.asynchronous.missing_blobs.keys,
            check_retained=self._options.check_retained,
        )

    def _layout(self, rows: DataFrame) -> ScopeLayout:
        """Describe how keys are spread, with the types of key columns: the hash of an int is not that of a bigint."""
        types = dict(rows.dtypes)
        missing = [name for name in self._key_columns if name not in types]
        if missing or store_task.TASK_COLUMN in types:
            message = f"lack {', '.join(missing)}" if missing else f"have a column {store_task.TASK_COLUMN}"
            raise UsageError(message, operation="run", subject="rows", hint=f"there are {', '.join(types)}")
        keys = tuple(f"{name} {types[name]}" for name in self._key_columns)
        return ScopeLayout(tasks_count=self._tasks, key_hash=KEY_HASH, key_columns=keys)

    def _check_layout(self, parent: Commit, layout: ScopeLayout) -> None:
        """Check K3 before any work; the commit checks it once more."""
        begun = parent.record.layout
        if begun != layout:
            raise UsageError(
                f"has {begun.tasks_count} tasks by {', '.join(begun.key_columns) or 'no keys'}, "
                f"not {layout.tasks_count} by {', '.join(layout.key_columns)}",
                operation="run",
                subject=str(self.scope),
                hint="keys never change in the life of a job, and the number of its tasks by `tidemark rescale` alone",
            )
