"""Deleting the old versions of a state store: gather, plan, delete (design 0004, section 8)."""

from collections.abc import Awaitable, Callable

import msgspec

from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import map_bounded
from engine.errors import DamagedError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.local_files import StateFileMap, ZipStamp, known_names, shared_path
from engine.state.metrics import Deleted
from engine.state.sources import resolve_with
from engine.state.zips import StateZip
from index.errors import FormatError, VersionMissingError
from index.spark.lineage import Lineage, Present, Resolution
from index.spark.names import LOGS, SSTS, StateVersion, changelog_name, checksum_name, snapshot_name, state_name
from index.spark.retention import (
    BaseNeeded,
    SharedStatus,
    StateListing,
    choose_oldest_kept,
    deletion_is_due,
    find_base,
    find_orphan_files,
    plan_deletion,
    snapshots_to_delete,
)

ReadSnapshot = Callable[[StateVersion], Awaitable[StateZip]]
ReadHeader = Callable[[StateVersion], Awaitable[Lineage]]


class DeletionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a deletion takes; as the arguments of `StateFileManager.delete_old_versions`."""

    retained_min: int
    deleted_min: int
    deleted_max: int


class _Look(msgspec.Struct, frozen=True):
    """A listing, and what is going to be deleted of it."""

    statuses: tuple[FileStatus, ...]
    listing: StateListing
    going: tuple[StateVersion, ...] = ()
    oldest_kept: int = 0


async def delete_old_versions(
    directory: CheckpointDir,
    known: StateFileMap,
    read_snapshot: ReadSnapshot,
    read_header: ReadHeader,
    limits: DeletionLimits,
    *,
    needed: Resolution | None,
    gets_max: int,
) -> Deleted:
    """Delete as `StateFileManager.delete_old_versions`."""
    known.retains(limits.retained_min)
    oldest_seen, newest_seen = known.seen
    if not deletion_is_due(
        oldest_seen=oldest_seen,
        newest_seen=newest_seen,
        retained_min=limits.retained_min,
        deleted_min=limits.deleted_min,
    ):
        return Deleted()
    # From before the listing on: what an upload has named that ended since is in no zip that is listed.
    with known.watch_uploads() as uploaded_paths:
        look = await _look(directory, read_header, limits, needed)
        if not look.going:
            return Deleted()
        # Before the zips are looked at: an upload that ends in between is of files that are younger than what is
        # listed.
        shared = await _list_shared(directory)
        files_of = await _files_of(look, known, read_snapshot, gets_max)
        plan = plan_deletion(look.listing, files_of, shared, oldest_kept=look.oldest_kept, needed=needed)
        if plan is None:
            return Deleted()
        unnamed = known.give_up(plan.unnamed, uploaded_paths)
        orphans = known.give_up(plan.orphans, uploaded_paths)
    # Each step before the next (G2): what is left of an interrupted one is found again.
    await directory.delete((*unnamed, *orphans))
    await directory.delete([snapshot_name(of) for of in plan.snapshots])
    known.forget_named(plan.snapshots)
    await directory.delete([changelog_name(of) for of in plan.changelogs])
    await directory.delete([checksum_name(state_name(file.kind, file.of)) for file in plan.checksums])
    known.deleted_below(look.oldest_kept)
    await directory.give_up_unfinished()
    return Deleted(
        oldest_kept=look.oldest_kept,
        snapshots=len(plan.snapshots),
        changelogs=len(plan.changelogs),
        files=len(unnamed),
        orphans=len(orphans),
        checksums=len(plan.checksums),
    )


async def _look(
    directory: CheckpointDir, read_header: ReadHeader, limits: DeletionLimits, needed: Resolution | None
) -> _Look:
    """List the directory, and find out which snapshots can go."""
    statuses = await directory.list()
    listing = _listing(statuses)
    chosen = choose_oldest_kept(
        listing, retained_min=limits.retained_min, deleted_max=limits.deleted_max, needed=needed
    )
    if isinstance(chosen, BaseNeeded):
        # It asks for a base only where a caller's version is known.
        chosen = 0 if needed is None else await _walk_back(chosen, needed, listing, read_header)
    return _Look(statuses, listing, snapshots_to_delete(listing.snapshots, chosen, needed), chosen)


async def _walk_back(wanted: BaseNeeded, needed: Resolution, listing: StateListing, read_header: ReadHeader) -> int:
    """Find the base of an older version by headers (G7); 0, so that nothing goes, if they do not lead there."""
    present = Present(frozenset(listing.snapshots), frozenset(listing.changelogs))
    # What the caller knows needs no reading.
    versions = [StateVersion(item.version, item.unique_id) for item in needed.lineage]
    present = present.with_headers({of: needed.lineage[:at] for at, of in enumerate(versions) if at})
    try:
        answer = await resolve_with(lambda present: find_base(wanted, needed.target, present), present, read_header)
    except (DamagedError, FormatError):
        # A version that cannot be put together says nothing about what may go. Its next load raises why.
        return 0
    return 0 if answer.base is None else answer.base.version


async def find_orphans(
    directory: CheckpointDir, known: StateFileMap, read_snapshot: ReadSnapshot, *, gets_max: int
) -> tuple[str, ...]:
    """Find what `StateFileManager.find_orphan_files` does."""
    statuses = await directory.list()
    listing = _listing(statuses)
    shared = await _list_shared(directory)
    files_of = await _files_of(_Look(statuses, listing), known, read_snapshot, gets_max)
    return find_orphan_files(known_names(files_of), shared, snapshots=len(listing.snapshots))


def _listing(statuses: tuple[FileStatus, ...]) -> StateListing:
    return StateListing.of_names(status.name for status in statuses if not status.is_directory)


async def _list_shared(directory: CheckpointDir) -> tuple[SharedStatus, ...]:
    found = [*await directory.list(SSTS), *await directory.list(LOGS)]
    return tuple(SharedStatus(status.path, status.modified_at_ms) for status in found if not status.is_directory)


async def _files_of(
    look: _Look, known: StateFileMap, read_snapshot: ReadSnapshot, gets_max: int
) -> dict[StateVersion, frozenset[str]]:
    """Return the paths that each snapshot names, from memory or from its zip."""
    stamps = {status.name: ZipStamp(status.size_bytes, status.modified_at_ms) for status in look.statuses}

    async def read(of: StateVersion) -> tuple[StateVersion, frozenset[str] | None]:
        stamp = stamps[snapshot_name(of)]
        # The one that stays at the end is read again, as in Spark: some stores have times in whole seconds.
        is_sure = of.unique_id is not None or of.version != look.oldest_kept
        paths = known.named_by(of, stamp) if is_sure else None
        if paths is not None:
            return of, paths
        try:
            metadata = (await read_snapshot(of)).metadata
        except (DamagedError, FormatError) as error:
            if of in look.going or isinstance(error, VersionMissingError):
                # It is not needed any more, or was just deleted by another process. No other snapshot names its files.
                return of, None
            error.add_note("a snapshot that stays cannot be read, so nothing was deleted: what it names is not known")
            raise
        files = (*metadata.sst_files, *metadata.log_files)
        paths = frozenset(shared_path(file.stored_name) for file in files)
        known.remember_named(of, paths, stamp)
        return of, paths

    found = await map_bounded(read, look.listing.snapshots, in_flight_max=gets_max)
    return {of: paths if paths is not None else frozenset() for of, paths in found}
