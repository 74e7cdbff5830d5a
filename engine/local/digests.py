"""Which local file is which: hashes and SST identities, read where a decision needs them and remembered (0002, I1, I2).

What reads files blocks and is made for a thread, all files of a directory per call. The only importer of blake3.
"""

import asyncio
import contextlib
import functools
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import msgspec
from blake3 import blake3
from typing_extensions import override

from blobstore.base import Buffer, Sink
from blobstore.local.files import write_whole
from engine.errors import UnsafeSourceError
from engine.local import scan
from engine.local.checksums import crc32
from index.display import encodable
from index.errors import UNDECODABLE
from index.plan.backup import group_by_size
from index.rocksdb.sst import TAIL_BYTES, MoreBytesNeeded, parse_sst_tail
from index.snapshot.dir_diff import LocalDir, LocalFile, pairs_to_identify
from index.snapshot.model import DirIndex, FileIndex, FilePath, SstIdentity

BLAKE3_BYTES: Final = 32

ENTRIES_MAX: Final = 400_000
# Entries beyond twice the files of the directory are of files that are gone, except this number.
EXTRA_ENTRIES: Final = 1_000
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
# A file that changed less than this before it was looked at may change once more within the same clock tick.
SETTLING_TIME_NS: Final = 2_000_000_000

# Directories of which one open repository keeps the hashes in memory.
DIRECTORIES_REMEMBERED_MAX: Final = 64

# The parser asks for more at most twice.
SST_READS_MAX: Final = 3
READ_BYTES: Final = 1024 * 1024
# Reading is spread over this many threads once there is so much of it that it pays.
READERS_MAX: Final = 4
READ_ALONE_BYTES_MAX: Final = 16 * 1024 * 1024
# What one thread takes at a time.
_GROUP_BYTES: Final = 4 * 1024 * 1024
_GROUP_FILES_MAX: Final = 256

_MAGIC: Final = b"TIDECACH"
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

_Found = TypeVar("_Found")


class Digest(NamedTuple):
    """Both hashes of some bytes: BLAKE3-256, and IEEE CRC32 unsigned, which is Samza's checksum."""

    blake3: bytes
    crc32: int


class ContentHasher:
    """Hashes bytes as they stream by, to compare them with a known hash. Not for two threads at once.

    It lets other threads run while it works on a large chunk: a chunk of a megabyte belongs in a thread, a chunk of a
    few kilobytes does not.
    """

    def __init__(self) -> None:
        self._blake3 = blake3()
        # How many bytes went in so far; every hash is of these.
        self.size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._blake3.update(data)
        self.size_bytes += len(data)

    @property
    def blake3(self) -> bytes:
        return self._blake3.digest()


class FileHasher(ContentHasher):
    """As `ContentHasher`, and the CRC32 too, which takes as long again: for files that get a new entry."""

    def __init__(self) -> None:
        super().__init__()
        self._crc32 = 0

    @override
    def update(self, data: bytes | bytearray | memoryview) -> None:
        super().update(data)
        self._crc32 = crc32(data, self._crc32)

    @property
    def digest(self) -> Digest:
        return Digest(self.blake3, self._crc32)


class HashingSink(Sink):
    """Hashes bytes and keeps none of them."""

    def __init__(self, hasher: ContentHasher) -> None:
        self._hasher = hasher

    @override
    def write(self, data: Buffer) -> None:
        self._hasher.update(data)


