"""Saves, loads and deletes the files of one state store in Spark's own layout; Spark's `RocksDBFileManager`.

Whether this is a directory, a bucket or a snapshot index of either is for `StateFiles` to know. Nothing here opens
RocksDB, and nothing decides what is due: that is the state store's business.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import map_bounded, run_all, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError, TargetError, UnsafeSourceError, UsageError
from engine.local.scratch import scratch_dir
from engine.runtime import Runtime
from engine.state import local_files
from engine.state.changelogs import fetch_checked, open_changelog, publish_checked, read_checked
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.compression import Codec
from engine.state.settings import StateStoreSettings
from engine.state.zips import ZIP_BYTES_MAX, StateZip, build_state_zip, read_state_zip
from index.errors import FormatError, VersionMissingError
from index.snapshot.model import UniqueId
from index.spark import retention
from index.spark.lineage import HeaderNeeded, Lineage, Present, Resolution, resolve
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import (
    LOGS,
    SSTS,
    StateVersion,
    changelog_name,
    checksum_name,
    snapshot_name,
    state_name,
    stored_name,
)

_LOG: Final = logging.getLogger(__name__)

_MISSING_HINT: Final = (
    "it was deleted or never uploaded; load a version that is still there, or restore the directory from a backup"
)


async def resolve_with(
    ask: Callable[[Present], Resolution | HeaderNeeded],
    present: Present,
    read_header: Callable[[StateVersion], Awaitable[Lineage]],
) -> Resolution:
    """Resolve a version, reading the headers that decide, one after the other (design 0004, R2).

    `ask` is `index.spark.lineage.resolve` or `index.spark.retention.find_base` of what is present.
    """
    while isinstance(answer := ask(present), HeaderNeeded):
        present = present.with_headers({answer.changelog: await read_header(answer.changelog)})
    return answer


class FilesLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a snapshot that a load took from the store, and those that were here already."""

    # Spark: rocksdbFilesCopied, rocksdbFilesReused, rocksdbBytesCopied, of the last load or save.
    files_fetched: int = 0
    files_reused: int = 0
    bytes_fetched: int = 0


class SnapshotUploaded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `upload_snapshot`."""

    # Spark: rocksdbFilesCopied, rocksdbFilesReused, rocksdbBytesCopied, rocksdbZipFileBytesUncompressed.
    files_copied: int = 0
    files_reused: int = 0
    # Of the files copied, those that had been reused and were copied again, as they may have been deleted (S4).
    files_renewed: int = 0
    bytes_copied: int = 0
    # What went into the zip, uncompressed.
    zip_bytes: int = 0
    # Spark: rocksdbSaveZipFilesLatencyMs is the part of it that the zip takes.
    upload_s: float = 0.0


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `delete_old_versions`."""

    # The oldest snapshot that stays; 0: nothing was deleted.
    oldest_kept: int = 0
    snapshots: int = 0
    changelogs: int = 0
    # SSTs and logs that only deleted snapshots named, and those that none named.
    files: int = 0
    orphans: int = 0
    checksums: int = 0


class CapturedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of which everything is decided, and nothing uploaded (design 0004, S3)."""

    of: StateVersion
    # A rocksdb_checkpoint that nobody writes to.
    directory: Path
    # In the names of all its new files (N3).
    upload_id: str
    files: tuple[local_files.CapturedFile, ...]
    # Without its files.
    metadata: StateMetadata


class StateFileManager:
    """The files of one state store, seen from one task.

    A load, and what is captured after it, belong to one working directory. Any method may be awaited while another one
    is, also from another thread's event loop if the store bears that (`CheckpointDir`); only `load_snapshot` and
    `capture` are called one at a time. Those that write are a `UsageError` for a backup of a directory.
    """

    def __init__(
        self, files: StateFiles, settings: StateStoreSettings | None = None, *, runtime: Runtime | None = None
    ) -> None:
        # The directory of the state store, or a backup of one, which is read-only.
        self.files = files
        self.settings = settings or StateStoreSettings()
        self.known = local_files.StateFileMap()
        self.last_load = FilesLoaded()
        self._runtime = runtime or Runtime()
        # Lineages of changelogs that were read here. A name with a unique id never gets other bytes.
        self._headers: dict[StateVersion, Lineage] = {}
        # Names in the last listing; None before the first.
        self._listed: frozenset[str] | None = None

    async def resolve(
        self,
        version: int,
        unique_id: UniqueId | None = None,
        *,
        scratch: Path | None = None,
        known: Mapping[StateVersion, Lineage] | None = None,
        rejected: Collection[StateVersion] = (),
    ) -> Resolution:
        """Find the files that make a version (design 0004, R1 to R5). One LIST, and one GET for each unknown header.

        Args:
            version: 0 is empty, and asks nothing of the store.
            unique_id: Of the version; None without ids.
            scratch: A directory of the caller, where changelogs that have to be read are left for `fetch_changelogs`;
                None: they are fetched again there.
            known: Lineages that need not be read from headers, each as its header has it (C2).
            rejected: Snapshots that count as absent, as they do not open (R7).

        Raises:
            VersionMissingError, LineageError: As `index.spark.lineage.resolve`.
            FormatError: A changelog's header is damaged, or the changelog does not fit its checksum.
            EngineError, StoreError: As they say.
        """
        if version == 0 and unique_id is None:
            return Resolution(StateVersion(0), None)
        present = Present.of_names(await self._names(), is_hdfs=self.settings.is_hdfs)
        for of in rejected:
            present = present.without_snapshot(of)
        return await resolve_with(
            lambda present: resolve(version, unique_id, present),
            present.with_headers({**self._headers, **(known or {})}),
            lambda of: self.read_header(of, scratch),
        )

    async def read_header(self, of: StateVersion, scratch: Path | None = None) -> Lineage:
        """Find the lineage in the header of a changelog, in memory or by a read of it; errors as `resolve`."""
        lineage = self._headers.get(of, self.files.known_lineage(of))
        if lineage is None:
            async with contextlib.AsyncExitStack() as resources:
                if scratch is None:
                    scratch = await resources.enter_async_context(scratch_dir())
                path = await self.fetch_rows(of, changelog_name(of), scratch)
                lineage = await run_blocking(_read_lineage, path, self.settings.codec, of)
        if of.unique_id is not None:
            self._headers[of] = lineage
        return lineage

    async def _names(self) -> tuple[str, ...]:
        names = await self.files.names()
        self._listed = frozenset(names)
        # Nothing is asked about what is gone.
        for of in [of for of in tuple(self._headers) if changelog_name(of) not in self._listed]:
            self._headers.pop(of, None)
        return names

    async def has_snapshot(self, of: StateVersion) -> bool:
        """Return whether the last listing, else a new one, showed a snapshot of this version, or one was put since."""
        if self._listed is None:
            await self._names()
        return snapshot_name(of) in (self._listed or ())

    async def load_snapshot(self, base: StateVersion | None, directory: Path) -> StateMetadata:
        """Make a directory hold exactly the files of a snapshot (design 0004, C1), or none. Nothing may have it open.

        One GET for the zip, one for its checksum if there may be one, and one for each SST that is not here already,
        some at once. If it fails, the directory holds a part, and the next call makes it whole or another one.

        Raises:
            VersionMissingError: There is no such snapshot.
            DamagedError: The zip is damaged or hostile, or a file of the snapshot is missing or has another size.
            FormatError: The zip does not fit its checksum, its metadata cannot be read, or a name in it is unsafe.
            TargetError: The directory cannot be written.
            StoreError: As the store says.
        """
        if base is None:
            self.known.forget_all()
            await run_blocking(_make_hold, directory, frozenset())
            self.last_load = FilesLoaded()
            return StateMetadata(num_keys=0, column_family_ids=(), column_family_internal=(), column_family_id_max=0)
        self.known.forget_named_from(base.version)
        state = await self.read_snapshot(base)
        wanted = state.metadata.files
        local = await run_blocking(_look_for, directory, wanted)
        # What is known of the files is true from here on, also of what is left if this fails.
        kept = self.known.begin_load(base.version, local, wanted)
        await run_blocking(_make_hold, directory, kept, state)
        missing = [file for file in wanted if file.local_name not in kept]

        async def fetch(file: StoredFile) -> tuple[StoredFile, retention.LocalStateFile]:
            target = local_files.local_path(directory, file.local_name)
            try:
                await self.files.fetch(file.path, target, size_bytes=file.size_bytes)
            except BlobNotFoundError as error:
                hint = "it was deleted while it was needed; an older snapshot may be whole"
                reason, subject = f"snapshot {base} names it, and it is not there", f"{self.files.location}/{file.path}"
                raise DamagedError(reason, operation="load", subject=subject, hint=hint) from error
            return file, await run_blocking(local_files.look_at, target)

        fetched = await map_bounded(fetch, missing, in_flight_max=self.settings.fetches_max)
        self.known.end_load(base.version, fetched)
        self.known.remember_named(base, [file.path for file in wanted], None)
        size_bytes = sum(file.size_bytes for file in missing)
        self.last_load = FilesLoaded(files_fetched=len(missing), files_reused=len(kept), bytes_fetched=size_bytes)
        return state.metadata

    async def read_snapshot(self, of: StateVersion) -> StateZip:
        """Read and check a snapshot's zip, without its SSTs. Raises as `load_snapshot`."""
        name = snapshot_name(of)
        try:
            read = partial(read_checked, self.files) if self._may_have_checksum(of, name) else self.files.read
            data = await read(name, size_bytes_max=ZIP_BYTES_MAX)
        except BlobNotFoundError as error:
            raise self._missing(name) from error
        return await run_blocking(read_state_zip, data, subject=f"{self.files.location}/{name}")

    async def fetch_changelogs(self, items: Collection[StateVersion], scratch: Path) -> tuple[Path, ...]:
        """Copy changelogs to this machine, in parallel: one GET for each, and one for a checksum that may be there.

        What `resolve` has left in `scratch` is not fetched again. The paths are in the order of `items`. Raises as
        `load_snapshot`.
        """

        async def fetch(of: StateVersion) -> Path:
            return await self.fetch_rows(of, changelog_name(of), scratch)

        return tuple(await map_bounded(fetch, items, in_flight_max=self.settings.fetches_max))

    async def fetch_rows(self, of: StateVersion, name: str, scratch: Path) -> Path:
        """Copy a changelog, or a snapshot of the HDFS-backed provider, to this machine. Raises as `load_snapshot`."""
        target = scratch / name
        if of.unique_id is not None and await run_blocking(target.is_file):
            return target  # whole, as it has its name, and never overwritten
        try:
            fetch = partial(fetch_checked, self.files) if self._may_have_checksum(of, name) else self.files.fetch
            await fetch(name, target)
        except BlobNotFoundError as error:
            raise self._missing(name) from error
        return target

    def _may_have_checksum(self, of: StateVersion, name: str) -> bool:
        # A checksum of a name without an id may be that of a file that was overwritten since: Spark 4.1 wrote such
        # checksums, and newer ones leave them behind.
        if not self.settings.file_checksums or of.unique_id is None:
            return False
        listed = self._listed
        return listed is None or name not in listed or checksum_name(name) in listed

    def _missing(self, name: str) -> VersionMissingError:
        return VersionMissingError("is not there", subject=f"{self.files.location}/{name}", hint=_MISSING_HINT)

    def capture(self, checkpoint_dir: Path, of: StateVersion, metadata: StateMetadata) -> CapturedSnapshot:
        """Decide what a snapshot consists of; nothing that happens later changes it (design 0004, S3). Blocks.

        It reads the end of every SST. The rocksdb_checkpoint and its files stay as they are until `upload_snapshot` or
        `known.discard`; removing it is the caller's. The metadata is without its files.

        Raises:
            UnsafeSourceError: A file cannot be read, or is not RocksDB's.
        """
        local = tuple(map(local_files.look_at, local_files.list_shared(checkpoint_dir)))
        upload_id = self._runtime.unique_id()
        files = self.known.capture(local, version=of.version, upload_id=upload_id)
        return CapturedSnapshot(of=of, directory=checkpoint_dir, upload_id=upload_id, files=files, metadata=metadata)

    async def upload_snapshot(self, captured: CapturedSnapshot) -> SnapshotUploaded:
        """Put a captured snapshot there: its new files, then the zip, which is the commit point (design 0004, Z1).

        One LIST for S4, one PUT for each new file, some at once, and one for the zip and one for its checksum.

        Raises:
            CheckpointFileExistsError: A snapshot of this version and id is there already (C4).
            UnsafeSourceError: The rocksdb_checkpoint has changed, or has an empty file that must not be (Z2).
            StoreError: The store did not take it. There is no zip then, or the store never said whether there is.
        """
        directory = self.writable("upload a snapshot")
        began_s = self._runtime.monotonic_s()
        try:
            uploaded = await self._upload(directory, captured)
        except BaseException:
            self.known.discard(captured.upload_id)
            raise
        return msgspec.structs.replace(uploaded, upload_s=self._runtime.monotonic_s() - began_s)

    async def _upload(self, directory: CheckpointDir, captured: CapturedSnapshot) -> SnapshotUploaded:
        files = captured.files
        puts_max = self.settings.fetches_max
        self.known.begin_upload(captured.upload_id, files)
        put = partial(_put, directory, captured.directory)
        # Before the first byte is sent: what must not be empty is not.
        zipped, zip_bytes = await run_blocking(build_state_zip, captured.directory, named_metadata(captured, files))
        await run_all(put, [file for file in files if not file.is_reused], in_flight_max=puts_max)
        # As late as can be, when what takes long is done: a file that was there at the beginning may be deleted
        # meanwhile.
        renewed: list[local_files.CapturedFile] = []
        if self.settings.check_stale_files and any(file.is_reused for file in files):
            renewed = await self._renew_stale(directory, captured)
        if renewed:
            self.known.begin_upload(captured.upload_id, renewed)
            await run_all(put, renewed, in_flight_max=puts_max)
            by_name = {file.local.name: file for file in renewed}
            files = tuple(by_name.get(file.local.name, file) for file in files)
            zipped, zip_bytes = await run_blocking(build_state_zip, captured.directory, named_metadata(captured, files))
        await self._publish(captured.of, snapshot_name(captured.of), zipped)
        new = [file for file in files if not file.is_reused]
        self.known.end_upload(captured.of, captured.upload_id, files, renewed)
        return SnapshotUploaded(
            files_copied=len(new),
            files_reused=len(files) - len(new),
            files_renewed=len(renewed),
            bytes_copied=sum(file.stored.size_bytes for file in new),
            zip_bytes=zip_bytes,
        )

    async def _renew_stale(
        self, directory: CheckpointDir, captured: CapturedSnapshot
    ) -> list[local_files.CapturedFile]:
        """Give the reused files that another executor may have deleted new names (S4)."""
        listing = retention.StateListing.of_names(status.name for status in await directory.list())
        newest, retained_min = listing.latest_snapshot_version, self.settings.versions_retained_min
        renewed: list[local_files.CapturedFile] = []
        for file in captured.files:
            used = self.known.newest_use(file.stored.path)
            if file.is_reused and retention.is_stale(used, newest, retained_min):
                name = stored_name(file.local.name, captured.upload_id)
                stored = StoredFile(file.local.name, name, file.local.size_bytes)
                renewed.append(local_files.CapturedFile(stored, file.local, is_reused=False))
        return renewed

    async def publish_changelog(self, of: StateVersion, path: Path) -> int:
        """Publish a changelog that was written, the commit point of a version (design 0004, C3), and return its size.

        With an id one PUT, and one for its checksum; nothing is overwritten. Without one a DELETE of the checksum that
        may be there, and one PUT; the last writer wins (C4). It raises as `CheckpointDir.publish`.
        """
        return await self._publish(of, changelog_name(of), path)

    async def _publish(self, of: StateVersion, name: str, source: Path | bytes) -> int:
        directory = self.writable("publish")
        if of.unique_id is not None:
            if self.settings.file_checksums:
                return await publish_checked(directory, name, source, runtime=self._runtime)
            return await directory.publish(name, source, overwrite=False)
        # It was that of the file that is replaced now; and no listing says what another writer has put there since.
        await directory.delete((checksum_name(name),))
        size_bytes = await directory.publish(name, source, overwrite=True)
        if self._listed is not None:
            self._listed |= {name}
        return size_bytes

    def writable(self, operation: str) -> CheckpointDir:
        """Return the directory; a `UsageError` if this is a backup of one, which is read-only."""
        if isinstance(self.files, CheckpointDir):
            return self.files
        reason = "cannot be written: it is a backup of a directory"
        hint = "open the directory itself, or restore the backup to one"
        raise UsageError(reason, operation=operation, subject=self.files.location, hint=hint)


