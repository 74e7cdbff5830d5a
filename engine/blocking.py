"""Asynchronous objects for callers without an event loop: a loop in a thread, and classes whose methods block."""

import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import MethodType, TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# So long does an interrupted caller wait for what it interrupted to clean up.
CLEANUP_S_MAX: Final = 30
# And what a second interrupt cancels has so long to end.
GIVEN_UP_S_MAX: Final = 1
# Of two signals at once the kernel may give both to another thread, which does not wake this one: it looks by itself.
LOOK_S: Final = 0.5
_CANNOT_RUN: Final = "the event loop of this object has ended, is another process's, or is the caller"


class LoopThread:
    """An event loop of its own in a daemon thread, so that a caller's loop (a notebook has one) is never in the way."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process_id = os.getpid()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="tidemark", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not been stopped."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Wait for a coroutine; an interrupt of the waiting thread cancels it and waits for its end, within a bound.

        Nothing that an interrupt could leave locked is shared with the loop: a `concurrent.futures.Future` is, and an
        interrupt on its way into the lock leaves both threads waiting for ever.

        Raises:
            RuntimeError: Nothing would ever run it: the loop has ended, or another process has it (after a fork), or
                waits for this call.
        """
        # `is_running` is not asked: an interrupt within that marks a thread that lives as ended.
        is_elsewhere = os.getpid() != self._process_id or self._loop.is_closed()
        if is_elsewhere or self._thread is threading.current_thread():
            work.close()
            raise RuntimeError(_CANNOT_RUN)
        begun: list[asyncio.Task[R]] = []
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def begin() -> None:
            task = self._loop.create_task(work)
            begun.append(task)
            task.add_done_callback(lambda _: ended.put(None))

        def cancel() -> None:
            if not begun:
                work.close()
            if not begun or begun[0].done():
                ended.put(None)
            else:
                begun[0].cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
            is_ended = False
            while not is_ended:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=LOOK_S)
                    is_ended = True
        except BaseException as interrupt:
            try:
                self._loop.call_soon_threadsafe(cancel)
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=CLEANUP_S_MAX)
            except BaseException:
                # A second interrupt does not wait; and it may have come before the first one's cancellation.
                self._loop.call_soon_threadsafe(cancel)
                raise
            for note in _notes_of(begun):
                interrupt.add_note(note)
            raise
        return begun[0].result()

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
            self._thread.join()

    def _run(self) -> None:
        while not self._is_ended:
            # One that a task raises has been noted as its error, and leaves the loop as well.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        """End what a second interrupt has left, which is not to clean up any longer, without a word of asyncio's."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=GIVEN_UP_S_MAX)
        self._loop.set_exception_handler(lambda *_: None)
        self._is_ended = True
        self._loop.stop()


def run_in_loop(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine as `LoopThread.run`, in one of its own: an interrupt gets the notes on what it has cancelled."""
    loop = LoopThread()
    try:
        return loop.run(work)
    finally:
        loop.stop()


def _notes_of(begun: Sequence[asyncio.Task[Any]]) -> list[str]:
    """Return the notes on the error of an interrupted task, such as what its cleaning up has left behind."""
    if any(not task.done() for task in begun):
        return [f"its cleaning up takes longer than {CLEANUP_S_MAX} s: what it wrote may be left behind"]
    try:
        for task in begun:
            task.result()
    except BaseException as error:  # noqa: BLE001  (its own caller gets the interrupt)
        return list(getattr(error, "__notes__", ()))
    return []


A = TypeVar("A", bound=AbstractAsyncContextManager[Any])
# Covariant, so that a method of a base class is one of the facade's too.
A_co = TypeVar("A_co", bound=AbstractAsyncContextManager[Any], covariant=True)


class Facade(Generic[A_co]):
    """An asynchronous object for callers without an event loop. Use it as a context manager, or call `close`.

    Attributes:
        loop: Where its methods run.
        asynchronous: The object.
    """

    def __init__(self, loop: LoopThread, asynchronous: A_co) -> None:
        self.loop = loop
        self.asynchronous = asynchronous

    def close(self) -> None:
        """Close the object and its loop; once is enough."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.loop.is_running:
            return
        try:
            self.loop.run(self.asynchronous.__aexit__(kind, error, trace))
        finally:
            self.loop.stop()

    @contextlib.contextmanager
    def inside(self, context: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Enter and leave an asynchronous context in the event loop of the object."""
        # An interrupt may come when it is entered, and before this thread knows: what was entered is left all the same.
        stack = contextlib.AsyncExitStack()
        try:
            yield self.loop.run(stack.enter_async_context(context))
        finally:
            self.loop.run(stack.aclose())


F = TypeVar("F", bound=Facade[Any])


class Blocking(Generic[A, P, R]):
    """Turns a method that waits into one of a `Facade` with the same arguments, result and errors."""

    def __init__(self, method: Callable[Concatenate[A, P], Awaitable[R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Facade[A] | None, owner: type[Facade[A]]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if instance is None:
                raise TypeError(f"{owner.__name__}.{call.__name__} needs an object to work on")

            async def work() -> R:
                return await self._method(instance.asynchronous, *args, **kwargs)

            return instance.loop.run(work())

        # Its name, documentation and arguments are those of the method, for `help` and notebooks.
        bound: Callable[..., object] = self._method
        if instance is not None:
            bound = MethodType(self._method, instance.asynchronous)
        functools.update_wrapper(call, bound)
        return call


class Direct(Generic[A, P, R]):
    """Gives a `Facade` a method that does not wait; it runs in the calling thread."""

    def __init__(self, method: Callable[Concatenate[A, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Facade[A] | None, owner: type[Facade[A]]) -> Callable[P, R]:
        bound: Callable[..., R] = self._method
        return bound if instance is None else MethodType(bound, instance.asynchronous)


class Opening(Generic[P]):
    """Turns a function that opens an asynchronous object into one that opens its `Facade`; the rest as `Blocking`."""

    def __init__(self, function: Callable[P, Coroutine[Any, Any, Any]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: F | None, owner: type[F]) -> Callable[P, F]:
        def call(*args: P.args, **kwargs: P.kwargs) -> F:
            loop = LoopThread()
            try:
                return owner(loop, loop.run(self._function(*args, **kwargs)))
            except BaseException:
                loop.stop()
                raise

        functools.update_wrapper(call, self._function)
        return call
