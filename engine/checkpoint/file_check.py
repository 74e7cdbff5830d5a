"""Read a file of a checkpoint whole, and refuse it if it is not what was written (design 0005, K2, K4 and K7).

A changelog or a zip is read more strictly than by a load: Spark reads a zip from its front, by what is before and
behind each entry, and we by the list at its end; so both are looked at. Hadoop's hidden checksums and left-overs, which
no store lists, are there on this machine's file systems only. All of it blocks.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from engine.checkpoint.errors import unreadable
from engine.checkpoint.findings import DELETE, Finding, damage
from engine.errors import DamagedError
from engine.local.hashing import crc32c
from engine.local.scan import READ_FLAGS
from engine.state.compression import Codec, decompress_chunks
from engine.state.zips import ZIP_BYTES_MAX, StateZip, read_state_zip
from index.errors import FileChecksumError
from index.spark.changelog import ChangelogDecoder, ChangelogHeader, check_header
from index.spark.checksums import (
    HadoopSums,
    check_file_checksum,
    decode_file_checksum,
    hadoop_checksum_bytes,
    hadoop_checksum_name,
)
from index.spark.lineage import Lineage
from index.spark.names import StateVersion, checksum_name

_CHUNK_BYTES: Final = 256 * 1024
_HINT: Final = "the file was altered or cut short; take it from a backup, or let an older version be loaded"

# Of a zip: what is before an entry, its line in the list at the end, and the end of that list.
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LISTED: Final = struct.Struct("<4s6H3L5H2L")
_END: Final = struct.Struct("<4s4H2LH")
_LOCAL_MAGIC: Final = b"PK\x03\x04"
_LISTED_MAGIC: Final = b"PK\x01\x02"
_DESCRIPTOR_MAGIC: Final = b"PK\x07\x08"
_END_MAGIC: Final = b"PK\x05\x06"
_DESCRIPTOR: Final = struct.Struct("<4s3L")
_FOLLOWED: Final = 0x8

_READ_BYTES: Final = 1024 * 1024
_HIDDEN_BYTES_MAX: Final = 256 * 1024 * 1024
_HIDDEN_HINT: Final = "the file was replaced by something else, or the disk fails; take it from a backup"


class ChangelogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A changelog in which nothing is wrong."""

    header: ChangelogHeader
    records: int
    size_bytes: int
    # How many bytes its lineage takes of the 65,535 that it may (design 0005, K6).
    lineage_bytes: int

    @property
    def lineage(self) -> Lineage:
        """Of its header."""
        return self.header.lineage


def check_changelog_file(path: Path, codec: Codec, at: StateVersion, *, checksum: bytes | None) -> ChangelogReport:
    """Read a changelog from its beginning to its end. Blocks, and holds a bounded part of it.

    Args:
        path: The file.
        codec: How it is compressed: what the offset log says.
        at: The version and the id that its name in the store says.
        checksum: Content of the `.crc` beside it; None if there is none.

    Raises:
        DamagedError: It does not decompress, or cannot be read, then with the `OSError` as its cause.
        DamagedChangelogError: Header, records or end mark are not what a writer writes, or go with another name.
        FileChecksumError: It does not fit its `.crc`, or that is none.
        UnknownFormatError: A newer Spark wrote the file or its `.crc`.
        UnsafeNameError: An id in its lineage cannot be part of a file name.
        TargetError: This machine lacks what it takes to read it.
    """
    subject = str(path)
    expected = None if checksum is None else decode_file_checksum(checksum, subject=checksum_name(subject))
    source = _Summed(path)
    decoder = ChangelogDecoder(subject)
    records = 0
    try:
        for piece in decompress_chunks(codec, source.chunks(), subject=subject):
            for start in range(0, len(piece), _CHUNK_BYTES):
                records += len(decoder.feed(piece[start : start + _CHUNK_BYTES]))
        decoder.finish()
    except OSError as error:
        raise unreadable(path, error, _HINT) from error
    header = decoder.header
    assert header is not None  # noqa: S101 — `finish` refuses a file without one
    check_header(header, at, subject=subject)
    if expected is not None:
        check_file_checksum(expected, crc32c=source.crc32c, size_bytes=source.size_bytes, subject=subject)
    # Two strings, each with its length before it, of which the first is the version.
    lineage_bytes = max(0, header.size_bytes - 6)
    return ChangelogReport(header=header, records=records, size_bytes=source.size_bytes, lineage_bytes=lineage_bytes)


