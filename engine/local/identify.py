"""Which local file is which: SST identities and content hashes, read where a decision needs them (design 0002, I1).

Everything here blocks and is made for a thread, all files of a directory per call.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from engine.errors import UnsafeSourceError
from engine.local.cache import DigestCache
from engine.local.hashing import Digest, FileHasher
from engine.local.scan import READ_FLAGS, SourceDir, changed_error, is_still, opened_dir, unreadable_error
from index.rocksdb.sst import TAIL_BYTES, MoreBytesNeeded, parse_sst_tail
from index.snapshot.dir_diff import LocalDir, LocalFile, pairs_to_identify
from index.snapshot.model import DirIndex, FileIndex, FilePath, SstIdentity

# The parser asks for more at most twice.
SST_READS_MAX: Final = 3
READ_BYTES: Final = 1024 * 1024
# Reading is spread over this many threads once there is so much of it that it pays.
READERS_MAX: Final = 4
READ_ALONE_BYTES_MAX: Final = 16 * 1024 * 1024
# Files that wait for these threads at a time.
_SUBMITTED_MAX: Final = 1024

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Wanted(msgspec.Struct, frozen=True):
    """A file of which an identity fact has to be read from the disk."""

    path: FilePath
    file: LocalFile
    # Read the tail of the SST.
    sst: bool
    # Hash the content, unless the tail had an identity.
    digest: bool


class StoppedError(Exception):
    """The caller of a long reading does not want it any more."""


class FactReader:
    """Reads identity facts of the files below a directory that was scanned, where a cache does not know them.

    A caller that does not want the result any more sets `stop`, and `StoppedError` is raised. `looked_at_ns` is what
    `engine.local.scan.file_system_now_ns` said, after the scan.
    """

    def __init__(self, root: Path, cache: DigestCache, *, stop: threading.Event, looked_at_ns: int = 0) -> None:
        self._root, self._cache, self._stop, self._looked_at_ns = root, cache, stop, looked_at_ns

    def identify(self, local: LocalDir, remote: DirIndex) -> LocalDir:
        """Fill in the identity facts that a diff of a scan against the previous snapshot asks for, and no others.

        These are `sst`, or `blake3` and `crc32`, of the files that `pairs_to_identify` names and that do not have their
        `blake3` yet. UnsafeSourceError: a file cannot be read, or has changed since the scan (I3).
        """
        identified: dict[FilePath, dict[str, LocalFile]] = {}
        wanted: list[Wanted] = []
        for parents, pairs in pairs_to_identify(local, remote):
            identified_here = identified[parents] = {}
            for file, entry in pairs:
                if file.blake3 is not None:
                    continue  # what carries its hash already is known by its name
                known = self._cache.find(file)
                by_sst = entry.sst is not None and (known is None or not known.sst_read or known.sst is not None)
                if known is None or not (known.sst_read if by_sst else known.blake3 is not None):
                    wanted.append(Wanted((*parents, file.name), file, sst=by_sst, digest=True))
                else:
                    facts = {"sst": known.sst, "blake3": known.blake3, "crc32": known.crc32}
                    identified_here[file.name] = msgspec.structs.replace(file, **facts)
        for path, file in self._read(wanted).items():
            identified[path[:-1]][path[-1]] = file
        return _with_files(local, identified, ())

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
        wanted: list[tuple[Wanted, bytes]] = []
        for path, file, entry in candidates:
            known = self._cache.find_restored(file)
            if known is None or known.blake3 is None:
                wanted.append((Wanted(path, file, sst=False, digest=True), entry.blake3))
            elif known.blake3 == entry.blake3:
                present[path] = file
        if wanted:
            size_bytes = sum(item.file.metadata.size_bytes for item, _ in wanted)
            with opened_dir(self._root) as source:
                equal = _map_read(functools.partial(_is_equal, source, self._stop), wanted, size_bytes, self._stop)
            found = zip(wanted, equal, strict=True)
            present.update((item.path, item.file) for (item, _), is_equal in found if is_equal)
        return present

    def _read(self, wanted: Sequence[Wanted]) -> dict[FilePath, LocalFile]:
        """Read facts from the disk, several files at once where there is much to hash, and remember them."""
        if not wanted:
            return {}
        size_bytes = sum(item.file.metadata.size_bytes for item in wanted if item.digest)
        with opened_dir(self._root) as source:
            read = _map_read(functools.partial(_read_one, source, self._stop), wanted, size_bytes, self._stop)
        found: dict[FilePath, LocalFile] = {}
        for item, file in zip(wanted, read, strict=True):
            self._cache.record(file, looked_at_ns=self._looked_at_ns, sst_read=item.sst)
            found[item.path] = file
        return found


def _map_read(
    read: Callable[[_Item], _Found], items: Sequence[_Item], size_bytes: int, stop: threading.Event
) -> list[_Found]:
    """Read one file after the other, or several at once where there is much to hash."""
    if size_bytes <= READ_ALONE_BYTES_MAX:
        return [read(item) for item in items]
    found: list[_Found] = []
    with ThreadPoolExecutor(READERS_MAX, "tidemark-read") as readers:
        try:
            # The pool makes a future of each item that it is given, and those of many files take much memory.
            for at in range(0, len(items), _SUBMITTED_MAX):
                found += readers.map(read, items[at : at + _SUBMITTED_MAX])
        except BaseException:
            stop.set()
            raise
    return found


def _is_equal(source: SourceDir, stop: threading.Event, item: tuple[Wanted, bytes]) -> bool:
    """Compare a file with a hash; one that cannot be read or does not hold still is not equal, and not reused."""
    try:
        return _read_one(source, stop, item[0]).blake3 == item[1]
    except UnsafeSourceError:
        return False


def _read_one(source: SourceDir, stop: threading.Event, item: Wanted) -> LocalFile:
    path, size_bytes = source.path.joinpath(*item.path), item.file.metadata.size_bytes
    sst: SstIdentity | None = None
    digest: Digest | None = None
    try:
        descriptor = os.open("/".join(item.path), READ_FLAGS, dir_fd=source.descriptor)
        try:
            held_still = is_still(item.file, os.fstat(descriptor))
            if held_still and item.sst:
                sst = read_sst(descriptor, size_bytes)
            if held_still and item.digest and sst is None:
                digest = _read_digest(descriptor, size_bytes, stop)
                held_still = digest is not None and is_still(item.file, os.fstat(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not held_still:
        raise changed_error(path)
    blake3, crc32 = digest or (None, None)
    return msgspec.structs.replace(item.file, sst=sst, blake3=blake3, crc32=crc32)


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


def _read_digest(descriptor: int, size_bytes: int, stop: threading.Event) -> Digest | None:
    """Return the hashes of a whole file; None if it has become shorter."""
    hasher = FileHasher()
    while hasher.size_bytes < size_bytes:
        if stop.is_set():
            raise StoppedError
        chunk = os.pread(descriptor, min(READ_BYTES, size_bytes - hasher.size_bytes), hasher.size_bytes)
        if not chunk:
            return None
        hasher.update(chunk)
    return hasher.digest


def _with_files(local: LocalDir, known: dict[FilePath, dict[str, LocalFile]], path: FilePath) -> LocalDir:
    known_here = known.get(path)
    files = tuple([known_here.get(file.name, file) for file in local.files]) if known_here else local.files
    sub_dirs = tuple(_with_files(sub, known, (*path, sub.name)) for sub in local.sub_dirs)
    return LocalDir(name=local.name, files=files, sub_dirs=sub_dirs, mode=local.mode)
