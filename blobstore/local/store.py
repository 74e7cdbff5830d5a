"""A plain directory as a store. Blobs are files of their own name and content, so that any tool can read them.

```
<root>/<key>            a blob, byte for byte
<root>/.ttl/<key>       its TTL, see `dirs`
<root>/.deleted/<key>   a deleted blob, where the store is asked to keep them
<root>/.tmp/            files that are being written, and probes of the clock
```

No key begins with a dot, so these never clash. A blob is written to `.tmp`, synced, given its name in one step and
that name synced: `put_if_absent` by link(2), so that of two racers exactly one wins (design 0002, S1), `put` by
rename(2). Below the root no link is followed, and nothing is removed but what has a name that this store makes
(design 0002, S2). Files and directories are their owner's alone, unless the root is shared (`StoreDirs.shared_mode`).
The file system has to know hard links and distinguish upper from lower case.
"""

import errno
import itertools
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from typing_extensions import override

from blobstore import base
from blobstore.concurrency import run_blocking
from blobstore.errors import BlobCorruptError, BlobDeletedError, BlobNotFoundError, InvalidRequestError
from blobstore.local import files
from blobstore.local.dirs import (
    LINK,
    TEMP,
    TTL,
    ReadDirs,
    StoreDirs,
    TempFiles,
    TtlLinks,
    is_temp_name,
    read_regular,
    split_key,
    walk_keys,
)

_NO_SUCH_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
# Bytes that a thread reads at a time: a read that is cancelled ends with them.
_HOP_BYTES: Final = 16 * 1024 * 1024
# link(2) on a network file system may answer these though the link was made, or will be.
_NO_ANSWER: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})

DELETED: Final = ".deleted"
# How often within the retention a purge looks through all that is kept.
_PURGES_PER_RETENTION: Final = 10


