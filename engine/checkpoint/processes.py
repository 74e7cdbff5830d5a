"""Functions that keep a core busy, in several processes where there is enough for them to do.

This process is one of them: another one begins with an import of what it runs, which takes half a second. It ends with
the one that began it, however that ends, and leaves an interrupt to it.
"""

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

import msgspec

from blobstore.concurrency import run_blocking, shielded
from engine.settings import MIB
from tidemark.errors import TidemarkError

P = ParamSpec("P")
R = TypeVar("R")

# With so much to read another process is worth its beginning.
WORTH_BYTES: Final = 128 * MIB


class _Refused(msgspec.Struct, frozen=True):
    """An error of ours: its `__init__` takes other arguments than it has, so that pickle cannot make it again."""

    kind: type[Exception]
    args: tuple[Any, ...]
    attributes: dict[str, Any]


class Processes:
    """Processes that are begun once there is something to do.

    What they are given has to be picklable. A program that begins them has to guard what it does by
    `if __name__ == "__main__"`, as each of them imports it.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        # Turns at the cores: the first one is this process's own, and the only one while little is waiting.
        self._turns = asyncio.PriorityQueue[int]()
        self._turns.put_nowait(0)
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    async def run(self, size_bytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function to its end, as `run_blocking`, once it has its turn; its size is of what it will read."""
        self._waiting_bytes += size_bytes
        if self._pool is None and self._at_once > 1 and self._waiting_bytes >= WORTH_BYTES:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._at_once - 1, multiprocessing.get_context("spawn"), initializer=_begin
            )
            for turn in range(1, self._at_once):
                self._turns.put_nowait(turn)
        try:
            turn = await self._turns.get()
        finally:
            self._waiting_bytes -= size_bytes
        try:
            if turn == 0 or self._pool is None:
                return await run_blocking(function, *args, **kwargs)
            found = await shielded(asyncio.wrap_future(_submit(self._pool, function, args, kwargs)))
        finally:
            self._turns.put_nowait(turn)
        if isinstance(found, _Refused):
            error = found.kind.__new__(found.kind, *found.args)
            vars(error).update(found.attributes)
            raise error
        result: R = found
        return result


def _submit(
    pool: concurrent.futures.Executor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> concurrent.futures.Future[Any]:
    # Processes that begin now take over which signals are blocked: an interrupt is for this one to answer.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_call, function, args, kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _begin() -> None:
    """End this process when the one that began it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  (this is a child)

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    try:
        return function(*args, **kwargs)
    except TidemarkError as error:
        return _Refused(type(error), error.args, vars(error))
