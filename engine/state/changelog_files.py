"""Changelogs as files of this machine: written record by record, read batch by batch.

Everything here blocks and is made for a thread. A file that is written is private until whoever publishes it has synced
it; a file that is read is never in memory as a whole (design 0004, L5).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from engine.errors import UsageError
from engine.state.compression import Codec, Compressor, decompress_chunks
from index.snapshot.model import LineageItem
from index.spark.changelog import (
    ChangelogDecoder,
    ChangelogHeader,
    ChangelogVersion,
    Record,
    check_header,
    encode_delete,
    encode_delete_range,
    encode_end,
    encode_header,
    encode_merge,
    encode_put,
)
from index.spark.names import StateVersion, changelog_name

# Records are compressed together once they take this much. Each write is one system call.
_BUFFER_BYTES: Final = 128 * 1024
_CHUNK_BYTES: Final = 256 * 1024


class ChangelogWriter:
    """One changelog that is being written. Not for use by two threads at once.

    Keys and values are what stands in RocksDB: with the prefix of their column family, and with row checksums if those
    are on (design 0004, L4). Until `finish` has returned, what stands at the path is no changelog.

    Args:
        path: A private file; it is created, or emptied if it is there.
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
        self._compressor = Compressor(codec)
        self._version = version
        self._path = path
        self._buffer = bytearray(header)
        self._size_bytes = 0
        self._records = 0
        self._ended = False
        # Unbuffered: what is written is large already.
        self._file = path.open("wb", buffering=0)

    @property
    def path(self) -> Path:
        """Where the file stands."""
        return self._path

    @property
    def records(self) -> int:
        """How many records were taken so far."""
        return self._records

    def put(self, key: bytes, value: bytes) -> None:
        """A key and its new value."""
        self._take(encode_put(self._version, key, value))

    def merge(self, key: bytes, operand: bytes) -> None:
        """A key and what is appended to its value."""
        self._take(encode_merge(self._version, key, operand))

    def delete(self, key: bytes) -> None:
        """A key that goes. With row checksums it begins with that of the key, as Spark has it."""
        self._take(encode_delete(self._version, key))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Every key from `begin` on and before `end` goes."""
        self._take(encode_delete_range(self._version, begin, end))

    def finish(self) -> int:
        """Write the rest and the end mark, and close the file. It is not synced.

        Returns:
            The size of the file in bytes.
        """
        if self._ended:
            raise self._ended_error()
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
        self._path.unlink(missing_ok=True)

    def _take(self, record: bytes) -> None:
        if self._ended:
            raise self._ended_error()
        self._buffer += record
        self._records += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self._write(self._compressor.write(self._buffer))
            self._buffer.clear()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        self._size_bytes += len(view)
        while view:
            view = view[self._file.write(view) :]

    def _ended_error(self) -> UsageError:
        return UsageError("was finished or cancelled", operation="write changelog", subject=str(self._path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class ChangelogReader:
    """One changelog that is being read, once, from its beginning; see `open_changelog`."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._pieces = _slices(decompress_chunks(codec, iter(self._next_chunk, b""), subject=path.name))
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
    def path(self) -> Path:
        """Where the file stands."""
        return self._path

    @property
    def header(self) -> ChangelogHeader:
        """What stands before the records; known as soon as the file is open."""
        header = self._decoder.header
        assert header is not None  # noqa: S101  # a file that ends before its header is known is damaged
        return header

    def __iter__(self) -> Iterator[list[Record]]:
        """The records in order, some thousands at a time, none twice.

        Raises:
            DamagedChangelogError: The file is not whole (design 0004, L2): what was handed out before may stand in a
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
        """Close the file; closing twice is fine."""
        self._file.close()

    def _next_records(self) -> list[Record]:
        """The records that come with the next piece; none may."""
        piece = next(self._pieces, None)
        if piece is None:
            self._finished = True
            self._decoder.finish()
            return []
        return self._decoder.feed(piece)

    def _next_chunk(self) -> bytes:
        return self._file.read(_CHUNK_BYTES) or b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _slices(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of bounded size: of the smallest records, a piece becomes thirty times its size."""
    for piece in pieces:
        for at in range(0, len(piece), _CHUNK_BYTES):
            yield piece[at : at + _CHUNK_BYTES]


def open_changelog(path: Path, codec: Codec, of: StateVersion | None = None) -> ChangelogReader:
    """Open a changelog and read its header.

    Args:
        path: A whole file; errors name it.
        codec: How it is compressed: what the offset log says.
        of: The version that the file's name in the store says, which its content has to go with (design 0004, L6);
            None: nobody knows.

    Raises:
        DamagedChangelogError: Header or lineage are cut short or none, or go with another kind of name.
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
