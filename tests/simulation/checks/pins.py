"""Distinguish pins that protect what they lead to (design 0002, D5) from others.

Part of the history: notified of every pin that is put or goes. A pin protects from its first put on, if its commit
was open then, until it is released or its time is over between two puts. Whatever is under its key after that is a
late copy (design 0002, D5): it keeps what a collection happens to find, and the walker has to know of it.
"""

from collections.abc import Callable, Mapping

import msgspec

from index.snapshot.model import Pin


class _Standing(msgspec.Struct, frozen=True):
    """A pin that protects: until when by the server's clock, and which indexes and blobs."""

    ends_at_ms: int
    led: frozenset[str]


class StandingPins:
    """Every pin that was ever put.

    Args:
        ways: The keys that each index leads to, its own too.
        clock: The server's, in ms.

    Attributes:
        over: The keys of those that protect nothing, any more or from the beginning.
    """

    def __init__(self, ways: Mapping[str, frozenset[str]], clock: Callable[[], int]) -> None:
        self._ways = ways
        self._clock = clock
        self._standing: dict[str, _Standing] = {}
        self.over: set[str] = set()

    def copy(self, ways: Mapping[str, frozenset[str]], clock: Callable[[], int]) -> "StandingPins":
        """The same, to go on with."""
        copied = StandingPins(ways, clock)
        copied._standing, copied.over = dict(self._standing), set(self.over)
        return copied

    def put(self, key: str, pin: Pin, created_at_ms: int, *, finds_open: bool) -> None:
        """A pin was put, renewed or released; `finds_open` if its commit is open, or a live name stands for it."""
        before = self._standing.get(key)
        if pin.duration_ms == 0 or key in self.over:
            self._end(key)
        elif finds_open if before is None else self._clock() < before.ends_at_ms:
            led = frozenset().union(*(self._ways.get(s.index.key, {s.index.key}) for s in pin.stores))
            self._standing[key] = _Standing(created_at_ms + pin.duration_ms, led)
        else:
            # Too late: a collection may have been there before it, or between it and the last one.
            self._end(key)

    def deleting(self, key: str) -> bool:
        """A pin is about to go; returns whether it protects something."""
        protects = self._protects(key)
        self._end(key)
        return protects

    def protector(self, key: str) -> str | None:
        """A pin that an index or blob is not deleted for."""
        return next((pin for pin, known in self._standing.items() if key in known.led and self._protects(pin)), None)

    def _protects(self, pin: str) -> bool:
        return pin in self._standing and self._clock() < self._standing[pin].ends_at_ms

    def _end(self, key: str) -> None:
        self._standing.pop(key, None)
        self.over.add(key)
