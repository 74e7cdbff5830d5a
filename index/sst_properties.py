"""What an SST says of itself: the identity in the properties block of RocksDB's block-based table (design 0001, I1).

```
file        = data blocks … | properties block | metaindex block | [index block] | footer
block       = contents | compression type (1 byte) | checksum (4 bytes)
contents    = entries | restart offsets (4 bytes each) | number of restarts (4 bytes)
entry       = shared | unshared | value length (varints) | unshared bytes of the key | value
footer v0   = metaindex handle | index handle | padding to 40 bytes | legacy magic (8)
footer v1-5 = checksum type (1) | metaindex handle | index handle | padding to 41 bytes | version (4) | magic (8)
footer v6+  = checksum type (1) | extended magic (4) | footer checksum (4) | base context checksum (4)
              | metaindex size (4) | reserved (24) | version (4) | magic (8); the metaindex block ends at the footer
handle      = offset | size (varints)
```

All integers are little-endian. RocksDB writes both meta blocks uncompressed. Neither checksum is verified: a damaged
identity is another identity and costs an upload; whether a file is damaged is for its hash to say (design 0002, I2).

Source:
    RocksDB `table/format.cc`, `table/block_based/block_builder.cc`, `include/rocksdb/table_properties.h`; the choice of
    facts follows `GetUniqueIdFromTableProperties`.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from index.model import SIZE_BYTES_MAX, SstIdentity

# A first read of this many bytes from the end has everything for an ordinary SST.
TAIL_BYTES: Final = 4096
# An SST whose meta blocks start earlier is treated as one without an identity.
TAIL_BYTES_MAX: Final = 1024 * 1024

_MAGIC: Final = 0x88E241B785F4CFF7
_MAGIC_LEGACY: Final = 0xDB4775248B80FB57
_MAGIC_EXTENDED: Final = bytes((0x3E, 0x00, 0x7A, 0x00))
_FOOTER_BYTES: Final = 53
_FOOTER_BYTES_LEGACY: Final = 48
_TRAILER_BYTES: Final = 5
_VERSION_WITHOUT_HANDLE: Final = 6
_VARINT_BYTES_MAX: Final = 10
_ENTRIES_MAX: Final = 100_000

_PROPERTIES_BLOCK: Final = b"rocksdb.properties"
_SESSION_ID: Final = b"rocksdb.creating.session.identity"
_FILE_NUMBER: Final = b"rocksdb.original.file.number"
_GLOBAL_SEQUENCE: Final = b"rocksdb.external_sst_file.global_seqno"
_SESSION_FORM = re.compile(rb"[0-9A-Z]{12,24}")


class MoreBytesNeeded(msgspec.Struct, frozen=True):
    """The answer stands further from the end of the file than the bytes that were given."""

    # Bytes from the end of the file to read and pass; always more than were passed, and at most TAIL_BYTES_MAX.
    tail_bytes: int


class _Malformed(Exception):  # noqa: N818 — never leaves this module
    """The bytes are not what RocksDB writes."""


class _OutOfReach(Exception):  # noqa: N818 — never leaves this module
    """A block starts before the tail."""

    def __init__(self, tail_bytes: int) -> None:
        self.tail_bytes = tail_bytes
        super().__init__()


class _Tail:
    """The last bytes of a file, addressed by their offset in the file."""

    def __init__(self, data: bytes, file_size_bytes: int) -> None:
        self.data = data
        self.size_bytes = file_size_bytes
        self._start = file_size_bytes - len(data)

    def block(self, offset: int, size_bytes: int) -> bytes:
        """The contents of an uncompressed block."""
        end = offset + size_bytes + _TRAILER_BYTES
        if end > self.size_bytes:
            raise _Malformed
        if offset < self._start:
            raise _OutOfReach(self.size_bytes - offset)
        contents = self.data[offset - self._start : end - self._start]
        if contents[size_bytes] != 0:
            raise _Malformed
        return contents[:size_bytes]


def parse_sst_tail(tail: bytes, file_size_bytes: int) -> SstIdentity | MoreBytesNeeded | None:
    """The identity that RocksDB wrote into an SST.

    Args:
        tail: The last bytes of the file, TAIL_BYTES of them or the whole file at first.
        file_size_bytes: Size of the whole file.

    Returns:
        The session id and the original file number; `MoreBytesNeeded` if the blocks that hold them start before
        `tail` (at most twice after a first read of TAIL_BYTES); None if there is no identity to go by: no
        block-based table, one from before session ids, one that an ingestion wrote a sequence number into, or bytes
        that no RocksDB wrote. No input raises.
    """
    if not 0 < len(tail) <= file_size_bytes:
        return None
    view = _Tail(tail, file_size_bytes)
    try:
        metaindex = _entries(view.block(*_metaindex_handle(view)))
        offset, size_bytes, _ = _handle(metaindex.get(_PROPERTIES_BLOCK, b""), 0)
        properties = _entries(view.block(offset, size_bytes))
        return _identity(properties)
    except _OutOfReach as reach:
        return MoreBytesNeeded(reach.tail_bytes) if reach.tail_bytes <= TAIL_BYTES_MAX else None
    except _Malformed:
        return None


def _metaindex_handle(tail: _Tail) -> tuple[int, int]:
    if len(tail.data) < min(_FOOTER_BYTES, tail.size_bytes):
        raise _OutOfReach(min(_FOOTER_BYTES, tail.size_bytes))
    magic = int.from_bytes(tail.data[-8:], "little")
    if magic == _MAGIC_LEGACY:
        footer = _footer(tail, _FOOTER_BYTES_LEGACY)
        offset, size_bytes, _ = _handle(footer, 0)
        return offset, size_bytes
    if magic != _MAGIC:
        raise _Malformed
    footer = _footer(tail, _FOOTER_BYTES)
    if int.from_bytes(footer[41:45], "little") < _VERSION_WITHOUT_HANDLE:
        offset, size_bytes, _ = _handle(footer, 1)
        return offset, size_bytes
    if footer[1:5] != _MAGIC_EXTENDED:
        raise _Malformed
    size_bytes = int.from_bytes(footer[13:17], "little")
    offset = tail.size_bytes - _FOOTER_BYTES - _TRAILER_BYTES - size_bytes
    if offset < 0:
        raise _Malformed
    return offset, size_bytes


def _footer(tail: _Tail, size_bytes: int) -> bytes:
    if tail.size_bytes < size_bytes:
        raise _Malformed
    return tail.data[-size_bytes:]


def _identity(properties: dict[bytes, bytes]) -> SstIdentity | None:
    session_id = properties.get(_SESSION_ID, b"")
    file_number, _ = _varint(properties.get(_FILE_NUMBER, b""), 0)
    if _SESSION_FORM.fullmatch(session_id) is None or not 0 < file_number <= SIZE_BYTES_MAX:
        return None
    if any(properties.get(_GLOBAL_SEQUENCE, b"")):
        # An ingestion wrote into the file: its content is no longer what the session made.
        return None
    return SstIdentity(session_id.decode(), file_number)


def _entries(contents: bytes) -> dict[bytes, bytes]:
    return dict(_read_entries(contents))


def _read_entries(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    end = len(contents) - 4
    if end < 0:
        raise _Malformed
    end -= 4 * int.from_bytes(contents[-4:], "little")
    position, key = 0, b""
    for _ in range(_ENTRIES_MAX):
        if position >= end:
            break
        shared, position = _varint(contents, position)
        unshared, position = _varint(contents, position)
        value_bytes, position = _varint(contents, position)
        value_start = position + unshared
        if shared > len(key) or value_start + value_bytes > end:
            raise _Malformed
        key = key[:shared] + contents[position:value_start]
        position = value_start + value_bytes
        yield key, contents[value_start:position]
    if position != end:
        raise _Malformed


def _handle(data: bytes, position: int) -> tuple[int, int, int]:
    offset, position = _varint(data, position)
    size_bytes, position = _varint(data, position)
    return offset, size_bytes, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:  # noqa: PLR2004 — the top bit says that another byte follows
            return value, position + index + 1
    raise _Malformed
