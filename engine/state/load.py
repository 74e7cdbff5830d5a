"""From a version to an open, replayed store (design 0004, C1 and R7)."""

import asyncio
import errno
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import first_error, run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError
from engine.clock import Runtime
from engine.errors import DamagedError, EngineError, NotFoundError, ProviderError, SnapshotRepairError, UsageError
from engine.rocksdb.store import RocksDbSettings, StoreWriter
from engine.state.changelogs import ChangelogReader, open_changelog
from engine.state.families import DEFAULT_FAMILY, ColumnFamilies, ColumnFamily
from engine.state.files import StateFileManager
from engine.state.loaded import LoadedState, RowChecks, RunningCounts, check_families_known
from engine.state.local_files import WorkingDir
from engine.state.metrics import LoadMetrics
from engine.state.replay import KeyCounts, Replayed, count_store, replay
from engine.state.settings import HDFS_PROVIDER, StateStoreSettings
from engine.state.sources import StateFiles
from index.errors import FormatError, LineageError, VersionMissingError
from index.spark.changelog import changelog_version, check_leads_back
from index.spark.lineage import Lineage, Resolution
from index.spark.metadata import StateMetadata
from index.spark.names import StateVersion, check_unique_id

# What says that a snapshot is not whole, or not there any more. Whatever else goes wrong would go wrong with an older
# one too: a store that does not answer must not cost hundreds of replayed changelogs.
_DOES_NOT_OPEN: Final = (FormatError, DamagedError, NotFoundError, BlobNotFoundError, BlobCorruptError)

# The file that leads RocksDB to all others.
_CURRENT: Final = "CURRENT"
# How RocksDB begins when it refuses files for what is in them, and what it says of one that is not there. Anything
# else, such as too many open files or a full disk, it would say of an older snapshot as well.
_REFUSES: Final = ("Corruption", "Invalid argument", "Not implemented")
_NO_SUCH_FILE: Final = os.strerror(errno.ENOENT)

# What Spark's other provider leaves in the directory of a state store.
_HDFS_FILE: Final = re.compile(r"[0-9]+\.(delta|snapshot)")


class _Opened(msgspec.Struct, frozen=True):
    """A snapshot that stands in the working directory and is open in RocksDB."""

    db: StoreWriter
    metadata: StateMetadata


