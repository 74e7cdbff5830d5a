"""From a version to an open, replayed store (design 0004, C1 and R7)."""

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from blobstore.concurrency import both, run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError
from engine.errors import DamagedError, EngineError, NotFoundError, ProviderError, SnapshotRepairError, UsageError
from engine.local.checksums import crc32c
from engine.rocksdb.sst_table import not_in_place
from engine.rocksdb.store import StoreWriter
from engine.runtime import Runtime, Stopwatch
from engine.state import loaded
from engine.state.changelogs import (
    ChangelogReader,
    KeyCounts,
    Opener,
    Replayed,
    count_store,
    open_changelog,
    outcome_of,
    replay,
)
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.files import FilesLoaded, StateFileManager
from engine.state.local_files import WorkingDir
from engine.state.overlay import OverlaidStore, Run, StateInPlace
from engine.state.settings import HDFS_PROVIDER, StateStoreSettings
from index.errors import FormatError, LineageError, VersionMissingError
from index.spark.changelog import changelog_version, check_leads_back
from index.spark.hdfs_rows import RowForm, SplitKey
from index.spark.lineage import Lineage, Resolution
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion, check_unique_id, snapshot_name

_LOG: Final = logging.getLogger(__name__)

# These errors say that a snapshot is not whole, or not there any more. Whatever else goes wrong would go wrong with an
# older one too: a store that does not answer must not cost hundreds of replayed changelogs.
_DOES_NOT_OPEN: Final = (FormatError, DamagedError, NotFoundError, BlobNotFoundError, BlobCorruptError)

# The file that leads RocksDB to all others.
_CURRENT: Final = "CURRENT"
# How RocksDB begins when it refuses files for their content, and what it says of one that is not there. Anything else,
# such as too many open files or a full disk, it would say of an older snapshot as well.
_REFUSES: Final = ("Corruption", "Invalid argument", "Not implemented")
_NO_SUCH_FILE: Final = os.strerror(errno.ENOENT)

_FAMILIES_HINT: Final = (
    "set `column_families` as the operator has it: transformWithState and joins of format 3 use them"
)


class LoadMetrics(FilesLoaded, frozen=True, kw_only=True):
    """Metrics of one `load`; beside some, Spark's name in the query's progress."""

    # What was loaded.
    of: StateVersion
    # The snapshot that it was built on; None: on nothing.
    base: StateVersion | None = None
    # It was loaded already.
    was_loaded: bool = False
    # Changelogs replayed (Spark: rocksdbNumReplayChangelogFiles), and what was in them.
    changelogs: int = 0
    records: int = 0
    record_bytes: int = 0
    # Snapshots that were rejected because they do not open. Spark: rocksdbNumSnapshotsAutoRepaired, which is 0 or 1.
    snapshots_repaired: int = 0
    # Seconds of the whole (Spark: rocksdbLoadLatencyMs), and of its phases; fetches of both kinds overlap.
    total_s: float = 0.0
    resolve_s: float = 0.0
    fetch_s: float = 0.0
    open_s: float = 0.0
    # Spark: rocksdbReplayChangelogLatencyMs.
    replay_s: float = 0.0


class SnapshotUnusableError(Exception):
    """A version cannot be built from the snapshot that was tried."""

    def __init__(self, reason: Exception, *, reused: bool) -> None:
        super().__init__(f"the snapshot does not open: {reason}")
        self.reason = reason
        # Whether files of this machine were part of it: the store may have them whole.
        self.reused = reused


