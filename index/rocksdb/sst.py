"""Read what an SST says of itself: where its blocks are (design 0005, K3) and its identity (design 0001, I1).

The identity is the session id of the database that wrote the file, the file's number in it, and the size
(`index.snapshot.model.SstIdentity`).

```
file        = data blocks … | properties block | metaindex block | [index block] | footer
block       = contents | compression type (1 byte) | checksum (4 bytes)
contents    = entries | restart offsets (4 bytes each) | number of restarts (4 bytes)
entry       = shared | unshared | value length (varints) | unshared bytes of the key | value
data key    = key of the row | kind (1 byte) | sequence number (7 bytes)
footer v0   = metaindex handle | index handle | padding to 40 bytes | legacy magic (8)
footer v1-5 = checksum type (1) | metaindex handle | index handle | padding to 41 bytes | version (4) | magic (8)
footer v6+  = checksum type (1) | extended magic (4) | footer checksum (4) | base context checksum (4)
              | metaindex size (4) | reserved (24) | version (4) | magic (8); the metaindex block ends at the footer
handle      = offset | size (varints)
```

All integers are little-endian, and the checksum of a block is over its contents and type. What leads from one block to
the next:

```
footer             -> metaindex, and before version 6 the index
metaindex          -> every other meta block, and from version 6 on the index ("rocksdb.index")
properties         -> what kind of index it is, and how its values are written
index              -> data blocks, or with two levels blocks of the index that lead there
partitioned filter -> an index of filter blocks
```

A value of an index is a handle, offset and size; if the properties say so ("delta encoded"), an entry has no length of
its value, and one that shares bytes with the key before it only says how much larger its block is than that before,
which it follows immediately. Nothing here reads a file or computes a checksum, and no length is believed beyond the
bytes given.

The identity is in the properties block. RocksDB writes both meta blocks uncompressed. Their checksums are not
verified: a damaged identity is another identity and costs an upload; whether a file is damaged is for its hash to say
(design 0002, I2).

Source:
    RocksDB `table/format.h`, `table/format.cc`, `table/block_based/block.cc`, `block_builder.cc`, `index_builder.h`,
    `include/rocksdb/table_properties.h`; the choice of facts follows `GetUniqueIdFromTableProperties`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from index.snapshot.model import SIZE_BYTES_MAX, SstIdentity

TRAILER_BYTES: Final = 5
# The longest footer; a file that is shorter may still have the shorter one of version 0.
FOOTER_BYTES: Final = 53
FOOTER_BYTES_LEGACY: Final = 48
FORMAT_VERSION_MAX: Final = 7

NO_CHECKSUM: Final = 0
CRC32C: Final = 1
XXHASH: Final = 2
XXHASH64: Final = 3
XXH3: Final = 4
CHECKSUM_NAMES: Final = {NO_CHECKSUM: "none", CRC32C: "crc32c", XXHASH: "xxHash", XXHASH64: "xxHash64", XXH3: "XXH3"}

MAGIC: Final = 0x88E241B785F4CFF7
MAGIC_LEGACY: Final = 0xDB4775248B80FB57
# Tables of other kinds, which have no checksums of blocks.
OTHER_TABLES: Final = {
    0x8242229663BF9564: "a plain table",
    0x4F3418EB7A8F13B8: "a plain table",
    0x926789D0C5F17873: "a cuckoo table",
}
MAGIC_EXTENDED: Final = bytes((0x3E, 0x00, 0x7A, 0x00))
VERSION_WITHOUT_HANDLES: Final = 6

INDEX_BLOCK: Final = b"rocksdb.index"
PROPERTIES_BLOCK: Final = b"rocksdb.properties"
_PROPERTIES_BLOCK_OLD: Final = b"rocksdb.stats"
RANGE_DELETIONS: Final = b"rocksdb.range_del"
COMPRESSION_DICTIONARY: Final = b"rocksdb.compression_dict"
_PARTITIONED_FILTER: Final = b"partitionedfilter."
_KINDS: Final = {
    INDEX_BLOCK: "index",
    PROPERTIES_BLOCK: "properties",
    _PROPERTIES_BLOCK_OLD: "properties",
    RANGE_DELETIONS: "range deletion",
    COMPRESSION_DICTIONARY: "compression dictionary",
    b"rocksdb.hashindex.prefixes": "hash index",
    b"rocksdb.hashindex.metadata": "hash index",
}
_FILTERS: Final = (b"filter.", b"fullfilter.", _PARTITIONED_FILTER)

_INDEX_TYPE: Final = b"rocksdb.block.based.table.index.type"
_INDEX_DELTA: Final = b"rocksdb.index.value.is.delta.encoded"
_FORMAT_VERSION: Final = b"rocksdb.format.version"
_KEY_IS_USER_KEY: Final = b"rocksdb.index.key.is.user.key"
_WHOLE_KEYS: Final = b"rocksdb.block.based.table.whole.key.filtering"
_EXTERNAL_VERSION: Final = b"rocksdb.external_sst_file.version"
_WITH_SEQUENCE: Final = 2
_DATA_BLOCKS: Final = b"rocksdb.num.data.blocks"
_ENTRIES: Final = b"rocksdb.num.entries"
_COUNTS: Final = (_ENTRIES, b"rocksdb.deleted.keys", b"rocksdb.raw.key.size", b"rocksdb.raw.value.size")
# More than this no codec makes of a byte.
_RATIO_MAX: Final = 10_000
_TWO_LEVELS: Final = 2
_FIRST_KEYS: Final = 3

# Behind each key of a data block: the kind of the entry, and its sequence number in seven bytes.
KEY_TRAILER_BYTES: Final = 8
DELETION: Final = 0
VALUE: Final = 1
MERGE: Final = 2
SINGLE_DELETION: Final = 7
KINDS_KNOWN: Final = frozenset({DELETION, VALUE, MERGE, SINGLE_DELETION})
# Of the number of restarts, the last one of the block.
_HASH_INDEX_BIT: Final = b"\x80"

# Of one name in a block of metadata, and of all in one: each may share all of the one before it.
_NAME_BYTES_MAX: Final = 4096
_NAMES_BYTES_MAX: Final = 4 * 1024 * 1024
_UINT32: Final = 0xFFFFFFFF
# Ten bytes of seven bits.
_VARINT_BITS_MAX: Final = 70
_NO_NUMBER: Final = "has a number that is none"
_PART_2: Final = slice(1, 41)
_FOOTER_CHECKSUM: Final = slice(5, 9)

# A first read of this many bytes from the end has everything for an ordinary SST.
TAIL_BYTES: Final = 4096
# An SST whose meta blocks start earlier is treated as one without an identity.
TAIL_BYTES_MAX: Final = 1024 * 1024

_SESSION_ID: Final = b"rocksdb.creating.session.identity"
_FILE_NUMBER: Final = b"rocksdb.original.file.number"
_SEQUENCE_BYTES: Final = 8
_GLOBAL_SEQUENCE: Final = b"rocksdb.external_sst_file.global_seqno"
# What a block has of this name in any case: it may share the beginning with the name before it.
_GLOBAL_SEQUENCE_END: Final = b"_sst_file.global_seqno"
_SESSION_FORM = re.compile(rb"[0-9A-Z]{12,24}")


class BlockHandle(msgspec.Struct, frozen=True):
    """Where a block is, without its trailer."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The first byte after the trailer."""
        return self.offset + self.size_bytes + TRAILER_BYTES


