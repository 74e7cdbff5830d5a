"""An event loop whose clock jumps to the next timer, so that hours of waiting take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    jumped_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits for something that never happens")
        if not ready and timeout:
            self.jumped_s += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        return self._jumping.jumped_s


def run_jumping(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of a coroutine that uses no threads, and how many seconds it would have waited."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
