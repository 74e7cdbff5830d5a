from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spark.spread import assign_by_bytes

sizes_lists = st.lists(st.integers(0, 10**12), max_size=60)


@pytest.mark.parametrize(
    "sizes, partitions, expected",
    [
        ([], 4, ()),
        ([7], 4, (0,)),
        ([1, 2, 3], 1, (0, 0, 0)),
        ([10, 30, 20], 3, (2, 0, 1)),
        ([5, 5, 5, 5], 2, (0, 1, 0, 1)),
        # One giant has a partition to itself, the rest share the others.
        ([100, 1, 1, 1, 1], 3, (0, 1, 2, 1, 2)),
        ([8, 7, 6, 5, 4], 2, (0, 1, 1, 0, 0)),
        # Stores without bytes are spread too: each still costs a start.
        ([0, 0, 0, 0], 2, (0, 1, 0, 1)),
        ([3, 2], 9, (0, 1)),
    ],
)
def test_the_largest_goes_where_there_is_least(sizes: list[int], partitions: int, expected: tuple[int, ...]) -> None:
    assert assign_by_bytes(sizes, partitions) == expected


@given(sizes_lists, st.integers(1, 20))
def test_every_partition_is_used_and_the_first_is_the_heaviest(sizes: list[int], partitions: int) -> None:
    chosen = assign_by_bytes(sizes, partitions)
    loads = Counter(dict.fromkeys(chosen, 0))
    for number, size in zip(chosen, sizes, strict=True):
        loads[number] += size
    assert len(chosen) == len(sizes)
    assert set(loads) == set(range(min(partitions, len(sizes))))
    assert [loads[n] for n in sorted(loads)] == sorted(loads.values(), reverse=True)


@given(sizes_lists.filter(bool), st.integers(1, 20))
def test_the_heaviest_partition_is_within_four_thirds_of_a_lower_bound_of_the_best(
    sizes: list[int], partitions: int
) -> None:
    chosen = assign_by_bytes(sizes, partitions)
    heaviest = max(sum(s for s, n in zip(sizes, chosen, strict=True) if n == number) for number in set(chosen))
    # Graham: mean load plus the last store put there; the exact optimum is not needed for this bound.
    assert heaviest <= sum(sizes) / partitions + max(sizes)


@given(st.lists(st.integers(0, 100), max_size=9), st.integers(1, 3))
def test_small_cases_are_within_four_thirds_of_the_optimum(sizes: list[int], partitions: int) -> None:
    def best(position: int, loads: tuple[int, ...]) -> int:
        if position == len(sizes):
            return max(loads)
        choices = {tuple(sorted((*loads[:i], loads[i] + sizes[position], *loads[i + 1 :]))) for i in range(partitions)}
        return min(best(position + 1, choice) for choice in choices)

    chosen = assign_by_bytes(sizes, partitions)
    heaviest = max((sum(s for s, n in zip(sizes, chosen, strict=True) if n == number) for number in chosen), default=0)
    assert 3 * heaviest <= 4 * best(0, (0,) * partitions)
