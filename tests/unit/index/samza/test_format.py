import json
from pathlib import Path as FilePath
from typing import Any

import msgspec
import pytest

from index.errors import FormatError, SamzaFormatError, UnsafeNameError
from index.samza.format import (
    SamzaFile,
    decode_samza_index,
    encode_samza_index,
    from_samza,
    parse_samza_checkpoint_id,
    samza_checkpoint_id,
    to_samza,
)
from index.snapshot.model import BlobKey, DirIndex, FileBlob, Pack, SnapshotIndex
from tests.unit.index.builders import EMPTY, SESSION, backup, blob_key, content_hash, file_index, metadata, parse_tree

change = msgspec.structs.replace

GOLDEN = (FilePath(__file__).parents[3] / "golden" / "samza" / "samza_snapshot_index.json").read_bytes()
CHECKPOINT = "1621987200123-456789"


def golden() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(GOLDEN)
    return raw


def encoded(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw).encode()


def index_of(directory: DirIndex, packs: tuple[Pack, ...] = ()) -> SnapshotIndex:
    return SnapshotIndex(metadata=backup({}).metadata, session=SESSION, dir=directory, packs=packs)


def exported(directory: DirIndex, packs: tuple[Pack, ...] = ()) -> dict[str, Any]:
    samza = to_samza(index_of(directory, packs), job_id="1", checkpoint_id=CHECKPOINT)
    raw: dict[str, Any] = json.loads(encode_samza_index(samza))
    return raw


def test_samzas_bytes_come_back_byte_for_byte() -> None:
    assert encode_samza_index(decode_samza_index(GOLDEN, blob_id="b")) == GOLDEN


def test_escapes_come_back_as_jackson_writes_them() -> None:
    name = b'q\\" ctl\\u001F\\u000B\\n\\t del\x7f slash\\u002F u001f'
    data = GOLDEN.replace(b'"blob-3-CURRENT-0"', b'"' + name + b'"')
    again = encode_samza_index(decode_samza_index(data, blob_id="b"))
    assert again == data.replace(b"\\u002F", b"/")


def test_escaped_backslash_before_a_u_is_left_alone() -> None:
    data = GOLDEN.replace(b'"blob-3-CURRENT-0"', b'"\\\\u001f and \\u001F"')
    assert encode_samza_index(decode_samza_index(data, blob_id="b")) == data


def test_unknown_fields_are_ignored_at_every_level() -> None:
    raw = golden()
    root = raw["dir-index"]
    for place in (raw, raw["snapshot-metadata"], root, root["files-present"][0], root["files-present"][0]["blobs"][0]):
        place["of-tomorrow"] = {"x": [1]}
    root["files-present"][0]["file-metadata"]["of-tomorrow"] = None
    assert encode_samza_index(decode_samza_index(encoded(raw), blob_id="b")) == GOLDEN


def test_missing_previous_index_reads_as_none_and_is_written_as_null() -> None:
    raw = golden()
    del raw["prev-snapshot-index-blob-id"]
    assert encode_samza_index(decode_samza_index(encoded(raw), blob_id="b")) == GOLDEN


def test_previous_index_is_carried() -> None:
    data = GOLDEN.replace(b'"prev-snapshot-index-blob-id":null', b'"prev-snapshot-index-blob-id":"before"')
    index = decode_samza_index(data, blob_id="b")
    assert index.prev_snapshot_index_blob_id == "before"
    assert encode_samza_index(index) == data


@pytest.mark.parametrize("field", ["files-present", "files-removed", "sub-dirs-present", "sub-dirs-removed"])
@pytest.mark.parametrize("value", ["missing", None])
def test_missing_list_is_an_error_that_names_the_blob(field: str, value: str | None) -> None:
    raw = golden()
    directory = raw["dir-index"]["sub-dirs-present"][0]
    if value is None:
        directory[field] = None
    else:
        del directory[field]
    with pytest.raises(SamzaFormatError, match="blob-17") as caught:
        decode_samza_index(encoded(raw), blob_id="blob-17")
    assert caught.value.hint


def edit(path: str, value: object) -> bytes:
    raw = golden()
    *parents, last = path.split("/")
    here: Any = raw
    for step in parents:
        here = here[int(step) if step.isdigit() else step]
    here[last] = value
    return encoded(raw)


