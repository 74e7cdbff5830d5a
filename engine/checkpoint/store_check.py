"""Check one state store: every committed version of it, each file once (design 0005, K1 to K7)."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError
from engine.checkpoint.errors import lacks
from engine.checkpoint.file_check import (
    ChangelogReport,
    check_changelog_file,
    check_hidden,
    check_sst,
    check_zip_file,
    find_misfit,
)
from engine.checkpoint.findings import MISFIT_HINT, CheckLevel, Finding, Findings, StoreChecked
from engine.errors import DamagedError, EngineError, TargetError
from engine.local.scratch import scratch_dir
from engine.runtime import Runtime
from engine.state.changelogs import KeyCounts, count_store
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.compression import Codec
from engine.state.files import StateFileManager, resolve_with
from engine.state.load import StateLoader
from engine.state.local_files import working_dir
from engine.state.query import StreamingCheckpoint
from engine.state.settings import StateStoreSettings
from index.errors import (
    DamagedChangelogError,
    FileChecksumError,
    FormatError,
    LineageError,
    StateMetadataError,
    VersionMissingError,
)
from index.spark import names
from index.spark.changelog import changelog_version, check_leads_back
from index.spark.checkpoint import StoreId
from index.spark.checksums import FILE_CHECKSUM_BYTES_MAX, hadoop_checksum_name
from index.spark.lineage import LINEAGE_BYTES_MAX, Lineage, Present, Resolution, resolve
from index.spark.metadata import NOT_COUNTED, StateMetadata

T = TypeVar("T")

_LINEAGE_FULL: Final = 0.8
# How often a damaged store is looked at while its query goes on.
_LOOKS_MAX: Final = 3
# The endings of what Spark lists in a directory of state.
_SUFFIXES: Final = (".zip", ".changelog", names.CHECKSUM_SUFFIX)


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to check."""

    id: StoreId
    # What the commit log says of it, ascending, and how the changelog of each is compressed.
    versions: tuple[names.StateVersion, ...]
    codecs: tuple[Codec, ...]
    # As the newest of them has it.
    settings: StateStoreSettings
    newest_batch: int


async def check_store(root: CheckpointDir, work: StoreWork, *, scratch: Path | None, level: CheckLevel) -> StoreChecked:
    """Check a store: on a local directory in place; else each file is fetched once, to a private directory.

    What a running query has deleted or overwritten since the logs were read is not damage: if it has gone on, a store
    that is damaged is looked at again, as the logs have it by then, until it is whole or twice damaged in the same way.

    Raises:
        StoreError: The store did not answer.
        TargetError: The scratch directory cannot be written.
    """
    checkpoint = StreamingCheckpoint(root)
    before: set[str] = set()
    checked = await _look_at(root, work, scratch, level)
    for _ in range(_LOOKS_MAX - 1):
        damaged = {finding.path for finding in checked.findings if finding.kind == "damage"}
        if damaged == before or (now := await _as_of_now(checkpoint, work)) == work:
            break
        before, work = damaged, now
        checked = await _look_at(root, work, scratch, level)
    return checked


async def _look_at(root: CheckpointDir, work: StoreWork, scratch: Path | None, level: CheckLevel) -> StoreChecked:
    where = scratch
    try:
        async with scratch_dir(scratch, "tidemark-check-", may_stay=True) as private:
            where = private
            return await _StoreCheck(root, work, private, level).run()
    except OSError as error:
        hint, subject = "choose another scratch directory, or free space in it", str(error.filename or where or "")
        raise TargetError(error.strerror or str(error), operation="check", subject=subject, hint=hint) from error


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


class _ChecksumAlteredError(Exception):
    """A file that proves itself does not fit its `.crc`."""


