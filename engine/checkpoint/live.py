"""Choose what a backup takes of a running query: of each state store (design 0005, P3) and of its own files (P7).

On a local file system the files are read in place, and nothing is made there. From another store those that are wanted
are fetched into a scratch directory, each with one GET (P6).
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from blobstore.concurrency import run_all, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.backup.backup import BackupSource
from engine.checkpoint.errors import error_context, lacks, with_subject
from engine.checkpoint.file_check import check_changelog_file, check_hidden, check_sst, check_zip_file, find_misfit
from engine.checkpoint.findings import MISFIT_HINT, Findings
from engine.errors import DamagedError, EngineError, UnsafeSourceError, restated
from engine.local.scan import changed_error, is_unchanged, local_file, refusing, special_error
from engine.local.scratch import scratch_dir
from engine.state.changelogs import open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import resolve_with
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, QueryAt, StoreAt
from index.errors import FileChecksumError, FormatError, UnknownFormatError, UnsafeNameError, VersionMissingError
from index.plan.backup import PlannedFile
from index.snapshot.contents import files_of
from index.snapshot.dir_diff import LocalDir, LocalFile, local_dir_of
from index.snapshot.keys import check_file_name
from index.snapshot.model import FileIndex, FileMetadata, FilePath, SnapshotIndex, StoreReference, UniqueId
from index.spark import names
from index.spark.checkpoint import (
    QUERY_ID,
    SOURCES,
    STATE,
    StoreId,
    check_entry,
    is_entry,
    newest_entries,
    take_query_files,
)
from index.spark.checksums import FILE_CHECKSUM_BYTES_MAX
from index.spark.lineage import Lineage, Present, Resolution, resolve
from index.spark.metadata import StateMetadata
from index.spark.query_logs import SCHEMAS, decode_commit, decode_offsets, decode_operator, decode_query_id
from index.spark.retention import select_state_files
from index.spark.schema import decode_state_schema

# Files of one store that are checked at once: each is a thread that reads and sums up.
_CHECKS_MAX: Final = 2
_METADATA: Final = "_metadata"
# The store of an id that no store of the backup has: the batch cannot be restored from it.
_NO_STORE: Final = ("",)
# After this Hadoop has put its checksum beside a file.
_HIDDEN_LATER_S: Final = 0.2
FETCHES_MAX: Final = 8
# What a file may have that is fetched by its name alone.
FETCHED_BYTES_MAX: Final = 64 * 1024 * 1024
_MODE: Final = 0o644

Result = TypeVar("Result")


class FilesInPlace:
    """Files below one directory of a checkpoint on a file system of this machine. Paths are components from there."""

    # Whether `directory` is the checkpoint itself.
    is_lasting = True
    # Number of requests made of a store so far.
    requests = 0

    def __init__(self, directory: CheckpointDir) -> None:
        # What errors call it.
        self.location = directory.location
        # Where `bring` leaves files to be read. Resolved: a reader below it follows no links.
        self.directory = (directory.local_root or Path()).resolve()
        self._seen: dict[FilePath, LocalFile] = {}

    async def list(self, below: Iterable[str] = ("",)) -> dict[FilePath, LocalFile]:
        """List every file in these directories, if they are there, and below, without Hadoop's and left-overs (P7).

        Of a store it costs a list for each. What was brought before is brought again. UnsafeSourceError: what has a
        name that is kept is neither a file nor a directory.
        """
        found: dict[FilePath, LocalFile] = {}
        for path in below:
            try:
                found |= await run_blocking(lambda parts: dict(_walk(self.directory, parts)), _components(path))
            except RecursionError as error:
                message, subject = "nests too deep to be listed", f"{self.location}/{path}"
                raise UnsafeSourceError(message, operation="backup", subject=subject) from error
        self._seen |= found
        return found

    async def bring(self, paths: Collection[FilePath]) -> dict[FilePath, LocalFile]:
        """Bring files to where they can be read, and return their stat there. Of a store it costs a GET for each.

        UnsafeSourceError: one is not there any more, or not what was listed.
        """
        new = [path for path in paths if path not in self._seen]
        self._seen |= await run_blocking(lambda: {path: self._stat(path) for path in new})
        return {path: self._seen[path] for path in paths}

    async def find_changed(self, paths: Collection[FilePath], *, gone: bool = True) -> FilePath | None:
        """Return the first of these files that is another than was listed or brought, or, if that counts, gone."""

        def is_changed(path: FilePath) -> bool:
            if not self.directory.joinpath(*path).exists():
                return gone
            try:
                return not is_unchanged(self._seen[path], self._stat(path))
            except UnsafeSourceError:
                return True

        return await run_blocking(lambda: next(filter(is_changed, paths), None))

    def _stat(self, path: FilePath) -> LocalFile:
        at = self.directory.joinpath(*path)
        with refusing(at):
            status = at.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise special_error(at, status.st_mode)
        return local_file(path[-1], status)


class FetchedFiles:
    """Files on another store, as `FilesInPlace`."""

    is_lasting = False

    def __init__(self, source: CheckpointDir, scratch: Path) -> None:
        self.location = source.location
        self.directory = scratch.resolve()
        self.requests = 0
        self._source = source
        self._listed: dict[FilePath, LocalFile] = {}
        self._brought: dict[FilePath, LocalFile] = {}
        self._below: tuple[str, ...] = ()

    async def list(self, below: Iterable[str] = ("",)) -> dict[FilePath, LocalFile]:
        self._below = tuple(below)
        self._brought = {}
        self._listed = await self._list()
        return self._listed

    async def _list(self) -> dict[FilePath, LocalFile]:
        found: dict[FilePath, LocalFile] = {}
        for below in self._below:
            statuses = await self._source.walk(below)
            self.requests += 1 + len(statuses) // 1000
            for status in statuses:
                path = _components(status.path)
                if path and all(map(_is_kept, path)):
                    metadata = FileMetadata(status.size_bytes, _MODE, status.modified_at_ms * 1_000_000, 0, "", "")
                    found[path] = LocalFile(name=path[-1], metadata=metadata, device=0, inode=0, changed_at_ns=0)
        return found

    async def bring(self, paths: Collection[FilePath]) -> dict[FilePath, LocalFile]:
        new = [path for path in paths if path not in self._brought]
        await run_all(self._fetch, new, in_flight_max=FETCHES_MAX)
        return {path: self._brought[path] for path in paths}

    async def _fetch(self, path: FilePath) -> None:
        target = self.directory.joinpath(*path)
        listed = self._listed.get(path)
        await run_blocking(lambda: target.parent.mkdir(parents=True, exist_ok=True))
        size_bytes, data = FETCHED_BYTES_MAX, None
        if listed is not None:
            size_bytes, modified_at_ms = listed.metadata.size_bytes, listed.metadata.modified_at_ns // 1_000_000
            data = self._source.known("/".join(path), size_bytes, modified_at_ms)
        if data is not None:
            await run_blocking(target.write_bytes, data)
        else:
            self.requests += 1
            try:
                got_bytes = await self._source.fetch("/".join(path), target, size_bytes_max=size_bytes)
            except BlobNotFoundError as error:
                message = "is not there, or vanished meanwhile"
                raise UnsafeSourceError(message, operation="backup", subject=self._subject(path)) from error
            except DamagedError as error:
                raise changed_error(self._subject(path)) from error
            if listed is not None and got_bytes != size_bytes:
                raise changed_error(self._subject(path))
        self._brought[path] = await run_blocking(_settle, target, listed)

    def _subject(self, path: FilePath) -> str:
        return f"{self.location}/{'/'.join(path)}"

    async def find_changed(self, paths: Collection[FilePath], *, gone: bool = True) -> FilePath | None:
        now = await self._list()
        for path in paths:
            listed = self._listed.get(path)
            if listed is not None and (gone if path not in now else now[path].metadata != listed.metadata):
                return path
        return None


LiveFiles = FilesInPlace | FetchedFiles


@asynccontextmanager
async def live_files(directory: CheckpointDir, scratch: Path | None = None) -> AsyncIterator[LiveFiles]:
    """Open the files of a directory of a checkpoint for a block; what has to be fetched is put below `scratch`."""
    if directory.local_root is not None:
        yield FilesInPlace(directory)
        return
    async with scratch_dir(scratch) as made:
        yield FetchedFiles(directory, made)


def read_small(path: Path, size_bytes_max: int) -> bytes:
    """Read a file that can be held in memory. UnsafeSourceError: it is gone. DamagedError: it is larger. Blocks."""
    with refusing(path), path.open("rb") as source:
        data = source.read(size_bytes_max + 1)
    if len(data) > size_bytes_max:
        raise DamagedError(f"has more than {size_bytes_max} bytes", operation="backup", subject=str(path))
    return data


def _settle(target: Path, listed: LocalFile | None) -> LocalFile:
    """Give a fetched file the time that it has in the checkpoint (design 0005, R8), and look at it."""
    if listed is not None:
        at_ns = listed.metadata.modified_at_ns
        os.utime(target, ns=(at_ns, at_ns))
    target.chmod(_MODE)
    return local_file(target.name, target.lstat())


def _walk(root: Path, path: FilePath) -> Iterator[tuple[FilePath, LocalFile]]:
    """Yield the regular files below a directory that others write to: what vanishes meanwhile was not there."""
    at = root.joinpath(*path)
    with refusing(at):
        try:
            names = [name for name in os.listdir(at) if _is_kept(name)]  # noqa: PTH208  (names, not paths)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            try:
                status = (at / name).lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield (*path, name), local_file(name, status)
            elif stat.S_ISDIR(status.st_mode):
                yield from _walk(root, (*path, name))
            else:
                error = special_error(at / name, status.st_mode)
                raise restated(error, subject=error.subject, hint="put a file or a directory in its place")


def _components(path: str) -> FilePath:
    return tuple(path.split("/")) if path else ()


def _is_kept(name: str) -> bool:
    """Return whether a name may be Spark's: not hidden, not a left-over, and one that a backup can hold."""
    if name.startswith(".") or name.endswith(".tmp"):
        return False
    try:
        check_file_name(name)
    except UnsafeNameError:
        return False
    return True


