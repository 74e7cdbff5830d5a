"""Checks one state store: every committed version of it, each file once (design 0005, K1 and K3 to K7)."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError
from blobstore.local_files import run_blocking
from engine.checkpoint.check_hidden import check_hidden
from engine.checkpoint.check_load import check_load
from engine.checkpoint.check_waste import find_unnamed, find_waste
from engine.checkpoint.errors import lacks
from engine.checkpoint.findings import CheckLevel, Finding, StoreChecked, damage
from engine.checkpoint.sst_check import check_sst
from engine.checkpoint.state_file_check import ChangelogReport, check_changelog_file, check_zip_file
from engine.errors import DamagedError, EngineError, TargetError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import DirectoryStateFiles
from engine.state.local_files import shared_path
from engine.state.settings import CodecName, StateStoreSettings
from engine.state.streaming_checkpoint import StreamingCheckpoint
from engine.state.zips import ZIP_BYTES_MAX
from index.changelog import changelog_version, check_leads_back
from index.errors import DamagedChangelogError, FileChecksumError, FormatError, LineageError, VersionMissingError
from index.file_checksum import FILE_CHECKSUM_BYTES_MAX
from index.hadoop_checksum import hadoop_checksum_name
from index.lineage import LINEAGE_BYTES_MAX, HeaderNeeded, Present, Resolution, resolve
from index.picture import StoreId
from index.state_metadata import StateMetadata, StoredFile
from index.state_names import (
    LOGS,
    SSTS,
    StateVersion,
    by_version,
    changelog_name,
    checksum_name,
    parse_state_name,
    snapshot_name,
)

_LINEAGE_FULL: Final = 0.8
# How often a damaged store is looked at while its query goes on.
_LOOKS_MAX: Final = 3

T = TypeVar("T")


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to check."""

    id: StoreId
    # What the commit log says of it, ascending, and how the changelog of each is compressed.
    versions: tuple[StateVersion, ...]
    codecs: tuple[CodecName, ...]
    # As the newest of them has it.
    settings: StateStoreSettings
    newest_batch: int


