"""A condition that is read anew now and then, for whoever asks meanwhile."""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

from engine.metrics.model import Sample
from engine.metrics.samples import Samples

# However little somebody says: a reading lists the whole repository.
EVERY_S_MIN: Final = 1.0
THREAD: Final = "tidemark metrics"


class Watched:
    """The last reading, which a thread makes anew within a `with`. Who asks gets it at once, and never waits for one.

    A reading that fails changes nothing but `repository_up`, which is 0 before the first one too.

    Args:
        read: Makes a reading.
        every_s: So long after the end of a reading the next one begins, after a failed one too.
        tell: Is told of an error of `read`, which goes no further.
    """

    def __init__(self, read: Callable[[], Samples], *, every_s: float, tell: Callable[[Exception], None]) -> None:
        self._read = read
        self._every_s = max(EVERY_S_MIN, every_s)
        self._tell = tell
        self._ended = threading.Event()
        self._last = _is_down(())

    def __enter__(self) -> Self:
        """Begin to read."""
        threading.Thread(target=self._read_on, name=THREAD, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Begin no other reading. One that is under way is not waited for: it may take hours."""
        self._ended.set()

    def __call__(self) -> Iterator[Sample]:
        """The samples of the last reading."""
        return iter(self._last)

    def _read_on(self) -> None:
        while not self._ended.is_set():
            self.refresh()
            self._ended.wait(self._every_s)

    def refresh(self) -> None:
        """Read once."""
        try:
            self._last = tuple(self._read())
        except Exception as error:  # noqa: BLE001  (whoever asks is told by `repository_up`, the operator by `tell`)
            self._last = _is_down(self._last)
            self._tell(error)


def _is_down(last: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """A reading, but that the repository cannot be read."""
    samples = Samples()
    samples.update(last)
    samples.add("repository_up", 0)
    return tuple(samples)
