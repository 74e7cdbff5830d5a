"""Which SSTs and archived WALs of a local RocksDB are in the store already (design 0004, S1, S2 and S4).

Spark goes by name and size along one RocksDB history, which has failed it eight times (SPARK-43404 to SPARK-52637).
Here a file also has to be what it was when it was put there or fetched: by the identity that RocksDB wrote into it, or
by its hash if it has none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from index.model import SstIdentity
from index.state_metadata import StoredFile

# What an SST says of itself, or a hash of all bytes of a file that says nothing. Size completes either.
FileIdentity = SstIdentity | bytes


class LocalStateFile(msgspec.Struct, frozen=True):
    """An SST or an archived WAL as it stands on this machine."""

    # `<digits>.sst` or `<digits>.log`, whatever directory it is in.
    name: str
    size_bytes: int
    identity: FileIdentity


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A local file that has, or will have once its upload is complete, a copy in the store."""

    stored: StoredFile
    identity: FileIdentity
    # The version that put it there; of a file that was fetched, the one that it was fetched for.
    version: int
    # The upload that puts it there; empty for a file that was fetched.
    upload_id: str = ""


# By local name.
SharedFiles = Mapping[str, SharedFile]


def forget_newer(shared: SharedFiles, version: int) -> dict[str, SharedFile]:
    """What is still true of local files when a version is loaded: nothing that this version or a later one put there.

    A later one may be of a history that is being left, and this one may have been overwritten since.

    Source:
        Spark `RocksDBFileMapping.purgeIncompatibleMappingsForLoad`; SPARK-45419.
    """
    return {name: file for name, file in shared.items() if file.version < version}


def choose_kept(
    local: Iterable[LocalStateFile],
    wanted: Iterable[StoredFile],
    shared: SharedFiles,
    pending: Collection[str],
) -> frozenset[str]:
    """The local files that need not be fetched, as they are exactly what a snapshot wants.

    Args:
        local: What is there.
        wanted: What the snapshot names.
        shared: What is known of local files, after `forget_newer`.
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
    """The local files of a new snapshot whose copies in the store can be named again (S1, S2).

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


def is_stale(newest_use: int, newest_snapshot: int, versions_retained: int) -> bool:
    """Whether somebody who retains so many versions may have deleted a file that was last used by `newest_use` (S4).

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
    )
