"""Check one state store: every committed version of it, each file once (design 0005, K1 and K3 to K7)."""

import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError
from engine.checkpoint.check.contents import StoreContents, StoreWork
from engine.checkpoint.errors import lacks
from engine.checkpoint.file_check import check_zip_file
from engine.checkpoint.findings import DELETE, CheckLevel, Finding, StoreChecked
from engine.clock import SystemRuntime
from engine.errors import EngineError, TargetError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.load import StateLoader
from engine.state.local_files import WorkingDir, shared_path
from engine.state.query import StreamingCheckpoint
from engine.state.replay import KeyCounts, count_store
from engine.state.settings import StateStoreSettings
from engine.state.sources import StateFiles, resolve_with
from engine.state.zips import ZIP_BYTES_MAX
from index.errors import FormatError, LineageError, StateMetadataError, VersionMissingError
from index.spark.changelog import check_leads_back
from index.spark.checkpoint import StoreId
from index.spark.lineage import LINEAGE_BYTES_MAX, Lineage, Present, Resolution, resolve
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.names import (
    CHECKSUM_SUFFIX,
    LOGS,
    SSTS,
    StateFileName,
    StateVersion,
    by_version,
    changelog_name,
    is_shared_path,
    parse_state_name,
    snapshot_name,
)

_LINEAGE_FULL: Final = 0.8
# How often a damaged store is looked at while its query goes on.
_LOOKS_MAX: Final = 3
# The endings of what Spark lists in a directory of state.
_SUFFIXES: Final = (".zip", ".changelog", CHECKSUM_SUFFIX)


async def check_store(root: CheckpointDir, work: StoreWork, *, scratch: Path | None, level: CheckLevel) -> StoreChecked:
    """Check a store.

    On a local directory files are read in place; from another store each is fetched once, to a private
    directory that is gone when this ends.

    What a running query has deleted or overwritten since the logs were read is not damage: if it has gone on, a store
    that is damaged is looked at again, as the logs have it by then, until it is whole or twice damaged in the same way.

    Args:
        root: Of the checkpoint.
        work: The store.
        scratch: Where private directories are made; None: where this machine keeps such files.
        level: `quick` leaves out the content of SSTs, and the load.

    Raises:
        StoreError: The store did not answer.
        TargetError: The scratch directory cannot be written.
    """
    checkpoint = StreamingCheckpoint(root)
    before: set[str] = set()
    checked = await _look_at(root, checkpoint, work, scratch, level)
    for _ in range(_LOOKS_MAX - 1):
        damaged = {finding.path for finding in checked.findings if finding.kind == "damage"}
        if damaged == before or (now := await _as_of_now(checkpoint, work)) == work:
            break
        before, work = damaged, now
        checked = await _look_at(root, checkpoint, work, scratch, level)
    return checked


async def _look_at(
    root: CheckpointDir, checkpoint: StreamingCheckpoint, work: StoreWork, scratch: Path | None, level: CheckLevel
) -> StoreChecked:
    private = None
    try:
        private = Path(await run_blocking(tempfile.mkdtemp, prefix="tidemark-check-", dir=scratch))
        return await _StoreCheck(root.child(work.id.path), checkpoint, work, private, level).run()
    except OSError as error:
        hint = "choose another scratch directory, or free space in it"
        subject = str(error.filename or private or scratch or "")
        raise TargetError(error.strerror or str(error), operation="check", subject=subject, hint=hint) from error
    finally:
        if private is not None:
            await run_blocking(shutil.rmtree, private, ignore_errors=True)


async def _as_of_now(checkpoint: StreamingCheckpoint, work: StoreWork) -> StoreWork:
    """Return the store as the logs have it now: without what was purged meanwhile, and with the newest batch."""
    batches = await checkpoint.committed_batches()
    kept = {of: codec for of, codec in zip(work.versions, work.codecs, strict=True) if of.version - 1 in batches}
    newest = max(batches, default=-1)
    if newest > work.newest_batch:
        try:
            query = await checkpoint.at(newest)
        except (EngineError, FormatError):
            return work  # the check of the logs reports it
        kept |= {store.at: store.settings.codec for store in query.stores if store.id == work.id}
    if not kept:
        return work
    return msgspec.structs.replace(
        work, versions=tuple(kept), codecs=tuple(kept.values()), newest_batch=max(newest, work.newest_batch)
    )


