"""When a file on disk is the file of a snapshot (design 0002, I1), and Samza's answer to the same question."""

from collections.abc import Callable
from typing import Final

from index.snapshot.local_tree import LocalFile
from index.snapshot.model import FileIndex

SameFile = Callable[[LocalFile, FileIndex], bool]

# Samza compares no checksum of a larger file unless told to; one of exactly this size is still compared.
SAMZA_LARGE_FILE_BYTES: Final = 1024 * 1024

_OWNER_BITS: Final = 0o700


def is_same_file(local: LocalFile, remote: FileIndex) -> bool:
    """Whether the bytes of a local file are those that the snapshot holds already.

    Two empty files are the same. Two SSTs are the same if their session id, original file number and size are. All
    other files are the same if their content hash and size are; so is an SST of which one side has no identity. A
    local fact that is missing is never taken for equality: the file is uploaded again, which costs and harms nothing.

    Args:
        local: The file on disk, with the identity that `pairs_to_identify` asked for.
        remote: The entry of the previous snapshot.

    Returns:
        True if nothing needs to be uploaded. Names and metadata other than the size take no part.

    Source:
        Design 0002, I1. RocksDB names the files of its own backups after the same three facts
        (`BackupEngineOptions::kUseDbSessionId`).
    """
    size_bytes = remote.metadata.size_bytes
    if local.metadata.size_bytes != size_bytes:
        return False
    if size_bytes == 0:
        return True
    if local.sst is not None and remote.sst is not None:
        return local.sst == remote.sst
    return local.blake3 is not None and local.blake3 == remote.blake3


def is_same_file_samza_v1(*, compare_large_file_checksums: bool, compare_file_owners: bool) -> SameFile:
    """Samza's own rule, for whoever must decide as Samza does.

    Name and size are equal; with `compare_file_owners` the names of owner and group are; the owner's read, write and
    execute bits are, and no other bit of the mode counts; timestamps never count. Then the CRC32 decides, except that
    a file above 1,048,576 bytes is the same unread unless `compare_large_file_checksums`. That exception takes a
    changed file for an unchanged one wherever large files are not immutable, or where two forks of one store write
    the same file number: never use it where `is_same_file` can be used.

    Args:
        compare_large_file_checksums: Compare the CRC32 of large files too.
        compare_file_owners: Compare the names of owner and group.

    Returns:
        A predicate that needs the local `crc32` wherever the checksum decides and the file is not empty; without it
        the files are not the same.

    Source:
        Samza `DirDiffUtil.areSameFile`.
    """

    def is_same(local: LocalFile, remote: FileIndex) -> bool:
        mine, theirs = local.metadata, remote.metadata
        if local.name != remote.name or mine.size_bytes != theirs.size_bytes:
            return False
        if compare_file_owners and (mine.group, mine.owner) != (theirs.group, theirs.owner):
            return False
        if (mine.mode ^ theirs.mode) & _OWNER_BITS:
            return False
        if mine.size_bytes > SAMZA_LARGE_FILE_BYTES and not compare_large_file_checksums:
            return True
        crc32 = 0 if mine.size_bytes == 0 else local.crc32
        return crc32 == remote.crc32

    return is_same


def is_stored_alike(a: FileIndex, b: FileIndex) -> bool:
    """Whether two entries name the same stored bytes in the same place, whatever their metadata say."""
    return a.blobs == b.blobs and a.inline == b.inline and a.blake3 == b.blake3
