"""What one Spark task does with one store: one attempt, from claiming the store to a reference to its backup.

Everything here is pickled to Python workers: no session, no credentials, no open handle. A task writes blobs and
never a record: an attempt that loses, fails or comes late has made nothing visible, and its blobs end with their TTL.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import pyarrow as pa

from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import DamagedError, EngineError, UsageError
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.spark.access import Access
from engine.spark.claims import READERS, Attempt, ReadyStore, StoreClaims, StoreState
from engine.spark.errors import PartitioningError
from index.snapshot.model import Scope, StoreReference

TASK_COLUMN: Final = "__tidemark_task"

UpdateStore = Callable[[StoreWriter, Iterator[pa.RecordBatch], str], None]
ReadStore = Callable[[StoreReader, str], Iterator[pa.RecordBatch]]
Origin = Literal["new", "local", "restored"]
OpenStore = TypeVar("OpenStore", bound=StoreReader)


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt at a task that counts reports to the driver."""

    task: str
    rows_count: int
    # Where the store came from: nowhere, this machine, or the repository.
    origin: Origin
    backup: BackupResult


# A `TaskReport` in msgpack.
RESULT_DDL: Final = "report binary"


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempts at all tasks of one run have in common."""

    access: Access
    scope: Scope
    store: str
    local_root: str
    # Distinguishes the states that this run makes from those of others (`claims`, rule 4).
    id: str
    # The store of each task at the commit that the run builds on.
    bases: dict[str, StoreReference]
    rocksdb: RocksDbSettings
    # What the driver knows to be missing, and whether to look for more (design 0006, M1).
    missing: frozenset[str] = frozenset()
    check_retained: bool = False

    def claims(self, task: str) -> StoreClaims:
        return StoreClaims(
            Path(self.local_root), repository_id=self.access.record.id, scope=self.scope, task=task, store=self.store
        )


class UpdateTask(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at updating one store; given to `mapInArrow`."""

    run: JobRun
    version: int
    update: UpdateStore

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Apply a partition's rows; one row comes back, or none from a partition without rows.

        A task without rows does nothing at all: the commit carries its store over.
        """
        rows = TaskRows(batches)
        if rows.task is None:
            return
        report = msgspec.msgpack.encode(self._attempt(rows, rows.task))
        yield pa.record_batch([pa.array([report], pa.binary())], ["report"])

    def _attempt(self, rows: "TaskRows", task: str) -> TaskReport:
        run, claims = self.run, self.run.claims(task)
        base = run.bases.get(task)
        origin: Origin = "new"
        with claims.begin() as attempt:
            claims.remove_dead_attempts()
            if base is None:
                store = StoreWriter.open(attempt.directory, run.rocksdb)
            else:
                store, claimed = open_at(run, attempt, base, StoreWriter)
                origin = "local" if claimed else "restored"
            attempt.remove_stale(None if base is None else state_of(base), run.id)
            with store:
                self.update(store, iter(rows), task)
                rows.check_finished()
                store.checkpoint(attempt.checkpoint_directory)
            backup = self._back_up(attempt.checkpoint_directory, task, base)
            # Last, for from here on another attempt may claim the store: an error above leaves nothing to claim.
            attempt.finish(state_of(backup.reference), run.id)
        return TaskReport(task=task, rows_count=rows.rows_count, origin=origin, backup=backup)

    def _back_up(self, checkpoint: Path, task: str, base: StoreReference | None) -> BackupResult:
        run = self.run
        options = BackupOptions(version=self.version, base=base, missing=run.missing, check_retained=run.check_retained)
        with run.access.borrow() as repository:
            return repository.backup(run.scope, checkpoint, task=task, store=run.store, options=options)


class ReadTask(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at reading stores; given to `mapInArrow` over a DataFrame of task names."""

    run: JobRun
    read: ReadStore

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
        """Yield what the user's function makes of the stores of the tasks named in the first column."""
        for batch in batches:
            for task in batch.column(0).to_pylist():
                yield from self._read(task)

    def _read(self, task: str) -> Iterator[pa.RecordBatch]:
        base = self.run.bases[task]
        claims = self.run.claims(task)
        with claims.begin() as attempt:
            claims.remove_dead_attempts()
            attempt.remove_read(state_of(base))
            store, claimed = open_at(self.run, attempt, base, StoreReader)
            intact = True
            try:
                with store:
                    yield from self.read(store, task)
            except DamagedError:
                intact = False
                raise
            finally:
                # Also where the user's function failed, or Spark has seen enough rows: reading has changed nothing.
                if intact:
                    attempt.give_back(claimed or ReadyStore(state_of(base), READERS))


class TaskRows:
    """The rows of one partition as a user's function sees them, checked to be those of one task."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = (batch for batch in batches if batch.num_rows)
        self._next = next(self._batches, None)
        # Those that the function has seen.
        self.rows_count = 0
        # None: there is not one row.
        self.task = None if self._next is None else str(self._next.column(TASK_COLUMN)[0].as_py())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (batch := self._next) is not None:
            self._next = next(self._batches, None)
            tasks = {str(task) for task in batch.column(TASK_COLUMN).unique().to_pylist()}
            if tasks != {self.task}:
                raise PartitioningError(f"one partition holds rows of tasks {sorted(tasks)}", operation="update")
            self.rows_count += batch.num_rows
            yield batch.drop_columns([TASK_COLUMN])

    def check_finished(self) -> None:
        """Refuse a function that returned early: rows that it did not look at would be lost without a word."""
        if self._next is not None:
            message = "the function returned before it had read all rows"
            hint = "read the batches to their end, also where rows are to be ignored"
            raise UsageError(message, operation="update", subject=f"task {self.task}", hint=hint)


def state_of(reference: StoreReference) -> StoreState:
    """Return what a machine calls the state of a reference."""
    return StoreState(reference.version, reference.index.sha256.hex())


def open_at(
    run: JobRun, attempt: Attempt, base: StoreReference, kind: type[OpenStore]
) -> tuple[OpenStore, ReadyStore | None]:
    """Open the store at a commit: this machine's if it has that very state and it opens, else the repository's.

    No pin is needed: the caller holds one, or the reference is from the commit that a run builds on. That one is the
    newest for as long as the run can succeed, and the newest is never collected (design 0002, D3). It returns also what
    the store was claimed as; None if it was restored.
    """
    claimed = attempt.claim(state_of(base))
    if claimed is not None:
        try:
            return kind.open(attempt.directory, run.rocksdb), claimed
        except EngineError:
            # Half written in a power cut, or damaged since: what was backed up is the truth.
            attempt.discard()
    with run.access.borrow() as repository:
        repository.restore_reference(base, attempt.directory)
    return kind.open(attempt.directory, run.rocksdb), None