class _UnreadableError(Exception):
    """A changelog cannot be read; there is a finding about it."""


class _StoreCheck:
    """One store, while it is checked."""

    def __init__(
        self,
        directory: CheckpointDir,
        checkpoint: StreamingCheckpoint,
        work: StoreWork,
        private: Path,
        level: CheckLevel,
    ) -> None:
        self._directory = directory
        self._checkpoint = checkpoint
        self._work = work
        self._private = private
        self._level = level
        self._here = directory.local_root or private / "files"
        self._is_local = directory.local_root is not None
        self._contents = StoreContents(directory, work, self._here, level)

    async def run(self) -> StoreChecked:
        if not self._is_local:
            for subdirectory in (SSTS, LOGS):
                await run_blocking((self._here / subdirectory).mkdir, parents=True, exist_ok=True)
        statuses = await self._directory.list()
        shared = [*await self._directory.list(SSTS), *await self._directory.list(LOGS)]
        self._contents.sizes = {
            status.path: status.size_bytes for status in (*statuses, *shared) if not status.is_directory
        }
        present = Present.of_names(self._contents.sizes)
        resolutions, failed, gone = await self._resolve_all(present)
        # Also what is beside what is replayed, such as the changelog of a version that is a snapshot.
        chained = {
            of for found in resolutions for of in (found.target, found.base, *found.changelogs) if of is not None
        }
        for of in sorted(chained & present.changelogs, key=by_version):
            await self._contents.changelog(of)
        for of in sorted(chained & present.snapshots, key=by_version):
            await self._contents.zip(of)
        self._note_missing(failed)
        for resolution in resolutions:
            self._check_chain(resolution)
        await self._contents.check_shared()
        keys = -1
        newest = max(resolutions, key=lambda found: found.target.version, default=None)
        if newest is not None:
            self._check_lineage(newest)
            if self._level == "full" and newest.target == self._work.versions[-1] and not self._contents.damaged:
                keys = await self._load(newest)
        needed = {name for of in chained for name in (changelog_name(of), snapshot_name(of))}
        committed = {of.version: of for of in self._work.versions}
        store = self._work.id.path
        newest_batch = self._work.newest_batch
        if any(
            (name := parse_state_name(path)) and name.of.version > newest_batch + 1 for path in self._contents.sizes
        ):
            # The query may have gone on since the logs were read: what counts is what it had committed by the listing.
            newest_batch = max(newest_batch, *await self._checkpoint.committed_batches())
        self._contents.findings += _find_waste(
            store, statuses, needed=needed, committed=committed, newest_batch=newest_batch
        )
        times = [status.modified_at_ms for status in statuses if status.name.endswith(".zip")]
        named = await self._named({status.path for status in shared}, present)
        self._contents.findings += _find_unnamed(store, shared, named, max(times, default=0))
        return StoreChecked(
            path=store,
            findings=tuple(self._contents.findings),
            versions=len(resolutions),
            versions_gone=gone,
            keys=keys,
            **self._contents.counts,
        )

    # ------------------------------------------------------------------ which files

    async def _resolve_all(
        self, present: Present
    ) -> tuple[list[Resolution], list[tuple[StateVersion, FormatError]], int]:
        """Resolve each committed version; list those that fail, and count those that retention has taken (K1)."""
        oldest = min((of.version for of in present.snapshots | present.changelogs), default=None)
        newest = self._work.versions[-1]
        is_current = newest.version == self._work.newest_batch + 1
        found: list[Resolution] = []
        failed: list[tuple[StateVersion, FormatError]] = []
        gone = 0
        headers: dict[StateVersion, Lineage] = {}

        async def read_header(of: StateVersion) -> Lineage:
            report = await self._contents.changelog(of)
            if report is None:
                raise _UnreadableError
            headers[of] = report.lineage
            return report.lineage

        # The newest first: its headers lead to most of the others.
        for of in reversed(self._work.versions):
            if (oldest is None or of.version < oldest) and not (of == newest and is_current):
                gone += 1
                continue
            ask = partial(resolve, of.version, of.unique_id)
            try:
                found.append(await resolve_with(ask, present.with_headers(headers), read_header))
            except _UnreadableError:
                continue
            except (VersionMissingError, LineageError) as error:
                failed.append((of, error))
        return found, failed, gone

    def _note_missing(self, failed: list[tuple[StateVersion, FormatError]]) -> None:
        """Note versions that cannot be put together, by the file that is missing (K1); all headers have been read."""
        missing: dict[str, list[tuple[StateVersion, FormatError]]] = {}
        for of, error in failed:
            built_on = self._built_on(of)
            if built_on is None:
                missing.setdefault(self._missing_path(error), []).append((of, error))
            else:
                self._contents.findings.append(_other_id(self._work.id, of, built_on))
        for path, failures in missing.items():
            versions = sorted(of.version for of, _ in failures)
            which = f"batch {versions[0] - 1} needs it"
            if len(versions) > 1:
                which = f"{len(versions)} committed batches from {versions[0] - 1} to {versions[-1] - 1} need it"
            self._contents.note(path, failures[0][1], "K1", note=f"{which} (commits/{versions[-1] - 1})")

    def _built_on(self, of: StateVersion) -> StateVersion | None:
        """Find another attempt at this version that later versions were built on."""
        for report in self._contents.changelogs.values():
            for item in () if report is None else report.lineage:
                if item.version == of.version and item.unique_id != of.unique_id:
                    return StateVersion(item.version, item.unique_id)
        return None

    def _missing_path(self, error: FormatError) -> str:
        """Find the file that an error is about; "", the directory, if it names none."""
        words = (word.strip(",;:") for word in str(error).split())
        return next((word for word in words if (name := parse_state_name(word)) and name.kind == "changelog"), "")

    async def _named(self, shared: set[str], present: Present) -> set[str]:
        """Collect the paths that any snapshot names, needed or not; zips are read until every path is named."""
        if None in self._contents.zips.values():
            return shared  # what a damaged snapshot names is not known
        named = {
            shared_path(file.stored_name)
            for state in self._contents.zips.values()
            if state is not None
            for file in (*state.sst_files, *state.log_files)
        }
        for of in sorted(present.snapshots - set(self._contents.zips), key=by_version, reverse=True):
            if shared <= named:
                break
            name = snapshot_name(of)
            try:
                data = await self._directory.read(name, size_bytes_max=ZIP_BYTES_MAX)
                state = (await run_blocking(check_zip_file, data, checksum=None, subject=name)).metadata
            except TargetError:
                raise
            except (EngineError, FormatError, BlobNotFoundError):
                # Not needed. What it names is not known: nothing is called waste then.
                return shared | named
            named |= {shared_path(f.stored_name) for f in (*state.sst_files, *state.log_files)}
        return named

    # ------------------------------------------------------------------ what they make together

    def _check_chain(self, resolution: Resolution) -> None:
        """Check that each changelog was written on what it is replayed on (0004, R8)."""
        before = (resolution.base or StateVersion(0), *resolution.changelogs)
        for of, below in zip(resolution.changelogs, before, strict=False):
            report = self._contents.changelogs.get(of)
            if report is None:
                continue
            try:
                check_leads_back(report.header, of, below)
            except LineageError as error:
                self._contents.note(changelog_name(of), error, "K1")

    def _check_lineage(self, newest: Resolution) -> None:
        """Warn if the newest header is near its limit (K6)."""
        report = self._contents.changelogs.get(newest.target)
        if report is None or report.lineage_bytes <= _LINEAGE_FULL * LINEAGE_BYTES_MAX or newest.base == newest.target:
            return
        each = report.lineage_bytes / max(1, len(report.lineage))
        left = int((LINEAGE_BYTES_MAX - report.lineage_bytes) / each)
        self._contents.findings.append(
            Finding(
                kind="warning",
                path=f"{self._work.id.path}/{changelog_name(newest.target)}",
                message=f"its lineage takes {report.lineage_bytes} of {LINEAGE_BYTES_MAX} bytes: commits fail after "
                f"about {left} more without a snapshot",
                hint="find out why no snapshot is uploaded: maintenance may be off, or fail",
                rule="K6",
            )
        )

    async def _load(self, newest: Resolution) -> int:
        """Load the newest version, and count its base (K5)."""
        files = self._directory if self._is_local else await CheckpointDir.open(self._here)
        metadata = None if newest.base is None else self._contents.zips[newest.base]
        name = snapshot_name(newest.base) if newest.base is not None else changelog_name(newest.target)
        try:
            keys, doubt = await _check_load(files, newest, metadata, self._work.settings, self._private / "work")
        except (EngineError, FormatError) as error:
            if lacks(error):
                raise
            self._contents.note(name, error, "K5")
            return -1
        finally:
            if not self._is_local:
                await files.close()
        if doubt:
            hint = "compare the rows with a backup; what a snapshot counts, a query goes on to count from"
            path = f"{self._work.id.path}/{name}"
            self._contents.findings.append(Finding(kind="warning", path=path, message=doubt, hint=hint, rule="K5"))
        return keys


