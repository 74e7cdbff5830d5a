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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple, cast

import msgspec
from typing_extensions import override

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What is given to a thread takes time in this share of calls, up to a longest time; in another share it waits for its
# turn, and is done at once otherwise: most of what is run costs less than the waiting for it.
_SLOW_CALLS: Final = 1 / 8
_SLOW_CALL_S: Final = 0.02
_WAITING_CALLS: Final = 1 / 4
# More callbacks than any run needs: one that comes here goes round in circles.
STEPS_MAX: Final = 20_000_000
_CLEANING_S: Final = 1e6
_CLEANING_ROUNDS: Final = 5
_A_MOMENT_S: Final = 1e-3
_SHOWN_FRAMES: Final = 8
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
        blocking: Called before and after each call that would run in a thread ("before" or "after", its name).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.blocking: BlockingHook | None = None
        self.parked: list[_Turn] = []


LIFELINE: Final[ContextVar[Lifeline | None]] = ContextVar("lifeline", default=None)


class _Turn(msgspec.Struct):
    """In place of `asyncio.Handle` and `TimerHandle`, with nothing around it: a campaign makes millions."""

    callback: Any
    args: tuple[Any, ...]
    context: contextvars.Context
    when_s: float = 0.0
    is_cancelled: bool = False

    def cancel(self) -> None:
        """It is not to run."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Whether it is not."""
        return self.is_cancelled

    def when(self) -> float:
        """Of a timer, its time."""
        return self.when_s


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

    # Of BaseEventLoop, which has no types for it.
    _stopping: bool

    def __init__(self, seed: int | None, start_s: float = 0) -> None:
        super().__init__()
        self._rng = None if seed is None else Random(f"loop {seed}")
        self._now_s = start_s
        # When, the how manieth, what.
        self._timers: list[tuple[float, int, _Turn]] = []
        self._timers_count = 0
        self._ready: list[_Turn] = []
        self._dropped: list[_Turn] = []
        # Those that were ever paused.
        self._lifelines: dict[str, Lifeline] = {}
        # Kept, so that the garbage collector does not unwind what was killed; with whose it is.
        self._tasks: list[tuple[asyncio.Task[Any], Lifeline | None]] = []
        # Those of them that a process began with; the others are theirs.
        self._begun: list[asyncio.Task[Any]] = []
        self._tasks_kept = _TASKS_KEPT
        self.is_ending = False
        self.steps = 0
        self.blocking_calls = 0

    @override
    def time(self) -> float:
        return self._now_s

    # The base class's do the same, and check more than millions of callbacks need.

    @override
    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        turn = _Turn(callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(turn)
        return cast("asyncio.Handle", turn)

    # What a generator that nobody closed leaves behind comes this way; there is one thread.
    call_soon_threadsafe = call_soon

    @override
    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        turn = _Turn(callback, args, contextvars.copy_context() if context is None else context, when)
        self._timers_count += 1
        heapq.heappush(self._timers, (when, self._timers_count, turn))
        return cast("asyncio.TimerHandle", turn)

    @override
    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        turn = _Turn(callback, args, contextvars.copy_context() if context is None else context, self._now_s + delay)
        self._timers_count += 1
        heapq.heappush(self._timers, (turn.when_s, self._timers_count, turn))
        return cast("asyncio.TimerHandle", turn)

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        context = options.get("context")
        if len(self._tasks) >= self._tasks_kept:
            self._tasks = [known for known in self._tasks if not known[0].done()]
            self._begun = [task for task in self._begun if not task.done()]
            self._tasks_kept = max(_TASKS_KEPT, 2 * len(self._tasks))
        self._tasks.append((task, LIFELINE.get() if context is None else context.get(LIFELINE)))
        if context is not None:
            self._begun.append(task)
        return task

    @override
    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        self.blocking_calls += 1
        rng = 1.0 if self._rng is None else self._rng.random()
        if self._rng is not None and rng < _SLOW_CALLS:
            self.call_later(self._rng.random() * _SLOW_CALL_S, self._call, done, func, args)
        elif self._rng is None or rng < _WAITING_CALLS:
            self.call_soon(self._call, done, func, args)
        else:
            self._call(done, func, args)
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
        ready, timers = self._ready, self._timers
        rng = None if self._rng is None else self._rng.random
        while not self._stopping:
            if not ready or (timers and timers[0][0] <= self._now_s):
                self._let_come_due()
            turn = ready.pop(0 if rng is None or len(ready) == 1 else int(rng() * len(ready)))
            if turn.is_cancelled:
                continue
            lifeline = turn.context.get(LIFELINE)
            if lifeline is not None and (lifeline.is_dead or lifeline.is_stopped) and not self.is_ending:
                self._put_away(lifeline, turn)
                continue
            self.steps += 1
            try:
                turn.context.run(turn.callback, *turn.args)
            except Exception:
                # What a callback raises is a fault of the simulation, unless everything is being unwound.
                if not self.is_ending:
                    raise
            if self.steps > STEPS_MAX:
                raise DeadlockError(f"goes round in circles:\n{self._summary()}")

    def _let_come_due(self) -> None:
        """What is due is ready; where nothing is, time jumps."""
        ready, timers = self._ready, self._timers
        while timers and (not ready or timers[0][0] <= self._now_s):
            when_s, _, turn = heapq.heappop(timers)
            if not turn.is_cancelled:
                self._now_s = max(self._now_s, when_s)
                ready.append(turn)
        if not ready:
            raise DeadlockError(f"everything waits for something that never happens:\n{self._summary()}")

    def _put_away(self, lifeline: Lifeline, turn: _Turn) -> None:
        """A callback belongs to a process that is dead or paused."""
        if lifeline.is_dead:
            self._dropped.append(turn)
        else:
            self._lifelines[lifeline.name] = lifeline
            lifeline.parked.append(turn)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task's exception that nobody asked for is the engine's affair, reported when the garbage is collected."""

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
        # First what processes began with: it cancels what it must, and leaves alone what has to come to its end, which
        # may be the closing of a file. Anyone who cleans up may begin something for it.
        left = [task for task in self._begun if not task.done()]
        for _ in range(_CLEANING_ROUNDS):
            for task in left:
                task.cancel()
            self.run_until_complete(_wait_for(left))
            left = [task for task, _ in self._tasks if not task.done()]
            if not left:
                break
        self.close()

    def _summary(self) -> str:
        lines = []
        left = [(task, lifeline) for task, lifeline in self._tasks if not task.done()]
        for task, lifeline in sorted(left, key=lambda owned: owned[0].get_name()):
            where = " < ".join(
                f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in reversed(_frames(task)[-_SHOWN_FRAMES:])
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


async def _wait_for(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=_CLEANING_S)
    # Time passes once nothing is ready any more.
    await asyncio.sleep(_A_MOMENT_S)


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
