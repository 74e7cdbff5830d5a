"""A condition that is read anew now and then, for whoever asks often."""

import threading
from collections.abc import Callable, Iterator

from engine.metrics.model import Sample
from engine.metrics.samples import Samples


class Watched:
    """The last reading, made anew when it is asked for and too old. Several threads may ask at once.

    A reading that fails changes nothing but `repository_up`, which is 0 until one goes well.

    Args:
        read: Makes a reading.
        monotonic_s: Seconds that never go backwards.
        every_s: A reading is as good as new for so long, a failed one too.
        tell: Is told of an error of `read`, which goes no further.
    """

    def __init__(
        self,
        read: Callable[[], Samples],
        monotonic_s: Callable[[], float],
        *,
        every_s: float,
        tell: Callable[[Exception], None],
    ) -> None:
        self._read = read
        self._monotonic_s = monotonic_s
        self._every_s = every_s
        self._tell = tell
        self._lock = threading.Lock()
        self._last = Samples()
        self._read_at_s: float | None = None

    def __call__(self) -> Iterator[Sample]:
        """The samples of the last reading."""
        with self._lock:
            now_s = self._monotonic_s()
            if self._read_at_s is None or now_s - self._read_at_s >= self._every_s:
                self._refresh()
                self._read_at_s = now_s
            return iter(tuple(self._last))

    def _refresh(self) -> None:
        try:
            self._last = self._read()
        except Exception as error:  # noqa: BLE001  (whoever asks is told by `repository_up`, the operator by `tell`)
            self._last.add("repository_up", 0)
            self._tell(error)
