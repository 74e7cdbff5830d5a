"""Which stores one task reads: small ones together, in their order."""

import pytest

from engine.settings import MIB
from engine.spark.sources.plan import CheckpointPlace, StoreRead, StoreWork, group_works
from engine.state.query import StoreAt
from engine.state.settings import StateStoreSettings
from index.spark.checkpoint import StoreId
from index.spark.names import StateVersion


def work(partition: int, size_bytes: int) -> StoreWork:
    store = StoreId(0, partition, "default")
    at = StoreAt(id=store, at=StateVersion(1), settings=StateStoreSettings())
    read = StoreRead(place=CheckpointPlace(location="/"), store=at, size_bytes=size_bytes)
    return StoreWork(id=store, reads=(read,), table=None)


@pytest.mark.parametrize(
    "sizes, most, groups",
    [
        ([], 32, []),
        ([0, 0], 32, [[0, 1]]),
        # Each counts 4 MiB more than it has.
        ([0] * 20, 32, [[*range(8)], [*range(8, 16)], [*range(16, 20)]]),
        ([12] * 5, 32, [[0, 1], [2, 3], [4]]),
        ([100, 1, 1, 100], 60, [[0], [1, 2], [3]]),
        ([100, 100], 32, [[0], [1]]),
        ([0, 1, 1], 0, [[0], [1], [2]]),
    ],
)
def test_small_stores_share_a_task(sizes: list[int], most: int, groups: list[list[int]]) -> None:
    works = [work(partition, size * MIB) for partition, size in enumerate(sizes)]
    found = group_works(works, most * MIB)
    assert [[each.id.partition for each in group] for group in found] == groups
