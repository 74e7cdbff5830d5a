from unittest import mock

import msgspec
import pytest

from index.errors import IndexInvariantError
from index.snapshot import dir_diff
from index.snapshot.delta import ComparedFile, diff_indexes
from index.snapshot.dir_diff import (
    DiffStats,
    DirDiff,
    LocalDir,
    build_dir_index,
    diff_dir,
    diff_stats,
    pairs_to_identify,
    strip_removed,
)
from index.snapshot.model import DirIndex, FileIndex
from tests.unit.index.builders import (
    EMPTY,
    Path,
    Tree,
    backup,
    dir_modes,
    file_index,
    local_dir,
    local_file,
    metadata,
    present_files,
)


def diff_of(local: Tree, remote: Tree) -> DirDiff:
    return diff_dir(local_dir(local), backup(remote).dir)


def names(entries: tuple[object, ...]) -> list[str]:
    return [entry.name for entry in entries]  # type: ignore[attr-defined]


def test_file_that_no_predicate_recognises_is_added_and_removed() -> None:
    """`TestDirDiffUtilMisc.testGetDirDiffWhenIsSameFileReturnsFalseForSameFileName`."""
    with mock.patch.object(dir_diff, "is_same_file", return_value=False):
        diff = diff_dir(local_dir({"a": b"a"}), backup({"a": b"a"}).dir)
    assert (names(diff.files_added), names(diff.files_retained), names(diff.files_removed)) == (["a"], [], ["a"])


def test_empty_file_is_retained_without_reading_it() -> None:
    local = LocalDir(name="", files=(local_file("LOG", identified=False),))
    assert names(diff_dir(local, backup({"LOG": b""}).dir).files_retained) == ["LOG"]


def test_retained_file_keeps_its_old_entry_if_only_times_or_owner_differ() -> None:
    remote = backup({"f": b"1"}).dir
    local = LocalDir(name="", files=(local_file("f", b"1", modified_at_ns=5, owner="root", group="root"),))
    assert diff_dir(local, remote).files_retained == remote.files_present


def test_retained_file_takes_the_local_metadata_if_its_mode_differs() -> None:
    """No upload for a chmod, and a restore that gives the new mode (Samza's trap T12)."""
    remote = backup({"f": b"1"}).dir
    file = local_file("f", b"1", mode=0o400, modified_at_ns=5)
    (retained,) = diff_dir(LocalDir(name="", files=(file,)), remote).files_retained
    assert retained.metadata == file.metadata
    assert msgspec.structs.replace(retained, metadata=remote.files_present[0].metadata) == remote.files_present[0]


def test_removed_directory_is_listed_without_what_it_had_removed_itself() -> None:
    first = backup({"d": {"a": b"1", "b": b"2", "e": {"x": b"3"}}}, version=1)
    second = backup({"d": {"a": b"1"}}, version=2, base=first)
    assert second.dir.sub_dirs_present[0].files_removed
    diff = diff_dir(local_dir({}), second.dir)
    assert diff.sub_dirs_removed == (strip_removed(second.dir.sub_dirs_present[0]),)
    assert diff.sub_dirs_removed[0] == DirIndex("d", second.dir.sub_dirs_present[0].files_present)


def test_directories_have_the_modes_on_disk() -> None:
    first = backup({"d": {"a": b"1"}, "old": {}}, modes={"": 0o755, "d": 0o755, "old": 0o500})
    diff = diff_dir(local_dir({"d": {"a": b"1"}, "new": {}}, modes={"": 0o700, "d": 0o750, "new": 0o500}), first.dir)
    assert diff_stats(diff).files_added == 0
    built = build_dir_index(diff, {})
    assert dir_modes(built) == {(): 0o700, ("d",): 0o750, ("new",): 0o500}
    assert built.sub_dirs_removed == (DirIndex("old", mode=0o500),)


def test_directory_without_removed_lists_is_not_copied() -> None:
    directory = backup({"d": {"e": {"x": b"1"}}}).dir
    assert strip_removed(directory) is directory


def test_added_file_that_is_stored_as_before_is_not_listed_as_removed() -> None:
    """Nothing was known of a tiny file, so it was added; its new inline entry is the old one again."""
    remote = DirIndex("", (msgspec.structs.replace(file_index("f", b"1"), blobs=(), inline=b"1"),))
    local = LocalDir(name="", files=(local_file("f", b"1", identified=False),))
    diff = diff_dir(local, remote)
    assert names(diff.files_added) == names(diff.files_removed) == ["f"]
    assert build_dir_index(diff, {("f",): remote.files_present[0]}) == remote


def test_files_are_sorted_by_code_point_in_the_new_index() -> None:
    first = backup({"b": b"1", "é": b"2"})
    diff = diff_dir(local_dir({"b": b"1", "é": b"2", "a": b"3", "Z": b"4", "z": b"5"}), first.dir)
    uploaded: dict[Path, FileIndex] = {
        (n,): file_index(n, b"3", counter=i) for i, n in enumerate(["Z", "a", "z"], start=50)
    }
    assert names(build_dir_index(diff, uploaded).files_present) == ["Z", "a", "b", "z", "é"]


@pytest.mark.parametrize(
    "uploaded",
    [
        pytest.param({}, id="none"),
        pytest.param({("a",): file_index("b", b"1")}, id="of another name"),
        pytest.param({("a",): file_index("a", b"1"), ("b",): file_index("b", b"1")}, id="one too many"),
    ],
)
def test_uploads_that_do_not_belong_to_the_diff_are_refused(uploaded: dict[Path, FileIndex]) -> None:
    with pytest.raises(IndexInvariantError, match=r"a: has no entry|2 entries for 1"):
        build_dir_index(diff_of({"a": b"1"}, {}), uploaded)


