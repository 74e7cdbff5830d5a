"""Backs a streaming query up while it runs: a backup after every n-th batch, in a thread of its own (0005, L1)."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Final, Self

import msgspec
from pyspark.sql.streaming import listener
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.opening import StoreSettings, open_store
from engine.checkpoint.backup import BackupChoice, CheckpointBackupResult, backup_checkpoint
from engine.errors import NotFoundError, UsageError
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from engine.state.checkpoint_dir import opened_checkpoint
from engine.state.query import StreamingCheckpoint
from index.snapshot.model import Scope
from index.spark.checkpoint import decode_checkpoint_backup

_LOG: Final = logging.getLogger(__name__)


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a query, merged: the newest of each kind."""

    query_id: str
    batch: int | None = None
    has_started: bool = False
    has_ended: bool = False

    def after(self, earlier: "_Event") -> "_Event":
        return msgspec.structs.replace(
            self,
            batch=earlier.batch if self.batch is None else self.batch,
            has_started=self.has_started or earlier.has_started,
            has_ended=self.has_ended or earlier.has_ended,
        )


class BackupListener(listener.StreamingQueryListener):
    """Backs up one query's checkpoint after every `every` committed batches, beside the query.

    Spark's calls only leave a note, so the query never waits, and nothing that fails here reaches it: the error is
    logged, kept as `last_error`, and the backup is tried again after the next `every` batches (L1, L2). Batches that
    are committed while a backup runs count for the next one; so do those since the newest backup of an earlier run.
    A query that is started again in the same place, with another id, is followed from then on.

    The thread ends with the process, whatever it is doing: call `close`, or use the listener as a context manager,
    where the last backup is wanted. docs/how-to/spark.md has an example.

    Attributes:
        backups: How many were made.
        last_backup: What the newest one made, or found there already; None before the first.
        last_error: What the newest one failed with; None if it did not fail.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        repository: str | BlobStore,
        choice: BackupChoice | None = None,
        *,
        every: int = 1,
        at_end: bool = True,
        transfer: TransferSettings | None = None,
        repository_settings: StoreSettings | None = None,
    ) -> None:
        """Start the thread; nothing is opened before the first event of a query.

        Args:
            checkpoint: The query's `checkpointLocation`: a path, or a URL as `open_store` takes it.
            repository: A URL, or an open store, which is closed with the listener.
            every: Minimum number of batches that are committed between two backups.
            at_end: Whether a last backup is made when the query ends, with an error or without.
            repository_settings: How the repository's store is asked, if `repository` is a URL.

        Raises:
            UsageError: `every` is less than 1.
        """
        if every < 1:
            raise UsageError(f"every {every} batches", operation="listen", hint="use 1 or more")
        self._checkpoint = checkpoint
        self._choice = choice or BackupChoice()
        self._store = repository
        self._repository_settings = repository_settings
        self._transfer = transfer
        self._every = every
        self._at_end = at_end

        # What is not judged yet, by query: whose it is could not be found out, or not how old the newest backup is.
        self._unjudged: dict[str, _Event] = {}
        self._query_id = ""
        # Queries that have their checkpoints elsewhere, until they are started again.
        self._others: set[str] = set()
        self._repository: Repository | None = None
        # The newest batch of an event; and the batch of the last backup by any writer, -1 if there is none.
        self._newest = -1
        self._backed_up: int | None = None
        self._is_due = False

        self._changed = threading.Condition()
        self._unhandled_count = 0
        self._closed = False
        self.backups = 0
        self.last_backup: CheckpointBackupResult | None = None
        self.last_error: Exception | None = None

        self._notes: asyncio.Queue[_Event | None] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tidemark-backup", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None, *, batch: int | None = None) -> bool:
        """Wait until all events so far are handled.

        Spark reports a batch a moment after its commit: to wait for the backup of a batch, name it.

        Args:
            timeout_s: For so long at the most; None: for ever.
            batch: Wait for a backup of this batch or a later one too, unless the newest backup has failed, or the
                listener is closed: then none may ever come.

        Returns:
            Whether it came to that in time. If not, `last_error` may say why.
        """

        def is_handled() -> bool:
            return not self._unhandled_count

        def has_batch() -> bool:
            last = self.last_backup
            if batch is None or last is None:
                return batch is None
            return last.backup.query_id == self._query_id and last.backup.batch >= batch

        def is_over() -> bool:
            return is_handled() and (has_batch() or self.last_error is not None or self._closed)

        with self._changed:
            self._changed.wait_for(is_over, timeout_s)
            return is_handled() and has_batch()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop listening; events so far are still handled.

        Returns:
            Whether all of it is done in that time, None: for ever. If not, the thread goes on.
        """
        with self._changed:
            self._put(None)
            self._closed = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def onQueryStarted(self, event: listener.QueryStartedEvent) -> None:
        """Note that a query may have another checkpoint from now on. The query's start waits for this call."""
        self._put(_Event(query_id=str(event.id), has_started=True))

    @override
    def onQueryProgress(self, event: listener.QueryProgressEvent) -> None:
        self._put(_Event(query_id=str(event.progress.id), batch=event.progress.batchId))

    @override
    def onQueryTerminated(self, event: listener.QueryTerminatedEvent) -> None:
        self._put(_Event(query_id=str(event.id), has_ended=True))

    def _put(self, event: _Event | None) -> None:
        """Leave a note for the thread; None: the last one."""
        with self._changed:
            if not self._closed:
                self._unhandled_count += 1
                self._loop.call_soon_threadsafe(self._notes.put_nowait, event)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        is_open = True
        try:
            while is_open:
                notes = [await self._notes.get()]
                while not self._notes.empty():
                    notes.append(self._notes.get_nowait())
                is_open = None not in notes
                for note in notes:
                    if note is not None:
                        # Taken out first, so that the newest comes last.
                        earlier = self._unjudged.pop(note.query_id, note)
                        self._unjudged[note.query_id] = note.after(earlier)
                await self._see_to_notes()
                # Who waits looks at what became of them only now.
                with self._changed:
                    self._unhandled_count -= len(notes)
                    self._changed.notify_all()
        finally:
            if self._repository is not None:
                await self._repository.close()
            elif not isinstance(self._store, str):
                await self._store.close()

    async def _see_to_notes(self) -> None:
        """Back up if the notes make it due: once, however many there are."""
        try:
            await self._judge()
            if not self._is_due:
                return
            self._is_due = False
            # Whatever becomes of it: the next one is tried after as many batches again.
            self._backed_up = self._newest
            made = await backup_checkpoint(await self._opened(), self._checkpoint, self._choice)
        except Exception as error:  # noqa: BLE001  (L2: kept and logged, never raised into Spark)
            _LOG.exception("%s was not backed up; the query itself is not affected", self._checkpoint)
            self.last_error = error
        else:
            self._backed_up = made.backup.batch
            self.backups += made.is_new
            self.last_backup, self.last_error = made, None

    async def _judge(self) -> None:
        while self._unjudged:
            event = next(iter(self._unjudged.values()))
            if await self._is_of_query(event):
                batch = event.batch
                if self._backed_up is None:
                    self._backed_up = await self._newest_backup()
                if batch is not None and (batch < self._newest or (self._newest < 0 and batch < self._backed_up)):
                    # The query was taken back, and goes on from there.
                    self._backed_up = batch - 1
                self._newest = self._newest if batch is None else batch
                self._is_due |= self._newest - self._backed_up >= self._every or (event.has_ended and self._at_end)
            # Only now: what went wrong before is tried again with the next note.
            del self._unjudged[event.query_id]

    async def _is_of_query(self, event: _Event) -> bool:
        """Return whether the checkpoint is of this query (L3): by now, if another one was before."""
        if event.has_started:
            self._others.discard(event.query_id)
        if event.query_id != self._query_id and event.query_id not in self._others:
            try:
                async with opened_checkpoint(self._checkpoint, self._choice.checkpoint_settings) as directory:
                    found = await StreamingCheckpoint(directory).query_id()
            except NotFoundError:
                # Another query was first.
                return False
            if found != self._query_id:
                self._query_id, self._newest, self._backed_up = found, -1, None
            if found != event.query_id:
                self._others.add(event.query_id)
        return event.query_id == self._query_id

    async def _newest_backup(self) -> int:
        """Return the batch of the newest backup of the query, by any writer; -1 if there is none."""
        repository = await self._opened()
        newest = await repository.latest(Scope(self._choice.job or f"spark-{self._query_id}"))
        backup = None if newest is None else decode_checkpoint_backup(newest.record.offsets)
        return backup.batch if backup is not None and backup.query_id == self._query_id else -1

    async def _opened(self) -> Repository:
        if isinstance(self._store, str):
            self._store = open_store(self._store, self._repository_settings)
        if self._repository is None:
            self._repository = await Repository.open(self._store, settings=self._transfer)
        return self._repository
