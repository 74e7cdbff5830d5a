"""Rows of a state in the one form that both readers can show.

Spark's `statestore` source gives, with an option that it keeps for itself, the bytes of every key and value in every
column family. They are those in RocksDB without what its encoders add, so ours are stripped of that: the byte before
each row that says how it is encoded, and the length before each value of a list. Where the reader puts a key together
from two parts (`KeyForm`), both sides are taken apart into the fields of the key, and those are compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

# How the fields of a key are written: as one word or of variable length, nested as in the schema.
Field = Literal["word", "bytes"] | tuple[Any, ...]
# Family, key (its bytes, or its fields), value.
StateRow = tuple[str, object, bytes]

_ROW = b"\0"


class KeyForm(msgspec.Struct, frozen=True):
    """How Spark's reader puts a key together that is in two parts in RocksDB."""

    # "prefix": a length, the first row, the second; "after": a row and a time; "before": a time and a row.
    parts: Literal["prefix", "after", "before"]
    # Fields of the first and of the second part.
    first: tuple[Field, ...]
    second: tuple[Field, ...] = ()


class Forms(msgspec.Struct, frozen=True):
    """What has to be known of a state to compare it."""

    # By column family: those whose keys Spark's reader puts together again.
    keys: Mapping[str, KeyForm] = {}
    # Column families whose values are lists, which Spark's reader reports one by one.
    lists: frozenset[str] = frozenset()

    def of_spark(self, family: str, key: bytes, value: bytes) -> StateRow:
        """A row as Spark's reader gives it."""
        form = self.keys.get(family)
        if form is None:
            return family, key, value
        time: tuple[Field, ...] = () if form.parts == "prefix" else ("word",)
        return family, _fields(key, (*form.first, *form.second, *time)), value

    def of_ours(self, family: str, key: bytes, value: bytes, delimiter: bytes) -> Iterator[StateRow]:
        """A row as RocksDB has it, without the number of the family and row checksums: one, or one for each value."""
        form = self.keys.get(family)
        known: object
        if form is None:
            assert key.startswith(_ROW)
            known = key[1:]
        else:
            known = _parted_key(form, key)
        for each in _listed(value, delimiter) if family in self.lists else (value,):
            assert each.startswith(_ROW)
            yield family, known, each[1:]


def _listed(value: bytes, delimiter: bytes) -> Iterator[bytes]:
    """The values of a list: each after its length, and between two of them what the merge operator puts there."""
    at = 0
    while at < len(value):
        if at:
            assert value[at:].startswith(delimiter)
            at += len(delimiter)
        size = int.from_bytes(value[at : at + 4], "little")
        yield value[at + 4 : at + 4 + size]
        at += 4 + size


def _parted_key(form: KeyForm, key: bytes) -> tuple[object, ...]:
    if form.parts == "prefix":
        size = int.from_bytes(key[:4], "little")
        first, second = key[4 : 4 + size], key[4 + size :]
        assert first.startswith(_ROW)
        assert second.startswith(_ROW)
        return _fields(first[1:], form.first) + _fields(second[1:], form.second)
    time, row = (key[:8], key[8:]) if form.parts == "before" else (key[-8:], key[:-8])
    assert row.startswith(_ROW)
    # Big-endian with its sign turned round, so that times sort as numbers do.
    word = (int.from_bytes(time, "big") ^ 1 << 63).to_bytes(8, "little")
    return (*_fields(row[1:], form.first), word)


def _fields(row: bytes, fields: Iterable[Field]) -> tuple[object, ...]:
    """The fields of an UnsafeRow: a bit for each that is null, then eight bytes for each, then what is longer."""
    kinds = tuple(fields)
    start = (len(kinds) + 63) // 64 * 8
    nulls = int.from_bytes(row[:start], "little")
    found: list[object] = []
    for at, kind in enumerate(kinds):
        word = row[start + 8 * at : start + 8 * at + 8]
        if nulls >> at & 1:
            found.append(None)
        elif kind == "word":
            found.append(word)
        else:
            size, offset = int.from_bytes(word[:4], "little"), int.from_bytes(word[4:], "little")
            data = row[offset : offset + size]
            found.append(data if kind == "bytes" else _fields(data, kind))
    return tuple(found)
