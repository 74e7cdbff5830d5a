"""Choose files of a state store's directory: those that one version is made of (design 0004, R6), and those that go.

What is deleted is section 8 of design 0004. Spark counts versions over all unique ids, and knows neither the commit log
nor who has loaded what. The outcomes here are Spark's where that does no harm; where a query was taken back to an older
version, its own past stays (G4).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from index.errors import StateMetadataError, VersionMissingError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileIndex, FilePath, LineageItem
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
    if SCHEMA_PATH in present:
        chosen[SCHEMA_PATH] = present[SCHEMA_PATH]
    return chosen


def _shared(metadata: StateMetadata | None) -> Iterator[tuple[FilePath, StoredFile]]:
    if metadata is not None:
        for directory, files in ((SSTS, metadata.sst_files), (LOGS, metadata.log_files)):
            for stored in files:
                yield (directory, stored.stored_name), stored


def _need(resolution: Resolution, path: FilePath, present: Mapping[FilePath, _Present]) -> _Present:
    entry = present.get(path)
    if entry is None:
        raise VersionMissingError(
            f"cannot be put together: {'/'.join(path)} is not there",
            subject=f"version {resolution.target}",
            hint=_HINT,
        )
    return entry


class StateListing(msgspec.Struct, frozen=True, kw_only=True):
    """What the names in the directory of a state store say, each kind in order; foreign names are in none (N1)."""

    snapshots: tuple[StateVersion, ...] = ()
    changelogs: tuple[StateVersion, ...] = ()
    checksums: tuple[StateFileName, ...] = ()

    @classmethod
    def of_names(cls, names: Iterable[str]) -> "StateListing":
        """Sort the names out."""
        found = [parsed for parsed in map(parse_state_name, names) if parsed is not None]
        return cls(
            snapshots=tuple(sorted(f.of for f in found if f.kind == "snapshot" and not f.checksum)),
            changelogs=tuple(sorted(f.of for f in found if f.kind == "changelog" and not f.checksum)),
            checksums=tuple(sorted((f for f in found if f.checksum), key=lambda f: (f.of, f.kind))),
        )

    @property
    def latest_version(self) -> int:
        """The greatest version that a snapshot or a changelog is of; 0 if there is none."""
        return max((of.version for of in (*self.snapshots[-1:], *self.changelogs[-1:])), default=0)

    @property
    def latest_snapshot_version(self) -> int:
        """The greatest version that a snapshot is of; 0 if there is none."""
        return self.snapshots[-1].version if self.snapshots else 0


class SharedStatus(msgspec.Struct, frozen=True):
    """A file in `SSTs/` or `logs/`, as a listing has it."""

    # Relative to the directory of the state store.
    path: str
    # By the store's clock.
    modified_at_ms: int


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, in the order in which it goes (G2)."""

    # Every snapshot and changelog below it goes, but for what the caller needs.
    oldest_kept: int
    # SSTs and logs that only snapshots name which go too.
    unnamed: tuple[str, ...]
    # SSTs and logs that no snapshot names.
    orphans: tuple[str, ...]
    snapshots: tuple[StateVersion, ...]
    changelogs: tuple[StateVersion, ...]
    checksums: tuple[StateFileName, ...]


