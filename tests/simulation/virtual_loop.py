"""An event loop with a clock of its own and a seeded order, in one thread: the same seed gives the same run (0007, S2).

Where nothing is ready, time jumps to the next timer. Of what is ready, the seed chooses the next. What is given to a
thread runs at such a chosen moment, whole. A callback belongs to the process (`Lifeline`) in whose context it was made:
those of a killed process never run, those of a stopped one wait until it is woken.
"""

import asyncio
import contextvars
import functools
import heapq
from asyncio import base_events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple

from typing_extensions import override

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What is given to a thread takes some time now and then: once in so many, up to so long.
_SLOW_CALLS: Final = 8
_SLOW_CALL_S: Final = 0.02
# More callbacks than any run needs: one that comes here goes round in circles.
STEPS_MAX: Final = 20_000_000
_CLEANING_S: Final = 1e6
_CLEANING_ROUNDS: Final = 5
_TOLD_FRAMES: Final = 8
# Tasks of a process above which those that are done are forgotten.
_TASKS_KEPT: Final = 512

BlockingHook = Callable[[str, str], None]


class DeadlockError(RuntimeError):
    """Everything waits for something that never happens."""


class Lifeline:
    """What the callbacks of one simulated process hang on.

    Attributes:
        is_dead: It was killed: what is left of it never runs.
        is_stopped: What comes due is parked until it is woken.
        blocking: Is told before and after each call that would run in a thread ("before" or "after", its name).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.blocking: BlockingHook | None = None
        self.parked: list[asyncio.Handle] = []
        # Kept, so that the garbage collector does not unwind what was killed.
        self.tasks: list[asyncio.Task[Any]] = []


LIFELINE: Final[ContextVar[Lifeline | None]] = ContextVar("lifeline", default=None)


class _Turn(asyncio.Handle):
    """A callback that is to run, with nothing around it: a campaign makes a hundred million of them."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, context: contextvars.Context | None) -> None:
        self._callback: Any = callback
        self._args: Any = args
        self._context: Any = contextvars.copy_context() if context is None else context
        self._cancelled = False

    @override
    def cancel(self) -> None:
        self._cancelled = True