FILE0 = "dir-index/files-present/0"
BROKEN = [
    ("garbage", b"\x00\xff"),
    ("nothing", b""),
    ("cut short", GOLDEN[:-1]),
    ("another form", b"[]"),
    ("text that is not UTF-8", GOLDEN.replace(b"CURRENT", b"CURREN\xff")),
    ("nests without end", b'{"dir-index":' + b'{"sub-dirs-present":[' * 100_000),
    ("Optional of old", edit("prev-snapshot-index-blob-id", {"present": False})),
    ("offset above int32", edit(f"{FILE0}/blobs/0/offset", 2**31)),
    ("negative offset", edit(f"{FILE0}/blobs/0/offset", -1)),
    ("size above int64", edit(f"{FILE0}/file-metadata/size", 2**63)),
    ("negative time", edit(f"{FILE0}/file-metadata/creation-time-millis", -1)),
    ("checksum of 33 bits", edit(f"{FILE0}/checksum", 2**32)),
    ("permissions", edit(f"{FILE0}/file-metadata/permissions", "0644")),
    ("blank owner", edit(f"{FILE0}/file-metadata/owner", " ")),
    ("blank group", edit(f"{FILE0}/file-metadata/group", "")),
    ("blank blob id", edit(f"{FILE0}/blobs/0/blob-id", "")),
    ("blank file name", edit(f"{FILE0}/file-name", " ")),
    ("blank job", edit("snapshot-metadata/job-name", "")),
    ("blank previous id", edit("prev-snapshot-index-blob-id", "")),
    ("checkpoint id", edit("snapshot-metadata/checkpoint-id", "17")),
    ("named root", edit("dir-index/dir-name", "root")),
    ("a name twice", edit("dir-index/sub-dirs-present/0/dir-name", "CURRENT")),
]


@pytest.mark.parametrize("_wrong,data", BROKEN, ids=[row[0] for row in BROKEN])
def test_what_samza_could_not_read_is_refused(_wrong: str, data: bytes) -> None:
    """`TestBlobStoreUtil.testSerdeException`: the error names the blob."""
    with pytest.raises(SamzaFormatError) as caught:
        decode_samza_index(data, blob_id="blob-17")
    assert "blob-17" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("field", [f"{FILE0}/file-name", "dir-index/sub-dirs-present/0/dir-name"])
@pytest.mark.parametrize("name", ["../escaped", "..", "/etc/passwd", ""])
def test_name_that_leads_out_of_the_directory_is_refused(field: str, name: str) -> None:
    """Samza writes it outside (trap T17)."""
    with pytest.raises(UnsafeNameError) as caught:
        decode_samza_index(edit(field, name), blob_id="blob-17")
    assert "blob-17" in caught.value.__notes__[0]


def test_unsafe_names_of_removed_entries_are_refused_too() -> None:
    raw = golden()
    root = raw["dir-index"]
    root["files-removed"] = [{**root["files-present"][0], "file-name": ".."}]
    with pytest.raises(UnsafeNameError):
        decode_samza_index(encoded(raw), blob_id="b")


def test_directories_that_nest_too_deep_are_refused() -> None:
    raw = golden()
    directory: dict[str, Any] = {
        "dir-name": "d",
        "files-present": [],
        "files-removed": [],
        "sub-dirs-present": [],
        "sub-dirs-removed": [],
    }
    for _ in range(66):
        directory = {**directory, "sub-dirs-present": [directory]}
    raw["dir-index"]["sub-dirs-present"] = [directory]
    with pytest.raises(SamzaFormatError, match="deeper than 64"):
        decode_samza_index(encoded(raw), blob_id="b")


def test_export_has_samzas_fields_in_samzas_order() -> None:
    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {key: shape(value[key]) for key in value}
        return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__

    raw = exported(DirIndex("", (file_index("a", b"123"),), (DirIndex("d"),)))
    theirs = golden()
    theirs["dir-index"]["sub-dirs-present"] = theirs["dir-index"]["sub-dirs-present"][1:]
    assert json.dumps(shape(raw)) == json.dumps(shape(theirs))


