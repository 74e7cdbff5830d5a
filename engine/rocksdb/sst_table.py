"""Read an SST by ranges: its end at first, then the blocks that may have a key (design 0013, W2).

Each block is compared with its checksum. What was read is kept in a cache with a limit.
"""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, Self, TypeVar

from engine.errors import DamagedError
from engine.local.checksums import BLOCK_SUMS
from engine.rocksdb.merge import sst_name
from engine.rocksdb.sst_blocks import LargeBlockError, decompress_sst_block
from engine.settings import KIB, MIB
from index.errors import UnknownFormatError
from index.rocksdb import lookup, sst
from index.rocksdb.manifest import SEQUENCE_MAX, ManifestFile

# The end of a file that is read at first where the MANIFEST does not say how long it is.
_TAIL_BYTES: Final = 64 * KIB
# Of the end of a file, and of any block, decompressed.
_TAIL_BYTES_MAX: Final = 64 * MIB
# Of the blocks of one request, decompressed.
_FETCHED_BYTES_MAX: Final = 128 * MIB
RANGES_MAX: Final = 10_000
_RANGE_BYTES: Final = 200
# Of a scan, the blocks that are fetched with one request: twice as many each time.
_READ_AHEAD_BYTES: Final = 16 * KIB
_READ_AHEAD_BYTES_MAX: Final = 1 * MIB
CACHE_BYTES: Final = 64 * MIB
# Where the last key of a file is the end of a deleted range, and not in the file.
_EXCLUSIVE: Final = SEQUENCE_MAX << 8

_UNKNOWN_HINT: Final = "restore the store, and open it with RocksDB"
DAMAGED_HINT: Final = "the file was altered or cut short; `tidemark verify` finds what else is"

_UINT32: Final = 0xFFFFFFFF

T = TypeVar("T")


