"""Find what a snapshot holds: its files, the blobs that it keeps alive, a part of its files, and the share that is new.

A part is an index of its own, made to be restored and not to be stored: chosen by patterns of paths, or file by file.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TypeVar

import msgspec

from index.snapshot.keys import parse_upload_key
from index.snapshot.model import BlobKey, DirIndex, FileIndex, FilePath, SnapshotIndex

_File = TypeVar("_File")


def files_of(directory: DirIndex, parents: FilePath = ()) -> Iterator[tuple[FilePath, FileIndex]]:
    """Yield every present file below a directory with its path components, directories in order."""
    for file in directory.files_present:
        yield (*parents, file.name), file
    for sub in directory.sub_dirs_present:
        yield from files_of(sub, (*parents, sub.name))


def dirs_of(directory: DirIndex, parents: FilePath = ()) -> Iterator[tuple[FilePath, DirIndex]]:
    """Yield every present directory below a directory with its path components, parents first."""
    for sub in directory.sub_dirs_present:
        path = (*parents, sub.name)
        yield path, sub
        yield from dirs_of(sub, path)


def paths_in(index: SnapshotIndex, key: str) -> Iterator[str]:
    """Yield the paths of the present files that have bytes in a blob."""
    return ("/".join(path) for path, file in files_of(index.dir) if any(blob.key == key for blob in file.blobs))


def blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """Return the blobs that hold bytes of the snapshot's present files."""
    return frozenset(blob.key for _, file in files_of(index.dir) for blob in file.blobs)


def bytes_needed(files: Iterable[FileIndex]) -> dict[BlobKey, int]:
    """Return the blobs that hold bytes of files, each with the least number of bytes that it must have."""
    needed: dict[BlobKey, int] = {}
    for file in files:
        for blob in file.blobs:
            needed[blob.key] = max(needed.get(blob.key, 0), blob.blob_offset_bytes + blob.size_bytes)
    return needed


def blobs_needed(index: SnapshotIndex) -> dict[BlobKey, int]:
    """Return the blobs that an index needs, packs with all of their bytes; as `bytes_needed`."""
    needed = bytes_needed(file for _, file in files_of(index.dir))
    for pack in index.packs:
        needed[pack.key] = max(needed.get(pack.key, 0), pack.size_bytes)
    return needed


def new_blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """Return the blobs uploaded for this very index: the only ones that can still have a TTL (design 0002, T1)."""
    return frozenset(key for key in blob_keys(index) if parse_upload_key(key).session == index.session)


def group_by_dir(
    files: Iterable[tuple[FilePath, _File]],
) -> tuple[list[_File], list[tuple[str, list[tuple[FilePath, _File]]]]]:
    """Split files by path into those of a directory itself, by name, and those of each sub-directory, by name."""
    own: list[tuple[str, _File]] = []
    below: dict[str, list[tuple[FilePath, _File]]] = {}
    for (first, *rest), file in files:
        if rest:
            below.setdefault(first, []).append((tuple(rest), file))
        else:
            own.append((first, file))
    return [file for _, file in sorted(own, key=itemgetter(0))], sorted(below.items())


def select_files(index: SnapshotIndex, files: Iterable[tuple[FilePath, FileIndex]]) -> SnapshotIndex:
    """Reduce a snapshot to these of its files: their directories, the packs that hold them, and nothing removed.

    It takes time by the files chosen, and not by all: who reads one file of many calls it for each. It is made to be
    restored, not to be stored: nothing else than a restore knows what to do with a part.
    """
    chosen = list(files)
    used = {blob.key for _, entry in chosen for blob in entry.blobs}
    packs = tuple(pack for pack in index.packs if pack.key in used)
    return msgspec.structs.replace(index, dir=_select(index.dir, chosen), packs=packs)


def _select(source: DirIndex, files: Iterable[tuple[FilePath, FileIndex]]) -> DirIndex:
    own, below = group_by_dir(files)
    known = {sub.name: sub for sub in source.sub_dirs_present}
    sub_dirs = tuple(_select(known.get(name, DirIndex(name)), of) for name, of in below)
    return DirIndex(source.name, tuple(own), sub_dirs, mode=source.mode)


def is_empty_pattern(pattern: str) -> bool:
    """Return whether a pattern names nothing, as "" and "." do: such a one is not a pattern."""
    return not PurePosixPath(pattern).parts


def choose_files(index: SnapshotIndex, patterns: Sequence[str]) -> tuple[SnapshotIndex, tuple[str, ...]]:
    """Reduce a snapshot, as `select_files`, to the files that a pattern matches.

    A pattern is as in a shell, matched from the right: `*.sst` at any depth, `db/*.sst` in every directory `db`. `*`
    matches within one component. None of them is empty. Those that match nothing are returned, too.
    """
    unmatched, found = {*patterns}, []
    for path, file in files_of(index.dir):
        if by := {pattern for pattern in patterns if PurePosixPath(*path).match(pattern)}:
            unmatched -= by
            found.append((path, file))
    return select_files(index, found), tuple(sorted(unmatched))


class SnapshotShare(msgspec.Struct, frozen=True, kw_only=True):
    """Files and bytes that a snapshot brought, those that it took over, and what was uploaded for it."""

    files_new: int = 0
    bytes_new: int = 0
    files_retained: int = 0
    bytes_retained: int = 0
    # Whole blobs, packs with their gaps, and the index itself.
    bytes_uploaded: int = 0

    def plus(self, other: "SnapshotShare") -> "SnapshotShare":
        return SnapshotShare(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


def measure_share(index: SnapshotIndex, *, index_bytes: int = 0) -> SnapshotShare:
    """Measure what of a snapshot was uploaded with it (design 0002, K2); its index is stored in `index_bytes`.

    A file is new if any of its bytes are in a blob of the snapshot's own upload session, or in the index itself, as an
    empty one does. A file that was packed again counts as new, because it was sent again.
    """
    new: list[FileIndex] = []
    retained: list[FileIndex] = []
    for _, file in files_of(index.dir):
        is_new = not file.blobs or any(parse_upload_key(blob.key).session == index.session for blob in file.blobs)
        (new if is_new else retained).append(file)
    needed = blobs_needed(index)
    return SnapshotShare(
        files_new=len(new),
        bytes_new=sum(file.metadata.size_bytes for file in new),
        files_retained=len(retained),
        bytes_retained=sum(file.metadata.size_bytes for file in retained),
        bytes_uploaded=index_bytes + sum(needed[key] for key in new_blob_keys(index)),
    )