def test_export_reports_the_file_as_it_is() -> None:
    file = change(file_index("a", b"123", mode=0o4751, created_at_ms=7), metadata=metadata(3, 0o4751, created_at_ms=7))
    raw = exported(DirIndex("", (file,)))
    assert raw["dir-index"]["files-present"] == [
        {
            "file-name": "a",
            "blobs": [{"blob-id": blob_key(1), "offset": 0}],
            "file-metadata": {
                "creation-time-millis": 7,
                "last-modified-time-millis": 1_700_000_000_000,
                "size": 3,
                "owner": "spark",
                "group": "hadoop",
                "permissions": "rwxr-x--x",
            },
            "checksum": file.crc32,
        }
    ]
    assert raw["snapshot-metadata"] == {
        "checkpoint-id": CHECKPOINT,
        "job-name": "page-views",
        "job-id": "1",
        "task-name": "Partition 7",
        "store-name": "counts",
    }


def test_export_lists_nothing_as_removed() -> None:
    """Samza deletes what is listed as removed, and an older commit of ours may need it."""
    first = backup({"a": b"1", "d": {"e": {"x": b"2"}}, "gone": {"y": b"3"}})
    second = backup({"d": {}}, version=2, base=first)
    assert second.dir.files_removed
    assert second.dir.sub_dirs_present[0].sub_dirs_removed
    text = json.dumps(exported(second.dir))
    assert text.count('"files-removed": []') == text.count('"files-removed"') == 2
    assert text.count('"sub-dirs-removed": []') == text.count('"sub-dirs-removed"') == 2


def test_export_of_a_file_in_several_blobs_keeps_their_order() -> None:
    half = content_hash(b"")
    file = change(
        file_index("a", b"1234"), blobs=(FileBlob(blob_key(1), 0, 0, 3, half), FileBlob(blob_key(2), 3, 0, 1, half))
    )
    raw = exported(DirIndex("", (file,)))
    assert raw["dir-index"]["files-present"][0]["blobs"] == [
        {"blob-id": blob_key(1), "offset": 0},
        {"blob-id": blob_key(2), "offset": 3},
    ]


def test_export_fills_in_what_samza_insists_on() -> None:
    """A blank owner, and a time before 1970, would make Samza refuse the whole index."""
    file = change(file_index("a"), metadata=metadata(owner="", group="", modified_at_ns=-5))
    (shown,) = exported(DirIndex("", (file,)))["dir-index"]["files-present"]
    assert (shown["file-metadata"]["owner"], shown["file-metadata"]["group"]) == ("unknown", "unknown")
    assert shown["file-metadata"]["last-modified-time-millis"] == 0
    assert shown["blobs"] == []


PACKED = change(file_index("a", b"123"), blobs=(FileBlob(blob_key(5), 0, 0, 3),))


@pytest.mark.parametrize(
    "directory,packs",
    [
        (DirIndex("", (), (DirIndex("d", (change(file_index("a", b"1"), blobs=(), inline=b"1"),)),)), ()),
        (DirIndex("", (), (DirIndex("d", (PACKED,)),)), (Pack(blob_key(5), 3),)),
        (DirIndex("", (), (DirIndex("d", (change(PACKED, blobs=(FileBlob(blob_key(5), 0, 9, 3),)),)),)), ()),
    ],
    ids=["inline", "in a pack", "within a blob"],
)
def test_export_of_a_file_that_samza_cannot_express_is_refused(directory: DirIndex, packs: tuple[Pack, ...]) -> None:
    with pytest.raises(SamzaFormatError, match="d/a") as caught:
        exported(directory, packs)
    assert "tidemark export --unpack" in caught.value.hint


def test_export_of_an_offset_above_int32_is_refused() -> None:
    size = 2**31 + 5
    blobs = (FileBlob(blob_key(1), 0, 0, 2**31, b"1" * 32), FileBlob(blob_key(2), 2**31, 0, 5, b"1" * 32))
    file = change(file_index("a", b"1"), metadata=metadata(size), blobs=blobs)
    with pytest.raises(SamzaFormatError, match="2147483647"):
        exported(DirIndex("", (file,)))
    limit = change(
        file,
        blobs=(change(blobs[0], size_bytes=2**31 - 1), change(blobs[1], file_offset_bytes=2**31 - 1, size_bytes=6)),
    )
    assert exported(DirIndex("", (limit,)))["dir-index"]["files-present"][0]["blobs"][1]["offset"] == 2**31 - 1


