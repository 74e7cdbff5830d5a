"""The envelope around every stored value: what it is, how long it is, and that it is whole (design 0001, F1 to F5).

```
offset  bytes  content
     0      8  magic "TIDEMARK"
     8      1  kind, an ASCII letter
     9      1  format version
    10      1  compression: 0 none, 1 zlib
    11      1  reserved, 0
    12      8  raw size: bytes of the payload before compression, little-endian
    20     32  SHA-256 over the 20 bytes above and the stored payload
    52      …  stored payload, to the end of the object
```
"""

import hashlib
import struct
import zlib
from typing import Final

from index.errors import CorruptIndexError, IndexInvariantError, UnknownFormatError

MAGIC: Final = b"TIDEMARK"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 52

KIND_INDEX: Final = b"I"
KIND_COMMIT: Final = b"C"
KIND_BOUNDARY: Final = b"B"
KIND_PIN: Final = b"P"
KIND_NAME: Final = b"N"
KIND_REPOSITORY: Final = b"R"
KINDS: Final = frozenset({KIND_INDEX, KIND_COMMIT, KIND_BOUNDARY, KIND_PIN, KIND_NAME, KIND_REPOSITORY})

_HEAD = struct.Struct("<8sBBBBQ")
_COMPRESSION_NONE: Final = 0
_COMPRESSION_ZLIB: Final = 1
# Below this, compression saves less than a request costs.
_COMPRESS_BYTES_MIN: Final = 512


def seal(kind: bytes, payload: bytes, *, bytes_max: int, raw_bytes_max: int) -> bytes:
    """Wrap a payload; it is compressed where that makes it smaller.

    Args:
        kind: One ASCII letter.
        payload: The encoded value.
        bytes_max: Cap on the stored bytes, envelope included.
        raw_bytes_max: Cap on the payload before compression.

    Raises:
        IndexInvariantError: A cap is exceeded: no reader would take the result.
    """
    compression, stored = _COMPRESSION_NONE, payload
    _check_fits(len(payload), raw_bytes_max, kind)
    if len(payload) >= _COMPRESS_BYTES_MIN:
        squeezed = zlib.compress(payload, 1)
        if len(squeezed) < len(payload):
            compression, stored = _COMPRESSION_ZLIB, squeezed
    _check_fits(HEADER_BYTES + len(stored), bytes_max, kind)
    head = _HEAD.pack(MAGIC, kind[0], FORMAT_VERSION, compression, 0, len(payload))
    return b"".join((head, _digest(head, stored), stored))


def unseal(data: bytes, kind: bytes, *, bytes_max: int, raw_bytes_max: int, subject: str) -> bytes:
    """The payload of an envelope, once it is known to be whole and of the kind expected.

    The checks come in this order, so that nothing is believed before it is proven and nothing is allocated on the word
    of a header: cap, length, magic, kind, version, hash, reserved byte and compression, declared size, decompression.

    Args:
        data: Stored bytes.
        kind: The letter expected.
        bytes_max: Cap on the stored bytes.
        raw_bytes_max: Cap on the payload before compression.
        subject: What is being read, for errors.

    Raises:
        CorruptIndexError: The bytes are cut short, altered, not ours, of another kind, or exceed a cap.
        UnknownFormatError: A newer version, kind or compression.
    """
    if len(data) > bytes_max:
        raise CorruptIndexError(f"{len(data)} bytes exceed the cap of {bytes_max} (F4)", subject=subject)
    if len(data) < HEADER_BYTES:
        raise CorruptIndexError(f"{len(data)} bytes are less than an envelope (F1)", subject=subject)
    magic, found, version, compression, reserved, raw_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptIndexError("does not start with the magic (F1)", subject=subject)
    if found != kind[0]:
        raise _wrong_kind(found, kind, subject)
    if version != FORMAT_VERSION:
        raise _unknown(f"format version {version}", subject)
    stored = memoryview(data)[HEADER_BYTES:]
    if _digest(data[: _HEAD.size], stored) != data[_HEAD.size : HEADER_BYTES]:
        raise CorruptIndexError("the checksum does not match the bytes (F3)", subject=subject)
    if reserved != 0 or compression not in {_COMPRESSION_NONE, _COMPRESSION_ZLIB}:
        raise _unknown(f"compression {compression}, reserved byte {reserved}", subject)
    if raw_bytes > raw_bytes_max:
        raise CorruptIndexError(f"declares {raw_bytes} bytes, above {raw_bytes_max} (F4)", subject=subject)
    payload = bytes(stored) if compression == _COMPRESSION_NONE else _decompress(stored, raw_bytes, subject)
    if len(payload) != raw_bytes:
        raise CorruptIndexError(f"holds {len(payload)} bytes and declares {raw_bytes} (F5)", subject=subject)
    return payload


def _check_fits(size_bytes: int, bytes_max: int, kind: bytes) -> None:
    if size_bytes > bytes_max:
        raise IndexInvariantError(
            f"{size_bytes} bytes exceed the cap of {bytes_max} (F4)",
            subject=f"value of kind {kind.decode()}",
            hint="it names more files or stores than one value can; split the store or the scope",
        )


def _digest(head: bytes, stored: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(stored)
    return digest.digest()


def _decompress(stored: memoryview, raw_bytes: int, subject: str) -> bytes:
    inflater = zlib.decompressobj()
    try:
        # One byte more than declared: enough to see both the end of the stream and a stream that goes on.
        payload = inflater.decompress(stored, raw_bytes + 1)
    except zlib.error as error:
        raise CorruptIndexError("does not decompress (F5)", subject=subject) from error
    if not inflater.eof or inflater.unused_data:
        raise CorruptIndexError("does not end where its compressed bytes do (F5)", subject=subject)
    return payload


def _wrong_kind(found: int, kind: bytes, subject: str) -> CorruptIndexError | UnknownFormatError:
    if bytes([found]) in KINDS:
        return CorruptIndexError(f"is of kind {chr(found)!r}, not {kind.decode()!r} (F2)", subject=subject)
    return _unknown(f"kind {found}", subject)


def _unknown(what: str, subject: str) -> UnknownFormatError:
    return UnknownFormatError(
        f"has {what}, which this version of tidemark does not know", subject=subject, hint="use a newer tidemark"
    )
