"""Spreading stores over Spark partitions so that no partition has much more to move than another."""

import heapq
from collections.abc import Sequence


def assign_by_bytes(sizes_bytes: Sequence[int], partitions_max: int) -> tuple[int, ...]:
    """A partition for each size: the largest first, each to the partition that has the least so far.

    The heaviest partition ends up with at most 4/3 of what the best possible assignment would give it. Partition
    numbers are in the order of load, heaviest first, because Spark starts partitions in the order of their numbers:
    what takes longest then begins first, also where there are more partitions than cores.

    Args:
        sizes_bytes: What each store has to move; a store of size zero still counts as work.
        partitions_max: No more partitions than this; with fewer sizes there is one for each.

    Returns:
        One partition number per size, in the order of `sizes_bytes`; every number from 0 to the greatest one is used.

    Source:
        R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969): longest processing time first.
    """
    count = max(1, min(partitions_max, len(sizes_bytes)))
    loads = [(0, 0, number) for number in range(count)]
    chosen = [0] * len(sizes_bytes)
    for position in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        load_bytes, stores_count, number = loads[0]
        heapq.heapreplace(loads, (load_bytes + sizes_bytes[position], stores_count + 1, number))
        chosen[position] = number
    heaviest_first = sorted(loads, key=lambda load: (-load[0], -load[1], load[2]))
    renumbered = {number: rank for rank, (_, _, number) in enumerate(heaviest_first)}
    return tuple(renumbered[number] for number in chosen)