@pytest.mark.parametrize("changes", [{"job_id": ""}, {"checkpoint_id": "x"}], ids=lambda c: next(iter(c)))
def test_export_that_samza_would_refuse_is_refused_here(changes: dict[str, str]) -> None:
    arguments = {"job_id": "1", "checkpoint_id": CHECKPOINT, **changes}
    with pytest.raises(FormatError):
        encode_samza_index(to_samza(index_of(EMPTY), **arguments))


def test_samzas_serde_tree_comes_back_equal() -> None:
    """`TestSnapshotIndexSerde`."""

    def plain(tree: dict[str, Any]) -> DirIndex:
        files = tuple(file_index(n, c, counter=len(n)) for n, c in sorted(tree.items()) if isinstance(c, bytes))
        subs = tuple(change(plain(c), name=n) for n, c in sorted(tree.items()) if not isinstance(c, bytes))
        return DirIndex("", files, subs)

    samza = to_samza(index_of(plain(dict(parse_tree("[a, b, z, c/1/2, e/1]")))), job_id="1", checkpoint_id=CHECKPOINT)
    assert decode_samza_index(encode_samza_index(samza), blob_id="b") == samza


def test_samza_snapshot_is_read_with_every_run() -> None:
    snapshot = from_samza(decode_samza_index(GOLDEN, blob_id="b"))
    assert snapshot.directories == (("archive",), ("archive", "deep"), ("emptydir",))
    assert [file.path for file in snapshot.files] == [
        ("000012.sst",),
        ("CURRENT",),
        ("empty.log",),
        ("archive", "000003.log"),
        ("archive", "deep", "naïve name.txt"),
    ]
    assert snapshot.files[1] == SamzaFile(
        path=("CURRENT",),
        size_bytes=16,
        crc32=4102469562,
        mode=0o640,
        modified_at_ms=1795239632679,
        blobs=(
            FileBlob(BlobKey("blob-3-CURRENT-0"), 0, 0, 6),
            FileBlob(BlobKey("blob-4-CURRENT-1"), 6, 0, 6),
            FileBlob(BlobKey("blob-5-CURRENT-2"), 12, 0, 4),
        ),
    )
    assert snapshot.files[2].blobs == (FileBlob(BlobKey("blob-12-empty.log-0"), 0, 0, 0),)


def test_blobs_out_of_order_are_read_in_file_order() -> None:
    """Samza sorts them too (`testRestoreDirRestoresMultiPartFilesCorrectly`)."""
    raw = golden()
    raw["dir-index"]["files-present"][1]["blobs"].reverse()
    snapshot = from_samza(decode_samza_index(encoded(raw), blob_id="b"))
    assert snapshot == from_samza(decode_samza_index(GOLDEN, blob_id="b"))


@pytest.mark.parametrize("offsets", [[], [1], [0, 0], [0, 16], [0, 99], [5, 6]])
def test_blobs_that_do_not_divide_their_file_are_refused(offsets: list[int]) -> None:
    raw = golden()
    raw["dir-index"]["files-present"][1]["blobs"] = [{"blob-id": f"b{n}", "offset": o} for n, o in enumerate(offsets)]
    with pytest.raises(SamzaFormatError, match="CURRENT"):
        from_samza(decode_samza_index(encoded(raw), blob_id="b"))


def test_empty_file_may_have_no_blob() -> None:
    raw = golden()
    raw["dir-index"]["files-present"][2]["blobs"] = []
    assert from_samza(decode_samza_index(encoded(raw), blob_id="b")).files[2].blobs == ()


def test_checkpoint_id_is_millis_and_nanos() -> None:
    """`TestCheckpointId`: a frozen form, not padded."""
    assert samza_checkpoint_id(1621987200123, 456789) == "1621987200123-456789"
    assert samza_checkpoint_id(1621987200123, 7) == "1621987200123-7"
    assert parse_samza_checkpoint_id("1621987200123-7") == (1621987200123, 7)


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "1-2-3", "a-b", "1 -2", "\u0663-\u0664"])
def test_other_checkpoint_ids_are_refused(text: str) -> None:
    with pytest.raises(SamzaFormatError):
        parse_samza_checkpoint_id(text)


@pytest.mark.parametrize("millis,nanos", [(-1, 0), (0, -1), (0, 1_000_000)])
def test_checkpoint_id_out_of_range_is_refused(millis: int, nanos: int) -> None:
    with pytest.raises(SamzaFormatError):
        samza_checkpoint_id(millis, nanos)
