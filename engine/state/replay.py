"""Bringing a store to a later version: the records of changelogs, written in the order they were made.

The last record of a key wins, so records are gathered in a dict, and the dict is written at once, in the order of its
keys. Everything here blocks.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from engine.rocksdb.store import StoreReader, StoreWriter
from engine.state.changelogs import ChangelogReader
from index.spark.changelog import DELETE, DELETE_RANGE, MERGE, PUT, Record

# Keys that are gathered before they are written, and the bytes in them: whichever is reached first.
BATCH_KEYS: Final = 50_000
BATCH_BYTES: Final = 16 * 1024 * 1024
# A store whose compactions wait gets them after this much: with each file more on level 0, looks take longer.
COMPACTED_AFTER_BYTES: Final = 256 * 1024 * 1024
# Keys that are looked up together: RocksDB does that without Python's lock, and their values are in memory together.
_LOOKUP_KEYS: Final = 64
# A look for one key costs as much as a scan over eight, or over five of large rows. Once the looks have cost what a
# scan does, a scan it is: at worst the price is twice the least.
_SCANNED_PER_LOOKUP: Final = 8
# The prefix of the column family.
_FAMILY_BYTES: Final = 2


class KeyCounts(msgspec.Struct, frozen=True):
    """Number of keys of a store."""

    keys: int = 0
    # Those of internal column families; `keys` is without them.
    internal_keys: int = 0


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    changelogs: int = 0
    records: int = 0
    # Of keys and values in the records.
    size_bytes: int = 0
    # By how much the number of keys has changed; 0 where keys are not counted.
    keys_delta: KeyCounts = KeyCounts()


def count_store(db: StoreReader, is_internal: Callable[[bytes], bool] | None = None) -> KeyCounts:
    """Count the keys of a store by a scan; `is_internal` as for `replay`, a damaged block is a `DamagedError`."""
    if is_internal is None:
        return KeyCounts(sum(db.count().values()))
    keys = internal_keys = 0
    for family, number in db.count(prefix_bytes=_FAMILY_BYTES).items():
        if is_internal(family):
            internal_keys += number
        else:
            keys += number
    return KeyCounts(keys, internal_keys)


def replay(
    db: StoreWriter,
    changelogs: Iterable[Callable[[], ChangelogReader]],
    *,
    delimiter: bytes,
    count_keys: bool,
    is_internal: Callable[[bytes], bool] | None = None,
    check_row: Callable[[Record], Record] | None = None,
    counted_before: KeyCounts | None = None,
) -> Replayed:
    """Apply changelogs to a store.

    Args:
        db: The store at the version before the first changelog. After an error it is of no version. If its compactions
            wait, they begin when this is done, or when so much was written that they are overdue.
        changelogs: One call per changelog that opens it, in the order of their versions. Each is closed when it is
            read.
        delimiter: Between a value and an operand that is appended to it.
        count_keys: Whether to find out by how much the number of keys changes, as Spark does. It costs a look for
            every key and a scan of what a DELETE_RANGE removes, or a scan of the store.
        is_internal: Whether a key as stored belongs to an internal column family, which is counted apart. Only the
            first two bytes of the key may decide.
        check_row: Called for each record before it counts; returns the record as it is in RocksDB, or raises.
        counted_before: What the store has now, if it is known. It allows for one scan at the end in place of the looks
            where that is cheaper.

    Raises:
        DamagedChangelogError: A changelog is not whole (design 0004, L2).
        DamagedError: A changelog or the store is damaged.
    """
    counter = _Counter(db, is_internal, counted_before) if count_keys else None
    target = _Target(db, delimiter, counter)
    opened = records_count = 0
    for open_one in changelogs:
        opened += 1
        with open_one() as changelog:
            for read in changelog:
                records = read if check_row is None else list(map(check_row, read))
                records_count += len(records)
                target.take(records)
            if target.size_bytes >= COMPACTED_AFTER_BYTES:
                db.begin_compactions()
    target.write()
    db.begin_compactions()
    delta = KeyCounts() if counter is None else counter.delta()
    return Replayed(changelogs=opened, records=records_count, size_bytes=target.size_bytes, keys_delta=delta)


class _Counter:
    """Counts how the number of keys changes, by look-ups before every write or by one scan after all of them."""

    def __init__(self, db: StoreWriter, is_internal: Callable[[bytes], bool] | None, before: KeyCounts | None) -> None:
        self._db = db
        self._is_internal = is_internal
        self._before = before
        self._keys = 0
        self._internal_keys = 0
        self._lookups = 0
        self.by_scan = False

    def before_write(self, changes: dict[bytes, bytes | None]) -> None:
        """Count what these changes will do; None is a key that goes."""
        keys = sorted(changes)
        # The common case: nothing goes, and one number counts all.
        only_new = self._is_internal is None and None not in changes.values()
        for at in range(0, len(keys), _LOOKUP_KEYS):
            if self._is_scan_cheaper():
                return
            some = keys[at : at + _LOOKUP_KEYS]
            self._lookups += len(some)
            found = self._db.get_many(some)
            if only_new:
                self._keys += found.count(None)
                continue
            for key, before in zip(some, found, strict=True):
                after = changes[key]
                if (before is None) != (after is None):
                    self.add(key, -1 if after is None else 1)

    def before_delete_range(self, begin: bytes, end: bytes) -> None:
        if self._is_scan_cheaper() or begin >= end:
            return
        for key, _ in itertools.takewhile(lambda item: item[0] < end, self._db.items(start=begin)):
            self.add(key, -1)

    def add(self, key: bytes, count: int) -> None:
        if self._is_internal is not None and self._is_internal(key):
            self._internal_keys += count
        else:
            self._keys += count

    def delta(self) -> KeyCounts:
        if not self.by_scan or self._before is None:
            return KeyCounts(self._keys, self._internal_keys)
        after = count_store(self._db, self._is_internal)
        return KeyCounts(after.keys - self._before.keys, after.internal_keys - self._before.internal_keys)

    def _is_scan_cheaper(self) -> bool:
        before = self._before
        if before is not None and not self.by_scan:
            stored = before.keys + before.internal_keys + self._keys + self._internal_keys
            self.by_scan = self._lookups * _SCANNED_PER_LOOKUP > max(stored, _SCANNED_PER_LOOKUP * _LOOKUP_KEYS)
        return self.by_scan


class _Target:
    """The store behind a batch of changes that are not written yet.

    A key of the batch is in one of three places: `_values` has what it is set to, `_joined` a value and the
    operands that came after it, `_operands` operands that come after what the store has.
    """

    def __init__(self, db: StoreWriter, delimiter: bytes, counter: _Counter | None) -> None:
        self._db = db
        self._delimiter = delimiter
        self._counter = counter
        # None: the key goes.
        self._values: dict[bytes, bytes | None] = {}
        self._joined: dict[bytes, list[bytes]] = {}
        self._operands: dict[bytes, list[bytes]] = {}
        self._batch_bytes = 0
        self.size_bytes = 0

    def take(self, records: list[Record]) -> None:
        values, joined, operands = self._values, self._joined, self._operands
        size_bytes = 0
        for kind, key, value in records:
            size_bytes += len(key) + len(value)
            if kind == PUT:
                values[key] = value
            elif kind == DELETE:
                values[key] = None
            elif kind == MERGE:
                self._merge(key, value)
                continue
            elif kind == DELETE_RANGE:
                self._delete_range(key, value)
                continue
            if joined:
                joined.pop(key, None)
            if operands:
                operands.pop(key, None)
        self.size_bytes += size_bytes
        self._batch_bytes += size_bytes
        if self._batch_bytes >= BATCH_BYTES or len(values) + len(joined) + len(operands) >= BATCH_KEYS:
            self.write()

    def write(self) -> None:
        values = self._values
        for key, parts in self._joined.items():
            values[key] = self._delimiter.join(parts)
        self._joined.clear()
        if values:
            if self._counter is not None:
                self._counter.before_write(values)
            self._db.write_batch(values)
            values.clear()
        self._write_operands()
        self._batch_bytes = 0

    def _merge(self, key: bytes, operand: bytes) -> None:
        parts = self._joined.get(key) or self._operands.get(key)
        if parts is not None:
            parts.append(operand)
        elif key not in self._values:
            self._operands[key] = [operand]
        else:
            value = self._values.pop(key)
            self._joined[key] = [operand] if value is None else [value, operand]

    def _write_operands(self) -> None:
        """Append `_operands` to what the store has, few keys at a time: those values may be of any size."""
        keys = sorted(self._operands)
        at, step = 0, 1
        while at < len(keys):
            some = keys[at : at + step]
            changes: dict[bytes, bytes | None] = {}
            size_bytes = 0
            for key, value in zip(some, self._db.get_many(some), strict=True):
                operands = self._operands[key]
                if value is None and self._counter is not None:
                    self._counter.add(key, 1)
                joined = self._delimiter.join(operands if value is None else (value, *operands))
                changes[key] = joined
                size_bytes += len(joined)
            self._db.write_batch(changes)
            at += len(some)
            step = max(1, min(BATCH_KEYS, 2 * step, BATCH_BYTES * len(some) // max(1, size_bytes)))
        self._operands.clear()

    def _delete_range(self, begin: bytes, end: bytes) -> None:
        self.write()
        if self._counter is not None:
            self._counter.before_delete_range(begin, end)
        self._db.delete_range(begin, end)
