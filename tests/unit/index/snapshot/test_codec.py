import hashlib
import struct
import zlib
from collections.abc import Callable

import msgspec
import pytest

from index.errors import CorruptIndexError, IndexInvariantError, UnknownFormatError, UnsafeNameError
from index.snapshot import codec
from index.snapshot.codec import (
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
    encode_index,
    encode_record,
)
from index.snapshot.model import DirIndex, SnapshotIndex, StoredRecord
from tests.golden.make_golden import RECORDS, SNAPSHOT
from tests.unit.index.builders import backup, parse_tree

STORED = encode_index(SNAPSHOT)
DECODERS: dict[str, Callable[..., StoredRecord]] = {
    "commit": decode_commit,
    "boundary": decode_boundary,
    "pin": decode_pin,
    "name": decode_name,
    "repository": decode_repository,
}


def envelope(
    payload: bytes,
    *,
    kind: bytes = b"I",
    version: int = 1,
    compression: int = 0,
    reserved: int = 0,
    raw_bytes: int | None = None,
    magic: bytes = b"TIDEMARK",
) -> bytes:
    """Design 0001, F1, written out independently of the code under test."""
    size = len(payload) if raw_bytes is None else raw_bytes
    head = struct.pack("<8scBBBQ", magic, kind, version, compression, reserved, size)
    return head + hashlib.sha256(head + payload).digest() + payload


def payload_of(stored: bytes) -> bytes:
    return zlib.decompress(stored[52:]) if stored[10] == 1 else stored[52:]


def test_samzas_serde_tree_comes_back_equal() -> None:
    """`TestSnapshotIndexSerde`."""
    index = backup(parse_tree("[a, b, z, c/1/2, e/1]"))
    assert decode_index(encode_index(index), subject="k") == index


def test_envelope_is_laid_out_as_the_design_says() -> None:
    assert envelope(STORED[52:], compression=1, raw_bytes=len(payload_of(STORED))) == STORED


def test_reader_takes_an_uncompressed_payload_of_any_size() -> None:
    assert decode_index(envelope(payload_of(STORED)), subject="k") == SNAPSHOT


def test_small_records_are_not_compressed() -> None:
    stored = encode_record(RECORDS["repository"])
    assert stored[10] == 0
    assert decode_repository(stored, subject="k") == RECORDS["repository"]


@pytest.mark.parametrize("kind", DECODERS)
def test_record_comes_back_equal(kind: str) -> None:
    assert DECODERS[kind](encode_record(RECORDS[kind]), subject="k") == RECORDS[kind]


@pytest.mark.parametrize("kind", DECODERS)
def test_record_of_one_kind_is_not_taken_for_another(kind: str) -> None:
    for other, decode in DECODERS.items():
        if other != kind:
            with pytest.raises(CorruptIndexError, match="F2"):
                decode(encode_record(RECORDS[kind]), subject="k")


PAYLOAD = payload_of(STORED)
SQUEEZED = zlib.compress(PAYLOAD)

# what is wrong, bytes, error, in its message
DAMAGED = [
    ("nothing there", b"", CorruptIndexError, "F1"),
    ("less than an envelope", STORED[:51], CorruptIndexError, "F1"),
    ("magic", envelope(PAYLOAD, magic=b"TIDEMARC"), CorruptIndexError, "F1"),
    ("a record", encode_record(RECORDS["commit"]), CorruptIndexError, "F2"),
    ("unknown kind", envelope(PAYLOAD, kind=b"X"), UnknownFormatError, "kind 88"),
    ("newer version", envelope(PAYLOAD, version=2), UnknownFormatError, "version 2"),
    ("unknown compression", envelope(PAYLOAD, compression=2), UnknownFormatError, "compression 2"),
    ("reserved byte", envelope(PAYLOAD, reserved=1), UnknownFormatError, "reserved byte 1"),
    ("trailing byte", STORED + b"\0", CorruptIndexError, "F3"),
    ("trailing byte inside", envelope(PAYLOAD + b"\0"), CorruptIndexError, "trailing"),
    ("declared size above the cap", envelope(PAYLOAD, raw_bytes=2**40), CorruptIndexError, "F4"),
    ("declared size too small", envelope(SQUEEZED, compression=1, raw_bytes=10), CorruptIndexError, "F5"),
    ("declared size too large", envelope(SQUEEZED, compression=1, raw_bytes=len(PAYLOAD) + 1), CorruptIndexError, "F5"),
    ("declared size zero", envelope(SQUEEZED, compression=1, raw_bytes=0), CorruptIndexError, "F5"),
    ("declared size, uncompressed", envelope(PAYLOAD, raw_bytes=1), CorruptIndexError, "F5"),
    ("cut stream", envelope(SQUEEZED[:-1], compression=1, raw_bytes=len(PAYLOAD)), CorruptIndexError, "F5"),
    (
        "bytes after the stream",
        envelope(SQUEEZED + b"\0", compression=1, raw_bytes=len(PAYLOAD)),
        CorruptIndexError,
        "F5",
    ),
    ("no stream", envelope(PAYLOAD, compression=1), CorruptIndexError, "F5"),
    ("no payload", envelope(b""), CorruptIndexError, "decode"),
    ("not MessagePack", envelope(b"\xc1"), CorruptIndexError, "decode"),
    ("another type", envelope(msgspec.msgpack.encode([1])), CorruptIndexError, "decode"),
    ("unknown tag", envelope(msgspec.msgpack.encode({"kind": "novel"})), CorruptIndexError, "decode"),
    ("text that is not UTF-8", envelope(b"\x81\xa4kind\xa1\xff"), CorruptIndexError, "decode"),
    ("array that claims 4 GiB", envelope(b"\x81\xa4kind\xdd\xff\xff\xff\xff"), CorruptIndexError, "decode"),
]


