"""Which form each added file takes, and which packs are packed again (design 0002, P1), as tables of sizes."""

import pytest

from index.errors import IndexInvariantError
from index.plan.backup import BackupLimits, BackupPlan, PlannedFile, plan_backup
from index.snapshot.dir_diff import diff_dir
from index.snapshot.model import DirIndex, FileBlob, FileIndex, Pack, SnapshotIndex, SnapshotMetadata, UniqueId
from tests.unit.index.builders import Tree, blob_key, file_index, local_dir

LIMITS = BackupLimits(
    blob_bytes_max=100, pack_file_bytes_max=20, pack_bytes_max=50, inline_file_bytes_max=4, inline_bytes_max=10
)
METADATA = SnapshotMetadata(job="job", task="0", store="s", version=1, unique_id=UniqueId("u"))


def tree_of(sizes: str) -> Tree:
    """`a10 d/b3`: a file `a` of 10 bytes, and a file `b` of 3 bytes in the directory `d`."""
    tree: dict[str, bytes | dict[str, bytes]] = {}
    for word in sizes.split():
        path = word.rstrip("0123456789")
        data = path[-1].encode() * int(word[len(path) :])
        if "/" in path:
            below = tree.setdefault(path.split("/")[0], {})
            assert isinstance(below, dict)
            below[path.split("/")[1]] = data
        else:
            tree[path] = data
    return tree


def shape_of(plan: BackupPlan) -> dict[str, object]:
    """A plan as words."""

    def names(files: tuple[PlannedFile, ...]) -> str:
        return " ".join("/".join(item.path) for item in files)

    return {
        "empty": names(plan.empty),
        "inline": names(plan.inline),
        "packs": [names(pack.files) for pack in plan.packs],
        "blobs": [f"{names((item.file,))}:{'+'.join(str(size) for _, size in item.runs)}" for item in plan.blobs],
    }


@pytest.mark.parametrize(
    "sizes, empty, inline, packs, blobs",
    [
        ("", "", "", [], []),
        ("a0 d/b0", "a d/b", "", [], []),
        ("a4 b5", "", "a", [], ["b:5"]),
        ("a4 b4 c3 d2 e1", "", "a b d", ["c e"], []),
        ("a20 b21", "", "", [], ["a:20", "b:21"]),
        ("a20 b20 c10 d5", "", "", ["a b c"], ["d:5"]),
        ("a20 b20 c11 d5", "", "", ["a b", "c d"], []),
        ("a20 b20 c20 d20 e20", "", "", ["a b", "c d"], ["e:20"]),
        ("a100 b101 c200 d201", "", "", [], ["a:100", "b:100+1", "c:100+100", "d:100+100+1"]),
        ("b10 a/x10 c/y10", "", "", ["a/x b c/y"], []),
        ("a21 d/b5 d/c0 e2", "d/c", "e", [], ["a:21", "d/b:5"]),
    ],
)
def test_size_decides_the_form(sizes: str, empty: str, inline: str, packs: list[str], blobs: list[str]) -> None:
    local = local_dir(tree_of(sizes))
    plan = plan_backup(local, None, diff_dir(local, DirIndex("")), LIMITS)
    assert shape_of(plan) == {"empty": empty, "inline": inline, "packs": packs, "blobs": blobs}


def test_uploads_are_numbered_packs_first_without_gaps() -> None:
    local = local_dir(tree_of("a20 b20 c20 d20 e150 f60"))
    plan = plan_backup(local, None, diff_dir(local, DirIndex("")), LIMITS)
    assert [pack.counter for pack in plan.packs] == [0, 1]
    assert [(item.counter, len(item.runs)) for item in plan.blobs] == [(2, 2), (4, 1)]
    assert plan.uploads_count == 5
    assert plan.upload_bytes == 80 + 150 + 60


def packed(tree: Tree, *, dead_bytes: int = 0) -> SnapshotIndex:
    """A snapshot whose files all are in one pack, in the order of their names."""
    files: list[FileIndex] = []
    offset = 0
    for name in sorted(tree):
        data = tree[name]
        assert isinstance(data, bytes)
        entry = file_index(name, data)
        blob = FileBlob(blob_key(1), 0, offset, len(data))
        files.append(FileIndex(name, entry.metadata, entry.blake3, entry.crc32, (blob,)))
        offset += len(data)
    pack = Pack(blob_key(1), offset + dead_bytes)
    return SnapshotIndex(metadata=METADATA, session="0" * 20, dir=DirIndex("", tuple(files)), packs=(pack,))


@pytest.mark.parametrize(
    "now, dead_bytes, again",
    [
        ("a10 b10 c10 d10", 0, ""),
        ("a10 b10", 0, ""),
        ("a10 b9", 0, "a"),
        ("a10", 0, "a"),
        ("", 0, ""),
        ("a10 b10 c10 d10", 40, ""),
        ("a10 b10 c10 d10", 41, "a b c d"),
        ("a10 b10 c10 d10 x10", 41, "a b c d"),
    ],
)
def test_pack_of_which_less_than_half_is_live_is_packed_again(now: str, dead_bytes: int, again: str) -> None:
    previous = packed(tree_of("a10 b10 c10 d10"), dead_bytes=dead_bytes)
    local = local_dir(tree_of(now))
    plan = plan_backup(local, previous, diff_dir(local, previous.dir), LIMITS)
    moved = sorted("/".join(item.path) for item in plan.files if item.expected is not None)
    assert " ".join(moved) == again
    assert plan.files_repacked == len(moved)
    assert bool(plan.packs_kept) == (not again and bool(now))
    assert plan.changes.files_retained == sum(name in now for name in ("a10", "b10", "c10", "d10"))


def test_file_packed_again_may_take_another_form() -> None:
    previous = packed(tree_of("a4 b50"))
    local = local_dir(tree_of("a4"))
    plan = plan_backup(local, previous, diff_dir(local, previous.dir), LIMITS)
    assert shape_of(plan) == {"empty": "", "inline": "a", "packs": [], "blobs": []}


def test_what_is_in_the_index_already_takes_space_there() -> None:
    local = local_dir(tree_of("a4 b4 c4 d2"))
    entry = file_index("a", b"aaaa")
    kept = FileIndex("a", entry.metadata, entry.blake3, entry.crc32, (), b"aaaa")
    previous = SnapshotIndex(metadata=METADATA, session="0" * 20, dir=DirIndex("", (kept,)))
    plan = plan_backup(local, previous, diff_dir(local, previous.dir), LIMITS)
    assert shape_of(plan) == {"empty": "", "inline": "b d", "packs": [], "blobs": ["c:4"]}


def test_diff_of_another_scan_is_refused() -> None:
    previous = packed(tree_of("a10 b10 c10 d10"))
    local = local_dir(tree_of("a10"))
    with pytest.raises(IndexInvariantError, match="did not see"):
        plan_backup(local_dir(tree_of("x1")), previous, diff_dir(local, previous.dir), LIMITS)
