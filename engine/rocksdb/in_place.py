"""Read rows of a RocksDB by ranges of its files, wherever they are; nothing is written (design 0013).

A key is looked up as RocksDB does it: in the files that may hold it, what is newer first. Of each file the end is read,
with filter, index and deleted ranges, and then the blocks that may have the key; each is compared with its checksum.
What was read is kept in a cache with a limit.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from operator import attrgetter
from typing import Final, Self

from blobstore.concurrency import map_bounded
from engine.errors import DamagedError, NotFoundError, UsageError
from engine.local.checksums import crc32c
from engine.rocksdb.merge import MANIFEST_BYTES_MAX, parse_current, sst_name
from engine.rocksdb.sst_table import (
    CACHE_BYTES,
    DAMAGED_HINT,
    RANGES_MAX,
    BlockCache,
    FileRanges,
    SstTable,
    not_in_place,
)
from engine.rocksdb.store import DEFAULT_FAMILY
from engine.settings import MIB
from index.errors import ManifestError
from index.rocksdb import manifest, sst
from index.rocksdb.lookup import DeletedRange, Version, decode_writes

# A write buffer and a half, as Spark has it; it is held whole.
_LOG_BYTES_MAX: Final = 256 * MIB
_CURRENT_BYTES_MAX: Final = 1024
# Of all logs together, with what an entry takes in memory beside its bytes: they are held, too.
_LOGGED_BYTES_MAX: Final = 512 * MIB
_ENTRY_BYTES: Final = 200
# Entries of the log that a scan takes at once.
_LOG_SLICE: Final = 1000
_DELETIONS: Final = frozenset({sst.DELETION, sst.SINGLE_DELETION})


class StoreInPlace:
    """A RocksDB store whose files are read by ranges. Nothing is on a disk, and nobody writes it."""

    def __init__(
        self,
        files: FileRanges,
        families: dict[str, manifest.ManifestFamily],
        logged: "dict[int, _Logged]",
        cache: BlockCache,
    ) -> None:
        self.families = tuple(sorted(families))
        self.location = files.location
        self._files = files
        self._by_name = families
        self._logged = logged
        self._cache = cache

    @classmethod
    async def open(cls, files: FileRanges, *, cache_bytes: int = CACHE_BYTES) -> Self:
        """Read which files a store consists of, and its write-ahead log; what is read later is kept up to a size.

        Raises:
            NotFoundError: It is not a RocksDB directory.
            DamagedError, ManifestError: It is damaged.
            UnknownFormatError: It has what cannot be read in place; the error names it.
        """
        current = await _read_whole(files, "CURRENT", _CURRENT_BYTES_MAX)
        name = parse_current(current, files.location)
        data = await _read_whole(files, name, MANIFEST_BYTES_MAX)
        state = manifest.decode_manifest(data, crc32c=crc32c, subject=f"{files.location}/{name}")
        families = {family.name.decode("utf-8", "surrogateescape"): family for family in state.families}
        if other := {family.comparator for family in state.families} - {manifest.BYTEWISE}:
            raise not_in_place(f"the comparator {other.pop().decode(errors='replace')}", files.location)
        return cls(files, families, await _read_logs(files, state.families), BlockCache(cache_bytes))

    async def get(
        self, key: bytes, family: str = DEFAULT_FAMILY, *, merge_delimiter: bytes | None = None
    ) -> bytes | None:
        """Return the value of a key; None if there is none.

        Costs a request for the end of each file that may have the key, and one for each block that does, unless they
        are in the cache.

        Raises:
            NotFoundError: There is no such column family.
            DamagedError: A block does not fit its checksum, or is not what it has to be.
            UnknownFormatError: A file cannot be read in place; the error names why.
            UsageError: The key has operands, and there is no delimiter.
        """
        of = self._family(family)
        newest_first = itertools.chain.from_iterable(manifest.runs_of(of))
        files = [file for file in newest_first if file.smallest_key <= key <= file.largest_key]
        tables = await map_bounded(self._table, files)
        sources: list[_Logged | SstTable] = [self._logged[of.id], *tables]
        found: list[Version] = []
        deleted_before = 0
        for source in sources:
            if source.largest_sequence < deleted_before:
                break
            deleted_before = max(deleted_before, newest_deletion(source.deleted, key))
            found += await source.versions_of(key)
            if found and found[-1].kind != sst.MERGE:
                break
        return self._value(found, deleted_before, merge_delimiter)

    async def chunks(
        self,
        family: str = DEFAULT_FAMILY,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        merge_delimiter: bytes | None = None,
    ) -> AsyncGenerator[list[tuple[bytes, bytes]], None]:
        """Yield the rows from one key on and before another, in lists, in the order of their keys. Raises as `get`."""
        of = self._family(family)
        logged = self._logged[of.id]
        deleted = [*logged.deleted]
        blocks = [logged.blocks(), *(self._blocks(run, start, stop, deleted) for run in manifest.runs_of(of))]
        runs = [_Run(each, self.location) for each in blocks]
        while True:
            await map_bounded(_Run.fill, runs)
            runs = [run for run in runs if run.versions]
            if not runs:
                return
            # Up to here all that is to come is known: a key may go on in the next block.
            end = min(run.versions[-1].key for run in runs)
            for run in runs:
                while run.versions[-1].key == end and await run.more():
                    pass
            found = [version for run in runs for version in run.take(end)]
            found.sort(key=_order)
            # Ranges that end before are passed.
            deleted[:] = [each for each in deleted if each.stop > found[0].key]
            near = [each for each in deleted if each.start <= end]
            rows = []
            for key, versions in itertools.groupby(found, key=attrgetter("key")):
                if key < start:
                    continue
                if stop is not None and key >= stop:
                    break
                value = self._value(versions, newest_deletion(near, key), merge_delimiter)
                if value is not None:
                    rows.append((key, value))
            if rows:
                yield rows

    def _family(self, name: str) -> manifest.ManifestFamily:
        found = self._by_name.get(name)
        if found is None:
            hint = f"it has {', '.join(self.families)}"
            raise NotFoundError(f"has no column family {name!r}", operation="read", subject=self.location, hint=hint)
        return found

    def _value(self, versions: Iterable[Version], deleted_before: int, delimiter: bytes | None) -> bytes | None:
        newest_first: list[bytes] = []
        has_operands = False
        for version in versions:
            if version.sequence < deleted_before or version.kind in _DELETIONS:
                break
            newest_first.append(version.value)
            if version.kind == sst.VALUE:
                break
            has_operands = True
        if has_operands and delimiter is None:
            hint = "say what was between them when they were written"
            raise UsageError("has operands of merges", operation="read", subject=self.location, hint=hint)
        return (delimiter or b"").join(newest_first[::-1]) if newest_first else None

    async def _table(self, file: manifest.ManifestFile) -> SstTable:
        name = sst_name(file.number)
        found: SstTable | None = self._cache.get((name, -1))
        if found is None:
            found = await SstTable.open(self._files, file, self._cache)
            self._cache.put((name, -1), found, found.size_bytes)
        return found

    async def _blocks(
        self, level: Sequence[manifest.ManifestFile], start: bytes, stop: bytes | None, deleted: list[DeletedRange]
    ) -> AsyncIterator[list[Version]]:
        """Yield the entries of files that follow each other; the ranges of a file are known before its first entry."""
        for file in level:
            if file.largest_key < start or (stop is not None and file.smallest_key >= stop):
                continue
            table = await self._table(file)
            deleted += table.deleted
            if len(deleted) > RANGES_MAX:
                raise not_in_place(f"more than {RANGES_MAX} deleted ranges of keys", self.location)
            async for block in table.blocks(start, stop):
                yield block


class _Logged:
    """What the write-ahead log has of a column family."""

    largest_sequence = manifest.SEQUENCE_MAX

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.deleted: list[DeletedRange] = []

    async def versions_of(self, key: bytes) -> list[Version]:
        at = bisect_left(self.versions, key, key=attrgetter("key"))
        return self.versions[at : bisect_right(self.versions, key, at, key=attrgetter("key"))]

    async def blocks(self) -> AsyncIterator[list[Version]]:
        for at in range(0, len(self.versions), _LOG_SLICE):
            yield self.versions[at : at + _LOG_SLICE]


async def _read_logs(files: FileRanges, families: Iterable[manifest.ManifestFamily]) -> dict[int, _Logged]:
    """Read what the write-ahead logs have that no SST has: of each family from the log on that it needs."""
    logged = {family.id: _Logged() for family in families}
    needed = {family.id: family.log_number for family in families}
    stems = {name.removesuffix(".log") for name in files.names() if name.endswith(".log")}
    is_cut, left = False, _LOGGED_BYTES_MAX
    for number, name in sorted((int(stem), f"{stem}.log") for stem in stems if stem.isdecimal()):
        if number < min(needed.values()) or not files.size_bytes(name):
            continue
        subject = f"{files.location}/{name}"
        data = await _read_whole(files, name, _LOG_BYTES_MAX)
        try:
            records, whole_bytes = manifest.decode_log(
                data, crc32c=crc32c, is_live=True, number=number, subject=subject
            )
        except ManifestError as error:
            raise not_in_place(f"a write-ahead log that is not read: {error}", files.location) from error
        if is_cut and records:
            raise not_in_place("a write-ahead log that is cut before the next one", subject)
        is_cut = is_cut or whole_bytes < len(data)
        needing = {id_: logged[id_] for id_, least in needed.items() if number >= least}
        try:
            left = _note_writes(records, needing, left - len(data))
        except ValueError as error:
            raise DamagedError(str(error), operation="read", subject=subject, hint=DAMAGED_HINT) from error
        except NotImplementedError as error:
            raise not_in_place(str(error), subject) from error
    for of in logged.values():
        of.versions.sort(key=_order)
    return logged


def _note_writes(records: Iterable[bytes], logged: dict[int, _Logged], left: int) -> int:
    """Add the writes of some families, and return how many bytes may still be held."""
    for family, write in itertools.chain.from_iterable(map(decode_writes, records)):
        left -= _ENTRY_BYTES
        if left < 0:
            raise NotImplementedError("write-ahead logs with more writes than are held in memory")
        if (of := logged.get(family)) is not None:
            of.versions.append(write) if isinstance(write, Version) else of.deleted.append(write)
    return left


async def _read_whole(files: FileRanges, name: str, size_bytes_max: int) -> bytes:
    size_bytes = files.size_bytes(name)
    if size_bytes > size_bytes_max:
        raise not_in_place(f"{size_bytes} bytes of {name}", files.location)
    return await files.read(name, 0, size_bytes)


class _Run:
    """Entries in the order of their keys, of which some are here."""

    def __init__(self, blocks: AsyncIterator[list[Version]], location: str) -> None:
        self._blocks = blocks
        self._location = location
        self._last = b""
        self.versions: list[Version] = []

    async def fill(self) -> None:
        while not self.versions and await self.more():
            pass

    async def more(self) -> bool:
        """Read the next block; return whether there was one."""
        block = await anext(self._blocks, None)
        if block is None:
            return False
        for version in block:
            if version.key < self._last:
                message = f"has the key {version.key.hex()} behind a greater one"
                raise DamagedError(message, operation="read", subject=self._location, hint=DAMAGED_HINT)
            self._last = version.key
        self.versions += block
        return True

    def take(self, end: bytes) -> list[Version]:
        """Take what is not above a key."""
        cut = bisect_right(self.versions, end, key=attrgetter("key"))
        taken, self.versions = self.versions[:cut], self.versions[cut:]
        return taken


def end_of_prefix(prefix: bytes) -> bytes | None:
    """Return the least key above all keys with a prefix; None if there is none."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None


def newest_deletion(deleted: Iterable[DeletedRange], key: bytes) -> int:
    """Return the sequence number before which ranges delete a key; 0 if none does."""
    return max((of.sequence for of in deleted if of.start <= key < of.stop), default=0)


def _order(version: Version) -> tuple[bytes, int]:
    return version.key, -version.sequence