class StateLoader:
    """Builds the versions of one store in its working directory, one at a time."""

    def __init__(
        self, manager: StateFileManager, place: WorkingDir, runtime: Runtime, *, split_key: SplitKey | None = None
    ) -> None:
        settings = self._settings = manager.settings
        # Of the rows of the HDFS-backed provider, which are as its RocksDB provider has them once they are loaded.
        self._row_form = RowForm(settings.row_checksums, crc32c, split_key)
        self._manager = manager
        self._place = place
        self._runtime = runtime
        # What RocksDB is opened with.
        self.rocksdb = msgspec.structs.replace(settings.rocksdb, merge_delimiter=settings.merge_delimiter)

    async def load(
        self,
        target: StateVersion,
        known: Mapping[StateVersion, Lineage],
        *,
        read_only: bool,
        empty: bool = False,
        overlays: bool = False,
    ) -> tuple[loaded.LoadedState, LoadMetrics]:
        """Build a version, as `StateStore.load`. Nothing may have the working directory open.

        Lineages that are known need not be read again (design 0004, C2). A reader of another query's state may not know
        whether there are changelogs: a repair tries. With `overlays` the rows are only scanned, and no keys counted:
        changelogs are laid over the snapshot where they can be (C1a).
        """
        timer, location = Stopwatch(self._runtime), self._manager.files.location
        with timer.phase("resolve_s"):
            candidate = Resolution(target, None) if empty else await self._resolve(target, known)
        if candidate.target.is_hdfs and not read_only:
            reason = f"its state is of {HDFS_PROVIDER}, which can be read, and not be written"
            hint = "load it to be read only, or convert the checkpoint with `tidemark spark convert --to rocksdb`"
            raise ProviderError(reason, operation="load", subject=location, hint=hint)
        # Those that are here already, for every candidate.
        changelogs: dict[StateVersion, Path] = {}
        rejected: list[StateVersion] = []
        fetched_whole = 0
        # Without changelogs there is nothing to bring an older snapshot up to date with.
        may_repair = self._settings.snapshot_repair and (self._settings.changelogs or read_only)
        while True:
            try:
                state, replayed = await self._build(candidate, changelogs, timer, overlays=overlays)
            except SnapshotUnusableError as error:
                failure = error
            else:
                state.is_empty_start = empty
                # Until there is a snapshot again, every load has to repair. It also names the families.
                state.needs_snapshot = state.needs_snapshot or bool(rejected)
                metrics = LoadMetrics(
                    of=candidate.target,
                    base=candidate.base,
                    changelogs=len(candidate.changelogs),
                    records=replayed.records,
                    record_bytes=replayed.size_bytes,
                    snapshots_repaired=len(rejected),
                    total_s=sum(timer.phases_s.values()),
                    **timer.phases_s,
                    **msgspec.structs.asdict(self._manager.last_load),
                )
                text = "%s: loaded version %s from snapshot %s; changelogs replayed: %d"
                _LOG.info(text, location, metrics.of, metrics.base, metrics.changelogs)
                return state, metrics
            if failure.reused:
                # The same with every file fetched.
                self._manager.known.forget_all()
                continue
            if candidate.base is None or not may_repair:
                raise failure.reason
            fetched_whole += 1
            # Only the newest is tried more than once (design 0004, R7).
            if rejected or fetched_whole >= self._settings.repair_after_failures:
                rejected.append(candidate.base)
                _LOG.warning("%s: snapshot %s does not open: %s", location, candidate.base, failure.reason)
                with timer.phase("resolve_s"):
                    candidate = await self._older(target, known, rejected, failure.reason)

    async def load_in_place(self, target: StateVersion, run: Run[Any]) -> loaded.LoadedState:
        """Build a version of whose snapshot no SST is fetched: to look single keys up (0013, W9).

        Raises:
            UnknownFormatError: It cannot be read so: it has no snapshot, or changelogs that are large or have other
                records than PUT and DELETE. `load` does it. The other errors are those of `load`; nothing is repaired.
        """
        candidate = await self._resolve(target, {})
        base, files = candidate.rocksdb_snapshot, self._manager.files
        if base is None:
            raise not_in_place("no snapshot of RocksDB", f"{files.location}, version {target}")
        paths = await self._manager.fetch_changelogs(candidate.changelogs, self._place.fetched)
        zipped = await self._manager.read_snapshot(base)
        name = snapshot_name(base)
        db = await StateInPlace.of_snapshot(files, zipped, name, run, self.rocksdb.merge_delimiter)
        openers = self._openers(candidate, dict(zip(candidate.changelogs, paths, strict=True)))
        return (await self._finish(candidate, db, zipped.metadata, openers))[0]

    async def _resolve(
        self, target: StateVersion, known: Mapping[StateVersion, Lineage], rejected: Sequence[StateVersion] = ()
    ) -> Resolution:
        return await self._manager.resolve(
            target.version, target.unique_id, scratch=self._place.fetched, known=known, rejected=rejected
        )

    async def _older(
        self,
        target: StateVersion,
        known: Mapping[StateVersion, Lineage],
        rejected: Sequence[StateVersion],
        failure: Exception,
    ) -> Resolution:
        """Find what else the version can be made of (design 0004, R7)."""
        subject, reason = f"version {target}", f"the snapshots {', '.join(map(str, rejected))} do not open"
        try:
            found = await self._resolve(target, known, rejected)
        except (VersionMissingError, LineageError) as error:
            if not self._settings.changelogs:
                raise failure from None
            failure.add_note(f"and there is no older one: {error}")
            reason += ", and nothing else leads to it"
            raise SnapshotRepairError(reason, operation="load", subject=subject) from failure
        behind = target.version - (found.base.version if found.base is not None else 0)
        most = self._settings.changes_replayed_max
        if behind > most:
            reason += f", and the next one is {behind} versions back, more than the {most} that may be replayed"
            raise SnapshotRepairError(reason, operation="load", subject=subject) from failure
        return found

    async def _build(
        self, candidate: Resolution, changelogs: dict[StateVersion, Path], timer: Stopwatch, *, overlays: bool
    ) -> tuple[loaded.LoadedState, Replayed]:
        """Build a version from one of the snapshots that it can be made of, or raise a `SnapshotUnusableError`.

        `changelogs` has those that are here already; more afterwards.
        """
        with timer.phase("fetch_s"):
            metadata = await self._fetch(candidate, changelogs)
        reused = self._manager.last_load.files_reused > 0
        base = candidate.rocksdb_snapshot
        with timer.phase("open_s"):
            db = await self._open(base, reused=reused, kind=OverlaidStore if overlays and base else StoreWriter)
        try:
            with timer.phase("replay_s"):
                return await self._finish(candidate, db, metadata, self._openers(candidate, changelogs))
        except DamagedError as error:
            # It opens. But where files were here already, those in the store deserve a try.
            if reused:
                raise SnapshotUnusableError(error, reused=True) from error
            raise

    async def _fetch(self, candidate: Resolution, changelogs: dict[StateVersion, Path]) -> StateMetadata:
        """Fetch a snapshot and the changelogs that are not here yet, at once."""
        missing = tuple(of for of in candidate.changelogs if of not in changelogs)
        if candidate.row_snapshot is not None:
            name = snapshot_name(candidate.row_snapshot)
            await self._manager.fetch_rows(candidate.row_snapshot, name, self._place.fetched)
        # The changelogs are fetched to the end: the next candidate takes them, too.
        metadata, fetched = await both(
            outcome_of(self._manager.load_snapshot(candidate.rocksdb_snapshot, self._place.db), _DOES_NOT_OPEN),
            self._manager.fetch_changelogs(missing, self._place.fetched),
        )
        changelogs.update(zip(missing, fetched, strict=True))
        if isinstance(metadata, Exception):
            raise SnapshotUnusableError(metadata, reused=False) from metadata
        return metadata

    async def _open(self, base: StateVersion | None, *, reused: bool, kind: type[StoreWriter]) -> StoreWriter:
        opened: list[StoreWriter] = []
        try:
            # Noted in the thread: it opens it to the end even if this is cancelled, and somebody has to close it.
            await run_blocking(lambda: opened.append(self._open_db(base, kind)))
        except EngineError as error:
            # It refuses the directory for its files, or for what it lacks.
            said = str(error.__cause__ or "")
            lacks = said.startswith("IO error") and _NO_SUCH_FILE in said
            if not (isinstance(error, DamagedError | NotFoundError) or said.startswith(_REFUSES) or lacks):
                raise
            raise SnapshotUnusableError(error, reused=reused) from error
        except BaseException:
            for db in opened:
                await run_blocking(db.close)
            raise
        return opened[0]

    def _open_db(self, base: StateVersion | None, kind: type[StoreWriter]) -> StoreWriter:
        # RocksDB would make an empty store where there is none.
        if base is not None and not (self._place.db / _CURRENT).is_file():
            hint = "an older snapshot may be whole"
            raise DamagedError(f"has no {_CURRENT}", operation="load", subject=f"snapshot {base}", hint=hint)
        return kind.open(self._place.db, self.rocksdb, compactions_wait=True)

    def _openers(self, candidate: Resolution, changelogs: Mapping[StateVersion, Path]) -> list[Opener]:
        """Return what opens the files to replay, in order."""
        replayed = candidate.changelogs
        paths = [changelogs[of] for of in replayed]
        if candidate.row_snapshot is not None:
            replayed = (candidate.row_snapshot, *replayed)
            paths.insert(0, self._place.fetched / snapshot_name(candidate.row_snapshot))
        below = (candidate.rocksdb_snapshot or StateVersion(0), *replayed)
        files = zip(paths, replayed, below, strict=False)
        return [partial(_open_changelog, *each, self._settings) for each in files]

    async def _finish(
        self, candidate: Resolution, db: StoreWriter, metadata: StateMetadata, openers: Sequence[Opener]
    ) -> tuple[loaded.LoadedState, Replayed]:
        """Replay on top of a snapshot, or lay changes over it; closes RocksDB if that fails."""
        settings = self._settings
        try:
            families = _families(metadata, candidate, settings)
            is_internal = families.is_internal if settings.column_families else None
            before = None
            if settings.count_keys:
                before = KeyCounts(metadata.num_keys, metadata.num_internal_keys)
                if min(metadata.num_keys, metadata.num_internal_keys) < 0:  # its writer did not count
                    before = await run_blocking(count_store, db, is_internal)
            rows = loaded.RowChecks(settings) if settings.row_checksums else None
            check_row = None if rows is None else rows.replayed
            if candidate.target.is_hdfs:
                check_row = self._row_form.to_rocksdb
            replayed = None
            if isinstance(db, OverlaidStore):
                replayed = await run_blocking(db.lay_over, openers, check_row)
                if replayed is None:
                    await run_blocking(db.close)
                    db = await self._open(candidate.rocksdb_snapshot, reused=False, kind=StoreWriter)
            if replayed is None:
                replayed = await run_blocking(
                    replay, db, openers, before=before, is_internal=is_internal, check_row=check_row
                )
            counts = loaded.RunningCounts(replayed.counts)
            state = loaded.LoadedState(db, settings, candidate, families=families, counts=counts, rows=rows)
            if settings.column_families and loaded.DEFAULT_FAMILY not in families:
                families.add(loaded.DEFAULT_FAMILY, is_internal=False)
                # As Spark does: changelogs do not hold names, so the first commit is a snapshot.
                state.needs_snapshot = True
            # A family comes with a snapshot, which may be one that was rejected or has been lost.
            if settings.column_families and replayed.changelogs:
                await run_blocking(loaded.check_families_known, db, families)
        except BaseException:
            await run_blocking(db.close)
            raise
        return state, replayed