class LocalStore(base.BlobStore):
    """Blobs as the files of a directory, for any number of processes and, over a network mount, machines.

    Args:
        root: Made by the first write if it is not there; refused if it is something else than a directory.
        deleted_retention_ms: How long deleted blobs can still be read; 0 for not at all.
    """

    def __init__(self, root: Path, *, deleted_retention_ms: int = 0) -> None:
        self._root = root.absolute()
        if self._root.exists() and not self._root.is_dir():
            hint = "name a directory, or one to be made"
            raise InvalidRequestError("is not a directory", operation="open", key=str(root), hint=hint)
        self._dirs = StoreDirs(self._root)
        self._temp_files = TempFiles(self._dirs)
        self._ttl = TtlLinks(self._dirs, self._temp_files)
        self._deleted = DeletedBlobs(self._dirs, deleted_retention_ms)
        self._capabilities = base.Capabilities(
            atomic_create=True,
            consistent_lists=lists_are_consistent(self._root),
            keeps_deleted=deleted_retention_ms > 0,
        )

    @property
    @override
    def capabilities(self) -> base.Capabilities:
        return self._capabilities

    @override
    def place(self) -> tuple[str, ...]:
        # A loop of links is refused by who reads there.
        return files.place_of(self._root)

    @override
    async def put(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, repeatable: bool = False
    ) -> base.Created:
        base.check_put(key, ttl_ms, "put")
        async with self._staged(key, body, "put") as (descriptor, temp):
            with files.store_errors("put", key):
                return await run_blocking(self._replace, descriptor, temp, key, ttl_ms)

    @override
    async def put_if_absent(self, key: str, body: base.Body, *, ttl_ms: int | None = None) -> base.CreateOutcome:
        base.check_put(key, ttl_ms, "put_if_absent")
        with files.store_errors("put_if_absent", key):
            lost = await run_blocking(self._lost, key)
        if lost is not None:
            return lost
        async with self._staged(key, body, "put_if_absent") as (descriptor, temp):
            with files.store_errors("put_if_absent", key):
                return await run_blocking(self._create, descriptor, temp, key, ttl_ms)

    @override
    async def read_into(
        self,
        key: str,
        sink: base.Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        base.check_read(key, start, size_bytes)
        async with AsyncExitStack() as resources:
            with files.store_errors("get", key):
                descriptor = await self._open(key, deleted=deleted, resources=resources)
                blob_size_bytes = (await run_blocking(os.fstat, descriptor)).st_size
            end = start + base.range_size_bytes(start, size_bytes, blob_size_bytes=blob_size_bytes, key=key)
            for at in range(start, end, _HOP_BYTES):
                await run_blocking(_read_into, descriptor, key, sink, at, min(at + _HOP_BYTES, end))

    @override
    async def stat(self, key: str) -> base.BlobInfo | None:
        base.check_key(key, "stat")
        with files.store_errors("stat", key):
            return await run_blocking(self._info, key)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = base.LIST_PAGE_MAX) -> base.ListPage:
        base.check_list(prefix, limit)
        with files.store_errors("list_page", prefix):
            return await run_blocking(self._list, prefix, start_after, limit)

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        base.check_delete(keys)
        return await run_blocking(self._delete, keys)

    @override
    async def remove_ttl(self, key: str) -> None:
        base.check_key(key, "remove_ttl")
        with files.store_errors("remove_ttl", key):
            await run_blocking(self._remove_ttl, key)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[base.UnfinishedPut, ...]:
        base.check_list(prefix, base.LIST_PAGE_MAX)
        with files.store_errors("list_unfinished", prefix):
            return await run_blocking(lambda: (*self._temp_files.list_left(), *self._ttl.list_left(prefix)))

    @override
    async def abort_unfinished(self, puts: Sequence[base.UnfinishedPut]) -> tuple[base.DeleteFailure, ...]:
        return await run_blocking(self._abort_unfinished, puts)

    @override
    async def check_unused(self, operation: str, *, marker: str = "", prefixes: tuple[str, ...] = ()) -> None:
        with files.store_errors(operation, str(self._root)):
            await run_blocking(check_unused, self._dirs, operation)
            root = self._root.resolve()
            above = [up for up in root.parents[:2] if marker and f"{root.relative_to(up)}/".startswith(prefixes)]
            base.check_not_within([str(up) for up in above if (up / marker).is_file()], operation)

    @override
    async def now_ms(self) -> int:
        with files.store_errors("now_ms", str(self._root)):
            return await run_blocking(self._temp_files.now_ms)

    @override
    async def close(self) -> None:
        pass  # nothing stays open between calls

    # --- what follows blocks, and runs in threads ---

    def _info(self, key: str, dirs: tuple[ReadDirs, ReadDirs] | None = None) -> base.BlobInfo | None:
        """Return what is known of a blob; `dirs`, where more keys follow, is for blobs and for their TTLs."""
        if dirs is None:
            with ReadDirs(self._dirs) as blobs, ReadDirs(self._dirs) as ttls:
                return self._info(key, (blobs, ttls))
        # The blob before its TTL: the link is there before the blob is, so that this order never misses it.
        if (there := dirs[0].find(key)) is None:
            return None
        opened, found = there
        ttl_ms = self._ttl.read_ms(key, dirs[1])
        created_at_ms = self._temp_files.read_creation_ms(split_key(key)[1], opened, found)
        expires_at_ms = None if ttl_ms is None else created_at_ms + ttl_ms
        return base.BlobInfo(
            key=key, size_bytes=found.st_size, created_at_ms=created_at_ms, expires_at_ms=expires_at_ms
        )

    def _missing(self, key: str, operation: str) -> BlobNotFoundError:
        if self._deleted.is_kept(key):
            return BlobDeletedError("was deleted", operation=operation, key=key)
        return BlobNotFoundError("there is no such file", operation=operation, key=key)

    def _list(self, prefix: str, start_after: str, limit: int) -> base.ListPage:
        with ReadDirs(self._dirs) as directories, ReadDirs(self._dirs) as ttls:
            infos = (self._info(key, (directories, ttls)) for key in walk_keys(directories, prefix, start_after))
            # None: deleted since the directory was read.
            blobs = tuple(itertools.islice((info for info in infos if info is not None), limit + 1))
        return base.ListPage(blobs=blobs[:limit], truncated=len(blobs) > limit)

    def _lost(self, key: str) -> base.Lost | None:
        with ReadDirs(self._dirs) as dirs:
            if (there := dirs.find(key)) is None:
                return None
            # The caller may build on it, and the process that created it may have died before this.
            files.sync_dir(there[0])
            return base.Lost()

    def _create(self, descriptor: int, temp: str, key: str, ttl_ms: int | None) -> base.CreateOutcome:
        with self._sealed(descriptor, key) as (directory, name, temps):
            if ttl_ms is not None:
                if read_regular(name, directory) is not None:
                    files.sync_dir(directory)
                    return base.Lost()
                self._ttl.promise(key, ttl_ms, is_there=lambda: read_regular(name, directory) is not None)
            # A blob is as old as its name, by the clock of the file system. Writing and syncing it may have taken long.
            os.utime(descriptor)
            try:
                os.link(temp, name, src_dir_fd=temps, dst_dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                # A network file system may repeat a request by itself and then answer to the repetition.
                if not _is_same_file(name, directory, descriptor):
                    if error.errno in _NO_ANSWER:
                        return base.Unknown(reason=f"link: {error.strerror}")
                    if error.errno == errno.EPERM:
                        raise OSError(errno.EOPNOTSUPP, "cannot make hard links", name) from error
                    lost = self._lost(key) if isinstance(error, FileExistsError) else None
                    if lost is None:
                        raise
                    return lost
            # Where the process was stopped just before the link, the name came far later than the time written so far,
            # and readers have to see what the writer sees (design 0002, C5), also after a loss of power. Until then
            # `TempFiles` shows it to them.
            try:
                os.utime(descriptor)
                files.flush(descriptor)
                files.sync_dir(directory)
                return _created(descriptor)
            except OSError as error:
                # Whatever it says, as that the disk is full: the blob is there, and the store has not refused it.
                return base.Unknown(reason=f"linked, but its time or its name may not be durable: {error.strerror}")

    def _replace(self, descriptor: int, temp: str, key: str, ttl_ms: int | None) -> base.Created:
        with self._sealed(descriptor, key) as (directory, name, temps):
            # A crash in between leaves a TTL where none is meant, never none where one is.
            if ttl_ms is not None:
                self._ttl.set(key, ttl_ms)
            os.utime(descriptor)  # as for a blob that is created
            os.replace(temp, name, src_dir_fd=temps, dst_dir_fd=directory)
            files.sync_dir(directory)
        if ttl_ms is None:
            self._ttl.remove(key)
        return _created(descriptor)

    def _remove_ttl(self, key: str) -> None:
        with ReadDirs(self._dirs) as dirs:
            if dirs.find(key) is None:
                raise self._missing(key, "remove_ttl")
        self._ttl.remove(key)

    @contextmanager
    def _sealed(self, descriptor: int, key: str) -> Iterator[tuple[int, str, int]]:
        """Make a file ready to get its name: yields its directory, the name there, and the directory it is in now."""
        self._dirs.share(descriptor)
        files.flush(descriptor)
        below, name = split_key(key)
        with self._dirs.opened(below, make=True) as directory, self._dirs.opened(TEMP) as temps:
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    raise IsADirectoryError(errno.EISDIR, "is a directory of other keys", name)
            yield directory, name, temps

    def _delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        failures: dict[str, str] = {}
        directories: dict[str, list[str]] = {}
        for key in keys:
            directories.setdefault(split_key(key)[0], []).append(key)
        for directory, inside in directories.items():
            with (
                files.noting_failures(failures, inside),
                suppress(FileNotFoundError, NotADirectoryError),
                self._dirs.opened(directory) as opened,
            ):
                for key in inside:
                    with files.noting_failures(failures, [key]), suppress(FileNotFoundError):
                        if read_regular(split_key(key)[1], opened) is not None:
                            self._deleted.delete(key, opened)
                # A deletion that a loss of power undoes could bring a commit back whose blobs are gone (design 0002,
                # D1). Also for what is gone already: the process that deleted it may have died before this.
                files.sync_dir(opened)
        for directory, inside in directories.items():
            self._ttl.drop(directory, [split_key(key)[1] for key in inside if key not in failures])
        if self._capabilities.keeps_deleted:
            with suppress(OSError):  # the next call purges
                self._deleted.purge(self._temp_files.now_ms())
        return tuple(base.DeleteFailure(key=key, reason=reason) for key, reason in failures.items())

    def _abort_unfinished(self, puts: Sequence[base.UnfinishedPut]) -> tuple[base.DeleteFailure, ...]:
        failures: dict[str, str] = {}
        # Temporary files first: without them no put can finish any more whose TTL goes then.
        for put in sorted(puts, key=lambda put: not put.key.startswith(f"{TEMP}/")):
            with files.noting_failures(failures, [put.key]), suppress(FileNotFoundError, NotADirectoryError):
                if put.key == f"{TEMP}/{put.upload_id}" and is_temp_name(put.upload_id):
                    self._temp_files.unlink(put.upload_id)
                elif put.upload_id == LINK and self._info(base.check_key(put.key, "abort_unfinished")) is None:
                    directory, name = split_key(put.key)
                    self._ttl.drop(directory, [name])
        return tuple(base.DeleteFailure(key=key, reason=reason) for key, reason in failures.items())

    # --- and this does not ---

    @asynccontextmanager
    async def _staged(self, key: str, body: base.Body, operation: str) -> AsyncIterator[tuple[int, str]]:
        """Make a temporary file with the bytes of a body; its name is gone at the end, whatever happened."""
        temp = self._temp_files.new_name()
        is_done = False
        try:
            async with AsyncExitStack() as resources:
                with files.store_errors(operation, key):
                    temps = self._dirs.opened(TEMP, make=True)
                    made = files.create_to_write(temp, dir_fd=temps, mode=0o600)
                    descriptor = await resources.enter_async_context(made)
                at = 0
                # Errors of the body are not the store's, so the two are not caught together.
                async with aclosing(base.checked_chunks(body, operation=operation, key=key)) as chunks:
                    async for chunk in chunks:
                        with files.store_errors(operation, key):
                            await run_blocking(files.write_all_at, descriptor, at, chunk)
                        at += len(chunk)
                yield descriptor, temp
                is_done = True
        except OSError:
            # Of closing it: what was synced is there, whatever a network file system says now.
            if not is_done:
                raise
        finally:
            # What cannot be removed now is an unfinished put; the outcome of the call does not depend on it.
            with suppress(OSError):
                await run_blocking(self._temp_files.unlink, temp)

    async def _open(self, key: str, *, deleted: bool, resources: AsyncExitStack) -> int:
        directory, name = split_key(key)
        try:
            return await resources.enter_async_context(files.open_to_read(name, dir_fd=self._dirs.opened(directory)))
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                raise
        if not deleted or not await run_blocking(self._deleted.is_kept, key):
            raise await run_blocking(self._missing, key, "get")
        kept = self._dirs.opened(f"{DELETED}/{directory}".removesuffix("/"))
        return await resources.enter_async_context(files.open_to_read(name, dir_fd=kept))


def _created(descriptor: int) -> base.Created:
    # The change time is that of link or rename. Where the process was stopped just before that step, it is far later
    # than the modification time that `stat` shows, and a writer has to know (design 0002, C5).
    now = os.fstat(descriptor)
    return base.Created(created_at_ms=max(now.st_mtime_ns, now.st_ctime_ns) // 1_000_000)


def _is_same_file(name: str, directory: int, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(descriptor))
    return False


def _read_into(descriptor: int, key: str, sink: base.Sink, start: int, end: int) -> None:
    """Give a sink the bytes from `start` to `end`. What the sink raises is not the store's error."""
    buffer = memoryview(bytearray(min(end - start, base.SINK_BYTES)))
    at = start
    while at < end:
        with files.store_errors("get", key):
            size_bytes = os.preadv(descriptor, [buffer[: end - at]], at)
        if not size_bytes:
            raise BlobCorruptError("the file became shorter while it was read", operation="get", key=key)
        sink.write(buffer[:size_bytes])
        at += size_bytes


class DeletedBlobs:
    """Keeps deleted blobs, for the retention at least; with 0 none. Blocks."""

    def __init__(self, dirs: StoreDirs, retention_ms: int) -> None:
        self._dirs = dirs
        self._retention_ms = retention_ms
        self._next_purge_ms = 0

    def is_kept(self, key: str) -> bool:
        with ReadDirs(self._dirs) as dirs:
            return self._retention_ms > 0 and dirs.find(f"{DELETED}/{key}") is not None

    def delete(self, key: str, directory: int) -> None:
        """Take a blob away from its open directory: to where it is kept, or for good."""
        below, name = split_key(f"{DELETED}/{key}")
        if self._retention_ms > 0:
            # An earlier deleted blob may be where a directory is needed now, or the reverse: then it is not kept.
            with (
                suppress(NotADirectoryError, IsADirectoryError, FileExistsError),
                self._dirs.opened(below, make=True) as kept,
            ):
                os.replace(name, name, src_dir_fd=directory, dst_dir_fd=kept)
                return
        os.unlink(name, dir_fd=directory)

    def purge(self, now_ms: int) -> None:
        """Remove for good what was deleted longer ago than the retention; does nothing if it did so recently.

        The time of deletion is the change time of the inode, which the rename has set.
        """
        if not self._retention_ms or now_ms < self._next_purge_ms:
            return
        self._next_purge_ms = now_ms + self._retention_ms // _PURGES_PER_RETENTION
        with self._dirs.opened(DELETED) as top:
            for _, _, names, directory in os.fwalk(".", dir_fd=top):
                for name in filter(base.is_component, names):
                    found = read_regular(name, directory)
                    if found is not None and found.st_ctime_ns // 1_000_000 < now_ms - self._retention_ms:
                        # Another process purges too.
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=directory)


# What `doctor` writes.
_DOCTORS: Final = re.compile(r"doctor(/[0-9a-f]{20}(/.+)?)?")
# What mkfs(8) makes at the top of a file system.
_LOST_AND_FOUND: Final = "lost+found"


def check_unused(dirs: StoreDirs, operation: str) -> None:
    """Refuse a directory with anything in it but what a killed `init` or `doctor` leaves. Blocks."""
    with suppress(FileNotFoundError), dirs.opened("") as root:
        for parent, directories, names, opened in os.fwalk(".", dir_fd=root):
            within = parent.removeprefix(".").removeprefix("/")
            for name in (*directories, *names):
                path = f"{within}/{name}".removeprefix("/")
                mode = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
                if not _is_left(path, is_dir=stat.S_ISDIR(mode)):
                    message = f"the directory has something else in it: {path!r}"
                    hint = "name an empty directory, or one to be made: a repository has its directory to itself"
                    raise InvalidRequestError(message, operation=operation, key=str(dirs.root), hint=hint)
            if not within and _LOST_AND_FOUND in directories:
                directories.remove(_LOST_AND_FOUND)  # is root's alone


def _is_left(path: str, *, is_dir: bool) -> bool:
    top, _, below = path.partition("/")
    if not below:
        return is_dir and top in {TEMP, TTL, DELETED, "doctor", _LOST_AND_FOUND}
    if top == TEMP:
        return is_temp_name(below)
    return _DOCTORS.fullmatch(path if top == "doctor" else below) is not None


# File systems whose clients answer from a cache for seconds: a list may lack what another client has just put.
# Coherent ones (Ceph, Lustre, GPFS) are not among them.
_CACHING_TYPES: Final = frozenset(
    {*("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "beegfs"), *("fuse.sshfs", "fuse.juicefs", "fuse.glusterfs")}
)
# Mount options of NFS and CIFS that switch this cache off.
_UNCACHED_OPTIONS: Final = frozenset({"noac", "actimeo=0", "acdirmax=0"})
_MOUNT: Final = re.compile(
    r"^\d+ \d+ (?P<device>\d+:\d+) \S+ \S+ (?P<options>\S+).* - (?P<type>\S+) \S+ (?P<super_options>\S+)$", re.MULTILINE
)
_MOUNTINFO: Final = Path("/proc/self/mountinfo")


def lists_are_consistent(directory: Path) -> bool:
    """Return whether a list of the directory shows at once what other machines have put there.

    A file system that the kernel does not describe, as on macOS, is taken for a local one.
    """
    nearest = next(level for level in (directory, *directory.parents) if level.exists())
    device = nearest.stat().st_dev
    try:
        mountinfo = _MOUNTINFO.read_text()
    except OSError:
        return True
    return not is_caching_mount(mountinfo, f"{os.major(device)}:{os.minor(device)}")


def is_caching_mount(mountinfo: str, device: str) -> bool:
    """Return whether a device (`major:minor`) is mounted over a network with a cache that may be stale.

    `mountinfo` is the text of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
    """
    return any(
        mount["device"] == device
        and mount["type"] in _CACHING_TYPES
        and not _UNCACHED_OPTIONS & {*mount["options"].split(","), *mount["super_options"].split(",")}
        for mount in _MOUNT.finditer(mountinfo)
    )
