"""Changelogs as files of this machine, how they are replayed, and the checksums beside zips and changelogs (Spark 4.1).

What reads, writes or replays changelogs blocks and belongs in a thread. A file that is written is private until it is
published, synced; a file that is read is never in memory as a whole (design 0004, L5).

A file and its checksum are two files, and nothing makes them one. So a checksum is never there while the file beside it
may be another: it goes before the file is replaced, and a file that has none gets none when it is replaced by a process
that cannot know which others write it.

Source:
    Spark `ChecksumCheckpointFileManager` (SPARK-51972, SPARK-54290), which writes and deletes both at once.
"""

import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import Final, Self, TypeAlias, TypeVar

import msgspec

from blobstore.concurrency import both, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import TargetError, UsageError
from engine.local.checksums import crc32c
from engine.local.scan import opened
from engine.rocksdb.store import StoreReader, StoreWriter
from engine.runtime import Runtime
from engine.state.checkpoint_dir import READ_BYTES_MAX, CheckpointDir, StateFiles
from engine.state.compression import Codec, Compressor, decompress_chunks
from index.snapshot.model import LineageItem
from index.spark import changelog
from index.spark.checksums import (
    FILE_CHECKSUM_BYTES_MAX,
    FileChecksum,
    check_file_checksum,
    decode_file_checksum,
    encode_file_checksum,
)
from index.spark.names import StateVersion, changelog_name, checksum_name

_READ_BYTES: Final = 1024 * 1024

T = TypeVar("T")


async def publish_checked(directory: CheckpointDir, path: str, source: Path | bytes, *, runtime: Runtime) -> int:
    """Publish a new file and its checksum, one PUT for each, and return the size of the file.

    It raises as `CheckpointDir.publish`, for either of the two. A file that is there is unchanged, as is its checksum.
    """
    if isinstance(source, bytes):
        found, size_bytes = crc32c(source), len(source)
    else:
        found, size_bytes = await run_blocking(_read_crc32c, source)
    checksum = FileChecksum.of_file(crc32c=found, size_bytes=size_bytes, timestamp_ms=runtime.local_now_ms())
    data = encode_file_checksum(checksum)
    await directory.publish(path, source, overwrite=False)
    # Only now, and not at the same time: where the name is taken, this would be the checksum of another file.
    await directory.publish(checksum_name(path), data, overwrite=False)
    return size_bytes


async def read_checked(files: StateFiles, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
    """Read a small file as `StateFiles.read`, and verify it if a checksum is there.

    Raises:
        FileChecksumError: It does not fit its checksum.
        UnknownFormatError: Its checksum is of another algorithm.
        DamagedError: It is larger than `size_bytes_max`, or its checksum is larger than any.
    """
    data, expected = await _with_checksum(files.read(path, size_bytes_max=size_bytes_max), files, path)
    if expected is not None:
        check_file_checksum(expected, crc32c=crc32c(data), size_bytes=len(data), subject=f"{files.location}/{path}")
    return data


async def fetch_checked(files: StateFiles, path: str, target: Path) -> int:
    """Copy a file to this machine as `StateFiles.fetch`, verify it as `read_checked`, and return its size.

    Nothing of `target` is there before it is verified.
    """
    # Cut by bytes: that is what a file system counts.
    unverified = target.with_name(f".{os.fsdecode(os.fsencode(target.name)[:200])}.unverified")
    try:
        size_bytes, expected = await _with_checksum(files.fetch(path, unverified), files, path)
        if expected is not None:
            found, found_bytes = await run_blocking(_read_crc32c, unverified)
            check_file_checksum(expected, crc32c=found, size_bytes=found_bytes, subject=f"{files.location}/{path}")
        await run_blocking(unverified.replace, target)
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="fetch", subject=str(target)) from error
    finally:
        await run_blocking(unverified.unlink, missing_ok=True)
    return size_bytes


async def _with_checksum(work: Awaitable[T], files: StateFiles, path: str) -> tuple[T, FileChecksum | None]:
    """Read a file and its checksum at once; the error of the file counts first."""
    found, expected = await both(outcome_of(work), outcome_of(_read_checksum(files, path)))
    if isinstance(found, Exception):
        raise found
    if isinstance(expected, Exception):
        raise expected
    return found, expected


async def _read_checksum(files: StateFiles, path: str) -> FileChecksum | None:
    name = checksum_name(path)
    try:
        data = await files.read(name, size_bytes_max=FILE_CHECKSUM_BYTES_MAX)
    except BlobNotFoundError:
        return None
    return decode_file_checksum(data, subject=f"{files.location}/{name}")


