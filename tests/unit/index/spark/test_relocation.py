import json

import pytest

from index.errors import BatchLogError, UnsafeNameError
from index.spark.checkpoint import PathMap, relocate_operator
from index.spark.query_logs import OperatorMetadata, OperatorStore, decode_operator
from tests.unit.index.spark.written_metadata import encode_operator

SCHEMA = "state/0/_stateSchema/default/0_abc"


def metadata(*paths: str) -> bytes:
    store = OperatorStore(name="default", prefix_columns_count=0, partitions_count=2, schema_paths=paths)
    operator = OperatorMetadata(version=2, id=0, name="transformWithStateExec", stores=(store,), properties='{"a":"/"}')
    return encode_operator(operator)


def relocated(path: str, target: str) -> str:
    data = relocate_operator(metadata(path), target, subject="metadata")
    return decode_operator(data).stores[0].schema_paths[0]


@pytest.mark.parametrize(
    "path, target, expected",
    [
        # As Spark writes it, on a file system and on S3.
        (f"file:/old/place/{SCHEMA}", "/new", f"file:/new/{SCHEMA}"),
        (f"s3a://bucket/old/{SCHEMA}", "s3://other/new", f"s3a://other/new/{SCHEMA}"),
        # The scheme stays where the kind of store does.
        (f"/old/{SCHEMA}", "/new", f"/new/{SCHEMA}"),
        (f"file:///old/{SCHEMA}", "/new", f"file:///new/{SCHEMA}"),
        (f"s3://bucket/old/{SCHEMA}", "s3a://other/new/", f"s3://other/new/{SCHEMA}"),
        (f"s3n://bucket/old/{SCHEMA}", "s3://other/new", f"s3n://other/new/{SCHEMA}"),
        # And goes where it does not.
        (f"file:/old/{SCHEMA}", "s3://other/new", f"s3a://other/new/{SCHEMA}"),
        (f"s3a://bucket/old/{SCHEMA}", "/new", f"file:/new/{SCHEMA}"),
        (f"hdfs://host:9000/old/{SCHEMA}", "/new", f"file:/new/{SCHEMA}"),
        (f"file:/old/{SCHEMA}", "abfss://c@account/new", f"abfss://c@account/new/{SCHEMA}"),
        # A checkpoint whose own path looks like a part of one: the last one counts.
        (f"file:/a/{SCHEMA}/{SCHEMA}", "/new", f"file:/new/{SCHEMA}"),
        ("file:/a b/ü/state/12/_stateSchema/left/7_x", "/n w", "file:/n w/state/12/_stateSchema/left/7_x"),
    ],
)
def test_what_stands_behind_the_root_stays(path: str, target: str, expected: str) -> None:
    assert relocated(path, target) == expected


def test_nothing_else_in_the_file_changes() -> None:
    before, after = (
        metadata(f"file:/old/{SCHEMA}"),
        relocate_operator(metadata(f"file:/old/{SCHEMA}"), "/new", subject="metadata"),
    )
    assert after == before.replace(b"file:/old/", b"file:/new/")


def test_fields_that_nobody_knows_stay() -> None:
    first, _, text = metadata(f"file:/old/{SCHEMA}").partition(b"\n")
    parsed = json.loads(text) | {"later": {"a": [1]}}
    data = first + b"\n" + json.dumps(parsed).encode()
    after = relocate_operator(data, "/new", subject="metadata")
    assert json.loads(after.partition(b"\n")[2])["later"] == {"a": [1]}


def test_an_operator_without_paths_stays_as_it_is() -> None:
    store = OperatorStore(name="default", prefix_columns_count=0, partitions_count=2)
    data = encode_operator(OperatorMetadata(id=0, name="stateStoreSave", stores=(store,)))
    assert relocate_operator(data, "/new", subject="metadata") == data


@pytest.mark.parametrize("path", ["file:/somewhere/else", "", f"file:/old/{SCHEMA}".replace("_stateSchema", "schema")])
def test_what_is_no_schema_file_is_refused(path: str) -> None:
    with pytest.raises(BatchLogError, match="not a schema file"):
        relocated(path, "/new")


@pytest.mark.parametrize("rest", ["../../../etc/passwd", "default//x", "default/./x"])
def test_a_path_does_not_lead_out_of_the_checkpoint(rest: str) -> None:
    with pytest.raises(UnsafeNameError):
        relocated(f"file:/old/state/0/_stateSchema/{rest}", "/new")


@pytest.mark.parametrize(
    "old, new, path, expected",
    [
        ("/in", "/new", "file:///in/a.json", "file:///new/a.json"),
        ("/in/", "/new/", "file:/in/a.json", "file:///new/a.json"),
        ("/in", "s3a://bucket/in", "file:///in/b/a.json", "s3a://bucket/in/b/a.json"),
        ("s3a://bucket/in", "/new", "s3a://bucket/in/a.json", "file:///new/a.json"),
        ("file:///in", "file:///new", "file:///in/a.json", "file:///new/a.json"),
        # As people write a path, and as a URL has it.
        ("/in here", "/ü", "file:///in%20here/a%20b.json", "file:///%C3%BC/a%20b.json"),
        # At whole components.
        ("/in", "/new", "file:///input/a.json", "file:///input/a.json"),
        ("/in", "/new", "s3a://in/a.json", "s3a://in/a.json"),
        ("/in", "/new", "hdfs://host/in/a.json", "hdfs://host/in/a.json"),
    ],
)
def test_prefixes_are_mapped_at_whole_components(old: str, new: str, path: str, expected: str) -> None:
    assert PathMap({old: new}).relocate(path) == expected


def test_the_longer_of_two_prefixes_counts() -> None:
    paths = PathMap({"/a": "/x", "/a/b": "/y"})
    assert [paths.relocate(f"file:///a/{rest}") for rest in ("b/1", "c/1")] == ["file:///y/1", "file:///x/c/1"]
    assert paths.unused == set()


def test_a_mapping_that_matches_nothing_is_known() -> None:
    paths = PathMap({"/a": "/x", "/b": "/y"})
    paths.relocate("file:///a/1")
    assert paths.unused == {"/b"}


def test_a_source_log_keeps_everything_but_the_paths() -> None:
    entries = [{"path": f"file:///in/{n}.json", "timestamp": n, "batchId": n, "later": None} for n in range(3)]
    data = "\n".join(["v1", *(json.dumps(e, separators=(",", ":")) for e in entries)]).encode()
    found = PathMap({"/in": "/new"}).relocate_log(data)
    assert found == data.replace(b"file:///in/", b"file:///new/")


@pytest.mark.parametrize(
    "data",
    [b"", b"0", b'v1\n{"topic":{"0":5}}', b"v1\n[1]\n{", b'v1\n{"path":5}', b"\xff\n\xff", b'{"path":"file:///in/a"}'],
)
def test_a_log_of_another_source_stays_as_it_is(data: bytes) -> None:
    assert PathMap({"/in": "/new"}).relocate_log(data) == data
