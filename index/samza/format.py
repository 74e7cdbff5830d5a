"""Samza's stored form of a snapshot, both directions, byte for byte.

First the JSON that Samza stores for one snapshot, as values: field for field and in the order that Samza writes.

What Samza reads as a snapshot it also cleans up: after a commit it deletes every blob that the index lists as removed,
and the index that it names as its predecessor. An index made by `to_samza` therefore lists nothing as removed: older
commits of ours may still need those very blobs.

Source:
    Samza `storage/blobstore/index/serde/*Mixin.java` and `SamzaObjectMapper`, release 1.8.
"""

import re
from typing import Annotated, Final

import msgspec

from index.errors import FormatError, SamzaFormatError
from index.java_text import decode_json, encode_jackson
from index.snapshot.invariants import DEPTH_MAX
from index.snapshot.keys import check_file_name
from index.snapshot.model import BlobKey, DirIndex, FileBlob, FileIndex, FilePath, SnapshotIndex

OFFSET_BYTES_MAX = 2**31 - 1

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=OFFSET_BYTES_MAX)]
_Checksum = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Permissions = Annotated[str, msgspec.Meta(pattern="^([r-][w-][x-]){3}$")]

SAMZA_INDEX_BYTES_MAX: Final = 1024 * 1024 * 1024

# Samza refuses a blank owner or group; ours are empty where the file system did not know them.
_OWNER_UNKNOWN: Final = "unknown"
_UNPACK_HINT: Final = "write a copy with `tidemark export --unpack`, one blob per file, and export that"

_CHECKPOINT_ID = re.compile(r"(?P<millis>[0-9]{1,19})-(?P<nanos>[0-9]{1,19})")