def hash_content(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3-256 of bytes in memory."""
    return blake3(data).digest()


def hash_pack(hashes: Iterable[bytes]) -> bytes:
    """Identify the blob of several files by their hashes; no file has it for its own, whatever is in it."""
    return blake3(b"".join(hashes), derive_key_context="tidemark 2026-11-28 pack of files").digest()


def hash_bytes(data: bytes | bytearray | memoryview) -> Digest:
    """Return the hashes of bytes in memory."""
    return Digest(blake3(data).digest(), crc32(data))


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
        # What `find` said of the files of the last look, as they were: the next look takes over what it finds the same,
        # in place of making 100,000 files again. It is not kept on disk.
        self.believed = LocalDir(name="")

    def __len__(self) -> int:
        return len(self._files)

    def find(self, file: LocalFile) -> CachedFile | None:
        """Return what a backup may believe of a file with this stat (I1).

        Bytes that are written through a shared mapping move no stat, so that a name counts too: it must be one whose
        file is written once.
        """
        known = self._find(file)
        is_believed = known is not None and known.settled and (self._trust_stat or scan.is_written_once(file.name))
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
        if stored.directory == encodable(str(directory.absolute())):
            cache._files = {(file.device, file.inode): file for file in stored.files[:ENTRIES_MAX]}
        return cache

    def save(self, cache_dir: Path, directory: Path) -> None:
        """Write the cache for a directory, replacing an older one at once. OSError: it cannot be written."""
        stored = _Stored(encodable(str(directory.absolute())), tuple(self._files.values()))
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


class Wanted(msgspec.Struct, frozen=True):
    """A file of which an identity fact has to be read from the disk."""

    path: FilePath
    file: LocalFile
    # Read the tail of the SST.
    sst: bool
    # Hash the content, unless the tail had an identity.
    digest: bool
    # The hash to compare with, where only that is asked.
    expected: bytes = b""

    @property
    def hashed_bytes(self) -> int:
        return self.file.metadata.size_bytes if self.digest else 0


class StoppedError(Exception):
    """The caller of a long reading does not want it any more."""


class FactReader:
    """Reads identity facts of the files below a directory that was scanned, where a cache does not know them.

    A caller that does not want the result any more sets `stop`, and `StoppedError` is raised. `looked_at_ns` is what
    `engine.local.scan.file_system_now_ns` said, after the scan.
    """

    def __init__(self, root: Path, cache: DigestCache, *, stop: threading.Event, looked_at_ns: int = 0) -> None:
        self._root, self._cache, self._stop, self._looked_at_ns = root, cache, stop, looked_at_ns

    def identify(self, local: LocalDir, remote: DirIndex, *, by_content: bool = False) -> LocalDir:
        """Fill in the identity facts that a diff of a scan against the previous snapshot asks for, and no others.

        These are `sst`, or `blake3` and `crc32`, of the files that `pairs_to_identify` names and that do not carry them
        yet; with `by_content` never `sst`, which damage leaves as it is. UnsafeSourceError: a file cannot be
        read, or has changed since the scan (I3).
        """
        identified: dict[FilePath, dict[str, LocalFile]] = {}
        wanted: list[Wanted] = []
        for parents, pairs in pairs_to_identify(local, remote):
            identified_here = identified[parents] = {}
            for file, entry in pairs:
                known = self._cache.find(file)
                by_sst = (
                    not by_content
                    and entry.sst is not None
                    and (known is None or not known.sst_read or known.sst is not None)
                )
                if known is None or not (known.sst_read if by_sst else known.blake3 is not None):
                    wanted.append(Wanted((*parents, file.name), file, sst=by_sst, digest=True))
                else:
                    facts = {"sst": known.sst, "blake3": known.blake3, "crc32": known.crc32}
                    identified_here[file.name] = msgspec.structs.replace(file, **facts)
        local = _with_files(local, identified, ())
        # What the cache said now, and what is taken over of what it said before. What is read now may have changed a
        # moment ago, and a hash that a source has by a file's name was read by nobody.
        taken_over = {id(file) for file in scan.all_files(self._cache.believed)}
        taken_over.update(id(file) for files in identified.values() for file in files.values())
        self._cache.believed = _only(local, taken_over)
        read: dict[FilePath, dict[str, LocalFile]] = {}
        for path, file in self._read(wanted).items():
            read.setdefault(path[:-1], {})[path[-1]] = file
        return _with_files(local, read, ()) if read else local

    def identify_ssts(self, files: Iterable[tuple[FilePath, LocalFile]]) -> dict[FilePath, SstIdentity]:
        """Return the identities of those files whose name ends in `.sst` and that have one. Raises as `identify`."""
        found: dict[FilePath, SstIdentity] = {}
        wanted: list[Wanted] = []
        for path, file in files:
            if not file.name.endswith(".sst"):
                continue
            known = self._cache.find(file)
            sst = file.sst if known is None or file.sst is not None else known.sst
            if sst is not None:
                found[path] = sst
            elif known is None or not known.sst_read:
                wanted.append(Wanted(path, file, sst=True, digest=False))
        return found | {path: file.sst for path, file in self._read(wanted).items() if file.sst is not None}

    def find_present(self, candidates: Iterable[tuple[FilePath, LocalFile, FileIndex]]) -> dict[FilePath, LocalFile]:
        """Find the local files whose content is that of the entry that each may be equal to (I2).

        Every file that the cache does not know from a restore of ours is read.
        """
        present: dict[FilePath, LocalFile] = {}
        wanted: list[Wanted] = []
        for path, file, entry in candidates:
            known = self._cache.find_restored(file)
            if known is None or known.blake3 is None:
                wanted.append(Wanted(path, file, sst=False, digest=True, expected=entry.blake3))
            elif known.blake3 == entry.blake3:
                present[path] = file
        if wanted:
            with scan.opened_dir(self._root) as source:
                equal = _map_read(functools.partial(_is_equal, source, self._stop), wanted, self._stop)
            present.update((item.path, item.file) for item, is_equal in zip(wanted, equal, strict=True) if is_equal)
        return present

    def _read(self, wanted: Sequence[Wanted]) -> dict[FilePath, LocalFile]:
        """Read facts from the disk, several files at once where there is much to hash, and remember them."""
        if not wanted:
            return {}
        with scan.opened_dir(self._root) as source:
            read = _map_read(functools.partial(_read_one, source, self._stop), wanted, self._stop)
        found: dict[FilePath, LocalFile] = {}
        for item, file in zip(wanted, read, strict=True):
            self._cache.record(file, looked_at_ns=self._looked_at_ns, sst_read=item.sst)
            found[item.path] = file
        return found


def _map_read(read: Callable[[Wanted], _Found], items: Sequence[Wanted], stop: threading.Event) -> list[_Found]:
    """Read one file after the other, or several at once where there is much to hash."""
    size_of = attrgetter("hashed_bytes")
    if sum(map(size_of, items)) <= READ_ALONE_BYTES_MAX:
        return [read(item) for item in items]
    groups = group_by_size(items, size_of, bytes_max=_GROUP_BYTES, count_max=_GROUP_FILES_MAX)
    found: list[_Found] = []
    with ThreadPoolExecutor(READERS_MAX, "tidemark-read") as readers:
        try:
            # To hand a file over takes as long as to hash a small one, and memory.
            for group in readers.map(lambda group: [read(item) for item in group], groups):
                found += group
        except BaseException:
            stop.set()
            raise
    return found


def _is_equal(source: scan.SourceDir, stop: threading.Event, item: Wanted) -> bool:
    """Compare a file with a hash; one that cannot be read or does not hold still is not equal, and not reused."""
    hasher = ContentHasher()
    try:
        with _opened_file(source, item) as descriptor:
            _hash_file(descriptor, item, hasher, stop)
    except UnsafeSourceError:
        return False
    return hasher.blake3 == item.expected


def _read_one(source: scan.SourceDir, stop: threading.Event, item: Wanted) -> LocalFile:
    sst: SstIdentity | None = None
    digest: Digest | None = None
    with _opened_file(source, item) as descriptor:
        if item.sst:
            sst = read_sst(descriptor, item.file.metadata.size_bytes)
        if item.digest and sst is None:
            hasher = FileHasher()
            _hash_file(descriptor, item, hasher, stop)
            digest = hasher.digest
    blake3, crc32 = digest or (None, None)
    return msgspec.structs.replace(item.file, sst=sst, blake3=blake3, crc32=crc32)


@contextlib.contextmanager
def _opened_file(source: scan.SourceDir, item: Wanted) -> Iterator[int]:
    """Open a file that has the stat of the scan, before the block and after it; else an UnsafeSourceError."""
    path = source.path.joinpath(*item.path)
    with scan.refusing(path), scan.opened("/".join(item.path), dir_fd=source.descriptor) as descriptor:
        if not scan.is_still(item.file, os.fstat(descriptor)):
            raise scan.changed_error(path)
        yield descriptor
        if not scan.is_still(item.file, os.fstat(descriptor)):
            raise scan.changed_error(path)


def _hash_file(descriptor: int, item: Wanted, hasher: ContentHasher, stop: threading.Event) -> None:
    """Hash a whole file; of one that has become shorter, what there is."""
    size_bytes = item.file.metadata.size_bytes
    while hasher.size_bytes < size_bytes:
        if stop.is_set():
            raise StoppedError
        chunk = os.pread(descriptor, min(READ_BYTES, size_bytes - hasher.size_bytes), hasher.size_bytes)
        if not chunk:
            return
        hasher.update(chunk)


def read_sst(descriptor: int, size_bytes: int) -> SstIdentity | None:
    """Read the identity of an SST at its end; None if it has none that can be relied on. Blocks."""
    tail_bytes = TAIL_BYTES
    for _ in range(SST_READS_MAX):
        tail_bytes = min(tail_bytes, size_bytes)
        answer = parse_sst_tail(os.pread(descriptor, tail_bytes, size_bytes - tail_bytes), size_bytes)
        if not isinstance(answer, MoreBytesNeeded):
            return answer
        tail_bytes = answer.tail_bytes
    return None


def parse_sst(name: str, data: bytes) -> SstIdentity | None:
    """Find the identity in the bytes of a whole file, as `read_sst`; None unless its name is an SST's."""
    answer = parse_sst_tail(data, len(data)) if name.endswith(".sst") else None
    return None if isinstance(answer, MoreBytesNeeded) else answer


def _with_files(local: LocalDir, known: dict[FilePath, dict[str, LocalFile]], path: FilePath) -> LocalDir:
    known_here = known.get(path)
    files = tuple([known_here.get(file.name, file) for file in local.files]) if known_here else local.files
    sub_dirs = tuple(_with_files(sub, known, (*path, sub.name)) for sub in local.sub_dirs)
    return LocalDir(name=local.name, files=files, sub_dirs=sub_dirs, mode=local.mode)


def _only(local: LocalDir, wanted: Collection[int]) -> LocalDir:
    """Return the files whose `id` is among those wanted."""
    files = tuple([file for file in local.files if id(file) in wanted])
    return LocalDir(name=local.name, files=files, sub_dirs=tuple(_only(sub, wanted) for sub in local.sub_dirs))
