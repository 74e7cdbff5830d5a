import json
from collections.abc import Callable

import msgspec
import pytest

from index.errors import BatchLogError, FormatError, UnknownFormatError
from index.snapshot.model import UniqueId
from index.spark.query_logs import (
    JOIN_STORES,
    BatchCommit,
    BatchOffsets,
    ControlBatch,
    OperatorMetadata,
    OperatorStore,
    SinkMetadata,
    SourceMetadata,
    SourceOffset,
    decode_commit,
    decode_offsets,
    decode_operator,
    decode_query_id,
    encode_commit,
    encode_offsets,
    order_stores,
    parse_batch_name,
)
from tests.unit.index.spark.written_metadata import encode_operator

change = msgspec.structs.replace

# As Spark 4.3 wrote them, the settings cut down to three.
OFFSETS_1 = (
    b'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1795300152652,"conf":{'
    b'"spark.sql.streaming.stateStore.rocksdb.formatVersion":"5","spark.sql.shuffle.partitions":"2",'
    b'"spark.sql.streaming.stateStore.compression.codec":"lz4"}}\n{"logOffset":1}\n-'
)
OFFSETS_2 = (
    b'v2\n{"batchWatermarkMs":7,"batchTimestampMs":9,"conf":{},"sourceMetadataInfo":{"clicks":{"sourceId":"clicks",'
    b'"providerName":"json","apiVersion":"v1"}}}\nclicks:{"logOffset":1}\nviews:-'
)
COMMIT_1 = b'v1\n{"nextBatchWatermarkMs":1704067641000}'
COMMIT_2 = (
    b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["eb21136c-f43c-4c87-a32f-51181890aeb9"],'
    b'["9d6e0324-838d-497b-9aad-7841d0c7ef1d"]],"1":[["a","b","c","d"]]}}'
)
COMMIT_3 = (
    b'v3\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["a"]]},"sinkMetadataMap":{"sink-0":{"sinkName":"sink-0",'
    b'"commitOffset":"-","providerName":"noop","apiVersion":"v2","isActive":true}}}'
)
OPERATOR_1 = (
    b'v1\n{"operatorInfo":{"operatorId":0,"operatorName":"stateStoreSave"},"stateStoreInfo":[{"storeName":"default",'
    b'"numColsPrefixKey":0,"numPartitions":2}]}'
)
OPERATOR_2 = (
    b'v2\n{"operatorInfo":{"operatorId":3,"operatorName":"symmetricHashJoin"},"stateStoreInfo":[{"storeName":"default",'
    b'"numColsPrefixKey":0,"numPartitions":2,"stateSchemaFilePaths":["file:/a/state/0/_stateSchema/default/0_b"]}],'
    b'"operatorPropertiesJson":"{\\"useVirtualColumnFamilies\\":true}"}'
)


@pytest.mark.parametrize("data", [OFFSETS_1, OFFSETS_2])
def test_sparks_offsets_come_back_byte_for_byte(data: bytes) -> None:
    assert encode_offsets(decode_offsets(data)) == data


@pytest.mark.parametrize("data", [COMMIT_1, COMMIT_2, COMMIT_3])
def test_sparks_commits_come_back_byte_for_byte(data: bytes) -> None:
    assert encode_commit(decode_commit(data)) == data


@pytest.mark.parametrize("data", [OPERATOR_1, OPERATOR_2])
def test_sparks_operators_come_back_byte_for_byte(data: bytes) -> None:
    assert encode_operator(decode_operator(data)) == data


def test_offsets_of_version_1_say_what_is_read_and_what_is_pinned() -> None:
    assert decode_offsets(OFFSETS_1) == BatchOffsets(
        version=1,
        timestamp_ms=1795300152652,
        conf={
            "spark.sql.streaming.stateStore.rocksdb.formatVersion": "5",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.stateStore.compression.codec": "lz4",
        },
        offsets=(SourceOffset("0", '{"logOffset":1}'), SourceOffset("1", None)),
    )


def test_offsets_of_version_2_name_their_sources() -> None:
    assert decode_offsets(OFFSETS_2) == BatchOffsets(
        version=2,
        watermark_ms=7,
        timestamp_ms=9,
        sources={"clicks": SourceMetadata(source_id="clicks", provider_name="json", api_version="v1")},
        offsets=(SourceOffset("clicks", '{"logOffset":1}'), SourceOffset("views", None)),
    )


