"""The `metadata` entry of a snapshot, against the text that Spark writes."""

import json
from typing import Any

import msgspec
import pytest

from index.errors import FormatError, StateMetadataError, UnknownFormatError, UnsafeNameError
from index.spark.metadata import NOT_COUNTED, StateMetadata, StoredFile, decode_state_metadata, encode_state_metadata

SST = StoredFile("00001.sst", "00001-uuid.sst", 12345678901234)
LOG = StoredFile("00001.log", "00001-uuid.log", 12345678901234)

# Value and text of RocksDBCheckpointMetadata.json in Spark 4.3.0.
SPARK_TEXTS = [
    (StateMetadata(num_keys=0), '{"sstFiles":[],"numKeys":0,"numInternalKeys":0}'),
    (
        StateMetadata(sst_files=(SST,), num_keys=12345678901234),
        (
            '{"sstFiles":[{"localFileName":"00001.sst","dfsSstFileName":"00001-uuid.sst","sizeBytes":12345678901234}],'
            '"numKeys":12345678901234,"numInternalKeys":0}'
        ),
    ),
    (
        StateMetadata(sst_files=(SST,), log_files=(LOG,), num_keys=12345678901234),
        (
            '{"sstFiles":[{"localFileName":"00001.sst","dfsSstFileName":"00001-uuid.sst","sizeBytes":12345678901234}],'
            '"logFiles":[{"localFileName":"00001.log","dfsLogFileName":"00001-uuid.log","sizeBytes":12345678901234}],'
            '"numKeys":12345678901234,"numInternalKeys":0}'
        ),
    ),
    (
        StateMetadata(
            sst_files=(SST,),
            log_files=(LOG,),
            num_keys=-1,
            num_internal_keys=7,
            column_family_ids=(("default", 1), ('naïve \1"\\/\u2028', 2), ("\U0001f600", 3)),
            column_family_internal=(("default", False), ("$x", True)),
            column_family_id_max=5,
        ),
        (
            '{"sstFiles":[{"localFileName":"00001.sst","dfsSstFileName":"00001-uuid.sst","sizeBytes":12345678901234}],'
            '"logFiles":[{"localFileName":"00001.log","dfsLogFileName":"00001-uuid.log","sizeBytes":12345678901234}],'
            '"numKeys":-1,"numInternalKeys":7,'
            '"columnFamilyMapping":{"default":1,"naïve \\u0001\\"\\\\/\u2028":2,"\U0001f600":3},'
            '"columnFamilyTypeMap":{"default":false,"$x":true},"maxColumnFamilyId":5}'
        ),
    ),
]


def changed(metadata: StateMetadata, **fields: Any) -> StateMetadata:
    return msgspec.structs.replace(metadata, **fields)


@pytest.mark.spark_case(21)
@pytest.mark.parametrize("metadata,text", SPARK_TEXTS)
def test_metadata_is_written_and_read_as_spark_does(metadata: StateMetadata, text: str) -> None:
    data = f"v1\n{text}".encode()
    assert encode_state_metadata(metadata) == data
    assert decode_state_metadata(data) == metadata


def test_control_characters_are_written_with_capitals_as_jackson_writes_them() -> None:
    metadata = StateMetadata(num_keys=0, column_family_ids=(("\x1f\\u001f", 1),), column_family_id_max=1)
    data = encode_state_metadata(metadata)
    assert b'"\\u001F\\\\u001f":1' in data
    assert decode_state_metadata(data) == metadata


@pytest.mark.spark_case(21)
@pytest.mark.parametrize(
    "text,expected",
    [
        pytest.param('{"sstFiles":[],"numKeys":0}', StateMetadata(num_keys=0), id="Spark 3.2 to 3.5"),
        pytest.param(
            '{"sstFiles":[],"numKeys":3,"columnFamilyMapping":{"default":0},"maxColumnFamilyId":0}',
            StateMetadata(
                num_keys=3, num_internal_keys=-1, column_family_ids=(("default", 0),), column_family_id_max=0
            ),
            id="Spark 4.0.0",
        ),
        pytest.param(
            '{"sstFiles":[],"numKeys":3,"numInternalKeys":0,"columnFamilyMapping":{},"columnFamilyTypeMap":{},'
            '"maxColumnFamilyId":0}',
            StateMetadata(num_keys=3, column_family_ids=(), column_family_internal=(), column_family_id_max=0),
            id="Spark 4.3 without column families",
        ),
        pytest.param(
            '{"numKeys" : 3, "later":[{"a":null}], "sstFiles":[]}', StateMetadata(num_keys=3), id="unknown fields"
        ),
    ],
)
def test_what_other_versions_of_spark_write_is_read(text: str, expected: StateMetadata) -> None:
    assert decode_state_metadata(f"v1\n{text}".encode()) == expected


def test_absent_fields_stay_absent() -> None:
    """Case 21 of Spark, for the one field without which Spark 4.3 cannot read: it is written as 0."""
    older = decode_state_metadata(b'v1\n{"sstFiles":[],"numKeys":0}')
    assert set(json.loads(encode_state_metadata(older)[3:])) == {"sstFiles", "numKeys", "numInternalKeys"}