def _other_id(store: StoreId, of: StateVersion, built_on: StateVersion) -> Finding:
    return Finding(
        kind="damage",
        path=f"commits/{of.version - 1}",
        message=f"says that {store} is {of}, which is not there, and what came after it was built on {built_on}",
        hint="the file was altered, or is of another history; take it from a backup",
        rule="K1",
    )


async def _check_load(
    files: StateFiles,
    resolution: Resolution,
    metadata: StateMetadata | None,
    settings: StateStoreSettings,
    directory: Path,
) -> tuple[int, str]:
    """Build a version and compare the keys of its base with what the snapshot says of them.

    Args:
        files: Of the store; every one that the version takes has passed on its own.
        resolution: What the version is made of.
        metadata: Of its base; None if it starts from nothing.
        settings: Of the store.
        directory: A working directory, private to this call. It takes the size of the version.

    Returns:
        How many keys the base has, internal ones not counted, 0 without one; and what is doubtful about their number.

    Raises:
        StateMetadataError: The snapshot says that there are more.
        EngineError, FormatError: The version does not load, whatever its files say one by one.
    """
    # Another snapshot in the place of the one that is to be looked at would prove nothing.
    settings = msgspec.structs.replace(settings, snapshot_repair=False)
    runtime = SystemRuntime()
    manager = StateFileManager(files, settings, runtime=runtime)
    place = await run_blocking(WorkingDir.open, directory)
    try:
        loader = StateLoader(manager, place, runtime)
        keys, doubt = 0, ""
        if resolution.base is not None and metadata is not None:
            state, _ = await loader.load(resolution.base, {}, read_only=True)
            try:
                is_internal = state.families.is_internal if settings.column_families else None
                counted = await run_blocking(count_store, state.db, is_internal)
            finally:
                await run_blocking(state.db.close)
            doubt = check_counts(metadata, counted, subject=snapshot_name(resolution.base))
            keys = counted.keys
        if resolution.changelogs:
            state, _ = await loader.load(resolution.target, {}, read_only=True)
            await run_blocking(state.db.close)
        return keys, doubt
    finally:
        await run_blocking(place.close)


