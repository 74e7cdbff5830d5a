"""Which partitions of a query become which others, and what its files say then (design 0010, section 3).

A row is in partition `pmod(hash, n)` of n, where the hash is Spark's Murmur3 of the key columns, a signed number.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from index.errors import StoreMergeError
from index.java_text import encode_jackson
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.query_logs import decode_operator


class PartitionGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Partitions whose rows become those of other partitions, and of no others."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


def group_partitions(before: int, after: int) -> tuple[PartitionGroup, ...]:
    """Split the partitions of a store, `before` and `after` of them, into as many groups as can be (P1)."""
    groups = math.gcd(before, after)
    return tuple(
        PartitionGroup(sources=tuple(range(n, before, groups)), targets=tuple(range(n, after, groups)))
        for n in range(groups)
    )


def merge_state_metadata(parents: Sequence[StateMetadata], *, subject: str) -> StateMetadata:
    """Combine what snapshots of at least one partition say into what one of all their rows says, without files (P3).

    Raises:
        StoreMergeError: A column family has another number in one of them: its keys begin with it.
    """
    first = parents[0]
    for each in parents:
        same = (set(each.column_family_ids or ()), set(each.column_family_internal or ()))
        if same != (set(first.column_family_ids or ()), set(first.column_family_internal or ())):
            hint = "these partitions cannot become one"
            raise StoreMergeError("its partitions number their column families differently", subject=subject, hint=hint)
    return msgspec.structs.replace(
        first,
        sst_files=(),
        log_files=(),
        num_keys=_sum([each.num_keys for each in parents]),
        num_internal_keys=_sum([each.num_internal_keys for each in parents]),
        column_family_id_max=max((each.column_family_id_max or 0 for each in parents), default=None),
    )


def _sum(counts: Sequence[int]) -> int:
    return NOT_COUNTED if NOT_COUNTED in counts else sum(counts)


def repartition_operator(data: bytes, partitions: int, *, subject: str) -> bytes:
    """Rewrite the number of partitions in the metadata of an operator (P5).

    Raises:
        BatchLogError: It is not what Spark writes.
    """
    decode_operator(data, subject=subject)
    first, newline, text = data.partition(b"\n")
    parsed: dict[str, Any] = msgspec.json.decode(text)
    for store in parsed["stateStoreInfo"]:
        store["numPartitions"] = partitions
    return first + newline + encode_jackson(parsed)