@pytest.mark.spark_case(21)
@pytest.mark.parametrize("start", [b"v2\n", b"v1", b"v1\r\n", b"", b"{", b"v10\n", b"\xff\xfe\n"])
def test_another_first_line_is_an_error_that_shows_it(start: bytes) -> None:
    with pytest.raises(UnknownFormatError, match="not 'v1'") as error:
        decode_state_metadata(start + b'{"sstFiles":[],"numKeys":0}', subject="3.zip/metadata")
    assert error.value.subject == "3.zip/metadata"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"numKeys":0}',
        '{"sstFiles":[]}',
        '{"sstFiles":null,"numKeys":0}',
        '{"sstFiles":[],"numKeys":"0"}',
        '{"sstFiles":[],"numKeys":0.5}',
        '{"sstFiles":[{"localFileName":"1.sst","sizeBytes":1}],"numKeys":0}',
        '{"sstFiles":[],"numKeys":0} trailing',
        '{"sstFiles":[],"numKeys":0,"columnFamilyMapping":{"default":true},"maxColumnFamilyId":1}',
        '{"sstFiles":[],"numKeys":0,"x":' + "[" * 100_000,
        '{"sstFiles":[],"numKeys":0,"columnFamilyMapping":{"\ud800":1},"maxColumnFamilyId":1}',
    ],
)
def test_what_is_no_metadata_is_refused(text: str) -> None:
    with pytest.raises(StateMetadataError):
        decode_state_metadata(b"v1\n" + text.encode("utf-8", "surrogatepass"))


FAMILIES = StateMetadata(
    num_keys=0,
    column_family_ids=(("default", 1), ("a", 2)),
    column_family_internal=(("default", False), ("a", False)),
    column_family_id_max=2,
)


@pytest.mark.parametrize(
    "metadata,message",
    [
        (changed(FAMILIES, column_family_id_max=None), "without the other"),
        (changed(FAMILIES, column_family_ids=None), "without the other"),
        (changed(FAMILIES, column_family_id_max=1), "'a' the id 2"),
        (changed(FAMILIES, column_family_ids=(("default", 1), ("a", -1))), "'a' the id -1"),
        (changed(FAMILIES, column_family_ids=(("default", 1), ("a", 1))), "twice"),
        (changed(FAMILIES, column_family_ids=(("a", 1), ("a", 2))), "twice"),
        (changed(FAMILIES, column_family_id_max=0x8000), "greatest column family id of 32768"),
        (StateMetadata(num_keys=0, sst_files=(SST, StoredFile(SST.local_name, "b.sst", 1))), "twice"),
        (StateMetadata(num_keys=0, sst_files=(StoredFile("00001.sst", "b.sst", -1),)), r"00001\.sst a size of -1"),
        (StateMetadata(num_keys=0, sst_files=(StoredFile("00001.sst", "b.sst", 2**63),)), r"00001\.sst a size of"),
    ],
)
def test_values_out_of_range_are_refused_in_both_directions(metadata: StateMetadata, message: str) -> None:
    with pytest.raises(StateMetadataError, match=message) as error:
        encode_state_metadata(metadata)
    assert error.value.hint
    if message == "twice" and metadata.column_family_ids == (("a", 1), ("a", 2)):
        return  # JSON has no way to say it
    with pytest.raises(FormatError) as read_error:
        decode_state_metadata(b"v1\n" + json.dumps(wire(metadata)).encode(), subject="3.zip/metadata")
    assert "3.zip/metadata" in "".join([str(read_error.value), *getattr(read_error.value, "__notes__", [])])


@pytest.mark.parametrize(
    "metadata, message",
    [
        (StateMetadata(num_keys=-2, num_internal_keys=3), "counts -2 keys"),
        (StateMetadata(num_keys=3, num_internal_keys=-2), "counts -2 internal keys"),
    ],
)
def test_a_number_of_keys_below_nothing_is_never_written_and_read_as_none(
    metadata: StateMetadata, message: str
) -> None:
    with pytest.raises(StateMetadataError, match=message):
        encode_state_metadata(metadata)
    read = decode_state_metadata(b"v1\n" + json.dumps(wire(metadata)).encode())
    assert sorted([read.num_keys, read.num_internal_keys]) == [NOT_COUNTED, 3]


def wire(metadata: StateMetadata) -> dict[str, Any]:
    ids, internal = metadata.column_family_ids, metadata.column_family_internal
    fields = {
        "sstFiles": [
            {"localFileName": f.local_name, "dfsSstFileName": f.stored_name, "sizeBytes": f.size_bytes}
            for f in metadata.sst_files
        ],
        "logFiles": [
            {"localFileName": f.local_name, "dfsLogFileName": f.stored_name, "sizeBytes": f.size_bytes}
            for f in metadata.log_files
        ],
        "numKeys": metadata.num_keys,
        "numInternalKeys": metadata.num_internal_keys,
        "columnFamilyMapping": None if ids is None else dict(ids),
        "columnFamilyTypeMap": None if internal is None else dict(internal),
        "maxColumnFamilyId": metadata.column_family_id_max,
    }
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    "metadata",
    [
        *(
            StateMetadata(num_keys=0, sst_files=(StoredFile(local, stored, 1),))
            for local, stored in [
                ("../00001.sst", "a.sst"),
                ("a.sst", "a.sst"),
                ("00001.log", "a.sst"),
                ("00001.sst", "../a.sst"),
                ("00001.sst", "a.log"),
                ("00001.sst", ""),
            ]
        ),
        *(
            StateMetadata(num_keys=0, log_files=(StoredFile(local, stored, 1),))
            for local, stored in [("a/00001.log", "a.log"), ("00001.sst", "a.log"), ("00001.log", "/a.log")]
        ),
    ],
)
def test_a_name_that_leads_out_of_the_directory_is_refused_in_both_directions(metadata: StateMetadata) -> None:
    with pytest.raises(UnsafeNameError):
        encode_state_metadata(metadata)
    with pytest.raises(UnsafeNameError):
        decode_state_metadata(b"v1\n" + json.dumps(wire(metadata)).encode())


def test_a_name_of_a_column_family_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(StateMetadataError, match="Unicode"):
        encode_state_metadata(StateMetadata(num_keys=0, column_family_ids=(("\ud800", 1),), column_family_id_max=1))
