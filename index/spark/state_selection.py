"""Which files of a state store's directory one version is made of (design 0004, R6)."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from index.errors import StateMetadataError, VersionMissingError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileIndex
from index.spark.lineage import Resolution
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import LOGS, SSTS, changelog_name, checksum_name, snapshot_name

FilePath = tuple[str, ...]
# A file of a directory on disk, or of a picture of one.
_Present = TypeVar("_Present", LocalFile, FileIndex)

# What of the directory belongs to no version: the schema of the store's rows, which a reader of the state needs.
SCHEMA: FilePath = ("_metadata", "schema")

_HINT = "the directory was not whole when it was backed up; restore another version"


def select_state_files(
    resolution: Resolution, metadata: StateMetadata | None, present: Mapping[FilePath, _Present]
) -> dict[FilePath, _Present]:
    """The files that it takes so that Spark, or our state store, can load a version from a directory with nothing else.

    Args:
        resolution: What the version is made of.
        metadata: Of its base snapshot; None if it has none.
        present: Every file of the directory, by its path.

    Returns:
        The snapshot, its SSTs and logs, the changelogs, their checksums and the schema of the rows, these last two
        where they are there.

    Raises:
        VersionMissingError: A file that the version takes is not there.
        StateMetadataError: The snapshot says another size of a file than the file has.
    """
    chosen: dict[FilePath, _Present] = {}
    names = [] if resolution.base is None else [snapshot_name(resolution.base)]
    names += [changelog_name(of) for of in resolution.changelogs]
    for name in names:
        chosen[name,] = _need(resolution, (name,), present)
        if (checksum := present.get((checksum_name(name),))) is not None:
            chosen[checksum_name(name),] = checksum
    for path, stored in _shared(metadata):
        chosen[path] = entry = _need(resolution, path, present)
        if entry.metadata.size_bytes != stored.size_bytes:
            raise StateMetadataError(
                f"says that {'/'.join(path)} has {stored.size_bytes} bytes, and it has {entry.metadata.size_bytes}",
                subject=f"snapshot {resolution.base}",
                hint=_HINT,
            )
    if SCHEMA in present:
        chosen[SCHEMA] = present[SCHEMA]
    return chosen


def _shared(metadata: StateMetadata | None) -> Iterator[tuple[FilePath, StoredFile]]:
    if metadata is not None:
        for room, files in ((SSTS, metadata.sst_files), (LOGS, metadata.log_files)):
            for stored in files:
                yield (room, stored.stored_name), stored


def _need(resolution: Resolution, path: FilePath, present: Mapping[FilePath, _Present]) -> _Present:
    entry = present.get(path)
    if entry is None:
        raise VersionMissingError(
            f"cannot be put together: {'/'.join(path)} is not there",
            subject=f"version {resolution.target}",
            hint=_HINT,
        )
    return entry
