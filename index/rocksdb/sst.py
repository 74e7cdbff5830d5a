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
from typing import Final

import msgspec

from index.rocksdb.sst_blocks import (
    FOOTER_BYTES,
    PROPERTIES_BLOCK,
    BlockHandle,
    decode_entries,
    decode_footer,
    decode_handle,
    decode_varint,
)
from index.snapshot.model import SIZE_BYTES_MAX, SstIdentity

# A first read of this many bytes from the end has everything for an ordinary SST.
TAIL_BYTES: Final = 4096
# An SST whose meta blocks start earlier is treated as one without an identity.
TAIL_BYTES_MAX: Final = 1024 * 1024

_SESSION_ID: Final = b"rocksdb.creating.session.identity"
_FILE_NUMBER: Final = b"rocksdb.original.file.number"
_GLOBAL_SEQUENCE: Final = b"rocksdb.external_sst_file.global_seqno"
_SESSION_FORM = re.compile(rb"[0-9A-Z]{12,24}")


class MoreBytesNeeded(msgspec.Struct, frozen=True):
    """The answer stands further from the end of the file than the bytes that were given."""

    # Bytes from the end of the file to read and pass; always more than were passed, and at most TAIL_BYTES_MAX.
    tail_bytes: int


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

    def block(self, handle: BlockHandle) -> bytes:
        """The contents of an uncompressed block."""
        if handle.offset < 0 or handle.end > self.size_bytes:
            raise ValueError("reaches beyond the file")
        if handle.offset < self._start:
            raise _OutOfReach(self.size_bytes - handle.offset)
        contents = self.data[handle.offset - self._start : handle.end - self._start]
        if contents[handle.size_bytes] != 0:
            raise ValueError("is compressed")
        return contents[: handle.size_bytes]


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
        metaindex = dict(decode_entries(view.block(_metaindex_handle(view))))
        properties, _ = decode_handle(metaindex.get(PROPERTIES_BLOCK, b""))
        return _identity(dict(decode_entries(view.block(properties))))
    except _OutOfReach as reach:
        return MoreBytesNeeded(reach.tail_bytes) if reach.tail_bytes <= TAIL_BYTES_MAX else None
    except ValueError:
        return None


def _metaindex_handle(tail: _Tail) -> BlockHandle:
    if len(tail.data) < min(FOOTER_BYTES, tail.size_bytes):
        raise _OutOfReach(min(FOOTER_BYTES, tail.size_bytes))
    return decode_footer(tail.data[-FOOTER_BYTES:], tail.size_bytes).metaindex


def _identity(properties: dict[bytes, bytes]) -> SstIdentity | None:
    session_id = properties.get(_SESSION_ID, b"")
    file_number, _ = decode_varint(properties.get(_FILE_NUMBER, b""), 0)
    if _SESSION_FORM.fullmatch(session_id) is None or not 0 < file_number <= SIZE_BYTES_MAX:
        return None
    if any(properties.get(_GLOBAL_SEQUENCE, b"")):
        # An ingestion wrote into the file: its content is no longer what the session made.
        return None
    return SstIdentity(session_id.decode(), file_number)
