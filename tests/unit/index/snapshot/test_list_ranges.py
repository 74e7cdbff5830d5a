"""How a long list is split: nothing twice, nothing left out, and not into more parts than pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.snapshot.keys import BLOBS, INDEXES, KeyRange, choose_list_ranges, shard_prefixes, upload_key
from index.snapshot.model import Scope

PREFIXES = st.sampled_from(["", BLOBS, INDEXES, "blobs/3f/", "log/"])
TAILS = st.one_of(
    st.text("0123456789abcdefz/", max_size=6),
    st.builds(lambda n: upload_key(BLOBS, Scope("job"), f"{n:020x}", n).removeprefix(BLOBS), st.integers(0, 2**20)),
    st.sampled_from([cut.removeprefix(BLOBS) for cut in shard_prefixes(BLOBS)]),
)


@given(prefix=PREFIXES, reached=TAILS, keys=st.lists(TAILS, max_size=50))
def test_every_key_after_the_first_page_is_in_exactly_one_range(prefix: str, reached: str, keys: list[str]) -> None:
    reached = prefix + reached
    ranges = choose_list_ranges(prefix, reached)
    assert ranges[0].after == reached
    for key in (prefix + tail for tail in keys):
        holding = [part for part in ranges if part.after < key and part.reaches(key)]
        assert len(holding) == (key > reached)


@pytest.mark.parametrize(
    "last_shard, ranges",
    [
        (0x80, 1),  # two pages
        (0x20, 1),  # eight pages
        (0x10, 3),  # 16 pages
        (0x02, 21),  # 85 pages
        (0x00, 63),  # 256 pages or more: nobody knows from a page that ends in the first shard
        (0xFF, 1),
    ],
)
def test_a_list_is_split_into_parts_of_some_pages(last_shard: int, ranges: int) -> None:
    assert len(choose_list_ranges(BLOBS, f"{BLOBS}{last_shard:02x}/job/x")) == ranges


def test_what_has_no_shards_is_not_split() -> None:
    assert choose_list_ranges("log/", "log/job/x") == (KeyRange("log/job/x"),)
    assert choose_list_ranges("blobs/3f/", "blobs/3f/job/x") == (KeyRange("blobs/3f/job/x"),)
