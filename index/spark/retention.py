"""Choose files of a state store's directory: those of one version (design 0004, R6), those that go, those shared.

What is deleted is section 8 of design 0004. Spark counts versions over all unique ids, and knows neither the commit log
nor who has loaded what. The outcomes here are Spark's where that does no harm; where a query was taken back to an older
version, its own past stays (G4).

At the end is which SSTs and archived WALs of a local RocksDB are in the store already (S1, S2 and S4). Spark goes by
name and size along one RocksDB history, which has failed it eight times (SPARK-43404 to SPARK-52637). Here a file also
has to be what it was when it was put there or fetched: by the identity that RocksDB wrote into it, or by its hash if it
has none. An identity says which file it was, not that it is unaltered since: for that it also has to be the same inode
with the same time of its last change (S5).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from index.errors import StateMetadataError, VersionMissingError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileIndex, FilePath, LineageItem, SstIdentity
from index.spark.lineage import HeaderNeeded, Present, Resolution, full_lineage, resolve
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import (
    LOGS,
    SSTS,
    StateFileName,
    StateVersion,
    changelog_name,
    checksum_name,
    is_shared_path,
    parse_state_name,
    snapshot_name,
)

# A file of a directory on disk, or of a backup of one.
_Present = TypeVar("_Present", LocalFile, FileIndex)

# What of the directory belongs to no version: the schema of the store's rows, which a reader of the state needs.
SCHEMA_PATH: FilePath = ("_metadata", "schema")

_HINT = "the directory was not whole when it was backed up; restore another version"


def select_state_files(
    resolution: Resolution, metadata: StateMetadata | None, present: Mapping[FilePath, _Present]
) -> dict[FilePath, _Present]:
    """Select the files from which Spark, or our state store, can load a version, and nothing else.

    They are the snapshot, its SSTs and logs, the changelogs, and, where they are there, their checksums and the schema
    of the rows. `metadata` is of the base snapshot, None without one; `present` is every file of the directory, by its
    path.

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
    shared = () if metadata is None else ((SSTS, metadata.sst_files), (LOGS, metadata.log_files))
    for directory, files in shared:
        for stored in files:
            path = directory, stored.stored_name
            chosen[path] = entry = _need(resolution, path, present)
            size_bytes = entry.metadata.size_bytes
            if size_bytes != stored.size_bytes:
                message = f"says that {'/'.join(path)} has {stored.size_bytes} bytes, and it has {size_bytes}"
                raise StateMetadataError(message, subject=f"snapshot {resolution.base}", hint=_HINT)
    if SCHEMA_PATH in present:
        chosen[SCHEMA_PATH] = present[SCHEMA_PATH]
    return chosen


def _need(resolution: Resolution, path: FilePath, present: Mapping[FilePath, _Present]) -> _Present:
    if path not in present:
        message = f"cannot be put together: {'/'.join(path)} is not there"
        raise VersionMissingError(message, subject=f"version {resolution.target}", hint=_HINT)
    return present[path]


