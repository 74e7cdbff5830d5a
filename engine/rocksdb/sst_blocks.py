"""Blocks of SSTs, decompressed as RocksDB does."""

import bz2
import sys
import zlib
from collections.abc import Callable
from typing import Final

import cramjam

from index.rocksdb.sst import decode_varint

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# The greatest window that a frame of zstd may ask for: 128 MiB, that of zstd's last level.
ZSTD_WINDOW_LOG_MAX: Final = 27


class LargeBlockError(ValueError):
    """A block holds more than may come of it; what wrote it may have had a value of that size."""


def decompress_sst_block(kind: int, block: bytes, *, sized: bool, plain_bytes_max: int) -> bytes:
    """Decompress a block of an SST: raw algorithms, the size before all of them but snappy.

    `kind` is RocksDB's number of the algorithm, and `plain_bytes_max` what may come of it. `sized`: the size is written
    as RocksDB does from format version 2 on; before, lz4 has it in another form, and zlib and bzip2 have none.

    Raises:
        LargeBlockError: It is larger inside.
        ValueError: It is not such a block.
        NotImplementedError: The algorithm is unknown.
    """
    if kind not in _SST_BLOCKS:
        raise NotImplementedError(f"blocks of compression {kind}")
    at = 0
    plain_bytes = plain_bytes_max
    try:
        if kind == _SST_SNAPPY:
            plain_bytes = cramjam.snappy.decompress_raw_len(block)
        elif sized or kind in _SST_ZSTD:
            plain_bytes, at = decode_varint(block, 0)
        elif kind in _SST_LZ4:
            plain_bytes, at = int.from_bytes(block[:8], "little"), 8
        if plain_bytes > plain_bytes_max:
            raise LargeBlockError(f"says that it holds {plain_bytes} bytes")
        plain = bytes(_SST_BLOCKS[kind](block[at:], plain_bytes))
    except (cramjam.DecompressionError, zstd.ZstdError, zlib.error, OSError, EOFError) as error:
        raise ValueError(f"does not decompress: {error}") from error
    if len(plain) > plain_bytes_max:
        # zlib and bzip2 of old tables say no size: decompressing stops one byte above what may be.
        raise LargeBlockError(f"holds more than {plain_bytes_max} bytes")
    if at and len(plain) != plain_bytes:
        raise ValueError(f"holds {len(plain)} bytes and says {plain_bytes}")
    return plain


def _sst_zlib(block: bytes, plain_bytes: int) -> bytes:
    # RocksDB writes no header of zlib's, by default.
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(block, plain_bytes + 1)
    except zlib.error:
        return zlib.decompressobj().decompress(block, plain_bytes + 1)


def _sst_zstd(block: bytes, plain_bytes: int) -> bytes:
    options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG_MAX}
    return zstd.ZstdDecompressor(options=options).decompress(block, plain_bytes + 1)


def _sst_lz4(block: bytes, plain_bytes: int) -> bytes:
    # `decompress_block` would fill up with zeros what is missing.
    plain = bytearray(plain_bytes)
    size: int = cramjam.lz4.decompress_block_into(block, plain, output_len=plain_bytes)
    return bytes(memoryview(plain)[:size])


_SST_SNAPPY: Final = 1
_SST_LZ4: Final = frozenset({4, 5})
_SST_ZSTD: Final = frozenset({7, 0x40})
_SST_BLOCKS: Final[dict[int, Callable[[bytes, int], bytes]]] = {
    _SST_SNAPPY: lambda block, _: bytes(cramjam.snappy.decompress_raw(block)),
    2: _sst_zlib,
    3: lambda block, plain_bytes: bz2.BZ2Decompressor().decompress(block, plain_bytes + 1),
    4: _sst_lz4,
    5: _sst_lz4,
    7: _sst_zstd,
    0x40: _sst_zstd,
}
