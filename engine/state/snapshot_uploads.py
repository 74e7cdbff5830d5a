"""Snapshots of commits on their way to the store while the query goes on (design 0004, C7).

One upload is under way at most, and one snapshot waits at most: a newer one takes the place of an older one that has
not begun, so that a slow store makes snapshots rarer, not commits slower.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from engine.state.file_metrics import SnapshotUploaded
from engine.state.upload import CapturedSnapshot

# One under way and one that waits.
_AT_ONCE: Final = 2


class SnapshotUploads:
    """The queue of one state store. Every method is called in the event loop that the first one was called in.

    Args:
        upload: Uploads one snapshot.
        drop: Forgets a snapshot that is given up, and removes what this machine keeps of it.
        free: Removes what this machine keeps of a snapshot whose upload has ended.
        tell: Called when one is uploaded.
        in_background: Whether an upload begins when it is offered; else `settle` begins it.

    Attributes:
        is_due_again: Whether an upload failed, and nothing newer was offered since.
        failures_count: Of all uploads.
    """

    def __init__(
        self,
        upload: Callable[[CapturedSnapshot], Awaitable[SnapshotUploaded]],
        drop: Callable[[CapturedSnapshot], Awaitable[None]],
        free: Callable[[CapturedSnapshot], Awaitable[None]],
        tell: Callable[[CapturedSnapshot, SnapshotUploaded], None],
        *,
        in_background: bool,
    ) -> None:
        self._upload = upload
        self._drop = drop
        self._free = free
        self._tell = tell
        self._in_background = in_background
        self._waiting: CapturedSnapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: tuple[CapturedSnapshot, Exception] | None = None
        self.is_due_again = False
        self.failures_count = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return self._waiting is None and (self._task is None or self._task.done())

    async def offer(self, captured: CapturedSnapshot) -> None:
        """Take over a snapshot; one that waits is given up for it."""
        replaced, self._waiting = self._waiting, captured
        self.is_due_again = False
        if self._in_background:
            self._begin()
        if replaced is not None:
            await self._drop(replaced)

    async def give_up(self, is_void: Callable[[CapturedSnapshot], bool]) -> None:
        """Give up the snapshot that waits, if the caller knows that it must not be seen any more."""
        waiting = self._waiting
        if waiting is not None and is_void(waiting):
            self._waiting = None
            await self._drop(waiting)

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
                await self.give_up(lambda _: True)
            await self.settle()
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            raise

    def _begin(self) -> None:
        if self._waiting is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(self._waiting), name="tidemark snapshot upload")
            self._waiting = None

    async def _run(self, captured: CapturedSnapshot) -> None:
        try:
            uploaded = await self._upload(captured)
        except Exception as error:  # noqa: BLE001  (kept, and raised by whoever asks next)
            self._failure = (captured, error)
            self.failures_count += 1
            # A newer one that waits needs no further commit.
            self.is_due_again = self._waiting is None
        else:
            self._failure = None
            self._tell(captured, uploaded)
        finally:
            await self._free(captured)
        self._task = None
        if self._in_background:
            self._begin()
