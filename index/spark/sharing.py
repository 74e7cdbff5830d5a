"""Which SSTs and archived WALs of a local RocksDB are in the store already (design 0004, S1, S2 and S4).

Spark goes by name and size along one RocksDB history, which has failed it eight times (SPARK-43404 to SPARK-52637).
Here a file also has to be what it was when it was put there or fetched: by the identity that RocksDB wrote into it, or
by its hash if it has none. An identity says which file it was, not that it is unaltered since: for that it also
has to be the same inode with the same time of its last change (S5).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from index.snapshot.model import SstIdentity
from index.spark.metadata import StoredFile

# What an SST says of itself, or a hash of all bytes of a file that says nothing. Size completes either.
FileIdentity = SstIdentity | bytes


class FileStamp(msgspec.Struct, frozen=True):
    """What the file system says of a file. Not the time of its inode: that changes with each hard link to it."""

    inode: int
    modified_at_ns: int


class LocalStateFile(msgspec.Struct, frozen=True):
    """An SST or an archived WAL as it is on this machine."""

    # `<digits>.sst` or `<digits>.log`, whatever directory it is in.
    name: str
    size_bytes: int
    identity: FileIdentity
    # None: unknown, and it counts as altered.
    stamp: FileStamp | None = None
    # Whether it has other names: as a file of a rocksdb_checkpoint has, unless the file system knows no hard links.
    is_linked: bool = False


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A local file that has, or will have once its upload is complete, a copy in the store."""

    stored: StoredFile
    identity: FileIdentity
    # Of the local file, when it was put there or fetched.
    stamp: FileStamp | None = None
    # The version that put it there; of a file that was fetched, the one that it was fetched for.
    version: int
    # The upload that puts it there; empty for a file that was fetched.
    upload_id: str = ""


# By local name.
SharedFiles = Mapping[str, SharedFile]


def as_fetched(shared: SharedFiles, kept: Collection[str], version: int) -> dict[str, SharedFile]:
    """Return what is known of local files when a version is loaded: of those that stay, as if they were fetched.

    The snapshot names them, and no stored name ever gets other bytes: so it does not matter which version, of which
    history, has put them there, and the next snapshot may name them as well (S1). Everything else goes.

    Args:
        shared: What was known.
        kept: As `choose_kept` answers.
        version: Of the snapshot.

    Source:
        Spark `RocksDBFileMapping.purgeIncompatibleMappingsForLoad`, which forgets what newer versions put there and
        fetches it again; SPARK-45419.
    """
    return {
        name: msgspec.structs.replace(file, version=min(file.version, version), upload_id="")
        for name, file in shared.items()
        if name in kept
    }


def choose_kept(
    local: Iterable[LocalStateFile],
    wanted: Iterable[StoredFile],
    shared: SharedFiles,
    pending: Collection[str],
) -> frozenset[str]:
    """Choose the local files that need not be fetched, as they are exactly what a snapshot wants.

    Args:
        local: What is there.
        wanted: What the snapshot names.
        shared: What is known of local files.
        pending: Uploads that are not complete.

    Returns:
        Local names. Every other file has to go, and every other wanted one to be fetched.

    Source:
        Design 0004, C1 and S2; Spark `RocksDBFileManager.loadImmutableFilesFromDfs`.
    """
    by_name = {file.local_name: file for file in wanted}
    return frozenset(
        file.name
        for file in local
        if file.name in by_name
        and file.name in shared
        and shared[file.name].stored == by_name[file.name]
        and _is_same(file, shared[file.name], pending)
    )


def choose_reused(
    local: Sequence[LocalStateFile], shared: SharedFiles, *, version: int, pending: Collection[str]
) -> frozenset[str]:
    """Choose the local files of a new snapshot whose copies in the store can be named again (S1, S2).

    Args:
        local: SSTs and archived WALs of the snapshot.
        shared: What is known of local files.
        version: Of the snapshot.
        pending: Uploads that are not complete.

    Returns:
        Local names. Every other file has to be uploaded under a new name.

    Source:
        Spark `RocksDBFileMapping.getDfsFileForSave`, and the identity beyond it.
    """
    return frozenset(
        file.name
        for file in local
        if file.name in shared and shared[file.name].version < version and _is_same(file, shared[file.name], pending)
    )


def find_altered(local: Iterable[LocalStateFile], shared: SharedFiles) -> tuple[str, ...]:
    """Find the local names of files that were written to since they were put there or fetched (S5).

    RocksDB never writes to an SST again. Another inode of the same identity is not proof, but a copy:
    the file system, if it knows no hard links, and that may use an inode again.
    """
    return tuple(
        file.name
        for file in local
        if file.is_linked
        and file.name in shared
        and not isinstance(file.identity, bytes)
        and file.identity == shared[file.name].identity
        and _has_changed(file.stamp, shared[file.name].stamp)
    )


def _has_changed(now: FileStamp | None, then: FileStamp | None) -> bool:
    return now is not None and then is not None and now.inode == then.inode and now != then


def is_stale(newest_use: int, newest_snapshot: int, versions_retained: int) -> bool:
    """Return whether a file last used by `newest_use` may have been deleted, if that many versions are retained (S4).

    Args:
        newest_use: The newest version known to name the file.
        newest_snapshot: The newest snapshot that is in the store, of whatever id.
        versions_retained: As `choose_oldest_kept` takes it.

    Source:
        SPARK-55892.
    """
    return newest_use <= newest_snapshot - versions_retained


def _is_same(local: LocalStateFile, shared: SharedFile, pending: Collection[str]) -> bool:
    return (
        shared.upload_id not in pending
        and local.size_bytes == shared.stored.size_bytes
        and local.identity == shared.identity
        and _is_untouched(local, shared)
    )


def _is_untouched(local: LocalStateFile, shared: SharedFile) -> bool:
    # A hash is of all bytes that are there now.
    return isinstance(local.identity, bytes) or (local.stamp is not None and local.stamp == shared.stamp)