async def outcome_of(
    work: Awaitable[T], errors: type[Exception] | tuple[type[Exception], ...] = Exception
) -> T | Exception:
    """Return the result or one of these errors, so that it does not end what runs beside it."""
    try:
        return await work
    except errors as error:
        return error


def _read_crc32c(path: Path) -> tuple[int, int]:
    checksum = size_bytes = 0
    with opened(path) as descriptor:
        while chunk := os.pread(descriptor, _READ_BYTES, size_bytes):
            checksum = crc32c(chunk, checksum)
            size_bytes += len(chunk)
    return checksum, size_bytes


# Records are compressed together once they take this much. Each write is one system call.
_BUFFER_BYTES: Final = 128 * 1024
_CHUNK_BYTES: Final = 256 * 1024


class ChangelogWriter:
    """One changelog that is being written to a private file. Not for use by two threads at once.

    Keys and values are as in RocksDB: with the prefix of their column family, and with row checksums if those
    are on (design 0004, L4). The file is a changelog once `finish` has returned. The lineage is empty for versions 1
    and 2.

    Raises:
        LineageError: The lineage does not fit (design 0004, C6).
        UnsupportedRecordError: From the methods too: the version cannot hold it.
        OSError: From the methods too: the file cannot be written. Then `cancel`.
    """

    def __init__(
        self, path: Path, codec: Codec, version: changelog.ChangelogVersion, lineage: Sequence[LineageItem] = ()
    ) -> None:
        header = changelog.encode_header(version, lineage)
        self.path = path
        self.records = 0
        self._compressor = Compressor(codec)
        self._version = version
        self._buffer = bytearray(header)
        # Unbuffered: what is written is large already.
        self._file = path.open("wb", buffering=0)

    def write(self, record: changelog.Record) -> None:
        """Add a record. With row checksums the key of a DELETE begins with its own, as Spark has it."""
        data = changelog.encode_record(self._version, record)
        self._check_not_ended()
        self._buffer += data
        self.records += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self._write(self._compressor.write(self._buffer))
            self._buffer.clear()

    def finish(self) -> None:
        """Write the rest and the end mark, and close the file. It is not synced."""
        self._check_not_ended()
        self._buffer += changelog.encode_end(self._version)
        self._write(self._compressor.write(self._buffer) + self._compressor.finish())
        self._file.close()

    def cancel(self) -> None:
        """Close and remove the file; after `finish`, or a second time, this does nothing."""
        if not self._file.closed:
            self._buffer.clear()
            self._file.close()
            self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _check_not_ended(self) -> None:
        if self._file.closed:
            raise UsageError("was finished or cancelled", operation="write changelog", subject=str(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class ChangelogReader:
    """One changelog that is being read, once, from its beginning; see `open_changelog`."""

    def __init__(self, file: FileIO, path: Path, codec: Codec) -> None:
        self.path = path
        chunks = iter(lambda: file.read(_CHUNK_BYTES) or b"", b"")
        self._pieces = _slices(decompress_chunks(codec, chunks, subject=path.name))
        self._decoder = changelog.ChangelogDecoder(path.name)
        self._first: list[changelog.Record] = []
        self._finished = False
        while self._decoder.header is None and not self._finished:
            self._first = self._next_records()

    @property
    def header(self) -> changelog.ChangelogHeader:
        """The part before the records; known as soon as the file is open."""
        header = self._decoder.header
        assert header is not None  # noqa: S101  # a file that ends before its header is known is damaged
        return header

    def __iter__(self) -> Iterator[list[changelog.Record]]:
        """Iterate over the records in order, some thousands at a time, none twice.

        Raises:
            DamagedChangelogError: The file is not whole (design 0004, L2): records from before may be those of a
                file that was cut short.
            DamagedError: A block of it does not decompress or match its checksum.
        """
        first, self._first = self._first, []
        if first:
            yield first
        while not self._finished:
            records = self._next_records()
            if records:
                yield records

    def _next_records(self) -> list[changelog.Record]:
        piece = next(self._pieces, None)
        if piece is None:
            self._finished = True
            self._decoder.finish()
            return []
        return self._decoder.feed(piece)


def _slices(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Cut bytes into pieces of bounded size: decoded, the smallest records take thirty times their size."""
    for piece in pieces:
        for at in range(0, len(piece), _CHUNK_BYTES):
            yield piece[at : at + _CHUNK_BYTES]


@contextmanager
def open_changelog(path: Path, codec: Codec, of: StateVersion | None = None) -> Iterator[ChangelogReader]:
    """Open a changelog, a whole file, and read its header.

    Its content has to go with `of`, the version that its name in the store says (design 0004, L6); None: unknown.

    Raises:
        DamagedChangelogError: Header or lineage are cut short or missing, or go with another kind of name.
        DamagedError: Its beginning does not decompress.
        UnknownFormatError: A newer Spark wrote it.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        reader = ChangelogReader(file, path, codec)
        if of is not None:
            changelog.check_header(reader.header, of, subject=changelog_name(of))
        yield reader


# Opens a changelog for a block.
Opener: TypeAlias = Callable[[], AbstractContextManager[ChangelogReader]]

# Bringing a store to a later version: the last record of a key wins, so records are gathered in a dict, and the dict is
# written at once, in the order of its keys.

# Keys that are gathered before they are written, and the bytes in them: whichever is reached first.
BATCH_KEYS: Final = 50_000
BATCH_BYTES: Final = 16 * 1024 * 1024
# A store whose compactions wait gets them after this much: with each file more on level 0, looks take longer.
COMPACTED_AFTER_BYTES: Final = 256 * 1024 * 1024
# Keys that are looked up together: RocksDB does that without Python's lock, and their values are in memory together.
_LOOKUP_KEYS: Final = 64
# A look for one key costs as much as a scan over eight, or over five of large rows. Once the looks have cost what a
# scan does, a scan it is: at worst the price is twice the least.
_SCANNED_PER_LOOKUP: Final = 8
# The number of the column family, before each key.
PREFIX_BYTES: Final = 2


class KeyCounts(msgspec.Struct, frozen=True):
    """Number of keys of a store."""

    keys: int = 0
    # Those of internal column families; `keys` is without them.
    internal_keys: int = 0


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    changelogs: int = 0
    records: int = 0
    # Of keys and values in the records.
    size_bytes: int = 0
    # Of keys afterwards; None: they are not counted.
    counts: KeyCounts | None = None


def count_store(db: StoreReader, is_internal: Callable[[bytes], bool] | None = None) -> KeyCounts:
    """Count the keys of a store by a scan; `is_internal` as for `replay`, a damaged block is a `DamagedError`."""
    if is_internal is None:
        return KeyCounts(sum(db.count().values()))
    keys = internal_keys = 0
    for family, number in db.count(prefix_bytes=PREFIX_BYTES).items():
        if is_internal(family):
            internal_keys += number
        else:
            keys += number
    return KeyCounts(keys, internal_keys)


def replay(
    db: StoreWriter,
    changelogs: Iterable[Opener],
    *,
    before: KeyCounts | None = None,
    is_internal: Callable[[bytes], bool] | None = None,
    check_row: Callable[[changelog.Record], changelog.Record] | None = None,
) -> Replayed:
    """Apply changelogs to a store.

    Args:
        db: The store at the version before the first changelog. After an error it is of no version. If its compactions
            wait, they begin when this is done, or when so much was written that they are overdue.
        changelogs: One call per changelog that opens it, in the order of their versions. Each is closed when it is
            read.
        before: The keys that the store has now. They are counted on as Spark does, with a look for every key and a scan
            of what a DELETE_RANGE removes, or by one scan of the store at the end where that is cheaper. None: they are
            not counted.
        is_internal: Whether a key as stored belongs to an internal column family, which is counted apart. Only the
            first two bytes of the key may decide.
        check_row: Called for each record before it counts; returns the record as it is in RocksDB, or raises.

    Raises:
        DamagedChangelogError: A changelog is not whole (design 0004, L2).
        DamagedError: A changelog or the store is damaged.
    """
    counter = _Counter(db, is_internal, before) if before is not None else None
    target = _Target(db, counter)
    opened = records_count = 0
    for open_one in changelogs:
        opened += 1
        with open_one() as changelog:
            for read in changelog:
                records = read if check_row is None else list(map(check_row, read))
                records_count += len(records)
                target.take(records)
            if target.size_bytes >= COMPACTED_AFTER_BYTES:
                db.begin_compactions()
    target.write()
    db.begin_compactions()
    counts = None if counter is None else counter.counts()
    return Replayed(changelogs=opened, records=records_count, size_bytes=target.size_bytes, counts=counts)


class _Counter:
    """Counts how the number of keys changes, by look-ups before every write or by one scan after all of them."""

    def __init__(self, db: StoreWriter, is_internal: Callable[[bytes], bool] | None, before: KeyCounts) -> None:
        self._db = db
        self._is_internal = is_internal
        self._keys, self._internal_keys = before.keys, before.internal_keys
        self._lookups = 0
        self._by_scan = False

    def before_write(self, changes: dict[bytes, bytes | None]) -> None:
        """Count what these changes will do; None is a key that goes."""
        keys = sorted(changes)
        # The common case: nothing goes, and one number counts all.
        only_new = self._is_internal is None and None not in changes.values()
        for at in range(0, len(keys), _LOOKUP_KEYS):
            if self._is_scan_cheaper():
                return
            some = keys[at : at + _LOOKUP_KEYS]
            self._lookups += len(some)
            found = self._db.get_many(some)
            if only_new:
                self._keys += found.count(None)
                continue
            for key, before in zip(some, found, strict=True):
                after = changes[key]
                if (before is None) != (after is None):
                    self.add(key, -1 if after is None else 1)

    def before_delete_range(self, begin: bytes, end: bytes) -> None:
        if self._is_scan_cheaper() or begin >= end:
            return
        for key, _ in itertools.takewhile(lambda item: item[0] < end, self._db.items(start=begin)):
            self.add(key, -1)

    def add(self, key: bytes, count: int) -> None:
        if self._is_internal is not None and self._is_internal(key):
            self._internal_keys += count
        else:
            self._keys += count

    def counts(self) -> KeyCounts:
        return count_store(self._db, self._is_internal) if self._by_scan else KeyCounts(self._keys, self._internal_keys)

    def _is_scan_cheaper(self) -> bool:
        if not self._by_scan:
            stored = self._keys + self._internal_keys
            self._by_scan = self._lookups * _SCANNED_PER_LOOKUP > max(stored, _SCANNED_PER_LOOKUP * _LOOKUP_KEYS)
        return self._by_scan


class _Target:
    """The store behind a batch of changes that are not written yet.

    A key of the batch is in one of three places: `_values` has what it is set to, `_joined` a value and the
    operands that came after it, `_operands` operands that come after what the store has.
    """

    def __init__(self, db: StoreWriter, counter: _Counter | None) -> None:
        self._db = db
        self._counter = counter
        # None: the key goes.
        self._values: dict[bytes, bytes | None] = {}
        self._joined: dict[bytes, list[bytes]] = {}
        self._operands: dict[bytes, list[bytes]] = {}
        self._batch_bytes = 0
        self.size_bytes = 0

    def take(self, records: list[changelog.Record]) -> None:
        values, joined, operands = self._values, self._joined, self._operands
        size_bytes = 0
        for kind, key, value in records:
            size_bytes += len(key) + len(value)
            if kind == changelog.PUT:
                values[key] = value
            elif kind == changelog.DELETE:
                values[key] = None
            elif kind == changelog.MERGE:
                self._merge(key, value)
                continue
            elif kind == changelog.DELETE_RANGE:
                self.write()
                if self._counter is not None:
                    self._counter.before_delete_range(key, value)
                self._db.delete_range(key, value)
                continue
            if joined:
                joined.pop(key, None)
            if operands:
                operands.pop(key, None)
        self.size_bytes += size_bytes
        self._batch_bytes += size_bytes
        if self._batch_bytes >= BATCH_BYTES or len(values) + len(joined) + len(operands) >= BATCH_KEYS:
            self.write()

    def write(self) -> None:
        values = self._values
        for key, parts in self._joined.items():
            values[key] = self._db.merge_delimiter.join(parts)
        self._joined.clear()
        if values:
            if self._counter is not None:
                self._counter.before_write(values)
            self._db.write_batch(values)
            values.clear()
        self._write_operands()
        self._batch_bytes = 0

    def _merge(self, key: bytes, operand: bytes) -> None:
        parts = self._joined.get(key) or self._operands.get(key)
        if parts is not None:
            parts.append(operand)
        elif key not in self._values:
            self._operands[key] = [operand]
        else:
            value = self._values.pop(key)
            self._joined[key] = [operand] if value is None else [value, operand]

    def _write_operands(self) -> None:
        """Append `_operands` to what the store has, few keys at a time: those values may be of any size."""
        keys = sorted(self._operands)
        at, step = 0, 1
        while at < len(keys):
            some = keys[at : at + step]
            changes: dict[bytes, bytes | None] = {}
            size_bytes = 0
            for key, value in zip(some, self._db.get_many(some), strict=True):
                operands = self._operands[key]
                if value is None and self._counter is not None:
                    self._counter.add(key, 1)
                joined = self._db.merge_delimiter.join(operands if value is None else (value, *operands))
                changes[key] = joined
                size_bytes += len(joined)
            self._db.write_batch(changes)
            at += len(some)
            step = max(1, min(BATCH_KEYS, 2 * step, BATCH_BYTES * len(some) // max(1, size_bytes)))
        self._operands.clear()