def check_zip_file(source: Path | bytes, *, checksum: bytes | None, subject: str = "") -> StateZip:
    """Read a snapshot's zip whole: as we load it, and as Spark does. Blocks.

    What stays unseen without a `.crc` is what neither reads: the times of its entries.

    Args:
        source: The file, or its content.
        checksum: Content of the `.crc` beside it; None if there is none.
        subject: What errors call it; a path calls itself.

    Returns:
        What is in it. Whether its SSTs are there, and of the sizes that it says, is for the caller to see.

    Raises:
        DamagedError: Not such a zip, or unreadable, then with the `OSError` as its cause.
        UnsafeNameError: A name in it is unsafe.
        FormatError: Its metadata cannot be read, or it does not fit its `.crc`.
        TargetError: This machine lacks what it takes to read it.
    """
    subject = subject or (str(source) if isinstance(source, Path) else "zip")
    data = source if isinstance(source, bytes) else _read_zip(source)
    if checksum is not None:
        expected = decode_file_checksum(checksum, subject=checksum_name(subject))
        check_file_checksum(expected, crc32c=crc32c(data), size_bytes=len(data), subject=subject)
    found = read_state_zip(data, subject=subject)
    try:
        _check_stream(data)
    except (ValueError, struct.error) as error:
        raise DamagedError(
            f"cannot be read from its front, as Spark reads it: {error}", operation="check", subject=subject, hint=_HINT
        ) from error
    return found


def _read_zip(path: Path) -> bytes:
    try:
        descriptor = os.open(path, READ_FLAGS)
        try:
            data = b"".join(iter(lambda: os.read(descriptor, _CHUNK_BYTES), b""))
            if len(data) > ZIP_BYTES_MAX:
                raise _damaged(path, f"has more than {ZIP_BYTES_MAX} bytes")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path, error, _HINT) from error
    return data


def _check_stream(data: bytes) -> None:
    """Check that entries follow each other from the first byte on, and that the list at the end says the same.

    `read_state_zip` has taken the zip before: the list is whole, and the contents fit the checksums in it.

    Raises:
        ValueError: Something is between them, or is said twice and differently.
        struct.error: It ends too soon.
    """
    end = data.rfind(_END_MAGIC)
    _, disk, first_disk, here, count, list_bytes, list_at, comment = _END.unpack_from(data, end)
    if (disk, first_disk, here, comment) != (0, 0, count, 0) or end + _END.size != len(data):
        raise ValueError("its end record is none that a snapshot has")
    if list_at + list_bytes != end:
        raise ValueError("its list of entries does not end where the end record begins")
    at, listed_at = 0, list_at
    for _ in range(count):
        listed = _LISTED.unpack_from(data, listed_at)
        magic, _, needed, flags, method, _, _, crc, packed, plain, name_bytes, extra, remark, *_, entry_at = listed
        if magic != _LISTED_MAGIC or entry_at != at:
            raise ValueError(f"its list has an entry at byte {entry_at}, and one is at {at}")
        name = data[listed_at + _LISTED.size : listed_at + _LISTED.size + name_bytes]
        listed_at += _LISTED.size + name_bytes + extra + remark
        at = _check_entry(data, at, name, (needed, flags, method), (crc, packed, plain))
    if (at, listed_at) != (list_at, end):
        raise ValueError(f"there are bytes between its entries and the list of them, from byte {at} on")