class _Timer:
    """Seconds of the phases of one load."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_s = self._last_s = runtime.monotonic_s()
        self._phases_s = {"resolve": 0.0, "fetch": 0.0, "open": 0.0, "replay": 0.0}

    def note(self, phase: str) -> None:
        """What passed since the last call was this phase."""
        now_s = self._runtime.monotonic_s()
        self._phases_s[phase] += now_s - self._last_s
        self._last_s = now_s

    def add_to(self, metrics: LoadMetrics) -> LoadMetrics:
        """The same with what was measured here."""
        return msgspec.structs.replace(
            metrics,
            total_s=self._runtime.monotonic_s() - self._began_s,
            **{f"{phase}_s": seconds for phase, seconds in self._phases_s.items()},
        )


class StateLoader:
    """Builds the versions of one store in its working directory, one at a time."""

    def __init__(
        self, manager: StateFileManager, place: WorkingDir, settings: StateStoreSettings, runtime: Runtime
    ) -> None:
        self._manager = manager
        self._place = place
        self._settings = settings
        self._runtime = runtime
        # Whether files that were here already are part of what is being built.
        self._has_reused = False
        self._rocksdb: RocksDbSettings = msgspec.structs.replace(
            settings.rocksdb, merge_delimiter=settings.merge_delimiter
        )

    @property
    def rocksdb(self) -> RocksDbSettings:
        """What RocksDB is opened with."""
        return self._rocksdb

    async def load(
        self, target: StateVersion, known: Mapping[StateVersion, Lineage], *, read_only: bool
    ) -> tuple[LoadedState, LoadMetrics]:
        """Build a version. Nothing may have the working directory open.

        Args:
            target: The version; 0 is empty.
            known: Lineages that need not be read again (design 0004, C2).
            read_only: Nothing will be built on it. Whoever reads somebody else's state may not know whether there are
                changelogs: a repair tries.

        Raises:
            VersionMissingError: The version is not there.
            SnapshotRepairError: Nor is a snapshot that opens.
            FormatError, EngineError, StoreError: As they say.
        """
        timer = _Timer(self._runtime)
        resolution = await self._resolve(target, known)
        timer.note("resolve")
        changelogs: dict[StateVersion, Path] = {}
        put_aside: list[StateVersion] = []
        failures = 0
        while True:
            self._has_reused = False
            built = await self._build(resolution, changelogs, timer)
            if not isinstance(built, Exception):
                break
            if self._has_reused:
                # Perhaps only what this machine kept is damaged, and all is well in the store.
                self._manager.forget_local()
                continue
            failures += 1
            if resolution.base is None or not self._may_repair(read_only=read_only):
                raise built
            if not put_aside and failures < self._settings.repair_after_failures:
                continue
            put_aside.append(resolution.base)
            resolution = await self._next_best(resolution, known, put_aside, built)
            timer.note("resolve")
        state, replayed = built
        # Until there is a snapshot again, everybody who loads has to repair. It also names the families.
        state.needs_snapshot = state.needs_snapshot or bool(put_aside)
        fetched = self._manager.last_load
        metrics = LoadMetrics(
            of=resolution.target,
            base=resolution.base,
            files_fetched=fetched.files_fetched,
            files_reused=fetched.files_reused,
            bytes_fetched=fetched.bytes_fetched,
            changelogs=replayed.changelogs,
            records=replayed.records,
            record_bytes=replayed.size_bytes,
            snapshots_repaired=len(put_aside),
        )
        return state, timer.add_to(metrics)

    async def load_empty(self, version: int) -> tuple[LoadedState, LoadMetrics]:
        """An empty store that counts as a version, whatever there is of it (SPARK-54420)."""
        timer = _Timer(self._runtime)
        resolution = Resolution(StateVersion(version), None)
        built = await self._build(resolution, {}, timer, is_empty_start=True)
        if isinstance(built, Exception):
            raise built
        return built[0], timer.add_to(LoadMetrics(of=resolution.target))

    def _may_repair(self, *, read_only: bool) -> bool:
        # Without changelogs there is nothing to bring an older snapshot up to date with.
        return self._settings.snapshot_repair and (self._settings.changelogs or read_only)

    async def _resolve(self, target: StateVersion, known: Mapping[StateVersion, Lineage]) -> Resolution:
        try:
            return await self._manager.resolve(
                target.version, target.unique_id, scratch=self._place.fetched, known=known
            )
        except VersionMissingError as error:
            foreign = next(filter(_HDFS_FILE.fullmatch, await self._manager.files.names()), None)
            if foreign is None:
                raise
            reason = f"it holds {foreign}: its state is of the state store provider {HDFS_PROVIDER}"
            raise ProviderError(reason, operation="load", subject=self._manager.files.location) from error

    async def _next_best(
        self,
        resolution: Resolution,
        known: Mapping[StateVersion, Lineage],
        put_aside: list[StateVersion],
        failure: Exception,
    ) -> Resolution:
        """What else the version can be made of (design 0004, R7)."""
        target = resolution.target
        tried = ", ".join(map(str, put_aside))
        try:
            found = await self._manager.resolve(
                target.version, target.unique_id, scratch=self._place.fetched, known=known, put_aside=put_aside
            )
        except (VersionMissingError, LineageError) as error:
            if not self._settings.changelogs:
                raise failure from None
            failure.add_note(f"and there is no older one: {error}")
            raise _beyond_repair(
                target, f"the snapshots {tried} do not open, and nothing else leads to it"
            ) from failure
        behind = target.version - (found.base.version if found.base is not None else 0)
        if behind > self._settings.changes_replayed_max:
            raise _beyond_repair(
                target,
                f"the snapshots {tried} do not open, and the next one is {behind} versions back, more than the "
                f"{self._settings.changes_replayed_max} that may be replayed",
            ) from failure
        return found

    async def _build(
        self,
        resolution: Resolution,
        changelogs: dict[StateVersion, Path],
        timer: _Timer,
        *,
        is_empty_start: bool = False,
    ) -> tuple[LoadedState, Replayed] | Exception:
        """A version from one of the snapshots that it can be made of, or why that one does not open.

        Args:
            resolution: Which.
            changelogs: Those that are here already; more afterwards.
            timer: Of the load.
            is_empty_start: As of `LoadedState`.
        """
        opened = await self._open(resolution, changelogs, timer)
        if isinstance(opened, Exception):
            return opened
        paths = [changelogs[of] for of in resolution.changelogs]
        try:
            return await self._finish(resolution, opened, paths, is_empty_start=is_empty_start)
        except DamagedError as error:
            # It opens. But where files were here already, those in the store deserve a try.
            if self._has_reused:
                return error
            raise
        finally:
            timer.note("replay")

    async def _open(
        self, resolution: Resolution, changelogs: dict[StateVersion, Path], timer: _Timer
    ) -> _Opened | Exception:
        """Fetch a snapshot and the changelogs that are not here yet, and open it; what is wrong with it is returned."""
        missing = tuple(of for of in resolution.changelogs if of not in changelogs)
        metadata, paths = await self._fetch(resolution.base, missing)
        timer.note("fetch")
        changelogs.update(zip(missing, paths, strict=True))
        if isinstance(metadata, Exception):
            return metadata
        self._has_reused = self._manager.last_load.files_reused > 0
        opened: list[StoreWriter] = []
        try:
            # Noted in the thread: it opens it to the end even if this is cancelled, and somebody has to close it.
            await run_blocking(lambda: opened.append(self._open_db(resolution.base)))
        except EngineError as error:
            if not _is_refusal(error):
                raise
            return error
        except BaseException:
            for db in opened:
                await run_blocking(db.close)
            raise
        finally:
            timer.note("open")
        return _Opened(opened[0], metadata)

    def _open_db(self, base: StateVersion | None) -> StoreWriter:
        # RocksDB would make an empty store where there is none.
        if base is not None and not (self._place.db / _CURRENT).is_file():
            hint = "an older snapshot may be whole"
            raise DamagedError(f"has no {_CURRENT}", operation="load", subject=f"snapshot {base}", hint=hint)
        return StoreWriter.open(self._place.db, self._rocksdb, compactions_wait=True)

    async def _fetch(
        self, base: StateVersion | None, changelogs: tuple[StateVersion, ...]
    ) -> tuple[StateMetadata | Exception, tuple[Path, ...]]:
        """A snapshot, or why it does not open, and changelogs, at once."""
        try:
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(self._load_snapshot(base))
                fetching = group.create_task(self._manager.fetch_changelogs(changelogs, self._place.fetched))
        except BaseExceptionGroup as failures:
            error = first_error(failures)
        else:
            return loading.result(), fetching.result()
        # Out here, so that the group becomes neither its context nor takes the place of its cause.
        raise error

    async def _load_snapshot(self, base: StateVersion | None) -> StateMetadata | Exception:
        try:
            return await self._manager.load_snapshot(base, self._place.db)
        except _DOES_NOT_OPEN as error:
            return error

    async def _finish(
        self, resolution: Resolution, opened: _Opened, changelogs: list[Path], *, is_empty_start: bool = False
    ) -> tuple[LoadedState, Replayed]:
        """Replay on top of a snapshot, and tell what came of it; closes RocksDB if it fails."""
        settings = self._settings
        try:
            families = _families(opened.metadata, resolution, settings)
            before = await run_blocking(_count, opened, families) if settings.count_keys else None
            rows = None
            if settings.row_checksums:
                rows = RowChecks(settings.merge_delimiter, settings.row_check_ratio)
            replayed = await run_blocking(
                replay,
                opened.db,
                _openers(resolution, changelogs, settings),
                delimiter=settings.merge_delimiter,
                count_keys=before is not None,
                is_internal=families.is_internal if settings.column_families else None,
                check_row=None if rows is None else rows.replayed,
                counted_before=before,
            )
            counted = None
            if before is not None:
                counted = KeyCounts(
                    before.keys + replayed.keys_delta, before.internal_keys + replayed.internal_keys_delta
                )
            state = LoadedState(
                opened.db,
                settings,
                resolution,
                families=families,
                counts=RunningCounts(counted),
                rows=rows,
                is_empty_start=is_empty_start,
            )
            if settings.column_families and DEFAULT_FAMILY not in families:
                families.add(DEFAULT_FAMILY, is_internal=False)
                # As Spark does: changelogs do not tell names, so the first commit is a snapshot.
                state.needs_snapshot = True
            # A family comes with a snapshot, which may be one that was put aside or has been lost.
            if settings.column_families and replayed.changelogs:
                await run_blocking(check_families_known, opened.db, families)
        except BaseException:
            await run_blocking(opened.db.close)
            raise
        return state, replayed


def check_target(
    version: int,
    unique_id: str | None,
    files: StateFiles,
    format_version: int,
    *,
    read_only: bool,
    empty: bool,
) -> StateVersion:
    """What is to be loaded, once it is known to make sense; arguments as of `StateStore.load`.

    Raises:
        UsageError: It makes none.
        UnsafeNameError: The id cannot stand in a file name.
    """
    subject = f"version {version}"
    if version < 0:
        hint = "the state after batch b is version b + 1, and version 0 is empty"
        raise UsageError("is no version", operation="load", subject=subject, hint=hint)
    if unique_id is not None and (version == 0 or empty):
        hint = "load it without an id"
        raise UsageError("has no unique id when it is empty", operation="load", subject=subject, hint=hint)
    if not read_only and not files.is_writable:
        hint = "load it with read_only=True"
        raise UsageError("stands in files that cannot be written", operation="load", subject=subject, hint=hint)
    if not read_only and unique_id is not None and format_version == 1:
        hint = "set `format_version` to 2, or load it with read_only=True"
        reason = "has a unique id, and nothing without one can be built on it"
        raise UsageError(reason, operation="load", subject=subject, hint=hint)
    return StateVersion(version, None if unique_id is None else check_unique_id(unique_id))


def _families(metadata: StateMetadata, resolution: Resolution, settings: StateStoreSettings) -> ColumnFamilies:
    ids = metadata.column_family_ids or ()
    internal = dict(metadata.column_family_internal or ())
    if resolution.base is not None and bool(ids) != settings.column_families:
        found = "has column families" if ids else "has no column families"
        raise UsageError(
            f"{found}, and the settings say otherwise",
            operation="load",
            subject=f"snapshot {resolution.base}",
            hint="set `column_families` as the operator has it: transformWithState and joins of format 3 use them",
        )
    families = tuple(ColumnFamily(name, id_, internal.get(name, False)) for name, id_ in ids)
    return ColumnFamilies(
        is_enabled=settings.column_families, families=families, id_max=metadata.column_family_id_max or 0
    )


def _count(opened: _Opened, families: ColumnFamilies) -> KeyCounts:
    """What the snapshot says, or a scan if whoever made it did not count."""
    metadata = opened.metadata
    if min(metadata.num_keys, metadata.num_internal_keys) < 0:
        return count_store(opened.db, families.is_internal if families.is_enabled else None)
    return KeyCounts(metadata.num_keys, metadata.num_internal_keys)


def _is_refusal(error: EngineError) -> bool:
    """Whether RocksDB refuses a directory for what is in it, or for what is not."""
    if isinstance(error, DamagedError | NotFoundError):
        return True
    said = str(error.__cause__ or "")
    return said.startswith(_REFUSES) or (said.startswith("IO error") and _NO_SUCH_FILE in said)


def _openers(
    resolution: Resolution, paths: list[Path], settings: StateStoreSettings
) -> list[Callable[[], ChangelogReader]]:
    before = (resolution.base or StateVersion(0), *resolution.changelogs)
    return [
        partial(_open_changelog, path, of, below, settings)
        for path, of, below in zip(paths, resolution.changelogs, before, strict=False)
    ]


def _open_changelog(
    path: Path, of: StateVersion, before: StateVersion, settings: StateStoreSettings
) -> ChangelogReader:
    reader = open_changelog(path, settings.codec, of)
    try:
        _check_families_fit(reader, of, settings)
        check_leads_back(reader.header, of, before)
    except BaseException:
        reader.close()
        raise
    return reader


def _check_families_fit(reader: ChangelogReader, of: StateVersion, settings: StateStoreSettings) -> None:
    fitting = changelog_version(column_families=settings.column_families, unique_ids=of.unique_id is not None)
    if reader.header.version != fitting:
        raise UsageError(
            f"is of version {reader.header.version}, which the settings' column families do not go with",
            operation="load",
            subject=reader.path.name,
            hint="set `column_families` as the operator has it: transformWithState and joins of format 3 use them",
        )


def _beyond_repair(target: StateVersion, reason: str) -> SnapshotRepairError:
    return SnapshotRepairError(reason, operation="load", subject=f"version {target}")
