"""Makes a version durable: its changelog, now and then a snapshot, and the uploads of both.

Snapshots are uploaded while the query goes on (design 0004, C7). One upload is under way at most, and one snapshot
waits at most: a newer one takes the place of an older one that has not begun, so that a slow store makes snapshots
rarer, not commits slower.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from blobstore.concurrency import run_blocking
from engine.errors import EngineError, SnapshotUploadError
from engine.rocksdb.store import RocksDbSettings
from engine.runtime import Runtime, Stopwatch
from engine.state.files import CapturedSnapshot, Deleted, SnapshotUploaded, StateFileManager
from engine.state.loaded import LoadedState, RowChecks
from engine.state.local_files import WorkingDir, remove_tree
from index.snapshot.model import UniqueId
from index.spark.names import StateVersion

_LOG: Final = logging.getLogger(__name__)


class SaveMetrics(SnapshotUploaded, frozen=True, kw_only=True):
    """Metrics of one `commit`, and of the last snapshot that was uploaded, which may be of an older one.

    Beside some is Spark's name in the query's progress.
    """

    # What was committed; None before the first commit.
    of: StateVersion | None = None
    # The changelog: records and stored bytes.
    records: int = 0
    changelog_bytes: int = 0
    # Whether a snapshot was made; whether it was uploaded before the commit returned.
    snapshot_made: bool = False
    snapshot_inline: bool = False
    # Seconds of the whole (Spark: rocksdbCommitFileSyncLatencyMs for what goes to the store), and of its phases.
    total_s: float = 0.0
    # Spark: rocksdbChangeLogWriterCommitLatencyMs.
    changelog_s: float = 0.0
    # Of the snapshot on this machine. Spark: rocksdbCommitFlushLatency, rocksdbCommitCompactLatency and
    # rocksdbCommitCheckpointLatency; here a rocksdb_checkpoint flushes what is left to flush itself.
    flush_s: float = 0.0
    compact_s: float = 0.0
    checkpoint_s: float = 0.0
    # The last snapshot that was uploaded. Spark: the snapshotLastUploaded metric of each partition.
    uploaded: StateVersion | None = None
    # Uploads that failed since the store was opened.
    uploads_failed: int = 0


class SnapshotUploads:
    """The queue of one state store. Its tasks belong to the event loop that is running when one begins.

    In the background an upload begins when it is offered; else `settle` begins it. `rebase` is called with each version
    whose snapshot has arrived.
    """

    def __init__(
        self, manager: StateFileManager, rocksdb: RocksDbSettings, rebase: Callable[[StateVersion], None]
    ) -> None:
        self._manager = manager
        self._settings = manager.settings
        self._rocksdb = rocksdb
        self._rebase = rebase
        self._waiting: CapturedSnapshot | None = None
        self._running: CapturedSnapshot | None = None
        # The running one, if its failure does not count any more.
        self._unwanted: CapturedSnapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: tuple[CapturedSnapshot, Exception] | None = None
        self._uploaded: StateVersion | None = None
        # Whether an upload failed, and nothing newer was offered or uploaded since.
        self.is_due_again = False
        self.failures_count = 0
        self.last: tuple[StateVersion, SnapshotUploaded] | None = None
        # Versions without ids whose zip may be there, as this process has put it there or tried to.
        self.zips_begun: set[StateVersion] = set()

    async def upload(self, captured: CapturedSnapshot) -> None:
        """Upload a snapshot, and note that it is there."""
        if captured.of.unique_id is None:
            self.zips_begun.add(captured.of)
        if self._settings.row_checksums:
            try:
                await run_blocking(RowChecks(self._settings).check_snapshot, captured.directory, self._rocksdb)
            except BaseException:
                self._manager.known.discard(captured.upload_id)
                raise
        uploaded = await self._manager.upload_snapshot(captured)
        self._uploaded = captured.of
        self.last = captured.of, uploaded
        _LOG.info("%s: uploaded the snapshot of version %s: %s", self._manager.files.location, captured.of, uploaded)
        self._rebase(captured.of)

    async def drop(self, captured: CapturedSnapshot) -> None:
        self._manager.known.discard(captured.upload_id)
        await self.free(captured)

    async def free(self, captured: CapturedSnapshot) -> None:
        """Remove the files on this machine of a snapshot whose upload has ended, or has been given up."""
        # What cannot be removed now is removed when the store is closed, which says so if it cannot be then either.
        with suppress(OSError):
            await run_blocking(remove_tree, captured.directory)

    async def offer(self, captured: CapturedSnapshot) -> None:
        """Queue a snapshot in place of one that waits."""
        replaced, self._waiting = self._waiting, captured
        self.is_due_again = False
        if self._settings.background_uploads:
            self._begin()
        if replaced is not None:
            await self.drop(replaced)

    async def supersede(self) -> None:
        """Give up what was offered: a newer snapshot has arrived by another way."""
        self._failure = None
        self.is_due_again = False
        self._unwanted = self._running
        await self._give_up()

    async def revoke(self, is_void: Callable[[CapturedSnapshot], bool]) -> None:
        """Give up snapshots that must not be seen any more.

        One that is under way is stopped, and waited for. If it was too late to stop it, it is there.
        """
        await self._give_up(is_void)
        running, task = self._running, self._task
        if running is not None and task is not None and is_void(running):
            self._unwanted = running
            task.cancel()
            await asyncio.wait({task})

    async def wait(self) -> None:
        """Wait for the upload under way, and for what begins by itself when that ends."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def settle(self) -> None:
        """Wait for the upload under way and for what waits; not for what is offered meanwhile, which may never end.

        Uploads go on if the caller is cancelled.
        """
        for _ in range(2):  # one under way and one that waits
            self._begin()
            if self._task is None or self._task.done():
                return
            await asyncio.wait({self._task})

    def take_uploaded(self) -> StateVersion | None:
        """Return, once, the last snapshot that was uploaded."""
        uploaded, self._uploaded = self._uploaded, None
        return uploaded

    def raise_failure(self, operation: str) -> None:
        """Raise, once, the last failure that no later upload made good, as a `SnapshotUploadError`."""
        failure, self._failure = self._failure, None
        if failure is not None:
            reason, subject = f"the snapshot was not uploaded: {failure[1]}", f"version {failure[0].of}"
            raise SnapshotUploadError(reason, operation=operation, subject=subject) from failure[1]

    async def close(self) -> None:
        """Upload the rest, or give up what has not begun by itself. Cancelled, it stops the upload under way."""
        try:
            if not self._settings.background_uploads:
                await self._give_up()
            await self.settle()
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            raise

    async def _give_up(self, is_void: Callable[[CapturedSnapshot], bool] = lambda _: True) -> None:
        waiting = self._waiting
        if waiting is not None and is_void(waiting):
            self._waiting = None
            await self.drop(waiting)

    def _begin(self) -> None:
        if self._waiting is not None and (self._task is None or self._task.done()):
            captured, self._waiting = self._waiting, None
            self._running = captured
            self._task = asyncio.create_task(self._run(captured), name="tidemark snapshot upload")
            self._task.add_done_callback(partial(self._note_end, captured))

    async def _run(self, captured: CapturedSnapshot) -> None:
        try:
            await self.upload(captured)
        except Exception as error:  # noqa: BLE001  (kept, and raised by the next call that asks)
            self._note_failure(captured, error)
        else:
            self._failure = None
        finally:
            await self.free(captured)
        self._running = self._task = None
        if self._settings.background_uploads:
            self._begin()

    def _note_end(self, captured: CapturedSnapshot, task: asyncio.Task[None]) -> None:
        # A task may be cancelled before it has taken a step, as when its loop ends: `_run` does not see it.
        if task.cancelled():
            self._manager.known.discard(captured.upload_id)
            hint = "keep one event loop running for as long as the state store is open"
            self._note_failure(captured, EngineError("was cancelled", operation="upload snapshot", hint=hint))
            if self._running is captured:
                self._running = None

    def _note_failure(self, captured: CapturedSnapshot, error: Exception) -> None:
        if captured is self._unwanted:
            return
        self._failure = (captured, error)
        _LOG.warning("%s: snapshot %s was not uploaded: %s", self._manager.files.location, captured.of, error)
        self.failures_count += 1
        # A newer one that waits needs no further commit.
        self.is_due_again = self._waiting is None


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a commit, which a task of Spark's reports to the driver, and the commit log keeps."""

    version: int
    # None with format 1.
    unique_id: UniqueId | None
    # Of the version that it was built on; None with format 1, and for the first version of a store.
    base_unique_id: UniqueId | None
    # Without those of internal column families; -1: not counted.
    num_keys: int
    # Whether this version gets a snapshot; it may still be on its way.
    snapshot_made: bool


