"""One state store of a query that runs, as a batch left it: what of its directory a backup takes (design 0005, P3)."""

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from blobstore.concurrency import run_all, run_blocking
from engine.backup.source import BackupSource
from engine.checkpoint.live_files import LiveFiles, read_small
from engine.checkpoint.naming import located, told_of
from engine.checkpoint.sst_check import check_sst
from engine.checkpoint.state_files import check_changelog_file, check_zip_file
from engine.errors import EngineError
from engine.local.scan import changed_error, refusing
from engine.state.changelogs import open_changelog
from engine.state.query import StoreAt
from engine.state.sources import resolve_with
from index.errors import FileChecksumError, FormatError
from index.plan.backup import PlannedFile
from index.snapshot.contents import files_of
from index.snapshot.dir_diff import LocalDir, LocalFile, local_dir_of
from index.snapshot.model import FileIndex, FilePath, SnapshotIndex
from index.spark.checksums import FILE_CHECKSUM_BYTES_MAX
from index.spark.lineage import Lineage, Present, Resolution, resolve
from index.spark.metadata import StateMetadata
from index.spark.names import (
    SSTS,
    StateVersion,
    changelog_name,
    checksum_name,
    is_shared_path,
    parse_state_name,
    snapshot_name,
)
from index.spark.retention import select_state_files

# Files of one store that are checked at once: each is a thread that reads and sums up.
_CHECKS_MAX: Final = 2

Result = TypeVar("Result")


