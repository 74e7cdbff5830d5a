"""Some files of a snapshot: those whose paths somebody names by patterns."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import msgspec

from index.snapshot.model import DirIndex, SnapshotIndex


def is_empty(pattern: str) -> bool:
    """Whether a pattern names nothing at all, as "" and "." do: such a one is no pattern."""
    return not PurePosixPath(pattern).parts


def choose_files(index: SnapshotIndex, patterns: Sequence[str]) -> tuple[SnapshotIndex, tuple[str, ...]]:
    """A snapshot of those files alone that a pattern matches, and of the directories that they stand in.

    A pattern is as in a shell, matched from the right: `*.sst` at any depth, `db/*.sst` in every directory `db`. `*`
    matches within one component. None of them is empty.

    Returns:
        The snapshot, of which only the files are less; and the patterns that match nothing.
    """
    unmatched = set(patterns)
    chosen = _choose(index.dir, patterns, unmatched, PurePosixPath())
    return msgspec.structs.replace(index, dir=chosen), tuple(sorted(unmatched))


def _choose(directory: DirIndex, patterns: Sequence[str], unmatched: set[str], at: PurePosixPath) -> DirIndex:
    def matches(name: str) -> bool:
        found = [pattern for pattern in patterns if (at / name).match(pattern)]
        unmatched.difference_update(found)
        return bool(found)

    def below() -> Iterator[DirIndex]:
        for sub in directory.sub_dirs_present:
            chosen = _choose(sub, patterns, unmatched, at / sub.name)
            if chosen.files_present or chosen.sub_dirs_present:
                yield chosen

    files = tuple(file for file in directory.files_present if matches(file.name))
    return msgspec.structs.replace(
        directory, files_present=files, files_removed=(), sub_dirs_present=tuple(below()), sub_dirs_removed=()
    )
