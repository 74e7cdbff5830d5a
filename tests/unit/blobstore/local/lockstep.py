"""Runs functions in threads, one step at a time, in an order that a seed decides."""

import threading
from collections.abc import Callable
from random import Random


class _Actor:
    def __init__(self) -> None:
        self.may_step = threading.Semaphore(0)
        self.has_stopped = threading.Semaphore(0)
        self.is_done = False
        self.error: BaseException | None = None


class Lockstep:
    """Actors stop at every `gate`; between two steps nothing moves.

    Args:
        seed: Of the order.
        observe: Called after each step.
    """

    def __init__(self, seed: int, observe: Callable[[], None]) -> None:
        self._random = Random(seed)
        self._observe = observe
        self._local = threading.local()

    def gate(self) -> None:
        """Called before each step of an actor; does nothing in any other thread."""
        actor: _Actor | None = getattr(self._local, "actor", None)
        if actor is not None:
            actor.has_stopped.release()
            actor.may_step.acquire()

    def run(self, *functions: Callable[[], None]) -> None:
        """Run all of them to their end; raises the first error of one of them."""
        actors = [_Actor() for _ in functions]
        threads = [
            threading.Thread(target=self._act, args=(actor, function), daemon=True)
            for actor, function in zip(actors, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for actor in actors:
            assert actor.has_stopped.acquire(timeout=10)
        for _ in range(10_000):
            waiting = [actor for actor in actors if not actor.is_done]
            if not waiting:
                break
            actor = self._random.choice(waiting)
            actor.may_step.release()
            assert actor.has_stopped.acquire(timeout=10)
            self._observe()
        for thread, actor in zip(threads, actors, strict=True):
            thread.join(timeout=10)
            if actor.error is not None:
                raise actor.error

    def _act(self, actor: _Actor, function: Callable[[], None]) -> None:
        self._local.actor = actor
        try:
            self.gate()
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            actor.error = error
        finally:
            actor.is_done = True
            actor.has_stopped.release()
