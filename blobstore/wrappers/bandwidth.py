"""A bound on the bytes per second that a process sends and fetches."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Final

# Bytes are let through in pieces of this size: who has many to move does not hold up who has few.
PIECE_BYTES: Final = 64 * 1024
# So much of the time in which nothing was moved may be made up for at once.
BURST_S: Final = 0.25
# A shorter wait is put off until it has become this long: sleeping costs more than it gives.
GRAIN_S: Final = 0.01


class Bandwidth:
    """So many bytes per second, for everybody who asks together and in the order in which they ask.

    A bucket of tokens, told as the moment up to which the line is taken. Event loops and threads may ask at once.

    Args:
        bytes_per_s: At least 1.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._taken_until_s = float("-inf")

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Take so many bytes; returns after how many seconds they will have gone through.

        Args:
            size_bytes: How many.
            now_s: The time of an event loop, which all of a process have from one clock.
        """
        with self._lock:
            begins_s = max(self._taken_until_s, now_s - BURST_S)
            self._taken_until_s = begins_s + size_bytes / self._bytes_per_s
            return max(0.0, self._taken_until_s - now_s)

    async def pass_through(self, size_bytes: int) -> None:
        """Wait until so many bytes have gone through."""
        clock = asyncio.get_running_loop().time
        for piece_bytes in pieces(size_bytes):
            wait_s = self.reserve(piece_bytes, clock())
            if wait_s > GRAIN_S:
                await asyncio.sleep(wait_s)


def pieces(size_bytes: int) -> Iterator[int]:
    """The sizes of the pieces in which so many bytes are let through."""
    for at in range(0, size_bytes, PIECE_BYTES):
        yield min(PIECE_BYTES, size_bytes - at)


# By rate: a limit is one of the process, however many stores it opens.
_of_process: Final[dict[int, Bandwidth]] = {}
_making: Final = threading.Lock()


def shared_bandwidth(bytes_per_s: int) -> Bandwidth:
    """The bandwidth that everything in this process shares which was told the same limit."""
    with _making:
        return _of_process.setdefault(bytes_per_s, Bandwidth(bytes_per_s))
