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
from typing import Final, TypeAlias

from index.rocksdb.lookup import RANGE_DELETION, DeletedRange, Version
from index.rocksdb.sst import DELETION, MERGE, SINGLE_DELETION, VALUE, decode_varint

_HEAD_BYTES: Final = 12
_SEQUENCE_BYTES: Final = 8
_NOTE: Final = 3
_NOTHING: Final = 13


# The kinds of writes by their tags with a family; without one, the tag is the kind.
_OF_FAMILY: Final = {4: DELETION, 5: VALUE, 6: MERGE, 8: SINGLE_DELETION, 14: RANGE_DELETION}
_WITH_VALUE: Final = {DELETION: False, VALUE: True, MERGE: True, SINGLE_DELETION: False, RANGE_DELETION: True}

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
        tag = record[at]
        at += 1
        if tag == _NOTHING:
            continue
        if tag == _NOTE:
            _, at = _slice(record, at)
            continue
        kind = _OF_FAMILY.get(tag, tag)
        if kind not in _WITH_VALUE:
            raise NotImplementedError(f"writes of the kind {tag}")
        family, at = decode_varint(record, at) if tag in _OF_FAMILY else (0, at)
        key, at = _slice(record, at)
        value, at = _slice(record, at) if _WITH_VALUE[kind] else (b"", at)
        if kind == RANGE_DELETION:
            yield family, DeletedRange(key, value, sequence)
        else:
            yield family, Version(key, sequence, kind, value)
        sequence += 1
    if sequence != end:
        raise ValueError("has a record with another number of writes than it says")


def _slice(record: bytes, at: int) -> tuple[bytes, int]:
    size, at = decode_varint(record, at)
    end = at + size
    if end > len(record):
        raise ValueError("has a record that is too short for its writes")
    return record[at:end], end