def _read_lineage(path: Path, codec: Codec, of: StateVersion) -> Lineage:
    with open_changelog(path, codec, of) as changelog:
        return changelog.header.lineage


def named_metadata(captured: CapturedSnapshot, files: Sequence[local_files.CapturedFile]) -> StateMetadata:
    """Return the metadata of a snapshot, with its files under the names that they have in the store."""
    return msgspec.structs.replace(
        captured.metadata,
        sst_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".sst")),
        log_files=tuple(file.stored for file in files if file.stored.local_name.endswith(".log")),
    )


def _look_for(directory: Path, wanted: Sequence[StoredFile]) -> tuple[retention.LocalStateFile, ...]:
    """Find the wanted files that are in the directory under their names, whatever they are."""
    found: list[retention.LocalStateFile] = []
    for file in wanted:
        path = local_files.local_path(directory, file.local_name)
        with contextlib.suppress(OSError, UnsafeSourceError):  # then it is fetched
            if path.lstat().st_size == file.size_bytes:
                found.append(local_files.look_at(path))
    return tuple(found)


def _make_hold(directory: Path, kept: frozenset[str], state: StateZip | None = None) -> None:
    """Remove everything from a working directory but SSTs and WALs of these names, and write what the zip has."""
    try:
        local_files.remove_all_but(directory, kept)
        if state is not None:
            if state.metadata.log_files:
                (directory / local_files.ARCHIVE).mkdir(exist_ok=True)
            for name, content in state.files.items():
                (directory / name).write_bytes(content)
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="load", subject=str(directory)) from error


