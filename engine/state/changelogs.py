"""Changelogs as files of this machine, and the checksums beside zips and changelogs (Spark 4.1 and newer).

Readers and writers of changelogs block and belong in a thread. A file that is written is private until it is published,
synced; a file that is read is never in memory as a whole (design 0004, L5).

A file and its checksum are two files, and nothing makes them one. So a checksum is never there while the file beside it
may be another: it goes before the file is replaced, and a file that has none gets none when it is replaced by a process
that cannot know which others write it.

Source:
    Spark `ChecksumCheckpointFileManager` (SPARK-51972, SPARK-54290), which writes and deletes both at once.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError
from engine.clock import Runtime
from engine.errors import TargetError, UsageError
from engine.local.hashing import crc32c
from engine.local.scan import READ_FLAGS
from engine.state.checkpoint_dir import READ_BYTES_MAX, CheckpointDir
from engine.state.compression import Codec, Compressor, decompress_chunks
from engine.state.sources import StateFiles
from index.snapshot.model import LineageItem
from index.spark.changelog import (
    DELETE,
    DELETE_RANGE,
    MERGE,
    PUT,
    ChangelogDecoder,
    ChangelogHeader,
    ChangelogVersion,
    Record,
    check_header,
    encode_end,
    encode_header,
    encode_record,
)
from index.spark.checksums import (
    FILE_CHECKSUM_BYTES_MAX,
    FileChecksum,
    check_file_checksum,
    decode_file_checksum,
    encode_file_checksum,
)
from index.spark.names import StateVersion, changelog_name, checksum_name

# What a checksum says of who made it, where Spark names an executor.
CREATOR: Final = "tidemark"

_READ_BYTES: Final = 1024 * 1024

T = TypeVar("T")


async def publish_checked(directory: CheckpointDir, path: str, source: Path | bytes, *, runtime: Runtime) -> int:
    """Publish a new file and its checksum, one PUT for each, and return the size of the file.

    Raises:
        CheckpointFileExistsError: A file is there. It is unchanged, as is its checksum.
        CheckpointUnknownError: The store never said whether it took one of the two.
        OSError: The source cannot be read.
        StoreError: The store did not take one of the two.
    """
    if isinstance(source, bytes):
        found, size_bytes = crc32c(source), len(source)
    else:
        found, size_bytes = await run_blocking(_read_crc32c, source)
    checksum = FileChecksum.of_file(
        crc32c=found, size_bytes=size_bytes, timestamp_ms=runtime.local_now_ms(), executor_id=CREATOR
    )
    data = encode_file_checksum(checksum)
    await directory.publish(path, source, overwrite=False)
    # Only now, and not at the same time: where the name is taken, this would be the checksum of another file.
    await directory.publish(checksum_name(path), data, overwrite=False)
    return size_bytes


async def read_checked(files: StateFiles, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
    """Read a small file, and verify it if a checksum is there.

    Raises:
        BlobNotFoundError: There is no such file.
        FileChecksumError: It does not fit its checksum.
        UnknownFormatError: Its checksum is of another algorithm.
        DamagedError: It is larger than `size_bytes_max`, or its checksum is larger than any.
        StoreError: As the store says.
    """
    data, expected = await _with_checksum(files.read(path, size_bytes_max=size_bytes_max), files, path)
    if expected is not None:
        check_file_checksum(expected, crc32c=crc32c(data), size_bytes=len(data), subject=f"{files.location}/{path}")
    return data


async def fetch_checked(files: StateFiles, path: str, target: Path) -> int:
    """Copy a file to this machine, verify it if a checksum is there, and return its size.

    Nothing of `target` is there before it is verified.

    Raises:
        TargetError: The target cannot be written.
        BlobNotFoundError, FileChecksumError, UnknownFormatError, DamagedError, StoreError: As `read_checked`.
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
    async with asyncio.TaskGroup() as both:
        reading = both.create_task(outcome_of(work))
        expecting = both.create_task(outcome_of(_read_checksum(files, path)))
    found, expected = reading.result(), expecting.result()
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
    """Return the result or one of these errors, so that it does not end what runs beside it in a task group."""
    try:
        return await work
    except errors as error:
        return error


def _read_crc32c(path: Path) -> tuple[int, int]:
    checksum = size_bytes = 0
    descriptor = os.open(path, READ_FLAGS)
    try:
        while chunk := os.pread(descriptor, _READ_BYTES, size_bytes):
            checksum = crc32c(chunk, checksum)
            size_bytes += len(chunk)
    finally:
        os.close(descriptor)
    return checksum, size_bytes


