"""Blocks of SSTs are decompressed as RocksDB does, and hold what they say or are refused."""

import bz2
import zlib

import cramjam
import pytest

from engine.rocksdb.sst_blocks import decompress_sst_block

PLAIN = b"row " * 40
BLOCKS = {
    2: zlib.compress(PLAIN, wbits=-zlib.MAX_WBITS),
    3: bz2.compress(PLAIN),
    4: bytes(cramjam.lz4.compress_block(PLAIN, store_size=False)),
    5: bytes(cramjam.lz4.compress_block(PLAIN, store_size=False)),
    7: bytes(cramjam.zstd.compress(PLAIN)),
}


def sized(size_bytes: int, block: bytes) -> bytes:
    return bytes([size_bytes & 0x7F | 0x80, size_bytes >> 7]) + block


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_that_holds_another_number_of_bytes_than_it_says_is_refused(kind: int) -> None:
    block = sized(len(PLAIN), BLOCKS[kind])
    assert decompress_sst_block(kind, block, sized=True, plain_bytes_max=1000) == PLAIN
    for wrong in (len(PLAIN) + 1, len(PLAIN) + 500, len(PLAIN) - 1):
        with pytest.raises(ValueError, match=r"and says|does not decompress"):
            decompress_sst_block(kind, sized(wrong, BLOCKS[kind]), sized=True, plain_bytes_max=1000)