class _Timer(asyncio.TimerHandle):
    """As `_Turn`, at its time."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, context: contextvars.Context | None) -> None:
        self._callback: Any = callback
        self._args: Any = args
        self._context: Any = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._when = when

    @override
    def cancel(self) -> None:
        self._cancelled = True


class VirtualLoop(base_events.BaseEventLoop):
    """See the module.

    Args:
        seed: None keeps the order in which things became ready.
        start_s: What the clock begins with.

    Attributes:
        is_ending: What is left is unwound: nothing of it is to have an effect any more.
        steps: Callbacks that ran.
        blocking_calls: Calls that would have run in a thread.
    """

    # Of BaseEventLoop, which has no types for them.
    _ready: Any
    _stopping: bool

    def __init__(self, seed: int | None, start_s: float = 0) -> None:
        super().__init__()
        self._chance = None if seed is None else Random(f"loop {seed}")
        self._now_s = start_s
        # When, the how manieth, what.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_count = 0
        self._dropped: list[asyncio.Handle] = []
        self._lifelines: dict[str, Lifeline] = {}
        self.is_ending = False
        self.steps = 0
        self.blocking_calls = 0

    @override
    def time(self) -> float:
        return self._now_s

    # The base class's two do the same, and check more than twenty million callbacks need.

    @override
    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        turn = _Turn(callback, args, context)
        self._ready.append(turn)
        return turn

    @override
    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, context)
        self._timers_count += 1
        heapq.heappush(self._timers, (when, self._timers_count, timer))
        return timer

    @override
    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    @override
    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        context = options.get("context")
        lifeline = LIFELINE.get() if context is None else context.get(LIFELINE)
        if lifeline is not None:
            if len(lifeline.tasks) >= _TASKS_KEPT:
                lifeline.tasks[:] = [known for known in lifeline.tasks if not known.done()]
            lifeline.tasks.append(task)
            self._lifelines[lifeline.name] = lifeline
        return task

    @override
    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        self.blocking_calls += 1
        chance = self._chance
        if chance is not None and chance.random() < 1 / _SLOW_CALLS:
            self.call_later(chance.random() * _SLOW_CALL_S, self._call, done, func, args)
        else:
            self.call_soon(self._call, done, func, args)
        return done

    def _call(self, done: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if self.is_ending and done.done():
            return  # nobody would close what it opens
        lifeline = LIFELINE.get()
        hook = None if lifeline is None or self.is_ending else lifeline.blocking
        name = _name(func) if hook is not None else ""
        if hook is not None:
            hook("before", name)
            if lifeline is not None and (lifeline.is_dead or lifeline.is_stopped):
                # It is held when its turn comes: until the process wakes, or all is unwound.
                self.call_soon(self._call, done, func, args)
                return
        try:
            result = func(*args)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            if not done.done():
                done.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        else:
            if not done.done():
                done.set_result(result)
        if hook is not None:
            hook("after", name)

    def _run_once(self) -> None:
        """Run until something stops the loop; `run_forever` calls it again and again."""
        ready, timers, chance = self._ready, self._timers, self._chance
        while not self._stopping:
            while timers and timers[0][0] <= self._now_s:
                ready.append(heapq.heappop(timers)[2])
            if not ready:
                self._jump()
                continue
            if chance is None or len(ready) == 1:
                handle = ready.popleft()
            else:
                at = int(chance.random() * len(ready))
                handle = ready[at]
                del ready[at]
            if handle._cancelled:
                continue
            lifeline = handle._context.get(LIFELINE)
            if lifeline is not None and self._is_held(lifeline, handle):
                continue
            self.steps += 1
            try:
                handle._context.run(handle._callback, *handle._args)
            except Exception:
                # What a callback raises is a fault of the simulation, unless everything is being unwound.
                if not self.is_ending:
                    raise
            if self.steps > STEPS_MAX:
                raise DeadlockError(f"goes round in circles:\n{self._told()}")

    def _is_held(self, lifeline: Lifeline, handle: asyncio.Handle) -> bool:
        """Whether a callback belongs to a process that is dead or stands still: then it is put away."""
        if self.is_ending:
            return False
        if lifeline.is_dead:
            self._dropped.append(handle)
        elif lifeline.is_stopped:
            lifeline.parked.append(handle)
        return lifeline.is_dead or lifeline.is_stopped

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task's exception that nobody asked for is the engine's affair, told when the garbage is collected."""

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise DeadlockError(f"everything waits for something that never happens:\n{self._told()}")
        self._now_s = max(self._now_s, timers[0][0])

    def wake(self, lifeline: Lifeline) -> None:
        """Let a stopped process go on; what came due meanwhile does so now."""
        lifeline.is_stopped = False
        self._ready.extend(lifeline.parked)
        lifeline.parked.clear()

    def end(self) -> None:
        """Unwind what is left, that of killed processes too, so that files are closed and nobody is warned."""
        self.is_ending = True
        self._ready.extend(self._dropped)
        for lifeline in self._lifelines.values():
            self._ready.extend(lifeline.parked)
            lifeline.parked.clear()
        self._dropped.clear()
        # Whoever cleans up may begin something for it.
        for _ in range(_CLEANING_ROUNDS):
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=_CLEANING_S))
        self.close()

    def _told(self) -> str:
        lines = []
        owners = {task: lifeline for lifeline in self._lifelines.values() for task in lifeline.tasks}
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            lifeline = owners.get(task)
            where = " < ".join(
                f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in reversed(_frames(task)[-_TOLD_FRAMES:])
            )
            state = "" if lifeline is None else f" of {lifeline.name}{' (dead)' if lifeline.is_dead else ''}"
            lines.append(f"  {task.get_name()}{state}: {where}")
        return "\n".join(lines)

    # Generators that nobody closed are unwound with the tasks that hold them: there is no need of a list.

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        """Nothing is noted."""

    # What a loop with a selector does and this one has no need of.

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who could be woken."""


def _frames(task: asyncio.Task[Any]) -> list[Any]:
    """The frames of a coroutine and what it awaits, from the outside in."""
    frames = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        inner = (
            getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
        )
    return frames


def _name(func: Callable[..., object]) -> str:
    while isinstance(func, functools.partial):
        # `asyncio.to_thread` runs a function in a context.
        func = func.args[0] if func.args and getattr(func.func, "__name__", "") == "run" else func.func
    return getattr(func, "__qualname__", type(func).__name__)


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int | None, start_s: float = 0) -> T:
    """The result of a coroutine that runs on a `VirtualLoop`."""
    with virtual_loop(seed=seed, start_s=start_s) as loop:
        return loop.run_until_complete(main)


@contextmanager
def virtual_loop(*, seed: int | None, start_s: float = 0) -> Iterator[VirtualLoop]:
    """A loop that is ended whatever becomes of what ran on it."""
    loop = VirtualLoop(seed, start_s)
    try:
        yield loop
    finally:
        loop.end()


def run_jumping(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of a coroutine whose tasks take turns as they always do, and how many seconds it would have waited."""
    with virtual_loop(seed=None) as loop:
        return loop.run_until_complete(main), loop.time()