async def _put(directory: CheckpointDir, source: Path, file: local_files.CapturedFile) -> None:
    path = local_files.local_path(source, file.local.name)
    try:
        if not await run_blocking(local_files.is_untouched, path, file.local):
            raise _changed(path, "was written to since it was captured")
        # The name is new and this upload's alone: sent twice, it is the same.
        size_bytes = await directory.publish(file.stored.path, path, overwrite=True)
    except OSError as error:
        raise UnsafeSourceError(error.strerror or str(error), operation="snapshot", subject=str(path)) from error
    if size_bytes != file.stored.size_bytes:
        raise _changed(path, f"has {size_bytes} bytes, and had {file.stored.size_bytes} when it was captured")


def _changed(path: Path, message: str) -> UnsafeSourceError:
    hint = "nobody may write to a rocksdb_checkpoint, nor to the SSTs that it has in common with the working directory"
    return UnsafeSourceError(message, operation="snapshot", subject=str(path), hint=hint)


async def delete_old_versions(manager: StateFileManager, *, needed: Resolution | None = None) -> Deleted:
    """Delete what no version to retain is made of, by the manager's settings (design 0004, section 8).

    Nothing is asked of the store while this process has seen too few versions go by. Then LISTs of the directory,
    of `SSTs/` and of `logs/`, one GET for each zip that is not known, and deletes of up to 1,000 files.

    What the newest version that the caller has loaded or committed is made of is `needed`: it stays, and where newer
    files are those of a history that was left, so do the versions before it (G4).

    Raises:
        DamagedError: A snapshot that stays cannot be read, so that nobody knows what it names; nothing was deleted.
        StoreError: As the store says; what was not deleted is, by the next call.
    """
    directory, known, settings = manager.writable("delete old versions"), manager.known, manager.settings
    retained_min, deleted_max = settings.versions_retained_min, settings.versions_deleted_max
    if not retention.deletion_is_due(
        oldest_seen=known.oldest_seen,
        newest_seen=known.newest_seen,
        retained_min=retained_min,
        deleted_min=settings.stale_versions_min,
    ):
        return Deleted()
    # From before the listing on: what an upload has named that ended since is in no zip that is listed.
    with known.watch_uploads() as uploaded_paths:
        statuses = await directory.list()
        listing = retention.StateListing.of_names(status.name for status in statuses if not status.is_directory)
        chosen = retention.choose_oldest_kept(
            listing, retained_min=retained_min, deleted_max=deleted_max, needed=needed
        )
        if isinstance(chosen, retention.BaseNeeded):
            # It asks for a base only where a caller's version is known.
            chosen = 0 if needed is None else await _walk_back(chosen, needed, listing, manager)
        going = retention.snapshots_to_delete(listing.snapshots, chosen, needed)
        if not going:
            return Deleted()
        # Before the zips are looked at: an upload that ends in between is of files that are younger than what is
        # listed.
        found = [*await directory.list(SSTS), *await directory.list(LOGS)]
        shared = {status.path: status.modified_at_ms for status in found if not status.is_directory}
        stamps = {status.name: (status.size_bytes, status.modified_at_ms) for status in statuses}
        files_of = await _files_of(manager, {of: stamps[snapshot_name(of)] for of in listing.snapshots}, going, chosen)
        plan = retention.plan_deletion(listing, going, files_of, shared, oldest_kept=chosen, needed=needed)
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
    deleted = Deleted(
        oldest_kept=chosen,
        snapshots=len(plan.snapshots),
        changelogs=len(plan.changelogs),
        files=len(unnamed),
        orphans=len(orphans),
        checksums=len(plan.checksums),
    )
    _LOG.info("%s: deleted versions below %d: %s", directory.location, chosen, deleted)
    return deleted