def test_a_control_batch_is_reported_only_where_there_is_one() -> None:
    offsets = BatchOffsets(version=2, control=ControlBatch(operation_type="rescale"))
    assert b'"controlBatchInfo":{"operationType":"rescale"}' in encode_offsets(offsets)
    assert decode_offsets(encode_offsets(offsets)) == offsets
    assert b"controlBatchInfo" not in encode_offsets(change(offsets, control=None))


def test_offsets_without_metadata_are_those_of_spark_2_1() -> None:
    data = b'v1\n\n{"logOffset":1}'
    offsets = decode_offsets(data)
    assert offsets == BatchOffsets(has_metadata=False, offsets=(SourceOffset("0", '{"logOffset":1}'),))
    assert encode_offsets(offsets) == data


def test_offsets_that_lack_fields_have_their_defaults() -> None:
    assert decode_offsets(b"v1\n{}") == BatchOffsets()


def test_commit_of_version_2_has_the_ids_of_every_store_of_every_partition() -> None:
    assert decode_commit(COMMIT_2).unique_ids == {
        0: (("eb21136c-f43c-4c87-a32f-51181890aeb9",), ("9d6e0324-838d-497b-9aad-7841d0c7ef1d",)),
        1: (("a", "b", "c", "d"),),
    }


@pytest.mark.parametrize(
    "commit, data",
    [
        (BatchCommit(next_watermark_ms=5), b'v1\n{"nextBatchWatermarkMs":5}'),
        (BatchCommit(version=2), b'v2\n{"nextBatchWatermarkMs":0}'),
        (BatchCommit(version=2, unique_ids={}), b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}'),
        (
            BatchCommit(version=2, unique_ids={0: ((UniqueId("a"),), (UniqueId("b"),))}),
            b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["a"],["b"]]}}',
        ),
    ],
)
def test_a_commit_is_written_as_spark_writes_it(commit: BatchCommit, data: bytes) -> None:
    assert encode_commit(commit) == data
    assert decode_commit(data) == commit


def test_a_commit_of_its_version_alone_is_one() -> None:
    assert decode_commit(b"v1") == decode_commit(b"v1\n") == decode_commit(b"v1\n{}") == BatchCommit()


def test_ids_in_a_commit_of_version_1_mean_nothing() -> None:
    assert decode_commit(b"v1" + COMMIT_2[2:]) == BatchCommit()


def test_commit_of_version_3_has_one_active_sink() -> None:
    sink = SinkMetadata(sink_name="s", commit_offset="-", provider_name="noop", api_version="v2", is_active=True)
    assert decode_commit(COMMIT_3).sinks == {"sink-0": change(sink, sink_name="sink-0")}
    for sinks in ({}, {"s": change(sink, is_active=False)}, {"s": sink, "t": sink}):
        with pytest.raises(BatchLogError, match="not exactly one sink"):
            encode_commit(BatchCommit(version=3, sinks=sinks))
    with pytest.raises(BatchLogError, match="not exactly one sink"):
        decode_commit(COMMIT_3.replace(b"true", b"false"))


@pytest.mark.parametrize(
    "decode, newest",
    [(decode_offsets, 2), (decode_commit, 3), (decode_operator, 2)],
    ids=["offsets", "commit", "operator"],
)
def test_a_newer_version_is_refused_and_says_what_to_do(decode: Callable[[bytes], object], newest: int) -> None:
    for version in (newest + 1, 999_999_999):
        with pytest.raises(UnknownFormatError, match=f"is of version {version}; 1 to {newest} are known") as caught:
            decode(b"v%d\n{}" % version)
        assert "newer" in caught.value.hint
    with pytest.raises(UnknownFormatError):
        decode(b"v0\n{}")