class _StoreCheck:
    def __init__(self, root: CheckpointDir, work: StoreWork, private: Path, level: CheckLevel) -> None:
        self._checkpoint = StreamingCheckpoint(root)
        self._directory = root.child(work.id.path)
        self._work, self._private, self._level = work, private, level
        self._here = self._directory.local_root or private / "files"
        self._is_local = self._directory.local_root is not None
        self._codecs = dict(zip((of.version for of in work.versions), work.codecs, strict=True))
        # Of every file by its path, once they are listed; in bytes.
        self._sizes: dict[str, int] = {}
        # What was read; None for what is damaged.
        self._changelogs: dict[names.StateVersion, ChangelogReport | None] = {}
        self._zips: dict[names.StateVersion, StateMetadata | None] = {}
        self._row_snapshots: dict[names.StateVersion, ChangelogReport | None] = {}
        self._is_hdfs = work.versions[-1].is_hdfs
        # Zips and changelogs that are compared with their `.crc`.
        self._summed: set[str] = set()
        self._findings = Findings(work.id.path)
        # Of what was read, as in `StoreChecked`.
        self._counts = {"files": 0, "size_bytes": 0, "ssts": 0, "blocks": 0}

    async def run(self) -> StoreChecked:
        if not self._is_local:
            for subdirectory in (names.SSTS, names.LOGS):
                await run_blocking((self._here / subdirectory).mkdir, parents=True, exist_ok=True)
        for place in ("", names.SSTS, names.LOGS):
            statuses = await self._directory.list(place)
            self._sizes |= {status.path: status.size_bytes for status in statuses if not status.is_directory}
        present = Present.of_names(self._sizes, is_hdfs=self._is_hdfs)
        resolutions, failed, gone = await self._resolve_all(present)
        # Also what is beside what is replayed, such as the changelog of a version that is a snapshot.
        chained = {
            of for found in resolutions for of in (found.target, found.base, *found.changelogs) if of is not None
        }
        for of in sorted(chained & present.changelogs):
            await self._changelog(of)
        for of in sorted(chained & present.snapshots):
            if of.is_hdfs:
                self._row_snapshots[of] = await self._read_rows(names.snapshot_name(of), of)
                continue
            self._zips[of] = await self._read_summed(
                names.snapshot_name(of),
                of,
                lambda path, checksum: check_zip_file(path, checksum=checksum).metadata,
                proves_itself=True,
            )
        self._note_missing(failed)
        for resolution in resolutions:
            self._check_chain(resolution)
        await self._check_shared()
        keys = -1
        newest = max(resolutions, key=lambda found: found.target.version, default=None)
        if newest is not None:
            self._check_lineage(newest)
            if self._level == "full" and newest.target == self._work.versions[-1] and not self._findings.damaged:
                keys = await self._load(newest)
        await self._check_names()
        findings = tuple(self._findings.found)
        return StoreChecked(findings=findings, versions=len(resolutions), versions_gone=gone, keys=keys, **self._counts)

    async def _changelog(self, of: names.StateVersion) -> ChangelogReport | None:
        """Read a changelog whole, once (K4); None if it is damaged."""
        if of not in self._changelogs:
            name = names.changelog_name(of)
            report = self._changelogs[of] = await self._read_rows(name, of)
            families = self._work.settings.column_families
            fitting = changelog_version(column_families=families, unique_ids=of.unique_id is not None)
            if report is not None and report.header.version != fitting:
                message = f"is of version {report.header.version}, and the operator's are of version {fitting}"
                error = DamagedChangelogError(message, hint="another store's file was copied to this name")
                self._findings.damage(name, error, "K4")
        return self._changelogs[of]

    async def _read_rows(self, name: str, of: names.StateVersion) -> ChangelogReport | None:
        """Read a changelog, or a snapshot in its form; None if it is damaged."""
        # Before every commit record it is compressed as the oldest of these.
        codec: Codec = self._codecs.get(of.version) or self._codecs[min(self._codecs)]
        return await self._read_summed(
            name,
            of,
            lambda path, checksum: check_changelog_file(path, codec, of, checksum=checksum),
            proves_itself=codec == "lz4",
        )

    async def _read_summed(
        self, name: str, of: names.StateVersion, read: Callable[[Path, bytes | None], T], *, proves_itself: bool
    ) -> T | None:
        """Read a file with its checksum; of a file that proves itself, the checksum is what was altered."""
        checksum = await self._checksum(name, of)
        misfit = ""

        def read_and_compare(path: Path) -> T:
            nonlocal misfit
            if of.unique_id is None:
                misfit = find_misfit(path, checksum) if checksum is not None else ""
                return read(path, None)
            try:
                return read(path, checksum)
            except FileChecksumError:
                if not proves_itself:
                    raise
                read(path, None)
                raise _ChecksumAlteredError from None

        found = await self._read(name, read_and_compare, "K4")
        if found is not None and misfit:
            self._findings.warn(names.checksum_name(name), misfit, MISFIT_HINT, "K4")
        return found

    async def _checksum(self, name: str, of: names.StateVersion) -> bytes | None:
        path = names.checksum_name(name)
        if path not in self._sizes:
            return None
        if of.unique_id is not None:  # without an id it may be of a file that was overwritten (0004, N5)
            self._summed.add(name)
        try:
            return await self._directory.read(path, size_bytes_max=FILE_CHECKSUM_BYTES_MAX)
        except BlobNotFoundError:
            return None
        except DamagedError:
            return b""  # larger than any: its reader refuses it

    async def _check_shared(self) -> None:
        """Check every SST and log that a needed snapshot names: there, of its size, and sound (K3, K4)."""
        seen: set[str] = set()
        for of, state in sorted(self._zips.items(), key=itemgetter(0), reverse=True):
            if state is None:
                continue
            for file in state.files:
                path = file.path
                seen.add(path)
                size_bytes = self._sizes.get(path)
                if size_bytes is None:
                    hint = "it was deleted while it was needed; restore the checkpoint, or an older batch"
                    error = DamagedError(f"is not there, and snapshot {of} names it", operation="check", hint=hint)
                    self._findings.damage(path, error, "K1")
                elif size_bytes != file.size_bytes:
                    message = f"has {size_bytes} bytes, and snapshot {of} says {file.size_bytes}"
                    hint = "it was cut short or replaced; take it from a backup, or restore the checkpoint"
                    self._findings.damage(path, DamagedError(message, operation="check", hint=hint), "K4")
        for path in sorted(seen - self._findings.damaged if self._level == "full" else ()):
            if not path.endswith(".sst"):
                await self._read(path, lambda _: None, "K4")
            elif (report := await self._read(path, check_sst, "K3")) is not None:
                self._counts["ssts"] += 1
                self._counts["blocks"] += report.blocks
                if report.unchecked:
                    message = f"{report.unchecked}: it cannot be decided whether it is whole"
                    self._findings.warn(path, message, "only a comparison with a backup can show it", "K3")

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
            self._findings.damage(names.checksum_name(path), error, "K4")
            return None
        except (DamagedError, FormatError) as error:
            self._findings.damage(path, error, rule)
            return None
        except (BlobNotFoundError, BlobCorruptError) as error:
            self._findings.damage(path, DamagedError(f"cannot be had: {error}", operation="check"), rule)
            return None
        if self._is_local:
            await self._check_hidden(path)
        return found

    async def _check_hidden(self, path: str) -> None:
        """Check that Hadoop would read the file (K2). If its bytes were proved, the hidden file is the wrong one."""
        proved = path.endswith(".sst") or path in self._summed
        for name in (path, names.checksum_name(path)):
            try:
                if name == path or name in self._sizes:
                    await run_blocking(check_hidden, self._here / name)
            except (FileChecksumError, DamagedError) as error:
                if not proved:
                    self._findings.damage(name, error, "K2")
                    continue
                parent, _, last = name.rpartition("/")
                hidden = f"{parent}/{hadoop_checksum_name(last)}" if parent else hadoop_checksum_name(last)
                self._findings.damage(hidden, error, "K2", note=f"{last} itself is sound: delete the hidden file")

    async def _resolve_all(
        self, present: Present
    ) -> tuple[list[Resolution], list[tuple[names.StateVersion, FormatError]], int]:
        """Resolve each committed version; list those that fail, and count those that retention has taken (K1)."""
        newest = self._work.versions[-1]
        is_current = newest.version == self._work.newest_batch + 1
        found: list[Resolution] = []
        failed: list[tuple[names.StateVersion, FormatError]] = []
        gone = 0
        headers: dict[names.StateVersion, Lineage] = {}

        async def read_header(of: names.StateVersion) -> Lineage:
            report = await self._changelog(of)
            if report is None:
                raise _UnreadableError
            headers[of] = report.header.lineage
            return report.header.lineage

        # The newest first: its headers lead to most of the others.
        for of in reversed(self._work.versions):
            if present.lacks_by_retention(of) and not (of == newest and is_current):
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

    def _note_missing(self, failed: list[tuple[names.StateVersion, FormatError]]) -> None:
        """Note versions that cannot be put together, by the file that is missing (K1); all headers have been read."""
        missing: dict[str, list[tuple[names.StateVersion, FormatError]]] = {}
        for of, error in failed:
            built_on = self._built_on(of)
            if built_on is None:
                # The directory, if the error names no file.
                words = (word.strip(",;:") for word in str(error).split())
                path = next(
                    (word for word in words if (n := names.parse_state_name(word)) and n.kind == "changelog"), ""
                )
                missing.setdefault(path, []).append((of, error))
            else:
                message = f"says that {self._work.id} is {of}, which is not there, and what came after it was built on "
                message += str(built_on)
                hint = "the file was altered, or is of another history; take it from a backup"
                path = f"commits/{of.version - 1}"
                self._findings.found.append(Finding(kind="damage", path=path, message=message, hint=hint, rule="K1"))
        for path, failures in missing.items():
            versions = sorted(of.version for of, _ in failures)
            which = f"batch {versions[0] - 1} needs it"
            if len(versions) > 1:
                which = f"{len(versions)} committed batches from {versions[0] - 1} to {versions[-1] - 1} need it"
            self._findings.damage(path, failures[0][1], "K1", note=f"{which} (commits/{versions[-1] - 1})")

    def _built_on(self, of: names.StateVersion) -> names.StateVersion | None:
        """Find another attempt at this version that later versions were built on."""
        for report in self._changelogs.values():
            for item in () if report is None else report.header.lineage:
                if item.version == of.version and item.unique_id != of.unique_id:
                    return names.StateVersion(item.version, item.unique_id)
        return None

    def _check_chain(self, resolution: Resolution) -> None:
        """Check that each changelog was written on what it is replayed on (0004, R8)."""
        before = (resolution.base or names.StateVersion(0), *resolution.changelogs)
        for of, below in zip(resolution.changelogs, before, strict=False):
            report = self._changelogs.get(of)
            if report is None:
                continue
            try:
                check_leads_back(report.header, of, below)
            except LineageError as error:
                self._findings.damage(names.changelog_name(of), error, "K1")

    def _check_lineage(self, newest: Resolution) -> None:
        """Warn if the newest header is near its limit (K6)."""
        report = self._changelogs.get(newest.target)
        if report is None or report.lineage_bytes <= _LINEAGE_FULL * LINEAGE_BYTES_MAX or newest.base == newest.target:
            return
        each = report.lineage_bytes / max(1, len(report.header.lineage))
        left = int((LINEAGE_BYTES_MAX - report.lineage_bytes) / each)
        message = f"its lineage takes {report.lineage_bytes} of {LINEAGE_BYTES_MAX} bytes: commits fail after about "
        hint = "find out why no snapshot is uploaded: maintenance may be off, or fail"
        self._findings.warn(names.changelog_name(newest.target), f"{message}{left} more without a snapshot", hint, "K6")

    async def _load(self, newest: Resolution) -> int:
        """Load the newest version, and count its base (K5)."""
        files = self._directory if self._is_local else await CheckpointDir.open(self._here)
        name = names.snapshot_name(newest.base) if newest.base is not None else names.changelog_name(newest.target)
        try:
            keys, doubt = await self._count(files, newest)
        except (EngineError, FormatError) as error:
            if lacks(error):
                raise
            self._findings.damage(name, error, "K5")
            return -1
        finally:
            if not self._is_local:
                await files.close()
        if doubt:
            hint = "compare the rows with a backup; what a snapshot counts, a query goes on to count from"
            self._findings.warn(name, doubt, hint, "K5")
        return keys

    async def _count(self, files: StateFiles, newest: Resolution) -> tuple[int, str]:
        """Build a version, every file of which has passed on its own.

        Returns how many keys its base has, internal ones not counted, 0 without one; and what is doubtful about them.
        """
        # Another snapshot in the place of the one that is to be looked at would prove nothing.
        settings = msgspec.structs.replace(self._work.settings, snapshot_repair=False)
        runtime = Runtime()
        async with working_dir(self._private / "work") as place:
            loader = StateLoader(StateFileManager(files, settings, runtime=runtime), place, runtime)
            keys, doubt = 0, ""
            metadata = None if newest.rocksdb_snapshot is None else self._zips[newest.rocksdb_snapshot]
            if newest.row_snapshot is not None and (rows := self._row_snapshots[newest.row_snapshot]) is not None:
                # It says no number, but has each key once.
                metadata = StateMetadata(num_keys=rows.records)
            if newest.base is not None and metadata is not None:
                state, _ = await loader.load(newest.base, {}, read_only=True)
                try:
                    is_internal = state.families.is_internal if settings.column_families else None
                    counted = await run_blocking(count_store, state.db, is_internal)
                finally:
                    await run_blocking(state.db.close)
                doubt = check_counts(metadata, counted, subject=names.snapshot_name(newest.base))
                keys = counted.keys
            if newest.changelogs:
                state, _ = await loader.load(newest.target, {}, read_only=True)
                await run_blocking(state.db.close)
            return keys, doubt

    async def _check_names(self) -> None:
        """Warn of what another history left, and of names that Spark's listing fails on (K7)."""
        newest_batch = self._work.newest_batch
        every = {path: names.parse_state_name(path) for path in self._sizes}
        parsed = {path: None if n is None or n.of.is_hdfs != self._is_hdfs else n for path, n in every.items()}
        if any(name is not None and name.of.version > newest_batch + 1 for name in parsed.values()):
            # The query may have gone on since the logs were read: what counts is what it had committed by the listing.
            newest_batch = max((newest_batch, *await self._checkpoint.committed_batches()))
        for path, name in parsed.items():
            if name is None:
                if self._is_refused(path):
                    message = "has a name that Spark does not write, with an ending of Spark's"
                    hint = "nothing of Spark's wrote it, so it may be moved away: Spark's listing of the directory "
                    hint += "fails on it, and its maintenance stops"
                    self._findings.warn(path, message, hint, "K7")
            # A batch that runs writes the version after that of the newest committed one.
            elif name.of.version > newest_batch + 2 and not name.checksum:
                message = f"is of version {name.of.version}, and the newest committed batch is {newest_batch}"
                hint = "unless a query runs here, another history left it: Spark's maintenance would count from it, "
                hint += "and delete what the committed versions need; restore the checkpoint to an empty directory"
                self._findings.warn(path, message, hint, "K7")

    def _is_refused(self, path: str) -> bool:
        """Return whether Spark's listing of the directory fails on a name that it does not write."""
        if not self._is_hdfs:
            return path.endswith(_SUFFIXES) and not path.rpartition("/")[2].startswith(".")
        # Whatever its ending is, what is before the only dot is read as a number.
        stem, dot, ending = path.partition(".")
        return bool(stem and dot) and "." not in ending and "/" not in path and not stem.isdecimal()


def check_counts(metadata: StateMetadata, counted: KeyCounts, *, subject: str) -> str:
    """Compare what was counted with what a snapshot says, each number on its own; one that it lacks is as it should be.

    Returns what is doubtful: more keys than it says, as a query may have miscounted, and nothing is missing.
    StateMetadataError: there are fewer.
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