def sst_bytes(files: Mapping[FilePath, LocalFile] | Mapping[FilePath, FileIndex]) -> int:
    """Return the bytes in SSTs; of the HDFS-backed provider those in snapshots."""
    sizes = ((path[0], file.metadata.size_bytes) for path, file in files.items())
    return sum(size_bytes for top, size_bytes in sizes if top == names.SSTS or top.endswith(".snapshot"))


class _LiveSource(BackupSource):
    def __init__(self, files: LiveFiles, *, despite_damage: bool, distrust: bool, root: str = "") -> None:
        # What is wrong with what was taken over all the same (P5).
        self.findings = Findings(root)
        self._despite_damage = despite_damage
        # Whether every file is to be checked, also what the previous backup has (P5a).
        self._distrust = distrust
        self._files = files
        self.directory = files.directory
        self.is_lasting = files.is_lasting

    @property
    def requests(self) -> int:
        return self._files.requests

    def _path(self, path: FilePath) -> Path:
        return self._files.directory.joinpath(*path)

    def _take_over(self, path: FilePath, error: DamagedError | FormatError) -> None:
        """Note what is wrong with a file, if it is to be taken over all the same; else raise it."""
        if not self._despite_damage or isinstance(error, UnknownFormatError | VersionMissingError) or lacks(error):
            raise error
        self.findings.damage("/".join(path), error, "P5")

    def _named(self, path: FilePath) -> AbstractContextManager[None]:
        """Let errors of a block name a file as it is in the checkpoint."""
        return error_context(self._files.location, "/".join(path), private=self._files.directory)