class Maintained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `maintain`."""

    # The newest snapshot that is in the store and was uploaded since the last `maintain`; None: there was none.
    uploaded: StateVersion | None
    deleted: Deleted
    # Nothing was deleted because nothing has been loaded to be written on yet, nor committed, and it is not known which
    # version has to stay (design 0004, G4).
    deletion_waits: bool = False


class StateCommits:
    """The commits of one store and the uploads that they leave behind."""

    def __init__(
        self,
        manager: StateFileManager,
        place: WorkingDir,
        runtime: Runtime,
        *,
        rocksdb: RocksDbSettings,
        rebase: Callable[[StateVersion], None],
    ) -> None:
        self._manager = manager
        self._place = place
        self._runtime = runtime
        self._last_save = SaveMetrics()
        self.uploads = SnapshotUploads(manager, rocksdb, rebase)

    @property
    def last_save(self) -> SaveMetrics:
        saved = msgspec.structs.replace(self._last_save, uploads_failed=self.uploads.failures_count)
        if self.uploads.last is None:
            return saved
        of, uploaded = self.uploads.last
        return msgspec.structs.replace(saved, uploaded=of, **msgspec.structs.asdict(uploaded))

    async def commit(self, loaded: LoadedState, *, force: bool) -> Committed:
        """Publish the changes as the next version, and note in `loaded` that it is the loaded one (design 0004, C3).

        After an error `loaded` is of no version.
        """
        timer = Stopwatch(self._runtime)
        of = StateVersion(loaded.target.version + 1, loaded.next_id)
        writer = loaded.writer
        # Waited for: without changelogs it is the commit itself, and what no changelog can hold must not be lost. Nor
        # may the zip of an attempt that failed count for this one.
        inline = force or writer is None or loaded.needs_snapshot or loaded.is_lineage_cut
        inline = inline or of in self.uploads.zips_begun
        if of.unique_id is None and not inline:
            # Nor that of a history that was left: no changelog is looked at where a snapshot of the version is (C4).
            inline = await self._manager.has_snapshot(of)
        overdue = of.version - loaded.snapshot_version >= self._manager.settings.deltas_per_snapshot
        captured: CapturedSnapshot | None = None
        changelog_bytes = 0
        try:
            if inline or overdue or self.uploads.is_due_again:
                captured = await self._capture(loaded, of, timer)
            if captured is not None and inline:
                if of.unique_id is None:
                    # One that began earlier must not end later: only their names differ.
                    await self.uploads.wait()
                # Before the changelog: a failure leaves no commit, and Spark never looks beyond a version's zip.
                await self.uploads.upload(captured)
            if writer is not None:
                with timer.phase("changelog_s"):
                    await run_blocking(writer.finish)
                    changelog_bytes = await self._manager.publish_changelog(of, writer.path)
                    with suppress(OSError):
                        # The version is there; what cannot be removed now is removed when the store is closed.
                        await run_blocking(writer.path.unlink, missing_ok=True)
        except BaseException:
            if captured is not None:
                await self.uploads.drop(captured)
            raise
        base_unique_id = loaded.target.unique_id
        loaded.advance(of, snapshot_is_uploaded=inline)
        if captured is not None:
            loaded.snapshot_version = of.version
            if inline:
                await self.uploads.supersede()
                await self.uploads.free(captured)
            else:
                await self.uploads.offer(captured)
        location, made = self._manager.files.location, captured is not None
        _LOG.info("%s: committed version %s: %d bytes of changelog; snapshot: %s", location, of, changelog_bytes, made)
        self._last_save = SaveMetrics(
            of=of,
            records=0 if writer is None else writer.records,
            changelog_bytes=changelog_bytes,
            snapshot_made=made,
            snapshot_inline=inline,
            total_s=timer.total_s(),
            **timer.phases_s,
        )
        return Committed(
            version=of.version,
            unique_id=of.unique_id,
            base_unique_id=base_unique_id if of.unique_id is not None else None,
            num_keys=loaded.counts.keys,
            snapshot_made=made,
        )

    async def _capture(self, loaded: LoadedState, of: StateVersion, timer: Stopwatch) -> CapturedSnapshot:
        """Capture what is there now, so that nothing that follows can change it (design 0004, S3), and time it."""
        directory = self._place.new_captured()
        metadata = loaded.metadata
        made: list[CapturedSnapshot] = []

        def capture() -> None:
            with timer.phase("flush_s"):
                loaded.write_operands()
                loaded.db.flush()
            with timer.phase("compact_s"):
                if self._manager.settings.compact_on_commit:
                    loaded.db.compact()
            with timer.phase("checkpoint_s"):
                loaded.db.checkpoint(directory)
                made.append(self._manager.capture(directory, of, metadata))

        try:
            await run_blocking(capture)
        except BaseException:
            # The thread may have come to its end although this was cancelled.
            for captured in made:
                self._manager.known.discard(captured.upload_id)
            await run_blocking(remove_tree, directory)
            raise
        return made[0]