class FileRanges(Protocol):
    """The files of one directory, which do not change."""

    # What errors call the directory.
    location: str

    def names(self) -> Iterable[str]:
        """Return the names of all files."""

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; a `NotFoundError` if there is none."""

    async def read(self, name: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        """Read a range that is within a file; `fresh`: not as before, for it came out wrong."""


class BlockCache:
    """What was read last, up to a number of bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()

    def get(self, key: tuple[str, int]) -> Any:  # noqa: ANN401 - whatever was put there
        """Return what was put under a key; None if it is not there any more."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: tuple[str, int], value: object, size_bytes: int) -> None:
        """Keep a value, in place of those that were used least recently."""
        self._bytes += size_bytes - self._kept.pop(key, (None, 0))[1]
        self._kept[key] = value, size_bytes
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]


class SstTable:
    """An SST of which the end has been read: its index, its filter, and what ranges of keys it deletes."""

    def __init__(self, files: FileRanges, file: ManifestFile, cache: BlockCache) -> None:
        self.file = file
        self.largest_sequence = file.largest_sequence
        self.deleted: list[lookup.DeletedRange] = []
        # Of memory, about.
        self.size_bytes = 0
        self._files = files
        self._cache = cache
        self._name = sst_name(file.number)
        self._subject = f"{files.location}/{self._name}"
        self._filter: bytes | None = None

    @classmethod
    async def open(cls, files: FileRanges, file: ManifestFile, cache: BlockCache) -> Self:
        table = cls(files, file, cache)
        await table._read_end()
        return table

    async def _read_end(self) -> None:
        size_bytes = self._files.size_bytes(self._name)
        if size_bytes != self.file.size_bytes:
            raise self._damaged(f"has {size_bytes} bytes, and the MANIFEST says {self.file.size_bytes}")
        tail_bytes = min(self.file.tail_bytes or _TAIL_BYTES, size_bytes)
        if tail_bytes > _TAIL_BYTES_MAX:
            raise not_in_place(f"an index of {tail_bytes} bytes", self._subject)
        self._end = await self._files.read(self._name, size_bytes - tail_bytes, tail_bytes)
        self._footer = self._read_footer(self._end[-sst.FOOTER_BYTES :], size_bytes)
        metaindex = await self._end_block("metaindex", self._footer.metaindex)
        handles = self._decoded(
            "metaindex", lambda: {name: sst.decode_handle(value)[0] for name, value in sst.decode_entries(metaindex)}
        )
        index, properties = self._footer.index or handles.get(sst.INDEX_BLOCK), handles.get(sst.PROPERTIES_BLOCK)
        if index is None or properties is None:
            raise not_in_place("no index, or no properties", self._subject)
        if sst.COMPRESSION_DICTIONARY in handles:
            raise not_in_place("a compression dictionary", self._subject)
        described = await self._end_block("properties", properties)
        entries = self._decoded("properties", lambda: dict(sst.decode_entries(described)))
        self._form = self._decoded("properties", lambda: sst.decode_index_form(entries))
        self._index = self._index_in(await self._end_block("index", index))
        self.size_bytes = self._index.held_bytes
        if self._form.whole_keys and (handle := handles.get(lookup.FILTER_BLOCK)) is not None:
            self._filter = await self._end_block("filter", handle)
            self.size_bytes += len(self._filter)
        if (handle := handles.get(sst.RANGE_DELETIONS)) is not None:
            self._note_ranges(await self._end_block("range deletion", handle))
        # Only what was decoded of it is kept.
        self._end = b""

    def _read_footer(self, tail: bytes, size_bytes: int) -> sst.SstFooter:
        if other := sst.OTHER_TABLES.get(int.from_bytes(tail[-8:], "little")):
            raise not_in_place(other, self._subject)
        footer = self._decoded("footer", lambda: sst.decode_footer(tail, size_bytes))
        if footer.checksum not in BLOCK_SUMS:
            raise not_in_place(f"blocks with the checksum {footer.checksum}", self._subject)
        if not footer.is_whole(BLOCK_SUMS[footer.checksum]):
            raise self._damaged("footer does not fit its checksum")
        if footer.format_version > sst.FORMAT_VERSION_MAX:
            raise not_in_place(f"format version {footer.format_version}", self._subject)
        return footer

    def _note_ranges(self, block: bytes) -> None:
        ranges = self._decoded("range deletion", lambda: lookup.decode_deleted_ranges(block))
        if len(ranges) > RANGES_MAX:
            raise not_in_place(f"more than {RANGES_MAX} deleted ranges of keys", self._subject)
        self.deleted = list(filter(None, map(self._within, ranges)))
        self.size_bytes += len(block) + _RANGE_BYTES * len(ranges)

    def _within(self, deleted: lookup.DeletedRange) -> lookup.DeletedRange | None:
        """Cut a deleted range to the keys of the file: beyond them newer rows may be on lower levels."""
        file = self.file
        is_open = int.from_bytes(file.largest[-sst.KEY_TRAILER_BYTES :], "little") >= _EXCLUSIVE
        end = file.largest_key if is_open else file.largest_key + b"\0"
        start, stop = max(deleted.start, file.smallest_key), min(deleted.stop, end)
        sequence = file.largest_sequence if self._form.one_sequence else deleted.sequence
        return lookup.DeletedRange(start, stop, sequence) if start < stop else None

    async def versions_of(self, key: bytes) -> list[lookup.Version]:
        """Return what the file has of a key, the newest first, down to a value or a deletion."""
        if self._filter is not None and not lookup.may_contain(self._filter, key):
            return []
        found: list[lookup.Version] = []
        async for separator, handle in self._handles(key):
            (block,) = await self._data_blocks([handle])
            found += [version for version in block if version.key == key]
            if separator > key or (found and found[-1].kind != sst.MERGE):
                break
        return found

    async def blocks(self, start: bytes, stop: bytes | None) -> AsyncIterator[list[lookup.Version]]:
        """Yield the entries of all blocks that may have keys from one on and before another."""
        ahead_bytes = _READ_AHEAD_BYTES
        wanted: list[sst.BlockHandle] = []
        async for separator, handle in self._handles(start):
            if wanted and (handle.offset != wanted[-1].end or handle.end - wanted[0].offset > ahead_bytes):
                for block in await self._data_blocks(wanted):
                    yield block
                wanted, ahead_bytes = [], min(2 * ahead_bytes, _READ_AHEAD_BYTES_MAX)
            wanted.append(handle)
            if stop is not None and separator >= stop:
                break
        for block in await self._data_blocks(wanted):
            yield block

    async def _handles(self, key: bytes) -> AsyncIterator[tuple[bytes, sst.BlockHandle]]:
        """Yield separator and place of each data block from the first one on that may have a key.

        Each block is behind the one before, so that no index, however often it repeats itself, has one read twice.
        """
        end = end_below = 0
        for separator, handle in self._seek(self._index, key):
            end = self._behind(end, handle)
            if not self._form.two_levels:
                yield separator, handle
                continue
            for below in self._seek(self._index_in(*await self._contents("index", [handle])), key):
                end_below = self._behind(end_below, below[1])
                yield below

    def _behind(self, end: int, handle: sst.BlockHandle) -> int:
        if handle.offset < end:
            raise self._damaged(f"index leads to a block at offset {handle.offset} behind one that ends at {end}")
        return handle.end

    def _index_in(self, contents: bytes) -> lookup.BlockIndex:
        return self._decoded("index", lambda: lookup.BlockIndex(contents, self._form))

    def _seek(self, index: lookup.BlockIndex, key: bytes) -> Iterator[tuple[bytes, sst.BlockHandle]]:
        try:
            yield from index.seek(key)
        except ValueError as error:
            raise self._damaged(f"index block {error}") from error

    async def _data_blocks(self, handles: Sequence[sst.BlockHandle]) -> list[list[lookup.Version]]:
        """Return the entries of blocks that follow each other."""
        found = []
        for contents in await self._contents("data", handles):
            versions = self._decoded("data", functools.partial(lookup.decode_versions, contents))
            if self._form.one_sequence:
                versions = [version._replace(sequence=self.file.largest_sequence) for version in versions]
            found.append(versions)
        return found

    async def _contents(self, kind: str, handles: Sequence[sst.BlockHandle]) -> list[bytes]:
        """Return blocks that follow each other: from the cache, or by one request."""
        kept = [self._cache.get((self._name, handle.offset)) for handle in handles]
        if None not in kept:
            return kept
        for handle in handles:
            self._check_place(kind, handle)
        try:
            found = await self._fetched(kind, handles, fresh=False)
        except DamagedError:
            # A fault on the way is not yet one of the file.
            found = await self._fetched(kind, handles, fresh=True)
        for handle, contents in zip(handles, found, strict=True):
            self._cache.put((self._name, handle.offset), contents, len(contents))
        return found

    async def _fetched(self, kind: str, handles: Sequence[sst.BlockHandle], *, fresh: bool) -> list[bytes]:
        first = handles[0].offset
        data = await self._files.read(self._name, first, handles[-1].end - first, fresh=fresh)
        found, left = [], _FETCHED_BYTES_MAX
        for handle in handles:
            found.append(self._checked(kind, handle, data[handle.offset - first : handle.end - first]))
            left -= len(found[-1])
            if left < 0:
                raise not_in_place(f"{kind} blocks that hold very much more than their bytes", self._subject)
        return found

    async def _end_block(self, kind: str, handle: sst.BlockHandle) -> bytes:
        """Return a block of which most are in the end that has been read."""
        self._check_place(kind, handle)
        at = handle.offset - (self.file.size_bytes - len(self._end))
        if at >= 0:
            with contextlib.suppress(DamagedError):
                return self._checked(kind, handle, self._end[at : at + handle.size_bytes + sst.TRAILER_BYTES])
        return (await self._contents(kind, [handle]))[0]

    def _check_place(self, kind: str, handle: sst.BlockHandle) -> None:
        if handle.offset < 0 or handle.end > self._footer.offset:
            raise self._damaged(f"{kind} block at offset {handle.offset} would reach beyond the file")
        if handle.size_bytes > _TAIL_BYTES_MAX:
            raise not_in_place(f"a {kind} block of {handle.size_bytes} bytes", self._subject)

    def _checked(self, kind: str, handle: sst.BlockHandle, data: bytes) -> bytes:
        """Compare a block with its checksum, and decompress it."""
        as_summed = sst.without_global_sequence(data[:-4]) if kind == "properties" else b""
        if not (self._fits(handle, data[:-4], data[-4:]) or (as_summed and self._fits(handle, as_summed, data[-4:]))):
            raise self._damaged(f"{kind} block at offset {handle.offset} does not fit its checksum")
        contents, compression = data[: -sst.TRAILER_BYTES], data[-sst.TRAILER_BYTES]
        if not compression:
            return contents
        sized = self._footer.format_version > 1
        return self._decoded(
            kind, lambda: decompress_sst_block(compression, contents, sized=sized, plain_bytes_max=_TAIL_BYTES_MAX)
        )

    def _fits(self, handle: sst.BlockHandle, data: bytes, stored: bytes) -> bool:
        found = BLOCK_SUMS[self._footer.checksum](data)
        found += sst.checksum_modifier(self._footer.base_context_checksum, handle.offset)
        return found & _UINT32 == int.from_bytes(stored, "little")

    def _decoded(self, kind: str, decode: Callable[[], T]) -> T:
        try:
            return decode()
        except LargeBlockError as error:
            raise not_in_place(f"a {kind} block that {error}", self._subject) from error
        except ValueError as error:
            raise self._damaged(f"{kind} block {error}") from error
        except NotImplementedError as error:
            raise not_in_place(str(error), self._subject) from error

    def _damaged(self, reason: str) -> DamagedError:
        return DamagedError(reason, operation="read", subject=self._subject, hint=DAMAGED_HINT)


def not_in_place(what: str, subject: str) -> UnknownFormatError:
    """Return the refusal of what is not read in place."""
    return UnknownFormatError(f"has {what}, which is not read in place", subject=subject, hint=_UNKNOWN_HINT)