class StateListing(msgspec.Struct, frozen=True, kw_only=True):
    """What the names in the directory of a state store say, each kind in order; foreign names are in none (N1)."""

    snapshots: tuple[StateVersion, ...] = ()
    changelogs: tuple[StateVersion, ...] = ()
    checksums: tuple[StateFileName, ...] = ()

    @classmethod
    def of_names(cls, names: Iterable[str]) -> "StateListing":
        # What the HDFS-backed provider wrote is never deleted here (N1a).
        found = [parsed for parsed in map(parse_state_name, names) if parsed is not None and not parsed.of.is_hdfs]
        found.sort(key=lambda file: (file.of, file.kind))
        snapshots, changelogs = (
            tuple(f.of for f in found if f.kind == kind and not f.checksum) for kind in ("snapshot", "changelog")
        )
        return cls(snapshots=snapshots, changelogs=changelogs, checksums=tuple(f for f in found if f.checksum))

    @property
    def latest_snapshot_version(self) -> int:
        return self.snapshots[-1].version if self.snapshots else 0


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, in the order in which it goes (G2)."""

    # SSTs and logs that only snapshots name which go too.
    unnamed: tuple[str, ...]
    # SSTs and logs that no snapshot names.
    orphans: tuple[str, ...]
    snapshots: tuple[StateVersion, ...]
    changelogs: tuple[StateVersion, ...]
    checksums: tuple[StateFileName, ...]


def deletion_is_due(*, oldest_seen: int, newest_seen: int | None, retained_min: int, deleted_min: int) -> bool:
    """Return whether enough versions are stale, by what this process saw, for a listing to be worth its price (G1).

    `oldest_seen` is the oldest version kept by the last deletion, 1 before it; `newest_seen` the newest snapshot that
    this process has put there, None if none. `retained_min` versions stay loadable; a `deleted_min` of 0 or less is
    always due (SPARK-48931).
    """
    if deleted_min <= 0 or newest_seen is None:
        return True
    return newest_seen - oldest_seen + 1 - retained_min >= deleted_min


class BaseNeeded(msgspec.Struct, frozen=True):
    """The version whose base has to be known before it is known what goes; see `find_base`."""

    version: int


def choose_oldest_kept(
    listing: StateListing, *, retained_min: int, deleted_max: int = -1, needed: Resolution | None = None
) -> int | BaseNeeded:
    """Choose the oldest snapshot to keep: the newest that the oldest version to retain can be made from (G1).

    Numbers alone show that only where one history is there. A snapshot of an attempt that lost, or of a history that
    was left, is not a base of anything that is to be retained (G7).

    Args:
        listing: All that is there, of every unique id.
        retained_min: How many versions stay loadable.
        deleted_max: The oldest that stays is at most this number of versions above the oldest there is; -1: any number.
        needed: What the version of the caller is made of. If newer snapshots are there, of a history that was left, the
            versions to retain are counted from this one (G4). None: the caller does not know; then they are counted
            from where the first two histories part.

    Returns:
        Its version, 0 if nothing can go; or the version that it is the base of, if only headers show it.

    Source:
        Spark `RocksDBFileManager.deleteOldVersions`.
    """
    snapshots = listing.snapshots
    target = None if needed is None else needed.target
    if target is not None and target.unique_id is None:
        # Without ids nothing with an id is ever replayed.
        snapshots = tuple(of for of in snapshots if of.unique_id is None)
    if not snapshots:
        return 0
    newest = snapshots[-1].version
    if target is not None:
        newest = min(newest, target.version)
    else:
        counts = Counter(of.version for of in {*listing.snapshots, *listing.changelogs})
        newest = min([newest, *(version for version, count in counts.items() if count > 1)])
    limit = newest - retained_min + 1
    if deleted_max != -1:
        limit = min(limit, listing.snapshots[0].version + deleted_max)
    candidates = sorted({of.version for of in snapshots if of.version <= limit}, reverse=True)
    if not candidates or (target is not None and target.unique_id is None):
        return candidates[0] if candidates else 0
    if needed is not None:
        return candidates[0] if _is_certain(candidates[0], listing, needed) else BaseNeeded(limit)
    return next((version for version in candidates if _is_certain(version, listing, None)), 0)


def _is_certain(version: int, listing: StateListing, needed: Resolution | None) -> bool:
    """Return whether every history that goes through this version has a snapshot of it.

    Of each version between its base and its end a history has a file. So where all files of a version are snapshots or
    lie beside one, the one that counts has one too, whichever it is.
    """
    snapshots = frozenset(of for of in listing.snapshots if of.version == version)
    if all(of in snapshots for of in listing.changelogs if of.version == version):
        return True
    if needed is None:
        return False
    known = {StateVersion(item.version, item.unique_id) for item in needed.lineage}
    return needed.base in snapshots or not known.isdisjoint(snapshots)


def find_base(needed: BaseNeeded, target: StateVersion, present: Present) -> Resolution | HeaderNeeded:
    """Find what an older version of the history that leads to `target`, the caller's version with its id, is made of.

    If the older version is below 1, version 1 is meant. Its base is the oldest snapshot that stays; or there is a
    changelog whose header has to be known next. Raises as `full_lineage` and `resolve`.
    """
    assert target.unique_id is not None  # noqa: S101  # `choose_oldest_kept` asks for no other
    end = LineageItem(target.version, target.unique_id)
    lineage = full_lineage(max(1, needed.version), end, present.headers)
    if isinstance(lineage, HeaderNeeded):
        return lineage
    return resolve(lineage[0].version, lineage[0].unique_id, present)


def snapshots_to_delete(
    snapshots: Iterable[StateVersion], oldest_kept: int, needed: Resolution | None
) -> tuple[StateVersion, ...]:
    """List the snapshots below the oldest to keep, but for the one that the caller's version is based on (G4)."""
    base = None if needed is None else needed.base
    return tuple(of for of in snapshots if of.version < oldest_kept and of != base)


def plan_deletion(
    listing: StateListing,
    going: tuple[StateVersion, ...],
    files_of: Mapping[StateVersion, Collection[str]],
    shared: Mapping[str, int],
    *,
    oldest_kept: int,
    needed: Resolution | None = None,
) -> Deletion:
    """Plan what is deleted with the snapshots that go. Where none does, nothing goes, orphans included, as in Spark.

    Args:
        listing: The directory.
        going: As `snapshots_to_delete` answers, and not empty.
        files_of: The paths of SSTs and logs that each snapshot names. One that goes may be missing: it was deleted
            meanwhile or cannot be read, and what only it names is an orphan then.
        shared: What is in `SSTs/` and `logs/`: path to the time of its last change, by the store's clock.
        oldest_kept: As `choose_oldest_kept` answers.
        needed: What the caller's version is put together from; it stays (G4).
    """
    gone = frozenset(going)
    by_going = {path for of in going for path in files_of.get(of, ())}
    by_kept = {path for of in listing.snapshots if of not in gone for path in files_of[of]}
    replayed = frozenset(() if needed is None else needed.changelogs)
    changelogs = tuple(of for of in listing.changelogs if of.version < oldest_kept and of not in replayed)
    staying = {"snapshot": frozenset(listing.snapshots) - gone, "changelog": replayed & frozenset(listing.changelogs)}
    return Deletion(
        unnamed=tuple(sorted(by_going - by_kept)),
        orphans=find_orphan_files(by_going | by_kept, shared, snapshots=len(listing.snapshots)),
        snapshots=going,
        changelogs=changelogs,
        checksums=tuple(
            file for file in listing.checksums if file.of.version < oldest_kept and file.of not in staying[file.kind]
        ),
    )