@pytest.mark.parametrize("_wrong,data,error,says", DAMAGED, ids=[row[0] for row in DAMAGED])
def test_damaged_index_is_refused(_wrong: str, data: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        decode_index(data, subject="indexes/00/j/0")
    assert "indexes/00/j/0" in str(caught.value)


def test_payload_that_nests_without_end_is_refused() -> None:
    deep = b"\x93\xa1d\x90\x91" * 100_000 + b"\x93\xa1d\x90\x90"
    hostile = b"\x82" + msgspec.msgpack.encode("kind") + msgspec.msgpack.encode("snapshot")
    hostile += msgspec.msgpack.encode("dir") + deep
    with pytest.raises(CorruptIndexError, match="decode"):
        decode_index(envelope(hostile), subject="k")


def test_bomb_is_not_inflated_beyond_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 1 GiB in 1 MiB, declared as 100 bytes: 101 bytes are inflated."""
    inflated: list[int] = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self) -> None:
            self._inner = real()

        def decompress(self, data: bytes, max_length: int) -> bytes:
            out = self._inner.decompress(data, max_length)
            inflated.append(len(out))
            return out

        @property
        def eof(self) -> bool:
            return self._inner.eof

        @property
        def unused_data(self) -> bytes:
            return self._inner.unused_data

    monkeypatch.setattr("index.snapshot.codec.zlib.decompressobj", Watched)
    bomb = zlib.compress(bytes(64 * 1024 * 1024))
    with pytest.raises(CorruptIndexError, match="F5"):
        decode_index(envelope(bomb, compression=1, raw_bytes=100), subject="k")
    assert inflated == [101]


@pytest.mark.parametrize("stored", [STORED, *(encode_record(record) for record in RECORDS.values())])
def test_every_truncation_is_noticed(stored: bytes) -> None:
    decoders: list[Callable[..., object]] = [decode_index, *DECODERS.values()]
    for size in range(len(stored)):
        for decode in decoders:
            with pytest.raises((CorruptIndexError, UnknownFormatError)):
                decode(stored[:size], subject="k")


@pytest.mark.parametrize("kind", [None, *DECODERS])
def test_every_flipped_byte_is_noticed(kind: str | None) -> None:
    stored = STORED if kind is None else encode_record(RECORDS[kind])
    decode = decode_index if kind is None else DECODERS[kind]
    for position in range(len(stored)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(stored)
            damaged[position] ^= flip
            with pytest.raises((CorruptIndexError, UnknownFormatError)):
                decode(bytes(damaged), subject="k")


def test_unknown_fields_are_ignored() -> None:
    """F6: in a map by their name, in an array by standing at the end."""
    raw = msgspec.msgpack.decode(PAYLOAD)
    raw["field of tomorrow"] = 1
    raw["metadata"]["another"] = [1, 2]
    raw["dir"].append("extra")
    raw["dir"][1][0].append({"more": True})
    assert decode_index(envelope(msgspec.msgpack.encode(raw)), subject="k") == SNAPSHOT


def test_missing_field_without_default_is_refused() -> None:
    raw = msgspec.msgpack.decode(PAYLOAD)
    del raw["session"]
    with pytest.raises(CorruptIndexError, match="session"):
        decode_index(envelope(msgspec.msgpack.encode(raw)), subject="k")


def test_whole_bytes_of_an_unsound_index_are_refused_with_their_key() -> None:
    raw = msgspec.msgpack.decode(PAYLOAD)
    raw["dir"][1][0][0] = "../escaped"
    with pytest.raises(UnsafeNameError) as caught:
        decode_index(envelope(msgspec.msgpack.encode(raw)), subject="indexes/00/j/0")
    assert caught.value.__notes__ == ["while reading indexes/00/j/0"]


def test_unsound_values_are_never_written() -> None:
    with pytest.raises(IndexInvariantError, match="M1"):
        encode_index(msgspec.structs.replace(SNAPSHOT, dir=DirIndex("root")))
    with pytest.raises(IndexInvariantError, match="M18"):
        encode_record(msgspec.structs.replace(RECORDS["commit"], number=0))


def test_index_above_a_cap_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for cap in ("INDEX_BYTES_MAX", "INDEX_RAW_BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(codec, cap, 200)
            with pytest.raises(IndexInvariantError, match="F4"):
                encode_index(SNAPSHOT)


def test_index_above_the_cap_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "INDEX_BYTES_MAX", len(STORED) - 1)
    with pytest.raises(CorruptIndexError, match="F4"):
        decode_index(STORED, subject="k")


def test_same_value_gives_the_same_bytes() -> None:
    assert encode_index(SNAPSHOT) == STORED
    index = decode_index(STORED, subject="k")
    assert isinstance(index, SnapshotIndex)
    assert encode_index(index) == STORED
