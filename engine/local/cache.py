"""What is known of local files without reading them again (design 0002, I1 and I2)."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final, Self

import msgspec

from blobstore.local.files import write_whole
from engine.local.hashing import BLAKE3_BYTES, Digest, hash_content
from engine.local.scan import is_written_once
from index.errors import UNDECODABLE
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import SstIdentity

ENTRIES_MAX: Final = 400_000
# Entries beyond twice the files of the directory are of files that are gone, except this number.
EXTRA_ENTRIES: Final = 1_000
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
# A file that changed less than this before it was looked at may change once more within the same clock tick.
SETTLING_TIME_NS: Final = 2_000_000_000

# Directories of which one open repository keeps the hashes in memory.
DIRECTORIES_REMEMBERED_MAX: Final = 64

_MAGIC: Final = b"TIDECACH"
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class CachedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry. It holds for a file of exactly this stat, and says nothing of any other."""

    device: int
    inode: int
    size_bytes: int
    modified_at_ns: int
    changed_at_ns: int
    # The hashes, or None where only the SST identity was asked for.
    blake3: bytes | None = None
    crc32: int | None = None
    # Whether the SST's tail was read, and what it said.
    sst_read: bool = False
    sst: SstIdentity | None = None
    # The file had been quiet for so long that its stat proves its content: a backup may trust the entry (I1).
    settled: bool = False
    # Recorded by a restore of ours once it had written and fsynced the file (I2).
    restored: bool = False


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """What is on disk; the directory is repeated, so that two directories can never share a file."""

    directory: str
    files: tuple[CachedFile, ...]


class DigestCache:
    """Hashes and SST identities by device, inode, size, mtime_ns and ctime_ns.

    One cache serves one store's directories. A new stat of an inode replaces the old one and `trim` forgets files that
    are gone, so that it grows with the number of files and not with that of their changes; beyond `ENTRIES_MAX` the
    oldest entries go. Threads may use it at the same time. `trust_stat`: as in `TransferSettings`.
    """

    def __init__(self, *, trust_stat: bool = False) -> None:
        self._trust_stat = trust_stat
        self._files: dict[tuple[int, int], CachedFile] = {}

    def __len__(self) -> int:
        return len(self._files)

    def find(self, file: LocalFile) -> CachedFile | None:
        """Return what a backup may believe of a file with this stat (I1).

        Bytes that are written through a shared mapping move no stat, so that a name counts too: it must be one whose
        file is written once.
        """
        known = self._find(file)
        is_believed = known is not None and known.settled and (self._trust_stat or is_written_once(file.name))
        return known if is_believed else None

    def find_restored(self, file: LocalFile) -> CachedFile | None:
        """Return what an earlier restore of ours had fsynced, where the caller trusts a stat (I2): rot moves none."""
        known = self._find(file) if self._trust_stat else None
        return known if known is not None and known.restored else None

    def _find(self, file: LocalFile) -> CachedFile | None:
        known = self._files.get((file.device, file.inode))
        is_same = (
            known is not None
            and known.changed_at_ns == file.changed_at_ns
            and known.modified_at_ns == file.metadata.modified_at_ns
            and known.size_bytes == file.metadata.size_bytes
        )
        return known if is_same else None

    def record(self, file: LocalFile, *, looked_at_ns: int, sst_read: bool = False) -> None:
        """Remember the identity facts that a file carries, whose stat held before and after its bytes were read.

        Facts about the same stat add up. `looked_at_ns` is what the clock of its file system said before it was read,
        or earlier; with `sst_read`, its tail was read, so that an `sst` of None means that it has no identity.
        """
        known = self._find(file)
        settled = looked_at_ns - max(file.metadata.modified_at_ns, file.changed_at_ns) >= SETTLING_TIME_NS
        if known is None and not settled:
            return
        sst = known.sst if known is not None and not sst_read else file.sst
        known = known or _entry(file)
        blake3, crc32, restored = file.blake3, file.crc32, known.restored
        if blake3 is None:
            blake3, crc32 = known.blake3, known.crc32
        elif known.blake3 is not None and known.blake3 != blake3:
            # The same stat, other bytes: whatever happened to this disk, a restore had better read the file.
            restored = False
        sst_read = sst_read or known.sst_read
        facts = {"blake3": blake3, "crc32": crc32, "sst_read": sst_read, "sst": sst}
        self._put(msgspec.structs.replace(known, **facts, settled=settled, restored=restored))

    def record_restored(self, file: LocalFile, digest: Digest) -> None:
        """Remember a file that a restore has written and verified, with its stat from after the fsync (I2)."""
        # Written a moment ago: a backup has to read it once more.
        self._put(msgspec.structs.replace(_entry(file), blake3=digest.blake3, crc32=digest.crc32, restored=True))

    def trim(self, files: Collection[LocalFile]) -> None:
        """Forget files that are gone, once they are more than those that there are: all files of the directory."""
        if len(self._files) > 2 * len(files) + EXTRA_ENTRIES:
            there = {(file.device, file.inode) for file in files}
            self._files = {key: entry for key, entry in tuple(self._files.items()) if key in there}

    def _put(self, entry: CachedFile) -> None:
        key = entry.device, entry.inode
        self._files.pop(key, None)
        self._files[key] = entry
        if len(self._files) > ENTRIES_MAX:
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread removes one already
                self._files.pop(next(iter(self._files)), None)

    @classmethod
    def load(cls, cache_dir: Path, directory: Path, *, trust_stat: bool = False) -> Self:
        """Load the cache that `save` left for a directory; an empty one if there is none that can be trusted.

        A file that is damaged, oversized, another user's or writable by others counts as none: who could
        write it could make a backup skip a file that has changed.
        """
        cache = cls(trust_stat=trust_stat)
        try:
            data = read_own_file(_cache_path(cache_dir, directory))
            payload = data[len(_MAGIC) + BLAKE3_BYTES :]
            if data[: -len(payload)] != _MAGIC + hash_content(payload):
                return cache
            stored = msgspec.msgpack.decode(payload, type=_Stored)
        except (OSError, *UNDECODABLE):
            return cache
        if stored.directory == str(directory.absolute()):
            cache._files = {(file.device, file.inode): file for file in stored.files[:ENTRIES_MAX]}
        return cache

    def save(self, cache_dir: Path, directory: Path) -> None:
        """Write the cache for a directory, replacing an older one at once. OSError: it cannot be written."""
        stored = _Stored(str(directory.absolute()), tuple(self._files.values()))
        payload = msgspec.msgpack.encode(stored)
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(_cache_path(cache_dir, directory), _MAGIC + hash_content(payload) + payload)


