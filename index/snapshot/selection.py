"""A part of a snapshot, as an index of its own: for a restore of some of its files."""

from collections.abc import Iterable

import msgspec

from index.snapshot.model import DirIndex, FileIndex, SnapshotIndex

FilePath = tuple[str, ...]


class _Directory:
    """A directory while its files are gathered."""

    def __init__(self) -> None:
        self.files: dict[str, FileIndex] = {}
        self.sub_dirs: dict[str, _Directory] = {}

    def frozen(self, name: str, source: DirIndex) -> DirIndex:
        files = tuple(self.files[file] for file in sorted(self.files))
        known = {sub.name: sub for sub in source.sub_dirs_present}
        sub_dirs = (self.sub_dirs[sub].frozen(sub, known.get(sub, DirIndex(sub))) for sub in sorted(self.sub_dirs))
        return DirIndex(name, files, tuple(sub_dirs), mode=source.mode)


def select_files(index: SnapshotIndex, files: Iterable[tuple[FilePath, FileIndex]]) -> SnapshotIndex:
    """The same snapshot with these files alone: their directories, the packs that hold them, and nothing removed.

    It is made to be restored, not to be stored: nothing else than a restore knows what to do with a part.

    Args:
        index: The snapshot.
        files: Entries of it, each with its path from the root.
    """
    root = _Directory()
    used: set[str] = set()
    for path, entry in files:
        directory = root
        for name in path[:-1]:
            directory = directory.sub_dirs.setdefault(name, _Directory())
        directory.files[entry.name] = entry
        used.update(blob.key for blob in entry.blobs)
    packs = tuple(pack for pack in index.packs if pack.key in used)
    return msgspec.structs.replace(index, dir=root.frozen("", index.dir), packs=packs)
