"""Rows of a snapshot that is open for reading only, or read in place, with changes of changelogs laid over them.

Nothing is written. RocksDB opened for writing syncs a dozen files, of a store that is read once and thrown away. Of a
snapshot that is read in place, blocks are fetched as they are needed (0013, W9).
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar, cast

from typing_extensions import override

from blobstore.concurrency import map_bounded
from engine.errors import DamagedError, NotFoundError, UsageError
from engine.rocksdb.in_place import StoreInPlace, end_of_prefix
from engine.rocksdb.sst_table import not_in_place
from engine.rocksdb.store import DEFAULT_FAMILY, RocksDbSettings, StoreWriter, list_families
from engine.settings import MIB
from engine.state.changelogs import Opener, Replayed
from engine.state.checkpoint_dir import StateFiles
from engine.state.zips import StateZip
from index.spark.changelog import DELETE, PUT, Record

# More than this is replayed instead: it would take much memory, or merging in Python longer than RocksDB.
OVERLAID_BYTES_MAX: Final = 64 * MIB
OVERLAID_RECORDS_MAX: Final = 20_000
_KINDS: Final = frozenset({PUT, DELETE})
# The changes get one part of this number of each list of rows, and what is stored the others.
_PARTS: Final = 4

_first: Final = itemgetter(0)

Value = TypeVar("Value")
T = TypeVar("T")
# Runs what is asked of the store's loop, and waits for it.
Run = Callable[[Coroutine[Any, Any, T]], T]
Rows = list[tuple[bytes, bytes]]


def gather_changes(
    changelogs: Iterable[Opener], check_row: Callable[[Record], Record] | None = None
) -> tuple[dict[bytes, bytes | None], Replayed] | None:
    """Return what changelogs set each key to, None where it goes; nothing if they are large or have other records.

    Arguments and errors are those of `replay`.
    """
    by_key: dict[bytes, bytes | None] = {}
    opened = records_count = size_bytes = 0
    for open_one in changelogs:
        opened += 1
        with open_one() as changelog:
            for read in changelog:
                records = read if check_row is None else map(check_row, read)
                for kind, key, value in records:
                    if kind not in _KINDS:
                        return None
                    by_key[key] = value if kind == PUT else None
                    size_bytes += len(key) + len(value)
                records_count += len(read)
                if size_bytes > OVERLAID_BYTES_MAX or records_count > OVERLAID_RECORDS_MAX:
                    return None
    return by_key, Replayed(changelogs=opened, records=records_count, size_bytes=size_bytes)


class OverlaidStore(StoreWriter):
    """A store with changes laid over its rows. It is open for reading only: RocksDB refuses every write."""

    # Until changes are laid over it there are none.
    _changes: Mapping[bytes, bytes | None] = MappingProxyType({})
    _sorted: Sequence[bytes] = ()

    @classmethod
    @override
    def open(cls, directory: Path, settings: RocksDbSettings | None = None, *, compactions_wait: bool = False) -> Self:
        """Open an existing store as `StoreReader.open`, if its rows are in one column family: others would be left out.

        Raises:
            DamagedError: As there, or for another column family.
        """
        families = list_families(directory)
        if families != (DEFAULT_FAMILY,):
            reason = f"has the column families {', '.join(families)}: Spark writes one"
            raise DamagedError(reason, operation="open", subject=str(directory))
        return super(StoreWriter, cls).open(directory, settings)

    def lay_over(
        self, changelogs: Iterable[Opener], check_row: Callable[[Record], Record] | None = None
    ) -> Replayed | None:
        """Show the changes of some changelogs from now on; where `gather_changes` returns None nothing is shown."""
        changes = gather_changes(changelogs, check_row)
        if changes is None:
            return None
        self._changes, replayed = changes
        self._sorted = sorted(self._changes)
        return replayed

    @override
    def compact(self, *, force: bool = False) -> None:
        raise UsageError("is open for reading only", operation="compact", subject=str(self.directory))

    def _stored(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return super().get_many(keys)

    def _stored_items(self, prefix: bytes, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        return super().items(prefix, start=start)

    def _stored_chunks(self, prefix: bytes, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        return super().chunks(prefix, rows_max=rows_max, bytes_max=bytes_max)

    @override
    def get(self, key: bytes) -> bytes | None:
        return self._changes[key] if key in self._changes else self._stored([key])[0]

    @override
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._changes.get(key, stored) for key, stored in zip(keys, self._stored(keys), strict=True)]

    @override
    def items(self, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        stored = self._stored_items(prefix, start)
        # Of two rows with one key the change comes first.
        rows: Iterator[tuple[bytes, bytes | None]] = heapq.merge(self._changed(prefix, start), stored, key=_first)
        for key, same in itertools.groupby(rows, key=_first):
            value = next(same)[1]
            if value is not None:
                yield key, value

    @override
    def chunks(self, prefix: bytes = b"", *, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        if not self._changes:
            yield from self._stored_chunks(prefix, rows_max, bytes_max)
            return
        rows_part, bytes_part = max(1, rows_max // _PARTS), max(1, bytes_max // _PARTS)
        stored = self._stored_chunks(prefix, max(1, rows_max - rows_part), max(1, bytes_max - bytes_part))
        changed = _cut(self._changed(prefix), rows_part, bytes_part)
        for rows, changes in align_chunks(stored, changed):
            found: list[tuple[bytes, bytes]] = []
            at = 0
            # Changes are few beside rows: what lies between two of them is taken as a whole.
            for key, value in changes:
                end = bisect_left(rows, (key,), at)
                found += rows[at:end]
                at = end + (end < len(rows) and rows[end][0] == key)
                if value is not None:
                    found.append((key, value))
            found += rows[at:]
            if found:
                yield found

    @override
    def count(self, *, prefix_bytes: int = 0) -> dict[bytes, int]:
        groups = itertools.groupby(self.items(), key=lambda row: row[0][:prefix_bytes])
        return {group: sum(1 for _ in rows) for group, rows in groups}

    def _changed(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes | None]]:
        at = bisect_left(self._sorted, max(prefix, start))
        following = (self._sorted[n] for n in range(at, len(self._sorted)))
        keys = itertools.takewhile(lambda key: key.startswith(prefix), following)
        return ((key, self._changes[key]) for key in keys)


def _cut(
    rows: Iterator[tuple[bytes, bytes | None]], rows_max: int, bytes_max: int
) -> Iterator[list[tuple[bytes, bytes | None]]]:
    chunk: list[tuple[bytes, bytes | None]] = []
    size_bytes = 0
    for key, value in rows:
        chunk.append((key, value))
        size_bytes += len(key) + len(value or b"")
        if len(chunk) >= rows_max or size_bytes >= bytes_max:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def align_chunks(
    before: Iterator[list[tuple[bytes, bytes]]], after: Iterator[list[tuple[bytes, Value]]]
) -> Iterator[tuple[list[tuple[bytes, bytes]], list[tuple[bytes, Value]]]]:
    """Cut two sides, both in the order of their keys, so that both parts of a pair end at the same key.

    That is the lower of the last keys of both chunks: up to it both sides are known. A chunk of either is held.
    """
    first, second = next(before, []), next(after, [])
    while first or second:
        bound = min(rows[-1][0] for rows in (first, second) if rows)
        ends = [bisect_right(rows, bound, key=_first) for rows in (first, second)]
        yield first[: ends[0]], second[: ends[1]]
        first = first[ends[0] :] or next(before, [])
        second = second[ends[1] :] or next(after, [])


class _SnapshotRanges:
    """The files of a snapshot: small ones in its zip, SSTs beside it."""

    def __init__(self, files: StateFiles, zipped: StateZip, name: str) -> None:
        self.location = f"{files.location}/{name}"
        self._files = files
        self._zipped = zipped.files
        self._ssts = {file.local_name: file for file in zipped.metadata.sst_files}

    def names(self) -> Iterable[str]:
        return (*self._zipped, *self._ssts)

    def size_bytes(self, name: str) -> int:
        if name in self._zipped:
            return len(self._zipped[name])
        if name not in self._ssts:
            hint = "the snapshot is damaged; an older one may be whole"
            raise NotFoundError(f"has no file {name}", operation="read", subject=self.location, hint=hint)
        return self._ssts[name].size_bytes

    async def read(self, name: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        if name in self._zipped:
            return self._zipped[name][start : start + size_bytes]
        return await self._files.read_range(self._ssts[name].path, start, size_bytes, fresh=fresh)


class StateInPlace(OverlaidStore):
    """A snapshot that is read in place, with changes laid over it; not for use by the thread of the loop itself."""

    def __init__(self, store: StoreInPlace, run: Run[Any], merge_delimiter: bytes | None) -> None:
        super().__init__(Path(store.location), cast("Any", None), merge_delimiter)
        self._store = store
        self._run = run

    @classmethod
    async def of_snapshot(
        cls, files: StateFiles, zipped: StateZip, name: str, run: Run[Any], merge_delimiter: bytes | None
    ) -> "StateInPlace":
        """Open a snapshot. Costs no request beyond that for its zip, which the caller has read.

        Raises:
            DamagedError: It has another column family than Spark writes, or none of RocksDB's files.
            UnknownFormatError, ManifestError: As `StoreInPlace.open`.
        """
        if zipped.metadata.log_files:
            raise not_in_place("archived write-ahead logs", f"{files.location}/{name}")
        store = await StoreInPlace.open(_SnapshotRanges(files, zipped, name))
        if store.families != (DEFAULT_FAMILY,):
            reason = f"has the column families {', '.join(store.families)}: Spark writes one"
            raise DamagedError(reason, operation="open", subject=store.location)
        return cls(store, run, merge_delimiter)

    @override
    def lay_over(
        self, changelogs: Iterable[Opener], check_row: Callable[[Record], Record] | None = None
    ) -> Replayed | None:
        """Show the changes of some changelogs from now on; an `UnknownFormatError` if they cannot be laid over rows."""
        replayed = super().lay_over(changelogs, check_row)
        if replayed is None:
            raise not_in_place("changelogs that are not laid over rows", self._store.location)
        return replayed

    @override
    def close(self) -> None:
        """Do nothing: the files belong to somebody else."""

    @override
    def _stored(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        async def get(key: bytes) -> bytes | None:
            return await self._store.get(key, merge_delimiter=self._merge_delimiter)

        return cast("list[bytes | None]", self._run(map_bounded(get, keys)))

    @override
    def _stored_items(self, prefix: bytes, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        for rows in self._chunks(prefix, start):
            yield from rows

    @override
    def _stored_chunks(self, prefix: bytes, rows_max: int, bytes_max: int) -> Iterator[Rows]:
        for rows in self._chunks(prefix, prefix):
            for at in range(0, len(rows), rows_max):
                yield rows[at : at + rows_max]

    def _chunks(self, prefix: bytes, start: bytes) -> Iterator[Rows]:
        first, stop = max(prefix, start), end_of_prefix(prefix)
        chunks = self._store.chunks(start=first, stop=stop, merge_delimiter=self._merge_delimiter)
        try:
            while rows := self._run(_next(chunks)):
                yield rows
        finally:
            self._run(chunks.aclose())


async def _next(chunks: AsyncIterator[Rows]) -> Rows:
    return await anext(chunks, [])
