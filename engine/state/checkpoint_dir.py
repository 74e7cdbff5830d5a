"""Where the files of a state store are, and a directory of a streaming checkpoint on any store.

On a local directory the store is a `LocalStore` over it, so that the files are those that Spark reads. It keeps what it
is writing in a hidden directory `.tmp` of its root. Spark passes over hidden names wherever it lists a checkpoint, but
the root is best the checkpoint itself, and the directory of a state store a `child` of it: one `.tmp`, not hundreds.

Hadoop's local file system writes a hidden `.<name>.crc` beside each file and refuses the file if the two do not fit.
So the hidden one goes before the file is replaced or deleted; without one, the file is read unverified. Every file
appears whole.
"""

import asyncio
import functools
import itertools
import os
import re
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from blobstore.base import BlobStore, Body, BytesBody, MemorySink, ReadBody, TooLargeError, check_key
from blobstore.checkpoint_files import CheckpointFiles, FileStatus
from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError, InvalidRequestError
from blobstore.local.files import FileSink, create_to_write, read_chunks, store_errors
from blobstore.local.store import LocalStore
from blobstore.opening import StoreSettings, local_path_of, open_store
from blobstore.wrappers.forwarding import Meter, MeteredStore
from blobstore.wrappers.retry import RetryingStore
from engine.errors import DamagedError, TargetError
from engine.local.copy import copy_file
from index.spark.lineage import Lineage
from index.spark.names import StateVersion

# The most bytes of a file that is read into memory, by default.
READ_BYTES_MAX: Final = 64 * 1024 * 1024
# A file that is written takes less long than this.
UNFINISHED_MS: Final = 24 * 3_600_000
# What one look holds of what it has read; the rest is read again.
_SEEN_BYTES_MAX: Final = 32 * 1024 * 1024

# Other names that Spark has for it.
_SPARK_S3: Final = re.compile(r"\As3[an](?=://)", re.IGNORECASE)

# Names of files that are being fetched: never twice in this process, and two processes never share a target.
_fetches = itertools.count()


class StateFiles(Protocol):
    """The files of one state store: those of a `CheckpointDir`, or of a snapshot index of one (design 0004, R6).

    Paths are names in its directory, or `SSTs/<name>` and `logs/<name>`.
    """

    @property
    def location(self) -> str:
        """Its name in errors."""

    async def names(self) -> tuple[str, ...]:
        """List the names of the files directly in the directory; none if there is no directory."""

    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Read a small file.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is larger than `size_bytes_max`, and so not what it has to be.
            StoreError: As the store says.
        """

    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        """Copy a file to this machine, whole or not at all, to a target in a directory that exists; return its size.

        A file that is there is replaced. `size_bytes` is what it has to have, `size_bytes_max` what it may; None: any.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is not what it has to be.
            TargetError: The target cannot be written.
            StoreError: As the store says.
        """

    async def read_range(self, path: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        """Read a part of a file; `fresh`: not as before, for it came out wrong. Raises as `read`, DamagedError too."""

    def known_lineage(self, of: StateVersion) -> Lineage | None:
        """Return the lineage in the header of this changelog, where that is known without reading it; else None."""

    async def close(self) -> None: ...


class Seen:
    """What one look at a checkpoint has seen, by key; the meter counts its requests and those of looks before it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.listed: dict[str, tuple[FileStatus, ...]] = {}
        self.statuses: dict[str, FileStatus] = {}
        # With the status that each had before it was read, if it was listed by then.
        self.files: dict[str, tuple[FileStatus | None, bytes]] = {}
        self.size_bytes = 0
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add(self, key: str, data: bytes, status: FileStatus | None) -> None:
        if self.size_bytes + len(data) <= _SEEN_BYTES_MAX:
            self.size_bytes += len(data)
            self.files[key] = status, data


