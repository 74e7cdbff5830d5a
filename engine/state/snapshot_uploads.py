"""Snapshots of commits on their way to the store while the query goes on (design 0004, C7).

One upload is under way at most, and one snapshot waits at most: a newer one takes the place of an older one that has
not begun, so that a slow store makes snapshots rarer, not commits slower.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from engine.errors import EngineError
from engine.state.file_metrics import SnapshotUploaded
from engine.state.upload import CapturedSnapshot

# One under way and one that waits.
_AT_ONCE: Final = 2


class SnapshotUploads:
    """The queue of one state store. Its tasks are those of the event loop that is running when one begins.

    Args:
        upload: Uploads one snapshot.
        forget: Forgets what a snapshot that is not uploaded was to put there.
        free: Removes what this machine keeps of a snapshot whose upload has ended, or has been given up.
        tell: Called when one is uploaded.
        in_background: Whether an upload begins when it is offered; else `settle` begins it.

    Attributes:
        is_due_again: Whether an upload failed, and nothing newer was offered or uploaded since.
        failures_count: Of all uploads.
    """

    def __init__(
        self,
        upload: Callable[[CapturedSnapshot], Awaitable[SnapshotUploaded]],
        forget: Callable[[CapturedSnapshot], None],
        free: Callable[[CapturedSnapshot], Awaitable[None]],
        tell: Callable[[CapturedSnapshot, SnapshotUploaded], None],
        *,
        in_background: bool,
    ) -> None:
        self._upload = upload
        self._forget = forget
        self._free = free
        self._tell = tell
        self._in_background = in_background
        self._waiting: CapturedSnapshot | None = None
        self._running: CapturedSnapshot | None = None
        # Of what is running, if nobody cares any more what becomes of it.
        self._unwanted: CapturedSnapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: tuple[CapturedSnapshot, Exception] | None = None
        self.is_due_again = False
        self.failures_count = 0

    async def offer(self, captured: CapturedSnapshot) -> None:
        """Take over a snapshot; one that waits is given up for it."""
        replaced, self._waiting = self._waiting, captured
        self.is_due_again = False
        if self._in_background:
            self._begin()
        if replaced is not None:
            await self._drop(replaced)

    async def supersede(self) -> None:
        """A newer snapshot than all that were offered has arrived by another way: they have become useless."""
        self._failure = None
        self.is_due_again = False
        self._unwanted = self._running
        await self._give_up(lambda _: True)

    async def revoke(self, is_void: Callable[[CapturedSnapshot], bool]) -> None:
        """Give up snapshots of which the caller knows that they must not be seen any more.

        One that is under way is stopped, and waited for. If it was too late to stop it, it is there.
        """
        await self._give_up(is_void)
        running, task = self._running, self._task
        if running is not None and task is not None and is_void(running):
            self._unwanted = running
            task.cancel()
            await asyncio.wait({task})

    async def wait(self) -> None:
        """Wait for what is under way, and for what begins by itself when that ends."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def settle(self) -> None:
        """Wait for what is under way and for what waits; not for what is offered meanwhile, which may never end.

        Uploads go on if the caller is cancelled.
        """
        for _ in range(_AT_ONCE):
            self._begin()
            if self._task is None or self._task.done():
                return
            await asyncio.wait({self._task})

    def take_failure(self) -> tuple[CapturedSnapshot, Exception] | None:
        """The last failure that nobody was told of yet and that no later upload made good."""
        failure, self._failure = self._failure, None
        return failure

    async def close(self, *, finish: bool) -> None:
        """End it: upload what is there, or give up what has not begun. Cancelled, it stops the upload under way."""
        try:
            if not finish:
                await self._give_up(lambda _: True)
            await self.settle()
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            raise

    async def _give_up(self, is_void: Callable[[CapturedSnapshot], bool]) -> None:
        waiting = self._waiting
        if waiting is not None and is_void(waiting):
            self._waiting = None
            await self._drop(waiting)

    async def _drop(self, captured: CapturedSnapshot) -> None:
        self._forget(captured)
        await self._free(captured)

    def _begin(self) -> None:
        if self._waiting is not None and (self._task is None or self._task.done()):
            captured, self._waiting = self._waiting, None
            self._running = captured
            self._task = asyncio.create_task(self._run(captured), name="tidemark snapshot upload")
            self._task.add_done_callback(partial(self._note_end, captured))

    async def _run(self, captured: CapturedSnapshot) -> None:
        try:
            uploaded = await self._upload(captured)
        except Exception as error:  # noqa: BLE001  (kept, and raised by whoever asks next)
            self._note_failure(captured, error)
        else:
            self._failure = None
            self._tell(captured, uploaded)
        finally:
            await self._free(captured)
        self._running = self._task = None
        if self._in_background:
            self._begin()

    def _note_end(self, captured: CapturedSnapshot, task: asyncio.Task[None]) -> None:
        """A task may be cancelled before it has taken a step, as when its loop ends: nothing in `_run` would know."""
        if task.cancelled():
            self._forget(captured)
            hint = "keep one event loop running for as long as the state store is open"
            self._note_failure(captured, EngineError("was cancelled", operation="upload snapshot", hint=hint))
            if self._running is captured:
                self._running = None

    def _note_failure(self, captured: CapturedSnapshot, error: Exception) -> None:
        if captured is self._unwanted:
            return
        self._failure = (captured, error)
        self.failures_count += 1
        # A newer one that waits needs no further commit.
        self.is_due_again = self._waiting is None