class DigestCaches:
    """The caches of the directories that one repository has used last, kept for the next process in `cache_dir`."""

    def __init__(self, cache_dir: Path | None = None, *, trust_stat: bool = False) -> None:
        self._cache_dir = cache_dir
        self._trust_stat = trust_stat
        # By directory, the one used last at the end.
        self._caches: dict[Path, DigestCache] = {}
        # Why the newest one could not be kept. That costs the next run time and nothing else: nothing is raised.
        self.error: OSError | None = None

    @contextlib.asynccontextmanager
    async def of(self, directory: Path) -> AsyncIterator[DigestCache]:
        """Yield what is known of a directory's files; what the block adds is kept, however it ends."""
        cache = await asyncio.to_thread(self._load, directory)
        try:
            yield cache
        finally:
            await asyncio.to_thread(self._save, cache, directory)

    def _load(self, directory: Path) -> DigestCache:
        directory = directory.absolute()
        cache = self._caches.pop(directory, None)
        if cache is None and self._cache_dir is not None:
            cache = DigestCache.load(self._cache_dir, directory, trust_stat=self._trust_stat)
        cache = cache if cache is not None else DigestCache(trust_stat=self._trust_stat)
        self._caches[directory] = cache
        # A job that backs up a checkpoint of another name each time would otherwise remember them all.
        for oldest in list(self._caches)[:-DIRECTORIES_REMEMBERED_MAX]:
            self._caches.pop(oldest, None)
        return cache

    def _save(self, cache: DigestCache, directory: Path) -> None:
        try:
            if self._cache_dir is not None:
                cache.save(self._cache_dir, directory)
        except OSError as error:
            self.error = error


def _entry(file: LocalFile) -> CachedFile:
    """Make an entry that says nothing of the content."""
    metadata = file.metadata
    return CachedFile(file.device, file.inode, metadata.size_bytes, metadata.modified_at_ns, file.changed_at_ns)


def _cache_path(cache_dir: Path, directory: Path) -> Path:
    return cache_dir / f"{hash_content(os.fsencode(directory.absolute()))[:16].hex()}.digests"


def read_own_file(path: Path) -> bytes:
    """Read a file of this user that nobody else can write, up to the size cap; empty otherwise."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:  # noqa: PTH123
        status = os.fstat(source.fileno())
        own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
        return source.read(CACHE_BYTES_MAX) if own and status.st_size <= CACHE_BYTES_MAX else b""
