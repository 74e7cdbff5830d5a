"""How much of a snapshot is new, and how much stands in what earlier commits have uploaded: told by its index alone."""

from typing import Self

import msgspec

from index.snapshot.keys import parse_upload_key
from index.snapshot.model import FileIndex, SnapshotIndex
from index.snapshot.reachable import blobs_needed, files_of, new_blob_keys


class SnapshotShare(msgspec.Struct, frozen=True, kw_only=True):
    """Files and bytes that a snapshot brought, those that it took over, and what was uploaded for it."""

    files_new: int = 0
    bytes_new: int = 0
    files_retained: int = 0
    bytes_retained: int = 0
    # Whole blobs, packs with their gaps, and the index itself.
    bytes_uploaded: int = 0

    def plus(self, other: Self) -> "SnapshotShare":
        """The sums of both."""
        return SnapshotShare(
            **{name: getattr(self, name) + getattr(other, name) for name in SnapshotShare.__struct_fields__}
        )


def measure_share(index: SnapshotIndex, *, index_bytes: int = 0) -> SnapshotShare:
    """What of a snapshot was uploaded with it (design 0002, K2).

    A file is new if any of its bytes stand in a blob of the snapshot's own upload session, or in the index itself, as
    an empty one does. A file that was packed again counts as new, because it was sent again.

    Args:
        index: The snapshot.
        index_bytes: Of the index as it is stored.
    """
    new: list[FileIndex] = []
    retained: list[FileIndex] = []
    for _, file in files_of(index.dir):
        (new if _is_new(file, index.session) else retained).append(file)
    needed = blobs_needed(index)
    return SnapshotShare(
        files_new=len(new),
        bytes_new=sum(file.metadata.size_bytes for file in new),
        files_retained=len(retained),
        bytes_retained=sum(file.metadata.size_bytes for file in retained),
        bytes_uploaded=index_bytes + sum(needed[key] for key in new_blob_keys(index)),
    )


def _is_new(file: FileIndex, session: str) -> bool:
    return not file.blobs or any(parse_upload_key(blob.key).session == session for blob in file.blobs)