# Records are compressed together once they take this much. Each write is one system call.
_BUFFER_BYTES: Final = 128 * 1024
_CHUNK_BYTES: Final = 256 * 1024


class ChangelogWriter:
    """One changelog that is being written to a private file. Not for use by two threads at once.

    Keys and values are as in RocksDB: with the prefix of their column family, and with row checksums if those
    are on (design 0004, L4). The file is a changelog once `finish` has returned.

    Args:
        path: It is created, or emptied if it is there.
        codec: How the file is compressed.
        version: From `index.spark.changelog.changelog_version`.
        lineage: What its header says; empty for versions 1 and 2.

    Raises:
        LineageError: The lineage does not fit (design 0004, C6).
        UnsupportedRecordError: From the methods too: the version cannot hold it.
        OSError: From the methods too: the file cannot be written. Then `cancel`.
    """

    def __init__(
        self, path: Path, codec: Codec, version: ChangelogVersion, lineage: Sequence[LineageItem] = ()
    ) -> None:
        header = encode_header(version, lineage)
        self.path = path
        self.records = 0
        self._compressor = Compressor(codec)
        self._version = version
        self._buffer = bytearray(header)
        self._size_bytes = 0
        self._ended = False
        # Unbuffered: what is written is large already.
        self._file = path.open("wb", buffering=0)

    def put(self, key: bytes, value: bytes) -> None:
        self._take((PUT, key, value))

    def merge(self, key: bytes, operand: bytes) -> None:
        self._take((MERGE, key, operand))

    def delete(self, key: bytes) -> None:
        """Add the removal of a key. With row checksums the key begins with its own, as Spark has it."""
        self._take((DELETE, key, b""))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self._take((DELETE_RANGE, begin, end))

    def finish(self) -> int:
        """Write the rest and the end mark, close the file, and return its size. It is not synced."""
        self._check_not_ended()
        self._buffer += encode_end(self._version)
        self._write(self._compressor.write(self._buffer) + self._compressor.finish())
        self._ended = True
        self._file.close()
        return self._size_bytes

    def cancel(self) -> None:
        """Close and remove the file; after `finish`, or a second time, this does nothing."""
        if self._ended:
            return
        self._ended = True
        self._buffer.clear()
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _take(self, record: Record) -> None:
        data = encode_record(self._version, record)
        self._check_not_ended()
        self._buffer += data
        self.records += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self._write(self._compressor.write(self._buffer))
            self._buffer.clear()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        self._size_bytes += len(view)
        while view:
            view = view[self._file.write(view) :]

    def _check_not_ended(self) -> None:
        if self._ended:
            raise UsageError("was finished or cancelled", operation="write changelog", subject=str(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class ChangelogReader:
    """One changelog that is being read, once, from its beginning; see `open_changelog`."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        chunks = iter(lambda: self._file.read(_CHUNK_BYTES) or b"", b"")
        self._pieces = _slices(decompress_chunks(codec, chunks, subject=path.name))
        self._decoder = ChangelogDecoder(path.name)
        self._first: list[Record] = []
        self._finished = False
        try:
            while self._decoder.header is None and not self._finished:
                self._first = self._next_records()
        except BaseException:
            self._file.close()
            raise

    @property
    def header(self) -> ChangelogHeader:
        """The part before the records; known as soon as the file is open."""
        header = self._decoder.header
        assert header is not None  # noqa: S101  # a file that ends before its header is known is damaged
        return header

    def __iter__(self) -> Iterator[list[Record]]:
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

    def close(self) -> None:
        self._file.close()

    def _next_records(self) -> list[Record]:
        piece = next(self._pieces, None)
        if piece is None:
            self._finished = True
            self._decoder.finish()
            return []
        return self._decoder.feed(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _slices(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Cut bytes into pieces of bounded size: decoded, the smallest records take thirty times their size."""
    for piece in pieces:
        for at in range(0, len(piece), _CHUNK_BYTES):
            yield piece[at : at + _CHUNK_BYTES]


def open_changelog(path: Path, codec: Codec, of: StateVersion | None = None) -> ChangelogReader:
    """Open a changelog and read its header.

    Args:
        path: A whole file.
        codec: How it is compressed: what the offset log says.
        of: The version that the file's name in the store says, which its content has to go with (design 0004, L6);
            None: unknown.

    Raises:
        DamagedChangelogError: Header or lineage are cut short or missing, or go with another kind of name.
        DamagedError: Its beginning does not decompress.
        UnknownFormatError: A newer Spark wrote it.
        OSError: It cannot be read.
    """
    reader = ChangelogReader(path, codec)
    try:
        if of is not None:
            check_header(reader.header, of, subject=changelog_name(of))
    except BaseException:
        reader.close()
        raise
    return reader
