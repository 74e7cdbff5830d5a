"""Which blobs an index keeps alive, and which of them are new in it."""

from collections.abc import Iterable, Iterator

from index.snapshot.keys import parse_upload_key
from index.snapshot.model import BlobKey, DirIndex, FileIndex, SnapshotIndex


def files_of(directory: DirIndex, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FileIndex]]:
    """Every present file below a directory with its path components, directories in order."""
    for file in directory.files_present:
        yield (*parents, file.name), file
    for sub in directory.sub_dirs_present:
        yield from files_of(sub, (*parents, sub.name))


def blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """The blobs that hold bytes of the snapshot's present files."""
    return frozenset(blob.key for _, file in files_of(index.dir) for blob in file.blobs)


def bytes_needed(files: Iterable[FileIndex]) -> dict[BlobKey, int]:
    """The blobs that hold bytes of files, each with the bytes that it must at least have."""
    needed: dict[BlobKey, int] = {}
    for file in files:
        for blob in file.blobs:
            needed[blob.key] = max(needed.get(blob.key, 0), blob.blob_offset_bytes + blob.size_bytes)
    return needed


def blobs_needed(index: SnapshotIndex) -> dict[BlobKey, int]:
    """The blobs that an index needs, packs with all of their bytes; as `bytes_needed`."""
    needed = bytes_needed(file for _, file in files_of(index.dir))
    for pack in index.packs:
        needed[pack.key] = max(needed.get(pack.key, 0), pack.size_bytes)
    return needed


def new_blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """The blobs that were uploaded for this very index: the only ones that can still carry a TTL (design 0002, T1)."""
    return frozenset(key for key in blob_keys(index) if parse_upload_key(key).session == index.session)
