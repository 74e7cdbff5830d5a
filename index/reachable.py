"""Which blobs an index keeps alive, and which of them are new in it."""

from collections.abc import Iterator

from index.keys import parse_upload_key
from index.model import BlobKey, DirIndex, FileIndex, SnapshotIndex


def files_of(directory: DirIndex, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FileIndex]]:
    """Every present file below a directory with its path components, directories in order."""
    for file in directory.files_present:
        yield (*parents, file.name), file
    for sub in directory.sub_dirs_present:
        yield from files_of(sub, (*parents, sub.name))


def blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """The blobs that hold bytes of the snapshot's present files."""
    return frozenset(blob.key for _, file in files_of(index.dir) for blob in file.blobs)


def new_blob_keys(index: SnapshotIndex) -> frozenset[BlobKey]:
    """The blobs that were uploaded for this very index: the only ones that can still carry a TTL (design 0002, T1)."""
    return frozenset(key for key in blob_keys(index) if parse_upload_key(key).session == index.session)
