"""A snapshot as a zip: RocksDB's files but SSTs and archived WALs, and `metadata`, last (design 0004, section 4).

Java reads it entry by entry from the front, so every entry is deflated and followed by a data descriptor, as Java's own
writer has it. Nothing of a zip is used before all of it has been checked (N4). Everything blocks.
"""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from engine.errors import DamagedError, UnsafeSourceError
from index.spark.metadata import STATE_METADATA_BYTES_MAX, StateMetadata, decode_state_metadata, encode_state_metadata
from index.spark.names import METADATA, check_zip_entry, is_zip_entry

# A zip of some thousand SSTs has less than a megabyte; nearly all of it is MANIFEST.
ZIP_BYTES_MAX: Final = 64 * 1024 * 1024
# All entries together. Deflate makes at most 1,032 bytes of one.
CONTENT_BYTES_MAX: Final = 256 * 1024 * 1024
ENTRIES_MAX: Final = 1024

# The list of entries at the end of a zip: their names of up to 255 bytes, 46 bytes beside each, and extra fields.
_DIRECTORY_BYTES_MAX: Final = 1024 * 1024
# How a zip ends: count of entries and size of their list, in an end record that a comment may follow. One of zip64,
# before it, would count in its place.
_END: Final = struct.Struct("<4s4H2LH")
_END_MAGIC: Final = b"PK\x05\x06"
_END64: Final = struct.Struct("<4sLQL")
_END64_MAGIC: Final = b"PK\x06\x07"
_COMMENT_BYTES_MAX: Final = 0xFFFF

_ENCRYPTED: Final = 0x1
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_UNIX: Final = 3
# Stored bytes depend on no clock: the oldest time that a zip can hold.
_TIME: Final = (1980, 1, 1, 0, 0, 0)
_HINT: Final = "the snapshot is damaged or hostile, and nothing of it was used; an older one may be whole"


