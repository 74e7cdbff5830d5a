"""How the rest of a long list is split, so that its parts can be listed at the same time (design 0001, K1)."""

from typing import Final

import msgspec

from index.snapshot.keys import BLOBS, INDEXES, shard_prefixes

# Each part costs at most one request more than its share of the whole list: a quarter at this size.
PAGES_PER_RANGE: Final = 4


class KeyRange(msgspec.Struct, frozen=True):
    """The keys of a prefix that sort after one key, up to and including another."""

    after: str
    # None: to the end.
    through: str | None = None

    def reaches(self, key: str) -> bool:
        """Whether a key is not past the end."""
        return self.through is None or key <= self.through


def choose_list_ranges(prefix: str, reached: str) -> tuple[KeyRange, ...]:
    """Split the keys of a prefix that sort after one into ranges of a few pages each.

    Uploads are spread evenly over the shards (design 0002, K2), so a first page tells about how many are left. The
    estimate decides how many ranges there are, and nothing else: whatever stands where, shards or not, every key
    after `reached` is in exactly one of them.

    Args:
        prefix: A room, or any other prefix: one that has no shards below it is not split.
        reached: The last key of the first page, which says how much of the prefix one page holds.

    Returns:
        Ranges in order; one, where more would not pay.
    """
    inside = [cut for room in (BLOBS, INDEXES) for cut in shard_prefixes(room) if cut.startswith(prefix)]
    cuts = [cut for cut in inside if cut > reached]
    pages_left = len(cuts) / max(1, len(inside) - len(cuts))
    count = max(1, min(len(cuts), int(pages_left) // PAGES_PER_RANGE))
    ends = [cuts[position * len(cuts) // count] for position in range(1, count)]
    return tuple(KeyRange(after, through) for after, through in zip((reached, *ends), (*ends, None), strict=True))
