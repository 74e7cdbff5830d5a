"""Progress for people: a line that redraws itself on a terminal, a line now and then in a log."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self, TextIO

from index.display import human_bytes, human_duration

Log = Callable[[str, Mapping[str, int]], None]

REDRAW_PERIOD_S: Final = 0.1
LOG_PERIOD_S: Final = 10.0
# How often it is looked whether a line is due.
TICK_PERIOD_S: Final = 1.0
# The rate forgets: after this long, what was further back counts for a third.
RATE_MEMORY_S: Final = 10.0
# Until then there is no useful rate.
RATE_AGE_S_MIN: Final = 0.5

_CLEAR_LINE: Final = "\r\x1b[K"


class TerminalProgress:
    """Shows files, bytes, rate and time left on a stream.

    A terminal gets one line that is redrawn in place and is gone at the end; between two calls nothing is drawn, so
    that a transfer which stalls leaves the last line in place. Anything else gets a line each ten seconds, also
    while nothing moves: within a `with`, a thread sees to that.
    """

    def __init__(self, stream: TextIO, monotonic_s: Callable[[], float], *, what: str, log: Log | None = None) -> None:
        """Begin to count.

        Args:
            stream: Where to write, usually stderr.
            monotonic_s: Seconds that never go backwards.
            what: The verb to begin each line with, such as "backup".
            log: Is given each line with its numbers, in place of the stream: for a structured log.
        """
        self._stream = stream
        self._monotonic_s = monotonic_s
        self._what = what
        self._log = log
        self._in_place = stream.isatty() and log is None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticking: threading.Thread | None = None
        self._files = self._bytes = 0
        self._files_total = self._bytes_total = 0
        self._began_s = self._drawn_s = self._rated_s = monotonic_s()
        self._rated_bytes = 0
        self._rate_bytes_per_s = 0.0
        self._on_screen = False

    def __enter__(self) -> Self:
        if not self._in_place:
            self._ticking = threading.Thread(target=self._tick_on, name="tidemark progress", daemon=True)
            self._ticking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._ticking is not None:
            self._ticking.join()
        if self._on_screen:
            # The result shows what was done.
            self._write(_CLEAR_LINE)
            self._on_screen = False

    def total(self, *, files: int, bytes_: int) -> None:
        with self._lock:
            self._files_total, self._bytes_total = files, bytes_
            self._tick()

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        with self._lock:
            self._files += files
            self._bytes += bytes_
            self._tick()

    def tick(self) -> None:
        with self._lock:
            self._tick()

    def _tick_on(self) -> None:
        while not self._ended.wait(TICK_PERIOD_S):
            self.tick()

    def _tick(self) -> None:
        now_s = self._monotonic_s()
        if now_s - self._drawn_s < (REDRAW_PERIOD_S if self._in_place else LOG_PERIOD_S):
            return
        self._drawn_s = now_s
        self._measure(now_s)
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR_LINE + self.line(now_s)[:width])
            self._on_screen = True
        elif self._log is not None:
            numbers = {
                "files": self._files,
                "files_total": self._files_total,
                "bytes": self._bytes,
                "bytes_total": self._bytes_total,
                "bytes_per_s": int(self._rate_bytes_per_s),
            }
            # As in `_write`.
            with contextlib.suppress(OSError, ValueError):
                self._log(self.line(now_s), numbers)
        else:
            self._write(self.line(now_s) + "\n")

    def _measure(self, now_s: float) -> None:
        passed_s = now_s - self._rated_s
        if passed_s <= 0:
            return
        current = (self._bytes - self._rated_bytes) / passed_s
        # Within its memory the rate is the plain average since the beginning.
        weight = passed_s / min(RATE_MEMORY_S, max(passed_s, now_s - self._began_s))
        self._rate_bytes_per_s += (current - self._rate_bytes_per_s) * min(1.0, weight)
        self._rated_s, self._rated_bytes = now_s, self._bytes

    def line(self, now_s: float) -> str:
        files = _of(f"{self._files:,}", f"{self._files_total:,}", self._files_total)
        parts = [f"{self._what}: {files} files"]
        parts.append(_of(human_bytes(self._bytes), human_bytes(self._bytes_total), self._bytes_total))
        if self._bytes_total:
            parts.append(f"{min(100, 100 * self._bytes // self._bytes_total)}%")
        if now_s - self._began_s >= RATE_AGE_S_MIN and self._rate_bytes_per_s >= 1:
            parts.append(f"{human_bytes(int(self._rate_bytes_per_s))}/s")
            left = self._bytes_total - self._bytes
            if left > 0:
                parts.append(f"{human_duration(int(1000 * left / self._rate_bytes_per_s))} left")
        return ", ".join(parts)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The work goes on also where nobody reads this any more.
            self._on_screen = False


def _of(done: str, total: str, known: int) -> str:
    return f"{done} of {total}" if known else done
