"""From where a restore takes each file: this disk, the index, or a blob; decided before anything is written."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import msgspec

from index.snapshot.contents import dirs_of, files_of
from index.snapshot.dir_diff import LocalFile
from index.snapshot.keys import check_file_name
from index.snapshot.model import BlobKey, FileIndex, FilePath, SnapshotIndex

# Dead bytes of a pack that are fetched along, so that what is before and after them is one request (design 0008, R11):
# until it is known how fast a store answers and sends, and the limits of what is chosen then.
GAP_BYTES_FIRST: Final = 1024 * 1024
GAP_BYTES_MIN: Final = 64 * 1024
GAP_BYTES_MAX: Final = 4 * 1024 * 1024
# A gap above the first has at most 16 times the bytes of the file behind it: of tiny files few bytes are wanted.
GAP_BYTES_TINY: Final = 256 * 1024
GAP_PER_BYTE_MAX: Final = 16
# What a request takes of this machine's processor.
_REQUEST_WORK_S: Final = 0.001

# A snapshot may come from anywhere: no restored file runs with its owner's rights. No store has such files.
RESTORED_MODE: Final = 0o777
# The user who restores a directory may read, replace and remove it.
_READABLE: Final = 0o500


class RestoredFile(msgspec.Struct, frozen=True):
    """One file of the snapshot and where it belongs."""

    path: FilePath
    entry: FileIndex

    @property
    def size_bytes(self) -> int:
        return self.entry.metadata.size_bytes


class ReusedFile(msgspec.Struct, frozen=True):
    """A file that this disk has already, its content known to be right (design 0002, I2)."""

    target: RestoredFile
    # The file of the same path in the directory that is replaced.
    local: LocalFile


class FetchedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a pack, with the files in it, in the order of their offsets; they do not overlap."""

    key: BlobKey
    start: int
    size_bytes: int
    files: tuple[RestoredFile, ...]


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every directory, parents first, and every file in exactly one of the other fields."""

    dirs: tuple[FilePath, ...]
    # Permission bits for the directories of which they are known, the root's under ().
    modes: dict[FilePath, int]
    empty: tuple[RestoredFile, ...]
    inline: tuple[RestoredFile, ...]
    # Immutable files that get a second name.
    links: tuple[ReusedFile, ...]
    copies: tuple[ReusedFile, ...]
    # Small files, by ranges of packs.
    runs: tuple[FetchedRun, ...]
    # Files that are fetched blob by blob and written as they come.
    streams: tuple[RestoredFile, ...]

    @property
    def files_count(self) -> int:
        return sum(1 for _ in self.written) + len(self.links)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.written) + sum(link.target.size_bytes for link in self.links)

    @property
    def fetch_bytes(self) -> int:
        """Bytes asked of the store, dead ones between the files of a range counted."""
        return sum(run.size_bytes for run in self.runs) + sum(file.size_bytes for file in self.streams)

    @property
    def fetch_requests(self) -> int:
        return len(self.runs) + sum(len(file.entry.blobs) for file in self.streams)

    @property
    def fetched(self) -> Iterator[RestoredFile]:
        for run in self.runs:
            yield from run.files
        yield from self.streams

    @property
    def written(self) -> Iterator[RestoredFile]:
        """The files that need space on the disk: all but those that only get a second name."""
        yield from self.empty
        yield from self.inline
        yield from self.fetched
        for copy in self.copies:
            yield copy.target


def choose_gap_bytes(wait_s: float, bytes_per_s: float) -> int:
    """Return how many bytes come in the time that one more request would take.

    Args:
        wait_s: How long a request waits for its answer, divided by the number of requests under way at once.
        bytes_per_s: At what rate the answers to all of them come.
    """
    return round(min(max(GAP_BYTES_MIN, (wait_s + _REQUEST_WORK_S) * bytes_per_s), GAP_BYTES_MAX))


def plan_restore(
    index: SnapshotIndex,
    present: Mapping[FilePath, LocalFile],
    *,
    range_bytes: int,
    owners_count: bool,
    gap_bytes: int = GAP_BYTES_FIRST,
) -> RestorePlan:
    """Choose from where each file comes; the plan names every file and every directory of the snapshot once.

    Args:
        present: Local files by path, their content known to be that of the snapshot's file of the path (I2).
        range_bytes: The largest range of a pack to ask for at once.
        owners_count: Whether a file of another owner or group is not the same file.
        gap_bytes: The most bytes between two files of a pack that are asked for with them.

    Raises:
        UnsafeNameError: A name is not a single path component.
    """
    packs = {pack.key for pack in index.packs}
    empty: list[RestoredFile] = []
    inline: list[RestoredFile] = []
    links: list[ReusedFile] = []
    copies: list[ReusedFile] = []
    packed: dict[BlobKey, list[RestoredFile]] = {}
    streams: list[RestoredFile] = []
    for path, entry in files_of(index.dir):
        check_file_name(path[-1])
        file = RestoredFile(path, entry)
        local = present.get(path)
        if file.size_bytes == 0:
            empty.append(file)
        elif entry.inline is not None:
            inline.append(file)
        elif local is not None:
            linkable = _is_linkable(local, entry, owners_count=owners_count)
            (links if linkable else copies).append(ReusedFile(file, local))
        elif len(entry.blobs) == 1 and entry.blobs[0].key in packs and file.size_bytes <= range_bytes:
            packed.setdefault(entry.blobs[0].key, []).append(file)
        else:
            streams.append(file)
    modes: dict[FilePath, int | None] = {(): index.dir.mode}
    for path, directory in dirs_of(index.dir):
        check_file_name(path[-1])
        modes[path] = directory.mode
    return RestorePlan(
        dirs=tuple(path for path in modes if path),
        modes={path: mode & RESTORED_MODE | _READABLE for path, mode in modes.items() if mode is not None},
        empty=tuple(empty),
        inline=tuple(inline),
        links=tuple(links),
        copies=tuple(copies),
        runs=tuple(run for key, files in packed.items() for run in _runs(key, files, range_bytes, gap_bytes)),
        streams=tuple(streams),
    )


def _is_linkable(local: LocalFile, entry: FileIndex, *, owners_count: bool) -> bool:
    # A link shares the metadata with the old directory, which has to stay as it is until the new one is complete.
    mine, theirs = local.metadata, entry.metadata
    return (
        entry.name.endswith(".sst")
        and (mine.mode, mine.modified_at_ns) == (theirs.mode, theirs.modified_at_ns)
        and (not owners_count or (mine.owner, mine.group) == (theirs.owner, theirs.group))
    )


def _runs(key: BlobKey, files: Collection[RestoredFile], range_bytes: int, gap_bytes: int) -> Iterator[FetchedRun]:
    """Join the files of a pack to ranges, bridging small gaps, none longer than `range_bytes`, none with an overlap."""
    run: list[RestoredFile] = []
    start = end = 0

    def closed() -> FetchedRun:
        return FetchedRun(key=key, start=start, size_bytes=end - start, files=tuple(run))

    for file in sorted(files, key=_blob_offset_bytes):
        at = _blob_offset_bytes(file)
        file_end = at + file.size_bytes
        most_bytes = min(gap_bytes, max(GAP_BYTES_TINY, GAP_PER_BYTE_MAX * file.size_bytes))
        if run and (not 0 <= at - end <= most_bytes or file_end - start > range_bytes):
            yield closed()
            run = []
        if not run:
            start = end = at
        run.append(file)
        end = file_end
    if run:
        yield closed()


def _blob_offset_bytes(file: RestoredFile) -> int:
    return file.entry.blobs[0].blob_offset_bytes
