"""Where a key is in an SST: the index of its data blocks, its filter, and the ranges of keys that it deletes.

At the end are the writes of a write-ahead log, whose records `index.rocksdb.manifest.decode_log` takes out. The form of
blocks is in `index.rocksdb.sst`. Nothing here reads a file, and no length is believed beyond the bytes given.

```
index entry  = key that is not below the last one of the block | handle; in full at each restart
filter       = lines of 64 bytes | 0xFF | 0 | probes (1 byte) | 0 | 0
range entry  = first key | kind 15, sequence number | value: the key before which the range ends
record       = sequence number of the first write (8) | number of writes (4) | (tag (1) | [family] | key | [value]) …
```

A filter says of a key that it is not in the file, or that it may be: of its hash, the upper 32 bits say which line, and
the lower ones which bits of it. The hash is XXPH3, RocksDB's name for what XXH3 was in xxHash 0.7.2.

In a record a key, a value and the end of a deleted range have their length before them, and the family is a varint. The
n-th write has the n-th sequence number. Other tags are refused by their number, but for notes of the application.

Source:
    RocksDB `table/block_based/index_builder.h`, `filter_policy.cc`, `util/bloom_impl.h`, `util/xxph3.h`,
    `db/range_tombstone_fragmenter.cc`, `table/block_based/block_based_table_reader.cc` (GetGlobalSequenceNumber);
    RocksDB 9.8 `db/write_batch.cc`, `db/dbformat.h`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

from index.rocksdb import sst

FILTER_BLOCK: Final = b"fullfilter.rocksdb.BuiltinBloomFilter"
RANGE_DELETION: Final = 15

# Of the keys of one block: each may repeat all of the one before it, and an entry takes memory of its own.
_HELD_BYTES_MAX: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 100


class Version(NamedTuple):
    """One entry of a data block."""

    key: bytes
    sequence: int
    kind: int
    value: bytes


class DeletedRange(NamedTuple):
    """What is older than `sequence` and from `start` on, before `stop`, is deleted."""

    start: bytes
    stop: bytes
    sequence: int


def decode_versions(contents: bytes) -> list[Version]:
    """Decode a data block: of one key, what is newer comes first.

    Raises:
        ValueError: The contents are not a data block.
        NotImplementedError: The block or an entry is of a kind that is unknown here.
    """
    sst.refuse_hash_index(contents)
    found = []
    for key, value in _read_bounded(contents):
        at = _trailer(key)
        kind = key[at]
        if kind not in sst.KINDS_KNOWN:
            raise NotImplementedError(f"entries of the kind {kind}")
        found.append(Version(key[:at], int.from_bytes(key[at + 1 :], "little"), kind, value))
    return found


def decode_deleted_ranges(contents: bytes) -> list[DeletedRange]:
    """Decode the block of ranges that a file deletes. Raises as `decode_versions`."""
    found = []
    for key, stop in _read_bounded(contents):
        at = _trailer(key)
        if key[at] != RANGE_DELETION:
            raise NotImplementedError(f"ranges of the kind {key[at]}")
        found.append(DeletedRange(key[:at], stop, int.from_bytes(key[at + 1 :], "little")))
    return found


def _read_bounded(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    left = _HELD_BYTES_MAX
    for key, value in sst.read_entries(contents):
        left -= len(key) + _ENTRY_BYTES
        if left < 0:
            raise ValueError("has more entries, or longer keys, than a block can have")
        yield key, value


def _trailer(key: bytes) -> int:
    if len(key) < sst.KEY_TRAILER_BYTES:
        raise ValueError("has a key without its trailer")
    return len(key) - sst.KEY_TRAILER_BYTES


class BlockIndex:
    """An index block: which blocks may hold a key. It is decoded from the restart before the key on, not as a whole."""

    def __init__(self, contents: bytes, form: sst.IndexForm) -> None:
        """Take a block apart; a ValueError if it is none."""
        self._contents = contents
        self._form = form
        self._end, self._restarts = sst.restart_offsets(contents)

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self._contents) + 36 * len(self._restarts)

    def seek(self, key: bytes) -> Iterator[tuple[bytes, sst.BlockHandle]]:
        """Yield the blocks, in order, from the first one on that may hold a key: each with its separator.

        The separator is not below any key of the block, and not above any of the next. A ValueError, from the
        iteration: the block is damaged.
        """
        if not self._end:
            return
        # The last restart whose separator is below the key: the blocks before it are, too.
        restart = max(0, bisect_left(self._restarts, key, key=lambda at: next(self._entries(at))[0]) - 1)
        for separator, handle in self._entries(self._restarts[restart]):
            if separator >= key:
                yield separator, handle

    def _entries(self, at: int) -> Iterator[tuple[bytes, sst.BlockHandle]]:
        contents, key, left = self._contents, b"", _HELD_BYTES_MAX
        for shared, start, end, offset, size in sst.read_index_entries(contents, self._form, at, self._end):
            key = key[:shared] + contents[start:end]
            # From one restart to the next: to put a key together takes time, however few bytes say it.
            left = left - len(key) if shared else _HELD_BYTES_MAX
            if left < 0:
                raise ValueError("has longer keys than a block can have")
            yield key if self._form.user_keys else key[: _trailer(key)], sst.BlockHandle(offset, size)


# --- filters

_LINE_BYTES: Final = 64
_FILTER_END: Final = 5
_NEW_BLOOM: Final = 0xFF
_PROBES_MAX: Final = 30
_GOLDEN: Final = 0x9E3779B9
_UINT32: Final = 0xFFFFFFFF
_UINT64: Final = 0xFFFFFFFFFFFFFFFF


def may_contain(contents: bytes, key: bytes) -> bool:
    """Return whether a key may be in a file with this filter; also of a filter or key that is of no use here."""
    line_bytes = len(contents) - _FILTER_END
    if line_bytes <= 0:  # of a file without keys
        return False
    marker, implementation, probes, *reserved = contents[line_bytes:]
    hashed = xxph3(key)
    is_known = marker == _NEW_BLOOM and implementation == 0 and 0 < probes <= _PROBES_MAX and not any(reserved)
    if not is_known or hashed is None or line_bytes % _LINE_BYTES:
        return True
    line = ((hashed & _UINT32) * (line_bytes // _LINE_BYTES) >> 32) * _LINE_BYTES
    bits = hashed >> 32
    for _ in range(probes):
        place = bits >> 23
        if not contents[line + (place >> 3)] >> (place & 7) & 1:
            return False
        bits = bits * _GOLDEN & _UINT32
    return True


_PRIME_1: Final = 0x9E3779B185EBCA87
_PRIME_2: Final = 0xC2B2AE3D27D4EB4F
_PRIME_3: Final = 0x165667B19E3779F9
_PRIME_32: Final = 0x9E3779B1
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_BYTES_MIN: Final = 136
# The lengths up to which a key is hashed in one way; longer ones are of no use here.
_SHORT, _MIDDLE, _LONG, _HASHED_BYTES_MAX = 8, 16, 128, 240


def xxph3(key: bytes) -> int | None:
    """Return the hash that filters have of a key; None for one above 240 bytes, which is not hashed here."""
    size = len(key)
    if size > _HASHED_BYTES_MAX:
        return None
    if size > _MIDDLE:
        return _hash_long(key, size)
    if size > _SHORT:
        low = _word(key, 0) ^ _word(_SECRET, 0)
        high = _word(key, size - 8) ^ _word(_SECRET, 8)
        return _avalanche(size + low + high + _fold(low, high))
    if size > 3:  # noqa: PLR2004 — two halves, which overlap
        keyed = int.from_bytes(key[:4] + key[-4:], "little") ^ _word(_SECRET, 0)
        mixed = size + (keyed ^ keyed >> 51) * _PRIME_32 & _UINT64
        return _avalanche((mixed ^ mixed >> 47) * _PRIME_2)
    if size:
        combined = key[0] | key[size >> 1] << 8 | key[-1] << 16 | size << 24
        return _avalanche((combined ^ int.from_bytes(_SECRET[:4], "little")) * _PRIME_1)
    return _fold(_word(_SECRET, 0), _PRIME_2)


def _hash_long(key: bytes, size: int) -> int:
    found = size * _PRIME_1
    if size <= _LONG:
        # From both ends to the middle.
        for at in range(0, (size - 1) // 32 * 16 + 1, 16):
            found += _mix(key, at, 2 * at) + _mix(key, size - at - 16, 2 * at + 16)
        return _avalanche(found)
    for at in range(0, _LONG, 16):
        found += _mix(key, at, at)
    found = _avalanche(found)
    for at in range(_LONG, size // 16 * 16, 16):
        found += _mix(key, at, at - _LONG + 3)
    return _avalanche(found + _mix(key, size - 16, _SECRET_BYTES_MIN - 17))


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _mix(key: bytes, at: int, secret: int) -> int:
    return _fold(_word(key, at) ^ _word(_SECRET, secret), _word(key, at + 8) ^ _word(_SECRET, secret + 8))


def _fold(left: int, right: int) -> int:
    product = left * right
    return (product ^ product >> 64) & _UINT64


def _avalanche(value: int) -> int:
    value &= _UINT64
    value = (value ^ value >> 37) * _PRIME_3 & _UINT64
    return value ^ value >> 32


# --- writes of a log

_HEAD_BYTES: Final = 12
_SEQUENCE_BYTES: Final = 8
_NOTE: Final = 3
_NOTHING: Final = 13
# The kinds of writes by their tags with a family; without one, the tag is the kind.
_OF_FAMILY: Final = {4: sst.DELETION, 5: sst.VALUE, 6: sst.MERGE, 8: sst.SINGLE_DELETION, 14: RANGE_DELETION}
_WITHOUT_VALUE: Final = frozenset({sst.DELETION, sst.SINGLE_DELETION})


def decode_writes(record: bytes) -> Iterator[tuple[int, Version | DeletedRange]]:
    """Yield the writes of one record of a log, in their order, each with the number of its column family.

    Raises:
        ValueError: From the iteration: it is no such record.
        NotImplementedError: Likewise: it has a write of another kind.
    """
    if len(record) < _HEAD_BYTES:
        raise ValueError("has a record that is too short for its head")
    sequence = int.from_bytes(record[:_SEQUENCE_BYTES], "little")
    end = sequence + int.from_bytes(record[_SEQUENCE_BYTES:_HEAD_BYTES], "little")
    at = _HEAD_BYTES
    while at < len(record):
        tag = record[at]
        at += 1
        if tag == _NOTHING:
            continue
        if tag == _NOTE:
            _, at = _slice(record, at)
            continue
        kind = _OF_FAMILY.get(tag, tag)
        if kind not in sst.KINDS_KNOWN and kind != RANGE_DELETION:
            raise NotImplementedError(f"writes of the kind {tag}")
        family, at = sst.decode_varint(record, at) if tag in _OF_FAMILY else (0, at)
        key, at = _slice(record, at)
        value, at = _slice(record, at) if kind not in _WITHOUT_VALUE else (b"", at)
        if kind == RANGE_DELETION:
            yield family, DeletedRange(key, value, sequence)
        else:
            yield family, Version(key, sequence, kind, value)
        sequence += 1
    if sequence != end:
        raise ValueError("has a record with another number of writes than it says")


def _slice(record: bytes, at: int) -> tuple[bytes, int]:
    size, at = sst.decode_varint(record, at)
    end = at + size
    if end > len(record):
        raise ValueError("has a record that is too short for its writes")
    return record[at:end], end