async def _walk_back(
    wanted: retention.BaseNeeded, needed: Resolution, listing: retention.StateListing, manager: StateFileManager
) -> int:
    """Find the base of an older version by headers (G7); 0, so that nothing goes, if they do not lead there."""
    present = Present(frozenset(listing.snapshots), frozenset(listing.changelogs))
    # What the caller knows needs no reading.
    versions = [StateVersion(item.version, item.unique_id) for item in needed.lineage]
    present = present.with_headers({of: needed.lineage[:at] for at, of in enumerate(versions) if at})
    try:
        answer = await resolve_with(
            lambda present: retention.find_base(wanted, needed.target, present), present, manager.read_header
        )
    except (DamagedError, FormatError):
        # A version that cannot be put together says nothing about what may go. Its next load raises why.
        return 0
    return 0 if answer.base is None else answer.base.version


async def _files_of(
    manager: StateFileManager,
    snapshots: Mapping[StateVersion, local_files.ZipStamp],
    going: Collection[StateVersion],
    oldest_kept: int,
) -> dict[StateVersion, frozenset[str]]:
    async def read(of: StateVersion) -> tuple[StateVersion, frozenset[str]]:
        # The one that stays at the end is read again, as in Spark: some stores have times in whole seconds.
        is_sure = of.unique_id is not None or of.version != oldest_kept
        paths = manager.known.named_by(of, snapshots[of]) if is_sure else None
        if paths is not None:
            return of, paths
        try:
            paths = frozenset(file.path for file in (await manager.read_snapshot(of)).metadata.files)
        except (DamagedError, FormatError) as error:
            if of in going or isinstance(error, VersionMissingError):
                # It is not needed any more, or was just deleted by another process. No other snapshot names its files.
                return of, frozenset()
            error.add_note("a snapshot that stays cannot be read, so nothing was deleted: what it names is not known")
            raise
        manager.known.remember_named(of, paths, snapshots[of])
        return of, paths

    return dict(await map_bounded(read, snapshots, in_flight_max=manager.settings.fetches_max))
