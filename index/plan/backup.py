"""What a backup uploads and in which form: decided from a diff, before anything is read or sent.

A file that is added takes the first form that fits it: nothing (it is empty), the index itself (tiny, while there is
space), a pack shared with its neighbours (small), a blob, or several blobs.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from index.errors import IndexInvariantError
from index.snapshot.contents import bytes_needed
from index.snapshot.dir_diff import DiffStats, DirDiff, LocalDir, LocalFile, build_dir_index, diff_stats
from index.snapshot.model import BlobKey, DirIndex, FileIndex, FilePath, Pack, SnapshotIndex, SnapshotMetadata

_Item = TypeVar("_Item")

# A pack of which less than this part is live is packed again: one half (design 0002, P1).
LIVE_SHARE_MIN: Final = 2


class BackupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes by which the form of a file is chosen, in bytes; `engine.settings` says what each means."""

    blob_bytes_max: int
    pack_file_bytes_max: int
    pack_bytes_max: int
    inline_file_bytes_max: int
    inline_bytes_max: int


class PlannedFile(msgspec.Struct, frozen=True, gc=False):
    """One file whose bytes the new snapshot takes from the disk."""

    path: FilePath
    file: LocalFile
    # The entry of a file that is only packed again: its bytes must still be these.
    expected: FileIndex | None = None

    @property
    def size_bytes(self) -> int:
        return self.file.metadata.size_bytes


class PlannedPack(msgspec.Struct, frozen=True, kw_only=True):
    """One blob for several small files, which follow one another in it without gaps."""

    # Number of the upload in its session.
    counter: int
    files: tuple[PlannedFile, ...]
    size_bytes: int


class PlannedBlobs(msgspec.Struct, frozen=True, kw_only=True):
    """One file in blobs of its own, cut after every `blob_bytes` bytes."""

    # Number of the first upload in its session; the others follow.
    counter: int
    file: PlannedFile
    blob_bytes: int

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each blob's bytes in the file."""
        size_bytes = self.file.size_bytes
        return tuple(
            (offset, min(self.blob_bytes, size_bytes - offset)) for offset in range(0, size_bytes, self.blob_bytes)
        )


class BackupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every added file in exactly one form, and what is kept of the previous snapshot."""

    # The diff to build the new directory from: files that are packed again are in it as removed and added.
    diff: DirDiff
    empty: tuple[PlannedFile, ...]
    inline: tuple[PlannedFile, ...]
    packs: tuple[PlannedPack, ...]
    blobs: tuple[PlannedBlobs, ...]
    # Packs of the previous snapshot that the new one still uses.
    packs_kept: tuple[Pack, ...]
    # What the diff itself says, files that are packed again counting as retained.
    changes: DiffStats
    files_repacked: int
    bytes_repacked: int
    # Of these, those that have bytes in a blob that is missing (design 0006, M1).
    files_healed: int = 0
    bytes_healed: int = 0

    @property
    def uploads_count(self) -> int:
        """Number of blobs to put, packs included; the index comes on top."""
        return len(self.packs) + sum(len(item.runs) for item in self.blobs)

    @property
    def upload_bytes(self) -> int:
        return sum(pack.size_bytes for pack in self.packs) + sum(item.file.size_bytes for item in self.blobs)

    @property
    def inline_bytes(self) -> int:
        return sum(item.size_bytes for item in self.inline)

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """The files whose bytes are read."""
        packed = (file for pack in self.packs for file in pack.files)
        return (*self.empty, *self.inline, *packed, *(item.file for item in self.blobs))

    @property
    def blobs_retained(self) -> dict[BlobKey, int]:
        """The blobs of the previous snapshot that the new one uses, each with the bytes that it must at least have."""
        return bytes_needed(file for _, file in _retained(self.diff, ()))


def plan_backup(
    local: LocalDir,
    previous: SnapshotIndex | None,
    diff: DirDiff,
    limits: BackupLimits,
    missing: Collection[str] = frozenset(),
) -> BackupPlan:
    """Choose the form of every added file, and the retained files that are packed again (design 0002, P1).

    Args:
        local: The scan that `diff` was made from.
        previous: The snapshot that it was made against; None if it was an empty directory.
        missing: Keys of blobs that are not there any more: what has bytes in them is stored again (design 0006, M1).

    Returns:
        A plan in which each file that is added or packed again is once, in the order of paths within each form, and
        each upload has its number: packs first, then blobs.

    Raises:
        IndexInvariantError: The first three arguments do not belong together.
    """
    packs = {pack.key: pack.size_bytes for pack in (previous.packs if previous is not None else ())}
    live_bytes = _live_bytes(diff)
    healed = _with_bytes_in(diff, live_bytes.keys() & missing)
    repacked = healed | _with_bytes_in(diff, live_bytes.keys() & _thin_packs(packs, live_bytes))
    found = tuple(_found(local, repacked, ())) if repacked else ()
    if len(found) != len(repacked):
        raise IndexInvariantError("the diff retains files that the scan did not see", subject="backup plan")
    to_store = sorted((*_added(diff, ()), *found), key=attrgetter("path"))
    # What is packed again has blobs, and so nothing inline.
    in_index_bytes = sum(len(file.inline) for _, file in _retained(diff, ()) if file.inline is not None)
    empty, inline, small, large = _choose_forms(to_store, limits, limits.inline_bytes_max - in_index_bytes)
    groups = list(group_by_size(small, attrgetter("size_bytes"), bytes_max=limits.pack_bytes_max))
    # A file alone makes no pack.
    large = sorted((*large, *(files[0] for files in groups if len(files) == 1)), key=attrgetter("path"))
    planned_packs = tuple(
        PlannedPack(counter=counter, files=tuple(files), size_bytes=sum(item.size_bytes for item in files))
        for counter, files in enumerate(files for files in groups if len(files) > 1)
    )
    planned_blobs: list[PlannedBlobs] = []
    counter = len(planned_packs)
    for item in large:
        planned_blobs.append(PlannedBlobs(counter=counter, file=item, blob_bytes=limits.blob_bytes_max))
        counter += len(planned_blobs[-1].runs)
    moved, used = diff, live_bytes
    if previous is not None and repacked:
        moved = _moved(diff, previous.dir, {item.path: item.file for item in found}, ())
        used = _live_bytes(moved)
    return BackupPlan(
        diff=moved,
        empty=tuple(empty),
        inline=tuple(inline),
        packs=planned_packs,
        blobs=tuple(planned_blobs),
        packs_kept=tuple(Pack(key, size_bytes) for key, size_bytes in packs.items() if key in used),
        changes=diff_stats(diff),
        files_repacked=len(repacked),
        bytes_repacked=sum(file.metadata.size_bytes for file in repacked.values()),
        files_healed=len(healed),
        bytes_healed=sum(file.metadata.size_bytes for file in healed.values()),
    )


def build_snapshot(
    plan: BackupPlan,
    *,
    metadata: SnapshotMetadata,
    session: str,
    uploaded: Mapping[FilePath, FileIndex],
    packs: Sequence[Pack],
) -> SnapshotIndex:
    """Build the index of the new snapshot, once everything planned is uploaded; `packs` are the new ones.

    Raises:
        IndexInvariantError: `uploaded` does not name exactly the planned files.
    """
    return SnapshotIndex(
        metadata=metadata,
        session=session,
        dir=build_dir_index(plan.diff, uploaded),
        packs=tuple(sorted((*plan.packs_kept, *packs), key=lambda pack: pack.key)),
    )


def _added(diff: DirDiff, path: FilePath) -> Iterator[PlannedFile]:
    for file in diff.files_added:
        yield PlannedFile((*path, file.name), file)
    for sub in (*diff.sub_dirs_added, *diff.sub_dirs_retained):
        yield from _added(sub, (*path, sub.name))


def _retained(diff: DirDiff, path: FilePath) -> Iterator[tuple[FilePath, FileIndex]]:
    for file in diff.files_retained:
        yield (*path, file.name), file
    for sub in diff.sub_dirs_retained:
        yield from _retained(sub, (*path, sub.name))


def _live_bytes(diff: DirDiff) -> Counter[BlobKey]:
    live_bytes: Counter[BlobKey] = Counter()
    for _, file in _retained(diff, ()):
        for blob in file.blobs:
            live_bytes[blob.key] += blob.size_bytes
    return live_bytes


def _thin_packs(packs: Mapping[BlobKey, int], live_bytes: Counter[BlobKey]) -> set[BlobKey]:
    """Return the packs of which less than half would be live in the new tree (design 0002, P1)."""
    return {key for key, size_bytes in packs.items() if live_bytes[key] * LIVE_SHARE_MIN < size_bytes}


def _with_bytes_in(diff: DirDiff, keys: Collection[str]) -> dict[FilePath, FileIndex]:
    if not keys:
        return {}
    return {path: file for path, file in _retained(diff, ()) if any(blob.key in keys for blob in file.blobs)}


def _found(local: LocalDir, repacked: Mapping[FilePath, FileIndex], path: FilePath) -> Iterator[PlannedFile]:
    for file in local.files:
        if (*path, file.name) in repacked:
            yield PlannedFile((*path, file.name), file, repacked[*path, file.name])
    for sub in local.sub_dirs:
        yield from _found(sub, repacked, (*path, sub.name))


def _choose_forms(
    files: Iterable[PlannedFile], limits: BackupLimits, space_bytes: int
) -> tuple[list[PlannedFile], list[PlannedFile], list[PlannedFile], list[PlannedFile]]:
    """Split files into empty, inline (while there is space in the index), small and large ones."""
    empty: list[PlannedFile] = []
    inline: list[PlannedFile] = []
    small: list[PlannedFile] = []
    large: list[PlannedFile] = []
    for item in files:
        size_bytes = item.size_bytes
        if size_bytes == 0:
            empty.append(item)
        elif size_bytes <= limits.inline_file_bytes_max and size_bytes <= space_bytes:
            inline.append(item)
            space_bytes -= size_bytes
        elif size_bytes <= limits.pack_file_bytes_max:
            small.append(item)
        else:
            large.append(item)
    return empty, inline, small, large


def group_by_size(
    items: Iterable[_Item], size_of: Callable[[_Item], int], *, bytes_max: int, count_max: int = sys.maxsize
) -> Iterator[list[_Item]]:
    """Yield items, in order, in groups within both limits; an item above `bytes_max` is a group by itself."""
    group: list[_Item] = []
    space_bytes = bytes_max
    for item in items:
        size_bytes = size_of(item)
        if group and (size_bytes > space_bytes or len(group) == count_max):
            yield group
            group, space_bytes = [], bytes_max
        group.append(item)
        space_bytes -= size_bytes
    if group:
        yield group


def _moved(diff: DirDiff, previous: DirIndex, local: Mapping[FilePath, LocalFile], path: FilePath) -> DirDiff:
    """Return the diff with files that are packed again as removed and added: their bytes move to another place."""
    names = {file.name for file in diff.files_retained if (*path, file.name) in local}
    previous_dirs = {sub.name: sub for sub in previous.sub_dirs_present}
    sub_dirs = tuple(_moved(sub, previous_dirs[sub.name], local, (*path, sub.name)) for sub in diff.sub_dirs_retained)
    added = (*diff.files_added, *(local[*path, name] for name in names))
    gone = (*diff.files_removed, *(file for file in previous.files_present if file.name in names))
    return msgspec.structs.replace(
        diff,
        files_added=tuple(sorted(added, key=attrgetter("name"))),
        files_retained=tuple(file for file in diff.files_retained if file.name not in names),
        files_removed=tuple(sorted(gone, key=attrgetter("name"))),
        sub_dirs_retained=sub_dirs,
    )
