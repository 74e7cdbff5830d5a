"""What a restore would take with other sizes and executors: pure, from one rehearsal (design 0009, F1 to F6)."""

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.rehearsal.model import Rehearsal

SIZES: Final = (1, 2, 10)
EXECUTORS: Final = (1, 2, 4, 8, 16)
# An index, and the first bytes that it leads to: nothing of a store can go on at the same time as these.
STEPS_PER_STORE: Final = 2


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
    return tuple(_forecast(rehearsal, size, count) for size in sizes for count in executors)


def _forecast(rehearsal: Rehearsal, size: int, executors: int) -> Forecast:
    # A store is restored by one executor: none has less to do than the largest.
    whole = max(1, rehearsal.size_bytes)
    share = max(1 / executors, min(1.0, rehearsal.largest_store_bytes / whole))
    begins_s = _begins_s(rehearsal)
    begins_share = max(1 / executors, 1 / max(1, rehearsal.stores_count))
    moves_s = rehearsal.restore_s - begins_s
    moves_best_s = moves_s * size * share
    moves_worst_s = max(moves_best_s, _network_s(rehearsal) * size)
    rest_s = rehearsal.find_s + begins_s * begins_share + rehearsal.open_s * size * share
    return Forecast(size=size, executors=executors, best_s=rest_s + moves_best_s, worst_s=rest_s + moves_worst_s)


def _begins_s(rehearsal: Rehearsal) -> float:
    """What the beginnings of the stores took, which no size changes."""
    each_s = STEPS_PER_STORE * rehearsal.measured.round_trip_s
    return min(rehearsal.restore_s, each_s * rehearsal.stores_count / rehearsal.stores_at_once)


def _network_s(rehearsal: Rehearsal) -> float:
    """How long the bytes took at most: by the probe, also where that was held up by the processor."""
    measured = rehearsal.measured
    if not measured.network_bytes_per_s:
        return rehearsal.restore_s
    return min(rehearsal.restore_s, measured.bytes_fetched / measured.network_bytes_per_s)