class StoreToBackUp(msgspec.Struct, frozen=True, kw_only=True):
    """One state store at the version to back up, and what the newest backup has of it."""

    store: StoreAt
    base: StoreReference | None
    # The versions of older batches to take too, newest first.
    older: tuple[names.StateVersion, ...] = ()
    # Nothing is believed of the newest backup, which was taken despite damage: every file is read and checked.
    distrust: bool = False

    @property
    def id(self) -> StoreId:
        return self.store.id


class LiveStore(_LiveSource):
    """The files of one store that a version takes. Made for one backup."""

    def __init__(self, files: LiveFiles, work: StoreToBackUp, *, despite_damage: bool) -> None:
        store = work.store
        super().__init__(files, despite_damage=despite_damage, distrust=work.distrust, root=store.id.path)
        # SSTs that could not be checked, and why.
        self.unchecked: list[str] = []
        # In SSTs, of what the version takes and of what the previous backup has: changelogs come and go.
        self.sst_bytes = 0
        self.base_sst_bytes = 0
        self._store = store
        self._older = work.older
        # Of the version, and of the older ones, newest first.
        self._resolutions: tuple[Resolution, ...] = (Resolution(store.at, None),)
        # All that the version takes, as it is in the checkpoint.
        self._chosen: dict[FilePath, LocalFile] = {}
        # What of it the previous backup has under a name that is given once.
        self._known: dict[FilePath, FileIndex] = {}
        self._brought: dict[FilePath, LocalFile] = {}
        self._reads_mutable = False

    @property
    def base_version(self) -> int:
        """Version of the oldest snapshot that it has; 0 if it begins with nothing. Known once it was looked at."""
        return min(0 if found.base is None else found.base.version for found in self._resolutions)

    @property
    @override
    def lineage(self) -> Lineage:
        """The versions with ids that it grew from (design 0004, R6). Known once it was looked at."""
        items = {item.version: item for found in reversed(self._resolutions) for item in found.lineage}
        return tuple(items[version] for version in sorted(items) if version < self._store.at.version)

    @override
    async def look(self, previous: SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        async with self._unless_changed():
            try:
                await self.choose(previous)
            except FileChecksumError:
                # One attempt may upload a zip twice (P4), and its checksum after it: what was read may be of both.
                await self.choose(previous)
            to_read = [path for path in self._chosen if path not in self._known]
            self._brought |= await self._files.bring(to_read)
            return self._tree()

    async def choose(
        self, previous: SnapshotIndex | None
    ) -> tuple[dict[FilePath, LocalFile], dict[FilePath, FileIndex]]:
        """Find out what the versions are made of: all that they take, and what of that `previous` has for certain (P4).

        Costs a list, on another store than a file system a GET of each zip, and of a changelog if its header decides.
        VersionMissingError: a file that they take is not there.
        """
        self._brought = {}
        listed = await self._files.list()
        at = self._store.at
        present = Present.of_names((path[0] for path in listed if len(path) == 1), is_hdfs=at.is_hdfs)
        self._resolutions = ()
        self._chosen = {}
        snapshots: dict[names.StateVersion | None, StateMetadata | None] = {None: None}
        for of in (at, *(of for of in self._older if not present.lacks_by_retention(of))):
            found = await resolve_with(partial(resolve, of.version, of.unique_id), present, self._read_header)
            self._resolutions += (found,)
            base = found.rocksdb_snapshot
            if base is not None and base not in snapshots:
                snapshots[base] = await self._metadata(base, listed)
            self._chosen |= select_state_files(found, snapshots[base], listed)
        before: Mapping[FilePath, FileIndex] = {} if previous is None else dict(files_of(previous.dir))
        self.sst_bytes, self.base_sst_bytes = sst_bytes(self._chosen), sst_bytes(before)
        self._known = {
            path: entry
            for path, file in self._chosen.items()
            if _has_name_once(path)
            and (entry := before.get(path)) is not None
            and entry.metadata.size_bytes == file.metadata.size_bytes
        }
        return self._chosen, self._known

    async def _read_header(self, of: names.StateVersion) -> Lineage:
        path = (names.changelog_name(of),)
        self._brought |= await self._files.bring([path])
        local = self._path(path)

        def read() -> Lineage:
            with self._named(path), refusing(local), open_changelog(local, self._store.settings.codec, of) as changelog:
                return changelog.header.lineage

        return await run_blocking(read)

    async def _metadata(self, base: names.StateVersion, listed: Mapping[FilePath, LocalFile]) -> StateMetadata:
        path = (names.snapshot_name(base),)
        checksum = await self._checksum(path, base, listed)
        self._brought |= await self._files.bring([path])
        with self._named(path):
            try:
                zipped = await run_blocking(lambda: check_zip_file(self._path(path), checksum=checksum))
            except FileChecksumError as error:
                self._take_over(path, error)
                zipped = await run_blocking(lambda: check_zip_file(self._path(path), checksum=None))
        return zipped.metadata

    async def _checksum(
        self, path: FilePath, of: names.StateVersion, listed: Mapping[FilePath, LocalFile]
    ) -> bytes | None:
        """Read the checksum of a zip or a changelog; None if it has none.

        One of a name without an id may be that of a file that was overwritten since (0004, section 10).
        """
        name = (names.checksum_name(path[0]),)
        if of.unique_id is None or name not in listed:
            return None
        self._brought |= await self._files.bring([name])
        return await run_blocking(read_small, self._path(name), FILE_CHECKSUM_BYTES_MAX)

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        self._reads_mutable = any(not _has_name_once(item.path) for item in planned)
        # A pack that is filled again may take what is known.
        missing = [item.path for item in planned if item.path not in self._brought]
        self._brought |= await self._files.bring(missing)
        added = [item.path for item in planned if item.expected is None]
        async with self._unless_changed():
            await run_all(self._check, list(self._chosen) if self._distrust else added, in_flight_max=_CHECKS_MAX)
        return self._tree() if missing and not self.is_lasting else None

    async def _check(self, path: FilePath) -> None:
        """Refuse what is not whole, unless it is to be taken over (P5)."""
        try:
            await self._check_whole(path)
        except (DamagedError, FormatError) as error:
            self._take_over(path, error)

    async def _check_whole(self, path: FilePath) -> None:
        """Raise if a file is not whole. The zip was read to know what to take, and sizes are what it says."""
        if path[0] == names.SSTS:
            with self._named(path):
                report = await run_blocking(check_sst, self._path(path))
            if report.unchecked:
                self.unchecked.append(f"{self._store.id.path}/{'/'.join(path)}: {report.unchecked}")
            return
        parsed = names.parse_state_name(path[0])
        if parsed is None:
            return
        if parsed.checksum:
            # Not all that it says is compared with something.
            with self._named(path):
                await self._check_hidden(path)
            return
        checksum = await self._checksum(path, parsed.of, self._chosen)
        codec = self._store.settings.codec
        with self._named(path):
            if parsed.kind == "changelog" or parsed.of.is_hdfs:
                await run_blocking(lambda: check_changelog_file(self._path(path), codec, parsed.of, checksum=checksum))
            if checksum is None:
                await self._check_hidden(path)
                await self._compare_checksum((names.checksum_name(path[0]),), path)

    async def _compare_checksum(self, name: FilePath, path: FilePath) -> None:
        """Warn of a checksum that is not that of its file, which has a name without an id (K4)."""
        if name in self._chosen:
            self._brought |= await self._files.bring([name])
            try:
                checksum = await run_blocking(read_small, self._path(name), FILE_CHECKSUM_BYTES_MAX)
            except DamagedError:
                checksum = b""  # larger than any: it is the checksum of nothing
            if misfit := await run_blocking(find_misfit, self._path(path), checksum):
                self.findings.warn("/".join(name), misfit, MISFIT_HINT, "K4")

    async def _check_hidden(self, path: FilePath) -> None:
        """Compare a file that nothing else proves with Hadoop's checksum, which is renamed into place after it."""
        if not self.is_lasting:
            return
        try:
            await run_blocking(check_hidden, self._path(path))
        except FileChecksumError:
            await asyncio.sleep(_HIDDEN_LATER_S)
            await run_blocking(check_hidden, self._path(path))

    @override
    async def check_held_still(self) -> None:
        """Check that all that was read was there at one time; names that are given once need no second look.

        With ids a file that is gone by now is none that another one has taken the place of: the query goes on, and a
        first backup may take longer than Spark keeps a zip.
        """
        if self._reads_mutable or self._files.is_lasting:
            rest = [path for path in self._chosen if not _has_name_once(path)]
            await self._check_same(rest, gone=self._store.at.unique_id is None)

    async def _check_same(self, paths: Sequence[FilePath], *, gone: bool = True) -> None:
        if (changed := await self._files.find_changed(paths, gone=gone)) is not None:
            raise changed_error(f"{self._files.location}/{'/'.join(changed)}")

    @asynccontextmanager
    async def _unless_changed(self) -> AsyncIterator[None]:
        """Let an error of a block about a file that the query has taken away meanwhile be another one (P6)."""
        try:
            yield
        except (EngineError, FormatError) as error:
            await self._check_same([path for path in (*self._brought, *self._chosen) if path not in self._known])
            raise with_subject(error, self._files.location, private=self._files.directory) from error.__cause__

    def _tree(self) -> LocalDir:
        files = dict(self._chosen)
        for path, entry in self._known.items():
            # What is not here is as the previous backup has it.
            here = self._brought.get(path) or (files[path] if self.is_lasting else None)
            file = here or msgspec.structs.replace(files[path], metadata=entry.metadata)
            files[path] = msgspec.structs.replace(file, sst=entry.sst, blake3=entry.blake3, crc32=entry.crc32)
        for path in self._chosen.keys() - self._known.keys():
            files[path] = self._brought[path]
        return local_dir_of(files)


class QueryFiles(_LiveSource):
    """The files of a query at a batch. They are small, and all are read. Made for one backup, after the stores.

    `at` is its newest batch, as its logs were when its stores were taken; `base_version_max` the greatest version that
    a store of it begins with, 0 being nothing, None if the query has no state; `lineages` has, for every store of it,
    the versions with ids that it grew from.
    """

    def __init__(
        self,
        files: LiveFiles,
        *,
        at: QueryAt,
        base_version_max: int | None,
        lineages: Mapping[StoreId, Lineage],
        despite_damage: bool = False,
        distrust: bool = False,
    ) -> None:
        super().__init__(files, despite_damage=despite_damage, distrust=distrust)
        # The oldest one that can be restored. Known once it was looked at.
        self.oldest_batch = at.batch
        self._at = at
        # What no operator's metadata names, Spark passes over.
        self._schemas = {(str(operator.id), name) for operator in at.operators for name in operator.schemas}
        # Without state, nothing is left of older batches.
        self._first = at.batch if base_version_max is None else max(0, base_version_max - 1)
        self._taken: Mapping[FilePath, LocalFile] = {}
        self._ids: dict[int, dict[StoreId, UniqueId]] = {}
        for store, lineage in lineages.items():
            for item in lineage:
                self._ids.setdefault(item.version, {})[store] = item.unique_id

    @override
    async def look(self, previous: SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        self._taken = await self.bring()
        return local_dir_of(self._taken)

    async def bring(self) -> dict[FilePath, LocalFile]:
        """Bring all that a backup takes to where it can be read; raises as `look`."""
        dirs = [f"{STATE}/{operator.id}/{name}" for operator in self._at.operators for name in (_METADATA, SCHEMAS)]
        listed = await self._files.list((COMMITS, OFFSETS, SOURCES, *dirs))
        before = _batches_before(self._at.batch, self._first, listed)
        own_logs: tuple[FilePath, FilePath] = ((COMMITS, str(self._at.batch)), (OFFSETS, str(self._at.batch)))
        await self._files.bring([*own_logs, *((COMMITS, str(batch)) for batch in before)])
        await run_blocking(self._check_batch)
        self.oldest_batch = await run_blocking(self._oldest_batch, before)
        taken = take_query_files(listed, self.oldest_batch, self._at.batch)
        return await self._files.bring({QUERY_ID, *own_logs, *taken})

    def _check_batch(self) -> None:
        """Refuse the logs of another run of the batch than the one whose stores were taken."""
        offsets = self._read((OFFSETS, str(self._at.batch)), decode_offsets)
        if offsets != self._at.offsets or self._read((COMMITS, str(self._at.batch)), decode_commit) != self._at.commit:
            raise changed_error(f"{self._files.location}/{COMMITS}/{self._at.batch}")

    def _oldest_batch(self, before: Sequence[int]) -> int:
        """Return the oldest of these batches from which on every commit names the state that the backup has."""
        oldest = self._at.batch
        for batch in before:
            try:
                if self._ids_of(batch) != self._ids.get(batch + 1, {}):
                    break
            except (DamagedError, FormatError) as error:
                self._take_over((COMMITS, str(batch)), error)
                break
            oldest = batch
        return oldest

    def _ids_of(self, batch: int) -> dict[StoreId, UniqueId]:
        """Read from a commit the ids of the stores of the backup's operators."""
        path = (COMMITS, str(batch))
        stores = {operator.id: operator.stores for operator in self._at.operators}
        with self._named(path):
            check_hidden(self._path(path))
            found = self._read(path, decode_commit).unique_ids or {}
            return {
                StoreId(operator, partition, store): names.check_unique_id(unique_id)
                for operator, partitions in found.items()
                for partition, ids in enumerate(partitions)
                for store, unique_id in zip(stores.get(operator, ()) + _NO_STORE * len(ids), ids, strict=False)
            }

    def _read(self, path: FilePath, decode: Callable[..., Result]) -> Result:
        with self._named(path):
            return decode(read_small(self._path(path), ENTRY_BYTES_MAX), subject="/".join(path))

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        added = [item.path for item in planned if item.expected is None]
        await run_blocking(self._check, list(self._taken) if self._distrust else added)
        return None

    def _check(self, paths: Sequence[FilePath]) -> None:
        """Refuse what Spark could not read (P5)."""
        file_sources = newest_entries([self._at.offsets.offsets], self._taken)
        for path in paths:
            try:
                self._check_one(path, file_sources)
            except (DamagedError, FormatError) as error:
                self._take_over(path, error)

    def _check_one(self, path: FilePath, file_sources: Collection[str]) -> None:
        with self._named(path):
            # Of a log one byte may be another, and the rest can still be read.
            check_hidden(self._path(path))
        match path:
            case ("metadata",):
                self._read(path, decode_query_id)
            case ("commits", _):
                self._read(path, decode_commit)
            case ("offsets", _):
                self._read(path, decode_offsets)
            case ("state", _, "_metadata", *_):
                self._read(path, decode_operator)
            case ("state", operator, "_stateSchema", *name) if (operator, "/".join(name)) in self._schemas:
                self._read(path, decode_state_schema)
            case ("sources", source, name) if source in file_sources and is_entry(name):
                self._read(path, check_entry)

    @override
    async def check_held_still(self) -> None:
        """Check nothing: no file is written twice, and each was looked at while it was read."""


def _has_name_once(path: FilePath) -> bool:
    """Return whether nothing else ever gets this name; a zip and its checksum one attempt may upload twice (P4)."""
    if len(path) > 1:
        return names.is_shared_path("/".join(path))
    parsed = names.parse_state_name(path[0])
    return parsed is not None and parsed.kind == "changelog" and parsed.of.unique_id is not None


def _batches_before(batch: int, first: int, listed: Collection[FilePath]) -> tuple[int, ...]:
    """List the batches before one, newest first, whose logs are all there, and the offsets before the last of them."""
    found = []
    for before in range(batch - 1, first - 1, -1):
        needed = {(COMMITS, str(before)), (OFFSETS, str(before)), (OFFSETS, str(max(0, before - 1)))}
        if not all(path in listed for path in needed):
            break
        found.append(before)
    return tuple(found)
