"""Functions that keep a core busy, in other processes where there is enough for them to do.

A process begins with an import of what it runs, which takes half a second. It ends with the one that began it, however
that ends, and leaves an interrupt to it.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

import msgspec

from blobstore.concurrency import run_blocking, shielded
from blobstore.errors import StoreError
from engine.errors import EngineError
from engine.settings import MIB
from index.errors import FormatError

P = ParamSpec("P")
R = TypeVar("R")

# What two processes need less time for than one, with their beginning.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    async def run(self, size_bytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, in a process if this size is worth it, in a thread if not; to its end, as `run_blocking`."""
        if self._at_once < 2 or size_bytes < WORTH_BYTES:  # noqa: PLR2004
            return await run_blocking(function, *args, **kwargs)
        if self._pool is None:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._at_once, multiprocessing.get_context("spawn"), initializer=_begin
            )
        # Processes that begin now take over which signals are blocked: an interrupt is for this one to answer.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            call = self._pool.submit(_call, function, args, kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        waiting = asyncio.wrap_future(call)
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError:
            if not call.cancel():  # it has begun
                with contextlib.suppress(Exception):
                    await shielded(waiting)
            raise
        found = waiting.result()
        if isinstance(found, _Refused):
            error = found.kind.__new__(found.kind, *found.args)
            vars(error).update(found.attributes)
            raise error
        result: R = found
        return result


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
    except (EngineError, StoreError, FormatError) as error:
        return _Refused(type(error), error.args, vars(error))
