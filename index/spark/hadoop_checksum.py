"""Hadoop's hidden checksum files: `.<name>.crc` beside every file that its local file system has written.

```
"crc" 00 | bytes per checksum (4) | CRC32 of each so many bytes of the file (4 each)
```

Numbers are big-endian, and the CRC is the one of zip files. Hadoop refuses a file that does not fit; where there is no
such file, it verifies nothing.

Source:
    Hadoop `ChecksumFileSystem`, `ChecksumFs`; looked at in checkpoints of Spark 4.3.
"""

import zlib
from typing import Final

from index.errors import FileChecksumError

_MAGIC: Final = b"crc\0"
_HEAD_BYTES: Final = 8
_CRC_BYTES: Final = 4
# What Hadoop writes is 512. More than this is no chunk that anybody sums up at once.
CHUNK_BYTES_MAX: Final = 1024 * 1024
_HINT: Final = (
    "one of the two was altered without the other; a reader through Hadoop's local file system refuses the file"
)


def hadoop_checksum_name(name: str) -> str:
    """The name of the hidden file beside a file."""
    return f".{name}.crc"


def hadoop_checksum_bytes(size_bytes: int, chunk_bytes: int = 512) -> int:
    """How large the hidden file of a file of this size is."""
    return _HEAD_BYTES + _CRC_BYTES * -(-size_bytes // chunk_bytes)


class HadoopSums:
    """Compares a file, as it is read, with its hidden checksum file.

    Args:
        stored: Content of the hidden file.
        subject: What errors call the file that is compared.

    Raises:
        FileChecksumError: What is stored is no such file. From the methods: the file is another one.
    """

    def __init__(self, stored: bytes, *, subject: str) -> None:
        self._subject = subject
        self._stored = stored
        self._at = _HEAD_BYTES
        self._rest = b""
        self._chunk_bytes = int.from_bytes(stored[4:_HEAD_BYTES], "big")
        if (
            stored[:4] != _MAGIC
            or len(stored) < _HEAD_BYTES
            or (len(stored) - _HEAD_BYTES) % _CRC_BYTES
            or not 0 < self._chunk_bytes <= CHUNK_BYTES_MAX
        ):
            raise self._misfit("has a hidden .crc that is none of Hadoop's")

    def update(self, data: bytes) -> None:
        """The next bytes of the file."""
        view = memoryview(self._rest + data)
        size, stored, at, crc32 = self._chunk_bytes, self._stored, self._at, zlib.crc32
        whole = len(view) // size * size
        for start in range(0, whole, size):
            if crc32(view[start : start + size]) != int.from_bytes(stored[at : at + _CRC_BYTES], "big"):
                raise self._changed(at)
            at += _CRC_BYTES
        if at > len(stored):
            raise self._changed(len(stored))
        self._at = at
        self._rest = bytes(view[whole:])

    def finish(self) -> None:
        """Say that these were all."""
        if self._rest:
            found = zlib.crc32(self._rest)
            if self._stored[self._at : self._at + _CRC_BYTES] != found.to_bytes(_CRC_BYTES, "big"):
                raise self._changed(self._at)
            self._at += _CRC_BYTES
        if self._at != len(self._stored):
            raise self._misfit("is shorter than the file that Hadoop's hidden .crc was written for")

    def _changed(self, at: int) -> FileChecksumError:
        place = (at - _HEAD_BYTES) // _CRC_BYTES * self._chunk_bytes
        return self._misfit(f"does not fit Hadoop's hidden .crc from byte {place} on")

    def _misfit(self, message: str) -> FileChecksumError:
        return FileChecksumError(message, subject=self._subject, hint=_HINT)
