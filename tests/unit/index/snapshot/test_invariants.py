"""One row per way to break a rule of design 0001, and Samza's `TestDirIndex`."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from index.errors import FormatError, IndexInvariantError, UnknownFormatError, UnsafeNameError
from index.snapshot.invariants import (
    INDEX_DELTAS_MAX,
    LINEAGE_ITEMS_MAX,
    check_boundary,
    check_commit,
    check_index_delta,
    check_name,
    check_pin,
    check_repository,
    check_snapshot_index,
)
from index.snapshot.keys import INDEXES
from index.snapshot.model import (
    SIZE_BYTES_MAX,
    BlobKey,
    Boundary,
    CommitPointer,
    CommitRecord,
    DirDelta,
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexDelta,
    IndexReference,
    LineageItem,
    NameRecord,
    Pack,
    Pin,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    SnapshotIndex,
    SnapshotMetadata,
    SstIdentity,
    StoreReference,
    UniqueId,
    WriteId,
)
from tests.unit.index.builders import SESSION, blob_key, content_hash, file_index, metadata

change = msgspec.structs.replace

HASH = content_hash(b"")
KEY = blob_key(1)
PACK = blob_key(2)
FILE = file_index("f", b"123")
PACKED = (change(FILE, blobs=(FileBlob(PACK, 0, 0, 3),)), change(FILE, name="g", blobs=(FileBlob(PACK, 0, 3, 3),)))
META = SnapshotMetadata(job="j", task="t", store="s", version=3, unique_id=UniqueId("u3"))


def index_of(*files: FileIndex, packs: tuple[Pack, ...] = (), **lists: tuple[Any, ...]) -> SnapshotIndex:
    """An index of one directory."""
    directory = change(DirIndex("", files), **lists)
    return SnapshotIndex(metadata=META, session=SESSION, dir=directory, packs=packs)


def with_metadata(**changes: object) -> SnapshotIndex:
    return change(index_of(), metadata=change(META, **changes))


def two_blobs(
    *, offsets: tuple[int, int] = (0, 2), sizes: tuple[int, int] = (2, 1), hashes: tuple[bytes, bytes]
) -> FileIndex:
    blobs = (FileBlob(KEY, offsets[0], 0, sizes[0], hashes[0]), FileBlob(PACK, offsets[1], 0, sizes[1], hashes[1]))
    return change(FILE, blobs=blobs)


def nested(depth: int) -> SnapshotIndex:
    directory = DirIndex("d")
    for _ in range(depth - 1):
        directory = DirIndex("d", (), (directory,))
    return index_of(sub_dirs_present=(directory,))


def blob(**changes: object) -> FileIndex:
    return change(FILE, blobs=(change(FILE.blobs[0], **changes),))


def file_with_metadata(**changes: object) -> FileIndex:
    return change(FILE, metadata=change(FILE.metadata, **changes))


ITEM = LineageItem(2, UniqueId("b"))
FROM_ONE = (LineageItem(1, UniqueId("a")), ITEM)
GOOD_INDEXES = [
    ("nothing", index_of()),
    ("one file", index_of(FILE)),
    ("an empty file", index_of(file_index("e"))),
    ("an inline file", index_of(change(FILE, blobs=(), inline=b"123"))),
    ("two blobs", index_of(two_blobs(hashes=(HASH, HASH)))),
    ("a pack", index_of(*PACKED, packs=(Pack(PACK, 6),))),
    ("a pack with dead bytes", index_of(PACKED[0], packs=(Pack(PACK, 999),))),
    ("one blob for two equal files", index_of(FILE, change(FILE, name="g"))),
    ("an SST", index_of(change(FILE, sst=SstIdentity("S" * 20, 12)))),
    ("empty directories", nested(64)),
    (
        "the largest file",
        index_of(change(file_with_metadata(size_bytes=SIZE_BYTES_MAX), blobs=(FileBlob(KEY, 0, 0, SIZE_BYTES_MAX),))),
    ),
    (
        "a mutable file",
        index_of(file_index("CURRENT", b"1", counter=1), files_removed=(file_index("CURRENT", b"1", counter=2),)),
    ),
    ("a removed directory", index_of(sub_dirs_removed=(DirIndex("d", (FILE,)),))),
    ("a file that became a directory", index_of(sub_dirs_present=(DirIndex("f"),), files_removed=(FILE,))),
    (
        "a removed run beside present ones in a pack",
        index_of(PACKED[0], packs=(Pack(PACK, 6),), files_removed=(PACKED[1],)),
    ),
    ("names of any alphabet", index_of(file_index("..."), file_index("\U0001f30a"))),
    ("a file from before 1970", index_of(file_with_metadata(modified_at_ns=-1))),
    (
        "a lineage",
        with_metadata(
            base=LineageItem(2, UniqueId("b")), lineage=(LineageItem(0, UniqueId("a")), LineageItem(2, UniqueId("b")))
        ),
    ),
    ("a base of the same version, no lineage", with_metadata(base=LineageItem(3, UniqueId("other")))),
    ("a lineage of Spark's in a first backup", with_metadata(lineage=(ITEM,))),
    ("a lineage that has the base further back", with_metadata(base=LineageItem(1, UniqueId("a")), lineage=FROM_ONE)),
    ("a base that was taken back", with_metadata(base=LineageItem(14, UniqueId("gone")), lineage=FROM_ONE)),
]


@pytest.mark.parametrize("_shows,index", GOOD_INDEXES, ids=[row[0] for row in GOOD_INDEXES])
def test_sound_index_is_accepted(_shows: str, index: SnapshotIndex) -> None:
    check_snapshot_index(index)


# rule, what is wrong, index
BAD_INDEXES = [
    ("N1", "empty name", index_of(change(FILE, name=""))),
    ("N1", "parent directory", index_of(change(FILE, name=".."))),
    ("N1", "this directory", index_of(sub_dirs_present=(DirIndex("."),))),
    ("N1", "separator", index_of(change(FILE, name="../escaped"))),
    ("N1", "absolute", index_of(change(FILE, name="/etc/passwd"))),
    ("N1", "backslash", index_of(change(FILE, name="a\\b"))),
    ("N1", "NUL", index_of(change(FILE, name="a\0"))),
    ("N1", "lone surrogate", index_of(change(FILE, name="\udcff"))),
    ("N1", "256 bytes", index_of(change(FILE, name="é" * 128))),
    ("N1", "directory name", index_of(sub_dirs_present=(DirIndex("a/b"),))),
    ("N1", "removed name", index_of(files_removed=(change(FILE, name=".."),))),
    ("N1", "removed directory name", index_of(sub_dirs_removed=(DirIndex(".."),))),
    ("N1", "name below a removed directory", index_of(sub_dirs_removed=(DirIndex("d", (change(FILE, name=".."),)),))),
    ("M1", "root has a name", change(index_of(), dir=DirIndex("root"))),
    ("M2", "file twice", index_of(FILE, FILE)),
    ("M2", "files not sorted", index_of(change(FILE, name="g"), FILE)),
    ("M4", "mode of a directory", index_of(sub_dirs_present=(DirIndex("d", mode=0o10000),))),
    ("M4", "mode of a removed directory", index_of(sub_dirs_removed=(DirIndex("d", mode=-1),))),
    ("M2", "directory twice", index_of(sub_dirs_present=(DirIndex("d"), DirIndex("d")))),
    ("M2", "directories not sorted", index_of(sub_dirs_present=(DirIndex("e"), DirIndex("d")))),
    ("M2", "removed files not sorted", index_of(files_removed=(change(FILE, name="g"), FILE))),
    ("M2", "removed directory twice", index_of(sub_dirs_removed=(DirIndex("d"), DirIndex("d")))),
    ("M2", "file and directory of one name", index_of(FILE, sub_dirs_present=(DirIndex("f"),))),
    ("M3", "65 directories deep", nested(65)),
    (
        "M3",
        "sizes do not fit together",
        index_of(
            *(
                change(
                    file_with_metadata(size_bytes=SIZE_BYTES_MAX), name=n, blobs=(FileBlob(KEY, 0, 0, SIZE_BYTES_MAX),)
                )
                for n in "fg"
            )
        ),
    ),
    ("M4", "negative size", index_of(change(file_with_metadata(size_bytes=-1), blobs=()))),
    ("M4", "size of 64 bits", index_of(file_with_metadata(size_bytes=2**63))),
    ("M4", "mode", index_of(file_with_metadata(mode=0o10000))),
    ("M4", "negative mode", index_of(file_with_metadata(mode=-1))),
    ("M4", "modified_at_ns", index_of(file_with_metadata(modified_at_ns=2**63))),
    ("M4", "created_at_ms", index_of(file_with_metadata(created_at_ms=-1))),
    ("M4", "owner", index_of(file_with_metadata(owner="x" * 256))),
    ("M4", "group", index_of(file_with_metadata(group="\ud800"))),
    ("M4", "SST session", index_of(change(FILE, sst=SstIdentity("", 1)))),
    ("M4", "SST number", index_of(change(FILE, sst=SstIdentity("S", -1)))),
    ("M4", "negative blob offset", index_of(blob(blob_offset_bytes=-1))),
    ("M4", "blob offset of 64 bits", index_of(blob(blob_offset_bytes=2**63 - 1))),
    ("M5", "short hash", index_of(change(FILE, blake3=b"1" * 31))),
    ("M5", "CRC32", index_of(change(FILE, crc32=2**32))),
    ("M5", "negative CRC32", index_of(change(FILE, crc32=-1))),
    ("M6", "inline and blobs", index_of(change(FILE, inline=b"123"))),
    ("M6", "short inline", index_of(change(FILE, blobs=(), inline=b"12"))),
    ("M6", "empty inline", index_of(change(file_index("f"), inline=b""))),
    ("M6", "empty file with blobs", index_of(change(file_index("f"), blobs=FILE.blobs))),
    ("M7", "neither inline nor blobs", index_of(change(FILE, blobs=()))),
    ("M7", "starts late", index_of(blob(file_offset_bytes=1))),
    ("M7", "too short", index_of(blob(size_bytes=2))),
    ("M7", "too long", index_of(blob(size_bytes=4))),
    ("M7", "empty run", index_of(two_blobs(sizes=(3, 0), offsets=(0, 3), hashes=(HASH, HASH)))),
    ("M7", "negative run", index_of(two_blobs(sizes=(4, -1), offsets=(0, 4), hashes=(HASH, HASH)))),
    ("M7", "gap", index_of(two_blobs(offsets=(0, 3), hashes=(HASH, HASH)))),
    ("M7", "overlap", index_of(two_blobs(offsets=(0, 1), hashes=(HASH, HASH)))),
    ("M7", "not in file order", index_of(two_blobs(offsets=(2, 0), hashes=(HASH, HASH)))),
    ("M7", "run without hash", index_of(two_blobs(hashes=(HASH, b"")))),
    ("M7", "single run with hash", index_of(blob(blake3=HASH))),
    ("M8", "key of an index", index_of(blob(key=blob_key(1, prefix=INDEXES)))),
    ("M8", "no key", index_of(blob(key=BlobKey("blobs/passwd")))),
    ("M8", "another shard", index_of(blob(key=BlobKey(KEY.replace(KEY[6:8], "00" if KEY[6:8] != "00" else "01", 1))))),
    ("M9", "run beyond its pack", index_of(*PACKED, packs=(Pack(PACK, 5),))),
    ("M9", "pack unused", index_of(packs=(Pack(PACK, 5),))),
    ("M9", "pack used by removed files only", index_of(files_removed=PACKED, packs=(Pack(PACK, 6),))),
    ("M9", "pack twice", index_of(*PACKED, packs=(Pack(PACK, 6), Pack(PACK, 6)))),
    ("M9", "empty pack", index_of(*PACKED, packs=(Pack(PACK, 0),))),
    ("M8", "pack in indexes", index_of(packs=(Pack(blob_key(1, prefix=INDEXES), 5),))),
    ("M9", "part of a blob that is not a pack", index_of(*PACKED)),
    ("M9", "one blob of two sizes", index_of(FILE, change(file_index("g", b"12"), blobs=(FileBlob(KEY, 0, 0, 2),)))),
    ("M10", "present and removed", index_of(FILE, files_removed=(FILE,))),
    ("M10", "empty file present and removed", index_of(file_index("e"), files_removed=(file_index("e"),))),
    ("M11", "same run under another name", index_of(FILE, files_removed=(change(FILE, name="g"),))),
    ("M11", "in a removed directory", index_of(FILE, sub_dirs_removed=(DirIndex("d", (FILE,)),))),
    (
        "M11",
        "deep in a removed directory",
        index_of(FILE, sub_dirs_removed=(DirIndex("d", (), (DirIndex("e", (FILE,)),)),)),
    ),
    ("M11", "in a pack", index_of(PACKED[0], packs=(Pack(PACK, 6),), files_removed=(change(PACKED[0], name="g"),))),
    (
        "M11",
        "removed from a present directory (T16)",
        index_of(FILE, sub_dirs_present=(DirIndex("d", (), (), (FILE,)),)),
    ),
    (
        "M11",
        "present only in a sub-directory",
        index_of(files_removed=(FILE,), sub_dirs_present=(DirIndex("d", (FILE,)),)),
    ),
    ("M12", "removed lists in what is removed", index_of(sub_dirs_removed=(DirIndex("d", (), (), (FILE,)),))),
    ("M13", "no store", with_metadata(store="")),
    ("N1", "no job", with_metadata(job="")),
    ("N1", "task too long for a key", with_metadata(task="t" * 201)),
    ("M13", "no unique id", with_metadata(unique_id="")),
    ("M13", "negative version", with_metadata(version=-1)),
    ("M13", "version of 64 bits", with_metadata(version=2**63)),
    ("M13", "store of no Unicode", with_metadata(store="\ud800")),
    ("M13", "lineage not ascending", with_metadata(base=ITEM, lineage=(ITEM, ITEM))),
    ("M13", "version not above lineage", with_metadata(base=ITEM, lineage=(ITEM,), version=2)),
    ("M13", "version not above lineage, no base", with_metadata(lineage=FROM_ONE, version=2)),
    ("M13", "item without id", with_metadata(lineage=(LineageItem(1, UniqueId("")), ITEM))),
    ("M13", "item of a negative version", with_metadata(lineage=(LineageItem(-1, UniqueId("a")), ITEM))),
    (
        "M13",
        "lineage too long",
        with_metadata(
            base=LineageItem(LINEAGE_ITEMS_MAX, UniqueId("u")),
            lineage=tuple(LineageItem(v, UniqueId("u")) for v in range(LINEAGE_ITEMS_MAX + 1)),
            version=LINEAGE_ITEMS_MAX + 1,
        ),
    ),
    ("M13", "base without id", with_metadata(base=LineageItem(2, UniqueId("")))),
    ("M14", "session", change(index_of(), session="0123456789ABCDEF0123")),
    ("M4", "negative creation time", with_metadata(created_at_ms=-1)),
]


@pytest.mark.parametrize("rule,_wrong,index", BAD_INDEXES, ids=[f"{row[0]} {row[1]}" for row in BAD_INDEXES])
def test_unsound_index_is_refused(rule: str, _wrong: str, index: SnapshotIndex) -> None:
    refuses(rule, check_snapshot_index, index)


def refuses(rule: str, check: Callable[[Any], None], value: object) -> None:
    """`check` refuses by the rule; N1 and broken keys are unsafe names."""
    with pytest.raises(FormatError) as caught:
        check(value)
    if isinstance(caught.value, UnsafeNameError):
        assert rule in {"N1", "M8", "M16"}
    else:
        assert isinstance(caught.value, IndexInvariantError)
        assert f"({rule})" in str(caught.value)
    assert caught.value.hint


def test_error_reports_the_path_of_the_file() -> None:
    bad = index_of(sub_dirs_present=(DirIndex("d", (change(FILE, blake3=b""),)),))
    with pytest.raises(IndexInvariantError) as caught:
        check_snapshot_index(bad)
    assert caught.value.__notes__ == ["in file 'd/f'"]


class TestWithABaseThatWasChecked:
    def test_its_own_files_are_not_asked_again_and_all_others_are(self) -> None:
        bad, other = change(FILE, blake3=b""), change(FILE, name="g", blobs=(FileBlob(blob_key(3), 0, 0, 3),))
        base = index_of(bad, sub_dirs_present=(DirIndex("d", (bad,)),))
        check_snapshot_index(index_of(bad, other, sub_dirs_present=(DirIndex("d", (bad,)),)), base)
        refuses("M5", lambda index: check_snapshot_index(index, base), index_of(change(bad, crc32=7)))
        refuses("M5", lambda index: check_snapshot_index(index, base), index_of(bad, change(other, blake3=b"")))

    @pytest.mark.parametrize(
        "rule, bad",
        [
            ("M2", DirIndex("", (PACKED[1], PACKED[0]))),
            ("M2", DirIndex("", PACKED, (DirIndex("f"),))),
            ("M9", DirIndex("", PACKED)),
            ("M11", DirIndex("", (FILE,), (), (change(FILE, name="x"),))),
        ],
    )
    def test_what_ties_files_together_is_asked_of_all(self, rule: str, bad: DirIndex) -> None:
        base = index_of(FILE, sub_dirs_present=(DirIndex("d", PACKED),))
        packs = (Pack(PACK, 6),) if rule == "M2" else ()
        refuses(rule, lambda index: check_snapshot_index(index, base), change(index_of(), dir=bad, packs=packs))


def test_mutable_file_may_be_present_and_removed_with_different_blobs_only() -> None:
    """`TestDirIndex.testDirIndexValidationForFileAddedAndRemovedChecksBlobsAndMetadataToo`."""
    present = file_index("mutableFile", b"123", counter=1)
    check_snapshot_index(index_of(present, files_removed=(file_index("mutableFile", b"123", counter=2),)))
    other_metadata = change(present, metadata=metadata(3, 0o600, modified_at_ns=624))
    refuses("M11", check_snapshot_index, index_of(present, files_removed=(other_metadata,)))


def test_same_blob_under_two_names_may_not_be_present_and_removed() -> None:
    """`TestDirIndex.testDirIndexValidationFailsIfSameBlobAddedAndRemoved`."""
    present, removed = file_index("filePresent", b"123"), file_index("fileRemoved", b"123")
    refuses("M11", check_snapshot_index, index_of(present, files_removed=(removed,)))


REFERENCE = IndexReference(key=blob_key(7, prefix=INDEXES), sha256=HASH, size_bytes=100)
DELTA = IndexDelta(
    metadata=change(META, base=ITEM),
    session=SESSION,
    base=REFERENCE,
    depth=1,
    dir=DirDelta("", (FILE,), ("gone",), (DirDelta("d"),), ("e",)),
    packs_set=(Pack(PACK, 6),),
    packs_dropped=(blob_key(3),),
)


def test_sound_delta_is_accepted() -> None:
    check_index_delta(DELTA)
    check_index_delta(change(DELTA, depth=INDEX_DELTAS_MAX))


BAD_DELTAS = [
    ("M15", "depth 0", {"depth": 0}),
    ("M15", "depth 17", {"depth": 17}),
    ("M15", "no base", {"metadata": META}),
    ("M15", "base is a blob", {"base": change(REFERENCE, key=KEY)}),
    ("M15", "short hash of the base", {"base": change(REFERENCE, sha256=b"")}),
    ("M15", "empty base", {"base": change(REFERENCE, size_bytes=0)}),
    ("M15", "pack set and dropped", {"packs_dropped": (PACK,)}),
    ("M9", "dropped packs not sorted", {"packs_dropped": tuple(sorted((blob_key(3), blob_key(4)), reverse=True))}),
    ("M8", "dropped pack is not a blob", {"packs_dropped": ("x",)}),
    ("M1", "root has a name", {"dir": DirDelta("x")}),
    ("M4", "mode of a directory", {"dir": DirDelta("", (), (), (DirDelta("d", mode=-1),))}),
    ("N1", "unsafe file", {"dir": DirDelta("", (change(FILE, name=".."),))}),
    ("N1", "unsafe dropped file", {"dir": DirDelta("", (), ("..",))}),
    ("N1", "unsafe directory", {"dir": DirDelta("", (), (), (DirDelta(".."),))}),
    ("N1", "unsafe dropped directory", {"dir": DirDelta("", (), (), (), ("..",))}),
    ("M2", "files not sorted", {"dir": DirDelta("", (change(FILE, name="g"), FILE))}),
    ("M2", "dropped files not sorted", {"dir": DirDelta("", (), ("b", "a"))}),
    ("M2", "directory twice", {"dir": DirDelta("", (), (), (DirDelta("d"), DirDelta("d")))}),
    ("M7", "file not covered", {"dir": DirDelta("", (blob(size_bytes=2),))}),
    ("M15", "file set and dropped", {"dir": DirDelta("", (FILE,), ("f",))}),
    ("M15", "directory set and dropped", {"dir": DirDelta("", (), (), (DirDelta("d"),), ("d",))}),
    ("M15", "file and directory", {"dir": DirDelta("", (FILE,), (), (DirDelta("f"),))}),
    ("M14", "session", {"session": ""}),
]


@pytest.mark.parametrize("rule,_wrong,changes", BAD_DELTAS, ids=[f"{row[0]} {row[1]}" for row in BAD_DELTAS])
def test_unsound_delta_is_refused(rule: str, _wrong: str, changes: dict[str, Any]) -> None:
    refuses(rule, check_index_delta, change(DELTA, **changes))


def store(task: str = "0", name: str = "default", **changes: object) -> StoreReference:
    reference = StoreReference(
        task=task,
        store=name,
        version=5,
        unique_id=UniqueId("u5"),
        index=REFERENCE,
        number=7,
        files_count=3,
        size_bytes=9,
    )
    return change(reference, **changes)


def pointer(number: int) -> CommitPointer:
    return CommitPointer(number, WriteId(f"w{number}"))


COMMIT = CommitRecord(
    scope=Scope("j"),
    number=7,
    write_id=WriteId("w7"),
    predecessor=pointer(5),
    base=pointer(4),
    version=5,
    offsets='{"0": 17}',
    layout=ScopeLayout(tasks_count=4, key_hash="spark-hash-v1", key_columns=("carrier",)),
    stores=(store("0", "a"), store("0", "b"), store("1", "a")),
    valid_until_ms=1_800_000_000_000,
    settled_through=6,
)
REWIND = change(COMMIT, kind="rewind", source=pointer(2))
FORK = change(COMMIT, kind="fork", source=pointer(99), source_scope=Scope("other", "3"))


@pytest.mark.parametrize(
    "record",
    [COMMIT, REWIND, FORK, change(COMMIT, number=1, predecessor=None, base=None, settled_through=0, stores=())],
)
def test_sound_commit_is_accepted(record: CommitRecord) -> None:
    check_commit(record)


BAD_COMMITS: list[tuple[str, str, CommitRecord]] = [
    ("M18", "number 0", change(COMMIT, number=0)),
    ("M18", "number of 64 bits", change(COMMIT, number=2**63)),
    ("M18", "no write id", change(COMMIT, write_id="")),
    ("M18", "negative version", change(COMMIT, version=-1)),
    ("M18", "valid_until_ms", change(COMMIT, valid_until_ms=-1)),
    ("M18", "offsets of no Unicode", change(COMMIT, offsets="\ud800")),
    ("M18", "predecessor is itself", change(COMMIT, predecessor=pointer(7))),
    ("M18", "predecessor number 0", change(COMMIT, predecessor=pointer(0))),
    ("M18", "commit with a source", change(COMMIT, source=pointer(2))),
    ("M18", "commit with a source scope", change(COMMIT, source_scope=Scope("x"))),
    ("M18", "rewind without a source", change(REWIND, source=None)),
    ("M18", "rewind forward", change(REWIND, source=pointer(7))),
    ("M18", "rewind to another scope", change(REWIND, source_scope=Scope("x"))),
    ("M18", "fork without a source", change(FORK, source=None)),
    ("M18", "fork without a scope", change(FORK, source_scope=None)),
    ("N1", "no job", change(COMMIT, scope=Scope(""))),
    ("N1", "no job in the source", change(FORK, source_scope=Scope(""))),
    ("M18", "negative tasks", change(COMMIT, layout=ScopeLayout(tasks_count=-1))),
    ("M18", "key column without a name", change(COMMIT, layout=ScopeLayout(key_columns=("",)))),
    ("M17", "store twice", change(COMMIT, stores=(store(), store()))),
    ("M17", "stores not sorted", change(COMMIT, stores=(store("1"), store("0")))),
    ("M17", "store of another task", change(COMMIT, scope=Scope("j", "0"))),
    ("M17", "store first named later", change(COMMIT, stores=(store(number=8),))),
    ("M17", "store never named", change(COMMIT, stores=(store(number=0),))),
    ("M17", "store without unique id", change(COMMIT, stores=(store(unique_id=""),))),
    ("M17", "store without name", change(COMMIT, stores=(store(name=""),))),
    ("N1", "store without task", change(COMMIT, stores=(store(task=""), store(task="t")))),
    ("M17", "negative store version", change(COMMIT, stores=(store(version=-1),))),
    ("M17", "negative count", change(COMMIT, stores=(store(files_count=-1),))),
    ("M17", "negative size", change(COMMIT, stores=(store(size_bytes=-1),))),
    ("M16", "index key is a blob", change(COMMIT, stores=(store(index=change(REFERENCE, key=KEY)),))),
    ("M16", "index key is none", change(COMMIT, stores=(store(index=change(REFERENCE, key="log/j/1")),))),
    ("M16", "index hash", change(COMMIT, stores=(store(index=change(REFERENCE, sha256=b"1")),))),
    ("M16", "index size", change(COMMIT, stores=(store(index=change(REFERENCE, size_bytes=0)),))),
]


@pytest.mark.parametrize("rule,_wrong,record", BAD_COMMITS, ids=[f"{row[0]} {row[1]}" for row in BAD_COMMITS])
def test_unsound_commit_is_refused(rule: str, _wrong: str, record: CommitRecord) -> None:
    refuses(rule, check_commit, record)


def test_store_names_are_unique_within_a_task_only() -> None:
    check_commit(change(COMMIT, scope=Scope("j", "0"), stores=(store("0", "a"), store("0", "b"))))


BOUNDARY = Boundary(scope=Scope("j"), number=9, kept=(pointer(3), pointer(9)))
PIN = Pin(id=SESSION, scope=Scope("j"), source=pointer(7), duration_ms=0, purpose="restore", stores=(store(),))
NAME = NameRecord(
    scope=Scope("j"), name="before-migration", source=pointer(7), version=5, committed_at_ms=5, stores=(store(),)
)
REPOSITORY = RepositoryRecord(id="r", ttl_ms=100, margin_ms=10, collection_period_ms=5)

GOOD_RECORDS: list[tuple[Callable[[Any], None], object]] = [
    (check_boundary, BOUNDARY),
    (check_boundary, change(BOUNDARY, kept=())),
    (check_pin, PIN),
    (check_pin, change(PIN, stores=(), duration_ms=60_000)),
    (check_name, NAME),
    (check_name, change(NAME, name="before the migration…", released=True, stores=())),
    (check_repository, REPOSITORY),
]


@pytest.mark.parametrize("check,record", GOOD_RECORDS)
def test_sound_record_is_accepted(check: Callable[[Any], None], record: object) -> None:
    check(record)


BAD_RECORDS: list[tuple[str, Callable[[Any], None], Any, dict[str, object]]] = [
    ("M19", check_boundary, BOUNDARY, {"number": 0}),
    ("M19", check_boundary, BOUNDARY, {"kept": (pointer(3), pointer(3))}),
    ("M19", check_boundary, BOUNDARY, {"kept": (pointer(3), CommitPointer(3, WriteId("other")))}),
    ("M19", check_boundary, BOUNDARY, {"kept": (pointer(4), pointer(3))}),
    ("M19", check_boundary, BOUNDARY, {"kept": (pointer(10),)}),
    ("M19", check_boundary, BOUNDARY, {"kept": (pointer(0),)}),
    ("M19", check_boundary, BOUNDARY, {"kept": (CommitPointer(3, WriteId("")),)}),
    ("N1", check_boundary, BOUNDARY, {"scope": Scope("j", "")}),
    ("M20", check_pin, PIN, {"id": "x"}),
    ("M20", check_pin, PIN, {"duration_ms": -1}),
    ("M20", check_pin, PIN, {"source": pointer(0)}),
    ("M20", check_pin, PIN, {"purpose": "x" * 1025}),
    ("M17", check_pin, PIN, {"stores": (store(), store())}),
    ("M17", check_pin, PIN, {"source": pointer(6)}),
    ("N1", check_name, NAME, {"name": ""}),
    ("M21", check_name, NAME, {"version": -1}),
    ("M21", check_name, NAME, {"committed_at_ms": -1}),
    ("M21", check_name, NAME, {"source": pointer(-1)}),
    ("M17", check_name, NAME, {"stores": (store("1"), store("0"))}),
    ("M22", check_repository, REPOSITORY, {"id": ""}),
    ("M22", check_repository, REPOSITORY, {"ttl_ms": 0}),
    ("M22", check_repository, REPOSITORY, {"margin_ms": 100}),
    ("M22", check_repository, REPOSITORY, {"margin_ms": -1}),
    ("M22", check_repository, REPOSITORY, {"collection_period_ms": 0}),
    ("M22", check_repository, REPOSITORY, {"key_layout": 0}),
]


@pytest.mark.parametrize(
    "rule,check,record,changes", BAD_RECORDS, ids=[f"{row[0]} {row[3]}"[:60] for row in BAD_RECORDS]
)
def test_unsound_record_is_refused(
    rule: str, check: Callable[[Any], None], record: Any, changes: dict[str, object]
) -> None:
    refuses(rule, check, change(record, **changes))


def test_newer_key_layout_is_an_unknown_format() -> None:
    with pytest.raises(UnknownFormatError):
        check_repository(change(REPOSITORY, key_layout=2))


def test_entries_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.snapshot.invariants.ENTRIES_MAX", 3)
    files = tuple(FileIndex(n, FileMetadata(0, 0, 0), HASH, 0) for n in "abcd")
    check_snapshot_index(index_of(*files[:3]))
    refuses("M3", check_snapshot_index, index_of(*files))
    refuses("M3", check_snapshot_index, index_of(*files[:2], files_removed=files[2:]))


def test_stores_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.snapshot.invariants.STORES_MAX", 2)
    refuses("M17", check_commit, COMMIT)