def find_orphan_files(named: Collection[str], shared: Mapping[str, int], *, snapshots: int) -> tuple[str, ...]:
    """Find SSTs and logs that no snapshot names and that no upload under way can be about to name (G3).

    An upload puts its files before its snapshot, so what no snapshot names may be of one that is not there yet. What is
    older than every file that is named is not. A name of another form is a foreign file (G5). None is an orphan while
    there are fewer than two snapshots (SPARK-42353; Spark `RocksDBFileManager.findOrphanFiles`). `named` are the paths
    that snapshots name, those included that are about to go.
    """
    times = [modified_at_ms for path, modified_at_ms in shared.items() if path in named]
    if snapshots < 2 or not times:  # noqa: PLR2004 — the rule says two
        return ()
    oldest_ms = min(times)
    unnamed = (path for path, modified_at_ms in shared.items() if path not in named and modified_at_ms < oldest_ms)
    return tuple(sorted(filter(is_shared_path, unnamed)))


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

    @classmethod
    def of(cls, stored: StoredFile, local: LocalStateFile, version: int, upload_id: str = "") -> "SharedFile":
        return cls(stored=stored, identity=local.identity, stamp=local.stamp, version=version, upload_id=upload_id)


# By local name.
SharedFiles = Mapping[str, SharedFile]


def as_fetched(shared: SharedFiles, kept: Collection[str], version: int) -> dict[str, SharedFile]:
    """Return what is known of local files when a version is loaded: of those that stay, as if they were fetched.

    The snapshot names them, and no stored name ever gets other bytes: so it does not matter which version, of which
    history, has put them there, and the next snapshot may name them as well (S1). Everything else goes. Spark's
    `RocksDBFileMapping.purgeIncompatibleMappingsForLoad` forgets what newer versions put there and fetches it again
    (SPARK-45419).
    """
    return {
        name: msgspec.structs.replace(file, version=min(file.version, version), upload_id="")
        for name, file in shared.items()
        if name in kept
    }


def choose_kept(
    local: Iterable[LocalStateFile], wanted: Iterable[StoredFile], shared: SharedFiles, pending: Collection[str]
) -> frozenset[str]:
    """Choose the local files that need not be fetched, as they are exactly what a snapshot wants (0004, C1 and S2).

    Every other local file has to go, and every other one that the snapshot names to be fetched. `pending` are uploads
    that are not complete (Spark `RocksDBFileManager.loadImmutableFilesFromDfs`).
    """
    by_name = {file.local_name: file for file in wanted}
    both = ((file, shared[file.name]) for file in local if file.name in by_name and file.name in shared)
    return frozenset(file.name for file, of in both if of.stored == by_name[file.name] and _is_same(file, of, pending))


def choose_reused(
    local: Sequence[LocalStateFile], shared: SharedFiles, *, version: int, pending: Collection[str]
) -> frozenset[str]:
    """Choose the local files of the new snapshot of a version whose copies in the store can be named again (S1, S2).

    Every other one has to be uploaded under a new name. Spark's `RocksDBFileMapping.getDfsFileForSave`, and the
    identity beyond it.
    """
    both = ((file, shared[file.name]) for file in local if file.name in shared)
    return frozenset(file.name for file, of in both if of.version < version and _is_same(file, of, pending))


def find_altered(local: Iterable[LocalStateFile], shared: SharedFiles) -> tuple[str, ...]:
    """Find the local names of files that were written to since they were put there or fetched (S5).

    RocksDB never writes to an SST again. Another inode of the same identity is not proof, but a copy: the file system,
    if it knows no hard links, and that may use an inode again.
    """
    both = ((file, shared[file.name]) for file in local if file.is_linked and file.name in shared)
    return tuple(
        file.name
        for file, of in both
        if not isinstance(file.identity, bytes)
        and file.identity == of.identity
        and file.stamp is not None
        and of.stamp is not None
        and file.stamp.inode == of.stamp.inode
        and file.stamp != of.stamp
    )


def is_stale(newest_use: int, newest_snapshot: int, versions_retained: int) -> bool:
    """Return whether a file last used by `newest_use` may have been deleted, if that many versions are retained (S4).

    SPARK-55892.
    """
    return newest_use <= newest_snapshot - versions_retained


def _is_same(local: LocalStateFile, shared: SharedFile, pending: Collection[str]) -> bool:
    # A hash is of all bytes that are there now.
    is_untouched = isinstance(local.identity, bytes) or (local.stamp is not None and local.stamp == shared.stamp)
    is_this = (local.size_bytes, local.identity) == (shared.stored.size_bytes, shared.identity)
    return shared.upload_id not in pending and is_this and is_untouched
