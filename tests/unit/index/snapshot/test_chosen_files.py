"""Files that patterns choose from a snapshot."""

import pytest

from index.snapshot.contents import choose_files, is_empty_pattern
from index.snapshot.model import DirIndex
from tests.unit.index.builders import Tree, backup

TREE: Tree = {
    "000001.sst": b"1",
    "CURRENT": b"c",
    "db": {"000002.sst": b"2", "LOG": b"l", "deep": {"000003.sst": b"3"}},
    "other": {"LOG": b"o"},
    "empty": {},
}


def paths(directory: DirIndex, at: str = "") -> list[str]:
    found = [f"{at}{file.name}" for file in directory.files_present]
    for sub in directory.sub_dirs_present:
        found += [f"{at}{sub.name}/", *paths(sub, f"{at}{sub.name}/")]
    return found


@pytest.mark.parametrize(
    "patterns, expected, unmatched",
    [
        (["CURRENT"], ["CURRENT"], ()),
        (["*.sst"], ["000001.sst", "db/", "db/000002.sst", "db/deep/", "db/deep/000003.sst"], ()),
        (["db/*"], ["db/", "db/000002.sst", "db/LOG"], ()),
        (["db/*", "LOG"], ["db/", "db/000002.sst", "db/LOG", "other/", "other/LOG"], ()),
        (["*/LOG", "LOCK", "db"], ["db/", "db/LOG", "other/", "other/LOG"], ("LOCK", "db")),
        (["000001.SST"], [], ("000001.SST",)),
        (["../CURRENT"], [], ("../CURRENT",)),
    ],
)
def test_a_pattern_is_matched_from_the_right(
    patterns: list[str], expected: list[str], unmatched: tuple[str, ...]
) -> None:
    index = backup(TREE)
    chosen, left = choose_files(index, patterns)
    assert paths(chosen.dir) == expected
    assert left == unmatched
    assert chosen.metadata == index.metadata


def test_entries_are_the_very_ones_of_the_snapshot_and_removed_ones_go() -> None:
    index = backup(TREE, version=2, base=backup({**TREE, "gone": b"g"}))
    assert index.dir.files_removed
    chosen, _ = choose_files(index, ["*"])
    assert chosen.dir.files_present == index.dir.files_present
    assert chosen.dir.files_removed == ()


def test_a_pattern_that_names_nothing_is_empty() -> None:
    assert [pattern for pattern in ("", ".", "./", "./.", "a", "*", "/", "..", " ") if is_empty_pattern(pattern)] == [
        "",
        ".",
        "./",
        "./.",
    ]
