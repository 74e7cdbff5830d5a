"""What a restore would take with other sizes and executors: pure, from one rehearsal (design 0009, F1 to F5)."""

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.drill.model import Rehearsal

SIZES: Final = (1, 2, 10)
EXECUTORS: Final = (1, 2, 4, 8, 16)


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast; both times are in seconds."""

    # So many times the bytes, files and requests of the rehearsal, in the same stores.
    size: int
    executors: int
    # Each executor gets from the store what this machine got.
    best_s: float
    # All executors together get no more bytes per second from it than this machine got.
    worst_s: float


def forecast(
    rehearsal: Rehearsal, *, sizes: Sequence[int] = SIZES, executors: Sequence[int] = EXECUTORS
) -> tuple[Forecast, ...]:
    """Forecast restores of the same state, at other sizes and over several executors.

    Args:
        rehearsal: What was measured on one machine.
        sizes: Multiples of its size.
        executors: How many machines such as this one, each with a disk of its own.

    Returns:
        For each size, each number of executors. For 1 and 1 it is what was measured.
    """
    # A store is restored by one executor: none has less to do than the largest.
    largest = min(1.0, rehearsal.largest_store_bytes / max(1, rehearsal.size_bytes))
    forecasts = []
    for size in sizes:
        for count in executors:
            share = size * max(1 / count, largest)
            opened_s = rehearsal.find_s + share * rehearsal.open_s
            forecasts.append(
                Forecast(
                    size=size,
                    executors=count,
                    best_s=opened_s + share * rehearsal.restore_s,
                    worst_s=opened_s + size * rehearsal.restore_s,
                )
            )
    return tuple(forecasts)
