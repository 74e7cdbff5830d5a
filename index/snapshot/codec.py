"""Our stored form, both directions: MessagePack in an envelope, checked before it is written and after it is read.

Nothing is returned that has not passed the checksum, the size caps and every invariant. The envelope, of which design
0001 has the table, says what a value is and how long it is, and proves that it is whole (F1 to F5, F8).
"""

import hashlib
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from index.errors import (
    UNDECODABLE,
    CorruptIndexError,
    FormatError,
    IndexInvariantError,
    UnknownFormatError,
    UnsafeNameError,
)
from index.snapshot import invariants, model

# Caps on stored bytes, for readers that fetch them (design 0001, F4).
INDEX_BYTES_MAX: Final = 512 * 1024 * 1024
RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
# Caps on the payload before compression.
INDEX_RAW_BYTES_MAX: Final = 1024 * 1024 * 1024
RECORD_RAW_BYTES_MAX: Final = 128 * 1024 * 1024

_Value = TypeVar("_Value")
_Record = TypeVar("_Record", bound=msgspec.Struct)

_index_decoder: msgspec.msgpack.Decoder[model.StoredIndex] = msgspec.msgpack.Decoder(
    model.SnapshotIndex | model.IndexDelta
)

MAGIC: Final = b"TIDEMARK"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 52

KIND_INDEX: Final = b"I"
KIND_COMMIT: Final = b"C"
KIND_BOUNDARY: Final = b"B"
KIND_PIN: Final = b"P"
KIND_NAME: Final = b"N"
KIND_REPOSITORY: Final = b"R"

# The kind of a record, and its rules.
_RECORDS: Final[dict[type[msgspec.Struct], tuple[bytes, Callable[[Any], None]]]] = {
    model.CommitRecord: (KIND_COMMIT, invariants.check_commit),
    model.Boundary: (KIND_BOUNDARY, invariants.check_boundary),
    model.Pin: (KIND_PIN, invariants.check_pin),
    model.NameRecord: (KIND_NAME, invariants.check_name),
    model.RepositoryRecord: (KIND_REPOSITORY, invariants.check_repository),
}
KINDS: Final = frozenset({KIND_INDEX, *(kind for kind, _ in _RECORDS.values())})

_HEAD = struct.Struct("<8sBBBBQ")
_COMPRESSION_NONE: Final = 0
_COMPRESSION_ZLIB: Final = 1
# Below this, compression saves less than a request costs.
_COMPRESS_BYTES_MIN: Final = 512


def encode_index(index: model.StoredIndex, base: model.SnapshotIndex | None = None) -> bytes:
    """Encode an index or an index delta as it is stored; `base` is as for `check_snapshot_index`.

    Raises:
        IndexInvariantError: It breaks an invariant, or is too large to be read back.
        UnsafeNameError: A name or key has a form that none has.
    """
    _check_index(index, base)
    return seal(KIND_INDEX, _pack(index), bytes_max=INDEX_BYTES_MAX, raw_bytes_max=INDEX_RAW_BYTES_MAX)


def decode_index(data: bytes, *, subject: str) -> model.StoredIndex:
    """Decode a stored index or index delta; the subject is the key that it came from, for errors.

    Raises:
        CorruptIndexError, UnknownFormatError: As `unseal`, or the payload does not decode.
        IndexInvariantError: They are whole and their content breaks an invariant.
        UnsafeNameError: They are whole and a name or key in them has a form that none has.
    """
    payload = unseal(data, KIND_INDEX, bytes_max=INDEX_BYTES_MAX, raw_bytes_max=INDEX_RAW_BYTES_MAX, subject=subject)
    return _unpack(payload, _index_decoder.decode, _check_index, subject)


def encode_record(record: model.StoredRecord) -> bytes:
    """Encode a record of any kind as it is stored; errors as in `encode_index`."""
    kind, check = _RECORDS[type(record)]
    check(record)
    return seal(kind, _pack(record), bytes_max=RECORD_BYTES_MAX, raw_bytes_max=RECORD_RAW_BYTES_MAX)


def decode_record(kind: type[_Record], data: bytes, *, subject: str) -> _Record:
    """Decode a record of one kind; arguments and errors as in `decode_index`."""
    letter, check = _RECORDS[kind]
    payload = unseal(data, letter, bytes_max=RECORD_BYTES_MAX, raw_bytes_max=RECORD_RAW_BYTES_MAX, subject=subject)
    record: _Record = _unpack(payload, msgspec.msgpack.Decoder(kind).decode, check, subject)
    return record


decode_commit = partial(decode_record, model.CommitRecord)
decode_boundary = partial(decode_record, model.Boundary)
decode_pin = partial(decode_record, model.Pin)
decode_name = partial(decode_record, model.NameRecord)
decode_repository = partial(decode_record, model.RepositoryRecord)


def _pack(value: model.StoredIndex | model.StoredRecord) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise UnsafeNameError("holds a text that is not valid Unicode", subject="value") from error


def _unpack(payload: bytes, decode: Callable[[bytes], _Value], check: Callable[[_Value], None], subject: str) -> _Value:
    try:
        value = decode(payload)
    except UNDECODABLE as error:
        # The checksum was right, so this is what somebody wrote: another program, or one with intent.
        raise CorruptIndexError(f"does not decode: {error}", subject=subject) from error
    try:
        check(value)
    except FormatError as error:
        error.add_note(f"while reading {subject}")
        raise
    return value


def _check_index(index: model.StoredIndex, base: model.SnapshotIndex | None = None) -> None:
    if isinstance(index, model.SnapshotIndex):
        invariants.check_snapshot_index(index, base)
    else:
        invariants.check_index_delta(index)


def seal(kind: bytes, payload: bytes, *, bytes_max: int, raw_bytes_max: int) -> bytes:
    """Wrap a payload of a kind, one ASCII letter; it is compressed where that makes it smaller.

    Raises:
        IndexInvariantError: A cap, on stored bytes or those before compression, is exceeded: no reader would take it.
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
    """Return the payload of an envelope, once it is known to be whole and of the kind expected; caps as in `seal`.

    The checks come in this order, so that nothing is believed before it is proven and nothing is allocated on the word
    of a header: cap, length, magic, kind, version, hash, reserved byte and compression, declared size, decompression.

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
        reason, subject = f"{size_bytes} bytes exceed the cap of {bytes_max} (F4)", f"value of kind {kind.decode()}"
        hint = "it names more files or stores than one value can; split the store or the scope"
        raise IndexInvariantError(reason, subject=subject, hint=hint)


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