async def check_store(root: CheckpointDir, work: StoreWork, *, scratch: Path | None, level: CheckLevel) -> StoreChecked:
    """Check a store.

    On a local directory files are read where they stand; from another store each is fetched once, to a private
    directory that is gone when this ends.

    What a running query has deleted or overwritten since the logs were read is no damage: if it has gone on, a store
    that is damaged is looked at again, as the logs have it by then, until it is whole or twice damaged in the same way.

    Args:
        root: Of the checkpoint.
        work: The store.
        scratch: Where private directories are made; None: where this machine keeps such files.
        level: `quick` leaves out what stands in SSTs, and the load.

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
        hint = "choose another scratch directory, or make room in it"
        subject = str(error.filename or private or scratch or "")
        raise TargetError(error.strerror or str(error), operation="check", subject=subject, hint=hint) from error
    finally:
        if private is not None:
            await run_blocking(shutil.rmtree, private, ignore_errors=True)


async def _as_of_now(checkpoint: StreamingCheckpoint, work: StoreWork) -> StoreWork:
    """The same store as the logs have it now: without what was purged meanwhile, and with the newest batch."""
    batches = await checkpoint.committed_batches()
    kept = {of: codec for of, codec in zip(work.versions, work.codecs, strict=True) if of.version - 1 in batches}
    newest = max(batches, default=-1)
    if newest > work.newest_batch:
        try:
            query = await checkpoint.at(newest)
        except (EngineError, FormatError):
            return work  # for whoever reads the logs to say
        kept |= {store.at: store.settings.codec for store in query.stores if store.id == work.id}
    if not kept:
        return work
    return msgspec.structs.replace(
        work, versions=tuple(kept), codecs=tuple(kept.values()), newest_batch=max(newest, work.newest_batch)
    )


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
        self._codecs = dict(zip((of.version for of in work.versions), work.codecs, strict=True))
        self._findings: list[Finding] = []
        self._damaged: set[str] = set()
        # Zips and changelogs that are compared with their `.crc`.
        self._summed: set[str] = set()
        self._changelogs: dict[StateVersion, ChangelogReport | None] = {}
        self._zips: dict[StateVersion, StateMetadata | None] = {}
        self._sizes: dict[str, int] = {}
        self._counts = {"files": 0, "size_bytes": 0, "ssts": 0, "blocks": 0}

    async def run(self) -> StoreChecked:
        if not self._is_local:
            for room in (SSTS, LOGS):
                await run_blocking((self._here / room).mkdir, parents=True, exist_ok=True)
        statuses = await self._directory.list()
        shared = [*await self._directory.list(SSTS), *await self._directory.list(LOGS)]
        self._sizes = {status.path: status.size_bytes for status in (*statuses, *shared) if not status.is_directory}
        present = Present.of_names(self._sizes)
        resolutions, failed, gone = await self._resolve_all(present)
        # What stands beside what is replayed, such as the changelog of a version that is a snapshot, too.
        chained = {
            of for found in resolutions for of in (found.target, found.base, *found.changelogs) if of is not None
        }
        for of in sorted(chained & present.changelogs, key=by_version):
            await self._changelog(of)
        for of in sorted(chained & present.snapshots, key=by_version):
            await self._zip(of)
        self._note_missing(failed)
        for resolution in resolutions:
            self._check_chain(resolution)
        await self._check_shared()
        keys = -1
        newest = max(resolutions, key=lambda found: found.target.version, default=None)
        if newest is not None:
            self._check_lineage(newest)
            if self._level == "full" and newest.target == self._work.versions[-1] and not self._damaged:
                keys = await self._load(newest)
        needed = {name for of in chained for name in (changelog_name(of), snapshot_name(of))}
        committed = {of.version: of for of in self._work.versions}
        store = self._work.id.path
        newest_batch = self._work.newest_batch
        if any((name := parse_state_name(path)) and name.of.version > newest_batch + 1 for path in self._sizes):
            # The query may have gone on since the logs were read: what counts is what it had committed by the listing.
            newest_batch = max(newest_batch, *await self._checkpoint.committed_batches())
        self._findings += find_waste(store, statuses, needed=needed, committed=committed, newest_batch=newest_batch)
        times = [status.modified_at_ms for status in statuses if status.name.endswith(".zip")]
        named = await self._named({status.path for status in shared}, present)
        self._findings += find_unnamed(store, shared, named, max(times, default=0))
        return StoreChecked(
            path=store,
            findings=tuple(self._findings),
            versions=len(resolutions),
            versions_gone=gone,
            keys=keys,
            **self._counts,
        )

    # ------------------------------------------------------------------ which files

    async def _resolve_all(
        self, present: Present
    ) -> tuple[list[Resolution], list[tuple[StateVersion, FormatError]], int]:
        """What each committed version is made of, which are of nothing, and how many retention has taken (K1)."""
        oldest = min((of.version for of in present.snapshots | present.changelogs), default=None)
        newest = self._work.versions[-1]
        is_current = newest.version == self._work.newest_batch + 1
        found: list[Resolution] = []
        failed: list[tuple[StateVersion, FormatError]] = []
        gone = 0
        # The newest first: its headers tell most.
        for of in reversed(self._work.versions):
            if (oldest is None or of.version < oldest) and not (of == newest and is_current):
                gone += 1
                continue
            try:
                while isinstance(answer := resolve(of.version, of.unique_id, present), HeaderNeeded):
                    report = await self._changelog(answer.changelog)
                    if report is None:
                        break  # the finding is about the changelog
                    present = present.with_header(answer.changelog, report.lineage)
                else:
                    found.append(answer)
            except (VersionMissingError, LineageError) as error:
                failed.append((of, error))
        return found, failed, gone

    def _note_missing(self, failed: list[tuple[StateVersion, FormatError]]) -> None:
        """What cannot be put together, by the file that is missing (K1); every header that there is has been read."""
        missing: dict[str, list[tuple[StateVersion, FormatError]]] = {}
        for of, error in failed:
            built_on = self._built_on(of)
            if built_on is None:
                missing.setdefault(self._missing_path(error), []).append((of, error))
            else:
                self._findings.append(_other_id(self._work.id, of, built_on))
        for path, failures in missing.items():
            versions = sorted(of.version for of, _ in failures)
            which = f"batch {versions[0] - 1} needs it"
            if len(versions) > 1:
                which = f"{len(versions)} committed batches from {versions[0] - 1} to {versions[-1] - 1} need it"
            self._note(path, failures[0][1], "K1", note=f"{which} (commits/{versions[-1] - 1})")

    def _built_on(self, of: StateVersion) -> StateVersion | None:
        """What later versions say that they were built on, where that is another attempt at this version."""
        for report in self._changelogs.values():
            for item in () if report is None else report.lineage:
                if item.version == of.version and item.unique_id != of.unique_id:
                    return StateVersion(item.version, item.unique_id)
        return None

    def _missing_path(self, error: FormatError) -> str:
        """The file that an error is about, or the directory if it names none."""
        words = (word.strip(",;:") for word in str(error).split())
        return next((word for word in words if (name := parse_state_name(word)) and name.kind == "changelog"), "")

    async def _named(self, shared: set[str], present: Present) -> set[str]:
        """The paths that any snapshot names, needed or not; zips are read until nothing is left to be named."""
        if None in self._zips.values():
            return shared  # what a damaged snapshot names, nobody can say
        named = {
            shared_path(file.stored_name)
            for state in self._zips.values()
            if state is not None
            for file in (*state.sst_files, *state.log_files)
        }
        for of in sorted(present.snapshots - set(self._zips), key=by_version, reverse=True):
            if shared <= named:
                break
            name = snapshot_name(of)
            try:
                data = await self._directory.read(name, size_bytes_max=ZIP_BYTES_MAX)
                state = (await run_blocking(check_zip_file, data, checksum=None, subject=name)).metadata
            except TargetError:
                raise
            except (EngineError, FormatError, BlobNotFoundError, InvalidRequestError):
                # Nobody needs it. What it names, nobody can say: nothing is called waste then.
                return shared | named
            named |= {shared_path(f.stored_name) for f in (*state.sst_files, *state.log_files)}
        return named

    # ------------------------------------------------------------------ their contents

    async def _changelog(self, of: StateVersion) -> ChangelogReport | None:
        """A changelog, read whole, once (K4); None if it is damaged."""
        if of not in self._changelogs:
            name = changelog_name(of)
            checksum = await self._checksum(name, of)
            codec = self._codec(of)

            def read(path: Path) -> ChangelogReport:
                try:
                    return check_changelog_file(path, codec, of, checksum=checksum)
                except FileChecksumError:
                    # Of a file that proves itself, the checksum is what was altered.
                    if codec == "lz4":
                        check_changelog_file(path, codec, of, checksum=None)
                        raise _ChecksumAlteredError from None
                    raise

            self._changelogs[of] = report = await self._read(name, read, "K4")
            fitting = changelog_version(
                column_families=self._work.settings.column_families, unique_ids=of.unique_id is not None
            )
            if report is not None and report.header.version != fitting:
                message = f"is of version {report.header.version}, and the operator's are of version {fitting}"
                self._note(
                    name, DamagedChangelogError(message, hint="another store's file was copied to this name"), "K4"
                )
        return self._changelogs[of]

    async def _zip(self, of: StateVersion) -> StateMetadata | None:
        """What a snapshot's zip names, all of it read once (K4); None if it is damaged."""
        if of not in self._zips:
            name = snapshot_name(of)
            checksum = await self._checksum(name, of)

            def read(path: Path) -> StateMetadata:
                try:
                    return check_zip_file(path, checksum=checksum).metadata
                except FileChecksumError:
                    check_zip_file(path, checksum=None)
                    raise _ChecksumAlteredError from None

            self._zips[of] = await self._read(name, read, "K4")
        return self._zips[of]

    async def _checksum(self, name: str, of: StateVersion) -> bytes | None:
        """The `.crc` beside a file; beside a name without an id it may be of a file that was overwritten (0004, N5)."""
        path = checksum_name(name)
        if of.unique_id is None or path not in self._sizes:
            return None
        self._summed.add(name)
        try:
            return await self._directory.read(path, size_bytes_max=FILE_CHECKSUM_BYTES_MAX)
        except BlobNotFoundError:
            return None
        except InvalidRequestError:
            return b""  # larger than any: it is refused by whoever reads it

    async def _check_shared(self) -> None:
        """Every SST and log that a needed snapshot names: there, of its size, and sound (K3, K4)."""
        seen: set[str] = set()
        for of, state in sorted(self._zips.items(), key=lambda item: by_version(item[0]), reverse=True):
            if state is None:
                continue
            for file in (*state.sst_files, *state.log_files):
                path = shared_path(file.stored_name)
                seen.add(path)
                self._check_there(path, of, file)
        for path in sorted(seen):
            if path not in self._damaged:
                await self._check_sst(path)

    def _check_there(self, path: str, of: StateVersion, file: StoredFile) -> None:
        size_bytes = self._sizes.get(path)
        if size_bytes is None:
            hint = "it was deleted while it was needed; restore the checkpoint, or an older batch"
            self._note(
                path, DamagedError(f"is not there, and snapshot {of} names it", operation="check", hint=hint), "K1"
            )
        elif size_bytes != file.size_bytes:
            self._note(path, _size_error(of, file, size_bytes), "K4")

    async def _check_sst(self, path: str) -> None:
        if self._level == "quick":
            return
        if not path.endswith(".sst"):
            await self._read(path, lambda _: None, "K4")
            return
        report = await self._read(path, check_sst, "K3")
        if report is None:
            return
        self._counts["ssts"] += 1
        self._counts["blocks"] += report.blocks
        if not report.checked:
            self._findings.append(
                Finding(
                    kind="warning",
                    path=f"{self._work.id.path}/{path}",
                    message=f"{report.reason}: nobody can tell whether it is whole",
                    hint="only a comparison with a backup can tell",
                    rule="K3",
                )
            )

    async def _read(self, path: str, read: Callable[[Path], T], rule: str) -> T | None:
        """Have a file here, and read it; None if it is damaged, which is noted."""
        place = self._here / path
        try:
            if not self._is_local:
                await self._directory.fetch(path, place)
            found = await run_blocking(read, place)
            self._counts["files"] += 1
            self._counts["size_bytes"] += self._sizes.get(path, 0)
        except _ChecksumAlteredError:
            hint = "delete it, if a backup has the same file beside it: without one, the file is read unverified"
            error = FileChecksumError("is not the checksum of its file, which is sound", hint=hint)
            self._note(checksum_name(path), error, "K4")
            return None
        except (DamagedError, FormatError) as error:
            self._note(path, error, rule)
            return None
        except (BlobNotFoundError, BlobCorruptError) as error:
            self._note(path, DamagedError(f"cannot be had: {error}", operation="check"), rule)
            return None
        if self._is_local:
            await self._check_hidden(path, place)
        return found

    async def _check_hidden(self, path: str, place: Path) -> None:
        """That Hadoop would give the file (K2). If each of its bytes was proved, it is the hidden one that is wrong."""
        proved = path.endswith(".sst") or path in self._summed
        for name, file in ((path, place), (checksum_name(path), place.with_name(checksum_name(place.name)))):
            try:
                if name == path or name in self._sizes:
                    await run_blocking(check_hidden, file)
            except (FileChecksumError, DamagedError) as error:
                if not proved:
                    self._note(name, error, "K2")
                    continue
                room, _, last = name.rpartition("/")
                hidden = f"{room}/{hadoop_checksum_name(last)}" if room else hadoop_checksum_name(last)
                self._note(hidden, error, "K2", note=f"{last} itself is sound: delete the hidden file")

    def _check_chain(self, resolution: Resolution) -> None:
        """That each changelog was written on what it is replayed on (0004, R8)."""
        before = (resolution.base or StateVersion(0), *resolution.changelogs)
        for of, below in zip(resolution.changelogs, before, strict=False):
            report = self._changelogs.get(of)
            if report is None:
                continue
            try:
                check_leads_back(report.header, of, below)
            except LineageError as error:
                self._note(changelog_name(of), error, "K1")

    def _check_lineage(self, newest: Resolution) -> None:
        """How near the newest header is to its limit (K6)."""
        report = self._changelogs.get(newest.target)
        if report is None or report.lineage_bytes <= _LINEAGE_FULL * LINEAGE_BYTES_MAX or newest.base == newest.target:
            return
        each = report.lineage_bytes / max(1, len(report.lineage))
        left = int((LINEAGE_BYTES_MAX - report.lineage_bytes) / each)
        self._findings.append(
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
        files = DirectoryStateFiles(self._directory if self._is_local else await CheckpointDir.open(self._here))
        metadata = None if newest.base is None else self._zips[newest.base]
        name = snapshot_name(newest.base) if newest.base is not None else changelog_name(newest.target)
        try:
            keys, doubt = await check_load(files, newest, metadata, self._work.settings, self._private / "work")
        except (EngineError, FormatError) as error:
            if lacks(error):
                raise
            self._note(name, error, "K5")
            return -1
        finally:
            if not self._is_local:
                await files.close()
        if doubt:
            hint = "compare the rows with a backup; what a snapshot counts, a query goes on to count from"
            path = f"{self._work.id.path}/{name}"
            self._findings.append(Finding(kind="warning", path=path, message=doubt, hint=hint, rule="K5"))
        return keys

    # ------------------------------------------------------------------ what was found

    def _codec(self, of: StateVersion) -> CodecName:
        """How a changelog is compressed; one that is older than every commit record, as the oldest of these."""
        codecs: Mapping[int, CodecName] = self._codecs
        return codecs.get(of.version) or codecs[min(codecs)]

    def _note(self, path: str, error: EngineError | FormatError, rule: str, *, note: str = "") -> None:
        if path in self._damaged:
            return
        self._damaged.add(path)
        store = self._work.id.path
        self._findings.append(damage(f"{store}/{path}" if path else store, error, rule, note=note))


class _ChecksumAlteredError(Exception):
    """A file that proves itself does not fit its `.crc`."""


def _other_id(store: StoreId, of: StateVersion, built_on: StateVersion) -> Finding:
    return Finding(
        kind="damage",
        path=f"commits/{of.version - 1}",
        message=f"says that {store} is {of}, which is not there, and what came after it was built on {built_on}",
        hint="the file was altered, or is of another history; take it from a backup",
        rule="K1",
    )


def _size_error(of: StateVersion, file: StoredFile, size_bytes: int) -> DamagedError:
    return DamagedError(
        f"has {size_bytes} bytes, and snapshot {of} says {file.size_bytes}",
        operation="check",
        hint="it was cut short or replaced; take it from a backup, or restore the checkpoint",
    )