class CheckpointDir(msgspec.Struct, frozen=True, eq=False):
    """Files below one directory of a checkpoint: the `StateFiles` that can be written. Paths are relative to it.

    Opened from a path, it may be used from several event loops at once; opened from another URL, from the one that it
    is first used in, as its connections belong to that; opened from a store object, from those that the store bears.
    """

    store: BlobStore
    prefix: str = ""
    # The same directory as this machine's file system has it; None: it is on no local file system.
    local_root: Path | None = None
    location: str = ""
    owns_store: bool = False
    # Of a look.
    seen: Seen | None = None
    links_ssts: bool = False

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self.store, self.prefix)

    @classmethod
    async def open(
        cls, location: str | Path | BlobStore, prefix: str = "", *, settings: StoreSettings | None = None
    ) -> Self:
        """Open a directory at or below a location; it need not exist. Asks nothing of the store.

        The location is a path, a URL as `open_store` or Spark take it, or an open store, which stays the caller's.

        Raises:
            InvalidRequestError: The URL or the prefix does not follow the grammar.
            CapabilityMissingError: What the store needs is not installed.
        """
        if isinstance(location, Path | str):
            url = str(location)
            store = open_store(store_url(url), settings)
            local_root = local_path_of(location)
            if local_root is not None:
                # Without the limit on requests, which belongs to one event loop: a local disk needs none.
                chosen = settings or StoreSettings()
                local = LocalStore(local_root, deleted_retention_ms=chosen.deleted_retention_ms)
                store = RetryingStore(local, chosen.retry)
            shown = url.rstrip("/") or "/"
            opened = cls(store, local_root=local_root, location=shown, owns_store=True)
        else:
            opened = cls(location, location=type(location).__name__)
        return opened.child(prefix, owns_store=opened.owns_store) if prefix else opened

    def child(self, path: str, *, owns_store: bool = False) -> Self:
        """Open a directory below this one, on the same store; only this one closes it, unless that has its store."""
        check_key(path, "open")
        local_root = None if self.local_root is None else self.local_root / path
        location = f"{self.location}/{path}" if self.location else path
        return msgspec.structs.replace(
            self, prefix=self._key(path), local_root=local_root, location=location, owns_store=owns_store
        )

    def linked(self) -> Self:
        """Open it once more so that an SST that is fetched is the same file, by a hard link, where that can be.

        It must not be written to then, nor be given another time; RocksDB never does either.
        """
        return msgspec.structs.replace(self, owns_store=False, links_ssts=True)

    def look(self, *, again: bool = False) -> Self:
        """Begin a look at this directory, in which each small file is read once and each directory listed once.

        What it has seen may be another by now: of a query that runs, look `again`. Else a look is returned as it is.
        Only the directory that is looked at is closed.
        """
        if self.seen is not None and not again:
            return self
        meter = Meter() if self.seen is None else self.seen.meter
        store = MeteredStore(self.store, meter) if self.seen is None else self.store
        return msgspec.structs.replace(self, store=store, seen=Seen(meter), owns_store=False, links_ssts=False)

    @property
    def requests(self) -> int:
        """Number of requests of a look, and of those before it; of a file system of this machine 0."""
        return 0 if self.seen is None or self.local_root is not None else self.seen.meter.requests.total()

    def known(self, path: str, size_bytes: int, modified_at_ms: int) -> bytes | None:
        """Return what this look has read of a file that still is as it was listed before; else None."""
        status, data = (None, b"") if self.seen is None else self.seen.files.get(self._key(path), (None, b""))
        if status is None or (status.size_bytes, status.modified_at_ms) != (size_bytes, modified_at_ms):
            return None
        return data if len(data) == size_bytes else None

    def forget(self, paths: Iterable[str]) -> None:
        """Read these files again when they are asked for."""
        if self.seen is not None:
            for path in paths:
                self.seen.files.pop(self._key(path), None)

    def place(self) -> tuple[str, ...]:
        """Return its place, as `BlobStore.place`; () if that is unknown."""
        return self._files.place()

    async def list(self, path: str = "") -> tuple[FileStatus, ...]:
        """List files and directories directly in a directory, sorted by name; none if there is no such directory."""
        if self.seen is None:
            return await self._list(path)
        key = self._key(path)
        async with self.seen.locks[f"{key}/"]:
            if key not in self.seen.listed:
                self.seen.listed[key] = self._note(await self._list(path))
            return self.seen.listed[key]

    async def _list(self, path: str) -> tuple[FileStatus, ...]:
        try:
            return await self._files.list(path)
        except BlobNotFoundError:
            return ()

    def _note(self, found: tuple[FileStatus, ...]) -> tuple[FileStatus, ...]:
        if self.seen is not None:
            self.seen.statuses |= {self._key(status.path): status for status in found}
        return found

    def _key(self, path: str) -> str:
        return "/".join(filter(None, (self.prefix, path)))

    async def names(self) -> tuple[str, ...]:
        return tuple(status.name for status in await self.list() if not status.is_directory)

    def known_lineage(self, of: StateVersion) -> None:
        """Return None: a listing knows names only."""

    async def walk(self, path: str = "") -> tuple[FileStatus, ...]:
        """List every file in a directory and below, in the order of their keys: one request for each 1,000."""
        async with aclosing(self._files.walk(path)) as found:
            return self._note(tuple([status async for status in found]))

    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Read a small file, as `StateFiles.read`; a path that cannot be a key is an `InvalidRequestError`."""
        check_key(path, "read")
        if self.seen is None:
            return await self._read(path, size_bytes_max)
        key = self._key(path)
        async with self.seen.locks[key]:
            if key not in self.seen.files:
                status, data = self.seen.statuses.get(key), await self._read(path, size_bytes_max)
                self.seen.add(key, data, status)
                return data
            data = self.seen.files[key][1]
            if len(data) > size_bytes_max:
                raise self._too_large(path, size_bytes_max)
            return data

    async def _read(self, path: str, size_bytes_max: int) -> bytes:
        sink = MemorySink(size_bytes_max)
        try:
            await self._files.read_into(path, sink)
        except TooLargeError:
            raise self._too_large(path, size_bytes_max) from None
        return sink.data

    async def read_range(self, path: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        sink = MemorySink(size_bytes)
        try:
            await self.store.read_into(self._key(path), sink, start=start, size_bytes=size_bytes, fresh=fresh)
        except InvalidRequestError as error:
            raise self._misfit(path, f"has no bytes {start} to {start + size_bytes}") from error
        return sink.data

    def _too_large(self, path: str, size_bytes_max: int) -> DamagedError:
        message = f"is larger than the {size_bytes_max} bytes that are read of it"
        hint = "it is not what its name says; an older version may be whole"
        return DamagedError(message, operation="read", subject=f"{self.location}/{path}", hint=hint)

    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        """Copy a file to this machine, as `StateFiles.fetch`: one request.

        Nothing of `target` is there before all of it is. It is not synced: a machine that loses power loses the
        working directory, and loads again.
        """
        check_key(path, "fetch")
        at_most = size_bytes if size_bytes is not None else size_bytes_max
        temp = target.with_name(f".{os.fsdecode(os.fsencode(target.name)[:200])}.{next(_fetches)}.tmp")
        try:
            got = await self._fetch(path, temp, at_most)
            if size_bytes is not None and got != size_bytes:
                raise self._misfit(path, f"has {got} bytes instead of {size_bytes}")
            await run_blocking(temp.replace, target)
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "free space and check the permissions; the checkpoint itself is untouched"
            raise TargetError(reason, operation="fetch", subject=str(target), hint=hint) from error
        finally:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
        return got

    async def _fetch(self, path: str, temp: Path, at_most: int | None) -> int:
        if self.local_root is not None:
            links = self.links_ssts and path.endswith(".sst")
            copied = await run_blocking(_copy_within, self.local_root / path, temp, at_most, links=links)
            if copied is not None:
                if at_most is not None and copied > at_most:
                    raise self._misfit(path, f"has {copied} bytes, and at most {at_most} were expected")
                return copied
        # From here on also what is wrong with a local file: the store says it in its words.
        async with create_to_write(temp) as descriptor:
            sink = FileSink(descriptor, at_most)
            try:
                await self._files.read_into(path, sink)
            except TooLargeError:
                raise self._misfit(path, f"has more than {at_most} bytes") from None
        return sink.size_bytes

    async def publish(self, path: str, source: Path | bytes, *, overwrite: bool) -> int:
        """Publish bytes, or a local file that nobody changes, and return its size: one request.

        Raises:
            CheckpointFileExistsError: Without `overwrite`: a file is there, and is unchanged.
            CheckpointUnknownError: The store never said whether it took the file.
            OSError: The source cannot be read.
            StoreError: The store did not take it.
        """
        if isinstance(source, bytes):
            body: Body = BytesBody(source)
            size_bytes = len(source)
        else:
            size_bytes = (await run_blocking(source.stat)).st_size
            # Nobody changes it; the store refuses a file that has become shorter.
            body = ReadBody(size_bytes, functools.partial(read_chunks, source, size_bytes))
        check_key(path, "publish")
        await run_blocking(self._remove_hidden, (path,), unless_there=not overwrite)
        await self._files.publish(path, body, overwrite=overwrite)
        return size_bytes

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove files, up to 1,000 with one request; no error for one that is not there.

        Raises:
            StoreUnavailableError: Something was not deleted; do it again.
        """
        if paths:
            for path in paths:
                check_key(path, "delete")
            await run_blocking(self._remove_hidden, paths, unless_there=False)
            await self._files.delete_files(paths)

    async def give_up_unfinished(self) -> None:
        """Remove what dead writers have left in a directory of this machine; a bucket has lifecycle rules for that."""
        if self.local_root is not None:
            await CheckpointFiles(self.store).abort_unfinished(older_than_ms=UNFINISHED_MS)

    async def close(self) -> None:
        if self.owns_store:
            await self.store.close()

    def _remove_hidden(self, paths: Sequence[str], *, unless_there: bool) -> None:
        if self.local_root is None:
            return
        for path in paths:
            file = self.local_root / path
            if unless_there and file.exists():
                continue  # it will not be replaced, and keeps what it has
            with store_errors("delete", path), suppress(FileNotFoundError, NotADirectoryError):
                file.with_name(f".{file.name}.crc").unlink()

    def _misfit(self, path: str, message: str) -> DamagedError:
        hint = "the file is cut short or another one; an older version may be whole"
        return DamagedError(message, operation="fetch", subject=f"{self.location}/{path}", hint=hint)


@asynccontextmanager
async def opened_checkpoint(
    location: str | Path | BlobStore, settings: StoreSettings | None = None
) -> AsyncIterator[CheckpointDir]:
    """Open the root of a checkpoint for a block, as `CheckpointDir.open`."""
    root = await CheckpointDir.open(location, settings=settings)
    try:
        yield root
    finally:
        await root.close()


def store_url(url: str) -> str:
    """Return a URL as our stores take it: Spark has other names for `s3:`."""
    return _SPARK_S3.sub("s3", url)


def _copy_within(source: Path, target: Path, at_most: int | None, *, links: bool) -> int | None:
    """Copy or link a file and count its bytes; None if the store is to read it, which knows what an error means."""
    try:
        found = source.lstat()
        size_bytes = found.st_size
        if at_most is not None and size_bytes > at_most:
            return size_bytes
        if links and stat.S_ISREG(found.st_mode):
            with suppress(OSError):  # another file system, another owner, or too many links
                os.link(source, target, follow_symlinks=False)
                return size_bytes
        return copy_file(source, target)
    except FileExistsError:
        raise
    except OSError:
        target.unlink(missing_ok=True)
        return None