class SstFooter(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an SST: what leads to everything else."""

    # Where it begins in the file.
    offset: int
    format_version: int
    checksum: int
    metaindex: BlockHandle
    # None from version 6 on: the metaindex has it.
    index: BlockHandle | None
    # Of version 6 and newer: what the footer has to add up to, and how; 0: the sums of blocks do not depend on offsets.
    base_context_checksum: int = 0
    stored_sum: int | None = None
    summed: bytes = b""

    def is_whole(self, block_sum: Callable[[bytes], int]) -> bool:
        """Return whether it fits its own checksum, if it has one; the function is that of its blocks."""
        if self.stored_sum is None:
            return True
        found = block_sum(self.summed) + checksum_modifier(self.base_context_checksum, self.offset)
        return found & _UINT32 == self.stored_sum


class IndexForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the properties say of the index, of looking keys up, and what they count."""

    two_levels: bool = False
    # Whether values are delta encoded, and whether the first key of a block follows its handle.
    delta: bool = False
    first_keys: bool = False
    # Whether keys of the index are without a trailer, and whether the filter is of whole keys.
    user_keys: bool = False
    whole_keys: bool = True
    # Whether all entries have the sequence number that the MANIFEST says: of a file that was ingested.
    one_sequence: bool = False
    # None: a RocksDB that did not say so wrote it.
    format_version: int | None = None
    data_blocks: int | None = None
    entries: int | None = None


def decode_footer(tail: bytes, file_size_bytes: int) -> SstFooter:
    """Decode the footer of a block-based table from the last bytes of a file: `FOOTER_BYTES`, or all of a shorter file.

    Of a version above `FORMAT_VERSION_MAX` only the sum of the footer is to be relied on.

    Raises:
        ValueError: It is none: the file was cut short or altered. That includes bytes between what is read and the
            version, which are zero wherever RocksDB wrote them.
    """
    magic = int.from_bytes(tail[-8:], "little")
    if magic == MAGIC_LEGACY and len(tail) >= FOOTER_BYTES_LEGACY:
        footer = tail[-FOOTER_BYTES_LEGACY:]
        metaindex, index = _footer_handles(footer[:40])
        offset = file_size_bytes - len(footer)
        return SstFooter(offset=offset, format_version=0, checksum=CRC32C, metaindex=metaindex, index=index)
    if magic != MAGIC:
        raise ValueError("ends in no number that an SST ends in")
    if len(tail) < FOOTER_BYTES:
        raise ValueError("is too short to be an SST")
    footer = tail[-FOOTER_BYTES:]
    offset = file_size_bytes - len(footer)
    version = int.from_bytes(footer[41:45], "little")
    if version < VERSION_WITHOUT_HANDLES:
        metaindex, index = _footer_handles(footer[_PART_2])
        return SstFooter(offset=offset, format_version=version, checksum=footer[0], metaindex=metaindex, index=index)
    is_known = version <= FORMAT_VERSION_MAX
    if footer[1:5] != MAGIC_EXTENDED or (is_known and any(footer[17:41])):
        raise ValueError("has a footer with other bytes than its version has")
    size_bytes = int.from_bytes(footer[13:17], "little")
    zeroed = bytearray(footer)
    zeroed[_FOOTER_CHECKSUM] = bytes(4)
    return SstFooter(
        offset=offset,
        format_version=version,
        checksum=footer[0],
        metaindex=BlockHandle(offset - TRAILER_BYTES - size_bytes, size_bytes),
        index=None,
        base_context_checksum=int.from_bytes(footer[9:13], "little"),
        stored_sum=int.from_bytes(footer[_FOOTER_CHECKSUM], "little"),
        summed=bytes(zeroed),
    )


def _footer_handles(part: bytes) -> tuple[BlockHandle, BlockHandle]:
    metaindex, at = decode_handle(part)
    index, at = decode_handle(part, at)
    if any(part[at:]):
        raise ValueError("has a footer with bytes where none are written")
    return metaindex, index


def checksum_modifier(base_context_checksum: int, offset: int) -> int:
    """Return what is added to a checksum at an offset, modulo 2^32: it shows that a block is in its place."""
    if base_context_checksum == 0:
        return 0
    return base_context_checksum ^ (((offset & _UINT32) + (offset >> 32)) & _UINT32)


def meta_block_kind(name: bytes) -> str:
    """Name the kind of block that an entry of the metaindex leads to, for people; "meta" if it is unknown."""
    return _KINDS.get(name) or ("filter" if name.startswith(_FILTERS) else "meta")


def is_filter_index(name: bytes) -> bool:
    """Return whether an entry of the metaindex leads to an index of filter blocks."""
    return name.startswith(_PARTITIONED_FILTER)


def decode_index_form(properties: dict[bytes, bytes]) -> IndexForm:
    """Decode the entries of the properties that describe the index.

    Raises:
        ValueError: A number is none, or the index is of a type that nobody knows.
    """
    index_type = int.from_bytes(properties.get(_INDEX_TYPE, b""), "little")
    if index_type > _FIRST_KEYS:
        raise ValueError(f"has an index of the unknown type {index_type}")
    return IndexForm(
        two_levels=index_type == _TWO_LEVELS,
        first_keys=index_type == _FIRST_KEYS,
        delta=bool(_number(properties, _INDEX_DELTA)),
        user_keys=bool(_number(properties, _KEY_IS_USER_KEY)),
        whole_keys=properties.get(_WHOLE_KEYS) != b"0",
        one_sequence=int.from_bytes(properties.get(_EXTERNAL_VERSION, b""), "little") >= _WITH_SEQUENCE,
        format_version=_number(properties, _FORMAT_VERSION) or None,
        data_blocks=_number(properties, _DATA_BLOCKS),
        entries=_number(properties, _ENTRIES),
    )


def _number(properties: dict[bytes, bytes], name: bytes) -> int | None:
    value = properties.get(name)
    return None if value is None else decode_varint(value, 0)[0]


def without_global_sequence(properties: bytes) -> bytes:
    """Return a block of properties as its checksum has it: older releases ingest a file by a number written there."""
    at = properties.find(_GLOBAL_SEQUENCE_END) + len(_GLOBAL_SEQUENCE_END)
    if at < len(_GLOBAL_SEQUENCE_END):
        return properties
    return properties[:at] + bytes(_SEQUENCE_BYTES) + properties[at + _SEQUENCE_BYTES :]


def decode_entries(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values of a block of metadata, in order.

    Raises:
        ValueError: From the iteration: the contents are not such a block, or the names are longer than any are.
    """
    left = _NAMES_BYTES_MAX
    for name, value in read_entries(contents):
        left -= len(name)
        if len(name) > _NAME_BYTES_MAX or left < 0:
            raise ValueError("has names of an unlikely length")
        yield name, value


def decode_rows(contents: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield key, kind and value of each entry of a data block: deletions, and what newer entries replace, too.

    Raises:
        ValueError: From the iteration: the contents are not a data block.
        NotImplementedError: Likewise: the block or an entry is of a kind that is unknown here.
    """
    refuse_hash_index(contents)
    for key, value in read_entries(contents):
        if len(key) < KEY_TRAILER_BYTES:
            raise ValueError("has a key without its trailer")
        kind = key[-KEY_TRAILER_BYTES]
        if kind not in KINDS_KNOWN:
            raise NotImplementedError(f"entries of the kind {kind}")
        yield key[:-KEY_TRAILER_BYTES], kind, value


def refuse_hash_index(contents: bytes) -> None:
    """Raise a NotImplementedError if a data block has a hash index behind its entries."""
    if contents[-1:] >= _HASH_INDEX_BIT:
        raise NotImplementedError("data blocks with a hash index")


def read_entries(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block as they are; a ValueError, from the iteration, if the contents are not one."""
    end = _entries_end(contents)
    at, key = 0, b""
    while at < end:
        shared, at = decode_varint(contents, at)
        unshared, at = decode_varint(contents, at)
        value_bytes, at = decode_varint(contents, at)
        value_at = at + unshared
        if shared > len(key) or value_at + value_bytes > end:
            raise ValueError("has an entry that reaches beyond its block")
        key = key[:shared] + contents[at:value_at]
        at = value_at + value_bytes
        yield key, contents[value_at:at]
    if at != end:
        raise ValueError("has bytes after its last entry")


def decode_index(contents: bytes, form: IndexForm) -> Iterator[tuple[int, int]]:
    """Yield offset and size of every block that an index, decompressed and of this form, leads to, in order.

    Raises:
        ValueError: From the iteration: the contents are not an index.
    """
    for *_, offset, size in read_index_entries(contents, form, 0, _entries_end(contents)):
        yield offset, size


def read_index_entries(contents: bytes, form: IndexForm, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the entries of an index from a restart on: shared bytes, start and end of the others, and the handle.

    Nothing is made of a key here, which may repeat all of the one before it. Raises as `decode_index`.
    """
    offset = size = key_bytes = value_bytes = 0
    while at < end:
        shared, unshared = contents[at], contents[at + 1]
        if (shared | unshared) & 0x80:
            shared, at = decode_varint(contents, at)
            unshared, at = decode_varint(contents, at)
        else:  # as of nearly every entry: without two calls
            at += 2
        if not form.delta:
            value_bytes, at = decode_varint(contents, at)
        key_at, key_end = at, at + unshared
        if form.delta and shared:
            change, at = decode_varint(contents, key_end)
            offset += size + TRAILER_BYTES
            size += (change >> 1) ^ -(change & 1)
        else:
            offset, at = decode_varint(contents, key_end)
            size, at = decode_varint(contents, at)
        least = at
        if not form.delta:
            at = key_end + value_bytes
        elif form.first_keys:
            first_key_bytes, at = decode_varint(contents, at)
            at += first_key_bytes
        if shared > key_bytes or not least <= at <= end or size < 0:
            raise ValueError("has an entry that reaches beyond its block")
        key_bytes = shared + unshared
        yield shared, key_at, key_end, offset, size


def _entries_end(contents: bytes) -> int:
    end = len(contents) - 4
    count = int.from_bytes(contents[-4:], "little")
    if end < 0 or not 0 < count <= end // 4:
        raise ValueError("is not a block: its end is not what a block ends in")
    return end - 4 * count


def restart_offsets(contents: bytes) -> tuple[int, list[int]]:
    """Return where the entries of a block end, and where those begin that say their whole key.

    Raises:
        ValueError: The contents are not a block.
    """
    end = _entries_end(contents)
    found = [int.from_bytes(contents[at : at + 4], "little") for at in range(end, len(contents) - 4, 4)]
    if not end and found == [0]:  # of a file that only deletes ranges
        return end, found
    if found[0] or any(left >= right for left, right in zip(found, [*found[1:], end], strict=True)):
        raise ValueError("has restarts that are not one behind the other")
    return end, found


def decode_handle(data: bytes, at: int = 0) -> tuple[BlockHandle, int]:
    """Decode a handle; return it, and where what follows it begins.

    Raises:
        ValueError: The bytes end within it.
    """
    offset, at = decode_varint(data, at)
    size_bytes, at = decode_varint(data, at)
    return BlockHandle(offset, size_bytes), at


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of up to 64 bits; return it, and where what follows it begins.

    Raises:
        ValueError: The bytes end within it, or it is longer than it has to be, which no writer makes it.
    """
    try:
        byte = data[at]
        value = byte & 0x7F
        shift = 7
        while byte >= 0x80:  # noqa: PLR2004 — the top bit says that another byte follows
            at += 1
            byte = data[at]
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > _VARINT_BITS_MAX or byte == 0:
                raise ValueError(_NO_NUMBER)
    except IndexError:
        raise ValueError(_NO_NUMBER) from None
    return value, at + 1


class MoreBytesNeeded(msgspec.Struct, frozen=True):
    """The answer is further from the end of the file than the bytes that were given."""

    # Bytes from the end of the file to read and pass; always more than were passed, and at most TAIL_BYTES_MAX.
    tail_bytes: int


class _OutOfReach(Exception):  # noqa: N818 — never leaves this module
    """A block starts before the tail; the argument is the tail that has it."""


def parse_sst_tail(tail: bytes, file_size_bytes: int) -> SstIdentity | MoreBytesNeeded | None:
    """Read the identity that RocksDB wrote into an SST; no input raises.

    Args:
        tail: The last bytes of the file, TAIL_BYTES of them or the whole file at first.
        file_size_bytes: Size of the whole file.

    Returns:
        The session id and the original file number; `MoreBytesNeeded` if the blocks that hold them start before `tail`
        (at most twice after a first read of TAIL_BYTES); None if there is no identity to go by: no block-based table,
        one from before session ids, one that an ingestion wrote a sequence number into, or bytes that no RocksDB wrote.
    """
    if not 0 < len(tail) <= file_size_bytes:
        return None
    try:
        return _identity(_properties_in(tail, file_size_bytes))
    except _OutOfReach as reach:
        return MoreBytesNeeded(reach.args[0]) if reach.args[0] <= TAIL_BYTES_MAX else None
    except ValueError:
        return None


class SstCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the properties of an SST count: all of its entries, of which a store may show fewer."""

    entries: int
    # Of the entries; ranges too.
    deletions: int
    # Of keys, without their trailers, and of values.
    raw_bytes: int


def parse_sst_counts(tail: bytes, file_size_bytes: int) -> SstCounts | None:
    """Read what an SST counts; None: as for `parse_sst_tail`, or the tail is too short. No input raises."""
    if not FOOTER_BYTES_LEGACY <= len(tail) <= file_size_bytes:
        return None
    try:
        found = _properties_in(tail, file_size_bytes)
        entries, deletions, keys_bytes, values_bytes = (decode_varint(found.get(name, b""), 0)[0] for name in _COUNTS)
    except (ValueError, _OutOfReach):
        return None
    raw_bytes = keys_bytes + values_bytes - KEY_TRAILER_BYTES * entries
    # A damaged block may say anything: its checksum is not verified here.
    is_likely = deletions <= entries and 0 <= raw_bytes <= _RATIO_MAX * file_size_bytes
    return SstCounts(entries=entries, deletions=deletions, raw_bytes=raw_bytes) if is_likely else None


def parse_range_deletions(tail: bytes, file_size_bytes: int) -> bool | MoreBytesNeeded:
    """Read whether an SST deletes ranges of keys; the arguments and `MoreBytesNeeded` are those of `parse_sst_tail`.

    Raises:
        ValueError: It is not a block-based table, or its end is damaged.
    """
    try:
        return RANGE_DELETIONS in _metaindex_in(tail, file_size_bytes)
    except _OutOfReach as reach:
        if reach.args[0] > TAIL_BYTES_MAX:
            raise ValueError("has an unlikely long end") from None
        return MoreBytesNeeded(reach.args[0])


def _metaindex_in(tail: bytes, file_size_bytes: int) -> dict[bytes, bytes]:
    if len(tail) < min(FOOTER_BYTES, file_size_bytes):
        raise _OutOfReach(min(FOOTER_BYTES, file_size_bytes))
    footer = decode_footer(tail[-FOOTER_BYTES:], file_size_bytes)
    return dict(decode_entries(_block_in(tail, footer.metaindex, file_size_bytes)))


def _properties_in(tail: bytes, file_size_bytes: int) -> dict[bytes, bytes]:
    properties, _ = decode_handle(_metaindex_in(tail, file_size_bytes).get(PROPERTIES_BLOCK, b""))
    return dict(decode_entries(_block_in(tail, properties, file_size_bytes)))


def _block_in(tail: bytes, handle: BlockHandle, file_size_bytes: int) -> bytes:
    if handle.offset < 0 or handle.end > file_size_bytes:
        raise ValueError("reaches beyond the file")
    start = handle.offset - (file_size_bytes - len(tail))
    if start < 0:
        raise _OutOfReach(file_size_bytes - handle.offset)
    end = start + handle.size_bytes
    if tail[end] != 0:
        raise ValueError("is compressed")
    return tail[start:end]


def _identity(properties: dict[bytes, bytes]) -> SstIdentity | None:
    session_id = properties.get(_SESSION_ID, b"")
    file_number, _ = decode_varint(properties.get(_FILE_NUMBER, b""), 0)
    if _SESSION_FORM.fullmatch(session_id) is None or not 0 < file_number <= SIZE_BYTES_MAX:
        return None
    if any(properties.get(_GLOBAL_SEQUENCE, b"")):
        # An ingestion wrote into the file: its content is no longer what the session made.
        return None
    return SstIdentity(session_id.decode(), file_number)
