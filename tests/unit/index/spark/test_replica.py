"""The files of a followed query that are not Spark's (design 0011, Q5 and Q7)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import BatchLogError
from index.spark.query_logs import decode_commit, decode_offsets, decode_query_id
from index.spark.replica import Fence, Replica, decode_fence, decode_replica, encode_fence, encode_replica

REPLICA = Replica(id="0123456789abcdef0123", replica_of="s3://bucket/query", metadata='{"id":"x"}', partitions=16)


def test_the_metadata_of_a_replica_has_an_object_for_an_id() -> None:
    data = encode_replica(REPLICA)
    assert decode_replica(data) == REPLICA
    wire = json.loads(data)["id"]
    assert next(iter(wire)) == "hint"
    assert "`tidemark spark cutover`" in wire["hint"]
    assert (wire["replicaOf"], wire["partitions"], wire["format"]) == ("s3://bucket/query", 16, 1)
    with pytest.raises(BatchLogError, match="metadata: is that of a replica of s3://bucket/query") as refused:
        decode_query_id(data)
    assert refused.value.hint == REPLICA.hint


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"null", b'{"id":"x"}', b'{"id":null}', b"\xff", b"[" * 100_000])
def test_metadata_of_something_else_is_of_no_replica(data: bytes) -> None:
    assert decode_replica(data) is None


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"provider": "hdfs"}, {"replicaOf": 1}, {"partitions": "2"}, {"id": "x"}]
)
def test_metadata_of_a_newer_replica_is_refused(change: dict[str, object]) -> None:
    wire = json.loads(encode_replica(REPLICA))
    wire["id"] |= change
    with pytest.raises(BatchLogError, match="metadata: is not that of a replica"):
        decode_replica(json.dumps(wire).encode())


@given(st.text())
def test_a_fence_says_where_the_query_is_in_one_line(target: str) -> None:
    try:
        line = encode_fence(fence := Fence(REPLICA.id, target))
    except UnicodeEncodeError:
        return
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_fence(line) == fence
    for decode in (decode_offsets, decode_commit):
        with pytest.raises(BatchLogError, match="is closed: the query has moved to"):
            decode(line)


@pytest.mark.parametrize("data", [b"", b"v1\n{}", b"the query has moved to \n", b'x the query has moved to "y" by'])
def test_an_entry_of_a_log_is_no_fence(data: bytes) -> None:
    assert decode_fence(data) is None
