"""Functions that keep a core busy, in several processes where there is enough for them to do.

This process is one of them: another one begins with an import of what it runs, which takes half a second. It ends with
the one that began it, however that ends, and leaves an interrupt to it.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from blobstore.concurrency import run_blocking, shielded
from engine.settings import MIB
from tidemark.errors import TidemarkError

P = ParamSpec("P")
R = TypeVar("R")

# With so much to read another process is worth its beginning.
WORTH_BYTES: Final = 128 * MIB


class Processes(contextlib.ExitStack):
    """Processes that are begun once there is something to do.

    What they are given has to be picklable. A program that begins them has to guard what it does by
    `if __name__ == "__main__"`, as each of them imports it.
    """

    def __init__(self, at_once: int = 1) -> None:
        super().__init__()
        self._at_once = at_once
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        # Turns at the cores: the first one is this process's own, and the only one while little is waiting.
        self._turns = asyncio.PriorityQueue[int]()
        self._turns.put_nowait(0)
        self._waiting_bytes = 0

    async def run(self, size_bytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function to its end, as `run_blocking`, once it has its turn; its size is of what it will read."""
        self._waiting_bytes += size_bytes
        if self._pool is None and self._at_once > 1 and self._waiting_bytes >= WORTH_BYTES:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._at_once - 1, multiprocessing.get_context("spawn"), initializer=_begin
            )
            self.callback(self._pool.shutdown, cancel_futures=True)
            for turn in range(1, self._at_once):
                self._turns.put_nowait(turn)
        try:
            turn = await self._turns.get()
        finally:
            self._waiting_bytes -= size_bytes
        try:
            if turn == 0 or self._pool is None:
                return await run_blocking(function, *args, **kwargs)
            # Processes that begin now take over which signals are blocked: an interrupt is for this one to answer.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                called = self._pool.submit(function, *args, **kwargs)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            try:
                return await shielded(asyncio.wrap_future(called))
            except TidemarkError as error:
                raise error from None  # its cause is the text of a traceback over there
        finally:
            self._turns.put_nowait(turn)


def _begin() -> None:
    """End this process when the one that began it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  (this is a child)

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