LOCAL_A = local_file("a", b"1")
REMOTE_A = file_index("a", b"1")


@pytest.mark.parametrize(
    "local",
    [
        LocalDir(name="", files=(LOCAL_A, LOCAL_A)),
        LocalDir(name="", files=(local_file("b"), LOCAL_A)),
        LocalDir(name="", files=(local_file(""),)),
        LocalDir(name="", sub_dirs=(LocalDir(name="a"), LocalDir(name="a"))),
        LocalDir(name="", sub_dirs=(LocalDir(name="b"), LocalDir(name="a"))),
        LocalDir(name="", files=(LOCAL_A,), sub_dirs=(LocalDir(name="a"),)),
    ],
    ids=["file twice", "files not sorted", "no name", "directory twice", "directories not sorted", "both"],
)
def test_local_side_with_a_name_twice_is_refused(local: LocalDir) -> None:
    with pytest.raises(IndexInvariantError, match="occurs twice, or names are not sorted"):
        diff_dir(local, EMPTY)


@pytest.mark.parametrize(
    "remote",
    [DirIndex("", (REMOTE_A, REMOTE_A)), DirIndex("", (), (DirIndex("a"), DirIndex("a")))],
    ids=["file", "directory"],
)
def test_remote_side_with_a_name_twice_is_refused(remote: DirIndex) -> None:
    with pytest.raises(IndexInvariantError, match="occurs twice"):
        diff_dir(LocalDir(name="", sub_dirs=(LocalDir(name="a"),)), remote)


def test_tree_that_nests_too_deep_is_refused() -> None:
    local, remote = LocalDir(name="d"), DirIndex("d")
    for _ in range(70):
        local, remote = LocalDir(name="d", sub_dirs=(local,)), DirIndex("d", (), (remote,))
    with pytest.raises(IndexInvariantError, match="deeper than 64"):
        diff_dir(local, remote)
    with pytest.raises(IndexInvariantError, match="deeper than 64"):
        list(pairs_to_identify(local, remote))


def test_stats_count_everything_below_a_removed_directory() -> None:
    """Samza counts no file of a removed directory (trap T15)."""
    diff = diff_of(
        {"kept": b"123", "new": b"12", "sub": {"kept": b"1234", "n": {}}},
        {"kept": b"123", "sub": {"kept": b"1234"}, "gone": {"a": b"12345", "b": {"c": b"1"}}},
    )
    assert diff_stats(diff) == DiffStats(
        files_added=1,
        files_retained=2,
        files_removed=2,
        sub_dirs_added=1,
        sub_dirs_retained=1,
        sub_dirs_removed=2,
        bytes_added=2,
        bytes_retained=7,
        bytes_removed=6,
    )


def without_facts(local: LocalDir) -> LocalDir:
    files = tuple(msgspec.structs.replace(file, blake3=None, crc32=None, sst=None) for file in local.files)
    return msgspec.structs.replace(local, files=files, sub_dirs=tuple(map(without_facts, local.sub_dirs)))


def test_only_files_whose_size_does_not_decide_are_identified() -> None:
    local = local_dir(
        {
            "same": b"123",
            "other": b"123",
            "size": b"1234",
            "new": b"1",
            "empty": b"",
            "d": {"x": b"12"},
            "n": {"y": b"1"},
        }
    )
    remote = backup({"same": b"123", "other": b"321", "size": b"123", "empty": b"", "d": {"x": b"12"}, "gone": {}}).dir

    def asked_of(local: LocalDir) -> list[tuple[tuple[str, ...], str]]:
        pairs = pairs_to_identify(local, remote)
        return [((*path, file.name), entry.name) for path, found in pairs for file, entry in found]

    assert asked_of(local) == [], "each carries its hash"
    assert asked_of(without_facts(local)) == [(("other",), "other"), (("same",), "same"), (("d", "x"), "x")]


def test_two_snapshots_are_compared_file_by_file() -> None:
    before = backup({"a": b"1", "b": b"22", "c": b"3", "m": b"4", "t": b"5", "d": {"x": b"6"}, "gone": {"y": b"7"}})
    after = backup(
        {"a": b"1", "b": b"2", "m": b"4", "n": b"88", "t": {"z": b"9"}, "d": {"x": b"0"}}, modes={"m": 0o400}
    )
    difference = diff_indexes(before.dir, after.dir)
    assert difference.added == (ComparedFile(path=("n",), after_bytes=2), ComparedFile(path=("t", "z"), after_bytes=1))
    assert difference.removed == (
        ComparedFile(path=("c",), before_bytes=1),
        ComparedFile(path=("t",), before_bytes=1),
        ComparedFile(path=("gone", "y"), before_bytes=1),
    )
    assert difference.changed == (
        ComparedFile(path=("b",), before_bytes=2, after_bytes=1),
        ComparedFile(path=("m",), before_bytes=1, after_bytes=1, mode_changed=True),
        ComparedFile(path=("d", "x"), before_bytes=1, after_bytes=1),
    )
    assert difference.unchanged == (ComparedFile(path=("a",), before_bytes=1, after_bytes=1),)
    assert difference.dirs_added == (("t",),)
    assert difference.dirs_removed == (("gone",),)


def test_where_bytes_are_stored_makes_no_difference_to_a_comparison() -> None:
    moved = DirIndex("", (file_index("a", b"1", counter=9),))
    difference = diff_indexes(DirIndex("", (file_index("a", b"1", counter=1),)), moved)
    assert len(difference.unchanged) == 1
    assert [path for path, _ in present_files(moved)] == [("a",)]
    assert metadata(1) == moved.files_present[0].metadata