def deletion_is_due(*, oldest_seen: int, newest_seen: int | None, retained_min: int, deleted_min: int) -> bool:
    """Return whether a listing is worth its price: a number of versions are stale, by what this process saw (G1).

    Args:
        oldest_seen: The oldest version kept by the last deletion; 1 before it.
        newest_seen: The newest snapshot that this process has put there; None if it has put none.
        retained_min: How many versions stay loadable.
        deleted_min: How many have to be stale; 0 or less: always due.

    Source:
        SPARK-48931.
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
        needed: What the version of the caller is made of. If newer snapshots are there, of a history that
            was left, the versions to retain are counted from this one (G4). None: the caller does not know; then they
            are counted from where the first two histories part.

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
    newest = min([newest, *_forks(listing)] if target is None else [newest, target.version])
    limit = newest - retained_min + 1
    if deleted_max != -1:
        limit = min(limit, listing.snapshots[0].version + deleted_max)
    candidates = sorted({of.version for of in snapshots if of.version <= limit}, reverse=True)
    if not candidates or (target is not None and target.unique_id is None):
        return candidates[0] if candidates else 0
    if needed is not None:
        return candidates[0] if _is_certain(candidates[0], listing, needed) else BaseNeeded(limit)
    return next((version for version in candidates if _is_certain(version, listing, None)), 0)


def _forks(listing: StateListing) -> list[int]:
    """List the versions of which more than one attempt is there."""
    counts = Counter(of.version for of in {*listing.snapshots, *listing.changelogs})
    return [version for version, count in counts.items() if count > 1]


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
    """Find what an older version of the history that leads to `target` is made of.

    Args:
        needed: The older version; if it is below 1, version 1 is meant.
        target: The version of the caller, with its id.
        present: What is there, and the headers that are known.

    Returns:
        Its base is the oldest that stays; or the changelog whose header has to be known next.

    Raises:
        LineageError: The headers do not lead back so far.
        VersionMissingError: A file of the older version is not there.
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
    files_of: Mapping[StateVersion, Collection[str]],
    shared: Sequence[SharedStatus],
    *,
    oldest_kept: int,
    needed: Resolution | None = None,
) -> Deletion | None:
    """Plan what is deleted once the oldest snapshot to keep is known.

    Args:
        listing: The directory.
        files_of: The paths of SSTs and logs that each snapshot names. One that goes may be missing: it was deleted
            meanwhile or cannot be read, and what only it names is an orphan then.
        shared: What is in `SSTs/` and `logs/`.
        oldest_kept: As `choose_oldest_kept` answers.
        needed: What the caller's version is put together from; it stays (G4).

    Returns:
        The plan; None if no snapshot goes: then nothing does, orphans included, as in Spark.
    """
    going = snapshots_to_delete(listing.snapshots, oldest_kept, needed)
    if not going:
        return None
    gone = frozenset(going)
    by_going = {path for of in going for path in files_of.get(of, ())}
    by_kept = {path for of in listing.snapshots if of not in gone for path in files_of[of]}
    orphans = find_orphan_files(by_going | by_kept, shared, snapshots=len(listing.snapshots))
    replayed = frozenset(() if needed is None else needed.changelogs)
    changelogs = tuple(of for of in listing.changelogs if of.version < oldest_kept and of not in replayed)
    staying = {"snapshot": frozenset(listing.snapshots) - gone, "changelog": replayed & frozenset(listing.changelogs)}
    return Deletion(
        oldest_kept=oldest_kept,
        unnamed=tuple(sorted(by_going - by_kept)),
        orphans=orphans,
        snapshots=going,
        changelogs=changelogs,
        checksums=tuple(
            file for file in listing.checksums if file.of.version < oldest_kept and file.of not in staying[file.kind]
        ),
    )


def find_orphan_files(named: Collection[str], shared: Sequence[SharedStatus], *, snapshots: int) -> tuple[str, ...]:
    """SSTs and logs that no snapshot names and that no upload under way can be about to name (G3).

    An upload puts its files before its snapshot, so what no snapshot names may be of one that is not there yet. What is
    older than every file that is named is not. A name of another form is a foreign file (G5).

    Args:
        named: Paths that snapshots name, those included that are about to go.
        shared: What is there, with the store's times.
        snapshots: How many there are; none is an orphan while there are fewer than two.

    Source:
        SPARK-42353; Spark `RocksDBFileManager.findOrphanFiles`.
    """
    times = [file.modified_at_ms for file in shared if file.path in named]
    if snapshots < 2 or not times:  # noqa: PLR2004 — the rule says two
        return ()
    oldest_ms = min(times)
    unnamed = (file for file in shared if file.path not in named and file.modified_at_ms < oldest_ms)
    return tuple(sorted(file.path for file in unnamed if is_shared_path(file.path)))
