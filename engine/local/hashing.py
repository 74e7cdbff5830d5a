"""The only importer of blake3 and crc32c: both hashes of a file in one pass, Spark's checksum, those of SST blocks."""

import zlib
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import xxhash
from blake3 import blake3
from crc32c import crc32c as _crc32c
from typing_extensions import override

from blobstore.sink import Buffer, Sink

BLAKE3_BYTES: Final = 32


class Digest(NamedTuple):
    """Both hashes of some bytes: BLAKE3-256, and IEEE CRC32 unsigned, which is Samza's checksum."""

    blake3: bytes
    crc32: int


class ContentHasher:
    """Hashes bytes as they stream by, to compare them with a known hash. Not for two threads at once.

    It lets other threads run while it works on a large chunk: a chunk of a megabyte belongs in a thread, a chunk of a
    few kilobytes does not.
    """

    def __init__(self) -> None:
        self._blake3 = blake3()
        # How many bytes went in so far; every hash is of these.
        self.size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._blake3.update(data)
        self.size_bytes += len(data)

    @property
    def blake3(self) -> bytes:
        return self._blake3.digest()


class FileHasher(ContentHasher):
    """As `ContentHasher`, and the CRC32 too, which takes as long again: for files that get a new entry."""

    def __init__(self) -> None:
        super().__init__()
        self._crc32 = 0

    @override
    def update(self, data: bytes | bytearray | memoryview) -> None:
        super().update(data)
        self._crc32 = zlib.crc32(data, self._crc32)

    @property
    def digest(self) -> Digest:
        return Digest(self.blake3, self._crc32)


class HashingSink(Sink):
    """Hashes bytes and keeps none of them."""

    def __init__(self, hasher: ContentHasher) -> None:
        self._hasher = hasher

    @override
    def write(self, data: Buffer) -> None:
        self._hasher.update(data)


def hash_content(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3-256 of bytes in memory."""
    return blake3(data).digest()


def hash_bytes(data: bytes | bytearray | memoryview) -> Digest:
    """Return the hashes of bytes in memory."""
    return Digest(blake3(data).digest(), zlib.crc32(data))


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return Spark's checksum of bytes, unsigned (its files hold it signed), continuing from what came before them."""
    return _crc32c(data, crc)


# RocksDB never stores a CRC of bytes that may hold CRCs as it is.
_MASK_DELTA: Final = 0xA282EAD8
_LAST_BYTE_PRIME: Final = 0x6B9083D9
_UINT32: Final = 0xFFFFFFFF


def _mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17 & _UINT32) + _MASK_DELTA) & _UINT32


def _lower_xxh3(data: bytes | memoryview) -> int:
    return (xxhash.xxh3_64_intdigest(data[:-1]) ^ data[-1] * _LAST_BYTE_PRIME) & _UINT32


# RocksDB's checksums of a block, by what its footers call them: of its contents and the byte behind them, at least one.
BLOCK_SUMS: Final[dict[int, Callable[[bytes | memoryview], int]]] = {
    1: lambda data: _mask(_crc32c(data)),
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
        return _mask(_crc32c(last, crc))
    hasher = {2: xxhash.xxh32, 3: xxhash.xxh64, 4: xxhash.xxh3_64}[kind]()
    for piece in pieces:
        hasher.update(piece)
    if kind == 4:  # noqa: PLR2004 — XXH3, as above
        return (hasher.intdigest() ^ last[0] * _LAST_BYTE_PRIME) & _UINT32
    hasher.update(last)
    return hasher.intdigest() & _UINT32
