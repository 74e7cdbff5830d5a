"""Which stores one task reads: small ones together, in their order."""

import pytest

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
    "sizes, size_bytes_max, groups",
    [
        ([], 30, []),
        ([1, 1, 1], 30, [[0, 1, 2]]),
        ([10] * 8, 30, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ([100, 1, 1, 100], 60, [[0], [1, 2], [3]]),
        ([100, 100], 30, [[0], [1]]),
        ([1, 1, 1], 0, [[0], [1], [2]]),
        ([0, 0], 30, [[0, 1]]),
    ],
)
def test_small_stores_share_a_task(sizes: list[int], size_bytes_max: int, groups: list[list[int]]) -> None:
    works = [work(partition, size_bytes) for partition, size_bytes in enumerate(sizes)]
    found = group_works(works, size_bytes_max)
    assert [[each.id.partition for each in group] for group in found] == groups
