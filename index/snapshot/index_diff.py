"""What differs between two snapshots, file by file: for people (`tidemark diff A B`)."""

import msgspec

from index.display import Told, tell_files
from index.snapshot.model import DirIndex, FileIndex

Path = tuple[str, ...]


class ComparedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of either snapshot. A size is None on the side that has no such file."""

    path: Path
    before_bytes: int | None = None
    after_bytes: int | None = None
    mode_changed: bool = False


class IndexDifference(Told, msgspec.Struct, frozen=True, kw_only=True):
    """Two snapshots compared by content; each list is in the order of a walk, files before sub-directories."""

    added: tuple[ComparedFile, ...] = ()
    removed: tuple[ComparedFile, ...] = ()
    # Other bytes, or the same bytes with another mode.
    changed: tuple[ComparedFile, ...] = ()
    unchanged: tuple[ComparedFile, ...] = ()
    dirs_added: tuple[Path, ...] = ()
    dirs_removed: tuple[Path, ...] = ()

    def figures(self) -> dict[str, str]:  # type: ignore[explicit-override]  # as in `Told`
        """How many files, and how large they are afterwards; those removed, before."""
        groups = {
            "added": self.added, "removed": self.removed, "changed": self.changed, "unchanged": self.unchanged
        }  # fmt: skip
        told = {name: tell_files(len(files), sum(map(_size_bytes, files))) for name, files in groups.items()}
        folders = {"directories added": len(self.dirs_added), "directories removed": len(self.dirs_removed)}
        return told | {name: f"{number:,}" for name, number in folders.items() if number}


def _size_bytes(file: ComparedFile) -> int:
    return file.before_bytes or 0 if file.after_bytes is None else file.after_bytes


def diff_indexes(a: DirIndex, b: DirIndex) -> IndexDifference:
    """Compare the present files of two snapshots by size, content hash and mode.

    Args:
        a: The snapshot before.
        b: The snapshot after.

    Returns:
        Every file of either side exactly once. Where the bytes are stored, and times, owner and group, do not matter.
    """
    walk = _Walk()
    walk.compare(a, b, ())
    return IndexDifference(
        added=tuple(walk.added),
        removed=tuple(walk.removed),
        changed=tuple(walk.changed),
        unchanged=tuple(walk.unchanged),
        dirs_added=tuple(walk.dirs_added),
        dirs_removed=tuple(walk.dirs_removed),
    )


class _Walk:
    """The lists of an `IndexDifference` while they grow."""

    def __init__(self) -> None:
        self.added: list[ComparedFile] = []
        self.removed: list[ComparedFile] = []
        self.changed: list[ComparedFile] = []
        self.unchanged: list[ComparedFile] = []
        self.dirs_added: list[Path] = []
        self.dirs_removed: list[Path] = []

    def compare(self, a: DirIndex, b: DirIndex, path: Path) -> None:
        before = {file.name: file for file in a.files_present}
        after = {file.name: file for file in b.files_present}
        for name in sorted(before.keys() | after.keys()):
            self._compare_file(before.get(name), after.get(name), (*path, name))
        dirs_before = {sub.name: sub for sub in a.sub_dirs_present}
        dirs_after = {sub.name: sub for sub in b.sub_dirs_present}
        for name in sorted(dirs_before.keys() | dirs_after.keys()):
            below = (*path, name)
            if name not in dirs_before:
                self.dirs_added.append(below)
            elif name not in dirs_after:
                self.dirs_removed.append(below)
            self.compare(dirs_before.get(name, DirIndex(name)), dirs_after.get(name, DirIndex(name)), below)

    def _compare_file(self, before: FileIndex | None, after: FileIndex | None, path: Path) -> None:
        file = ComparedFile(
            path=path,
            before_bytes=None if before is None else before.metadata.size_bytes,
            after_bytes=None if after is None else after.metadata.size_bytes,
            mode_changed=before is not None and after is not None and before.metadata.mode != after.metadata.mode,
        )
        if before is None:
            self.added.append(file)
        elif after is None:
            self.removed.append(file)
        elif file.mode_changed or file.before_bytes != file.after_bytes or before.blake3 != after.blake3:
            self.changed.append(file)
        else:
            self.unchanged.append(file)
