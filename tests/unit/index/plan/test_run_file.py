"""Names and headers of what a collection on Spark writes down (design 0006, R2)."""

import pytest

from index.errors import CorruptIndexError, UnknownFormatError
from index.plan.plan_format import SHARDS, RunHeader, decode_run_header, digest_of, encode_run_header, group_by_shard
from index.snapshot.keys import BLOBS, INDEXES, make_run_id, run_key, shard_prefixes, upload_key
from index.snapshot.model import Scope

RUN = make_run_id(1_700_000_000_000, "0123456789abcdef0123")


def test_shards_are_all_prefixes_in_the_order_of_their_keys() -> None:
    prefixes = [shard.prefix for shard in SHARDS]
    assert prefixes == [*shard_prefixes(BLOBS), *shard_prefixes(INDEXES)] == sorted(prefixes)


def test_every_object_of_a_run_has_a_key_of_its_own() -> None:
    digests = [digest_of(b"one"), digest_of(b"another")]
    names = [shard.inventory_name for shard in SHARDS]
    names += [name(digest) for s in SHARDS for digest in digests for name in (s.plan_name, s.done_name)]
    assert len({run_key(RUN, name) for name in names}) == 5 * len(SHARDS)


def test_keys_are_grouped_by_where_they_stand() -> None:
    keys = [upload_key(prefix, Scope("job"), "0" * 20, n) for prefix in (BLOBS, INDEXES) for n in range(600)]
    groups = group_by_shard(keys)
    assert sorted(key for group in groups.values() for key in group) == sorted(keys)
    assert all(key.startswith(shard.prefix) for shard, group in groups.items() for key in group)


@pytest.mark.parametrize("key", ["", "blobs/", "blobs/0g/x", "log/job/1.commit", "blobs00/x", "indexes/0/x"])
def test_a_key_of_no_shard_is_refused(key: str) -> None:
    with pytest.raises(CorruptIndexError):
        group_by_shard([key])


def test_a_header_comes_back() -> None:
    header = RunHeader(run=RUN, repository_id="id", release="1.2")
    assert decode_run_header(encode_run_header(header), subject="h") == header


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"schema":"1"}', b"[" * 100_000])
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptIndexError):
        decode_run_header(data, subject="h")


def test_a_header_of_a_newer_release_is_reported_as_such() -> None:
    newer = encode_run_header(RunHeader(schema=2, run=RUN, repository_id="id", release="9"))
    with pytest.raises(UnknownFormatError):
        decode_run_header(newer[:-1] + b',"more":1}', subject="h")