def check_counts(metadata: StateMetadata, counted: KeyCounts, *, subject: str) -> str:
    """Compare what was counted with what a snapshot says, each number on its own; one that it lacks is as it should be.

    Returns:
        Where there are more keys than it says, that; a query may have miscounted, and nothing is missing.

    Raises:
        StateMetadataError: There are fewer.
    """
    internal = metadata.num_internal_keys
    keys_least = keys_most = counted.keys
    if internal == NOT_COUNTED:
        # Spark 4.0 does not say which column families are internal, nor whether it counted them.
        keys_least, keys_most = 0, counted.keys + counted.internal_keys
    found = [
        (said, there, said > most)
        for said, least, most, there in (
            (metadata.num_keys, keys_least, keys_most, f"keys, and it has {keys_most}"),
            (internal, counted.internal_keys, counted.internal_keys, f"internal ones, and has {counted.internal_keys}"),
        )
        if said != NOT_COUNTED and not least <= said <= most
    ]
    message = "says that it has " + "; ".join(f"{said} {there}" for said, there, _ in found)
    if any(is_lacking for _, _, is_lacking in found):
        hint = "rows are missing, though every block is what was written; restore an older batch"
        raise StateMetadataError(message, subject=subject, hint=hint)
    return message if found else ""


def _find_waste(
    store: str,
    statuses: Iterable[FileStatus],
    *,
    needed: Collection[str],
    committed: Mapping[int, StateVersion],
    newest_batch: int,
) -> Iterator[Finding]:
    """Find names that no committed version needs and no retention explains (K7).

    Args:
        store: Path of the directory.
        statuses: What is directly in it.
        needed: Names of zips and changelogs that committed versions take.
        committed: Every version that is in the commit log, by its number.
        newest_batch: The newest batch that was committed when the directory had been listed. Files of the next one are
            its attempts, and of what comes before the oldest committed one, retention has the say.
    """
    files = {status.name: status for status in statuses if not status.is_directory}
    oldest = min(committed, default=0)
    # A batch that runs writes the version after that of the newest committed one.
    running = newest_batch + 2
    for name, status in files.items():
        path = f"{store}/{name}"
        parsed = parse_state_name(name)
        if parsed is None:
            if not name.startswith("."):
                yield _foreign(path, status)
            continue
        if parsed.checksum:
            # One is there before its file, and may outlive it for a moment: that of a committed version says nothing.
            if name.removesuffix(CHECKSUM_SUFFIX) not in files and _is_lost(parsed, committed):
                yield _waste(path, "is the checksum of a file that is not there", status)
            continue
        if name in needed or parsed.of.version < oldest or parsed.of.version == running:
            continue
        if parsed.of.version > running:
            yield Finding(
                kind="warning",
                path=path,
                message=f"is of version {parsed.of.version}, and the newest committed batch is {newest_batch}",
                hint="unless a query runs here, another history left it: Spark's maintenance would count from it, and "
                "delete what the committed versions need; restore the checkpoint to an empty directory",
                rule="K7",
            )
        elif _is_lost(parsed, committed):
            yield _waste(path, "is of an attempt that was not committed", status)