@pytest.mark.parametrize("data", [b"", b"\n", b"1\n{}", b"v\n{}", b"v-1\n{}", b"vv1\n{}", b"{}", b"v1x\n{}", b"\xff"])
@pytest.mark.parametrize("decode", [decode_offsets, decode_commit, decode_operator])
def test_a_file_without_a_version_is_damaged(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(BatchLogError):
        decode(data)


@pytest.mark.parametrize(
    "decode, data",
    [
        (decode_offsets, b"v1"),
        (decode_offsets, b"v1\n{"),
        (decode_offsets, b'v1\n{"conf":{"a":1}}'),
        (decode_offsets, b"v2\n{}\nno colon"),
        (decode_commit, b'v1\n{"nextBatchWatermarkMs":"x"}'),
        (decode_commit, b'v2\n{"stateUniqueIds":{"x":[["a"]]}}'),
        (decode_commit, b'v2\n{"stateUniqueIds":{"0":["a"]}}'),
        (decode_commit, b"v3\n{}"),
        (decode_operator, b"v1\n{}"),
        (decode_operator, b"v1"),
        (decode_query_id, b""),
        (decode_query_id, b"{}"),
        (decode_query_id, b"\xff"),
    ],
)
def test_what_spark_does_not_write_is_refused(decode: Callable[..., object], data: bytes) -> None:
    with pytest.raises(BatchLogError, match="a-file"):
        decode(data, subject="a-file")


@pytest.mark.parametrize(
    "decode, first",
    [(decode_offsets, b"v1\n"), (decode_commit, b"v1\n"), (decode_operator, b"v1\n"), (decode_query_id, b"")],
    ids=["offsets", "commit", "operator", "query"],
)
def test_what_is_nested_too_deeply_is_refused(decode: Callable[..., object], first: bytes) -> None:
    depth = 100_000
    with pytest.raises(BatchLogError, match="a-file"):
        decode(first + b'{"x":' + b"[" * depth + b"]" * depth + b"}", subject="a-file")


@pytest.mark.parametrize(
    "offsets",
    [
        BatchOffsets(offsets=(SourceOffset("0", "two\nlines"),)),
        BatchOffsets(offsets=(SourceOffset("0", "two\rlines"),)),
        BatchOffsets(offsets=(SourceOffset("1", "{}"),)),
        BatchOffsets(control=ControlBatch(operation_type="x")),
        BatchOffsets(version=2, offsets=(SourceOffset("a:b", "{}"),)),
        BatchOffsets(version=2, offsets=(SourceOffset("", "{}"),)),
        BatchOffsets(version=3),
    ],
)
def test_offsets_that_would_not_come_back_are_refused(offsets: BatchOffsets) -> None:
    with pytest.raises(FormatError):
        encode_offsets(offsets)


def test_a_version_cannot_hold_what_came_later() -> None:
    with pytest.raises(BatchLogError, match="no field for unique ids"):
        encode_commit(BatchCommit(unique_ids={}))
    sink = SinkMetadata(sink_name="s", commit_offset="-", provider_name="noop", api_version="v2", is_active=True)
    with pytest.raises(BatchLogError, match="no field for sinks"):
        encode_commit(BatchCommit(version=2, sinks={"s": sink}))


def test_operator_of_version_2_has_schemas_and_properties() -> None:
    assert decode_operator(OPERATOR_2) == OperatorMetadata(
        version=2,
        id=3,
        name="symmetricHashJoin",
        stores=(
            OperatorStore(
                name="default",
                prefix_columns_count=0,
                partitions_count=2,
                schema_paths=("file:/a/state/0/_stateSchema/default/0_b",),
            ),
        ),
        properties='{"useVirtualColumnFamilies":true}',
    )


def test_what_is_not_known_in_the_json_is_passed_over() -> None:
    raw = json.loads(OPERATOR_1[3:]) | {"later": [1]}
    assert decode_operator(b"v1\n" + json.dumps(raw, indent=1).encode()) == decode_operator(OPERATOR_1)


def test_keys_of_a_newer_spark_are_not_taken_for_ours() -> None:
    later = b'{"batchWatermarkMs":3,"version":"4.3","offsets":5,"has_metadata":0}'
    assert decode_offsets(b"v1\n" + later).watermark_ms == 3
    assert decode_commit(b'v1\n{"nextBatchWatermarkMs":3,"version":"4.3"}').next_watermark_ms == 3


def test_the_query_has_an_id() -> None:
    data = b'{"id":"7fa8bab2-f2eb-46aa-8204-097f99d47da9"}'
    assert decode_query_id(data) == decode_query_id(data + b"\n") == "7fa8bab2-f2eb-46aa-8204-097f99d47da9"


def test_stores_of_a_join_stand_in_the_order_of_their_ids() -> None:
    assert order_stores(reversed(JOIN_STORES)) == JOIN_STORES
    assert order_stores(["default"]) == ("default",)
    assert order_stores([]) == ()
    with pytest.raises(BatchLogError, match="a, b, in no known order"):
        order_stores(["a", "b"])


@pytest.mark.parametrize(
    "name, batch",
    [
        ("0", 0),
        ("17", 17),
        ("9223372036854775806", 9223372036854775806),
        ("9223372036854775807", None),
        ("99999999999999999999", None),
        ("00", None),
        ("-1", None),
        ("9.compact", None),
        (".1.crc", None),
        ("٣", None),
        ("", None),
    ],
)
def test_only_canonical_numbers_are_batches(name: str, batch: int | None) -> None:
    assert parse_batch_name(name) == batch