def _check_entry(data: bytes, at: int, name: bytes, kind: tuple[int, int, int], content: tuple[int, int, int]) -> int:
    """Check one entry by what is before and behind its data; return where the next one begins."""
    magic, needed, flags, method, _, _, crc, packed, plain, name_bytes, extra = _LOCAL.unpack_from(data, at)
    name_at = at + _LOCAL.size
    data_at = name_at + name_bytes + extra
    if magic != _LOCAL_MAGIC or (needed, flags, method) != kind or data[name_at : name_at + name_bytes] != name:
        raise ValueError(f"what is at byte {at} is not the entry {name!r} that its list says")
    end: int = data_at + content[1]
    if not flags & _FOLLOWED:
        if (crc, packed, plain) != content:
            raise ValueError(f"the entry {name!r} and the list say different sizes or checksums of it")
        return end
    if (crc, packed, plain) not in ((0, 0, 0), content):
        raise ValueError(f"the entry {name!r} says sizes or checksums both before and behind it")
    if data[end : end + 4] == _DESCRIPTOR_MAGIC:
        found = _DESCRIPTOR.unpack_from(data, end)[1:]
        end += _DESCRIPTOR.size
    else:
        found = struct.unpack_from("<3L", data, end)
        end += 12
    if found != content:
        raise ValueError(f"what is behind the entry {name!r} and the list say different sizes or checksums of it")
    return end


class _Summed:
    """A file that is read once, and the checksum of what was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.crc32c = 0
        self.size_bytes = 0

    def chunks(self) -> Iterator[bytes]:
        descriptor = os.open(self._path, READ_FLAGS)
        try:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                self.crc32c = crc32c(chunk, self.crc32c)
                self.size_bytes += len(chunk)
                yield chunk
        finally:
            os.close(descriptor)


def _damaged(path: Path, message: str) -> DamagedError:
    return DamagedError(message, operation="check", subject=str(path), hint=_HINT)


def check_hidden(path: Path) -> None:
    """Compare a file with Hadoop's hidden checksum, if it has one.

    Raises:
        FileChecksumError: They do not fit.
        DamagedError: One of them cannot be read.
        TargetError: This machine lacks what it takes to read them.
    """
    hidden = path.with_name(hadoop_checksum_name(path.name))
    try:
        descriptor = os.open(hidden, READ_FLAGS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(hidden, error, _HIDDEN_HINT) from error
    try:
        with os.fdopen(descriptor, "rb") as source:
            size_bytes = path.stat().st_size
            stored = source.read(min(_HIDDEN_BYTES_MAX, hadoop_checksum_bytes(size_bytes, 1)) + 1)
        sums = HadoopSums(stored, subject=str(path))
        with os.fdopen(os.open(path, READ_FLAGS), "rb", buffering=0) as source:
            while data := source.read(_READ_BYTES):
                sums.update(data)
        sums.finish()
    except OSError as error:
        raise unreadable(path, error, _HIDDEN_HINT) from error


def find_hidden_misfits(root: Path, paths: list[str]) -> list[Finding]:
    """Find files that do not fit their hidden checksums, where nothing else shows which of the two was altered."""
    found = []
    for path in paths:
        try:
            check_hidden(root / path)
        except (FileChecksumError, DamagedError) as error:
            if (root / path).exists():
                found.append(damage(path, error, "K2"))
    return found


def find_left_overs(root: Path, before_ms: int) -> Iterator[Finding]:
    """Find what writers that died left under hidden names, and checksums of files that are gone (K7).

    Args:
        root: Of the checkpoint.
        before_ms: What is younger may still be written.
    """
    for directory, _, names in os.walk(root):
        here = set(names)
        is_ours = Path(directory).name == ".tmp"
        for name in names:
            path = Path(directory, name)
            if name.startswith(".") and name.endswith(".crc") and (name[1:-4] in here):
                continue
            if not is_ours and not (name.startswith(".") and name.endswith((".tmp", ".crc"))):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue
            if status.st_mtime_ns // 1_000_000 < before_ms:
                yield Finding(
                    kind="waste",
                    path=path.relative_to(root).as_posix(),
                    message="was left by a writer that ended before its file was whole, or by a file that is gone",
                    hint=DELETE,
                    rule="K7",
                    size_bytes=status.st_size,
                )
