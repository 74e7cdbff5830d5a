"""Checksums of Samza, of Spark's files, and of the blocks of an SST. The only importer of crc32c and isal."""

from collections.abc import Callable, Iterable
from typing import Final

import xxhash
from crc32c import crc32c as _crc32c

from index.rocksdb.manifest import mask_crc

try:
    # zlib's polynomial, many times as fast as zlib on a processor that multiplies without carry.
    from isal.isal_zlib import crc32
except ImportError:  # there is no wheel for this machine
    from zlib import crc32

__all__ = ["BLOCK_SUMS", "crc32", "crc32c", "sum_block"]


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return Spark's checksum of bytes, unsigned (its files hold it signed), continuing from what came before them."""
    return _crc32c(data, crc)


_LAST_BYTE_PRIME: Final = 0x6B9083D9
_UINT32: Final = 0xFFFFFFFF


def _lower_xxh3(data: bytes | memoryview) -> int:
    return (xxhash.xxh3_64_intdigest(data[:-1]) ^ data[-1] * _LAST_BYTE_PRIME) & _UINT32


# RocksDB's checksums of a block, by what its footers call them: of its contents and the byte behind them, at least one.
BLOCK_SUMS: Final[dict[int, Callable[[bytes | memoryview], int]]] = {
    1: lambda data: mask_crc(_crc32c(data)),
    2: xxhash.xxh32_intdigest,
    3: lambda data: xxhash.xxh64_intdigest(data) & _UINT32,
    4: _lower_xxh3,
}


def sum_block(kind: int, pieces: Iterable[bytes], last: bytes) -> int:
    """As `BLOCK_SUMS[kind]`, of the contents of a block that nobody wants to hold in memory and the byte after it."""
    if kind == 1:
        crc = 0
        for piece in pieces:
            crc = _crc32c(piece, crc)
        return mask_crc(_crc32c(last, crc))
    hasher = {2: xxhash.xxh32, 3: xxhash.xxh64, 4: xxhash.xxh3_64}[kind]()
    for piece in pieces:
        hasher.update(piece)
    if kind == 4:  # noqa: PLR2004 — XXH3, as above
        return (hasher.intdigest() ^ last[0] * _LAST_BYTE_PRIME) & _UINT32
    hasher.update(last)
    return hasher.intdigest() & _UINT32
