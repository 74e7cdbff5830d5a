"""Samza's own table of directory trees, `TestDirDiffUtil`, all 33 cases, under two predicates."""

import json
from collections.abc import Callable
from pathlib import Path as FilePath
from unittest import mock

import pytest

from index.snapshot import dir_diff
from index.snapshot.dir_diff import DirDiff, LocalDir, LocalFile, build_dir_index, diff_dir, diff_stats, is_same_file
from index.snapshot.model import DirIndex, FileIndex
from tests.unit.index.builders import EMPTY, Path, added_files, file_index, local_dir, parse_tree, present_files

GOLDEN = FilePath(__file__).parents[3] / "golden" / "samza" / "samza_dirdiff_cases.json"

# Samza's notation: `x` a file, `d/x` a file in a directory; a file's content is its own leaf name.
# local, remote, added, retained, removed, what it shows
CASES: list[tuple[str, ...]] = [tuple(case.values()) for case in json.loads(GOLDEN.read_text())]


def same_leaf_name(local: LocalFile, remote: FileIndex) -> bool:
    """Samza's predicate in these tests."""
    return local.name == remote.name


def paths_of(notation: str) -> set[Path]:
    return {tuple(path.split("/")) for path in notation.strip("[]").split(", ") if path}


def remote_dir(local: LocalDir) -> DirIndex:
    diff = diff_dir(local, EMPTY)
    return build_dir_index(
        diff,
        {
            path: file_index(file.name, file.name.encode(), counter=n)
            for n, (path, file) in enumerate(added_files(diff))
        },
    )


def retained_and_removed(diff: DirDiff, path: Path = ()) -> tuple[set[Path], set[Path]]:
    retained = {(*path, file.name) for file in diff.files_retained}
    removed = {(*path, file.name) for file in diff.files_removed}
    for gone in diff.sub_dirs_removed:
        removed |= {(*path, gone.name, *below) for below, _ in present_files(gone)}
    for sub in (*diff.sub_dirs_added, *diff.sub_dirs_retained):
        retained_below, removed_below = retained_and_removed(sub, (*path, sub.name))
        retained |= retained_below
        removed |= removed_below
    return retained, removed


@pytest.mark.parametrize(
    "same_file", [pytest.param(same_leaf_name, id="by leaf name"), pytest.param(is_same_file, id="by content")]
)
@pytest.mark.parametrize("local,remote,added,retained,removed,_shows", CASES, ids=[case[-1] for case in CASES])
def test_directory_is_split_as_samza_splits_it(
    *,
    local: str,
    remote: str,
    added: str,
    retained: str,
    removed: str,
    _shows: str,
    same_file: Callable[[LocalFile, FileIndex], bool],
) -> None:
    with mock.patch.object(dir_diff, "is_same_file", same_file):
        diff = diff_dir(local_dir(parse_tree(local)), remote_dir(local_dir(parse_tree(remote))))

    assert {path for path, _ in added_files(diff)} == paths_of(added)
    assert retained_and_removed(diff) == (paths_of(retained), paths_of(removed))
    stats = diff_stats(diff)
    assert (stats.files_added, stats.files_retained, stats.files_removed) == (
        len(paths_of(added)),
        len(paths_of(retained)),
        len(paths_of(removed)),
    )


def test_all_cases_of_samza_are_in_the_table() -> None:
    assert len(set(CASES)) == 33


def test_new_index_has_what_samzas_put_dir_returns() -> None:
    """`TestBlobStoreUtil.testPutDir`."""
    local = local_dir(parse_tree("[a, c, z/1, y/2, p/m/3, q/n/4]"))
    remote = remote_dir(local_dir(parse_tree("[a, b, z/1, x/2, p/m/3, p/m/5, r/o/6]")))
    diff = diff_dir(local, remote)
    uploaded = {
        path: file_index(file.name, file.name.encode(), counter=100 + n)
        for n, (path, file) in enumerate(added_files(diff))
    }

    index = build_dir_index(diff, uploaded)

    assert uploaded.keys() == paths_of("[c, y/2, q/n/4]")
    present = dict(present_files(index))
    assert present.keys() == paths_of("[a, c, z/1, y/2, p/m/3, q/n/4]")
    before = dict(present_files(remote))
    assert all(present[path] == (uploaded.get(path) or before[path]) for path in present)
    assert removed_files(index) == paths_of("[b, x/2, r/o/6, p/m/5]")


def removed_files(directory: DirIndex, path: Path = ()) -> set[Path]:
    removed = {(*path, file.name) for file in directory.files_removed}
    for gone in directory.sub_dirs_removed:
        removed |= {(*path, gone.name, *below) for below, _ in present_files(gone)}
    for sub in directory.sub_dirs_present:
        removed |= removed_files(sub, (*path, sub.name))
    return removed
