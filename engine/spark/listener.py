"""Backs a streaming query up while it runs: a picture after every n-th batch, in a thread of its own (0005, L1)."""

import asyncio
import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.opening import StoreSettings, open_store
from engine.checkpoint.backup import CheckpointBackup, backup_checkpoint
from engine.errors import NotFoundError, UsageError
from engine.repository import Repository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.streaming_checkpoint import StreamingCheckpoint
from engine.transfer_settings import TransferSettings

STORES_AT_ONCE: Final = 8

_LOG: Final = logging.getLogger(__name__)


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What Spark told of a query; without a batch, that it ended."""

    query_id: str
    batch: int | None = None


class BackupListener(StreamingQueryListener):
    """Takes a picture of one query's checkpoint after every `every` committed batches, beside the query.

    Spark's calls only leave a note, so the query never waits, and nothing that fails here reaches it: the error is
    logged, kept as `last_error`, and the backup is tried again after the next `every` batches (L1, L2). Batches that
    are committed while a backup runs count for the next one.

    The thread ends with the process, whatever it is doing: call `close`, or use the listener as a context manager,
    where the last picture is wanted.

    Example:
        ```python
        with BackupListener("/checkpoints/flights", "s3://backups/state", every=10) as listener:
            spark.streams.addListener(listener)
            query = rows.writeStream.option("checkpointLocation", "/checkpoints/flights").start()
            query.awaitTermination()
        ```
    """

    def __init__(
        self,
        checkpoint: str | Path,
        repository: str | BlobStore,
        *,
        job: str | None = None,
        every: int = 1,
        at_end: bool = True,
        stores_at_once: int = STORES_AT_ONCE,
        transfer: TransferSettings | None = None,
        repository_settings: StoreSettings | None = None,
        checkpoint_settings: StoreSettings | None = None,
    ) -> None:
        """Start the thread; nothing is opened before the first backup.

        Args:
            checkpoint: The query's `checkpointLocation`: a path, or a URL as `open_store` takes it.
            repository: A URL, or an open store, which is closed with the listener.
            job: As for `backup_checkpoint`.
            every: So many batches are committed between two pictures, at least.
            at_end: Whether a last picture is taken when the query ends, with an error or without.
            stores_at_once: As for `backup_checkpoint`.
            transfer: How bytes are moved.
            repository_settings: How the repository's store is asked, if `repository` is a URL.
            checkpoint_settings: How the checkpoint's store is asked.

        Raises:
            UsageError: `every` is less than 1.
        """
        if every < 1:
            raise UsageError(f"every {every} batches", operation="listen", hint="use 1 or more")
        self._checkpoint = checkpoint
        self._checkpoint_settings = checkpoint_settings
        self._store = repository
        self._repository_settings = repository_settings
        self._transfer = transfer
        self._job = job
        self._every = every
        self._at_end = at_end
        self._stores_at_once = stores_at_once

        self._query_id: str | None = None
        self._repository: Repository | None = None
        # Batches that were committed since the last backup began, and the newest of them.
        self._count = 0
        self._newest: int | None = None

        self._changed = threading.Condition()
        self._told_count = 0
        self._handled_count = 0
        self._closed = False
        self._backups = 0
        self._last_backup: CheckpointBackup | None = None
        self._last_error: Exception | None = None

        self._notes: asyncio.Queue[_Told | None] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tidemark-backup", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what happened

    @property
    def backups(self) -> int:
        """How many pictures were taken."""
        with self._changed:
            return self._backups

    @property
    def last_backup(self) -> CheckpointBackup | None:
        """What the newest backup made, or found there already; None before the first."""
        with self._changed:
            return self._last_backup

    @property
    def last_error(self) -> Exception | None:
        """What the newest backup failed with; None if it did not fail."""
        with self._changed:
            return self._last_error

    def wait(self, timeout_s: float | None = None, *, batch: int | None = None) -> bool:
        """Wait until nothing is under way of all that Spark has told so far.

        Spark tells of a batch a moment after it is committed: whoever wants the picture of a batch names it.

        Args:
            timeout_s: For so long at the most; None: for ever.
            batch: Wait for a picture of this batch or a later one too.

        Returns:
            Whether it came to that in time.
        """

        def is_done() -> bool:
            last = self._last_backup
            has_batch = batch is None or (last is not None and last.picture.batch >= batch)
            return has_batch and self._handled_count == self._told_count

        with self._changed:
            return self._changed.wait_for(is_done, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Listen no more; what Spark has told so far is still seen to.

        Args:
            timeout_s: Wait for so long at the most; None: for ever.

        Returns:
            Whether all of it is done. If not, the thread goes on.
        """
        with self._changed:
            if not self._closed:
                self._closed = True
                self._told_count += 1
                self._loop.call_soon_threadsafe(self._notes.put_nowait, None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        """The listener itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # ------------------------------------------------------------------ what Spark calls

    @override
    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is committed yet. The query's start waits for this call."""

    @override
    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Note that a batch is committed."""
        self._tell(_Told(query_id=str(event.progress.id), batch=event.progress.batchId))

    @override
    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Note that the query ended."""
        self._tell(_Told(query_id=str(event.id)))

    def _tell(self, told: _Told) -> None:
        with self._changed:
            if not self._closed:
                self._told_count += 1
                self._loop.call_soon_threadsafe(self._notes.put_nowait, told)

    # ------------------------------------------------------------------ the thread

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
                await self._see_to([note for note in notes if note is not None])
                self._note(handled=len(notes))
        finally:
            if self._repository is not None:
                await self._repository.close()
            elif not isinstance(self._store, str):
                await self._store.close()

    async def _see_to(self, told: list[_Told]) -> None:
        """Back up if the notes make it due: once, however many there are."""
        try:
            if not await self._is_due(told):
                return
            self._count = 0
            made = await self._back_up()
        except Exception as error:  # noqa: BLE001  (L2: kept and logged, never raised into Spark)
            _LOG.exception("no picture of %s was taken; the query is not concerned", self._checkpoint)
            self._note(error=error)
        else:
            self._note(made=made)

    async def _is_due(self, told: list[_Told]) -> bool:
        has_ended = False
        for note in told:
            if not await self._is_of_query(note.query_id):
                continue
            if note.batch is None:
                has_ended = True
            elif note.batch != self._newest:
                # Spark tells of a trigger that found nothing under the number of the batch before.
                self._newest = note.batch
                self._count += 1
        return self._count >= self._every or (has_ended and self._at_end)

    async def _is_of_query(self, query_id: str) -> bool:
        """Whether a query is the one whose checkpoint this is (L3)."""
        if self._query_id is None:
            directory = await CheckpointDir.open(self._checkpoint, settings=self._checkpoint_settings)
            checkpoint = StreamingCheckpoint(directory)
            try:
                self._query_id = await checkpoint.query_id()
            except NotFoundError:
                # Another query was first.
                return False
            finally:
                await checkpoint.close()
        return query_id == self._query_id

    async def _back_up(self) -> CheckpointBackup:
        if self._repository is None:
            store = open_store(self._store, self._repository_settings) if isinstance(self._store, str) else self._store
            try:
                self._repository = await Repository.open(store, settings=self._transfer)
            except BaseException:
                if isinstance(self._store, str):
                    await store.close()
                raise
        return await backup_checkpoint(
            self._repository,
            self._checkpoint,
            job=self._job,
            stores_at_once=self._stores_at_once,
            store_settings=self._checkpoint_settings,
        )

    def _note(self, *, handled: int = 0, made: CheckpointBackup | None = None, error: Exception | None = None) -> None:
        with self._changed:
            self._handled_count += handled
            if made is not None:
                self._backups += made.is_new
                self._last_backup, self._last_error = made, None
            if error is not None:
                self._last_error = error
            self._changed.notify_all()