def check_target(
    version: int, unique_id: str | None, files: StateFiles, format_version: int, *, read_only: bool, empty: bool
) -> StateVersion:
    """Return what is to be loaded; arguments as of `StateStore.load`.

    What makes no sense is a `UsageError`, an id that cannot be part of a file name an `UnsafeNameError`.
    """
    reason = hint = ""
    if version < 0:
        reason, hint = "is not a version", "the state after batch b is version b + 1, and version 0 is empty"
    elif unique_id is not None and (version == 0 or empty):
        reason, hint = "has no unique id when it is empty", "load it without an id"
    elif not read_only and not isinstance(files, CheckpointDir):
        reason, hint = "is in files that cannot be written", "load it with read_only=True"
    elif not read_only and unique_id is not None and format_version == 1:
        reason = "has a unique id, and nothing without one can be built on it"
        hint = "set `format_version` to 2, or load it with read_only=True"
    if reason:
        raise UsageError(reason, operation="load", subject=f"version {version}", hint=hint)
    return StateVersion(version, None if unique_id is None else check_unique_id(unique_id))


def _families(metadata: StateMetadata, resolution: Resolution, settings: StateStoreSettings) -> loaded.ColumnFamilies:
    ids = metadata.column_family_ids or ()
    internal = dict(metadata.column_family_internal or ())
    if resolution.base is not None and bool(ids) != settings.column_families:
        reason = f"{'has' if ids else 'has no'} column families, and the settings say otherwise"
        raise UsageError(reason, operation="load", subject=f"snapshot {resolution.base}", hint=_FAMILIES_HINT)
    families = tuple(loaded.ColumnFamily(name, id_, internal.get(name, False)) for name, id_ in ids)
    return loaded.ColumnFamilies(
        is_enabled=settings.column_families, families=families, id_max=metadata.column_family_id_max or 0
    )


@contextmanager
def _open_changelog(
    path: Path, of: StateVersion, before: StateVersion, settings: StateStoreSettings
) -> Iterator[ChangelogReader]:
    with open_changelog(path, settings.codec, of) as reader:
        found = reader.header.version
        if found != changelog_version(column_families=settings.column_families, unique_ids=of.unique_id is not None):
            reason = f"is of version {found}, which the settings' column families do not go with"
            raise UsageError(reason, operation="load", subject=path.name, hint=_FAMILIES_HINT)
        check_leads_back(reader.header, of, before)
        yield reader
