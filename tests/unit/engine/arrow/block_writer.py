"""Data blocks of an SST as RocksDB writes them, one entry after the other."""

import itertools
from collections.abc import Sequence

from index.rocksdb.sst import VALUE


def varint(number: int) -> bytes:
    """A number in bytes of seven bits, the lowest first."""
    found = b""
    while number >= 0x80:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def encode_block(rows: Sequence[tuple[bytes, bytes]], interval: int = 16, kind: int = VALUE) -> bytes:
    """A block of keys, as users see them, and values; of every `interval` entries the first has its whole key."""
    entries, restarts, before = b"", list[bytes](), b""
    for number, (row_key, value) in enumerate(rows):
        key = row_key + bytes([kind]) + number.to_bytes(7, "little")
        if number % interval == 0:
            restarts.append(len(entries).to_bytes(4, "little"))
            before = b""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, key, strict=False))
        shared = sum(1 for _ in same)
        entries += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return entries + b"".join(restarts) + len(restarts).to_bytes(4, "little")
