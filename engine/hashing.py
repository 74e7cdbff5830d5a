"""The one door to blake3 and crc32c: the two hashes of a file, taken in one pass over its bytes; Spark's checksum."""

import zlib
from typing import Final, NamedTuple

from blake3 import blake3
from crc32c import crc32c as _crc32c

BLAKE3_BYTES: Final = 32


class Digest(NamedTuple):
    """Both hashes of some bytes: BLAKE3-256, and IEEE CRC32 unsigned, which is Samza's checksum."""

    blake3: bytes
    crc32: int


class FileHasher:
    """Hashes bytes as they stream by. Not for use by two threads at once.

    Both hashes let other threads run while they work on a large chunk: a chunk of a megabyte belongs in a thread,
    a chunk of a few kilobytes does not.
    """

    def __init__(self) -> None:
        self._blake3 = blake3()
        self._crc32 = 0
        self._size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._blake3.update(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._size_bytes += len(data)

    @property
    def size_bytes(self) -> int:
        """How many bytes went in so far."""
        return self._size_bytes

    @property
    def digest(self) -> Digest:
        """The hashes of what went in so far."""
        return Digest(self._blake3.digest(), self._crc32)


def hash_bytes(data: bytes | bytearray | memoryview) -> Digest:
    """The hashes of bytes that stand in memory."""
    return Digest(blake3(data).digest(), zlib.crc32(data))


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """The CRC32C of bytes, unsigned, continuing from that of what came before them.

    Spark protects files and rows with it; its files hold the same 32 bits as a signed number.
    """
    return _crc32c(data, crc)
