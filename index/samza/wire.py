"""The JSON that Samza stores for one snapshot, as values: field for field and in the order that Samza writes.

Source:
    Samza `storage/blobstore/index/serde/*Mixin.java` and `SamzaObjectMapper`, release 1.8.
"""

from typing import Annotated

import msgspec

OFFSET_BYTES_MAX = 2**31 - 1

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=OFFSET_BYTES_MAX)]
_Checksum = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Permissions = Annotated[str, msgspec.Meta(pattern="^([r-][w-][x-]){3}$")]


class SamzaFileBlob(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One blob of a file. The offset is a Java `int`: files beyond 2 GiB can stand in one blob only."""

    blob_id: str
    offset: _Offset


class SamzaFileMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """POSIX attributes; times in milliseconds since the epoch, permissions such as `rw-r--r--`."""

    creation_time_millis: _Natural
    last_modified_time_millis: _Natural
    size: _Natural
    owner: str
    group: str
    permissions: _Permissions


class SamzaFileIndex(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One file; the checksum is the IEEE CRC32 of the whole, unsigned."""

    file_name: str
    blobs: tuple[SamzaFileBlob, ...]
    file_metadata: SamzaFileMetadata
    checksum: _Checksum


class SamzaDirIndex(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One directory; the root's name is empty. No list has a default: Samza refuses a missing one, and so do we."""

    dir_name: str
    files_present: tuple[SamzaFileIndex, ...]
    files_removed: tuple[SamzaFileIndex, ...]
    sub_dirs_present: tuple["SamzaDirIndex", ...]
    sub_dirs_removed: tuple["SamzaDirIndex", ...]


class SamzaSnapshotMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Whose state it is. A checkpoint id is `<millis>-<nanos>`, neither of them padded."""

    checkpoint_id: str
    job_name: str
    job_id: str
    task_name: str
    store_name: str


class SamzaSnapshotIndex(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One store of one task at one checkpoint."""

    creation_time_millis: _Natural
    snapshot_metadata: SamzaSnapshotMetadata
    dir_index: SamzaDirIndex
    # Written as null when there is none; read as none when it is missing.
    prev_snapshot_index_blob_id: str | None = None