class StateZip(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's zip, read and checked."""

    metadata: StateMetadata
    # All entries but `metadata`, by name.
    files: Mapping[str, bytes]


class _Stream(io.BytesIO):
    """Cannot go back: so zipfile writes data descriptors."""

    @override
    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise io.UnsupportedOperation


def build_state_zip(directory: Path, metadata: StateMetadata) -> tuple[bytes, int]:
    """Zip what of a rocksdb_checkpoint is neither an SST nor an archived WAL, and then the metadata.

    Returns:
        The zip, and how many bytes went into it.

    Raises:
        UnsafeSourceError: A file is empty that must not be (Z2), is not a regular file, or cannot be read; or they are
            more than a reader takes.
        FormatError: The metadata breaks a rule of design 0004.
    """
    last = encode_state_metadata(metadata)
    content_bytes = len(last)
    stream = _Stream()
    with zipfile.ZipFile(stream, "w") as target:
        for path in sorted(directory.iterdir()):
            if path.is_dir() or path.name == METADATA or not is_zip_entry(path.name):  # Z3
                continue
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise UnsafeSourceError("is not a regular file", operation="snapshot", subject=str(path))
                data = path.read_bytes()
            except OSError as error:
                reason = error.strerror or str(error)
                raise UnsafeSourceError(reason, operation="snapshot", subject=str(path)) from error
            if not data and not path.name.endswith(".log"):
                reason = "is empty, and RocksDB would not open what is restored from it"
                hint = "the disk may be full or failing; make another snapshot (SPARK-54072)"
                raise UnsafeSourceError(reason, operation="snapshot", subject=str(path), hint=hint)
            content_bytes += len(data)
            if content_bytes > CONTENT_BYTES_MAX:
                reason = f"has more than {CONTENT_BYTES_MAX} bytes beside its SSTs, which no reader takes"
                hint = "open and close the store: RocksDB then writes a new MANIFEST"
                raise UnsafeSourceError(reason, operation="snapshot", subject=str(directory), hint=hint)
            target.writestr(_entry(path.name), data)
        target.writestr(_entry(METADATA), last)
    return stream.getvalue(), content_bytes


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(check_zip_entry(name), _TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def read_state_zip(data: bytes, *, subject: str) -> StateZip:
    """Read a snapshot's zip whole, or refuse it whole; `subject` is what errors call it.

    Raises:
        DamagedError: It is not a zip, is cut short, fails a checksum, lacks `metadata`, or is larger inside than a
            snapshot is; or it has a directory, a symbolic link, an encrypted entry, or a name twice (N4).
        UnsafeNameError: A name in it is not one safe component, or is not part of a snapshot (Z3).
        FormatError: The metadata cannot be read.
    """
    _check_end(data, subject)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source:
            entries = source.infolist()
            _check_entries(entries, subject)
            files = {entry.filename: _content(source, entry, subject) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OverflowError) as error:
        raise _refused(f"cannot be read as a zip: {error}", subject) from error
    last = files.pop(METADATA, None)
    if last is None:
        raise _refused(f"has no entry `{METADATA}`", subject)
    return StateZip(metadata=decode_state_metadata(last, subject=f"{subject}/{METADATA}"), files=files)


def _check_end(data: bytes, subject: str) -> None:
    """Refuse a zip by its last bytes: the library reads the whole list of entries before they can be counted."""
    at = len(data) - _END.size
    if at < 0 or data[at : at + 4] != _END_MAGIC or data[-2:] != b"\0\0":
        at = data.rfind(_END_MAGIC, max(0, at - _COMMENT_BYTES_MAX))
    if at < 0 or at + _END.size > len(data):
        raise _refused("cannot be read as a zip: it has no end record", subject)
    _, _, _, _, count, size_bytes, _, _ = _END.unpack_from(data, at)
    if at >= _END64.size and data.startswith(_END64_MAGIC, at - _END64.size):
        raise _refused("is a zip64, and no snapshot is large enough to be one", subject)
    if count > ENTRIES_MAX or size_bytes > _DIRECTORY_BYTES_MAX:
        raise _refused(f"has {count} entries in a list of {size_bytes} bytes; at most {ENTRIES_MAX} are read", subject)


def _check_entries(entries: list[zipfile.ZipInfo], subject: str) -> None:
    if len(entries) > ENTRIES_MAX:
        raise _refused(f"has {len(entries)} entries, and at most {ENTRIES_MAX} are read", subject)
    seen: set[str] = set()
    for entry in entries:
        # `filename` is what the library makes of it: cut at a NUL, with other separators.
        name = check_zip_entry(entry.orig_filename)
        if name in seen:
            raise _refused(f"has the entry {name!r} twice", subject)
        seen.add(name)
        if entry.flag_bits & _ENCRYPTED:
            raise _refused(f"has the encrypted entry {name!r}", subject)
        if entry.compress_type not in _METHODS:
            raise _refused(f"has the entry {name!r} of compression method {entry.compress_type}", subject)
        mode = entry.external_attr >> 16 if entry.create_system == _UNIX else 0
        if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
            raise _refused(f"has the entry {name!r}, which is not a regular file", subject)
        if name == METADATA and entry.file_size > STATE_METADATA_BYTES_MAX:
            raise _refused(f"has {entry.file_size} bytes of `{METADATA}`", subject)
    if sum(entry.file_size for entry in entries) > CONTENT_BYTES_MAX:
        raise _refused(f"holds more than {CONTENT_BYTES_MAX} bytes", subject)


def _content(source: zipfile.ZipFile, entry: zipfile.ZipInfo, subject: str) -> bytes:
    """Read an entry: the bytes that it declares, whatever its data would become."""
    with source.open(entry) as stream:
        content = stream.read(entry.file_size)
        if len(content) != entry.file_size or stream.read(1):
            raise _refused(f"has another size of {entry.filename!r} than it says", subject)
    return content


def _refused(message: str, subject: str) -> DamagedError:
    return DamagedError(message, operation="load", subject=subject, hint=_HINT)