class SamzaFileBlob(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One blob of a file. The offset is a Java `int`: files beyond 2 GiB fit in one blob only."""

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


class SamzaFile(msgspec.Struct, frozen=True, kw_only=True):
    """One present file of a Samza snapshot, with what reading it takes."""

    path: FilePath
    size_bytes: int
    crc32: int
    mode: int
    modified_at_ms: int
    # In file order, each whole, covering the file; Samza stores an empty file as one empty blob.
    blobs: tuple[FileBlob, ...]


class SamzaSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The present files of a Samza snapshot, and every directory, empty ones included, parents first."""

    metadata: SamzaSnapshotMetadata
    files: tuple[SamzaFile, ...]
    directories: tuple[FilePath, ...]


def samza_checkpoint_id(millis: int, nanos: int) -> str:
    """Make Samza's checkpoint id: milliseconds since the epoch, and the last six digits of a nanosecond clock.

    Raises:
        SamzaFormatError: One is negative, or `nanos` has more than six digits.
    """
    if millis < 0 or not 0 <= nanos < 1_000_000:  # noqa: PLR2004 — six digits
        raise SamzaFormatError("is out of range", subject=f"checkpoint id {millis}-{nanos}", hint="pass a time")
    return f"{millis}-{nanos}"


def parse_samza_checkpoint_id(checkpoint_id: str) -> tuple[int, int]:
    """Return milliseconds and nanoseconds of a checkpoint id.

    Raises:
        SamzaFormatError: It is not of the form `<millis>-<nanos>`.
    """
    m = _CHECKPOINT_ID.fullmatch(checkpoint_id)
    if m is None:
        raise SamzaFormatError("is not <millis>-<nanos>", subject=f"checkpoint id {checkpoint_id!r}")
    return int(m["millis"]), int(m["nanos"])


def encode_samza_index(index: SamzaSnapshotIndex) -> bytes:
    """Encode an index as Samza stores it: no spaces, no final newline, escapes as Jackson writes them.

    Raises:
        SamzaFormatError: Samza would refuse to read it.
    """
    _check_index(index, "snapshot-index")
    try:
        return encode_jackson(index)
    except UnicodeEncodeError as error:
        raise SamzaFormatError("holds a text that is not valid Unicode", subject="snapshot-index") from error


def decode_samza_index(data: bytes, *, blob_id: str) -> SamzaSnapshotIndex:
    """Read what Samza stored. Unknown fields are ignored, as Samza ignores them.

    Raises:
        SamzaFormatError: It is not JSON of this form, a list is missing, an offset exceeds 2^31 - 1, or Samza itself
            would refuse a value.
        UnsafeNameError: A file or directory name is not a single path component. Samza would write outside its
            directory here.
    """
    if len(data) > SAMZA_INDEX_BYTES_MAX:
        raise SamzaFormatError(f"{len(data)} bytes exceed the cap of {SAMZA_INDEX_BYTES_MAX}", subject=blob_id)
    what = "is not a Samza snapshot index"
    hint = "check that the blob is a snapshot index; one written before Samza 1.8 may be unreadable to Samza too"
    index = decode_json(data, SamzaSnapshotIndex, SamzaFormatError, what, subject=blob_id, hint=hint)
    _check_index(index, blob_id)
    return index


def _check_index(index: SamzaSnapshotIndex, blob_id: str) -> None:
    """Refuse what Samza's own constructors refuse, names that lead out of the directory, and too deep a nesting."""
    try:
        metadata = index.snapshot_metadata
        for field in ("job_name", "job_id", "task_name", "store_name"):
            _check_not_blank(getattr(metadata, field), field.replace("_", "-"))
        if index.prev_snapshot_index_blob_id is not None:
            _check_not_blank(index.prev_snapshot_index_blob_id, "prev-snapshot-index-blob-id")
        parse_samza_checkpoint_id(metadata.checkpoint_id)
        _check_dir(index.dir_index, ())
    except FormatError as error:
        error.add_note(f"while reading Samza's snapshot index {blob_id}")
        raise


def to_samza(index: SnapshotIndex, *, job_id: str, checkpoint_id: str) -> SamzaSnapshotIndex:
    """Convert an index of ours to what Samza would have written; blob ids are our keys.

    The index is whole, with every file in blobs of its own. Nothing is listed as removed, nor an index as the previous
    one: Samza deletes what is, and our older commits may need it. Where we know no owner or group they are "unknown",
    because Samza refuses blank ones; it then has to restore without comparing owners.

    Raises:
        SamzaFormatError: A file is inline, in a pack, or in a blob that starts beyond 2^31 - 1.
    """
    packs = frozenset(pack.key for pack in index.packs)
    return SamzaSnapshotIndex(
        creation_time_millis=index.metadata.created_at_ms,
        snapshot_metadata=SamzaSnapshotMetadata(
            checkpoint_id=checkpoint_id,
            job_name=index.metadata.job,
            job_id=job_id,
            task_name=index.metadata.task,
            store_name=index.metadata.store,
        ),
        dir_index=_to_samza_dir(index.dir, packs, ()),
    )


def from_samza(index: SamzaSnapshotIndex) -> SamzaSnapshot:
    """Return what restoring or importing a Samza snapshot takes.

    Raises:
        SamzaFormatError: The offsets of a file's blobs do not divide it.
    """
    files: list[SamzaFile] = []
    directories: list[FilePath] = []
    _collect(index.dir_index, (), files, directories)
    return SamzaSnapshot(metadata=index.snapshot_metadata, files=tuple(files), directories=tuple(directories))


def _check_dir(directory: SamzaDirIndex, path: FilePath) -> None:
    if len(path) > DEPTH_MAX:
        raise SamzaFormatError(f"directories nest deeper than {DEPTH_MAX}", subject="/".join(path[:3]))
    if not path and directory.dir_name:
        raise SamzaFormatError("the root directory has a name", subject=repr(directory.dir_name))
    for file in (*directory.files_present, *directory.files_removed):
        check_file_name(file.file_name)
        _check_not_blank(file.file_name, "file-name")
        _check_not_blank(file.file_metadata.owner, "owner")
        _check_not_blank(file.file_metadata.group, "group")
        for blob in file.blobs:
            _check_not_blank(blob.blob_id, "blob-id")
    for sub in (*directory.sub_dirs_present, *directory.sub_dirs_removed):
        _check_dir(sub, (*path, check_file_name(sub.dir_name)))
    names = [file.file_name for file in directory.files_present]
    names += [sub.dir_name for sub in directory.sub_dirs_present]
    if len(set(names)) != len(names):
        raise SamzaFormatError("a name occurs twice in the directory", subject="/".join(path) or "root")


def _check_not_blank(value: str, what: str) -> None:
    if not value or value.isspace():
        raise SamzaFormatError("is blank, which Samza refuses", subject=what)


def _to_samza_dir(directory: DirIndex, packs: frozenset[str], path: FilePath) -> SamzaDirIndex:
    return SamzaDirIndex(
        dir_name=directory.name,
        files_present=tuple(_to_samza_file(file, packs, (*path, file.name)) for file in directory.files_present),
        files_removed=(),
        sub_dirs_present=tuple(_to_samza_dir(sub, packs, (*path, sub.name)) for sub in directory.sub_dirs_present),
        sub_dirs_removed=(),
    )


def _to_samza_file(file: FileIndex, packs: frozenset[str], path: FilePath) -> SamzaFileIndex:
    if file.inline is not None:
        raise SamzaFormatError("is inside the index itself", subject="/".join(path), hint=_UNPACK_HINT)
    metadata = file.metadata
    return SamzaFileIndex(
        file_name=file.name,
        blobs=tuple(_to_samza_blob(blob, packs, path) for blob in file.blobs),
        file_metadata=SamzaFileMetadata(
            creation_time_millis=metadata.created_at_ms,
            last_modified_time_millis=max(0, metadata.modified_at_ns // 1_000_000),
            size=metadata.size_bytes,
            owner=metadata.owner or _OWNER_UNKNOWN,
            group=metadata.group or _OWNER_UNKNOWN,
            permissions=_permissions(metadata.mode),
        ),
        checksum=file.crc32,
    )


def _to_samza_blob(blob: FileBlob, packs: frozenset[str], path: FilePath) -> SamzaFileBlob:
    if blob.key in packs or blob.blob_offset_bytes != 0:
        raise SamzaFormatError("is in a pack with other files", subject="/".join(path), hint=_UNPACK_HINT)
    if blob.file_offset_bytes > OFFSET_BYTES_MAX:
        raise SamzaFormatError(
            f"has a blob at {blob.file_offset_bytes}, beyond the {OFFSET_BYTES_MAX} that Samza can express",
            subject="/".join(path),
            hint="Samza can hold a file of this size in one blob only",
        )
    return SamzaFileBlob(blob_id=blob.key, offset=blob.file_offset_bytes)


def _permissions(mode: int) -> str:
    return "".join(letter if mode & (0o400 >> bit) else "-" for bit, letter in enumerate("rwxrwxrwx"))


def _mode(permissions: str) -> int:
    return sum(0o400 >> bit for bit, letter in enumerate(permissions) if letter != "-")


def _collect(directory: SamzaDirIndex, path: FilePath, files: list[SamzaFile], directories: list[FilePath]) -> None:
    for file in directory.files_present:
        where = (*path, file.file_name)
        files.append(
            SamzaFile(
                path=where,
                size_bytes=file.file_metadata.size,
                crc32=file.checksum,
                mode=_mode(file.file_metadata.permissions),
                modified_at_ms=file.file_metadata.last_modified_time_millis,
                blobs=_runs(file, where),
            )
        )
    for sub in directory.sub_dirs_present:
        below = (*path, sub.dir_name)
        directories.append(below)
        _collect(sub, below, files, directories)


def _runs(file: SamzaFileIndex, path: FilePath) -> tuple[FileBlob, ...]:
    size_bytes = file.file_metadata.size
    if size_bytes == 0 and not file.blobs:
        return ()
    blobs = sorted(file.blobs, key=lambda blob: blob.offset)
    starts = [blob.offset for blob in blobs]
    ends = [*starts[1:], size_bytes]
    # The one blob of an empty file is empty; elsewhere a blob has at least one byte.
    shortest = 0 if size_bytes == 0 and len(blobs) == 1 else 1
    if starts[:1] != [0] or any(end - start < shortest for start, end in zip(starts, ends, strict=True)):
        raise SamzaFormatError(
            f"its blobs start at {starts[:8]}, which does not divide {size_bytes} bytes", subject="/".join(path)
        )
    return tuple(
        FileBlob(BlobKey(blob.blob_id), start, 0, end - start)
        for blob, start, end in zip(blobs, starts, ends, strict=True)
    )
