"""Files of a checkpoint whose query goes on: where this machine reads them, and whether they are still the same.

On a local file system they are read in place, and nothing is made there. From another store those that are
wanted are fetched into a scratch directory, each with one GET (design 0005, P6).
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from blobstore.concurrency import run_all, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError, UnsafeSourceError, restated
from engine.local.scan import changed_error, is_unchanged, local_file, refusing, special_error
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import UnsafeNameError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.keys import check_file_name
from index.snapshot.model import FileMetadata, FilePath

FETCHES_MAX: Final = 8
# What a file may have that is fetched by its name alone.
FETCHED_BYTES_MAX: Final = 64 * 1024 * 1024
_NS_PER_MS: Final = 1_000_000
_MODE: Final = 0o644
_LEFT_OVER: Final = ".tmp"


class FilesInPlace:
    """Files below one directory of a checkpoint on a file system of this machine. Paths are components from there.

    Attributes:
        location: What errors call it.
        directory: Where `bring` leaves files to be read.
        is_lasting: Whether that is the checkpoint itself.
        requests: Number of requests made of a store so far.
    """

    is_lasting = True
    requests = 0

    def __init__(self, directory: CheckpointDir) -> None:
        self.location = directory.location
        # Resolved: a reader below it follows no links.
        self.directory = (directory.local_root or Path()).resolve()
        self._seen: dict[FilePath, LocalFile] = {}

    async def list(self, below: Iterable[str] = ("",)) -> dict[FilePath, LocalFile]:
        """List every file in these directories and below, without those of Hadoop and left-overs (P7).

        Of a store it costs a list for each. A directory that is not there has no files. What was brought before is
        brought again. UnsafeSourceError: what has a name that is kept is neither a file nor a directory.
        """
        found: dict[FilePath, LocalFile] = {}
        for path in below:
            found |= await run_blocking(lambda parts: dict(_walk(self.directory, parts)), _components(path))
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
        """Return the first of these files that is another than was listed or brought, or, if that counts, gone.

        Of a store it costs a list of each directory that was listed.
        """
        return await run_blocking(lambda: next((path for path in paths if self._is_changed(path, gone=gone)), None))

    def _stat(self, path: FilePath) -> LocalFile:
        at = self.directory.joinpath(*path)
        with refusing(at):
            status = at.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise special_error(at, status.st_mode)
        return local_file(path[-1], status)

    def _is_changed(self, path: FilePath, *, gone: bool) -> bool:
        if not self.directory.joinpath(*path).exists():
            return gone
        try:
            return not is_unchanged(self._seen[path], self._stat(path))
        except UnsafeSourceError:
            return True


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
                    at_ns = status.modified_at_ms * _NS_PER_MS
                    metadata = FileMetadata(status.size_bytes, _MODE, at_ns, 0, "", "")
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
        self.requests += 1
        size_bytes = FETCHED_BYTES_MAX if listed is None else listed.metadata.size_bytes
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


@contextlib.asynccontextmanager
async def live_files(directory: CheckpointDir, scratch: Path | None = None) -> AsyncIterator[LiveFiles]:
    """Open the files of a directory of a checkpoint for a block; the directory stays the caller's.

    What has to be fetched is put in a directory of its own in `scratch`, or where this system has such files.
    """
    if directory.local_root is not None:
        yield FilesInPlace(directory)
        return
    made = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-", dir=scratch))
    try:
        yield FetchedFiles(directory, Path(made.name))
    finally:
        await run_blocking(made.cleanup)


def read_small(path: Path, size_bytes_max: int) -> bytes:
    """Read the content of a file that can be held in memory. Blocks.

    Raises:
        UnsafeSourceError: It is not there any more.
        DamagedError: It is larger.
    """
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
    """Regular files below a directory that others write to: what vanishes meanwhile was not there."""
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
    if name.startswith(".") or name.endswith(_LEFT_OVER):
        return False
    try:
        check_file_name(name)
    except UnsafeNameError:
        return False
    return True
