"""Hash every key of an open store, and refuse the first that is not in its partition (design 0010, H9)."""

from collections.abc import Collection, Iterator
from typing import Protocol

from engine.state.key_rules import Partitioner, StoreRules, check_keys, partitions_of


class RowsByFamily(Protocol):
    def chunks(self, family: str, *, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]: ...


def check_store(
    rules: StoreRules,
    reader: RowsByFamily,
    families: Collection[str],
    partition: int,
    *,
    partitioner: Partitioner = partitions_of,
) -> dict[str, int]:
    """Return how many keys each of these column families has, all of them in place. Raises as `check_keys`."""
    counts = dict.fromkeys(families, 0)
    for family in families:
        rule = rules.families.get(family)
        for pairs in reader.chunks(family, rows_max=32_768, bytes_max=4 * 1024 * 1024):
            keys = [key for key, _ in pairs]
            found = [0] * len(keys) if rule is None else partitioner(rule, keys, rules.operator.partitions_count)
            check_keys(rules, family, keys, found, partition, checked=sum(counts.values()))
            counts[family] += len(keys)
    return counts
