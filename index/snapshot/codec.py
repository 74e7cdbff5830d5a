"""Our stored form, both directions: MessagePack in an envelope, checked before it is written and after it is read.

Nothing is returned that has not passed the checksum, the size caps and every invariant (design 0001, F1 to F8).
"""

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from index.decoding import UNDECODABLE
from index.errors import CorruptIndexError, FormatError, UnsafeNameError
from index.snapshot.envelope import (
    KIND_BOUNDARY,
    KIND_COMMIT,
    KIND_INDEX,
    KIND_NAME,
    KIND_PIN,
    KIND_REPOSITORY,
    seal,
    unseal,
)
from index.snapshot.invariants import (
    check_boundary,
    check_commit,
    check_index_delta,
    check_name,
    check_pin,
    check_repository,
    check_snapshot_index,
)
from index.snapshot.model import (
    Boundary,
    CommitRecord,
    IndexDelta,
    NameRecord,
    Pin,
    RepositoryRecord,
    SnapshotIndex,
    StoredIndex,
    StoredRecord,
)

# Caps on stored bytes, for whoever fetches them (design 0001, F4).
INDEX_BYTES_MAX: Final = 512 * 1024 * 1024
RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
# Caps on the payload before compression.
INDEX_RAW_BYTES_MAX: Final = 1024 * 1024 * 1024
RECORD_RAW_BYTES_MAX: Final = 128 * 1024 * 1024

_Value = TypeVar("_Value")

_encoder = msgspec.msgpack.Encoder()
_index_decoder: msgspec.msgpack.Decoder[StoredIndex] = msgspec.msgpack.Decoder(SnapshotIndex | IndexDelta)
_commit_decoder = msgspec.msgpack.Decoder(CommitRecord)
_boundary_decoder = msgspec.msgpack.Decoder(Boundary)
_pin_decoder = msgspec.msgpack.Decoder(Pin)
_name_decoder = msgspec.msgpack.Decoder(NameRecord)
_repository_decoder = msgspec.msgpack.Decoder(RepositoryRecord)


def encode_index(index: StoredIndex, base: SnapshotIndex | None = None) -> bytes:
    """The stored bytes of an index or an index delta.

    Args:
        index: What to store.
        base: As for `check_snapshot_index`.

    Raises:
        IndexInvariantError: It breaks an invariant, or is too large to be read back.
        UnsafeNameError: A name or key has a form that none has.
    """
    _check_index(index, base)
    payload = _pack(index)
    return seal(KIND_INDEX, payload, bytes_max=INDEX_BYTES_MAX, raw_bytes_max=INDEX_RAW_BYTES_MAX)


def decode_index(data: bytes, *, subject: str) -> StoredIndex:
    """The index or index delta that was stored.

    Args:
        data: Stored bytes, at most INDEX_BYTES_MAX of them.
        subject: The key that they came from, for errors.

    Raises:
        CorruptIndexError: The bytes are cut short, altered, not an index, or exceed a cap.
        UnknownFormatError: A newer tidemark wrote them.
        IndexInvariantError: They are whole and their content breaks an invariant.
        UnsafeNameError: They are whole and a name or key in them has a form that none has.
    """
    payload = unseal(data, KIND_INDEX, bytes_max=INDEX_BYTES_MAX, raw_bytes_max=INDEX_RAW_BYTES_MAX, subject=subject)
    return _unpack(payload, _index_decoder.decode, _check_index, subject)


def encode_record(record: StoredRecord) -> bytes:
    """The stored bytes of a record of any kind.

    Raises:
        IndexInvariantError: It breaks an invariant, or is too large to be read back.
        UnsafeNameError: A name or key has a form that none has.
    """
    kind = _check_record(record)
    return seal(kind, _pack(record), bytes_max=RECORD_BYTES_MAX, raw_bytes_max=RECORD_RAW_BYTES_MAX)


def decode_commit(data: bytes, *, subject: str) -> CommitRecord:
    """The commit record that was stored; arguments and errors as in `decode_index`."""
    return _unpack(_unseal_record(data, KIND_COMMIT, subject), _commit_decoder.decode, check_commit, subject)


def decode_boundary(data: bytes, *, subject: str) -> Boundary:
    """The boundary that was stored; arguments and errors as in `decode_index`."""
    payload = _unseal_record(data, KIND_BOUNDARY, subject)
    return _unpack(payload, _boundary_decoder.decode, check_boundary, subject)


def decode_pin(data: bytes, *, subject: str) -> Pin:
    """The pin that was stored; arguments and errors as in `decode_index`."""
    return _unpack(_unseal_record(data, KIND_PIN, subject), _pin_decoder.decode, check_pin, subject)


def decode_name(data: bytes, *, subject: str) -> NameRecord:
    """The name that was stored; arguments and errors as in `decode_index`."""
    return _unpack(_unseal_record(data, KIND_NAME, subject), _name_decoder.decode, check_name, subject)


def decode_repository(data: bytes, *, subject: str) -> RepositoryRecord:
    """The repository record that was stored; arguments and errors as in `decode_index`."""
    payload = _unseal_record(data, KIND_REPOSITORY, subject)
    return _unpack(payload, _repository_decoder.decode, check_repository, subject)


def _unseal_record(data: bytes, kind: bytes, subject: str) -> bytes:
    return unseal(data, kind, bytes_max=RECORD_BYTES_MAX, raw_bytes_max=RECORD_RAW_BYTES_MAX, subject=subject)


def _pack(value: StoredIndex | StoredRecord) -> bytes:
    try:
        return _encoder.encode(value)
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


def _check_index(index: StoredIndex, base: SnapshotIndex | None = None) -> None:
    if isinstance(index, SnapshotIndex):
        check_snapshot_index(index, base)
    else:
        check_index_delta(index)


def _check_record(record: StoredRecord) -> bytes:
    match record:
        case CommitRecord():
            check_commit(record)
            return KIND_COMMIT
        case Boundary():
            check_boundary(record)
            return KIND_BOUNDARY
        case Pin():
            check_pin(record)
            return KIND_PIN
        case NameRecord():
            check_name(record)
            return KIND_NAME
        case RepositoryRecord():
            check_repository(record)
            return KIND_REPOSITORY
