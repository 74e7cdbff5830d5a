"""Which partitions become which, and what the files of a query say then (design 0010, P1, P3 and P5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import BatchLogError, StoreMergeError
from index.spark.metadata import NOT_COUNTED, StateMetadata, StoredFile
from index.spark.query_logs import decode_operator
from index.spark.rescale import group_partitions, merge_state_metadata, repartition_operator

counts = st.integers(1, 60)


@given(counts, counts, st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_a_row_stays_within_its_group(before: int, after: int, hashes: list[int]) -> None:
    groups = group_partitions(before, after)
    assert sorted(n for group in groups for n in group.sources) == list(range(before))
    assert sorted(n for group in groups for n in group.targets) == list(range(after))
    assert all(len(group.targets) == 1 for group in groups) == (before % after == 0)
    for hashed in hashes:
        assert sum(hashed % before in g.sources and hashed % after in g.targets for g in groups) == 1


def metadata(num_keys: int, internal: int, ids: dict[str, int]) -> StateMetadata:
    return StateMetadata(
        sst_files=(StoredFile("000008.sst", "000008-u.sst", 7),),
        num_keys=num_keys,
        num_internal_keys=internal,
        column_family_ids=tuple(ids.items()),
        column_family_internal=tuple((name, name.startswith("$")) for name in ids),
        column_family_id_max=max(ids.values(), default=0),
    )


def test_keys_are_added_up_where_all_are_counted() -> None:
    ids = {"default": 1, "$timers": 2}
    parts = [metadata(3, 1, ids), metadata(4, 0, dict(reversed(ids.items())))]
    merged = merge_state_metadata(parts, subject="store")
    assert (merged.num_keys, merged.num_internal_keys, merged.sst_files) == (7, 1, ())
    assert dict(merged.column_family_ids or ()) == ids
    uncounted = merge_state_metadata([*parts, metadata(NOT_COUNTED, 0, ids)], subject="store")
    assert (uncounted.num_keys, uncounted.num_internal_keys) == (NOT_COUNTED, 1)


def test_column_families_of_other_numbers_are_refused() -> None:
    with pytest.raises(StoreMergeError, match="number their column families differently"):
        merge_state_metadata([metadata(1, 0, {"default": 1}), metadata(1, 0, {"default": 2})], subject="store")


def test_the_number_of_partitions_of_an_operator_is_replaced() -> None:
    stores = ",".join(f'{{"storeName":"{name}","numColsPrefixKey":0,"numPartitions":4}}' for name in ("left", "right"))
    text = '{"operatorInfo":{"operatorId":0,"operatorName":"join"},"stateStoreInfo":[%s]}'
    after = repartition_operator(b"v1\n" + (text % stores).encode(), 2, subject="metadata")
    assert [store.partitions_count for store in decode_operator(after).stores] == [2, 2]
    assert after == b"v1\n" + (text % stores).replace(":4", ":2").encode()
    with pytest.raises(BatchLogError):
        repartition_operator(b"v1\n[]", 2, subject="metadata")