def _find_unnamed(
    store: str, shared: Iterable[FileStatus], named: Collection[str], newest_snapshot_ms: int
) -> Iterator[Finding]:
    """Find SSTs and logs that no snapshot names (K7).

    Args:
        store: Path of the directory.
        shared: What is in `SSTs` and `logs`.
        named: Paths that a snapshot names, needed or not.
        newest_snapshot_ms: When the newest zip came. What is younger may be of a snapshot that is on its way.
    """
    for status in shared:
        if status.is_directory or status.path in named or status.name.startswith("."):
            continue
        if not is_shared_path(status.path):
            yield _foreign(f"{store}/{status.path}", status)
        elif status.modified_at_ms < newest_snapshot_ms:
            yield _waste(f"{store}/{status.path}", "is named by no snapshot", status)


def _is_lost(parsed: StateFileName, committed: Mapping[int, StateVersion]) -> bool:
    of = committed.get(parsed.of.version)
    return of is not None and of != parsed.of


def _foreign(path: str, status: FileStatus) -> Finding:
    if path.endswith(_SUFFIXES):
        return Finding(
            kind="warning",
            path=path,
            message="has a name that Spark does not write, with an ending of Spark's",
            hint="nothing of Spark's wrote it, so it may be moved away: Spark's listing of the directory fails on it, "
            "and its maintenance stops",
            rule="K7",
        )
    return _waste(path, "has a name that Spark does not write", status)


def _waste(path: str, message: str, status: FileStatus) -> Finding:
    return Finding(kind="waste", path=path, message=message, hint=DELETE, rule="K7", size_bytes=status.size_bytes)