class LiveStore(BackupSource):
    """What a backup takes of one store. Made for one backup.

    Args:
        files: The directory of the store.
        store: Which version of it, and how it is written.
        verify: Whether what is new is checked before it counts (P5).

    Attributes:
        unchecked: SSTs of which nobody can tell whether they are whole.
    """

    def __init__(self, files: LiveFiles, store: StoreAt, *, verify: bool = True) -> None:
        self.unchecked: list[str] = []
        self._files = files
        self._store = store
        self._verify = verify
        self._resolution = Resolution(store.at, None)
        # All that the version takes, as it is in the checkpoint.
        self._chosen: dict[FilePath, LocalFile] = {}
        # What of it the previous backup has under a name that is given once.
        self._known: dict[FilePath, FileIndex] = {}
        self._brought: dict[FilePath, LocalFile] = {}
        self._reads_mutable = False

    @property
    @override
    def directory(self) -> Path:
        return self._files.directory

    @property
    @override
    def is_lasting(self) -> bool:
        return self._files.is_lasting

    @property
    def requests(self) -> int:
        """How many were made of the checkpoint's store."""
        return self._files.requests

    @property
    def base_version(self) -> int:
        """Of the snapshot that the version begins with; 0 if it begins with nothing. Known once it was looked at."""
        return 0 if self._resolution.base is None else self._resolution.base.version

    @property
    @override
    def lineage(self) -> Lineage:
        """The versions with ids that it grew from (design 0004, R6). Known once it was looked at."""
        return tuple(item for item in self._resolution.lineage if item.version < self._store.at.version)

    @override
    async def look(self, previous: SnapshotIndex | None) -> LocalDir:
        return await self._unless_changed(self._look(previous))

    async def _look(self, previous: SnapshotIndex | None) -> LocalDir:
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
        """Find out what the version is made of.

        Costs a list, on another store than a file system a GET of the zip, and of a changelog if its header decides.

        Returns:
            All that it takes, and what of that the previous backup has for certain (P4).

        Raises:
            VersionMissingError: A file that it takes is not there.
            FormatError, EngineError, StoreError: As they say.
        """
        self._brought = {}
        listed = await self._files.list()
        self._resolution = await self._resolve(listed)
        self._chosen = select_state_files(self._resolution, await self._metadata(listed), listed)
        before: Mapping[FilePath, FileIndex] = {} if previous is None else dict(files_of(previous.dir))
        self._known = {
            path: entry
            for path, file in self._chosen.items()
            if _has_name_once(path)
            and (entry := before.get(path)) is not None
            and entry.metadata.size_bytes == file.metadata.size_bytes
        }
        return self._chosen, self._known

    async def _resolve(self, listed: Mapping[FilePath, LocalFile]) -> Resolution:
        at = self._store.at
        present = Present.of_names(path[0] for path in listed if len(path) == 1)
        return await resolve_with(
            lambda present: resolve(at.version, at.unique_id, present), present, self._read_header
        )

    async def _read_header(self, of: StateVersion) -> Lineage:
        path = (changelog_name(of),)
        self._brought |= await self._files.bring([path])

        def read() -> Lineage:
            with (
                self._named(path),
                refusing(self._path(path)),
                open_changelog(self._path(path), self._store.settings.codec, of) as changelog,
            ):
                return changelog.header.lineage

        return await run_blocking(read)

    async def _metadata(self, listed: Mapping[FilePath, LocalFile]) -> StateMetadata | None:
        base = self._resolution.base
        if base is None:
            return None
        path = (snapshot_name(base),)
        checksum = await self._checksum(path, base, listed)
        self._brought |= await self._files.bring([path])
        with self._named(path):
            zipped = await run_blocking(lambda: check_zip_file(self._path(path), checksum=checksum))
        return zipped.metadata

    async def _checksum(self, path: FilePath, of: StateVersion, listed: Mapping[FilePath, LocalFile]) -> bytes | None:
        """The checksum of a zip or a changelog; None if it has none.

        One of a name without an id may be that of a file that was overwritten since (0004, section 10).
        """
        name = (checksum_name(path[0]),)
        if of.unique_id is None or name not in listed:
            return None
        self._brought |= await self._files.bring([name])
        return await run_blocking(read_small, self._path(name), FILE_CHECKSUM_BYTES_MAX)

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        self._reads_mutable = any(not _has_name_once(item.path) for item in planned)
        # A pack that is filled anew may take what is known.
        missing = [item.path for item in planned if item.path not in self._brought]
        self._brought |= await self._files.bring(missing)
        if self._verify:
            added = [item.path for item in planned if item.expected is None]
            await self._unless_changed(run_all(self._check, added, in_flight_max=_CHECKS_MAX))
        return self._tree() if missing and not self.is_lasting else None

    async def _check(self, path: FilePath) -> None:
        """Refuse what is not whole (P5). The zip was read to know what to take, and sizes are what it says."""
        if path[0] == SSTS:
            with self._named(path):
                report = await run_blocking(check_sst, self._path(path))
            if not report.checked:
                self.unchecked.append(f"{self._store.id.path}/{'/'.join(path)}: {report.reason}")
            return
        parsed = parse_state_name(path[0])
        if parsed is not None and parsed.kind == "changelog" and not parsed.checksum:
            checksum = await self._checksum(path, parsed.of, self._chosen)
            codec = self._store.settings.codec
            with self._named(path):
                await run_blocking(lambda: check_changelog_file(self._path(path), codec, parsed.of, checksum=checksum))

    @override
    async def check_held_still(self) -> None:
        """What has its name once was looked at while it was read; all the rest was there at one time.

        With ids a file that is gone by now is none that another one has taken the place of: the query goes on, and a
        first backup may take longer than Spark keeps a zip.
        """
        if self._reads_mutable or self._files.is_lasting:
            rest = [path for path in self._chosen if not _has_name_once(path)]
            await self._check_same(rest, gone=self._store.at.unique_id is None)

    async def _check_same(self, paths: Sequence[FilePath], *, gone: bool = True) -> None:
        changed = await self._files.find_changed(paths, gone=gone)
        if changed is not None:
            raise changed_error(f"{self._files.location}/{'/'.join(changed)}")

    async def _unless_changed(self, work: Awaitable[Result]) -> Result:
        """The result, or what is wrong, unless that is of a file that the query has taken away meanwhile (P6)."""
        try:
            return await work
        except (EngineError, FormatError) as error:
            await self._check_same([path for path in (*self._brought, *self._chosen) if path not in self._known])
            raise told_of(error, self._files.location, private=self._files.directory) from error.__cause__

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

    def _named(self, path: FilePath) -> AbstractContextManager[None]:
        """Lets errors of a block name a file as it is in the checkpoint."""
        return located(self._files.location, "/".join(path), private=self._files.directory)

    def _path(self, path: FilePath) -> Path:
        return self._files.directory.joinpath(*path)


def _has_name_once(path: FilePath) -> bool:
    """Whether nothing else ever gets this name (P4).

    A zip with an id is none of them: one attempt may upload it twice, and its checksum with it.
    """
    if len(path) > 1:
        return is_shared_path("/".join(path))
    parsed = parse_state_name(path[0])
    return parsed is not None and parsed.kind == "changelog" and parsed.of.unique_id is not None
