"""Deleting the old versions of a state store: gather, plan, delete (design 0004, section 8)."""

from collections.abc import Collection, Mapping

from blobstore.concurrency import map_bounded
from engine.errors import DamagedError, UsageError
from engine.state.files import StateFileManager
from engine.state.local_files import ZipStamp, shared_path
from engine.state.metrics import Deleted
from engine.state.sources import resolve_with
from index.errors import FormatError, VersionMissingError
from index.spark.lineage import Present, Resolution
from index.spark.names import LOGS, SSTS, StateVersion, changelog_name, checksum_name, snapshot_name, state_name
from index.spark.retention import (
    BaseNeeded,
    SharedStatus,
    StateListing,
    choose_oldest_kept,
    deletion_is_due,
    find_base,
    plan_deletion,
    snapshots_to_delete,
)


async def delete_old_versions(
    manager: StateFileManager,
    *,
    versions_retained_min: int | None = None,
    versions_deleted_min: int = 0,
    versions_deleted_max: int = -1,
    needed: Resolution | None = None,
) -> Deleted:
    """Delete what no version to retain is made of (design 0004, section 8).

    Nothing is asked of the store while this process has seen too few versions go by. Then LISTs of the directory,
    of `SSTs/` and of `logs/`, one GET for each zip that is not known, and deletes of up to 1,000 files.

    Args:
        manager: Of the files.
        versions_retained_min: How many versions stay loadable; as the settings say if not given.
        versions_deleted_min: Nothing happens until this number is stale, by what this process has seen.
        versions_deleted_max: The most that go at once; -1: any number.
        needed: What the newest version that the caller has loaded or committed is made of; it stays, and where
            newer files are those of a history that was left, so do the versions before it (G4).

    Raises:
        DamagedError: A snapshot that stays cannot be read, so that nobody knows what it names; nothing was deleted.
        StoreError: As the store says; what was not deleted is, by the next call.
        UsageError: This is a backup, which is read-only.
    """
    directory, known = manager.writable("delete old versions"), manager.known
    retained_min = manager.settings.versions_retained_min if versions_retained_min is None else versions_retained_min
    if retained_min < 1:
        reason, hint = f"{retained_min} versions are to be retained", "retain at least one"
        raise UsageError(reason, operation="delete old versions", subject=directory.location, hint=hint)
    known.retains(retained_min)
    if not deletion_is_due(
        oldest_seen=known.oldest_seen,
        newest_seen=known.newest_seen,
        retained_min=retained_min,
        deleted_min=versions_deleted_min,
    ):
        return Deleted()
    # From before the listing on: what an upload has named that ended since is in no zip that is listed.
    with known.watch_uploads() as uploaded_paths:
        statuses = await directory.list()
        listing = StateListing.of_names(status.name for status in statuses if not status.is_directory)
        chosen = choose_oldest_kept(listing, retained_min=retained_min, deleted_max=versions_deleted_max, needed=needed)
        if isinstance(chosen, BaseNeeded):
            # It asks for a base only where a caller's version is known.
            chosen = 0 if needed is None else await _walk_back(chosen, needed, listing, manager)
        going = snapshots_to_delete(listing.snapshots, chosen, needed)
        if not going:
            return Deleted()
        # Before the zips are looked at: an upload that ends in between is of files that are younger than what is
        # listed.
        found = [*await directory.list(SSTS), *await directory.list(LOGS)]
        shared = tuple(SharedStatus(status.path, status.modified_at_ms) for status in found if not status.is_directory)
        stamps = {status.name: ZipStamp(status.size_bytes, status.modified_at_ms) for status in statuses}
        files_of = await _files_of(manager, {of: stamps[snapshot_name(of)] for of in listing.snapshots}, going, chosen)
        plan = plan_deletion(listing, files_of, shared, oldest_kept=chosen, needed=needed)
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
    known.oldest_seen = chosen
    await directory.give_up_unfinished()
    return Deleted(
        oldest_kept=chosen,
        snapshots=len(plan.snapshots),
        changelogs=len(plan.changelogs),
        files=len(unnamed),
        orphans=len(orphans),
        checksums=len(plan.checksums),
    )


async def _walk_back(wanted: BaseNeeded, needed: Resolution, listing: StateListing, manager: StateFileManager) -> int:
    """Find the base of an older version by headers (G7); 0, so that nothing goes, if they do not lead there."""
    present = Present(frozenset(listing.snapshots), frozenset(listing.changelogs))
    # What the caller knows needs no reading.
    versions = [StateVersion(item.version, item.unique_id) for item in needed.lineage]
    present = present.with_headers({of: needed.lineage[:at] for at, of in enumerate(versions) if at})
    try:
        answer = await resolve_with(
            lambda present: find_base(wanted, needed.target, present), present, manager.read_header
        )
    except (DamagedError, FormatError):
        # A version that cannot be put together says nothing about what may go. Its next load raises why.
        return 0
    return 0 if answer.base is None else answer.base.version


async def _files_of(
    manager: StateFileManager,
    snapshots: Mapping[StateVersion, ZipStamp],
    going: Collection[StateVersion],
    oldest_kept: int,
) -> dict[StateVersion, frozenset[str]]:
    """Return the paths that each snapshot names, from memory or from its zip."""

    async def read(of: StateVersion) -> tuple[StateVersion, frozenset[str] | None]:
        # The one that stays at the end is read again, as in Spark: some stores have times in whole seconds.
        is_sure = of.unique_id is not None or of.version != oldest_kept
        paths = manager.known.named_by(of, snapshots[of]) if is_sure else None
        if paths is not None:
            return of, paths
        try:
            metadata = (await manager.read_snapshot(of)).metadata
        except (DamagedError, FormatError) as error:
            if of in going or isinstance(error, VersionMissingError):
                # It is not needed any more, or was just deleted by another process. No other snapshot names its files.
                return of, None
            error.add_note("a snapshot that stays cannot be read, so nothing was deleted: what it names is not known")
            raise
        files = (*metadata.sst_files, *metadata.log_files)
        paths = frozenset(shared_path(file.stored_name) for file in files)
        manager.known.remember_named(of, paths, snapshots[of])
        return of, paths

    found = await map_bounded(read, snapshots, in_flight_max=manager.settings.fetches_max)
    return {of: paths if paths is not None else frozenset() for of, paths in found}
