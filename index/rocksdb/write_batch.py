"""Read the rows of a write-ahead log of RocksDB, whose records `index.rocksdb.manifest.decode_log` takes out.

```
record = sequence number of the first write (8) | number of writes (4) | (tag (1) | [family] | key | [value]) …
```

A key, a value and the end of a deleted range have their length before them, and the family is a varint. The n-th write
has the n-th sequence number. Other tags are refused by their number, but for notes of the application.

Source:
    RocksDB 9.8 `db/write_batch.cc`, `db/dbformat.h`.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from index.rocksdb.lookup import RANGE_DELETION, DeletedRange, Version
from index.rocksdb.sst import DELETION, MERGE, SINGLE_DELETION, VALUE, decode_varint

_HEAD_BYTES: Final = 12
_SEQUENCE_BYTES: Final = 8
_NOTE: Final = 3
_NOTHING: Final = 13


class _Tag(NamedTuple):
    kind: int
    has_family: bool
    has_value: bool


_TAGS: Final = {
    0: _Tag(DELETION, has_family=False, has_value=False),
    1: _Tag(VALUE, has_family=False, has_value=True),
    2: _Tag(MERGE, has_family=False, has_value=True),
    4: _Tag(DELETION, has_family=True, has_value=False),
    5: _Tag(VALUE, has_family=True, has_value=True),
    6: _Tag(MERGE, has_family=True, has_value=True),
    7: _Tag(SINGLE_DELETION, has_family=False, has_value=False),
    8: _Tag(SINGLE_DELETION, has_family=True, has_value=False),
    14: _Tag(RANGE_DELETION, has_family=True, has_value=True),
    15: _Tag(RANGE_DELETION, has_family=False, has_value=True),
}

# With the number of its column family.
Write: TypeAlias = tuple[int, Version | DeletedRange]


def decode_writes(record: bytes) -> Iterator[Write]:
    """Yield the writes of one record of a log, in their order.

    Raises:
        ValueError: From the iteration: it is no such record.
        NotImplementedError: Likewise: it has a write of another kind.
    """
    if len(record) < _HEAD_BYTES:
        raise ValueError("has a record that is too short for its head")
    sequence = int.from_bytes(record[:_SEQUENCE_BYTES], "little")
    end = sequence + int.from_bytes(record[_SEQUENCE_BYTES:_HEAD_BYTES], "little")
    at = _HEAD_BYTES
    while at < len(record):
        number = record[at]
        at += 1
        if number == _NOTHING:
            continue
        if number == _NOTE:
            _, at = _slice(record, at)
            continue
        tag = _TAGS.get(number)
        if tag is None:
            raise NotImplementedError(f"writes of the kind {number}")
        family, at = decode_varint(record, at) if tag.has_family else (0, at)
        key, at = _slice(record, at)
        value, at = _slice(record, at) if tag.has_value else (b"", at)
        if tag.kind == RANGE_DELETION:
            yield family, DeletedRange(key, value, sequence)
        else:
            yield family, Version(key, sequence, tag.kind, value)
        sequence += 1
    if sequence != end:
        raise ValueError("has a record with another number of writes than it says")


def _slice(record: bytes, at: int) -> tuple[bytes, int]:
    size, at = decode_varint(record, at)
    end = at + size
    if end > len(record):
        raise ValueError("has a record that is too short for its writes")
    return record[at:end], end
